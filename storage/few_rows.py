"""Changes of few rows: only the leaves that they touch are looked at, and patched.

What such a change costs does not grow with the table. It changes nothing but leaves that can be patched
(`storage.patch`); all else is for `storage.draft`. `storage.commit` makes the result of either durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.storage import _few_commit_kernels as kernels
from headrace.storage._byte_kernels import SLACK
from headrace.storage._few_kernels import FOUND, seal_few
from headrace.storage.backend import PREAD
from headrace.storage.keys import Keys
from headrace.storage.merge import Counts, unique_violation
from headrace.storage.superblock import MOVED_AT_ONCE, SLOT_BYTES
from headrace.storage.tree import damaged_page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.backend import StorageBackend
    from headrace.storage.layout import LeafLayout
    from headrace.storage.moving import MovingHead
    from headrace.storage.new_rows import NewRows
    from headrace.storage.space import FreeSpace
    from headrace.storage.tree import Entries

__all__ = ["FewRows"]


class FewRows:
    """Makes one change of few rows after the other, all in the same memory.

    Parameters
    ----------
    backend
        The file.
    layout
        Of a table that `headrace.storage.patch` is for.

    Attributes
    ----------
    pages : uint8[n]
        Of the last change: its leaves side by side, whole once they are sealed.
    count
        How many leaves these are.
    grown
        Rows that the table has more after the last change.
    """

    def __init__(self, backend: StorageBackend, layout: LeafLayout) -> None:
        self._backend = backend
        self._layout = layout
        self._page_size = size = layout.page_size
        self.count = self.grown = 0
        self._found = found = np.empty((FOUND, MOVED_AT_ONCE), dtype=np.int64)
        self._freed, self._hints = _firsts(found[1]), _firsts(found[4])
        self._numbers = _firsts(np.empty(MOVED_AT_ONCE, dtype=np.int64))
        self._left = memoryview(found[1])
        self._rows = np.empty(MOVED_AT_ONCE, dtype=np.int64)
        self._checksums = np.empty(MOVED_AT_ONCE, dtype=np.uint64)
        self._frames = np.empty(MOVED_AT_ONCE * size + SLACK, dtype=np.uint8)
        self.pages = np.empty(MOVED_AT_ONCE * size + SLACK, dtype=np.uint8)
        self._slot = np.empty(SLOT_BYTES, dtype=np.uint8)

    def change(self, head: MovingHead, written: Entries, rows: NewRows) -> Counts | None:
        """Make changes and return what they do; None if they touch many leaves, or one that cannot be patched.

        Parameters
        ----------
        head
            Of the newest commit.
        written
            The leaves as the inner nodes have them.
        rows
            The changes.

        Raises
        ------
        UniqueViolationError
            If an insert's key is in a unique table already.
        CorruptionError
            If a leaf is damaged.
        """
        if not head.leaves:
            return None
        came, self.count, at, error, inserted, updated, deleted, self.grown = kernels.change_few(
            self._backend.calls, self._page_size,
            written.separators.prefix, written.continued, written.pages, written.checksums, written.rows,
            head.moved, head.count, *rows, head.unique, head.rows // head.leaves,
            self._found, self._frames, self.pages, self._rows,
        )  # fmt: skip
        if came == kernels.MADE:
            return Counts(inserted, updated, deleted)
        if came == kernels.UNREAD:
            raise self._backend.error_of(PREAD, error, self._left[at] * self._page_size)
        if came == kernels.DAMAGED:
            raise damaged_page(self._backend, self._left[at])
        if came == kernels.CLASH:
            raise unique_violation(self._layout, Keys("u64", rows.keys), at)
        return None

    def seal(self, numbers: NDArray[np.int64], head: MovingHead) -> None:
        """Seal the leaves, to be written to these pages by the next commit, and list them as moved."""
        head.count = seal_few(
            self.pages, self._page_size, self._found, numbers, head.txid + 1, self._rows, head.moved, head.count,
            self._checksums,
        )  # fmt: skip

    def publish(self, space: FreeSpace, head: MovingHead) -> None:
        """Write the leaves to free pages and make them durable with the superblock that `head` becomes by it.

        Raises
        ------
        StorageIOError
            If a write or the sync fails.
        """
        numbers = self.numbers
        space.take_into(self.hints, numbers)
        txid, rows = head.txid + 1, head.rows + self.grown
        count, end, call, error, offset = kernels.publish_few(
            self._backend.calls, self.pages, self._page_size, self._found, numbers, self._rows, self._checksums,
            self._slot, head.copy, head.tail, head.moved, head.count, txid, rows, head.pages,
        )  # fmt: skip
        if error:
            raise self._backend.error_of(call, error, offset)
        head.txid, head.rows, head.pages, head.count = txid, rows, end, count

    @property
    def freed(self) -> NDArray[np.int64]:
        """The pages that they left."""
        return self._freed[self.count].copy()

    @property
    def hints(self) -> NDArray[np.int64]:
        """Where each should go."""
        return self._hints[self.count]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The pages that they were written to."""
        return self._numbers[self.count]

    @property
    def checksums(self) -> NDArray[np.uint64]:
        """Of the leaves once they are sealed."""
        return self._checksums[: self.count]


def _firsts(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the first so many of some numbers, for each count."""
    return [numbers[:count] for count in range(len(numbers) + 1)]
