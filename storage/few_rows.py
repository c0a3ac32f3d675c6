"""Changes of few rows: only the leaves that they touch are looked at, and patched.

What such a change costs does not grow with the table. It changes nothing but leaves that can be patched
(`storage.patch`); all else is for `storage.draft`. `storage.commit` makes the result of either durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from storage import _few_kernels as kernels
from storage._byte_kernels import SLACK
from storage.keys import Keys
from storage.merge import Counts, unique_violation
from storage.superblock import MOVED_AT_ONCE, digest
from storage.tree import damaged_page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storage.backend import StorageBackend
    from storage.layout import LeafLayout
    from storage.moving import MovingHead
    from storage.new_rows import NewRows
    from storage.space import FreeSpace
    from storage.tree import Entries

__all__ = ["FewRows"]


class FewRows:
    """Makes one change of few rows after the other, all in the same memory.

    Parameters
    ----------
    backend
        The file.
    layout
        Of a table that `storage.patch` is for.

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
        self._found = found = np.empty((kernels.FOUND, MOVED_AT_ONCE), dtype=np.int64)
        self._leaves, self._freed, self._hints = (_firsts(found[row]) for row in (0, 1, 4))
        self._numbers = _firsts(np.empty(MOVED_AT_ONCE, dtype=np.int64))
        self._left, self._taken = _view(found[1]), _view(self._numbers[-1])
        self._rows = np.empty(MOVED_AT_ONCE, dtype=np.int64)
        self._checksums = np.empty(MOVED_AT_ONCE, dtype=np.uint64)
        self._frames = np.empty(MOVED_AT_ONCE * size + SLACK, dtype=np.uint8)
        self.pages = np.empty(MOVED_AT_ONCE * size + SLACK, dtype=np.uint8)
        self._before = [[page] for page in _parts(self._frames)]
        self._after = _parts(self.pages)
        self._proven = _view(self._checksums).cast("B")

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
        self.count = kernels.find_leaves(
            written.separators.prefix, written.continued, written.pages, written.checksums, written.rows,
            head.moved, head.count, rows.touched, rows.keys, rows.fresh, self._found,
        )  # fmt: skip
        if not self.count:
            return None
        for page, leaf in zip(self._left[: self.count], self._before, strict=False):
            self._backend.pread_into(page * self._page_size, leaf)
        bad, clash, done, inserted, updated, deleted, self.grown = kernels.patch_few(
            self._frames, self._page_size, self._found, self.count, *rows,
            head.unique, head.rows // head.leaves, self.pages, self._rows,
        )  # fmt: skip
        if bad >= 0:
            raise damaged_page(self._backend, self._left[bad])
        if clash >= 0:
            raise unique_violation(self._layout, Keys("u64", rows.keys), clash)
        return Counts(inserted, updated, deleted) if done else None

    def seal(self, numbers: NDArray[np.int64], head: MovingHead) -> None:
        """Seal the leaves, to be written to these pages by the next commit, and list them as moved."""
        head.count = kernels.seal_few(
            self.pages, self._page_size, self._found, numbers, head.txid + 1, self._rows, head.moved, head.count,
            self._checksums,
        )  # fmt: skip

    def write(self, space: FreeSpace, head: MovingHead) -> bytes:
        """Write the leaves to free pages, and return a copy of the superblock that `head` becomes with them moved."""
        count = self.count
        numbers = self._numbers[count]
        space.take_into(self._hints[count], numbers)
        head.txid += 1
        head.rows += self.grown
        head.count, head.pages, place = kernels.settle_few(
            self.pages, self._page_size, self._found, numbers, self._rows, self._checksums,
            head.copy, head.tail, head.moved, head.count, head.txid, head.rows, head.pages,
        )  # fmt: skip
        for page, leaf in zip(self._taken[:count], self._after, strict=False):
            self._backend.pwrite(page * self._page_size, leaf)
        return head.sealed(place, digest(self._proven[: 8 * count]))

    @property
    def leaves(self) -> NDArray[np.int64]:
        """Their numbers, ascending."""
        return self._leaves[self.count]

    @property
    def freed(self) -> NDArray[np.int64]:
        """The pages that they leave."""
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


def _parts(pages: NDArray[np.uint8]) -> list[memoryview]:
    """Return each page of the room for leaves."""
    return [_view(page) for page in np.split(pages[:-SLACK], MOVED_AT_ONCE)]


def _firsts(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the first so many of some numbers, for each count."""
    return [numbers[:count] for count in range(len(numbers) + 1)]


def _view(numbers: NDArray[Any]) -> memoryview:
    return memoryview(numbers)  # type: ignore[arg-type] # numpy declares its buffer from Python 3.12 on
