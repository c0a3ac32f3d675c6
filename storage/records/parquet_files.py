"""Parquet as records of declared columns: values are converted without loss, or their row is rejected."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.storage.errors import RecordFileError
from headrace.storage.format import at_scale
from headrace.storage.records.csv_files import column_places
from headrace.storage.records.formats import compression_of
from headrace.storage.records.records import Records, Rejections
from headrace.storage.records.sources import unpacked
from headrace.storage.records.values import Converted, clock_reasons, packed, timestamps, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.records.formats import RecordFormat
    from headrace.storage.records.pieces import Piece

    _Converter = Callable[[pa.Array, pa.DataType, RecordFormat], Converted]

__all__ = ["parquet_batches", "parquet_raw", "parquet_records", "parquet_schema"]

_BATCH_ROWS = 1 << 16
_READ_BYTES = 1 << 20
_RANGE, _FRACTION, _TEXT, _MIDNIGHT = 20, 21, 22, 23
_MANTISSA = {pa.float64(): 53, pa.float32(): 24}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01, 9999-12-31
_WIDE = 76
_DECIMAL128, _DIGITS = 128, 38
_BILLION = 10**9
_MOST_SECONDS = np.iinfo(np.int64).max // 10**6 - 1
_EXACT = pa.struct({"seconds of 96 bits": pa.timestamp("s", "UTC"), "nanoseconds": pa.int64()})


def parquet_schema(path: str) -> pa.Schema:
    """Return the columns of a file, where timestamps of 96 bits are instants, as Spark, which writes them, means."""
    with _opened(path) as file:
        return file.schema


class _Taken:
    """Columns of some row groups, taken some rows at a time: readers of other columns end their batches elsewhere."""

    def __init__(self, file: pq.ParquetFile, groups: list[int], names: list[str]) -> None:
        self._parts = file.iter_batches(_BATCH_ROWS, groups, names, use_threads=False)
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> pa.Table:
        taken = []
        while rows:
            rest = next(self._parts) if self._rest is None else self._rest
            taken.append(rest.slice(0, rows))
            rows -= taken[-1].num_rows
            self._rest = rest.slice(taken[-1].num_rows) if taken[-1].num_rows < rest.num_rows else None
        return pa.Table.from_batches(taken).combine_chunks()


@dataclass(frozen=True)
class _File:
    """An open file, whose timestamps of 96 bits are read exactly.

    Attributes
    ----------
    plain
        The file, with such timestamps cut to microseconds.
    seconds, nanos
        The file again, with such timestamps cut to seconds, and in nanoseconds modulo 2^64.
    schema
        The columns.
    instants
        The columns of 96 bits.
    inner
        The columns that have such timestamps inside of lists or structs.
    """

    plain: pq.ParquetFile
    seconds: pq.ParquetFile
    nanos: pq.ParquetFile
    schema: pa.Schema
    instants: frozenset[str]
    inner: frozenset[str]

    def batches(self, groups: list[int], names: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of row groups; those of 96 bits are `_EXACT`."""
        if not groups:
            return
        exact = [name for name in dict.fromkeys(names) if name in self.instants]
        parts = [_Taken(file, groups, exact) for file in (self.seconds, self.nanos)] if exact else []
        for batch in self.plain.iter_batches(_BATCH_ROWS, groups, names, use_threads=False):
            if not exact or not batch.num_rows:
                yield batch
                continue
            seconds, nanos = (part.take(batch.num_rows) for part in parts)
            columns = [
                _exact(seconds.column(name).combine_chunks(), nanos.column(name).combine_chunks())
                if name in exact
                else batch.column(place)
                for place, name in enumerate(batch.schema.names)
            ]
            yield pa.RecordBatch.from_arrays(columns, batch.schema.names)

    def rows(self, group: int, places: NDArray[np.int64]) -> pa.Table:
        """Return rows of a row group; columns of 96 bits are `_EXACT`."""
        wanted = pa.array(places)
        table = self.plain.read_row_group(group, use_threads=False).take(wanted)
        for name in self.instants:
            both = (file.read_row_group(group, [name], use_threads=False) for file in (self.seconds, self.nanos))
            exact = _exact(*(each.column(0).take(wanted).combine_chunks() for each in both))
            table = table.set_column(table.schema.get_field_index(name), name, exact)
        return table.combine_chunks()


def _exact(seconds: pa.Array, nanos: pa.Array) -> pa.Array:
    """Return timestamps of 96 bits exactly.

    Arrow wraps their nanoseconds outside the years 1677 to 2262. The fraction of the second is right nevertheless,
    because it is a difference modulo 2^64 that is less than 2^64.
    """
    whole, valid = _numbers(seconds.view(pa.int64()))
    wrapped, _ = _numbers(nanos.view(pa.int64()))
    fraction = packed(pa.int64(), wrapped - whole * _BILLION, valid)
    return pa.StructArray.from_arrays(
        [seconds.cast(_EXACT[0].type), fraction], fields=list(_EXACT), mask=pa.array(~valid)
    )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[_File]:
    """Open a file; an archive is unpacked in memory."""
    source = pa.BufferReader(unpacked(path)) if compression_of(path) is not None else path

    def opened(unit: str) -> pq.ParquetFile:
        return pq.ParquetFile(
            source,
            pre_buffer=False,
            buffer_size=_READ_BYTES,
            coerce_int96_timestamp_unit=unit,
            page_checksum_verification=True,
        )

    with opened("us") as plain:
        leaves = [plain.schema.column(place) for place in range(len(plain.schema))]
        paths = {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}
        schema = plain.schema_arrow.remove_metadata()
        instants = frozenset(paths & set(schema.names))
        inner = frozenset(
            name for name in schema.names if any(path.startswith(f"{name}.") for path in paths - instants)
        )
        zoned = pa.schema(
            [field.with_type(pa.timestamp("us", "UTC")) if field.name in instants else field for field in schema]
        )
        with contextlib.ExitStack() as stack:
            seconds, nanos = (stack.enter_context(opened(unit)) if instants else plain for unit in ("s", "ns"))
            yield _File(plain, seconds, nanos, zoned, instants, inner)


def parquet_records(piece: Piece, form: RecordFormat) -> Iterator[Records]:
    """Yield the records of a piece of a Parquet file; see `read_records`."""
    assert form.columns is not None
    number = piece.first_record
    with _opened(piece.path) as file:
        schema = file.schema
        places = column_places(schema.names, form.columns.names, form, piece.path, "columns")
        converters = [
            None if place is None else _converter_of(piece.path, file, schema.field(place), field, form)
            for field, place in zip(form.columns, places, strict=True)
        ]
        there = [schema.names[place] for place in places if place is not None]
        groups = list(range(piece.start, file.plain.num_row_groups if piece.stop is None else piece.stop))
        for batch in file.batches(groups, there):
            yield _records(batch, schema, form, converters, number)
            number += batch.num_rows


def _converter_of(path: str, file: _File, source: pa.Field, target: pa.Field, form: RecordFormat) -> _Converter:
    if source.name in file.inner:
        raise RecordFileError(
            f"{path}: column {target.name!r} has timestamps of 96 bits within a list or a struct, which are not read; "
            "write the file again with timestamps of 64 bits"
        )
    as_it_is = form.any_year and source.name not in file.instants
    if source.type == target.type and (as_it_is or pa.types.is_dictionary(source.type)):
        return _same
    found = _converter(source.type, target.type)
    if found is None:
        raise RecordFileError(
            f"{path}: column {target.name!r} is {source.type}, which {type_name(target.type)} does not hold without "
            "loss; declare a type that does, or write the file again"
        )
    return found


def _records(
    batch: pa.RecordBatch,
    schema: pa.Schema,
    form: RecordFormat,
    converters: Sequence[_Converter | None],
    number: int,
) -> Records:
    assert form.columns is not None
    rejected = Rejections()
    columns = []
    for field, converter in zip(form.columns, converters, strict=True):
        if converter is None:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        values = batch.column(field.name)
        values = values if converter is _same else _plain(values, schema.field(field.name).type)
        converted = converter(values, field.type, form)
        for row in np.flatnonzero(converted.rules):
            rejected.add(int(row), field.name, _shown(values, int(row)), converted.reasons[int(converted.rules[row])])
        columns.append(converted.values)
    rows = pa.RecordBatch.from_arrays(columns, schema=form.columns)
    return Records(rows, pa.array(np.arange(number, number + batch.num_rows)), rejected.table())


def _plain(values: pa.Array, declared: pa.DataType) -> pa.Array:
    """Return a column without dictionary, and as the type that the file means."""
    if pa.types.is_dictionary(values.type):
        return values.dictionary_decode()
    return values if values.type in {declared, _EXACT} else values.view(declared)


def _converter(source: pa.DataType, target: pa.DataType) -> _Converter | None:
    """Return what converts a type to another one without loss, or None."""
    if pa.types.is_dictionary(source):
        source = source.value_type
    if pa.types.is_null(source):
        return _cast
    if pa.types.is_timestamp(target):
        zoned_only = pa.types.is_timestamp(source) and source.tz is not None and target.tz is None
        times = pa.types.is_timestamp(source) or pa.types.is_date(source)
        return _timestamps if times and not zoned_only else None
    if _is_string(target):
        return _strings if _is_string(source) else None
    if source == target and not pa.types.is_date(source):
        return _same
    kinds: tuple[tuple[bool, bool, _Converter], ...] = (
        (_is_binary(target), _is_binary(source) or pa.types.is_fixed_size_binary(source), _cast),
        (pa.types.is_integer(target), pa.types.is_integer(source), _integers),
        (pa.types.is_integer(target), pa.types.is_decimal(source) and source.scale <= 0, _decimals),
        (pa.types.is_decimal(target), pa.types.is_integer(source) or pa.types.is_decimal(source), _decimals),
        (pa.types.is_floating(target), pa.types.is_integer(source), _whole_floats),
        (
            pa.types.is_floating(target),
            pa.types.is_floating(source) and source.bit_width <= target.bit_width,
            _cast,
        ),
        (pa.types.is_date(target), pa.types.is_date(source), _dates),
        (pa.types.is_date(target), pa.types.is_timestamp(source) and source.tz is None, _dates),
    )
    return next((converter for wanted, fits, converter in kinds if wanted and fits), None)


def _is_string(dtype: pa.DataType) -> bool:
    if pa.types.is_dictionary(dtype):
        return _is_string(dtype.value_type)
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype)


def _is_binary(dtype: pa.DataType) -> bool:
    return pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype) or pa.types.is_binary_view(dtype)


def _none(values: pa.Array) -> NDArray[np.uint8]:
    return np.zeros(len(values), dtype=np.uint8)


def _same(values: pa.Array, _dtype: pa.DataType, _form: RecordFormat) -> Converted:
    return Converted(values, _none(values), {})


def _cast(values: pa.Array, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    return Converted(values.cast(dtype), _none(values), {})


def _strings(values: pa.Array, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    """Return texts; those that are not UTF-8 are refused, which Arrow and Spark would not see."""
    rules = _none(values)
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        texts = values.cast(pa.large_binary()).to_pylist()
        rules = np.array([0 if text is None or _decodes(text) else _TEXT for text in texts], dtype=np.uint8)
        values = pc.if_else(pa.array(rules == 0), values, pa.scalar(None, values.type))
    return Converted(values.cast(dtype), rules, {_TEXT: "is not UTF-8"})


def _decodes(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _numbers(values: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the values as numpy has them, 0 for null, and which are there."""
    valid = np.asarray(values.is_valid())
    return np.asarray(values.fill_null(0) if values.null_count else values), valid


def _integers(values: pa.Array, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    numbers, valid = _numbers(values)
    limits = np.iinfo(dtype.to_pandas_dtype())
    outside = (numbers < int(limits.min)) | (numbers > int(limits.max))
    reasons = {_RANGE: f"is out of the range of {type_name(dtype)}, {limits.min} to {limits.max}"}
    fitting = np.ascontiguousarray(numbers.astype(limits.dtype))
    rules = (outside & valid).astype(np.uint8) * np.uint8(_RANGE)
    return Converted(packed(dtype, fitting, valid & ~outside), rules, reasons)


def _whole_floats(values: pa.Array, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    """Return whole numbers as floating point; those that it does not hold exactly are refused."""
    numbers, valid = _numbers(values)
    greatest = 1 << _MANTISSA[dtype]
    outside = (numbers < -greatest) | (numbers > greatest)
    rules = (outside & valid).astype(np.uint8) * np.uint8(_RANGE)
    fitting = numbers.astype(dtype.to_pandas_dtype())
    return Converted(
        packed(dtype, fitting, valid & ~outside), rules, {_RANGE: f"has more digits than {type_name(dtype)}"}
    )


def _cannot_overflow(dtype: pa.DataType, scale: int) -> bool:
    """Whether Arrow can multiply decimals to a scale: it does not notice if their digits are too many on the way."""
    return dtype.bit_width == _DECIMAL128 and scale >= dtype.scale and dtype.precision + scale - dtype.scale <= _DIGITS


def _decimals(values: pa.Array, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    whole = pa.types.is_integer(dtype)
    if pa.types.is_integer(values.type):
        values = values.cast(pa.decimal128(20, 0))
    scale = 0 if whole else dtype.scale
    if _cannot_overflow(values.type, scale):
        with contextlib.suppress(pa.ArrowInvalid):
            return Converted(values.cast(dtype), _none(values), {})
    own = values.cast(pa.decimal256(_WIDE, values.type.scale))
    limits = np.iinfo(dtype.to_pandas_dtype()) if whole else None
    most = int(limits.max) if limits else 10 ** (dtype.precision - scale) - 1
    least = int(limits.min) if limits else -most
    units = at_scale(own, 0)
    bounds = [pa.scalar(bound, units.type) for bound in (least, most)]
    outside = pc.or_(pc.less(units, bounds[0]), pc.greater(units, bounds[1]))
    inside = pc.if_else(outside, pa.scalar(None, own.type), own)
    wide = inside.cast(pa.decimal256(_WIDE, max(own.type.scale, scale)))
    cut = at_scale(wide, scale)
    changed = pc.fill_null(pc.not_equal(at_scale(cut, wide.type.scale), wide), fill_value=False)
    rules = np.asarray(changed).astype(np.uint8) * np.uint8(_FRACTION)
    rules[np.asarray(pc.fill_null(outside, fill_value=False))] = _RANGE
    fitting = pc.if_else(pa.array(rules == 0), cut, pa.scalar(None, cut.type)).cast(dtype)
    reasons = {
        _RANGE: f"is out of the range of {type_name(dtype)}",
        _FRACTION: f"has more than {scale} digits after the point, and is not rounded",
    }
    return Converted(fitting, rules, reasons)


def _dates(values: pa.Array, dtype: pa.DataType, _form: RecordFormat) -> Converted:
    if pa.types.is_date32(values.type):
        ticks, valid = _numbers(values.view(pa.int32()))
        per_day = 1
    else:
        ticks, valid = _numbers(values.view(pa.int64()))
        per_day = _DAY * (_PER_SECOND[values.type.unit] if pa.types.is_timestamp(values.type) else 1000)
    days = ticks // per_day
    rules = np.where(ticks % per_day != 0, np.uint8(_MIDNIGHT), np.uint8(0))
    rules[(days < _FIRST_DAY) | (days > _LAST_DAY)] = _RANGE
    rules[~valid] = 0
    reasons = {
        _MIDNIGHT: "has a time of day, which date does not hold",
        _RANGE: "is not within the years 1 to 9999",
    }
    found = packed(pa.date32(), days.astype(np.int32), valid & (rules == 0))
    return Converted(found if dtype == pa.date32() else found.cast(dtype), rules, reasons)


def _timestamps(values: pa.Array, dtype: pa.DataType, form: RecordFormat) -> Converted:
    """Return times: naive ones are local times of the declared zone."""
    rules = _none(values)
    if values.type == _EXACT:
        seconds, fraction, valid = _parts(values)
        local = np.zeros(len(values), dtype=np.bool_)
    else:
        naive = not pa.types.is_timestamp(values.type) or values.type.tz is None
        if pa.types.is_date32(values.type):
            values = values.cast(pa.date64())
        per_second = _PER_SECOND[values.type.unit] if pa.types.is_timestamp(values.type) else 1000
        ticks, valid = _numbers(values.view(pa.int64()))
        seconds, fraction = ticks // per_second, ticks % per_second * (_BILLION // per_second)
        local = np.full(len(values), naive) & valid
    fitting = timestamps(seconds, fraction, local, rules, dtype, form)
    rules[~valid] = 0
    return Converted(packed(dtype, fitting, valid & (rules == 0)), rules, clock_reasons(dtype, form))


def _parts(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the seconds and nanoseconds of `_EXACT` timestamps, and which are there."""
    seconds, valid = _numbers(values.field(0).view(pa.int64()))
    return seconds.copy(), _numbers(values.field(1))[0], valid


def _shown(values: pa.Array, row: int) -> str:
    """Return a value as text."""
    return str(_original(values.slice(row, 1))[0])


def _original(values: pa.Array) -> list[Any]:  # noqa: PLR0911 - one case for each kind of type
    """Return values as JSON has them: times and decimals as text, bytes in hexadecimal."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _original(values.dictionary_decode())
    if _is_string(kind):
        return [None if text is None else text.decode("utf-8", "backslashreplace") for text in _bytes(values)]
    if _is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return [None if text is None else text.hex() for text in values.to_pylist()]
    if kind == _EXACT:
        places = zip(_original(values.field(0)), values.field(1).to_pylist(), strict=True)
        return [None if nanos is None else _with_nanos(second, nanos) for second, nanos in places]
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return _times(values)
    if pa.types.is_temporal(kind):
        try:
            return values.cast(pa.string()).to_pylist()
        except pa.ArrowException:
            return values.view(pa.int32() if kind.bit_width == pa.int32().bit_width else pa.int64()).to_pylist()
    if pa.types.is_decimal(kind):
        return [None if value is None else str(value) for value in values.to_pylist()]
    return values.to_pylist()


def _times(values: pa.Array) -> list[str | None]:
    """Return times as text; those outside the years 1 to 9999, which have none, as their number and unit."""
    unit = values.type.unit if pa.types.is_timestamp(values.type) else "ms"
    days = _numbers(values.view(pa.int64()))[0] // (_DAY * _PER_SECOND[unit])
    near = (days >= _FIRST_DAY) & (days <= _LAST_DAY)
    texts = pc.if_else(pa.array(near), values, pa.scalar(None, values.type)).cast(pa.string()).to_pylist()
    numbers = values.view(pa.int64()).to_pylist()
    return [
        text if text is not None or number is None else f"{number} {unit} since 1970"
        for text, number in zip(texts, numbers, strict=True)
    ]


def _with_nanos(second: str, nanos: int) -> str:
    """Return a time, given as text of its whole second, with its nanoseconds."""
    if not second.endswith("Z"):
        return second
    return f"{second[:-1]}.{nanos:09d}Z"


def _bytes(values: pa.Array) -> list[bytes | None]:
    return values.cast(pa.large_binary()).to_pylist()


def parquet_raw(path: str, numbers: Sequence[int]) -> list[str]:
    """Return records of a file as JSON of the values that are in it."""
    wanted = np.array(sorted(set(numbers)), dtype=np.int64) - 1
    texts: dict[int, str] = {}
    first = 0
    with _opened(path) as file:
        names = file.schema.names
        for group in range(file.plain.num_row_groups):
            rows = file.plain.metadata.row_group(group).num_rows
            inside = wanted[(wanted >= first) & (wanted < first + rows)]
            if inside.size:
                table = file.rows(group, inside - first)
                columns = [_original(column.combine_chunks()) for column in table.columns]
                for number, values in zip(inside.tolist(), zip(*columns, strict=True), strict=True):
                    record = dict(zip(names, values, strict=True))
                    texts[number + 1] = json.dumps(record, ensure_ascii=False, default=str)
            first += rows
    return [texts[number] for number in numbers]


def parquet_batches(path: str, numbers: Sequence[int]) -> list[bytes]:
    """Return records of a file exactly, each as a serialized record batch without its schema.

    Dictionaries are decoded. A record with a timestamp of 96 bits that is no whole microsecond has no such batch, and
    is empty. The schema is that of `parquet_schema`, with the value type of each dictionary.
    """
    wanted = np.array(sorted(set(numbers)), dtype=np.int64) - 1
    found: dict[int, bytes] = {}
    first = 0
    with _opened(path) as file:
        schema = file.schema
        for group in range(file.plain.num_row_groups):
            rows = file.plain.metadata.row_group(group).num_rows
            inside = wanted[(wanted >= first) & (wanted < first + rows)]
            if inside.size:
                table = file.rows(group, inside - first)
                columns = [column.combine_chunks() for column in table.columns]
                whole = _fit_microseconds(columns)
                arrays = [
                    _microseconds(column) if column.type == _EXACT else _plain(column, field.type)
                    for column, field in zip(columns, schema, strict=True)
                ]
                batch = pa.RecordBatch.from_arrays(arrays, names=schema.names)
                for row, number in enumerate(inside.tolist()):
                    found[number + 1] = batch.slice(row, 1).serialize().to_pybytes() if whole[row] else b""
            first += rows
    return [found[number] for number in numbers]


def _fit_microseconds(columns: Sequence[pa.Array]) -> NDArray[np.bool_]:
    """Return the rows whose timestamps of 96 bits are whole microseconds that 64 bits hold."""
    fit = np.ones(len(columns[0]), dtype=np.bool_)
    for column in columns:
        if column.type == _EXACT:
            seconds, nanos, _ = _parts(column)
            fit &= (nanos % 1000 == 0) & (np.abs(seconds) <= _MOST_SECONDS)
    return fit


def _microseconds(values: pa.Array) -> pa.Array:
    """Return `_EXACT` timestamps that fit as microseconds."""
    seconds, nanos, valid = _parts(values)
    return packed(pa.timestamp("us", "UTC"), seconds * 10**6 + nanos // 1000, valid)
