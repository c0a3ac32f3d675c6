"""SSIJ's online phase (the paper's algorithm 1): stream tuples meet the cached pages, the rest waits for the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from joins import _kernels as kernels
from joins._emit import Matches
from joins._state import SSIJState, arrivals_at
from joins._stream_buffer import PIECE_NBYTES, Chunk, ascending
from storage.leaves import search

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray

    from joins._input_buffer import Piece
    from storage.keys import Keys

__all__ = ["OnlinePhase", "Probe", "sorted_positions"]

_NO_FLAGS = np.zeros(0, dtype=np.bool_)
_WORD = 64
_ARRIVAL_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Located:
    """Stream tuples sorted by key, and the leaves in which their matches may be.

    Attributes
    ----------
    order : int32[n]
        Position of each tuple in the batch; tuples that can match nothing are left out.
    keys
        Of the tuples.
    first, last : int32[n]
        Leaves, both ascending.
    """

    order: NDArray[np.int32]
    keys: Keys
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
    piece
        The batch.
    single, spanning
        Tuples that may match in one leaf, and in several.
    frame : int32[n]
        Where the leaf of each single tuple is cached, or -1.
    pieces : int32[m]
        Runs of uncached leaves of each spanning tuple.
    """

    piece: Piece
    single: Located
    spanning: Located
    frame: NDArray[np.int32]
    pieces: NDArray[np.int32]

    @property
    def impossible(self) -> int:
        """Tuples that can match nothing."""
        return len(self.piece.rows) - len(self.single.order) - len(self.spanning.order)

    @property
    def row_nbytes(self) -> float:
        """Bytes of a stream tuple."""
        return self.piece.rows.nbytes / max(1, len(self.piece.rows))

    @property
    def waiting_nbytes(self) -> tuple[int, int]:
        """The most that the stream buffer and the inverted index will grow by."""
        pieces = int((self.frame < 0).sum()) + int(self.pieces.sum())
        rows = self.piece.rows
        tuples = rows.nbytes + (_ARRIVAL_NBYTES + 2 * rows.num_columns + 1) * len(rows)
        return (tuples, PIECE_NBYTES * pieces) if pieces else (0, 0)


class OnlinePhase:
    """Joins batches with what is cached. The cached set is fixed while a batch is being joined.

    Parameters
    ----------
    state
        Of the operator.
    """

    def __init__(self, state: SSIJState) -> None:
        self._state = state
        self._snapshot = state.snapshot
        self._store = state.store

    def probe(self, piece: Piece) -> Probe:
        """Look a batch up in the index and in the cache. Changes nothing."""
        located = self._locate(piece.rows)
        none = located.only(np.zeros(0, dtype=np.intp))
        single, spanning = located, none
        if not np.array_equal(located.first, located.last):
            spans = located.last > located.first
            single, spanning = located.only(np.flatnonzero(~spans)), located.only(np.flatnonzero(spans))
        pieces = np.zeros(len(spanning.order), dtype=np.int32)
        cache = self._store.cache
        kernels.count_pieces(spanning.first, spanning.last, cache.frame_map, pieces)
        return Probe(piece, single, spanning, cache.frame_of(single.first), pieces)

    def run(self, probe: Probe) -> Iterator[pa.RecordBatch]:
        """Join a batch with the cached pages and put the tuples that need others into the stream buffer.

        The stream buffer must have room for ``probe.waiting_nbytes``.
        """
        begin = self._state.busy()
        self._state.counters.online_phases += 1
        self._store.pin(on=True)
        yield from self._join_single(probe)
        waiting = yield from self._join_spanning(probe)
        self._store.pin(on=False)
        self._hold_single(probe)
        if waiting is not None:
            self._store.hold(waiting)
        self._state.counters.online_seconds += self._state.busy() - begin

    def _locate(self, rows: pa.RecordBatch) -> Located:
        keys, valid = self._state.bound.encode(rows)
        if len(self._snapshot.leaf_pages) == 0:
            valid = np.zeros(len(rows), dtype=np.bool_)
        order = sorted_positions(keys.prefix, valid, self._snapshot.separators)
        keys = keys.take(order)
        first, last = self._snapshot.locate(keys)
        if not (_ascends(first) and _ascends(last)):
            # Both ends ascend with the key, so their sum orders tuples as the key does, up to equal leaves.
            again = ascending(first.astype(np.int64) + last)
            order, keys, first, last = order[again], keys.take(again), first[again], last[again]
        return Located(order, keys, first, last)

    def _join_single(self, probe: Probe) -> Iterator[pa.RecordBatch]:
        """Join the tuples that may match in one leaf."""
        state, single = self._state, probe.single
        buffer, unique = self._store.cache.buffer, self._snapshot.unique
        row, count = search(self._snapshot.layout, buffer, probe.frame, single.keys, unique=unique)
        self._store.touch(probe.frame)
        done = np.flatnonzero(probe.frame >= 0)
        state.counters.rows_cached += len(done)
        state.completed(arrivals_at(probe.piece.arrival, single.order[done]), len(done))
        impossible = self._give_up(probe)
        if unique:
            place = np.full(len(probe.piece.rows), -1, dtype=np.int32)
            kernels.place_matches(single.order, probe.frame, count, state.outer, place)
            if state.outer:
                place[impossible] = -2
            yield from state.emitter.emit_placed(probe.piece.rows, place, probe.frame, row, buffer)
            return
        frame = probe.frame.copy()
        kernels.outer_matches(frame, count, state.outer)
        yield from state.emitter.emit(probe.piece.rows, Matches(frame, row, count, single.order), buffer)
        if state.outer and len(impossible):
            yield from state.emitter.nulls(probe.piece.rows.take(pa.array(impossible)))

    def _give_up(self, probe: Probe) -> NDArray[np.intp]:
        """Complete the tuples that can match nothing and return which they are."""
        if probe.impossible == 0:
            return np.empty(0, dtype=np.intp)
        possible = np.zeros(len(probe.piece.rows), dtype=np.bool_)
        possible[probe.single.order] = True
        possible[probe.spanning.order] = True
        impossible = np.flatnonzero(~possible)
        self._state.counters.rows_cached += len(impossible)
        self._state.completed(arrivals_at(probe.piece.arrival, impossible), len(impossible))
        return impossible

    def _hold_single(self, probe: Probe) -> None:
        waiting = np.flatnonzero(probe.frame < 0)
        if len(waiting) == 0:
            return
        order, first = probe.single.order[waiting], probe.single.first[waiting]
        rows = probe.piece.rows.take(pa.array(order))
        self._store.hold(Chunk(rows, arrivals_at(probe.piece.arrival, order), first, first))

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
        while size := kernels.cached_pairs(spanning.first, spanning.last, cache.frame_map, cursor, tuples, frames):
            pair, frame = tuples[:size], frames[:size]
            row, count = search(self._snapshot.layout, cache.buffer, frame, spanning.keys.take(pair))
            self._store.touch(frame)
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
        kernels.split_pieces(spanning.first, spanning.last, self._store.cache.frame_map, waiting, first, last, tuples)
        # Pieces of neighbouring tuples interleave; of any two one begins and ends no later, so their sums order both.
        sort = ascending(first.astype(np.int64) + last)
        order = spanning.order[waiting]
        rows = probe.piece.rows.take(pa.array(order))
        arrival = arrivals_at(probe.piece.arrival, order)
        return Chunk(rows, arrival, first[sort], last[sort], tuples[sort], matched[waiting])


def sorted_positions(
    prefix: NDArray[np.uint64], valid: NDArray[np.bool_] | None, separators: Keys
) -> NDArray[np.int32]:
    """Return the positions of the valid keys in nearly ascending order.

    Position and the leading bits of the key, within the relation's range of keys, are packed into one word: sorting
    words is ten times faster than a stable argsort.
    """
    low, high = np.uint64(0), np.uint64(0)
    if len(separators) > 1:
        low, high = separators.prefix[1], separators.prefix[-1]
    bits = max(len(prefix) - 1, 0).bit_length()
    shift = max(0, int(high - low).bit_length() - (_WORD - bits))
    packed = kernels.pack_positions(prefix, _NO_FLAGS if valid is None else valid, low, high, shift, bits)
    packed.sort()
    return kernels.unpack_positions(packed, bits)


def _ascends(values: NDArray[np.int32]) -> bool:
    return len(values) < 2 or bool((values[1:] >= values[:-1]).all())  # noqa: PLR2004 - one value is in order
