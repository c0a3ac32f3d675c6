"""Parquet and CSV files, alone or by the folder, as rows to load."""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.storage._duckdb import connect, quoted
from headrace.storage.encodings import not_utf8
from headrace.storage.errors import InputError
from headrace.storage.format.columns import fixed_type
from headrace.storage.read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import duckdb
    import pyarrow.parquet as pq

__all__ = ["Rows", "open_files"]

_PARQUET = (".parquet", ".pq")
_CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst")
_BATCH_ROWS = 1 << 17
_NARROW_BYTES = 16
_PART_ROWS = 1 << 19
_THREADS = 2
_READ_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20
_CAUSE_LINES = 3
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they come.

    Attributes
    ----------
    name
        What to call them in messages.
    schema
        Of the source.
    read
        Gives all batches; can be called again only if `again`.
    again
        Whether the source can be read more than once.
    query
        What DuckDB calls the rows, if it can read them by itself.
    files
        That the rows come from.
    """

    name: str
    schema: pa.Schema
    read: Callable[[Sequence[str] | None], Generator[pa.RecordBatch]]
    again: bool = True
    query: str | None = None
    files: Sequence[Path] = ()


def open_files(paths: Sequence[Path]) -> Rows:
    """Return the rows of files and folders.

    Parameters
    ----------
    paths
        Parquet or CSV files (by their suffix), or folders that hold such files at any depth; names that begin with
        a dot or an underscore are passed over in folders. In a CSV an empty field is null, and ``""`` an empty text.

    Raises
    ------
    InputError
        If a path is missing or cannot be read, a folder holds no such file, or both formats occur.
    """
    files = [file for path in paths for file in _files_of(path)]
    formats = {_format_of(file) for file in files}
    if len(formats) > 1:
        raise InputError(f"{paths[0]} holds both Parquet and CSV files; load one format at a time")
    return _parquet(files) if formats == {"parquet"} else _csv(files)


def _files_of(path: Path) -> list[Path]:
    try:
        if path.is_file():
            with path.open("rb"):
                return [path]
        if not path.is_dir():
            raise InputError(f"there is no file or folder {path}; correct the path")
        found = sorted(file for file in _walk(path) if _wanted(file, path))
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror}; check the permissions") from error
    if not found:
        raise InputError(f"the folder {path} holds no Parquet or CSV file")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder; one that cannot be listed is an error, not an empty folder."""

    def refuse(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(base) / name for name in names)


def _wanted(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return not hidden and file.name.lower().endswith(_PARQUET + _CSV) and file.is_file()


def _format_of(file: Path) -> str:
    name = file.name.lower()
    if name.endswith(_PARQUET):
        return "parquet"
    if name.endswith(_CSV):
        return "csv"
    raise InputError(f"{file} is neither Parquet nor CSV by its name ({', '.join(_PARQUET + _CSV)})")


def _quoted(files: Sequence[Path]) -> str:
    """Return a list of files as DuckDB takes it, which would read a pattern in a name."""
    names = (_GLOB.sub(r"[\g<0>]", str(file)).replace("'", "''") for file in files)
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


def _name(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _parquet(files: Sequence[Path]) -> Rows:
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded only for files

    schemas = []
    for file in files:
        with _named(file):
            schemas.append(pq.read_schema(file).remove_metadata())
    try:
        schema = pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise InputError(f"the files of {files[0].parent} do not have the same columns: {error}") from error

    def read(columns: Sequence[str] | None) -> Generator[pa.RecordBatch]:
        names = schema.names if columns is None else list(columns)
        wanted = pa.schema([schema.field(name) for name in names])
        parts = (part for file in files for part in _parquet_parts(file, wanted))
        yield from read_ahead(parts, _bytes_of, threads=_THREADS)

    query = f"read_parquet({_quoted(files)}, union_by_name=true, hive_partitioning=false)"
    return Rows(_name(files), schema, read, query=query, files=files)


def _parquet_parts(file: Path, wanted: pa.Schema) -> Iterator[Callable[[], Generator[pa.RecordBatch]]]:
    """Give what reads the row groups of a file, small ones together."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded only for files

    with _named(file):
        metadata = pq.read_metadata(file)
    groups: list[int] = []
    rows = 0
    for group in range(metadata.num_row_groups):
        groups.append(group)
        rows += metadata.row_group(group).num_rows
        if rows >= _PART_ROWS or group == metadata.num_row_groups - 1:
            yield functools.partial(_parquet_batches, file, metadata, groups, wanted)
            groups, rows = [], 0


def _parquet_batches(
    file: Path, metadata: pq.FileMetaData, groups: list[int], wanted: pa.Schema
) -> Generator[pa.RecordBatch]:
    """Yield the wanted columns of row groups of one file; those that it lacks are null.

    Without a pre-buffer and with small buffers: the memory is that of a batch, not of a row group or the file.
    Columns are decoded at once only where there is but one part: parts at once keep all cores busier.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded only for files

    alone = len(groups) == metadata.num_row_groups
    with (
        _named(file),
        pq.ParquetFile(file, metadata=metadata, pre_buffer=False, buffer_size=_READ_BYTES) as opened,
    ):
        there = [name for name in wanted.names if name in opened.schema_arrow.names]
        for batch in opened.iter_batches(_batch_rows(wanted), groups, there, use_threads=alone):
            arrays = [
                batch.column(field.name).cast(field.type)
                if field.name in there
                else pa.nulls(batch.num_rows, field.type)
                for field in wanted
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _batch_rows(wanted: pa.Schema) -> int:
    """Return how many rows a batch has: narrow ones twice as many, as each batch costs a change of threads."""
    kinds = (fixed_type(field.type) for field in wanted)
    width = sum(math.inf if kind is None else kind.width for kind in kinds)
    return 2 * _BATCH_ROWS if width <= _NARROW_BYTES else _BATCH_ROWS


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in what Arrow says of it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot read {file} as Parquet: {error}") from error


def _bytes_of(batch: pa.RecordBatch) -> int:
    return int(batch.nbytes)


def _csv(files: Sequence[Path]) -> Rows:
    import duckdb  # noqa: PLC0415 - loaded only for CSV

    headers = [_header(file) for file in files]
    options = (
        f"{_dialect(headers[0])}, header=true, skip=0, sample_size=-1, allow_quoted_nulls=false, "
        "union_by_name=true, hive_partitioning=false"
    )
    query = f"read_csv({_quoted(files)}, {options})"
    refused = (duckdb.Error, pa.ArrowException, OSError)  # what DuckDB finds late comes through Arrow

    def read(columns: Sequence[str] | None) -> Generator[pa.RecordBatch]:
        chosen = "*" if columns is None else ", ".join(quoted(name) for name in columns)
        with connect() as connection:
            try:
                yield from read_ahead([lambda: _csv_batches(connection, f"SELECT {chosen} FROM {query}")], _bytes_of)  # noqa: S608 - quoted
            except refused as error:
                cause = _other_encoding(files) or _cause(error)
                raise InputError(f"cannot read {_name(files)} as CSV: {cause}") from error

    with connect() as connection:
        try:
            schema = connection.sql(f"FROM {query} LIMIT 0").to_arrow_table().schema
        except duckdb.Error as error:
            found = (_ragged_line(connection, file, header) for file, header in zip(files, headers, strict=True))
            cause = _other_encoding(files) or next((text for text in found if text), _cause(error))
            raise InputError(f"cannot read {_name(files)} as CSV: {cause}") from error
    return Rows(_name(files), schema, read, query=query, files=files)


def _csv_batches(connection: duckdb.DuckDBPyConnection, query: str) -> Generator[pa.RecordBatch]:
    yield from connection.sql(query).to_arrow_reader(_BATCH_ROWS)


def _other_encoding(files: Sequence[Path]) -> str | None:
    """Return where the first file that is not UTF-8 is not."""
    found = ((file, not_utf8(file)) for file in files)
    return next((f"{file}: {place}" for file, place in found if place), None)


def _header(file: Path) -> str:
    with contextlib.ExitStack() as stack:
        if file.suffix == ".gz":
            line = stack.enter_context(gzip.open(file)).readline(_HEADER_BYTES)
        elif file.suffix == ".zst":
            line = stack.enter_context(pa.input_stream(str(file), compression="zstd")).read(_HEADER_BYTES)
        else:
            line = stack.enter_context(file.open("rb")).readline(_HEADER_BYTES)
    header = line.split(b"\n")[0].decode("utf-8", errors="replace").strip()
    if not header:
        raise InputError(f"{file} does not begin with a line of column names")
    return header


def _delimiter(header: str) -> str:
    """Return the delimiter that occurs most in a header; a guess from the rows would be led astray by ragged ones."""
    return max((",", ";", "\t", "|"), key=header.count)


def _dialect(header: str) -> str:
    return f"delim='{_delimiter(header)}', quote='\"', escape='\"'"


def _ragged_line(connection: duckdb.DuckDBPyConnection, file: Path, header: str) -> str | None:
    """Return what is wrong with the first line that does not fit the header; DuckDB's guess of types names no line."""
    import duckdb  # noqa: PLC0415 - loaded only for CSV

    names = next(csv.reader([header], delimiter=_delimiter(header)))
    columns = ", ".join(f"'c{number}': 'VARCHAR'" for number in range(len(names)))
    options = f"{_dialect(header)}, header=true, auto_detect=false, columns={{{columns}}}"
    try:
        connection.sql(f"SELECT count(*) FROM read_csv({_quoted([file])}, {options})").fetchall()  # noqa: S608 - quoted
    except duckdb.Error as error:
        return _cause(error)
    return None


def _cause(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines()[:_CAUSE_LINES] if line.strip())
