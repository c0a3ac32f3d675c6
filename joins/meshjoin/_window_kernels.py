"""Compiled multimap of stream tuples: tuples of one key form a ring, and a bucket chains keys. Arrays in, arrays out.

A relation row that probes the multimap meets each key once, however many tuples wait for it. A byte of tags for each
bucket rules most other rows out without touching the chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format import HEADER, I64, load_u64, prefetch
from headrace.storage.leaf import mask_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ABSENT",
    "Multimap",
    "RowBuffer",
    "enumerate_rows",
    "expand_keys",
    "expire",
    "find_hashes",
    "find_words",
    "hash_bytes",
    "hash_words",
    "insert",
    "same_keys",
]

ABSENT = -2
"""The `follow` of a slot whose tuple is not in the multimap."""

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_BLOCK = 4096  # rows whose hashes stay in the processor's cache until their chains are walked
_U16 = np.uint64(0xFFFF)


class Multimap(NamedTuple):
    """Tuples in slots, by the hash of their key.

    Attributes
    ----------
    slot_hash : uint64[slots]
        Hash of the key in each slot.
    follow : int32[slots]
        Next younger slot of the same key; that of the youngest is the oldest. `ABSENT` for a slot that is not in use.
    next_key : int32[slots]
        Of the youngest slot of a key: the youngest slot of the next key in the bucket, or -1.
    head : int32[buckets]
        Youngest slot of each bucket's first key, or -1.
    tags : uint8[buckets]
        Union of the `_tag` of each key in the bucket.
    """

    slot_hash: NDArray[np.uint64]
    follow: NDArray[np.int32]
    next_key: NDArray[np.int32]
    head: NDArray[np.int32]
    tags: NDArray[np.uint8]


class RowBuffer(NamedTuple):
    """Relation rows whose key has tuples in the multimap, each with the youngest slot of its key.

    Attributes
    ----------
    hashes : uint64[most]
        Hash of the row's key.
    slot, frame, row : int32[most]
        Youngest slot of the key; frame and row number of the relation row.
    """

    hashes: NDArray[np.uint64]
    slot: NDArray[np.int32]
    frame: NDArray[np.int32]
    row: NDArray[np.int32]


@njit(cache=True, nogil=True, inline="always")
def _mix(word: np.uint64) -> np.uint64:
    """Return a distinct, well-mixed word for each word (the finalizer of MurmurHash3)."""
    word ^= word >> np.uint64(33)
    word *= np.uint64(0xFF51AFD7ED558CCD)
    word ^= word >> np.uint64(33)
    word *= np.uint64(0xC4CEB9FE1A85EC53)
    return word ^ (word >> np.uint64(33))


@njit(cache=True, nogil=True, inline="always")
def _bucket(value: np.uint64, buckets: int) -> Any:
    """Return the bucket of a hash: its upper half, scaled to the number of buckets."""
    return I64(((value >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32))


@njit(cache=True, nogil=True, inline="always")
def _tag(value: np.uint64) -> np.uint8:
    """Return one of eight bits for a hash, independent of its bucket."""
    return np.uint8(np.uint64(1) << (value & np.uint64(7)))


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
def insert(hashes: NDArray[np.uint64], valid: NDArray[np.bool_], first: int, multimap: Multimap) -> None:
    """Add tuples in order as slots from `first` on, each as the youngest of its key.

    Tuples that are not `valid` are left out; an empty array means that all are.
    """
    slot_hash, follow, next_key, head, tags = multimap
    every = len(valid) == 0
    for i in range(len(hashes)):
        slot = first + i
        if not (every or valid[i]):
            follow[slot] = ABSENT
            continue
        value = hashes[i]
        bucket = _bucket(value, len(head))
        before, youngest = I64(-1), I64(head[bucket])
        while youngest >= 0 and slot_hash[youngest] != value:
            before, youngest = youngest, I64(next_key[youngest])
        slot_hash[slot] = value
        if youngest < 0:
            follow[slot] = slot
            next_key[slot] = head[bucket]
            head[bucket] = slot
            tags[bucket] |= _tag(value)
            continue
        follow[slot] = follow[youngest]
        follow[youngest] = slot
        next_key[slot] = next_key[youngest]
        if before < 0:
            head[bucket] = slot
        else:
            next_key[before] = slot


@njit(cache=True, nogil=True)
def expire(first: int, count: int, multimap: Multimap) -> None:
    """Remove the tuples that were inserted first. Each is the oldest of its key."""
    slot_hash, follow, next_key, head, tags = multimap
    for slot in range(first, first + count):
        if follow[slot] == ABSENT:
            continue
        bucket = _bucket(slot_hash[slot], len(head))
        before, youngest = I64(-1), I64(head[bucket])
        while slot_hash[youngest] != slot_hash[slot]:
            before, youngest = youngest, I64(next_key[youngest])
        if youngest != slot:
            follow[youngest] = follow[slot]
            continue
        if before < 0:
            head[bucket] = next_key[slot]
        else:
            next_key[before] = next_key[slot]
        tag, other = np.uint8(0), head[bucket]
        while other >= 0:
            tag |= _tag(slot_hash[other])
            other = next_key[other]
        tags[bucket] = tag


@njit(cache=True, nogil=True)
def find_words(
    frames: NDArray[np.uint8],
    page_size: int,
    cursor: NDArray[np.int64],
    stop: int,
    multimap: Multimap,
    out: RowBuffer,
) -> int:
    """Write the relation rows whose key of one word is in the multimap, until `out` may be full; return how many.

    Parameters
    ----------
    frames, page_size
        Pages of the relation.
    cursor : int64[2]
        Frame and row to begin with; moved on to where the search ended, (stop, 0) at the end.
    stop
        Frame after the last.
    multimap
        Multimap of stream tuples.
    out
        Output.
    """
    head, tags = multimap.head, multimap.tags
    found = I64(0)  # typed: numba compiles a callee again for a literal
    frame, row = cursor[0], cursor[1]
    while frame < stop and found < len(out.hashes):
        size, left = found, min(len(out.hashes) - found, _BLOCK)
        while frame < stop and left > 0:
            page = frame * page_size
            rows = I64(load_u64(frames, page + 16) >> np.uint64(32))
            base = load_u64(frames, page + HEADER)
            packed = load_u64(frames, page + HEADER + 8)
            data = page + I64(packed & _U16)
            width = I64((packed >> np.uint64(48)) & np.uint64(0xFF))
            mask = mask_of(np.uint64(width))
            last = min(rows, row + left)
            left -= last - row
            for at in range(row, last):
                value = _mix(base + (load_u64(frames, data + at * width) & mask))
                out.hashes[size] = value
                out.frame[size] = frame
                out.row[size] = at
                size += (tags[_bucket(value, len(head))] & _tag(value)) != 0
            row = last
            if row == rows:
                frame, row = frame + 1, I64(0)
        found = _walk_chains(found, size, multimap, out)
    cursor[0], cursor[1] = frame, row
    return found


@njit(cache=True, nogil=True)
def find_hashes(multimap: Multimap, out: RowBuffer) -> int:
    """Keep of the rows in `out`, whose hashes are given, those with a hash in the multimap; return how many."""
    head, tags = multimap.head, multimap.tags
    size = I64(0)  # typed: numba compiles a callee again for a literal
    for i in range(len(out.hashes)):
        value = out.hashes[i]
        out.hashes[size] = value
        out.frame[size] = out.frame[i]
        out.row[size] = out.row[i]
        size += (tags[_bucket(value, len(head))] & _tag(value)) != 0
    return _walk_chains(I64(0), size, multimap, out)


@njit(cache=True, nogil=True)
def _walk_chains(start: int, stop: int, multimap: Multimap, out: RowBuffer) -> int:
    """Keep of the rows from `start` up to `stop` those whose hash is in the chain of its bucket; return their end.

    One pass fetches the heads of all chains and asks for their hashes, so that the processor waits for many at once.
    """
    slot_hash, next_key, head = multimap.slot_hash, multimap.next_key, multimap.head
    for i in range(start, stop):
        slot = I64(head[_bucket(out.hashes[i], len(head))])
        out.slot[i] = slot
        prefetch(slot_hash, max(slot, I64(0)))
    found = start
    for i in range(start, stop):
        slot = I64(out.slot[i])
        while slot >= 0 and slot_hash[slot] != out.hashes[i]:
            slot = I64(next_key[slot])
        out.slot[found] = slot
        out.frame[found] = out.frame[i]
        out.row[found] = out.row[i]
        found += slot >= 0
    return found


@njit(cache=True, nogil=True)
def expand_keys(
    youngest: NDArray[np.int32],
    cursor: NDArray[np.int64],
    follow: NDArray[np.int32],
    out_slot: NDArray[np.int32],
    out_which: NDArray[np.int32],
) -> int:
    """Write all slots of each key, the oldest first, from `cursor` on; return how many, 0 at the end.

    Parameters
    ----------
    youngest : int32[n]
        Youngest slot of each key.
    cursor : int64[2]
        Key, and its next slot or -1 for the oldest. Starts as (0, -1).
    follow
        See `Multimap`.
    out_slot, out_which : int32[m]
        Slots, and the position in `youngest` that each belongs to.
    """
    size = 0
    which, slot = cursor[0], cursor[1]
    while which < len(youngest) and size < len(out_slot):
        last = I64(youngest[which])
        if slot < 0:
            slot = I64(follow[last])
        while size < len(out_slot):
            out_slot[size] = slot
            out_which[size] = which
            size += 1
            if slot == last:
                which, slot = which + 1, I64(-1)
                break
            slot = I64(follow[slot])
    cursor[0], cursor[1] = which, slot
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
def enumerate_rows(
    frames: NDArray[np.uint8],
    page_size: int,
    cursor: NDArray[np.int64],
    stop: int,
    out_frame: NDArray[np.int32],
    out_row: NDArray[np.int32],
) -> int:
    """Write frame and row number of the rows from `cursor` on, as `find_words` moves it; return how many."""
    size = 0
    frame, row = cursor[0], cursor[1]
    while frame < stop and size < len(out_frame):
        rows = I64(load_u64(frames, frame * page_size + 16) >> np.uint64(32))
        while row < rows and size < len(out_frame):
            out_frame[size] = frame
            out_row[size] = row
            size += 1
            row += 1
        if row == rows:
            frame, row = frame + 1, I64(0)
    cursor[0], cursor[1] = frame, row
    return size
