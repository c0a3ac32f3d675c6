"""Files of CSV, JSON lines and Parquet, alone or by the folder, as rows to load."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.storage.errors import InputError
from headrace.storage.file.read_ahead import read_ahead
from headrace.storage.format.columns import fixed_type
from headrace.storage.records import (
    COMPRESSIONS,
    SUFFIXES,
    RecordFormat,
    compression_of,
    infer_columns,
    kind_of,
    sound_batches,
    with_delimiter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import pyarrow.parquet as pq

    from headrace.storage.records import Kind

__all__ = ["Rows", "open_files"]

_TITLES = {"parquet": "Parquet", "csv": "CSV", "json": "JSON"}
_BATCH_ROWS = 1 << 17
_NARROW_BYTES = 16
_PART_ROWS = 1 << 19
_THREADS = 2
_READ_BYTES = 1 << 20
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they come.

    Attributes
    ----------
    name
        What to call them in messages.
    schema
        Schema of the source.
    read
        Gives all batches; can be called again only if `again`.
    again
        Whether the source can be read more than once.
    query
        What DuckDB calls the rows, if it can read them by itself.
    files
        Files that the rows come from.
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
        Files of Parquet, CSV or JSON lines (by their suffix), or folders that hold such files at any depth; names that
        begin with a dot or an underscore are passed over in folders. The columns of text are those of the first file,
        with types as `headrace.storage.records.infer_columns` says.

    Raises
    ------
    InputError
        If a path is missing or cannot be read, a folder holds no such file, or several formats occur.
    """
    files = [file for path in paths for file in _files_of(path)]
    kinds = {_kind_of(file) for file in files}
    if len(kinds) > 1:
        titles = " and ".join(_TITLES[kind] for kind in _TITLES if kind in kinds)
        raise InputError(f"{paths[0]} holds both {titles} files; load one format at a time")
    (kind,) = kinds
    packed = any(compression_of(file) for file in files)
    plain = kind == "parquet" and not packed and not any(map(_has_instants, files))
    return _parquet(files) if plain else _records(kind, files)


def _has_instants(file: Path) -> bool:
    """Return whether a Parquet file has timestamps of 96 bits, which Arrow and DuckDB cut or wrap."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded only for files

    with _named(file):
        schema = pq.read_metadata(file).schema
    return any(schema.column(place).physical_type == "INT96" for place in range(len(schema)))


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
        raise InputError(f"the folder {path} holds no Parquet or CSV file, and no JSON lines")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder; one that cannot be listed is an error, not an empty folder."""

    def refuse(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(base) / name for name in names)


def _wanted(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return not hidden and kind_of(file) is not None and file.is_file()


def _kind_of(file: Path) -> Kind:
    kind = kind_of(file)
    if kind is None:
        known = f"{', '.join(SUFFIXES)}, and {', '.join(COMPRESSIONS)} behind them"
        raise InputError(f"{file} is neither Parquet nor CSV by its name, nor JSON lines; name it with one of {known}")
    return kind


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


def _records(kind: Kind, files: Sequence[Path]) -> Rows:
    """Return the rows of files that are parsed as records; their columns are those of the first file."""
    form = RecordFormat(
        kind, unknown_fields="error", missing_fields="null" if kind == "json" else "error", any_year=True
    )
    if kind == "csv":
        form = with_delimiter(files[0], form)
    form = replace(form, columns=infer_columns(files[0], form))

    def batches(file: Path, columns: Sequence[str] | None) -> Generator[pa.RecordBatch]:
        for batch in sound_batches(file, form):
            yield batch if columns is None else batch.select(list(columns))

    def read(columns: Sequence[str] | None) -> Generator[pa.RecordBatch]:
        yield from read_ahead((functools.partial(batches, file, columns) for file in files), _bytes_of)

    return Rows(_name(files), form.columns, read, files=files)
