"""Compiled steps of DINER's flushing policy. Arrays in, arrays out.

Entries are the sorted entries of an input, `slots` the slots of their tuples, and `room` the bytes that a block may
still hold. A block that has no tuple yet takes one of any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format import I64, load_u64

if TYPE_CHECKING:
    from headrace.storage.format import Bytes, Int32s, Int64s

__all__ = ["StoredRows", "credit", "sweep", "take_run"]

_U32 = np.uint64(0xFFFFFFFF)


class StoredRows(NamedTuple):
    """Records of tuples in memory, as arguments of kernels; see `headrace.joins.streams.tuples.layout.RowLayout`."""

    records: Bytes
    heap: Bytes
    stride: int
    heap_at: int
    flags_at: int


@njit(inline="always")
def _size(rows: StoredRows, slot: int) -> int:
    """Return the bytes of a tuple in a block."""
    if rows.heap_at < 0:
        return rows.stride
    at = I64(load_u64(rows.records, slot * rows.stride + rows.heap_at))
    return rows.stride + I64((load_u64(rows.heap, at) >> np.uint64(32)) & _U32)


@njit(cache=True, nogil=True)
def credit(
    records: Bytes, stride: int, word_at: int, index: Int64s, lower: int, upper: int, bounded: bool, joins: Int64s
) -> None:
    """Add one to the join counter of the region of each chosen tuple.

    Parameters
    ----------
    records, stride, word_at, index
        Tuples, where their records have the key word, and which of them; a tuple may be chosen repeatedly.
    lower, upper, bounded
        Boundaries of the regions; without boundaries all tuples are in the middle.
    joins : int64[3]
        Counters of the lower, middle and upper region.
    """
    low, high = np.uint64(lower), np.uint64(upper)
    for i in range(len(index)):
        region = 1
        if bounded:
            word = load_u64(records, index[i] * stride + word_at)
            if word >= high:
                region = 2
            elif word <= low:
                region = 0
        joins[region] += 1


@njit(cache=True, nogil=True)
def take_run(
    slots: Int32s, start: int, stop: int, step: int, rows: StoredRows, room: int, first: bool, chosen: Int64s
) -> tuple[int, int, bool]:
    """Take entries from `start` on until the block is full.

    Parameters
    ----------
    slots, rows, room
        See the module.
    start, stop, step
        Entries to take in order: from `start` up to, but not including, `stop`.
    first
        Whether the block has no tuple yet.
    chosen : int64[n]
        Positions of the taken entries.

    Returns
    -------
    int, int, bool
        Number of entries taken, their bytes, and whether the block is full.
    """
    at, found, used = start, 0, 0
    while at != stop:
        size = _size(rows, I64(slots[at]))
        if used + size > room and not (first and found == 0):
            return found, used, True
        chosen[found] = at
        found += 1
        used += size
        at += step
    return found, used, False


@njit(cache=True, nogil=True)
def sweep(
    slots: Int32s,
    start: int,
    stop: int,
    hand: int,
    rows: StoredRows,
    bit: int,
    room: int,
    first: bool,
    chosen: Int64s,
) -> tuple[int, int, bool, int]:
    """Move the hand of the Clock over the entries from `start` up to `stop` until the block is full.

    The hand takes entries whose bit is clear, and clears the bit of the others. It goes around twice at most: by then
    it has taken everything.

    Parameters
    ----------
    slots, rows, room
        See the module.
    start, stop, hand
        Entries to visit in a circle, and the first to visit.
    bit
        Flag of a record that is the join bit.
    first, chosen
        See `take_run`. Entries are in the order of the visits.

    Returns
    -------
    int, int, bool, int
        Number of entries taken, their bytes, whether the block is full, and the next entry to visit.
    """
    mask, found, used, skipped = np.uint8(bit), 0, 0, 0
    entries = stop - start
    for visit in range(2 * entries):
        slot = I64(slots[hand])
        flags_at = slot * rows.stride + rows.flags_at
        if visit >= entries and skipped < found and chosen[skipped] == hand:
            skipped += 1  # taken in the first round
        elif rows.records[flags_at] & mask:
            rows.records[flags_at] &= ~mask
        else:
            size = _size(rows, slot)
            if used + size > room and not (first and found == 0):
                return found, used, True, hand
            chosen[found] = hand
            found += 1
            used += size
        hand = hand + 1 if hand + 1 < stop else start
    return found, used, False, hand
