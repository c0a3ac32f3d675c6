"""Join phase of SSIJ (the paper's algorithm 2): reads the pages that waiting tuples need, by a plan, and joins them.

Which pages stay in the cache is decided before the first read, by utility: for cached pages the tuples that they joined
with since the last join phase, for pages on disk the tuples that wait for them. Pages are read in blocks and joined
where they were read; those that will stay are copied into the cache. While pages are read, tuples that arrive may take
frames; then the decision is repeated for the pages not read yet and the smaller cache.

Where all pages will stay, the tuples are looked up in the cache at the end, by all threads. Otherwise they have to meet
each block while it is in the read buffer, one block after the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.emitter import rows_at
from headrace.joins.input_buffer import LocatedSlice
from headrace.joins.memory.allocators import release_freed_memory
from headrace.joins.predicates import BoundEquality
from headrace.joins.predicates.search_keys import find
from headrace.joins.ssij.phases import _join_kernels
from headrace.joins.ssij.phases._join_kernels import expand_found, frames_of_places
from headrace.joins.ssij.phases.pair_batches import PairBatches
from headrace.joins.ssij.phases.read_ahead import ReadAhead
from headrace.storage.format.copies import take
from headrace.storage.leaf import StagedRows, copy_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup
    from headrace.joins.ssij.memory.stream_buffer import Chunk
    from headrace.joins.ssij.phases.pair_batches import PairBatch
    from headrace.joins.ssij.phases.read_ahead import Block

__all__ = ["JoinPhase"]

_WORTH_A_THREAD = 4096  # fewer tuples are offered to the record tier before a thread has woken up


class JoinPhase:
    """One join phase. Created, run once, and dropped.

    Parameters
    ----------
    context
        Context of the phases.
    """

    def __init__(self, context: SSIJContext) -> None:
        self._context = context
        self._store = context.store
        self._cache = context.store.cache
        self._leaves = self._store.wanted()
        self._keep = np.ones(len(self._leaves), dtype=np.bool_)
        self._remove: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._chosen_for = -1
        self._chunks = self._store.stream.chunks

    def run(self) -> Iterator[pa.RecordBatch]:
        """Read the pages, join each with the tuples that wait for it, and empty the stream buffer."""
        counters, tuple_nbytes = self._context.counters, self._store.stream.tuple_nbytes
        begin, seeks, pages = self._context.progress.busy_seconds, counters.seeks, counters.pages_read
        self._store.grow()
        self._choose_resident(0)
        cached = self._cached_join()
        if cached is not None:
            self._store.pin(on=True)
        join = cached or _BlockJoin(self._context, self._leaves, self._chunks)
        for block in ReadAhead(self._context, self._leaves).blocks():
            try:
                yield from join.add(block)
                self._keep_some(block)
                self._complete_filter(block)
            finally:
                join.wait()
        yield from join.rest()
        yield from self._unmatched()
        if cached is not None:
            self._store.pin(on=False)
        self._chunks.clear()
        self._store.release_stream(self._context.bound.step)
        self._cache.phase_done()
        release_freed_memory(tuple_nbytes)
        seconds = self._context.progress.busy_seconds - begin
        planned = self._context.reader.device.cost(counters.seeks - seeks, counters.pages_read - pages)
        self._context.estimate.learn(len(self._leaves), planned, seconds)
        counters.join_phases += 1
        counters.join_seconds += seconds

    def _cached_join(self) -> _CachedJoin | None:
        """Return what joins the tuples once all pages are cached; None if some will not be.

        An active record tier and the filter need to see each page with its matches as it is read.
        """
        direct, tiers = self._store.direct, self._store.tiers
        if direct is None or tiers.filter is not None or tiers.records_active or not self._keep.all():
            return None
        return _CachedJoin(self._context, direct, self._chunks)

    # What stays in the cache

    def _choose_resident(self, start: int) -> None:
        """Decide ToKeep and ToRemove for the cache's current size and the pages from `start` on."""
        frames = self._cache.resident_frames
        remove = np.zeros(len(frames), dtype=np.bool_)
        _join_kernels.choose_resident(
            self._store.stream.demand,
            self._leaves[start:],
            self._store.newest_first,
            self._cache.utility[frames],
            self._cache.capacity,
            self._keep[start:],
            remove,
        )
        self._remove = frames[remove]
        self._chosen_for = self._cache.capacity

    def _keep_some(self, block: Block) -> None:
        """Copy the pages that will stay into the cache. Pages of ToRemove give way."""
        if self._chosen_for != self._cache.capacity:
            self._choose_resident(block.start)
        chosen = self._keep[block.start : block.stop]
        if not chosen.any():
            return
        keep = np.flatnonzero(chosen)
        missing = len(keep) - self._cache.available
        if missing > 0:
            leaving, self._remove = self._remove[:missing], self._remove[missing:]
            self._cache.release(leaving)
            self._context.counters.pages_evicted += len(leaving)
        leaves, frames = self._leaves[block.start + keep], self._cache.allocate(len(keep))
        copy_pages(self._store.read_buffer.frames, block.slots[keep], self._cache.buffer, frames, self._cache.page_size)
        self._store.keep(leaves, frames)
        self._context.counters.pages_kept += len(keep)

    def _complete_filter(self, block: Block) -> None:
        """Add the segments of a block's leaves that the filter did not have."""
        tier, frames = self._store.tiers.filter, self._store.read_buffer.frames
        if tier is not None:
            tier.complete(self._leaves[block.start : block.stop], frames, block.slots, self._store.workspace // 2)

    def _unmatched(self) -> Iterator[pa.RecordBatch]:
        """Complete the tuples that waited for several leaves: now it is known which had no match in any."""
        for chunk in self._chunks:
            if chunk.matched is None:
                continue
            self._context.completed(chunk.arrival, len(chunk.rows))
            unmatched = np.flatnonzero(~chunk.matched)
            if self._context.outer and len(unmatched):
                yield from self._context.emitter.nulls(take(chunk.rows, unmatched))


class _BlockJoin:
    """Joins tuples with the leaves that they wait for, in batches of pairs that may reach over several blocks.

    Matches are staged until their batch of pairs is complete, so that a result batch is as large as the workspace
    allows, however few pages a block has.
    """

    def __init__(self, context: SSIJContext, leaves: NDArray[np.int32], chunks: list[Chunk]) -> None:
        self._context = context
        most = context.store.tuples_in_a_part(context.emitter, context.bound.keys_per_tuple)
        self._pair_batches = PairBatches(leaves, context.store.stream.demand, chunks, context.bound, most)
        self._any = bool(chunks)
        self._reach = 0
        self._pairs: PairBatch | None = None
        self._results = _PairResults(context, leaves)

    def add(self, block: Block) -> Iterator[pa.RecordBatch]:
        """Join the tuples that wait for the pages of a block."""
        at = block.start
        while self._any and at < block.stop:
            if at == self._reach:
                yield from self._next_pairs(block, at)
            stop = min(self._reach, block.stop)
            if self._pairs is not None:
                yield from self._results.add(self._pairs, block, stop)
            at = stop

    def wait(self) -> None:
        """Wait until no thread reads from the block."""
        self._results.wait()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the last batch of pairs."""
        if self._pairs is not None:
            yield from self._results.complete(self._pairs)
            self._pairs = None

    def _next_pairs(self, block: Block, at: int) -> Iterator[pa.RecordBatch]:
        """Gather the next pairs. If too many wait for a single leaf, join all batches but the last with it now."""
        yield from self.rest()
        self._reach = self._pair_batches.reach(at)
        for pairs in self._pair_batches.gather(at, self._reach):
            if self._pairs is not None:
                yield from self._results.add(self._pairs, block, self._reach)
                yield from self.rest()
            self._pairs = pairs


class _PairResults:
    """Matches of one batch of pairs, in its order."""

    def __init__(self, context: SSIJContext, leaves: NDArray[np.int32]) -> None:
        self._context = context
        self._single = context.bound.at_most_one(unique=context.snapshot.unique)
        self._leaves = leaves
        self._staged: StagedRows | None = None
        self._sources: list[NDArray[np.int32]] = []
        self._met = self._noted = 0
        self._admitted: Callable[[], None] | None = None

    def add(self, pairs: PairBatch, block: Block, stop: int) -> Iterator[pa.RecordBatch]:
        """Find the matches of the tuples that wait for a leaf of the block before place `stop`."""
        context, low = self._context, self._met
        frame = np.empty(len(pairs.place) - low, dtype=np.int32)
        self._met = frames_of_places(pairs.place, low, block.start, stop, block.slots, frame)
        frame = frame[: self._met - low]
        keys = pairs.keys.slice(low, self._met)
        row, count = find(context.snapshot, context.store.read_buffer.frames, frame, keys)
        if context.store.tiers.filter is not None:
            context.store.tiers.filter.note_waited(self._leaves[pairs.place[low : self._met]], count)
        pairs.note(low, count)
        if context.store.tiers.records_active:
            admit = partial(context.store.tiers.admit, context.store.read_buffer.frames, frame, row, count, keys)
            self.wait()
            self._admitted = context.workers.start(admit) if len(frame) >= _WORTH_A_THREAD else admit
        cursor = np.zeros(2, dtype=np.int64)
        while cursor[0] < len(frame):
            staged = self._stage(len(pairs.rows))
            most = min(staged.free, len(frame)) if self._single else staged.free
            match, at, where = np.empty((3, most), dtype=np.int32)
            size = expand_found(frame, row, count, context.outer, cursor, match, where, at)
            if size:
                staged.add(context.store.read_buffer.frames, where[:size], at[:size])
                self._sources.append(match[:size] + np.int32(low))
            if staged.free == 0:
                self._note(pairs, low + int(cursor[0]))
                yield self._batch(pairs)

    def wait(self) -> None:
        """Wait until the record tier has taken in the rows found last, which a thread does meanwhile."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            admitted()

    def complete(self, pairs: PairBatch) -> Iterator[pa.RecordBatch]:
        """Note that all pairs have been joined, and yield what is staged."""
        self._note(pairs, len(pairs.rows))
        pairs.hand_back()
        self._met = self._noted = 0
        if self._staged is not None and self._staged.rows:
            yield self._batch(pairs)
        self._staged = None

    def _note(self, pairs: PairBatch, stop: int) -> None:
        """Note the pairs up to `stop` as complete, except for tuples that go on to another leaf."""
        start, self._noted = self._noted, stop
        self._context.completed(*pairs.complete(start, stop))

    def _stage(self, rows: int) -> StagedRows:
        if self._staged is None:
            emitter = self._context.emitter
            room = min(max(rows, 1), emitter.most_rows) if self._single else emitter.most_rows
            self._staged = StagedRows(self._context.snapshot.layout, emitter.columns, room)
        return self._staged

    def _batch(self, pairs: PairBatch) -> pa.RecordBatch:
        assert self._staged is not None
        columns = self._staged.arrays()
        source = self._sources[0] if len(self._sources) == 1 else np.concatenate(self._sources)
        rows = rows_at(pairs.rows, source)
        self._staged, self._sources = None, []
        return self._context.emitter.finished(rows, columns)


class _CachedJoin:
    """Joins all tuples once the last page of the phase is cached. No page may leave before the last tuple is joined.

    Parameters
    ----------
    context
        Context of the phases.
    lookup
        Direct look-up of the relation, whose keys are unique: each tuple waits for one leaf.
    chunks
        Chunks of waiting tuples.
    """

    def __init__(self, context: SSIJContext, lookup: DirectLookup, chunks: list[Chunk]) -> None:
        self._context = context
        self._lookup = lookup
        self._chunks = chunks

    def add(self, block: Block) -> Iterator[pa.RecordBatch]:
        """Do nothing: the tuples are joined after the last block."""
        del block
        return iter(())

    def wait(self) -> None:
        """Do nothing: no thread reads from a block."""

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Join all tuples."""
        workers = self._context.workers
        for batch in self._slices():
            parts = batch.parts(workers.share(len(batch.rows)))
            for part, results in zip(parts, workers.stream(self._join, parts), strict=True):
                self._context.completed(part.arrival, len(part.rows))
                yield from results

    def _slices(self) -> Iterator[LocatedSlice]:
        """Yield the tuples, as many at a time as there is room to work on."""
        for chunk in self._chunks:
            row_nbytes = chunk.tuple_nbytes / len(chunk.rows)
            most = self._context.store.rows_at_once(row_nbytes + self._context.emitter.row_bytes(row_nbytes))
            batch = LocatedSlice(chunk.rows, chunk.arrival, chunk.first)
            yield from batch.parts(-(-len(chunk.rows) // most))

    def _join(self, part: LocatedSlice) -> list[pa.RecordBatch]:
        """Join some tuples. Changes nothing, so that threads may run it at once."""
        context, cache = self._context, self._context.store.cache
        assert isinstance(context.bound, BoundEquality)
        found = self._lookup.probe(
            cache.buffer, context.bound.words(part.rows), cache.frame_of(part.leaf), context.outer
        )
        return list(context.emitter.emit_found(part.rows, found.source, found.columns))
