"""Compiled search for keys and ranges of keys in encoded leaves, in place. Arrays in, arrays out.

`frames` is a flat uint8 array of whole pages with eight spare bytes at its end; `frame` says in which of them a row
is, -1 for none. A directory entry is a base and one packed word (see FORMAT.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, bswap_u64, compare_bytes, load_u16, load_u64
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
    "search_bytes",
    "search_u64",
    "text_span",
]

ALL, FIRST, LAST, EQUAL = 0, 1, 2, 3
"""Which rows of a range are wanted: all, or the one nearest to an end, or all of a range of one key."""

_TEXT_DICTIONARY = np.uint64(2)
_U16 = np.uint64(0xFFFF)
_WINDOW = 7  # rows around a guess, searched without a branch
_BEFORE = 3  # of them before it
_STRIDE = 8  # growth of the steps from a guess: most guesses are next to the row, the others may be anywhere
_NO, _YES, _ANYWHERE = np.False_, np.True_, np.int64(-1)  # typed: numba compiles a callee again for a literal
_ALL = ~np.uint64(0)


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
            page = I64(last) * page_size
            rows = I64(load_u64(frames, page + 16) >> np.uint64(32))
            base = load_u64(frames, page + HEADER)
            packed = load_u64(frames, page + HEADER + 8)
            data = page + I64(packed & _U16)
            width = I64((packed >> np.uint64(48)) & np.uint64(0xFF))
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
                    min(I64(np.float64(above) * scale), rows - 1),
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
        at = min(I64(np.float64(target) * scale), rows - 1)
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
    data = page + I64(packed & _U16)
    aux = page + I64((packed >> np.uint64(16)) & _U16)
    width = (packed >> np.uint64(48)) & np.uint64(0xFF)
    mask = mask_of(width)
    step = I64(width)
    if packed >> np.uint64(56) == _TEXT_DICTIONARY:
        code = I64(load_u64(frames, data + row * step) & mask)
        text = aux + 2 + 2 * load_u16(frames, aux)
        start = load_u16(frames, aux + 2 * code) if code > 0 else 0
        return text + start, text + load_u16(frames, aux + 2 + 2 * code)
    shortest = I64(base)
    end = (row + 1) * shortest + I64(load_u64(frames, data + row * step) & mask)
    start = 0
    if row > 0:
        start = row * shortest + I64(load_u64(frames, data + (row - 1) * step) & mask)
    return aux + start, aux + end


class _Page(NamedTuple):
    """A page of byte keys, as a search for many keys sees it.

    Attributes
    ----------
    start, rows
        Offset of the page in `frames`, and its rows.
    base, packed
        Directory entry of the key column.
    prefix, shared
        Offset of the first key in `frames`, and how many leading bytes all keys of the page share.
    low, scale
        The eight bytes behind them in the first key, as a number, and rows for each unit above it.
    stride, mask
        Bytes of a key if all keys are of one length and lie side by side, else 0; the bits of those eight bytes that
        belong to the key.
    """

    start: int
    rows: int
    base: np.uint64
    packed: np.uint64
    prefix: int
    shared: int
    low: np.uint64
    scale: float
    stride: int
    mask: np.uint64


@njit(cache=True, nogil=True, inline="always")
def _word_at(data: Bytes, start: int, end: int) -> np.uint64:
    """Return up to eight bytes of `data` as a big-endian number, padded with zeros."""
    length = end - start
    if length <= 0:
        return np.uint64(0)
    if start + WORD > len(data):
        word = np.uint64(0)
        for at in range(length):
            word |= np.uint64(data[start + at]) << np.uint64(56 - 8 * at)
        return word
    word = bswap_u64(load_u64(data, start))
    return word & ~((np.uint64(1) << np.uint64(64 - 8 * length)) - np.uint64(1)) if length < WORD else word


@njit(cache=True, nogil=True)
def _page_of(frames: Bytes, page: int) -> _Page:
    rows = I64(load_u64(frames, page + 16) >> np.uint64(32))
    base, packed = load_u64(frames, page + HEADER), load_u64(frames, page + HEADER + 8)
    if rows == 0:
        return _Page(page, rows, base, packed, page, 0, np.uint64(0), 0.0, 0, _ALL)
    first, first_end = text_span(frames, page, base, packed, I64(0))
    last, last_end = text_span(frames, page, base, packed, rows - 1)
    shared, most = 0, min(first_end - first, last_end - last)
    while shared < most and frames[first + shared] == frames[last + shared]:
        shared += 1
    low = _word_at(frames, first + shared, first_end)
    high = _word_at(frames, last + shared, last_end)
    scale = (rows - 1) / np.float64(high - low) if high > low else 0.0
    fixed = packed >> np.uint64(56) != _TEXT_DICTIONARY and (packed >> np.uint64(48)) & np.uint64(0xFF) == 0
    stride = I64(base) if fixed else 0
    behind = max(stride - shared, 0)
    mask = ~mask_of(np.uint64(WORD - behind)) if behind < WORD else _ALL
    return _Page(page, rows, base, packed, first, shared, low, scale, stride, mask)


@njit(cache=True, nogil=True, inline="always")
def _order_of(frames: Bytes, page: _Page, row: int, word: np.uint64, data: Bytes, start: int, end: int) -> int:
    """Compare the key of a row with one in `data` from the first byte on that not all rows share.

    `start` is the offset of that byte, and `word` the eight bytes from there.
    """
    left, left_end = text_span(frames, page.start, page.base, page.packed, row)
    left += page.shared
    other = _word_at(frames, left, left_end)
    if other != word:
        return -1 if other < word else 1
    length = left_end - left
    if length <= WORD or end - start <= WORD:
        return length - (end - start)
    return compare_bytes(frames, left + WORD, left_end, data, start + WORD, end)


@njit(cache=True, nogil=True, inline="always")
def _row_word(frames: Bytes, page: _Page, row: int) -> np.uint64:
    """Return the eight bytes of a row's key behind those that all rows share. Keys have to be of one length."""
    return bswap_u64(load_u64(frames, page.prefix + page.shared + row * page.stride)) & page.mask


@njit(cache=True, nogil=True)
def _rank_word(frames: Bytes, page: _Page, word: np.uint64, guess: int) -> int:
    """Return how many rows have a lesser word. Rows around the guess are searched without a branch."""
    low, high, begin = 0, page.rows, guess - _BEFORE
    if begin >= 0 and begin + _WINDOW <= page.rows:
        below = 4 * I64(_row_word(frames, page, begin + 3) < word)
        below += 2 * I64(_row_word(frames, page, begin + below + 1) < word)
        below += I64(_row_word(frames, page, begin + below) < word)
        if 0 < below < _WINDOW:
            return begin + below
        low, high = (0, begin + 1) if below == 0 else (begin + _WINDOW, page.rows)
    while low < high:
        middle = (low + high) >> 1
        if _row_word(frames, page, middle) < word:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _rank_bytes(frames: Bytes, page: _Page, data: Bytes, start: int, end: int, equal: bool, guess: int) -> int:
    """Return how many rows of a page are below a key, or with `equal` not above it.

    The search gallops from the row `guess`; if that is negative, from where the key would be if keys lay evenly.
    """
    rows = page.rows
    side = compare_bytes(frames, page.prefix, page.prefix + page.shared, data, start, min(start + page.shared, end))
    if side != 0:
        return 0 if side > 0 else rows
    start += page.shared
    word = _word_at(data, start, end)
    if guess < 0:
        above = np.float64(word - page.low) if word > page.low else 0.0
        guess = I64(min(above * page.scale, np.float64(rows - 1)))
    if page.stride > 0:
        guess = _rank_word(frames, page, word, guess)
        if guess == rows or _row_word(frames, page, guess) != word:
            return guess
    most, low, high, step = I64(equal), 0, rows, 1  # rows of an order less than `most` count
    if rows > 0 and _order_of(frames, page, guess, word, data, start, end) < most:
        at = low = guess + 1
        while at < high:
            if _order_of(frames, page, at, word, data, start, end) < most:
                low = at + 1
                at += step
                step *= _STRIDE
            else:
                high = at
    elif rows > 0:
        high, at = guess, guess - 1
        while at >= low:
            if _order_of(frames, page, at, word, data, start, end) < most:
                low = at + 1
            else:
                high = at
                at -= step
                step *= _STRIDE
    while low < high:
        middle = (low + high) >> 1
        if _order_of(frames, page, middle, word, data, start, end) < most:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True, inline="always")
def _order_of_row(frames: Bytes, page: _Page, row: int, data: Bytes, start: int, end: int) -> int:
    """Compare the key of a row with one in `data`."""
    left, left_end = text_span(frames, page.start, page.base, page.packed, row)
    return compare_bytes(frames, left, left_end, data, start, end)


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
    """Find the rows of a page in each range of byte keys, as `search_u64` does; `closed` ranges include their end.

    Keys are compared behind the bytes that all rows of a page share, so most comparisons are of one word, by which a
    search also begins where the key should be.
    """
    last, none = np.int32(-1), np.uint64(0)
    page = _Page(0, 0, none, none, 0, 0, none, 0.0, 0, none)
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        if frame[i] != last:
            last = frame[i]
            page = _page_of(frames, I64(last) * page_size)
        start, stop = low.offsets[i], low.offsets[i + 1]
        end_start, end_stop = high.offsets[i], high.offsets[i + 1]
        if pick == LAST:
            at = _rank_bytes(frames, page, high.data, end_start, end_stop, closed, _ANYWHERE) - 1
            row[i] = max(at, 0)
            count[i] = -1 if at < 0 else _order_of_row(frames, page, at, low.data, start, stop) >= 0
            continue
        at = _rank_bytes(frames, page, low.data, start, stop, _NO, _ANYWHERE)
        end = at
        if pick == EQUAL:
            if at < page.rows and _order_of_row(frames, page, at, low.data, start, stop) == 0:
                end = at + 1 if unique else _rank_bytes(frames, page, low.data, start, stop, _YES, at)
        elif pick == FIRST and at < page.rows:
            order = _order_of_row(frames, page, at, high.data, end_start, end_stop)
            end = at + (order < 0 or (closed and order == 0))
        elif at < page.rows:
            end = max(_rank_bytes(frames, page, high.data, end_start, end_stop, closed, _ANYWHERE), at)
        row[i] = at if end > at else 0
        count[i] = -1 if pick == FIRST and at == page.rows else end - at
