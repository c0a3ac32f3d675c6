"""Compiled steps of the record tier: rows found by key, rows taken in, rows copied out. Arrays in, arrays out.

A bucket is eight slots, whose keys fill one line of the processor's cache; a key can be in one bucket only. A slot
whose use is 0 is empty. How often keys are asked for that are not here is estimated by a count-min sketch of two rows
in one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from storage._byte_kernels import load_u64, store_u64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BUCKET", "admit_rows", "copy_records", "find_records"]

BUCKET = 8
_MOST = 255
_OFTEN = 2  # a row asked for only once so far is left where it is
_HASH = np.uint64(0x9E3779B97F4A7C15)
_OTHER = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)
_DIRECTORY, _ENTRY = 24, 16  # of a leaf page; see storage/FORMAT.md
_U16 = np.uint64(0xFFFF)


@njit(inline="always")
def _place(key: np.uint64, factor: np.uint64, size: int) -> np.int64:
    """Return a place below `size` for a key, evenly spread."""
    mixed = (key ^ (key >> _HALF)) * factor
    return np.int64(((mixed >> _HALF) * np.uint64(size)) >> _HALF)


@njit(cache=True, nogil=True)
def find_records(
    key: NDArray[np.uint64],
    valid: NDArray[np.bool_],
    keys: NDArray[np.uint64],
    uses: NDArray[np.uint8],
    sketch: NDArray[np.uint8],
    hit: NDArray[np.int32],
    slot: NDArray[np.int32],
    miss: NDArray[np.int32],
) -> int:
    """Look keys up; return how many are here.

    Parameters
    ----------
    key : uint64[n]
        What tuples look for.
    valid : bool[n] or bool[0]
        Which of them can match; empty if all.
    keys, uses : [slots]
        The table. Uses of what is found grow.
    sketch : uint8[m]
        Grows for what is not found.
    hit, slot, miss : int32[n]
        Filled from the front: tuples found and where, tuples not found.
    """
    buckets = len(keys) // BUCKET
    every = len(valid) == 0
    hits = 0
    misses = 0
    for i in range(len(key)):
        found = -1
        if every or valid[i]:
            start = _place(key[i], _HASH, buckets) * BUCKET
            for j in range(start, start + BUCKET):
                if keys[j] == key[i] and uses[j] > 0:
                    found = j
            if found < 0:
                for at in (_place(key[i], _OTHER, len(sketch)), _place(~key[i], _HASH, len(sketch))):
                    if sketch[at] < _MOST:
                        sketch[at] += np.uint8(1)
        if found >= 0:
            if uses[found] < _MOST:
                uses[found] += np.uint8(1)
            hit[hits] = i
            slot[hits] = found
            hits += 1
        else:
            miss[misses] = i
            misses += 1
    return hits


@njit(cache=True, nogil=True)
def admit_rows(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    count: NDArray[np.int32],
    key: NDArray[np.uint64],
    entries: NDArray[np.int64],
    keys: NDArray[np.uint64],
    uses: NDArray[np.uint8],
    sketch: NDArray[np.uint8],
    records: NDArray[np.uint64],
) -> None:
    """Take in rows that are asked for more often than what they push out.

    Parameters
    ----------
    frames, page_size, frame, row, count, key
        Rows just found in pages, for these keys; a count of 0 is none.
    entries : int64[c]
        The columns' entries of the pages' directories.
    keys, uses, sketch
        The table.
    records : uint64[slots, 1 + c]
        Of each slot: a bit for each column that is null, and the columns.
    """
    buckets = len(keys) // BUCKET
    for i in range(len(frame)):
        if frame[i] < 0 or count[i] == 0:
            continue
        often = min(sketch[_place(key[i], _OTHER, len(sketch))], sketch[_place(~key[i], _HASH, len(sketch))])
        if often < _OFTEN:
            continue
        start = _place(key[i], _HASH, buckets) * BUCKET
        worst = start
        for j in range(start, start + BUCKET):
            if keys[j] == key[i] and uses[j] > 0:
                worst = -1
                break
            if uses[j] < uses[worst]:
                worst = j
        if worst < 0 or uses[worst] >= often:
            continue
        keys[worst] = key[i]
        uses[worst] = often
        nulls = np.uint64(0)
        page = np.int64(frame[i]) * page_size
        for c in range(len(entries)):
            at = page + _DIRECTORY + _ENTRY * entries[c]
            packed = load_u64(frames, at + 8)
            width = np.int64((packed >> np.uint64(48)) & np.uint64(0xFF))
            mask = ~np.uint64(0) if width == 8 else (np.uint64(1) << np.uint64(8 * width)) - np.uint64(1)  # noqa: PLR2004 - bytes of a word
            bitmap = np.int64((packed >> _HALF) & _U16)
            if bitmap > 0 and (frames[page + bitmap + (row[i] >> 3)] >> (row[i] & 7)) & 1:
                nulls |= np.uint64(1) << np.uint64(c)
            data = page + np.int64(packed & _U16) + np.int64(row[i]) * width
            records[worst, 1 + c] = load_u64(frames, at) + (load_u64(frames, data) & mask)
        records[worst, 0] = nulls


@njit(cache=True, nogil=True)
def copy_records(
    records: NDArray[np.uint64],
    slot: NDArray[np.int32],
    sizes: NDArray[np.int64],
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    missing: NDArray[np.int64],
) -> None:
    """Copy records out, column by column.

    Parameters
    ----------
    sizes, starts : int64[c]
        Bytes of a value of each column, and where the column begins in `out`.
    out : uint8
        Columns one after the other, each with slack behind it.
    valid : uint8[c, n]
        Becomes 1 for what is not null.
    missing : int64[c]
        Becomes the number of nulls.
    """
    for c in range(len(sizes)):
        missing[c] = 0
    for i in range(len(slot)):
        at = slot[i]
        nulls = records[at, 0]
        for c in range(len(sizes)):
            null = (nulls >> np.uint64(c)) & np.uint64(1)
            valid[c, i] = np.uint8(1) - np.uint8(null)
            missing[c] += np.int64(null)
            store_u64(out, starts[c] + i * sizes[c], records[at, 1 + c])
