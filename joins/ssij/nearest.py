"""SSIJ's online phase for as-of joins: tuples that look for the one nearest row.

That row lies in the leaf where the tuple's value falls, unless the value falls between two leaves: then it may be the
last row of the leaf before, or the first of the leaf behind, which the index cannot tell. So a tuple is looked up in
one leaf, as with equality, and only if that leaf has no row on the right side goes on to the neighbour. If the
neighbour is not cached the tuple waits for it; leaves read in vain cost what a miss costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins import _result_kernels
from headrace.joins._input_buffer import Postponed, arrivals_at
from headrace.joins._sought import find, locate
from headrace.joins.ssij.phase import ProbingPhase
from headrace.joins.ssij.probe import sorted_positions, waiting_nbytes
from headrace.joins.ssij.stream_buffer import Chunk, ascending

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.joins._input_buffer import Piece
    from headrace.joins._sought import Sought

__all__ = ["NearestPhase"]


@dataclass(frozen=True, slots=True)
class _Probe:
    """A batch, looked up as far as pages are cached.

    Attributes
    ----------
    piece
        The batch.
    order : int32[n]
        Position of each tuple that a leaf can tell about.
    leaf, frame : int32[n]
        The leaf that can, and where it is cached, or -1.
    row, count : int32[n]
        What was found there.
    leaves
        Of the relation.
    """

    piece: Piece
    order: NDArray[np.int32]
    leaf: NDArray[np.int32]
    frame: NDArray[np.int32]
    row: NDArray[np.int32]
    count: NDArray[np.int32]
    leaves: int

    @property
    def waiting_nbytes(self) -> tuple[int, int]:
        """The most that the stream buffer and the inverted index will grow by."""
        waiting = int((self.frame < 0).sum())
        return waiting_nbytes(self.piece, waiting, min(waiting, self.leaves))

    def lonely(self) -> NDArray[np.int32]:
        """Return the positions of the tuples that no leaf can tell about."""
        told = np.zeros(len(self.piece.rows), dtype=np.bool_)
        told[self.order] = True
        return np.flatnonzero(~told).astype(np.int32)


class NearestPhase(ProbingPhase[_Probe]):
    """Joins a batch with what is cached, going on to neighbours where a leaf cannot tell."""

    def run(self) -> Iterator[pa.RecordBatch]:
        """Output what was found and put the tuples that need other pages into the stream buffer, which has room."""
        begin, probes = self._state.progress.busy_seconds, self._probes
        self._state.counters.online_phases += 1
        self._store.pin(on=True)
        for probe in probes:
            self._store.cache.touch(probe.frame)
            for rows in (probe.order[probe.frame >= 0], probe.lonely()):
                self._state.counters.rows_cached += len(rows)
                self._state.completed(arrivals_at(probe.piece.arrival, rows), len(rows))
            yield from self._found(probe)
        self._store.pin(on=False)
        for chunk in map(self._waiting, probes):
            if chunk is not None:
                self._store.hold(chunk)
        self._state.counters.online_seconds += self._state.progress.busy_seconds - begin

    def _probe(self, piece: Piece) -> _Probe:
        sought, valid = self._state.bound.encode(piece.rows)
        leaves = len(self._snapshot.leaf_pages)
        if leaves == 0:
            valid = np.zeros(len(piece.rows), dtype=np.bool_)
        order = sorted_positions(sought.prefix, valid, self._snapshot.separators)
        sought = sought.take(order)
        first, last = locate(self._snapshot, sought)
        start = last if self._state.bound.step < 0 else first
        if isinstance(piece, Postponed):
            start = piece.leaf[order]
        elif len(start) > 1 and bool((start[1:] < start[:-1]).any()):
            again = ascending(start)
            order, start, sought = order[again], start[again], sought.take(again)
            first, last = first[again], last[again]
        leaf, found = start.copy(), np.zeros((3, len(order)), dtype=np.int32)
        told = self._look(sought, leaf, (first, last), found)
        frame, row, count = found[:, told]
        return _Probe(piece, order[told], leaf[told], frame, row, count, leaves)

    def _look(
        self,
        sought: Sought,
        leaf: NDArray[np.int32],
        bounds: tuple[NDArray[np.int32], NDArray[np.int32]],
        found: NDArray[np.int32],
    ) -> NDArray[np.intp]:
        """Look tuples up in cached leaves, which move on to the neighbours that can tell.

        `found` becomes frame, row and count of each. Tuples whose leaf would lie outside of `bounds` have no match and
        are left out of the positions returned.
        """
        told = np.ones(len(leaf), dtype=np.bool_)
        frame, row, count = found
        which = np.arange(len(leaf))
        while len(which):
            inside = (bounds[0][which] <= leaf[which]) & (leaf[which] <= bounds[1][which])
            told[which[~inside]] = False
            which = which[inside]
            frame[which] = self._store.cache.frame_of(leaf[which])
            which = which[frame[which] >= 0]
            row[which], count[which] = find(self._snapshot, self._store.cache.buffer, frame[which], sought.take(which))
            which = which[count[which] < 0]
            leaf[which] += np.int32(self._state.bound.step)
        return np.flatnonzero(told)

    def _found(self, probe: _Probe) -> Iterator[pa.RecordBatch]:
        outer = self._state.outer
        place = np.full(len(probe.piece.rows), -1, dtype=np.int32)
        _result_kernels.place_matches(probe.order, probe.frame, probe.count, outer, place)
        if outer:
            place[probe.lonely()] = -2
        buffer = self._store.cache.buffer
        yield from self._state.emitter.emit_placed(probe.piece.rows, place, probe.frame, probe.row, buffer)

    def _waiting(self, probe: _Probe) -> Chunk | None:
        waiting = np.flatnonzero(probe.frame < 0)
        if len(waiting) == 0:
            return None
        waiting = waiting[ascending(probe.leaf[waiting])]
        order, leaf = probe.order[waiting], probe.leaf[waiting]
        rows, arrival = probe.piece.rows.take(pa.array(order)), arrivals_at(probe.piece.arrival, order)
        return Chunk(rows, arrival, leaf, leaf, later=np.zeros(len(leaf), dtype=np.bool_))
