"""Compiled steps against naive twins."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.joins import _result_kernels
from headrace.joins.inlj import _pool_kernels
from headrace.joins.meshjoin import _window_kernels
from headrace.joins.ssij.memory import _index_kernels
from headrace.joins.ssij.memory.stream_buffer import ascending
from headrace.joins.ssij.phases import _join_kernels
from headrace.joins.ssij.phases.base import sorted_positions
from headrace.storage.read import LeafMap, plan_cost, plan_reads, value_at, values_at

SEEDS = st.integers(0, 2**32 - 1)


def random_runs(rng, leaves, count, longest):
    first = np.sort(rng.integers(0, leaves, count)).astype(np.int32)
    last = np.maximum.accumulate(np.minimum(first + rng.integers(0, longest, count), leaves - 1)).astype(np.int32)
    return first, last


@given(
    keys=hnp.arrays(np.uint64, st.integers(0, 200)),
    bounds=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=9).map(sorted),
    seed=SEEDS,
)
def test_positions_are_those_of_the_valid_keys_nearly_in_order(keys, bounds, seed):
    valid = np.random.default_rng(seed).random(len(keys)) < 0.8
    order = sorted_positions(keys, valid, (np.uint64(bounds[0]), np.uint64(bounds[-1])))
    assert sorted(order.tolist()) == np.flatnonzero(valid).tolist()
    low, high = bounds[0], bounds[-1]
    bits = max(len(keys) - 1, 0).bit_length()
    coarse = 2 ** max(0, (high - low).bit_length() - (64 - bits))
    inside = [min(max(int(key), low), high) for key in keys[order]]
    assert all(later - earlier > -coarse for earlier, later in itertools.pairwise(inside))


@given(hnp.arrays(np.int32, st.integers(0, 50), elements=st.integers(0, 9)))
def test_ascending_is_a_stable_order(values):
    assert ascending(values).tolist() == np.argsort(values, kind="stable").tolist()


@given(seed=SEEDS, rows=st.integers(0, 30), outer=st.booleans(), limit=st.integers(1, 40))
def test_placed_matches_come_back_in_the_order_of_the_stream(seed, rows, outer, limit):
    rng = np.random.default_rng(seed)
    order = rng.permutation(rows)[: rng.integers(0, rows + 1)].astype(np.int32)
    frame = rng.integers(-1, 4, len(order)).astype(np.int32)
    row, count = np.arange(len(order), dtype=np.int32), rng.integers(0, 2, len(order)).astype(np.int32)
    place = np.full(rows, -1, dtype=np.int32)
    _result_kernels.place_matches(order, frame, count, outer, place)
    wanted, got = [], []
    for position in range(rows):
        (at,) = np.flatnonzero(order == position) if position in order else (-1,)
        if at >= 0 and frame[at] >= 0 and (count[at] or outer):
            wanted.append((position, int(frame[at]), int(row[at])) if count[at] else (position, -1, 0))
    target = np.full(len(order), -1, dtype=np.int32)
    for start in range(0, rows, limit):
        part = place[start : start + limit]
        near, at, index = (np.empty(len(part) + 1, dtype=np.int32) for _ in range(3))
        gathered, results = _result_kernels.in_key_order(part, frame, row, target, near, at, index)
        positions = start + np.flatnonzero(part != -1)
        got += [(int(p), int(near[i]), int(at[i])) for p, i in zip(positions, index[:results], strict=True)]
        assert gathered <= len(part) + 1
        assert (target == -1).all()
    assert got == wanted


@given(
    counts=hnp.arrays(np.int64, st.integers(1, 20), elements=st.integers(0, 5)),
    cut=st.integers(0, 100),
    size=st.integers(1, 10),
)
def test_results_from_any_row_on_are_runs_of_relation_rows(counts, cut, size):
    every = [(match, 100 * match + row) for match, count in enumerate(counts) for row in range(count)]
    start = cut % (len(every) + 1)
    wanted = every[start : start + size]
    if not wanted:
        return
    ends, frame = np.cumsum(counts), np.arange(len(counts), dtype=np.int32)
    first, last = np.searchsorted(ends, [start, start + len(wanted) - 1], side="right")
    match, out_frame, row = np.empty((3, last + 1 - first), dtype=np.int32)
    upto = np.empty(last + 1 - first, dtype=np.int64)
    runs = _result_kernels.runs_between(
        ends, frame, 100 * frame, start, start + len(wanted), first, match, out_frame, row, upto
    )
    assert (out_frame[:runs] == match[:runs]).all()
    lengths = np.diff(upto[:runs], prepend=0)
    assert (lengths > 0).all()
    found = zip(match[:runs].tolist(), row[:runs].tolist(), lengths.tolist(), strict=True)
    assert [(which, begin + at) for which, begin, length in found for at in range(length)] == wanted


@given(seed=SEEDS, most=st.integers(1, 9), longest=st.sampled_from([1, 3, 12]))
def test_pairs_with_cached_leaves_and_runs_of_the_others(seed, most, longest):
    rng = np.random.default_rng(seed)
    first, last = random_runs(rng, 15, 12, longest)
    frame_of = np.where(rng.random(15) < 0.5, np.arange(15), -1).astype(np.int32)
    pairs = [(i, leaf) for i in range(12) for leaf in range(first[i], last[i] + 1) if frame_of[leaf] >= 0]
    assert drained(_index_kernels.cached_pairs, most, 2, first, last, frame_of) == pairs
    runs = np.zeros(12, dtype=np.int32)
    assert _index_kernels.count_leaf_runs(first, last, frame_of, runs) == len(pairs)
    waiting = np.flatnonzero(runs).astype(np.int32)
    begin, end, tuples = (np.empty(runs.sum(), dtype=np.int32) for _ in range(3))
    _index_kernels.list_leaf_runs(first, last, frame_of, waiting, begin, end, tuples)
    missing = {(int(waiting[t]), leaf) for b, e, t in zip(begin, end, tuples, strict=True) for leaf in range(b, e + 1)}
    assert missing == {(i, n) for i in range(12) for n in range(first[i], last[i] + 1) if frame_of[n] < 0}
    sort = ascending(begin.astype(np.int64) + end)
    assert (np.diff(begin[sort]) >= 0).all()
    assert (np.diff(end[sort]) >= 0).all()


def drained(kernel, most, cursors, *arrays):
    """Call a resumable kernel until it has no more pairs."""
    left, right = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
    cursor, pairs = np.zeros(cursors, dtype=np.int64), []
    while size := kernel(*arrays, cursor, left, right):
        pairs += zip(left[:size].tolist(), right[:size].tolist(), strict=True)
    return pairs


@given(seed=SEEDS, most=st.integers(1, 9), longest=st.sampled_from([1, 2, 20]), nested=st.booleans())
def test_each_run_meets_the_leaves_read_that_it_waits_for(seed, most, longest, nested):
    rng = np.random.default_rng(seed)
    first, last = random_runs(rng, 30, 20, longest)
    if nested:
        last = (first + rng.integers(0, longest + 1, 20)).astype(np.int32)
    leaves = np.flatnonzero(rng.random(30) < rng.choice([0.1, 0.5, 1.0])).astype(np.int32)
    wanted = [(i, leaf) for i in range(20) for leaf in leaves.tolist() if first[i] <= leaf <= last[i]]
    assert drained(_index_kernels.collect_pairs, most, 3, first, last, not nested, leaves, leaves) == wanted


@given(seed=SEEDS, most=st.integers(1, 9))
def test_all_pairs_of_tuple_and_leaf(seed, most):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 9, 10).astype(np.int32)
    last = (first + rng.integers(-1, 3, 10)).astype(np.int32)
    wanted = [(i, leaf) for i in range(10) for leaf in range(first[i], last[i] + 1)]
    assert drained(_result_kernels.all_pairs, most, 2, first, last) == wanted


@given(seed=SEEDS, longest=st.sampled_from([1, 5]))
def test_demand_counts_runs_and_new_leaves(seed, longest):
    first, last = random_runs(np.random.default_rng(seed), 12, 9, longest)
    demand = np.zeros(12, dtype=np.int32)
    fresh = _index_kernels.add_demand(first, last, demand)
    twin = sum(((np.arange(12) >= f) & (np.arange(12) <= e)).astype(int) for f, e in zip(first, last, strict=True))
    assert demand.tolist() == twin.tolist()
    assert fresh == (twin > 0).sum()
    order = np.random.default_rng(seed).permutation(12).astype(np.int32)
    out, none, everything = np.empty(fresh, dtype=np.int32), order[:0], True
    pages = np.argsort(order).astype(np.int64)
    assert _index_kernels.wanted_leaves(demand, order, pages, 0, none, everything, 0.0, out) == fresh
    assert out.tolist() == [leaf for leaf in order.tolist() if twin[leaf]]
    assert _index_kernels.wanted_leaves(demand, none, np.arange(12), 0, none, everything, 0.0, out) == fresh
    assert out.tolist() == np.flatnonzero(twin).tolist()


@given(seed=SEEDS, longest=st.sampled_from([1, 5, 30]))
def test_demand_in_a_list_is_that_of_the_array(seed, longest):
    rng = np.random.default_rng(seed)
    leaves, demand = np.empty((2, 0), dtype=np.int32)
    wanted = np.zeros(40, dtype=np.int32)
    for _ in range(3):
        first, last = random_runs(rng, 40, rng.integers(0, 9), longest)
        _index_kernels.add_demand(first, last, wanted)
        size = _index_kernels.union_of_runs(first, last, leaves[:0], leaves[:0])
        more = np.empty((2, size), dtype=np.int32)
        assert _index_kernels.union_of_runs(first, last, *more) == size
        merged = np.empty((2, size + len(leaves)), dtype=np.int32)
        count = _index_kernels.merge_demand(leaves, demand, *more, *merged)
        leaves, demand = merged[:, :count]
    assert leaves.tolist() == np.flatnonzero(wanted).tolist()
    assert demand.tolist() == wanted[leaves].tolist()


@given(seed=SEEDS, count=st.integers(0, 12), longest=st.sampled_from([1, 6]))
def test_a_map_of_few_leaves_answers_as_an_array_does(seed, count, longest):
    rng = np.random.default_rng(seed)
    leaves = np.sort(rng.choice(30, count, replace=False)).astype(np.int32)
    every = np.full(30, -1, dtype=np.int32)
    every[leaves] = rng.integers(0, 100, count)
    few = LeafMap(leaves, every[leaves], -1)
    asked = rng.integers(0, 30, 20)
    assert values_at(few, asked).tolist() == values_at(every, asked).tolist() == every[asked].tolist()
    assert [value_at(few, leaf) for leaf in asked] == [value_at(every, leaf) for leaf in asked] == every[asked].tolist()
    first, last = random_runs(rng, 30, 8, longest)
    runs, twin = np.empty((2, 8), dtype=np.int32)
    assert _index_kernels.count_leaf_runs(first, last, few, runs) == _index_kernels.count_leaf_runs(
        first, last, every, twin
    )
    assert runs.tolist() == twin.tolist()


@given(seed=SEEDS, head=st.integers(0, 30), widest=st.sampled_from([0.0, 1.0, 3.5, 100.0]))
def test_leaves_join_a_plan_where_a_read_goes_over_them(seed, head, widest):
    rng = np.random.default_rng(seed)
    pages = np.sort(rng.choice(40, 12, replace=False)).astype(np.int64)
    demand = rng.integers(0, 2, 12).astype(np.int32)
    ahead = [leaf for leaf in range(12) if demand[leaf] and pages[leaf] >= head]
    planned = [leaf for leaf in ahead if rng.random() < 0.5]
    out, everything = np.empty(12, dtype=np.int32), False
    size = _index_kernels.wanted_leaves(
        demand, np.empty(0, np.int32), pages, head, np.array(planned, np.int32), everything, widest, out
    )
    gaps = [(low, high) for low, high in itertools.pairwise(planned) if pages[high] - pages[low] - 1 <= widest]
    assert out[:size].tolist() == [
        leaf for leaf in ahead if leaf in planned or any(low < leaf < high for low, high in gaps)
    ]


def settle(resident, candidates, capacity):
    """Return the paper's ToKeep and ToRemove (section IV-C); with equal scores a resident page stays."""
    keep, remove = np.ones(len(candidates), dtype=np.bool_), np.zeros(len(resident), dtype=np.bool_)
    excess = max(len(resident) + len(candidates) - capacity, 0)
    leaving = np.argsort(np.concatenate([candidates, resident]), kind="stable")[:excess]
    keep[leaving[leaving < len(candidates)]] = False
    remove[leaving[leaving >= len(candidates)] - len(candidates)] = True
    return keep, remove


@given(
    resident=hnp.arrays(np.int64, st.integers(0, 12), elements=st.integers(0, 6)),
    utility=hnp.arrays(np.int32, st.integers(0, 12), elements=st.integers(1, 6)),
    capacity=st.integers(0, 24),
)
def test_what_stays_is_worth_as_much_as_the_naive_twin_keeps(resident, utility, capacity):
    keep, remove = np.empty(len(utility), dtype=np.bool_), np.empty(len(resident), dtype=np.bool_)
    leaves = np.arange(len(utility), dtype=np.int32)
    _join_kernels.choose_resident(utility, leaves, False, resident, capacity, keep, remove)  # noqa: FBT003 - a kernel
    twin_keep, twin_remove = settle(resident, utility.astype(np.int64), capacity)
    assert remove.tolist().count(True) == twin_remove.tolist().count(True)
    assert sorted(utility[keep]) == sorted(utility[twin_keep])
    assert sorted(resident[remove]) == sorted(resident[twin_remove])


@given(residents=st.integers(0, 9), wanted=st.integers(0, 9), capacity=st.integers(0, 20), seed=SEEDS)
def test_under_lru_what_is_read_last_stays(residents, wanted, capacity, seed):
    resident = np.random.default_rng(seed).permutation(residents).astype(np.int64)
    keep, remove = np.empty(wanted, dtype=np.bool_), np.empty(residents, dtype=np.bool_)
    demand, leaves = np.ones(wanted, dtype=np.int32), np.arange(wanted, dtype=np.int32)
    _join_kernels.choose_resident(demand, leaves, True, resident, capacity, keep, remove)  # noqa: FBT003 - a kernel
    excess = max(0, residents + wanted - capacity)
    assert sorted(resident[remove]) == list(range(min(excess, residents)))
    assert keep.tolist() == [i >= excess - residents for i in range(wanted)]


@given(
    wanted=st.lists(st.integers(0, 9), max_size=60),
    frames=st.integers(1, 5),
)
def test_the_buffer_pool_misses_as_an_ordered_dict_does(wanted, frames):
    leaf = np.array(wanted, dtype=np.int32)
    frame_of, leaf_of = np.full(10, -1, dtype=np.int32), np.full(frames, -1, dtype=np.int32)
    ring = np.arange(frames + 1, dtype=np.int32)
    before, after = np.roll(ring, 1).copy(), np.roll(ring, -1).copy()
    maps = _pool_kernels.PoolMaps(frame_of, leaf_of, before, after, np.zeros(frames, dtype=np.int64))
    out = np.empty(len(leaf), dtype=np.int32)
    missed, misses, start, walk = np.empty(frames, dtype=np.int32), [], 0, 0
    while start < len(leaf):
        walk += 1
        stop, count = _pool_kernels.walk_pool(leaf, start, walk, maps, out, missed)
        misses += leaf_of[missed[:count]].tolist()
        assert (leaf_of[out[start:stop]] == leaf[start:stop]).all()
        start = stop
    pool, twin = collections.OrderedDict(), []
    for page in wanted:
        if page not in pool:
            twin.append(page)
            if len(pool) == frames:
                pool.popitem(last=False)
        pool[page] = True
        pool.move_to_end(page)
    assert misses == twin


@given(seed=SEEDS, most=st.integers(1, 20), distinct=st.sampled_from([1, 3, 50]))
def test_the_multimap_is_a_dictionary_of_lists(seed, most, distinct):
    rng = np.random.default_rng(seed)
    batches, size = 3, 6
    multimap = _window_kernels.Multimap(
        slot_hash=np.zeros(18, dtype=np.uint64),
        follow=np.full(18, _window_kernels.ABSENT, dtype=np.int32),
        next_key=np.full(18, -1, dtype=np.int32),
        head=np.full(8, -1, dtype=np.int32),
        tags=np.zeros(8, dtype=np.uint8),
    )
    held = {}
    for step in range(8):
        place = step % batches
        if place in held:
            _window_kernels.expire(place * size, len(held.pop(place)), multimap)
        words = rng.integers(0, distinct, rng.integers(0, size + 1)).astype(np.uint64)
        _window_kernels.insert(_window_kernels.hash_words(words), np.array([], dtype=bool), place * size, multimap)
        held[place] = words
        probes = rng.integers(0, distinct, 5).astype(np.uint64)
        out = _window_kernels.RowBuffer(
            _window_kernels.hash_words(probes),
            np.empty(5, dtype=np.int32),
            np.zeros(5, dtype=np.int32),
            np.arange(5, dtype=np.int32),
        )
        size_found = _window_kernels.find_hashes(multimap, out)
        found, cursor = [], np.array([0, -1], dtype=np.int64)
        slots, which = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
        youngest = out.slot[:size_found]
        while count := _window_kernels.expand_keys(youngest, cursor, multimap.follow, slots, which):
            found += zip(slots[:count].tolist(), out.row[which[:count]].tolist(), strict=True)
        wanted = [
            (batch * size + at, row)
            for batch, words in held.items()
            for at, word in enumerate(words)
            for row, probe in enumerate(probes)
            if word == probe
        ]
        assert sorted(found) == sorted(wanted)


@given(st.lists(st.binary(max_size=12), max_size=20))
def test_equal_bytes_have_equal_hashes(values):
    offsets = np.cumsum([0, *map(len, values)])
    data = np.frombuffer(bytearray(b"".join(values) + b"\0"), dtype=np.uint8)
    hashes = _window_kernels.hash_bytes(offsets, data)
    assert len(set(hashes.tolist())) == len(set(values))
    reverse = np.arange(len(values), dtype=np.int32)[::-1].copy()
    same = _window_kernels.same_keys(offsets, data, reverse, offsets, data)
    assert same.tolist() == [value == other for value, other in zip(values[::-1], values, strict=True)]


@pytest.mark.parametrize("counts", [[], [0], [3, 0, 2]])
@pytest.mark.parametrize("most", [1, 2, 10])
def test_rows_of_pages_are_enumerated(counts, most):
    page_size = 24
    frames = np.zeros(max(page_size * len(counts), 1), dtype=np.uint8)
    for page, count in enumerate(counts):
        count_bytes = np.frombuffer(np.uint32(count).tobytes(), dtype=np.uint8)
        frames[page * page_size + 20 : page * page_size + 24] = count_bytes
    cursor, found = np.zeros(2, dtype=np.int64), []
    frame, row = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
    while size := _window_kernels.enumerate_rows(frames, page_size, cursor, len(counts), frame, row):
        found += zip(frame[:size].tolist(), row[:size].tolist(), strict=True)
    assert found == [(page, at) for page, count in enumerate(counts) for at in range(count)]


@given(wanted=st.sets(st.integers(0, 59)), shuffled=st.booleans(), seek=st.sampled_from([0.0, 2.5, 100.0]))
def test_reading_costs_what_the_optimal_plan_says(wanted, shuffled, seek):
    pages = np.random.default_rng(1).permutation(60) if shuffled else np.arange(60)
    demand = np.zeros(60, dtype=np.int32)
    demand[list(wanted)] = 1
    order = np.argsort(pages).astype(np.int32) if shuffled else np.empty(0, dtype=np.int32)
    places = np.sort(pages[list(wanted)]).astype(np.int64)
    cost = _index_kernels.reading_cost(demand, order, pages.astype(np.int64), seek, 1.0)
    assert cost == pytest.approx(plan_cost(plan_reads(places, seek, 1.0, 1000), seek, 1.0))
