"""Online phase for unique keys of one word, in stream order: only tuples that have to wait are sorted.

Twin of `headrace.joins.ssij.phases.online`, which serves all other relations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.predicates import BoundEquality
from headrace.joins.ssij.memory.stream_buffer import Chunk, ascending
from headrace.joins.ssij.phases.base import ProbingPhase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup
    from headrace.storage.format import KeyWords

__all__ = ["DirectPhase", "DirectProbe"]


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """A batch, looked up in the index and in the cache as both are now.

    Attributes
    ----------
    batch
        The batch.
    keys
        Keys of its tuples.
    leaf, frame : int32[n]
        Leaf that may hold the match of each tuple, and its frame; frame -1 if the leaf is not cached, -2 if the tuple
        cannot match.
    waiting
        Number of tuples with frame -1.
    leaves
        Number of leaves of the relation.
    asked, absent
        Tuples that the filter was asked for, and those whose key it knew to be absent; their frame is -2.
    """

    batch: BatchSlice
    keys: KeyWords
    leaf: NDArray[np.int32]
    frame: NDArray[np.int32]
    waiting: int
    leaves: int
    asked: int = 0
    absent: int = 0

    @property
    def leaf_runs(self) -> tuple[int, int]:
        """Number of leaf runs that tuples will wait for, and most leaves in them."""
        return self.waiting, min(self.waiting, self.leaves)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A part of a batch: its probe, its results, and the tuples of it that wait."""

    probe: DirectProbe
    results: list[pa.RecordBatch]
    chunks: list[Chunk]


class DirectPhase(ProbingPhase[DirectProbe]):
    """Joins a batch with the cached pages, in stream order.

    Parameters
    ----------
    context
        Context of the phases.
    lookup
        Direct look-up of the relation's keys.
    """

    def __init__(self, context: SSIJContext, lookup: DirectLookup) -> None:
        super().__init__(context)
        self._lookup = lookup
        self._parts: Sequence[BatchSlice | DirectProbe] = []

    def probe(self, batch: BatchSlice) -> list[tuple[int, int]]:
        """Look a batch up as all phases do, unless there is room for all of it to wait.

        In that case each thread looks its part up just before joining it, and `run` does both.
        """
        rows = len(batch.rows)
        tuples, index = self._waiting_nbytes(batch, rows, min(rows, self._snapshot.leaves))
        most = tuples + self._store.stream.dictionaries_growth(batch.rows), index
        if self._store.fits(*most):
            self._parts = batch.parts(self._context.workers.share(rows))
            return [most]
        growth = super().probe(batch)
        self._parts, self._probes = self._probes, []
        return growth

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the matches in cached pages and put the tuples that need other pages into the stream buffer.

        The stream buffer must have room for the waiting tuples.
        """
        begin, waiting = self._context.progress.busy_seconds, []
        self._context.counters.online_phases += 1
        self._store.pin(on=True)
        for joined in self._context.workers.stream(self._join, self._parts):
            self._note(joined.probe)
            self._probes.append(joined.probe)
            waiting.append(joined.chunks)
            yield from joined.results
        self._store.pin(on=False)
        for chunks in filter(None, waiting):
            self._store.hold(chunks)
        if self._store.tiers.rows is not None:
            looked_up = sum(len(probe.frame) for probe in self._probes)
            self._store.tiers.rows.advance(looked_up, self._store.try_make_room)
        self._context.counters.online_seconds += self._context.progress.busy_seconds - begin

    def _probe(self, batch: BatchSlice) -> DirectProbe:
        cache, bound = self._store.cache, self._context.bound
        assert isinstance(bound, BoundEquality)
        keys = bound.words(batch.rows)
        leaf, frame, waiting = self._lookup.locate(keys, cache.frame_array)
        absent, leaves = self._ask_filter(keys, leaf, frame), self._snapshot.leaves
        return DirectProbe(batch, keys, leaf, frame, waiting - absent, leaves, waiting, absent)

    def _join(self, part: BatchSlice | DirectProbe) -> _Joined:
        """Find the matches in cached pages. Changes nothing, so that threads may run it at once."""
        probe = part if isinstance(part, DirectProbe) else self._probe(part)
        found = self._lookup.probe(self._store.cache.buffer, probe.keys, probe.frame, self._context.outer)
        results = list(self._context.emitter.emit_found(probe.batch.rows, found.source, found.columns))
        return _Joined(probe, results, self._waiting_chunks(probe) if probe.waiting else [])

    def _waiting_chunks(self, probe: DirectProbe) -> list[Chunk]:
        """Return the tuples that wait, in the order of their leaves."""
        waiting = np.flatnonzero(probe.frame == -1).astype(np.int32)
        waiting = waiting[ascending(probe.leaf[waiting])]
        return self._store.stream.chunks_at(probe.batch.rows, probe.batch.arrival, waiting, probe.leaf[waiting])

    def _ask_filter(self, keys: KeyWords, leaf: NDArray[np.int32], frame: NDArray[np.int32]) -> int:
        """Exclude tuples whose key the filter knows to be absent from waiting; return how many."""
        tier = self._store.tiers.filter
        if tier is None or not tier.active:
            return 0
        absent = tier.absent(leaf, keys.keys(), frame == -1)
        frame[absent] = -2
        return int(absent.sum())

    def _note(self, probe: DirectProbe) -> None:
        """Count the tuples that this phase completes: those whose leaf is cached or that cannot match."""
        self._note_looked_up(probe.frame, probe.waiting, probe.asked, probe.absent)
        arrival, done = probe.batch.arrival, len(probe.frame) - probe.waiting
        if isinstance(arrival, np.ndarray):
            arrival = arrival[probe.frame != -1]
        self._context.counters.rows_cached += done
        self._context.completed(arrival, done)
