"""Errors that the command line raises. `headrace.cli.reporting.exits` maps every error family to its exit code."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from headrace.storage.errors import HeadraceError, InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["ArgumentsError", "CliError", "InputFileError", "OutputFileError", "require_column", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


class CliError(HeadraceError):
    """Base class of the errors of the command line."""


class ArgumentsError(CliError, InputError):
    """Arguments of the command cannot be used as they are; the same command would fail again."""


class InputFileError(CliError, InputError):
    """An input file or folder is missing, empty, of an unknown kind, or not readable in its format."""


class OutputFileError(CliError, InputError):
    """The output path is in use, its folder does not exist, or it cannot be written."""


def require_column(owner: Path | str, name: str, names: Sequence[str]) -> None:
    """Raise an error that names the nearest column if the owner has none of that name.

    Raises
    ------
    ArgumentsError
        If `name` is not among `names`.
    """
    if name not in names:
        raise ArgumentsError(
            f"{owner} has no column {name!r}{nearest(name, names)}; its columns are {', '.join(names)}"
        )


@contextlib.contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Name the place and a remedy if the operating system refuses to write there.

    Raises
    ------
    OutputFileError
        If the block raises an `OSError`, except for a pipe that its reader closed.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # Arrow's own text does not name the file
        remedy = "free space, or write elsewhere" if error.errno in _FULL else "write elsewhere"
        raise OutputFileError(f"cannot write {place}: {reason}; {remedy}") from error
