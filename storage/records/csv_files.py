"""CSV as RFC 4180 has it: the heading, and blocks of text as records."""

from __future__ import annotations

import csv
import difflib
import functools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.storage.errors import RecordFileError
from headrace.storage.records import _csv_kernels as kernels
from headrace.storage.records._value_kernels import equal_fields
from headrace.storage.records.records import Records, Rejections
from headrace.storage.records.sources import BlockReader, is_utf8, open_text, reading
from headrace.storage.records.values import Fields, convert, decoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.records.formats import RecordFormat, StrPath
    from headrace.storage.records.pieces import Piece

__all__ = [
    "CsvBlock",
    "block_fields",
    "column_places",
    "csv_blocks",
    "csv_records",
    "dialect",
    "heading_text",
    "read_heading",
]

_ROWS = (1 << 16) - 40  # no power of two: columns would share lines of the processor's cache
_LEAST_ROWS = 1 << 10
_FIELDS = 1 << 19
_NOT_ASCII = 0x80
_OTHER_FILES = {
    b"\x1f\x8b": "it is a gzip archive; end its name in .gz",
    b"BZh": "it is a bzip2 archive; end its name in .bz2",
    b"\x28\xb5\x2f\xfd": "it is a Zstandard archive; end its name in .zst",
    b"PK\x03\x04": "it is a ZIP archive or a spreadsheet; unpack it, or save it as CSV",
    b"\xff\xfe": "it is UTF-16; declare `encoding: utf-16`",
    b"\xfe\xff": "it is UTF-16; declare `encoding: utf-16`",
}
_OTHER_ENCODING = "declare the file's encoding, or convert it, for instance with: iconv -f WINDOWS-1252 -t UTF-8"


def dialect(form: RecordFormat) -> tuple[int, int, int]:
    """Return delimiter, quote and escape as bytes, -1 for none."""
    quote = ord(form.quote) if form.quote else -1
    return ord(form.delimiter), quote, ord(form.escape) if form.escape else quote


def read_heading(path: StrPath, form: RecordFormat) -> list[str] | None:
    """Return the names in the first record of a file, or None if it has no record.

    Raises
    ------
    RecordFileError
        If the heading cannot be read.
    """
    with open_text(path, form) as source:
        reader = BlockReader(source)
        return None if _heading_end(reader, path, form) is None else _names(reader, path, form)


def heading_text(path: StrPath, form: RecordFormat) -> str | None:
    """Return the first record of a file as text, or None if it has no record.

    Raises
    ------
    RecordFileError
        If the heading cannot be read.
    """
    with reading(path, form.kind), open_text(path, form) as source:
        reader = BlockReader(source)
        end = _heading_end(reader, path, form)
        return None if end is None else decoded(reader.data[reader.position : end]).strip("\r\n")


def _heading_end(reader: BlockReader, path: StrPath, form: RecordFormat) -> int | None:
    """Return where the first record ends in the reader's buffer, which holds all of it then."""
    while True:
        records, end, state = kernels.count_records(
            reader.data, reader.position, reader.size, reader.final, *dialect(form), 1, reader.marks
        )
        if records:
            return int(end)
        if state == kernels.UNCLOSED:
            raise RecordFileError(f"{path}: the heading has a quote that is never closed; the file may be cut")
        if reader.final:
            return None
        reader.position = end
        reader.fill()


def _names(reader: BlockReader, path: StrPath, form: RecordFormat) -> list[str]:
    end = _heading_end(reader, path, form)
    raw = bytes(reader.data[reader.position : end]).strip(b"\r\n")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordFileError(
            f"{path}: the heading is not {form.encoding} (byte 0x{raw[error.start]:02x} at {error.start + 1}); "
            + next((remedy for mark, remedy in _OTHER_FILES.items() if raw.startswith(mark)), _OTHER_ENCODING)
        ) from error
    doubled = form.escape in {None, form.quote}
    escape = None if doubled else form.escape
    lines = csv.reader(
        [text],
        delimiter=form.delimiter,
        quotechar=form.quote or None,
        escapechar=escape,
        doublequote=doubled,
        quoting=csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        return next(iter(lines))
    except csv.Error as error:
        raise RecordFileError(f"{path}: the heading {text!r} cannot be read: {error}; correct its quotes") from error


def column_places(
    found: Sequence[str], wanted: Sequence[str], form: RecordFormat, path: StrPath, what: str = "heading"
) -> list[int | None]:
    """Return where each wanted column is among those found, None for one that may be missing and is.

    Raises
    ------
    RecordFileError
        If a column is missing, not known or there twice; the message names the file, and both lists.
    """
    problems = [f"column {name!r} is there {count} times" for name, count in Counter(found).items() if count > 1]
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    if form.missing_fields == "error":
        problems += [f"column {name!r} is missing{_like(name, extra)}" for name in missing]
    if not form.ignores_unknown:
        problems += [f"column {name!r} is not declared" for name in extra]
    if problems:
        raise RecordFileError(
            f"{path}: {'; '.join(problems)}. Its {what}: {_listed(found)}; expected: {_listed(wanted)}"
        )
    return [found.index(name) if name in found else None for name in wanted]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name if name.isprintable() and name else repr(name) for name in names)


def _like(name: str, extra: Sequence[str]) -> str:
    alike = [other for other in extra if other.strip().casefold() == name.casefold()]
    alike = alike or difflib.get_close_matches(name, extra, n=1)
    return f" (there is {alike[0]!r})" if alike else ""


@dataclass(frozen=True)
class CsvBlock:
    """Records of one block: fields by column and record, bounds of records, what is wrong with them."""

    data: NDArray[np.uint8]
    records: int
    starts: NDArray[np.int32]
    stops: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    bounds: NDArray[np.int32]
    faults: NDArray[np.uint8]
    counts: NDArray[np.int32]

    def text(self, record: int) -> str:
        """Return a record as it came; bytes that are not UTF-8 in hexadecimal."""
        return decoded(self.data[self.bounds[0, record] : self.bounds[1, record]])

    def raw(self, record: int) -> bytes:
        """Return the bytes of a record as it came, in UTF-8 if the file has another encoding."""
        return bytes(self.data[self.bounds[0, record] : self.bounds[1, record]])


def csv_blocks(piece: Piece, form: RecordFormat, columns: int) -> Iterator[CsvBlock]:
    """Yield the records of a piece, which has so many columns; each block is valid until the next one.

    Raises
    ------
    RecordFileError
        If the file cannot be read, or a quote is never closed.
    """
    rows = max(_LEAST_ROWS, min(_ROWS, _FIELDS // max(columns, 1)))
    starts, stops = (np.zeros((columns, rows), dtype=np.int32) for _ in range(2))
    kinds = np.zeros((columns, rows), dtype=np.uint8)
    bounds = np.zeros((2, rows), dtype=np.int32)
    faults, counts = np.zeros(rows, dtype=np.uint8), np.zeros(rows, dtype=np.int32)
    done = piece.first_record - 1
    with open_text(piece.path, form) as source:
        reader = BlockReader(source, piece.start, piece.stop)
        if form.header and piece.start == 0:
            end = _heading_end(reader, piece.path, form)
            if end is None:
                return
            reader.position = end
        while True:
            records, reader.position, state = kernels.split_fields(
                reader.data,
                reader.position,
                reader.size,
                reader.final,
                *dialect(form),
                starts,
                stops,
                kinds,
                bounds,
                faults,
                counts,
                reader.marks,
            )
            if records:
                yield CsvBlock(
                    reader.data,
                    records,
                    starts[:, :records],
                    stops[:, :records],
                    kinds[:, :records],
                    bounds[:, :records],
                    faults[:records],
                    counts[:records],
                )
            done += records
            if state == kernels.UNCLOSED:
                raise RecordFileError(_unclosed(piece.path, done + 1, reader))
            if records < rows:
                if reader.final:
                    return
                reader.fill()


def _unclosed(path: StrPath, number: int, reader: BlockReader) -> str:
    begin = bytes(reader.data[reader.position : min(reader.position + 60, reader.size)]).decode("utf-8", "replace")
    return (
        f"{path}: record {number} opens a quote that is never closed, so that all that follows belongs to it; close "
        f"the quote, or deliver the file again if it was cut. The record begins with {begin.splitlines()[0]!r}"
    )


def csv_records(piece: Piece, form: RecordFormat) -> Iterator[Records]:
    """Yield the records of a piece of a CSV; see `read_records`."""
    assert form.columns is not None
    names = form.columns.names
    heading = read_heading(piece.path, form) if form.header else names
    if heading is None:
        return
    places = column_places(heading, names, form, piece.path)
    number = piece.first_record
    for block in csv_blocks(piece, form, len(heading)):
        yield _records(block, form, places, heading, number)
        number += block.records


def _records(block: CsvBlock, form: RecordFormat, places: list[int | None], heading: list[str], number: int) -> Records:
    assert form.columns is not None
    rejected = Rejections()
    _refuse_undecoded(block, form, heading, rejected)
    _refuse_broken(block, form, len(heading), rejected)
    columns = []
    for field, place in zip(form.columns, places, strict=True):
        if place is None:
            columns.append(pa.nulls(block.records, field.type))
            continue
        fields = block_fields(block, place, form)
        converted = convert(fields, field.type, form)
        for row in np.flatnonzero(converted.rules):
            text = fields.text(int(row))
            reason = converted.reasons[int(converted.rules[row])]
            rejected.add(int(row), field.name, text, reason if text else f"{reason}; leave the field empty for null")
        columns.append(converted.values)
    rows = pa.RecordBatch.from_arrays(columns, schema=form.columns)
    return Records(rows, pa.array(np.arange(number, number + block.records)), rejected.table())


def block_fields(block: CsvBlock, place: int, form: RecordFormat) -> Fields:
    """Return the fields of one column of a block, quotes unescaped in place and declared nulls left out."""
    starts, stops, kinds = block.starts[place], block.stops[place], block.kinds[place]
    escape = dialect(form)[2]
    if escape >= 0:
        kernels.unescape_quotes(block.data, starts, stops, kinds, escape)
    for spelling in _spellings(form.nulls):
        equal_fields(block.data, starts, stops, spelling, kinds, kernels.PLAIN, kernels.NULL)
    return Fields(block.data, starts, stops, kinds != kernels.NULL)


@functools.lru_cache(maxsize=64)
def _spellings(nulls: tuple[str, ...]) -> list[NDArray[np.uint8]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in nulls if text]


def _refuse_undecoded(block: CsvBlock, form: RecordFormat, heading: list[str], rejected: Rejections) -> None:
    """Reject records with bytes that are not in the encoding, naming the column."""
    for record, place in undecoded(block.data, block.bounds, block.records):
        inside = np.flatnonzero((block.starts[:, record] <= place) & (place < block.stops[:, record]))
        column = value = None
        if len(inside):
            column = heading[inside[0]]
            value = decoded(block.data[block.starts[inside[0], record] : block.stops[inside[0], record]])
        rejected.add(record, column, value, encoding_reason(int(block.data[place]), form))
        block.kinds[:, record] = kernels.NULL
        block.faults[record] = 0


def encoding_reason(byte: int, form: RecordFormat) -> str:
    """Return what is wrong with a byte."""
    if is_utf8(form.encoding):
        return f"is not UTF-8 (byte 0x{byte:02x}); declare the file's encoding if it has another one"
    return f"has a byte that {form.encoding} does not know"


def undecoded(data: NDArray[np.uint8], bounds: NDArray[np.int32], records: int) -> list[tuple[int, int]]:
    """Return the records with a byte that is not UTF-8, and where it is."""
    first, last = int(bounds[0, 0]), int(bounds[1, records - 1])
    if last <= first or data[first:last].max() < _NOT_ASCII:
        return []
    places = np.empty(records, dtype=np.int32)
    if not kernels.check_utf8(data, bounds[0], bounds[1], places):
        return []
    return [(int(record), int(places[record])) for record in np.flatnonzero(places >= 0)]


def _refuse_broken(block: CsvBlock, form: RecordFormat, columns: int, rejected: Rejections) -> None:
    """Reject records that are not well formed."""
    for record in np.flatnonzero(block.faults):
        if block.faults[record] & kernels.BAD_QUOTE:
            reason = (
                f"a quote ({form.quote}) is inside a field that is not quoted, or text follows a closing quote; quote "
                "the field, and double each quote within it"
            )
        else:
            where = "the heading" if form.header else "the schema"
            count = int(block.counts[record])
            many = f"quote a field that holds {form.delimiter!r}"
            few = "write every field, an empty one for null, and quote a field that holds a line break"
            remedy = many if count > columns else few
            reason = f"{count} field{'s' if count != 1 else ''} where {where} has {columns}; {remedy}"
        rejected.add(int(record), None, None, reason)
