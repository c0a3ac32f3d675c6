"""Compiled BLAKE2b with a digest of eight bytes and no key (RFC 7693), for code that cannot call `hashlib`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage._byte_kernels import load_u64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["digest_word"]

_START = np.array(
    [
        0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
        0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
    ],
    dtype=np.uint64,
)  # fmt: skip
_PARAMETERS = np.uint64(0x01010000 ^ 8)
_BLOCK, _ROUNDS = 128, 12
_GOES_ON, _LAST = np.uint64(0), ~np.uint64(0)
_ORDERS = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
    [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
    [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
    [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
    [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
    [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
    [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
    [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
]
_PLACES = 8 * np.array([*_ORDERS, *_ORDERS[:2]], dtype=np.int64)
"""Where the words of a block are that each round takes."""


@njit(cache=True, nogil=True)
def _rotated(word: Any, bits: int) -> Any:
    return (word >> np.uint64(bits)) | (word << np.uint64(64 - bits))


@njit(cache=True, nogil=True)
def _mixed(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
    a = a + b + x
    d = _rotated(d ^ a, 32)
    c = c + d
    b = _rotated(b ^ c, 24)
    a = a + b + y
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 63)
    return a, b, c, d


@njit(cache=True, nogil=True)
def _compress(state: NDArray[np.uint64], block: NDArray[np.uint8], at: int, count: int, last: Any) -> None:
    """Take a block into the state; `count` bytes have been taken with it. `last` has all bits set for the last one."""
    v0, v1, v2, v3, v4, v5, v6, v7 = state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]
    v8, v9, v10, v11 = _START[0], _START[1], _START[2], _START[3]
    v12, v13, v14, v15 = _START[4] ^ np.uint64(count), _START[5], _START[6] ^ last, _START[7]
    for turn in range(_ROUNDS):
        p = _PLACES[turn]
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, load_u64(block, at + p[0]), load_u64(block, at + p[1]))
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, load_u64(block, at + p[2]), load_u64(block, at + p[3]))
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, load_u64(block, at + p[4]), load_u64(block, at + p[5]))
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, load_u64(block, at + p[6]), load_u64(block, at + p[7]))
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, load_u64(block, at + p[8]), load_u64(block, at + p[9]))
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, load_u64(block, at + p[10]), load_u64(block, at + p[11]))
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, load_u64(block, at + p[12]), load_u64(block, at + p[13]))
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, load_u64(block, at + p[14]), load_u64(block, at + p[15]))
    state[0] ^= v0 ^ v8
    state[1] ^= v1 ^ v9
    state[2] ^= v2 ^ v10
    state[3] ^= v3 ^ v11
    state[4] ^= v4 ^ v12
    state[5] ^= v5 ^ v13
    state[6] ^= v6 ^ v14
    state[7] ^= v7 ^ v15


@njit(cache=True, nogil=True)
def digest_word(data: NDArray[np.uint8], start: int, stop: int) -> Any:
    """Return the digest of bytes `start` to `stop`, as `storage.superblock.digest` does, as a little-endian uint64."""
    state = _START.copy()
    state[0] ^= _PARAMETERS
    at = start
    while stop - at > _BLOCK:
        at += _BLOCK
        _compress(state, data, at - _BLOCK, at - start, _GOES_ON)
    block = np.zeros(_BLOCK, dtype=np.uint8)
    block[: stop - at] = data[at:stop]
    _compress(state, block, 0, stop - start, _LAST)
    return state[0]
