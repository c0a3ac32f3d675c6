"""Compiled steps of the join phase: reads laid out in the read buffer, and matches of the tuples that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["expand_found", "frames_of_places", "lay_out"]


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
    """Divide the reads of a plan into blocks of at most `most` pages each, its reads side by side.

    Parameters
    ----------
    start, length, first
        The plan: reads of at most `most` pages.
    pages : int64[n]
        That it was made for.
    number
        Of the first block: blocks take turns in the parts of the read buffer.
    most
        Pages in a block.
    parts
        Of the read buffer, with room for a block each.
    slots : int64[n]
        Becomes the frame of each page in the read buffer.
    blocks : int64[reads + 1]
        Becomes the first read of each block, and the number of reads at the end.

    Returns
    -------
    int
        How many blocks there are.
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
    """Write where the leaf of each tuple lies; return up to which tuple leaves are in the block.

    Parameters
    ----------
    place : int32[n]
        Of the tuples' leaves among all that are read, ascending.
    low
        First tuple that has not met its leaf.
    start, stop
        Places of the leaves in the block up to which tuples are wanted.
    slots : int32[m]
        Where these leaves lie.
    frame : int32[n - low]
        Filled from the front.
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
    """Fill the outputs with one entry for each result row, from `cursor` on; return how many.

    Parameters
    ----------
    frame, row, count : int32[n]
        Of `headrace.storage.leaf.decode.search`.
    outer
        Whether a tuple without a match gives a row of nulls, which lies in frame -1.
    cursor : int64[2]
        Next tuple, and how many of its matches are out already. Starts as zeros; the first is n when all are out.
    out_match
        Which tuple each result row belongs to.
    out_frame, out_row
        Where its relation row lies.
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
