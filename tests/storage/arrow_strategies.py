"""Random Arrow columns of every type that a table stores."""

from __future__ import annotations

import datetime as dt
import decimal

import pyarrow as pa
from hypothesis import strategies as st

from headrace.storage.format.columns import is_bytes

INT_RANGES = {
    pa.int8(): (-(2**7), 2**7 - 1),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint8(): (0, 2**8 - 1),
    pa.uint16(): (0, 2**16 - 1),
    pa.uint32(): (0, 2**32 - 1),
    pa.uint64(): (0, 2**64 - 1),
}
INT64_TYPES = (
    pa.timestamp("s"),
    pa.timestamp("ns"),
    pa.timestamp("us", tz="UTC"),
    pa.timestamp("ms", tz="Europe/Berlin"),
    pa.time64("us"),
    pa.date64(),
)
KEY_TYPES = (
    *INT_RANGES,
    *INT64_TYPES,
    pa.date32(),
    pa.time32("s"),
    pa.bool_(),
    pa.decimal128(9, 2),
    pa.decimal128(18, 0),
    pa.decimal128(38, 10),
    pa.string(),
    pa.binary(),
)
PAYLOAD_TYPES = (*KEY_TYPES, pa.float16(), pa.float32(), pa.float64(), pa.duration("ms"))
_DAY = 86_400


def values_of(dtype: pa.DataType) -> st.SearchStrategy:
    """Return Python values that `pa.array` takes for a type."""
    if dtype in INT_RANGES:
        low, high = INT_RANGES[dtype]
        return st.integers(low, high) | st.integers(0, 3)
    if pa.types.is_boolean(dtype):
        return st.booleans()
    if is_bytes(dtype):
        return _bytes_of(dtype)
    if pa.types.is_decimal(dtype):
        bound = 10**dtype.precision - 1
        scale = decimal.Context(prec=76)
        return st.integers(-bound, bound).map(lambda value: decimal.Decimal(value).scaleb(-dtype.scale, scale))
    if pa.types.is_floating(dtype):
        return st.floats(width=dtype.bit_width)
    return _ticks(dtype)


def _bytes_of(dtype: pa.DataType) -> st.SearchStrategy:
    if pa.types.is_string(dtype):
        return st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["", "a", "a\0", "ab"])
    return st.binary(max_size=12) | st.sampled_from([b"", b"\0", b"\0\xff", b"\xff" * 9])


def _ticks(dtype: pa.DataType) -> st.SearchStrategy:
    if pa.types.is_date32(dtype):
        return st.dates(dt.date(1, 1, 1))
    if pa.types.is_date64(dtype):
        return st.integers(-(2**20), 2**20).map(lambda day: day * _DAY * 1000)
    if pa.types.is_time32(dtype):
        return st.integers(0, _DAY - 1)
    if pa.types.is_time64(dtype):
        return st.integers(0, _DAY * 10**6 - 1)
    return st.integers(-(2**62), 2**62)


def array_of(values: list, dtype: pa.DataType) -> pa.Array:
    """Return an array of Python values; ticks of temporal types are given as integers."""
    if pa.types.is_time32(dtype):
        return pa.array(values, pa.int32()).view(dtype)
    temporal = pa.types.is_timestamp(dtype) or pa.types.is_time64(dtype) or pa.types.is_date64(dtype)
    if temporal or pa.types.is_duration(dtype):
        return pa.array(values, pa.int64()).view(dtype)
    return pa.array(values, dtype)


def values_in(column: pa.Array | pa.ChunkedArray) -> list:
    """Return the values of a column; temporal ones as ticks, floats as bits, so that all can be compared."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    dtype = array.type
    if pa.types.is_date32(dtype) or pa.types.is_time32(dtype) or pa.types.is_float32(dtype):
        return array.view(pa.int32()).to_pylist()
    if pa.types.is_float16(dtype):
        return array.view(pa.uint16()).to_pylist()
    if pa.types.is_temporal(dtype) or pa.types.is_float64(dtype):
        return array.view(pa.int64()).to_pylist()
    return array.to_pylist()


def rows_of(table: pa.Table) -> list[tuple]:
    """Return the rows of a table as tuples of comparable values."""
    return list(zip(*(values_in(column) for column in table.columns), strict=True))


@st.composite
def arrays(draw: st.DrawFn, dtype: pa.DataType, rows: int, *, nulls: bool = True, repeat: bool = False) -> pa.Array:
    """Return an array of a type, with nulls and repeated values if asked."""
    values = values_of(dtype)
    if repeat:
        values = st.sampled_from(draw(st.lists(values, min_size=1, max_size=4)))
    if nulls:
        values = st.none() | values
    return array_of(draw(st.lists(values, min_size=rows, max_size=rows)), dtype)


@st.composite
def tables(
    draw: st.DrawFn, *, max_rows: int = 60, max_key: int = 3, max_payload: int = 4
) -> tuple[pa.Table, list[str]]:
    """Return a table and the names of its key columns."""
    rows = draw(st.integers(0, max_rows))
    key_types = draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=max_key))
    payload_types = draw(st.lists(st.sampled_from(PAYLOAD_TYPES), max_size=max_payload))
    repeat = draw(st.booleans())
    columns = {f"k{n}": draw(arrays(t, rows, nulls=False, repeat=repeat)) for n, t in enumerate(key_types)}
    payload = {f"v{n}": draw(arrays(t, rows, repeat=draw(st.booleans()))) for n, t in enumerate(payload_types)}
    names = draw(st.permutations([*columns, *payload]))
    return pa.table({name: (columns | payload)[name] for name in names}), list(columns)
