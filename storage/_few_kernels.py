"""Compiled changes of few rows: the leaves that they touch are found and patched, and listed as moved.

What `change_few` alone calls is inlined, for it takes less time to compile so.

A list of moved leaves comes as `storage.moved` describes it, in room for more: the first `listed` entries count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from headrace.storage._arrow_kernels import open_array, open_schema, read_words, same_columns
from headrace.storage._byte_kernels import load_u64, store_u64
from headrace.storage._commit_kernels import touched_leaves
from headrace.storage._encode_kernels import seal_pages
from headrace.storage._kernels import verify_pages
from headrace.storage._patch_kernels import DONE, patch_leaves
from headrace.storage._tree_kernels import locate
from headrace.storage.superblock_bytes import MOVED_LEAF

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FOUND", "add_moved", "find_leaves", "patch_few", "read_rows", "seal_few"]

FOUND = 7
"""What is found of a leaf."""
_WIDE = False
"""Keys are of one word each."""
_SIGN = np.uint64(1 << 63)
_WORD = np.uint64(64)
_HALF = np.uint64(32)
_LEAF = np.uint64(2**32 - 1)
_PAGE, _CHECKSUM = 8, 16  # in an entry


@njit(cache=True, nogil=True)
def _place_of(leaf: int, moved: NDArray[np.uint8], listed: int) -> int:
    """Return where what a list says of a leaf begins, or -1."""
    for at in range(0, listed * MOVED_LEAF, MOVED_LEAF):
        if load_u64(moved, at) & _LEAF == np.uint64(leaf):
            return at
    return -1


@njit(cache=True, nogil=True)
def _page_of(leaf: int, pages: NDArray[np.int64], moved: NDArray[np.uint8], listed: int) -> Any:
    at = _place_of(leaf, moved, listed)
    return pages[leaf] if at < 0 else np.int64(load_u64(moved, at + _PAGE))


@njit(cache=True, nogil=True)
def add_moved(
    moved: NDArray[np.uint8],
    listed: int,
    leaves: NDArray[np.int64],
    pages: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
) -> int:
    """Add leaves to a list, in the place of what it says of them; return how many it has then."""
    for i in range(len(pages)):
        at = _place_of(leaves[i], moved, listed)
        if at < 0:
            at = listed * MOVED_LEAF
            listed += 1
        store_u64(moved, at, np.uint64(leaves[i]) | (np.uint64(rows[i]) << _HALF))
        store_u64(moved, at + _PAGE, np.uint64(pages[i]))
        store_u64(moved, at + _CHECKSUM, checksums[i])
    return listed


@njit(cache=True, nogil=True)
def _pack_keys(
    words: NDArray[np.int64], bits: NDArray[np.uint64], flips: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> bool:
    """Make one key of the first columns of each row, as `KeyCodec.pack_words` does; return whether the keys ascend."""
    for row in range(len(keys)):
        key = np.uint64(0)
        for column in range(len(bits)):
            value = np.uint64(words[column, row]) ^ flips[column]
            if bits[column] == _WORD:
                key = value
            else:
                key = (key << bits[column]) | (value & ((np.uint64(1) << bits[column]) - np.uint64(1)))
        keys[row] = key
        words[len(bits) - 1, row] = np.int64(key ^ _SIGN)
        if row > 0 and keys[row - 1] >= key:
            return False
    return True


@njit(cache=True)  # holds the interpreter's lock, which capsules need
def read_rows(
    schema: int,
    expected: int,
    batch: int,
    columns: NDArray[np.int64],
    bits: NDArray[np.uint64],
    flips: NDArray[np.uint64],
    words: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> bool:
    """Read a batch of rows; return False if its columns are not those expected, have nulls, or keys do not ascend.

    Parameters
    ----------
    schema, expected, batch
        Where the capsules lie (`id`) with two `ArrowSchema` and the `ArrowArray`.
    columns
        See `_arrow_kernels.read_words`; those of the key are the first.
    bits, flips
        Of each column of the key: its width, and its sign bit if it has one.
    words
        Filled column by column; the last one of the key becomes the key as leaves have it.
    keys
        Filled.
    """
    if not same_columns(open_schema(schema), open_schema(expected)):
        return False
    return read_words(open_array(batch), columns, words) and _pack_keys(words, bits, flips, keys)


@njit(cache=True, nogil=True, inline="always")
def find_leaves(
    separators: NDArray[np.uint64],
    continued: NDArray[np.uint8],
    pages: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    moved: NDArray[np.uint8],
    listed: int,
    touched: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    fresh: NDArray[np.bool_],
    found: NDArray[np.int64],
) -> int:
    """Find the leaves that changes touch; return how many, 0 if they are too many or a key spans several of them.

    Parameters
    ----------
    separators, continued, pages, checksums, rows
        What inner nodes say of all leaves.
    touched, keys
        Keys whose rows go, and keys of rows to store, ascending.
    fresh
        Which rows are inserts.
    found : int64[FOUND, n]
        Filled for each leaf, ascending: its number, page, checksum and rows; where it should go: where it is, or near
        its neighbours if it strayed; where its changes end among `touched` and `keys`.
    """
    offsets, data = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint8)
    first, last = np.empty(len(touched), dtype=np.int32), np.empty(len(touched), dtype=np.int32)
    row_first, row_last = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=np.int32)
    locate(separators, offsets, data, continued, touched, offsets, data, _WIDE, first, last)
    locate(separators, offsets, data, continued, keys, offsets, data, _WIDE, row_first, row_last)
    begin, end = first.astype(np.int64), last.astype(np.int64)
    goal = np.empty(len(keys), dtype=np.int64)
    for row in range(len(keys)):
        goal[row] = row_last[row] if fresh[row] else row_first[row]
    leaves, joined = touched_leaves(begin, end, goal, len(separators))
    if len(leaves) > found.shape[1] or joined.any():
        return 0
    t = 0
    q = 0
    for i in range(len(leaves)):
        leaf = leaves[i]
        found[0, i], found[1, i], found[2, i], found[3, i] = leaf, pages[leaf], np.int64(checksums[leaf]), rows[leaf]
        entry = _place_of(leaf, moved, listed)
        if entry >= 0:
            found[1, i] = np.int64(load_u64(moved, entry + _PAGE))
            found[2, i] = np.int64(load_u64(moved, entry + _CHECKSUM))
            found[3, i] = np.int64(load_u64(moved, entry) >> _HALF)
        left = _page_of(max(leaf - 1, 0), pages, moved, listed)
        right = _page_of(min(leaf + 1, len(separators) - 1), pages, moved, listed)
        found[4, i] = max(min(left, right), min(max(left, right), found[1, i]))
        while t < len(begin) and begin[t] <= leaf:
            t += 1
        while q < len(goal) and goal[q] <= leaf:
            q += 1
        found[5, i], found[6, i] = t, q
    return len(leaves)


@njit(cache=True, nogil=True, inline="always")
def patch_few(
    frames: NDArray[np.uint8],
    page_size: int,
    found: NDArray[np.int64],
    count: int,
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
    out: NDArray[np.uint8],
    rows: NDArray[np.int64],
) -> tuple[int, int, bool, int, int, int, int]:
    """Verify the first `count` leaves found and patch them; see `patch_leaves` for the other parameters.

    Returns
    -------
    bad
        The first leaf whose page is not what it should be, or -1.
    clash
        A new row whose key is there already, or -1.
    done
        Whether all leaves could be patched.
    inserted, updated, deleted, grown
        How many rows were, and how many more the table has.
    """
    bad = verify_pages(frames, page_size, np.arange(count), found[1, :count], found[2, :count].view(np.uint64))
    if bad >= 0:
        return bad, -1, False, 0, 0, 0, 0
    counts = np.zeros(3, dtype=np.int64)
    status = np.empty(count, dtype=np.int64)
    clash = patch_leaves(
        frames, page_size, np.zeros(count, dtype=np.bool_),
        touched, upserted, found[5], keys, fresh, found[6],
        places, words, spans, heap, nulls, unique, average, out, status, rows, counts,
    )  # fmt: skip
    done = clash < 0 and (status == DONE).all()
    return -1, clash, done, counts[0], counts[1], counts[2], rows[:count].sum() - found[3, :count].sum()


@njit(cache=True, nogil=True)
def seal_few(
    pages: NDArray[np.uint8],
    page_size: int,
    found: NDArray[np.int64],
    numbers: NDArray[np.int64],
    txid: int,
    rows: NDArray[np.int64],
    moved: NDArray[np.uint8],
    listed: int,
    checksums: NDArray[np.uint64],
) -> int:
    """Seal leaves as the pages `numbers`, fill in their checksums and `add_moved` them; return how many are listed."""
    seal_pages(pages, page_size, numbers, txid, checksums)
    return add_moved(moved, listed, found[0], numbers, checksums, rows)
