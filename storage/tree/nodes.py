"""Inner nodes of the B+-tree, written bottom up and read top down into flat arrays. Knows nothing about rows.

All inner nodes are read and verified when a table is opened. The index is the `Entries` of the lowest level, one for
each leaf, in key order. Those of a large table are read again when they are first used, and stay in memory from then
on; until then only what a `Summary` says of them is known.
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
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend

__all__ = ["Entries", "Index", "InnerLevel", "read_entries", "read_index", "read_tree", "separators_between"]

_WINDOW_BYTES = 1 << 20  # of nodes that are read at once
_KEPT_BYTES = 1 << 20  # of leaf entries that stay in memory although no one has used them

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
    entries, levels = _read_above(backend, page_size, kind, root, height, 0)
    return entries, list(levels)


def read_index(backend: StorageBackend, page_size: int, kind: Kind, root: Entries, height: int) -> Index:
    """Read all inner levels and keep the entries of few leaves, or a summary of those of many.

    See `read_tree` for the parameters.
    """
    if height <= 1:
        return Index(root, ())
    nodes, levels = _read_above(backend, page_size, kind, root, height, 1)
    summary, kept, counts = Summary(), [], []
    for part, children in _read_level(backend, page_size, kind, nodes, 1):
        summary = summary.followed_by(part)
        counts.append(children)
        kept.append(part)
        if summary.nbytes > _KEPT_BYTES:
            kept.clear()
    levels = (*levels, InnerLevel(nodes, _starts(np.concatenate(counts))))
    if kept and summary.nbytes <= _KEPT_BYTES:
        return Index(Entries.concat(kept), levels)
    return Index(
        lambda: Entries.concat([part for part, _ in _read_level(backend, page_size, kind, nodes, 1)]), levels, summary
    )


def _read_above(
    backend: StorageBackend, page_size: int, kind: Kind, root: Entries, height: int, lowest: int
) -> tuple[Entries, tuple[InnerLevel, ...]]:
    """Return the entries of the nodes of the level `lowest`, and the levels above it."""
    entries, levels = root, []
    for level in range(height - 1, lowest, -1):
        parts, counts = zip(*_read_level(backend, page_size, kind, entries, level), strict=True)
        levels.append(InnerLevel(entries, _starts(np.concatenate(counts))))
        entries = parts[0] if len(parts) == 1 else Entries.concat(parts)
    return entries, tuple(levels)


def _read_level(
    backend: StorageBackend, page_size: int, kind: Kind, nodes: Entries, level: int
) -> Iterator[tuple[Entries, NDArray[np.int64]]]:
    """Yield the entries of the nodes of a level, as many nodes at a time as a window has, and their numbers."""
    step = max(1, _WINDOW_BYTES // page_size)
    for start in range(0, len(nodes), step):
        part = nodes.slice(start, min(start + step, len(nodes)))
        frames = read_pages(backend, page_size, part.pages, part.checksums)
        counts = _inner_counts(backend, frames, page_size, part.pages, level)
        below = read_entries(frames, page_size, kind, counts)
        if isinstance(below, int):
            raise CorruptPageError(f"{backend.path}: the entries of inner page {int(part.pages[below])} overrun it")
        yield below, counts


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
class Summary:
    """What is known of leaf entries that are not in memory.

    Attributes
    ----------
    leaves, rows, nbytes
        Number of entries, rows below them, and bytes that they take in memory.
    in_key_order
        Whether the pages ascend.
    lowest, highest
        Least and greatest page number.
    ends
        Leading words of the second separator and of the last; zeros if there is only one leaf.
    """

    leaves: int = 0
    rows: int = 0
    nbytes: int = 0
    in_key_order: bool = True
    lowest: int = 0
    highest: int = 0
    ends: tuple[np.uint64, np.uint64] = (np.uint64(0), np.uint64(0))
    _last: int = -1

    def followed_by(self, entries: Entries) -> Summary:
        """Return the summary of these entries and more that follow them."""
        if not len(entries):
            return self
        pages, prefix = entries.pages, entries.separators.prefix
        lowest, highest = int(pages.min()), int(pages.max())
        second = prefix[max(0, 1 - self.leaves) :][:1]
        several = self.leaves + len(entries) > 1
        return Summary(
            self.leaves + len(entries),
            self.rows + int(entries.rows.sum()),
            self.nbytes + entries.nbytes,
            self.in_key_order and int(pages[0]) > self._last and bool((pages[1:] > pages[:-1]).all()),
            min(self.lowest, lowest) if self.leaves else lowest,
            max(self.highest, highest),
            (self.ends[0] if self.leaves > 1 else second[0], prefix[-1]) if several else self.ends,
            int(pages[-1]),
        )


class Index:
    """Index of a table as the inner nodes have it. Commits that relocate leaves share it.

    Parameters
    ----------
    written
        Entry of each leaf, in key order, or a function that reads them.
    levels
        Inner levels, root first.
    summary
        Summary of the entries. It must be given if these are not in memory.
    """

    __slots__ = ("_summary", "_written", "levels")

    def __init__(
        self, written: Entries | Callable[[], Entries], levels: tuple[InnerLevel, ...], summary: Summary | None = None
    ) -> None:
        self._written = written
        self._summary = summary
        self.levels = levels

    @property
    def written(self) -> Entries:
        """Entry of each leaf, in key order, which is read if it is not in memory yet."""
        if not isinstance(self._written, Entries):
            self._written = self._written()
        return self._written

    @property
    def summary(self) -> Summary:
        """Summary of the entries."""
        if self._summary is None:
            self._summary = Summary().followed_by(self.written)
        return self._summary

    @property
    def in_memory(self) -> bool:
        """Whether the entries are in memory."""
        return isinstance(self._written, Entries)
