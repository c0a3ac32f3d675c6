"""Compiled buffer pool with least recently used replacement, walked in the order of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import njit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["walk_pool"]


@njit(cache=True, nogil=True)
def walk_pool(
    leaf: NDArray[np.int32],
    start: int,
    stamp: int,
    frame_of: NDArray[np.int32],
    leaf_of: NDArray[np.int32],
    before: NDArray[np.int32],
    after: NDArray[np.int32],
    used: NDArray[np.int64],
    out_frame: NDArray[np.int32],
    missed: NDArray[np.int32],
) -> tuple[int, int]:
    """Give each wanted leaf a frame, until a frame would have to be taken from a leaf wanted in this same walk.

    Frames form a ring in order of use: ``after[n]`` is the one used longest ago, ``before[n]`` the latest, for `n`
    frames.

    Parameters
    ----------
    leaf : int32[m]
        Leaves in the order in which they are wanted.
    start
        Where to begin.
    stamp
        Number of this walk, greater than all before.
    frame_of : int32[leaves]
        Frame of each leaf or -1.
    leaf_of : int32[n]
        Leaf in each frame or -1.
    before, after : int32[n + 1]
        The ring.
    used : int64[n]
        Walk in which a frame was last wanted.
    out_frame : int32[m]
        Frame of each leaf, from `start` on.
    missed : int32[n]
        Frames whose leaf has to be read, in the order of wanting.

    Returns
    -------
    stop, misses
        Where the walk ended, and how many leaves it missed.
    """
    end = len(leaf_of)
    misses = 0
    for i in range(start, len(leaf)):
        frame = frame_of[leaf[i]]
        if frame < 0:
            frame = after[end]
            if used[frame] == stamp:
                return i, misses
            if leaf_of[frame] >= 0:
                frame_of[leaf_of[frame]] = -1
            leaf_of[frame] = leaf[i]
            frame_of[leaf[i]] = frame
            missed[misses] = frame
            misses += 1
        out_frame[i] = frame
        used[frame] = stamp
        if before[end] != frame:
            after[before[frame]] = after[frame]
            before[after[frame]] = before[frame]
            latest = before[end]
            after[latest] = frame
            before[frame] = latest
            after[frame] = end
            before[end] = frame
    return len(leaf), misses
