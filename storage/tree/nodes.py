"""Inner nodes of the B+-tree, written bottom up and read top down into flat arrays. Knows nothing about rows.

All inner nodes are read when a table is opened; the index is then the `Entries` of the lowest level, one for each leaf,
in key order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptPageError
from headrace.storage.format import _key_kernels
from headrace.storage.format.constants import INNER_PAGE
from headrace.storage.format.keys import Keys, Kind
from headrace.storage.format.page import aligned_pages, read_heads, read_pages
from headrace.storage.tree import _tree_kernels as kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend

__all__ = ["Entries", "Index", "InnerLevel", "read_entries", "read_tree", "separators_between"]


_NO_CHECKSUMS = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of inner nodes: pointers to their children, in key order.

    Attributes
    ----------
    pages : int64[n]
        Page numbers.
    checksums : uint64[n]
    rows : int64[n]
        Rows below each child.
    continued : uint8[n]
        1 if the first key of a child may also be the last key of the child before it.
    separators
        No key of a child is below its separator, and no key of the children before is above it. The first is
        minus infinity: 0, or no bytes.
    """

    pages: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    rows: NDArray[np.int64]
    continued: NDArray[np.uint8]
    separators: Keys

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        fixed = self.pages.nbytes + self.checksums.nbytes + self.rows.nbytes + self.continued.nbytes
        return fixed + self.separators.nbytes

    def replaced(self, at: NDArray[np.int64], new: Entries) -> Entries:
        """Return the entries with new ones, which have the same separators, at the positions `at`."""
        pages, checksums, rows = self.pages.copy(), self.checksums.copy(), self.rows
        pages[at], checksums[at] = new.pages, new.checksums
        if (rows[at] != new.rows).any():
            rows = rows.copy()
            rows[at] = new.rows
        return Entries(pages, checksums, rows, self.continued, self.separators)

    def slice(self, start: int, stop: int) -> Entries:
        """Return the entries from `start` up to `stop`."""
        part = slice(start, stop)
        return Entries(
            self.pages[part],
            self.checksums[part],
            self.rows[part],
            self.continued[part],
            self.separators.slice(start, stop),
        )

    @classmethod
    def empty(cls, kind: Kind) -> Entries:
        """Return the entries of an empty table."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, _NO_CHECKSUMS, none, np.zeros(0, dtype=np.uint8), Keys.empty(kind))

    @classmethod
    def concat(cls, parts: Sequence[Entries]) -> Entries:
        """Return the entries of all parts, in order. There must be at least one part."""
        return cls(
            np.concatenate([part.pages for part in parts]),
            np.concatenate([part.checksums for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.continued for part in parts]),
            Keys.concat([part.separators for part in parts]),
        )

    def node_pages(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64], page_size: int, level: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return nodes with the entries from `starts[i]` up to `stops[i]`, not sealed, and the rows below each."""
        pages, rows = aligned_pages(len(starts), page_size), np.empty(len(starts), dtype=np.int64)
        children = kernels.Children(self.pages, self.checksums, self.rows, self.continued)
        keys = self.separators
        kernels.write_nodes(keys.parts, keys.wide, children, starts, stops, page_size, level, pages, rows)
        return pages, rows

    def locate(self, keys: Keys) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the first and the last child that may hold each key; there must be at least one child."""
        first, last = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=np.int32)
        kernels.locate(self.separators.parts, self.continued, keys.parts, keys.wide, first, last)
        return first, last

    def take(self, index: NDArray[np.int64]) -> Entries:
        """Return the entries at these positions."""
        return Entries(
            self.pages[index],
            self.checksums[index],
            self.rows[index],
            self.continued[index],
            self.separators.take(index),
        )


@dataclass(frozen=True, slots=True)
class InnerLevel:
    """The nodes of one inner level.

    Attributes
    ----------
    nodes
        Entries of the nodes one level up.
    first : int64[m + 1]
        Position of each node's first child in the level below.
    """

    nodes: Entries
    first: NDArray[np.int64]

    @property
    def pages(self) -> NDArray[np.int64]:
        """int64[m], page numbers."""
        return self.nodes.pages

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.nodes.nbytes + self.first.nbytes


def separators_between(last: Keys, first: Keys) -> tuple[Keys, NDArray[np.uint8]]:
    """Return separators for neighboring leaves, and whether a key spans both.

    Parameters
    ----------
    last, first
        For each boundary the last key on its left and the first key on its right.
    """
    both = Keys.concat([last, first])
    count = len(first)
    left = np.arange(count, dtype=np.int64)
    right = left + count
    pairs = both.take(np.ravel(np.column_stack([left, right])))
    continued = pairs.same_as_next()[::2].astype(np.uint8) if count else np.zeros(0, dtype=np.uint8)
    if both.offsets is None or both.data is None:
        return first, continued
    lengths = _key_kernels.shortest_separators(both.offsets, both.data, left, right)
    starts = both.offsets[count:-1]
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    data = _key_kernels.read_bytes(both.data, starts.copy(), offsets, False)  # noqa: FBT003 - a kernel
    return Keys.from_bytes(offsets, data), continued


def read_tree(
    backend: StorageBackend, page_size: int, kind: Kind, root: Entries, height: int
) -> tuple[Entries, list[InnerLevel]]:
    """Read all inner levels.

    Parameters
    ----------
    root
        One entry, for the root; none for an empty table.
    height
        Levels of the tree, leaves included.

    Returns
    -------
    entries
        Leaf entries.
    levels
        Inner levels, root first.
    """
    entries, levels = root, []
    for level in range(height - 1, 0, -1):
        frames = read_pages(backend, page_size, entries.pages, entries.checksums)
        counts = _inner_counts(backend, frames, page_size, entries.pages, level)
        below = read_entries(frames, page_size, kind, counts)
        if isinstance(below, int):
            raise CorruptPageError(f"{backend.path}: the entries of inner page {int(entries.pages[below])} overrun it")
        levels.append(InnerLevel(entries, _starts(counts)))
        entries = below
    return entries, levels


def read_entries(frames: NDArray[np.uint8], page_size: int, kind: Kind, counts: NDArray[np.int64]) -> Entries | int:
    """Return the entries of inner pages, one page after the other, or the first page whose entries overrun it."""
    first = _starts(counts)
    count = int(first[-1])
    pages, checksums = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.uint64)
    rows, flags = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.uint8)
    prefix, offsets = np.zeros(count, dtype=np.uint64), np.zeros(count + 1, dtype=np.int64)
    wide = kind == "bytes"
    bad = kernels.read_inner(frames, page_size, wide, first, pages, checksums, rows, flags, prefix, offsets)
    if bad >= 0:
        return int(bad)
    if wide:
        separators = Keys.from_bytes(offsets, kernels.read_separators(frames, page_size, first, offsets))
    else:
        separators = Keys("u64", prefix)
    return Entries(pages, checksums, rows, flags, separators)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def _inner_counts(
    backend: StorageBackend, frames: NDArray[np.uint8], page_size: int, numbers: NDArray[np.int64], level: int
) -> NDArray[np.int64]:
    kinds, levels, counts = read_heads(frames, page_size, len(numbers))
    wrong = (kinds != INNER_PAGE) | (levels != level) | (counts < 1) | (counts > page_size)
    if wrong.any():
        page = int(numbers[int(np.argmax(wrong))])
        raise CorruptPageError(f"{backend.path}: page {page} should be an inner node of level {level}, but is not")
    return counts


@dataclass(frozen=True, slots=True)
class Index:
    """Index of a table as the inner nodes have it. Commits that relocate leaves share it.

    Attributes
    ----------
    written
        Entry of each leaf, in key order.
    levels
        Inner levels, root first.
    """

    written: Entries
    levels: tuple[InnerLevel, ...]
