"""Compiled key codec: pieces of byte keys written, read, ordered and compared. Arrays in, arrays out.

A byte key is the concatenation of its columns: fixed-width ones big-endian, bytes that are not last with every 0x00
written as 0x00 0xFF and 0x00 0x00 at the end, the last one as it is. `cursor` is where the next piece of each key
begins; kernels that write or read a piece move it on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import bswap_u64, compare_bytes, copy_bytes, load_u64

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Flags, Int64s, Words

__all__ = [
    "KeyParts",
    "append_bytes",
    "append_fixed",
    "compare_keys",
    "escaped_lengths",
    "first_descent",
    "prefixes",
    "read_bytes",
    "read_fixed",
    "same_as_next",
    "shortest_separators",
    "take_lengths",
    "unescaped_lengths",
    "write_taken",
]

_RUN = 256
_ESCAPE = np.uint8(0xFF)


class KeyParts(NamedTuple):
    """Keys as kernels take them; see `headrace.storage.format.keys.Keys`.

    Attributes
    ----------
    prefix : uint64[n]
        The key itself, or its first eight bytes.
    offsets : int64[n + 1]
        Offsets of byte keys in `data`.
    data : uint8 array
        Bytes of byte keys. They are empty, and `offsets` too, if keys are words.
    """

    prefix: Words
    offsets: Int64s
    data: Bytes


@njit(cache=True, nogil=True, inline="always")
def compare_keys(left: KeyParts, i: int, right: KeyParts, j: int, wide: bool) -> int:
    """Compare two keys; the sign of the result is their order. `wide` keys go on beyond the prefix."""
    if left.prefix[i] != right.prefix[j]:
        return -1 if left.prefix[i] < right.prefix[j] else 1
    if not wide:
        return 0
    return compare_bytes(
        left.data, left.offsets[i], left.offsets[i + 1], right.data, right.offsets[j], right.offsets[j + 1]
    )


@njit(cache=True, nogil=True)
def prefixes(offsets: Int64s, data: Bytes) -> Words:
    """Return the first eight bytes of each key as a big-endian number, padded with zeros."""
    rows = len(offsets) - 1
    result = np.empty(rows, dtype=np.uint64)
    size = len(data)
    for row in range(rows):
        start = offsets[row]
        length = offsets[row + 1] - start
        if start + 8 <= size and length > 0:
            word = bswap_u64(load_u64(data, start))
            if length < 8:  # noqa: PLR2004 - bytes of a word
                word &= ~((np.uint64(1) << np.uint64(64 - 8 * length)) - np.uint64(1))
        else:
            word = np.uint64(0)
            for at in range(min(length, 8)):
                word |= np.uint64(data[start + at]) << np.uint64(56 - 8 * at)
        result[row] = word
    return result


@njit(cache=True, nogil=True)
def escaped_lengths(offsets: Int64s, data: Bytes, lengths: Int64s) -> None:
    """Add to `lengths` what each value takes when escaped and terminated."""
    for row in range(len(offsets) - 1):
        zeros = 0
        for at in range(offsets[row], offsets[row + 1]):
            zeros += data[at] == 0
        lengths[row] += offsets[row + 1] - offsets[row] + zeros + 2


@njit(cache=True, nogil=True)
def append_fixed(out: Bytes, cursor: Int64s, values: Words, width: int) -> None:
    """Write `width` bytes of each value, most significant first."""
    for row in range(len(values)):
        value = values[row]
        for at in range(width):
            out[cursor[row] + at] = np.uint8((value >> np.uint64(8 * (width - 1 - at))) & np.uint64(0xFF))
        cursor[row] += width


@njit(cache=True, nogil=True)
def append_bytes(out: Bytes, cursor: Int64s, offsets: Int64s, data: Bytes, escape: bool) -> None:
    """Write each value, escaped and terminated if asked."""
    for row in range(len(offsets) - 1):
        at = cursor[row]
        if not escape:
            length = offsets[row + 1] - offsets[row]
            copy_bytes(data, offsets[row], out, at, length)
            cursor[row] = at + length
            continue
        for source in range(offsets[row], offsets[row + 1]):
            out[at] = data[source]
            at += 1
            if data[source] == 0:
                out[at] = _ESCAPE
                at += 1
        out[at] = 0
        out[at + 1] = 0
        cursor[row] = at + 2


@njit(cache=True, nogil=True)
def read_fixed(data: Bytes, cursor: Int64s, width: int) -> Words:
    """Read `width` big-endian bytes of each key."""
    result = np.empty(len(cursor), dtype=np.uint64)
    for row in range(len(cursor)):
        value = np.uint64(0)
        for at in range(width):
            value = (value << np.uint64(8)) | np.uint64(data[cursor[row] + at])
        result[row] = value
        cursor[row] += width
    return result


@njit(cache=True, nogil=True)
def unescaped_lengths(data: Bytes, cursor: Int64s, ends: Int64s) -> Int64s:
    """Return the offsets of the values that an escaped column will have once read. Leaves `cursor` where it is."""
    offsets = np.zeros(len(cursor) + 1, dtype=np.int64)
    for row in range(len(cursor)):
        at = cursor[row]
        length = 0
        while at + 1 < ends[row] and not (data[at] == 0 and data[at + 1] == 0):
            at += 2 if data[at] == 0 else 1
            length += 1
        offsets[row + 1] = offsets[row] + length
    return offsets


@njit(cache=True, nogil=True)
def read_bytes(data: Bytes, cursor: Int64s, offsets: Int64s, escape: bool) -> Bytes:
    """Return the bytes of a column whose offsets are known."""
    result = np.empty(offsets[-1], dtype=np.uint8)
    for row in range(len(cursor)):
        at = cursor[row]
        if not escape:
            copy_bytes(data, at, result, offsets[row], offsets[row + 1] - offsets[row])
            continue
        for target in range(offsets[row], offsets[row + 1]):
            result[target] = data[at]
            at += 2 if data[at] == 0 else 1
        cursor[row] = at + 2
    return result


@njit(cache=True, nogil=True)
def take_lengths(offsets: Int64s, index: Int64s) -> Int64s:
    """Return the offsets of the chosen keys when they lie side by side."""
    result = np.zeros(len(index) + 1, dtype=np.int64)
    for row in range(len(index)):
        result[row + 1] = result[row] + offsets[index[row] + 1] - offsets[index[row]]
    return result


@njit(cache=True, nogil=True)
def write_taken(offsets: Int64s, data: Bytes, index: Int64s, target: Int64s) -> Bytes:
    """Return the bytes of the chosen keys side by side, at the offsets that `take_lengths` gave."""
    result = np.empty(target[-1], dtype=np.uint8)
    for row in range(len(index)):
        copy_bytes(data, offsets[index[row]], result, target[row], target[row + 1] - target[row])
    return result


@njit(cache=True, nogil=True)
def first_descent(keys: KeyParts, wide: bool, strictly: bool) -> int:
    """Return the first row whose key is smaller than the one before it, or also equal to it if `strictly`; or -1."""
    prefix = keys.prefix
    start = 1
    while start + _RUN <= len(prefix):  # without a branch a row, until something is to be looked at closely
        descents = 0
        for at in range(_RUN):
            descents += prefix[start + at] <= prefix[start + at - 1]
        if descents > 0:
            break
        start += _RUN
    for row in range(start, len(prefix)):
        order = compare_keys(keys, row - 1, keys, row, wide)
        if order > 0 or (strictly and order == 0):
            return row
    return -1


@njit(cache=True, nogil=True)
def same_as_next(keys: KeyParts, wide: bool) -> Flags:
    """Return for each key but the last whether the next one equals it."""
    prefix, offsets, data = keys
    result = prefix[1:] == prefix[:-1]
    if wide:
        for row in np.flatnonzero(result):
            start, end = offsets[row], offsets[row + 1]
            result[row] = compare_bytes(data, start, end, data, end, offsets[row + 2]) == 0
    return result


@njit(cache=True, nogil=True)
def shortest_separators(offsets: Int64s, data: Bytes, left: Int64s, right: Int64s) -> Int64s:
    """Return how many bytes of key `right[i]` suffice to be greater than key `left[i]`; all of them if they are equal.

    Parameters
    ----------
    offsets, data
        Keys.
    left, right : int64[m]
        Pairs of keys, each left one not greater than its right one.

    Returns
    -------
    int64[m]
    """
    result = np.empty(len(left), dtype=np.int64)
    for pair in range(len(left)):
        a, b = offsets[left[pair]], offsets[right[pair]]
        length = offsets[right[pair] + 1] - b
        common = min(offsets[left[pair] + 1] - a, length)
        at = 0
        while at < common and data[a + at] == data[b + at]:
            at += 1
        result[pair] = min(at + 1, length)
    return result
