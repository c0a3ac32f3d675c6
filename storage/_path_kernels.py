"""Compiled commits of few rows: the leaves that they touch, and the paths from these to the root, written anew.

The tree comes as `storage.paths.PathTree` keeps it: one array for all levels, leaves first, the root last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from storage._byte_kernels import store_u64, xxh64
from storage._commit_kernels import touched_leaves
from storage._kernels import verify_pages
from storage._patch_kernels import DONE, patch_leaves
from storage._tree_kernels import locate, write_node

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["find_paths", "patch_few", "write_paths"]

_WIDE = False
"""Keys are of one word each."""


@njit(cache=True, nogil=True)
def _above(leaves: NDArray[np.int64], parent: NDArray[np.int64], height: int) -> NDArray[np.int64]:
    """Return leaves and all nodes above them, ascending."""
    at = np.empty(height * len(leaves), dtype=np.int64)
    found = len(leaves)
    at[:found] = leaves
    reached = 0
    while reached < found:
        above = parent[at[reached]]
        if above >= 0 and above != at[found - 1]:
            at[found] = above
            found += 1
        reached += 1
    return at[:found].copy()


@njit(cache=True, nogil=True)
def find_paths(
    separators: NDArray[np.uint64],
    continued: NDArray[np.uint8],
    parent: NDArray[np.int64],
    pages: NDArray[np.int64],
    height: int,
    touched: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    fresh: NDArray[np.bool_],
    most: int,
) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the leaves that changes touch, and the nodes above.

    Parameters
    ----------
    separators, continued
        Of the leaves; the other arrays of the tree are of all levels.
    touched, keys
        Keys whose rows go, and keys of rows to store, ascending.
    fresh
        Which rows are inserts.
    most
        Leaves that are few.

    Returns
    -------
    leaves
        How many; 0 if there are too many, or a key spans several of them.
    at, hints
        The leaves and the nodes above them, ascending, and where each should go: a leaf where it is, or near its
        neighbours if it strayed; a node where it is.
    touched_ends, row_ends
        Where the changes of each leaf end among `touched` and `keys`.
    """
    offsets, data = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint8)
    first, last = np.empty(len(touched), dtype=np.int32), np.empty(len(touched), dtype=np.int32)
    row_first, row_last = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=np.int32)
    locate(separators, offsets, data, continued, touched, offsets, data, _WIDE, first, last)
    locate(separators, offsets, data, continued, keys, offsets, data, _WIDE, row_first, row_last)
    begin = first.astype(np.int64)
    leaf = np.where(fresh, row_last, row_first).astype(np.int64)
    leaves, joined = touched_leaves(begin, last.astype(np.int64), leaf, len(separators))
    count = len(leaves) if len(leaves) <= most and not joined.any() else 0
    at = _above(leaves[:count], parent, height)
    hints = pages[at]
    for i in range(count):
        before = pages[max(at[i] - 1, 0)]
        after = pages[min(at[i] + 1, len(separators) - 1)]
        hints[i] = max(min(before, after), min(max(before, after), hints[i]))
    return (
        count,
        at,
        hints,
        np.searchsorted(begin, leaves[:count], side="right"),
        np.searchsorted(leaf, leaves[:count], side="right"),
    )


@njit(cache=True, nogil=True)
def patch_few(
    frames: NDArray[np.uint8],
    page_size: int,
    leaves: NDArray[np.int64],
    pages: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    touched: NDArray[np.uint64],
    upserted: NDArray[np.bool_],
    touched_ends: NDArray[np.int64],
    keys: NDArray[np.uint64],
    fresh: NDArray[np.bool_],
    row_ends: NDArray[np.int64],
    places: NDArray[np.int64],
    words: NDArray[np.int64],
    spans: NDArray[np.int64],
    heap: NDArray[np.uint8],
    nulls: NDArray[np.uint8],
    unique: bool,
    average: int,
    out: NDArray[np.uint8],
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[int, int, bool]:
    """Verify leaves and patch them; see `patch_leaves` for the parameters.

    Returns
    -------
    bad
        The first leaf whose page is not what its parent says, or -1.
    clash
        A new row whose key is there already, or -1.
    done
        Whether all leaves could be patched.
    """
    count = len(leaves)
    bad = verify_pages(frames, page_size, np.arange(count), pages[leaves], checksums[leaves])
    if bad >= 0:
        return bad, -1, False
    status = np.empty(count, dtype=np.int64)
    clash = patch_leaves(
        frames, page_size, np.zeros(count, dtype=np.bool_),
        touched, upserted, touched_ends, keys, fresh, row_ends,
        places, words, spans, heap, nulls, unique, average, out, status, rows, counts,
    )  # fmt: skip
    return -1, clash, clash < 0 and (status == DONE).all()


@njit(cache=True, nogil=True)
def write_paths(
    at: NDArray[np.int64],
    numbers: NDArray[np.int64],
    txid: int,
    page_size: int,
    leaf_rows: NDArray[np.int64],
    children: NDArray[np.int64],
    level: NDArray[np.int64],
    pages: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    rows: NDArray[np.int64],
    continued: NDArray[np.uint8],
    separators: NDArray[np.uint64],
    out: NDArray[np.uint8],
) -> None:
    """Seal new leaves, write and seal the nodes above them, and change the tree accordingly.

    Parameters
    ----------
    at, numbers
        The leaves and the nodes above them, and the page that each gets.
    leaf_rows
        Rows of the leaves.
    children
        Where the children of each node begin; those of the next one begin where they end.
    out
        The leaves, and zeroed room for the nodes.
    """
    offsets, data = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint8)
    for i in range(len(at)):
        node, origin = at[i], i * page_size
        if i < len(leaf_rows):
            rows[node] = leaf_rows[i]
        else:
            start, stop = children[node], children[node + 1]
            write_node(
                separators, offsets, data, _WIDE, pages, checksums, rows, continued,
                start, stop, level[node], out, origin,
            )  # fmt: skip
            rows[node] = rows[start:stop].sum()
        store_u64(out, origin + 8, np.uint64(txid))
        pages[node] = numbers[i]
        checksums[node] = xxh64(out, origin + 8, page_size - 8, np.uint64(numbers[i]))
        store_u64(out, origin, checksums[node])
