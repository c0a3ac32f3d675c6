"""Match options of `headrace join`: equal columns, the nearest key, or keys within a band."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Literal

from headrace.joins import AsOf, Band
from headrace.joins.predicates.offsets import is_moderate
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.joins.predicates import On

__all__ = ["Match", "offset"]

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

    def predicate(self) -> On:
        """Return the join predicate for the operators.

        Raises
        ------
        InputError
            If options are missing or incompatible.
        """
        self._check()
        if self.as_of:
            tolerance = None if self.tolerance is None else offset(self.tolerance)
            return AsOf(*self.as_of[0], by=self.on, direction=self.direction or "backward", tolerance=tolerance)
        if self.band:
            return Band(*self.band[0], offset(self.below or "0"), offset(self.above or "0"), by=self.on)
        return list(self.on)

    def _check(self) -> None:
        if not self.pairs:
            raise InputError("say which rows match: --on, --as-of or --band")
        if self.as_of and self.band:
            raise InputError("--as-of and --band do not go together; leave one out")
        for option, pairing in (("--as-of", self.as_of), ("--band", self.band)):
            if len(pairing) > 1:
                raise InputError(f"{option} takes one pair of columns; those that are to be equal go to --on")
        _refuse("--as-of", self.as_of, {"--direction": self.direction, "--tolerance": self.tolerance})
        _refuse("--band", self.band, {"--below": self.below, "--above": self.above})


def _refuse(owner: str, given: Sequence[object], options: dict[str, str | None]) -> None:
    for option, value in options.items():
        if value is not None and not given:
            raise InputError(f"{option} belongs to {owner}")


def offset(text: str) -> int | Decimal | str:
    """Parse an offset as an integer or a decimal; any other text is a duration."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    if not is_moderate(number):
        raise InputError(f"{text} is no distance between keys: give a moderate number, or a duration such as 5s")
    return int(number) if number == number.to_integral_value() else number
