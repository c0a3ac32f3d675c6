"""Compiled commits of few rows: the leaves are read and changed, written, and made durable with the next superblock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from headrace.storage._byte_kernels import store_u64
from headrace.storage._digest_kernels import digest_word
from headrace.storage._few_kernels import find_leaves, patch_few, seal_few
from headrace.storage._io_kernels import read_bytes, sync_file, write_bytes
from headrace.storage._superblock_kernels import write_follower
from headrace.storage.backend import PWRITE, SYNC
from headrace.storage.superblock import COPY_BYTES, SLOT_BYTES
from headrace.storage.superblock_bytes import CHECKED, CHECKSUM

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CLASH", "DAMAGED", "MADE", "OTHERWISE", "UNREAD", "change_few", "publish_few"]

MADE, OTHERWISE, UNREAD, DAMAGED, CLASH = range(5)
"""What came of changes: they are made, have to be made otherwise, or must not be made."""


@njit(cache=True, nogil=True)
def change_few(
    calls: NDArray[np.int64],
    page_size: int,
    separators: NDArray[np.uint64],
    continued: NDArray[np.uint8],
    pages: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    moved: NDArray[np.uint8],
    listed: int,
    touched: NDArray[np.uint64],
    upserted: NDArray[np.bool_],
    keys: NDArray[np.uint64],
    fresh: NDArray[np.bool_],
    places: NDArray[np.int64],
    words: NDArray[np.int64],
    spans: NDArray[np.int64],
    heap: NDArray[np.uint8],
    nulls: NDArray[np.uint8],
    unique: bool,
    average: int,
    found: NDArray[np.int64],
    frames: NDArray[np.uint8],
    out: NDArray[np.uint8],
    rows_after: NDArray[np.int64],
) -> tuple[int, int, int, int, int, int, int, int]:
    """Find the leaves that changes touch, read them and make the changes; see `find_leaves` and `patch_few`.

    Returns
    -------
    came
        What came of the changes.
    count
        How many leaves they touch.
    at, error
        UNREAD: the leaf and the number of the error; DAMAGED: the leaf; CLASH: the new row.
    inserted, updated, deleted, grown
        MADE: how many rows were, and how many more the table has.
    """
    count = find_leaves(separators, continued, pages, checksums, rows, moved, listed, touched, keys, fresh, found)
    if count == 0:
        return OTHERWISE, 0, 0, 0, 0, 0, 0, 0
    for leaf in range(count):
        error = read_bytes(calls, frames, leaf * page_size, page_size, found[1, leaf] * page_size)
        if error != 0:
            return UNREAD, count, leaf, error, 0, 0, 0, 0
    bad, clash, done, inserted, updated, deleted, grown = patch_few(
        frames, page_size, found, count, touched, upserted, keys, fresh, places, words, spans, heap, nulls,
        unique, average, out, rows_after,
    )  # fmt: skip
    if bad >= 0:
        return DAMAGED, count, bad, 0, 0, 0, 0, 0
    if clash >= 0:
        return CLASH, count, clash, 0, 0, 0, 0, 0
    return MADE if done else OTHERWISE, count, 0, 0, inserted, updated, deleted, grown


@njit(cache=True, nogil=True)
def publish_few(
    calls: NDArray[np.int64],
    pages: NDArray[np.uint8],
    page_size: int,
    found: NDArray[np.int64],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    slot: NDArray[np.uint8],
    copy: NDArray[np.uint8],
    tail: int,
    moved: NDArray[np.uint8],
    listed: int,
    txid: int,
    table_rows: int,
    end: int,
) -> tuple[int, int, int, int, int]:
    """Seal leaves, write them and the superblock that follows, and make all durable by one sync.

    See `seal_few` and `write_follower` for the parameters; the `slot` is room for both copies of the superblock.

    Returns
    -------
    listed
        How many leaves are listed.
    end
        Pages of the file.
    call, error, offset
        Which of the `calls` failed, with which number, and where; an error of 0 if none did.
    """
    listed = seal_few(pages, page_size, found, numbers, txid, rows, moved, listed, checksums)
    end = max(end, numbers.max() + 1)
    digest = write_follower(copy, tail, txid, table_rows, end, listed, numbers)
    store_u64(copy, digest, digest_word(checksums.view(np.uint8), 0, checksums.itemsize * len(numbers)))
    store_u64(copy, CHECKSUM, digest_word(copy, CHECKED, COPY_BYTES))
    slot[:COPY_BYTES] = copy[:COPY_BYTES]
    slot[COPY_BYTES:] = copy[:COPY_BYTES]
    for leaf in range(len(numbers)):
        offset = numbers[leaf] * page_size
        error = write_bytes(calls, pages, leaf * page_size, page_size, offset)
        if error != 0:
            return listed, end, PWRITE, error, offset
    offset = txid % 2 * page_size
    error = write_bytes(calls, slot, 0, SLOT_BYTES, offset)
    if error != 0:
        return listed, end, PWRITE, error, offset
    return listed, end, SYNC, sync_file(calls), 0
