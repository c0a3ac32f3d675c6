"""The buffer pool of index nested loops: frames with least recently used replacement, and one read for each page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.inlj import _pool_kernels as kernels
from headrace.storage.read import PageReader, ReadPlan, ReadQueue, ReadReport, Reads, page_buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.tree import Snapshot

__all__ = ["BufferPool"]

_ONE, _FIRST = np.ones(1, dtype=np.int64), np.arange(2)


class BufferPool:
    """Frames for leaf pages.

    Parameters
    ----------
    snapshot, reader
        Snapshot of the relation and reader of its pages.
    frames
        Number of frames.
    queue_depth
        Most reads in flight.
    """

    def __init__(self, snapshot: Snapshot, reader: PageReader, frames: int, queue_depth: int) -> None:
        self._snapshot = snapshot
        self._reader = reader
        self.buffer = page_buffer(frames, snapshot.page_size)
        self._depth = queue_depth
        self._queue = ReadQueue(reader, self.buffer)
        ring = np.arange(frames + 1, dtype=np.int32)
        self._maps = kernels.PoolMaps(
            frame_of=np.full(len(snapshot.leaf_pages), -1, dtype=np.int32),
            leaf_of=np.full(frames, -1, dtype=np.int32),
            before=np.roll(ring, 1),
            after=np.roll(ring, -1),
            used=np.zeros(frames, dtype=np.int64),
        )
        self._missed = np.empty(frames, dtype=np.int32)
        self._walk = 0

    @staticmethod
    def nbytes(frames: int, leaves: int, page_size: int) -> int:
        """Return the bytes of a pool of this size."""
        return frames * (page_size + 24) + 4 * leaves + 16

    @property
    def used(self) -> int:
        """Number of frames that hold a page."""
        return int((self._maps.leaf_of >= 0).sum())

    def fetch(
        self, leaves: NDArray[np.int32], start: int, frames: NDArray[np.int32]
    ) -> tuple[int, NDArray[np.bool_], ReadReport]:
        """Fetch leaves in order, from `start` on, until the pool would have to evict one of them again.

        Returns
        -------
        stop, missed, report
            Leaves from `start` to `stop` are in `frames`; which of them were the first to request a page that had to be
            read; and what was read, one page a read.

        Raises
        ------
        CorruptPageError, StorageIOError
            If a page is not what was written, or cannot be read.
        """
        self._walk += 1
        stop, misses = kernels.walk_pool(leaves, start, self._walk, self._maps, frames, self._missed)
        report = self._read(self._missed[:misses])
        first = np.zeros(stop - start, dtype=np.bool_)
        _, where = np.unique(frames[start:stop], return_index=True)
        first[where] = np.isin(frames[start:stop][where], self._missed[:misses])
        return stop, first, report

    def close(self) -> None:
        """Free the queue in the kernel."""
        self._queue.close()

    def _read(self, frames: NDArray[np.int32]) -> ReadReport:
        """Read the pages that belong into these frames, in order."""
        began = self._reader.clock()
        if self._depth == 1:
            for frame in frames:
                self._read_alone(frame)
        else:
            for start in range(0, len(frames), self._depth):
                self._read_together(frames[start : start + self._depth].astype(np.int64))
        return ReadReport(len(frames), len(frames), len(frames), self._reader.clock() - began)

    def _read_alone(self, frame: np.int32) -> None:
        leaf = self._maps.leaf_of[frame : frame + 1]
        page, checksum = self._snapshot.leaf_pages[leaf], self._snapshot.leaf_checksums[leaf]
        plan = ReadPlan(page, _ONE, _FIRST)
        self._reader.read_plan(plan, slice(None), page, self.buffer, np.array([frame]), checksum)

    def _read_together(self, frames: NDArray[np.int64]) -> None:
        size, leaves = self._snapshot.page_size, self._maps.leaf_of[frames]
        pages, checksums = self._snapshot.leaf_pages[leaves], self._snapshot.leaf_checksums[leaves]
        lengths = np.full(len(frames), size, dtype=np.int64)
        reading = self._queue.begin(Reads(pages * size, lengths, frames * size, pages, frames, checksums))
        try:
            reading.wait()
        except BaseException:
            reading.abandon()
            raise
        reading.check()
