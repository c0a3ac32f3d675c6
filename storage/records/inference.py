"""Infers the columns of files without a declared schema, by one rule for all commands.

The names are those of the first file. The types fit all values in its first mebibyte: whole numbers (bigint), numbers
(double), booleans, dates, timestamps and times of day; all other values are text. Numbers that would change when they
are written again are text too: codes with leading zeros, and whole numbers of more than 64 bits, two of which could
become equal. JSON distinguishes numbers from text; its text can be a date or a timestamp. A later value that does not
fit is an error.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.errors import RecordFileError, nearest
from headrace.storage.records._value_kernels import FORM
from headrace.storage.records.csv_files import block_fields, csv_blocks, read_heading
from headrace.storage.records.formats import RecordFormat
from headrace.storage.records.pieces import Piece
from headrace.storage.records.reading import lines_of, read_records
from headrace.storage.records.sources import reading
from headrace.storage.records.values import ZONED, Fields, convert

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from headrace.storage.records.formats import StrPath

__all__ = ["infer_columns", "record_place", "sound_batches", "with_delimiter"]

_SAMPLE_BYTES = 1 << 20
_SAMPLE_LINES = 1 << 16
_DELIMITERS = ",;\t|"
_LOCAL, _LOCAL_NANOS, _INSTANT = pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("us", "UTC")
_TIMES = (pa.date32(), _LOCAL, _LOCAL_NANOS, _INSTANT)
_TYPES = (pa.int64(), pa.float64(), pa.bool_(), *_TIMES, pa.time32("s"))
_WHOLE_BITS = 63


def with_delimiter(path: StrPath, form: RecordFormat) -> RecordFormat:
    """Return the format with the delimiter that divides a file's heading into most names; a comma if none does."""

    def names(mark: str) -> int:
        try:
            return len(read_heading(path, replace(form, delimiter=mark)) or [])
        except (RecordFileError, csv.Error):
            return 0

    with reading(path, form.kind):
        return replace(form, delimiter=max(_DELIMITERS, key=names))


def infer_columns(path: StrPath, form: RecordFormat, known: Mapping[str, pa.DataType] | None = None) -> pa.Schema:
    """Return the columns of a file.

    Parameters
    ----------
    path
        The file.
    form
        Its format; the columns in it do not matter.
    known
        Types of columns that are known, by name.

    Raises
    ------
    RecordFileError
        If the file cannot be read, names no column or one twice, or lacks a known column.
    """
    known = known or {}
    with reading(path, form.kind):
        found = _FINDERS[form.kind](str(path), form)
    missing = [name for name in known if name not in found.names]
    if missing:
        near = nearest(missing[0], found.names)
        raise RecordFileError(f"{path} has no column {missing[0]!r}{near}; its columns are {', '.join(found.names)}")
    return pa.schema([column.with_type(known.get(column.name, column.type)) for column in found])


def sound_batches(path: StrPath, form: RecordFormat) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file; the first record that is rejected is an error.

    Raises
    ------
    RecordFileError
        If the file cannot be read, or a record does not fit the columns; the message names the file, the record, the
        column and the value.
    """
    for records in read_records(Piece(str(path)), form):
        if records.rejects.num_rows:
            cause = records.rejects.slice(0, 1).to_pylist()[0]
            number = records.numbers[cause["row"]].as_py()
            raise RecordFileError(f"{path}, {record_place(number, form)}{_told(cause)}", cause["column"])
        yield records.rows


def record_place(number: int, form: RecordFormat) -> str:
    """Return where a record is in its file, for messages; `number` counts from 1, without a heading."""
    headed = form.kind == "csv" and form.header
    return f"record {number + 1} (the heading is record 1)" if headed else f"record {number}"


def _told(cause: dict[str, Any]) -> str:
    if cause["column"] is None:
        return f": {cause['reason']}"
    if cause["value"] is None:
        return f", column {cause['column']!r}: {cause['reason']}"
    return f", column {cause['column']!r}: {_quoted(cause['value'])} {cause['reason']}"


def _quoted(value: str) -> str:
    r"""Return a value in quotes, on one line; a byte that is not in the encoding is ``\xNN`` in it already."""
    return repr(value).replace("\\\\", "\\")


@dataclass
class _Guess:
    """The types that all values of a column have had so far."""

    types: set[pa.DataType] = field(default_factory=lambda: set(_TYPES))
    seen: bool = False

    def narrow(self, fields: Fields, form: RecordFormat) -> None:
        """Keep the types that more values have, too."""
        if not fields.wanted.any():
            return
        self.seen = True
        for dtype in list(self.types):
            converted = convert(fields, dtype, form)
            broken = converted.rules[fields.wanted]
            if dtype == pa.int64() and not _come_back(fields, converted.values, broken):
                self.types -= {pa.int64(), pa.float64()}
            elif broken.any() or (dtype == _INSTANT and not _all_zoned(fields, form)):
                self.types.discard(dtype)

    def chosen(self) -> pa.DataType:
        """Return the narrowest type, text if there is none."""
        return next((dtype for dtype in _TYPES if self.seen and dtype in self.types), pa.string())


def _come_back(fields: Fields, values: pa.Array, broken: Any) -> bool:
    """Return whether all whole numbers are in range and without leading zeros or plus; others do not matter."""
    if (broken > FORM).any():
        return False
    texts = convert(fields, pa.string(), RecordFormat("csv")).values
    return bool(pc.all(pc.equal(values.cast(pa.string()), texts), min_count=0).as_py())


def _all_zoned(fields: Fields, form: RecordFormat) -> bool:
    return bool((convert(fields, _LOCAL, form).rules[fields.wanted] == ZONED).all())


def _csv(path: str, form: RecordFormat) -> pa.Schema:
    names = read_heading(path, form)
    if names is None:
        raise RecordFileError(f"{path} does not begin with a line of column names: it is empty")
    _refuse_repeated(path, names)
    guesses = [_Guess() for _ in names]
    taken = 0
    for block in csv_blocks(Piece(path), form, len(names)):
        for place, guess in enumerate(guesses):
            guess.narrow(block_fields(block, place, form), form)
        taken += int(block.bounds[1, -1] - block.bounds[0, 0])
        if taken >= _SAMPLE_BYTES:
            break
    return pa.schema([(name, guess.chosen()) for name, guess in zip(names, guesses, strict=True)])


def _refuse_repeated(path: str, names: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise RecordFileError(f"{path} names a column twice: {repeated[0]}; rename one of them")


def _parquet(path: str, _form: RecordFormat) -> pa.Schema:
    from headrace.storage.records.parquet_files import parquet_schema  # noqa: PLC0415 - loaded only for Parquet

    schema = parquet_schema(path)
    _refuse_repeated(path, schema.names)
    return schema


def _json(path: str, form: RecordFormat) -> pa.Schema:
    values: dict[str, list[Any]] = {}
    taken = 0
    for _, line in lines_of(path, form, _SAMPLE_LINES):
        for name, value in _object(line).items():
            values.setdefault(name, []).append(value)
        taken += len(line)
        if taken >= _SAMPLE_BYTES:
            break
    if not values:
        raise RecordFileError(f"{path} begins with no JSON object that has a field; write one object a line")
    return pa.schema([(name, _json_type(found, form)) for name, found in values.items()])


def _object(line: str) -> dict[str, Any]:
    """Return the object of a line; nothing of one that is not valid, which is refused when it is read."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_type(values: list[Any], form: RecordFormat) -> pa.DataType:
    there = [value for value in values if value is not None]
    kinds = {type(value) for value in there}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        wide = max(value.bit_length() for value in there) > _WHOLE_BITS
        return pa.decimal128(38, 0) if wide else pa.int64()
    if kinds and kinds <= {int, float}:
        return pa.float64()
    if kinds != {str}:
        return pa.string()
    guess = _Guess(set(_TIMES))
    guess.narrow(_fields(there), form)
    return guess.chosen()


def _fields(texts: list[str]) -> Fields:
    encoded = [text.encode("utf-8", "replace") for text in texts]
    ends = np.cumsum([len(text) for text in encoded]).astype(np.int32)
    starts = np.concatenate([np.zeros(1, dtype=np.int32), ends[:-1]])
    data = np.frombuffer(bytearray(b"".join(encoded) + b"\0"), dtype=np.uint8)
    return Fields(data, starts, ends, np.ones(len(texts), dtype=np.bool_))


_FINDERS = {"csv": _csv, "parquet": _parquet, "json": _json}
