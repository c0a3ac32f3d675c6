"""Compiled gathering of columns from encoded leaves; `_search_kernels` describes the buffers of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, copy_bytes, load_u64, store_u64
from headrace.storage.format.constants import DIRECTORY_ENTRY, HEADER
from headrace.storage.leaf._search_kernels import mask_of, text_span

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Int32s, Int64s

__all__ = ["expand_rows", "expand_runs", "gather_spans", "gather_text", "gather_word_runs", "gather_words"]


_U16 = np.uint64(0xFFFF)


@njit(inline="always")
def _described(frames: Bytes, page: int, entry: int) -> tuple[np.uint64, np.uint64, int, int, int]:
    """Return how a page holds a word: base, mask, place and width of the values, and the null bitmap's place or 0."""
    at = page + HEADER + DIRECTORY_ENTRY * entry
    packed = load_u64(frames, at + 8)
    width = I64((packed >> np.uint64(48)) & np.uint64(0xFF))
    bitmap = I64((packed >> np.uint64(32)) & _U16)
    if bitmap > 0:
        bitmap += page
    return load_u64(frames, at), mask_of(np.uint64(width)), page + I64(packed & _U16), width, bitmap


@njit(cache=True, nogil=True)
def gather_words(
    frames: Bytes, page_size: int, frame: Int32s, row: Int32s, entry: int, size: int, out: Bytes, valid: Bytes
) -> int:
    """Write `size` low bytes of one column's word for each row; return how many rows are null or nowhere.

    Parameters
    ----------
    entry
        Number of the entry in the directory.
    out : uint8[n * size + 8]
    valid : uint8[n]
        Becomes 1 for values that are present.
    """
    last = np.int32(-1)
    data = 0
    bitmap = 0
    width = 0
    base = mask = np.uint64(0)
    missing = 0
    for i in range(len(frame)):
        if frame[i] != last and frame[i] >= 0:
            last = frame[i]
            base, mask, data, width, bitmap = _described(frames, I64(last) * page_size, entry)
        present = np.uint8(frame[i] >= 0)
        if present != 0 and bitmap > 0:
            present = np.uint8(((frames[bitmap + (row[i] >> 3)] >> (row[i] & 7)) & 1) ^ 1)
        valid[i] = present
        if present != 0:
            store_u64(out, i * size, base + (load_u64(frames, data + I64(row[i]) * width) & mask))
        else:
            missing += 1
            store_u64(out, i * size, np.uint64(0))
    return missing


@njit(cache=True, nogil=True)
def gather_word_runs(
    frames: Bytes,
    page_size: int,
    frame: Int32s,
    row: Int32s,
    ends: Int64s,
    entry: int,
    size: int,
    out: Bytes,
    valid: Bytes,
) -> int:
    """Do what `gather_words` does for runs of rows: run `i` begins with row `row[i]` of its page.

    Parameters
    ----------
    ends : int64[n]
        Number of rows up to the last one of each run.
    out : uint8[ends[-1] * size + 8]
    valid : uint8[ends[-1]]
        Becomes 1 for values that are present.
    """
    last = np.int32(-1)
    first = 0
    bitmap = 0
    width = 0
    base = mask = np.uint64(0)
    missing = 0
    begin = 0
    for i in range(len(frame)):
        end = ends[i]
        if frame[i] != last and frame[i] >= 0:
            last = frame[i]
            base, mask, first, width, bitmap = _described(frames, I64(last) * page_size, entry)
        data = first + I64(row[i]) * width
        if frame[i] >= 0 and bitmap == 0:
            for to in range(begin, end):
                valid[to] = 1
                store_u64(out, to * size, base + (load_u64(frames, data) & mask))
                data += width
        else:
            for to in range(begin, end):
                at = I64(row[i]) + to - begin
                present = frame[i] >= 0 and (frames[bitmap + (at >> 3)] >> (at & 7)) & 1 == 0
                valid[to] = present
                missing += 0 if present else 1
                store_u64(out, to * size, base + (load_u64(frames, data) & mask) if present else np.uint64(0))
                data += width
        begin = end
    return missing


@njit(cache=True, nogil=True)
def gather_spans(
    frames: Bytes, page_size: int, frame: Int32s, row: Int32s, entry: int, offsets: Int64s, valid: Bytes
) -> int:
    """Write the offsets, int64[n + 1], that the rows' texts of one column will have; return how many are missing."""
    missing = 0
    offsets[0] = 0
    for i in range(len(frame)):
        length = 0
        valid[i] = 0
        if frame[i] >= 0:
            page = I64(frame[i]) * page_size
            at = page + HEADER + DIRECTORY_ENTRY * entry
            packed = load_u64(frames, at + 8)
            bitmap = I64((packed >> np.uint64(32)) & _U16)
            if bitmap == 0 or (frames[page + bitmap + (row[i] >> 3)] >> (row[i] & 7)) & 1 == 0:
                valid[i] = 1
                start, end = text_span(frames, page, load_u64(frames, at), packed, I64(row[i]))
                length = end - start
        missing += 1 - valid[i]
        offsets[i + 1] = offsets[i] + length
    return missing


@njit(cache=True, nogil=True)
def gather_text(
    frames: Bytes, page_size: int, frame: Int32s, row: Int32s, entry: int, offsets: Int64s, out: Bytes
) -> None:
    """Copy the texts whose offsets `gather_spans` gave into `out`."""
    for i in range(len(frame)):
        length = offsets[i + 1] - offsets[i]
        if length > 0:
            page = I64(frame[i]) * page_size
            at = page + HEADER + DIRECTORY_ENTRY * entry
            start, _ = text_span(frames, page, load_u64(frames, at), load_u64(frames, at + 8), I64(row[i]))
            copy_bytes(frames, start, out, offsets[i], length)


@njit(cache=True, nogil=True)
def expand_rows(frame: Int32s, first: Int32s, count: Int64s) -> tuple[Int32s, Int32s, Int64s]:
    """Return frame, row and index of origin of `count[i]` rows from `first[i]` on in page `frame[i]`, for all i."""
    total = count.sum()
    frames = np.empty(total, dtype=np.int32)
    rows = np.empty(total, dtype=np.int32)
    origin = np.empty(total, dtype=np.int64)
    at = 0
    for i in range(len(frame)):
        for row in range(count[i]):
            frames[at] = frame[i]
            rows[at] = first[i] + row
            origin[at] = i
            at += 1
    return frames, rows, origin


@njit(cache=True, nogil=True)
def expand_runs(frame: Int32s, row: Int32s, ends: Int64s, out_frame: Int32s, out_row: Int32s) -> None:
    """Write frame and row of each row of runs; see `gather_word_runs`. Frame -1 is kept."""
    begin = 0
    for i in range(len(frame)):
        for to in range(begin, ends[i]):
            out_frame[to] = frame[i]
            out_row[to] = row[i] + np.int32(to - begin)
        begin = ends[i]
