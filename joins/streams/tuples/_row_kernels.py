"""Compiled steps on stored tuples: values between Arrow's buffers and records, and the heap. Arrays in, arrays out.

Records lie side by side in a flat uint8 array; `stride` is their width. An index of -1 stands for a row of nulls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format import I64, copy_bytes, load_u64, prefetch, store_u64, xxh64

if TYPE_CHECKING:
    from headrace.storage.format import Bytes, Flags, Int64s, Words

__all__ = [
    "add_heap_lengths",
    "begin_heap",
    "begin_records",
    "chosen_nulls",
    "compact_heap",
    "copy_out",
    "gather_bits",
    "gather_fixed",
    "gather_text",
    "gather_words",
    "hash_keys",
    "heap_length",
    "keep_records",
    "move_records",
    "name_records",
    "number_records",
    "put_bits",
    "put_fixed",
    "put_text",
    "put_words",
    "scatter",
    "set_flags",
    "shift_heap",
    "text_offsets",
]

_AHEAD = 16
_ZERO = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@njit(inline="always")
def _u32(data: Bytes, at: int) -> int:
    return I64(data[at]) | I64(data[at + 1]) << 8 | I64(data[at + 2]) << 16 | I64(data[at + 3]) << 24


@njit(inline="always")
def _put_u32(data: Bytes, at: int, value: int) -> None:
    data[at] = np.uint8(value & 0xFF)
    data[at + 1] = np.uint8((value >> 8) & 0xFF)
    data[at + 2] = np.uint8((value >> 16) & 0xFF)
    data[at + 3] = np.uint8((value >> 24) & 0xFF)


@njit(cache=True, nogil=True)
def begin_records(records: Bytes, stride: int, rows: int, departure_at: int, departure: int) -> None:
    """Write records of zeros with a departure stamp. The stride is a number of whole words."""
    for row in range(rows):
        for at in range(row * stride, (row + 1) * stride, 8):
            store_u64(records, at, _ZERO)
        store_u64(records, row * stride + departure_at, np.uint64(departure))


@njit(cache=True, nogil=True)
def number_records(records: Bytes, stride: int, offset: int, start: int, rows: int, first: int) -> None:
    """Write the numbers from `first` on into the records from `start` on."""
    for row in range(start, rows):
        store_u64(records, row * stride + offset, np.uint64(first + row - start))


@njit(cache=True, nogil=True)
def put_words(records: Bytes, stride: int, offset: int, words: Words) -> None:
    """Write one word into each record."""
    for row in range(len(words)):
        store_u64(records, row * stride + offset, words[row])


@njit(cache=True, nogil=True)
def put_fixed(records: Bytes, stride: int, offset: int, width: int, values: Bytes, start: int, rows: int) -> None:
    """Write the values of a column, `width` bytes each, from value number `start` on."""
    if width == 8:  # noqa: PLR2004 - a word
        for row in range(rows):
            store_u64(records, row * stride + offset, load_u64(values, (start + row) * 8))
        return
    for row in range(rows):
        to, source = row * stride + offset, (start + row) * width
        for byte in range(width):
            records[to + byte] = values[source + byte]


@njit(cache=True, nogil=True)
def put_bits(records: Bytes, stride: int, offset: int, bit: int, nulls: Flags) -> None:
    """Set a null bit in the records whose flag is set."""
    mask = np.uint8(1 << bit)
    for row in range(len(nulls)):
        if nulls[row]:
            records[row * stride + offset] |= mask


@njit(cache=True, nogil=True)
def begin_heap(records: Bytes, stride: int, heap_at: int, lengths: Int64s, heap: Bytes) -> None:
    """Lay out the variable parts side by side: write positions into records, and headers into the heap."""
    at = 0
    for row in range(len(lengths)):
        length = (lengths[row] + 15) >> 3 << 3
        store_u64(records, row * stride + heap_at, np.uint64(at))
        _put_u32(heap, at, row)
        _put_u32(heap, at + 4, length)
        at += length


@njit(cache=True, nogil=True)
def put_text(
    records: Bytes, stride: int, heap_at: int, end_at: int, cursor: Int64s, offsets: Int64s, data: Bytes, heap: Bytes
) -> None:
    """Append a column's bytes to the variable parts; `cursor` is how many bytes each holds so far."""
    for row in range(len(cursor)):
        start, length = offsets[row], offsets[row + 1] - offsets[row]
        at = I64(load_u64(records, row * stride + heap_at)) + 8 + cursor[row]
        copy_bytes(data, start, heap, at, length)
        cursor[row] += length
        _put_u32(records, row * stride + end_at, cursor[row])


@njit(cache=True, nogil=True)
def hash_keys(offsets: Int64s, data: Bytes) -> Words:
    """Return a hash of each key's bytes."""
    digests = np.empty(len(offsets) - 1, dtype=np.uint64)
    for row in range(len(digests)):
        digests[row] = xxh64(data, offsets[row], offsets[row + 1] - offsets[row], _ZERO)
    return digests


@njit(cache=True, nogil=True)
def gather_words(records: Bytes, stride: int, offset: int, index: Int64s) -> Words:
    """Return a word of each chosen record."""
    out = np.empty(len(index), dtype=np.uint64)
    for i in range(len(index)):
        out[i] = load_u64(records, index[i] * stride + offset)
    return out


@njit(cache=True, nogil=True)
def gather_fixed(records: Bytes, stride: int, offset: int, width: int, index: Int64s, out: Bytes) -> None:
    """Copy the chosen values, `width` bytes each; zeros for index -1."""
    if width == 8:  # noqa: PLR2004 - a word
        for i in range(len(index)):
            value = _ZERO if index[i] < 0 else load_u64(records, index[i] * stride + offset)
            store_u64(out, i * 8, value)
        return
    for i in range(len(index)):
        to, source = i * width, index[i] * stride + offset
        for byte in range(width):
            out[to + byte] = records[source + byte] if index[i] >= 0 else 0


@njit(cache=True, nogil=True)
def chosen_nulls(records: Bytes, stride: int, offset: int, index: Int64s, nulls: Bytes) -> None:
    """Write which null bits are set in any chosen record; all for index -1.

    It is the first to touch the records, so it asks for them ahead of time.
    """
    for i in range(len(index)):
        if i + _AHEAD < len(index):
            record = max(index[i + _AHEAD], 0) * stride
            for line in range(0, stride, 64):
                prefetch(records, record + line)
        for byte in range(len(nulls)):
            nulls[byte] |= records[index[i] * stride + offset + byte] if index[i] >= 0 else np.uint8(255)


@njit(cache=True, nogil=True)
def gather_bits(records: Bytes, stride: int, offset: int, bit: int, index: Int64s, valid: Flags) -> int:
    """Write whether each chosen value is present; return how many are not."""
    mask, missing = np.uint8(1 << bit), 0
    for i in range(len(index)):
        there = index[i] >= 0 and (records[index[i] * stride + offset] & mask) == 0
        valid[i] = there
        missing += not there
    return missing


@njit(cache=True, nogil=True)
def text_offsets(records: Bytes, stride: int, before_at: int, end_at: int, index: Int64s, offsets: Int64s) -> None:
    """Write the offsets of the chosen values of a text column when they lie side by side.

    `before_at` is where the record holds the end of the part before; -1 if there is none.
    """
    offsets[0] = 0
    for i in range(len(index)):
        length = 0
        if index[i] >= 0:
            record = index[i] * stride
            start = 0 if before_at < 0 else _u32(records, record + before_at)
            length = _u32(records, record + end_at) - start
        offsets[i + 1] = offsets[i] + length


@njit(cache=True, nogil=True)
def gather_text(
    records: Bytes, stride: int, heap_at: int, before_at: int, heap: Bytes, index: Int64s, offsets: Int64s, out: Bytes
) -> None:
    """Copy the chosen values of a text column to the offsets that `text_offsets` gave."""
    for i in range(len(index)):
        length = offsets[i + 1] - offsets[i]
        if length == 0:
            continue
        record = index[i] * stride
        start = 0 if before_at < 0 else _u32(records, record + before_at)
        copy_bytes(heap, I64(load_u64(records, record + heap_at)) + 8 + start, out, offsets[i], length)


@njit(cache=True, nogil=True)
def set_flags(records: Bytes, stride: int, offset: int, flag: int, index: Int64s) -> None:
    """Set a flag of the chosen records."""
    mask = np.uint8(flag)
    for i in range(len(index)):
        records[index[i] * stride + offset] |= mask


@njit(cache=True, nogil=True)
def copy_out(
    records: Bytes, stride: int, heap_at: int, heap: Bytes, index: Int64s, out: Bytes, out_heap: Bytes, heap_start: int
) -> int:
    """Copy the chosen records side by side, with their variable parts; return where the heap ends.

    Parameters
    ----------
    heap_start
        Position in `out_heap` at which to go on.
    """
    at = heap_start
    for i in range(len(index)):
        copy_bytes(records, index[i] * stride, out, i * stride, stride)
        if heap_at >= 0:
            source = I64(load_u64(records, index[i] * stride + heap_at))
            length = _u32(heap, source + 4)
            copy_bytes(heap, source, out_heap, at, length)
            _put_u32(out_heap, at, i)
            store_u64(out, i * stride + heap_at, np.uint64(at))
            at += length
    return at


@njit(cache=True, nogil=True)
def add_heap_lengths(records: Bytes, stride: int, heap_at: int, heap: Bytes, index: Int64s, lengths: Int64s) -> None:
    """Add the bytes of the variable part of each chosen record."""
    for i in range(len(index)):
        if index[i] >= 0:
            lengths[i] += _u32(heap, I64(load_u64(records, index[i] * stride + heap_at)) + 4)


@njit(cache=True, nogil=True)
def name_records(records: Bytes, stride: int, heap_at: int, heap: Bytes, first: int, rows: int) -> None:
    """Write the numbers of records, from `first` on, into their variable parts."""
    for row in range(rows):
        _put_u32(heap, I64(load_u64(records, row * stride + heap_at)), first + row)


@njit(cache=True, nogil=True)
def move_records(records: Bytes, stride: int, heap_at: int, heap: Bytes, source: Int64s, target: Int64s) -> None:
    """Copy records to other slots; their variable parts stay where they are."""
    for i in range(len(source)):
        copy_bytes(records, source[i] * stride, records, target[i] * stride, stride)
        if heap_at >= 0:
            _put_u32(heap, I64(load_u64(records, target[i] * stride + heap_at)), target[i])


@njit(cache=True, nogil=True)
def shift_heap(records: Bytes, stride: int, heap_at: int, rows: int, by: int) -> None:
    """Add to the heap positions of records."""
    for row in range(rows):
        at = row * stride + heap_at
        store_u64(records, at, np.uint64(I64(load_u64(records, at)) + by))


@njit(cache=True, nogil=True)
def heap_length(records: Bytes, stride: int, heap_at: int, heap: Bytes, index: Int64s) -> int:
    """Return the bytes of the variable parts of the chosen records."""
    total = 0
    for i in range(len(index)):
        total += _u32(heap, I64(load_u64(records, index[i] * stride + heap_at)) + 4)
    return total


@njit(cache=True, nogil=True)
def compact_heap(records: Bytes, stride: int, heap_at: int, rows: int, heap: Bytes, used: int) -> int:
    """Close the gaps in a heap, in place; return how many bytes are used then.

    A variable part is live if the record that it names holds its position.
    """
    at = to = 0
    while at < used:
        length, row = _u32(heap, at + 4), _u32(heap, at)
        if row < rows and I64(load_u64(records, row * stride + heap_at)) == at:
            if to < at:
                for byte in range(0, length, 8):
                    store_u64(heap, to + byte, load_u64(heap, at + byte))
                store_u64(records, row * stride + heap_at, np.uint64(to))
            to += length
        at += length
    return to


@njit(cache=True, nogil=True)
def keep_records(records: Bytes, stride: int, heap_at: int, heap: Bytes, start: int, keep: Flags, target: int) -> int:
    """Move the records from `start` on whose flags are set to slot `target` and on; return the slot behind them.

    The target is at `start` or before it. Variable parts stay where they are.
    """
    to = target
    for i in range(len(keep)):
        if keep[i]:
            if to < start + i:
                copy_bytes(records, (start + i) * stride, records, to * stride, stride)
                if heap_at >= 0:
                    _put_u32(heap, I64(load_u64(records, to * stride + heap_at)), to)
            to += 1
    return to


@njit(cache=True, nogil=True)
def scatter(
    records: Bytes,
    stride: int,
    heap_at: int,
    heap: Bytes,
    index: Int64s,
    start: int,
    numbers: Int64s,
    skip: int,
    flags_at: int,
    mark: int,
    buffers: Bytes,
    size: int,
    first: int,
    heap_start: int,
    counts: Int64s,
    heap_ends: Int64s,
) -> int:
    """Append records to the buffers of their partitions; return the position in `index` of the first without room.

    Parameters
    ----------
    index, start
        Records to append are those at `index`, from this position on.
    numbers
        Partition of each record of `index`.
    skip
        Bytes at the begin of a record that are left out.
    flags_at, mark
        Offset of the flags, and those that are set in the copies.
    buffers, size
        Buffers side by side, and bytes of each. In a buffer, records begin at 0, and variable parts at `heap_start`.
    first
        Buffer of partition 0. Those of the others follow.
    counts, heap_ends : int64[partitions]
        Records in each buffer, and bytes of their variable parts.
    """
    width = stride - skip
    most = heap_start // width
    room = size - heap_start
    for i in range(start, len(index)):
        number, source = numbers[i], index[i] * stride + skip
        count = counts[number]
        if count == most:
            return i
        base = (first + number) * size
        to = base + count * width
        if heap_at >= 0:
            at, end = I64(load_u64(records, source - skip + heap_at)), heap_ends[number]
            length = _u32(heap, at + 4)
            if end + length > room:
                return i
            copy_bytes(heap, at, buffers, base + heap_start + end, length)
            _put_u32(buffers, base + heap_start + end, count)
            heap_ends[number] = end + length
        for byte in range(0, width, 8):  # records consist of whole words
            store_u64(buffers, to + byte, load_u64(records, source + byte))
        if mark:
            buffers[to + flags_at - skip] |= np.uint8(mark)
        if heap_at >= 0:
            store_u64(buffers, to + heap_at - skip, np.uint64(end))
        counts[number] = count + 1
    return len(index)
