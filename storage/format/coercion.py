"""Conversion of a column to the type of a stored column without a change of meaning.

A stream's key column may be narrower, wider, in another unit or of another scale than the table's. Values that the
table's type cannot hold can never match: they are marked as not valid. Types between which no value could ever be
equal (text against numbers, a local time against an instant) are refused before the first row.

Rows to store are converted by the same rules, and a value that does not fit is refused. Numbers also become floats,
and floats numbers, if they are equal. Arrow's own casts are not enough: they round, cut off times, take 5 for true,
and multiply decimals without a look at the overflow.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.storage.errors import KeyInputError, SchemaError
from headrace.storage.format.columns import as_array, decoded, fixed_type, is_bytes, null_mask, stored_type

__all__ = ["Coerced", "as_floats", "at_scale", "coerce", "conform", "plain", "shown", "whole_range"]

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_INT64 = np.iinfo(np.int64)
_WIDE = 76
_WORD_DIGITS = 9  # of a divisor of 32 bits

Coerced = tuple[pa.Array, NDArray[np.bool_] | None]


def coerce(column: pa.Array | pa.ChunkedArray, target: pa.DataType, name: str) -> Coerced:
    """Return a column as type `target`, and which rows are not null and can equal a value of that type.

    Parameters
    ----------
    column
        Column to convert.
    target
        Type of a key column.
    name
        Name of the column, for messages.

    Returns
    -------
    array
        Values of type `target`, without nulls; rows that are not valid have arbitrary values.
    valid : bool[n] or None
        None if all rows are valid.

    Raises
    ------
    KeyInputError
        If no value of the column's type can equal one of the target's.

    Examples
    --------
    >>> coerce(pa.array([1, 300, None]), pa.int8(), "k")[1].tolist()
    [True, False, False]
    """
    array = as_array(column)
    if array.type == target and array.null_count == 0:
        return array, None
    array = decoded(array)
    if pa.types.is_null(array.type):
        return _zeros(len(array), target), np.zeros(len(array), dtype=np.bool_)
    dtype = stored_type(array.type)
    if dtype is None or not _comparable(dtype, target):
        raise KeyInputError(
            f"column {name!r} has type {array.type}, which can never equal a key of type {target}; "
            "cast it, or join on another column"
        )
    if array.type != dtype:
        array = array.cast(dtype)
    valid = None
    mask = null_mask(array)
    if mask is not None:
        valid = ~mask
        array = _filled(array, valid)
    if dtype == target or is_bytes(dtype):
        return array, valid
    array, fits = _convert(array, target)
    return array, _both(valid, fits)


def plain(column: pa.Array | pa.ChunkedArray, dtype: pa.DataType) -> pa.Array:
    """Return a column as one array of the stored type `dtype`, with the same values.

    Raises
    ------
    pyarrow.ArrowException
        If a value would change, or the types are of different kinds.

    Examples
    --------
    >>> plain(pa.array([1, None]), pa.decimal128(5, 2)).to_pylist()
    [Decimal('1.00'), None]
    """
    array = as_array(column)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    array = decoded(array)
    if array.type == dtype:
        return array
    if pa.types.is_null(array.type):
        return array.cast(dtype)
    kept = stored_type(array.type)
    if kept is None or is_bytes(kept) != is_bytes(dtype):
        raise _other_kind(array.type, dtype)
    if pa.types.is_integer(kept) and pa.types.is_float16(dtype):  # the only numbers that Arrow rounds
        array, kept = array.cast(pa.float32()), pa.float32()
    if kept == dtype or is_bytes(dtype) or _is_checked_by_arrow(kept, dtype):
        return array.cast(dtype)
    if pa.types.is_floating(kept) and pa.types.is_floating(dtype):
        converted, fits = as_floats(array, dtype)
        _refuse_unfit(array, fits, dtype)
        return converted
    if not _comparable(kept, dtype):
        raise _other_kind(array.type, dtype)
    return _as_exact(array.cast(kept), dtype)


def conform(rows: pa.RecordBatch | pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows in the stored schema.

    Raises
    ------
    SchemaError
        If a column is missing or a value does not fit its type.
    """
    if rows.schema.equals(schema) and isinstance(rows, pa.RecordBatch):
        return rows
    arrays = []
    for field in schema:
        if field.name not in rows.schema.names:
            raise SchemaError(
                f"column {field.name!r} is missing; the columns are {', '.join(map(repr, rows.schema.names))}"
            )
        try:
            arrays.append(plain(rows.column(field.name), field.type))
        except pa.ArrowException as error:
            raise SchemaError(f"column {field.name!r} does not fit the type {field.type}: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def at_scale(values: pa.Array, scale: int) -> pa.Array:
    """Return decimals with another scale, in 256 bits; digits beyond the scale are cut off.

    A value and the factor of a greater scale must have at most 76 digits together.

    Examples
    --------
    >>> at_scale(pa.array([1, 25], pa.decimal128(3, 0)).cast(pa.decimal128(5, 2)), 1).to_pylist()
    [Decimal('1.0'), Decimal('25.0')]
    """
    wide = values.cast(pa.decimal256(_WIDE, values.type.scale), safe=False)
    # Arrow's division by more than 32 bits is wrong if 32 bits of the quotient are all ones.
    for step in range(values.type.scale - _WORD_DIGITS, scale, -_WORD_DIGITS):
        wide = wide.cast(pa.decimal256(_WIDE, step), safe=False)
    return wide.cast(pa.decimal256(_WIDE, scale), safe=False)


def _other_kind(found: pa.DataType, dtype: pa.DataType) -> pa.ArrowInvalid:
    return pa.ArrowInvalid(f"{found} is not {dtype}; cast the column")


def _is_checked_by_arrow(dtype: pa.DataType, target: pa.DataType) -> bool:
    """Whether Arrow's cast refuses every value that would change."""
    types = pa.types
    numbers = types.is_integer, types.is_floating
    mixed = any(left(dtype) and right(target) for left, right in (numbers, numbers[::-1]))
    return mixed or (types.is_duration(dtype) and types.is_duration(target))


def as_floats(array: pa.Array, dtype: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return floats in another width, and a mask of those that are equal to them; NaN and null are."""
    converted = array.cast(dtype)
    before, after = (np.asarray(each.cast(pa.float64()).fill_null(0.0)) for each in (array, converted))
    return converted, (before == after) | np.isnan(before)


def _as_exact(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    nulls = null_mask(array)
    converted, fits = _convert(array if nulls is None else _filled(array, ~nulls), dtype)
    if fits is not None:
        _refuse_unfit(array, fits, dtype)
    return converted if nulls is None else pc.if_else(pa.array(nulls), pa.scalar(None, dtype), converted)


def _refuse_unfit(array: pa.Array, fits: NDArray[np.bool_], dtype: pa.DataType) -> None:
    if not fits.all():
        row = int(np.argmin(fits))
        raise pa.ArrowInvalid(f"{shown(array.slice(row))} is not a value of {dtype} (row {row}); cast or correct it")


def _comparable(dtype: pa.DataType, target: pa.DataType) -> bool:
    exact = (pa.types.is_integer, _is_convertible_decimal)
    if any(test(dtype) for test in exact) and any(test(target) for test in exact):
        return True
    if pa.types.is_timestamp(dtype) and pa.types.is_timestamp(target):
        return (dtype.tz is None) == (target.tz is None)
    families = (pa.types.is_boolean, pa.types.is_date, pa.types.is_time, pa.types.is_string, pa.types.is_binary)
    return any(test(dtype) and test(target) for test in families) or dtype == target


def _is_convertible_decimal(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_decimal128(dtype) and dtype.scale >= 0)


def _convert(array: pa.Array, target: pa.DataType) -> Coerced:
    if pa.types.is_decimal128(array.type) or pa.types.is_decimal128(target):
        return _convert_exact(array, target)
    if pa.types.is_integer(target):
        return _convert_integer(array, target)
    return _convert_unit(array, target)


def _convert_integer(array: pa.Array, target: pa.DataType) -> Coerced:
    values = np.asarray(array)
    cast = values.astype(target.to_pandas_dtype())
    fits = (cast.astype(values.dtype) == values) & ((cast < 0) == (values < 0))
    return pa.array(cast), _none_if_all(fits)


def _convert_exact(array: pa.Array, target: pa.DataType) -> Coerced:
    scale = array.type.scale if pa.types.is_decimal128(array.type) else 0
    exact = array.cast(pa.decimal256(_WIDE, scale), safe=False)
    scaled = at_scale(exact, target.scale if pa.types.is_decimal128(target) else 0)
    same = pc.equal(at_scale(scaled, scale), exact)
    fits = pc.and_(same, _within(scaled, target))
    flags = np.asarray(fits.to_numpy(zero_copy_only=False), dtype=np.bool_)
    return _filled(scaled, flags).cast(target), _flags(fits)


def whole_range(target: pa.DataType) -> tuple[int, int]:
    """Return the least and the greatest whole number of a type."""
    if pa.types.is_decimal128(target):
        return 1 - 10**target.precision, 10**target.precision - 1
    fixed = fixed_type(target)
    assert fixed is not None
    bits = 8 * fixed.dtype.itemsize
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if fixed.signed else (0, 2**bits - 1)


def _within(scaled: pa.Array, target: pa.DataType) -> pa.Array:
    low, high = whole_range(target)
    return pc.and_(
        pc.greater_equal(scaled, _unscaled(low, scaled.type)), pc.less_equal(scaled, _unscaled(high, scaled.type))
    )


def _unscaled(value: int, dtype: pa.DataType) -> pa.Scalar:
    raw = value.to_bytes(32, "little", signed=True)
    return pa.Array.from_buffers(dtype, 1, [None, pa.py_buffer(raw)])[0]


def _convert_unit(array: pa.Array, target: pa.DataType) -> Coerced:
    have, want = _ticks(array.type), _ticks(target)
    width = pa.int32() if array.type.bit_width == 32 else pa.int64()  # noqa: PLR2004 - bits
    values = np.asarray(array.view(width).cast(pa.int64()))
    if want >= have:
        factor = want // have
        fits = (values <= _INT64.max // factor) & (values >= -(-_INT64.min // factor))
        values = np.where(fits, values, 0) * factor
    else:
        factor = have // want
        fits = values % factor == 0
        values = values // factor
    if target.bit_width == 32:  # noqa: PLR2004 - bits
        narrow = values.astype(np.int32)
        fits &= narrow == values
        return pa.array(narrow).view(target), _none_if_all(fits)
    return pa.array(values).view(target), _none_if_all(fits)


def _ticks(dtype: pa.DataType) -> int:
    """Return units per day."""
    if pa.types.is_date32(dtype):
        return 1
    return 86_400 * (_UNITS["ms"] if pa.types.is_date64(dtype) else _UNITS[dtype.unit])


def _filled(array: pa.Array, valid: NDArray[np.bool_]) -> pa.Array:
    """Return the array with a harmless value wherever it is not valid."""
    return pc.if_else(pa.array(valid), array, _zeros(1, array.type)[0])


def _zeros(rows: int, dtype: pa.DataType) -> pa.Array:
    if is_bytes(dtype):
        return pa.array([b""] * rows, type=pa.binary()).cast(dtype)
    return pa.Array.from_buffers(dtype, rows, [None, pa.py_buffer(bytes(rows * 32))])


def _flags(fits: pa.Array) -> NDArray[np.bool_] | None:
    return _none_if_all(np.asarray(fits.to_numpy(zero_copy_only=False), dtype=np.bool_))


def _none_if_all(fits: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    return None if bool(fits.all()) else fits


def _both(left: NDArray[np.bool_] | None, right: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    if left is None:
        return right
    return left if right is None else left & right


def shown(array: pa.Array | pa.ChunkedArray) -> str:
    """Return the first value as text."""
    try:
        return str(array[0])
    except (OverflowError, ValueError):  # a time that Python has no type for
        return str(array.cast(pa.string())[0])
