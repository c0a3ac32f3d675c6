"""Compiled multimap of stream tuples: chained buckets in which tuples come and go in order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Multimap", "enumerate_rows", "expire", "hash_bytes", "hash_words", "insert", "probe", "same_keys"]

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


class Multimap(NamedTuple):
    """Chained buckets of slots.

    Attributes
    ----------
    slot_hash : uint64[slots]
        Hash of the key in each slot.
    follow : int32[slots]
        Next slot of the chain, or -1.
    head, tail : int32[buckets]
        First and last slot of each bucket's chain, or -1. The number of buckets is a power of two.
    """

    slot_hash: NDArray[np.uint64]
    follow: NDArray[np.int32]
    head: NDArray[np.int32]
    tail: NDArray[np.int32]


@njit(cache=True, nogil=True, inline="always")
def _mix(word: np.uint64) -> np.uint64:
    """Return a distinct, well-mixed word for each word (the finalizer of MurmurHash3)."""
    word ^= word >> np.uint64(33)
    word *= np.uint64(0xFF51AFD7ED558CCD)
    word ^= word >> np.uint64(33)
    word *= np.uint64(0xC4CEB9FE1A85EC53)
    return word ^ (word >> np.uint64(33))


@njit(cache=True, nogil=True)
def hash_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each word. Different words have different hashes."""
    out = np.empty(len(words), dtype=np.uint64)
    for i in range(len(words)):
        out[i] = _mix(words[i])
    return out


@njit(cache=True, nogil=True)
def hash_bytes(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a hash of each string of bytes."""
    out = np.empty(len(offsets) - 1, dtype=np.uint64)
    for i in range(len(out)):
        value = _FNV_OFFSET
        for at in range(offsets[i], offsets[i + 1]):
            value = (value ^ np.uint64(data[at])) * _FNV_PRIME
        out[i] = _mix(value)
    return out


@njit(cache=True, nogil=True)
def insert(hashes: NDArray[np.uint64], slot: int, multimap: Multimap) -> None:
    """Add tuples in order as slots from `slot` on. Each goes to the end of its bucket's chain."""
    slot_hash, follow, head, tail = multimap
    mask = np.uint64(len(head) - 1)
    for i in range(len(hashes)):
        at = slot + i
        bucket = hashes[i] & mask
        slot_hash[at] = hashes[i]
        follow[at] = -1
        if tail[bucket] < 0:
            head[bucket] = at
        else:
            follow[tail[bucket]] = at
        tail[bucket] = at


@njit(cache=True, nogil=True)
def expire(slot: int, count: int, multimap: Multimap) -> None:
    """Remove the tuples that were inserted first. Each is the first of its chain."""
    slot_hash, follow, head, tail = multimap
    mask = np.uint64(len(head) - 1)
    for at in range(slot, slot + count):
        bucket = slot_hash[at] & mask
        head[bucket] = follow[at]
        if follow[at] < 0:
            tail[bucket] = -1


@njit(cache=True, nogil=True)
def probe(
    hashes: NDArray[np.uint64],
    cursor: NDArray[np.int64],
    multimap: Multimap,
    out_slot: NDArray[np.int32],
    out_row: NDArray[np.int32],
) -> int:
    """Fill the outputs with (slot, row) pairs of equal hashes from `cursor` on. Return how many; 0 at the end.

    Parameters
    ----------
    hashes : uint64[n]
        Hashes of relation rows.
    cursor : int64[2]
        Row, and slot in the row's chain or -1 for its head. Starts as (0, -1).
    multimap
        Multimap of stream tuples.
    out_slot, out_row : int32[m]
        Output.
    """
    slot_hash, follow, head = multimap.slot_hash, multimap.follow, multimap.head
    mask = np.uint64(len(head) - 1)
    size = 0
    row, slot = cursor[0], cursor[1]
    while row < len(hashes):
        if slot < 0:
            slot = np.int64(head[hashes[row] & mask])
        while slot >= 0 and size < len(out_slot):
            if slot_hash[slot] == hashes[row]:
                out_slot[size] = slot
                out_row[size] = row
                size += 1
            slot = np.int64(follow[slot])
        if slot >= 0:
            break
        row += 1
        if size == len(out_slot):
            break
    cursor[0], cursor[1] = row, slot
    return size


@njit(cache=True, nogil=True)
def same_keys(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    which: NDArray[np.int32],
    other_offsets: NDArray[np.int64],
    other_data: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Return whether key ``which[i]`` of the first list equals key `i` of the second, byte by byte."""
    out = np.empty(len(which), dtype=np.bool_)
    for i in range(len(which)):
        start, other = offsets[which[i]], other_offsets[i]
        length = offsets[which[i] + 1] - start
        same = length == other_offsets[i + 1] - other
        at = 0
        while same and at < length:
            same = data[start + at] == other_data[other + at]
            at += 1
        out[i] = same
    return out


@njit(cache=True, nogil=True)
def enumerate_rows(counts: NDArray[np.int32], frame: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return frame and row of all rows of pages in adjacent frames."""
    total = 0
    for i in range(len(counts)):
        total += counts[i]
    frames = np.empty(total, dtype=np.int32)
    rows = np.empty(total, dtype=np.int32)
    at = 0
    for i in range(len(counts)):
        for row in range(counts[i]):
            frames[at] = frame + i
            rows[at] = row
            at += 1
    return frames, rows
