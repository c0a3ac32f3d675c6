import collections
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read.cache import LRU, PageCache, UtilityCounter, page_buffer

PAGE = 4096


def resident_bytes(cache):
    """Bytes of the cache's own mapping that the kernel has backed, from /proc."""
    address = cache.buffer.ctypes.data
    with Path("/proc/self/smaps").open(encoding="ascii") as smaps:
        lines = iter(smaps)
        for line in lines:
            start, _, end = line.split()[0].partition("-")
            if end and int(start, 16) <= address < int(end, 16):
                return next(int(field.split()[1]) * 1024 for field in lines if field.startswith("Rss:"))
    raise AssertionError(address)


def filled(frames=8, leaves=100, policy=None):
    cache = PageCache(frames, PAGE, leaves, policy)
    held = cache.allocate(frames)
    cache.admit(np.arange(frames) * 10, held, np.arange(frames) + 1)
    return cache


def test_a_page_is_found_until_it_leaves():
    cache = filled()
    assert cache.frame_of(np.array([0, 10, 11, 70])).tolist() == [0, 1, -1, 7]
    assert cache.resident.tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    cache.remove(np.array([10, 11]))
    assert cache.frame_of(np.array([10])).tolist() == [-1]
    assert cache.available == 1


def test_utility_evicts_the_least_joined_pages():
    cache = filled()
    cache.touch(np.array([0, 1, -1] * 100, dtype=np.int32))
    assert cache.evict(3).tolist() == [20, 30, 40]
    cache.phase_done()
    assert not cache.utility.any()


def test_lru_evicts_the_least_recently_used_pages():
    cache = filled(policy=LRU())
    cache.touch(np.array([0, 2], dtype=np.int32))
    cache.phase_done()
    assert cache.evict(2).tolist() == [10, 30]


@given(hnp.arrays(np.int32, st.integers(0, 60), elements=st.integers(-2, 7)))
def test_each_use_counts(frame):
    cache = filled()
    before = cache.utility.copy()
    cache.touch(frame)
    counts = collections.Counter(frame[frame >= 0].tolist())
    assert {place: int(added) for place, added in enumerate(cache.utility - before) if added} == counts


@given(hnp.arrays(np.int32, st.integers(0, 60), elements=st.integers(-2, 7)))
def test_the_last_use_of_each_page_orders_them(frame):
    cache = filled(policy=LRU())
    cache.touch(frame)
    last = {place: at for at, place in enumerate(frame.tolist()) if place >= 0}
    used = [10 * place for place in sorted(last, key=last.__getitem__)]
    oldest_first = cache.resident[np.argsort(cache.utility, kind="stable")].tolist()
    assert oldest_first[len(oldest_first) - len(used) :] == used


def test_more_than_there_are_can_be_evicted():
    assert len(filled().evict(100)) == 8
    assert len(filled().evict(0)) == 0


def test_frames_never_used_cost_nothing_and_shrinking_gives_memory_back():
    cache = PageCache(1000, PAGE, 5000)
    maps = cache.map_nbytes(1000, 5000)
    assert cache.nbytes == maps
    assert resident_bytes(cache) == 0
    cache.resize(600)
    frames = cache.allocate(600)
    cache.buffer[frames[:, None] * PAGE + np.arange(PAGE)] = 1
    assert resident_bytes(cache) == 600 * PAGE == cache.nbytes - maps
    cache.admit(np.arange(600), frames, np.arange(600))
    assert cache.resize(250).tolist() == list(range(350))
    assert resident_bytes(cache) == 250 * PAGE == cache.nbytes - maps
    cache.release(cache.frame_of(np.arange(400, 600)))
    assert cache.nbytes - maps == 250 * PAGE
    cache.resize(100)
    assert resident_bytes(cache) == 100 * PAGE == cache.nbytes - maps


def test_too_many_frames_are_refused():
    cache = filled()
    with pytest.raises(MemoryBudgetError, match="1 page frames are wanted, 0 of 8"):
        cache.allocate(1)
    with pytest.raises(MemoryBudgetError, match="8 is the most"):
        cache.resize(9)
    cache.evict(4)
    cache.allocate(4)
    with pytest.raises(MemoryBudgetError, match="4 are held now"):
        cache.resize(3)


def test_another_snapshot_keeps_the_pages_that_it_shares():
    cache = filled()
    cache.remap(50, np.array([0, 20, 99]), np.array([0, 3, 4]))
    assert cache.frame_of(np.array([0, 3, 4, 20])).tolist() == [0, 2, -1, -1]
    assert cache.available == 6


def test_buffers_are_page_aligned_with_slack():
    buffer = page_buffer(3, PAGE)
    assert buffer.ctypes.data % 4096 == 0
    assert len(buffer) == 3 * PAGE + 8


class CacheMachine(RuleBasedStateMachine):
    """The cache against a dict of leaf -> (frame, score)."""

    @initialize(lru=st.booleans())
    def start(self, lru):
        self.cache = PageCache(10, PAGE, 40, LRU() if lru else UtilityCounter())
        self.model = {}

    @rule(leaves=st.lists(st.integers(0, 39), unique=True, max_size=6), count=st.integers(0, 9))
    def admit(self, leaves, count):
        leaves = np.array([leaf for leaf in leaves if leaf not in self.model][: self.cache.available], np.int64)
        frames = self.cache.allocate(len(leaves))
        assert not set(frames.tolist()) & set(self.model.values())
        self.cache.admit(leaves, frames, np.full(len(leaves), count))
        self.model.update(zip(leaves.tolist(), frames.tolist(), strict=True))

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        score = {leaf: int(self.cache.utility[frame]) for leaf, frame in self.model.items()}
        gone = self.cache.evict(count).tolist()
        assert len(gone) == min(count, len(self.model))
        for leaf in gone:
            del self.model[leaf]
        assert max((score[leaf] for leaf in gone), default=-1) <= min((score[leaf] for leaf in self.model), default=99)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        leaf = data.draw(st.sampled_from(sorted(self.model)))
        self.cache.remove(np.array([leaf]))
        del self.model[leaf]

    @rule(capacity=st.integers(0, 10))
    def resize(self, capacity):
        for leaf in self.cache.resize(capacity).tolist():
            del self.model[leaf]
        assert self.cache.used <= capacity

    @invariant()
    def agrees(self):
        if not hasattr(self, "model"):
            return
        expected = [self.model.get(leaf, -1) for leaf in range(40)]
        assert self.cache.frame_of(np.arange(40)).tolist() == expected
        assert self.cache.used == len(self.model)
        assert self.cache.nbytes <= self.cache.map_nbytes(10, 40) + self.cache.capacity * PAGE


TestCacheMachine = CacheMachine.TestCase
