"""Compiled leaf encoder: `plan_leaves` decides how many rows fit in each page, `write_leaves` writes the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, copy_bytes, store_u64
from headrace.storage.format.constants import DIRECTORY_ENTRY, HEADER, SIGN, TEXT_DICTIONARY, TEXT_PLAIN

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Int32s, Int64s

__all__ = ["RowColumns", "bytes_needed", "dictionary_size", "plan_leaves", "write_leaves"]


_BLOCK = 32
_MAX = np.int64(2**63 - 1)
_MIN = np.int64(-(2**63))


class RowColumns(NamedTuple):
    """Rows as matrices with one row for each physical column.

    Attributes
    ----------
    places : int64[entries, 4]
        For each entry of the directory: 1 if it is text, else 0; its row in `words` or `spans`; its row in `nulls`, or
        -1; its row in `codes`, or -1.
    words : int64[words, rows]
        Values of the 64-bit columns.
    spans : int64[texts, rows + 1]
        Offsets of the texts in `heap`.
    heap : uint8 array
        Texts of all columns.
    nulls : uint8[columns with nulls, rows]
        1 where a value is null.
    codes : int32[columns, rows]
        Dictionary codes of the text columns that look repetitive.
    cardinality
        Number of different codes.
    """

    places: Int64s
    words: Int64s
    spans: Int64s
    heap: Bytes
    nulls: Bytes
    codes: Int32s
    cardinality: int


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
    places: Int64s,
    words: Int64s,
    spans: Int64s,
    row: int,
    count: int,
    limit: int,
    low: Int64s,
    high: Int64s,
    width: Int64s,
    total: Int64s,
    bottom: Int64s,
    top: Int64s,
) -> bool:
    """Add a block of rows to a page if all of them fit; for columns without nulls and dictionaries.

    `bottom` and `top` are buffers for the new values of `low`, and of `high` or `total`.
    """
    size = HEADER + DIRECTORY_ENTRY * len(places)
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
def plan_leaves(columns_in: RowColumns, rows: int, limit: int, page_size: int, breaks: Int64s) -> tuple[Int64s, int]:
    """Return where each page ends if `rows` rows are packed greedily, and the first row that fits in no page, or -1.

    A page takes rows as long as it needs at most `limit` bytes, and at least one row if that fits in `page_size`. At
    the rows `breaks`, in ascending order, a page must end.
    """
    places, words, spans, _, nulls, codes, cardinality = columns_in
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
    start = row = I64(0)  # typed: numba compiles a callee again for a literal
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
        size = HEADER + DIRECTORY_ENTRY * columns
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


@njit(cache=True, nogil=True)
def _write_entry(
    page: Bytes, at: int, base: np.uint64, data: int, aux: int, nulls: int, width: int, encoding: int
) -> None:
    store_u64(page, at, base)
    word = np.uint64(data) | (np.uint64(aux) << np.uint64(16)) | (np.uint64(nulls) << np.uint64(32))
    store_u64(page, at + 8, word | (np.uint64(width) << np.uint64(48)) | (np.uint64(encoding) << np.uint64(56)))


@njit(cache=True, nogil=True)
def _write_number(page: Bytes, at: int, value: int, width: int) -> None:
    for byte in range(width):
        page[at + byte] = np.uint8((value >> (8 * byte)) & 0xFF)


@njit(cache=True, nogil=True)
def _write_words(
    page: Bytes, entry: int, origin: int, at: int, values: Int64s, absent: Bytes, bitmap: int, flip: np.uint64
) -> int:
    rows = len(values)
    low = _MAX
    high = _MIN
    for row in range(rows):
        if len(absent) == 0 or absent[row] == 0:
            low = min(low, values[row])
            high = max(high, values[row])
    if low > high:
        low = np.int64(0)
        high = np.int64(0)
    base = np.uint64(low)
    width = bytes_needed(np.uint64(high) - base)
    _write_entry(page, entry, base ^ flip, at - origin if width > 0 else 0, 0, bitmap, width, 0)
    if width == 0:
        return at
    for row in range(rows):
        delta = np.uint64(values[row]) - base
        if len(absent) > 0 and absent[row] != 0:
            delta = np.uint64(0)
        store_u64(page, at, delta)
        at += width
    return at


@njit(cache=True, nogil=True)
def _write_text(
    page: Bytes, entry: int, origin: int, at: int, spans: Int64s, heap: Bytes, absent: Bytes, bitmap: int
) -> int:
    rows = len(spans) - 1
    total = 0
    shortest = _MAX
    for row in range(rows):
        length = spans[row + 1] - spans[row]
        if len(absent) > 0 and absent[row] != 0:
            length = 0
        total += length
        shortest = min(shortest, length)
    width = bytes_needed(np.uint64(total - rows * shortest))
    text = at + rows * width
    _write_entry(
        page,
        entry,
        np.uint64(shortest),
        at - origin if width > 0 else 0,
        text - origin if total > 0 else 0,
        bitmap,
        width,
        TEXT_PLAIN,
    )
    end = 0
    for row in range(rows):
        if len(absent) == 0 or absent[row] == 0:
            length = spans[row + 1] - spans[row]
            copy_bytes(heap, spans[row], page, text + end, length)
            end += length
        _write_number(page, at, end - (row + 1) * shortest, width)
        at += width
    return text + end


@njit(cache=True, nogil=True)
def _write_dictionary(
    page: Bytes,
    entry: int,
    origin: int,
    at: int,
    spans: Int64s,
    heap: Bytes,
    absent: Bytes,
    bitmap: int,
    codes: Int32s,
    local: Int32s,
    distinct: int,
    first: Int64s,
) -> int:
    rows = len(codes)
    width = bytes_needed(np.uint64(max(distinct - 1, 0)))
    block = at + rows * width
    _write_entry(
        page, entry, np.uint64(0), at - origin if width > 0 else 0, block - origin, bitmap, width, TEXT_DICTIONARY
    )
    for row in range(rows):
        code = 0 if len(absent) > 0 and absent[row] != 0 else local[codes[row]]
        _write_number(page, at, code, width)
        at += width
    _write_number(page, block, distinct, 2)
    text = block + 2 + 2 * distinct
    end = 0
    for number in range(distinct):
        row = first[number]
        length = spans[row + 1] - spans[row]
        copy_bytes(heap, spans[row], page, text + end, length)
        end += length
        _write_number(page, block + 2 + 2 * number, end, 2)
    return text + end


@njit(cache=True, nogil=True)
def _number_entries(codes: Int32s, absent: Bytes, spans: Int64s, local: Int32s, first: Int64s) -> tuple[int, int, int]:
    """Assign numbers to the codes of a page; return how many, and bytes with and without dictionary."""
    distinct = 0
    heap = 0
    total = 0
    shortest = _MAX
    for row in range(len(codes)):
        if len(absent) > 0 and absent[row] != 0:
            shortest = np.int64(0)
            continue
        code = codes[row]
        length = spans[row + 1] - spans[row]
        total += length
        shortest = min(shortest, length)
        if local[code] < 0:
            local[code] = distinct
            first[distinct] = row
            distinct += 1
            heap += length
    rows = len(codes)
    plain = total + rows * bytes_needed(np.uint64(total - rows * shortest))
    return distinct, dictionary_size(rows, distinct, heap), plain


@njit(cache=True, nogil=True)
def write_leaves(rows: RowColumns, ends: Int64s, page_size: int, flip_key: bool, pages: Bytes) -> None:
    """Write the pages that end at the rows `ends` into `pages`, zeroed uint8[len(ends) * page_size + 8].

    `seal_pages` adds checksum and transaction.
    """
    places, words, spans, heap, nulls, codes, cardinality = rows
    columns = len(places)
    local = np.full(cardinality, -1, dtype=np.int32)
    first = np.empty(page_size, dtype=np.int64)
    nothing = np.zeros(0, dtype=np.uint8)
    start = 0
    for number in range(len(ends)):
        stop = ends[number]
        origin = number * page_size
        store_u64(pages, origin + 16, np.uint64(1) | (np.uint64(stop - start) << np.uint64(32)))
        at = origin + HEADER + DIRECTORY_ENTRY * columns
        for column in range(columns):
            entry = origin + HEADER + DIRECTORY_ENTRY * column
            slot = places[column, 1]
            absent = nothing
            bitmap = 0
            if places[column, 2] >= 0:
                candidate = nulls[places[column, 2], start:stop]
                if candidate.any():
                    absent = candidate
                    bitmap = at - origin
                    for row in range(len(absent)):
                        pages[at + (row >> 3)] |= np.uint8(absent[row] << (row & 7))
                    at += (stop - start + 7) >> 3
            if places[column, 0] == 0:
                flip = SIGN if column == 0 and flip_key else np.uint64(0)
                at = _write_words(pages, entry, origin, at, words[slot, start:stop], absent, bitmap, flip)
                continue
            lengths = spans[slot, start : stop + 1]
            if places[column, 3] >= 0:
                chosen = codes[places[column, 3], start:stop]
                distinct, small, plain = _number_entries(chosen, absent, lengths, local, first)
                if small < plain:
                    at = _write_dictionary(
                        pages, entry, origin, at, lengths, heap, absent, bitmap, chosen, local, distinct, first
                    )
                for number_of in range(distinct):
                    local[chosen[first[number_of]]] = -1
                if small < plain:
                    continue
            at = _write_text(pages, entry, origin, at, lengths, heap, absent, bitmap)
        start = stop
