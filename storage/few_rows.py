"""Changes of few rows: only the leaves that they touch are looked at, and patched.

What such a change costs does not grow with the table. It changes nothing but leaves that can be patched
(`storage.patch`); all else is for `storage.draft`. `storage.commit` makes the result of either durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from storage import _few_kernels as kernels
from storage._byte_kernels import SLACK
from storage.keys import Keys
from storage.merge import Counts, unique_violation
from storage.moved import LISTED, moved_words
from storage.superblock import MOVED_AT_ONCE, Proof, digest
from storage.tree import damaged_page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storage.backend import StorageBackend
    from storage.new_rows import NewRows
    from storage.snapshot import Snapshot

__all__ = ["MOST_ROWS", "FewRows"]

MOST_ROWS = 64
"""Rows that are few."""


class FewRows:
    """Makes one change of few rows after the other, all in the same memory.

    Parameters
    ----------
    backend
        The file.
    page_size
        Bytes in a page.

    Attributes
    ----------
    pages : uint8[n]
        Of the last change: its leaves side by side, whole once they are sealed.
    grown
        Rows that the table has more after the last change.
    """

    def __init__(self, backend: StorageBackend, page_size: int) -> None:
        self._backend = backend
        self._page_size = page_size
        self._count = self.grown = 0
        self._found = np.empty((kernels.FOUND, MOVED_AT_ONCE), dtype=np.int64)
        self._frames = np.empty(MOVED_AT_ONCE * page_size + SLACK, dtype=np.uint8)
        self._rows, self._counts = np.empty(MOVED_AT_ONCE, dtype=np.int64), np.empty(kernels.GROWN + 1, dtype=np.int64)
        self._checksums = np.empty(MOVED_AT_ONCE, dtype=np.uint64)
        self._moved, self._listed = np.empty(LISTED, dtype=np.uint64), np.empty(LISTED, dtype=np.uint64)
        self.pages = np.empty(MOVED_AT_ONCE * page_size + SLACK, dtype=np.uint8)
        self._before, self._after = _parts(self._frames), _parts(self.pages)

    def change(self, snapshot: Snapshot, rows: NewRows) -> Counts | None:
        """Make changes and return what they do; None if they touch many leaves, or one that cannot be patched.

        Parameters
        ----------
        snapshot
            Of a table that `storage.patch` is for.
        rows
            The changes.

        Raises
        ------
        UniqueViolationError
            If an insert's key is in a unique table already.
        CorruptionError
            If a leaf is damaged.
        """
        written, head = snapshot.index.written, snapshot.superblock
        if not head.leaves:
            return None
        self._moved = moved_words(head.moved)
        self._count = kernels.find_leaves(
            written.separators.prefix, written.continued, written.pages, written.checksums, written.rows,
            self._moved, rows.touched, rows.keys, rows.fresh, self._found,
        )  # fmt: skip
        if not self._count:
            return None
        for page, leaf in zip(self.freed.tolist(), self._before, strict=False):
            self._backend.pread_into(page * self._page_size, leaf)
        bad, clash, done = kernels.patch_few(
            self._frames, self._page_size, self._found, self._count, *rows,
            head.unique, head.rows // head.leaves, self.pages, self._rows, self._counts,
        )  # fmt: skip
        if bad >= 0:
            raise damaged_page(self._backend, int(self.freed[bad]))
        if clash >= 0:
            raise unique_violation(snapshot.layout, Keys("u64", rows.keys), clash)
        *counts, self.grown = self._counts.tolist()
        return Counts(*counts) if done else None

    def seal(self, numbers: NDArray[np.int64], txid: int) -> bytes:
        """Seal the leaves, to be written to these pages; return the list of moved leaves with them."""
        count = kernels.seal_few(
            self.pages, self._page_size, self._found, numbers, txid, self._rows, self._moved,
            self._checksums, self._listed,
        )  # fmt: skip
        return self._listed[:count].tobytes()

    def write(self, numbers: NDArray[np.int64], txid: int) -> tuple[bytes, Proof]:
        """Seal the leaves and write them to these pages; return the list with them and the proof of it."""
        listed, pages = self.seal(numbers, txid), numbers.tolist()
        for page, leaf in zip(pages, self._after, strict=False):
            self._backend.pwrite(page * self._page_size, leaf[0])
        return listed, Proof(tuple(pages), digest(self.checksums.tobytes()))

    @property
    def leaves(self) -> NDArray[np.int64]:
        """Their numbers, ascending."""
        return self._found[0, : self._count]

    @property
    def freed(self) -> NDArray[np.int64]:
        """The pages that they leave."""
        return self._found[1, : self._count]

    @property
    def hints(self) -> NDArray[np.int64]:
        """Where each should go."""
        return self._found[4, : self._count]

    @property
    def checksums(self) -> NDArray[np.uint64]:
        """Of the leaves once they are sealed."""
        return self._checksums[: self._count]


def _parts(pages: NDArray[np.uint8]) -> list[list[NDArray[np.uint8]]]:
    """Return each page of the room for leaves, as the one buffer to read it into."""
    return [[page] for page in np.split(pages[:-SLACK], MOVED_AT_ONCE)]
