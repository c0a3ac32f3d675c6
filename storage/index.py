"""The index of one commit in memory: an entry for each leaf and the inner nodes above, or patches upon older ones.

A commit that changes few leaves says what became of these and of the nodes above them. Only who asks for the whole
index pays for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from storage.tree import Entries, InnerLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Index", "IndexPatch", "PatchedIndex"]


@dataclass(frozen=True, slots=True)
class Index:
    """A whole index.

    Attributes
    ----------
    entries
        One for each leaf, in key order.
    levels
        The inner nodes that the entries were read from, root first.
    """

    entries: Entries
    levels: tuple[InnerLevel, ...]


@dataclass(frozen=True, slots=True)
class IndexPatch:
    """What a commit changed of an index, whose shape and separators stay.

    Attributes
    ----------
    at : int64[n]
        Leaves by their ordinals; nodes are counted on from these, from the lowest level to the root.
    pages : int64[n]
    checksums : uint64[n]
    rows : int64[n]
    """

    at: NDArray[np.int64]
    pages: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    rows: NDArray[np.int64]

    @classmethod
    def concat(cls, patches: Sequence[IndexPatch]) -> IndexPatch:
        """Return patches, at least one, as one; what comes later stands behind."""
        return cls(
            np.concatenate([patch.at for patch in patches]),
            np.concatenate([patch.pages for patch in patches]),
            np.concatenate([patch.checksums for patch in patches]),
            np.concatenate([patch.rows for patch in patches]),
        )


class PatchedIndex:
    """An index as some first patches upon another one leave it. Made whole when it is asked for, and kept then.

    Parameters
    ----------
    base
        The index as it was.
    patches
        A list that only grows.
    count
        How many of them count.
    """

    __slots__ = ("_base", "_count", "_patches", "_whole")

    def __init__(self, base: Index, patches: Sequence[IndexPatch], count: int) -> None:
        self._base = base
        self._patches = patches
        self._count = count
        self._whole: Index | None = None

    @property
    def entries(self) -> Entries:
        """As of `Index`."""
        return self.whole.entries

    @property
    def levels(self) -> tuple[InnerLevel, ...]:
        """As of `Index`."""
        return self.whole.levels

    @property
    def whole(self) -> Index:
        """The index without patches."""
        if self._whole is None:
            self._whole = _patched(self._base, IndexPatch.concat(self._patches[: self._count]))
        return self._whole


def _patched(base: Index, patch: IndexPatch) -> Index:
    entries, start = _patched_level(base.entries, patch, 0), len(base.entries)
    levels = []
    for level in reversed(base.levels):
        levels.append(InnerLevel(_patched_level(level.nodes, patch, start), level.first))
        start += len(level.nodes)
    return Index(entries, tuple(reversed(levels)))


def _patched_level(entries: Entries, patch: IndexPatch, start: int) -> Entries:
    """Return one level, whose positions count from `start`, with what the patch changes there."""
    here = np.flatnonzero((patch.at >= start) & (patch.at < start + len(entries)))
    pages, checksums, rows = entries.pages.copy(), entries.checksums.copy(), entries.rows.copy()
    at = patch.at[here] - start
    pages[at], checksums[at], rows[at] = patch.pages[here], patch.checksums[here], patch.rows[here]
    return Entries(pages, checksums, rows, entries.continued, entries.separators)
