"""Compiled negative filter: segments are filled, sealed, proven, folded and asked. Arrays in, arrays out.

A segment is a run of blocks of 256 bits, four words each. A key's hash chooses the block by its upper half and the bits
in it by its product with an odd number. In memory a segment may be folded to fewer blocks, each the union of one or
more neighbors: block `b` becomes block ``b * narrow >> 32``, where `narrow` is the share of blocks that are left,
times 2**32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, load_u64, store_u64, xxh64

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Flags, Int32s, Int64s, Words

__all__ = ["BLOCK_WORDS", "absent_keys", "fill_segments", "hash_bytes", "hash_words", "seal_segments", "take_proven"]

BLOCK_WORDS = 4
_WORDS: Any = np.int64(BLOCK_WORDS)
_HALF = np.uint64(32)
_AHEAD = 256
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_PLACE = np.uint64(0xD6E8FEB86659FD93)


@njit(cache=True, nogil=True, inline="always")
def _block(hashed: np.uint64, blocks: int, narrow: int) -> Any:
    block = ((hashed >> _HALF) * np.uint64(blocks)) >> _HALF
    return I64((block * np.uint64(narrow)) >> _HALF) * _WORDS


@njit(cache=True, nogil=True)
def hash_words(keys: Words, out: Words) -> None:
    """Hash keys of one word: the finalizer of MurmurHash3, which no two words share."""
    for i in range(len(keys)):
        word = keys[i]
        word = (word ^ (word >> np.uint64(33))) * _MIX_1
        word = (word ^ (word >> np.uint64(33))) * _MIX_2
        out[i] = word ^ (word >> np.uint64(33))


@njit(cache=True, nogil=True)
def hash_bytes(offsets: Int64s, data: Bytes, out: Words) -> None:
    """Hash byte keys whole, by XXH64."""
    for i in range(len(out)):
        out[i] = xxh64(data, offsets[i], offsets[i + 1] - offsets[i], np.uint64(0))


@njit(cache=True, nogil=True)
def fill_segments(hashes: Words, owner: Int64s, blocks: int, narrow: int, probes: int, segments: Words) -> None:
    """Put key `i` into segment `owner[i]` of `segments`."""
    for i in range(len(hashes)):
        block = _block(hashes[i], blocks, narrow)
        bits = hashes[i] * _SPREAD
        for _ in range(probes):
            bit = bits >> np.uint64(56)
            segments[owner[i], block + I64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))
            bits <<= np.uint64(8)


@njit(cache=True, nogil=True)
def absent_keys(
    segments: Words,
    known: Flags,
    blocks: int,
    narrow: int,
    probes: int,
    place: Int32s,
    asked: Flags,
    leaf: Int32s,
    hashes: Words,
    absent: Flags,
) -> np.uint64:
    """Say of each key that is asked for whether it is surely not in its leaf; return a number of no meaning.

    Blocks are fetched some at a time, so that the memory answers many questions at once.

    Parameters
    ----------
    segments : uint64[n, words]
    known : bool[n]
        Whether a segment is right; others say nothing.
    place : int32[leaves]
        Segment of each leaf, -1 for none.
    """
    touched = np.uint64(0)
    flat = segments.ravel()
    words = segments.shape[1]
    at = np.empty(_AHEAD, dtype=np.int64)
    for begin in range(0, len(leaf), _AHEAD):
        end = min(begin + _AHEAD, len(leaf))
        for i in range(begin, end):
            row = I64(place[leaf[i]]) if asked[i] else -1
            if row >= 0 and known[row]:
                at[i - begin] = row * words + _block(hashes[i], blocks, narrow)
            else:
                at[i - begin] = -1
        for i in range(end - begin):
            touched ^= flat[max(at[i], 0)]
        for i in range(begin, end):
            block = at[i - begin]
            if block < 0:
                absent[i] = False
                continue
            bits = hashes[i] * _SPREAD
            every = np.uint64(1)
            for _ in range(probes):
                bit = bits >> np.uint64(56)
                every &= flat[block + I64(bit >> np.uint64(6))] >> (bit & np.uint64(63))
                bits <<= np.uint64(8)
            absent[i] = every == 0
    return touched


@njit(cache=True, nogil=True)
def _tag(slots: Bytes, at: int, size: int, page: int, checksum: np.uint64) -> np.uint64:
    return xxh64(slots, at, size, checksum ^ (np.uint64(page) * _PLACE))


@njit(cache=True, nogil=True)
def seal_segments(segments: Words, pages: Int64s, checksums: Words, slots: Bytes) -> None:
    """Write segments and their tags, one slot after the other; `slots` has room for the kernels' slack behind them."""
    words = segments.shape[1]
    size = 8 * words
    for i in range(len(pages)):
        at = i * (size + 8)
        for word in range(words):
            store_u64(slots, at + 8 * word, segments[i, word])
        store_u64(slots, at + size, _tag(slots, at, size, pages[i], checksums[i]))


@njit(cache=True, nogil=True)
def take_proven(
    slots: Bytes,
    start: Int64s,
    pages: Int64s,
    checksums: Words,
    size: int,
    narrow: int,
    segments: Words,
    place: Int32s,
    known: Flags,
) -> None:
    """Fold the segments whose tags are right into `segments[place[i]]`, and mark them as known.

    Parameters
    ----------
    start : int64[n]
        Offset of each slot in `slots`.
    size
        Bytes of a segment in its slot.
    """
    blocks = size // (8 * _WORDS)
    for i in range(len(start)):
        known[place[i]] = load_u64(slots, start[i] + size) == _tag(slots, start[i], size, pages[i], checksums[i])
        if not known[place[i]]:
            continue
        segments[place[i]] = 0
        for block in range(blocks):
            to = I64((np.uint64(block) * np.uint64(narrow)) >> _HALF) * _WORDS
            for word in range(_WORDS):
                segments[place[i], to + word] |= load_u64(slots, start[i] + 8 * (block * _WORDS + word))
