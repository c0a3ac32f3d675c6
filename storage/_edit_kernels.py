"""Compiled plans for changing encoded leaves: which rows go and which come, and whether they fit. Writes nothing.

Columns of new rows come as the encoder takes them: see `_encode_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage._byte_kernels import compare_bytes, load_u16, load_u64
from headrace.storage._pack_kernels import bytes_needed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["column_bytes", "dictionary_bytes", "field", "number_at", "plan_edits", "put_number", "text_end"]

_HEADER = 24
_WORD = 8
_ALL = ~np.uint64(0)
_MIN, _MAX = np.int64(-(2**63)), np.int64(2**63 - 1)
_TEXT_PLAIN = 1


@njit(cache=True, nogil=True, inline="always")
def _number(page: NDArray[np.uint8], at: int, width: int) -> Any:
    if width == 0:
        return 0
    mask = _ALL if width >= _WORD else (np.uint64(1) << np.uint64(8 * width)) - np.uint64(1)
    return np.int64(load_u64(page, at) & mask)


@njit(cache=True, nogil=True, inline="always")
def number_at(page: NDArray[np.uint8], data: int, width: int, row: int) -> Any:
    """Return number `row` of a block of numbers."""
    return _number(page, data + row * width, width)


@njit(cache=True, nogil=True, inline="always")
def put_number(page: NDArray[np.uint8], at: int, value: np.uint64, width: int) -> None:
    for byte in range(width):
        page[at + byte] = np.uint8((value >> np.uint64(8 * byte)) & np.uint64(0xFF))


@njit(cache=True, nogil=True, inline="always")
def _fits(value: np.uint64, width: int) -> Any:
    return width >= _WORD or value < (np.uint64(1) << np.uint64(8 * width))


@njit(cache=True, nogil=True, inline="always")
def field(page: NDArray[np.uint8], entry: int, at: int) -> Any:
    return load_u16(page, entry + at)


@njit(cache=True, nogil=True)
def _lower_bound(page: NDArray[np.uint8], data: int, width: int, start: int, stop: int, delta: np.uint64) -> int:
    while start < stop:
        middle = (start + stop) >> 1
        if np.uint64(_number(page, data + middle * width, width)) < delta:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)
def plan_edits(
    page: NDArray[np.uint8],
    origin: int,
    touched: NDArray[np.uint64],
    upserted: NDArray[np.bool_],
    t: int,
    t_end: int,
    keys: NDArray[np.uint64],
    fresh: NDArray[np.bool_],
    q: int,
    q_end: int,
    edits: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[int, int]:
    """Find which old rows go and where new ones come in; return how many edits, and a new row whose key stays, or -1.

    An edit replaces old rows edits[e, 0] up to edits[e, 1] by new rows edits[e, 2] up to edits[e, 3].
    """
    entry = origin + _HEADER
    rows = np.int64(load_u64(page, origin + 16) >> np.uint64(32))
    base = load_u64(page, entry)
    width = np.int64(page[entry + 14])
    data = origin + field(page, entry, 8)
    found = 0
    clash = -1
    position = 0
    while t < t_end or q < q_end:
        key = touched[t] if t < t_end and (q == q_end or touched[t] <= keys[q]) else keys[q]
        low = position
        if key >= base:
            low = _lower_bound(page, data, width, position, rows, key - base)
        high = low
        while high < rows and key >= base and np.uint64(_number(page, data + high * width, width)) == key - base:
            high += 1
        stop = q
        replacing = 0
        while stop < q_end and keys[stop] == key:
            replacing += not fresh[stop]
            stop += 1
        if t < t_end and touched[t] == key:
            if high > low:
                counts[1] += replacing
                counts[0] -= replacing
            if not upserted[t]:
                counts[2] += high - low
            t += 1
        else:
            if high > low:
                clash = q
            low = high
        counts[0] += stop - q
        if high > low or stop > q:
            edits[found, 0] = low
            edits[found, 1] = high
            edits[found, 2] = q
            edits[found, 3] = stop
            found += 1
        q = stop
        position = high
    return found, clash


@njit(cache=True, nogil=True)
def _dictionary_code(page: NDArray[np.uint8], block: int, heap: NDArray[np.uint8], start: int, end: int) -> int:
    size = load_u16(page, block)
    text = block + 2 + 2 * size
    begin = 0
    for code in range(size):
        stop = load_u16(page, block + 2 + 2 * code)
        if stop - begin == end - start and compare_bytes(page, text + begin, text + stop, heap, start, end) == 0:
            return code
        begin = stop
    return -1


@njit(cache=True, nogil=True, inline="always")
def text_end(page: NDArray[np.uint8], data: int, width: int, base: int, row: int) -> Any:
    """Return where the text of a row ends; 0 for the row before the first."""
    return (row + 1) * base + _number(page, data + row * width, width) if row >= 0 else 0


@njit(cache=True, nogil=True)
def dictionary_bytes(page: NDArray[np.uint8], block: int) -> Any:
    size = load_u16(page, block)
    return 2 + 2 * size + (load_u16(page, block + 2 * size) if size > 0 else 0)


@njit(cache=True, nogil=True)
def _frame_of(
    page: NDArray[np.uint8],
    data: int,
    base: np.uint64,
    width: int,
    rows: int,
    edits: NDArray[np.int64],
    found: int,
    words: NDArray[np.int64],
    absent: NDArray[np.uint8],
    flip: np.uint64,
) -> tuple[np.uint64, np.uint64]:
    """Return base and width of a patched column of numbers as the encoder chooses them."""
    low = _MAX
    high = _MIN
    source = 0
    for edit in range(found + 1):
        for row in range(source, edits[edit, 0] if edit < found else rows):
            value = np.int64((base + np.uint64(number_at(page, data, width, row))) ^ flip)
            low = min(low, value)
            high = max(high, value)
        if edit == found:
            break
        for row in range(edits[edit, 2], edits[edit, 3]):
            if len(absent) == 0 or absent[row] == 0:
                low = min(low, words[row])
                high = max(high, words[row])
        source = edits[edit, 1]
    return np.uint64(low) ^ flip, np.uint64(bytes_needed(np.uint64(high) - np.uint64(low)))


@njit(cache=True, nogil=True)
def column_bytes(
    page: NDArray[np.uint8],
    origin: int,
    entry: int,
    rows: int,
    edits: NDArray[np.int64],
    found: int,
    words: NDArray[np.int64],
    spans: NDArray[np.int64],
    heap: NDArray[np.uint8],
    absent: NDArray[np.uint8],
    flip: np.uint64,
    codes: NDArray[np.int32],
    frame: NDArray[np.uint64],
) -> Any:
    """Return the bytes of a patched column without its nulls, or -1 if a new text does not fit.

    Fills `frame` with its base and width, which stay as they are unless a new number needs others. Only differences of
    keys have to ascend: those of other numbers may pass 2**64.
    """
    ascending = flip != 0
    base = load_u64(page, entry)
    data = origin + field(page, entry, 8)
    aux = origin + field(page, entry, 10)
    width = np.int64(page[entry + 14])
    encoding = page[entry + 15]
    frame[0], frame[1] = base, np.uint64(width)
    total = 0
    if encoding == _TEXT_PLAIN:
        total = text_end(page, data, width, np.int64(base), rows - 1)
    after = rows
    fits = True
    for edit in range(found):
        if encoding == _TEXT_PLAIN:
            before = text_end(page, data, width, np.int64(base), edits[edit, 0] - 1)
            total -= text_end(page, data, width, np.int64(base), edits[edit, 1] - 1) - before
        after += edits[edit, 3] - edits[edit, 2] - edits[edit, 1] + edits[edit, 0]
        for row in range(edits[edit, 2], edits[edit, 3]):
            null = len(absent) > 0 and absent[row] != 0
            if encoding == 0:
                value = np.uint64(words[row]) ^ flip
                fits &= null or (_fits(value - base, width) and (not ascending or value >= base))
            elif encoding == _TEXT_PLAIN:
                length = 0 if null else spans[row + 1] - spans[row]
                if length < np.int64(base):
                    return -1
                total += length
            elif not null:
                codes[row] = _dictionary_code(page, aux, heap, spans[row], spans[row + 1])
                if codes[row] < 0:
                    return -1
    if encoding == 0:
        if not fits:
            frame[0], frame[1] = _frame_of(page, data, base, width, rows, edits, found, words, absent, flip)
        return after * np.int64(frame[1])
    if encoding == _TEXT_PLAIN:
        return after * width + total if _fits(np.uint64(total - after * np.int64(base)), width) else -1
    return after * width + dictionary_bytes(page, aux)
