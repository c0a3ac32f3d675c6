"""The inner levels of a tree whose leaves have changed: only nodes on the paths to changes are written anew.

Works level by level from the leaves up, each time over all children at once: children that are as they were keep
their node, the others are gathered and cut into new nodes. Where pages go and how they are written is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from storage import _tree_kernels as kernels
from storage.layout import HEADER
from storage.tree import Entries, InnerLevel, aligned_pages, seal_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["NewTree", "PageSink", "Placed", "rewrite_inner"]

_CHILD = 25
_U64 = 8
_END = 2
_UNDERFULL = 4


class PageSink(Protocol):
    """Where new pages go."""

    @property
    def page_size(self) -> int:
        """Bytes in a page."""
        ...

    @property
    def txid(self) -> int:
        """Transaction that writes them."""
        ...

    def place(self, hints: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take a page near each hint."""
        ...

    def put(self, pages: NDArray[np.uint8], numbers: NDArray[np.int64]) -> None:
        """Write sealed pages; page `i` is page `numbers[i]` of the file."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """Entries of a changed level, and where they stand in the level as it was.

    Attributes
    ----------
    entries
        In key order.
    position : int64[n]
        For an entry that was there before its position then; for a new one that of the first entry it replaces.
    kept : bool[n]
        Whether the entry was there before.
    """

    entries: Entries
    position: NDArray[np.int64]
    kept: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True, slots=True)
class NewTree:
    """The inner part of a tree.

    Attributes
    ----------
    root
        One entry, or none for an empty table.
    levels
        Inner levels, root first.
    freed : int64 array
        Pages of inner nodes that the tree no longer has.
    """

    root: Entries
    levels: tuple[InnerLevel, ...]
    freed: NDArray[np.int64]

    @property
    def height(self) -> int:
        """Levels, leaves included."""
        return len(self.levels) + len(self.root)


def rewrite_inner(leaves: Placed, levels: Sequence[InnerLevel], fill: float, sink: PageSink) -> NewTree:
    """Write the inner nodes that changed leaves need.

    Parameters
    ----------
    leaves
        Entries of the leaves as they are to be.
    levels
        Inner levels as they were, root first.
    fill
        Share of a page to fill where nodes are split.
    sink
        Where new nodes go.
    """
    children = leaves
    new_levels: list[InnerLevel] = []
    freed: list[NDArray[np.int64]] = []
    for old in reversed(levels):
        if len(children) <= 1:
            freed.append(old.pages)
            continue
        if _is_one_to_one(children, old):
            children, level = _replace_nodes(children, old, len(new_levels) + 1, sink)
        else:
            children, level = _Level(children, old, len(new_levels) + 1, fill, sink).rewrite()
        new_levels.append(level)
        freed.append(old.pages[~np.isin(old.pages, level.pages, kind="sort")])
    while len(children) > 1:
        children, level = _grow(children.entries, len(new_levels) + 1, fill, sink)
        new_levels.append(level)
    gone = np.concatenate([np.zeros(0, dtype=np.int64), *freed])
    return NewTree(children.entries, tuple(reversed(new_levels)), gone)


def _is_one_to_one(children: Placed, old: InnerLevel) -> bool:
    """Return whether each child stands where one child stood before, so that no node changes its size."""
    count = len(children)
    return count == int(old.first[-1]) and bool((children.position == np.arange(count)).all())


def _replace_nodes(children: Placed, old: InnerLevel, level: int, sink: PageSink) -> tuple[Placed, InnerLevel]:
    """Write anew the nodes whose children changed, child for child."""
    node = np.searchsorted(old.first, np.flatnonzero(~children.kept), side="right") - 1
    nodes = node[np.diff(node, prepend=-1) != 0]
    starts = old.first[:-1]
    count = old.first[nodes + 1] - starts[nodes]
    ends = np.cumsum(count)
    within = np.arange(int(count.sum())) + np.repeat(starts[nodes] - ends + count, count)
    new = _write_nodes(children.entries.take(within), ends, level, old.pages[nodes], sink)
    pages, checksums = old.pages.copy(), old.checksums.copy()
    pages[nodes], checksums[nodes] = new.pages, new.checksums
    kept = np.ones(len(pages), dtype=np.bool_)
    kept[nodes] = False
    below = children.entries
    entries = Entries(
        pages,
        checksums,
        np.add.reduceat(below.rows, starts),
        below.continued[starts],
        below.separators.take(starts),
    )
    return Placed(entries, np.arange(len(pages)), kept), InnerLevel(pages, checksums, old.first)


class _Level:
    """One level: the nodes as they were, and the children that they are to have."""

    def __init__(self, children: Placed, old: InnerLevel, level: int, fill: float, sink: PageSink) -> None:
        self._children = children.entries
        self._old = old
        self._level = level
        self._fill = fill
        self._sink = sink
        self._node = np.searchsorted(old.first, children.position, side="right") - 1
        count = np.bincount(self._node, minlength=len(old.pages))
        same = np.bincount(self._node, weights=children.kept, minlength=len(old.pages)) == count
        self._nodes = np.flatnonzero(count)
        self._changed = ~(same & (count == np.diff(old.first)))[self._nodes]
        self._count = count[self._nodes]
        self._starts = np.cumsum(self._count) - self._count
        self._size = _entry_sizes(self._children)
        self._bytes = np.add.reduceat(self._size, self._starts)

    def rewrite(self) -> tuple[Placed, InnerLevel]:
        """Return the entries of the level's nodes, and the level."""
        group = self._groups()
        changed = np.bincount(group, weights=self._changed) > 0
        group_of = np.repeat(group, self._count)
        dirty = np.flatnonzero(changed[group_of])
        ends = self._cut(group, group_of, dirty)
        first = dirty[np.concatenate([[0], ends[:-1]])] if len(ends) else dirty
        hints = self._old.pages[self._node[first]]
        new = _write_nodes(self._children.take(dirty), ends, self._level, hints, self._sink)
        return self._join(np.flatnonzero(~changed[group]), new, self._node[first], np.diff(ends, prepend=0))

    def _groups(self) -> NDArray[np.int64]:
        """Put nodes that changed and got too small together with the next, the last one with that before it."""
        small = self._changed & (self._bytes < self._sink.page_size // _UNDERFULL)
        joined = small[:-1].copy()
        if len(joined):
            joined[-1] |= small[-1]
        return np.concatenate([[0], np.cumsum(~joined)])

    def _cut(
        self, group: NDArray[np.int64], group_of: NDArray[np.int64], dirty: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return where new nodes end among the dirty children."""
        if not len(dirty):
            return np.zeros(0, dtype=np.int64)
        room = self._sink.page_size - HEADER
        size = np.bincount(group, weights=self._bytes).astype(np.int64)
        target = min(int(self._fill * room), room - int(self._size.max()))
        parts = np.where(size <= room, 1, -(-size // target))
        share = np.where(parts == 1, room + 1, -(-size // parts))
        if parts[-1] > 1:
            share[-1] = target  # keys that only ever grow leave full nodes behind
        offset = np.cumsum(self._size) - self._size - (np.cumsum(size) - size)[group_of]
        part = (offset // share[group_of])[dirty]
        cut = (np.diff(group_of[dirty]) != 0) | (np.diff(part) != 0)
        return np.concatenate([np.flatnonzero(cut) + 1, [len(dirty)]])

    def _join(
        self, kept: NDArray[np.int64], new: Entries, position: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Placed, InnerLevel]:
        nodes, starts = self._nodes[kept], self._starts[kept]
        old = Entries(
            self._old.pages[nodes],
            self._old.checksums[nodes],
            np.add.reduceat(self._children.rows, self._starts)[kept],
            self._children.continued[starts],
            self._children.separators.take(starts),
        )
        places = np.concatenate([nodes, position])
        order = np.argsort(places, kind="stable")
        entries = Entries.concat([old, new]).take(order)
        counts = np.concatenate([self._count[kept], sizes])[order]
        level = InnerLevel(entries.pages, entries.checksums, np.concatenate([[0], np.cumsum(counts)]))
        return Placed(entries, places[order], order < len(kept)), level


def _grow(children: Entries, level: int, fill: float, sink: PageSink) -> tuple[Placed, InnerLevel]:
    """Write a level above the highest one."""
    keys = children.separators
    ends = kernels.plan_inner(keys.parts[1], keys.wide, len(children), int(fill * sink.page_size))
    first = np.concatenate([[0], ends])
    entries = _write_nodes(children, ends, level, children.pages[first[:-1]], sink)
    level_of = InnerLevel(entries.pages, entries.checksums, first)
    return Placed(entries, np.arange(len(entries)), np.zeros(len(entries), dtype=np.bool_)), level_of


def _write_nodes(
    children: Entries, ends: NDArray[np.int64], level: int, hints: NDArray[np.int64], sink: PageSink
) -> Entries:
    """Write nodes that end at the children `ends`, and return the entries that point to them."""
    if not len(ends):
        return children.take(ends)
    prefix, offsets, data = children.separators.parts
    pages = aligned_pages(len(ends), sink.page_size)
    kernels.write_inner(
        prefix, offsets, data, children.separators.wide,
        children.pages, children.checksums, children.rows, children.continued,
        ends, sink.page_size, level, pages,
    )  # fmt: skip
    numbers = sink.place(hints)
    checksums = seal_pages(pages, sink.page_size, numbers, sink.txid)
    sink.put(pages, numbers)
    starts = np.concatenate([[0], ends[:-1]])
    return Entries(
        numbers,
        checksums,
        np.add.reduceat(children.rows, starts),
        children.continued[starts],
        children.separators.take(starts),
    )


def _entry_sizes(entries: Entries) -> NDArray[np.int64]:
    if entries.separators.offsets is None:
        return np.full(len(entries), _CHILD + _U64, dtype=np.int64)
    return np.diff(entries.separators.offsets) + (_CHILD + _END)
