"""Stream buffer: tuples that wait for relation pages (the paper's SB), and which pages they wait for (II).

Tuples are kept in chunks, copied compactly and sorted by key, so the inverted index needs no lists: the leaves that the
tuples of a chunk wait for ascend, and the tuples that wait for a page are found by binary search. Most tuples wait for
one leaf. A tuple whose matches may lie in several leaves has one *leaf run* for each run of leaves that were not cached
when it came, and a mark that says whether it has matched. A tuple that looks for the nearest row waits for the leaf
where that row should be; if it is not there, the tuple is *deferred* to the neighboring leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.input_buffer import DeferredSlice, arrivals_at
from headrace.joins.ssij.memory import _index_kernels as kernels
from headrace.storage.format.copies import concat_batches, take

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import Arrivals

__all__ = [
    "LEAF_RUN_NBYTES",
    "WANTED_NBYTES",
    "Chunk",
    "StreamBuffer",
    "ascending",
    "ascends",
    "by_leaves",
    "merged_arrivals",
]

_ARRIVAL_NBYTES = 8
LEAF_RUN_NBYTES = 12
"""Bytes of a leaf run that is not one leaf: first and last leaf, and tuple."""
WANTED_NBYTES = 5
"""Bytes of a wanted page in a join phase: the leaf, and whether it will stay cached."""

_FAN_IN = 8
_TIER = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """Stream tuples that entered the stream buffer together.

    Attributes
    ----------
    rows
        The tuples.
    arrival
        When they arrived.
    first, last : int32[runs]
        First and last leaf of each run; the first ones ascend. The same array if each run is one leaf.
    tuples : int32[runs] or None
        Row of each run; None if there is one run for each row, in order.
    matched : bool[rows] or None
        Whether the tuple has had a match; None if every tuple waits for one leaf only.
    ascends
        Whether the last leaves ascend too.
    undecided : bool[rows] or None
        Whether the tuple has to go to the neighboring leaf; None if every leaf can decide.
    """

    rows: pa.RecordBatch
    arrival: Arrivals
    first: NDArray[np.int32]
    last: NDArray[np.int32]
    tuples: NDArray[np.int32] | None = None
    matched: NDArray[np.bool_] | None = None
    ascends: bool = True
    undecided: NDArray[np.bool_] | None = None

    @property
    def tuple_nbytes(self) -> int:
        """Bytes of the tuples: the stream buffer's share."""
        arrival = 0 if isinstance(self.arrival, float) else self.arrival.nbytes
        return (
            self.rows.nbytes + arrival + sum(mark.nbytes for mark in (self.matched, self.undecided) if mark is not None)
        )

    @property
    def index_nbytes(self) -> int:
        """Bytes of the leaf runs: the inverted index's share."""
        last = 0 if self.last is self.first else self.last.nbytes
        return self.first.nbytes + last + (0 if self.tuples is None else self.tuples.nbytes)

    @property
    def wanted_most(self) -> int:
        """Most leaves that the runs wait for. Leaves that several runs share count more than once."""
        return len(self.first) if self.last is self.first else int((self.last - self.first).sum()) + len(self.first)

    def oldest(self) -> float:
        """Return the arrival of the tuple that has waited longest."""
        return float(np.min(self.arrival))

    @property
    def simple(self) -> bool:
        """Whether each tuple waits for one leaf."""
        return self.matched is None

    def deferred_slice(self, step: int) -> DeferredSlice | None:
        """Return the tuples that have to move on by `step` leaves; None if there are none."""
        if self.undecided is None or not self.undecided.any():
            return None
        rows = np.flatnonzero(self.undecided)
        arrival = arrivals_at(self.arrival, rows)
        return DeferredSlice(take(self.rows, rows), arrival, self.first[rows] + np.int32(step))


class StreamBuffer:
    """Chunks of waiting tuples, and how many leaf runs wait for each leaf.

    Parameters
    ----------
    leaves
        Number of leaves of the relation.

    Attributes
    ----------
    demand : int32[leaves]
        How many runs wait for each leaf: the lengths of the inverted index's lists, and so the leaves' utility.
    pages
        Number of leaves that tuples wait for (the size of the paper's P_u).
    rows
        Number of waiting tuples.
    tuple_nbytes
        Bytes of the tuples.
    oldest
        Arrival of the tuple that has waited longest.
    deferred
        Tuples that the last join phase has deferred to another leaf, to be looked up at once.
    """

    def __init__(self, leaves: int) -> None:
        self._simple: list[Chunk] = []
        self._spanning: list[Chunk] = []
        self.demand: NDArray[np.int32] = np.zeros(leaves, dtype=np.int32)
        self.rows = 0
        self.pages = 0
        self.tuple_nbytes = 0
        self._runs_nbytes = 0
        self.oldest: float | None = None
        self.deferred: list[DeferredSlice] = []

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks of waiting tuples."""
        return [*self._simple, *self._spanning]

    @property
    def index_nbytes(self) -> int:
        """Bytes of the leaf runs, and of the list of wanted pages that a join phase makes."""
        return self._runs_nbytes + WANTED_NBYTES * self.pages

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self._append(chunk)
        self.rows += len(chunk.rows)
        self.pages += kernels.add_demand(chunk.first, chunk.last, self.demand)
        oldest = chunk.oldest()
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def mergeable(self, nbytes: int) -> list[Chunk]:
        """Return the latest chunks of a kind if they are many, of similar size, and together within `nbytes`."""
        for chunks in (self._simple, self._spanning):
            last = chunks[-_FAN_IN:]
            sizes = [len(chunk.rows) for chunk in last]
            alike = len(last) == _FAN_IN and max(sizes) <= _TIER * min(sizes)
            if alike and sum(chunk.tuple_nbytes for chunk in last) <= nbytes:
                return last
        return []

    @staticmethod
    def merged_growth(chunks: list[Chunk]) -> int:
        """Return by how many bytes chunks may grow if merged: arrivals, and a bitmap for each column."""
        return sum(
            len(chunk.rows) * _ARRIVAL_NBYTES + chunk.rows.num_columns * (len(chunk.rows) // 8 + 1) for chunk in chunks
        )

    def merge(self, last: list[Chunk]) -> None:
        """Replace the latest chunks, which `mergeable` returned, by one."""
        del self._like(last[0])[-len(last) :]
        self.tuple_nbytes -= sum(chunk.tuple_nbytes for chunk in last)
        self._runs_nbytes -= sum(chunk.index_nbytes for chunk in last)
        self._append(_merged(last))

    def clear(self, step: int) -> None:
        """Remove everything after a join phase except deferred tuples, which move on by `step` leaves."""
        self.demand[:] = 0
        self.rows = self.pages = self.tuple_nbytes = self._runs_nbytes = 0
        self.oldest = None
        self._spanning.clear()
        while self._simple:
            deferred = self._simple.pop().deferred_slice(step)
            if deferred is not None:
                self.deferred.append(deferred)
                self.tuple_nbytes += deferred.nbytes

    def take_deferred(self, most: int) -> DeferredSlice | None:
        """Remove at most `most` deferred tuples and return them; None if there are none."""
        if not self.deferred:
            return None
        deferred = self.deferred.pop()
        self.tuple_nbytes -= deferred.nbytes
        if len(deferred.rows) > most:
            rest = deferred.slice(most, len(deferred.rows))
            self.deferred.append(rest)
            self.tuple_nbytes += rest.nbytes
        return deferred.slice(0, most)

    def _like(self, chunk: Chunk) -> list[Chunk]:
        """Return the chunks of a kind."""
        return self._simple if chunk.simple else self._spanning

    def _append(self, chunk: Chunk) -> None:
        self._like(chunk).append(chunk)
        self.tuple_nbytes += chunk.tuple_nbytes
        self._runs_nbytes += chunk.index_nbytes


def _merged(chunks: list[Chunk]) -> Chunk:
    """Merge chunks of one kind."""
    return _merged_simple(chunks) if chunks[0].simple else _merged_spanning(chunks)


def _merged_simple(chunks: list[Chunk]) -> Chunk:
    """Merge chunks of tuples that wait for one leaf, sorted by leaf."""
    first = np.concatenate([chunk.first for chunk in chunks])
    rows = concat_batches([chunk.rows for chunk in chunks])
    order = ascending(first)
    first = first[order]
    arrival = _arrivals_of(chunks, order)
    undecided = None if chunks[0].undecided is None else np.zeros(len(rows), dtype=np.bool_)
    return Chunk(take(rows, order), arrival, first, first, undecided=undecided)


def _merged_spanning(chunks: list[Chunk]) -> Chunk:
    """Merge chunks of tuples that wait for several leaves; the runs are sorted by leaf."""
    first, last = np.concatenate([[chunk.first, chunk.last] for chunk in chunks], axis=1)
    order = by_leaves(first, last)
    starts = np.cumsum([0, *(len(chunk.rows) for chunk in chunks[:-1])], dtype=np.int32)
    tuples = [chunk.tuples + start for chunk, start in zip(chunks, starts, strict=True) if chunk.tuples is not None]
    marks = [chunk.matched for chunk in chunks if chunk.matched is not None]
    rows, last = concat_batches([chunk.rows for chunk in chunks]), last[order]
    return Chunk(
        rows, _arrivals_of(chunks, None), first[order], last, np.concatenate(tuples)[order], np.concatenate(marks),
        ascends=ascends(last),
    )  # fmt: skip


def _arrivals_of(chunks: list[Chunk], order: NDArray[np.int32] | None) -> Arrivals:
    return merged_arrivals([chunk.arrival for chunk in chunks], [len(chunk.rows) for chunk in chunks], order)


def ascending(values: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return a stable order in which the values ascend."""
    packed = (values.astype(np.int64) << np.int64(31)) | np.arange(len(values), dtype=np.int64)
    packed.sort()
    return (packed & np.int64(2**31 - 1)).astype(np.int32)


def by_leaves(first: NDArray[np.int32], last: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the order by first leaf, then by last leaf. Both ascend in it if they can do so together."""
    by_last = ascending(last)
    return by_last[ascending(first[by_last])]


def ascends(values: NDArray[np.int32]) -> bool:
    """Return whether no value is less than the one before it."""
    return len(values) < 2 or bool((values[1:] >= values[:-1]).all())  # noqa: PLR2004 - one value is in order


def merged_arrivals(parts: Sequence[Arrivals], rows: Sequence[int], order: NDArray[np.int32] | None) -> Arrivals:
    """Return the arrivals of several parts with these numbers of rows, in another order."""
    if len({part if isinstance(part, float) else None for part in parts}) == 1 and isinstance(parts[0], float):
        return parts[0]
    each = np.concatenate([np.broadcast_to(np.asarray(part), count) for part, count in zip(parts, rows, strict=True)])
    return each if order is None else each[order]
