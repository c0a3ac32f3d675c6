"""Reads that go on while their caller works: begun in one call, awaited and verified in others.

Each read brings adjacent disk pages to adjacent frames, the pages of its gaps too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from storage.kernel_reads import READ_NBYTES, KernelQueue, open_kernel_queue
from storage.reader import ReadReport, page_damaged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storage.plan import ReadPlan
    from storage.reader import PageReader

__all__ = ["ReadQueue", "Reading"]

_DEPTH = 64


class ReadQueue:
    """Begins reads of one reader's file; one `Reading` at a time. Not for several threads.

    Parameters
    ----------
    reader
        Of the file.
    """

    def __init__(self, reader: PageReader) -> None:
        self.reader = reader
        self._kernel: KernelQueue | None = None
        self._refused = False

    nbytes = _DEPTH * READ_NBYTES
    """Bytes that a queue holds beside the frames."""

    def begin(
        self,
        plan: ReadPlan,
        pages: NDArray[np.int64],
        frames: NDArray[np.uint8],
        frame_ids: NDArray[np.integer],
        checksums: NDArray[np.uint64],
    ) -> Reading:
        """Begin all reads of a plan.

        Parameters
        ----------
        plan
            For `pages`.
        pages
            int64[n], page numbers in ascending order, each once.
        frames
            Flat page-aligned buffer with slack behind its end.
        frame_ids
            Frame of each page. Those of one read lie as far apart as its pages, and those between are overwritten.
        checksums
            uint64[n], what the parents' pointers say.
        """
        return Reading(self.reader, self._queue(), plan, pages, frames, frame_ids, checksums)

    def close(self) -> None:
        """Give the kernel's queue back."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _queue(self) -> KernelQueue | None:
        if self._kernel is not None and not self._kernel.usable:
            self._kernel = None
        if self._kernel is None and not self._refused:
            descriptor = getattr(self.reader.backend, "direct_descriptor", None)
            self._kernel = None if descriptor is None else open_kernel_queue(descriptor, _DEPTH)
            self._refused = self._kernel is None
        return self._kernel


class Reading:
    """Reads that were begun. Wait for them before anything else happens to their frames, then check them."""

    def __init__(
        self,
        reader: PageReader,
        queue: KernelQueue | None,
        plan: ReadPlan,
        pages: NDArray[np.int64],
        frames: NDArray[np.uint8],
        frame_ids: NDArray[np.integer],
        checksums: NDArray[np.uint64],
    ) -> None:
        self._reader = reader
        self._queue = queue
        self._plan = plan
        self._pages = pages
        self._frames = frames
        self._ids = np.ascontiguousarray(frame_ids, dtype=np.int64)
        self._checksums = checksums
        self._offsets = plan.start * reader.page_size
        self._lengths = plan.length * reader.page_size
        self._places = self._ids[plan.first[:-1]] * reader.page_size
        self._seconds = 0.0
        self._at = self._stop = 0
        if queue is not None:
            self._submit(queue)

    def wait(self) -> None:
        """Return when all pages are in their frames.

        Raises
        ------
        CorruptPageError
            If the file ends before.
        StorageIOError
            If the operating system refuses.
        """
        begin = self._reader.clock()
        if self._queue is None:
            self._reader.fill(self._offsets, self._lengths, self._frames, self._places)
        while self._queue is not None and self._at < len(self._plan):
            got = self._queue.wait(self._stop - self._at)
            short = self._at + np.flatnonzero(got != self._lengths[self._at : self._stop])
            self._at = self._stop
            if self._stop < len(self._plan):
                self._submit(self._queue)
            # Whatever the kernel did not do, the reader does again, and says why it cannot.
            self._reader.fill(self._offsets[short], self._lengths[short], self._frames, self._places[short])
        self._seconds = self._reader.clock() - begin

    def check(self) -> ReadReport:
        """Verify all pages; return what reading them took of the caller's time.

        Raises
        ------
        CorruptPageError
            If a page is not what was written.
        """
        from storage._kernels import verify_pages  # noqa: PLC0415 - numba is loaded with the first read

        begin = self._reader.clock()
        bad = int(verify_pages(self._frames, self._reader.page_size, self._ids, self._pages, self._checksums))
        if bad >= 0:
            raise page_damaged(int(self._pages[bad]), self._reader.backend.path)
        seconds = self._seconds + self._reader.clock() - begin
        return ReadReport(self._plan.pages_wanted, self._plan.pages_read, len(self._plan), seconds)

    def _submit(self, queue: KernelQueue) -> None:
        self._stop = min(self._at + queue.depth, len(self._plan))
        now = slice(self._at, self._stop)
        addresses = np.uint64(self._frames.ctypes.data) + self._places[now].astype(np.uint64)
        queue.submit(self._offsets[now], self._lengths[now], addresses)
