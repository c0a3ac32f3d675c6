"""Spilled blocks of tuples: immutable, with arrival and departure stamps, sorted if their writer sorted them.

A block is the records of its tuples and their heap. What is in memory is charged to the component ``spill``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.rows import Rows
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.layout import RowLayout
    from headrace.storage.spill import BlockRef, SpillFile

__all__ = ["BLOCK_ENTRY_NBYTES", "SpilledBlock", "held", "merge_rows", "read_block", "write_block"]

_SLACK = 8
BLOCK_ENTRY_NBYTES = 256
"""Bytes of a `SpilledBlock` in memory, for whoever keeps a list of them."""


@dataclass(frozen=True, slots=True)
class SpilledBlock:
    """A block of tuples of one input in a spill file.

    Attributes
    ----------
    ref
        Where its bytes are.
    count
        Number of tuples.
    departure
        Greatest departure stamp of its tuples.
    """

    ref: BlockRef
    count: int
    departure: int

    @property
    def nbytes(self) -> int:
        """Bytes in memory while the block is read or written."""
        return block_nbytes(self.ref.nbytes)


def write_block(file: SpillFile, rows: Rows, budget: MemoryBudget) -> SpilledBlock:
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
        ref = file.append([records, rows.heap])
    return SpilledBlock(ref, len(rows), int(rows.departures.max(initial=0)))


@contextlib.contextmanager
def read_block(file: SpillFile, layout: RowLayout, block: SpilledBlock, budget: MemoryBudget) -> Iterator[Rows]:
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
def held(budget: MemoryBudget, nbytes: int) -> Iterator[None]:
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
        np.concatenate([*records, np.zeros(_SLACK, dtype=np.uint8)]),
        np.concatenate([part.heap for part in parts]),
    )
    return joined.take(joined.order_by(key))
