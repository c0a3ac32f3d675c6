"""Compiled writing of a superblock that follows the one before; the layout is that of `storage.superblock_bytes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from storage import superblock_bytes as layout
from storage._byte_kernels import store_u64
from storage.superblock import COPY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["write_follower"]

_TXID, _ROWS, _PAGES, _FLAGS = layout.TXID, layout.ROWS, layout.PAGES, layout.FLAGS
_UNIQUE, _PROVEN_BY_PAGES, _WITH_MOVED = layout.UNIQUE, layout.PROVEN_BY_PAGES, layout.WITH_MOVED
_COUNT, _MOVED_LEAF, _DIGEST, _WORD = 2, layout.MOVED_LEAF, 8, 8


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
    store_u64(copy, _TXID, np.uint64(txid))
    store_u64(copy, _ROWS, np.uint64(rows))
    store_u64(copy, _PAGES, np.uint64(pages))
    flags = copy[_FLAGS] & _UNIQUE
    at = tail
    if moved > 0:
        flags |= _WITH_MOVED
        _store_count(copy, at, moved)
        at += _COUNT + moved * _MOVED_LEAF
    digest = at + _COUNT
    if len(proof) > 0:
        flags |= _PROVEN_BY_PAGES
        _store_count(copy, at, len(proof))
        at = digest + _DIGEST
        for page in proof:
            store_u64(copy, at, np.uint64(page))
            at += _WORD
    copy[_FLAGS] = flags
    copy[at:COPY_BYTES] = 0
    return digest
