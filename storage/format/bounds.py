"""Bounds of a key column from values of a stream: the least key not below a value, the greatest key not above it.

The two may differ in width, unit and scale. Whatever the rounding, a bound is exact: a key column's value lies above it
if and only if it lies above the stream's value. Bounds beyond the range of the key type are clamped, or cannot be met.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.errors import KeyInputError
from headrace.storage.format.coercion import Coerced, coerce, whole_range
from headrace.storage.format.columns import (
    as_array,
    fixed_to_array,
    fixed_type,
    fixed_values,
    is_bytes,
    null_mask,
    stored_type,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Scale", "extreme", "high_bound", "low_bound", "scale_of"]

_DAY_SECONDS = 86_400
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_WORD = 2**64
_HALF = 2**63
_SIGN = np.uint64(_HALF)


class Scale:
    """Scale of a type: how its values compare with those of other types.

    Parameters
    ----------
    line
        ``"number"``, ``"local time"``, ``"instant"``, ``"time of day"`` or ``"duration"``. Types on different lines
        cannot be compared.
    ticks
        Whole numbers that a value's unit (1, or a second) is divided into.
    """

    def __init__(self, line: str, ticks: Fraction | int) -> None:
        self.line = line
        self.ticks = Fraction(ticks)


def scale_of(dtype: pa.DataType) -> Scale | None:
    """Return the scale of a type, or None for types that have only an order or no bounds.

    Examples
    --------
    >>> scale_of(pa.timestamp("ms")).ticks, scale_of(pa.decimal128(9, 2)).ticks, scale_of(pa.string())
    (Fraction(1000, 1), Fraction(100, 1), None)
    """
    fixed = fixed_type(dtype)
    if pa.types.is_integer(dtype):
        return Scale("number", 1)
    if pa.types.is_decimal128(dtype) and fixed is not None and fixed.words == 1 and dtype.scale >= 0:
        return Scale("number", 10**dtype.scale)
    if pa.types.is_date(dtype):
        return Scale("local time", Fraction(1, _DAY_SECONDS) if pa.types.is_date32(dtype) else _UNITS["ms"])
    if pa.types.is_timestamp(dtype):
        return Scale("local time" if dtype.tz is None else "instant", _UNITS[dtype.unit])
    if pa.types.is_time(dtype):
        return Scale("time of day", _UNITS[dtype.unit])
    return Scale("duration", _UNITS[dtype.unit]) if pa.types.is_duration(dtype) else None


def low_bound(
    column: pa.Array | pa.ChunkedArray,
    target: pa.DataType,
    name: str,
    offset: Fraction = Fraction(0),
    *,
    strict: bool = False,
) -> Coerced:
    """Return the least values of `target` that are not below those of a column.

    Parameters
    ----------
    column
        Column of the stream.
    target
        A key column's type.
    name
        Name of the stream's column, for messages.
    offset
        Added to each value, in whole numbers of the target: units of an integer or timestamp, days of a date, last
        places of a decimal.
    strict
        Whether the bound itself is left out.

    Returns
    -------
    array
        Bounds of type `target`, without nulls.
    valid : bool[n] or None
        False for nulls, and where no value of the type is large enough; None if all are valid.

    Raises
    ------
    KeyInputError
        If the types have no common order.

    Examples
    --------
    >>> array, valid = low_bound(pa.array([1, 300, None]), pa.int8(), "x", strict=True)
    >>> array[0].as_py(), valid.tolist()
    (2, [True, False, False])
    """
    if is_bytes(target):
        array, valid = coerce(column, target, name)
        return (_successors(array) if strict else array), valid
    if column.type == target and not offset and not strict:
        return coerce(column, target, name)
    words, valid, _, over = _scaled(column, target, name, offset, low=True, strict=strict)
    return fixed_to_array(target, [words]), _both(valid, over)


def high_bound(
    column: pa.Array | pa.ChunkedArray,
    target: pa.DataType,
    name: str,
    offset: Fraction = Fraction(0),
    *,
    strict: bool = False,
) -> Coerced:
    """Return the greatest values of `target` that are not above those of a column; see `low_bound`.

    There is no greatest text below another text, so for text and binary types the caller handles `strict`.
    """
    if is_bytes(target) or (column.type == target and not offset and not strict):
        return coerce(column, target, name)
    words, valid, under, _ = _scaled(column, target, name, offset, low=False, strict=strict)
    return fixed_to_array(target, [words]), _both(valid, under)


def extreme(target: pa.DataType, rows: int, *, greatest: bool) -> pa.Array:
    """Return an array of the least or the greatest value of a type. Text has no greatest value.

    Examples
    --------
    >>> extreme(pa.int16(), 1, greatest=True)[0].as_py()
    32767
    """
    if is_bytes(target):
        assert not greatest, "text has no greatest value"
        return pa.array([b""], pa.binary()).cast(target).take(pa.array(np.zeros(rows, dtype=np.int32)))
    fixed = fixed_type(target)
    assert fixed is not None
    if fixed.words > 1:
        words = [_HALF - 1, -1] if greatest else [-_HALF, 0]
    elif pa.types.is_boolean(target):
        words = [int(greatest)]
    else:
        words = [_wrapped(whole_range(target)[greatest])]
    return fixed_to_array(target, [np.full(rows, word, dtype=np.int64) for word in words])


def _scaled(
    column: pa.Array | pa.ChunkedArray, target: pa.DataType, name: str, offset: Fraction, *, low: bool, strict: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the bounds' words, which values are not null, and which lay under and over the type's ends.

    With key and value as whole numbers, ``key * a >= value * b + offset * a`` where one of `a` and `b` is 1.
    """
    array = as_array(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        return _nothing(len(array))
    ratio = _ratio(array.type, target, name)
    array = array.cast(stored_type(array.type))
    mask = null_mask(array)
    coarser = math.ceil(ratio)  # the a of the formula
    shift = _rounded(offset * coarser, low=low, strict=strict)
    values, bias = _line_words(array)
    if coarser > 1:
        quotient, rest = divmod(shift, coarser)
        carried = values % coarser + (rest + coarser - 1 if low else rest)
        values, shift = values // coarser + carried // coarser, quotient
    finer = math.ceil(1 / ratio)
    words, under, above = _moved(values, finer, shift + bias * finer, target)
    return words, None if mask is None else ~mask, under, above


def _ratio(dtype: pa.DataType, target: pa.DataType, name: str) -> Fraction:
    stored = stored_type(dtype)
    have, want = None if stored is None else scale_of(stored), scale_of(target)
    if have is None or want is None or have.line != want.line:
        raise KeyInputError(
            f"column {name!r} has type {dtype}, which has no common order with a key of type {target}; cast it, or use "
            "another column"
        )
    return have.ticks / want.ticks


def _rounded(value: Fraction, *, low: bool, strict: bool) -> int:
    """Return the whole number that bounds the same whole numbers as `value` does."""
    if low:
        return math.floor(value) + 1 if strict else math.ceil(value)
    return math.ceil(value) - 1 if strict else math.floor(value)


def _line_words(array: pa.Array) -> tuple[NDArray[np.int64], int]:
    """Return the values less a constant, and that constant: unsigned words do not fit signed ones."""
    (words,) = fixed_values(array)
    if pa.types.is_uint64(array.type):
        return (words.view(np.uint64) ^ _SIGN).view(np.int64), _HALF
    return words, 0


def _moved(
    values: NDArray[np.int64], factor: int, shift: int, target: pa.DataType
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return ``values * factor + shift`` within the target's ends, and what lay under and over them."""
    least, most = whole_range(target)
    under = _below(values, -((shift - least) // factor))
    over = ~_below(values, (most - shift) // factor + 1)
    words = (values.view(np.uint64) * np.uint64(factor) + np.uint64(shift % _WORD)).view(np.int64)
    words[under], words[over] = _wrapped(least), _wrapped(most)
    return words, under, over


def _below(values: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    if limit >= _HALF:
        return np.ones(len(values), dtype=np.bool_)
    return values < max(limit, -_HALF)


def _wrapped(value: int) -> int:
    """Return the signed number whose word is that of `value`."""
    return (value + _HALF) % _WORD - _HALF


def _successors(array: pa.Array) -> pa.Array:
    """Return the least text above each: the text and a zero."""
    joint = pa.scalar(b"\0").cast(pa.binary()).cast(array.type)
    return pc.binary_join_element_wise(array, joint, pa.scalar(b"").cast(array.type))


def _nothing(rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    none = np.zeros(rows, dtype=np.bool_)
    return np.zeros(rows, dtype=np.int64), none, none, none


def _both(valid: NDArray[np.bool_] | None, missed: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    found = ~missed if valid is None else valid & ~missed
    return None if bool(found.all()) else found
