"""MeshJoin's window: the stream tuples that have not met the whole relation yet, as a multimap by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.meshjoin import _window_kernels as kernels
from headrace.joins.meshjoin.columns import WindowColumns
from headrace.storage.leaf import gather_keys

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import Arrivals, BatchSlice
    from headrace.storage.format import Keys, LeafLayout

__all__ = ["LeavingBatch", "MeshWindow"]

_SLOT_NBYTES = 8 + 4 + 4 + 1  # hash, next slots of the key and of the bucket, mark
_BUCKETS = 2  # for each slot: most rows that match nothing then meet an empty one
_BUCKET_NBYTES = 4 + 1
_ALL = np.zeros(0, dtype=np.bool_)
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _WindowBatch:
    """Stream tuples that entered together and will leave together.

    Attributes
    ----------
    rows
        Number of tuples.
    arrival
        Arrival of the tuples.
    keys
        Keys of the tuples, if different keys can have the same hash.
    nbytes
        Bytes that the tuples take in addition to the arrays of the window.
    """

    rows: int
    arrival: Arrivals
    keys: Keys | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class LeavingBatch:
    """Stream tuples that have met the whole relation.

    Attributes
    ----------
    rows
        Number of tuples.
    arrival
        Arrival of the tuples.
    unmatched
        Tuples without a match; None if there are none, or if no one asked for them.
    """

    rows: int
    arrival: Arrivals
    unmatched: pa.RecordBatch | None


class MeshWindow:
    """One batch for each chunk of the relation, of limited size. Each tuple has a slot; slots of a batch are adjacent.

    Parameters
    ----------
    schema
        Schema of the stream.
    batches
        Number of batches.
    tuples
        Most tuples in a batch.

    Attributes
    ----------
    batches
        Number of batches that the window holds now.
    """

    def __init__(self, schema: pa.Schema, batches: int, tuples: int) -> None:
        self.batches = 0
        self._tuples = tuples
        self._batches: list[_WindowBatch | None] = [None] * batches
        self._columns = WindowColumns(schema, batches, tuples)
        slots = batches * tuples
        self._matched = np.zeros(slots, dtype=np.bool_)
        self._multimap = kernels.Multimap(
            slot_hash=np.zeros(slots, dtype=np.uint64),
            follow=np.full(slots, kernels.ABSENT, dtype=np.int32),
            next_key=np.full(slots, -1, dtype=np.int32),
            head=np.full(_BUCKETS * max(slots, 1), -1, dtype=np.int32),
            tags=np.zeros(_BUCKETS * max(slots, 1), dtype=np.uint8),
        )
        self._batch_nbytes = 0

    @staticmethod
    def slot_nbytes() -> int:
        """Return the bytes that a tuple takes in addition to its values and its arrival."""
        return _SLOT_NBYTES + _BUCKETS * _BUCKET_NBYTES

    @property
    def map_nbytes(self) -> int:
        """Bytes of the multimap and the marks."""
        return self._matched.nbytes + sum(array.nbytes for array in self._multimap)

    @property
    def nbytes(self) -> int:
        """Bytes of the tuples: the arrays of their values, which are allocated at once, and what varies."""
        return self._columns.nbytes + self._batch_nbytes

    @property
    def places(self) -> int:
        """Most batches in the window: one for each chunk."""
        return len(self._batches)

    @property
    def unflattened(self) -> list[pa.RecordBatch]:
        """Columns of each batch that are kept as they came."""
        return self._columns.unflattened

    def growth(self, arrived: BatchSlice, keys: Keys) -> int:
        """Return by how many bytes tuples with these keys would make the window grow."""
        held = (keys if keys.wide else None, arrived.arrival)
        return self._columns.growth(arrived.rows) + sum(
            part.nbytes for part in held if part is not None and not isinstance(part, float)
        )

    def enter(self, place: int, arrived: BatchSlice, keys: Keys, valid: NDArray[np.bool_] | None) -> None:
        """Put tuples in the place of the oldest batch. Only `valid` ones can match."""
        assert self._batches[place] is None
        first, rows = place * self._tuples, len(arrived.rows)
        nbytes = self.growth(arrived, keys)
        self._columns.write(place, arrived.rows)
        self._batches[place] = _WindowBatch(rows, arrived.arrival, keys if keys.wide else None, nbytes)
        self._batch_nbytes += nbytes
        self.batches += 1
        self._matched[first : first + rows] = False
        kernels.insert(_hashes(keys), _ALL if valid is None else valid, first, self._multimap)

    def leave(self, place: int, *, outer: bool) -> LeavingBatch | None:
        """Remove and return the oldest batch, with its unmatched tuples if `outer`; None if there is none."""
        batch, self._batches[place] = self._batches[place], None
        if batch is None:
            return None
        self.batches -= 1
        first = place * self._tuples
        kernels.expire(first, batch.rows, self._multimap)
        unmatched = np.flatnonzero(~self._matched[first : first + batch.rows]) if outer else _NONE
        rows = self._columns.take(first + unmatched) if len(unmatched) else None
        self._columns.clear(place)
        self._batch_nbytes -= batch.nbytes
        return LeavingBatch(batch.rows, batch.arrival, rows)

    def find(self, scan: ChunkScan) -> kernels.RowBuffer:
        """Return the next relation rows whose key, or whose hash at least, some tuples have."""
        if scan.layout.codec.kind == "u64":
            found = kernels.find_words(
                scan.frames, scan.layout.page_size, scan.cursor, scan.stop, self._multimap, scan.scratch
            )
            return _first(scan.scratch, found)
        out = scan.scratch
        rows = kernels.enumerate_rows(scan.frames, scan.layout.page_size, scan.cursor, scan.stop, out.frame, out.row)
        some = _first(out, rows)
        some.hashes[:] = _hashes(gather_keys(scan.layout, scan.frames, some.frame, some.row))
        return _first(out, kernels.find_hashes(self._multimap, some))

    def pairs(
        self, found: kernels.RowBuffer, cursor: NDArray[np.int64], most: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return slots, and the positions in `found` of the rows that have their hash; at most `most`, none at the end.

        Parameters
        ----------
        found
            Result of `find`.
        cursor : int64[2]
            Key and slot to continue with. Starts as (0, -1).
        most
            Most pairs.
        """
        slots, which = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
        size = kernels.expand_keys(found.slot, cursor, self._multimap.follow, slots, which)
        return slots[:size], which[:size]

    def same_keys(self, slots: NDArray[np.int32], keys: Keys) -> NDArray[np.bool_]:
        """Return whether each slot's tuple has the key, byte by byte."""
        same = np.zeros(len(slots), dtype=np.bool_)
        places = slots // self._tuples
        for place in np.unique(places).tolist():
            batch, here = self._batches[place], np.flatnonzero(places == place)
            assert batch is not None
            assert batch.keys is not None
            inside = slots[here] - np.int32(place * self._tuples)
            same[here] = kernels.same_keys(*batch.keys.parts[1:], inside, *keys.take(here).parts[1:])
        return same

    def matched(self, slots: NDArray[np.int32]) -> pa.RecordBatch:
        """Return the tuples in some slots, and mark them as matched."""
        self._matched[slots] = True
        return self._columns.take(slots)


@dataclass(frozen=True, slots=True)
class ChunkScan:
    """A thread's share of a chunk.

    Attributes
    ----------
    layout, frames
        Leaf layout of the relation, and the pages of the chunk.
    cursor : int64[2]
        Frame and row that come next.
    stop
        Frame after the last.
    scratch
        Room for as many rows as are looked at in one go.
    """

    layout: LeafLayout
    frames: NDArray[np.uint8]
    cursor: NDArray[np.int64]
    stop: int
    scratch: kernels.RowBuffer

    @property
    def done(self) -> bool:
        """Whether all rows were looked at."""
        return int(self.cursor[0]) >= self.stop


def _first(rows: kernels.RowBuffer, count: int) -> kernels.RowBuffer:
    return kernels.RowBuffer(rows.hashes[:count], rows.slot[:count], rows.frame[:count], rows.row[:count])


def _hashes(keys: Keys) -> NDArray[np.uint64]:
    prefix, offsets, data = keys.parts
    hashes: NDArray[np.uint64] = kernels.hash_bytes(offsets, data) if keys.wide else kernels.hash_words(prefix)
    return hashes
