"""Rows and changes of a Delta table, read without Spark, with the same values that Spark reads.

There are three readers, because none reads every table exactly. Arrow's dataset reads plain tables, and Spark's INT96
timestamps over their whole range. DataFusion's scan reads column mapping, deletion vectors, v2 checkpoints and decimal
partition columns, but it wraps INT96 timestamps outside the years 1677 to 2262. It is not used if the statistics do not
rule out such timestamps.
`headrace.pipelines.delta.live_files` reads local tables whose only such feature is deletion vectors.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltalake import DeltaTable
    from pyarrow.fs import SubTreeFileSystem

__all__ = ["SCANNED_FEATURES", "feed_is_exact", "has_only_vectors", "physical_name", "plain_schema", "scan_table"]

SCANNED_FEATURES: Final = frozenset({"columnMapping", "deletionVectors", "v2Checkpoint", "variantType"})
_NANOSECONDS: Final = ("1677-09-22", "2262-04-11")
_PHYSICAL_NAME: Final = "delta.columnMapping.physicalName"


def scan_table(table: DeltaTable, columns: Sequence[str]) -> pa.RecordBatchReader:
    """Return the given columns of all rows of a table as a stream of batches, in no particular order.

    Parameters
    ----------
    table
        Table, opened at the version to read.
    columns
        Names of columns. Each must be a column of the table.

    Raises
    ------
    DeltaTableError
        If the table may hold timestamps that the reader would change.
    """
    schema = plain_schema(pa.schema(table.schema().to_arrow()))
    wanted = pa.schema([schema.field(name).remove_metadata() for name in columns])
    if _needs_scan(table) and not has_only_vectors(table):
        _refuse_far_times(table, wanted)
    return pa.RecordBatchReader.from_batches(wanted, _batches(table, wanted))


def feed_is_exact(table: DeltaTable, first: int, last: int, columns: Sequence[str]) -> bool:
    """Return whether `load_cdf` returns the changes of a range of versions exactly as Spark does.

    `load_cdf` changes INT96 timestamps outside the years 1677 to 2262. If a file may hold such a timestamp in a column
    that is read, the caller must read the whole table instead.

    Parameters
    ----------
    table
        Table to read.
    first, last
        First and last version of the range, inclusive.
    columns
        Names of the columns to read.
    """
    schema = pa.schema(table.schema().to_arrow())
    if not any(name in schema.names and pa.types.is_timestamp(schema.field(name).type) for name in columns):
        return True
    store = _file_system(table)
    return not any(_has_int96(store, path) for version in range(first, last + 1) for path in _files_of(store, version))


def physical_name(table: DeltaTable, column: str) -> str:
    """Return the name of a column in the table's files and statistics."""
    for field in table.schema().fields:
        if field.name == column:
            return str(field.metadata.get(_PHYSICAL_NAME, column))
    return column


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema with plain text and binary types instead of view types and large types."""
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    return kind


def _batches(table: DeltaTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches with the given schema; an error names the table and the version."""
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - heavy

    try:
        if has_only_vectors(table):
            yield from _live_rows(table, schema)
            return
        for batch in _reader(table, schema.names):
            yield _as(batch, schema)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise DeltaTableError(
            f"the Delta table {table.table_uri} cannot be read at version {table.version()}: {error}; restore its "
            "files, or drop the feature that the message names (ALTER TABLE ... DROP FEATURE ...)"
        ) from error


def has_only_vectors(table: DeltaTable) -> bool:
    """Return whether a local table has deletion vectors, and nothing else that Arrow's dataset does not read."""
    features = set(table.protocol().reader_features or ()) & SCANNED_FEATURES
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    local = urlsplit(table.table_uri).scheme == "file"
    return features == {"deletionVectors"} and local and not mapped and not table.metadata().partition_columns


def _live_rows(table: DeltaTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    path = unquote(urlsplit(table.table_uri).path)
    for file in LiveFiles(path).at(table.version()):
        for _, batch in read_live_file(path, file, schema):
            yield batch


def _reader(table: DeltaTable, columns: list[str]) -> pa.RecordBatchReader:
    if _needs_scan(table):
        return pa.RecordBatchReader.from_stream(table.scan(columns=columns))
    from pyarrow.dataset import ParquetReadOptions  # noqa: PLC0415 - heavy

    options = ParquetReadOptions(coerce_int96_timestamp_unit="us")
    try:
        dataset = table.to_pyarrow_dataset(filesystem=_native_file_system(table), parquet_read_options=options)
    except ValueError as error:
        raise DeltaTableError(
            f"the Delta table {table.table_uri} at version {table.version()} has bounds of a column that cannot be "
            f"read: {error}; they may be dates outside the years 1 to 9999, which have to be corrected in the table"
        ) from error
    return dataset.scanner(columns=columns).to_reader()


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [batch.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(
        [
            each if each.type == field.type else each.cast(field.type)
            for each, field in zip(columns, schema, strict=True)
        ],
        schema=schema,
    )


def _needs_scan(table: DeltaTable) -> bool:
    features = set(table.protocol().reader_features or ())
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    return mapped or bool(features & SCANNED_FEATURES) or _has_decimal_partitions(table)


def _has_decimal_partitions(table: DeltaTable) -> bool:
    """Return whether a table is partitioned by a decimal; delta-rs gives -0.50 to Arrow's dataset as `0.-50`."""
    schema = pa.schema(table.schema().to_arrow())
    return any(pa.types.is_decimal(schema.field(name).type) for name in table.metadata().partition_columns)


def _refuse_far_times(table: DeltaTable, wanted: pa.Schema) -> None:
    """Raise an error unless the statistics show that all timestamps fit into INT96 nanoseconds."""
    partitions = set(table.metadata().partition_columns)
    times = [field.name for field in wanted if pa.types.is_timestamp(field.type) and field.name not in partitions]
    if not times:
        return
    files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    for name in times:
        inner = physical_name(table, name)
        if not all(_is_near(file, inner) for file in files):
            raise DeltaTableError(
                f"the Delta table {table.table_uri} at version {table.version()}: column {name!r} may hold timestamps "
                "outside the years 1677 to 2262, or has no statistics, and with column mapping, deletion vectors, v2 "
                "checkpoints or a decimal partition column those cannot be read exactly; drop that feature (ALTER "
                "TABLE ... DROP FEATURE ...) or write the table without that partitioning, or do not use the column"
            )


def _is_near(file: dict[str, Any], column: str) -> bool:
    """Return whether a file's statistics show that a column's timestamps fit into nanoseconds, or that it has none."""
    rows, nulls = file.get("num_records"), file.get(f"null_count.{column}")
    if rows is not None and rows == nulls:
        return True
    low, high = file.get(f"min.{column}"), file.get(f"max.{column}")
    return low is not None and high is not None and str(low) > _NANOSECONDS[0] and str(high) < _NANOSECONDS[1]


def _native_file_system(table: DeltaTable) -> SubTreeFileSystem | None:
    """Return Arrow's native file system at the folder of a local table; None for a remote table.

    Otherwise deltalake passes a file system of Python objects to Arrow's threads, which can abort Python at exit.
    """
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem  # noqa: PLC0415 - heavy

    place = urlsplit(table.table_uri)
    return SubTreeFileSystem(unquote(place.path), LocalFileSystem()) if place.scheme == "file" else None


def _file_system(table: DeltaTable) -> Any:
    from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415 - heavy
    from pyarrow.fs import PyFileSystem  # noqa: PLC0415 - as above

    return PyFileSystem(DeltaStorageHandler(table.table_uri))


def _has_int96(store: Any, path: str) -> bool:
    with store.open_input_file(path) as file:
        parquet = pq.ParquetFile(file).schema
        return any(parquet.column(position).physical_type == "INT96" for position in range(len(parquet)))


def _files_of(store: Any, version: int) -> Iterator[str]:
    """Yield the files that the log entry of a version adds, or lists as change files.

    An earlier entry added the files that this entry removes. If that entry precedes the range, they are read as well.
    """
    with store.open_input_stream(f"_delta_log/{version:020}.json") as log:
        text = log.read().decode()
    for line in text.splitlines():
        entry = json.loads(line)
        for kind in ("add", "cdc", "remove"):
            if kind in entry:
                yield unquote(entry[kind]["path"])
