"""`BlockList`: the spilled blocks of one input (the paper's Disk), with what tells that two blocks need no join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.blocks import SpilledBlock
from headrace.joins.streams.tuples.arena import ARENA_PAGE, Arena, charged_nbytes
from headrace.storage.spill import BlockRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.keys import Width
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["BLOCK_NBYTES", "ENTRIES_AHEAD", "BlockList"]

_PAGE, _NBYTES, _COUNT, _LOW, _HIGH, _ARRIVAL, _DEPARTURE = range(7)
_FIELDS = 7
BLOCK_NBYTES = 8 * _FIELDS
"""Bytes of a block in the list."""
ENTRIES_AHEAD = 32
"""Blocks for which a list should have room before memory is full."""
_MOST = 2**64 - 1


class BlockList:
    """Spilled blocks of one input, in the order in which they were written.

    All tuples of a block left memory together. For each block the list holds where it is, how many tuples it has, its
    least and greatest key word, the latest arrival of its tuples and their departure.

    Parameters
    ----------
    budget
        Budget to charge, as the component ``spill``.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._memory = Arena(budget, "spill")
        self._memory.resize(ARENA_PAGE)
        self._count = 0
        self.largest = 0

    def __len__(self) -> int:
        return self._count

    def reserve(self, more: int = ENTRIES_AHEAD) -> bool:
        """Grow for more blocks, if there is memory for them; return whether the list has room for them.

        Call it while tuples can make way, so that `append` finds room when memory is full.
        """
        grown = max(self._memory.charged, charged_nbytes(BLOCK_NBYTES * (self._count + more)))
        if grown - self._memory.charged > self._budget.available:
            return False
        self._memory.resize(grown)
        return True

    def append(self, block: SpilledBlock, rows: Rows, key: int) -> None:
        """Add a block.

        Parameters
        ----------
        block, rows
            Block, and its tuples, of which there is at least one.
        key
            Key by which they are sorted.

        Raises
        ------
        MemoryBudgetError
            If the list is full and no memory is left.
        """
        self._memory.resize(max(self._memory.charged, BLOCK_NBYTES * (self._count + 1)))
        words = rows.key_words(key)
        self._count += 1
        entry = self._entries[-1]
        entry[:] = block.ref.page, block.ref.nbytes, block.count, 0, 0, rows.arrivals.max(), block.departure
        entry.view(np.uint64)[[_LOW, _HIGH]] = words.min(), words.max()
        self.largest = max(self.largest, block.nbytes)

    def block(self, at: int) -> SpilledBlock:
        """Return a block."""
        entry = self._entries[at].tolist()
        return SpilledBlock(BlockRef(at, entry[_PAGE], entry[_NBYTES], entry[_COUNT]), entry[_COUNT], entry[_DEPARTURE])

    def content_nbytes(self, at: int) -> int:
        """Return the bytes of a block's tuples."""
        return int(self._entries[at, _NBYTES])

    def meets(self, at: int, other: BlockList, start: int, stop: int, width: Width | None) -> bool:
        """Return whether a block may have results with blocks of the other input that do not exist yet.

        It has none if the key ranges are too far apart, or if all tuples of both blocks were in memory together.

        Parameters
        ----------
        at
            Block of this list.
        other, start, stop
            Blocks of the other list.
        width
            Greatest distance of keys; None for equality. Distances of floats do not rule out any blocks.
        """
        mine, theirs = self._entries[at], other._entries[start:stop]
        joined = (theirs[:, _ARRIVAL] < mine[_DEPARTURE]) & (theirs[:, _DEPARTURE] > mine[_ARRIVAL])
        if width is not None and width.floating:
            return not joined.all()
        reach = 0 if width is None else width.words
        low, high = (int(word) for word in mine.view(np.uint64)[[_LOW, _HIGH]])
        near = (theirs.view(np.uint64)[:, _LOW] <= np.uint64(min(high + reach, _MOST))) & (
            theirs.view(np.uint64)[:, _HIGH] >= np.uint64(max(low - reach, 0))
        )
        return bool((near & ~joined).any())

    def free(self) -> None:
        """Free the memory."""
        self._count = 0
        self._memory.free()

    @property
    def _entries(self) -> NDArray[np.int64]:
        return self._memory.bytes[: BLOCK_NBYTES * self._count].view(np.int64).reshape(-1, _FIELDS)
