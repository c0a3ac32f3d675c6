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
    from headrace.storage.format._key_kernels import KeyParts
    from headrace.storage.format.arrays import Bytes, Int32s, Words

__all__ = [
    "ALL",
    "EQUAL",
    "FIRST",
    "LAST",
    "first_not_below",
    "mask_of",
    "order_of",
    "search_bytes",
    "search_u64",
    "text_span",
]

ALL, FIRST, LAST, EQUAL = 0, 1, 2, 3
"""Which rows of a range are wanted: all, or the one nearest to an end, or all of a range of one key."""

_TEXT_DICTIONARY = np.uint64(2)
_U16 = np.uint64(0xFFFF)
_NO = False
_ALL = ~np.uint64(0)
_I64: Any = np.int64  # numba knows the scalar, mypy would not let it meet an int


@njit(cache=True, nogil=True, inline="always")
def mask_of(width: np.uint64) -> np.uint64:
    """Return the bits of so many bytes."""
    return _ALL if width >= np.uint64(8) else (np.uint64(1) << (width * np.uint64(8))) - np.uint64(1)


@njit(cache=True, nogil=True)
def first_not_below(
    frames: Bytes, data: int, width: int, mask: np.uint64, rows: int, target: np.uint64, at: int
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
    frames: Bytes,
    page_size: int,
    frame: Int32s,
    low: Words,
    high: Words,
    unique: bool,
    pick: int,
    row: Int32s,
    count: Int32s,
) -> None:
    """Find the rows of a page from key `low` to key `high`, both included: the first row, and how many there are.

    The first probe is interpolated between the page's ends; from there the search gallops, so that no distribution
    of keys costs more than two logarithms. Unique tables stop at the first hit, as `low` is then `high`.

    With `pick` `FIRST` or `LAST`, `row` is the first row not below `low`, or the last one not above `high`. The count
    is 1 if that row lies in the range, 0 if it does not, and -1 if the page has no such row, so that only its neighbor
    can tell.
    """
    last = np.int32(-1)
    rows = data = width = 0
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
        if rows == 0 or high[i] < base:
            count[i] = -1 if pick == LAST or (pick == FIRST and rows == 0) else 0
            continue
        above = high[i] - base
        if pick == LAST:
            at = (
                rows
                if above >= top
                else first_not_below(
                    frames,
                    data,
                    width,
                    mask,
                    rows,
                    above + np.uint64(1),
                    min(_I64(np.float64(above) * scale), rows - 1),
                )
            )
            count[i] = -1
            if at > 0:
                row[i] = at - 1
                count[i] = low[i] <= base + (load_u64(frames, data + (at - 1) * width) & mask)
            continue
        target = low[i] - base if low[i] > base else np.uint64(0)
        if target > top:
            count[i] = -1 if pick == FIRST else 0
            continue
        at = min(_I64(np.float64(target) * scale), rows - 1)
        hit = unique and (load_u64(frames, data + at * width) & mask) == target
        if not hit:
            at = first_not_below(frames, data, width, mask, rows, target, at)
        if hit or (load_u64(frames, data + at * width) & mask) <= above:
            row[i] = at
            count[i] = 1
            if not unique and pick != FIRST:
                end = rows
                if above < top:
                    end = first_not_below(frames, data, width, mask, rows, above + np.uint64(1), at)
                count[i] = end - at


@njit(cache=True, nogil=True)
def text_span(frames: Bytes, page: int, base: np.uint64, packed: np.uint64, row: int) -> tuple[int, int]:
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
    frames: Bytes,
    page: int,
    base: np.uint64,
    packed: np.uint64,
    row: int,
    prefix: np.uint64,
    data: Bytes,
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
def _rank_bytes(
    frames: Bytes,
    page: int,
    rows: tuple[int, int],
    data: Bytes,
    key: tuple[np.uint64, int, int],
    equal: bool,
    unique: bool,
) -> tuple[int, bool]:
    """Return how many rows of a page are below a key, or with `equal` not above it, and whether a row has the key.

    Parameters
    ----------
    rows
        Least and greatest possible result.
    data, key
        Bytes of keys; the prefix of the key, and where it begins and ends in `data`.
    unique
        Whether to stop at the first row that has the key.
    """
    base, packed = load_u64(frames, page + HEADER), load_u64(frames, page + HEADER + 8)
    low, high = rows
    prefix, start, end = key
    found = False
    while low < high:
        middle = (low + high) >> 1
        order = order_of(frames, page, base, packed, middle, prefix, data, start, end)
        if order == 0:
            found = True
            if unique:
                return middle, found
        if order < 0 or (equal and order == 0):
            low = middle + 1
        else:
            high = middle
    return low, found


@njit(cache=True, nogil=True)
def search_bytes(
    frames: Bytes,
    page_size: int,
    frame: Int32s,
    low: KeyParts,
    high: KeyParts,
    closed: bool,
    unique: bool,
    pick: int,
    row: Int32s,
    count: Int32s,
) -> None:
    """Find the rows of a page in each range of byte keys, as `search_u64` does; `closed` ranges include their end."""
    low_data, high_data = low.data, high.data
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        first = (low.prefix[i], low.offsets[i], low.offsets[i + 1])
        last = (high.prefix[i], high.offsets[i], high.offsets[i + 1])
        if pick == LAST:
            at = _rank_bytes(frames, page, (0, rows), high_data, last, closed, _NO)[0] - 1
            row[i] = max(at, 0)
            count[i] = -1 if at < 0 else _rank_bytes(frames, page, (at, at + 1), low_data, first, _NO, _NO)[0] == at
            continue
        at, found = _rank_bytes(frames, page, (0, rows), low_data, first, _NO, unique)
        end, stop = at, min(at + 1, rows) if pick == FIRST else rows
        if pick == EQUAL:
            end = stop = at + found
            if found and not unique:
                step = 1
                while end < rows and _rank_bytes(frames, page, (end, end + 1), high_data, last, closed, _NO)[0] > end:
                    stop = end + 1
                    end += step
                    step += step
                end, stop = stop, min(end, rows)
        if end < stop:
            end = _rank_bytes(frames, page, (end, stop), high_data, last, closed, _NO)[0]
        row[i] = at if end > at else 0
        count[i] = -1 if pick == FIRST and at == rows else end - at
