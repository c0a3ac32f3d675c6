"""Conversion between logical Arrow columns and the physical columns of pages.

A fixed-width column is one column of 64-bit integers (floats as their bits), or two for decimals of more than 18
digits; a text or binary column is one column of bytes. Dictionary, large and view types are stored as their plain
relatives. Knows nothing about pages or keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.storage.errors import InputError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "FixedType",
    "as_array",
    "bytes_of",
    "decoded",
    "fixed_to_array",
    "fixed_type",
    "fixed_values",
    "is_bytes",
    "null_mask",
    "stored_schema",
    "stored_type",
    "text_to_array",
    "validity",
    "view_of",
]

_WIDE_DECIMAL = 18
_MAX_TEXT = 2**31 - 1
_FEW_BYTES = 1024


@dataclass(frozen=True, slots=True)
class FixedType:
    """Storage of a fixed-width type: the numpy type of its Arrow buffer, and the number of 64-bit words.

    Only a `plain` buffer has one number of that type for each value.
    """

    dtype: np.dtype[np.generic]
    signed: bool
    words: int = 1
    plain: bool = True

    @property
    def width(self) -> int:
        """Bytes of a value as a key."""
        return 16 if self.words > 1 else self.dtype.itemsize


_FIXED = {
    pa.bool_(): FixedType(np.dtype(np.uint8), signed=False, plain=False),
    pa.int8(): FixedType(np.dtype(np.int8), signed=True),
    pa.int16(): FixedType(np.dtype(np.int16), signed=True),
    pa.int32(): FixedType(np.dtype(np.int32), signed=True),
    pa.int64(): FixedType(np.dtype(np.int64), signed=True),
    pa.uint8(): FixedType(np.dtype(np.uint8), signed=False),
    pa.uint16(): FixedType(np.dtype(np.uint16), signed=False),
    pa.uint32(): FixedType(np.dtype(np.uint32), signed=False),
    pa.uint64(): FixedType(np.dtype(np.uint64), signed=False),
    pa.float16(): FixedType(np.dtype(np.uint16), signed=False),
    pa.float32(): FixedType(np.dtype(np.uint32), signed=False),
    pa.float64(): FixedType(np.dtype(np.uint64), signed=False),
    pa.date32(): FixedType(np.dtype(np.int32), signed=True),
    pa.date64(): FixedType(np.dtype(np.int64), signed=True),
}
_INT32 = FixedType(np.dtype(np.int32), signed=True)
_INT64 = FixedType(np.dtype(np.int64), signed=True)
_DECIMAL64 = FixedType(np.dtype(np.int64), signed=True, plain=False)
_DECIMAL128 = FixedType(np.dtype(np.int64), signed=True, words=2, plain=False)


def fixed_type(dtype: pa.DataType) -> FixedType | None:
    """Return how a type is stored in 64-bit words, or None if it is not of fixed width."""
    if isinstance(dtype, pa.BaseExtensionType):
        return None
    found = _FIXED.get(dtype)
    if found is not None:
        return found
    if pa.types.is_time32(dtype):
        return _INT32
    if pa.types.is_timestamp(dtype) or pa.types.is_time64(dtype) or pa.types.is_duration(dtype):
        return _INT64
    if pa.types.is_decimal128(dtype):
        return _DECIMAL64 if dtype.precision <= _WIDE_DECIMAL else _DECIMAL128
    return None


def is_bytes(dtype: pa.DataType) -> bool:
    """Whether a type is stored as a column of bytes."""
    return bool(pa.types.is_string(dtype) or pa.types.is_binary(dtype))


def stored_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type that a column of `dtype` has in a table, or None if it cannot be stored."""
    if pa.types.is_dictionary(dtype):
        return stored_type(dtype.value_type)
    if pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return pa.string()
    if pa.types.is_large_binary(dtype) or pa.types.is_binary_view(dtype) or pa.types.is_fixed_size_binary(dtype):
        return pa.binary()
    if pa.types.is_decimal32(dtype) or pa.types.is_decimal64(dtype):
        return pa.decimal128(dtype.precision, dtype.scale)
    return dtype if fixed_type(dtype) is not None or is_bytes(dtype) else None


def stored_schema(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """Return the schema that a table built of `schema` has: plain types, key columns not null.

    Raises
    ------
    SchemaError
        If two columns have one name, or a column's type cannot be stored.
    """
    names = list(schema.names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SchemaError(f"column names must be unique, but {', '.join(map(repr, twice))} occurs more than once")
    fields = []
    for field in schema:
        dtype = stored_type(field.type)
        if dtype is None:
            raise SchemaError(
                f"column {field.name!r} has type {field.type}, which a table cannot store; cast it to an integer, "
                "float, decimal of up to 38 digits, date, time, timestamp, boolean, string or binary type"
            )
        fields.append(pa.field(field.name, dtype, nullable=field.nullable and field.name not in key))
    return pa.schema(fields)


def as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one contiguous array.

    Chunks with dictionaries are decoded: Arrow refuses to combine some dictionaries, and changes floats in others.
    """
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        empty = decoded(pa.nulls(0, column.type))
        column = pa.chunked_array([decoded(chunk) for chunk in column.chunks], empty.type)
    joined = column.combine_chunks()
    return pa.concat_arrays(joined.chunks) if isinstance(joined, pa.ChunkedArray) else joined


def decoded(array: pa.Array) -> pa.Array:
    """Return an array without dictionary encoding.

    Arrow cannot decode dictionaries of views, so these become plain text or binary.
    """
    if not pa.types.is_dictionary(array.type):
        return array
    kind = array.type.value_type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(stored_type(kind)))
    return array.dictionary_decode()


class _Memory:
    """Memory of an Arrow buffer for numpy, which keeps this object, and with it the buffer, alive."""

    def __init__(self, buffer: pa.Buffer) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "data": (buffer.address, False),
            "shape": (buffer.size,),
            "typestr": "|u1",
            "version": 3,
        }


def view_of(buffer: pa.Buffer | None, dtype: Any) -> NDArray[Any]:
    """Return the memory of a buffer as an array, without a copy unless it is small. It must not be written to.

    It is not flagged as read-only, so that kernels are compiled for one array type only.
    """
    if buffer is None or buffer.size == 0:
        return np.zeros(0, dtype=dtype)
    if buffer.size <= _FEW_BYTES:  # a copy is faster than the view
        return np.frombuffer(buffer, dtype=dtype, count=buffer.size // np.dtype(dtype).itemsize).copy()
    whole = buffer.size - buffer.size % np.dtype(dtype).itemsize  # Arrow may pad buffers
    return np.asarray(_Memory(buffer))[:whole].view(dtype)


def null_mask(array: pa.Array) -> NDArray[np.bool_] | None:
    """Return which values are null, or None if none is."""
    if array.null_count == 0:
        return None
    bits = view_of(array.buffers()[0], np.uint8)
    first, last = array.offset // 8, (array.offset + len(array) + 7) // 8
    flags = np.unpackbits(bits[first:last], bitorder="little")
    start = array.offset - 8 * first
    mask: NDArray[np.bool_] = flags[start : start + len(array)] == 0
    return mask


def fixed_values(array: pa.Array) -> list[NDArray[np.int64]]:
    """Return the 64-bit words of a fixed-width array, most significant word first; nulls have arbitrary values."""
    kind = fixed_type(array.type)
    assert kind is not None, array.type
    start, end = array.offset, array.offset + len(array)
    if len(array) == 0:
        return [np.zeros(0, dtype=np.int64)] * kind.words
    if kind.plain:
        values = view_of(array.buffers()[1], kind.dtype)[start:end]
        return [values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)]
    if pa.types.is_boolean(array.type):
        bits = view_of(array.buffers()[1], np.uint8)
        flags = np.unpackbits(bits[start // 8 : (end + 7) // 8], bitorder="little")
        return [flags[start % 8 : start % 8 + len(array)].astype(np.int64)]
    words = view_of(array.buffers()[1], np.int64).reshape(-1, 2)[start:end]
    low = np.ascontiguousarray(words[:, 0])
    return [low] if kind.words == 1 else [np.ascontiguousarray(words[:, 1]), low]


def bytes_of(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets, int64[n + 1], into the bytes of a string or binary array, and the bytes; no copy of these."""
    if len(array) == 0:
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    _, offsets, data = array.buffers()
    ends = view_of(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return ends, view_of(data, np.uint8)


def validity(valid: NDArray[np.uint8] | NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Return the Arrow validity bitmap of a mask in which 1 means present; None stays None."""
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def fixed_to_array(
    dtype: pa.DataType, words: Sequence[NDArray[np.int64]], valid: NDArray[np.uint8] | None = None
) -> pa.Array:
    """Return the Arrow array of a fixed-width type whose 64-bit words are given, most significant first."""
    kind = fixed_type(dtype)
    assert kind is not None, dtype
    rows = len(words[0])
    if pa.types.is_boolean(dtype):
        values = pa.py_buffer(np.packbits(words[0].astype(np.bool_), bitorder="little"))
    elif pa.types.is_decimal128(dtype):
        pairs = np.empty((rows, 2), dtype=np.int64)
        pairs[:, 0] = words[-1]
        pairs[:, 1] = words[0] >> 63 if kind.words == 1 else words[0]
        values = pa.py_buffer(pairs)
    else:
        values = pa.py_buffer(words[0].astype(kind.dtype, copy=False))
    return pa.Array.from_buffers(dtype, rows, [validity(valid), values])


def text_to_array(
    dtype: pa.DataType,
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    valid: NDArray[np.uint8] | None = None,
) -> pa.Array:
    """Return the string or binary array with these offsets into these bytes.

    Raises
    ------
    InputError
        If the bytes are more than one Arrow array can address.
    """
    if offsets[-1] > _MAX_TEXT:
        raise InputError(
            f"{len(offsets) - 1} rows hold {offsets[-1]} bytes of text, more than one array can address; "
            "ask for fewer rows at a time"
        )
    ends = pa.py_buffer(offsets.astype(np.int32))
    return pa.Array.from_buffers(dtype, len(offsets) - 1, [validity(valid), ends, pa.py_buffer(data)])
