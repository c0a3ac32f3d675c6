"""Files as streams of record batches: CSV, JSON lines or Parquet, one file or a folder, batch by batch.

The columns are those of the first file; the others must fit them by name and type, and nothing is dropped silently.
Types of text are inferred as `headrace.storage.records.infer_columns` says, unless the caller knows better: key columns
take the type of the key they are to meet.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.cli.errors import InputFileError
from headrace.storage.file import read_ahead
from headrace.storage.records import (
    COMPRESSIONS,
    SUFFIXES,
    RecordFileError,
    RecordFormat,
    compression_of,
    infer_columns,
    kind_of,
    sound_batches,
    with_delimiter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from headrace.storage.records import Kind

__all__ = ["CsvFormat", "FileStream", "kind_of", "open_stream", "text_columns"]

PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV is read.

    Parameters
    ----------
    delimiter
        What separates fields; None for the one that divides the heading into most names.
    nulls
        Spellings of a missing value, beside an empty field. A quoted one is text.
    types
        Types of columns of text that are known before the first row is seen.
    declared
        Types that columns have in files of any kind, where they are there.
    time_zone, ambiguous_time
        Zone of times that name none, and what happens to one that occurs twice in it; see `RecordFormat`.
    """

    delimiter: str | None = None
    nulls: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    declared: Mapping[str, pa.DataType] = field(default_factory=dict)
    time_zone: str = "UTC"
    ambiguous_time: Literal["reject", "earlier", "later"] = "reject"


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
        ``"csv"``, ``"json"`` or ``"parquet"``.
    schema
        Columns of every batch.
    rows
        Number of rows where the files tell it without being read, else None.
    """

    files: tuple[Path, ...]
    kind: str
    schema: pa.Schema
    rows: int | None
    _open: Callable[[Path], Iterator[pa.RecordBatch]]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows, file by file, in batches that fit in memory; a thread reads ahead.

        Raises
        ------
        InputFileError
            If a file cannot be read or does not fit the first one; names the file, and the record where there is one.
        """
        with closing(read_ahead([self._read], lambda batch: int(batch.nbytes))) as batches:
            yield from batches

    def _read(self) -> Generator[pa.RecordBatch]:
        for file in self.files:
            with _reading(file):
                yield from self._open(file)


def open_stream(path: Path, *, batch_rows: int = 1 << 15, csv: CsvFormat | None = None) -> FileStream:
    """Look at the files and find out their columns; do not read their rows yet.

    Parameters
    ----------
    path
        A file, or a folder whose files (not those beginning with ``.`` or ``_``) are all CSV, JSON lines or Parquet.
    batch_rows
        Most rows in a batch of a Parquet file.
    csv
        How text is read.

    Raises
    ------
    InputFileError
        If there is nothing to read or it is of no known kind.
    """
    files = _files_at(path)
    kind = _kind_of(files)
    form = csv or CsvFormat()
    with _reading(files[0]):
        known = _known(files[0], kind, form)
    schema = known.columns
    if kind == "parquet":
        return FileStream(files, kind, schema, _parquet_rows(files), lambda file: _sliced(file, known, batch_rows))
    return FileStream(files, kind, schema, None, lambda file: _explained(file, known))


def _known(file: Path, kind: Kind, form: CsvFormat) -> RecordFormat:
    """Return how files are read, with the columns of the first one."""
    known = RecordFormat(
        kind,
        delimiter=form.delimiter or ",",
        nulls=form.nulls,
        time_zone=form.time_zone,
        ambiguous_time=form.ambiguous_time,
        unknown_fields="error",
        missing_fields="null" if kind == "json" else "error",
        any_year=True,
    )
    if kind == "csv" and form.delimiter is None:
        known = with_delimiter(file, known)
    columns = infer_columns(file, known, {} if kind == "parquet" else form.types)
    return replace(
        known, columns=pa.schema([each.with_type(form.declared.get(each.name, each.type)) for each in columns])
    )


def _files_at(path: Path) -> tuple[Path, ...]:
    if not path.exists():
        raise InputFileError(f"there is no file or folder {path}")
    if not path.is_dir():
        return (path,)
    files = sorted(file for file in _walk(path) if not _hidden(file.relative_to(path)))
    if not files:
        raise InputFileError(f"the folder {path} holds no files; put CSV, JSON or Parquet files there")
    return tuple(files)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder; one that cannot be listed is an error, not an empty folder."""

    def refuse(error: OSError) -> None:
        raise InputFileError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    for base, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(base) / name for name in names)


def _hidden(file: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.parts)


def _kind_of(files: Sequence[Path]) -> Kind:
    kinds = {file: kind_of(file) or _kind_by_content(file) for file in files}
    if len(set(kinds.values())) > 1:
        first, other = files[0], next(file for file in files if kinds[file] != kinds[files[0]])
        raise InputFileError(f"{first} is {kinds[first]} but {other} is {kinds[other]}; give files of one kind")
    return kinds[files[0]]


def _kind_by_content(file: Path) -> Kind:
    with file.open("rb") as handle:
        head = handle.read(len(PARQUET_MAGIC))
    if head != PARQUET_MAGIC:
        known = f"{', '.join(SUFFIXES)}, and {', '.join(COMPRESSIONS)} behind them"
        raise InputFileError(f"cannot tell what {file} is; name it with one of {known}")
    return "parquet"


def _parquet_rows(files: Sequence[Path]) -> int | None:
    if any(compression_of(file) for file in files):
        return None
    rows = 0
    for file in files:
        with _reading(file):
            rows += pq.read_metadata(file).num_rows
    return rows


def _sliced(file: Path, form: RecordFormat, batch_rows: int) -> Iterator[pa.RecordBatch]:
    for batch in sound_batches(file, form):
        yield from (batch.slice(start, batch_rows) for start in range(0, batch.num_rows, batch_rows))


def _explained(file: Path, form: RecordFormat) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a text; say what can be done about a value that does not fit."""
    try:
        yield from sound_batches(file, form)
    except RecordFileError as error:
        hint = (
            "; name the column in --text to keep it as text, unless it meets a key" if ", column " in str(error) else ""
        )
        raise InputFileError(f"{error}{hint}") from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Name the file in whatever Arrow says of it."""
    try:
        yield
    except RecordFileError as error:
        raise InputFileError(str(error)) from error
    except (pa.ArrowException, OSError) as error:
        raise InputFileError(f"cannot read {file}: {error}") from error
