"""`Spool`: tuples on their way to disk, collected by input and partition, and written as large blocks.

A tuple is copied once, into the buffer of its partition, without its stamps. A full buffer becomes a block of the
partition's file. A thread can do both for the tuples of a slice, while the caller goes on with the next slice.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.blocks import held
from headrace.joins.streams.base.lanes import most_lanes
from headrace.joins.streams.tuples import _row_kernels as kernels
from headrace.joins.streams.tuples.layout import STAMPS_NBYTES
from headrace.joins.streams.tuples.rows import heap_nbytes
from headrace.storage.format import SLACK
from headrace.storage.spill import SPILL_PAGE, block_buffer, block_nbytes, content_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.spill import SpillFile

__all__ = ["Spool", "spool_partitions"]

_SHARE = 8  # of the memory, for all buffers
_GOOD_PAGES, _MOST_PAGES = 2, 256
_MOST_PARTITIONS = 64  # each of them has a file for each input
_LEAST_SHARE = 0.25  # of a buffer, for records and for variable parts


def spool_partitions(memory: int) -> int:
    """Return the greatest number of partitions whose buffers are worth writing: a power of 2 from 2 to 64.

    Examples
    --------
    >>> [spool_partitions(mib << 20) for mib in (1, 8, 256)]
    [4, 32, 64]
    """
    partitions = _MOST_PARTITIONS
    while partitions > 2 and _pages(memory, 2 * partitions) < _GOOD_PAGES:  # noqa: PLR2004 - the fewest
        partitions //= 2
    return partitions


def _pages(memory: int, files: int) -> int:
    """Return the pages of a buffer, if each file has one and another block is being written."""
    return min(memory // _SHARE // SPILL_PAGE // (files + 1), _MOST_PAGES)


class Spool:
    """Buffers of tuples on their way to disk.

    Parameters
    ----------
    budget
        Budget to charge, as the component ``spill``: once, an eighth of it, or what the smallest buffers need.
    layouts
        Layout of the tuples of each input. Their blocks have it too, but without stamps.
    partitions
        Number of partitions.
    file
        Returns the file of an input and a partition.

    Attributes
    ----------
    layouts
        Layouts of the blocks.

    Raises
    ------
    MemoryBudgetError
        If the budget would be exceeded.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        layouts: Sequence[RowLayout],
        partitions: int,
        file: Callable[[int, int], SpillFile],
    ) -> None:
        files = len(layouts) * partitions
        self.layouts = [layout.without_stamps() for layout in layouts]
        self._budget = budget
        self._file = file
        self._content = content_nbytes(max(1, _pages(budget.limit, files)))
        self.nbytes = files * self._content + block_nbytes(self._content) + SLACK
        budget.charge("spill", self.nbytes)
        self._buffers = np.empty(files * self._content + SLACK, dtype=np.uint8)
        self._block = block_buffer(self._content)
        self._counts = np.zeros((len(layouts), partitions), dtype=np.int64)
        self._heap_ends = np.zeros_like(self._counts)
        self._heap_starts = [-1] * len(layouts)
        self._pool = ThreadPoolExecutor(1, "headrace-spill") if most_lanes() > 1 else None
        self._adding: Future[None] | None = None

    @property
    def count(self) -> int:
        """Number of tuples in the buffers, those included that are being added."""
        if self._adding is not None:
            wait([self._adding])
        return int(self._counts.sum())

    def too_large(self, side: int, rows: Rows) -> NDArray[np.bool_] | None:
        """Return which tuples no buffer takes; None if there is none."""
        layout = self.layouts[side]
        start = self._heap_start(side, rows)
        if start > self._content:
            return np.ones(len(rows), dtype=np.bool_)
        if layout.heap < 0:
            return None
        sizes = rows.sizes(np.arange(len(rows), dtype=np.int64)) - rows.layout.stride
        large: NDArray[np.bool_] = sizes > self._content - start
        return large if large.any() else None

    def add(self, side: int, rows: Rows, index: NDArray[np.int64], numbers: NDArray[np.int64], flag: int = 0) -> None:
        """Add tuples.

        Parameters
        ----------
        side
            Their input.
        rows, index
            Tuples to add are those at `index`. None of them is too large for a buffer.
        numbers : int64[len(index)]
            Partition of each.
        flag
            Flags to set in the copies.

        Raises
        ------
        StorageIOError
            If a block cannot be written, this one or one before it.
        """
        layout, start, at = rows.layout, self._heap_start(side, rows), 0
        while True:
            at = kernels.scatter(
                rows.records,
                layout.stride,
                layout.heap,
                rows.heap,
                index,
                at,
                numbers,
                STAMPS_NBYTES,
                layout.flags,
                flag,
                self._buffers,
                self._content,
                side * self._counts.shape[1],
                start,
                self._counts[side],
                self._heap_ends[side],
            )
            if at == len(index):
                return
            self._write(side, int(numbers[at]))

    def start(self, side: int, rows: Rows, index: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Add tuples as `add` does, but on a thread if there are processors for it.

        Until `settle` the arguments must not change, and only `start` may be called. It waits for the tuples before.

        Raises
        ------
        StorageIOError
            If a block of the tuples before, or without a thread of these, cannot be written.
        """
        self.settle()
        if self._pool is None:
            self.add(side, rows, index, numbers)
        else:
            self._adding = self._pool.submit(self.add, side, rows, index, numbers)

    def settle(self) -> None:
        """Wait until the tuples that were given to `start` are added.

        Raises
        ------
        StorageIOError
            If a block cannot be written.
        """
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.result()

    @staticmethod
    def nbytes_alone(nbytes: int) -> int:
        """Return the memory that `write_alone` needs for a tuple of so many bytes."""
        return nbytes + block_nbytes(nbytes)

    def write_alone(self, side: int, rows: Rows, at: int, number: int) -> None:
        """Write a tuple that is too large for a buffer as a block of its own."""
        self.settle()
        layout, one = self.layouts[side], np.array([at], dtype=np.int64)
        start = layout.stride
        size = start + heap_nbytes(rows, one)
        file = self._file(side, number)
        with held(self._budget, self.nbytes_alone(size)):
            buffer, none = np.empty(size + SLACK, dtype=np.uint8), np.zeros(1, dtype=np.int64)
            kernels.scatter(
                rows.records,
                rows.layout.stride,
                rows.layout.heap,
                rows.heap,
                one,
                0,
                none,
                STAMPS_NBYTES,
                rows.layout.flags,
                0,
                buffer,
                size,
                0,
                start,
                none.copy(),
                none.copy(),
            )
            file.write(file.reserve(size, 1), [buffer[:size]])

    def finish(self) -> None:
        """Write all tuples, and free the memory.

        Raises
        ------
        StorageIOError
            If a block cannot be written.
        """
        self.settle()
        for side, number in np.argwhere(self._counts).tolist():
            self._write(side, number)
        self.close()
        self._buffers = self._block = np.zeros(0, dtype=np.uint8)
        self._budget.release("spill", self.nbytes)

    def close(self) -> None:
        """Stop the thread, after the tuples that it is adding."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = self._adding = None

    def _heap_start(self, side: int, rows: Rows) -> int:
        """Return where variable parts begin in a buffer.

        The first tuples of an input decide it, within limits, since later ones may differ. It is beyond the buffer if
        not even a record fits.
        """
        if self._heap_starts[side] < 0:
            stride, share = self.layouts[side].stride, 1.0
            if self.layouts[side].heap >= 0:
                heap = heap_nbytes(rows, np.arange(len(rows), dtype=np.int64)) / max(len(rows), 1)
                share = min(max(stride / (stride + heap), _LEAST_SHARE), 1 - _LEAST_SHARE)
            self._heap_starts[side] = max(1, int(share * self._content) // stride) * stride
        return self._heap_starts[side]

    def _write(self, side: int, number: int) -> None:
        """Write the buffer of a partition, and empty it."""
        count, heap = int(self._counts[side, number]), int(self._heap_ends[side, number])
        place, start = side * self._counts.shape[1] + number, self._heap_starts[side]
        buffer = self._buffers[place * self._content : (place + 1) * self._content]
        parts = [buffer[: count * self.layouts[side].stride], buffer[start : start + heap]]
        file = self._file(side, number)
        file.write(file.reserve(sum(map(len, parts)), count), parts, self._block)
        self._counts[side, number] = self._heap_ends[side, number] = 0
