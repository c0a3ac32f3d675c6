"""Ranges of the relation's pages, which a continuous join phase reads one at a time.

Tuples that wait are divided by the range in which their leaf lies. So a step of the phase touches only those that it
joins, and these leave all at once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PageRanges"]

_RANGES = 8


class PageRanges:
    """Ranges of pages on disk with equal numbers of leaves.

    Parameters
    ----------
    pages : int64[leaves of the table]
        Page of each leaf.
    disk_order : int32[leaves of the table]
        Leaves in the order of their pages; empty if that is the key order.

    Attributes
    ----------
    count
        Number of ranges.
    most
        Most leaves in a range.
    """

    count = _RANGES

    def __init__(self, pages: NDArray[np.int64], disk_order: NDArray[np.int32]) -> None:
        self._bounds = np.arange(self.count + 1) * len(pages) // self.count
        self.most = int(np.diff(self._bounds).max())
        self._disk_order = disk_order
        starts = self._bounds[1:-1]
        self._pages = pages if len(disk_order) else None
        self._starts = pages[disk_order[starts]] if len(disk_order) else starts.astype(np.int32)

    def of(self, leaves: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the range of each leaf."""
        place = leaves if self._pages is None else self._pages[leaves]
        return np.searchsorted(self._starts, place, side="right")

    def wanted(self, number: int, demand: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the leaves of a range that have a demand, in disk order.

        Parameters
        ----------
        number
            Number of the range.
        demand : int32[leaves of the table]
            How many tuples wait for each leaf.
        """
        start, stop = self._bounds[number : number + 2].tolist()
        if self._pages is None:
            return np.flatnonzero(demand[start:stop]).astype(np.int32) + np.int32(start)
        leaves = self._disk_order[start:stop]
        return leaves[demand[leaves] > 0]

    def divide(self, leaves: NDArray[np.int32]) -> list[NDArray[np.intp]]:
        """Return, for each range, the places of its leaves among ascending leaves, in the order that they have."""
        if self._pages is None:
            bounds = [0, *np.searchsorted(leaves, self._starts), len(leaves)]
            return [np.arange(start, stop) for start, stop in pairwise(bounds)]
        ranges = self.of(leaves)
        order = np.argsort(ranges, kind="stable")
        return np.split(order, np.searchsorted(ranges[order], np.arange(1, self.count)))
