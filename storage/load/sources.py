"""Any source of rows as batches in key order: Arrow in memory, streams, Parquet and CSV files.

What fits in memory is sorted there; what does not is sorted by DuckDB, which spills to disk within a memory limit.
Types that DuckDB would change (instants with a zone, nanoseconds, durations, half floats) pass through it as the
integers that they are stored as. Files that are in order already are passed on as they come. Knows nothing about pages.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from headrace.storage.errors import InputError, KeyInputError
from headrace.storage.file.backend import path_text
from headrace.storage.file.read_ahead import read_ahead
from headrace.storage.file.temporary_files import scratch_folder
from headrace.storage.format.coercion import conform
from headrace.storage.format.columns import stored_schema
from headrace.storage.format.keys import KeyCodec, Keys
from headrace.storage.load.files import Rows, open_files

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import duckdb

    _Batch = tuple[pa.RecordBatch, Keys | None]

__all__ = ["LEAST_MEMORY", "NotInOrderError", "SortedRows", "Source", "sorted_rows"]

Paths: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = (
    "pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch] | Paths | Sequence[Paths]"
)

_BATCH_ROWS = 1 << 17
_TAKE_ROWS = 1 << 19
_SORT_COPIES = 4
LEAST_MEMORY = 128 << 20  # DuckDB needs as much to sort on disk


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in key order.

    Attributes
    ----------
    schema
        In stored types.
    batches
        Batches of that schema, with their keys where these are known already.
    checked
        Whether the rows are known to be in order and no key is null.
    """

    schema: pa.Schema
    batches: Iterator[_Batch]
    checked: bool = True


class NotInOrderError(InputError):
    """The rows of a source are not in key order. Never leaves a build, which sorts them then."""


@contextlib.contextmanager
def sorted_rows(
    source: Source,
    key: Sequence[str],
    memory: int,
    spill: Path,
    target: Path | None = None,
    *,
    assume_sorted: bool = False,
) -> Iterator[SortedRows]:
    """Give the rows of a source in key order, for as long as the context lasts.

    Parameters
    ----------
    source
        See `Table.build`.
    key
        Names of the key columns.
    memory
        Bytes that sorting may take.
    spill
        Folder for what does not fit.
    target
        File that the rows are to replace, which must not be one of the source's.
    assume_sorted
        Give the rows of a source that can be read again as they come, without a check.

    Raises
    ------
    InputError
        If the source cannot be read, is the target, has no key column of that name, or a key is null.
    """
    rows = _rows_of(source)
    if target is not None and target.exists() and any(target.samefile(file) for file in rows.files):
        raise InputError(f"{target} is the source itself, which the table would replace; name another file")
    schema = stored_schema(rows.schema, key)
    codec = KeyCodec(schema, key)
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(rows.read(None)))
        if assume_sorted and rows.again:
            unchecked = ((conform(batch, schema), None) for batch in batches)
            cast = rows.schema.types != schema.types
            yield SortedRows(schema, _ahead(stack, unchecked) if cast else unchecked, checked=False)
            return
        held, complete = _collect(batches, schema, memory)
        if complete:
            yield SortedRows(schema, _ahead(stack, _sorted_in_memory(held, schema, codec)))
            return
        if rows.again:
            held.clear()
            batches.close()
            batches = stack.enter_context(contextlib.closing(rows.read(None)))
        config = {"memory_limit": f"{max(memory, LEAST_MEMORY)}B"}
        config["temp_directory"] = str(stack.enter_context(scratch_folder(spill)))
        connection = stack.enter_context(connect(config))
        unsorted = _Unsorted(_first_then(held, batches), schema, codec)
        yield SortedRows(schema, _ahead(stack, _sorted_on_disk(connection, rows, unsorted, schema, codec)))


def _ahead(stack: contextlib.ExitStack, batches: Generator[_Batch]) -> Iterator[_Batch]:
    """Give batches that a thread makes, and waits for no longer than the stack lasts."""
    return stack.enter_context(contextlib.closing(read_ahead([lambda: batches], lambda item: int(item[0].nbytes))))


def _first_then(held: list[pa.RecordBatch], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give held batches, each one free as soon as it is taken, then the others."""
    held.reverse()
    while held:
        yield held.pop()
    yield from batches


def _rows_of(source: Source) -> Rows:
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        table = source
        return Rows("the table", table.schema, lambda _: (batch for batch in table.to_batches(_BATCH_ROWS)))
    if isinstance(source, pa.RecordBatchReader):
        reader = source
        return Rows("the stream", reader.schema, lambda _: (batch for batch in reader), again=False)
    if isinstance(source, str | os.PathLike):
        return open_files([Path(path_text(source))])
    _refuse_unknown(source)
    items = iter(source)
    first = next(items, None)
    if first is None:
        raise InputError("the source has no batch, so its columns are unknown; give a table or a reader with a schema")
    if isinstance(first, str | os.PathLike):
        return open_files([Path(path_text(path)) for path in itertools.chain([first], items)])
    _refuse_other(first)
    return Rows("the stream", first.schema, lambda _: _only_batches(itertools.chain([first], items)), again=False)


def _refuse_unknown(source: object) -> None:
    if not isinstance(source, Iterable) or isinstance(source, Mapping) or hasattr(source, "__dataframe__"):
        raise InputError(
            "a source is a pyarrow table, a reader or iterable of record batches, or paths, not "
            f"{type(source).__name__}; convert it to a pyarrow table"
        )


def _only_batches(items: Iterable[object]) -> Generator[pa.RecordBatch]:
    for item in items:
        _refuse_other(item)
        yield item


def _refuse_other(item: object) -> None:
    if not isinstance(item, pa.RecordBatch):
        raise InputError(f"a source is made of record batches or of paths, not of {type(item).__name__}")


def _collect(batches: Iterator[pa.RecordBatch], schema: pa.Schema, memory: int) -> tuple[list[pa.RecordBatch], bool]:
    """Take what can be sorted in memory, and say whether that is all."""
    held, size = [], 0
    for batch in batches:
        held.append(conform(batch, schema))
        size += batch.nbytes
        if _SORT_COPIES * size > memory:
            return held, False
    return held, True


def _sorted_in_memory(held: list[pa.RecordBatch], schema: pa.Schema, codec: KeyCodec) -> Generator[_Batch]:
    rows = conform(pa.Table.from_batches(held, schema=schema), schema)
    held.clear()
    keys = codec.encode(rows)
    if keys.first_descent() < 0:
        yield rows, keys
        return
    order = keys.argsort()
    for start in range(0, len(keys), _TAKE_ROWS):
        part = order[start : start + _TAKE_ROWS]
        yield rows.take(pa.array(part)), keys.take(part)


def connect(config: Mapping[str, str]) -> duckdb.DuckDBPyConnection:
    """Return a new connection to a database in memory that draws no progress bar."""
    import duckdb  # noqa: PLC0415 - loaded only for large sources

    connection = duckdb.connect(":memory:", config=dict(config))
    connection.execute("SET enable_progress_bar = false")
    return connection


def _quoted(name: str) -> str:
    """Return the name of a column as SQL takes it."""
    return '"' + name.replace('"', '""') + '"'


class _Unsorted:
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


def _sorted_on_disk(
    connection: duckdb.DuckDBPyConnection, rows: Rows, unsorted: _Unsorted, schema: pa.Schema, codec: KeyCodec
) -> Generator[_Batch]:
    """Yield the rows in key order; DuckDB reads the source by itself if it can, else the batches of `unsorted`."""
    import duckdb  # noqa: PLC0415 - loaded only for large sources

    relation, names = _relation(rows, schema), {name: name for name in schema.names}
    if relation is None:
        connection.register("source", unsorted.reader())
        relation, names = "source", _carried_names(schema)
    columns = ", ".join(_quoted(name) for name in names.values())
    order = ", ".join(f"{_quoted(names[name])} NULLS FIRST" for name in codec.columns)
    query = f"SELECT {columns} FROM {relation} ORDER BY {order}"  # noqa: S608 - names are quoted
    try:
        reader = connection.sql(query).to_arrow_reader(_BATCH_ROWS)
        while (batch := next(reader, None)) is not None:
            batch = _restored(batch, schema)
            for name in codec.columns:
                if batch.column(name).null_count:
                    _refuse_null_of(rows, name)
            yield batch, None
    except (duckdb.Error, pa.ArrowException, OSError) as error:  # what DuckDB finds late comes through Arrow
        if unsorted.error is not None:
            raise unsorted.error from None
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
        raise KeyInputError.of_row(
            row,
            lambda place: (
                f"key column {name!r} is null, but a key never is ({place}); leave such rows out or give them one"
            ),
        )
