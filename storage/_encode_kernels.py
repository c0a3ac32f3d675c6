"""Compiled leaf encoder: rows whose pages are planned are written. Arrays in, arrays out.

Columns come as `_pack_kernels` describes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage._byte_kernels import copy_bytes, store_u64, xxh64
from headrace.storage._pack_kernels import bytes_needed, dictionary_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["seal_pages", "write_leaves"]

_HEADER = 24
_ENTRY = 16
_SIGN = np.uint64(1 << 63)
_MAX = np.int64(2**63 - 1)
_MIN = np.int64(-(2**63))
_TEXT_PLAIN = 1
_TEXT_DICTIONARY = 2


@njit(cache=True, nogil=True)
def _write_entry(
    page: NDArray[np.uint8], at: int, base: np.uint64, data: int, aux: int, nulls: int, width: int, encoding: int
) -> None:
    store_u64(page, at, base)
    word = np.uint64(data) | (np.uint64(aux) << np.uint64(16)) | (np.uint64(nulls) << np.uint64(32))
    store_u64(page, at + 8, word | (np.uint64(width) << np.uint64(48)) | (np.uint64(encoding) << np.uint64(56)))


@njit(cache=True, nogil=True)
def _write_number(page: NDArray[np.uint8], at: int, value: int, width: int) -> None:
    for byte in range(width):
        page[at + byte] = np.uint8((value >> (8 * byte)) & 0xFF)


@njit(cache=True, nogil=True)
def _write_words(
    page: NDArray[np.uint8],
    entry: int,
    origin: int,
    at: int,
    values: NDArray[np.int64],
    absent: NDArray[np.uint8],
    bitmap: int,
    flip: np.uint64,
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
    page: NDArray[np.uint8],
    entry: int,
    origin: int,
    at: int,
    spans: NDArray[np.int64],
    heap: NDArray[np.uint8],
    absent: NDArray[np.uint8],
    bitmap: int,
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
        _TEXT_PLAIN,
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
    page: NDArray[np.uint8],
    entry: int,
    origin: int,
    at: int,
    spans: NDArray[np.int64],
    heap: NDArray[np.uint8],
    absent: NDArray[np.uint8],
    bitmap: int,
    codes: NDArray[np.int32],
    local: NDArray[np.int32],
    distinct: int,
    first: NDArray[np.int64],
) -> int:
    rows = len(codes)
    width = bytes_needed(np.uint64(max(distinct - 1, 0)))
    block = at + rows * width
    _write_entry(
        page,
        entry,
        np.uint64(0),
        at - origin if width > 0 else 0,
        block - origin,
        bitmap,
        width,
        _TEXT_DICTIONARY,
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
def _number_entries(
    codes: NDArray[np.int32],
    absent: NDArray[np.uint8],
    spans: NDArray[np.int64],
    local: NDArray[np.int32],
    first: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Assign numbers to the codes of a page as they appear; return how many, and bytes with and without dictionary."""
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
def write_leaves(
    places: NDArray[np.int64],
    words: NDArray[np.int64],
    spans: NDArray[np.int64],
    heap: NDArray[np.uint8],
    nulls: NDArray[np.uint8],
    codes: NDArray[np.int32],
    cardinality: int,
    ends: NDArray[np.int64],
    page_size: int,
    flip_key: bool,
    pages: NDArray[np.uint8],
) -> None:
    """Write the pages that end at the rows `ends` into `pages`, zeroed uint8[len(ends) * page_size + 8].

    Checksum, transaction and page type are for `seal_pages`.
    """
    columns = len(places)
    local = np.full(cardinality, -1, dtype=np.int32)
    first = np.empty(page_size, dtype=np.int64)
    nothing = np.zeros(0, dtype=np.uint8)
    start = 0
    for number in range(len(ends)):
        stop = ends[number]
        origin = number * page_size
        store_u64(pages, origin + 16, np.uint64(1) | (np.uint64(stop - start) << np.uint64(32)))
        at = origin + _HEADER + _ENTRY * columns
        for column in range(columns):
            entry = origin + _HEADER + _ENTRY * column
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
                flip = _SIGN if column == 0 and flip_key else np.uint64(0)
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


@njit(cache=True, nogil=True)
def seal_pages(
    pages: NDArray[np.uint8], page_size: int, numbers: NDArray[np.int64], txid: int, checksums: NDArray[np.uint64]
) -> None:
    """Write transaction and checksum into each page; page `i` will be page `numbers[i]` of the file."""
    for page in range(len(numbers)):
        origin = page * page_size
        store_u64(pages, origin + 8, np.uint64(txid))
        checksums[page] = xxh64(pages, origin + 8, page_size - 8, np.uint64(numbers[page]))
        store_u64(pages, origin, checksums[page])
