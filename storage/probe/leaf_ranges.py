"""`LeafRanges`: locates leaves for keys of one word, in a few steps that do not depend on earlier keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.probe import _probe_kernels as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.format.keys import KeyWords
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["LeafRanges"]

_PER_LEAF = 2


class LeafRanges:
    """The range of the separators, divided into intervals of equal width, and the first leaf of each interval.

    There are at most two intervals for each leaf. If keys are evenly distributed, a leaf is found almost at once, else
    by binary search among the leaves of an interval.

    Parameters
    ----------
    snapshot
        Snapshot of a table with keys of one word.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._separators = snapshot.separators.prefix
        later = self._separators[1:]
        self._low = later[0] if len(later) else np.uint64(0)
        span = int(later[-1] - self._low) if len(later) else 0
        most = _PER_LEAF * len(later)
        self._shift = np.uint64(max(0, span.bit_length() - most.bit_length() + 1))
        edges = self._low + (np.arange((span >> int(self._shift)) + 1, dtype=np.uint64) << self._shift)
        self._first = np.searchsorted(later, edges, side="right").astype(np.int32)
        if len(self._first):
            self._first[0] = 0

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return self._first.nbytes

    @staticmethod
    def nbytes(leaves: int) -> int:
        """Return the maximum bytes for a number of leaves."""
        return 4 * (_PER_LEAF * leaves + 1)

    @property
    def separators(self) -> NDArray[np.uint64]:
        """Separator before each leaf."""
        return self._separators

    def locate(self, keys: KeyWords, frame_of: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Find the leaf of each key, and its frame.

        Parameters
        ----------
        keys
            Keys to find.
        frame_of : int32[leaves]
            Frame of each leaf, -1 for none.

        Returns
        -------
        leaf, frame : int32[n]
            Frame -1 for leaves that are in none, -2 for keys that cannot be in the table.
        waiting
            Number of frames that are -1.
        """
        leaf, frame = np.empty((2, len(keys)), dtype=np.int32)
        if len(self._separators) == 0:
            leaf[:], frame[:] = -1, -2
            return leaf, frame, 0
        waiting = kernels.locate_frames(
            keys.words,
            keys.above,
            keys.flags,
            self._low,
            self._shift,
            self._first,
            self._separators,
            frame_of,
            leaf,
            frame,
        )
        return leaf, frame, int(waiting)
