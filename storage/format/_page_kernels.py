"""Compiled verification and sealing of whole pages, and row counts of leaves. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import load_u64, store_u64, xxh64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["count_rows", "seal_pages", "verify_pages"]

_I64: Any = np.int64  # numba knows the scalar, mypy would not let it meet an int


@njit(cache=True, nogil=True)
def count_rows(frames: NDArray[np.uint8], page_size: int, frame: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return how many rows each page holds."""
    result = np.empty(len(frame), dtype=np.int64)
    for i in range(len(frame)):
        result[i] = _I64(load_u64(frames, _I64(frame[i]) * page_size + 16) >> np.uint64(32))
    return result


@njit(cache=True, nogil=True)
def verify_pages(
    frames: NDArray[np.uint8],
    page_size: int,
    frame: NDArray[np.int64],
    numbers: NDArray[np.int64],
    checksums: NDArray[np.uint64],
) -> int:
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
def seal_pages(
    pages: NDArray[np.uint8], page_size: int, numbers: NDArray[np.int64], txid: int, checksums: NDArray[np.uint64]
) -> None:
    """Write transaction and checksum into each page; page `i` will be page `numbers[i]` of the file."""
    for page in range(len(numbers)):
        origin = page * page_size
        store_u64(pages, origin + 8, np.uint64(txid))
        checksums[page] = xxh64(pages, origin + 8, page_size - 8, np.uint64(numbers[page]))
        store_u64(pages, origin, checksums[page])
