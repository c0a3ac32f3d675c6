"""`FrameMemory`: memory for page frames, in huge pages as long as nothing of it was given back."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SLACK_BYTES", "FrameMemory"]

SLACK_BYTES = 8
"""Bytes behind the last frame that a kernel may load, so that it can read any value as eight bytes."""


class FrameMemory:
    """Private memory that is taken when it is first written.

    Look-ups in no order spend a third of their time on finding where in memory small pages are. But a huge page takes
    two megabytes when its first byte is written, and where a part of it is given back the system may fill it again. So
    only memory that may be used anyway is in huge pages, and none any more once something has been given back.

    Parameters
    ----------
    size
        Bytes of the frames.

    Attributes
    ----------
    buffer : uint8[size + SLACK_BYTES], page-aligned
    """

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size + SLACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._prefer(mmap.MADV_NOHUGEPAGE, 0, size + SLACK_BYTES)
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        self._allowed = 0
        self._whole = True

    def allow(self, nbytes: int, written: int) -> None:
        """Let the first `nbytes` take memory, of which the first `written` have been in use so far."""
        if not self._whole:
            return
        if nbytes > self._allowed:
            self._prefer(mmap.MADV_HUGEPAGE, self._allowed, nbytes)
        else:
            self._prefer(mmap.MADV_NOHUGEPAGE, nbytes, self._allowed)
            self.give_back(max(nbytes, written), self._allowed)
        self._allowed = nbytes

    def break_up(self, written: int) -> None:
        """Have no huge pages from now on; what is behind the first `written` bytes holds nothing yet."""
        if self._whole:
            self.allow(0, written)
            self._whole = False

    def give_back(self, start: int, stop: int) -> None:
        """Give memory back; it holds zeros when it is taken again."""
        if start < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _prefer(self, advice: int, start: int, stop: int) -> None:
        with contextlib.suppress(OSError):  # a system without huge pages
            if start < stop:
                self._memory.madvise(advice, start, stop - start)
