"""Compiled as-of lookups in the order of a stream: for each key the nearest row at or before it, or at or after it.

Sibling of `_probe_kernels.probe_pages`: pages are searched by their descriptors, and memory is asked for in groups. A
key whose page has no row on the right side goes on to the neighboring leaf, if that leaf can hold a match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, load_u64
from headrace.storage.format.constants import WORD
from headrace.storage.leaf._search_kernels import first_not_below, mask_of
from headrace.storage.probe._probe_kernels import GROUP, ask_for_facts, guess_rows, key_block, write_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.format.arrays import Bytes, Int32s, Int64s, Words

__all__ = ["probe_nearest"]

_WINDOW = 7  # rows around the guess, searched without a branch
_BEFORE = 3  # of them before it
_IN_GUESSES = np.uint64(2 * GROUP - 1)
_NONE, _WAITS, _IMPOSSIBLE = -1, np.int32(-1), np.int32(-2)
_U64: Any = np.uint64


@njit(inline="always")
def _rows_below(frames: Bytes, data: int, width: int, mask: np.uint64, rows: int, target: np.uint64, guess: int) -> int:
    """Return how many rows of a page are below the target, which is above the page's base."""
    begin = guess - _BEFORE
    if begin >= 0 and begin + _WINDOW <= rows:
        start = data + begin * width
        below = 4 * I64((load_u64(frames, start + 3 * width) & mask) < target)
        below += 2 * I64((load_u64(frames, start + (below + 1) * width) & mask) < target)
        below += I64((load_u64(frames, start + below * width) & mask) < target)
        if 0 < below < _WINDOW:
            return begin + below
    return first_not_below(frames, data, width, mask, rows, target, guess)


@njit(inline="always")
def _nearest_row(
    frames: Bytes, page: int, base: np.uint64, packed: np.uint64, near: np.uint64, last: bool, guess: int
) -> int:
    """Return the last row not above a key, or the first one not below it; -1 if the page has none."""
    rows, width, place = key_block(packed)
    mask = mask_of(_U64(width))
    above = near - base
    if last:
        if near < base:
            return _NONE
        if above >= mask:
            return rows - 1
        return _rows_below(frames, page + place, width, mask, rows, above + _U64(1), guess) - 1
    if near <= base:
        return 0 if rows > 0 else _NONE
    if above > mask:
        return _NONE
    at = _rows_below(frames, page + place, width, mask, rows, above, guess)
    return at if at < rows else _NONE


@njit(inline="always")
def _far_end(near: np.uint64, far: Words, i: np.uint64, span: np.uint64, last: bool) -> np.uint64:
    """Return the farthest key that still matches."""
    if len(far) > 0:
        return far[i]
    return near & ~span if last else near | span


@njit(cache=True, nogil=True)
def _go_on(
    facts: Words, stride: int, separators: Words, frame_of: Int32s, far: np.uint64, last: bool, leaf: int
) -> tuple[int, int, int]:
    """Return the next leaf that can decide, its frame (-1 if it is not cached, -2 if no leaf can match), and its row.

    `leaf` has no row on the right side of the key.
    """
    while True:
        if last:
            if leaf == 0 or far >= separators[leaf]:
                return leaf, -2, _NONE
            leaf -= 1
        else:
            leaf += 1
            if leaf == len(separators) or separators[leaf] > far:
                return leaf - 1, -2, _NONE
        place = I64(frame_of[leaf])
        if place < 0:
            return leaf, -1, _NONE
        rows, _, _ = key_block(facts[place * stride + 2])
        if rows > 0:
            return leaf, place, rows - 1 if last else 0


@njit(inline="always")
def _in_range(
    frames: Bytes, page: int, base: np.uint64, packed: np.uint64, at: int, far: np.uint64, last: bool
) -> bool:
    """Return whether the key of a row has not passed the far end."""
    _, width, place = key_block(packed)
    key = base + (load_u64(frames, page + place + at * width) & mask_of(_U64(width)))
    return key >= far if last else key <= far


@njit(inline="always")
def _write_results(
    frames: Bytes,
    page_size: int,
    facts: Words,
    stride: int,
    near: Words,
    far: Words,
    span: np.uint64,
    last: bool,
    separators: Words,
    frame_of: Int32s,
    leaf: Int32s,
    frame: Int32s,
    outer: bool,
    begin: np.uint64,
    stop: np.uint64,
    guess: Int64s,
    sizes: Int64s,
    starts: Int64s,
    out: Bytes,
    valid: Bytes,
    missing: Int64s,
    row: Int32s,
    source: Int32s,
    results: np.uint64,
) -> np.uint64:
    """Find the rows of some keys and write the results; return how many results there are by now."""
    for i in range(begin, stop):
        at, place = I64(_NONE), I64(frame[i])
        if place >= 0:
            fact, end = _U64(place * stride), _far_end(near[i], far, i, span, last)
            at = _nearest_row(
                frames, place * page_size, facts[fact], facts[fact + _U64(2)], near[i], last, guess[i & _IN_GUESSES]
            )
            if at < 0:
                to, place, at = _go_on(facts, stride, separators, frame_of, end, last, I64(leaf[i]))
                leaf[i], frame[i] = to, place
            if at >= 0:
                fact = _U64(place * stride)
                if not _in_range(frames, place * page_size, facts[fact], facts[fact + _U64(2)], at, end, last):
                    at = I64(_NONE)
        row[i] = at
        source[results] = i
        if at < 0 and (not outer or place == -1):
            continue
        write_row(
            frames, place * page_size, facts, _U64(place * stride), at, sizes, starts, out, valid, missing, results
        )
        results += _U64(1)
    return results


@njit(cache=True, nogil=True)
def probe_nearest(
    frames: Bytes,
    page_size: int,
    facts: Words,
    guesses: NDArray[np.float32],
    near: Words,
    far: Words,
    span: np.uint64,
    last: bool,
    separators: Words,
    frame_of: Int32s,
    leaf: Int32s,
    frame: Int32s,
    outer: bool,
    sizes: Int64s,
    starts: Int64s,
    out: Bytes,
    valid: Bytes,
    missing: Int64s,
    row: Int32s,
    source: Int32s,
) -> int:
    """Find the row nearest to each key, and write the columns of the results; return how many results there are.

    Parameters
    ----------
    facts, guesses
        Page descriptors, see `headrace.storage.probe._probe_kernels.describe_pages`.
    near
        Keys to find the nearest row of.
    far : uint64[n] or uint64[0]
        Farthest key that matches; empty if keys match that agree with `near` in all bits outside of `span`.
    span
        Bits of a key in which a match may differ.
    last
        Whether to find the last row at or before each key instead of the first one at or after it.
    separators : uint64[leaves]
        Separator before each leaf. Keys must be unique.
    frame_of : int32[leaves]
        Frame of each leaf, -1 for none.
    leaf, frame : int32[n]
        Leaf in which each key falls, and its frame: -1 gives no result for now, -2 no match. Changed where another
        leaf has the nearest row or may have it.
    outer
        Whether a key without a match gives a row of nulls.
    sizes, starts, out, valid, missing
        Arrays of a `headrace.storage.leaf.FixedRows`.
    row : int32[n]
        Row of each key in its page, -1 for none.
    source : int32[n]
        Position of each result's key.
    """
    stride, words = facts.shape[1], len(sizes)
    flat, flat_guesses = facts.reshape(facts.size), guesses.reshape(guesses.size)
    lines, nbytes = flat.view(np.uint8), WORD * stride
    guess = np.empty(2 * GROUP, dtype=np.int64)
    begin, results, group, end = _U64(0), _U64(0), _U64(GROUP), _U64(len(near))
    stop, none = min(group, end), _U64(0)
    ask_for_facts(lines, nbytes, frame, begin, min(stop + group, end))
    guess_rows(frames, page_size, flat, flat_guesses, stride, words, near, none, frame, begin, stop, guess)
    while begin < end:
        ahead = min(stop + group, end)
        ask_for_facts(lines, nbytes, frame, ahead, min(ahead + group, end))
        guess_rows(frames, page_size, flat, flat_guesses, stride, words, near, none, frame, stop, ahead, guess)
        results = _write_results(
            frames, page_size, flat, stride, near, far, span, last, separators, frame_of, leaf, frame, outer, begin,
            stop, guess, sizes, starts, out, valid, missing, row, source, results,
        )  # fmt: skip
        begin, stop = stop, ahead
    return I64(results)
