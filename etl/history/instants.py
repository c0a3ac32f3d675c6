"""Conversion of times to instants of a history, rounded down to its unit so that half-open intervals are exact."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from headrace.etl.errors import DeclarationError
from headrace.storage.format import as_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["are_exact", "instant_of", "ticks_of", "to_instants"]

_PER_DAY: Final = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_EPOCH: Final = dt.date(1970, 1, 1)


def to_instants(column: pa.Array | pa.ChunkedArray, kind: pa.DataType, name: str) -> pa.Array:
    """Convert times to instants of a type, rounded down; values out of range are clamped to the type's limits.

    Parameters
    ----------
    column
        Column of dates or timestamps of any unit.
    kind
        Target type: `date32` or a timestamp in microseconds. A date is midnight; a timestamp with a zone has the date
        in UTC.
    name
        Name of the column, for messages.

    Raises
    ------
    DeclarationError
        If the column is neither a date nor a timestamp, or only one of the two types has a zone.

    Examples
    --------
    >>> to_instants(pa.array([86_399, -1], pa.timestamp("s")), pa.date32(), "at").to_pylist()
    [datetime.date(1970, 1, 1), datetime.date(1969, 12, 31)]
    """
    array = as_array(column)
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    _check_zones(array.type, kind, name)
    have, want = _ticks_per_day(array.type), _ticks_per_day(kind)
    values = ticks_of(array)
    if want < have:
        values = values // (have // want)
    else:
        factor = want // have
        limit = np.iinfo(np.int64).max // factor
        values = np.clip(values, -limit, limit) * factor
    return _array(values, kind, np.asarray(array.is_null()))


def are_exact(times: pa.Array, kind: pa.DataType) -> NDArray[np.bool_]:
    """Return which of the times that `to_instants` converts are not rounded; nulls are not.

    Examples
    --------
    >>> are_exact(pa.array([86_400, 1, None], pa.timestamp("s")), pa.date32()).tolist()
    [True, False, True]
    """
    if pa.types.is_null(times.type):
        return np.ones(len(times), dtype=np.bool_)
    finer = max(_ticks_per_day(times.type) // _ticks_per_day(kind), 1)
    exact: NDArray[np.bool_] = ticks_of(times) % finer == 0
    return exact


def _array(values: NDArray[np.int64], kind: pa.DataType, null: NDArray[np.bool_]) -> pa.Array:
    mask = null if null.any() else None
    if kind == pa.date32():
        limits = np.iinfo(np.int32)
        return pa.array(np.clip(values, limits.min, limits.max).astype(np.int32), mask=mask).view(kind)
    return pa.array(values, mask=mask).view(kind)


def ticks_of(array: pa.Array) -> NDArray[np.int64]:
    """Return dates or timestamps as integers in their unit; 0 for null."""
    width = pa.int32() if array.type == pa.date32() else pa.int64()
    return np.asarray(array.view(width).fill_null(0)).astype(np.int64)


def instant_of(day: dt.date, kind: pa.DataType) -> int:
    """Return the midnight of a day in the unit of a type."""
    return (day - _EPOCH).days * _ticks_per_day(kind)


def _ticks_per_day(kind: pa.DataType) -> int:
    if kind == pa.date32():
        return 1
    return _PER_DAY["ms" if kind == pa.date64() else kind.unit]


def _check_zones(have: pa.DataType, want: pa.DataType, name: str) -> None:
    if not (pa.types.is_timestamp(have) or pa.types.is_date(have)):
        raise DeclarationError(f"column {name!r} of type {have} is no time; cast it to {want}")
    both = pa.types.is_timestamp(have) and pa.types.is_timestamp(want)
    if both and (have.tz is None) != (want.tz is None):
        raise DeclarationError(
            f"column {name!r} has type {have}, which is not comparable with {want}: only one of them has a time zone"
        )
