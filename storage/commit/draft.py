"""`Draft`: the next state of a table. Changed leaves are read, patched or merged, and written to free pages.

Readers cannot see a draft, because it writes only to free pages. `writer` decides whether it becomes the next state.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from headrace.storage.commit import _commit_kernels
from headrace.storage.commit.changes import Part, is_dense, positions
from headrace.storage.commit.merge import (
    Counts,
    LeafRows,
    Packed,
    Patched,
    apply_changes,
    can_patch,
    pack_groups,
    patch_leaves,
)
from headrace.storage.format.keys import Keys
from headrace.storage.format.page import aligned_pages, read_pages, seal_pages
from headrace.storage.leaf.decode import gather, gather_keys, rows_of_pages
from headrace.storage.read.cache import page_buffer
from headrace.storage.tree.nodes import Entries, separators_between
from headrace.storage.tree.rewrite import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from headrace.storage.commit.changes import Changes
    from headrace.storage.commit.page_writer import PageWriter
    from headrace.storage.read.reader import PageReader
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["Draft", "PageRooms", "Replacement", "ahead"]


_CHUNK_BYTES = 2 << 20
_FEW_LEAVES = 4
_UNDERFULL = 4
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Leaves to replace, the new entries, and for each new entry the first leaf that it replaces."""

    leaves: NDArray[np.int64]
    entries: Entries
    at: NDArray[np.int64]

    @property
    def in_place(self) -> bool:
        """Whether each leaf is replaced by one leaf, which then has the same separator."""
        return self.at is self.leaves or np.array_equal(self.at, self.leaves)


class Draft:
    """The next state of a table, as far as it is complete.

    Parameters
    ----------
    base
        Snapshot that the draft starts from.
    reader
        Page reader of the table.
    pages
        Writer of the new pages.

    Attributes
    ----------
    leaves
        Current leaf entries, and which of them are new.
    rows
        Current number of rows.
    """

    def __init__(self, base: Snapshot, reader: PageReader, pages: PageWriter) -> None:
        self._base = base
        self._reader = reader
        self.pages = pages
        self._layout = base.layout
        self.leaves = Placed(base.entries, _NONE)
        self.rows = base.rows
        self._freed: list[NDArray[np.int64]] = []
        self.page_size = base.page_size
        self.changed = False

    def apply(self, changes: Changes) -> Counts:
        """Change rows.

        Raises
        ------
        UniqueViolationError
            If an insert's key is in a unique table already.
        InputError
            If a row or a key does not fit in a page.
        """
        counts = Counts()
        done: list[Replacement] = []
        parts = self._parts(changes)
        self.pages.expect(sum(len(part.leaves) for part in parts if part.dense))
        if can_patch(self._layout) and len(self.leaves) > 0:
            rooms = PageRooms(max((len(part.leaves) for part in parts), default=0), self.page_size)
            for part, (frames, patched) in ahead(parts, partial(self._read_part, rooms), partial(self._patch, rooms)):
                counts = counts.plus(patched.counts)
                done.append(self._put(part, patched))
                if patched.rest.any():
                    rest, barred = part.only(patched.rest), part.leaves[patched.done]
                    replacement, counted = self._change(rest, self._decode(rest.leaves, part.leaves, frames), barred)
                    counts = counts.plus(counted)
                    done.append(replacement)
                rooms.give(frames, patched.pages)
        else:
            for part, present in ahead(parts, lambda part, _: self.load(part.leaves)):
                replacement, counted = self._change(part, present)
                counts = counts.plus(counted)
                done.append(replacement)
        self.install([replacement for replacement in done if len(replacement.leaves)])
        return counts

    @property
    def entries(self) -> Entries:
        """Current leaf entries."""
        return self.leaves.entries

    @property
    def replaced(self) -> NDArray[np.int64] | None:
        """Leaves that were replaced one by one, if the shape of the tree did not change; otherwise None."""
        leaves = self.leaves
        return leaves.changed if len(leaves) and leaves.position is None else None

    @property
    def freed(self) -> NDArray[np.int64]:
        """Pages of the base snapshot that the draft does not have."""
        return np.concatenate([_NONE, *self._freed])

    def _parts(self, changes: Changes) -> list[Part]:
        """Cut changes into batches of few leaves each, never within a run of leaves that one key spans."""
        first, last = self._locate(changes.touched)
        same = changes.touched is changes.keys
        row_first, row_last = (first, last) if same else self._locate(changes.keys)
        leaf = np.where(changes.fresh, row_last, row_first)
        count = max(len(self.leaves), 1)
        leaves, joined = _commit_kernels.touched_leaves(first, last, leaf, count)
        step = max(_CHUNK_BYTES // self.page_size, 1)
        whole = Part(leaves, joined, 0, count, is_dense(leaves), changes, leaf, first)
        if len(leaves) <= step:
            return [whole]
        parts, start = [], 0
        while start < len(leaves):
            stop = min(start + step, len(leaves))
            stop += int(np.argmin(joined[stop - 1 :]))
            parts.append(whole.cut(start, stop))
            start = stop
        return parts

    def _locate(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and last leaf that may hold each key; a table without leaves counts as one empty leaf."""
        if not len(self.leaves):
            return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
        first, last = self.entries.locate(keys)
        return first.astype(np.int64), last.astype(np.int64)

    @property
    def _average(self) -> int:
        return self.rows // max(len(self.leaves), 1)

    def _read_part(self, rooms: PageRooms, part: Part, _: object) -> NDArray[np.uint8]:
        return self.read(part.leaves, rooms.take())

    def _patch(self, rooms: PageRooms, part: Part, frames: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Patched]:
        """Patch the leaves that can be patched; return also the old pages."""
        unique, average = self._base.unique, self._average
        return frames, patch_leaves(self._layout, frames, part, rooms.take(), unique=unique, average=average)

    def _put(self, part: Part, patched: Patched) -> Replacement:
        """Write patched pages."""
        leaves = part.leaves[patched.done]
        numbers = self.pages.place(self._hints_near(leaves), together=part.dense)
        checksums = seal_pages(patched.pages, self.page_size, numbers, self.pages.txid)
        self.pages.put(patched.pages, numbers, checksums)
        old = self.entries
        entries = Entries(numbers, checksums, patched.rows, old.continued[leaves], old.separators.take(leaves))
        return Replacement(leaves, entries, leaves)

    def _change(self, part: Part, present: LeafRows, barred: NDArray[np.int64] = _NONE) -> tuple[Replacement, Counts]:
        """Merge changes into the present rows of their leaves; `barred` leaves were changed already."""
        rows, dirty, counts = apply_changes(self._layout, present, part.changes, part.leaf, unique=self._base.unique)
        changed = np.isin(part.leaves, dirty)
        size = np.bincount(positions(part.leaves, rows.leaf), minlength=len(changed))
        leaves, joined = self._draw_in(part, size, changed, barred)
        extra = np.setdiff1d(leaves, part.leaves, assume_unique=True)
        if len(extra):
            rows = rows.then(self.load(extra)).in_leaf_order()
        group = np.concatenate([[0], np.cumsum(~joined[:-1])])
        alive = (np.bincount(group, weights=np.isin(leaves, dirty)) > 0)[group]
        kept = alive[positions(leaves, rows.leaf)]
        rows = rows if kept.all() else rows.take(np.flatnonzero(kept))
        return self.write(rows, leaves[alive], group[alive], together=part.dense), counts

    def _draw_in(
        self, part: Part, rows: NDArray[np.int64], changed: NDArray[np.bool_], barred: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Join groups that became too small with a neighbor; return the leaves, and which share rows with the next one.

        A group whose neighbors are both barred stays small until it is changed again.
        """
        group = np.concatenate([[0], np.cumsum(~part.joined[:-1])])
        count = np.bincount(group, weights=rows)
        small = (np.bincount(group, weights=changed) > 0) & (count > 0) & (_UNDERFULL * count < self._average)
        first = part.leaves[np.flatnonzero(np.diff(group, prepend=-1))][small]
        last = part.leaves[np.flatnonzero(np.diff(group, append=group[-1] + 1))][small]
        right = (last + 1 < part.high) & ~np.isin(last + 1, barred)
        left = ~right & (first > part.low) & ~np.isin(first - 1, barred)
        joins = np.concatenate([part.leaves[part.joined], last[right], first[left] - 1])
        leaves = np.union1d(part.leaves, np.concatenate([last[right] + 1, first[left] - 1]))
        return leaves, np.isin(leaves, joins)

    def load(self, leaves: NDArray[np.int64]) -> LeafRows:
        """Read the rows of leaves."""
        leaves = leaves if len(self.entries) else _NONE
        return self._decode(leaves, leaves, self.read(leaves))

    def _decode(self, leaves: NDArray[np.int64], read: NDArray[np.int64], frames: NDArray[np.uint8]) -> LeafRows:
        """Return the rows of some of the leaves that were read into `frames`."""
        layout = self._layout
        frame = positions(read, leaves).astype(np.int32)
        places, rows, _ = rows_of_pages(layout, frames, frame)
        keys = gather_keys(layout, frames, places, rows)
        return LeafRows(keys, gather(layout, frames, places, rows), read[places])

    def read(self, leaves: NDArray[np.int64], room: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the pages of leaves side by side, in the buffer `room` if one is given."""
        pages, checksums = self.entries.pages[leaves], self.entries.checksums[leaves]
        if len(leaves) <= _FEW_LEAVES:
            return read_pages(self._reader.backend, self.page_size, pages, checksums, room)
        frames = page_buffer(len(leaves), self.page_size) if room is None else room
        order = np.argsort(pages)
        self._reader.read(pages[order], frames, order, checksums[order])
        return frames

    def write(
        self, rows: LeafRows, leaves: NDArray[np.int64], group: NDArray[np.int64], *, together: bool = False
    ) -> Replacement:
        """Write the pages that replace groups of leaves; see `PageWriter.place` for `together`."""
        heads = np.flatnonzero(np.diff(group, prepend=-1))
        group = np.cumsum(np.diff(group, prepend=group[:1]) != 0)
        size = np.bincount(group[positions(leaves, rows.leaf)], minlength=len(heads))
        filled = np.flatnonzero(size)
        if not len(filled):
            return Replacement(leaves, Entries.empty(self._layout.codec.kind), _NONE)
        last = bool(filled[-1] == len(heads) - 1 and leaves[-1] >= len(self.leaves) - 1)
        packed = pack_groups(self._layout, rows, np.cumsum(size[filled]), self._base.fill, last=last)
        packed = packed.with_groups(filled)
        numbers = self.pages.place(self._hints(packed.group, leaves[heads], np.bincount(group)), together=together)
        checksums = seal_pages(packed.pages, self.page_size, numbers, self.pages.txid)
        self.pages.put(packed.pages, numbers, checksums)
        at = leaves[heads][packed.group]
        separators, continued = self._separators(packed, at)
        return Replacement(leaves, Entries(numbers, checksums, packed.rows, continued, separators), at)

    def _hints(
        self, group: NDArray[np.int64], first: NDArray[np.int64], leaves: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return where to place new pages: near the leaf that they replace, or near its neighbors if it is far away."""
        if not len(self.leaves):
            return np.zeros(len(group), dtype=np.int64)
        count = np.bincount(group, minlength=len(first))
        rank = np.arange(len(group)) - (np.cumsum(count) - count)[group]
        leaf = first[group] + rank * leaves[group] // count[group]
        return self._hints_near(leaf)

    def _hints_near(self, leaf: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the median of the pages of each leaf and its neighbors."""
        pages, end = self.leaves.entries.pages, len(self.leaves) - 1
        before, here, after = pages[np.maximum(leaf - 1, 0)], pages[leaf], pages[np.minimum(leaf + 1, end)]
        hints: NDArray[np.int64] = np.maximum(np.minimum(before, after), np.minimum(np.maximum(before, after), here))
        return hints

    def _separators(self, packed: Packed, at: NDArray[np.int64]) -> tuple[Keys, NDArray[np.uint8]]:
        """Return the separators of new pages: a group's first page keeps that of the first leaf it replaces."""
        entries = self.leaves.entries
        first = packed.first_of_group
        heads, rest = np.flatnonzero(first), np.flatnonzero(~first)
        if len(entries):
            outer, outer_flags = entries.separators.take(at[heads]), entries.continued[at[heads]]
        else:
            outer, outer_flags = Keys.lowest(self._layout.codec.kind), np.zeros(1, dtype=np.uint8)
        inner, inner_flags = separators_between(packed.tails.take(rest - 1), packed.heads.take(rest))
        order = np.argsort(np.concatenate([heads, rest]))
        return Keys.concat([outer, inner]).take(order), np.concatenate([outer_flags, inner_flags])[order]

    def install(self, done: list[Replacement]) -> None:
        """Replace old leaves by new ones."""
        if not done:
            return
        self.changed = True
        if len(self.leaves) and self.leaves.position is None and all(part.in_place for part in done):
            self._install_in_place(done)
        else:
            self._install_anew(done)

    def _install_in_place(self, done: list[Replacement]) -> None:
        leaves, new = done[0].leaves, done[0].entries
        if len(done) > 1:
            leaves = np.concatenate([part.leaves for part in done])
            new = Entries.concat([part.entries for part in done])
        old = self.leaves
        self.rows += int(new.rows.sum() - old.entries.rows[leaves].sum())
        kept = leaves
        if len(old.changed):
            again = np.isin(leaves, old.changed)
            self.pages.give(old.entries.pages[leaves[again]])
            kept = leaves[~again]
        self._freed.append(old.entries.pages[kept])
        changed = leaves if len(leaves) == 1 and not len(old.changed) else np.union1d(old.changed, leaves)
        self.leaves = Placed(old.entries.replaced(leaves, new), changed)

    def _install_anew(self, done: list[Replacement]) -> None:
        old, kept = self.leaves, self.leaves.kept
        gone = np.zeros(len(old), dtype=np.bool_)
        if len(old):
            gone[np.concatenate([part.leaves for part in done])] = True
        self._freed.append(old.entries.pages[gone & kept])
        self.pages.give(old.entries.pages[gone & ~kept])
        stay = np.flatnonzero(~gone)
        at = np.concatenate([part.at for part in done])
        position = old.positions[at] if len(old) else at
        order = np.argsort(np.concatenate([stay, at]), kind="stable")
        entries = Entries.concat([old.entries, *(part.entries for part in done)])
        index = np.concatenate([stay, len(old) + np.arange(len(at))])[order]
        self.leaves = Placed(
            _with_open_left(entries.take(index)),
            np.flatnonzero(~np.concatenate([kept[stay], np.zeros(len(at), dtype=np.bool_)])[order]),
            np.concatenate([old.positions[stay], position])[order],
        )
        self.rows = int(self.leaves.entries.rows.sum())


def _with_open_left(entries: Entries) -> Entries:
    """Return the entries with minus infinity as the first separator, which is lost if the first leaf is dropped."""
    if not len(entries):
        return entries
    separators = Keys.concat([Keys.lowest(entries.separators.kind), entries.separators.slice(1, len(entries))])
    continued = entries.continued.copy()
    continued[0] = 0
    return replace(entries, separators=separators, continued=continued)


class PageRooms:
    """Pool of page buffers, which are reused because fresh memory is slow to get. Several threads may use it.

    Parameters
    ----------
    pages, page_size
        Pages of a buffer, and page size in bytes.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._idle: list[NDArray[np.uint8]] = []

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer with arbitrary content."""
        try:
            return self._idle.pop()
        except IndexError:
            return aligned_pages(self._pages, self._page_size)

    def give(self, *rooms: NDArray[np.uint8]) -> None:
        """Return buffers to the pool."""
        self._idle.extend(rooms)


_Part = TypeVar("_Part")


def ahead(parts: Sequence[_Part], *steps: Callable[[_Part, Any], Any]) -> Iterator[tuple[_Part, Any]]:
    """Yield each part with the result of all steps; each step takes the part and the result of the step before.

    While the caller works on a part, a thread for each step prepares the next parts.
    """
    if len(parts) < 2:  # noqa: PLR2004 - nothing to do ahead
        for part in parts:
            yield part, functools.reduce(lambda made, step: step(part, made), steps, None)
        return
    waiting: deque[tuple[_Part, Future[Any] | None]] = deque()
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="headrace-ahead")) for _ in steps]
        for part in parts:
            made: Future[Any] | None = None
            for pool, step in zip(pools, steps, strict=True):
                made = pool.submit(_follow, made, step, part)
            waiting.append((part, made))
            if len(waiting) > len(steps):
                yield _waited(*waiting.popleft())
        while waiting:
            yield _waited(*waiting.popleft())


def _follow(before: Future[Any] | None, step: Callable[[_Part, Any], Any], part: _Part) -> Any:
    return step(part, None if before is None else before.result())


def _waited(part: _Part, made: Future[Any] | None) -> tuple[_Part, Any]:
    return part, None if made is None else made.result()
