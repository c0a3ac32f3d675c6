"""SSIJ's online phase (the paper's algorithm 1): stream tuples meet the cached pages, the rest waits for the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins import _result_kernels
from headrace.joins._emit import Matches
from headrace.joins._input_buffer import arrivals_at
from headrace.joins._sought import find
from headrace.joins.ssij import _piece_kernels
from headrace.joins.ssij.phase import ProbingPhase
from headrace.joins.ssij.probe import Probe, Prober
from headrace.joins.ssij.stream_buffer import Chunk, ascends, by_leaves

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from headrace.joins._input_buffer import Piece
    from headrace.joins.ssij.state import SSIJState

__all__ = ["OnlinePhase"]


class OnlinePhase(ProbingPhase[Probe]):
    """Joins a batch with what is cached, in key order."""

    def __init__(self, state: SSIJState) -> None:
        super().__init__(state)
        self._prober = Prober(state.snapshot, state.bound, state.store.cache, state.store.tiers.filter)

    def run(self) -> Iterator[pa.RecordBatch]:
        """Join the batch with the cached pages and put the tuples that need others into the stream buffer.

        The stream buffer must have room for what waits.
        """
        begin, probes = self._state.progress.busy_seconds, self._probes
        self._state.counters.online_phases += 1
        self._store.pin(on=True)
        for probe in probes:
            self._note(probe)
        waiting: list[Chunk | None] = []
        if self._state.bound.at_most_one(unique=self._snapshot.unique):
            for results in self._state.workers.map(self._join_unique, probes):
                yield from results
        else:
            for probe in probes:
                yield from self._join_single(probe)
                waiting.append((yield from self._join_spanning(probe)))
        self._store.pin(on=False)
        for chunk in (*map(self._single_chunk, probes), *waiting):
            if chunk is not None:
                self._store.hold(chunk)
        self._state.counters.online_seconds += self._state.progress.busy_seconds - begin

    def _probe(self, piece: Piece) -> Probe:
        return self._prober.probe(piece)

    def _note(self, probe: Probe) -> None:
        """Count the tuples whose leaf is cached or that can match nothing: this phase completes them."""
        self._note_looked_up(probe.frame, int((probe.frame < 0).sum()), probe.asked, probe.absent)
        for rows in (probe.single.order[probe.frame >= 0], probe.impossible()):
            self._state.counters.rows_cached += len(rows)
            self._state.completed(arrivals_at(probe.piece.arrival, rows), len(rows))

    def _join_unique(self, probe: Probe) -> list[pa.RecordBatch]:
        """Join tuples that have one match at most. Changes nothing, so that threads may do it at once."""
        single, rows, buffer = probe.single, probe.piece.rows, self._store.cache.buffer
        row, count = find(self._snapshot, buffer, probe.frame, single.keys)
        place = np.full(len(rows), -1, dtype=np.int32)
        _result_kernels.place_matches(single.order, probe.frame, count, self._state.outer, place)
        if self._state.outer:
            place[probe.impossible()] = -2
        return list(self._state.emitter.emit_placed(rows, place, probe.frame, row, buffer))

    def _join_single(self, probe: Probe) -> Iterator[pa.RecordBatch]:
        """Join the tuples that may match in one leaf."""
        state, single, buffer = self._state, probe.single, self._store.cache.buffer
        row, count = find(self._snapshot, buffer, probe.frame, single.keys)
        frame = probe.frame.copy()
        _result_kernels.outer_matches(frame, count, state.outer)
        yield from state.emitter.emit(probe.piece.rows, Matches(frame, row, count, single.order), buffer)
        impossible = probe.impossible()
        if state.outer and len(impossible):
            yield from state.emitter.nulls(probe.piece.rows.take(pa.array(impossible)))

    def _single_chunk(self, probe: Probe) -> Chunk | None:
        waiting = np.flatnonzero(probe.frame < 0)
        if len(waiting) == 0:
            return None
        order, first = probe.single.order[waiting], probe.single.first[waiting]
        rows = probe.piece.rows.take(pa.array(order))
        return Chunk(rows, arrivals_at(probe.piece.arrival, order), first, first)

    def _join_spanning(self, probe: Probe) -> Generator[pa.RecordBatch, None, Chunk | None]:
        """Join the tuples that may match in several leaves with those that are cached; return the rest as a chunk."""
        spanning = probe.spanning
        if len(spanning.order) == 0:
            return None
        matched = np.zeros(len(spanning.order), dtype=np.bool_)
        yield from self._join_cached_pairs(probe, matched)
        done = np.flatnonzero(probe.pieces == 0)
        self._state.counters.rows_cached += len(done)
        self._state.completed(arrivals_at(probe.piece.arrival, spanning.order[done]), len(done))
        lonely = spanning.order[done[~matched[done]]]
        if self._state.outer and len(lonely):
            yield from self._state.emitter.nulls(probe.piece.rows.take(pa.array(lonely)))
        return self._spanning_chunk(probe, matched)

    def _join_cached_pairs(self, probe: Probe, matched: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        spanning, cache = probe.spanning, self._store.cache
        most = self._store.rows_at_once(probe.row_nbytes)
        tuples, frames = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
        cursor = np.zeros(2, dtype=np.int64)
        while size := _piece_kernels.cached_pairs(
            spanning.first, spanning.last, cache.frame_map, cursor, tuples, frames
        ):
            pair, frame = tuples[:size], frames[:size]
            row, count = find(self._snapshot, cache.buffer, frame, spanning.keys.take(pair))
            self._store.cache.touch(frame)
            matched[pair[count > 0]] = True
            found = Matches(frame, row, count, spanning.order[pair])
            yield from self._state.emitter.emit(probe.piece.rows, found, cache.buffer)

    def _spanning_chunk(self, probe: Probe, matched: NDArray[np.bool_]) -> Chunk | None:
        waiting = np.flatnonzero(probe.pieces > 0).astype(np.int32)
        if len(waiting) == 0:
            return None
        size = int(probe.pieces.sum())
        first, last, tuples = (np.empty(size, dtype=np.int32) for _ in range(3))
        spanning = probe.spanning
        _piece_kernels.split_pieces(
            spanning.first, spanning.last, self._store.cache.frame_map, waiting, first, last, tuples
        )
        sort = by_leaves(first, last)  # pieces of neighbouring tuples interleave
        first, last = first[sort], last[sort]
        order = spanning.order[waiting]
        rows = probe.piece.rows.take(pa.array(order))
        arrival = arrivals_at(probe.piece.arrival, order)
        return Chunk(rows, arrival, first, last, tuples[sort], matched[waiting], ascends(last))
