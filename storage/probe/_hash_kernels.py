"""Compiled steps of `row_hash`: rows of pages are put into slots, and found there. Arrays in, arrays out.

Keys in no order are wherever memory is slowest, so the slots of a group of keys are asked for before the group ahead
of it is compared, and have come by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, load_u64, prefetch, store_u64
from headrace.storage.leaf._search_kernels import mask_of
from headrace.storage.probe._probe_kernels import FACTS, FACTS_OF_A_COLUMN, is_null

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Flags, Int32s, Int64s, Words

__all__ = ["fill_slots", "find_slots"]

_GROUP = 64
"""Keys looked up between two requests for memory. A lookup of a key in no order among 8,000,000 rows took 14.6 ns with
16, 10.7 with 32, 9.6 with 64, and 9.7 with 128; among 20,000 rows 8.3 ns with 16 and 4.6 with 64."""
_RING = 2 * _GROUP - 1
_AHEAD = 16
_HALF, _ONE, _NONE = np.uint64(32), np.uint64(1), np.uint64(0)
_U8, _U16 = np.uint64(0xFF), np.uint64(0xFFFF)
_KEY_WIDTH, _ROWS, _WIDTH = np.uint64(16), np.uint64(32), np.uint64(48)


@njit(inline="always")
def _home(above: np.uint64, factor: np.uint64, slots: np.uint64, stride: int) -> int:
    """Return where the slot of a key begins, unless others have taken it."""
    mixed = (above ^ (above >> _HALF)) * factor
    return I64(((mixed >> _HALF) * slots) >> _HALF) * stride


@njit(cache=True, nogil=True)
def fill_slots(
    frames: Bytes,
    page_size: int,
    facts: Words,
    frame: Int64s,
    low: np.uint64,
    factor: np.uint64,
    slots: np.uint64,
    stride: int,
    key_mask: np.uint64,
    nulls: int,
    words: Words,
    memory: Bytes,
    end: int,
    most: int,
) -> int:
    """Put the rows of some pages into slots; return how many taken slots were passed, or -1 if there is no way on.

    That is when more than `most` would be passed, or a row would come to `end` or behind it.

    Parameters
    ----------
    facts
        Page descriptors, see `headrace.storage.probe._probe_kernels.describe_pages`.
    frame
        Frames of the pages.
    low, factor, slots, stride, key_mask, nulls, words, memory
        Arrays of a `headrace.storage.probe.row_hash.RowHash`.
    """
    passed = 0
    most_rows = np.uint64(0)
    for page in frame:
        most_rows = max(most_rows, facts[page, 2] >> _ROWS)
    slot_of = np.empty(I64(most_rows), dtype=np.int64)
    for page in frame:
        start, base, packed = page * page_size, facts[page, 0] - low, facts[page, 2]
        rows, width = I64(packed >> _ROWS), (packed >> _KEY_WIDTH) & _U8
        data, mask, step = start + I64(packed & _U16), mask_of(width), I64(width)
        for row in range(rows):
            slot_of[row] = _home(base + (load_u64(frames, data + row * step) & mask), factor, slots, stride)
        for row in range(rows):
            prefetch(memory, slot_of[min(row + _AHEAD, rows - 1)])
            slot = slot_of[row]
            while slot < end and load_u64(memory, slot) & key_mask != _NONE:
                slot += stride
                passed += 1
            if slot >= end or passed > most:
                return -1
            above = base + (load_u64(frames, data + row * step) & mask)
            store_u64(memory, slot, load_u64(memory, slot) | (above + _ONE))
            slot_of[row] = slot
        for word in range(len(words)):
            fact = FACTS + FACTS_OF_A_COLUMN * word
            _fill_word(
                frames, start, facts[page, fact], facts[page, fact + 1], word, words, memory, slot_of[:rows], nulls
            )
    return passed


@njit(inline="always")
def _fill_word(
    frames: Bytes,
    page: int,
    base: np.uint64,
    packed: np.uint64,
    word: int,
    words: Words,
    memory: Bytes,
    slot_of: Int64s,
    nulls: int,
) -> None:
    """Write one word of the rows of a page into their slots, where it holds zeros, and mark those that are null.

    A word at a time, because a processor stalls when it loads what it has just stored in parts.
    """
    place, shift, above = I64(words[word, 0]), words[word, 1], base - words[word, 3]
    width = (packed >> _WIDTH) & _U8
    data, mask, step = page + I64(packed & _U16), mask_of(width), I64(width)
    bitmap = (packed >> _HALF) & _U16
    for row in range(len(slot_of)):
        if bitmap > _NONE and is_null(frames, page, packed, row):
            memory[slot_of[row] + nulls + (word >> 3)] |= np.uint8(1 << (word & 7))
            continue
        value = above + (load_u64(frames, data + row * step) & mask)
        at = slot_of[row] + place
        store_u64(memory, at, load_u64(memory, at) | (value << shift))


@njit(inline="always")
def _ask_for(
    memory: Bytes,
    low: np.uint64,
    factor: np.uint64,
    slots: np.uint64,
    stride: int,
    key: Words,
    begin: int,
    stop: int,
    home: Int64s,
) -> None:
    """Note where the slots of some keys begin, and ask for them: they may reach into a second line."""
    for i in range(begin, stop):
        slot = _home(key[i] - low, factor, slots, stride)
        home[i & _RING] = slot
        prefetch(memory, slot)
        prefetch(memory, slot + stride - 1)


@njit(inline="always")
def _write_word(
    memory: Bytes,
    word: int,
    words: Words,
    slot: Int64s,
    nulls: int,
    certain: bool,
    first: int,
    results: int,
    size: int,
    start: int,
    out: Bytes,
    valid: Bytes,
) -> int:
    """Write one word of some results; return how many are null. Where all are present that need not be said."""
    place, shift, mask, base = I64(words[word, 0]), words[word, 1], words[word, 2], words[word, 3]
    if certain:
        for i in range(first, results):
            value = base + ((load_u64(memory, slot[i - first] + place) >> shift) & mask)
            store_u64(out, start + i * size, value)
        return 0
    missing = 0
    for i in range(first, results):
        at = slot[i - first]
        present = at >= 0 and (nulls < 0 or (memory[at + nulls + (word >> 3)] >> (word & 7)) & 1 == 0)
        value = base + ((load_u64(memory, at + place) >> shift) & mask) if present else _NONE
        store_u64(out, start + i * size, value)
        valid[word, i] = present
        missing += not present
    return missing


@njit(cache=True, nogil=True)
def find_slots(
    memory: Bytes,
    low: np.uint64,
    factor: np.uint64,
    slots: np.uint64,
    stride: int,
    key_mask: np.uint64,
    nulls: int,
    words: Words,
    key: Words,
    above: np.uint64,
    valid: Flags,
    outer: bool,
    certain: bool,
    sizes: Int64s,
    starts: Int64s,
    out: Bytes,
    present: Bytes,
    missing: Int64s,
    source: Int32s,
) -> int:
    """Find keys, and write the columns of the results; return how many results there are.

    Parameters
    ----------
    memory, low, factor, slots, stride, key_mask, nulls, words
        Arrays of a `headrace.storage.probe.row_hash.RowHash`.
    key, above
        Words, and what keys are above them.
    valid : bool[n] or bool[0]
        Which keys can be there at all; empty if all.
    outer
        Whether a key that is not there gives a row of nulls.
    certain
        Whether no result can have a null.
    sizes, starts, out, present, missing
        Arrays of a `headrace.storage.leaf.FixedRows`.
    source : int32[n]
        Position of each result's key.
    """
    home, found = np.empty(2 * _GROUP, dtype=np.int64), np.empty(_GROUP, dtype=np.int64)
    every = len(valid) == 0
    low -= above
    results = 0
    _ask_for(memory, low, factor, slots, stride, key, 0, min(_GROUP, len(key)), home)
    for begin in range(0, len(key), _GROUP):
        stop = min(begin + _GROUP, len(key))
        _ask_for(memory, low, factor, slots, stride, key, stop, min(stop + _GROUP, len(key)), home)
        first = results
        for i in range(begin, stop):
            slot, wanted = home[i & _RING], key[i] - low + _ONE
            there = load_u64(memory, slot) & key_mask
            while there != wanted and there != _NONE:  # noqa: PLR1714 - a kernel makes no tuples
                slot += stride
                there = load_u64(memory, slot) & key_mask
            hit = there != _NONE and (every or valid[i])
            found[results - first] = slot if hit else -1
            source[results] = i
            results += hit or outer
        for word in range(len(words)):
            missing[word] += _write_word(
                memory, word, words, found, nulls, certain, first, results, sizes[word], starts[word], out, present
            )
    return results
