"""Compiled steps of the inverted index: which leaves tuples wait for, and which tuples wait for the leaves read.

A *leaf run* is a range of leaves, ``first[i]`` to ``last[i]``, that stream tuple `i` still has to meet. Runs are sorted
by their first leaf. Where tuples look for keys, or for ranges of one width, their last leaves ascend as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.read import value_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.read import LeafNumbers

__all__ = [
    "add_demand",
    "cached_pairs",
    "collect_pairs",
    "count_leaf_runs",
    "list_leaf_runs",
    "merge_demand",
    "reading_cost",
    "union_of_runs",
    "wanted_leaves",
]


@njit(cache=True, nogil=True)
def count_leaf_runs(
    first: NDArray[np.int32], last: NDArray[np.int32], frame_of: LeafNumbers, runs: NDArray[np.int32]
) -> int:
    """Write how many runs of uncached leaves each tuple has. Return the number of cached leaves of all tuples."""
    cached = 0
    for i in range(len(first)):
        count = 0
        inside = False
        for leaf in range(first[i], last[i] + 1):
            if value_at(frame_of, leaf) >= 0:
                cached += 1
                inside = False
            elif not inside:
                count += 1
                inside = True
        runs[i] = count
    return cached


@njit(cache=True, nogil=True)
def cached_pairs(
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    frame_of: LeafNumbers,
    cursor: NDArray[np.int64],
    out_tuple: NDArray[np.int32],
    out_frame: NDArray[np.int32],
) -> int:
    """Fill the outputs with (tuple, frame) pairs of cached leaves from `cursor` (tuple, leaf) on. Return how many.

    0 means the end.
    """
    size = 0
    i = cursor[0]
    leaf = cursor[1]
    while i < len(first) and size < len(out_tuple):
        leaf = max(leaf, np.int64(first[i]))
        while leaf <= last[i] and size < len(out_tuple):
            if value_at(frame_of, leaf) >= 0:
                out_tuple[size] = i
                out_frame[size] = value_at(frame_of, leaf)
                size += 1
            leaf += 1
        if leaf > last[i]:
            i += 1
            leaf = 0
    cursor[0] = i
    cursor[1] = leaf
    return size


@njit(cache=True, nogil=True)
def list_leaf_runs(
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    frame_of: LeafNumbers,
    waiting: NDArray[np.int32],
    out_first: NDArray[np.int32],
    out_last: NDArray[np.int32],
    out_tuple: NDArray[np.int32],
) -> None:
    """Write the runs of uncached leaves of the tuples `waiting`; `count_leaf_runs` has counted them."""
    size = 0
    for at in range(len(waiting)):
        i = waiting[at]
        inside = False
        for leaf in range(first[i], last[i] + 1):
            if value_at(frame_of, leaf) >= 0:
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
    """Add 1 to the demand for each leaf of each run. Return how many leaves had no demand before."""
    fresh = 0
    for i in range(len(first)):
        for leaf in range(first[i], last[i] + 1):
            fresh += demand[leaf] == 0
            demand[leaf] += 1
    return fresh


@njit(cache=True, nogil=True)
def union_of_runs(
    first: NDArray[np.int32], last: NDArray[np.int32], leaves: NDArray[np.int32], demand: NDArray[np.int32]
) -> int:
    """List the leaves of all runs, ascending, and how many runs have each. Return how many leaves there are.

    With empty outputs, only count them. `first` ascends.
    """
    size = 0
    begin = np.int64(0)  # first leaf of the stretch of leaves that overlapping runs cover, and the place of that leaf
    place = 0
    end = np.int64(-1)
    for i in range(len(first)):
        if first[i] >= end:
            begin, place, end = np.int64(first[i]), size, np.int64(first[i])
        for leaf in range(end, last[i] + 1):
            if len(leaves):
                leaves[size] = leaf
                demand[size] = 0
            size += 1
        end = max(end, np.int64(last[i]) + 1)
        if len(leaves):
            for leaf in range(first[i], last[i] + 1):
                demand[place + leaf - begin] += 1
    return size


@njit(cache=True, nogil=True)
def merge_demand(
    leaves: NDArray[np.int32],
    demand: NDArray[np.int32],
    more: NDArray[np.int32],
    more_demand: NDArray[np.int32],
    out_leaves: NDArray[np.int32],
    out_demand: NDArray[np.int32],
) -> int:
    """Merge two ascending lists of leaves and add the demands of leaves that both have. Return how many there are."""
    i = j = size = 0
    while i < len(leaves) or j < len(more):
        left = i < len(leaves) and (j == len(more) or leaves[i] <= more[j])
        right = j < len(more) and (i == len(leaves) or more[j] <= leaves[i])
        out_leaves[size] = leaves[i] if left else more[j]
        out_demand[size] = (demand[i] if left else 0) + (more_demand[j] if right else 0)
        size += 1
        i += left
        j += right
    return size


@njit(cache=True, nogil=True)
def _first_reaching(last: NDArray[np.int32], leaf: int, low: int) -> int:
    """Return the first run from `low` on that does not end before `leaf`, by galloping search."""
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
    out_run: NDArray[np.int32],
    out_frame: NDArray[np.int32],
) -> int:
    """Fill the outputs with (run, frame) pairs for the leaves just read, from `cursor` on. Return how many.

    Parameters
    ----------
    first, last : int32[n]
        Leaf runs; `first` ascends.
    ascends
        Whether `last` ascends too, so that many runs can be skipped at a time.
    leaves, frames : int32[p]
        Leaves read, ascending, and their frames.
    cursor : int64[3]
        Run, least place in `leaves` where it can begin, and next place in `leaves` for it. Starts as zeros.

    Returns
    -------
    int
        Number of pairs; 0 at the end.
    """
    size = 0
    i, start, j = cursor[0], cursor[1], cursor[2]
    while i < len(first) and start < len(leaves) and size < len(out_run):
        if last[i] < leaves[start]:
            i = _first_reaching(last, leaves[start], i) if ascends else i + 1
            j = start
            continue
        while start < len(leaves) and leaves[start] < first[i]:
            start += 1
        j = max(j, start)
        while j < len(leaves) and leaves[j] <= last[i] and size < len(out_run):
            out_run[size] = i
            out_frame[size] = frames[j]
            size += 1
            j += 1
        if j == len(leaves) or leaves[j] > last[i]:
            i += 1
            j = start
    cursor[0], cursor[1], cursor[2] = i, start, j
    return size


@njit(cache=True, nogil=True)
def wanted_leaves(
    demand: NDArray[np.int32],
    disk_order: NDArray[np.int32],
    pages: NDArray[np.int64],
    head: int,
    planned: NDArray[np.int32],
    everything: bool,
    widest: float,
    out: NDArray[np.int32],
) -> int:
    """List leaves with a demand in disk order. Return how many there are.

    Parameters
    ----------
    demand : int32[leaves of the table]
        Number of tuples that wait for each leaf.
    disk_order : int32[leaves of the table]
        Leaves in the order of their pages; empty if that is the key order.
    pages : int64[leaves of the table]
        Page of each leaf.
    head
        Leaves on pages before this one are left out.
    planned : int32[n]
        Leaves with a demand from `head` on, in disk order.
    everything
        Whether to list all leaves with a demand. Otherwise, those of the plan, and those between two of them with at
        most `widest` pages in between.
    out
        Output: the leaves.
    """
    size = 0
    at = 0
    last = np.int64(-1)
    for i in range(len(demand)):
        leaf = i if len(disk_order) == 0 else disk_order[i]
        if demand[leaf] == 0 or pages[leaf] < head:
            continue
        if everything:
            out[size] = leaf
            size += 1
        elif at < len(planned) and planned[at] == leaf:
            out[size] = leaf
            size += 1
            at += 1
            last = pages[leaf]
        elif at == len(planned):
            break
        elif last >= 0 and pages[planned[at]] - last - 1 <= widest:
            out[size] = leaf
            size += 1
    return size


@njit(cache=True, nogil=True)
def reading_cost(
    demand: NDArray[np.int32], disk_order: NDArray[np.int32], pages: NDArray[np.int64], seek: float, transfer: float
) -> float:
    """Return the seconds of reading the leaves with a demand: each gap between them is read over or jumped.

    `pages` is the place of each leaf on disk; `disk_order` is as for `wanted_leaves`.
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
