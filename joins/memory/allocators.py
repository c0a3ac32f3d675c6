"""How to keep a process close to the memory that its joins account for: allocators keep what was freed."""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_little_freed_memory", "release_freed_memory"]

_MMAP_THRESHOLD = -3  # a parameter of glibc's `mallopt`
_LARGE = 4 << 20


def keep_little_freed_memory() -> None:
    """Have the allocators of this process return large blocks when they are freed.

    This is for programs, not for libraries, to choose. Call it first in a program whose memory is limited, before
    pyarrow is loaded. Arrow then allocates from the system unless ``ARROW_DEFAULT_MEMORY_POOL`` says otherwise, and
    glibc maps blocks of 4 MiB and more by themselves, where it would otherwise keep up to 32 MiB of a size that was
    freed before. Smaller blocks are kept, since allocating them again costs time. Other C libraries are left as they
    are.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)


def release_freed_memory(nbytes: int) -> None:
    """Make the allocators return what they keep, if `nbytes` bytes were freed and that many are worth the time.

    Tuples, pages, and scratch arrays come from different allocators: Arrow's, the system's, the C library's. Each keeps
    freed memory for reuse, which the budget does not see. That matters where much memory changes hands: a join phase
    frees all tuples, and pages take their room.
    """
    import pyarrow as pa  # noqa: PLC0415 - `keep_little_freed_memory` runs before pyarrow is loaded

    if nbytes >= _LARGE:
        pa.default_memory_pool().release_unused()
        pa.system_memory_pool().release_unused()  # the C library's, where numpy's arrays come from
