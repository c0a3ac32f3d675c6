"""Rows of a snapshot by key or by key range, read window by window in bounded memory.

Joins have their own operators.
"""

from __future__ import annotations

import bisect
import itertools
from datetime import date, time, timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.storage.errors import KeyInputError
from headrace.storage.leaf import _gather_kernels
from headrace.storage.leaf.decode import decode_pages, expand_matches, gather, gather_keys, rows_of_pages, search
from headrace.storage.read.cache import page_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.format.keys import Keys
    from headrace.storage.read.reader import PageReader
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["WINDOW_BYTES", "lookup", "read_leaves", "scan"]

WINDOW_BYTES = 4 << 20
"""Bytes of leaves that a scan reads at once."""


def read_leaves(snapshot: Snapshot, reader: PageReader, leaves: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the pages of leaves (ordinals, each once) side by side.

    Raises
    ------
    CorruptPageError
        If a page is not what was written.
    """
    frames = page_buffer(len(leaves), snapshot.page_size)
    pages = snapshot.leaf_pages[leaves]
    order = np.argsort(pages)
    reader.read(pages[order], frames, order, snapshot.leaf_checksums[leaves][order])
    return frames


def lookup(snapshot: Snapshot, reader: PageReader, keys: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return the rows that have the given keys, in their order; see `Table.lookup`."""
    if not isinstance(keys, pa.RecordBatch | pa.Table):
        raise KeyInputError(
            f"keys to look up are a pyarrow record batch or table with the columns {', '.join(snapshot.key)}, "
            f"not {type(keys).__name__}; convert them, as with pa.record_batch({{{snapshot.key[0]!r}: [...]}})"
        )
    wanted, valid = snapshot.codec.encode_stream(keys)
    asked = np.arange(len(wanted)) if valid is None else np.flatnonzero(valid)
    asked = asked[wanted.take(asked).argsort()]
    first, last = snapshot.locate(wanted.take(asked))
    spans = np.where(first >= 0, last - first + 1, 0).astype(np.int64)
    leaf, _, origin = _gather_kernels.expand_rows(first, first, spans)
    leaf = leaf + _steps(spans)
    parts, places = [], []
    for window in _windows(leaf, snapshot):
        rows, found = _look_in(snapshot, reader, leaf[window], wanted.take(asked[origin[window]]))
        parts.append(rows)
        places.append(asked[origin[window][found]])
    if not parts:
        return snapshot.schema.empty_table()
    order = np.argsort(np.concatenate(places), kind="stable")
    return pa.Table.from_batches(parts).take(pa.array(order))


def scan(
    snapshot: Snapshot, reader: PageReader, low: object, high: object, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows whose keys lie in a range, in key order; see `Table.scan`."""
    names = snapshot.schema.names if columns is None else snapshot.layout.select(columns)
    decoded = names or snapshot.key[:1]  # a batch of no columns has its number of rows from one that is dropped
    schema = pa.schema([snapshot.schema.field(name) for name in decoded])
    bottom, top = _bound(snapshot, low), _bound(snapshot, high)
    start = 0 if bottom is None else max(int(snapshot.locate(bottom)[0][0]), 0)
    stop = len(snapshot.entries) if top is None else int(snapshot.locate(top)[1][0]) + 1
    step = max(WINDOW_BYTES // snapshot.page_size, 1)
    for at in range(start, stop, step):
        leaves = np.arange(at, min(at + step, stop))
        frames = read_leaves(snapshot, reader, leaves)
        arrays = decode_pages(snapshot.layout, frames, np.arange(len(leaves), dtype=np.int32), decoded)
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema).select(names)
        if at == start or leaves[-1] == stop - 1:
            batch = _trim(batch, _keys_in(snapshot, frames, len(leaves)), bottom, top)
        if batch.num_rows:
            yield batch


def _steps(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, 2, ... for each span, one after the other."""
    starts = np.cumsum(spans) - spans
    return np.arange(int(spans.sum())) - np.repeat(starts, spans)


def _windows(leaf: NDArray[np.int64], snapshot: Snapshot) -> Iterator[slice]:
    """Cut a list of leaves into runs that touch few leaves each."""
    if not len(leaf):
        return
    rank = np.cumsum(np.diff(leaf, prepend=leaf[0]) != 0) // max(WINDOW_BYTES // snapshot.page_size, 1)
    cuts = np.flatnonzero(np.diff(rank)) + 1
    bounds = [0, *cuts.tolist(), len(leaf)]
    for start, stop in itertools.pairwise(bounds):
        yield slice(start, stop)


def _look_in(
    snapshot: Snapshot, reader: PageReader, leaf: NDArray[np.int64], keys: Keys
) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
    """Return the matching rows of pairs of leaf and key, and which pair each row belongs to."""
    leaves, inverse = np.unique(leaf, return_inverse=True)
    frames = read_leaves(snapshot, reader, leaves)
    frame = inverse.astype(np.int32)
    row, count = search(snapshot.layout, frames, frame, keys, unique=snapshot.unique)
    frame, row, origin = expand_matches(frame, row, count)
    arrays = gather(snapshot.layout, frames, frame, row, snapshot.schema.names)
    return pa.RecordBatch.from_arrays(arrays, schema=snapshot.schema), origin


def _bound(snapshot: Snapshot, bound: object) -> Keys | None:
    """Return the key of a bound of a scan.

    Raises
    ------
    KeyInputError
        If it has not one value for each key column, or a value is of the wrong type.
    """
    if bound is None:
        return None
    values: Sequence[Any] = bound if isinstance(bound, tuple) else (bound,)
    if len(values) != len(snapshot.key):
        raise KeyInputError(
            f"a bound has one value for each key column ({', '.join(snapshot.key)}), but {bound!r} has {len(values)}"
        )
    try:
        arrays = [pa.array([value], type=dtype) for value, dtype in zip(values, snapshot.codec.types, strict=True)]
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise KeyInputError(f"{bound!r} is not a key of the columns {', '.join(snapshot.key)}: {error}") from error
    for value, array in zip(values, arrays, strict=True):
        if isinstance(value, Real | date | time | timedelta) and array[0].as_py() != value:
            raise KeyInputError(
                f"{bound!r} is not a key of the columns {', '.join(snapshot.key)}: {array.type} cannot hold {value!r}"
            )
    return snapshot.codec.encode(arrays)


def _keys_in(snapshot: Snapshot, frames: NDArray[np.uint8], pages: int) -> Keys:
    places, rows, _ = rows_of_pages(snapshot.layout, frames, np.arange(pages, dtype=np.int32))
    return gather_keys(snapshot.layout, frames, places, rows)


def _trim(batch: pa.RecordBatch, keys: Keys, low: Keys | None, high: Keys | None) -> pa.RecordBatch:
    start = 0 if low is None else bisect.bisect_left(range(len(keys)), low.comparable(0), key=keys.comparable)
    stop = len(keys) if high is None else bisect.bisect_right(range(len(keys)), high.comparable(0), key=keys.comparable)
    return batch.slice(start, max(stop - start, 0))
