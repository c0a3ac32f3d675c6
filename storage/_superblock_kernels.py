"""Compiled writing of a superblock that follows the one before; the layout is that of `storage.superblock_bytes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage._byte_kernels import store_u64
from headrace.storage.superblock import COPY_BYTES
from headrace.storage.superblock_bytes import FLAGS, MOVED_LEAF, PAGES, PROVEN_BY_PAGES, ROWS, TXID, UNIQUE, WITH_MOVED

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["write_follower"]

_COUNT, _DIGEST, _WORD = 2, 8, 8


@njit(cache=True, nogil=True)
def _store_count(copy: NDArray[np.uint8], at: int, count: int) -> None:
    copy[at] = np.uint8(count & 255)
    copy[at + 1] = np.uint8(count >> 8)


@njit(cache=True, nogil=True)
def write_follower(
    copy: NDArray[np.uint8], tail: int, txid: int, rows: int, pages: int, moved: int, proof: NDArray[np.int64]
) -> int:
    """Turn a copy into that of a later commit that writes no inner nodes, but for checksum and the proof's digest.

    Parameters
    ----------
    copy
        Of the superblock of a commit before, in the newest format, but with the list of moved leaves as it is now.
    tail
        Where the applications end.
    txid, rows, pages
        As of the `Superblock`.
    moved
        How many leaves are listed as moved.
    proof
        Pages of the proof; none if there is none. There is room for it.

    Returns
    -------
    int
        Where the digest of the proof has to go.
    """
    store_u64(copy, TXID, np.uint64(txid))
    store_u64(copy, ROWS, np.uint64(rows))
    store_u64(copy, PAGES, np.uint64(pages))
    flags = copy[FLAGS] & UNIQUE
    at = tail
    if moved > 0:
        flags |= WITH_MOVED
        _store_count(copy, at, moved)
        at += _COUNT + moved * MOVED_LEAF
    digest = at + _COUNT
    if len(proof) > 0:
        flags |= PROVEN_BY_PAGES
        _store_count(copy, at, len(proof))
        at = digest + _DIGEST
        for page in proof:
            store_u64(copy, at, np.uint64(page))
            at += _WORD
    copy[FLAGS] = flags
    copy[at:COPY_BYTES] = 0
    return digest
