"""Compiled lookups in the order of a stream: leaf, page and row of one key after the other. Arrays in, arrays out.

Keys in no order are wherever memory is slowest, so what a group of keys will touch is asked for before the group
ahead of it is searched, and has come by then. What a search needs of a page, its *facts*, is kept apart from the pages,
in a few words that stay in the processor's cache, if not in the fastest.

Places in arrays are unsigned wherever they are not known to the compiler: it would allow for negative ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, load_u64, prefetch, store_u64
from headrace.storage.format.constants import DIRECTORY_ENTRY, HEADER, WORD
from headrace.storage.leaf._search_kernels import first_not_below, mask_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.format.arrays import Bytes, Flags, Int32s, Int64s, Words

__all__ = [
    "FACTS",
    "FACTS_OF_A_COLUMN",
    "GROUP",
    "ask_for_facts",
    "describe_pages",
    "greatest_key",
    "guess_rows",
    "is_null",
    "key_block",
    "locate_frames",
    "probe_pages",
    "rows_of",
    "value_above",
    "write_row",
]

FACTS = 3
"""Words of a page's key: base, guess, and (rows, width, place) packed. The guess is two numbers of 32 bits: rows per
unit of the key above the base, and what is to be added for the whole part to be the row."""
FACTS_OF_A_COLUMN = 2
"""Words of a page's column: its directory entry."""
GROUP = 8
"""Keys searched between two requests for memory: two groups of lines are about what a core can wait for at once."""

_SAMPLES = 32
_IN_GUESSES = np.uint64(2 * GROUP - 1)
_U8, _U16 = np.uint64(0xFF), np.uint64(0xFFFF)
_KEY_WIDTH = np.uint64(16)
_BITMAP, _WIDTH, _ROWS = np.uint64(32), np.uint64(48), np.uint64(32)
_LARGEST = np.uint64(2**63 - 1)
_IMPOSSIBLE = np.int32(-2)
_U64: Any = np.uint64


@njit(inline="always")
def _width(packed: np.uint64) -> np.uint64:
    return (packed >> _WIDTH) & _U8


@njit(inline="always")
def is_null(frames: Bytes, page: int, packed: np.uint64, row: int) -> bool:
    """Whether a row of a page is null in the column with this directory entry."""
    bitmap = I64((packed >> _BITMAP) & _U16)
    return bitmap > 0 and (frames[page + bitmap + (row >> 3)] >> (row & 7)) & 1 != 0


@njit(inline="always")
def value_above(frames: Bytes, page: int, packed: np.uint64, row: int) -> np.uint64:
    """Return by how much the word of a row is above the base of the column with this directory entry."""
    width = _width(packed)
    return load_u64(frames, page + I64(packed & _U16) + row * I64(width)) & mask_of(width)


@njit(cache=True, nogil=True)
def locate_frames(
    key: Words,
    above: np.uint64,
    valid: Flags,
    low: np.uint64,
    shift: np.uint64,
    first: Int32s,
    separators: Words,
    frame_of: Int32s,
    leaf: Int32s,
    frame: Int32s,
) -> int:
    """Find leaves and frames; return how many leaves are in no frame. See `LeafRanges.locate`.

    Parameters
    ----------
    key, above
        Words, and what keys are above them.
    low, shift
        Interval of a key: how far it is above `low`, without so many low bits.
    first : int32[intervals]
        First leaf of each.
    separators : uint64[leaves]
    """
    waiting = 0
    every = len(valid) == 0
    top, last = _U64(len(first) - 1), _U64(len(separators) - 1)
    one = _U64(1)
    for i in range(_U64(len(key))):
        wanted = key[i] + above
        interval = min((max(wanted, low) - low) >> shift, top)
        at = _U64(first[interval])
        more = (_U64(first[interval + one]) if interval < top else last) - at
        # Most intervals have one leaf or two: one unconditional step saves an unpredictable branch.
        half = (more + one) >> one
        at = at + half if separators[at + half] <= wanted else at
        more -= half
        while more > _U64(0):
            half = (more + one) >> one
            at = at + half if separators[at + half] <= wanted else at
            more -= half
        leaf[i] = at
        frame[i] = frame_of[at] if every or valid[i] else _IMPOSSIBLE
        waiting += frame[i] == -1
    return waiting


@njit(inline="always")
def _offset(frames: Bytes, page: int, packed: np.uint64, rows: int, slope: float) -> float:
    """Return what makes a guess right for as many keys of a page as can be, judged by some of them."""
    least = most = 0.0
    data, width = page + I64(packed & _U16), I64(_width(packed))
    for row in range(0, rows, max(1, rows // _SAMPLES)):
        off = row - np.float64(load_u64(frames, data + row * width) & mask_of(_width(packed))) * slope
        least, most = min(least, off), max(most, off)
    return 0.5 + (least + most) / 2


@njit(cache=True, nogil=True)
def describe_pages(
    frames: Bytes, page_size: int, frame: Int64s, entries: Int64s, facts: Words, guesses: NDArray[np.float32]
) -> None:
    """Write the facts of the pages in some frames.

    Parameters
    ----------
    entries : int64[words]
        Directory entries of the columns' words.
    facts : uint64[frames, FACTS + FACTS_OF_A_COLUMN * words]
    guesses : float32, the same memory
    """
    for at in frame:
        page = at * page_size
        rows = load_u64(frames, page + 16) >> _ROWS
        packed = load_u64(frames, page + HEADER + 8)
        last = page + I64(packed & _U16) + (I64(rows) - 1) * I64(_width(packed))
        top = load_u64(frames, last) & mask_of(_width(packed)) if rows > 0 else np.uint64(0)
        facts[at, 0] = load_u64(frames, page + HEADER)
        slope = np.float64(I64(rows) - 1) / np.float64(top) if top > 0 else 0.0
        guesses[at, 2], guesses[at, 3] = slope, _offset(frames, page, packed, I64(rows), slope)
        facts[at, 2] = (packed & _U16) | (_width(packed) << _KEY_WIDTH) | (rows << _ROWS)
        for word in range(len(entries)):
            entry = page + HEADER + DIRECTORY_ENTRY * entries[word]
            facts[at, FACTS + FACTS_OF_A_COLUMN * word] = load_u64(frames, entry)
            facts[at, FACTS + FACTS_OF_A_COLUMN * word + 1] = load_u64(frames, entry + 8)


def rows_of(facts: Words) -> Int64s:
    """Return how many rows the pages with these facts have."""
    return (facts[:, 2] >> _ROWS).astype(np.int64)


@njit(cache=True, nogil=True)
def greatest_key(frames: Bytes, page_size: int, facts: Words, frame: Int64s) -> np.uint64:
    """Return the greatest key of the pages in some frames, none of which is empty."""
    greatest = np.uint64(0)
    for at in frame:
        packed = facts[at, 2]
        width = (packed >> _KEY_WIDTH) & _U8
        last = at * page_size + I64(packed & _U16) + (I64(packed >> _ROWS) - 1) * I64(width)
        greatest = max(greatest, facts[at, 0] + (load_u64(frames, last) & mask_of(width)))
    return greatest


@njit(inline="always")
def _ask_for(frames: Bytes, place: int) -> None:
    """Ask for the eight bytes at a place: they may reach into a second line."""
    prefetch(frames, place)
    prefetch(frames, place + 7)


@njit(inline="always")
def ask_for_facts(facts: Bytes, nbytes: int, frame: Int32s, begin: int, stop: int) -> None:
    """Ask for what is known of the pages of some keys."""
    for i in range(begin, stop):
        if frame[i] >= 0:
            place = I64(frame[i]) * nbytes
            prefetch(facts, place)
            prefetch(facts, place + nbytes - 1)


@njit(inline="always")
def guess_rows(
    frames: Bytes,
    page_size: int,
    facts: Words,
    guesses: NDArray[np.float32],
    stride: int,
    words: int,
    key: Words,
    above: np.uint64,
    frame: Int32s,
    begin: int,
    stop: int,
    guess: Int64s,
) -> None:
    """Write for some keys in which row each would be if keys lay evenly, -1 for those without a page; ask for it."""
    for i in range(begin, stop):
        at = I64(-1)
        if frame[i] >= 0:
            fact, page = _U64(I64(frame[i]) * stride), I64(frame[i]) * page_size
            packed = facts[fact + _U64(2)]
            wanted = key[i] + above
            over = np.float64(I64(min(wanted - facts[fact], _LARGEST))) if wanted >= facts[fact] else 0.0
            number = fact + fact + _U64(2)
            guessed = over * np.float64(guesses[number]) + np.float64(guesses[number + _U64(1)])
            at = I64(max(min(guessed, np.float64(I64(packed >> _ROWS) - 1)), 0.0))
            _ask_for(frames, page + I64(packed & _U16) + at * I64((packed >> _KEY_WIDTH) & _U8))
            for word in range(words):
                packed = facts[fact + _U64(FACTS + FACTS_OF_A_COLUMN * word + 1)]
                _ask_for(frames, page + I64(packed & _U16) + at * I64(_width(packed)))
        guess[i & _IN_GUESSES] = at


@njit(inline="always")
def key_block(packed: np.uint64) -> tuple[int, int, int]:
    """Return rows, width and place of a page's keys, from the third word of its facts."""
    return I64(packed >> _ROWS), I64((packed >> _KEY_WIDTH) & _U8), I64(packed & _U16)


@njit(inline="always")
def write_row(
    frames: Bytes,
    page: int,
    facts: Words,
    fact: np.uint64,
    at: int,
    sizes: Int64s,
    starts: Int64s,
    out: Bytes,
    valid: Bytes,
    missing: Int64s,
    results: np.uint64,
) -> None:
    """Write the columns of a row of a page as a result; row -1 gives nulls."""
    for word in range(len(sizes)):
        value, present = _U64(0), at >= 0
        if present:
            entry = fact + _U64(FACTS + FACTS_OF_A_COLUMN * word)
            packed = facts[entry + _U64(1)]
            present = not is_null(frames, page, packed, at)
            if present:
                value = facts[entry] + value_above(frames, page, packed, at)
        valid[word, results] = present
        missing[word] += not present
        store_u64(out, starts[word] + I64(results) * sizes[word], value)


@njit(inline="always")
def _write_results(
    frames: Bytes,
    page_size: int,
    facts: Words,
    stride: int,
    key: Words,
    above: np.uint64,
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
    """Find some keys and write their results; return how many results there are by now. One step: few are too far."""
    for i in range(begin, stop):
        at, place = guess[i & _IN_GUESSES], I64(frame[i])
        page, fact = place * page_size, _U64(place * stride)
        if at >= 0:
            rows, step, place_of_keys = key_block(facts[fact + _U64(2)])
            data, mask, wanted = page + place_of_keys, mask_of(_U64(step)), key[i] + above
            target = wanted - facts[fact]
            if load_u64(frames, data + at * step) & mask != target:
                at = rows if wanted < facts[fact] else first_not_below(frames, data, step, mask, rows, target, at)
                if at == rows or load_u64(frames, data + at * step) & mask != target:
                    at = -1
        row[i] = at
        source[results] = i
        if at < 0 and (not outer or place == -1):
            continue
        write_row(frames, page, facts, fact, at, sizes, starts, out, valid, missing, results)
        results += _U64(1)
    return results


@njit(cache=True, nogil=True)
def probe_pages(
    frames: Bytes,
    page_size: int,
    facts: Words,
    guesses: NDArray[np.float32],
    key: Words,
    above: np.uint64,
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
    """Find each key in its page, and write the columns of the results; return how many results there are.

    Keys must be unique.

    Parameters
    ----------
    facts, guesses
        Page descriptors, see `describe_pages`.
    key, above
        Words, and what keys are above them.
    frame : int32[n]
        Page of each key; -1 gives no result for now, -2 no match.
    outer
        Whether a key without a match gives a row of nulls.
    sizes, starts, out, valid, missing
        Arrays of a `headrace.storage.leaf.FixedRows`.
    row : int32[n]
        Row of each key in its page, -1 if the key is not there.
    source : int32[n]
        Position of each result's key.
    """
    stride, words = facts.shape[1], len(sizes)
    flat, flat_guesses = facts.reshape(facts.size), guesses.reshape(guesses.size)
    lines, nbytes = flat.view(np.uint8), WORD * stride
    guess = np.empty(2 * GROUP, dtype=np.int64)
    begin, results, group, end = _U64(0), _U64(0), _U64(GROUP), _U64(len(key))
    stop = min(group, end)
    ask_for_facts(lines, nbytes, frame, begin, min(stop + group, end))
    guess_rows(frames, page_size, flat, flat_guesses, stride, words, key, above, frame, begin, stop, guess)
    while begin < end:
        ahead = min(stop + group, end)
        ask_for_facts(lines, nbytes, frame, ahead, min(ahead + group, end))
        guess_rows(frames, page_size, flat, flat_guesses, stride, words, key, above, frame, stop, ahead, guess)
        results = _write_results(
            frames, page_size, flat, stride, key, above, frame, outer, begin, stop, guess, sizes, starts, out, valid,
            missing, row, source, results,
        )  # fmt: skip
        begin, stop = stop, ahead
    return I64(results)
