"""Commits of few rows: only the leaves that they touch and the paths above them are looked at, and written anew.

What such a commit costs does not grow with the table. It changes nothing but leaves that can be patched
(`storage.patch`); all else is for `storage.draft`. `storage.commit` makes the result of either durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from storage import _path_kernels as kernels
from storage._byte_kernels import SLACK
from storage.errors import UniqueViolationError
from storage.index import Index, IndexPatch, PatchedIndex
from storage.keys import Keys
from storage.merge import Counts
from storage.new_rows import WordColumns
from storage.patch import can_patch
from storage.tree import Entries, aligned_pages, damaged_page

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from storage.backend import StorageBackend
    from storage.layout import LeafLayout
    from storage.new_rows import NewRows
    from storage.page_writer import PageWriter
    from storage.snapshot import Snapshot

__all__ = ["MOST_ROWS", "PathChange", "PathTree"]

MOST_ROWS = 64
"""Rows that are few."""

_MOST_LEAVES = 8
_MOST_PATCHES = 1024


@dataclass(frozen=True, slots=True)
class PathChange:
    """Changes of few rows: what becomes of their leaves, not yet sealed.

    Attributes
    ----------
    at, hints
        Ordinals of the leaves and of the nodes above them in the tree, and where each should go in the file.
    pages : uint8[len(at) * page_size + 8]
        The leaves, and zeroed room for the nodes.
    rows
        Of each leaf.
    counts
        Rows inserted, updated and deleted.
    """

    at: NDArray[np.int64]
    hints: NDArray[np.int64]
    pages: NDArray[np.uint8]
    rows: NDArray[np.int64]
    counts: Counts


class PathTree:
    """A tree that its writer changes in place: one array for all levels, leaves first, the root last.

    Parameters
    ----------
    snapshot
        The state that it begins from; its table has leaves, and they can be patched.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        entries, levels = snapshot.entries, snapshot.levels[::-1]
        every = Entries.concat([entries, *(level.nodes for level in levels)])
        starts = np.cumsum([0, len(entries), *(len(level.nodes) for level in levels)])
        below = [starts[at] + level.first[:-1] for at, level in enumerate(levels)]
        self._base = Index(entries, snapshot.levels)
        self._patches: list[IndexPatch] = []
        self._leaves = len(entries)
        self._height = 1 + len(levels)
        self._pages, self._checksums, self._rows = every.pages, every.checksums, every.rows
        self._continued, self._separators = every.continued, every.separators.prefix
        self._children = np.concatenate([np.zeros(len(entries), dtype=np.int64), *below, starts[-2:-1]])
        self._level = np.repeat(np.arange(self._height), np.diff(starts))
        self._parent = np.full(len(every), -1, dtype=np.int64)
        for at, level in enumerate(levels):
            nodes = starts[at + 1] + np.arange(len(level.nodes))
            self._parent[starts[at] : starts[at + 1]] = np.repeat(nodes, np.diff(level.first))
        self._columns = WordColumns(snapshot.layout) if WordColumns.fit(snapshot.layout) else None
        self._frames = aligned_pages(_MOST_LEAVES, snapshot.page_size)

    @staticmethod
    def fits(snapshot: Snapshot) -> bool:
        """Return whether a state can be changed in this way at all."""
        return snapshot.rows > 0 and can_patch(snapshot.layout)

    @property
    def pages(self) -> NDArray[np.int64]:
        """Page numbers of all leaves and nodes."""
        return self._pages

    @property
    def root(self) -> tuple[int, int, int]:
        """Page, checksum and rows of the root."""
        return int(self._pages[-1]), int(self._checksums[-1]), int(self._rows[-1])

    def read(self, upserts: pa.RecordBatch) -> NewRows | None:
        """Return upserts that are plain numbers, or None if they need a closer look; see `WordColumns`."""
        return None if self._columns is None else self._columns.read(upserts)

    def change(self, layout: LeafLayout, backend: StorageBackend, rows: NewRows, *, unique: bool) -> PathChange | None:
        """Return what changes make of the tree's present state, or None if they are not for this module.

        Raises
        ------
        UniqueViolationError
            If an insert's key is in a unique table already.
        CorruptionError
            If a leaf is damaged.
        """
        leaves, at, hints, touched_ends, row_ends = kernels.find_paths(
            self._separators[: self._leaves], self._continued[: self._leaves], self._parent, self._pages,
            self._height, rows.touched, rows.keys, rows.fresh, _MOST_LEAVES,
        )  # fmt: skip
        if not leaves:
            return None
        size, frames = layout.page_size, self._frames
        for start, leaf in enumerate(at[:leaves].tolist()):
            backend.pread_into(int(self._pages[leaf]) * size, [frames[start * size : (start + 1) * size]])
        pages = np.zeros(len(at) * size + SLACK, dtype=np.uint8)
        after, counts = np.zeros(leaves, dtype=np.int64), np.zeros(3, dtype=np.int64)
        bad, clash, done = kernels.patch_few(
            frames, size, at[:leaves], self._pages, self._checksums,
            rows.touched, rows.upserted, touched_ends, rows.keys, rows.fresh, row_ends, *rows.columns,
            unique, int(self._rows[-1]) // self._leaves, pages, after, counts,
        )  # fmt: skip
        if bad >= 0:
            raise damaged_page(backend, int(self._pages[at[bad]]))
        if clash >= 0:
            key = layout.codec.describe(Keys("u64", rows.keys), clash)
            raise UniqueViolationError(
                f"key {key} is in the table already, and the table is unique; nothing was changed"
            )
        return PathChange(at, hints, pages, after, Counts(*counts.tolist())) if done else None

    def put(self, change: PathChange, sink: PageWriter) -> tuple[PatchedIndex, NDArray[np.int64]]:
        """Write leaves and the nodes above them; return the new state's index, and the pages that go."""
        at, freed, numbers = change.at, self._pages[change.at], sink.place(change.hints)
        kernels.write_paths(
            at, numbers, sink.txid, sink.page_size, change.rows, self._children, self._level,
            self._pages, self._checksums, self._rows, self._continued, self._separators, change.pages,
        )  # fmt: skip
        patch = IndexPatch(at, numbers, self._checksums[at], self._rows[at])
        sink.put(change.pages, numbers, patch.checksums)
        return self._patched(patch), freed

    def _patched(self, patch: IndexPatch) -> PatchedIndex:
        """Return the index after one more patch; when there are many, it becomes what later ones build upon."""
        self._patches.append(patch)
        index = PatchedIndex(self._base, self._patches, len(self._patches))
        if len(self._patches) == _MOST_PATCHES:
            self._base, self._patches = index.whole, []
        return index
