"""Compiled inner nodes: written, read, and searched once they are flat arrays. Arrays in, arrays out.

An inner page of n entries holds, after the header, child pages u64[n], their checksums u64[n], their rows u64[n],
flags u8[n], and the separators: u64[n], or for byte keys end offsets u16[n] and the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import compare_bytes, copy_bytes, load_u16, load_u64, store_u64
from headrace.storage.format.constants import CHILD_BYTES, HEADER, SEPARATOR_END, WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["locate", "plan_inner", "read_inner", "read_separators", "write_nodes"]

_FEWEST = 2
_GALLOP = 6


@njit(cache=True, nogil=True)
def plan_inner(offsets: NDArray[np.int64], wide: bool, rows: int, limit: int) -> NDArray[np.int64]:
    """Return where each inner page ends when entries are packed greedily, at least two to a page."""
    ends = np.empty(rows, dtype=np.int64)
    pages = 0
    size = HEADER
    count = 0
    for row in range(rows):
        entry = CHILD_BYTES + (SEPARATOR_END + offsets[row + 1] - offsets[row] if wide else WORD)
        if count >= _FEWEST and size + entry > limit:
            ends[pages] = row
            pages += 1
            size = HEADER
            count = 0
        size += entry
        count += 1
    if rows > 0:
        ends[pages] = rows
        pages += 1
    return ends[:pages]


@njit(cache=True, nogil=True)
def _write_node(
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    wide: bool,
    children: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    flags: NDArray[np.uint8],
    start: int,
    stop: int,
    level: int,
    pages: NDArray[np.uint8],
    origin: int,
) -> None:
    """Write the inner page of the entries from `start` up to `stop` at `origin`."""
    count = stop - start
    kind = np.uint64(2) | (np.uint64(level) << np.uint64(16)) | (np.uint64(count) << np.uint64(32))
    store_u64(pages, origin + 16, kind)
    at = origin + HEADER
    for i in range(count):
        store_u64(pages, at + 8 * i, np.uint64(children[start + i]))
        store_u64(pages, at + 8 * (count + i), checksums[start + i])
        store_u64(pages, at + 8 * (2 * count + i), np.uint64(rows[start + i]))
        pages[at + 24 * count + i] = flags[start + i]
    at += CHILD_BYTES * count
    if not wide:
        for i in range(count):
            store_u64(pages, at + 8 * i, prefix[start + i])
        return
    text = at + SEPARATOR_END * count
    end = 0
    for i in range(count):
        length = offsets[start + i + 1] - offsets[start + i]
        copy_bytes(data, offsets[start + i], pages, text + end, length)
        end += length
        pages[at + 2 * i] = np.uint8(end & 0xFF)
        pages[at + 2 * i + 1] = np.uint8(end >> 8)


@njit(cache=True, nogil=True)
def write_nodes(
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    wide: bool,
    children: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    flags: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    page_size: int,
    level: int,
    pages: NDArray[np.uint8],
    sums: NDArray[np.int64],
) -> None:
    """Write the nodes whose children are the entries from `starts[i]` up to `stops[i]`.

    Parameters
    ----------
    pages : uint8[len(starts) * page_size + 8]
        Filled; must be zero before.
    sums : int64[len(starts)]
        Filled with the rows below each node.
    """
    for number in range(len(starts)):
        start, stop = starts[number], stops[number]
        _write_node(
            prefix, offsets, data, wide, children, checksums, rows, flags,
            start, stop, level, pages, number * page_size,
        )  # fmt: skip
        sums[number] = rows[start:stop].sum()


@njit(cache=True, nogil=True)
def read_inner(
    frames: NDArray[np.uint8],
    page_size: int,
    wide: bool,
    first: NDArray[np.int64],
    children: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    flags: NDArray[np.uint8],
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
) -> int:
    """Read the entries of inner pages into flat arrays; return the first page whose entries overrun it, or -1.

    Parameters
    ----------
    first : int64[pages + 1]
        Position of the first entry of each page in the flat arrays.
    prefix
        Filled for keys of one word.
    offsets : int64[entries + 1]
        Filled for byte keys: the offsets of the separators when they lie side by side.
    """
    for page in range(len(first) - 1):
        count = first[page + 1] - first[page]
        fixed = count * (CHILD_BYTES + (SEPARATOR_END if wide else WORD))
        if fixed > page_size - HEADER:
            return page
        at = page * page_size + HEADER
        separators = at + CHILD_BYTES * count
        end = 0
        for i in range(count):
            entry = first[page] + i
            children[entry] = np.int64(load_u64(frames, at + 8 * i))
            checksums[entry] = load_u64(frames, at + 8 * (count + i))
            rows[entry] = np.int64(load_u64(frames, at + 8 * (2 * count + i)))
            flags[entry] = frames[at + 24 * count + i]
            if not wide:
                prefix[entry] = load_u64(frames, separators + 8 * i)
                continue
            reached = load_u16(frames, separators + 2 * i)
            if reached < end or fixed + reached > page_size - HEADER:
                return page
            offsets[entry + 1] = offsets[entry] + reached - end
            end = reached
    return -1


@njit(cache=True, nogil=True)
def read_separators(
    frames: NDArray[np.uint8], page_size: int, first: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return the bytes of the separators whose offsets `read_inner` found."""
    result = np.empty(offsets[-1], dtype=np.uint8)
    for page in range(len(first) - 1):
        count = first[page + 1] - first[page]
        text = page * page_size + HEADER + (CHILD_BYTES + SEPARATOR_END) * count
        start = offsets[first[page]]
        copy_bytes(frames, text, result, start, offsets[first[page + 1]] - start)
    return result


@njit(cache=True, nogil=True, inline="always")
def _not_above(
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    at: int,
    key: np.uint64,
    key_data: NDArray[np.uint8],
    start: int,
    end: int,
    wide: bool,
) -> bool:
    """Whether separator `at` is at most the key."""
    if prefix[at] != key or not wide:
        return prefix[at] <= key
    return compare_bytes(data, offsets[at], offsets[at + 1], key_data, start, end) <= 0


@njit(cache=True, nogil=True, inline="always")
def _equal(
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    at: int,
    key: np.uint64,
    key_data: NDArray[np.uint8],
    start: int,
    end: int,
    wide: bool,
) -> bool:
    """Whether separator `at` is the key."""
    if prefix[at] != key or not wide:
        return prefix[at] == key
    return compare_bytes(data, offsets[at], offsets[at + 1], key_data, start, end) == 0


@njit(cache=True, nogil=True)
def locate(
    prefix: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    continued: NDArray[np.uint8],
    key: NDArray[np.uint64],
    key_offsets: NDArray[np.int64],
    key_data: NDArray[np.uint8],
    wide: bool,
    first: NDArray[np.int32],
    last: NDArray[np.int32],
) -> None:
    """Find for each key the leaves, first to last, that may hold it.

    The search gallops from where the previous key was found, and falls back to halving the whole range, so that it
    costs O(1) a key when keys come nearly in order and O(log leaves) when they do not.
    """
    leaves = len(prefix)
    low = 0
    start = end = 0
    for i in range(len(key)):
        if wide:
            start, end = key_offsets[i], key_offsets[i + 1]
        elif i > 0 and key[i] == key[i - 1]:
            first[i] = first[i - 1]
            last[i] = last[i - 1]
            continue
        step = 1
        tries = 0
        if low == 0 or _not_above(prefix, offsets, data, low, key[i], key_data, start, end, wide):
            high = leaves
            while low + step < leaves:
                if not _not_above(prefix, offsets, data, low + step, key[i], key_data, start, end, wide):
                    high = low + step
                    break
                low += step
                step += step
                tries += 1
                if tries == _GALLOP:
                    break
        else:
            high = low
            low = 0
            while high - step > 0 and tries < _GALLOP:
                if _not_above(prefix, offsets, data, high - step, key[i], key_data, start, end, wide):
                    low = high - step
                    break
                high -= step
                step += step
                tries += 1
        while high - low > 1:
            middle = (low + high) >> 1
            if _not_above(prefix, offsets, data, middle, key[i], key_data, start, end, wide):
                low = middle
            else:
                high = middle
        last[i] = low
        first[i] = low
        if continued[low] == 0 or not _equal(prefix, offsets, data, low, key[i], key_data, start, end, wide):
            continue
        # The run of leaves that begin with this key: find its start, then one leaf back for its head.
        bottom = 0
        top = low
        while bottom < top:
            middle = (bottom + top) >> 1
            if _not_above(prefix, offsets, data, middle, key[i], key_data, start, end, wide) and _equal(
                prefix, offsets, data, middle, key[i], key_data, start, end, wide
            ):
                top = middle
            else:
                bottom = middle + 1
        first[i] = bottom - 1 if bottom > 0 and continued[bottom] != 0 else bottom
