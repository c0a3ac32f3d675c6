"""Where the matches of stream tuples may be: leaves from the index, frames from the cache. Pure look-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins import _result_kernels
from headrace.joins._sought import locate
from headrace.joins.ssij import _piece_kernels
from headrace.joins.ssij.stream_buffer import PIECE_NBYTES, WANTED_NBYTES, ascends, by_leaves
from headrace.storage.format import Keys

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins._input_buffer import Piece
    from headrace.joins._sought import Sought
    from headrace.joins.predicates import Bound
    from headrace.joins.ssij.filter import FilterTier
    from headrace.storage.read import PageCache
    from headrace.storage.tree import Snapshot

__all__ = ["Located", "Probe", "Prober", "sorted_positions", "waiting_nbytes"]

_NO_FLAGS = np.zeros(0, dtype=np.bool_)
_WORD = 64
_BITMAP_NBYTES = 2


@dataclass(frozen=True, slots=True)
class Located:
    """Stream tuples sorted by key, and the leaves in which their matches may be.

    Attributes
    ----------
    order : int32[n]
        Position of each tuple in the batch; tuples that can match nothing are left out.
    keys
        What the tuples look for.
    first, last : int32[n]
        Leaves, the first ones ascending.
    """

    order: NDArray[np.int32]
    keys: Sought
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
    leaves
        Of the relation.
    asked, absent
        Tuples that the filter was asked for, and those of them that it knew to have no match; these are left out.
    """

    piece: Piece
    single: Located
    spanning: Located
    frame: NDArray[np.int32]
    pieces: NDArray[np.int32]
    leaves: int
    asked: int = 0
    absent: int = 0

    def impossible(self) -> NDArray[np.int32]:
        """Return the positions of the tuples that can match nothing."""
        rows = len(self.piece.rows)
        if len(self.single.order) + len(self.spanning.order) == rows:
            return np.empty(0, dtype=np.int32)
        possible = np.zeros(rows, dtype=np.bool_)
        possible[self.single.order] = True
        possible[self.spanning.order] = True
        return np.flatnonzero(~possible).astype(np.int32)

    @property
    def row_nbytes(self) -> float:
        """Bytes of a stream tuple."""
        return self.piece.rows.nbytes / max(1, len(self.piece.rows))

    @property
    def waiting_nbytes(self) -> tuple[int, int]:
        """The most that the stream buffer and the inverted index will grow by."""
        single = int((self.frame < 0).sum())
        pieces = single + int(self.pieces.sum())
        spanned = int((self.spanning.last - self.spanning.first).sum()) + len(self.spanning.order)
        wanted = min(single + spanned, self.leaves)
        return waiting_nbytes(self.piece, pieces, wanted)


class Prober:
    """Looks batches up. Changes nothing, so that several threads may use it at once.

    Parameters
    ----------
    snapshot
        The relation, for its index.
    bound
        From tuples to keys.
    cache
        Which leaves are in memory.
    tier
        What is known of absent keys.
    """

    def __init__(self, snapshot: Snapshot, bound: Bound, cache: PageCache, tier: FilterTier | None = None) -> None:
        self._snapshot = snapshot
        self._bound = bound
        self._cache = cache
        self._filter = tier

    def probe(self, piece: Piece) -> Probe:
        """Look a batch up in the index and in the cache."""
        located = self._locate(piece.rows)
        single, spanning = located, located.only(np.zeros(0, dtype=np.intp))
        if not np.array_equal(located.first, located.last):
            spans = located.last > located.first
            single, spanning = located.only(np.flatnonzero(~spans)), located.only(np.flatnonzero(spans))
        pieces = np.zeros(len(spanning.order), dtype=np.int32)
        _piece_kernels.count_pieces(spanning.first, spanning.last, self._cache.frame_map, pieces)
        leaves, frame = len(self._snapshot.leaf_pages), self._cache.frame_of(single.first)
        if self._filter is None or not self._filter.awake or not isinstance(single.keys, Keys):
            return Probe(piece, single, spanning, frame, pieces, leaves)
        asked = frame < 0
        stay = np.flatnonzero(~self._filter.absent(single.first, single.keys, asked))
        absent = len(frame) - len(stay)
        if absent:
            single, frame = single.only(stay), frame[stay]
        return Probe(piece, single, spanning, frame, pieces, leaves, int(asked.sum()), absent)

    def _locate(self, rows: pa.RecordBatch) -> Located:
        keys, valid = self._bound.encode(rows)
        if len(self._snapshot.leaf_pages) == 0:
            valid = np.zeros(len(rows), dtype=np.bool_)
        order = sorted_positions(keys.prefix, valid, self._snapshot.separators)
        keys = keys.take(order)
        first, last = locate(self._snapshot, keys)
        if not (ascends(first) and ascends(last)):
            again = by_leaves(first, last)
            order, keys, first, last = order[again], keys.take(again), first[again], last[again]
        return Located(order, keys, first, last)


def waiting_nbytes(piece: Piece, pieces: int, wanted: int) -> tuple[int, int]:
    """Return the most that tuples of a piece take in the stream buffer, and in the inverted index.

    Parameters
    ----------
    piece
        The tuples, all or some of which are to wait.
    pieces
        Runs of leaves that they wait for.
    wanted
        The most leaves in those.
    """
    if not pieces:
        return 0, 0
    rows = piece.rows
    arrivals = 0 if isinstance(piece.arrival, float) else piece.arrival.nbytes
    tuples = rows.nbytes + arrivals + (_BITMAP_NBYTES * rows.num_columns + 1) * len(rows)
    return tuples, PIECE_NBYTES * pieces + WANTED_NBYTES * wanted


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
    packed = _result_kernels.pack_positions(prefix, _NO_FLAGS if valid is None else valid, low, high, shift, bits)
    packed.sort()
    return _result_kernels.unpack_positions(packed, bits)
