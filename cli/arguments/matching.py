"""Match options of `headrace join`: equal columns, the nearest key, or keys within a band."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from headrace.cli.reporting.errors import ArgumentsError
from headrace.joins import AsOf, Band
from headrace.joins.predicates.offsets import is_moderate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.joins.predicates import On

__all__ = ["Match", "distance"]

Pairing = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Match:
    """Values of the match options; see the options of `headrace join`."""

    on: Pairing
    as_of: Pairing
    band: Pairing
    direction: Literal["backward", "forward"] | None
    tolerance: str | None
    below: str | None
    above: str | None

    @property
    def pairs(self) -> Pairing:
        """Pairs of stream columns and the key columns that they are compared with."""
        return (*self.on, *self.as_of, *self.band)

    def predicate(self, table: pa.Schema) -> On:
        """Return the join predicate for the operators.

        Parameters
        ----------
        table
            Columns of the table, which has the key columns.

        Raises
        ------
        InputError
            If options are missing or incompatible.
        """
        self._check()

        def width(option: str, text: str, key: str) -> int | Decimal | str:
            return distance(option, text, {f"key column {key}": table.field(key).type})

        if self.as_of:
            pair = self.as_of[0]
            tolerance = None if self.tolerance is None else width("--tolerance", self.tolerance, pair[1])
            return AsOf(*pair, by=self.on, direction=self.direction or "backward", tolerance=tolerance)
        if self.band:
            pair = self.band[0]
            below = width("--below", self.below or "0", pair[1])
            return Band(*pair, below, width("--above", self.above or "0", pair[1]), by=self.on)
        return list(self.on)

    def check_key(self, key: Sequence[str]) -> None:
        """Refuse columns of the table that are not its key as the options need it.

        Raises
        ------
        ArgumentsError
            Names the key and the columns that are given.
        """
        self._check()
        equal = [column for _, column in self.on]
        columns = f"the key is {', '.join(key)}, and --on names {', '.join(equal) or 'none'}"
        for option, pairs in (("--as-of", self.as_of), ("--band", self.band)):
            if pairs and (
                set(key[: len(equal)]) != set(equal) or tuple(key[len(equal) : len(equal) + 1]) != (pairs[0][1],)
            ):
                raise ArgumentsError(
                    f"{option} needs a table whose key begins with the columns of --on and continues with "
                    f"{pairs[0][1]!r}; {columns}"
                )
        if self.on == self.pairs and sorted(equal) != sorted(key):
            raise ArgumentsError(
                f"--on must name each key column of the table once; {columns}; pair columns of different names as in "
                f"--on STREAM_COL={key[0]}"
            )

    def _check(self) -> None:
        if not self.pairs:
            raise ArgumentsError("say which rows match: --on, --as-of or --band")
        if self.as_of and self.band:
            raise ArgumentsError("--as-of and --band do not go together; leave one out")
        for option, pairing in (("--as-of", self.as_of), ("--band", self.band)):
            if len(pairing) > 1:
                raise ArgumentsError(f"{option} takes one pair of columns; those that are to be equal go to --on")
        _refuse("--as-of", self.as_of, {"--direction": self.direction, "--tolerance": self.tolerance})
        _refuse("--band", self.band, {"--below": self.below, "--above": self.above})


def _refuse(owner: str, given: Sequence[object], options: dict[str, str | None]) -> None:
    for option, value in options.items():
        if value is not None and not given:
            raise ArgumentsError(f"{option} belongs to {owner}")


def distance(option: str, text: str, columns: Mapping[str, pa.DataType]) -> int | Decimal | str:
    """Parse a distance between values: an integer or a decimal, or between times a duration.

    Parameters
    ----------
    option, text
        Option and its value.
    columns
        Type of each column that the option compares, by its name in messages.

    Raises
    ------
    InputError
        If the number has too many digits, or is a distance between times without a unit.
    """
    width = _offset(text)
    if width and not isinstance(width, str) and all(map(pa.types.is_temporal, columns.values())):
        unit = "d" if any(map(pa.types.is_date, columns.values())) else "s"
        times = "are times" if len(columns) > 1 else "is a time"
        raise ArgumentsError(
            f"{option} {text} has no unit, but {' and '.join(columns)} {times}; write a duration such as {text}{unit} "
            "(units: us, ms, s, m, h, d)"
        )
    return width


def _offset(text: str) -> int | Decimal | str:
    """Parse an offset as an integer or a decimal; any other text is a duration."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    if not is_moderate(number):
        raise ArgumentsError(f"{text} is no distance between keys: give a moderate number, or a duration such as 5s")
    return int(number) if number == number.to_integral_value() else number
