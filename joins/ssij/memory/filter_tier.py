"""Filter tier: a table's negative filter in memory. Tuples whose key is surely not in their leaf wait for no page.

The segments of all leaves are in memory, folded to the size that the budget allows. A segment that the filter's file
could not prove answers nothing until the join phase reads its leaf and builds the segment again. Where few tuples are
recognized as absent, the tier becomes inactive and leaves its memory to the page cache. It becomes active again when
many tuples turn out to have waited without a match.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.storage.filter import BLOCK_NBYTES, FilterFile, hash_keys, leaf_segments
from headrace.storage.filter import _filter_kernels as kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.storage.filter import FilterShape
    from headrace.storage.format import Keys
    from headrace.storage.tree import Snapshot

__all__ = ["FilterTier"]

_SHARE = 0.75  # share of the free memory: more would save reads and cost as much in waiting tuples
_LEAST_BITS = 2.5  # per key: with less, four in ten absent keys are not recognized
_GROWTH = 64  # leaves per leaf that can be added without a new tier
_PLACE_NBYTES, _KNOWN_NBYTES = 4, 1
_SCRATCH_NBYTES = 40  # per row whose segment is built: frame, row, owner, key, hash
_EPOCH = 1 << 19
_LEAST_ABSENT = 1 / 16  # share of the tuples asked for: below it, pages are worth more
_LEAST_UNMATCHED = 1 / 8  # share of the tuples that waited


class FilterTier:
    """Filter segments of a table's leaves.

    Parameters
    ----------
    snapshot
        Snapshot of the relation.
    shape
        Shape of the segments.
    budget
        Budget that the tier charges.

    Attributes
    ----------
    active
        Whether the tier is in memory and can be asked.
    false_positives
        Tuples that waited although a segment was asked, and had no match.
    """

    def __init__(self, snapshot: Snapshot, shape: FilterShape, budget: MemoryBudget) -> None:
        self._snapshot = snapshot
        self._shape = shape
        self._budget = budget
        self._room = _room_for(snapshot)
        self._asked = self._absent = self._waited = self._unmatched = 0
        self.false_positives = 0
        self.deactivate()

    @classmethod
    def of(cls, snapshot: Snapshot, budget: MemoryBudget) -> Self | None:
        """Return the tier, active, if the table has a filter of which enough fits beside the rest.

        There is none if only without it the whole relation fits: then its pages answer everything.
        """
        made = FilterFile.open(snapshot.path)
        if made is None:
            return None
        with made:
            tier = cls._fitting(snapshot, made.shape, budget)
        pages = len(snapshot.leaf_pages) * snapshot.page_size
        if tier is None or budget.available - tier.nbytes < pages <= budget.available:
            return None
        tier.activate()
        return tier

    @classmethod
    def _fitting(cls, snapshot: Snapshot, shape: FilterShape, budget: MemoryBudget) -> Self | None:
        """Return the tier with as many blocks as fit into a share of the memory."""
        one = cls(snapshot, shape.folded(1), budget)
        kept = 1 + int(_SHARE * budget.available - one.nbytes) // (one._room * BLOCK_NBYTES)
        rows_per_leaf = snapshot.rows / max(1, len(snapshot.leaf_pages))
        few = shape.folded(kept).bits(rows_per_leaf) < min(_LEAST_BITS, shape.bits(rows_per_leaf))
        return None if kept < 1 or few else cls(snapshot, shape.folded(kept), budget)

    @property
    def nbytes(self) -> int:
        """Bytes that the tier takes while it is active."""
        leaves = len(self._snapshot.leaf_pages)
        return self._room * (8 * self._shape.words + _KNOWN_NBYTES) + leaves * _PLACE_NBYTES

    @property
    def bits(self) -> float:
        """Average bits per key in memory; 0 while the tier is inactive."""
        leaves = len(self._snapshot.leaf_pages)
        return self._shape.bits(self._snapshot.rows / leaves) if self.active and leaves else 0.0

    def activate(self) -> None:
        """Read all segments. There is room for `nbytes`."""
        self._budget.resize("filter", self.nbytes)
        self.active = True
        words, leaves = self._shape.words, len(self._snapshot.leaf_pages)
        memory = np.frombuffer(_huge_pages(self._room * 8 * words), dtype=np.uint64)
        self._segments = memory.reshape(self._room, words)
        self._known = np.zeros(self._room, dtype=np.bool_)
        self._place = np.arange(leaves, dtype=np.int32)
        self._place[self._room :] = -1
        self._load(np.arange(min(leaves, self._room)))

    def deactivate(self) -> None:
        """Drop all segments and release their memory."""
        self.active = False
        self._segments = np.zeros((0, self._shape.words), dtype=np.uint64)
        self._known = np.zeros(0, dtype=np.bool_)
        self._place = np.zeros(0, dtype=np.int32)
        self._waited = self._unmatched = self._asked = self._absent = 0
        self._budget.resize("filter", 0)

    def absent(self, leaf: NDArray[np.int32], keys: Keys, asked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of the keys asked for are surely not in their leaves. Threads may ask at once."""
        out = np.empty(len(keys), dtype=np.bool_)
        kernels.absent_keys(
            self._segments, self._known, self._shape.blocks, self._shape.narrow, self._shape.probes, self._place, asked,
            leaf, hash_keys(keys), out,
        )  # fmt: skip
        return out

    def note(self, asked: int, absent: int) -> None:
        """Count what was asked. For lack of absent keys the tier becomes inactive."""
        if not self.active:
            return
        self._asked += asked
        self._absent += absent
        if self._asked >= _EPOCH:
            if self._absent < _LEAST_ABSENT * self._asked:
                self.deactivate()
            self._asked = self._absent = 0

    def note_waited(self, leaf: NDArray[np.int32], count: NDArray[np.int32]) -> None:
        """Count the matches of tuples that waited for these leaves."""
        unmatched = count == 0
        if self.active:
            self.false_positives += int((unmatched & self._knows(leaf)).sum())
        else:
            self._waited += len(leaf)
            self._unmatched += int(unmatched.sum())

    def should_activate(self) -> bool:
        """Return whether many tuples waited without a match while the tier was inactive."""
        if self.active or self._waited < _EPOCH:
            return False
        worth = self._unmatched >= _LEAST_UNMATCHED * self._waited
        self._waited = self._unmatched = 0
        return worth

    def complete(
        self, leaves: NDArray[np.int32], frames: NDArray[np.uint8], frame: NDArray[np.int32], room: int
    ) -> None:
        """Build the missing segments of leaves that were read, within `room` bytes of scratch."""
        if not self.active:
            return
        missing = np.flatnonzero(~self._knows(leaves) & (self._place[leaves] >= 0))
        rows = int(self._snapshot.leaf_rows[leaves[missing]].max(initial=1))
        step = max(1, room // (rows * _SCRATCH_NBYTES))
        for start in range(0, len(missing), step):
            part = missing[start : start + step]
            place = self._place[leaves[part]]
            self._segments[place] = leaf_segments(self._snapshot.layout, frames, frame[part], self._shape)
            self._known[place] = True

    def growth(self, snapshot: Snapshot) -> int:
        """Return how many more bytes the tier takes with another snapshot."""
        more = len(snapshot.leaf_pages) - len(self._snapshot.leaf_pages)
        return max(0, more) * _PLACE_NBYTES if self.active else 0

    def install(self, snapshot: Snapshot, was: NDArray[np.intp], now: NDArray[np.intp]) -> None:
        """Switch to another snapshot, in which leaf `now[i]` is leaf `was[i]` of the old one.

        Segments of other leaves are read. There is room for what more leaves take, `growth`.
        """
        self._snapshot = snapshot
        if not self.active:
            self._room = _room_for(snapshot)
            return
        self._budget.resize("filter", self.nbytes)
        place = np.full(len(snapshot.leaf_pages), -1, dtype=np.int32)
        place[now] = self._place[was]
        free = np.ones(self._room, dtype=np.bool_)
        free[place[place >= 0]] = False
        places, new = np.flatnonzero(free), np.flatnonzero(place < 0)
        new = new[: len(places)]
        place[new] = places[: len(new)]
        self._place = place
        self._load(new)

    def _knows(self, leaf: NDArray[np.int32]) -> NDArray[np.bool_]:
        place = self._place[leaf]
        known: NDArray[np.bool_] = self._known[place] & (place >= 0)
        return known

    def _load(self, leaves: NDArray[np.intp]) -> None:
        """Read the segments of leaves that have a place. Those of a filter of another shape stay unknown."""
        place = self._place[leaves]
        self._known[place] = False
        made = FilterFile.open(self._snapshot.path)
        if made is None:
            return
        with made:
            if made.shape.folded(self._shape.kept) == self._shape:
                pages, checksums = self._snapshot.leaf_pages[leaves], self._snapshot.leaf_checksums[leaves]
                made.load(pages, checksums, self._shape, self._segments, place, self._known)


def _room_for(snapshot: Snapshot) -> int:
    """Return how many segments to have room for."""
    return len(snapshot.leaf_pages) + len(snapshot.leaf_pages) // _GROWTH + 1


def _huge_pages(nbytes: int) -> mmap.mmap:
    """Return zeroed memory, in huge pages where the system has them, because keys access it at random."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
