"""SSIJ's online phase for unique keys of one word: stream tuples stay in order, nothing but what has to wait is sorted.

Twin of `headrace.joins.ssij.online`, which takes all other relations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins._emit import rows_at
from headrace.joins._input_buffer import arrivals_at
from headrace.joins.predicates import BoundEquality
from headrace.joins.ssij.phase import ProbingPhase
from headrace.joins.ssij.probe import waiting_nbytes
from headrace.joins.ssij.stream_buffer import Chunk, ascending

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins._input_buffer import Piece
    from headrace.joins.ssij.direct_lookup import DirectLookup
    from headrace.joins.ssij.state import SSIJState
    from headrace.storage.format import KeyWords

__all__ = ["DirectPhase", "DirectProbe"]


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """A batch, looked up in the index and in the cache as both are now.

    Attributes
    ----------
    piece
        The batch.
    keys
        Of its tuples.
    leaf, frame : int32[n]
        Where the match of each tuple may be. Frame -1 if the leaf is not cached, -2 if the tuple can match nothing.
    waiting
        How many have frame -1.
    leaves
        Of the relation.
    asked, absent
        Tuples that the filter was asked for, and those of them that it knew to have no match; their frame is -2.
    """

    piece: Piece
    keys: KeyWords
    leaf: NDArray[np.int32]
    frame: NDArray[np.int32]
    waiting: int
    leaves: int
    asked: int = 0
    absent: int = 0

    @property
    def waiting_nbytes(self) -> tuple[int, int]:
        """The most that the stream buffer and the inverted index will grow by."""
        return waiting_nbytes(self.piece, self.waiting, min(self.waiting, self.leaves))


@dataclass(frozen=True, slots=True)
class _Joined:
    """A part of a batch: what was known of it, its results, and the tuples of it that wait."""

    probe: DirectProbe
    results: list[pa.RecordBatch]
    chunk: Chunk | None


class DirectPhase(ProbingPhase[DirectProbe]):
    """Joins a batch with what is cached, in the order of the stream.

    Parameters
    ----------
    state
        Of the operator.
    lookup
        Of the relation.
    """

    def __init__(self, state: SSIJState, lookup: DirectLookup) -> None:
        super().__init__(state)
        self._lookup = lookup
        self._parts: Sequence[Piece | DirectProbe] = []

    def probe(self, piece: Piece) -> list[tuple[int, int]]:
        """As all phases do; but if there is room for the whole batch to wait, who joins a part looks it up first."""
        rows = len(piece.rows)
        most = waiting_nbytes(piece, rows, min(rows, len(self._snapshot.leaf_pages)))
        if self._store.fits(*most):
            self._parts = piece.parts(self._state.workers.share(rows))
            return [most]
        growth = super().probe(piece)
        self._parts, self._probes = self._probes, []
        return growth

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield what was found in cached pages and put the tuples that need others into the stream buffer.

        The stream buffer must have room for what waits.
        """
        begin, chunks = self._state.busy(), []
        self._state.counters.online_phases += 1
        self._store.pin(on=True)
        for joined in self._state.workers.stream(self._join, self._parts):
            self._note(joined.probe)
            self._probes.append(joined.probe)
            chunks.append(joined.chunk)
            yield from joined.results
        self._store.pin(on=False)
        for chunk in chunks:
            if chunk is not None:
                self._store.hold(chunk)
        if self._store.tiers.whole is not None:
            self._store.tiers.whole.advance(sum(len(probe.frame) for probe in self._probes))
        self._state.counters.online_seconds += self._state.busy() - begin

    def _probe(self, piece: Piece) -> DirectProbe:
        cache, bound = self._store.cache, self._state.bound
        assert isinstance(bound, BoundEquality)
        keys = bound.words(piece.rows)
        leaf, frame, waiting = self._lookup.locate(keys, cache.frame_map)
        absent, leaves = self._ask(keys, leaf, frame), len(self._snapshot.leaf_pages)
        return DirectProbe(piece, keys, leaf, frame, waiting - absent, leaves, waiting, absent)

    def _join(self, part: Piece | DirectProbe) -> _Joined:
        """Find what matches in cached pages. Changes nothing, so that threads may do it at once."""
        probe = part if isinstance(part, DirectProbe) else self._probe(part)
        found = self._lookup.probe(self._store.cache.buffer, probe.keys, probe.frame, self._state.outer)
        results = list(self._state.emitter.emit_found(probe.piece.rows, found.source, found.columns))
        return _Joined(probe, results, _chunk(probe) if probe.waiting else None)

    def _ask(self, keys: KeyWords, leaf: NDArray[np.int32], frame: NDArray[np.int32]) -> int:
        """Let tuples that the filter knows to have no match wait for nothing; return how many."""
        tier = self._store.tiers.filter
        if tier is None or not tier.awake:
            return 0
        absent = tier.absent(leaf, keys.keys(), frame == -1)
        frame[absent] = -2
        return int(absent.sum())

    def _note(self, probe: DirectProbe) -> None:
        """Count the tuples whose leaf is cached or that can match nothing: this phase completes them."""
        self._note_looked_up(probe.frame, probe.waiting, probe.asked, probe.absent)
        arrival, done = probe.piece.arrival, len(probe.frame) - probe.waiting
        if isinstance(arrival, np.ndarray):
            arrival = arrival[probe.frame != -1]
        self._state.counters.rows_cached += done
        self._state.completed(arrival, done)


def _chunk(probe: DirectProbe) -> Chunk:
    """Return the tuples that wait, in the order of their leaves."""
    waiting = np.flatnonzero(probe.frame == -1).astype(np.int32)
    order = ascending(probe.leaf[waiting])
    waiting = waiting[order]
    leaf = probe.leaf[waiting]
    return Chunk(rows_at(probe.piece.rows, waiting), arrivals_at(probe.piece.arrival, waiting), leaf, leaf)
