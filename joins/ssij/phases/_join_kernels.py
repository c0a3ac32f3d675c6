"""Compiled steps of the join phase: read buffer layout, matches of waiting tuples, and the choice of pages to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["choose_resident", "expand_found", "frames_of_places", "lay_out"]


@njit(cache=True, nogil=True)
def lay_out(
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    first: NDArray[np.int64],
    pages: NDArray[np.int64],
    number: int,
    most: int,
    parts: int,
    slots: NDArray[np.int64],
    blocks: NDArray[np.int64],
) -> int:
    """Divide the reads of a plan into blocks of at most `most` pages. The reads of a block lie side by side.

    Parameters
    ----------
    start, length, first
        Read plan, whose reads have at most `most` pages.
    pages : int64[n]
        Pages that it was made for.
    number
        Number of the first block. Blocks alternate between the parts of the read buffer.
    most
        Most pages in a block.
    parts
        Parts of the read buffer, each with room for a block.
    slots : int64[n]
        Output: frame of each page in the read buffer.
    blocks : int64[reads + 1]
        Output: first read of each block, and the number of reads at the end.

    Returns
    -------
    int
        Number of blocks.
    """
    count = 0
    used = np.int64(0)
    blocks[0] = 0
    for read in range(len(start)):
        if used + length[read] > most:
            count += 1
            blocks[count] = read
            used = np.int64(0)
        for page in range(first[read], first[read + 1]):
            slots[page] = most * ((number + count) % parts) + used + pages[page] - start[read]
        used += length[read]
    count += 1
    blocks[count] = len(start)
    return count


@njit(cache=True, nogil=True)
def frames_of_places(
    place: NDArray[np.int32], low: int, start: int, stop: int, slots: NDArray[np.int32], frame: NDArray[np.int32]
) -> int:
    """Write the frame of each tuple's leaf. Return the first tuple whose leaf is not in the block.

    Parameters
    ----------
    place : int32[n]
        Places of the tuples' leaves among all leaves to read, ascending.
    low
        First tuple that has not met its leaf.
    start, stop
        First place in the block, and the place up to which tuples are wanted.
    slots : int32[m]
        Frames of the block's leaves.
    frame : int32[n - low]
        Output, filled from the front.
    """
    i = low
    while i < len(place) and place[i] < stop:
        frame[i - low] = slots[place[i] - start]
        i += 1
    return i


@njit(cache=True, nogil=True)
def expand_found(
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    count: NDArray[np.int32],
    outer: bool,
    cursor: NDArray[np.int64],
    out_match: NDArray[np.int32],
    out_frame: NDArray[np.int32],
    out_row: NDArray[np.int32],
) -> int:
    """Fill the outputs with one entry for each result row, from `cursor` on. Return how many.

    Parameters
    ----------
    frame, row, count : int32[n]
        Result of `headrace.storage.leaf.decode.search`.
    outer
        Whether a tuple without a match gives a row of nulls, which lies in frame -1.
    cursor : int64[2]
        Next tuple, and how many of its matches were written. Starts as zeros; the first is n at the end.
    out_match
        Tuple of each result row.
    out_frame, out_row
        Frame and row of its relation row.
    """
    size = 0
    i, done = cursor[0], cursor[1]
    while i < len(frame) and size < len(out_match):
        if count[i] == 0 and outer:
            out_match[size] = i
            out_frame[size] = -1
            out_row[size] = 0
            size += 1
        while done < count[i] and size < len(out_match):
            out_match[size] = i
            out_frame[size] = frame[i]
            out_row[size] = row[i] + np.int32(done)
            size += 1
            done += 1
        if done >= count[i]:
            i += 1
            done = 0
    cursor[0], cursor[1] = i, done
    return size


@njit(cache=True, nogil=True)
def _at_least(
    demand: NDArray[np.int32], leaves: NDArray[np.int32], newest: bool, resident: NDArray[np.int64], score: int
) -> int:
    """Count the pages whose score is at least `score`."""
    count = 0
    for i in range(len(resident)):
        count += resident[i] >= score
    if newest:
        return count + len(leaves)
    for i in range(len(leaves)):
        count += demand[leaves[i]] >= score
    return count


@njit(cache=True, nogil=True)
def _least_score(
    demand: NDArray[np.int32], leaves: NDArray[np.int32], newest: bool, resident: NDArray[np.int64], capacity: int
) -> np.int64:
    """Return the score of the worst page that stays: at least `capacity` pages have this score or more."""
    low = np.int64(0)
    high = np.int64(1)
    for i in range(len(resident)):
        high = max(high, resident[i] + 1)
    if not newest:
        for i in range(len(leaves)):
            high = max(high, np.int64(demand[leaves[i]]) + 1)
    while high - low > 1:
        middle = (low + high) >> 1
        if _at_least(demand, leaves, newest, resident, middle) >= capacity:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def choose_resident(
    demand: NDArray[np.int32],
    leaves: NDArray[np.int32],
    newest: bool,
    resident: NDArray[np.int64],
    capacity: int,
    keep: NDArray[np.bool_],
    remove: NDArray[np.bool_],
) -> None:
    """Decide which pages a join phase leaves in the cache, in constant extra memory.

    Parameters
    ----------
    demand : int32[leaves of the table]
        Utility of the pages that will be read.
    leaves : int32[m]
        Those pages.
    newest
        Whether they are worth more than any cached page whatever their utility (LRU).
    resident : int64[n]
        Scores of the cached pages.
    capacity
        Pages that the cache will hold in the end.
    keep : bool[m], remove : bool[n]
        Output: the paper's ToKeep and ToRemove. Among equal pages the cached ones stay, then those read last.
    """
    keep[:] = True
    remove[:] = False
    if len(leaves) + len(resident) <= capacity:
        return
    if newest and len(leaves) >= capacity:
        remove[:] = True
        keep[: len(leaves) - capacity] = False
        return
    low = _least_score(demand, leaves, newest, resident, capacity)
    quota = capacity - _at_least(demand, leaves, newest, resident, low + 1)
    for i in range(len(resident)):
        if resident[i] == low and quota > 0:
            quota -= 1
        elif resident[i] <= low:
            remove[i] = True
    if newest:
        return
    for at in range(len(leaves)):
        i = len(leaves) - 1 - at
        if demand[leaves[i]] == low and quota > 0:
            quota -= 1
        elif demand[leaves[i]] <= low:
            keep[i] = False
