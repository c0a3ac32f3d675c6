"""New pages of one transaction: where they go, how they are written, and how they are given back."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from storage.backend import StorageBackend
    from storage.space import FreeSpace

__all__ = ["PageWriter"]


class PageWriter:
    """Writes the new pages of one transaction to free pages of the file.

    Parameters
    ----------
    backend
        The file.
    space
        Its free pages.
    page_size, txid
        Bytes in a page, and the transaction.
    take
        Which free pages to take, given a hint for each; by default those near the hints.
    """

    def __init__(
        self,
        backend: StorageBackend,
        space: FreeSpace,
        page_size: int,
        txid: int,
        take: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
    ) -> None:
        self._backend = backend
        self._space = space
        self._take = space.take if take is None else take
        self._taken: list[NDArray[np.int64]] = []
        self.page_size = page_size
        self.txid = txid

    def place(self, hints: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take a page for each hint."""
        pages = self._take(hints)
        self._taken.append(pages)
        return pages

    def put(self, pages: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
        """Write sealed pages, those that follow one another on disk and in memory with one call."""
        size = self.page_size
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(numbers)] if len(numbers) else []):
            self._backend.pwrite(int(numbers[start]) * size, pages[start * size : stop * size])

    def give(self, pages: NDArray[np.int64]) -> None:
        """Return pages of this transaction that it no longer needs."""
        self._space.give(pages)

    def roll_back(self) -> None:
        """Return all pages that were taken."""
        for pages in self._taken:
            self._space.give(pages)
        self._taken = []
