"""Compiled look-ups in the order of a stream: leaf, page and row of one key after the other. Arrays in, arrays out.

Keys in no order are wherever memory is slowest, so each step is taken for a group of keys before the next one is:
what it will touch is asked for first, and has come when it is touched. What a search needs of a page, its *facts*, is
kept apart from the pages, in a few words that stay in the processor's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from storage._byte_kernels import load_u64, prefetch, store_u64
from storage._kernels import first_not_below, mask_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FACTS", "FACTS_OF_A_COLUMN", "describe_pages", "locate_frames", "probe_pages"]

FACTS = 3
"""Words of a page's key: base, rows per unit of the key above it, and (rows, width, place) packed."""
FACTS_OF_A_COLUMN = 2
"""Words of a page's column: its directory entry."""

_GROUP = 32
_HEADER, _ENTRY = 24, 16  # of a leaf page; see storage/FORMAT.md
_U8, _U16 = np.uint64(0xFF), np.uint64(0xFFFF)
_BITMAP, _WIDTH, _ROWS = np.uint64(32), np.uint64(48), np.uint64(32)
_IMPOSSIBLE = np.int32(-2)
_I64: Any = np.int64  # numba knows the scalar, mypy would not let it meet an int


@njit(inline="always")
def _width(packed: np.uint64) -> np.uint64:
    return (packed >> _WIDTH) & _U8


@njit(cache=True, nogil=True)
def locate_frames(
    key: NDArray[np.uint64],
    valid: NDArray[np.bool_],
    low: np.uint64,
    shift: np.uint64,
    first: NDArray[np.int32],
    separators: NDArray[np.uint64],
    frame_of: NDArray[np.int32],
    leaf: NDArray[np.int32],
    frame: NDArray[np.int32],
) -> int:
    """Find leaves and frames; return how many leaves are in no frame. See `storage.leaf_ranges.LeafRanges.locate`.

    Parameters
    ----------
    low, shift
        Interval of a key: how far it is above `low`, without so many low bits.
    first : int32[intervals]
        First leaf of each.
    separators : uint64[leaves]
    """
    waiting = 0
    every = len(valid) == 0
    top = np.uint64(len(first) - 1)
    end = np.empty(_GROUP, dtype=np.int32)
    for begin in range(0, len(key), _GROUP):
        stop = min(begin + _GROUP, len(key))
        for i in range(begin, stop):
            interval = min((max(key[i], low) - low) >> shift, top)
            leaf[i] = first[interval]
            end[i - begin] = first[interval + np.uint64(1)] if interval < top else len(separators) - 1
        for i in range(begin, stop):
            at = _I64(leaf[i])
            more = _I64(end[i - begin]) - at
            while more > 0:
                half = (more + 1) >> 1
                at = at + half if separators[at + half] <= key[i] else at
                more -= half
            leaf[i] = at
            frame[i] = frame_of[at] if every or valid[i] else _IMPOSSIBLE
            waiting += frame[i] == -1
    return waiting


@njit(cache=True, nogil=True)
def describe_pages(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int64],
    entries: NDArray[np.int64],
    facts: NDArray[np.uint64],
    slopes: NDArray[np.float64],
) -> None:
    """Write the facts of the pages in some frames.

    Parameters
    ----------
    entries : int64[words]
        Of the columns, in the pages' directories.
    facts : uint64[frames, FACTS + FACTS_OF_A_COLUMN * words]
    slopes : float64, the same memory
    """
    for at in frame:
        page = at * page_size
        rows = load_u64(frames, page + 16) >> _ROWS
        packed = load_u64(frames, page + _HEADER + 8)
        last = page + _I64(packed & _U16) + (_I64(rows) - 1) * _I64(_width(packed))
        top = load_u64(frames, last) & mask_of(_width(packed)) if rows > 0 else np.uint64(0)
        facts[at, 0] = load_u64(frames, page + _HEADER)
        slopes[at, 1] = np.float64(_I64(rows) - 1) / np.float64(top) if top > 0 else 0.0
        facts[at, 2] = (packed & _U16) | (_width(packed) << np.uint64(16)) | (rows << _ROWS)
        for word in range(len(entries)):
            entry = page + _HEADER + _ENTRY * entries[word]
            facts[at, FACTS + FACTS_OF_A_COLUMN * word] = load_u64(frames, entry)
            facts[at, FACTS + FACTS_OF_A_COLUMN * word + 1] = load_u64(frames, entry + 8)


@njit(inline="always")
def _key_place(fact: NDArray[np.uint64], page: int) -> tuple[int, int, np.uint64]:
    """Return where a page's keys begin, how many there are, and their width."""
    return page + _I64(fact[2] & _U16), _I64(fact[2] >> _ROWS), (fact[2] >> np.uint64(16)) & _U8


@njit(cache=True, nogil=True)
def probe_pages(
    frames: NDArray[np.uint8],
    page_size: int,
    facts: NDArray[np.uint64],
    slopes: NDArray[np.float64],
    key: NDArray[np.uint64],
    frame: NDArray[np.int32],
    outer: bool,
    sizes: NDArray[np.int64],
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    missing: NDArray[np.int64],
    row: NDArray[np.int32],
    source: NDArray[np.int32],
) -> int:
    """Find each key in its page, and write the columns of the results; return how many results there are.

    Keys must be unique.

    Parameters
    ----------
    facts, slopes
        Of `describe_pages`.
    frame : int32[n]
        Page of each key; -1 gives no result for now, -2 no match.
    outer
        Whether a key without a match gives a row of nulls.
    sizes, starts, out, valid, missing
        Of `storage.fixed_rows.FixedRows`.
    row : int32[n]
        Where each key was found in its page, -1 if nowhere.
    source : int32[n]
        Of each result: its key's position.
    """
    results = 0
    for begin in range(0, len(key), _GROUP):
        stop = min(begin + _GROUP, len(key))
        for i in range(begin, stop):
            row[i] = -1
            if frame[i] < 0:
                continue
            fact = facts[frame[i]]
            data, rows, width = _key_place(fact, _I64(frame[i]) * page_size)
            above = np.float64(key[i] - fact[0]) if key[i] >= fact[0] else 0.0
            at = min(_I64(min(above * slopes[frame[i], 1], np.float64(rows - 1))), rows - 1)
            row[i] = at
            prefetch(frames, data + at * _I64(width))
            for word in range(len(sizes)):
                packed = fact[FACTS + FACTS_OF_A_COLUMN * word + 1]
                prefetch(frames, _I64(frame[i]) * page_size + _I64(packed & _U16) + at * _I64(_width(packed)))
        for i in range(begin, stop):
            if row[i] >= 0:
                fact = facts[frame[i]]
                data, rows, width = _key_place(fact, _I64(frame[i]) * page_size)
                mask = mask_of(width)
                target = key[i] - fact[0]
                at = _I64(row[i])
                if key[i] < fact[0]:
                    at = rows
                elif load_u64(frames, data + at * _I64(width)) & mask != target:
                    at = first_not_below(frames, data, _I64(width), mask, rows, target, at)
                    if at < rows and load_u64(frames, data + at * _I64(width)) & mask != target:
                        at = rows
                row[i] = at if at < rows else -1
            if row[i] < 0 and (frame[i] == -1 or not outer):
                continue
            source[results] = i
            for word in range(len(sizes)):
                present = row[i] >= 0
                value = np.uint64(0)
                if present:
                    page = _I64(frame[i]) * page_size
                    packed = facts[frame[i], FACTS + FACTS_OF_A_COLUMN * word + 1]
                    bitmap = _I64((packed >> _BITMAP) & _U16)
                    if bitmap > 0:
                        present = (frames[page + bitmap + (row[i] >> 3)] >> (row[i] & 7)) & 1 == 0
                    if present:
                        place = page + _I64(packed & _U16) + _I64(row[i]) * _I64(_width(packed))
                        value = facts[frame[i], FACTS + FACTS_OF_A_COLUMN * word] + (
                            load_u64(frames, place) & mask_of(_width(packed))
                        )
                valid[word, results] = present
                missing[word] += not present
                store_u64(out, starts[word] + results * sizes[word], value)
            results += 1
    return results
