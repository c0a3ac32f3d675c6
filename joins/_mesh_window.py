"""MeshJoin's window: the stream tuples that have not met the whole relation yet, as a multimap by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from joins import _mesh_kernels as kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from joins._input_buffer import Arrivals
    from storage.keys import Keys

__all__ = ["MeshWindow", "WindowBatch"]

_SLOT_NBYTES = 8 + 4 + 1
_BUCKET_NBYTES = 8


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Stream tuples that entered together, and will leave together.

    Attributes
    ----------
    rows, arrival
        The tuples.
    keys
        Of the tuples that can match.
    place : int32[n] or None
        Row of each key, None if it is the key's own position.
    matched : bool[rows]
        Whether the tuple has had a match.
    """

    rows: pa.RecordBatch
    arrival: Arrivals
    keys: Keys
    place: NDArray[np.int32] | None
    matched: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Bytes of the tuples and their keys."""
        arrival = self.arrival.nbytes if isinstance(self.arrival, np.ndarray) else 0
        place = 0 if self.place is None else self.place.nbytes
        return self.rows.nbytes + self.keys.nbytes + self.matched.nbytes + arrival + place


class MeshWindow:
    """As many batches as the relation has chunks, each of at most so many tuples.

    Parameters
    ----------
    batches, tuples
        Their numbers.
    """

    def __init__(self, batches: int, tuples: int) -> None:
        self._tuples = tuples
        self._batches: list[WindowBatch | None] = [None] * batches
        slots = batches * tuples
        self._slot_hash = np.zeros(slots, dtype=np.uint64)
        self._follow = np.full(slots, -1, dtype=np.int32)
        buckets = _buckets(slots)
        self._head = np.full(buckets, -1, dtype=np.int32)
        self._tail = np.full(buckets, -1, dtype=np.int32)
        self.nbytes = 0

    @staticmethod
    def slot_nbytes() -> int:
        """Return the most that the multimap takes for each tuple."""
        return _SLOT_NBYTES + 2 * _BUCKET_NBYTES

    @property
    def map_nbytes(self) -> int:
        """Bytes of the multimap."""
        return self._slot_hash.nbytes + self._follow.nbytes + self._head.nbytes + self._tail.nbytes

    @property
    def empty(self) -> bool:
        """Whether no tuple is here."""
        return all(batch is None for batch in self._batches)

    def enter(self, place: int, batch: WindowBatch) -> None:
        """Put a batch where the oldest was."""
        assert self._batches[place] is None
        self._batches[place] = batch
        self.nbytes += batch.nbytes
        kernels.insert(_hashes(batch.keys), place * self._tuples, self._slot_hash, self._follow, self._head, self._tail)

    def leave(self, place: int) -> WindowBatch | None:
        """Take out the oldest batch, which is here if it had any tuples."""
        batch, self._batches[place] = self._batches[place], None
        if batch is not None:
            self.nbytes -= batch.nbytes
            kernels.expire(place * self._tuples, len(batch.keys), self._slot_hash, self._follow, self._head, self._tail)
        return batch

    def matches(self, keys: Keys, most: int) -> Iterator[tuple[WindowBatch, NDArray[np.int32], NDArray[np.int32]]]:
        """Yield the pairs of stream tuple and relation row with equal keys: a batch, rows of it, positions in `keys`.

        Parameters
        ----------
        keys
            Of relation rows.
        most
            Pairs to find at a time.
        """
        hashes = _hashes(keys)
        slots, rows = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
        cursor = np.array([0, -1], dtype=np.int64)
        while True:
            size = kernels.probe(hashes, cursor, self._slot_hash, self._follow, self._head, slots, rows)
            if size == 0:
                return
            yield from self._by_batch(slots[:size], rows[:size], keys)

    def _by_batch(
        self, slots: NDArray[np.int32], rows: NDArray[np.int32], keys: Keys
    ) -> Iterator[tuple[WindowBatch, NDArray[np.int32], NDArray[np.int32]]]:
        order = np.argsort(slots, kind="stable")
        slots, rows = slots[order], rows[order]
        batch_of = slots // self._tuples
        cuts = np.flatnonzero(np.diff(batch_of)) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(slots)], strict=True):
            batch = self._batches[int(batch_of[start])]
            assert batch is not None
            inside = slots[start:stop] - batch_of[start] * self._tuples
            relation = rows[start:stop]
            if keys.wide:
                _, offsets, data = batch.keys.parts
                wanted = keys.take(relation)
                same = kernels.same_keys(offsets, data, inside, *wanted.parts[1:])
                inside, relation = inside[same], relation[same]
            if len(inside):
                yield batch, inside if batch.place is None else batch.place[inside], relation


def _hashes(keys: Keys) -> NDArray[np.uint64]:
    prefix, offsets, data = keys.parts
    hashes: NDArray[np.uint64] = kernels.hash_bytes(offsets, data) if keys.wide else kernels.hash_words(prefix)
    return hashes


def _buckets(slots: int) -> int:
    return 1 << max(slots - 1, 1).bit_length()
