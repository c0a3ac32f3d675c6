"""What allocators keep of freed memory, and how a process stays close to the memory that its joins account for."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Final

__all__ = ["ProcessMemory", "keep_little_freed_memory", "release_freed_memory", "reuse_freed_memory"]

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's `mallopt`
_LARGE = 4 << 20
_TOP = 2 << 20
_SLACK = 4 << 20
_AGAIN = 1 << 20
_NOTHING = 0


def keep_little_freed_memory() -> None:
    """Have the allocators of this process return large blocks when they are freed.

    This is for programs, not for libraries, to choose. Call it first in a program whose memory is limited, before
    pyarrow is loaded. Arrow then allocates from the system unless ``ARROW_DEFAULT_MEMORY_POOL`` says otherwise, and
    glibc maps blocks of 4 MiB and more by themselves, where it would otherwise keep up to 32 MiB of a size that was
    freed before. Smaller blocks are kept, since allocating them again costs time. So are 2 MiB at the end of a heap,
    where glibc would otherwise return the memory of each result and take it again for the next one. Other C libraries
    are left as they are.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _TOP)


def release_freed_memory() -> None:
    """Make the allocators return what they keep.

    Tuples, pages, and scratch arrays come from different allocators: Arrow's, the system's, the C library's. Each keeps
    freed memory for reuse, which the budget does not see. That matters where much memory changes hands: a join phase
    frees all tuples, and pages take their room.
    """
    import pyarrow as pa  # noqa: PLC0415 - `keep_little_freed_memory` runs before pyarrow is loaded

    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; Arrow's system pool does not call it
    if trim is not None:
        trim(0)


def reuse_freed_memory(nbytes: int) -> None:
    """Have the C library reuse blocks of up to `nbytes` bytes, instead of returning each and taking new pages.

    glibc does so for blocks up to the largest that was mapped and freed before; this one is never written. A program
    that called `keep_little_freed_memory` has a fixed limit, which stays.
    """
    import numpy as np  # noqa: PLC0415 - `keep_little_freed_memory` runs before anything heavy is loaded

    np.empty(nbytes, dtype=np.uint8)


class ProcessMemory:
    """The anonymous memory of this process, and a limit on how much it grows by what allocators keep.

    An account counts what is allocated. Memory that was freed and is kept by an allocator is not allocated, but still
    belongs to the process. It does no harm as long as both fit the limit. Beyond that the allocators return it.

    Parameters
    ----------
    limit
        Bytes by which the process may grow.
    """

    def __init__(self, limit: int) -> None:
        self._limit: Final = limit
        self._before = anonymous_nbytes()
        self._known = _NOTHING

    def settle(self) -> None:
        """Make the allocators return freed memory if the process has grown beyond the limit.

        What is left is in use, here or elsewhere in the process, for example by compiled kernels. So they are asked
        again as soon as the process has grown by another 1 MiB.
        """
        now = anonymous_nbytes()
        self._before = min(self._before, now)
        if now > max(self._before + self._limit + _SLACK, self._known + _AGAIN):
            self.give_back()

    def give_back(self) -> None:
        """Make the allocators return freed memory now."""
        release_freed_memory()
        self._known = anonymous_nbytes()


def anonymous_nbytes() -> int:
    """Return how much anonymous memory of this process is resident; 0 where the system does not say.

    Pages of files that the process has mapped, such as a stream that it reads, do not count: no allocator keeps them.
    """
    try:
        _, resident, of_files, *_ = os.pread(_sizes_of(os.getpid()), _LINE, 0).split()
    except OSError:
        return 0
    return (int(resident) - int(of_files)) * _PAGE


@lru_cache(maxsize=1)
def _sizes_of(_process: int) -> int:
    """Return the file with the sizes of this process, which stays open: opening it takes four times as long as reading.

    A process that was forked opens its own.
    """
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


_LINE: Final = 256  # bytes: seven numbers take less
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
