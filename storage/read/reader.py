"""`PageReader`: reads wanted pages into frames. It plans the reads, runs them in parallel, and verifies the pages.

Every read goes directly into the frames of its wanted pages by one scattered call; all pages of a gap go into one
bounce page, which is never used. The caller chooses the pages and the frames.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptionError, CorruptPageError
from headrace.storage.format._page_kernels import verify_pages
from headrace.storage.read.cache import page_buffer
from headrace.storage.read.plan import plan_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.read.device import DeviceModel
    from headrace.storage.read.plan import ReadPlan

__all__ = ["PageReader", "ReadReport", "page_damaged"]

_BYTES_PER_VECTOR = 320  # a memoryview, its base and its place in the list
_FEW_READS = 2
_UNKNOWN = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Statistics of reads. Reports can be added."""

    pages_wanted: int = 0
    pages_read: int = 0
    seeks: int = 0
    seconds: float = 0.0

    def __add__(self, other: ReadReport) -> ReadReport:
        return ReadReport(
            self.pages_wanted + other.pages_wanted,
            self.pages_read + other.pages_read,
            self.seeks + other.seeks,
            self.seconds + other.seconds,
        )


class PageReader:
    """Reads pages of one table file.

    Parameters
    ----------
    backend
        Storage backend of the table file.
    page_size
        Page size in bytes.
    device
        Cost of reads on its disk, which decides the plans.
    threads
        Reads in flight.
    max_scan
        Most disk pages in one read, gaps included.
    clock
        Clock in seconds, for the reports.
    """

    def __init__(
        self,
        backend: StorageBackend,
        page_size: int,
        device: DeviceModel,
        *,
        threads: int = 16,
        max_scan: int = 200,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend = backend
        self.page_size = page_size
        self.device = device
        self.threads = threads
        self.max_scan = max_scan
        self.clock = clock
        self._bounce = page_buffer(1, page_size)[:page_size]
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()  # reads may come from several threads
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Maximum bytes of memory for reading beside frames and plan: the bounce page and the vectors in flight."""
        return self.nbytes_at(self.max_scan)

    def nbytes_at(self, max_scan: int) -> int:
        """Return what `nbytes` would be if no read had more pages than this."""
        return self.page_size + self.threads * max_scan * _BYTES_PER_VECTOR

    def close(self) -> None:
        """Stop the threads. The backend is the caller's."""
        self._forget_parents_threads()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def plan(self, pages: NDArray[np.int64], max_scan: int | None = None) -> ReadPlan:
        """Return the cheapest plan for pages in ascending order; `max_scan` overrides that of the reader."""
        return plan_reads(pages, self.device.seek, self.device.transfer, max_scan or self.max_scan)

    def read(
        self,
        pages: NDArray[np.int64],
        frames: NDArray[np.uint8],
        frame_ids: NDArray[np.integer],
        checksums: NDArray[np.uint64] | None = None,
    ) -> ReadReport:
        """Read all pages by the cheapest plan.

        Parameters
        ----------
        pages
            int64[n], page numbers in ascending order, each once.
        frames
            Flat page-aligned buffer with slack after its end (`PageCache.buffer`, `page_buffer`).
        frame_ids
            Frame of each page.
        checksums
            uint64[n], what the parent's pointers say; without them a page is verified against itself only.

        Raises
        ------
        CorruptPageError
            If a page is not what was written.
        StorageIOError
            If the operating system refuses.
        """
        return self.read_plan(self.plan(pages), slice(None), pages, frames, frame_ids, checksums)

    def read_plan(
        self,
        plan: ReadPlan,
        part: slice,
        pages: NDArray[np.int64],
        frames: NDArray[np.uint8],
        frame_ids: NDArray[np.integer],
        checksums: NDArray[np.uint64] | None = None,
    ) -> ReadReport:
        """Run the reads `part` of a plan; `pages`, `frame_ids` and `checksums` are those of the whole plan.

        See `read` for the parameters and what is raised.
        """
        begin = self.clock()
        reads = range(*part.indices(len(plan)))
        if not reads:
            return ReadReport()
        job = _Job(self, plan, pages, frames, frame_ids, checksums)
        if len(reads) <= _FEW_READS or self.threads == 1:
            job.run(reads)
        else:
            self._share(job, reads)
        wanted = int(plan.first[reads[-1] + 1] - plan.first[reads[0]])
        length = int(plan.length[reads[0] : reads[-1] + 1].sum())
        return ReadReport(wanted, length, len(reads), self.clock() - begin)

    def fill(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        frames: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> None:
        """Read bytes from `offsets` on to `places` in the frames, several reads at a time; nothing is verified.

        Raises
        ------
        CorruptPageError
            If the file ends before.
        StorageIOError
            If the operating system refuses.
        """
        reads = range(len(offsets))
        job = _Fill(self, offsets, lengths, frames, places)
        if len(reads) <= _FEW_READS or self.threads == 1:
            job.run(reads)
        else:
            self._share(job, reads)

    def _forget_parents_threads(self) -> None:
        """Start over in a forked process, which has none of the threads, and whose lock may be held forever."""
        if self._process != os.getpid():
            self._starting = threading.Lock()
            self._pool = None
            self._process = os.getpid()

    def _share(self, job: _Shared, reads: range) -> None:
        self._forget_parents_threads()
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="headrace-read")
            pool = self._pool
        todo = iter(reads)  # one iterator for all threads: each takes the next read as soon as it is free
        workers = [pool.submit(job.run, todo) for _ in range(min(self.threads, len(reads)))]
        errors = [error for worker in workers if (error := worker.exception()) is not None]
        if errors:
            raise errors[0]


class _Shared(ABC):
    """Reads that several threads share."""

    def run(self, reads: Iterable[int]) -> None:
        """Make the reads that no other thread has taken yet."""
        todo = iter(reads)
        try:
            for read in todo:
                self.one(read)
        except BaseException:
            for _ in todo:  # leave nothing for the other threads
                pass
            raise

    @abstractmethod
    def one(self, read: int) -> None:
        """Make one read."""


class _Fill(_Shared):
    """Reads of adjacent pages to adjacent frames."""

    def __init__(
        self,
        reader: PageReader,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        frames: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> None:
        self._reader = reader
        self._offsets = offsets.tolist()
        self._lengths = lengths.tolist()
        self._frames = frames
        self._places = places.tolist()

    def one(self, read: int) -> None:
        offset, length, place = self._offsets[read], self._lengths[read], self._places[read]
        try:
            self._reader.backend.pread_into(offset, [self._frames[place : place + length]])
        except CorruptionError as error:
            size = self._reader.page_size
            raise CorruptPageError(f"page {offset // size} or one read with it: {error}") from error


class _Job(_Shared):
    """The reads of one plan into one set of frames. Runs in several threads."""

    def __init__(
        self,
        reader: PageReader,
        plan: ReadPlan,
        pages: NDArray[np.int64],
        frames: NDArray[np.uint8],
        frame_ids: NDArray[np.integer],
        checksums: NDArray[np.uint64] | None,
    ) -> None:
        self._reader = reader
        self._pages = np.ascontiguousarray(pages, dtype=np.int64)
        self._frames = frames
        self._ids = np.ascontiguousarray(frame_ids, dtype=np.int64)
        self._checksums = _UNKNOWN if checksums is None else np.ascontiguousarray(checksums, dtype=np.uint64)
        self._first = plan.first
        self._start = plan.start

    def one(self, read: int) -> None:
        low, high = int(self._first[read]), int(self._first[read + 1])
        start = int(self._start[read])
        try:
            self._reader.backend.pread_into(start * self._reader.page_size, list(self._vectors(low, high)))
        except CorruptionError as error:
            raise CorruptPageError(f"page {start} or one of the {high - low} wanted with it: {error}") from error
        pages = self._pages[low:high]
        size, ids = self._reader.page_size, self._ids[low:high]
        bad = int(verify_pages(self._frames, size, ids, pages, self._checksums[low:high]))
        if bad >= 0:
            raise page_damaged(int(pages[bad]), self._reader.backend.path)

    def _vectors(self, low: int, high: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the buffers of one read: runs of adjacent frames for wanted pages, the bounce page for the others."""
        size = self._reader.page_size
        pages, ids = self._pages[low:high].tolist(), self._ids[low:high].tolist()
        begin = 0
        for at in range(1, len(pages)):
            gap = pages[at] - pages[at - 1] - 1
            if gap or ids[at] != ids[at - 1] + 1:
                yield self._frames[ids[begin] * size : (ids[at - 1] + 1) * size]
                begin = at
            for _ in range(gap):
                yield self._reader._bounce  # noqa: SLF001 - the two are one
        yield self._frames[ids[begin] * size : (ids[-1] + 1) * size]


def page_damaged(page: int, path: str) -> CorruptPageError:
    """Return the error of a page whose checksum is wrong."""
    return CorruptPageError(
        f"page {page} of {path} is damaged: its checksum does not match; run `headrace table check` and restore the "
        "file or build it again"
    )
