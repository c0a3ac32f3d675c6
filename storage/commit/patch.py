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

    from headrace.storage.commit.changes import Changes
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
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    leaves: NDArray[np.int64],
    joined: NDArray[np.bool_],
    changes: Changes,
    ends: tuple[NDArray[np.int64], NDArray[np.int64]],
    out: NDArray[np.uint8],
    *,
    unique: bool,
    average: int,
) -> Patched:
    """Patch the leaves that can be patched.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    frames
        Pages of the leaves, side by side.
    leaves, joined
        Ordinals of the leaves, and which of them share rows with the next one.
    changes
        Changes that affect these leaves.
    ends
        Ends of the changes of each leaf among `changes.touched` and among `changes.keys`.
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
    skip = joined
    if joined.any():
        shared = joined.copy()
        shared[1:] |= joined[:-1]
        skip = _beside(leaves, shared)
    patch = _Patch(layout, frames, changes, ends, out, unique=unique, average=average)
    patched, small = patch.run(skip)
    if small.any():
        patched, _ = patch.run(skip | _beside(leaves, small))
    return patched


class _Patch:
    """Arguments of the kernel, which is called once or twice."""

    def __init__(
        self,
        layout: LeafLayout,
        frames: NDArray[np.uint8],
        changes: Changes,
        ends: tuple[NDArray[np.int64], NDArray[np.int64]],
        out: NDArray[np.uint8],
        *,
        unique: bool,
        average: int,
    ) -> None:
        self._layout = layout
        self._frames = frames
        self._changes = changes
        self._ends = ends
        self._out = out
        self._unique = unique
        self._average = average
        self._columns = PhysicalRows(layout, changes.keys, changes.payload).columns

    def run(self, skip: NDArray[np.bool_]) -> tuple[Patched, NDArray[np.bool_]]:
        """Patch all leaves except those to skip; return also which became too small."""
        layout, changes, out = self._layout, self._changes, self._out
        status, after = np.empty(len(skip), dtype=np.int64), np.zeros(len(skip), dtype=np.int64)
        counts = np.zeros(3, dtype=np.int64)
        clash = kernels.patch_leaves(
            self._frames, layout.page_size, skip,
            kernels.LeafChanges(
                changes.touched.prefix, changes.upserted, self._ends[0],
                changes.keys.prefix, changes.fresh, self._ends[1],
            ),
            self._columns, self._unique, self._average, out, status, after, counts,
        )  # fmt: skip
        if clash >= 0:
            raise unique_violation(layout, changes.keys, clash)
        done = status == kernels.DONE
        patched = Patched(out, done, status >= kernels.FALLBACK, after[done], Counts(*counts.tolist()))
        return patched, status == kernels.SMALL


def _beside(leaves: NDArray[np.int64], some: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return some of the leaves together with those of their neighbors that are among the leaves."""
    adjacent = np.diff(leaves) == 1
    near = some.copy()
    near[1:] |= some[:-1] & adjacent
    near[:-1] |= some[1:] & adjacent
    return near
