"""`PageWriter`: places and writes the new pages of one transaction, and returns them if it is undone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from headrace.storage.format.page import runs_of
from headrace.storage.format.superblock import PROOF_PAGES, Proof

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from headrace.storage.commit.space import FreeSpace
    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.filter.segments import FilterWriter

__all__ = ["PageWriter"]

TOGETHER = 128
"""Number of pages from which on they are placed together."""
_SYNC_BYTES = 4 << 20


class PageWriter:
    """Writes the new pages of one transaction to free pages of the file.

    Parameters
    ----------
    backend
        Storage backend of the table file.
    space
        Its free pages.
    page_size, txid
        Page size in bytes, and the transaction id.
    take
        Chooses free pages, given a hint for each; by default those near the hints.
    filtered
        The table's filter, which is kept up to date.

    Attributes
    ----------
    taken
        Pages that were taken.
    """

    def __init__(
        self,
        backend: StorageBackend,
        space: FreeSpace,
        page_size: int,
        txid: int,
        take: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
        filtered: FilterWriter | None = None,
    ) -> None:
        self._backend = backend
        self._filter = filtered
        self._space = space
        self._take = space.take if take is None else take
        self.taken: list[NDArray[np.int64]] = []
        self._next: int | None = None
        self._checksums: dict[int, int] | None = {}
        self._unsynced = 0
        self._pool: ThreadPoolExecutor | None = None
        self._syncs: list[Future[None]] = []
        self.page_size = page_size
        self.txid = txid

    def expect(self, count: int) -> None:
        """Find a stretch of the file for `count` pages to be placed together, if they are enough."""
        self._next = self._space.find_stretch(count) if count >= TOGETHER else None

    def place(self, hints: NDArray[np.int64], *, together: bool = False) -> NDArray[np.int64]:
        """Take a page near each hint; pages that belong `together` follow one another if there is room."""
        if together and self._next is not None:
            pages = self._space.take_onward(self._next, len(hints))
            self._next = int(pages[-1]) + 1 if len(pages) else self._next
        else:
            pages = self._take(hints)
        self.taken.append(pages)
        return pages

    @property
    def end(self) -> int:
        """One past the last page that was taken."""
        return max((max(pages.tolist(), default=-1) for pages in self.taken), default=-1) + 1

    def put(self, pages: NDArray[np.uint8], numbers: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        """Write sealed pages, those that follow one another on disk and in memory with one call."""
        size = self.page_size
        self._note(numbers, checksums)
        for start, stop in runs_of(numbers):
            self._backend.pwrite(int(numbers[start]) * size, pages[start * size : stop * size])
        if self._filter is not None:
            self._filter.put(pages, numbers)
        self._unsynced += len(numbers) * size
        if self._unsynced >= _SYNC_BYTES and (not self._syncs or self._syncs[-1].done()):
            self._begin_sync()

    def _begin_sync(self) -> None:
        """Start to sync what was written while more pages are made. The commit relies only on its last sync."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-sync")
        self._unsynced = 0
        self._syncs.append(self._pool.submit(self._backend.sync))

    def settle(self) -> None:
        """Wait until no sync is running.

        Raises
        ------
        StorageIOError
            If the disk failed to write something. It reports a failure only once.
        """
        self._stop()
        for sync in self._syncs:
            sync.result()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def give(self, pages: NDArray[np.int64]) -> None:
        """Free pages of this transaction that it no longer needs."""
        self._space.give(pages)
        if self._checksums is not None:
            for page in pages.tolist():
                self._checksums.pop(page, None)

    @property
    def proof(self) -> Proof | None:
        """Proof that the pages of this transaction are on disk, or None if they are too many."""
        return None if self._checksums is None else Proof.of(self._checksums)

    def _note(self, numbers: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        """Record the checksums of pages as long as they are few."""
        if self._checksums is None or len(self._checksums) + len(numbers) > PROOF_PAGES:
            self._checksums = None
            return
        self._checksums.update(zip(numbers.tolist(), checksums.tolist(), strict=True))

    def roll_back(self) -> None:
        """Free all pages that were taken."""
        self._stop()
        for pages in self.taken:
            self._space.give(pages)
        self.taken = []
