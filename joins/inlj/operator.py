"""Index nested loops, page by page: what a database does with a stream, for comparison (figure 9 of the SSIJ paper).

Phases: each tuple, in order of arrival, is looked up in the index. Each leaf that may hold its key is fetched through a
buffer pool, with a read of its own if it is not there; many reads are in flight at once. The matches are output. No
tuple waits for another batch, and no two pages share a read.

Memory bound: index (inner nodes, a map from leaf to frame) + workspace (a sixteenth, at least two pages, at most
16 MiB) + a bounce page and the queue of reads + the buffer pool, which has the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins import _result_kernels as kernels
from headrace.joins.base import JoinAlgorithm, JoinParameters, StreamJoin
from headrace.joins.emitter import Matches
from headrace.joins.errors import MemoryBudgetError
from headrace.joins.handle import check_number
from headrace.joins.inlj.pool import BufferPool
from headrace.joins.predicates.search_keys import find, locate
from headrace.joins.stats import JoinStats
from headrace.storage.format import take
from headrace.storage.read import ReadQueue
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.deadlines import Arrivals
    from headrace.joins.predicates import On
    from headrace.joins.predicates.search_keys import SearchKeys
    from headrace.joins.relation import TableLike
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["IndexNestedLoops"]

_WORKSPACE_PAGES = 2
_WORKSPACE_SHARE = 16
_WORKSPACE_MOST = 16 * 2**20
_SCRATCH_NBYTES = 96


class _NestedLoops(JoinAlgorithm):
    """Looks up one chunk of a batch after the other.

    Parameters
    ----------
    parameters
        Parameters of the join.
    queue_depth
        Most reads in flight.
    """

    def __init__(self, parameters: JoinParameters, queue_depth: int) -> None:
        super().__init__(parameters)
        snapshot, page = self.snapshot, self.snapshot.page_size
        leaves = len(snapshot.leaf_pages)
        reading = self.relation.reader.nbytes_at(1) + ReadQueue.nbytes
        fixed = snapshot.index_nbytes + reading
        needed = fixed + _WORKSPACE_PAGES * page + BufferPool.nbytes(1, leaves, page)
        if needed > self.budget.limit:
            raise MemoryBudgetError(
                f"index nested loops need at least {format_size(needed)} ({needed} bytes) for the index, a page and "
                f"scratch, and have {format_size(self.budget.limit)}"
            )
        spare = (self.budget.limit - needed) // _WORKSPACE_SHARE
        self._workspace = _WORKSPACE_PAGES * page + min(spare, _WORKSPACE_MOST)
        self.budget.charge("index", snapshot.index_nbytes)
        self.budget.charge("read_buffer", reading)
        self.budget.charge("workspace", self._workspace)
        per_frame = BufferPool.nbytes(1, 0, page) - BufferPool.nbytes(0, 0, page)
        room = self.budget.available - BufferPool.nbytes(0, leaves, page)
        frames = max(1, min(room // per_frame, leaves))
        self.budget.charge("cache", BufferPool.nbytes(frames, leaves, page))
        self._pool = BufferPool(snapshot, self.relation.reader, frames, queue_depth)

    @property
    def stats(self) -> JoinStats:
        """Statistics so far."""
        return JoinStats(**self._base_stats())

    def close(self) -> None:
        """Free the queue of reads."""
        self._pool.close()

    def _consume(self, batch: pa.RecordBatch, arrival: Arrivals) -> Iterator[pa.RecordBatch]:
        row_nbytes = batch.nbytes / max(1, len(batch))
        room = _SCRATCH_NBYTES + row_nbytes + self.emitter.row_bytes(row_nbytes)
        most = max(1, int(self._workspace // 2 / room))
        for start in range(0, len(batch), most):
            yield from self._join(batch.slice(start, most), arrival, most)

    def _join(self, rows: pa.RecordBatch, arrival: Arrivals, most: int) -> Iterator[pa.RecordBatch]:
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
        unmatched = np.flatnonzero(~matched)
        if self.how == "left" and len(unmatched):
            yield from self.emitter.nulls(take(rows, unmatched))

    def _join_nearest(
        self,
        rows: pa.RecordBatch,
        keys: SearchKeys,
        leaves: tuple[NDArray[np.int32], NDArray[np.int32]],
        matched: NDArray[np.bool_],
        missed: NDArray[np.bool_],
    ) -> Iterator[pa.RecordBatch]:
        """Look for the nearest row in the leaf where it should be, then in the neighbor if that leaf cannot decide."""
        first, last = leaves
        step = self.bound.step
        leaf = (last if step < 0 else first).copy()
        decided = np.zeros(len(rows), dtype=np.bool_)
        while len(tuples := np.flatnonzero(~decided & (first <= leaf) & (leaf <= last)).astype(np.int32)):
            decided[tuples] = True
            yield from self._join_pairs(rows, keys, tuples, leaf[tuples], matched, missed, decided)
            leaf[tuples] += np.int32(step)

    def _join_pairs(
        self,
        rows: pa.RecordBatch,
        keys: SearchKeys,
        tuples: NDArray[np.int32],
        leaves: NDArray[np.int32],
        matched: NDArray[np.bool_],
        missed: NDArray[np.bool_],
        decided: NDArray[np.bool_] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Fetch the leaf of each pair and join, as many at a time as the pool can hold.

        Tuples whose leaf cannot decide their match become undecided again (`decided` False).
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
            if decided is not None:
                decided[pair[count < 0]] = False
                np.maximum(count, 0, out=count)
            yield from self.emitter.emit(rows, Matches(frame, row, count, pair), self._pool.buffer)
            start = stop

    def _drain(self) -> Iterator[pa.RecordBatch]:
        return iter(())

    def _rebound(self) -> None:
        """Do nothing: only the emitter depends on the stream's schema."""

    def _output_nbytes(self) -> int:
        return self._workspace // 2


class IndexNestedLoops(StreamJoin[_NestedLoops]):
    """Joins a stream with a clustered table by looking each tuple up, with a read for each page.

    Parameters
    ----------
    table, on, how, memory, columns, reader, clock
        As for `headrace.joins.SSIJ`.
    deadline
        Only counted: every tuple is complete when the output of its push has been consumed.
    queue_depth
        Most reads in flight; 1 to make one read after the other, as the databases of the paper did.
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
        queue_depth: int = 64,
    ) -> None:
        check_number("queue_depth", queue_depth, 1)
        parameters = JoinParameters.check(
            table, on, how, memory, columns=columns, deadline=deadline, reader=reader, clock=clock
        )
        super().__init__(_NestedLoops(parameters, queue_depth))
