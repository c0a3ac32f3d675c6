"""Chunks of the relation: pages that are in memory together. The next chunk is read while the current one is joined."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.read import page_buffer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from headrace.joins.meshjoin.split import MeshSplit
    from headrace.joins.stats import Counters
    from headrace.storage.read import PageReader, ReadReport
    from headrace.storage.tree import Snapshot

__all__ = ["ChunkReader"]


class ChunkReader:
    """Reads chunks into one buffer, or in turns into two.

    Parameters
    ----------
    snapshot, reader
        Snapshot of the relation and reader of its pages.
    split
        Pages in a chunk, and number of buffers.
    longest
        Most pages in a read.
    counters
        Running counts of the operator.
    """

    def __init__(
        self, snapshot: Snapshot, reader: PageReader, split: MeshSplit, longest: int, counters: Counters
    ) -> None:
        self._snapshot = snapshot
        self._reader = reader
        self._pages = split.pages
        self._longest = longest
        self._counters = counters
        self._order = np.argsort(snapshot.leaf_pages).astype(np.int32)
        self._buffers = [page_buffer(split.pages, snapshot.page_size) for _ in range(split.buffers)]
        self._chunk = -1
        self._ahead: tuple[int, Future[ReadReport]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-mesh") if split.buffers > 1 else None

    def pages(self, chunk: int) -> int:
        """Return the number of pages in a chunk."""
        return len(self._leaves(chunk))

    def read(self, chunk: int) -> NDArray[np.uint8]:
        """Return the pages of a chunk in disk order. They stay until another chunk is read.

        Raises
        ------
        CorruptPageError, StorageIOError
            If a page is not what was written, or cannot be read.
        """
        began = self._reader.clock()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._count(ahead[1], began)
            self._buffers.reverse()
            self._chunk = ahead[0]
        if self._chunk != chunk:
            self._chunk = -1
            report = self._fill(chunk, self._buffers[0])
            self._counters.add_read(replace(report, seconds=self._reader.clock() - began))
            self._chunk = chunk
        return self._buffers[0]

    def read_ahead(self, chunk: int) -> None:
        """Start reading a chunk, if there is a second buffer."""
        if self._thread is not None and self._ahead is None and chunk != self._chunk:
            self._ahead = chunk, self._thread.submit(self._fill, chunk, self._buffers[1])

    def close(self) -> None:
        """Wait until nothing is read any more."""
        self._ahead = None
        if self._thread is not None:
            self._thread.shutdown()

    def _leaves(self, chunk: int) -> NDArray[np.int32]:
        return self._order[chunk * self._pages : (chunk + 1) * self._pages]

    def _count(self, reading: Future[ReadReport], began: float) -> None:
        """Wait for a read, and count it with the seconds of waiting."""
        try:
            report = reading.result()
        finally:
            del reading  # an error refers to this frame: without its future it is no reference cycle
        self._counters.add_read(replace(report, seconds=self._reader.clock() - began))

    def _fill(self, chunk: int, frames: NDArray[np.uint8]) -> ReadReport:
        leaves = self._leaves(chunk)
        pages, checksums = self._snapshot.leaf_pages[leaves], self._snapshot.leaf_checksums[leaves]
        plan = self._reader.plan(pages, self._longest)
        return self._reader.read_plan(plan, slice(None), pages, frames, np.arange(len(leaves)), checksums)
