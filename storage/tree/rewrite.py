"""Rewriting of inner nodes after leaves have changed: only nodes on the paths to changes are written.

Works level by level from the leaves up, over all children of a level at once: unchanged nodes keep their children, the
children of the other nodes are gathered and cut into new nodes. The caller places and writes the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.storage.format.constants import CHILD_BYTES, HEADER, SEPARATOR_END, WORD
from headrace.storage.format.page import seal_pages
from headrace.storage.tree import _tree_kernels as kernels
from headrace.storage.tree.nodes import Entries, InnerLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["NewTree", "PageSink", "Placed", "rewrite_inner"]

_UNDERFULL = 4


class PageSink(Protocol):
    """Places and writes new pages."""

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

    def put(self, pages: NDArray[np.uint8], numbers: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        """Write sealed pages; page `i` is page `numbers[i]` of the file."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """Entries of a changed level, and their positions in the level before.

    Attributes
    ----------
    entries
        In key order.
    changed : int64 array
        Positions of the new entries, ascending; the others existed before.
    position : int64[n] or None
        Position before the change; for a new entry that of the first entry it replaces. None if each entry replaces
        one entry with the same separator.
    """

    entries: Entries
    changed: NDArray[np.int64]
    position: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool[n], which entries existed before."""
        kept = np.ones(len(self), dtype=np.bool_)
        kept[self.changed] = False
        return kept

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64[n], `position` also if it is None."""
        return np.arange(len(self)) if self.position is None else self.position

    def with_changed(self, before: NDArray[np.int64]) -> Placed:
        """Return the same with the entries at these earlier positions marked as new."""
        if not len(before):
            return self
        also = before if self.position is None else np.flatnonzero(np.isin(self.position, before))
        new = ~self.kept
        new[also] = True
        return Placed(self.entries, np.flatnonzero(new), self.position)


@dataclass(frozen=True, slots=True)
class NewTree:
    """The inner levels of a tree.

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

    @property
    def root_pointer(self) -> tuple[int, int]:
        """Page and checksum of the root; zeros for an empty table."""
        return (int(self.root.pages[0]), int(self.root.checksums[0])) if len(self.root) else (0, 0)


def rewrite_inner(leaves: Placed, levels: Sequence[InnerLevel], fill: float, sink: PageSink) -> NewTree:
    """Write the inner nodes that changed leaves need.

    Parameters
    ----------
    leaves
        Entries of the leaves as they are to be.
    levels
        Inner levels as they were, root first.
    fill
        Share of a page to fill if nodes are split.
    sink
        Receives the new nodes.
    """
    children = leaves
    new_levels: list[InnerLevel] = []
    freed: list[NDArray[np.int64]] = []
    for old in reversed(levels):
        if len(children) <= 1:
            freed.append(old.pages)
            continue
        if children.position is None:
            children, level = _replace_nodes(children, old, len(new_levels) + 1, sink)
            freed.append(old.pages[children.changed])
        else:
            children, level = _Level(children, old, len(new_levels) + 1, fill, sink).rewrite()
            freed.append(old.pages[~np.isin(old.pages, level.pages, kind="sort")])
        new_levels.append(level)
    while len(children) > 1:
        children, level = _grow(children.entries, len(new_levels) + 1, fill, sink)
        new_levels.append(level)
    gone = np.concatenate([np.zeros(0, dtype=np.int64), *freed])
    return NewTree(children.entries, tuple(reversed(new_levels)), gone)


def _replace_nodes(children: Placed, old: InnerLevel, level: int, sink: PageSink) -> tuple[Placed, InnerLevel]:
    """Rewrite the nodes whose children changed, child for child."""
    nodes = old.first.searchsorted(children.changed, side="right") - 1
    first = np.ones(len(nodes), dtype=np.bool_)
    np.not_equal(nodes[1:], nodes[:-1], out=first[1:])
    nodes = nodes[first]
    pages, rows = children.entries.node_pages(old.first[nodes], old.first[nodes + 1], sink.page_size, level)
    numbers = sink.place(old.pages[nodes])
    checksums = seal_pages(pages, sink.page_size, numbers, sink.txid)
    sink.put(pages, numbers, checksums)
    same = old.nodes.take(nodes)
    entries = old.nodes.replaced(nodes, Entries(numbers, checksums, rows, same.continued, same.separators))
    return Placed(entries, nodes), InnerLevel(entries, old.first)


class _Level:
    """One level: its old nodes and its new children."""

    def __init__(self, children: Placed, old: InnerLevel, level: int, fill: float, sink: PageSink) -> None:
        self._children = children.entries
        self._old = old
        self._level = level
        self._fill = fill
        self._sink = sink
        self._node = np.searchsorted(old.first, children.positions, side="right") - 1
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
        """Join nodes that changed and became too small with the next node, the last one with the node before."""
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
            share[-1] = target  # ascending inserts then leave full nodes
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
            self._old.nodes.checksums[nodes],
            np.add.reduceat(self._children.rows, self._starts)[kept],
            self._children.continued[starts],
            self._children.separators.take(starts),
        )
        places = np.concatenate([nodes, position])
        order = np.argsort(places, kind="stable")
        entries = Entries.concat([old, new]).take(order)
        counts = np.concatenate([self._count[kept], sizes])[order]
        level = InnerLevel(entries, np.concatenate([[0], np.cumsum(counts)]))
        return Placed(entries, np.flatnonzero(order >= len(kept)), places[order]), level


def _grow(children: Entries, level: int, fill: float, sink: PageSink) -> tuple[Placed, InnerLevel]:
    """Write a level above the highest one."""
    keys = children.separators
    ends = kernels.plan_inner(keys.parts[1], keys.wide, len(children), int(fill * sink.page_size))
    first = np.concatenate([[0], ends])
    entries = _write_nodes(children, ends, level, children.pages[first[:-1]], sink)
    every = np.arange(len(entries))
    return Placed(entries, every, every), InnerLevel(entries, first)


def _write_nodes(
    children: Entries, ends: NDArray[np.int64], level: int, hints: NDArray[np.int64], sink: PageSink
) -> Entries:
    """Write nodes that end at the children `ends`, and return the entries that point to them."""
    if not len(ends):
        return children.take(ends)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    pages, rows = children.node_pages(starts, ends, sink.page_size, level)
    numbers = sink.place(hints)
    checksums = seal_pages(pages, sink.page_size, numbers, sink.txid)
    sink.put(pages, numbers, checksums)
    return Entries(
        numbers,
        checksums,
        rows,
        children.continued[starts],
        children.separators.take(starts),
    )


def _entry_sizes(entries: Entries) -> NDArray[np.int64]:
    if entries.separators.offsets is None:
        return np.full(len(entries), CHILD_BYTES + WORD, dtype=np.int64)
    return np.diff(entries.separators.offsets) + (CHILD_BYTES + SEPARATOR_END)
