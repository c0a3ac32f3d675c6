"""Compiled hashing of normalized keys. Inputs and outputs are arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage.format import xxh64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["hash_keys"]


@njit(cache=True, nogil=True)
def hash_keys(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the XXH64 digest, seed 0, of each key's bytes `data[offsets[i]:offsets[i + 1]]`."""
    digests = np.empty(len(offsets) - 1, dtype=np.uint64)
    for row in range(len(digests)):
        digests[row] = xxh64(data, offsets[row], offsets[row + 1] - offsets[row], np.uint64(0))
    return digests
