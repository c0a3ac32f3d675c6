"""Files as streams of record batches: CSV or Parquet, one file or a folder, batch by batch.

The schema is that of the first file; the others must fit it by name and type, and nothing is dropped silently. Types of
a CSV come from its first block unless the caller knows better: key columns take the type of the key they are to meet.
"""

from __future__ import annotations

import csv
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from headrace.cli.errors import InputFileError
from headrace.storage.encodings import not_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["CsvFormat", "FileStream", "open_stream", "text_columns"]

BLOCK_BYTES = 1 << 20
READ_BYTES = 1 << 16
SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".txt": "csv", ".tsv": "csv"}
PARQUET_MAGIC = b"PAR1"
WRONG_FIELDS = re.compile(
    r"Row #(?P<row>\d+): Expected (?P<wanted>\d+) columns, got (?P<fields>\d+): (?P<text>.*)", re.DOTALL
)
WRONG_VALUE = re.compile(
    r"In CSV column #(?P<column>\d+): Row #(?P<row>\d+): CSV conversion error to (?P<type>.+?): (?P<text>.*)", re.DOTALL
)


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV is read.

    Parameters
    ----------
    delimiter
        What separates fields.
    nulls
        Spellings of a missing value. A quoted one is text.
    types
        Types of columns that are known before the first row is seen.
    """

    delimiter: str = ","
    nulls: tuple[str, ...] = ("",)
    types: Mapping[str, pa.DataType] = field(default_factory=dict)


def text_columns(names: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the types of columns that are to stay text, whatever they look like."""
    return dict.fromkeys(names, pa.string())


@dataclass(frozen=True)
class FileStream:
    """Files of one kind and one schema.

    Parameters
    ----------
    files
        In the order in which they are read.
    kind
        ``"csv"`` or ``"parquet"``.
    schema
        Of every batch.
    rows
        Number of rows where the files tell it without being read, else None.
    """

    files: tuple[Path, ...]
    kind: str
    schema: pa.Schema
    rows: int | None
    _open: Callable[[Path], Iterator[pa.RecordBatch]]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows, file by file, in batches that fit in memory.

        Raises
        ------
        InputFileError
            If a file cannot be read or does not fit the first one; names the file, and the row where there is one.
        """
        for file in self.files:
            with _reading(file):
                for batch in self._open(file):
                    yield _fitted(batch, self.schema, file)


def open_stream(path: Path, *, batch_rows: int = 1 << 15, csv: CsvFormat | None = None) -> FileStream:
    """Look at the files and read their schema, not yet their rows.

    Parameters
    ----------
    path
        A file, or a folder whose files (not those beginning with ``.`` or ``_``) are all CSV or all Parquet.
    batch_rows
        Most rows in a batch of a Parquet file.
    csv
        How CSV is read.

    Raises
    ------
    InputFileError
        If there is nothing to read or it is of no known kind.
    """
    files = _files_at(path)
    kind = _kind_of(files)
    if kind == "parquet":
        return FileStream(files, kind, *_parquet_head(files), lambda file: _parquet_batches(file, batch_rows))
    form = csv or CsvFormat()
    with _reading(files[0]):
        schema = _csv_schema(files[0], form)
    known = CsvFormat(form.delimiter, form.nulls, {column.name: column.type for column in schema})
    return FileStream(files, kind, schema, None, lambda file: _csv_batches(file, known))


def _files_at(path: Path) -> tuple[Path, ...]:
    if not path.exists():
        raise InputFileError(f"there is no file or folder {path}")
    if not path.is_dir():
        return (path,)
    files = sorted(file for file in _walk(path) if not _hidden(file.relative_to(path)))
    if not files:
        raise InputFileError(f"the folder {path} holds no files; put CSV or Parquet files there")
    return tuple(files)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder; one that cannot be listed is an error, not an empty folder."""

    def refuse(error: OSError) -> None:
        raise InputFileError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    for base, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(base) / name for name in names)


def _hidden(file: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.parts)


def _kind_of(files: Sequence[Path]) -> str:
    kinds = {file: SUFFIXES.get(file.suffix.lower()) or _kind_by_content(file) for file in files}
    if len(set(kinds.values())) > 1:
        first, other = files[0], next(file for file in files if kinds[file] != kinds[files[0]])
        raise InputFileError(f"{first} is {kinds[first]} but {other} is {kinds[other]}; give files of one kind")
    return kinds[files[0]]


def _kind_by_content(file: Path) -> str:
    with file.open("rb") as handle:
        head = handle.read(len(PARQUET_MAGIC))
    if head != PARQUET_MAGIC:
        known = ", ".join(SUFFIXES)
        raise InputFileError(f"cannot tell what {file} is; name it with one of {known}")
    return "parquet"


def _parquet_head(files: Sequence[Path]) -> tuple[pa.Schema, int]:
    rows = 0
    schema = None
    for file in files:
        with _reading(file):
            found = pq.read_metadata(file)
            rows += found.num_rows
            schema = schema or found.schema.to_arrow_schema().remove_metadata()
    return schema, rows


def _parquet_batches(file: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows; without these settings Arrow would hold all of a file that is being read."""
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES) as source:
        yield from source.iter_batches(batch_rows, use_threads=False)


def _csv_schema(file: Path, form: CsvFormat) -> pa.Schema:
    with _csv_reader(file, form) as reader:
        schema, names = reader.schema, reader.schema.names
    if any(pa.types.is_binary(column.type) and column.name not in form.types for column in schema):
        _refuse_other_encoding(file)  # Arrow takes text for bytes then
    if len(set(names)) != len(names):
        raise InputFileError(f"{file} names a column twice in its first line: {', '.join(names)}")
    unknown = [name for name in form.types if name not in names]
    if unknown:
        raise InputFileError(f"{file} has no column {unknown[0]!r}; its columns are {', '.join(names)}")
    return pa.schema([column.with_type(pa.string()) if pa.types.is_null(column.type) else column for column in schema])


def _csv_batches(file: Path, form: CsvFormat) -> Iterator[pa.RecordBatch]:
    last = None
    with _csv_reader(file, form) as reader:
        for batch in reader:
            last = batch if batch.num_rows else last
            yield batch
    if last is not None and _spans_lines(last.slice(last.num_rows - 1)) and _quotes(file) % 2:
        raise InputFileError(
            f"{file} has a quote that is opened and never closed: its last record would swallow the lines after it; "
            "close the quote"
        )


def _spans_lines(row: pa.RecordBatch) -> bool:
    """Return whether a value of a row holds a line break."""
    return any("\n" in value for value in row.to_pylist()[0].values() if isinstance(value, str))


def _quotes(file: Path) -> int:
    with file.open("rb") as source:
        return sum(block.count(b'"') for block in iter(lambda: source.read(BLOCK_BYTES), b""))


@contextmanager
def _csv_reader(file: Path, form: CsvFormat) -> Iterator[pc.CSVStreamingReader]:
    """Open a CSV, and tell in the same words what row or value ends it.

    Arrow's message is taken apart. Its handler of rows would be a Python object, which one of Arrow's threads may have
    to let go of while the process ends: that aborts it.
    """
    try:
        with pc.open_csv(file, *_csv_options(form)) as reader:
            yield reader
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        _refuse_other_encoding(file)
        reason = _row_refused(str(error), form) or _value_refused(str(error), file, form)
        if reason is None:
            raise
        raise InputFileError(f"{file}, {reason}") from error


def _row_refused(message: str, form: CsvFormat) -> str | None:
    found = WRONG_FIELDS.search(message)
    return found and (
        f"record {found['row']} (the heading is record 1): {found['fields']} fields where the heading has "
        f"{found['wanted']}; quote a field that holds {form.delimiter!r}: {found['text'][:80]}"
    )


def _value_refused(message: str, file: Path, form: CsvFormat) -> str | None:
    found = WRONG_VALUE.search(message)
    return found and (
        f"record {found['row']} (the heading is record 1), column {_heading(file, form)[int(found['column'])]!r}: "
        f"{found['text'][:120]}, which is no {found['type']}; name the column in --text to keep it as text, unless it "
        "meets a key"
    )


def _heading(file: Path, form: CsvFormat) -> list[str]:
    with file.open(encoding="utf-8-sig", newline="") as source:
        return next(csv.reader(source, delimiter=form.delimiter))


def _refuse_other_encoding(file: Path) -> None:
    place = not_utf8(file)
    if place:
        raise InputFileError(f"{file}: {place}")


def _csv_options(form: CsvFormat) -> tuple[pc.ReadOptions, pc.ParseOptions, pc.ConvertOptions]:
    return (
        pc.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
        pc.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
        pc.ConvertOptions(
            column_types=dict(form.types),
            null_values=list(form.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _fitted(batch: pa.RecordBatch, schema: pa.Schema, file: Path) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    if set(batch.schema.names) != set(schema.names):
        odd = ", ".join(sorted(set(batch.schema.names) ^ set(schema.names)))
        raise InputFileError(f"{file} does not have the columns of the first file; they differ in {odd}")
    return batch.select(schema.names).cast(schema)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Name the file in whatever Arrow says of it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputFileError(f"cannot read {file}: {error}") from error
