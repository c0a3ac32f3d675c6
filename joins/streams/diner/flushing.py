"""`FlushingPolicy`: which tuples of an input leave memory as the next block (the paper's section 3.3, algorithm 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.diner import _kernels as kernels
from headrace.joins.streams.diner._kernels import StoredRows
from headrace.joins.streams.diner.regions import LOWER, MIDDLE, Regions
from headrace.joins.streams.tuples.layout import TOUCHED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.indexes import SortedIndex
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["FlushingPolicy"]


class FlushingPolicy:
    """Flushing policy of one input.

    A block comes from the region with the fewest joins per tuple: from the end of an outer region, or from the middle
    by the Clock over join bits. If the region has too few tuples, the next worst region fills the block. The first
    flush is from the middle, which holds everything then.

    The hand of the Clock begins at a random entry, of a generator with a fixed seed. It is kept as a key word and a
    number among the entries of this word, since entries come and go between flushes.

    Parameters
    ----------
    block
        Bytes of a block.
    seed
        Seed of the generator.

    Attributes
    ----------
    regions
        Boundaries and join counters.
    """

    def __init__(self, block: int, seed: int) -> None:
        self.regions = Regions()
        self._block = block
        self._random = np.random.default_rng(seed)
        self._hand: tuple[int, int] | None = None

    def choose(self, rows: Rows, index: SortedIndex) -> NDArray[np.int64]:
        """Return the slots of the tuples of the next block in the order of their keys. There must be a tuple.

        Clears the join bits of the tuples that the hand of the Clock visits and leaves.
        """
        entries = index.slots
        chosen, room = np.zeros(0, dtype=np.int64), self._block
        start, stop = self.regions.bounds(index.words)
        stored = _stored(rows)
        for region in self.regions.worst_first(index.words):
            out = np.empty(room // rows.layout.stride + 1, dtype=np.int64)
            first = len(chosen) == 0
            if region == MIDDLE:
                hand = self._hand_at(index.words, start, stop)
                found, used, full, hand = kernels.sweep(entries, start, stop, hand, stored, TOUCHED, room, first, out)
                self._hand = _place(index.words, hand, out[:found])
            elif region == LOWER:
                found, used, full = kernels.take_run(entries, 0, start, 1, stored, room, first, out)
            else:
                found, used, full = kernels.take_run(entries, len(entries) - 1, stop - 1, -1, stored, room, first, out)
            chosen, room = np.concatenate([chosen, out[:found]]), room - used
            if full or room <= 0:
                break
        return entries[np.sort(chosen)].astype(np.int64)

    def flushed(self, rows: Rows, index: SortedIndex, nbytes: int) -> None:
        """Take note that the chosen tuples have left.

        Parameters
        ----------
        rows, index
            Tuples that are left, and their entries.
        nbytes
            Bytes that they would take in blocks.
        """
        self.regions.move(index.words, max(1, self._block * len(rows) // max(nbytes, 1)))

    def blocks(self, rows: Rows, index: SortedIndex) -> list[NDArray[np.int64]]:
        """Return the slots of all tuples in the order of their keys, cut into blocks."""
        entries, stored, start = index.slots, _stored(rows), 0
        out = np.empty(self._block // rows.layout.stride + 1, dtype=np.int64)
        cuts = []
        while start < len(entries):
            found, _, _ = kernels.take_run(entries, start, len(entries), 1, stored, self._block, True, out)  # noqa: FBT003 - kernels take no keywords
            cuts.append(entries[start : start + found].astype(np.int64))
            start += found
        return cuts

    def _hand_at(self, words: NDArray[np.uint64], start: int, stop: int) -> int:
        """Return the entry at the hand; it goes on at the start of the middle region if it has left the region."""
        if self._hand is None:
            return int(self._random.integers(start, stop))
        word, number = self._hand
        low = int(np.searchsorted(words, np.uint64(word), side="left"))
        high = int(np.searchsorted(words, np.uint64(word), side="right"))
        at = min(low + number, high)
        return at if start <= at < stop else start


def _stored(rows: Rows) -> StoredRows:
    layout = rows.layout
    return StoredRows(rows.records, rows.heap, layout.stride, layout.heap, layout.flags)


def _place(words: NDArray[np.uint64], hand: int, leaving: NDArray[np.int64]) -> tuple[int, int]:
    """Return the hand as a key word and a number among its entries, once the leaving entries have left."""
    low = int(np.searchsorted(words, words[hand], side="left"))
    return int(words[hand]), hand - low - int(((leaving >= low) & (leaving < hand)).sum())
