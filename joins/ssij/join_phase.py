"""SSIJ's join phase (the paper's algorithm 2): the pages that waiting tuples need are read by a plan and joined.

What stays in the cache is settled before the first read, from the pages' utility: of cached pages the tuples they
joined with since the last join phase, of pages on disk the tuples that wait for them. Pages are read in blocks and
joined where they were read; those that are to stay are copied into the cache. While pages are read, tuples that arrive
may take frames away; then what has not been read yet is settled again for the smaller cache. Where all pages are to
stay, the tuples are looked up in the cache in the end (`headrace.joins.ssij.cached_join`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins._emit import rows_at
from headrace.joins._sought import find
from headrace.joins.ssij import _piece_kernels
from headrace.joins.ssij._block_kernels import expand_found, frames_of_places
from headrace.joins.ssij.allocators import give_back_freed_memory
from headrace.joins.ssij.cached_join import CachedJoin
from headrace.joins.ssij.parts import Parts
from headrace.joins.ssij.read_ahead import ReadAhead
from headrace.storage.leaf import StagedRows, copy_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.joins.ssij.parts import Part
    from headrace.joins.ssij.read_ahead import Block
    from headrace.joins.ssij.state import SSIJState
    from headrace.joins.ssij.stream_buffer import Chunk

__all__ = ["JoinPhase"]

_WORTH_A_THREAD = 4096  # tuples: fewer are offered to the record tier before a thread has woken up


class JoinPhase:
    """One join phase. Made, run once, and dropped.

    Parameters
    ----------
    state
        Of the operator.
    """

    def __init__(self, state: SSIJState) -> None:
        self._state = state
        self._store = state.store
        self._cache = state.store.cache
        self._leaves = self._store.wanted()
        self._keep = np.ones(len(self._leaves), dtype=np.bool_)
        self._remove: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._settled_for = -1
        self._chunks = self._store.stream.chunks

    def run(self) -> Iterator[pa.RecordBatch]:
        """Read the pages, join each with the tuples that wait for it, and empty the stream buffer."""
        counters, tuple_nbytes = self._state.counters, self._store.stream.tuple_nbytes
        begin, seeks, pages = self._state.busy(), counters.seeks, counters.pages_read
        self._store.grow()
        self._settle(0)
        cached = self._cached_join()
        if cached is not None:
            self._store.pin(on=True)
        join = cached or _BlockJoin(self._state, self._leaves, self._chunks)
        for block in ReadAhead(self._state, self._leaves).blocks():
            try:
                yield from join.add(block)
                self._keep_some(block)
                self._complete_filter(block)
            finally:
                join.settle()
        yield from join.rest()
        yield from self._unmatched()
        if cached is not None:
            self._store.pin(on=False)
        self._chunks.clear()
        self._store.release_stream(self._state.bound.step)
        self._cache.phase_done()
        give_back_freed_memory(tuple_nbytes)
        seconds = self._state.busy() - begin
        planned = self._state.reader.device.cost(counters.seeks - seeks, counters.pages_read - pages)
        self._state.estimate.learn(len(self._leaves), planned, seconds)
        counters.join_phases += 1
        counters.join_seconds += seconds

    def _cached_join(self) -> CachedJoin | None:
        """Return what joins the tuples once all pages are cached; None if some will not be.

        The record tier and the filter want to know what was found in which page, as it comes.
        """
        direct, tiers = self._store.direct, self._store.tiers
        if direct is None or tiers.filter is not None or tiers.records_awake or not self._keep.all():
            return None
        return CachedJoin(self._state, direct, self._chunks)

    # What stays in the cache

    def _settle(self, start: int) -> None:
        """Settle ToKeep and ToRemove for the cache's present size and the pages from `start` on."""
        frames = self._cache.resident_frames
        remove = np.zeros(len(frames), dtype=np.bool_)
        _piece_kernels.settle_pages(
            self._store.stream.demand,
            self._leaves[start:],
            self._store.newest_first,
            self._cache.utility[frames],
            self._cache.capacity,
            self._keep[start:],
            remove,
        )
        self._remove = frames[remove]
        self._settled_for = self._cache.capacity

    def _keep_some(self, block: Block) -> None:
        """Copy the pages that are to stay into the cache; pages that are to be removed give way."""
        if self._settled_for != self._cache.capacity:
            self._settle(block.start)
        chosen = self._keep[block.start : block.stop]
        if not chosen.any():
            return
        keep = np.flatnonzero(chosen)
        missing = len(keep) - self._cache.available
        if missing > 0:
            leaving, self._remove = self._remove[:missing], self._remove[missing:]
            self._cache.release(leaving)
            self._state.counters.pages_evicted += len(leaving)
        leaves, frames = self._leaves[block.start + keep], self._cache.allocate(len(keep))
        copy_pages(self._store.read_buffer.frames, block.slots[keep], self._cache.buffer, frames, self._cache.page_size)
        self._store.keep(leaves, frames)
        self._state.counters.pages_kept += len(keep)

    def _complete_filter(self, block: Block) -> None:
        """Let the filter know the leaves of a block that it did not know."""
        tier, frames = self._store.tiers.filter, self._store.read_buffer.frames
        if tier is not None:
            tier.complete(self._leaves[block.start : block.stop], frames, block.slots, self._store.workspace // 2)

    def _unmatched(self) -> Iterator[pa.RecordBatch]:
        """Complete the tuples that waited for several leaves: now it is known which had no match in any."""
        for chunk in self._chunks:
            if chunk.matched is None:
                continue
            self._state.completed(chunk.arrival, len(chunk.rows))
            lonely = np.flatnonzero(~chunk.matched)
            if self._state.outer and len(lonely):
                yield from self._state.emitter.nulls(chunk.rows.take(pa.array(lonely)))


class _BlockJoin:
    """Joins tuples with the leaves that they wait for, in parts that reach over several blocks.

    Matches are staged until their part is complete, so that a result batch is as large as the workspace allows,
    however few pages a block has.
    """

    def __init__(self, state: SSIJState, leaves: NDArray[np.int32], chunks: list[Chunk]) -> None:
        self._state = state
        most = state.store.tuples_in_a_part(state.emitter, state.bound.keys_per_tuple)
        self._parts = Parts(leaves, state.store.stream.demand, chunks, state.bound, most)
        self._any = bool(chunks)
        self._reach = 0
        self._part: Part | None = None
        self._results = _PartResults(state, leaves)

    def add(self, block: Block) -> Iterator[pa.RecordBatch]:
        """Join the tuples that wait for the pages of a block."""
        at = block.start
        while self._any and at < block.stop:
            if at == self._reach:
                yield from self._next_part(block, at)
            stop = min(self._reach, block.stop)
            if self._part is not None:
                yield from self._results.add(self._part, block, stop)
            at = stop

    def settle(self) -> None:
        """Wait until nobody reads from the block any more."""
        self._results.settle()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Give out the results of the last part."""
        if self._part is not None:
            yield from self._results.complete(self._part)
            self._part = None

    def _next_part(self, block: Block, at: int) -> Iterator[pa.RecordBatch]:
        """Gather the next tuples. If too many wait for a single leaf, join all but the last of them with it now."""
        yield from self.rest()
        self._reach = self._parts.reach(at)
        for part in self._parts.gather(at, self._reach):
            if self._part is not None:
                yield from self._results.add(self._part, block, self._reach)
                yield from self.rest()
            self._part = part


class _PartResults:
    """Matches of one part, in its order."""

    def __init__(self, state: SSIJState, leaves: NDArray[np.int32]) -> None:
        self._state = state
        self._single = state.bound.at_most_one(unique=state.snapshot.unique)
        self._leaves = leaves
        self._staged: StagedRows | None = None
        self._sources: list[NDArray[np.int32]] = []
        self._met = self._noted = 0
        self._admitted: Callable[[], None] | None = None

    def add(self, part: Part, block: Block, stop: int) -> Iterator[pa.RecordBatch]:
        """Find the matches of the tuples that wait for a leaf of the block, up to one."""
        state, low = self._state, self._met
        frame = np.empty(len(part.place) - low, dtype=np.int32)
        self._met = frames_of_places(part.place, low, block.start, stop, block.slots, frame)
        frame = frame[: self._met - low]
        keys = part.keys.slice(low, self._met)
        row, count = find(state.snapshot, state.store.read_buffer.frames, frame, keys)
        if state.store.tiers.filter is not None:
            state.store.tiers.filter.note_waited(self._leaves[part.place[low : self._met]], count)
        part.note(low, count)
        if state.store.tiers.records_awake:
            admit = partial(state.store.tiers.admit, state.store.read_buffer.frames, frame, row, count, keys)
            self.settle()
            self._admitted = state.workers.start(admit) if len(frame) >= _WORTH_A_THREAD else admit
        cursor = np.zeros(2, dtype=np.int64)
        while cursor[0] < len(frame):
            staged = self._stage(len(part.rows))
            most = min(staged.free, len(frame)) if self._single else staged.free
            match, at, where = np.empty((3, most), dtype=np.int32)
            size = expand_found(frame, row, count, state.outer, cursor, match, where, at)
            if size:
                staged.add(state.store.read_buffer.frames, where[:size], at[:size])
                self._sources.append(match[:size] + np.int32(low))
            if staged.free == 0:
                self._note(part, low + int(cursor[0]))
                yield self._batch(part)

    def settle(self) -> None:
        """Wait until the record tier has taken in the rows found last: a thread does that meanwhile, one at a time."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            admitted()

    def complete(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Note that all tuples of a part have met their leaf, and give out what is staged."""
        self._note(part, len(part.rows))
        part.hand_back()
        self._met = self._noted = 0
        if self._staged is not None and self._staged.rows:
            yield self._batch(part)
        self._staged = None

    def _note(self, part: Part, stop: int) -> None:
        """Note that the tuples of a part up to one are complete, but for those that have to go to another leaf."""
        start, self._noted = self._noted, stop
        self._state.completed(*part.complete(start, stop))

    def _stage(self, rows: int) -> StagedRows:
        if self._staged is None:
            emitter = self._state.emitter
            room = min(max(rows, 1), emitter.most_rows) if self._single else emitter.most_rows
            self._staged = StagedRows(self._state.snapshot.layout, emitter.columns, room)
        return self._staged

    def _batch(self, part: Part) -> pa.RecordBatch:
        assert self._staged is not None
        columns = self._staged.arrays()
        source = self._sources[0] if len(self._sources) == 1 else np.concatenate(self._sources)
        rows = rows_at(part.rows, source)
        self._staged, self._sources = None, []
        return self._state.emitter.finished(rows, columns)
