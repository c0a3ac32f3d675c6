"""Index nested loops, page by page: what a database does with a stream, for comparison (figure 9 of the SSIJ paper).

Phases: each tuple, in the order of arrival, is looked up in the index; each leaf that may hold its key is fetched
through a buffer pool, by a single synchronous read if it is not there; the matches are output. Nothing is batched but
the work that costs no read: tuples wait for no others, and no two pages share a read.

Memory bound: index (inner nodes, a map from leaf to frame) + workspace (a sixteenth, two pages at least, 16 MiB at
most) + a bounce page + the buffer pool, which has all the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins import _result_kernels as kernels
from headrace.joins._base import StreamJoin
from headrace.joins._emit import Matches
from headrace.joins._sought import find, locate
from headrace.joins.errors import MemoryBudgetError
from headrace.joins.inlj.pool import BufferPool
from headrace.joins.stats import JoinStats
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins._relation import TableLike
    from headrace.joins._sought import Sought
    from headrace.joins.predicates import On
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["IndexNestedLoops"]

_WORKSPACE_PAGES = 2
_WORKSPACE_SHARE = 16
_WORKSPACE_MOST = 16 * 2**20
_SCRATCH_NBYTES = 96


class IndexNestedLoops(StreamJoin):
    """Joins a stream with a clustered table, one page read at a time.

    Parameters
    ----------
    table, on, how, memory, columns, reader, clock
        As of `headrace.joins.SSIJ`.
    deadline
        Counted only: every tuple is complete when the output of its push has been consumed.
    """

    def __init__(
        self,
        table: TableLike | Snapshot,
        on: On,
        how: str = "inner",
        memory: int | str = "32MiB",
        *,
        deadline: float | str | None = None,
        columns: Sequence[str] | None = None,
        reader: PageReader | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(table, on, how, memory, columns=columns, deadline=deadline, reader=reader, clock=clock)
        snapshot, page = self.snapshot, self.snapshot.page_size
        leaves = len(snapshot.leaf_pages)
        fixed = snapshot.index_nbytes + self.relation.reader.nbytes_at(1)
        needed = fixed + _WORKSPACE_PAGES * page + BufferPool.nbytes(1, leaves, page)
        if needed > self.budget.limit:
            raise MemoryBudgetError(
                f"index nested loops need at least {format_size(needed)} ({needed} bytes) for the index, a page and "
                f"scratch, and have {format_size(self.budget.limit)}"
            )
        spare = (self.budget.limit - needed) // _WORKSPACE_SHARE
        self._workspace = _WORKSPACE_PAGES * page + min(spare, _WORKSPACE_MOST)
        self.budget.charge("index", snapshot.index_nbytes)
        self.budget.charge("read_buffer", self.relation.reader.nbytes_at(1))
        self.budget.charge("workspace", self._workspace)
        per_frame = BufferPool.nbytes(1, 0, page) - BufferPool.nbytes(0, 0, page)
        room = self.budget.available - BufferPool.nbytes(0, leaves, page)
        frames = max(1, min(room // per_frame, leaves))
        self.budget.charge("cache", BufferPool.nbytes(frames, leaves, page))
        self._pool = BufferPool(snapshot, self.relation.reader, frames)

    @property
    def stats(self) -> JoinStats:
        """What was counted so far."""
        return JoinStats(**self._base_stats())

    def _consume(self, batch: pa.RecordBatch, arrival: float) -> Iterator[pa.RecordBatch]:
        row_nbytes = batch.nbytes / max(1, len(batch))
        room = _SCRATCH_NBYTES + row_nbytes + self.emitter.row_bytes(row_nbytes)
        most = max(1, int(self._workspace // 2 / room))
        for start in range(0, len(batch), most):
            yield from self._join(batch.slice(start, most), arrival, most)

    def _join(self, rows: pa.RecordBatch, arrival: float, most: int) -> Iterator[pa.RecordBatch]:
        keys, valid = self.bound.encode(rows)
        first, last = locate(self.snapshot, keys)
        if valid is not None:
            first[~valid], last[~valid] = 0, -1
        if len(self.snapshot.leaf_pages) == 0:
            first[:], last[:] = 0, -1
        matched = np.zeros(len(rows), dtype=np.bool_)
        missed = np.zeros(len(rows), dtype=np.bool_)
        if self.bound.step:
            yield from self._join_nearest(rows, keys, (first, last), matched, missed)
        else:
            cursor = np.zeros(2, dtype=np.int64)
            tuples, leaves = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
            while size := kernels.all_pairs(first, last, cursor, tuples, leaves):
                yield from self._join_pairs(rows, keys, tuples[:size], leaves[:size], matched, missed)
        self.counters.rows_cached += len(rows) - int(missed.sum())
        self.completed(arrival, len(rows))
        lonely = np.flatnonzero(~matched)
        if self.how == "left" and len(lonely):
            yield from self.emitter.nulls(rows.take(pa.array(lonely)))

    def _join_nearest(
        self,
        rows: pa.RecordBatch,
        keys: Sought,
        leaves: tuple[NDArray[np.int32], NDArray[np.int32]],
        matched: NDArray[np.bool_],
        missed: NDArray[np.bool_],
    ) -> Iterator[pa.RecordBatch]:
        """Look for the nearest row in the leaf where it should be, then, where that cannot tell, in its neighbour."""
        first, last = leaves
        step = self.bound.step
        leaf = (last if step < 0 else first).copy()
        settled = np.zeros(len(rows), dtype=np.bool_)
        while len(tuples := np.flatnonzero(~settled & (first <= leaf) & (leaf <= last)).astype(np.int32)):
            settled[tuples] = True
            yield from self._join_pairs(rows, keys, tuples, leaf[tuples], matched, missed, settled)
            leaf[tuples] += np.int32(step)

    def _join_pairs(
        self,
        rows: pa.RecordBatch,
        keys: Sought,
        tuples: NDArray[np.int32],
        leaves: NDArray[np.int32],
        matched: NDArray[np.bool_],
        missed: NDArray[np.bool_],
        settled: NDArray[np.bool_] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Fetch the leaf of each pair and join, as far as the pool can hold all at a time.

        Tuples whose leaf leaves it open where their match is become unsettled.
        """
        frames = np.empty(len(leaves), dtype=np.int32)
        start = 0
        while start < len(leaves):
            stop, read, report = self._pool.fetch(leaves, start, frames)
            self.counters.add_read(report)
            pair, frame = tuples[start:stop], frames[start:stop]
            missed[pair[read]] = True
            row, count = find(self.snapshot, self._pool.buffer, frame, keys.take(pair))
            matched[pair[count > 0]] = True
            if settled is not None:
                settled[pair[count < 0]] = False
                np.maximum(count, 0, out=count)
            yield from self.emitter.emit(rows, Matches(frame, row, count, pair), self._pool.buffer)
            start = stop

    def _drain(self) -> Iterator[pa.RecordBatch]:
        return iter(())

    def _rebound(self) -> None:
        """Depend on nothing but the emitter."""

    def _output_nbytes(self) -> int:
        return self._workspace // 2
