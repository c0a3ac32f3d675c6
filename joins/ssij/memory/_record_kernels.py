"""Compiled steps of the record tier: find rows by key, admit rows, copy rows. Arrays in, arrays out.

A bucket is one cache line of the processor: a word with the use counts of seven slots, one byte each, and their seven
keys. A key has one bucket; a slot whose use count is 0 is empty. A count-min sketch, whose two counters of a key share
a cache line too, estimates how often absent keys are looked up. Most lines are not in the processor's cache when they
are needed, so each step prefetches those of some tuples together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format import load_u64, prefetch, store_u64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BUCKET", "LINE", "SLOTS", "RecordTable", "admit_rows", "copy_records", "find_records"]

BUCKET = 8
LINE = 64
SLOTS = 7
_AHEAD = 32
_MOST = 255
_MOST_USES = 127  # threads that count at once may go beyond it, but never into the next slot's byte
_OFTEN = 2  # a row looked up only once so far is not admitted
_HASH = np.uint64(0x9E3779B97F4A7C15)
_OTHER = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF, _IN_LINE, _SHORT, _THREE = np.uint64(32), np.uint64(63), np.uint64(6), np.uint64(3)
_NO_SLOT = np.uint64(SLOTS)  # its use count, the eighth byte, is always 0
_DIRECTORY, _ENTRY = 24, 16  # in a leaf page; see storage/FORMAT.md
_U16 = np.uint64(0xFFFF)


class RecordTable(NamedTuple):
    """Hash table of rows.

    Attributes
    ----------
    buckets : uint64[b, 8]
        Use counts and keys of each bucket's slots.
    sketch : uint8[m]
        How often absent keys were looked up.
    records : uint8[m]
        For each slot the value of each column, and a null bit for each column. Slack behind them.
    offsets : int64[c + 1]
        Offset of each value in a record, and of the null bits.
    nbytes : int
        Bytes of a record.
    """

    buckets: NDArray[np.uint64]
    sketch: NDArray[np.uint8]
    records: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    nbytes: int


@njit(inline="always")
def _place(key: np.uint64, factor: np.uint64, size: int) -> np.int64:
    """Return a place below `size` for a key, evenly distributed."""
    mixed = (key ^ (key >> _HALF)) * factor
    return np.int64(((mixed >> _HALF) * np.uint64(size)) >> _HALF)


@njit(inline="always")
def _counters(key: np.uint64, sketch: NDArray[np.uint8]) -> tuple[np.int64, np.int64]:
    """Return the places of a key's two counters."""
    line = _place(key, _OTHER, len(sketch) // LINE) * LINE
    mixed = (key ^ (key >> _HALF)) * _HASH
    return line + np.int64(mixed & _IN_LINE), line + np.int64((mixed >> _SHORT) & _IN_LINE)


@njit(cache=True, nogil=True)
def find_records(
    key: NDArray[np.uint64],
    valid: NDArray[np.bool_],
    table: RecordTable,
    hit: NDArray[np.int32],
    slot: NDArray[np.int32],
    miss: NDArray[np.int32],
) -> int:
    """Look keys up. Return how many were found.

    Parameters
    ----------
    key : uint64[n]
        Keys that tuples look for.
    valid : bool[n] or bool[0]
        Which of them can match; empty if all.
    table
        Hash table. Use counts of the keys found grow, and the sketch's counters of the keys not found.
    hit, slot, miss : int32[n]
        Output, filled from the front: tuples found and their slots, tuples not found.
    """
    buckets, sketch = table.buckets, table.sketch
    words = buckets.reshape(buckets.size)
    lines = words.view(np.uint8)
    every = len(valid) == 0
    bucket = np.empty(_AHEAD, dtype=np.uint64)
    hits = 0
    misses = 0
    for begin in range(0, len(key), _AHEAD):
        end = min(begin + _AHEAD, len(key))
        for i in range(begin, end):
            bucket[i - begin] = _place(key[i], _HASH, len(buckets))
            prefetch(lines, np.int64(bucket[i - begin]) * LINE)
        before = misses
        for i in range(begin, end):
            at = bucket[i - begin] * np.uint64(BUCKET)  # unsigned, as a negative place would count from the end
            found = _NO_SLOT
            for j in range(SLOTS):
                if words[at + np.uint64(1 + j)] == key[i]:
                    found = np.uint64(j)
            uses, shift = words[at], found << _THREE
            use = (uses >> shift) & np.uint64(_MOST)
            if use > 0 and (every or valid[i]):
                if use < _MOST_USES:
                    words[at] = uses + (np.uint64(1) << shift)
                hit[hits] = i
                slot[hits] = bucket[i - begin] * np.uint64(SLOTS) + found
                hits += 1
            else:
                prefetch(sketch, _counters(key[i], sketch)[0])
                miss[misses] = i
                misses += 1
        for at_miss in range(before, misses):
            if every or valid[miss[at_miss]]:
                for counter in _counters(key[miss[at_miss]], sketch):
                    if sketch[counter] < _MOST:
                        sketch[counter] += np.uint8(1)
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
    table: RecordTable,
    low: int,
    high: int,
) -> None:
    """Admit rows that are looked up more often than those that they replace.

    Threads may admit rows to disjoint ranges of buckets at once: all that they share is the sketch, which they read.

    Parameters
    ----------
    frames, page_size, frame, row, count, key
        Rows just found in pages, for these keys; none where the count is 0.
    entries : int64[c]
        Entries of the columns in the pages' directories.
    table
        Hash table.
    low, high
        Range of buckets. Rows that belong to others are left out.
    """
    buckets, sketch, records, offsets, nbytes = table
    lines = buckets.reshape(buckets.size).view(np.uint8)
    some, bucket, slot = np.empty((3, _AHEAD), dtype=np.int64)
    done = 0
    while done < len(frame):
        size = 0
        while done < len(frame) and size < _AHEAD:
            place = _place(key[done], _HASH, len(buckets))
            if low <= place < high and frame[done] >= 0 and count[done] > 0:
                some[size], bucket[size] = done, place
                size += 1
                prefetch(lines, place * LINE)
                prefetch(sketch, _counters(key[done], sketch)[0])
            done += 1
        admitted = 0
        for at in range(size):
            i = some[at]
            one, two = _counters(key[i], sketch)
            often = min(sketch[one], sketch[two], np.uint8(_MOST_USES))
            taken = _take_slot(key[i], often, buckets[bucket[at]]) if often >= _OFTEN else -1
            if taken >= 0:
                some[admitted], slot[admitted] = i, bucket[at] * SLOTS + taken
                prefetch(records, slot[admitted] * nbytes)
                admitted += 1
        for at in range(admitted):
            i = some[at]
            page = np.int64(frame[i]) * page_size
            _write_record(frames, page, np.int64(row[i]), entries, records, slot[at] * nbytes, offsets)


@njit(inline="always")
def _take_slot(key: np.uint64, often: np.uint8, bucket: NDArray[np.uint64]) -> np.int64:
    """Give a key the least used slot of its bucket, if that is used less. Return the slot; -1 if there is none."""
    uses = bucket[0]
    for j in range(SLOTS):
        if bucket[1 + j] == key and (uses >> np.uint64(8 * j)) & np.uint64(_MOST) > 0:
            return np.int64(-1)
    worst = 0
    least = np.uint64(_MOST + 1)
    for j in range(SLOTS):
        use = (uses >> np.uint64(8 * j)) & np.uint64(_MOST)
        if use < least:
            worst, least = j, use
    if least >= np.uint64(often):
        return np.int64(-1)
    bucket[0] += (np.uint64(often) - least) << np.uint64(8 * worst)
    bucket[1 + worst] = key
    return np.int64(worst)


@njit(inline="always")
def _write_record(
    frames: NDArray[np.uint8],
    page: np.int64,
    row: np.int64,
    entries: NDArray[np.int64],
    records: NDArray[np.uint8],
    start: np.int64,
    offsets: NDArray[np.int64],
) -> None:
    """Copy one row of a page, byte by byte: the next record follows at once."""
    columns = len(entries)
    nulls = start + offsets[columns]
    for c in range(columns):
        at = page + _DIRECTORY + _ENTRY * entries[c]
        packed = load_u64(frames, at + 8)
        width = np.int64((packed >> np.uint64(48)) & np.uint64(0xFF))
        mask = ~np.uint64(0) if width == 8 else (np.uint64(1) << np.uint64(8 * width)) - np.uint64(1)  # noqa: PLR2004 - bytes of a word
        data = page + np.int64(packed & _U16) + row * width
        value = load_u64(frames, at) + (load_u64(frames, data) & mask)
        for byte in range(offsets[c + 1] - offsets[c]):
            records[start + offsets[c] + byte] = np.uint8(value >> np.uint64(8 * byte))
        bitmap = np.int64((packed >> _HALF) & _U16)
        if c & 7 == 0:
            records[nulls + (c >> 3)] = 0
        if bitmap > 0 and (frames[page + bitmap + (row >> 3)] >> (row & 7)) & 1:
            records[nulls + (c >> 3)] |= np.uint8(1) << np.uint8(c & 7)


@njit(cache=True, nogil=True)
def copy_records(
    table: RecordTable,
    slot: NDArray[np.int32],
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    missing: NDArray[np.int64],
) -> None:
    """Copy records out, column by column.

    Parameters
    ----------
    starts : int64[c]
        Start of each column in `out`.
    out : uint8
        Columns one after the other, each with slack behind it.
    valid : uint8[c, n]
        Output: 1 where the value is not null.
    missing : int64[c]
        Output: number of nulls.
    """
    records, offsets, nbytes = table.records, table.offsets, table.nbytes
    columns = len(starts)
    missing[:] = 0
    for i in range(len(slot)):
        if i + _AHEAD < len(slot):
            prefetch(records, np.int64(slot[i + _AHEAD]) * nbytes)
        start = np.int64(slot[i]) * nbytes
        nulls = start + offsets[columns]
        for c in range(columns):
            null = (records[nulls + (c >> 3)] >> np.uint8(c & 7)) & np.uint8(1)
            valid[c, i] = np.uint8(1) - null
            missing[c] += np.int64(null)
            store_u64(out, starts[c] + i * (offsets[c + 1] - offsets[c]), load_u64(records, start + offsets[c]))
