"""Moved leaves: those that were written anew since the inner nodes above them were. The superblock says where they are.

So a commit of few leaves writes no inner node. The list is bytes, 24 for each leaf: u32 number of the leaf in key
order, u32 rows, u64 page, u64 checksum. What it says takes the place of what the leaf's parent says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.superblock_bytes import MOVED_LEAF
from headrace.storage.tree import Entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["moved_columns", "moved_entries", "moved_leaves"]

_LEAF = np.uint64(2**32 - 1)


def moved_columns(
    moved: bytes | memoryview,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    """Return the numbers of the leaves, their rows, their pages and their checksums."""
    words = np.ndarray((len(moved) // MOVED_LEAF, MOVED_LEAF // 8), np.uint64, moved)
    leaves, rows = words[:, 0] & _LEAF, words[:, 0] >> np.uint64(32)
    return leaves.astype(np.int64), rows.astype(np.int64), words[:, 1].astype(np.int64), words[:, 2]


def moved_leaves(moved: bytes | memoryview) -> NDArray[np.int64]:
    """Return the numbers of the leaves, ascending."""
    return np.sort(moved_columns(moved)[0])


def moved_entries(written: Entries, moved: bytes | memoryview) -> Entries:
    """Return the entries of all leaves: what inner nodes say of them, and of moved ones what the list says."""
    if not moved:
        return written
    rows, pages, checksums = written.rows.copy(), written.pages.copy(), written.checksums.copy()
    leaves, *now = moved_columns(moved)
    rows[leaves], pages[leaves], checksums[leaves] = now
    return Entries(pages, checksums, rows, written.continued, written.separators)
