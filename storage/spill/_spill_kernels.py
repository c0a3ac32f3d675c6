"""Compiled checksums of the pages of a spilled block. Arrays in, arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format._byte_kernels import xxh64

if TYPE_CHECKING:
    from headrace.storage.format.arrays import Bytes, Words

__all__ = ["digest_pages"]


@njit(cache=True, nogil=True)
def digest_pages(block: Bytes, length: int, page: int, seed: int, digests: Words) -> None:
    """Write the digest of each page of the first `length` bytes; the last page may be short."""
    for i in range(len(digests)):
        start = i * page
        digests[i] = xxh64(block, start, min(page, length - start), np.uint64(seed + i))
