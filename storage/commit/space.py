"""`FreeSpace`: the free pages of a table file, and the choice of pages for new ones. In memory only; does no I/O.

Pages that the newest commit does not reach are free, so the map is built when a table is opened for writing. A page
that a commit frees is held back while a reader may need the state before that commit.

A new page is placed near the position that the scan order asks for: in the nearest free page, else in an extent of
`EXTENT` pages that all such overflow shares, else at the end of the file. Pages that one commit places far away so stay
together in key order, and reading in key order still finds long runs.

Pages that replace most leaves of a long stretch of the table are placed, in key order, in the shortest stretch of the
file with enough free pages instead, so that few large operations write and read them. If less than half of that stretch
is free, the file grows, but to no more than `MOST_GROWTH` times the pages in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.commit import _commit_kernels as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["EXTENT", "MOST_GROWTH", "REACH", "FreeSpace"]

EXTENT = 64
REACH = 2 * EXTENT
MOST_GROWTH = 2.5
_SPARSE = 2


class FreeSpace:
    """Free pages of one file.

    Parameters
    ----------
    pages
        Length of the file in pages.
    used
        Page numbers in use; all others are free.

    Attributes
    ----------
    held
        Number of pages that are held back for readers.
    """

    def __init__(self, pages: int, used: NDArray[np.int64]) -> None:
        self._free = np.ones(pages, dtype=np.uint8)
        self._free[used] = 0
        self._held: list[tuple[int, NDArray[np.int64]]] = []
        self.held = 0
        self._overflow = range(0)

    @property
    def pages(self) -> int:
        """Length of the file in pages."""
        return len(self._free)

    @property
    def end(self) -> int:
        """One past the last page that is not free."""
        taken = np.flatnonzero(self._free[::-1] == 0)
        return len(self._free) - int(taken[0]) if len(taken) else 0

    @property
    def free(self) -> NDArray[np.int64]:
        """Page numbers that can be taken now, ascending."""
        return np.flatnonzero(self._free)

    def take(self, hints: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take a page near each hint.

        Parameters
        ----------
        hints
            Page number near which each page should be placed, in the order in which the pages should be.

        Returns
        -------
        int64[n]
            Page numbers, each once.
        """
        pages = np.empty(len(hints), dtype=np.int64)
        if kernels.take_near(self._free, np.ascontiguousarray(hints, dtype=np.int64), REACH, pages):
            far = np.flatnonzero(pages < 0)
            pages[far] = self._take_far(len(far))
        return pages

    def find_stretch(self, count: int) -> int:
        """Return the page from which `take_onward` should take `count` pages."""
        start, length = kernels.shortest_stretch(self._free, count)
        sparse = length < count or length > _SPARSE * count
        used = len(self._free) - int(np.count_nonzero(self._free)) - self.held
        return len(self._free) if sparse and len(self._free) + count <= MOST_GROWTH * used else start

    def take_onward(self, start: int, count: int) -> NDArray[np.int64]:
        """Take the first free pages from `start` on, ascending; the file grows if they are too few."""
        pages = np.empty(count, dtype=np.int64)
        found = kernels.take_onward(self._free, start, pages)
        if found < count:
            pages[found:] = self.grow(count - found)
        return pages

    def grow(self, count: int) -> NDArray[np.int64]:
        """Take pages after the end of the file."""
        first = len(self._free)
        self._free = np.concatenate([self._free, np.zeros(count, dtype=np.uint8)])
        return np.arange(first, first + count, dtype=np.int64)

    def cut(self) -> int:
        """Forget the free pages at the end of the file, and return its new length in pages."""
        end = self.end
        self._free = self._free[:end].copy()
        self._overflow = range(0)
        return end

    def give(self, pages: NDArray[np.int64]) -> None:
        """Free pages that no reader can need."""
        self._free[pages] = 1

    def hold(self, txid: int, pages: NDArray[np.int64]) -> None:
        """Hold back pages that transaction `txid` freed; readers of earlier transactions may need them."""
        if len(pages):
            self._held.append((txid, pages))
            self.held += len(pages)

    def hold_free(self, txid: int) -> None:
        """Hold back all free pages; readers from before this map was built may need them."""
        pages = self.free
        self._free[pages] = 0
        self._overflow = range(0)
        self.hold(txid, pages)

    def reclaim(self, oldest: int) -> None:
        """Free held pages, given the earliest transaction that is still read."""
        if not self._held or self._held[0][0] > oldest:
            return
        due = np.concatenate([pages for txid, pages in self._held if txid <= oldest])
        self._free[due] = 1
        self.held -= len(due)
        self._held = [(txid, pages) for txid, pages in self._held if txid > oldest]

    def _take_far(self, count: int) -> NDArray[np.int64]:
        parts = [self._take_overflow(count)]
        missing = count - len(parts[0])
        while missing and self._next_extent():
            parts.append(self._take_overflow(missing))
            missing -= len(parts[-1])
        if missing:
            parts.append(self.grow(missing))
        return np.concatenate(parts)

    def _take_overflow(self, count: int) -> NDArray[np.int64]:
        start, stop = self._overflow.start, self._overflow.stop
        pages = start + np.flatnonzero(self._free[start:stop])[:count]
        self._free[pages] = 0
        if len(pages):
            self._overflow = range(int(pages[-1]) + 1, stop)
        return pages

    def _next_extent(self) -> bool:
        """Make the first extent that is free as a whole the one for overflow; say whether there is one."""
        extents = len(self._free) // EXTENT
        whole = np.flatnonzero(self._free[: extents * EXTENT].reshape(extents, EXTENT).all(axis=1))
        if not len(whole):
            return False
        self._overflow = range(int(whole[0]) * EXTENT, (int(whole[0]) + 1) * EXTENT)
        return True
