"""Compiled structure check of leaves that may be damaged. Reads nothing outside a page, whatever its content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, load_u16, load_u64
from headrace.storage.format.constants import DIRECTORY_ENTRY, HEADER, LEAF_PAGE, WORD
from headrace.storage.leaf._search_kernels import mask_of

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Int64s

__all__ = ["leaf_faults"]

_TEXT_WIDTH = 2
_DICTIONARY = 2
_U16 = np.uint64(0xFFFF)

NOT_A_LEAF, BAD_COUNT, BAD_ENTRY, BAD_BLOCK, BAD_TEXT, BAD_KEYS = 1, 2, 3, 4, 5, 6


@njit(cache=True, nogil=True)
def _plain_fault(frames: Bytes, rows: int, base: int, ends: int, width: int, room: int) -> bool:
    """Whether the texts of a column run backwards, or take more than the room that is left in the page."""
    mask = (np.uint64(1) << np.uint64(8 * width)) - np.uint64(1)
    end = 0
    for row in range(rows):
        reached = (row + 1) * base + I64(load_u64(frames, ends + row * width) & mask)
        if reached < end or reached > room:
            return True
        end = reached
    return False


@njit(cache=True, nogil=True)
def _keys_fault(frames: Bytes, data: int, rows: int, base: np.uint64, width: int) -> bool:
    """Whether a key lies below the base of its block, so that lookups would not find it."""
    mask = mask_of(np.uint64(width))
    least = base
    for row in range(rows):
        least = min(least, base + (load_u64(frames, data + row * width) & mask))
    return bool(least < base)


@njit(cache=True, nogil=True)
def _dictionary_fault(frames: Bytes, block: int, room: int) -> bool:
    """Whether the texts of a dictionary run backwards, or take more than the room that is left in the page."""
    distinct = load_u16(frames, block)
    end = 0
    for number in range(distinct):
        at = 2 + 2 * number
        if at + 2 > room:
            return True
        reached = load_u16(frames, block + at)
        if reached < end:
            return True
        end = reached
    return 2 + 2 * distinct + end > room


@njit(cache=True, nogil=True)
def _text_fault(frames: Bytes, page: int, page_size: int, rows: int, base: int, packed: np.uint64, nulls: int) -> bool:
    """Whether a text block of sound offsets reaches outside the page or runs backwards."""
    data = page + I64(packed & _U16)
    aux = I64((packed >> np.uint64(16)) & _U16)
    width = I64((packed >> np.uint64(48)) & np.uint64(0xFF))
    if packed >> np.uint64(56) != np.uint64(_DICTIONARY):
        return _plain_fault(frames, rows, base, data, width, page_size - aux)
    if aux + 2 > page_size or _dictionary_fault(frames, page + aux, page_size - aux):
        return True
    distinct = load_u16(frames, page + aux)
    mask = (np.uint64(1) << np.uint64(8 * width)) - np.uint64(1)
    for row in range(rows):
        absent = nulls > 0 and (frames[page + nulls + (row >> 3)] >> (row & 7)) & 1 != 0
        if not absent and I64(load_u64(frames, data + row * width) & mask) >= distinct:
            return True
    return False


@njit(cache=True, nogil=True)
def leaf_faults(frames: Bytes, page_size: int, pages: int, text: Bytes, faults: Int64s) -> None:
    """Write for each page what is wrong with its structure, as 256 * entry + kind, or 0.

    Parameters
    ----------
    text : uint8[entries]
        Whether each entry of the directory is text.
    faults : int64[pages]
    """
    start = HEADER + DIRECTORY_ENTRY * len(text)
    for number in range(pages):
        page = number * page_size
        head = load_u64(frames, page + 16)
        rows = I64(head >> np.uint64(32))
        faults[number] = 0
        if head & np.uint64(0xFF) != np.uint64(LEAF_PAGE):
            faults[number] = NOT_A_LEAF
            continue
        if rows < 1 or rows > page_size:
            faults[number] = BAD_COUNT
            continue
        for entry in range(len(text)):
            base = I64(load_u64(frames, page + HEADER + DIRECTORY_ENTRY * entry))
            packed = load_u64(frames, page + HEADER + DIRECTORY_ENTRY * entry + 8)
            data = I64(packed & _U16)
            nulls = I64((packed >> np.uint64(32)) & _U16)
            width = I64((packed >> np.uint64(48)) & np.uint64(0xFF))
            encoding = I64(packed >> np.uint64(56))
            is_text = text[entry] != 0
            kind = 0
            sound = (
                is_text == (encoding != 0) and encoding <= _DICTIONARY and width <= (_TEXT_WIDTH if is_text else WORD)
            )
            if not sound or (is_text and (base < 0 or base > page_size)):
                kind = BAD_ENTRY
            elif (width > 0 and (data < start or data + rows * width > page_size)) or (
                nulls > 0 and (nulls < start or nulls + ((rows + 7) >> 3) > page_size)
            ):
                kind = BAD_BLOCK
            elif is_text and _text_fault(frames, page, page_size, rows, base, packed, nulls):
                kind = BAD_TEXT
            elif entry == 0 and not is_text and _keys_fault(frames, page + data, rows, np.uint64(base), width):
                kind = BAD_KEYS
            if kind != 0:
                faults[number] = 256 * entry + kind
                break
