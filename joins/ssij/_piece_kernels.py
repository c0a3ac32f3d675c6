"""Compiled steps of the stream buffer: which leaves tuples wait for, and which tuples wait for the leaves read.

A *piece* is a run of leaves, ``first[i]`` to ``last[i]``, that stream tuple `i` still has to meet. Pieces are sorted by
their first leaf. Where tuples look for keys, or for ranges of one width, their last leaves ascend as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "add_demand",
    "cached_pairs",
    "collect_pairs",
    "count_pieces",
    "reading_cost",
    "settle_pages",
    "split_pieces",
    "wanted_leaves",
]


@njit(cache=True, nogil=True)
def count_pieces(
    first: NDArray[np.int32], last: NDArray[np.int32], frame_of: NDArray[np.int32], pieces: NDArray[np.int32]
) -> int:
    """Write how many runs of uncached leaves each tuple has; return the cached leaves of all tuples."""
    cached = 0
    for i in range(len(first)):
        runs = 0
        inside = False
        for leaf in range(first[i], last[i] + 1):
            if frame_of[leaf] >= 0:
                cached += 1
                inside = False
            elif not inside:
                runs += 1
                inside = True
        pieces[i] = runs
    return cached


@njit(cache=True, nogil=True)
def cached_pairs(
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    frame_of: NDArray[np.int32],
    cursor: NDArray[np.int64],
    out_tuple: NDArray[np.int32],
    out_frame: NDArray[np.int32],
) -> int:
    """Fill the outputs with (tuple, frame) for cached leaves from `cursor` (tuple, leaf) on; return how many.

    0 means that there are no more.
    """
    size = 0
    i = cursor[0]
    leaf = cursor[1]
    while i < len(first) and size < len(out_tuple):
        leaf = max(leaf, np.int64(first[i]))
        while leaf <= last[i] and size < len(out_tuple):
            if frame_of[leaf] >= 0:
                out_tuple[size] = i
                out_frame[size] = frame_of[leaf]
                size += 1
            leaf += 1
        if leaf > last[i]:
            i += 1
            leaf = 0
    cursor[0] = i
    cursor[1] = leaf
    return size


@njit(cache=True, nogil=True)
def split_pieces(
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    frame_of: NDArray[np.int32],
    waiting: NDArray[np.int32],
    out_first: NDArray[np.int32],
    out_last: NDArray[np.int32],
    out_tuple: NDArray[np.int32],
) -> None:
    """Write the runs of uncached leaves of the tuples `waiting`; their number is known from `count_pieces`."""
    size = 0
    for at in range(len(waiting)):
        i = waiting[at]
        inside = False
        for leaf in range(first[i], last[i] + 1):
            if frame_of[leaf] >= 0:
                inside = False
                continue
            if not inside:
                out_first[size] = leaf
                out_tuple[size] = at
                size += 1
                inside = True
            out_last[size - 1] = leaf


@njit(cache=True, nogil=True)
def add_demand(first: NDArray[np.int32], last: NDArray[np.int32], demand: NDArray[np.int32]) -> int:
    """Add 1 to the demand for each leaf of each piece; return how many leaves had none before."""
    fresh = 0
    for i in range(len(first)):
        for leaf in range(first[i], last[i] + 1):
            fresh += demand[leaf] == 0
            demand[leaf] += 1
    return fresh


@njit(cache=True, nogil=True)
def _first_reaching(last: NDArray[np.int32], leaf: int, low: int) -> int:
    """Return the first piece from `low` on that does not end before `leaf`, galloping."""
    step = 1
    while low + step <= len(last) and last[low + step - 1] < leaf:
        low += step
        step += step
    high = min(low + step, len(last))
    while low < high:
        middle = (low + high) >> 1
        if last[middle] < leaf:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def collect_pairs(
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    ascends: bool,
    leaves: NDArray[np.int32],
    frames: NDArray[np.int32],
    cursor: NDArray[np.int64],
    out_piece: NDArray[np.int32],
    out_frame: NDArray[np.int32],
) -> int:
    """Fill the outputs with (piece, frame) for the leaves just read, from `cursor` on; return how many.

    Parameters
    ----------
    first, last : int32[n]
        Pieces; `first` ascends.
    ascends
        Whether `last` does, too, so that pieces can be skipped many at a time.
    leaves, frames : int32[p]
        Leaves read, ascending, and where they are.
    cursor : int64[3]
        Piece, least place in `leaves` that it can begin at, and next place in `leaves` for it. Starts as zeros.

    Returns
    -------
    int
        0 means that there are no more.
    """
    size = 0
    i, start, j = cursor[0], cursor[1], cursor[2]
    while i < len(first) and start < len(leaves) and size < len(out_piece):
        if last[i] < leaves[start]:
            i = _first_reaching(last, leaves[start], i) if ascends else i + 1
            j = start
            continue
        while start < len(leaves) and leaves[start] < first[i]:
            start += 1
        j = max(j, start)
        while j < len(leaves) and leaves[j] <= last[i] and size < len(out_piece):
            out_piece[size] = i
            out_frame[size] = frames[j]
            size += 1
            j += 1
        if j == len(leaves) or leaves[j] > last[i]:
            i += 1
            j = start
    cursor[0], cursor[1], cursor[2] = i, start, j
    return size


@njit(cache=True, nogil=True)
def wanted_leaves(demand: NDArray[np.int32], disk_order: NDArray[np.int32], out: NDArray[np.int32]) -> int:
    """List the leaves with a demand in the order of the disk; return how many there are.

    `disk_order` is empty if leaves lie on disk in key order.
    """
    size = 0
    for i in range(len(demand)):
        leaf = i if len(disk_order) == 0 else disk_order[i]
        if demand[leaf] > 0:
            out[size] = leaf
            size += 1
    return size


@njit(cache=True, nogil=True)
def reading_cost(
    demand: NDArray[np.int32], disk_order: NDArray[np.int32], pages: NDArray[np.int64], seek: float, transfer: float
) -> float:
    """Return the seconds of reading the leaves with a demand: each gap between them is read over or jumped.

    `pages` says where each leaf lies; `disk_order` is as of `wanted_leaves`.
    """
    cost = 0.0
    last = np.int64(-1)
    for i in range(len(demand)):
        leaf = i if len(disk_order) == 0 else disk_order[i]
        if demand[leaf] > 0:
            way = np.float64(pages[leaf] - last) * transfer
            cost += min(way, seek + transfer) if last >= 0 else seek + transfer
            last = pages[leaf]
    return cost


@njit(cache=True, nogil=True)
def _at_least(
    demand: NDArray[np.int32], leaves: NDArray[np.int32], newest: bool, resident: NDArray[np.int64], score: int
) -> int:
    """Count the pages whose score is at least this."""
    count = 0
    for i in range(len(resident)):
        count += resident[i] >= score
    if newest:
        return count + len(leaves)
    for i in range(len(leaves)):
        count += demand[leaves[i]] >= score
    return count


@njit(cache=True, nogil=True)
def settle_pages(
    demand: NDArray[np.int32],
    leaves: NDArray[np.int32],
    newest: bool,
    resident: NDArray[np.int64],
    capacity: int,
    keep: NDArray[np.bool_],
    remove: NDArray[np.bool_],
) -> None:
    """Settle which pages a join phase leaves in the cache, in constant extra memory.

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
        Pages that the cache is to hold in the end.
    keep : bool[m], remove : bool[n]
        Set to the paper's ToKeep and ToRemove. Of equal pages those in the cache stay, then those read last.
    """
    keep[:] = True
    remove[:] = False
    if len(leaves) + len(resident) <= capacity:
        return
    if newest and len(leaves) >= capacity:
        remove[:] = True
        keep[: len(leaves) - capacity] = False
        return
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
