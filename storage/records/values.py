"""Columns of text as columns of a declared type: each value exactly, or not at all with the rule that it breaks.

CSV and JSON share these converters, so that the same text is the same value in both.
"""

from __future__ import annotations

import datetime as dt
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.errors import InputError
from headrace.storage.records import _value_kernels as kernels
from headrace.storage.records.patterns import MONTHS, SHORT_MONTHS
from headrace.storage.records.zones import local_offsets

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.storage.records.formats import RecordFormat
    from headrace.storage.records.patterns import Pattern

__all__ = [
    "Converted",
    "Fields",
    "check_types",
    "clock_reasons",
    "convert",
    "decoded",
    "packed",
    "timestamps",
    "type_name",
]

TWICE, NEVER, ZONED, YEARS = 6, 7, 8, 9
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400
_FIRST_SECOND = int((dt.datetime(1, 1, 1) - dt.datetime(1970, 1, 1)).total_seconds())  # noqa: DTZ001 - a count
_LAST_SECOND = int((dt.datetime(9999, 12, 31, 23, 59, 59) - dt.datetime(1970, 1, 1)).total_seconds())  # noqa: DTZ001 - a count
_NAMES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.bool_(): "boolean",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
}


@dataclass(frozen=True)
class Fields:
    """The fields of one column: bytes ``[start, stop)`` of a block. `wanted` says which are there and not null."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int32]
    stops: NDArray[np.int32]
    wanted: NDArray[np.bool_]

    def text(self, row: int) -> str:
        """Return one field; bytes that are not UTF-8 in hexadecimal."""
        return decoded(self.data[self.starts[row] : self.stops[row]])


@dataclass(frozen=True)
class Converted:
    """A column's values, null where a rule is broken.

    Attributes
    ----------
    values
        The column.
    rules
        The number of the rule that each field breaks, or 0.
    reasons
        What each number means.
    """

    values: pa.Array
    rules: NDArray[np.uint8]
    reasons: dict[int, str]


def decoded(data: NDArray[np.uint8]) -> str:
    """Return bytes as text; those that are not UTF-8 in hexadecimal."""
    return bytes(data).decode("utf-8", "backslashreplace")


def type_name(dtype: pa.DataType) -> str:
    """Return a type as a pipeline file writes it, or else as Arrow does."""
    if pa.types.is_decimal(dtype):
        return f"decimal({dtype.precision},{dtype.scale})"
    return _NAMES.get(dtype, str(dtype))


def check_types(columns: pa.Schema) -> None:
    """Refuse columns that cannot be read from text.

    Raises
    ------
    InputError
        If a column has such a type.
    """
    for field in columns:
        if _converter(field.type) is None:
            raise InputError(f"column {field.name!r} is {field.type}, which cannot be read from text")


def convert(fields: Fields, dtype: pa.DataType, form: RecordFormat) -> Converted:
    """Return fields as a column of a type that `check_types` allows."""
    converter = _converter(dtype)
    assert converter is not None
    return converter(fields, dtype, form)


@functools.cache
def _converter(dtype: pa.DataType) -> Callable[[Fields, pa.DataType, RecordFormat], Converted] | None:
    kinds: tuple[tuple[Callable[[pa.DataType], bool], Any], ...] = (
        (_is_text, _texts),
        (pa.types.is_integer, _integers),
        (pa.types.is_decimal128, _decimals),
        (lambda kind: pa.types.is_float32(kind) or pa.types.is_float64(kind), _floats),
        (pa.types.is_boolean, _booleans),
        (pa.types.is_date, _dates),
        (pa.types.is_timestamp, _timestamps),
        (pa.types.is_time, _times_of_day),
    )
    return next((converter for is_kind, converter in kinds if is_kind(dtype)), None)


def _is_text(dtype: pa.DataType) -> bool:
    if pa.types.is_dictionary(dtype):
        return _is_text(dtype.value_type)
    return any(
        is_kind(dtype)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
        )
    )


def _bitmap(valid: NDArray[np.bool_]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def packed(dtype: pa.DataType, values: NDArray[Any], valid: NDArray[np.bool_]) -> pa.Array:
    """Return a column over a buffer of values."""
    return pa.Array.from_buffers(dtype, len(valid), [_bitmap(valid), pa.py_buffer(values)])


def _text_array(fields: Fields, wanted: NDArray[np.bool_], dtype: pa.DataType) -> pa.Array:
    offsets = np.empty(len(wanted) + 1, dtype=np.int32)
    kernels.field_lengths(fields.starts, fields.stops, wanted, offsets)
    text = np.empty(int(offsets[-1]), dtype=np.uint8)
    kernels.copy_fields(fields.data, fields.starts, wanted, offsets, text)
    buffers = [_bitmap(wanted), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(dtype, len(wanted), buffers)


def _no_rules(fields: Fields) -> NDArray[np.uint8]:
    return np.zeros(len(fields.wanted), dtype=np.uint8)


def _texts(fields: Fields, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    binary = any(is_kind(dtype) for is_kind in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))
    plain = pa.binary() if binary else pa.string()
    values = _text_array(fields, fields.wanted, plain)
    return Converted(values if dtype == plain else values.cast(dtype), _no_rules(fields), {})


def _integers(fields: Fields, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    rules = _no_rules(fields)
    values = np.zeros(len(rules), dtype=np.uint64)
    limits = np.iinfo(dtype.to_pandas_dtype())
    least, most = np.uint64(-int(limits.min)), np.uint64(limits.max)
    kernels.parse_integers(fields.data, fields.starts, fields.stops, fields.wanted, least, most, values, rules)
    reasons = {
        kernels.FORM: "is not a whole number",
        kernels.RANGE: f"is out of the range of {type_name(dtype)}, {limits.min} to {limits.max}",
    }
    fitting = values.astype(dtype.to_pandas_dtype())  # two's complement: the low bytes
    return Converted(packed(dtype, fitting, fields.wanted & (rules == 0)), rules, reasons)


def _decimals(fields: Fields, dtype: pa.DataType, form: RecordFormat) -> Converted:
    rules = _no_rules(fields)
    words = np.zeros(2 * len(rules), dtype=np.uint64)
    kernels.parse_decimals(
        fields.data,
        fields.starts,
        fields.stops,
        fields.wanted,
        ord(form.decimal),
        dtype.precision,
        dtype.scale,
        words,
        rules,
    )
    reasons = {
        kernels.FORM: f"is not a number{_with_point(form)}",
        kernels.RANGE: f"has more digits before the point than {type_name(dtype)} holds",
        kernels.FRACTION: f"has more than {dtype.scale} digits after the point, and is not rounded",
    }
    return Converted(packed(dtype, words, fields.wanted & (rules == 0)), rules, reasons)


def _with_point(form: RecordFormat) -> str:
    other = "" if form.decimal == "," else "; a decimal comma is declared by `decimal: ','`"
    return f" with {form.decimal!r} before its fraction and nothing between its digits{other}"


def _floats(fields: Fields, dtype: pa.DataType, form: RecordFormat) -> Converted:
    rules = _no_rules(fields)
    values = np.zeros(len(rules), dtype=np.float64)
    exact = np.zeros(len(rules), dtype=np.bool_)
    kernels.check_floats(
        fields.data, fields.starts, fields.stops, fields.wanted, ord(form.decimal), values, exact, rules
    )
    if pa.types.is_float32(dtype):
        exact &= ~np.isfinite(values)  # a double that is rounded again may be off by one place
    others = fields.wanted & (rules == 0) & ~exact
    fitting = values.astype(dtype.to_pandas_dtype())
    if others.any():
        parsed = pc.cast(_text_array(fields, others, pa.string()), dtype)
        fitting[others] = parsed.drop_null().to_numpy()
        rules[others & np.isinf(fitting)] = kernels.RANGE
    reasons = {
        kernels.FORM: f"is not a number{_with_point(form)}",
        kernels.RANGE: f"is out of the range of {type_name(dtype)}",
    }
    return Converted(packed(dtype, fitting, fields.wanted & (rules == 0)), rules, reasons)


def _booleans(fields: Fields, _dtype: pa.DataType, _form: RecordFormat) -> Converted:
    rules = _no_rules(fields)
    values = np.zeros(len(rules), dtype=np.uint8)
    kernels.parse_booleans(fields.data, fields.starts, fields.stops, fields.wanted, values, rules)
    bits = np.packbits(values, bitorder="little")
    return Converted(
        packed(pa.bool_(), bits, fields.wanted & (rules == 0)), rules, {kernels.FORM: "is neither true nor false"}
    )


@dataclass
class _Times:
    """Dates and times as they are written: days, nanoseconds of the day, seconds east of UTC or `NAIVE`, rules."""

    days: NDArray[np.int32]
    nanos: NDArray[np.int64]
    zones: NDArray[np.int32]
    rules: NDArray[np.uint8]


def _read_times(fields: Fields, pattern: Pattern | None, *, has_day: bool, has_clock: bool) -> _Times:
    rows = len(fields.wanted)
    times = _Times(
        np.zeros(rows, dtype=np.int32),
        np.zeros(rows, dtype=np.int64),
        np.zeros(rows, dtype=np.int32),
        _no_rules(fields),
    )
    place = (fields.data, fields.starts, fields.stops, fields.wanted)
    out = (times.days, times.nanos, times.zones, times.rules)
    if pattern is None:
        kernels.parse_times(*place, has_day, has_clock, *out)
    else:
        kernels.parse_patterns(*place, pattern.codes, MONTHS, SHORT_MONTHS, *out)
    return times


def _dates(fields: Fields, dtype: pa.DataType, form: RecordFormat) -> Converted:
    pattern = form.patterns[0]
    times = _read_times(fields, pattern, has_day=True, has_clock=False)
    reasons = {
        kernels.FORM: f"is not a date of the form {pattern.text if pattern else 'YYYY-MM-DD'}",
        kernels.DAY: "is not a day of the calendar (years 1 to 9999)",
    }
    values = times.days if pa.types.is_date32(dtype) else times.days.astype(np.int64) * (_DAY * 1000)
    return Converted(packed(dtype, values, fields.wanted & (times.rules == 0)), times.rules, reasons)


def _times_of_day(fields: Fields, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    times = _read_times(fields, None, has_day=False, has_clock=True)
    tick = 10**9 // _PER_SECOND[dtype.unit]
    times.rules[(times.rules == 0) & (times.nanos % tick != 0)] = kernels.COARSE
    values = (times.nanos // tick).astype(np.int32 if pa.types.is_time32(dtype) else np.int64)
    reasons = {
        kernels.FORM: "is not a time of day of the form HH:MM:SS",
        kernels.DAY: "is not a time of day",
        kernels.COARSE: f"has a fraction of a second that {type_name(dtype)} does not hold",
    }
    return Converted(packed(dtype, values, fields.wanted & (times.rules == 0)), times.rules, reasons)


def _timestamps(fields: Fields, dtype: pa.DataType, form: RecordFormat) -> Converted:
    pattern = form.patterns[1]
    times = _read_times(fields, pattern, has_day=True, has_clock=True)
    rules = times.rules
    good = fields.wanted & (rules == 0)
    zoned = good & (times.zones != kernels.NAIVE)
    seconds = times.days.astype(np.int64) * _DAY + times.nanos // 10**9
    if dtype.tz is None:
        rules[zoned] = ZONED
    seconds[zoned] -= times.zones[zoned]
    values = timestamps(seconds, times.nanos % 10**9, good & ~zoned, rules, dtype, form)
    reasons = {
        kernels.FORM: f"is not a timestamp of the form {pattern.text if pattern else 'YYYY-MM-DD HH:MM:SS'}",
        kernels.DAY: "is not a day of the calendar and a time of day (years 1 to 9999)",
        ZONED: f"names a time zone, but {type_name(dtype)} has none",
        **clock_reasons(dtype, form),
    }
    return Converted(packed(dtype, values, fields.wanted & (rules == 0)), rules, reasons)


def timestamps(
    seconds: NDArray[np.int64],
    fraction: NDArray[np.int64],
    naive: NDArray[np.bool_],
    rules: NDArray[np.uint8],
    dtype: pa.DataType,
    form: RecordFormat,
) -> NDArray[np.int64]:
    """Return values of a timestamp type, and add to the rules that rows break; rows that break one keep any value.

    Parameters
    ----------
    seconds, fraction
        Seconds since 1970, and nanoseconds of the second.
    naive
        Which rows are local times of the declared zone, if the type has a zone; the others are instants.
    """
    _refuse_far(seconds, rules)
    if dtype.tz is not None:
        local = np.flatnonzero(naive & (rules == 0))
        seconds[local], rules[local] = _instants(seconds[local], form)
        _refuse_far(seconds, rules)
    per_second = _PER_SECOND[dtype.unit]
    tick = 10**9 // per_second
    rules[(rules == 0) & (fraction % tick != 0)] = kernels.COARSE
    if dtype.unit == "ns":
        limit = np.iinfo(np.int64).max // 10**9 - 1
        rules[(rules == 0) & (np.abs(seconds) > limit)] = kernels.RANGE
        seconds = np.clip(seconds, -limit, limit)
    return seconds * per_second + fraction // tick


def clock_reasons(dtype: pa.DataType, form: RecordFormat) -> dict[int, str]:
    """Return what the rules say that `timestamps` adds."""
    return {
        kernels.COARSE: f"has a fraction of a second that {type_name(dtype)} does not hold",
        kernels.RANGE: f"is out of the range of {type_name(dtype)}",
        TWICE: f"occurs twice in {form.time_zone}, where clocks are set back; declare `ambiguous_time`",
        NEVER: f"does not exist in {form.time_zone}, where clocks are set forward",
        YEARS: "is not within the years 1 to 9999 in UTC",
    }


def _instants(seconds: NDArray[np.int64], form: RecordFormat) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return local times in seconds since 1970 as instants, and the rules that they break."""
    before, after = local_offsets(seconds, form.time_zone)
    rules = np.zeros(len(seconds), dtype=np.uint8)
    rules[before < after] = NEVER
    if form.ambiguous_time == "reject":
        rules[before > after] = TWICE
    return seconds - (after if form.ambiguous_time == "later" else before), rules


def _refuse_far(seconds: NDArray[np.int64], rules: NDArray[np.uint8]) -> None:
    """Refuse times that Python and Spark cannot show."""
    rules[(rules == 0) & ((seconds < _FIRST_SECOND) | (seconds > _LAST_SECOND))] = YEARS
