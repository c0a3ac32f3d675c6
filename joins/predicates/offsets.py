"""Widths of bands and tolerances, as users write them, in whole steps of a key column."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import JoinInputError
from headrace.storage.format import scale_of
from headrace.storage.units import parse_exact_duration

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Offset", "is_moderate", "ticks"]

Offset = int | Decimal | timedelta | np.timedelta64 | str
"""A number, or for times a duration."""

_MOST_DIGITS = 40  # more than any key has: larger numbers are mistakes, and slow ones


def ticks(offset: Offset, dtype: pa.DataType, name: str) -> Fraction:
    """Return how many of a type's smallest steps an offset is.

    Parameters
    ----------
    offset
        A whole number or a decimal; for dates and times a whole number of their unit, or a duration.
    dtype
        Type of the key column.
    name
        Name of the parameter, for messages.

    Raises
    ------
    JoinInputError
        If `offset` is not a distance of that type.

    Examples
    --------
    >>> import pyarrow as pa
    >>> ticks("1.5s", pa.timestamp("ms"), "below"), ticks(Decimal("0.05"), pa.decimal128(9, 2), "below")
    (Fraction(1500, 1), Fraction(5, 1))
    """
    scale = scale_of(dtype)
    assert scale is not None
    if isinstance(offset, bool) or (isinstance(offset, Decimal) and not is_moderate(offset)):
        raise _refusal(offset, dtype, name)
    if scale.line == "number" and isinstance(offset, int | Decimal):
        return Fraction(offset) * scale.ticks
    if scale.line != "number" and isinstance(offset, int):
        return Fraction(offset)
    if scale.line == "number" or isinstance(offset, int | Decimal):
        raise _refusal(offset, dtype, name)
    return _seconds(offset, dtype, name) * scale.ticks


def is_moderate(number: Decimal) -> bool:
    """Return whether a number is finite and has no more digits than a distance between keys can have."""
    return number.is_finite() and abs(number.adjusted()) <= _MOST_DIGITS


def _seconds(offset: timedelta | np.timedelta64 | str, dtype: pa.DataType, name: str) -> Fraction:
    if isinstance(offset, timedelta):
        return Fraction(offset // timedelta(microseconds=1), 10**6)
    if isinstance(offset, np.timedelta64) and np.datetime_data(offset)[0] not in {"generic", "Y", "M"}:
        if not np.isnat(offset):
            unit, step = np.datetime_data(offset)
            return Fraction(int(offset.astype(np.int64)) * step) * _unit_seconds(unit)
    elif isinstance(offset, str):
        text = offset.strip()
        return -parse_exact_duration(text[1:]) if text.startswith("-") else parse_exact_duration(text)
    raise _refusal(offset, dtype, name)


def _unit_seconds(unit: str) -> Fraction:
    """Return the seconds in a unit of numpy's."""
    powers = {"ms": 3, "us": 6, "ns": 9, "ps": 12, "fs": 15, "as": 18}
    longer = {"W": 604_800, "D": 86_400, "h": 3_600, "m": 60, "s": 1}
    return Fraction(longer[unit]) if unit in longer else Fraction(1, 10 ** powers[unit])


def _refusal(offset: object, dtype: pa.DataType, name: str) -> JoinInputError:
    return JoinInputError(
        f"`{name}` must be a distance between keys of type {dtype}: a whole number, a decimal between numbers, or a "
        f"duration such as '5s' between times, not {offset!r}"
    )
