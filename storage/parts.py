"""Parts of a commit: neighbouring leaves that are changed together in memory, with the changes that fall into them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.changes import Changes

__all__ = ["Part", "positions"]

_SPARSE = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Leaves that are changed together in memory.

    Attributes
    ----------
    leaves : int64[m]
        Ordinals, ascending.
    joined : bool[m]
        Whether a leaf shares its rows with the next one.
    low, high
        Leaves from `low` on and before `high` may be drawn in as neighbours.
    dense
        Whether most leaves of a stretch of the table are changed together, so that they may move together.
    changes
        What changes in them.
    leaf, touched_leaf
        The leaf of each row to store, and the first one of each key whose rows go.
    """

    leaves: NDArray[np.int64]
    joined: NDArray[np.bool_]
    low: int
    high: int
    dense: bool
    changes: Changes
    leaf: NDArray[np.int64]
    touched_leaf: NDArray[np.int64]

    @classmethod
    def cut(
        cls,
        leaves: NDArray[np.int64],
        joined: NDArray[np.bool_],
        bounds: tuple[int, int],
        changes: Changes,
        leaf: NDArray[np.int64],
        first: NDArray[np.int64],
    ) -> Part:
        """Return the part of all changes that falls into some leaves; `bounds` are `low` and `high`."""
        around = [int(leaves[0]), int(leaves[-1]) + 1]
        dense = around[1] - around[0] <= _SPARSE * len(leaves)
        rows, touched = slice(*np.searchsorted(leaf, around)), slice(*np.searchsorted(first, around))
        return cls(leaves, joined, *bounds, dense, changes.slice(rows, touched), leaf[rows], first[touched])

    def only(self, some: NDArray[np.bool_]) -> Part:
        """Return some of the leaves with what changes in them."""
        rows = np.flatnonzero(some[positions(self.leaves, self.leaf)])
        touched = np.flatnonzero(some[positions(self.leaves, self.touched_leaf)])
        return replace(
            self,
            leaves=self.leaves[some],
            joined=self.joined[some],
            changes=self.changes.take(rows, touched),
            leaf=self.leaf[rows],
            touched_leaf=self.touched_leaf[touched],
        )


def positions(leaves: NDArray[np.int64], leaf: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each `leaf` is among `leaves`, which ascend."""
    return np.searchsorted(leaves, leaf)
