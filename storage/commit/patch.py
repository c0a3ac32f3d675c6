"""Patching of leaves in their encoded form, which works if the new values fit, as most do.

Only tables with keys of one word are patched. The rest is left to `merge`: leaves that a key spans, leaves that become
too full or too small, and new texts that do not fit the base and width of their column in the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.commit import _patch_kernels as kernels
from headrace.storage.commit.merge import Counts, unique_violation
from headrace.storage.leaf.encode import PhysicalRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.commit.changes import Part
    from headrace.storage.format.layout import LeafLayout

__all__ = ["Patched", "can_patch", "patch_leaves"]


@dataclass(frozen=True, slots=True)
class Patched:
    """Patched leaves, not sealed yet.

    Attributes
    ----------
    pages : uint8 array
        Buffer whose first p pages are the patched leaves.
    done : bool[m]
        Leaves that the pages replace.
    rest : bool[m]
        Leaves that are left to `headrace.storage.commit.merge`, including neighbors of leaves that got too small.
    rows : int64[p]
        Rows of each page.
    counts
        Numbers of changed rows in leaves other than the rest.
    """

    pages: NDArray[np.uint8]
    done: NDArray[np.bool_]
    rest: NDArray[np.bool_]
    rows: NDArray[np.int64]
    counts: Counts


def can_patch(layout: LeafLayout) -> bool:
    """Return whether leaves of a table can be patched."""
    return layout.codec.kind == "u64"


def patch_leaves(
    layout: LeafLayout, frames: NDArray[np.uint8], part: Part, out: NDArray[np.uint8], *, unique: bool, average: int
) -> Patched:
    """Patch the leaves that can be patched.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    frames
        Pages of the leaves, side by side.
    part
        Leaves and changes.
    out
        Buffer for as many pages.
    unique
        Whether a key may occur only once.
    average
        Average number of rows in a leaf.

    Raises
    ------
    UniqueViolationError
        If the table is unique and has the key of an insert already.
    """
    changes, leaves, skip = part.changes, part.leaves, part.joined
    if skip.any():
        shared = skip.copy()
        shared[1:] |= skip[:-1]
        skip = _beside(leaves, shared)
    columns = PhysicalRows(layout, changes.keys, changes.payload).columns
    given = kernels.LeafChanges(
        leaves,
        changes.touched.prefix,
        changes.upserted,
        part.touched_leaf,
        changes.keys.prefix,
        changes.fresh,
        part.leaf,
    )
    while True:
        status, after = np.empty(len(skip), dtype=np.int64), np.zeros(len(skip), dtype=np.int64)
        counts = np.zeros(3, dtype=np.int64)
        clash = kernels.patch_leaves(
            frames, layout.page_size, skip, given, columns, unique, average, out, status, after, counts
        )
        if clash >= 0:
            raise unique_violation(layout, changes.keys, clash)
        small = status == kernels.SMALL
        if not small.any():
            break
        skip = skip | _beside(leaves, small)
    done = status == kernels.DONE
    return Patched(out, done, status >= kernels.FALLBACK, after[done], Counts(*counts.tolist()))


def _beside(leaves: NDArray[np.int64], some: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return some of the leaves together with those of their neighbors that are among the leaves."""
    adjacent = np.diff(leaves) == 1
    near = some.copy()
    near[1:] |= some[:-1] & adjacent
    near[:-1] |= some[1:] & adjacent
    return near
