"""SSIJ's use of a table's negative filter: tuples whose key is surely not in their leaf wait for no page.

The segments of all leaves are in memory, folded to what the budget allows. A segment that the filter's file could not
prove says nothing until the join phase reads its leaf and makes it anew. Where few tuples are recognised as absent the
tier sleeps and gives its memory to the page cache; it wakes up when many tuples turn out to have waited in vain.
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

_SHARE = 0.75  # of the free memory: what more of it saves in reads, fewer waiting tuples cost
_LEAST_BITS = 2.5  # a key: with less, four in ten absent keys are not recognised
_GROWTH = 64  # leaves for each that is added without a new tier
_PLACE_NBYTES, _KNOWN_NBYTES = 4, 1
_SCRATCH_NBYTES = 40  # of a row whose segment is made: frame, row, owner, key, hash
_EPOCH = 1 << 19
_LEAST_ABSENT = 1 / 16  # of the tuples asked for: below that pages are worth more
_LEAST_VAIN = 1 / 8  # of the tuples that waited


class FilterTier:
    """The segments of a table's leaves.

    Parameters
    ----------
    snapshot
        The relation.
    shape
        Of the segments.
    budget
        From which the tier takes what it holds.

    Attributes
    ----------
    awake
        Whether it is in memory and can be asked.
    false_positives
        Tuples that waited although a segment was asked, and had no match.
    """

    def __init__(self, snapshot: Snapshot, shape: FilterShape, budget: MemoryBudget) -> None:
        self._snapshot = snapshot
        self._shape = shape
        self._budget = budget
        self._room = _room_for(snapshot)
        self._asked = self._absent = self._waited = self._vain = 0
        self.false_positives = 0
        self.fall_asleep()

    @classmethod
    def of(cls, snapshot: Snapshot, budget: MemoryBudget) -> Self | None:
        """Return the tier, awake, if the table has a filter and enough of it fits beside what the rest needs.

        There is none where only without it the whole relation fits: its pages know all.
        """
        made = FilterFile.open(snapshot.path)
        if made is None:
            return None
        with made:
            tier = cls._fitting(snapshot, made.shape, budget)
        pages = len(snapshot.leaf_pages) * snapshot.page_size
        if tier is None or budget.available - tier.nbytes < pages <= budget.available:
            return None
        tier.wake()
        return tier

    @classmethod
    def _fitting(cls, snapshot: Snapshot, shape: FilterShape, budget: MemoryBudget) -> Self | None:
        """Return the tier with as many blocks as go into a share of the memory."""
        one = cls(snapshot, shape.folded(1), budget)
        kept = 1 + int(_SHARE * budget.available - one.nbytes) // (one._room * BLOCK_NBYTES)
        rows_per_leaf = snapshot.rows / max(1, len(snapshot.leaf_pages))
        few = shape.folded(kept).bits(rows_per_leaf) < min(_LEAST_BITS, shape.bits(rows_per_leaf))
        return None if kept < 1 or few else cls(snapshot, shape.folded(kept), budget)

    @property
    def nbytes(self) -> int:
        """Bytes that the tier takes when it is awake."""
        leaves = len(self._snapshot.leaf_pages)
        return self._room * (8 * self._shape.words + _KNOWN_NBYTES) + leaves * _PLACE_NBYTES

    @property
    def bits(self) -> float:
        """Bits that a key has in memory on average; 0 while it sleeps."""
        leaves = len(self._snapshot.leaf_pages)
        return self._shape.bits(self._snapshot.rows / leaves) if self.awake and leaves else 0.0

    def wake(self) -> None:
        """Read all segments; there is room for `nbytes`."""
        self._budget.resize("filter", self.nbytes)
        self.awake = True
        words, leaves = self._shape.words, len(self._snapshot.leaf_pages)
        memory = np.frombuffer(_huge_pages(self._room * 8 * words), dtype=np.uint64)
        self._segments = memory.reshape(self._room, words)
        self._known = np.zeros(self._room, dtype=np.bool_)
        self._place = np.arange(leaves, dtype=np.int32)
        self._place[self._room :] = -1
        self._load(np.arange(min(leaves, self._room)))

    def fall_asleep(self) -> None:
        """Forget all segments and give their memory back."""
        self.awake = False
        self._segments = np.zeros((0, self._shape.words), dtype=np.uint64)
        self._known = np.zeros(0, dtype=np.bool_)
        self._place = np.zeros(0, dtype=np.int32)
        self._waited = self._vain = self._asked = self._absent = 0
        self._budget.resize("filter", 0)

    def absent(self, leaf: NDArray[np.int32], keys: Keys, asked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of the keys that are asked for are surely not in their leaves. Threads may ask at once."""
        out = np.empty(len(keys), dtype=np.bool_)
        kernels.absent_keys(
            self._segments, self._known, self._shape.blocks, self._shape.narrow, self._shape.probes, self._place, asked,
            leaf, hash_keys(keys), out,
        )  # fmt: skip
        return out

    def note(self, asked: int, absent: int) -> None:
        """Count what was asked. For lack of absent keys the tier falls asleep."""
        if not self.awake:
            return
        self._asked += asked
        self._absent += absent
        if self._asked >= _EPOCH:
            if self._absent < _LEAST_ABSENT * self._asked:
                self.fall_asleep()
            self._asked = self._absent = 0

    def note_waited(self, leaf: NDArray[np.int32], count: NDArray[np.int32]) -> None:
        """Count the matches of tuples that waited for these leaves."""
        vain = count == 0
        if self.awake:
            self.false_positives += int((vain & self._knows(leaf)).sum())
        else:
            self._waited += len(leaf)
            self._vain += int(vain.sum())

    def wants_to_wake(self) -> bool:
        """Return whether many tuples waited in vain while the tier slept."""
        if self.awake or self._waited < _EPOCH:
            return False
        worth = self._vain >= _LEAST_VAIN * self._waited
        self._waited = self._vain = 0
        return worth

    def complete(
        self, leaves: NDArray[np.int32], frames: NDArray[np.uint8], frame: NDArray[np.int32], room: int
    ) -> None:
        """Make the segments that are not known, of leaves that have been read, within `room` bytes of scratch."""
        if not self.awake:
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
        """Return how many bytes more the tier takes with another snapshot."""
        more = len(snapshot.leaf_pages) - len(self._snapshot.leaf_pages)
        return max(0, more) * _PLACE_NBYTES if self.awake else 0

    def install(self, snapshot: Snapshot, was: NDArray[np.intp], now: NDArray[np.intp]) -> None:
        """Go on with another snapshot, whose leaves `now` are those that `was` were; the others are read.

        There is room for what more leaves take, `growth`.
        """
        self._snapshot = snapshot
        if not self.awake:
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
        """Read the segments of leaves that have a place; those of a filter of another shape are left unknown."""
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
    """Return for how many segments to have room."""
    return len(snapshot.leaf_pages) + len(snapshot.leaf_pages) // _GROWTH + 1


def _huge_pages(nbytes: int) -> mmap.mmap:
    """Return zeroed memory, in large pages where the system has them: keys go all over it."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
