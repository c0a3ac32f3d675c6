"""`FrameMemory`: memory for page frames, in huge pages until some of it is given back."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.format.constants import SLACK

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SLACK_BYTES", "FrameMemory"]

SLACK_BYTES = SLACK
"""Bytes after the last frame, because kernels load eight bytes at a time."""


class FrameMemory:
    """Private memory that is taken when it is first written.

    Random lookups spend a third of their time on address translation if pages are small. But a huge page takes two
    megabytes when its first byte is written, and the system may fill it again after a part of it was given back. So
    only memory within the allowance is in huge pages, and none once something has been given back.

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
        """Allow the first `nbytes` to use memory; the first `written` of them have been in use so far."""
        if not self._whole:
            return
        if nbytes > self._allowed:
            self._prefer(mmap.MADV_HUGEPAGE, self._allowed, nbytes)
        else:
            self._prefer(mmap.MADV_NOHUGEPAGE, nbytes, self._allowed)
            self.give_back(max(nbytes, written), self._allowed)
        self._allowed = nbytes

    def break_up(self, written: int) -> None:
        """Use no huge pages from now on; memory after the first `written` bytes is still unused."""
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
