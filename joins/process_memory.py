"""How a process keeps close to the memory that its joins were given: for programs, not for libraries, to choose."""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_little_freed_memory"]

_MMAP_THRESHOLD = -3  # of glibc's `mallopt`
_LARGE = 4 << 20


def keep_little_freed_memory() -> None:
    """Have the allocators of this process return large blocks when they are freed.

    Call it first in a program whose memory is limited, before pyarrow is loaded. Arrow's memory is then the system's
    unless ``ARROW_DEFAULT_MEMORY_POOL`` says otherwise; and glibc maps blocks of 4 MiB and more by themselves, where it
    would keep up to 32 MiB of a size that it has seen freed. Smaller blocks are kept: to have them anew costs time.
    Other C libraries are left as they are.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
