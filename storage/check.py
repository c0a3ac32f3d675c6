"""Check of a table file: verifies each invariant, by name, and reports every violation.

Unlike opening a table, a check continues after the first damage: everything that can still be reached is checked.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.storage import _check_kernels
from headrace.storage.commit.locks import Claims, FileLocks
from headrace.storage.errors import CorruptionError
from headrace.storage.file.backend import FileBackend
from headrace.storage.filter.segments import FilterFile, leaf_segments
from headrace.storage.format import _page_kernels
from headrace.storage.format.constants import FIRST_PAGE, INNER_PAGE
from headrace.storage.format.keys import Keys
from headrace.storage.format.layout import LeafLayout
from headrace.storage.format.metadata import metadata_pages, read_metadata
from headrace.storage.format.page import aligned_pages, read_heads
from headrace.storage.format.slots import read_superblock
from headrace.storage.leaf.decode import gather_keys, rows_of_pages
from headrace.storage.tree.nodes import Entries, read_entries
from headrace.storage.tree.relocations import relocated_entries, relocated_leaves
from headrace.storage.tree.snapshot import root_entries

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.superblock import Superblock

__all__ = ["CheckReport", "Violation", "check_backend", "check_file"]

_WINDOW_BYTES = 8 << 20
_UNKNOWN = np.zeros(0, dtype=np.uint64)
_FAULTS = {
    1: "is not a leaf",
    2: "holds an impossible number of rows",
    3: "has a bad directory entry {}",
    4: "has a block outside the page in directory entry {}",
    5: "has bad text in directory entry {}",
    6: "has a key below the base of directory entry {}",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of one invariant.

    Attributes
    ----------
    invariant
        Name of the invariant: superblock, length, metadata, bounds, page-checksum, parent-checksum, transaction,
        structure, relocations, key-order, separators, unique, counts, reachable-once or filter.
    page
        Page number, or None for the file as a whole.
    detail
        Description of what was found.
    """

    invariant: str
    page: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check.

    Attributes
    ----------
    path
        Path of the table file.
    violations
        In the order in which they were found.
    pages, rows
        Number of pages and rows that were checked.
    unreferenced
        Pages of the file that this commit does not use; free space, not a violation.
    unfiltered
        Leaves that the filter does not cover; they cost speed and are not violations. 0 without a filter.
    """

    path: str
    violations: tuple[Violation, ...]
    pages: int
    rows: int
    unreferenced: int
    unfiltered: int = 0

    @property
    def ok(self) -> bool:
        """Whether the table is sound."""
        return not self.violations


@dataclass
class _Checker:
    backend: StorageBackend
    head: Superblock
    violations: list[Violation] = field(default_factory=list)
    seen: list[NDArray[np.int64]] = field(default_factory=list)
    rows: int = 0
    filter: FilterFile | None = None
    unfiltered: int = 0

    def report(self, invariant: str, page: int | None, detail: str) -> None:
        self.violations.append(Violation(invariant, page, detail))

    def run(self) -> None:
        head = self.head
        if self.backend.size() < head.pages * head.page_size:
            self.report("length", None, f"the file has {self.backend.size()} bytes, not {head.pages * head.page_size}")
        metadata = head.metadata_page + np.arange(metadata_pages(head.metadata_bytes, head.page_size))
        self.seen.append(np.concatenate([np.arange(FIRST_PAGE), metadata]).astype(np.int64))
        try:
            schema, key = read_metadata(
                self.backend, head.page_size, head.metadata_page, head.metadata_bytes, head.metadata_checksum
            )
            layout = LeafLayout(schema, key, head.page_size)
        except (CorruptionError, pa.ArrowException, ValueError) as error:
            self.report("metadata", head.metadata_page, str(error))
            return
        whole = self._check_tree(layout)
        numbers, times = np.unique(np.concatenate(self.seen), return_counts=True)
        for page in numbers[times > 1].tolist():
            self.report("reachable-once", page, "more than one pointer leads to this page")
        if whole and self.rows != head.rows:
            self.report("counts", None, f"the leaves hold {self.rows} rows, the superblock says {head.rows}")

    def _check_tree(self, layout: LeafLayout) -> bool:
        """Check all pages of the tree; return whether every leaf was reached."""
        entries, whole = root_entries(self.head, layout), True
        for level in range(self.head.height - 1, 0, -1):
            self.seen.append(entries.pages)
            below: list[Entries] = []
            good = 0
            for window in self._windows(entries):
                frames, kept = self._read(window)
                kept = self._inner_only(frames, window, kept, level)
                good += len(kept)
                counted = (
                    level < self.head.height - 1 or not self.head.relocations
                )  # no pointer has the root's rows then
                below.extend(self._children(frames, window, kept, layout, counted=counted))
            whole = whole and good == len(entries)
            entries = Entries.concat(below) if below else Entries.empty(layout.codec.kind)
        if self.head.relocations and not whole:
            return False  # leaf numbers are not known if some leaves are missing
        entries = self._as_relocated(entries)
        self.seen.append(entries.pages)
        if whole and len(entries) != self.head.leaves:
            self.report("counts", None, f"the tree has {len(entries)} leaves, the superblock says {self.head.leaves}")
        if entries.separators.first_descent() >= 0:
            leaf = entries.separators.first_descent()
            self.report("separators", int(entries.pages[leaf]), "the separator is below the one before it")
            return False
        return _LeafChecker(self, layout, entries).run() and whole

    def _as_relocated(self, entries: Entries) -> Entries:
        """Return the leaves where they are now."""
        relocated = relocated_leaves(self.head.relocations)
        if not len(relocated) or relocated[-1] < len(entries):
            return relocated_entries(entries, self.head.relocations)
        detail = f"leaf {relocated[-1]} is relocated, but only {len(entries)} leaves can be reached"
        self.report("relocations", None, detail)
        return entries

    def _windows(self, entries: Entries) -> Iterator[Entries]:
        step = max(_WINDOW_BYTES // self.head.page_size, 1)
        for start in range(0, len(entries), step):
            yield entries.slice(start, min(start + step, len(entries)))

    def _read(self, entries: Entries) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return pages, and the positions of those that are sound."""
        size, pages = self.head.page_size, entries.pages
        inside = (pages >= FIRST_PAGE) & (pages < min(self.head.pages, self.backend.size() // size))
        for page in pages[~inside].tolist():
            self.report("bounds", page, "a pointer leads outside the file")
        frames = aligned_pages(len(pages), size)
        good = np.flatnonzero(inside)
        cuts = np.flatnonzero((np.diff(pages[good]) != 1) | (np.diff(good) != 1)) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(good)] if len(good) else []):
            first, last = int(good[start]), int(good[stop - 1])
            self.backend.pread_into(int(pages[first]) * size, [frames[first * size : (last + 1) * size]])
        return frames, self._sound(frames, entries, good)

    def _sound(self, frames: NDArray[np.uint8], entries: Entries, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the pages that are what their parents point to."""
        size = self.head.page_size
        numbers, checksums = entries.pages[positions], entries.checksums[positions]
        sound, at = np.ones(len(positions), dtype=np.bool_), 0
        while (bad := _page_kernels.verify_pages(frames, size, positions[at:], numbers[at:], checksums[at:])) >= 0:
            at += bad + 1
            sound[at - 1] = False
            self._damaged(frames, positions[at - 1 : at], numbers[at - 1 : at])
        heads = frames[: len(entries) * size].reshape(-1, size)[positions, 8:16]
        times = heads.view(np.uint64)[:, 0]
        for at in np.flatnonzero(sound & (times > self.head.txid)).tolist():
            detail = f"written by transaction {times[at]}, the table is at {self.head.txid}"
            self.report("transaction", int(numbers[at]), detail)
        return positions[sound]

    def _damaged(self, frames: NDArray[np.uint8], position: NDArray[np.int64], number: NDArray[np.int64]) -> None:
        if _page_kernels.verify_pages(frames, self.head.page_size, position, number, _UNKNOWN) < 0:
            detail = "the page is whole, but not the one that its parent points to"
            self.report("parent-checksum", int(number[0]), detail)
        else:
            self.report("page-checksum", int(number[0]), "the content is not what its checksum says")

    def _inner_only(
        self, frames: NDArray[np.uint8], entries: Entries, kept: NDArray[np.int64], level: int
    ) -> NDArray[np.int64]:
        kinds, levels, counts = read_heads(frames, self.head.page_size, len(entries))
        good = (kinds == INNER_PAGE) & (levels == level) & (counts >= 1) & (counts <= self.head.page_size)
        for position in kept[~good[kept]].tolist():
            self.report("structure", int(entries.pages[position]), f"is not an inner node of level {level}")
        return kept[good[kept]]

    def _children(
        self, frames: NDArray[np.uint8], entries: Entries, kept: NDArray[np.int64], layout: LeafLayout, *, counted: bool
    ) -> Iterator[Entries]:
        size = self.head.page_size
        for position in kept.tolist():
            page = np.append(frames[position * size : (position + 1) * size], np.zeros(8, dtype=np.uint8))
            children = read_entries(page, size, layout.codec.kind, read_heads(page, size, 1)[2])
            if isinstance(children, int):
                self.report("structure", int(entries.pages[position]), "the entries overrun the page")
                continue
            if counted and int(children.rows.sum()) != int(entries.rows[position]):
                detail = f"the children have {int(children.rows.sum())} rows, the parent says {entries.rows[position]}"
                self.report("counts", int(entries.pages[position]), detail)
            yield children


class _LeafChecker:
    """Checks the leaves in key order, window by window."""

    def __init__(self, checker: _Checker, layout: LeafLayout, entries: Entries) -> None:
        self._checker = checker
        self._layout = layout
        self._entries = entries
        self._last = Keys.empty(layout.codec.kind)
        self._text = np.zeros(layout.entries, dtype=np.uint8)
        self._text[0] = layout.codec.kind == "bytes"
        for column in layout.columns:
            self._text[column.first] = column.words == 0

    def run(self) -> bool:
        """Return whether every leaf could be read."""
        whole, at = True, 0
        for window in self._checker._windows(self._entries):  # noqa: SLF001 - the two are one
            frames, kept = self._checker._read(window)  # noqa: SLF001 - as above
            kept = self._structure(frames, window, kept)
            whole = whole and len(kept) == len(window)
            if len(kept):
                self._window(frames, window, kept, at)
            at += len(window)
        return whole

    def _structure(self, frames: NDArray[np.uint8], window: Entries, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        faults = np.zeros(len(window), dtype=np.int64)
        _check_kernels.leaf_faults(frames, self._layout.page_size, len(window), self._text, faults)
        for position in kept[faults[kept] != 0].tolist():
            entry, kind = divmod(int(faults[position]), 256)
            self._checker.report("structure", int(window.pages[position]), _FAULTS[kind].format(entry))
        return kept[faults[kept] == 0]

    def _window(self, frames: NDArray[np.uint8], window: Entries, kept: NDArray[np.int64], at: int) -> None:
        frame = kept.astype(np.int32)
        places, rows, origin = rows_of_pages(self._layout, frames, frame)
        counts = np.bincount(origin, minlength=len(frame))
        self._checker.rows += int(counts.sum())
        for position in np.flatnonzero(counts != window.rows[kept]).tolist():
            page = int(window.pages[kept[position]])
            detail = f"holds {counts[position]} rows, the parent says {window.rows[kept[position]]}"
            self._checker.report("counts", page, detail)
        keys = gather_keys(self._layout, frames, places, rows)
        pages = window.pages[kept][origin]
        self._order(Keys.concat([self._last, keys]), np.concatenate([pages[: len(self._last)], pages]))
        self._bounds(keys, counts, kept + at)
        self._filter(frames, window, kept)
        self._last = keys.slice(len(keys) - 1, len(keys))

    def _order(self, keys: Keys, pages: NDArray[np.int64]) -> None:
        row = keys.first_descent()
        if row >= 0:
            self._checker.report("key-order", int(pages[row]), "a key is below the one before it")
        if self._checker.head.unique and row < 0:
            same = np.flatnonzero(keys.same_as_next())
            if len(same):
                key = self._layout.codec.describe(keys, int(same[0]))
                self._checker.report("unique", int(pages[same[0] + 1]), f"key {key} occurs more than once")

    def _bounds(self, keys: Keys, counts: NDArray[np.int64], leaves: NDArray[np.int64]) -> None:
        """Check that the keys of each leaf lie between its separator and the next one."""
        ends = np.cumsum(counts)
        wrong = np.zeros(len(leaves), dtype=np.bool_)
        for rows in (ends - counts, ends - 1):
            first, last = self._entries.locate(keys.take(rows))
            wrong |= (first > leaves) | (last < leaves)
        for leaf in leaves[wrong].tolist():
            self._checker.report("separators", int(self._entries.pages[leaf]), "a key lies outside the leaf's bounds")

    def _filter(self, frames: NDArray[np.uint8], window: Entries, kept: NDArray[np.int64]) -> None:
        """Check that the filter rules out no key of the leaves."""
        made = self._checker.filter
        if made is None:
            return
        stored, known = np.zeros((len(kept), made.shape.words), dtype=np.uint64), np.zeros(len(kept), dtype=np.bool_)
        pages, place = window.pages[kept], np.arange(len(kept), dtype=np.int32)
        made.load(pages, window.checksums[kept], made.shape, stored, place, known)
        true = leaf_segments(self._layout, frames, kept.astype(np.int32), made.shape)
        self._checker.unfiltered += int((~known).sum())
        for page in pages[known & ((true & ~stored) != 0).any(axis=1)].tolist():
            self._checker.report("filter", page, "the filter denies a key of the page; build it again")


def check_file(path: str | os.PathLike[str]) -> CheckReport:
    """Check the newest commit of a table, even if it is too damaged to be opened, while writers continue.

    Raises
    ------
    TableNotFoundError
        If there is no such file.
    StorageIOError
        If it cannot be read.
    FormatVersionError
        If the table has another format version.
    """
    with contextlib.closing(FileBackend(path)) as backend, contextlib.ExitStack() as stack:
        with contextlib.suppress(CorruptionError):  # is reported below
            stack.enter_context(Claims(FileLocks(backend.fileno(), backend.path)).newest(backend))
        return check_backend(backend)


def check_backend(backend: StorageBackend) -> CheckReport:
    """Check the newest commit of a table file. A claim of the caller keeps writers from reusing its pages.

    Raises
    ------
    StorageIOError
        If the file cannot be read.
    FormatVersionError
        If the table has another format version.
    """
    try:
        head = read_superblock(backend)
    except CorruptionError as error:
        return CheckReport(backend.path, (Violation("superblock", None, str(error)),), 0, 0, 0)
    with contextlib.ExitStack() as stack:
        made = FilterFile.open(backend.path)
        checker = _Checker(backend, head, filter=None if made is None else stack.enter_context(made))
        checker.run()
    pages = len(np.unique(np.concatenate(checker.seen)))
    unreferenced = max(head.pages - pages, 0)
    return CheckReport(backend.path, tuple(checker.violations), pages, checker.rows, unreferenced, checker.unfiltered)
