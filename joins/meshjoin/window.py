"""MeshJoin's window: the stream tuples that have not met the whole relation yet, as a multimap by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.meshjoin import _window_kernels as kernels
from headrace.storage.format.copies import concat_batches, take

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import Arrivals, BatchSlice
    from headrace.storage.format import Keys

__all__ = ["MeshWindow", "WindowBatch"]

_SLOT_NBYTES = 8 + 4 + 1
_BUCKET_NBYTES = 8


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Stream tuples that enter together and will leave together.

    Attributes
    ----------
    rows, arrival
        Tuples and their arrival.
    slots
        Number of tuples that can match; each has a slot of the multimap.
    place : int32[slots] or None
        Row of each slot; None if it is the slot's own position.
    keys
        Keys of the slots, if different keys can have the same hash.
    matched : bool[rows]
        Whether the tuple has had a match.
    """

    rows: pa.RecordBatch
    arrival: Arrivals
    slots: int
    place: NDArray[np.int32] | None
    keys: Keys | None
    matched: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Bytes of the tuples and their keys."""
        arrays = (self.arrival, self.place, self.keys, self.matched)
        return self.rows.nbytes + sum(
            array.nbytes for array in arrays if array is not None and not isinstance(array, float)
        )

    def rows_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows of slots, which are numbered from the batch's first."""
        return slots if self.place is None else self.place[slots]


class MeshWindow:
    """One batch for each chunk of the relation, of limited size.

    Parameters
    ----------
    batches
        Number of batches.
    tuples
        Most tuples in a batch.
    """

    def __init__(self, batches: int, tuples: int) -> None:
        self._tuples = tuples
        self._batches: list[WindowBatch | None] = [None] * batches
        slots = batches * tuples
        buckets = _buckets(slots)
        self._multimap = kernels.Multimap(
            slot_hash=np.zeros(slots, dtype=np.uint64),
            follow=np.full(slots, -1, dtype=np.int32),
            head=np.full(buckets, -1, dtype=np.int32),
            tail=np.full(buckets, -1, dtype=np.int32),
        )
        self.nbytes = 0

    @staticmethod
    def slot_nbytes() -> int:
        """Return the most bytes that the multimap takes for each tuple."""
        return _SLOT_NBYTES + 2 * _BUCKET_NBYTES

    @property
    def map_nbytes(self) -> int:
        """Bytes of the multimap."""
        return sum(array.nbytes for array in self._multimap)

    @property
    def empty(self) -> bool:
        """Whether the window holds no tuple."""
        return all(batch is None for batch in self._batches)

    def enter(self, place: int, arrived: BatchSlice, keys: Keys, valid: NDArray[np.bool_] | None) -> None:
        """Put tuples in the place of the oldest batch. Only `valid` ones can match."""
        assert self._batches[place] is None
        rows = None if valid is None else np.flatnonzero(valid).astype(np.int32)
        keys = keys if rows is None else keys.take(rows)
        matched = np.zeros(len(arrived.rows), dtype=np.bool_)
        batch = WindowBatch(arrived.rows, arrived.arrival, len(keys), rows, keys if keys.wide else None, matched)
        self._batches[place] = batch
        self.nbytes += batch.nbytes
        kernels.insert(_hashes(keys), place * self._tuples, self._multimap)

    def leave(self, place: int) -> WindowBatch | None:
        """Remove and return the oldest batch; None if it had no tuples."""
        batch, self._batches[place] = self._batches[place], None
        if batch is not None:
            self.nbytes -= batch.nbytes
            kernels.expire(place * self._tuples, batch.slots, self._multimap)
        return batch

    def pairs(self, keys: Keys, most: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield slots and positions in `keys` that have equal keys, at most `most` at a time."""
        hashes = _hashes(keys)
        cursor = np.array([0, -1], dtype=np.int64)
        while True:
            slots, rows = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
            size = kernels.probe(hashes, cursor, self._multimap, slots, rows)
            if size == 0:
                return
            slots, rows = slots[:size], rows[:size]
            if keys.wide:
                same = np.zeros(size, dtype=np.bool_)
                for batch, inside, which in self._by_batch(slots):
                    assert batch.keys is not None
                    wanted = keys.take(rows[which])
                    same[which] = kernels.same_keys(*batch.keys.parts[1:], inside, *wanted.parts[1:])
                slots, rows = slots[same], rows[same]
            yield slots, rows

    def matched(self, slots: NDArray[np.int32]) -> tuple[pa.RecordBatch, NDArray[np.intp]]:
        """Return the tuples of some slots and their order, and mark them as matched."""
        parts, order = [], []
        for batch, inside, which in self._by_batch(slots):
            rows = batch.rows_of(inside)
            batch.matched[rows] = True
            parts.append(take(batch.rows, rows))
            order.append(which)
        return concat_batches(parts), np.concatenate(order)

    def _by_batch(self, slots: NDArray[np.int32]) -> Iterator[tuple[WindowBatch, NDArray[np.int32], NDArray[np.intp]]]:
        """Yield each batch that has some of the slots, their numbers within it, and their positions in `slots`."""
        batch_of = slots // self._tuples
        order = np.argsort(batch_of, kind="stable")
        cuts = np.flatnonzero(np.diff(batch_of[order])) + 1
        for which in np.split(order, cuts):
            place = int(batch_of[which[0]])
            batch = self._batches[place]
            assert batch is not None
            yield batch, slots[which] - place * self._tuples, which


def _hashes(keys: Keys) -> NDArray[np.uint64]:
    prefix, offsets, data = keys.parts
    hashes: NDArray[np.uint64] = kernels.hash_bytes(offsets, data) if keys.wide else kernels.hash_words(prefix)
    return hashes


def _buckets(slots: int) -> int:
    return 1 << max(slots - 1, 1).bit_length()
