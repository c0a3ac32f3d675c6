"""Compiled bookkeeping of the page cache. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import njit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["count_uses", "stamp_uses"]


@njit(cache=True, nogil=True)
def count_uses(score: NDArray[np.int64], frame: NDArray[np.int32]) -> None:
    """Add one for each time that a frame is named; negative numbers name none."""
    for i in range(len(frame)):
        if frame[i] >= 0:
            score[frame[i]] += 1


@njit(cache=True, nogil=True)
def stamp_uses(score: NDArray[np.int64], frame: NDArray[np.int32], now: int) -> None:
    """Write the time at which each frame was last named, one after the other from `now` on."""
    for i in range(len(frame)):
        if frame[i] >= 0:
            score[frame[i]] = now + i
