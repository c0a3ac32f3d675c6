"""Compiled steps from the keys of stream tuples to result rows. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "all_pairs",
    "in_key_order",
    "outer_matches",
    "pack_positions",
    "place_matches",
    "runs_between",
    "unpack_positions",
]


@njit(cache=True, nogil=True)
def pack_positions(
    prefix: NDArray[np.uint64], valid: NDArray[np.bool_], low: np.uint64, high: np.uint64, shift: int, bits: int
) -> NDArray[np.uint64]:
    """Return one sortable word for each valid tuple: the leading bits of its key above its position.

    Keys are clipped to ``[low, high]`` and lose `shift` low bits, so the order is that of the keys except for near
    ties. `valid` is empty if all tuples are valid.
    """
    rows = len(prefix)
    packed = np.empty(rows, dtype=np.uint64)
    every = len(valid) == 0
    size = 0
    for i in range(rows):
        if every or valid[i]:
            key = min(max(prefix[i], low), high) - low
            packed[size] = ((key >> np.uint64(shift)) << np.uint64(bits)) | np.uint64(i)
            size += 1
    return packed[:size]


@njit(cache=True, nogil=True)
def unpack_positions(packed: NDArray[np.uint64], bits: int) -> NDArray[np.int32]:
    """Return the positions in sorted words."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    order = np.empty(len(packed), dtype=np.int32)
    for i in range(len(packed)):
        order[i] = np.int32(packed[i] & mask)
    return order


@njit(cache=True, nogil=True)
def place_matches(
    order: NDArray[np.int32],
    frame: NDArray[np.int32],
    count: NDArray[np.int32],
    outer: bool,
    place: NDArray[np.int32],
) -> None:
    """Write the match of each tuple of a batch, as an index into the probes, which are in key order.

    Tuples whose page is not in memory keep their -1. With `outer`, tuples whose page has no match get -2.
    """
    for i in range(len(order)):
        if frame[i] >= 0:
            if count[i] > 0:
                place[order[i]] = i
            elif outer:
                place[order[i]] = -2


@njit(cache=True, nogil=True)
def in_key_order(
    place: NDArray[np.int32],
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    target: NDArray[np.int32],
    out_frame: NDArray[np.int32],
    out_row: NDArray[np.int32],
    out_index: NDArray[np.int32],
) -> tuple[int, int]:
    """List the relation rows of some tuples in key order, so that gathering them passes through memory once.

    Parameters
    ----------
    place : int32[m]
        Result of `place_matches`.
    frame, row : int32[n]
        Frame and row of the probes.
    target : int32[n]
        Scratch, all -1, restored before returning.
    out_frame, out_row : int32[m + 1]
        Rows to gather. A row of nulls (frame -1) comes last if any tuple needs it.
    out_index : int32[m]
        Gathered row of each tuple that has a result.

    Returns
    -------
    gathered, results
    """
    results = 0
    nulls = 0
    for i in range(len(place)):
        if place[i] >= 0:
            target[place[i]] = results
            results += 1
        elif place[i] == -2:  # noqa: PLR2004 - a row of nulls
            out_index[results] = -1
            results += 1
            nulls += 1
    gathered = 0
    for i in range(len(target)):
        if target[i] >= 0:
            out_frame[gathered] = frame[i]
            out_row[gathered] = row[i]
            out_index[target[i]] = gathered
            gathered += 1
            target[i] = -1
    if nulls > 0:
        out_frame[gathered] = -1
        out_row[gathered] = 0
        for i in range(results):
            if out_index[i] < 0:
                out_index[i] = gathered
        gathered += 1
    return gathered, results


@njit(cache=True, nogil=True)
def outer_matches(frame: NDArray[np.int32], count: NDArray[np.int32], outer: bool) -> None:
    """Drop matches in pages that are not in memory. With `outer`, give tuples without a match a row of nulls."""
    for i in range(len(frame)):
        if frame[i] < 0:
            count[i] = 0
        elif outer and count[i] == 0:
            count[i] = 1
            frame[i] = -1


@njit(cache=True, nogil=True)
def runs_between(
    ends: NDArray[np.int64],
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    start: int,
    stop: int,
    first: int,
    out_match: NDArray[np.int32],
    out_frame: NDArray[np.int32],
    out_row: NDArray[np.int32],
    out_ends: NDArray[np.int64],
) -> int:
    """List the runs of relation rows that the result rows from `start` to `stop` are. Return how many.

    Parameters
    ----------
    ends : int64[n]
        Number of result rows up to the last one of each match.
    frame, row : int32[n]
        Frame and first row of the matches.
    first
        Match that result row `start` belongs to.
    out_match, out_frame, out_row : int32[m]
        Match of each run, its frame and its first row. There is room for all matches that have rows in the range, and
        for those between them.
    out_ends : int64[m]
        Number of rows from `start` up to the last one of each run; strictly ascending.
    """
    size = 0
    begin = start
    while begin < stop:
        end = min(ends[first], stop)
        if end > begin:
            before = ends[first - 1] if first > 0 else 0
            out_match[size] = first
            out_frame[size] = frame[first]
            out_row[size] = row[first] + np.int32(begin - before)
            out_ends[size] = end - start
            size += 1
            begin = end
        first += 1
    return size


@njit(cache=True, nogil=True)
def all_pairs(
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    cursor: NDArray[np.int64],
    out_tuple: NDArray[np.int32],
    out_leaf: NDArray[np.int32],
) -> int:
    """Fill the outputs with (tuple, leaf) pairs from `cursor` (tuple, leaf) on. Return how many; 0 at the end."""
    size = 0
    i = cursor[0]
    leaf = cursor[1]
    while i < len(first) and size < len(out_tuple):
        leaf = max(leaf, np.int64(first[i]))
        while leaf <= last[i] and size < len(out_tuple):
            out_tuple[size] = i
            out_leaf[size] = leaf
            size += 1
            leaf += 1
        if leaf > last[i]:
            i += 1
            leaf = 0
    cursor[0] = i
    cursor[1] = leaf
    return size
