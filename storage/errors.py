"""All errors of the storage layer, and the root of all errors of Headrace.

There are three families: input that the caller can correct (`InputError`, also a `ValueError`),
a file that is damaged (`CorruptionError`), and an operating system that refuses (`StorageIOError`).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "ClosedTableError",
    "CorruptPageError",
    "CorruptionError",
    "FormatVersionError",
    "HeadraceError",
    "InputError",
    "KeyInputError",
    "LockedError",
    "MemoryBudgetError",
    "NotATableError",
    "PoisonedHandleError",
    "RecordFileError",
    "SchemaError",
    "StorageIOError",
    "TableExistsError",
    "TableNotFoundError",
    "UniqueViolationError",
    "nearest",
]


def nearest(name: str, names: Sequence[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest of `names`, or an empty text if no name is close enough."""
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class HeadraceError(Exception):
    """Root of all errors that Headrace raises on purpose."""


class InputError(HeadraceError, ValueError):
    """What the caller gave cannot be used; the message names the place and the remedy.

    Attributes
    ----------
    row
        Position of the row that cannot be used, from 0 in all that was given; None if it is not one row.
    """

    row: int | None = None
    _told: Callable[[str], str] | None = None

    @classmethod
    def of_row(cls, row: int, told: Callable[[str], str]) -> Self:
        """Return the error of a row.

        Parameters
        ----------
        row
            Position of the row.
        told
            Function that returns the message for the place of the row. Here it is ``"row N"``; a reader of files knows
            a better one, see `placed`.

        Examples
        --------
        >>> error = InputError.of_row(2, lambda place: f"the key of {place} is null")
        >>> str(error)
        'the key of row 2 is null'
        >>> error.placed("a.csv, record 4")
        >>> str(error)
        'the key of a.csv, record 4 is null'
        """
        error = cls(told(f"row {row}"))
        error.row, error._told = row, told
        return error

    def placed(self, place: str) -> None:
        """Name another place of the row in the message."""
        if self._told is not None:
            self.args = (self._told(place),)


class SchemaError(InputError):
    """A column is missing, has the wrong type, or cannot be stored. Raised before the first row is touched."""


class KeyInputError(InputError):
    """A key is null, or of a type that can never match. Raised when keys are encoded."""


class RecordFileError(InputError):
    """A file of records cannot be read at all: it is cut, or has another heading. The message names the file.

    Attributes
    ----------
    column
        Column with a value that does not fit, or None.
    """

    def __init__(self, message: str, column: str | None = None) -> None:
        super().__init__(message)
        self.column = column


class UniqueViolationError(InputError):
    """A key occurs twice in a table declared unique. Nothing has been changed."""


class MemoryBudgetError(InputError):
    """A memory budget is smaller than the least that works; the message says how much is needed.

    Attributes
    ----------
    cause
        What does not fit, without the advice; None if the message has advice of its own.
    least
        Bytes that are enough for it, or None if that is not known.
    otherwise
        What to do in place of giving more memory, or an empty text.
    """

    cause: str | None = None
    least: int | None = None
    otherwise: str = ""

    @classmethod
    def of(cls, cause: str, least: int | None = None, otherwise: str = "") -> MemoryBudgetError:
        """Return the error that advises to give the join more memory.

        Examples
        --------
        >>> str(MemoryBudgetError.of("a tuple does not fit", 4096))
        'a tuple does not fit; give the join at least 4096 bytes'
        """
        more = "more memory" if least is None else f"at least {least} bytes"
        error = cls(f"{cause}; {_either(f'give the join {more}', otherwise)}")
        error.cause, error.least, error.otherwise = cause, least, otherwise
        return error

    def advising(self, advice: str) -> str:
        """Return the message with other advice than to give more memory."""
        return f"{self.cause}; {_either(advice, self.otherwise)}"


def _either(advice: str, otherwise: str) -> str:
    return f"{advice}, or {otherwise}" if otherwise else advice


class TableNotFoundError(InputError):
    """There is no file at the path of the table."""


class TableExistsError(InputError):
    """The path to build at exists and `overwrite` was not requested."""


class CorruptionError(HeadraceError):
    """The file is a table but its bytes are not what was written."""


class NotATableError(CorruptionError):
    """The file does not begin as a clustered table does: another file was named, or its first bytes are gone."""


class CorruptPageError(CorruptionError):
    """A page fails its checksum, its parent's checksum, or its own structure."""


class FormatVersionError(HeadraceError):
    """The table has another format version than the one that this release reads."""


class StorageIOError(HeadraceError):
    """The operating system refused to open, read, write or sync."""


class LockedError(StorageIOError):
    """Another process is writing to the table."""


class ClosedTableError(StorageIOError):
    """The table was closed. Raised by every operation that needs its file; open the table again."""


class PoisonedHandleError(StorageIOError):
    """A write or sync failed earlier; the handle refuses to work until the table is opened again."""
