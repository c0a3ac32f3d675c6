"""Any source of rows as batches in key order: Arrow in memory, streams, Parquet and CSV files.

What fits in memory is sorted there; what does not is sorted by DuckDB (`storage.external_sort`). Files that are in
order already are passed on as they come. Nothing here knows pages.
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

from headrace.storage.errors import InputError
from headrace.storage.file.backend import path_text
from headrace.storage.files import Rows, open_files
from headrace.storage.format.columns import conform, stored_schema
from headrace.storage.format.keys import KeyCodec, Keys
from headrace.storage.read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    _Batch = tuple[pa.RecordBatch, Keys | None]

__all__ = ["NotInOrderError", "SortedRows", "Source", "sorted_rows"]

Paths: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = (
    "pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch] | Paths | Sequence[Paths]"
)

_BATCH_ROWS = 1 << 17
_TAKE_ROWS = 1 << 19
_SORT_COPIES = 4


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in key order.

    Attributes
    ----------
    schema
        In stored types.
    batches
        Batches of that schema, with their keys where these are known already.
    hoped
        Whether nobody has looked yet if they are in order, and if no key is null.
    """

    schema: pa.Schema
    batches: Iterator[_Batch]
    hoped: bool = False


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
    hopeful: bool = False,
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
    hopeful
        Give the rows of a source that can be read again as they come.

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
        if hopeful and rows.again:
            hoped = ((conform(batch, schema), None) for batch in batches)
            cast = rows.schema.types != schema.types
            yield SortedRows(schema, _ahead(stack, hoped) if cast else hoped, hoped=True)
            return
        held, complete = _collect(batches, schema, memory)
        if complete:
            yield SortedRows(schema, _ahead(stack, _sorted_in_memory(held, schema, codec)))
            return
        if rows.again:
            held.clear()
            batches.close()
            batches = stack.enter_context(contextlib.closing(rows.read(None)))
        ordered = _sorted_on_disk(stack, rows, _first_then(held, batches), schema, codec, memory, spill)
        yield SortedRows(schema, _ahead(stack, ordered))


def _ahead(stack: contextlib.ExitStack, batches: Generator[_Batch]) -> Iterator[_Batch]:
    """Give batches that a thread makes, and waits for no longer than the stack lasts."""
    return stack.enter_context(contextlib.closing(read_ahead([lambda: batches], lambda item: int(item[0].nbytes))))


def _sorted_on_disk(
    stack: contextlib.ExitStack,
    rows: Rows,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    codec: KeyCodec,
    memory: int,
    spill: Path,
) -> Generator[_Batch]:
    from headrace.storage.external_sort import sort_externally  # noqa: PLC0415 - DuckDB is loaded only for large sources

    ordered = stack.enter_context(sort_externally(rows, batches, schema, codec, memory, spill))
    return ((batch, None) for batch in ordered)


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
