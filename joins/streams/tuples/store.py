"""`TupleStore`: the tuples of one input in memory, dense, with an index for each of its keys.

Slots 0 to ``len(store) - 1`` hold tuples. When tuples leave, the last ones move into their slots, so memory is as large
as the tuples in it. The arrival stamps tell the order of arrival; slots do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.tuples import _row_kernels as kernels
from headrace.joins.streams.tuples.arena import Arena, charged_nbytes
from headrace.joins.streams.tuples.indexes import HashIndex, KeyIndex, SortedIndex
from headrace.joins.streams.tuples.rows import Rows, heap_nbytes, heap_range
from headrace.storage.format import SLACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.keys import Width
    from headrace.joins.streams.tuples.layout import RowLayout

__all__ = ["TupleStore"]

_SMALL = 4096


class TupleStore:
    """Tuples of one input in memory.

    Parameters
    ----------
    layout
        Layout of the records.
    budget
        Budget to charge.
    ordered
        For each key, whether its index is a `SortedIndex`; otherwise it is a `HashIndex`. None for a key without one.
    """

    def __init__(self, layout: RowLayout, budget: MemoryBudget, ordered: Sequence[bool | None]) -> None:
        self.layout = layout
        self._budget = budget
        self._records, self._heap = Arena(budget, "tuples"), Arena(budget, "tuples")
        self._count = self._heap_end = self._heap_live = 0
        self.indexes: list[KeyIndex | None] = [
            None if kind is None else (SortedIndex if kind else HashIndex)(budget, key)
            for key, kind in enumerate(ordered)
        ]

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Rows:
        """Tuples, by slot. Views, valid until the store changes."""
        return Rows(self.layout, self._count, self._records.bytes, self._heap.bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that are charged."""
        return self._nbytes_for(self._count, self._heap_end)

    @property
    def least_nbytes(self) -> int:
        """Bytes that are charged for one tuple with a small variable part."""
        return self._nbytes_for(1, _SMALL if self.layout.heap >= 0 else 0)

    def sorted_index(self, key: int) -> SortedIndex:
        """Return the index of a key that has sorted entries."""
        index = self.indexes[key]
        assert isinstance(index, SortedIndex), key
        return index

    def add_sorted_index(self, key: int) -> SortedIndex:
        """Return a new index with sorted entries, of a key that has another index. The store must be empty."""
        assert not self._count
        index = SortedIndex(self._budget, key)
        self.indexes.append(index)
        return index

    def drop_indexes(self) -> None:
        """Free the indexes for good. Tuples that are added afterwards have none, so they cannot be probed."""
        for at, index in enumerate(self.indexes):
            if index is not None:
                index.free()
                self.indexes[at] = None

    @property
    def live_nbytes(self) -> int:
        """Bytes of the tuples themselves."""
        return self._count * self.layout.stride + self._heap_live

    def fitting(self, rows: Rows, start: int, limit: int | None = None) -> int:
        """Return how many of the tuples from position `start` on fit into the budget, or into `limit` more bytes."""
        room = self._budget.available if limit is None else min(limit, self._budget.available)
        if self._heap_end - self._heap_live > _SMALL and self._growth(rows, start, len(rows)) > room:
            self._compact()
        low, high = 0, len(rows) - start
        if self._growth(rows, start, len(rows)) <= room:
            return high
        while low < high:
            middle = (low + high + 1) >> 1
            if self._growth(rows, start, start + middle) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, rows: Rows, start: int = 0, stop: int | None = None) -> None:
        """Add the tuples from position `start` up to `stop`.

        Raises
        ------
        MemoryBudgetError
            If they do not fit. Nothing is added then.
        """
        stop = len(rows) if stop is None else stop
        if start >= stop:
            return
        stride, heap_at, before, more = self.layout.stride, self.layout.heap, self._count, stop - start
        first, last = heap_range(rows, start, stop)
        heap_end = self._heap_end + last - first
        self._reserve(more, heap_end)
        added = self._records.bytes[before * stride :]
        added[: more * stride] = rows.records[start * stride : stop * stride]
        if heap_at >= 0:
            heap = self._heap.bytes
            heap[self._heap_end : heap_end] = rows.heap[first:last]
            kernels.shift_heap(added, stride, heap_at, more, self._heap_end - first)
            kernels.name_records(added, stride, heap_at, heap, before, more)
        self._count += stop - start
        self._heap_live += heap_end - self._heap_end
        self._heap_end = heap_end
        for key_index in self.indexes:
            if key_index is not None:
                key_index.added(self.rows, before)

    def remove(self, slots: NDArray[np.int64], departure: int) -> Rows:
        """Remove tuples and return them in the order of `slots`, with their departure stamp.

        Parameters
        ----------
        slots : int64[n]
            Different slots.
        departure
            Departure stamp (the paper's DTS).
        """
        removed = self.rows.take(slots)
        removed.departures[:] = departure
        self.drop(slots)
        return removed

    def drop(self, slots: NDArray[np.int64]) -> None:
        """Remove the tuples in these slots, which are different."""
        if len(slots) == 0:
            return
        slots = np.sort(slots)
        self._heap_live -= heap_nbytes(self.rows, slots)
        kept = self._count - len(slots)
        stay = np.ones(self._count - kept, dtype=np.bool_)
        stay[slots[np.searchsorted(slots, kept) :] - kept] = False
        source = np.flatnonzero(stay) + kept
        target = slots[: len(source)]
        layout = self.layout
        kernels.move_records(self._records.bytes, layout.stride, layout.heap, self._heap.bytes, source, target)
        self._count = kept
        for key_index in self.indexes:
            if key_index is not None:
                key_index.removed(self.rows, slots, source, target)
        self._give_back()

    def sweep(self, keep: Callable[[int, int], NDArray[np.bool_]], step: int) -> None:
        """Remove tuples in one pass, in which the others keep their order, and rebuild the indexes.

        This takes less time than `drop` if the tuples that leave are a good part of all.

        Parameters
        ----------
        keep
            Called for one slice of slots after another, with start and end; returns which of their tuples stay. The
            tuples of the slice are still in these slots.
        step
            Slots in a slice.
        """
        layout, kept = self.layout, 0
        for start in range(0, self._count, step):
            stop = min(start + step, self._count)
            stay = keep(start, stop)
            self._heap_live -= heap_nbytes(self.rows, start + np.flatnonzero(~stay))
            kept = kernels.keep_records(
                self._records.bytes, layout.stride, layout.heap, self._heap.bytes, start, stay, kept
            )
        if kept == self._count:
            return
        self._count = kept
        for key_index in self.indexes:
            if key_index is not None:
                key_index.rebuild(self.rows)
        self._give_back()

    def probe(
        self,
        key: int,
        probing: Rows,
        probing_key: int,
        index: NDArray[np.int64],
        width: Width | None,
        cursor: NDArray[np.int64],
        out: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> int:
        """Find tuples that meet a condition with the probing tuples at `index`.

        Parameters
        ----------
        key
            Key of this store.
        probing, probing_key, index
            Tuples that probe, their key, and which of them.
        width
            Greatest distance of the keys; None for equality.
        cursor
            Place at which to go on, see `headrace.joins.streams.tuples.indexes.new_cursor`.
        out
            Arrays for pairs of a position in `index` and a slot. If they are filled, there may be more.

        Returns
        -------
        int
            Number of pairs.
        """
        key_index = self.indexes[key]
        assert key_index is not None, f"key {key} has no index"
        return key_index.probe(self.rows, key, probing, probing_key, index, width, cursor, out)

    def free(self) -> None:
        """Drop all tuples and free the memory."""
        self._count = self._heap_end = self._heap_live = 0
        self._records.free()
        self._heap.free()
        for key_index in self.indexes:
            if key_index is not None:
                key_index.free()

    def _nbytes_for(self, count: int, heap_end: int) -> int:
        """Return the bytes that are charged for a number of tuples."""
        records = charged_nbytes(count * self.layout.stride + SLACK) if count else 0
        heap = charged_nbytes(heap_end + SLACK) if heap_end else 0
        return records + heap + sum(index.nbytes_for(count) for index in self.indexes if index is not None)

    def _growth(self, rows: Rows, start: int, stop: int) -> int:
        """Return the bytes that are charged in addition if tuples are added."""
        if start == stop:
            return 0
        first, last = heap_range(rows, start, stop)
        return self._nbytes_for(self._count + stop - start, self._heap_end + last - first) - self._charged

    @property
    def _charged(self) -> int:
        indexes = sum(index.charged for index in self.indexes if index is not None)
        return self._records.charged + self._heap.charged + indexes

    def _reserve(self, more: int, heap_end: int) -> None:
        """Charge for more tuples: for all of their memory, or none of it."""
        count = self._count + more
        growth = self._nbytes_for(count, heap_end) - self._charged
        self._budget.charge("tuples", max(growth, 0))
        self._budget.release("tuples", max(growth, 0))
        self._records.resize(count * self.layout.stride + SLACK)
        if heap_end:
            self._heap.resize(heap_end + SLACK)

    def _give_back(self) -> None:
        """Give back the memory of tuples that were removed."""
        self._records.resize(self._count * self.layout.stride + SLACK if self._count else 0)
        if 2 * self._heap_live < self._heap_end or not self._count:
            self._compact()

    def _compact(self) -> None:
        """Close the gaps in the heap."""
        layout = self.layout
        if layout.heap >= 0:
            self._heap_end = kernels.compact_heap(
                self._records.bytes, layout.stride, layout.heap, self._count, self._heap.bytes, self._heap_end
            )
            assert self._heap_end == self._heap_live, (self._heap_end, self._heap_live)
            self._heap.resize(self._heap_end + SLACK if self._heap_end else 0)
