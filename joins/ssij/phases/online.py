"""Online phase for all predicates and keys (the paper's algorithm 1), in key order.

Stream tuples are sorted and looked up in the index. They join with the cached pages; the others wait for the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins import _result_kernels
from headrace.joins.emitter import Matches
from headrace.joins.input_buffer import arrivals_at
from headrace.joins.predicates.search_keys import find, locate
from headrace.joins.ssij.memory import _index_kernels
from headrace.joins.ssij.memory.stream_buffer import Chunk, ascends, by_leaves
from headrace.joins.ssij.phases.base import ProbingPhase, sorted_positions
from headrace.storage.format import Keys, take

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.predicates import Bound
    from headrace.joins.predicates.search_keys import SearchKeys
    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.filter_tier import FilterTier
    from headrace.storage.read import PageCache
    from headrace.storage.tree import Snapshot

__all__ = ["Located", "OnlinePhase", "Probe", "Prober"]


@dataclass(frozen=True, slots=True)
class Located:
    """Stream tuples sorted by key, and the leaves in which their matches may be.

    Attributes
    ----------
    order : int32[n]
        Position of each tuple in the batch. Tuples that cannot match are left out.
    keys
        Keys or ranges that the tuples search for.
    first, last : int32[n]
        First and last leaf of each tuple; the first ones ascend.
    """

    order: NDArray[np.int32]
    keys: SearchKeys
    first: NDArray[np.int32]
    last: NDArray[np.int32]

    def only(self, which: NDArray[np.intp]) -> Located:
        """Return some of the tuples."""
        return Located(self.order[which], self.keys.take(which), self.first[which], self.last[which])


@dataclass(frozen=True, slots=True)
class Probe:
    """A batch, looked up in the index and in the cache as both are now.

    Attributes
    ----------
    batch
        The batch.
    single, spanning
        Tuples that may match in one leaf, and in several.
    frame : int32[n]
        Frame of the leaf of each single tuple; -1 if it is not cached.
    runs : int32[m]
        Number of runs of uncached leaves of each spanning tuple.
    leaves
        Number of leaves of the relation.
    asked, absent
        Tuples that the filter was asked for, and those whose key it knew to be absent, which are left out.
    """

    batch: BatchSlice
    single: Located
    spanning: Located
    frame: NDArray[np.int32]
    runs: NDArray[np.int32]
    leaves: int
    asked: int = 0
    absent: int = 0

    def impossible(self) -> NDArray[np.int32]:
        """Return the positions of the tuples that cannot match."""
        rows = len(self.batch.rows)
        if len(self.single.order) + len(self.spanning.order) == rows:
            return np.empty(0, dtype=np.int32)
        possible = np.zeros(rows, dtype=np.bool_)
        possible[self.single.order] = True
        possible[self.spanning.order] = True
        return np.flatnonzero(~possible).astype(np.int32)

    @property
    def row_nbytes(self) -> float:
        """Bytes of a stream tuple."""
        return self.batch.rows.nbytes / max(1, len(self.batch.rows))

    @property
    def leaf_runs(self) -> tuple[int, int]:
        """Number of leaf runs that tuples will wait for, and most leaves in them."""
        single = int((self.frame < 0).sum())
        runs = single + int(self.runs.sum())
        spanned = int((self.spanning.last - self.spanning.first).sum()) + len(self.spanning.order)
        return runs, min(single + spanned, self.leaves)


class Prober:
    """Looks batches up. Changes nothing, so that several threads may use it at once.

    Parameters
    ----------
    snapshot
        Snapshot of the relation, for its index.
    bound
        Bound predicate.
    cache
        Page cache.
    tier
        Negative filter.
    """

    def __init__(self, snapshot: Snapshot, bound: Bound, cache: PageCache, tier: FilterTier | None = None) -> None:
        self._snapshot = snapshot
        self._bound = bound
        self._cache = cache
        self._filter = tier

    def probe(self, batch: BatchSlice) -> Probe:
        """Look a batch up in the index and in the cache."""
        located = self._locate(batch.rows)
        single, spanning = located, located.only(np.zeros(0, dtype=np.intp))
        if not np.array_equal(located.first, located.last):
            spans = located.last > located.first
            single, spanning = located.only(np.flatnonzero(~spans)), located.only(np.flatnonzero(spans))
        runs = np.zeros(len(spanning.order), dtype=np.int32)
        _index_kernels.count_leaf_runs(spanning.first, spanning.last, self._cache.frame_map, runs)
        leaves, frame = self._snapshot.leaves, self._cache.frame_of(single.first)
        if self._filter is None or not self._filter.active or not isinstance(single.keys, Keys):
            return Probe(batch, single, spanning, frame, runs, leaves)
        asked = frame < 0
        stay = np.flatnonzero(~self._filter.absent(single.first, single.keys, asked))
        absent = len(frame) - len(stay)
        if absent:
            single, frame = single.only(stay), frame[stay]
        return Probe(batch, single, spanning, frame, runs, leaves, int(asked.sum()), absent)

    def _locate(self, rows: pa.RecordBatch) -> Located:
        keys, valid = self._bound.encode(rows)
        if self._snapshot.leaves == 0:
            valid = np.zeros(len(rows), dtype=np.bool_)
        order = sorted_positions(keys.prefix, valid, self._snapshot.key_range)
        keys = keys.take(order)
        first, last = locate(self._snapshot, keys)
        if not (ascends(first) and ascends(last)):
            again = by_leaves(first, last)
            order, keys, first, last = order[again], keys.take(again), first[again], last[again]
        return Located(order, keys, first, last)


class OnlinePhase(ProbingPhase[Probe]):
    """Joins a batch with the cached pages, in key order.

    Parameters
    ----------
    context
        Context of the phases.
    """

    def __init__(self, context: SSIJContext) -> None:
        super().__init__(context)
        self._prober = Prober(context.snapshot, context.bound, context.store.cache, context.store.tiers.filter)

    def run(self) -> Iterator[pa.RecordBatch]:
        """Join the batch with the cached pages and put the tuples that need others into the stream buffer.

        The stream buffer must have room for the waiting tuples.
        """
        begin, probes = self._context.progress.busy_seconds, self._probes
        self._context.counters.online_phases += 1
        self._store.pin(on=True)
        for probe in probes:
            self._note(probe)
        waiting: list[list[Chunk]] = []
        if self._context.bound.at_most_one(unique=self._snapshot.unique):
            for results in self._context.workers.map(self._join_unique, probes):
                yield from results
        else:
            for probe, found in zip(probes, self._context.workers.map(self._find_single, probes), strict=True):
                yield from self._join_single(probe, *found)
                waiting.append((yield from self._join_spanning(probe)))
        self._store.pin(on=False)
        for chunks in filter(None, (*map(self._single_chunks, probes), *waiting)):
            self._store.hold(chunks)
        self._context.counters.online_seconds += self._context.progress.busy_seconds - begin

    def _probe(self, batch: BatchSlice) -> Probe:
        return self._prober.probe(batch)

    def _note(self, probe: Probe) -> None:
        """Count the tuples that this phase completes: those whose leaf is cached or that cannot match."""
        self._note_looked_up(probe.frame, int((probe.frame < 0).sum()), probe.asked, probe.absent)
        for rows in (probe.single.order[probe.frame >= 0], probe.impossible()):
            self._context.counters.rows_cached += len(rows)
            self._context.completed(arrivals_at(probe.batch.arrival, rows), len(rows))

    def _join_unique(self, probe: Probe) -> list[pa.RecordBatch]:
        """Join tuples that have at most one match. Changes nothing, so that threads may run it at once."""
        single, rows, buffer = probe.single, probe.batch.rows, self._store.cache.buffer
        row, count = find(self._snapshot, buffer, probe.frame, single.keys)
        place = np.full(len(rows), -1, dtype=np.int32)
        _result_kernels.place_matches(single.order, probe.frame, count, self._context.outer, place)
        if self._context.outer:
            place[probe.impossible()] = -2
        return list(self._context.emitter.emit_placed(rows, place, probe.frame, row, buffer))

    def _find_single(self, probe: Probe) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return first row and number of rows for tuples that may match in one leaf. Threads may run it at once."""
        return find(self._snapshot, self._store.cache.buffer, probe.frame, probe.single.keys)

    def _join_single(self, probe: Probe, row: NDArray[np.int32], count: NDArray[np.int32]) -> Iterator[pa.RecordBatch]:
        """Join the tuples that may match in one leaf."""
        context, single, buffer = self._context, probe.single, self._store.cache.buffer
        frame = probe.frame.copy()
        _result_kernels.outer_matches(frame, count, context.outer)
        matches = Matches(frame, row, count, single.order)
        yield from context.emitter.emit(probe.batch.rows, matches, buffer)
        impossible = probe.impossible()
        if context.outer and len(impossible):
            yield from context.emitter.nulls(take(probe.batch.rows, impossible))

    def _single_chunks(self, probe: Probe) -> list[Chunk]:
        waiting = np.flatnonzero(probe.frame < 0)
        if len(waiting) == 0:
            return []
        order, first = probe.single.order[waiting], probe.single.first[waiting]
        return self._store.stream.chunks_at(probe.batch.rows, probe.batch.arrival, order, first)

    def _join_spanning(self, probe: Probe) -> Generator[pa.RecordBatch, None, list[Chunk]]:
        """Join the tuples that may match in several leaves with cached pages. Return the waiting tuples."""
        spanning = probe.spanning
        if len(spanning.order) == 0:
            return []
        matched = np.zeros(len(spanning.order), dtype=np.bool_)
        yield from self._join_cached_pairs(probe, matched)
        done = np.flatnonzero(probe.runs == 0)
        self._context.counters.rows_cached += len(done)
        self._context.completed(arrivals_at(probe.batch.arrival, spanning.order[done]), len(done))
        unmatched = spanning.order[done[~matched[done]]]
        if self._context.outer and len(unmatched):
            yield from self._context.emitter.nulls(take(probe.batch.rows, unmatched))
        return self._spanning_chunks(probe, matched)

    def _join_cached_pairs(self, probe: Probe, matched: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        spanning, cache = probe.spanning, self._store.cache
        most = self._store.rows_at_once(probe.row_nbytes)
        tuples, frames = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
        cursor = np.zeros(2, dtype=np.int64)
        while size := _index_kernels.cached_pairs(
            spanning.first, spanning.last, cache.frame_map, cursor, tuples, frames
        ):
            pair, frame = tuples[:size], frames[:size]
            row, count = find(self._snapshot, cache.buffer, frame, spanning.keys.take(pair))
            self._store.cache.touch(frame)
            matched[pair[count > 0]] = True
            found = Matches(frame, row, count, spanning.order[pair])
            yield from self._context.emitter.emit(probe.batch.rows, found, cache.buffer)

    def _spanning_chunks(self, probe: Probe, matched: NDArray[np.bool_]) -> list[Chunk]:
        waiting = np.flatnonzero(probe.runs > 0).astype(np.int32)
        if len(waiting) == 0:
            return []
        size = int(probe.runs.sum())
        first, last, tuples = (np.empty(size, dtype=np.int32) for _ in range(3))
        spanning = probe.spanning
        _index_kernels.list_leaf_runs(
            spanning.first, spanning.last, self._store.cache.frame_map, waiting, first, last, tuples
        )
        sort = by_leaves(first, last)  # runs of adjacent tuples interleave
        first, last = first[sort], last[sort]
        order = spanning.order[waiting]
        rows = take(probe.batch.rows, order)
        arrival = arrivals_at(probe.batch.arrival, order)
        return [Chunk(rows, arrival, first, last, tuples[sort], matched[waiting], ascends(last))]
