"""Online phase for as-of joins: each tuple looks for the one nearest row.

That row lies in the leaf where the tuple's value falls, unless the value falls between two leaves. Then it may be the
last row of the leaf before or the first row of the leaf behind, which the index cannot tell. So a tuple is looked up in
one leaf, as with equality, and only if that leaf has no row on the right side goes on to the neighbor. If the neighbor
is not cached, the tuple waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from headrace.joins import _result_kernels
from headrace.joins.input_buffer import DeferredSlice, arrivals_at
from headrace.joins.predicates.search_keys import find, locate
from headrace.joins.ssij.memory.stream_buffer import DEFERRAL_NBYTES, Chunk, ascending
from headrace.joins.ssij.phases.base import ProbingPhase, sorted_positions
from headrace.storage.format import take

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.predicates.search_keys import SearchKeys

__all__ = ["NearestPhase"]


@dataclass(frozen=True, slots=True)
class _Probe:
    """A batch, looked up as far as pages are cached.

    Attributes
    ----------
    batch
        The batch.
    order : int32[n]
        Position of each tuple that may match.
    leaf, frame : int32[n]
        Leaf that decides its match, and the frame of that leaf or -1.
    row, count : int32[n]
        First row and number of rows found there.
    leaves
        Number of leaves of the relation.
    """

    batch: BatchSlice
    order: NDArray[np.int32]
    leaf: NDArray[np.int32]
    frame: NDArray[np.int32]
    row: NDArray[np.int32]
    count: NDArray[np.int32]
    leaves: int

    @property
    def leaf_runs(self) -> tuple[int, int]:
        """Number of leaf runs that tuples will wait for, and most leaves in them."""
        waiting = int((self.frame < 0).sum())
        return waiting, min(waiting, self.leaves)

    def unmatched(self) -> NDArray[np.int32]:
        """Return the positions of the tuples that cannot match in any leaf."""
        possible = np.zeros(len(self.batch.rows), dtype=np.bool_)
        possible[self.order] = True
        return np.flatnonzero(~possible).astype(np.int32)


class NearestPhase(ProbingPhase[_Probe]):
    """Joins a batch with the cached pages, moving on to neighboring leaves where a leaf cannot decide."""

    mark_nbytes: ClassVar = 1 + DEFERRAL_NBYTES

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the matches and put the tuples that need other pages into the stream buffer.

        The stream buffer must have room for the waiting tuples.
        """
        begin, probes = self._context.progress.busy_seconds, self._probes
        self._context.counters.online_phases += 1
        self._store.pin(on=True)
        for probe in probes:
            self._store.cache.touch(probe.frame)
            for rows in (probe.order[probe.frame >= 0], probe.unmatched()):
                self._context.counters.rows_cached += len(rows)
                self._context.completed(arrivals_at(probe.batch.arrival, rows), len(rows))
            yield from self._found(probe)
        self._store.pin(on=False)
        for chunk in map(self._waiting, probes):
            if chunk is not None:
                self._store.hold([chunk])
        self._context.counters.online_seconds += self._context.progress.busy_seconds - begin

    def _probe(self, batch: BatchSlice) -> _Probe:
        keys, valid = self._context.bound.encode(batch.rows)
        leaves = self._snapshot.leaves
        if leaves == 0:
            valid = np.zeros(len(batch.rows), dtype=np.bool_)
        order = sorted_positions(keys.prefix, valid, self._snapshot.key_range)
        keys = keys.take(order)
        first, last = locate(self._snapshot, keys)
        start = last if self._context.bound.step < 0 else first
        if isinstance(batch, DeferredSlice):
            start = batch.leaf[order]
        elif len(start) > 1 and bool((start[1:] < start[:-1]).any()):
            again = ascending(start)
            order, start, keys = order[again], start[again], keys.take(again)
            first, last = first[again], last[again]
        leaf, found = start.copy(), np.zeros((3, len(order)), dtype=np.int32)
        possible = self._look(keys, leaf, (first, last), found)
        frame, row, count = (part[possible] for part in found)
        return _Probe(batch, order[possible], leaf[possible], frame, row, count, leaves)

    def _look(
        self,
        keys: SearchKeys,
        leaf: NDArray[np.int32],
        bounds: tuple[NDArray[np.int32], NDArray[np.int32]],
        found: NDArray[np.int32],
    ) -> NDArray[np.intp]:
        """Look tuples up in cached leaves; move on to the neighbor where a leaf cannot decide.

        `found` becomes frame, row, and count of each tuple. A tuple whose leaf would lie outside of `bounds` has no
        match and is left out of the positions returned.
        """
        possible = np.ones(len(leaf), dtype=np.bool_)
        frame, row, count = found
        which = np.arange(len(leaf))
        while len(which):
            inside = (bounds[0][which] <= leaf[which]) & (leaf[which] <= bounds[1][which])
            possible[which[~inside]] = False
            which = which[inside]
            frame[which] = self._store.cache.frame_of(leaf[which])
            which = which[frame[which] >= 0]
            row[which], count[which] = find(self._snapshot, self._store.cache.buffer, frame[which], keys.take(which))
            which = which[count[which] < 0]
            leaf[which] += np.int32(self._context.bound.step)
        return np.flatnonzero(possible)

    def _found(self, probe: _Probe) -> Iterator[pa.RecordBatch]:
        outer = self._context.outer
        place = np.full(len(probe.batch.rows), -1, dtype=np.int32)
        _result_kernels.place_matches(probe.order, probe.frame, probe.count, outer, place)
        if outer:
            place[probe.unmatched()] = -2
        buffer = self._store.cache.buffer
        yield from self._context.emitter.emit_placed(probe.batch.rows, place, probe.frame, probe.row, buffer)

    def _waiting(self, probe: _Probe) -> Chunk | None:
        waiting = np.flatnonzero(probe.frame < 0)
        if len(waiting) == 0:
            return None
        waiting = waiting[ascending(probe.leaf[waiting])]
        order, leaf = probe.order[waiting], probe.leaf[waiting]
        rows, arrival = take(probe.batch.rows, order), arrivals_at(probe.batch.arrival, order)
        return Chunk(rows, arrival, leaf, leaf, undecided=np.zeros(len(leaf), dtype=np.bool_))
