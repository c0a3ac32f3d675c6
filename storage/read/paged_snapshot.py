"""`PagedSnapshot`: a snapshot in little memory, which reads the inner nodes above its leaves when they are needed.

The entries of the leaves take some 41 bytes each in memory, in the inner nodes on disk 33. Here only the entries of the
lowest inner nodes are in memory, of which a table has one for a hundred leaves or more, and a few frames for the nodes
used last. Leaves are found in two steps: first the nodes that may have them, then these nodes are read and searched, a
few at a time. So each call costs at most one read for each node that it needs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.read.cache import LRU, SPARSE_NBYTES, PageCache
from headrace.storage.tree import _tree_kernels as kernels
from headrace.storage.tree.relocations import relocation_columns
from headrace.storage.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.storage.format.keys import Keys
    from headrace.storage.read.reader import PageReader, ReadReport

__all__ = ["PagedSnapshot"]

_TOGETHER = 16  # most nodes that are read and searched at a time
_GAPS = 2  # most pages that are read for each wanted one, gaps included
_VECTOR_NBYTES = 320  # of the reader, for each page that it reads


class PagedSnapshot(Snapshot):
    """A snapshot that has no arrays with an element for each leaf.

    Parameters
    ----------
    whole
        The snapshot. It stays claimed, so that no writer takes its pages.
    reader
        Reader of its pages.
    frames
        Inner nodes to keep in memory; at least one.
    note
        Called with a report of all reads of inner nodes.
    """

    __slots__ = (
        "_cache", "_ends", "_first", "_lock", "_moved", "_nodes", "_note", "_now", "_ordered", "_reader", "_together",
        "_whole",
    )  # fmt: skip

    def __init__(
        self, whole: Snapshot, reader: PageReader, frames: int, note: Callable[[ReadReport], None] | None = None
    ) -> None:
        self.path, self.superblock, self.layout = whole.path, whole.superblock, whole.layout
        self._whole, self._reader, self._note = whole, reader, note
        self._nodes, self._first = whole.levels[-1].nodes, whole.levels[-1].first
        self._together = min(frames, _TOGETHER)
        self._cache = PageCache(frames, self.page_size, None, LRU())
        self._lock = threading.Lock()
        self._ends, self._ordered = whole.key_range, whole.in_key_order
        moved, _, *now = relocation_columns(self.superblock.relocations)
        order = np.argsort(moved)
        self._moved, self._now = moved[order], (now[0][order], now[1][order])

    @staticmethod
    def nbytes(whole: Snapshot, frames: int) -> int:
        """Return the bytes of a paged snapshot with so many frames."""
        nodes = sum(level.nbytes for level in whole.levels)
        maps = PageCache.map_nbytes(frames, 0) + SPARSE_NBYTES * frames
        return nodes + maps + frames * whole.page_size + _VECTOR_NBYTES * _GAPS * min(frames, _TOGETHER)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index in memory."""
        return self.nbytes(self._whole, self._cache.frames_max)

    @property
    def extent(self) -> int:
        """Most pages on disk from the first leaf to the last."""
        return self.superblock.pages

    @property
    def in_key_order(self) -> bool:
        """Whether the leaves lie on disk in key order."""
        return self._ordered

    @property
    def key_range(self) -> tuple[np.uint64, np.uint64]:
        """Leading words of the first separator and of the last."""
        return self._ends

    def pointers(self, leaves: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the page numbers and checksums of leaves. See `Snapshot.pointers`.

        Raises
        ------
        CorruptPageError
            If an inner node is not what was written.
        StorageIOError
            If the operating system refuses.
        """
        pages, checksums = np.empty(len(leaves), dtype=np.int64), np.empty(len(leaves), dtype=np.uint64)
        nodes = (self._first.searchsorted(leaves, side="right") - 1).astype(np.int32)
        child = leaves - self._first[nodes]
        for which, frame, count in self._visit(nodes):
            kernels.read_pointers(
                self._cache.buffer, self.page_size, frame, count, child[which], which, pages, checksums
            )
        if len(self._moved):
            place = self._moved.searchsorted(leaves)
            place[place == len(self._moved)] = 0
            moved = np.flatnonzero(self._moved[place] == leaves)
            pages[moved], checksums[moved] = self._now[0][place[moved]], self._now[1][place[moved]]
        return pages, checksums

    def locate(self, keys: Keys) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the first and the last leaf that may hold each key. See `Snapshot.locate` and `pointers`."""
        left, right = self._nodes.locate(keys)
        first, last = self._locate_below(keys, left)
        spanning = np.flatnonzero(right > left)
        if len(spanning):
            last[spanning] = self._locate_below(keys.take(spanning), right[spanning])[1]
        return first, last

    def _locate_below(self, keys: Keys, node: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the first and the last leaf below one node that may hold each key."""
        first, last = np.empty((2, len(keys)), dtype=np.int32)
        for which, frame, count in self._visit(node):
            kernels.search_nodes(
                self._cache.buffer, self.page_size, frame, count, keys.parts, keys.wide, which, first, last
            )
        before = self._first[node].astype(np.int32)
        return first + before, last + before

    def _visit(
        self, node: NDArray[np.int32]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]]:
        """Yield the nodes named, a few at a time: the places that name them, and their frames and numbers of children.

        No other thread may use the frames until the next ones are asked for.
        """
        order = np.argsort(node, kind="stable")
        named = node[order]
        distinct, start = np.unique(named, return_index=True)
        stop = np.append(start[1:], len(order))
        for at in range(0, len(distinct), self._together):
            nodes = distinct[at : at + self._together]
            part = slice(int(start[at]), int(stop[at + len(nodes) - 1]))
            with self._lock:
                frame = self._frames_of(nodes)[np.searchsorted(nodes, named[part])]
                yield order[part], frame, self._first[named[part] + 1] - self._first[named[part]]

    def _frames_of(self, nodes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the frames of some nodes, and read those that are in none."""
        cache = self._cache
        cache.touch(cache.frame_of(nodes))
        missing = nodes[cache.frame_of(nodes) < 0]
        if len(missing):
            if len(missing) > cache.available:
                cache.evict(len(missing) - cache.available)
            missing = missing[np.argsort(self._nodes.pages[missing])]
            frames = cache.allocate(len(missing))
            try:
                self._read(missing, frames)
            except BaseException:
                cache.release(frames)
                raise
            cache.admit(missing, frames, np.zeros(len(missing), dtype=np.int64))
        return cache.frame_of(nodes)

    def _read(self, nodes: NDArray[np.int32], frames: NDArray[np.int64]) -> None:
        pages, reader = self._nodes.pages[nodes], self._reader
        plan = reader.plan(pages, _TOGETHER)
        if plan.pages_read > _GAPS * len(pages):
            plan = reader.plan(pages, 1)
        report = reader.read_plan(plan, slice(None), pages, self._cache.buffer, frames, self._nodes.checksums[nodes])
        if self._note is not None:
            self._note(report)
