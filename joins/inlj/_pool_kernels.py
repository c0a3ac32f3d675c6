"""Compiled buffer pool with least recently used replacement. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numba import njit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PoolMaps", "walk_pool"]


class PoolMaps(NamedTuple):
    """What a pool of `n` frames knows of them.

    Frames form a ring in order of use: ``after[n]`` is the least recently used one and ``before[n]`` the most recently
    used one.

    Attributes
    ----------
    frame_of : int32[leaves]
        Frame of each leaf, or -1.
    leaf_of : int32[n]
        Leaf in each frame, or -1.
    before, after : int32[n + 1]
        The ring.
    used : int64[n]
        Walk in which a frame was last requested.
    """

    frame_of: NDArray[np.int32]
    leaf_of: NDArray[np.int32]
    before: NDArray[np.int32]
    after: NDArray[np.int32]
    used: NDArray[np.int64]


@njit(cache=True, nogil=True)
def walk_pool(
    leaf: NDArray[np.int32],
    start: int,
    stamp: int,
    maps: PoolMaps,
    out_frame: NDArray[np.int32],
    missed: NDArray[np.int32],
) -> tuple[int, int]:
    """Assign a frame to each requested leaf, until a frame would be taken from a leaf requested in the same walk.

    Parameters
    ----------
    leaf : int32[m]
        Leaves in the order of the requests.
    start
        First request of this walk.
    stamp
        Number of this walk, greater than all before.
    maps
        Maps of the pool.
    out_frame : int32[m]
        Frame of each leaf, from `start` on.
    missed : int32[n]
        Frames whose leaf has to be read, in order of request.

    Returns
    -------
    stop, misses
        End of the walk, and number of leaves to read.
    """
    frame_of, leaf_of, before, after, used = maps
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
