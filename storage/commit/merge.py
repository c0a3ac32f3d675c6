"""Patching of leaves in their encoded form, or merging of changes into their rows and packing of these. Does no I/O.

Only tables with keys of one word are patched. The rest is merged: leaves that a key spans, leaves that become too full
or too small, and new texts that do not fit the base and width of their column in the page.

All decisions are made over arrays: which rows stay, the merged order, which leaves share rows, where pages end. A group
is a run of neighboring leaves that are rewritten together: those that one changed key spans, or a leaf that became too
small and its neighbor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from headrace.storage.commit import _commit_kernels as kernels
from headrace.storage.commit import _patch_kernels as patch_kernels
from headrace.storage.commit.changes import find_keys
from headrace.storage.errors import UniqueViolationError
from headrace.storage.format.keys import Keys
from headrace.storage.leaf.encode import LeafEncoder, PhysicalRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.commit.changes import Changes, Part
    from headrace.storage.format.layout import LeafLayout

__all__ = ["Counts", "LeafRows", "Packed", "Patched", "apply_changes", "can_patch", "pack_groups", "patch_leaves"]


class Counts(NamedTuple):
    """Rows that changes inserted, updated and deleted."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sum of two counts."""
        return Counts(self.inserted + other.inserted, self.updated + other.updated, self.deleted + other.deleted)


@dataclass(frozen=True, slots=True)
class LeafRows:
    """Rows in key order, and the ordinal of the leaf that each belongs to."""

    keys: Keys
    payload: list[pa.Array]
    leaf: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.leaf)

    def take(self, rows: NDArray[np.int64]) -> LeafRows:
        """Return the rows at these positions."""
        index = pa.array(rows)
        return LeafRows(self.keys.take(rows), [array.take(index) for array in self.payload], self.leaf[rows])

    def then(self, other: LeafRows) -> LeafRows:
        """Return these rows followed by others."""
        return LeafRows(
            Keys.concat([self.keys, other.keys]),
            [pa.concat_arrays([mine, yours]) for mine, yours in zip(self.payload, other.payload, strict=True)],
            np.concatenate([self.leaf, other.leaf]),
        )

    def in_leaf_order(self) -> LeafRows:
        """Return the rows in the order of their leaves; rows of one leaf keep their order."""
        return self.take(np.argsort(self.leaf, kind="stable"))


def apply_changes(
    layout: LeafLayout, rows: LeafRows, changes: Changes, leaf: NDArray[np.int64], *, unique: bool
) -> tuple[LeafRows, NDArray[np.int64], Counts]:
    """Merge changes into rows.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    rows
        All rows of the leaves that the changes affect.
    changes
        Changes that affect these leaves.
    leaf : int64[n]
        Leaf ordinal of each row to store.
    unique
        Whether a key may occur only once.

    Returns
    -------
    merged
        Rows after the changes.
    dirty : int64 array
        Ordinals of leaves whose rows changed; some may occur more than once.
    counts
        Numbers of changed rows.

    Raises
    ------
    UniqueViolationError
        If the table is unique and has the key of an insert already.
    """
    gone = find_keys(rows.keys, changes.touched)
    keep = gone < 0
    if unique:
        _refuse_present(layout, rows, keep, changes)
    order = kernels.merge_order(rows.keys.parts, keep, changes.keys.parts, rows.keys.wide)
    merged = rows.then(LeafRows(changes.keys, changes.payload, leaf)).take(order)
    dirty = np.concatenate([rows.leaf[~keep], leaf])
    return merged, dirty, _count(gone[~keep], changes)


def _refuse_present(layout: LeafLayout, rows: LeafRows, keep: NDArray[np.bool_], changes: Changes) -> None:
    fresh = np.flatnonzero(changes.fresh)
    if len(fresh):
        present = find_keys(changes.keys.take(fresh), rows.keys.take(np.flatnonzero(keep))) >= 0
        if present.any():
            raise _unique_violation(layout, changes.keys, int(fresh[int(np.argmax(present))]))


def _unique_violation(layout: LeafLayout, keys: Keys, at: int) -> UniqueViolationError:
    """Return the error for a key to insert that a unique table has already."""
    key = layout.codec.describe(keys, at)
    return UniqueViolationError(f"key {key} is in the table already, and the table is unique; nothing was changed")


def _count(gone: NDArray[np.int64], changes: Changes) -> Counts:
    existed = np.zeros(len(changes.touched), dtype=np.bool_)
    existed[gone] = True
    replacing = find_keys(changes.keys.take(np.flatnonzero(~changes.fresh)), changes.touched)
    updated = int(existed[replacing].sum())
    return Counts(len(changes.keys) - updated, updated, int((~changes.upserted[gone]).sum()))


@dataclass(frozen=True, slots=True)
class Packed:
    """Leaves that replace groups of leaves; not sealed yet, because their page numbers are not known.

    Attributes
    ----------
    pages : uint8[p * page_size + 8]
    rows : int64[p]
    group : int64[p]
        Which group each page belongs to.
    heads, tails
        First and last key of each page.
    """

    pages: NDArray[np.uint8]
    rows: NDArray[np.int64]
    group: NDArray[np.int64]
    heads: Keys
    tails: Keys

    @property
    def first_of_group(self) -> NDArray[np.bool_]:
        """Which pages are the first of their group."""
        return np.diff(self.group, prepend=-1) != 0

    def with_groups(self, numbers: NDArray[np.int64]) -> Packed:
        """Return the same pages with other group numbers."""
        return replace(self, group=numbers[self.group])


def pack_groups(layout: LeafLayout, rows: LeafRows, ends: NDArray[np.int64], fill: float, *, last: bool) -> Packed:
    """Cut rows into leaves so that no leaf holds rows of two groups.

    A group that fits in one page gets one. A group that does not is spread evenly over as many pages as have room for
    later changes by the fill factor. The last group of the table is filled from the left instead, so that ascending
    inserts leave full pages.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    rows
        In key order.
    ends : int64[g]
        Row at which each group ends.
    fill
        Share of a page to fill if a group needs several pages.
    last
        Whether the last group holds the last leaf of the table.

    Raises
    ------
    InputError
        If a key or a row does not fit in a page.
    """
    encoder = LeafEncoder(layout, rows.keys, rows.payload)
    tight = encoder.plan(layout.page_size, ends)
    pages = np.diff(np.searchsorted(tight, ends, side="right"), prepend=0)
    breaks = [ends]
    many = np.flatnonzero(pages > 1)
    if last and len(many) and many[-1] == len(ends) - 1:
        loose = encoder.plan(int(layout.page_size * fill), ends)
        breaks.append(loose[loose > (ends[-2] if len(ends) > 1 else 0)])
        many = many[:-1]
    if len(many):
        breaks.append(_even_breaks(tight, ends, many, pages[many], fill))
    final = encoder.plan(layout.page_size, np.unique(np.concatenate(breaks)))
    encoded = encoder.write(final)
    return Packed(
        encoded.pages,
        encoded.counts,
        np.searchsorted(ends, final, side="left"),
        rows.keys.take(encoded.first[:-1]),
        rows.keys.take(encoded.first[1:] - 1),
    )


def _even_breaks(
    tight: NDArray[np.int64],
    ends: NDArray[np.int64],
    groups: NDArray[np.int64],
    pages: NDArray[np.int64],
    fill: float,
) -> NDArray[np.int64]:
    """Return the rows that cut groups of several tightly packed pages into even parts."""
    starts = np.concatenate([[0], ends[:-1]])[groups]
    rows = ends[groups] - starts
    full = tight[np.searchsorted(tight, ends[groups], side="left") - 1] - starts  # rows before the last tight page
    filled = pages - 1 + (rows - full) * (pages - 1) / full
    parts = np.maximum(np.ceil(filled / fill).astype(np.int64), 2)
    parts = np.minimum(parts, rows)
    group = np.repeat(np.arange(len(groups)), parts)
    part = np.arange(len(group)) - np.repeat(np.cumsum(parts) - parts, parts)
    breaks: NDArray[np.int64] = starts[group] + rows[group] * part // parts[group]
    return breaks[part > 0]


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
        Leaves that are left to `apply_changes`, including neighbors of leaves that got too small.
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
    given = patch_kernels.LeafChanges(
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
        clash = patch_kernels.patch_leaves(
            frames, layout.page_size, skip, given, columns, unique, average, out, status, after, counts
        )
        if clash >= 0:
            raise _unique_violation(layout, changes.keys, clash)
        small = status == patch_kernels.SMALL
        if not small.any():
            break
        skip = skip | _beside(leaves, small)
    done = status == patch_kernels.DONE
    return Patched(out, done, status >= patch_kernels.FALLBACK, after[done], Counts(*counts.tolist()))


def _beside(leaves: NDArray[np.int64], some: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return some of the leaves together with those of their neighbors that are among the leaves."""
    adjacent = np.diff(leaves) == 1
    near = some.copy()
    near[1:] |= some[:-1] & adjacent
    near[:-1] |= some[1:] & adjacent
    return near
