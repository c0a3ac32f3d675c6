"""Spilled blocks of tuples: immutable, with arrival and departure stamps, sorted if their writer sorted them.

A block is the records of its tuples and their heap. What is in memory is charged to the component ``spill``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.joins.streams.tuples.rows import Rows
from headrace.storage.format import SLACK
from headrace.storage.spill import BlockRef, block_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import Component, MemoryBudget
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.storage.spill import SpillFile

__all__ = [
    "BlockList",
    "Memory",
    "SpillReserve",
    "SpilledBlock",
    "cuts",
    "held",
    "merge_rows",
    "read_block",
    "write_block",
]


class Memory(Protocol):
    """What blocks in memory are charged to: a `MemoryBudget`, or a `SpillReserve` of it."""

    def charge(self, component: Component, nbytes: int) -> None:
        """Add to what a component holds, or raise `MemoryBudgetError`."""
        ...

    def release(self, component: Component, nbytes: int) -> None:
        """Subtract from what a component holds."""
        ...


class SpillReserve:
    """A part of the budget that is charged once, so that a flush can begin when no memory is left.

    Parameters
    ----------
    budget
        Budget to charge, as the component ``spill``.
    nbytes
        Bytes of the reserve.

    Raises
    ------
    MemoryBudgetError
        If the budget would be exceeded.
    """

    def __init__(self, budget: MemoryBudget, nbytes: int) -> None:
        budget.charge("spill", nbytes)
        self._budget = budget
        self.nbytes = self.available = nbytes

    def charge(self, component: Component, nbytes: int) -> None:
        """Take memory from the reserve, and from the budget what exceeds it.

        Raises
        ------
        MemoryBudgetError
            If the budget would be exceeded. Nothing is charged then.
        """
        beyond = max(nbytes - max(self.available, 0), 0)
        self._budget.charge(component, beyond)
        self.available -= nbytes

    def release(self, component: Component, nbytes: int) -> None:
        """Return memory."""
        self._budget.release(component, min(max(-self.available, 0), nbytes))
        self.available += nbytes


@dataclass(frozen=True, slots=True)
class SpilledBlock:
    """A block of tuples of one input in a spill file.

    Attributes
    ----------
    ref
        Place of its bytes in the file.
    count
        Number of tuples.
    departure
        Greatest departure stamp of its tuples; -1 if it is not known.
    """

    ref: BlockRef
    count: int
    departure: int

    @property
    def nbytes(self) -> int:
        """Bytes in memory while the block is read or written."""
        return block_nbytes(self.ref.nbytes)


class BlockList:
    """The first spilled blocks of one input, each with a partition number, in few bytes.

    Parameters
    ----------
    budget
        Budget to charge, as the component ``spill``.
    limit
        Most bytes of the list. Blocks that it does not have are found by `SpillFile.scan`.
    """

    _FIELDS = 7

    def __init__(self, budget: MemoryBudget, limit: int) -> None:
        self._budget = budget
        self._most = limit // (8 * self._FIELDS)
        self._complete = True
        self._table = np.zeros((self._FIELDS, 0), dtype=np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> SpilledBlock:
        number, page, nbytes, count, departure = self._table[:5, : self._count][:, at].tolist()
        return SpilledBlock(BlockRef(number, page, nbytes, count), count, departure)

    def append(self, block: SpilledBlock, partition: int = 0) -> None:
        """Add a block, unless there is no memory for it or one before it is missing."""
        if not self._complete:
            return
        if self._count == self._table.shape[1]:
            more = min(max(16, self._count // 2), self._most - self._count)
            nbytes = more * 8 * self._FIELDS
            if more <= 0 or 2 * nbytes > self._budget.available:
                self._complete = False
                return
            self._budget.charge("spill", nbytes)
            self._table = np.concatenate([self._table, np.zeros((self._FIELDS, more), dtype=np.int64)], axis=1)
        ref = block.ref
        self._table[:, self._count] = ref.number, ref.page, ref.nbytes, block.count, block.departure, partition, 0
        self._count += 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of tuples of each block. A view."""
        return self._table[3, : self._count]

    @property
    def partitions(self) -> NDArray[np.int64]:
        """Partition of each block. A view."""
        return self._table[5, : self._count]

    @property
    def marks(self) -> NDArray[np.int64]:
        """A number of each block for whoever keeps the list, at first 0. A view that can be written to."""
        return self._table[6, : self._count]

    def of(self, partition: int, file: SpillFile) -> Iterator[SpilledBlock]:
        """Yield the blocks of a partition in the order in which they were written to its file, in the list or not."""
        number = page = 0
        for at in np.flatnonzero(self.partitions == partition):
            block = self[int(at)]
            yield block
            number, page = block.ref.number + 1, block.ref.end
        for ref in file.scan(number, page):
            yield SpilledBlock(ref, ref.tag, -1)


def cuts(rows: Rows, index: NDArray[np.int64], nbytes: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield the positions at `index` in pieces for blocks, each with the bytes of its tuples.

    A piece has at most `nbytes`, or one tuple.
    """
    ends, start = np.cumsum(rows.sizes(index)), 0
    while start < len(index):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + nbytes, side="right")))
        yield index[start:stop], int(ends[stop - 1]) - before
        start = stop


def write_block(file: SpillFile, rows: Rows, budget: Memory) -> SpilledBlock:
    """Write tuples as a block. The write buffer is charged meanwhile.

    Raises
    ------
    StorageIOError
        If the operating system refuses, for instance because the disk is full.
    MemoryBudgetError
        If there is no memory for the buffer.
    """
    records = rows.records[: len(rows) * rows.layout.stride]
    with held(budget, block_nbytes(records.nbytes + rows.heap.nbytes)):
        ref = file.append([records, rows.heap], len(rows))
    return SpilledBlock(ref, len(rows), int(rows.departures.max(initial=0)))


@contextlib.contextmanager
def read_block(file: SpillFile, layout: RowLayout, block: SpilledBlock, budget: Memory) -> Iterator[Rows]:
    """Yield the tuples of a block. Their memory is charged until the end of the context.

    Raises
    ------
    CorruptPageError
        If the block is damaged.
    MemoryBudgetError
        If there is no memory for the block.
    """
    with held(budget, block.nbytes):
        content = file.read(block.ref)
        size = block.count * layout.stride
        yield Rows(layout, block.count, content, content[size:])


@contextlib.contextmanager
def held(budget: Memory, nbytes: int) -> Iterator[None]:
    """Charge the component ``spill`` within the context."""
    budget.charge("spill", nbytes)
    try:
        yield
    finally:
        budget.release("spill", nbytes)


def merge_rows(parts: Sequence[Rows], key: int) -> Rows:
    """Return the tuples of several blocks as one, sorted by a key. There must be at least one part."""
    layout = parts[0].layout
    heap_starts = np.cumsum([0, *(len(part.heap) for part in parts)])
    records = [part.records[: len(part) * layout.stride].copy() for part in parts]
    if layout.heap >= 0:
        for part, moved, start in zip(parts, records, heap_starts[:-1], strict=True):
            Rows(layout, len(part), moved, part.heap).words(layout.heap)[:] += np.uint64(start)
    joined = Rows(
        layout,
        sum(map(len, parts)),
        np.concatenate([*records, np.zeros(SLACK, dtype=np.uint8)]),
        np.concatenate([part.heap for part in parts]),
    )
    return joined.take(joined.order_by(key))
