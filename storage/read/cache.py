"""Frames for leaf pages in one preallocated buffer, and the policies that choose which pages stay.

A frame is free, held (a page is being read into it or joined from it) or resident (found by `frame_of`). Pages are
named by their leaf ordinal, so that one array maps them; where memory is too small for an array of all leaves, a
`LeafMap` of the resident ones does. `reader` reads the pages; the join phase of SSIJ decides which of them stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read import _cache_kernels as kernels
from headrace.storage.read.frame_memory import SLACK_BYTES, FrameMemory
from headrace.storage.read.leaf_map import LeafMap, values_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.read.leaf_map import LeafNumbers

__all__ = ["LRU", "SPARSE_NBYTES", "AgeingCounter", "CachePolicy", "PageCache", "UtilityCounter", "page_buffer"]


class CachePolicy(Protocol):
    """Policy for the scores of frames; the frame with the lowest score is evicted first."""

    def touch(self, score: NDArray[np.int64], frame: NDArray[np.int32]) -> None:
        """Note that a stream tuple joined with each of these frames in turn; negative numbers are ignored."""
        ...

    def of_candidates(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the scores that pages will have after they joined with `counts` stream tuples each."""
        ...

    def phase_done(self, score: NDArray[np.int64]) -> None:
        """Update the scores at the end of a join phase."""
        ...


class UtilityCounter:
    """The paper's policy (section IV-C): a page is worth the stream tuples it joined with since the last join phase."""

    def touch(self, score: NDArray[np.int64], frame: NDArray[np.int32]) -> None:
        """Add the joined tuples to the utility of each frame."""
        kernels.count_uses(score, frame)

    def of_candidates(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the utility of pages still on disk: the lengths of their inverted-index lists."""
        return counts

    def phase_done(self, score: NDArray[np.int64]) -> None:
        """Clear all counters."""
        score[:] = 0


class AgeingCounter(UtilityCounter):
    """The paper's counter that forgets slowly: a join phase halves what a page is worth, and does not clear it."""

    def phase_done(self, score: NDArray[np.int64]) -> None:
        """Halve all counters."""
        score >>= 1


class LRU:
    """Least recently used, for comparison: a page is worth the time of its last use, later in a batch being later."""

    def __init__(self) -> None:
        self._now = 0

    def touch(self, score: NDArray[np.int64], frame: NDArray[np.int32]) -> None:
        """Stamp the frames with the times of their use."""
        kernels.stamp_uses(score, frame, self._now + 1)
        self._now += len(frame)

    def of_candidates(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ascending times of use, all after those given out before."""
        begin = self._now + 1
        self._now += len(counts)
        return np.arange(begin, begin + len(counts), dtype=np.int64)

    def phase_done(self, score: NDArray[np.int64]) -> None:
        """Do nothing: times of use stay valid across phases."""


SPARSE_NBYTES = 32
"""Bytes for each frame of a map of resident pages only, and of the scratch to make it."""


def page_buffer(frames: int, page_size: int) -> NDArray[np.uint8]:
    """Return a flat, page-aligned buffer of frames and `SLACK_BYTES`; memory is taken when a frame is first written."""
    return FrameMemory(frames * page_size).buffer


class PageCache:
    """Frames for the leaf pages of one snapshot.

    Parameters
    ----------
    frames_max
        Maximum number of frames. Frames that were never used cost no memory.
    page_size
        Page size in bytes.
    leaves
        Leaf pages of the snapshot; their ordinals index the map. None to map the resident ones only.
    policy
        Chooses the page to evict first; by default a `UtilityCounter`.

    Attributes
    ----------
    buffer
        uint8[frames_max * page_size + 8], page-aligned; frame `f` begins at ``f * page_size``.
    utility
        int64[frames_max], the score of each frame under the policy.

    Examples
    --------
    >>> import numpy as np
    >>> cache = PageCache(frames_max=4, page_size=4096, leaves=100)
    >>> frames = cache.allocate(2)
    >>> cache.admit(np.array([17, 40]), frames, np.array([3, 9]))
    >>> cache.frame_of(np.array([40, 41])).tolist()
    [1, -1]
    >>> cache.evict(1).tolist()
    [17]
    """

    def __init__(self, frames_max: int, page_size: int, leaves: int | None, policy: CachePolicy | None = None) -> None:
        self.page_size = page_size
        self.frames_max = frames_max
        self.policy: CachePolicy = UtilityCounter() if policy is None else policy
        self._memory = FrameMemory(frames_max * page_size)
        self.buffer: NDArray[np.uint8] = self._memory.buffer
        self.utility: NDArray[np.int64] = np.zeros(frames_max, dtype=np.int64)
        self._frame_of = None if leaves is None else np.full(leaves, -1, dtype=np.int32)
        self._resident: LeafMap | None = None
        self._leaf_of = np.full(frames_max, -1, dtype=np.int32)
        # Free frames as a stack: the first `_cold` have no memory yet, so warm ones are always used first.
        self._free = np.arange(frames_max - 1, -1, -1, dtype=np.int32)
        self._free_count = frames_max
        self._cold = frames_max
        self._capacity = frames_max
        self._memory.allow(frames_max * page_size, 0)

    @property
    def capacity(self) -> int:
        """Frames that may be in use now, at most `frames_max`."""
        return self._capacity

    @property
    def used(self) -> int:
        """Frames that are held or resident."""
        return self.frames_max - self._free_count

    @property
    def available(self) -> int:
        """Frames that can be allocated without evicting."""
        return self._capacity - self.used

    @property
    def resident(self) -> NDArray[np.int32]:
        """Leaf ordinals in the cache, in the order of their frames."""
        return self._leaf_of[self._leaf_of >= 0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the frames used so far, and of all maps; huge pages may add frames within capacity."""
        maps = (self.utility, self._leaf_of, self._free)
        every = SPARSE_NBYTES * self.frames_max if self._frame_of is None else self._frame_of.nbytes
        return self._written + SLACK_BYTES + every + sum(array.nbytes for array in maps)

    @property
    def resident_frames(self) -> NDArray[np.int64]:
        """Frames of the resident pages, ascending."""
        return np.flatnonzero(self._leaf_of >= 0)

    @property
    def frame_map(self) -> LeafNumbers:
        """The frame of each leaf ordinal, -1 where it is not resident. Read it only."""
        if self._frame_of is not None:
            return self._frame_of
        resident = self._resident
        if resident is None:  # several threads may find the same at once
            frames = np.flatnonzero(self._leaf_of >= 0).astype(np.int32)
            frames = frames[np.argsort(self._leaf_of[frames])]
            self._resident = resident = LeafMap(self._leaf_of[frames], frames, -1)
        return resident

    @property
    def frame_array(self) -> NDArray[np.int32]:
        """int32[leaves], the frame map of a cache that maps all leaves. Read it only."""
        assert self._frame_of is not None
        return self._frame_of

    @staticmethod
    def map_nbytes(frames_max: int, leaves: int) -> int:
        """Return the bytes of an empty cache."""
        return SLACK_BYTES + 16 * frames_max + 4 * leaves

    def frame_of(self, leaves: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return the frame of each leaf ordinal, -1 where it is not resident."""
        return values_at(self.frame_map, leaves)

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Hold free frames and return them in ascending order.

        Raises
        ------
        MemoryBudgetError
            If fewer than `count` are available; evict or release first.
        """
        if count > self.available:
            raise MemoryBudgetError(f"{count} page frames are wanted, {self.available} of {self._capacity} are free")
        self._free_count -= count
        self._cold = min(self._cold, self._free_count)
        frames = self._free[self._free_count : self._free_count + count].astype(np.int64)
        frames.sort()
        return frames

    def admit(self, leaves: NDArray[np.integer], frames: NDArray[np.integer], counts: NDArray[np.integer]) -> None:
        """Make pages in held frames resident; page `i` has joined with ``counts[i]`` stream tuples."""
        self._map(leaves, frames)
        self._leaf_of[frames] = leaves
        self.utility[frames] = self.policy.of_candidates(np.asarray(counts, dtype=np.int64))

    def touch(self, frame: NDArray[np.int32]) -> None:
        """Note that a stream tuple joined with each of these resident frames; negative numbers are ignored."""
        self.policy.touch(self.utility, frame)

    def release(self, frames: NDArray[np.integer]) -> None:
        """Free held or resident frames."""
        leaves = self._leaf_of[frames]
        self._map(leaves[leaves >= 0], -1)
        self._leaf_of[frames] = -1
        self.utility[frames] = 0
        self._free[self._free_count : self._free_count + len(frames)] = frames[::-1]
        self._free_count += len(frames)
        self._trim()

    def remove(self, leaves: NDArray[np.integer]) -> None:
        """Drop the leaves that are resident."""
        frames = self.frame_of(leaves)
        self.release(frames[frames >= 0])

    def evict(self, count: int) -> NDArray[np.int32]:
        """Drop the resident pages with the lowest scores and return their leaf ordinals; fewer if there are fewer."""
        frames = np.flatnonzero(self._leaf_of >= 0)
        if count < len(frames):
            lowest = np.argpartition(self.utility[frames], max(count - 1, 0))[: max(count, 0)]
            frames = np.sort(frames[lowest])
        leaves = self._leaf_of[frames]
        self.release(frames)
        return leaves

    def resize(self, capacity: int) -> NDArray[np.int32]:
        """Set the capacity, evict what no longer fits, give its memory back, and return the evicted leaf ordinals.

        Raises
        ------
        MemoryBudgetError
            If more than `capacity` frames are held by the caller, or `capacity` exceeds `frames_max`.
        """
        held = self.used - int((self._leaf_of >= 0).sum())
        if not held <= capacity <= self.frames_max:
            raise MemoryBudgetError(
                f"the page cache cannot have {capacity} frames: {held} are held now, {self.frames_max} is the most"
            )
        self._capacity = capacity
        evicted = self.evict(self.used - capacity) if self.used > capacity else np.empty(0, dtype=np.int32)
        self._trim()
        self._memory.allow(capacity * self.page_size, self._written)
        return evicted

    def phase_done(self) -> None:
        """Tell the policy that a join phase is over."""
        self.policy.phase_done(self.utility)

    def remap(self, leaves: int, old: NDArray[np.integer], new: NDArray[np.integer]) -> None:
        """Move to another snapshot: the leaf that was ordinal ``old[i]`` is now ``new[i]``; all others are dropped."""
        frames = self.frame_of(old)
        kept, ordinals = frames[frames >= 0], np.asarray(new)[frames >= 0]
        lost = np.setdiff1d(np.flatnonzero(self._leaf_of >= 0), kept)
        self.release(lost)
        if self._frame_of is not None:
            self._frame_of = np.full(leaves, -1, dtype=np.int32)
        self._map(ordinals, kept)
        self._leaf_of[kept] = ordinals

    def _map(self, leaves: NDArray[np.integer], frames: NDArray[np.integer] | int) -> None:
        """Map leaves to frames; a `LeafMap` is made again when it is asked for."""
        self._resident = None
        if self._frame_of is not None:
            self._frame_of[leaves] = frames

    @property
    def _written(self) -> int:
        """Bytes of the frames that have memory: the first ones, until some was given back."""
        return (self.frames_max - self._cold) * self.page_size

    def _trim(self) -> None:
        excess = min(self._free_count - self._cold, self.frames_max - self._cold - self._capacity)
        if excess > 0:
            self._memory.break_up(self._written)
            frames = np.sort(self._free[self._cold : self._cold + excess])
            self._cold += excess
            for run in np.split(frames, np.flatnonzero(np.diff(frames) != 1) + 1):
                self._memory.give_back(int(run[0]) * self.page_size, (int(run[-1]) + 1) * self.page_size)
