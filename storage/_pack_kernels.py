"""Compiled packing: how many rows fit in each leaf. Arrays in, arrays out.

Columns come as matrices, one row per physical column: `words` for 64-bit integers, `spans` for the offsets of text
in `heap`, `codes` for the dictionary codes of repetitive text, `nulls` for the columns that have any. `places`
says for each entry of the directory where it is found:

    places[c, 0]  1 if the entry is text           places[c, 1]  row in `words` or `spans`
    places[c, 2]  row in `nulls`, or -1            places[c, 3]  row in `codes`, or -1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["bytes_needed", "dictionary_size", "plan_leaves"]

_HEADER = 24
_ENTRY = 16
_BLOCK = 32
_MAX = np.int64(2**63 - 1)
_MIN = np.int64(-(2**63))


@njit(cache=True, nogil=True, inline="always")
def bytes_needed(value: np.uint64) -> int:
    width = 0
    while value > np.uint64(0):
        value >>= np.uint64(8)
        width += 1
    return width


@njit(cache=True, nogil=True)
def dictionary_size(rows: int, distinct: int, heap: int) -> int:
    return rows * bytes_needed(np.uint64(max(distinct - 1, 0))) + 2 + 2 * distinct + heap


@njit(cache=True, nogil=True)
def _take_block(
    places: NDArray[np.int64],
    words: NDArray[np.int64],
    spans: NDArray[np.int64],
    row: int,
    count: int,
    limit: int,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    width: NDArray[np.int64],
    total: NDArray[np.int64],
    bottom: NDArray[np.int64],
    top: NDArray[np.int64],
) -> bool:
    """Add a block of rows to a page if all of them fit; for columns without nulls and dictionaries.

    `bottom` and `top` are room for what the block would make of `low` and of `high` or `total`.
    """
    size = _HEADER + _ENTRY * len(places)
    for column in range(len(places)):
        slot = places[column, 1]
        smallest = low[column]
        if places[column, 0] == 0:
            largest = high[column]
            for at in range(_BLOCK):
                smallest = min(smallest, words[slot, row + at])
                largest = max(largest, words[slot, row + at])
            size += count * bytes_needed(np.uint64(largest) - np.uint64(smallest))
        else:
            for at in range(_BLOCK):
                smallest = min(smallest, spans[slot, row + at + 1] - spans[slot, row + at])
            largest = total[column] + spans[slot, row + _BLOCK] - spans[slot, row]
            size += largest + count * bytes_needed(np.uint64(largest - count * smallest))
        bottom[column] = smallest
        top[column] = largest
    if size > limit:
        return False
    for column in range(len(places)):
        low[column] = bottom[column]
        if places[column, 0] == 0:
            high[column] = top[column]
            width[column] = bytes_needed(np.uint64(top[column]) - np.uint64(bottom[column]))
        else:
            total[column] = top[column]
    return True


@njit(cache=True, nogil=True)
def plan_leaves(
    places: NDArray[np.int64],
    words: NDArray[np.int64],
    spans: NDArray[np.int64],
    nulls: NDArray[np.uint8],
    codes: NDArray[np.int32],
    cardinality: int,
    rows: int,
    limit: int,
    page_size: int,
    breaks: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:
    """Return where each page ends when rows are packed greedily, and the first row that fits in no page, or -1.

    A page takes rows while it needs at most `limit` bytes, and at least one row if that fits in `page_size`. At the
    rows `breaks`, in ascending order, a page ends in any case.
    """
    columns = len(places)
    ends = np.empty(rows, dtype=np.int64)
    pages = 0
    low = np.empty(columns, dtype=np.int64)
    high = np.empty(columns, dtype=np.int64)
    width = np.empty(columns, dtype=np.int64)
    total = np.empty(columns, dtype=np.int64)
    missing = np.empty(columns, dtype=np.int64)
    distinct = np.empty(columns, dtype=np.int64)
    entries = np.empty(columns, dtype=np.int64)
    bottom = np.empty(columns, dtype=np.int64)
    top = np.empty(columns, dtype=np.int64)
    seen = np.full((len(codes), cardinality), -1, dtype=np.int64)
    by_block = len(codes) == 0 and len(nulls) == 0
    blocks = by_block
    start = 0
    row = 0
    upcoming = 0
    while row < rows:
        while upcoming < len(breaks) and breaks[upcoming] <= start:
            upcoming += 1
        if upcoming < len(breaks) and breaks[upcoming] == row:
            ends[pages] = row
            pages += 1
            start = row
        if row == start:
            low[:] = _MAX
            high[:] = _MIN
            width[:] = 0
            total[:] = 0
            missing[:] = 0
            distinct[:] = 0
            entries[:] = 0
            blocks = by_block
        if blocks:
            stop = breaks[upcoming] if upcoming < len(breaks) else rows
            count = row - start + _BLOCK
            blocks = row + _BLOCK <= stop and count <= page_size
            if blocks:
                blocks = _take_block(places, words, spans, row, count, limit, low, high, width, total, bottom, top)
            if blocks:
                row += _BLOCK
                continue
        count = row - start + 1
        size = _HEADER + _ENTRY * columns
        for column in range(columns):
            slot = places[column, 1]
            null = places[column, 2] >= 0 and nulls[places[column, 2], row] != 0
            if null:
                missing[column] += 1
            if places[column, 0] == 0:
                if not null:
                    value = words[slot, row]
                    if value < low[column] or value > high[column]:
                        low[column] = min(low[column], value)
                        high[column] = max(high[column], value)
                        width[column] = bytes_needed(np.uint64(high[column]) - np.uint64(low[column]))
                size += count * width[column]
            else:
                length = 0 if null else spans[slot, row + 1] - spans[slot, row]
                low[column] = min(low[column], length)
                total[column] += length
                plain = total[column] + count * bytes_needed(np.uint64(total[column] - count * low[column]))
                dictionary = places[column, 3]
                if dictionary >= 0:
                    code = codes[dictionary, row]
                    if not null and seen[dictionary, code] != pages:
                        seen[dictionary, code] = pages
                        distinct[column] += 1
                        entries[column] += length
                    plain = min(plain, dictionary_size(count, distinct[column], entries[column]))
                size += plain
            if missing[column] > 0:
                size += (count + 7) >> 3
        if count == 1 and size > page_size:
            return ends[:pages], row
        if count > 1 and (size > limit or count > page_size):
            ends[pages] = row
            pages += 1
            start = row
        else:
            row += 1
    if rows > 0:
        ends[pages] = rows
        pages += 1
    return ends[:pages], -1
