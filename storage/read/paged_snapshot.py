"""`PagedSnapshot`: a snapshot in little memory, which reads the inner nodes above its leaves when they are needed.

The entries of the leaves take some 41 bytes each in memory, in the inner nodes on disk 33. Here only the entries of the
lowest inner nodes are in memory, of which a table has one for a hundred leaves or more, and a few frames for the nodes
used last. Leaves are found in two steps: first the nodes that may have them, then these nodes are read and decoded, a
few at a time. So each call costs at most one read for each node that it needs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptPageError
from headrace.storage.format._byte_kernels import copy_blocks
from headrace.storage.format.page import aligned_pages, read_heads
from headrace.storage.read.cache import LRU, SPARSE_NBYTES, PageCache
from headrace.storage.tree.nodes import read_entries
from headrace.storage.tree.relocations import relocation_columns
from headrace.storage.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.storage.format.keys import Keys
    from headrace.storage.read.reader import PageReader, ReadReport
    from headrace.storage.tree.nodes import Entries

__all__ = ["PagedSnapshot"]

_TOGETHER = 8  # most nodes that are decoded at a time
_DECODED_PAGES = 3  # for each of them: a copy, and its entries, with offsets and prefixes of short keys twice its size
_VECTOR_NBYTES = 320


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
        self._together = _together(frames)
        self._cache = PageCache(frames, self.page_size, None, LRU())
        self._lock = threading.Lock()
        self._ends, self._ordered = whole.key_range, whole.in_key_order
        moved, _, *now = relocation_columns(self.superblock.relocations)
        order = np.argsort(moved)
        self._moved, self._now = moved[order], (now[0][order], now[1][order])

    @staticmethod
    def nbytes(whole: Snapshot, frames: int) -> int:
        """Return the bytes of a paged snapshot with so many frames."""
        nodes, together = whole.levels[-1], _together(frames)
        pages = frames + _DECODED_PAGES * together
        maps = PageCache.map_nbytes(frames, 0) + SPARSE_NBYTES * frames
        return nodes.nbytes + maps + pages * whole.page_size + _VECTOR_NBYTES * together**2

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
        for which, entries, ordinals in self._visit(nodes):
            place = ordinals.searchsorted(leaves[which])
            pages[which], checksums[which] = entries.pages[place], entries.checksums[place]
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
        """Return the first and the last leaf below one node that may hold each key.

        Nodes in between may be missing where several are searched together. A key is then found correctly in all that
        are there, because a node in which it is neither the first nor the last begins with it.
        """
        first, last = np.empty((2, len(keys)), dtype=np.int32)
        for which, entries, ordinals in self._visit(node):
            low, high = entries.locate(keys.take(which))
            first[which], last[which] = ordinals[low], ordinals[high]
        return first, last

    def _visit(self, node: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int64], Entries, NDArray[np.int32]]]:
        """Yield the nodes named, a few at a time: the places that name them, their entries, and the leaves of these."""
        order = np.argsort(node, kind="stable")
        distinct, start = np.unique(node[order], return_index=True)
        stop = np.append(start[1:], len(order))
        for at in range(0, len(distinct), self._together):
            nodes = distinct[at : at + self._together]
            with self._lock:
                entries = self._decode(nodes)
            counts = self._first[nodes + 1] - self._first[nodes]
            before = np.cumsum(counts) - counts
            ordinals = np.repeat(self._first[nodes] - before, counts) + np.arange(len(entries))
            yield order[start[at] : stop[at + len(nodes) - 1]], entries, ordinals.astype(np.int32)

    def _decode(self, nodes: NDArray[np.int32]) -> Entries:
        """Return the entries of some nodes."""
        copies = aligned_pages(len(nodes), self.page_size)
        frames = self._frames_of(nodes).astype(np.int64)
        copy_blocks(self._cache.buffer, frames, copies, np.arange(len(nodes)), self.page_size)
        counts = self._first[nodes + 1] - self._first[nodes]
        if not np.array_equal(read_heads(copies, self.page_size, len(nodes))[2], counts):
            raise CorruptPageError(f"{self.path}: an inner node has another number of children than when it was opened")
        entries = read_entries(copies, self.page_size, self.codec.kind, counts)
        if isinstance(entries, int):
            raise CorruptPageError(f"{self.path}: the entries of inner page {self._nodes.pages[nodes[entries]]} overrun it")
        return entries

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
            cache.admit(missing, frames, np.zeros(len(missing)))
        return cache.frame_of(nodes)

    def _read(self, nodes: NDArray[np.int32], frames: NDArray[np.int64]) -> None:
        pages, reader = self._nodes.pages[nodes], self._reader
        plan = reader.plan(pages, self._together)
        report = reader.read_plan(plan, slice(None), pages, self._cache.buffer, frames, self._nodes.checksums[nodes])
        if self._note is not None:
            self._note(report)


def _together(frames: int) -> int:
    return max(1, min(_TOGETHER, frames // 4))
