"""The relocation list: leaves that were written after the inner nodes above them, and where they are now.

With this list, which is part of the superblock, a commit of few leaves writes no inner nodes. The list has 24 bytes for
each leaf: u32 number of the leaf in key order, u32 rows, u64 page, u64 checksum. An entry replaces what the leaf's
parent says.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.format.constants import RELOCATION_BYTES
from headrace.storage.tree.nodes import Entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["add_relocations", "relocated_entries", "relocated_leaves", "relocation_columns"]

_ENTRY = struct.Struct("<IIQQ")
_LEAF = np.uint64(2**32 - 1)
_ROWS = np.uint64(32)


def relocation_columns(
    relocations: bytes,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    """Return the numbers of the leaves, their rows, their pages and their checksums."""
    words = _words(relocations)
    leaves, rows = words[:, 0] & _LEAF, words[:, 0] >> _ROWS
    return leaves.astype(np.int64), rows.astype(np.int64), words[:, 1].astype(np.int64), words[:, 2]


def relocated_leaves(relocations: bytes) -> NDArray[np.int64]:
    """Return the numbers of the leaves in a list, ascending."""
    return np.sort(relocation_columns(relocations)[0])


def relocated_entries(written: Entries, relocations: bytes) -> Entries:
    """Return the entries of all leaves, given those of the inner nodes and a relocation list."""
    if not relocations:
        return written
    rows, pages, checksums = written.rows.copy(), written.pages.copy(), written.checksums.copy()
    leaves, *now = relocation_columns(relocations)
    rows[leaves], pages[leaves], checksums[leaves] = now
    return Entries(pages, checksums, rows, written.continued, written.separators)


def add_relocations(relocations: bytes, leaves: NDArray[np.int64], entries: Entries) -> bytes:
    """Return a list with these leaves added, or replaced where the list has them already.

    Parameters
    ----------
    relocations
        List so far.
    leaves
        Numbers of the leaves to add.
    entries
        Current entries of all leaves.
    """
    numbers, moved = (
        np.frombuffer(relocations, dtype=np.uint32)[:: RELOCATION_BYTES // 4].tolist(),
        set(leaves.tolist()),
    )
    for at in [at for at, leaf in enumerate(numbers) if leaf in moved][::-1]:
        start = at * RELOCATION_BYTES
        relocations = relocations[:start] + relocations[start + RELOCATION_BYTES :]
    columns = (leaves, entries.rows[leaves], entries.pages[leaves], entries.checksums[leaves])
    added = [_ENTRY.pack(*entry) for entry in zip(*(column.tolist() for column in columns), strict=True)]
    return b"".join([relocations, *added])


def _words(relocations: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(relocations, dtype=np.uint64).reshape(-1, RELOCATION_BYTES // 8)
