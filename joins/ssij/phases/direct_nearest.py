"""Online phase for as-of joins with unique keys of one word, in stream order: only tuples that have to wait are sorted.

Twin of `headrace.joins.ssij.phases.nearest`, which serves all other keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from headrace.joins.emitter import rows_at
from headrace.joins.input_buffer import DeferredSlice, arrivals_at, compact
from headrace.joins.predicates import BoundRanges
from headrace.joins.ssij.memory.direct_lookup import LookupResult
from headrace.joins.ssij.memory.stream_buffer import DEFERRAL_NBYTES, Chunk, ascending
from headrace.joins.ssij.phases.base import ProbingPhase
from headrace.storage.format import KeyWords

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.predicates import NearestWords
    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup

__all__ = ["DirectNearestPhase"]

_NOTHING = LookupResult(np.empty(0, dtype=np.int32), [])


@dataclass(frozen=True, slots=True)
class _Probe:
    """A batch, looked up as far as pages are cached.

    Attributes
    ----------
    batch
        The batch.
    leaf, frame : int32[n]
        Leaf that decides the match of each tuple, and its frame; frame -1 if the leaf is not cached, -2 if the tuple
        has no match.
    found
        Results of the other tuples.
    waiting
        Number of tuples with frame -1.
    leaves
        Number of leaves of the relation.
    """

    batch: BatchSlice
    leaf: NDArray[np.int32]
    frame: NDArray[np.int32]
    found: LookupResult
    waiting: int
    leaves: int

    @property
    def leaf_runs(self) -> tuple[int, int]:
        """Number of leaf runs that tuples will wait for, and most leaves in them."""
        return self.waiting, min(self.waiting, self.leaves)

    def chunk(self) -> Chunk | None:
        """Return the tuples that wait, in the order of their leaves; None if there are none."""
        if not self.waiting:
            return None
        waiting = np.flatnonzero(self.frame == -1).astype(np.int32)
        waiting = waiting[ascending(self.leaf[waiting])]
        rows, arrival, leaf = compact(rows_at(self.batch.rows, waiting)), self.batch.arrival, self.leaf[waiting]
        undecided = np.zeros(len(leaf), dtype=np.bool_)
        return Chunk(rows, arrivals_at(arrival, waiting), leaf, leaf, undecided=undecided)


class DirectNearestPhase(ProbingPhase[_Probe]):
    """Joins a batch with the cached pages, in stream order.

    Which tuples wait is known only when their rows have been searched, since a leaf may not be able to decide. So
    `probe` finds the results, and `run` yields them.

    Parameters
    ----------
    context
        Context of the phases.
    lookup
        Direct look-up of the relation's keys.
    """

    mark_nbytes: ClassVar = 1 + DEFERRAL_NBYTES

    def __init__(self, context: SSIJContext, lookup: DirectLookup) -> None:
        super().__init__(context)
        self._lookup = lookup

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the matches and put the tuples that need other pages into the stream buffer.

        The stream buffer must have room for the waiting tuples.
        """
        begin, context = self._context.progress.busy_seconds, self._context
        context.counters.online_phases += 1
        self._store.pin(on=True)
        for probe in self._probes:
            self._note(probe)
            yield from context.emitter.emit_found(probe.batch.rows, probe.found.source, probe.found.columns)
        self._store.pin(on=False)
        for chunk in (probe.chunk() for probe in self._probes):
            if chunk is not None:
                self._store.hold([chunk])
        self._probes = [replace(probe, found=_NOTHING) for probe in self._probes]  # a join phase may follow
        context.counters.online_seconds += context.progress.busy_seconds - begin

    def _probe(self, batch: BatchSlice) -> _Probe:
        cache, bound = self._store.cache, self._context.bound
        assert isinstance(bound, BoundRanges)
        words = bound.nearest_words(batch.rows)
        leaf, frame = self._locate(batch, words)
        found = self._lookup.probe_nearest(cache.buffer, words, leaf, frame, cache.frame_array, self._context.outer)
        return _Probe(batch, leaf, frame, found, int((frame == -1).sum()), self._snapshot.leaves)

    def _locate(self, batch: BatchSlice, words: NearestWords) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        frame_of = self._store.cache.frame_array
        if isinstance(batch, DeferredSlice):
            leaf = batch.leaf.copy()
            return leaf, self._lookup.resume(words, leaf, frame_of)
        leaf, frame, _ = self._lookup.locate(KeyWords(words.near, valid=words.valid), frame_of)
        return leaf, frame

    def _note(self, probe: _Probe) -> None:
        """Count the tuples that this phase completes: those whose leaf is cached or that cannot match."""
        self._store.cache.touch(probe.frame)
        arrival, done = probe.batch.arrival, len(probe.frame) - probe.waiting
        if isinstance(arrival, np.ndarray):
            arrival = arrival[probe.frame != -1]
        self._context.counters.rows_cached += done
        self._context.completed(arrival, done)
