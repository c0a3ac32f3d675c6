"""Compiled verification and sealing of whole pages, and row counts of leaves. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import I64, load_u64, store_u64, xxh64

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Int32s, Int64s, Words

__all__ = ["count_rows", "seal_pages", "verify_pages"]


@njit(cache=True, nogil=True)
def count_rows(frames: Bytes, page_size: int, frame: Int32s) -> Int64s:
    """Return how many rows each page holds."""
    result = np.empty(len(frame), dtype=np.int64)
    for i in range(len(frame)):
        result[i] = I64(load_u64(frames, I64(frame[i]) * page_size + 16) >> np.uint64(32))
    return result


@njit(cache=True, nogil=True)
def verify_pages(frames: Bytes, page_size: int, frame: Int64s, numbers: Int64s, checksums: Words) -> int:
    """Return the index of the first page whose content or stored checksum is not as expected, or -1.

    Parameters
    ----------
    numbers : int64[n]
        Page numbers in the file, the seeds of the checksums.
    checksums : uint64[n] or uint64[0]
        What the parents say; none if unknown.
    """
    for i in range(len(frame)):
        origin = frame[i] * page_size
        digest = xxh64(frames, origin + 8, page_size - 8, np.uint64(numbers[i]))
        if digest != load_u64(frames, origin) or (len(checksums) > 0 and digest != checksums[i]):
            return i
    return -1


@njit(cache=True, nogil=True)
def seal_pages(pages: Bytes, page_size: int, numbers: Int64s, txid: int, checksums: Words) -> None:
    """Write transaction and checksum into each page; page `i` will be page `numbers[i]` of the file."""
    for page in range(len(numbers)):
        origin = page * page_size
        store_u64(pages, origin + 8, np.uint64(txid))
        checksums[page] = xxh64(pages, origin + 8, page_size - 8, np.uint64(numbers[page]))
        store_u64(pages, origin, checksums[page])
