"""Rows that do not fit in memory, brought into key order by DuckDB, which spills to disk within a memory limit.

Types that DuckDB would change on the way (instants with a zone, nanoseconds, durations, half floats) travel as the
integers they are stored as.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.storage._duckdb import connect, quoted
from headrace.storage.errors import InputError, KeyInputError
from headrace.storage.file.temporary_files import scratch_folder
from headrace.storage.format.columns import conform

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import duckdb

    from headrace.storage.files import Rows
    from headrace.storage.format.keys import KeyCodec

__all__ = ["LEAST_MEMORY", "sort_externally"]

LEAST_MEMORY = 128 << 20
_BATCH_ROWS = 1 << 17


class _Source:
    """The batches as DuckDB pulls them; keeps the error that stopped them, which DuckDB would flatten to text."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema, codec: KeyCodec) -> None:
        self._batches = batches
        self._schema = schema
        self._codec = codec
        self.error: Exception | None = None

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(_carried_schema(self._schema), self._pull())

    def _pull(self) -> Iterator[pa.RecordBatch]:
        row = 0
        try:
            for batch in self._batches:
                for name in self._codec.columns:
                    _refuse_null(batch.column(name), name, row)
                row += batch.num_rows
                yield _carried(conform(batch, self._schema))
        except Exception as error:
            self.error = error
            raise


@contextlib.contextmanager
def sort_externally(
    rows: Rows, batches: Iterator[pa.RecordBatch], schema: pa.Schema, codec: KeyCodec, memory: int, spill: Path
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Give the rows in key order, in the stored schema, for as long as the context lasts.

    Parameters
    ----------
    rows
        The source; DuckDB reads it by itself if it can.
    batches
        Its batches, for when DuckDB cannot.
    memory
        Limit for DuckDB, at least `LEAST_MEMORY`.
    spill
        Folder in which a temporary folder is made.

    Raises
    ------
    KeyInputError
        If a key is null.
    InputError
        If the source cannot be read.
    """
    with scratch_folder(spill) as folder:
        config = {"memory_limit": f"{max(memory, LEAST_MEMORY)}B", "temp_directory": str(folder)}
        with connect(config) as connection:
            source = _Source(batches, schema, codec)
            relation, names = _relation(rows, schema), {name: name for name in schema.names}
            if relation is None:
                connection.register("source", source.reader())
                relation, names = "source", _carried_names(schema)
            columns = ", ".join(quoted(name) for name in names.values())
            order = ", ".join(f"{quoted(names[name])} NULLS FIRST" for name in codec.columns)
            query = f"SELECT {columns} FROM {relation} ORDER BY {order}"  # noqa: S608 - names are quoted
            yield _ordered(connection, query, rows, source, schema, codec)


def _ordered(
    connection: duckdb.DuckDBPyConnection, query: str, rows: Rows, source: _Source, schema: pa.Schema, codec: KeyCodec
) -> Iterator[pa.RecordBatch]:
    import duckdb  # noqa: PLC0415 - loaded only for large sources

    try:
        reader = connection.sql(query).to_arrow_reader(_BATCH_ROWS)
        while (batch := next(reader, None)) is not None:
            batch = _restored(batch, schema)
            for name in codec.columns:
                if batch.column(name).null_count:
                    _refuse_null_of(rows, name)
            yield batch
    except (duckdb.Error, pa.ArrowException, OSError) as error:  # what DuckDB finds late comes through Arrow
        if source.error is not None:
            raise source.error from None
        raise InputError(f"cannot sort {rows.name}: {str(error).splitlines()[0]}") from error


def _relation(rows: Rows, schema: pa.Schema) -> str | None:
    """Return what DuckDB can read without changing any value, or None."""
    distinct = len({name.casefold() for name in schema.names}) == len(schema)
    return rows.query if distinct and all(_carrier(field.type) == field.type for field in schema) else None


def _carrier(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_float16(dtype):
        return pa.uint16()
    if dtype == pa.timestamp("us"):
        return dtype
    if pa.types.is_time32(dtype):
        return pa.int32()
    if pa.types.is_date64(dtype) or pa.types.is_timestamp(dtype) or pa.types.is_time(dtype):
        return pa.int64()
    return pa.int64() if pa.types.is_duration(dtype) else dtype


def _carried_names(schema: pa.Schema) -> dict[str, str]:
    """Return names that differ by more than their case, for DuckDB takes k and K for one."""
    return {name: f"c{number}" for number, name in enumerate(schema.names)}


def _carried_schema(schema: pa.Schema) -> pa.Schema:
    names = _carried_names(schema)
    return pa.schema([pa.field(names[field.name], _carrier(field.type)) for field in schema])


def _carried(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [array.view(_carrier(array.type)) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=_carried_schema(batch.schema))


def _restored(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for array, field in zip(batch.columns, schema, strict=True):
        carrier = _carrier(field.type)
        carried = array if array.type == carrier else array.cast(carrier)
        arrays.append(carried.view(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _refuse_null_of(rows: Rows, name: str) -> None:
    """Name the first null of a column that DuckDB read by itself: where it was is lost in the sorted rows."""
    row = 0
    with contextlib.closing(rows.read([name])) as batches:
        for batch in batches:
            _refuse_null(batch.column(0), name, row)
            row += batch.num_rows
    raise InputError(f"{rows.name} changed while it was read; load it again")


def _refuse_null(column: pa.Array, name: str, first_row: int) -> None:
    if column.null_count:
        row = first_row + column.is_null().index(pa.scalar(value=True)).as_py()
        raise KeyInputError(
            f"key column {name!r} is null, but a key never is (row {row}); leave such rows out or give them one"
        )
