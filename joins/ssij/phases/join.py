"""Join phase of SSIJ (the paper's algorithm 2): reads the pages that waiting tuples need, by a plan, and joins them.

**One sweep, in steps.** The paper's join phase runs from its first read to its last and admits no tuple. Here it is a
sweep over the disk that may stop between two blocks and go on later:

state
    ``head``, the first page that the sweep has not passed; the plan, the leaves that it still has to read, in disk
    order; and the stream buffer, whose ``demand`` says how many tuples wait for each leaf.
step
    Reads and joins a part of the plan: up to the end, or until ``cut`` says to stop. Then it settles: leaves that
    were read lose their demand, and tuples that have met all their leaves leave the buffer.
between steps
    Arrivals are looked up like any others. Those that find no cached page enter the stream buffer.

**Which arrivals join the running sweep.** All whose leaf is in the plan and ahead of the head; also those whose leaf
lies in a gap that the plan reads over, since that leaf costs nothing. Other leaves would cost a read each, and delay
the tuples behind them. A sweep that is *eager* takes them nevertheless if they are ahead: it is one of a sequence of
sweeps without pauses, in which a tuple that is left out waits for most of another sweep. So an eager sequence is an
elevator: it goes round as MeshJoin does, reads only what is wanted, and completes each tuple within one round, on
average within half.

**Continuous sweeps.** Without deadlines a sweep reads its pages for as many tuples as the memory holds. If it stops
after each of a few ranges of pages, and goes on when arrivals have filled the room of the tuples that left, each round
serves nearly twice as many: a tuple waits for half a round on average, so as many as the memory holds arrive in half a
round. A sweep is continuous where its reads take longer than the processor needs for them. Tuples are divided by range
(`headrace.joins.ssij.memory.page_ranges`), so that those of a step leave together and the others are not copied.

**Invariants.** Outside of a step no page is pinned, no read is in flight, and no result is staged. A tuple meets each
of its leaves once: it leaves the buffer, or loses that leaf, in the step that reads it, and the leaf's demand is 0
until another tuple waits for it. The head never moves back, and each step reads at least one block, so a sweep ends.
A step that may not stop reads all wanted leaves, also those behind the head, so that no tuple is left.
The snapshot is the same in all steps: a change of the relation completes the sweep first.

**Memory.** Between steps a sweep holds 4 bytes for each leaf of the plan, and during a step 5 more; the inverted index
is charged 9. A continuous sweep lists the leaves of one range at a time, so that more tuples can wait, unless tuples
may wait for several leaves. Chunks that tuples have left are copied when a quarter of them has, each within the
workspace.

**The cache.** Which pages stay is decided before the first read of a step, by utility: for cached pages the tuples
that they joined with since the last join phase, for pages on disk the tuples that wait for them. Pages are read in
blocks and joined where they were read; those that will stay are copied into the cache. If tuples took frames
meanwhile, the decision is repeated for the pages not read yet and the smaller cache.

Where all pages will stay, the tuples are looked up in the cache at the end of the step, by all threads. Otherwise they
have to meet each block while it is in the read buffer, one block after the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins import _result_kernels
from headrace.joins.emitter import Matches, rows_at
from headrace.joins.input_buffer import LocatedSlice
from headrace.joins.predicates import BoundEquality
from headrace.joins.predicates.search_keys import find
from headrace.joins.ssij.memory.page_ranges import PageRanges
from headrace.joins.ssij.memory.stream_buffer import LEAF_RUN_NBYTES
from headrace.joins.ssij.phases import _join_kernels
from headrace.joins.ssij.phases._join_kernels import expand_found, frames_of_places
from headrace.joins.ssij.phases.pair_batches import PairBatches
from headrace.joins.ssij.phases.read_ahead import ReadAhead
from headrace.storage.format import take
from headrace.storage.leaf import StagedRows, copy_pages
from headrace.storage.read import LeafMap, values_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup
    from headrace.joins.ssij.memory.stream_buffer import Chunk
    from headrace.joins.ssij.phases.pair_batches import PairBatch
    from headrace.joins.ssij.phases.read_ahead import Block
    from headrace.joins.workers import Workers

__all__ = ["JoinPhase"]

_STEP_SHARE = 32  # of the stream buffer, gathered at once where a step may stop
_STEP_LEAST = 4096  # tuples: as many are gathered at least, wherever a step may stop
_MANY_RESULTS = 1 << 15  # of a block's tuples: so many are copied by runs at once, and not staged row by row


class JoinPhase:
    """One sweep over the disk. Created, run step by step until it is `done`, and dropped.

    Parameters
    ----------
    context
        Context of the phases.
    eager
        Whether leaves ahead of the head that are not in the plan join the sweep although they cost a read.
    continuous
        Whether a step reads one range of pages only, and the next one waits until tuples need its room.

    Attributes
    ----------
    eager, continuous
        As given; a continuous sweep is eager.
    seconds, settled
        Busy seconds of its steps, and those in which tuples left the buffer after the last one.
    done
        Whether the sweep has ended.
    """

    def __init__(self, context: SSIJContext, *, eager: bool, continuous: bool = False) -> None:
        self._context = context
        self._store = context.store
        self.eager = eager or continuous
        self.continuous = continuous
        self._head = self._range = 0
        self._plan: NDArray[np.int32] | None = None
        self._leaves = 0
        self._planned = 0.0
        self._tuple_nbytes = context.store.stream.tuple_nbytes
        self.seconds = self.settled = 0.0
        self.done = False

    def step(self, cut: Callable[[], bool] | None, *, fine: bool = False) -> Iterator[pa.RecordBatch]:
        """Read the pages that come next, join each with the tuples that wait for it, and let these leave.

        Parameters
        ----------
        cut
            Whether to stop; asked between two blocks. None to go to the end.
        fine
            Whether `cut` will soon say so. Then blocks are small, and no more is prepared than a few of them need.
        """
        if self._leaves == 0:  # the first step: other threads will allocate now, and cannot reuse what was freed before
            self._store.budget.give_back(self._tuple_nbytes)
        counters = self._context.counters
        begin, seeks, pages = self._context.progress.busy_seconds, counters.seeks, counters.pages_read
        leaves = self._next_leaves()
        if not self._divisible(leaves):
            leaves = self._store.wanted() if self._head or self.continuous else leaves
            cut, self.continuous = None, False
        self._plan = None
        if len(leaves):
            reach = yield from _Step(self._context, leaves, cut, fine=fine).run()
            if cut is not None or self.continuous:
                self._head = int(self._context.snapshot.pointers(leaves[reach - 1 : reach])[0][0]) + 1
            joined = self._context.progress.busy_seconds
            yield from self._settle(leaves[:reach])
            self.settled = self._context.progress.busy_seconds - joined
            rest = leaves[reach:]
            self._plan = self._next_of_range() if self.continuous else self._store.still_wanted(rest)
            self._leaves += reach
        seconds = self._context.progress.busy_seconds - begin
        self.seconds += seconds
        counters.join_seconds += seconds
        self._planned += self._context.reader.device.cost(counters.seeks - seeks, counters.pages_read - pages)
        if self._plan is None or len(self._plan) == 0:
            self._end()

    def detour(self, leaves: NDArray[np.int32]) -> Iterator[pa.RecordBatch]:
        """Read leaves out of turn, whose tuples cannot wait for the head. The sweep goes on where it was."""
        counters, begin = self._context.counters, self._context.progress.busy_seconds
        yield from _Step(self._context, leaves, None, fine=False).run()
        yield from self._settle(leaves)
        if self._plan is not None:
            self._plan = self._store.still_wanted(self._plan)
        counters.join_seconds += self._context.progress.busy_seconds - begin
        counters.join_phases += 1

    def _next_leaves(self) -> NDArray[np.int32]:
        if self.continuous:
            return self._next_of_range()
        device = self._context.reader.device
        plan = None if self.eager or self._store.stream.spans else self._plan
        wanted = self._store.wanted_ahead(self._head, plan, device.seek / device.transfer)
        return wanted if self._head else self._store.completed_to_relation(wanted)

    def _next_of_range(self) -> NDArray[np.int32]:
        """Return the wanted leaves that come next in the same range, or those of the next range that has any."""
        last = PageRanges.count - 1
        while len(leaves := self._store.wanted_in(self._range, self._head)) == 0 and self._range < last:
            self._range += 1
        return leaves

    def _divisible(self, leaves: NDArray[np.int32]) -> bool:
        """Return whether a step may read only some of these leaves, which are wanted and ahead of the head.

        If inner nodes are paged, it may not, since the order of the wanted leaves on disk is not in memory. If tuples
        wait for several leaves, these must lie on disk in key order, and there must be room for the leaf runs that a
        step in their middle divides: of those that begin behind the head, a part before and a part behind it is left.
        """
        store = self._store
        if store.paged or not store.stream.spans or len(leaves) == 0:
            return not store.paged
        return len(store.disk_order) == 0 and store.fits(0, LEAF_RUN_NBYTES * store.stream.runs_over(leaves[0]))

    def _settle(self, read: NDArray[np.int32]) -> Iterator[pa.RecordBatch]:
        """Let the tuples leave that have met all their leaves."""
        stream, step = self._store.stream, self._context.bound.step
        if stream.wanted_among(read) == stream.pages:
            for chunk in stream.chunks:
                yield from self._complete(chunk)
            self._store.release_stream(step)
            return
        for chunk in self._store.settle(read, step):
            yield from self._complete(chunk)

    def _complete(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """Complete tuples that waited for several leaves: now it is known which had no match in any."""
        if chunk.matched is None:
            return
        self._context.completed(chunk.arrival, len(chunk.rows))
        unmatched = np.flatnonzero(~chunk.matched)
        if self._context.outer and len(unmatched):
            yield from self._context.emitter.nulls(take(chunk.rows, unmatched))

    def _end(self) -> None:
        self.done, self._plan = True, None
        self._store.phase_done(eager=self.eager)
        self._store.budget.give_back(self._tuple_nbytes)
        self._context.estimate.learn(self._leaves, self._planned, self.seconds)
        self._context.counters.join_phases += 1


class _Step:
    """A part of a sweep.

    Parameters
    ----------
    context
        Context of the phases.
    leaves : int32[n]
        Leaves to read, in disk order.
    cut
        Whether to stop; None to read all of them.
    fine
        Whether that will be soon.
    """

    def __init__(
        self, context: SSIJContext, leaves: NDArray[np.int32], cut: Callable[[], bool] | None, *, fine: bool
    ) -> None:
        self._context = context
        self._fine = fine
        self._store = context.store
        self._cache = context.store.cache
        self._leaves = leaves
        self._cut = cut
        self._keep = np.ones(len(leaves), dtype=np.bool_)
        self._remove: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._chosen_for = -1
        self._chunks = context.store.stream.chunks_of(leaves)

    def run(self) -> Generator[pa.RecordBatch, None, int]:
        """Read the pages and join each with the tuples that wait for it. Return the number of leaves that were read.

        The tuples are not freed before their step is.
        """
        reach = 0
        self._store.grow()
        self._choose_resident(0)
        cached = self._cached_join()
        if cached is not None:
            self._store.pin(on=True)
        join = cached or _BlockJoin(self._context, self._leaves, self._chunks, fine=self._fine)
        try:
            for block in ReadAhead(self._context, self._leaves, self._cut, fine=self._fine).blocks():
                try:
                    yield from join.add(block)
                    self._keep_some(block)
                    self._complete_filter(block)
                finally:
                    join.wait()
                reach = block.stop
            yield from join.rest()
        finally:
            join.stop()
        if cached is not None:
            self._store.pin(on=False)
        return reach

    def _cached_join(self) -> _CachedJoin | None:
        """Return what joins the tuples once all pages are cached; None if some will not be.

        An active record tier and the filter need to see each page with its matches as it is read.
        """
        direct, tiers = self._store.direct, self._store.tiers
        equality = isinstance(self._context.bound, BoundEquality)
        if direct is None or not equality or tiers.filter is not None or tiers.records_active or not self._keep.all():
            return None
        return _CachedJoin(self._context, direct, self._chunks)

    # What stays in the cache

    def _choose_resident(self, start: int) -> None:
        """Decide ToKeep and ToRemove for the cache's current size and the pages from `start` on."""
        frames = self._cache.resident_frames
        remove = np.zeros(len(frames), dtype=np.bool_)
        demand, leaves = self._store.stream.demand, self._leaves[start:]
        if isinstance(demand, LeafMap):
            demand, leaves = values_at(demand, leaves), np.arange(len(leaves), dtype=np.int32)
        _join_kernels.choose_resident(
            demand,
            leaves,
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


class _BlockJoin:
    """Joins tuples with the leaves that they wait for, in batches of pairs that may reach over several blocks.

    Matches are staged until their batch of pairs is complete, so that a result batch is as large as the workspace
    allows, however few pages a block has.

    Parameters
    ----------
    context
        Context of the phases.
    leaves : int32[n]
        Leaves that are read.
    chunks
        Chunks of waiting tuples.
    fine
        Whether the reads will soon stop.
    """

    def __init__(self, context: SSIJContext, leaves: NDArray[np.int32], chunks: list[Chunk], *, fine: bool) -> None:
        self._leaves = len(leaves)
        self._gatherer: Workers | None = None
        most = context.store.tuples_in_a_part(context.emitter, context.bound.keys_per_tuple)
        if fine:  # what was gathered for leaves that are not read is dropped
            most = min(most, max(_STEP_LEAST, context.store.stream.rows // _STEP_SHARE))
        elif context.workers.share(most) > 1:  # one batch is gathered while another is joined
            self._gatherer, most = context.workers, most // 2
        self._pair_batches = PairBatches(leaves, context.store.stream.demand, chunks, context.bound, most)
        self._coming: Callable[[], tuple[int, Iterator[PairBatch]]] | None = None
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

    def stop(self) -> None:
        """Wait until no thread gathers pairs, and drop them."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming()

    def _next_pairs(self, block: Block, at: int) -> Iterator[pa.RecordBatch]:
        """Gather the next pairs. If too many wait for a single leaf, join all batches but the last with it now."""
        yield from self.rest()
        coming, self._coming = self._coming, None
        self._reach, batches = self._pair_batches.gather(at) if coming is None else coming()
        del coming  # and with it the batch
        for pairs in batches:
            if self._pairs is not None:
                yield from self._results.add(self._pairs, block, self._reach)
                yield from self.rest()
            self._pairs = pairs
        if self._gatherer is not None and self._reach < self._leaves:
            self._coming = self._gatherer.start(partial(self._pair_batches.gather, self._reach))


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
        self.wait()
        self._admitted = context.store.tiers.begin_admission(
            context.workers, context.store.read_buffer.frames, frame, row, count, keys
        )
        if not self._single and int(np.maximum(count, int(context.outer)).sum()) >= _MANY_RESULTS:
            yield from self._many(pairs, low, frame, row, count)
            return
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

    def _many(
        self, pairs: PairBatch, low: int, frame: NDArray[np.int32], row: NDArray[np.int32], count: NDArray[np.int32]
    ) -> Iterator[pa.RecordBatch]:
        """Yield so many results that they are batches of their own, after those staged before them."""
        context = self._context
        self._note(pairs, low)
        if self._staged is not None and self._staged.rows:
            yield self._batch(pairs)
        found, frame = np.maximum(count, 0), frame.copy()
        _result_kernels.outer_matches(frame, found, context.outer)
        found[count < 0] = 0  # who may still match in another leaf
        self._note(pairs, self._met)
        rows = pairs.rows.slice(low, len(frame))
        yield from context.emitter.emit(rows, Matches(frame, row, found), context.store.read_buffer.frames)

    def wait(self) -> None:
        """Let the record tier take in the rest of the rows found last, which other threads have begun with."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            admitted()

    def complete(self, pairs: PairBatch) -> Iterator[pa.RecordBatch]:
        """Note that the pairs of the leaves that were read have been joined, and yield what is staged."""
        self._note(pairs, self._met)
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

    def stop(self) -> None:
        """Do nothing: no thread gathers pairs."""

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Join all tuples."""
        workers = self._context.workers
        for batch in self._slices():
            parts = batch.parts(workers.share(len(batch.rows)))
            for part, results in zip(parts, workers.stream(self._join, parts), strict=True):
                self._context.completed(part.arrival, len(part.rows))
                yield from results

    def _slices(self) -> Iterator[LocatedSlice]:
        """Yield the tuples whose leaves were read, as many at a time as there is room to work on."""
        cache = self._context.store.cache
        for chunk in self._chunks:
            row_nbytes = chunk.tuple_nbytes / len(chunk.rows)
            most = self._context.store.rows_at_once(row_nbytes + self._context.emitter.row_bytes(row_nbytes))
            batch = LocatedSlice(chunk.rows, chunk.arrival, chunk.first)
            if chunk.alive is not None:
                batch = batch.only(np.flatnonzero(chunk.alive))
            for part in batch.parts(-(-len(batch.rows) // most)):
                met = cache.frame_of(part.leaf) >= 0
                if met.all():
                    yield part
                elif met.any():
                    yield part.only(np.flatnonzero(met))

    def _join(self, part: LocatedSlice) -> list[pa.RecordBatch]:
        """Join some tuples. Changes nothing, so that threads may run it at once."""
        context, cache = self._context, self._context.store.cache
        assert isinstance(context.bound, BoundEquality)
        found = self._lookup.probe(
            cache.buffer, context.bound.words(part.rows), cache.frame_of(part.leaf), context.outer
        )
        return list(context.emitter.emit_found(part.rows, found.source, found.columns))
