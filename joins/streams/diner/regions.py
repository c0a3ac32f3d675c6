"""`Regions`: the three key regions of one input, their boundaries and join counters (the paper's section 3.3).

The lower region is all keys up to a boundary, the upper region all keys from another one on, the middle region the keys
between. The sorted entries of the tuples in memory tell how many tuples are in each (the paper's LwTups, MdTups and
UpTups), so no counters of tuples are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.diner import _kernels as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["LOWER", "MIDDLE", "UPPER", "Regions"]

LOWER, MIDDLE, UPPER = 0, 1, 2
_TIES = (UPPER, LOWER, MIDDLE)  # algorithm 2 tests the regions in this order


class Regions:
    """Key regions of one input.

    Attributes
    ----------
    lower, upper
        Greatest key word of the lower region and least key word of the upper region (the paper's LastLwVal and
        LastUpVal); None before the first flush, when all tuples are in the middle.
    joins : int64[3]
        Results since the last flush that tuples of each region were part of (the paper's LwJoins, MdJoins and UpJoins).
    """

    def __init__(self) -> None:
        self.lower: int | None = None
        self.upper: int | None = None
        self.joins = np.zeros(3, dtype=np.int64)

    def credit(self, rows: Rows, key: int, index: NDArray[np.int64]) -> None:
        """Count a result for the region of each tuple at `index` (algorithm 3).

        With a band, the tuples of a result can be in different regions, so each is credited by its own key.
        """
        lower, upper = self.lower or 0, self.upper or 0
        bounded = self.upper is not None
        layout = rows.layout
        word_at = layout.keys[key].word
        kernels.credit(
            rows.records, layout.stride, word_at, index, np.uint64(lower), np.uint64(upper), bounded, self.joins
        )

    def bounds(self, words: NDArray[np.uint64]) -> tuple[int, int]:
        """Return where the middle region begins and ends among sorted key words."""
        if self.lower is None or self.upper is None:
            return 0, len(words)
        return (
            int(np.searchsorted(words, np.uint64(self.lower), side="right")),
            int(np.searchsorted(words, np.uint64(self.upper), side="left")),
        )

    def worst_first(self, words: NDArray[np.uint64]) -> list[int]:
        """Return the regions that hold tuples, by growing number of joins per tuple (algorithm 2, lines 2 to 17).

        Parameters
        ----------
        words : uint64[n]
            Key words of the tuples in memory, in order.
        """
        benefits = self.benefits(words)
        return sorted(benefits, key=lambda region: benefits[region])

    def benefits(self, words: NDArray[np.uint64]) -> dict[int, float]:
        """Return the joins per tuple of the regions that hold tuples; see `worst_first`."""
        start, stop = self.bounds(words)
        tuples = {LOWER: start, MIDDLE: stop - start, UPPER: len(words) - stop}
        return {region: int(self.joins[region]) / tuples[region] for region in _TIES if tuples[region]}

    def move(self, words: NDArray[np.uint64], per_block: int) -> None:
        """Move the boundaries after a flush, and zero the join counters (algorithm 2, lines 11, 15, 19 and 20).

        Each end then holds a block, and with repeated keys as little more as possible. The boundaries never meet, so
        one end holds less if there are too few tuples or keys.

        Parameters
        ----------
        words : uint64[n]
            Key words of the tuples that are left, in order.
        per_block
            Tuples that fill a block.
        """
        self.joins[:] = 0
        if len(words) == 0:
            return  # the old boundaries are as good as any
        upper = int(words[max(len(words) - per_block, 0)])
        lower = int(words[min(per_block, len(words)) - 1])
        self.upper = max(upper, 1)
        self.lower = min(lower, self.upper - 1)
