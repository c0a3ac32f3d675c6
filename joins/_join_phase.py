"""SSIJ's join phase (the paper's algorithm 2): the pages that waiting tuples need are read by a plan and joined.

What stays in the cache is settled before the first read, from the pages' utility: of cached pages the tuples they
joined with since the last join phase, of pages on disk the tuples that wait for them. While pages are read, tuples that
arrive may take frames away; then what has not been read yet is settled again for the smaller cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from joins import _piece_kernels, _result_kernels
from joins._emit import Matches
from joins._input_buffer import arrivals_at
from joins._pairs import Gathered, Read, joined_rows
from storage.leaves import search
from storage.plan import ReadPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from joins._pairs import Pairs
    from joins._state import SSIJState

__all__ = ["JoinPhase"]

_READ_SHARE = 4
_READ_LEAST = 16
_READ_MOST = 1024
_PLAN_NBYTES = 80
_NO_PLAN = ReadPlan(np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(1, np.int64))


class JoinPhase:
    """One join phase. Made, run once, and dropped.

    Parameters
    ----------
    state
        Of the operator.
    """

    def __init__(self, state: SSIJState) -> None:
        self._state = state
        self._snapshot = state.snapshot
        self._store = state.store
        self._cache = state.store.cache
        self._leaves = self._store.wanted()
        self._keep = np.ones(len(self._leaves), dtype=np.bool_)
        self._remove: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._at = 0
        self._settled_for = -1
        self._reading = 1
        self._plan = _NO_PLAN
        self._read = 0
        self._gathered = Gathered(self._leaves, self._store.stream.demand, self._store.tuples_to_gather())

    def run(self) -> Iterator[pa.RecordBatch]:
        """Read the pages, join each with the tuples that wait for it, and empty the stream buffer."""
        begin = self._state.busy()
        self._store.grow()
        while self._at < len(self._leaves):
            yield from self._step()
        yield from self._unmatched()
        self._store.release_stream()
        self._cache.phase_done()
        seconds = self._state.busy() - begin
        self._state.estimate.learn(len(self._leaves), seconds)
        self._state.counters.join_phases += 1
        self._state.counters.join_seconds += seconds

    def _step(self) -> Iterator[pa.RecordBatch]:
        """Read as many of the next pages as there are frames for, in parallel, and join them."""
        if self._settled_for != self._cache.capacity:
            self._settle()
        if self._read == len(self._plan):
            self._plan_ahead()
        plan = self._next_reads(self._frames_for_reading())
        leaves = self._leaves[self._at : self._at + plan.pages_wanted]
        frames = self._cache.allocate(len(leaves))
        pages, checksums = self._snapshot.leaf_pages[leaves], self._snapshot.leaf_checksums[leaves]
        report = self._state.reader.read_plan(plan, slice(None), pages, self._cache.buffer, frames, checksums)
        self._state.counters.add_read(report)
        yield from self._join(leaves, frames)
        self._keep_some(leaves, frames)
        self._at += len(leaves)
        self._read += len(plan)

    def _settle(self) -> None:
        """Settle ToKeep and ToRemove for the cache's present size, and how many frames a step may read into."""
        left, capacity = len(self._leaves) - self._at, self._cache.capacity
        frames = self._cache.resident_frames
        fits = left + len(frames) <= capacity
        self._reading = min(_READ_MOST, capacity if fits else _reading_frames(capacity))
        remove = np.zeros(len(frames), dtype=np.bool_)
        _piece_kernels.settle_pages(
            self._store.stream.demand,
            self._leaves[self._at :],
            self._store.newest_first,
            self._cache.utility[frames],
            capacity if fits else capacity - self._reading,
            self._keep[self._at :],
            remove,
        )
        self._remove = frames[remove]
        self._settled_for = capacity
        self._plan, self._read = _NO_PLAN, 0

    def _plan_ahead(self) -> None:
        """Plan the next reads: of all pages that are left, or of as many as the workspace has room to plan."""
        most = max(self._reading, self._store.workspace // 2 // _PLAN_NBYTES)
        pages = self._snapshot.leaf_pages[self._leaves[self._at : self._at + most]]
        if self._at + len(pages) < len(self._leaves):
            pages = pages[: _end_of_runs(pages, self._state.reader.device.seek / self._state.reader.device.transfer)]
        self._plan = self._state.reader.plan(pages, min(self._store.max_scan, self._reading))
        self._read = 0

    def _frames_for_reading(self) -> int:
        """Return how many frames are free for the next step; pages that are to be removed give way."""
        missing = self._reading - self._cache.available
        if missing > 0 and len(self._remove):
            leaving, self._remove = self._remove[:missing], self._remove[missing:]
            self._cache.release(leaving)
            self._state.counters.pages_evicted += len(leaving)
        return min(self._reading, self._cache.available)

    def _next_reads(self, frames: int) -> ReadPlan:
        """Return the next reads of the plan that so many frames can take."""
        first = self._plan.first
        stop = int(np.searchsorted(first, first[self._read] + frames, side="right")) - 1
        assert stop > self._read, "a read never needs more frames than a step has"
        part = slice(self._read, stop)
        return ReadPlan(
            self._plan.start[part], self._plan.length[part], first[self._read : stop + 1] - first[self._read]
        )

    def _keep_some(self, leaves: NDArray[np.int32], frames: NDArray[np.int64]) -> None:
        """Admit the pages that are to stay. The frames of the last step are of no more use, so all its pages stay."""
        step = slice(self._at, self._at + len(leaves))
        keep = self._keep[step] if step.stop < len(self._leaves) else np.ones(len(leaves), dtype=np.bool_)
        self._cache.release(frames[~keep])
        self._cache.admit(leaves[keep], frames[keep], self._store.stream.demand[leaves[keep]])
        self._state.counters.pages_kept += int(keep.sum())

    def _join(self, leaves: NDArray[np.int32], frames: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Join pages with the tuples that wait for them, and with no others."""
        order = np.argsort(leaves) if len(self._store.disk_order) else slice(None)
        read = Read(leaves[order], frames[order].astype(np.int32))
        chunks = self._store.stream.chunks
        simple = [chunk for chunk in chunks if chunk.simple]
        for group in read.pairs(self._gathered.chunks(simple, self._at, self._at + len(leaves)), self._at_once()):
            yield from self._join_simple(group)
        for chunk in chunks:
            if not chunk.simple:
                for group in read.pairs([chunk], self._at_once()):
                    yield from self._join_spanning(group)

    def _at_once(self) -> int:
        stream = self._store.stream
        return self._store.rows_at_once(stream.tuple_nbytes / max(1, stream.rows))

    def _join_simple(self, group: list[Pairs]) -> Iterator[pa.RecordBatch]:
        """Join tuples that wait for one leaf each: now their join is complete."""
        rows = joined_rows([pairs.rows() for pairs in group])
        frame = np.concatenate([pairs.frame for pairs in group])
        row, count = self._search(rows, frame)
        for pairs in group:
            self._state.completed(arrivals_at(pairs.chunk.arrival, pairs.pieces), len(pairs.pieces))
        _result_kernels.outer_matches(frame, count, self._state.outer)
        yield from self._state.emitter.emit(rows, Matches(frame, row, count), self._cache.buffer)

    def _join_spanning(self, group: list[Pairs]) -> Iterator[pa.RecordBatch]:
        """Join tuples with one of several leaves that they wait for."""
        for pairs in group:
            assert pairs.chunk.tuples is not None
            assert pairs.chunk.matched is not None
            tuples = pairs.chunk.tuples[pairs.pieces]
            rows = pairs.chunk.rows.take(pa.array(tuples))
            row, count = self._search(rows, pairs.frame)
            pairs.chunk.matched[tuples[count > 0]] = True
            yield from self._state.emitter.emit(rows, Matches(pairs.frame, row, count), self._cache.buffer)

    def _search(self, rows: pa.RecordBatch, frame: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        keys, _ = self._state.bound.encode(rows)
        return search(self._snapshot.layout, self._cache.buffer, frame, keys, unique=self._snapshot.unique)

    def _unmatched(self) -> Iterator[pa.RecordBatch]:
        """Complete the tuples that waited for several leaves: now it is known which had no match in any."""
        for chunk in self._store.stream.chunks:
            if chunk.matched is None:
                continue
            self._state.completed(chunk.arrival, len(chunk.rows))
            lonely = np.flatnonzero(~chunk.matched)
            if self._state.outer and len(lonely):
                yield from self._state.emitter.nulls(chunk.rows.take(pa.array(lonely)))


def _reading_frames(capacity: int) -> int:
    """Return how many frames of a full cache are kept free to read into: enough for several reads at once."""
    return max(1, capacity // _READ_SHARE, min(_READ_LEAST, capacity // 2))


def _end_of_runs(pages: NDArray[np.int64], widest: float) -> int:
    """Return where to cut pages so that a plan of the first part is part of the best plan of all, if that can be.

    No read goes over a gap that costs more than a seek.
    """
    cuts = np.flatnonzero(np.diff(pages) - 1 > widest) + 1
    return int(cuts[-1]) if len(cuts) else len(pages)
