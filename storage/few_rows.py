"""Changes of few rows: only the leaves that they touch are looked at, and patched.

What such a change costs does not grow with the table. It changes nothing but leaves that can be patched
(`storage.patch`); all else is for `storage.draft`. `storage.commit` makes the result of either durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from storage import _few_kernels as kernels
from storage._byte_kernels import SLACK
from storage.keys import Keys
from storage.merge import Counts, unique_violation
from storage.moved import moved_words
from storage.patch import can_patch
from storage.superblock import MOVED_AT_ONCE
from storage.tree import damaged_page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storage.backend import StorageBackend
    from storage.new_rows import NewRows
    from storage.snapshot import Snapshot

__all__ = ["MOST_ROWS", "FewRows", "change_few"]

MOST_ROWS = 64
"""Rows that are few."""


class FewRows(NamedTuple):
    """Changes of few rows: what becomes of their leaves, not yet sealed.

    Attributes
    ----------
    found
        What `_few_kernels.find_leaves` finds of the leaves.
    pages : uint8[n * page_size + 8]
    rows
        Of each leaf.
    counts
        Rows inserted, updated and deleted.
    """

    found: NDArray[np.int64]
    pages: NDArray[np.uint8]
    rows: NDArray[np.int64]
    counts: Counts

    @property
    def leaves(self) -> NDArray[np.int64]:
        """Their numbers, ascending."""
        return self.found[:, 0]

    @property
    def freed(self) -> NDArray[np.int64]:
        """The pages that they leave."""
        return self.found[:, 1]

    @property
    def hints(self) -> NDArray[np.int64]:
        """Where each should go."""
        return self.found[:, 4]

    @property
    def grown(self) -> int:
        """Rows that the table has more than before."""
        return sum(self.rows.tolist()) - sum(self.found[:, 3].tolist())


def change_few(snapshot: Snapshot, backend: StorageBackend, rows: NewRows) -> FewRows | None:
    """Return what changes make of a table, or None if they are not for this module.

    Raises
    ------
    UniqueViolationError
        If an insert's key is in a unique table already.
    CorruptionError
        If a leaf is damaged.
    """
    layout, written, head = snapshot.layout, snapshot.index.written, snapshot.superblock
    if not head.leaves or not can_patch(layout):
        return None
    found = np.empty((MOVED_AT_ONCE, kernels.FOUND), dtype=np.int64)
    leaves = kernels.find_leaves(
        written.separators.prefix, written.continued, written.pages, written.checksums, written.rows,
        moved_words(head.moved), rows.touched, rows.keys, rows.fresh, found,
    )  # fmt: skip
    if not leaves:
        return None
    found, size = found[:leaves], layout.page_size
    frames, pages = np.empty(leaves * size + SLACK, dtype=np.uint8), np.zeros(leaves * size + SLACK, dtype=np.uint8)
    for start, page in enumerate(found[:, 1].tolist()):
        backend.pread_into(page * size, [frames[start * size : (start + 1) * size]])
    after, counts = np.zeros(leaves, dtype=np.int64), np.zeros(3, dtype=np.int64)
    bad, clash, done = kernels.patch_few(
        frames, size, found, rows.touched, rows.upserted, rows.keys, rows.fresh, *rows.columns,
        head.unique, head.rows // head.leaves, pages, after, counts,
    )  # fmt: skip
    if bad >= 0:
        raise damaged_page(backend, int(found[bad, 1]))
    if clash >= 0:
        raise unique_violation(layout, Keys("u64", rows.keys), clash)
    return FewRows(found, pages, after, Counts(*counts.tolist())) if done else None
