"""Any source of rows as batches in key order: Arrow in memory, streams, and Parquet or CSV files.

Small sources are sorted in memory; larger ones by DuckDB, which spills to disk. Sources that are in order already
are passed on as they come. Nothing here knows pages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from storage.columns import plain, stored_schema
from storage.errors import InputError
from storage.keys import KeyCodec, Keys

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

__all__ = ["SortedRows", "Source", "sorted_rows"]

Paths: TypeAlias = str | os.PathLike[str]
Source: TypeAlias = (
    pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch] | Paths | Sequence[Paths]
)

_BATCH_ROWS = 1 << 17
_SORT_COPIES = 3


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in key order.

    Attributes
    ----------
    schema
        In stored types.
    batches
        Batches of that schema, with their keys where these are known already.
    """

    schema: pa.Schema
    batches: Iterator[tuple[pa.RecordBatch, Keys | None]]


@contextlib.contextmanager
def sorted_rows(source: Source, key: Sequence[str], memory: int, spill: Path) -> Iterator[SortedRows]:
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

    Raises
    ------
    InputError
        If the source cannot be read, has no key column of that name, or a key is null.
    """
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table) and _SORT_COPIES * source.nbytes <= memory:
        yield _sorted_in_memory(source, key)
        return
    raise InputError("not yet")


def _sorted_in_memory(table: pa.Table, key: Sequence[str]) -> SortedRows:
    schema = stored_schema(table.schema, key)
    codec = KeyCodec(schema, key)
    keys = codec.encode(table)
    rows = _conform(table, schema)
    if keys.first_descent() >= 0:
        order = keys.argsort()
        return SortedRows(schema, _in_order(rows, keys, order))
    return SortedRows(schema, _slices(rows, keys))


def _conform(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [plain(table.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _slices(rows: pa.RecordBatch, keys: Keys) -> Iterator[tuple[pa.RecordBatch, Keys]]:
    for start in range(0, len(keys), _BATCH_ROWS):
        stop = min(start + _BATCH_ROWS, len(keys))
        yield rows.slice(start, stop - start), keys.slice(start, stop)


def _in_order(rows: pa.RecordBatch, keys: Keys, order: np.ndarray) -> Iterator[tuple[pa.RecordBatch, Keys]]:
    for start in range(0, len(keys), _BATCH_ROWS):
        part = order[start : start + _BATCH_ROWS]
        yield rows.take(pa.array(part)), keys.take(part)
