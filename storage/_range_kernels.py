"""Compiled search for ranges of keys in encoded leaves, in place. Beside `_kernels`, which finds single keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage._byte_kernels import load_u64
from headrace.storage._kernels import first_not_below, mask_of, order_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["nearest_bytes", "nearest_u64", "range_bytes", "range_u64"]

_HEADER = 24
_U16 = np.uint64(0xFFFF)
_TOP = ~np.uint64(0)
_BELOW, _NOT_ABOVE = False, True
_I64: Any = np.int64  # numba knows the scalar, mypy would not let it meet an int


@njit(cache=True, nogil=True)
def _rank_u64(frames: NDArray[np.uint8], page: int, key: np.uint64) -> int:
    """Return how many rows of a page are below a key: by interpolation, then galloping, then halving."""
    rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
    base = load_u64(frames, page + _HEADER)
    packed = load_u64(frames, page + _HEADER + 8)
    data = page + _I64(packed & _U16)
    width = _I64((packed >> np.uint64(48)) & np.uint64(0xFF))
    mask = mask_of(np.uint64(width))
    if rows == 0 or key <= base:
        return _I64(0)
    target = key - base
    top = load_u64(frames, data + (rows - 1) * width) & mask
    if target > top:
        return rows
    at = min(_I64(np.float64(target) / np.float64(top) * (rows - 1)), rows - 1)
    return first_not_below(frames, data, width, mask, rows, target, at)


@njit(cache=True, nogil=True)
def range_u64(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low: NDArray[np.uint64],
    high: NDArray[np.uint64],
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the rows of a page from `low` to `high`, both included: the first, and how many there are."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        start = _rank_u64(frames, page, low[i])
        if high[i] == _TOP:
            end = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        else:
            end = _rank_u64(frames, page, high[i] + np.uint64(1))
        row[i] = start
        count[i] = max(end - start, 0)


@njit(cache=True, nogil=True)
def nearest_u64(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low: NDArray[np.uint64],
    high: NDArray[np.uint64],
    last: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the last row not above `high`, or the first not below `low`.

    The count is 1 if that row lies in the range, 0 if it does not, and -1 if the page has no such row, so that only its
    neighbour can tell.
    """
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        if last:
            at = (rows if high[i] == _TOP else _rank_u64(frames, page, high[i] + np.uint64(1))) - 1
        else:
            at = _rank_u64(frames, page, low[i])
        if at < 0 or at == rows:
            count[i] = -1
            continue
        base = load_u64(frames, page + _HEADER)
        packed = load_u64(frames, page + _HEADER + 8)
        width = _I64((packed >> np.uint64(48)) & np.uint64(0xFF))
        key = base + (load_u64(frames, page + _I64(packed & _U16) + at * width) & mask_of(np.uint64(width)))
        row[i] = at
        count[i] = low[i] <= key <= high[i]


@njit(cache=True, nogil=True)
def _rank_bytes(
    frames: NDArray[np.uint8],
    page: int,
    prefix: np.uint64,
    data: NDArray[np.uint8],
    start: int,
    end: int,
    equal: bool,
) -> int:
    """Return how many rows of a page are below a key, or with `equal` not above it."""
    base = load_u64(frames, page + _HEADER)
    packed = load_u64(frames, page + _HEADER + 8)
    low = _I64(0)
    high = _I64(load_u64(frames, page + 16) >> np.uint64(32))
    while low < high:
        middle = (low + high) >> 1
        order = order_of(frames, page, base, packed, middle, prefix, data, start, end)
        if order < 0 or (equal and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def range_bytes(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low_prefix: NDArray[np.uint64],
    low_offsets: NDArray[np.int64],
    low_data: NDArray[np.uint8],
    high_prefix: NDArray[np.uint64],
    high_offsets: NDArray[np.int64],
    high_data: NDArray[np.uint8],
    closed: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the rows of a page in each range of byte keys, as `range_u64` does; `closed` ranges include their end."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        start = _rank_bytes(frames, page, low_prefix[i], low_data, low_offsets[i], low_offsets[i + 1], _BELOW)
        end = _rank_bytes(frames, page, high_prefix[i], high_data, high_offsets[i], high_offsets[i + 1], closed)
        row[i] = start
        count[i] = max(end - start, 0)


@njit(cache=True, nogil=True)
def nearest_bytes(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int32],
    low_prefix: NDArray[np.uint64],
    low_offsets: NDArray[np.int64],
    low_data: NDArray[np.uint8],
    high_prefix: NDArray[np.uint64],
    high_offsets: NDArray[np.int64],
    high_data: NDArray[np.uint8],
    last: bool,
    row: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    """Find the last row not above `high`, or the first not below `low`, as `nearest_u64` does."""
    for i in range(len(frame)):
        row[i] = 0
        count[i] = 0
        if frame[i] < 0:
            continue
        page = _I64(frame[i]) * page_size
        rows = _I64(load_u64(frames, page + 16) >> np.uint64(32))
        base = load_u64(frames, page + _HEADER)
        packed = load_u64(frames, page + _HEADER + 8)
        start, stop = low_offsets[i], low_offsets[i + 1]
        begin, end = high_offsets[i], high_offsets[i + 1]
        if last:
            at = _rank_bytes(frames, page, high_prefix[i], high_data, begin, end, _NOT_ABOVE) - 1
        else:
            at = _rank_bytes(frames, page, low_prefix[i], low_data, start, stop, _BELOW)
        if at < 0 or at == rows:
            count[i] = -1
            continue
        row[i] = at
        if last:
            count[i] = order_of(frames, page, base, packed, at, low_prefix[i], low_data, start, stop) >= 0
        else:
            count[i] = order_of(frames, page, base, packed, at, high_prefix[i], high_data, begin, end) <= 0
