"""Compiled inner nodes: written, read, and searched once they are flat arrays. Arrays in, arrays out.

An inner page of n entries holds, after the header, child pages u64[n], their checksums u64[n], their rows u64[n],
flags u8[n], and the separators: u64[n], or for byte keys end offsets u16[n] and the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import compare_bytes, copy_bytes, load_u16, load_u64, store_u64
from headrace.storage.format._key_kernels import KeyParts, compare_keys
from headrace.storage.format.constants import CHILD_BYTES, HEADER, SEPARATOR_END, WORD

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Int32s, Int64s, Words

__all__ = [
    "Children",
    "locate",
    "plan_inner",
    "read_inner",
    "read_pointers",
    "read_separators",
    "search_nodes",
    "write_nodes",
]

_FEWEST = 2
_GALLOP = 6


@njit(cache=True, nogil=True)
def plan_inner(offsets: Int64s, wide: bool, rows: int, limit: int) -> Int64s:
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


class Children(NamedTuple):
    """Entries of inner nodes as kernels take them; see `headrace.storage.tree.nodes.Entries`."""

    pages: Int64s
    checksums: Words
    rows: Int64s
    continued: Bytes


@njit(cache=True, nogil=True)
def write_nodes(
    separators: KeyParts,
    wide: bool,
    children: Children,
    starts: Int64s,
    stops: Int64s,
    page_size: int,
    level: int,
    pages: Bytes,
    sums: Int64s,
) -> None:
    """Write the nodes whose children are the entries from `starts[i]` up to `stops[i]`.

    Parameters
    ----------
    pages : uint8[len(starts) * page_size + 8]
        Filled; must be zero before.
    sums : int64[len(starts)]
        Filled with the rows below each node.
    """
    prefix, offsets, data = separators
    for number in range(len(starts)):
        start = starts[number]
        count = stops[number] - start
        kind = np.uint64(2) | (np.uint64(level) << np.uint64(16)) | (np.uint64(count) << np.uint64(32))
        store_u64(pages, number * page_size + 16, kind)
        at = number * page_size + HEADER
        end = at + CHILD_BYTES * count
        text = end + SEPARATOR_END * count
        sums[number] = 0
        for i in range(count):
            child = start + i
            store_u64(pages, at + 8 * i, np.uint64(children.pages[child]))
            store_u64(pages, at + 8 * (count + i), children.checksums[child])
            store_u64(pages, at + 8 * (2 * count + i), np.uint64(children.rows[child]))
            pages[at + 24 * count + i] = children.continued[child]
            sums[number] += children.rows[child]
        for i in range(count):
            if not wide:
                store_u64(pages, end + 8 * i, prefix[start + i])
                continue
            length = offsets[start + i + 1] - offsets[start + i]
            reached = offsets[start + i + 1] - offsets[start]
            copy_bytes(data, offsets[start + i], pages, text + reached - length, length)
            pages[end + 2 * i] = np.uint8(reached & 0xFF)
            pages[end + 2 * i + 1] = np.uint8(reached >> 8)


@njit(cache=True, nogil=True)
def read_inner(
    frames: Bytes,
    page_size: int,
    wide: bool,
    first: Int64s,
    children: Int64s,
    checksums: Words,
    rows: Int64s,
    flags: Bytes,
    prefix: Words,
    offsets: Int64s,
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
def read_separators(frames: Bytes, page_size: int, first: Int64s, offsets: Int64s) -> Bytes:
    """Return the bytes of the separators whose offsets `read_inner` found."""
    result = np.empty(offsets[-1], dtype=np.uint8)
    for page in range(len(first) - 1):
        count = first[page + 1] - first[page]
        text = page * page_size + HEADER + (CHILD_BYTES + SEPARATOR_END) * count
        start = offsets[first[page]]
        copy_bytes(frames, text, result, start, offsets[first[page + 1]] - start)
    return result


@njit(cache=True, nogil=True, inline="always")
def _last_not_above(separators: KeyParts, keys: KeyParts, i: int, wide: bool, low: int) -> int:
    """Return the last separator that is at most key `i`; the search gallops from `low`, and falls back to halving."""
    high = len(separators.prefix)
    step = 1
    tries = 0
    if low == 0 or compare_keys(separators, low, keys, i, wide) <= 0:
        while low + step < high and tries < _GALLOP:
            if compare_keys(separators, low + step, keys, i, wide) > 0:
                high = low + step
            else:
                low += step
                step += step
                tries += 1
    else:
        high = low
        low = 0
        while high - step > low and tries < _GALLOP:
            if compare_keys(separators, high - step, keys, i, wide) <= 0:
                low = high - step
            else:
                high -= step
                step += step
                tries += 1
    while high - low > 1:
        middle = (low + high) >> 1
        if compare_keys(separators, middle, keys, i, wide) <= 0:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def locate(separators: KeyParts, continued: Bytes, keys: KeyParts, wide: bool, first: Int32s, last: Int32s) -> None:
    """Find for each key the leaves, first to last, that may hold it.

    A key costs O(1) when keys come nearly in order and O(log leaves) when they do not.
    """
    low = 0
    for i in range(len(keys.prefix)):
        if not wide and i > 0 and keys.prefix[i] == keys.prefix[i - 1]:
            first[i] = first[i - 1]
            last[i] = last[i - 1]
            continue
        low = _last_not_above(separators, keys, i, wide, low)
        last[i] = low
        first[i] = low
        if continued[low] == 0 or compare_keys(separators, low, keys, i, wide) != 0:
            continue
        # The run of leaves that begin with this key: find its start, then one leaf back for its head.
        bottom = 0
        top = low
        while bottom < top:
            middle = (bottom + top) >> 1
            if compare_keys(separators, middle, keys, i, wide) == 0:
                top = middle
            else:
                bottom = middle + 1
        first[i] = bottom - 1 if bottom > 0 and continued[bottom] != 0 else bottom


# Nodes as they are on disk


@njit(cache=True, nogil=True)
def _compare_separator(frames: Bytes, page: int, count: int, child: int, keys: KeyParts, i: int, wide: bool) -> int:
    """Compare a separator in the page that begins at byte `page` with a key; the sign of the result is their order."""
    separators = page + HEADER + CHILD_BYTES * count
    if not wide:
        word = load_u64(frames, separators + 8 * child)
        return -1 if word < keys.prefix[i] else int(word > keys.prefix[i])
    texts = separators + SEPARATOR_END * count
    start = texts if child == 0 else texts + load_u16(frames, separators + 2 * (child - 1))
    end = texts + load_u16(frames, separators + 2 * child)
    return compare_bytes(frames, start, end, keys.data, keys.offsets[i], keys.offsets[i + 1])


@njit(cache=True, nogil=True)
def _first_child(frames: Bytes, page: int, count: int, keys: KeyParts, i: int, wide: bool, least: int) -> int:
    """Return the first child whose separator compares to key `i` with at least `least`; their number if none does."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) >> 1
        if _compare_separator(frames, page, count, middle, keys, i, wide) < least:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def search_nodes(
    frames: Bytes,
    page_size: int,
    frame: Int32s,
    count: Int64s,
    keys: KeyParts,
    wide: bool,
    which: Int64s,
    first: Int32s,
    last: Int32s,
) -> None:
    """Find the children, first to last, of one node for each key that may hold it.

    Parameters
    ----------
    frame : int32[n]
        Frame of the node of each key. The separator of the node is not above the key.
    count : int64[n]
        Children of the node.
    which : int64[n]
        Places of the keys in `keys`, `first` and `last`.
    first, last
        Outputs: numbers of the children.
    """
    for at in range(len(which)):
        i, children = which[at], count[at]
        page = frame[at] * page_size
        last[i] = max(_first_child(frames, page, children, keys, i, wide, 1) - 1, 0)
        begin = _first_child(frames, page, children, keys, i, wide, 0)
        flags = page + HEADER + CHILD_BYTES * children - children
        before = begin > 0 and (begin > last[i] or frames[flags + begin] != 0)
        first[i] = begin - 1 if before else begin


@njit(cache=True, nogil=True)
def read_pointers(
    frames: Bytes,
    page_size: int,
    frame: Int32s,
    count: Int64s,
    child: Int64s,
    which: Int64s,
    pages: Int64s,
    checksums: Words,
) -> None:
    """Read the pages and checksums of children; parameters as in `search_nodes`, and `child[i]` the child's number."""
    for at in range(len(which)):
        start = frame[at] * page_size + HEADER
        pages[which[at]] = np.int64(load_u64(frames, start + 8 * child[at]))
        checksums[which[at]] = load_u64(frames, start + 8 * (count[at] + child[at]))
