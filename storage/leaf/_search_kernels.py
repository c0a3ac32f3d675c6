"""Compiled search for keys and ranges of keys in encoded leaves, in place. Arrays in, arrays out.

`frames` is a flat uint8 array of whole pages with eight spare bytes at its end; `frame` says in which of them a row
is, -1 for none. A directory entry is a base and one packed word (see FORMAT.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import bswap_u64, compare_bytes, load_u16, load_u64
from headrace.storage.format.constants import HEADER, WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "first_not_below",
    "mask_of",
    "nearest_bytes",
    "nearest_u64",
    "order_of",
    "range_bytes",
    "range_u64",
    "search_bytes",
    "search_u64",
    "text_span",
]


_TEXT_DICTIONARY = np.uint64(2)
_U16 = np.uint64(0xFFFF)
_ALL = ~np.uint64(0)
_I64: Any = np.int64  # numba knows the scalar, mypy would not let it meet an int


@njit(cache=True, nogil=True, inline="always")
def mask_of(width: np.uint64) -> np.uint64:
    """Return the bits of so many bytes."""
    return _ALL if width >= np.uint64(8) else (np.uint64(1) << (width * np.uint64(8))) - np.uint64(1)


@njit(cache=True, nogil=True)
def first_not_below(
    frames: NDArray[np.uint8], data: int, width: int, mask: np.uint64, rows: int, target: np.uint64, at: int
) -> int:
    """Return the first row whose key is not below the target, `rows` if none; the search gallops from the row `at`.

    Parameters
    ----------
    data, width, mask
        Offset of the first key, bytes of a key, and a mask of that many bytes.
    target
        Above the page's base.
    """
    step = 1
    if (load_u64(frames, data + at * width) & mask) < target:
        low = at + 1
        while low + step <= rows and (load_u64(frames, data + (low + step - 1) * width) & mask) < target:
            low += step
            step += step
        high = min(low + step - 1, rows)
    else:
        high = at
        while high - step >= 0 and (load_u64(frames, data + (high - step) * width) & mask) >= target:
            high -= step
            step += step
        low = max(high - step + 1, 0)
    while low < high:
        middle = (low + high) >> 1
        if (load_u64(frames, data + middle * width) & mask) < target:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def search_u64(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    key: NDArray[np.uint64],
    unique: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find each key in its page: the first row that has it, and how many rows do.

    The first probe is interpolated between the page's ends; from there the search gallops, so that no distribution
    of keys costs more than two logarithms. Unique tables stop at the first hit.
    """
    last = np.int32(-1)
    rows = 0
    data = 0
    width = 0
    base = top = mask = np.uint64(0)
    scale = 0.0
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        if frame[i] != last:
            last = frame[i]
            page = _I64(last) * page_size
            rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
            base = load_u64(frames, page + HEADER)
            packed = load_u64(frames, page + HEADER + 8)
            data = page + _I64(packed & _U16)
            width = _I64((packed >> np.uint64(48)) & np.uint64(0xFF))
            mask = mask_of(np.uint64(width))
            top = load_u64(frames, data + (rows - 1) * width) & mask
            scale = (rows - 1) / np.float64(top) if top > 0 else 0.0
        if key[i] < base or rows == 0:
            continue
        target = key[i] - base
        if target > top:
            continue
        if width == 0:
            count[i] = rows
            continue
        at = min(_I64(np.float64(target) * scale), rows - 1)
        value = load_u64(frames, data + at * width) & mask
        if unique and value == target:
            row[i] = at
            count[i] = 1
            continue
        low = first_not_below(frames, data, width, mask, rows, target, at)
        if (load_u64(frames, data + low * width) & mask) != target:
            continue
        row[i] = low
        if unique:
            count[i] = 1
            continue
        end = low + 1
        step = 1
        while end + step <= rows and (load_u64(frames, data + (end + step - 1) * width) & mask) == target:
            end += step
            step += step
        high = min(end + step - 1, rows)
        while end < high:
            middle = (end + high) >> 1
            if (load_u64(frames, data + middle * width) & mask) == target:
                end = middle + 1
            else:
                high = middle
        count[i] = end - low


@njit(cache=True, nogil=True)
def text_span(frames: NDArray[np.uint8], page: int, base: np.uint64, packed: np.uint64, row: int) -> tuple[int, int]:
    """Return where in `frames` a text value begins and ends."""
    data = page + _I64(packed & _U16)
    aux = page + _I64((packed >> np.uint64(16)) & _U16)
    width = (packed >> np.uint64(48)) & np.uint64(0xFF)
    mask = mask_of(width)
    step = _I64(width)
    if packed >> np.uint64(56) == _TEXT_DICTIONARY:
        code = _I64(load_u64(frames, data + row * step) & mask)
        text = aux + 2 + 2 * load_u16(frames, aux)
        start = load_u16(frames, aux + 2 * code) if code > 0 else 0
        return text + start, text + load_u16(frames, aux + 2 + 2 * code)
    shortest = _I64(base)
    end = (row + 1) * shortest + _I64(load_u64(frames, data + row * step) & mask)
    start = 0
    if row > 0:
        start = row * shortest + _I64(load_u64(frames, data + (row - 1) * step) & mask)
    return aux + start, aux + end


@njit(cache=True, nogil=True)
def order_of(
    frames: NDArray[np.uint8],
    page: int,
    base: np.uint64,
    packed: np.uint64,
    row: int,
    prefix: np.uint64,
    data: NDArray[np.uint8],
    start: int,
    end: int,
) -> int:
    """Compare the byte key of a row with the one in `data`, whose first eight bytes are `prefix`."""
    left, left_end = text_span(frames, page, base, packed, row)
    length = left_end - left
    word = np.uint64(0)
    if length > 0:
        word = bswap_u64(load_u64(frames, left))
        if length < WORD:
            word &= ~((np.uint64(1) << np.uint64(64 - 8 * length)) - np.uint64(1))
    if word != prefix:
        return -1 if word < prefix else 1
    if length <= WORD or end - start <= WORD:
        return length - (end - start)
    return compare_bytes(frames, left + WORD, left_end, data, start + WORD, end)


@njit(cache=True, nogil=True)
def search_bytes(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    unique: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find each byte key in its page, as `search_u64` does, by binary search."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        base = load_u64(frames, page + HEADER)
        packed = load_u64(frames, page + HEADER + 8)
        word, start, stop = prefix[i], offsets[i], offsets[i + 1]
        low = 0
        high = rows
        found = False
        while low < high:
            middle = (low + high) >> 1
            order = order_of(frames, page, base, packed, middle, word, data, start, stop)
            if order < 0:
                low = middle + 1
            else:
                high = middle
                found = found or order == 0
                if unique and order == 0:
                    low = middle
        if not found:
            continue
        row[i] = low
        end = low + 1
        high = low + 1 if unique else rows
        step = 1
        while end + step <= high:
            if order_of(frames, page, base, packed, end + step - 1, word, data, start, stop) != 0:
                high = end + step - 1
                break
            end += step
            step += step
        while end < high:
            middle = (end + high) >> 1
            if order_of(frames, page, base, packed, middle, word, data, start, stop) == 0:
                end = middle + 1
            else:
                high = middle
        count[i] = end - low


_TOP = ~np.uint64(0)
_BELOW, _NOT_ABOVE = False, True


@njit(cache=True, nogil=True)
def _rank_u64(frames: NDArray[np.uint8], page: int, key: np.uint64) -> int:
    """Return how many rows of a page are below a key: by interpolation, then galloping, then halving."""
    rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
    base = load_u64(frames, page + HEADER)
    packed = load_u64(frames, page + HEADER + 8)
    data = page + _I64(packed & _U16)
    width = _I64((packed >> np.uint64(48)) & np.uint64(0xFF))
    mask = mask_of(np.uint64(width))
    if rows == 0 or key <= base:
        return _I64(0)
    target = key - base
    top = load_u64(frames, data + (rows - 1) * width) & mask
    if target > top:
        return rows
    at = min(_I64(np.float64(target) / np.float64(top) * (rows - 1)), rows - 1)
    return first_not_below(frames, data, width, mask, rows, target, at)


@njit(cache=True, nogil=True)
def range_u64(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low: NDArray[np.uint64],
    high: NDArray[np.uint64],
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the rows of a page from `low` to `high`, both included: the first, and how many there are."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        start = _rank_u64(frames, page, low[i])
        if high[i] == _TOP:
            end = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        else:
            end = _rank_u64(frames, page, high[i] + np.uint64(1))
        row[i] = start
        count[i] = max(end - start, 0)


@njit(cache=True, nogil=True)
def nearest_u64(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low: NDArray[np.uint64],
    high: NDArray[np.uint64],
    last: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the last row not above `high`, or the first not below `low`.

    The count is 1 if that row lies in the range, 0 if it does not, and -1 if the page has no such row, so that only its
    neighbor can tell.
    """
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        if last:
            at = (rows if high[i] == _TOP else _rank_u64(frames, page, high[i] + np.uint64(1))) - 1
        else:
            at = _rank_u64(frames, page, low[i])
        if at < 0 or at == rows:
            count[i] = -1
            continue
        base = load_u64(frames, page + HEADER)
        packed = load_u64(frames, page + HEADER + 8)
        width = _I64((packed >> np.uint64(48)) & np.uint64(0xFF))
        key = base + (load_u64(frames, page + _I64(packed & _U16) + at * width) & mask_of(np.uint64(width)))
        row[i] = at
        count[i] = low[i] <= key <= high[i]


@njit(cache=True, nogil=True)
def _rank_bytes(
    frames: NDArray[np.uint8],
    page: int,
    prefix: np.uint64,
    data: NDArray[np.uint8],
    start: int,
    end: int,
    equal: bool,
) -> int:
    """Return how many rows of a page are below a key, or with `equal` not above it."""
    base = load_u64(frames, page + HEADER)
    packed = load_u64(frames, page + HEADER + 8)
    low = _I64(0)
    high = _I64(load_u64(frames, page + 16) >> np.uint64(32))
    while low < high:
        middle = (low + high) >> 1
        order = order_of(frames, page, base, packed, middle, prefix, data, start, end)
        if order < 0 or (equal and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def range_bytes(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low_prefix: NDArray[np.uint64],
    low_offsets: NDArray[np.int64],
    low_data: NDArray[np.uint8],
    high_prefix: NDArray[np.uint64],
    high_offsets: NDArray[np.int64],
    high_data: NDArray[np.uint8],
    closed: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the rows of a page in each range of byte keys, as `range_u64` does; `closed` ranges include their end."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        start = _rank_bytes(frames, page, low_prefix[i], low_data, low_offsets[i], low_offsets[i + 1], _BELOW)
        end = _rank_bytes(frames, page, high_prefix[i], high_data, high_offsets[i], high_offsets[i + 1], closed)
        row[i] = start
        count[i] = max(end - start, 0)


@njit(cache=True, nogil=True)
def nearest_bytes(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low_prefix: NDArray[np.uint64],
    low_offsets: NDArray[np.int64],
    low_data: NDArray[np.uint8],
    high_prefix: NDArray[np.uint64],
    high_offsets: NDArray[np.int64],
    high_data: NDArray[np.uint8],
    last: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the last row not above `high`, or the first not below `low`, as `nearest_u64` does."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        base = load_u64(frames, page + HEADER)
        packed = load_u64(frames, page + HEADER + 8)
        start, stop = low_offsets[i], low_offsets[i + 1]
        begin, end = high_offsets[i], high_offsets[i + 1]
        if last:
            at = _rank_bytes(frames, page, high_prefix[i], high_data, begin, end, _NOT_ABOVE) - 1
        else:
            at = _rank_bytes(frames, page, low_prefix[i], low_data, start, stop, _BELOW)
        if at < 0 or at == rows:
            count[i] = -1
            continue
        row[i] = at
        if last:
            count[i] = order_of(frames, page, base, packed, at, low_prefix[i], low_data, start, stop) >= 0
        else:
            count[i] = order_of(frames, page, base, packed, at, high_prefix[i], high_data, begin, end) <= 0
