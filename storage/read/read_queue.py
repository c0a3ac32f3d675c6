"""`ReadQueue`: asynchronous reads of pages, submitted in one call, awaited and verified in others.

Each read brings adjacent disk pages to adjacent frames, the pages of its gaps too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.storage.file.async_reads import READ_NBYTES, KernelQueue, open_kernel_queue
from headrace.storage.format._page_kernels import verify_pages
from headrace.storage.read.reader import page_damaged

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.storage.read.reader import PageReader

__all__ = ["ReadQueue", "Reading", "Reads"]

_DEPTH = 64
_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads to make, and their target frames.

    Attributes
    ----------
    offsets, lengths : int64[reads]
        Offset and length of each read in the file.
    places : int64[reads]
        Offset of each read in the frames.
    pages : int64[n]
        Numbers of the wanted pages.
    frame_ids : int64[n]
        Frames of the pages. Those of one read are as far apart as its pages; frames in between are overwritten.
    checksums : uint64[n]
        Checksums from the parents' pointers.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    pages: NDArray[np.int64]
    frame_ids: NDArray[np.int64]
    checksums: NDArray[np.uint64]


class ReadQueue:
    """Submits reads of one file into one buffer; at most two `Reading` at a time, so that the disk never waits.

    Parameters
    ----------
    reader
        Page reader of the file.
    frames
        Flat page-aligned buffer with slack after its end.
    """

    nbytes = _AT_ONCE * _DEPTH * READ_NBYTES
    """Bytes that a queue holds beside the frames."""

    def __init__(self, reader: PageReader, frames: NDArray[np.uint8]) -> None:
        self.reader = reader
        self.frames = frames
        self.address = int(frames.ctypes.data)
        self._kernels: deque[KernelQueue] = deque(maxlen=_AT_ONCE)
        self._refused = False

    def begin(self, reads: Reads) -> Reading:
        """Begin to read. All readings but the last one must have ended."""
        return Reading(self, self._queue(), reads)

    def close(self) -> None:
        """Free the queues in the kernel."""
        while self._kernels:
            self._kernels.pop().close()

    def _queue(self) -> KernelQueue | None:
        """Return the queue in the kernel whose turn it is; None if there is none."""
        if self._kernels and not self._kernels[0].usable:
            self._kernels.clear()
        if len(self._kernels) < _AT_ONCE and not self._refused:
            descriptor = getattr(self.reader.backend, "direct_descriptor", None)
            kernel = None if descriptor is None else open_kernel_queue(descriptor, _DEPTH)
            self._refused = kernel is None
            if kernel is not None:
                self._kernels.append(kernel)
                return kernel
        self._kernels.rotate()
        return self._kernels[-1] if self._kernels else None


class Reading:
    """Reads in flight. Wait for them before their frames are used for anything else, then check them."""

    def __init__(self, queue: ReadQueue, kernel: KernelQueue | None, reads: Reads) -> None:
        self._queue = queue
        self._kernel = kernel
        self._reads = reads
        self._at = self._stop = 0
        if kernel is not None:
            self._submit(kernel)

    def wait(self) -> None:
        """Return when all pages are in their frames.

        Raises
        ------
        CorruptPageError
            If the file ends before.
        StorageIOError
            If the operating system refuses.
        """
        offsets, lengths, places = self._reads.offsets, self._reads.lengths, self._reads.places
        fill, frames = self._queue.reader.fill, self._queue.frames
        if self._kernel is None:
            fill(offsets, lengths, frames, places)
            return
        while self._at < len(offsets):
            short = self._at + self._kernel.wait(lengths[self._at : self._stop])
            self._at = self._stop
            if self._stop < len(offsets):
                self._submit(self._kernel)
            if len(short):  # the reader repeats short reads, and raises the reason if they fail
                fill(offsets[short], lengths[short], frames, places[short])

    def abandon(self) -> None:
        """Wait until no read writes to the frames, and discard what was read."""
        if self._kernel is not None:
            self._kernel.settle()

    def check(self) -> None:
        """Verify all pages.

        Raises
        ------
        CorruptPageError
            If a page is not what was written.
        """
        reads, reader = self._reads, self._queue.reader
        bad = verify_pages(self._queue.frames, reader.page_size, reads.frame_ids, reads.pages, reads.checksums)
        if bad >= 0:
            raise page_damaged(int(reads.pages[bad]), reader.backend.path)

    def _submit(self, kernel: KernelQueue) -> None:
        reads = self._reads
        self._stop = min(self._at + kernel.depth, len(reads.offsets))
        now = slice(self._at, self._stop)
        kernel.submit(reads.offsets[now], reads.lengths[now], reads.places[now] + self._queue.address)
