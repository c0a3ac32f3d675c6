"""What DINER does inside: regions, Clock, flushes, and nested loops over spilled blocks."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import JoinInputError
from headrace.joins.streams import DINER, MINER, Near
from headrace.joins.streams.diner import _kernels as kernels
from headrace.joins.streams.diner.regions import LOWER, MIDDLE, UPPER, Regions
from headrace.joins.streams.tuples.layout import TOUCHED
from headrace.storage.errors import MemoryBudgetError

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64())])
OFFSET = 1 << 63  # of the key words of int64


def rows(ids, keys):
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "x": pa.array(keys, pa.int64())}, SCHEMA)


def diner(folder, on="x", **options):
    """Return a join with small blocks, of some 20 tuples, and no time to wait."""
    settings = {"memory": "96KiB", "block": "1KiB", "wait": 1e-6, "spill": folder, "clock": lambda: 0.0} | options
    return DINER({"a": SCHEMA, "b": SCHEMA}, on, **settings)


def fill(join, keys, size=200, *, sides="ab"):
    """Push the same keys to both inputs by turns; return the pairs that came."""
    found = []
    for start in range(0, len(keys), size):
        for side in sides:
            part = np.arange(start, min(start + size, len(keys)))
            found += pairs(join.push(rows(part, keys[part]), side=side, at=0.0))
    return found


def pairs(batches):
    return [pair for batch in batches for pair in zip(*(batch.column(at).to_pylist() for at in (0, 2)), strict=True)]


def in_memory(join):
    return [set(store.rows.batch().column("id").to_pylist()) for store in join.algorithm.stores]


def words_of(join, side):
    return [int(word) - OFFSET for word in join.algorithm.stores[side].sorted_index(0).words]


# Regions


def test_all_tuples_are_in_the_middle_before_the_first_flush():
    words = np.arange(10, dtype=np.uint64)
    assert Regions().bounds(words) == (0, 10)
    assert Regions().worst_first(words) == [MIDDLE]


@pytest.mark.parametrize("per_block", [1, 7, 20])
def test_after_a_flush_each_end_holds_a_block_and_counters_are_zero(per_block):
    regions, words = Regions(), np.arange(100, 200, dtype=np.uint64)
    regions.joins[:] = 5
    regions.move(words, per_block)
    start, stop = regions.bounds(words)
    assert (start, len(words) - stop) == (per_block, per_block)
    assert regions.joins.tolist() == [0, 0, 0]


@pytest.mark.parametrize("words", [[7] * 9, [0] * 9, [2**64 - 1] * 9, [1, 1, 1, 1, 9, 9], [3], [0, 2**64 - 1]], ids=str)
@pytest.mark.parametrize("per_block", [1, 4, 50])
def test_boundaries_never_meet_however_the_keys_repeat(words, per_block):
    regions, words = Regions(), np.array(words, dtype=np.uint64)
    regions.move(words, per_block)
    assert 0 <= regions.lower < regions.upper < 2**64
    start, stop = regions.bounds(words)
    assert start <= stop
    assert len(words) - stop >= min(per_block, len(words)) or words.min() == 0


def test_the_region_with_fewest_joins_for_each_tuple_is_the_worst():
    regions, words = Regions(), np.arange(100, dtype=np.uint64)
    regions.move(words, 10)
    regions.joins[[LOWER, MIDDLE, UPPER]] = 20, 90, 30  # 2, 1.125 and 3 for each tuple
    assert regions.worst_first(words) == [MIDDLE, LOWER, UPPER]
    regions.joins[:] = 0
    assert regions.worst_first(words) == [UPPER, LOWER, MIDDLE]
    assert regions.worst_first(words[:5]) == [LOWER]


def test_a_key_on_a_boundary_belongs_to_the_outer_region(tmp_path):
    with diner(tmp_path) as join:
        regions = join.algorithm.policies[0].regions
        regions.lower, regions.upper = OFFSET + 10, OFFSET + 20
        join.push(rows(range(5), [10, 11, 19, 20, 25]), side="a").drain()
        tuples = join.algorithm.stores[0].rows
        regions.credit(tuples, 0, np.array([0, 1, 1, 2, 3, 4, 4, 4]))
        assert regions.joins.tolist() == [1, 3, 4]


def test_with_a_band_each_tuple_of_a_result_credits_its_own_region(tmp_path):
    with diner(tmp_path, Near("x", "x", 5)) as join:
        for policy in join.algorithm.policies:
            policy.regions.lower, policy.regions.upper = OFFSET + 10, OFFSET + 20
        join.push(rows([0, 1, 2], [8, 12, 30]), side="a").drain()
        assert pairs(join.push(rows([0], [9]), side="b")) == [(0, 0), (1, 0)]
        assert join.algorithm.policies[0].regions.joins.tolist() == [1, 1, 0]  # 8 is lower, 12 in the middle
        assert join.algorithm.policies[1].regions.joins.tolist() == [2, 0, 0]  # 9, twice


def test_join_bits_are_set_on_both_tuples_of_a_result(tmp_path):
    with diner(tmp_path) as join:
        join.push(rows([0, 1], [5, 6]), side="a").drain()
        join.push(rows([0, 1], [6, 7]), side="b").drain()
        bits = [(store.rows.flags & TOUCHED > 0).tolist() for store in join.algorithm.stores]
        assert bits == [[False, True], [True, False]]


# The Clock and the ends


def sweep_twin(bits, start, stop, hand, wanted):
    """Return the taken entries and the next one; clears bits."""
    taken = []
    while len(taken) < stop - start:
        if hand not in taken:
            if bits[hand]:
                bits[hand] = False
            elif len(taken) == wanted:
                break
            else:
                taken.append(hand)
        hand = hand + 1 if hand + 1 < stop else start
    return taken, hand


@pytest.mark.parametrize("seed", range(20))
def test_the_clock_takes_tuples_without_join_bit_and_clears_the_others(seed):
    rng = np.random.default_rng(seed)
    count, stride = 30, 16
    start, stop = sorted(rng.choice(count + 1, 2, replace=False).tolist())
    hand, wanted = int(rng.integers(start, stop)), int(rng.integers(1, 12))
    bits = rng.random(count) < rng.choice([0.1, 0.5, 1.0])
    slots = rng.permutation(count).astype(np.int32)
    records = np.zeros(count * stride + 8, dtype=np.uint8)
    records[slots.astype(np.int64) * stride + 3] = bits * TOUCHED
    stored = kernels.StoredRows(records, np.zeros(0, np.uint8), stride, -1, 3)
    chosen = np.empty(wanted + 1, dtype=np.int64)
    found, used, full, after = kernels.sweep(slots, start, stop, hand, stored, TOUCHED, wanted * stride, True, chosen)  # noqa: FBT003 - kernels take no keywords
    expected, expected_hand = sweep_twin(bits, start, stop, hand, wanted)
    assert chosen[:found].tolist() == expected
    assert used == found * stride
    if full:
        assert after == expected_hand
    assert (records[slots.astype(np.int64) * stride + 3] > 0).tolist() == bits.tolist()


def test_the_hand_of_the_clock_goes_on_where_it_stopped(tmp_path):
    with diner(tmp_path) as join:
        keys = np.arange(300)
        join.push(rows(keys, keys), side="a").drain()
        join.algorithm.policies[0]._hand = (OFFSET + 100, 0)
        left, gone = in_memory(join)[0], []
        for _ in range(3):
            join.algorithm.policies[0].regions.joins[:] = 10**6, 0, 10**6
            join.algorithm._flush_block()
            gone.append(sorted(left - in_memory(join)[0]))
            left = in_memory(join)[0]
        taken = gone[0] + gone[1] + gone[2]
        assert taken == list(range(100, 100 + 3 * (1024 // join.algorithm.layouts[0].stride)))


@pytest.mark.parametrize("worst", [LOWER, UPPER])
def test_an_outer_region_gives_its_extreme_keys_as_one_sorted_block(tmp_path, worst):
    with diner(tmp_path) as join:
        keys = np.random.default_rng(1).permutation(400)
        join.push(rows(range(400), keys), side="a").drain()
        algorithm = join.algorithm
        policy, store = algorithm.policies[0], algorithm.stores[0]
        policy.flushed(store.rows, store.sorted_index(0), store.live_nbytes)
        policy.regions.joins[:] = 1000
        policy.regions.joins[worst] = 0
        slots = policy.choose(store.rows, store.sorted_index(0))
        words = store.rows.key_words(0)[slots].astype(object) - OFFSET
        per_block = 1024 // store.layout.stride
        assert words.tolist() == (list(range(per_block)) if worst == LOWER else list(range(400 - per_block, 400)))


def test_the_next_worst_region_fills_the_block(tmp_path):
    with diner(tmp_path) as join:
        join.push(rows(range(100), range(100)), side="a").drain()
        algorithm = join.algorithm
        policy, store = algorithm.policies[0], algorithm.stores[0]
        policy.regions.lower, policy.regions.upper = OFFSET + 2, OFFSET + 97
        policy.regions.joins[:] = 0, 10**6, 1  # lower holds 0 to 2; then upper from the end, 99 to 97; then the middle
        words = store.rows.key_words(0)[policy.choose(store.rows, store.sorted_index(0))].astype(object) - OFFSET
        assert {0, 1, 2, 97, 98, 99} < set(words.tolist())
        assert len(words) == 1024 // store.layout.stride
        assert words.tolist() == sorted(words.tolist())


def test_the_first_flush_comes_from_the_middle_and_sets_the_boundaries(tmp_path):
    with diner(tmp_path) as join:
        keys = np.arange(4000)
        start = 0
        while not join.stats.rows_spilled:
            join.push(rows(keys[start : start + 50], keys[start : start + 50]), side="a").drain()
            start += 50
        left = words_of(join, 0)
        assert (left[0], left[-1]) == (0, start - 1)
        regions = join.algorithm.policies[0].regions
        assert left[0] < regions.lower - OFFSET < regions.upper - OFFSET < left[-1]


def test_the_input_with_most_tuples_is_flushed_and_the_streaming_one_after_the_other_has_ended(tmp_path):
    with diner(tmp_path) as join:
        join.push(rows(range(300), range(300)), side="b").drain()
        join.push(rows(range(100), range(100)), side="a").drain()
        assert join.algorithm._victim() == 1
        join.end("b").drain()
        assert join.algorithm._victim() == 0


# Nested loops over spilled blocks


def spilled_join(folder, tuples=2400, distinct=900, **options):
    """Return a join that has spilled, its keys, and the pairs so far."""
    join = diner(folder, **options)
    keys = np.random.default_rng(3).integers(0, distinct, tuples)
    return join, keys, fill(join, keys)


def matching(keys):
    order = {}
    for at, key in enumerate(keys.tolist()):
        order.setdefault(key, []).append(at)
    return {(a, b) for ids in order.values() for a in ids for b in ids}


def test_reactive_work_joins_every_spilled_block_with_every_other(tmp_path):
    join, keys, found = spilled_join(tmp_path)
    with join:
        while (steps := join.stats.reactive_steps) < 10**5:
            found += pairs(join.tick(1.0))
            if join.stats.reactive_steps == steps:
                break
        reactive = join.algorithm.reactive
        assert not reactive.unfinished
        assert reactive.joined == [len(disk) for disk in join.algorithm.disk]
        memory = in_memory(join)
        late = matching(keys) - set(found)
        assert all(a in memory[0] or b in memory[1] for a, b in late)
        found += pairs(join.finish())
        assert len(found) == len(set(found))
        assert set(found) == matching(keys)


def test_the_smaller_input_is_outer_and_roles_change_when_it_is_exhausted(tmp_path):
    join = diner(tmp_path, max_outer_blocks=3)
    with join:
        keys = np.random.default_rng(4).integers(0, 500, 3000)
        fill(join, keys, sides="a")
        fill(join, keys[:2000], sides="b")
        disk, reactive = join.algorithm.disk, join.algorithm.reactive
        sizes = [len(blocks) for blocks in disk]
        assert sizes[0] > sizes[1] > 4
        join.tick(1.0).drain()
        assert reactive.outer == 1
        assert reactive.joined == [sizes[0], 0]
        assert reactive.chunk == 3
        fill(join, keys[:600])  # more blocks of both
        while reactive.outer == 1:
            assert reactive.joined[0] == sizes[0], "the inner blocks to join with are fixed"
            join.tick(1.0).drain()
        assert reactive.joined[1] == len(disk[1])
        assert reactive.joined[0] >= sizes[0]


def test_reactive_work_stops_after_an_inner_block_when_more_than_max_new_arrivals_wait(tmp_path):
    join, _, _ = spilled_join(tmp_path, max_new_arrivals=10)
    with join:
        waiting = iter([10, 10, 11, 12])
        join.idle(1.0, arrived=lambda: next(waiting)).drain()
        assert join.stats.reactive_steps == 3
        join.idle(1.0, arrived=lambda: 11).drain()
        assert join.stats.reactive_steps == 4


def test_an_interrupted_chunk_goes_on_without_repetition(tmp_path):
    join, keys, found = spilled_join(tmp_path, max_outer_blocks=4)
    with join:
        for round_ in range(20):
            found += pairs(join.idle(1.0, arrived=lambda: 10**6))
            more = np.arange(2400 + 3 * round_, 2403 + 3 * round_)
            keys = np.concatenate([keys, keys[more % 1000]])
            for side in "ab":
                found += pairs(join.push(rows(more, keys[more]), side=side, at=0.0))
        found += pairs(join.finish())
        assert join.stats.rows_reactive > 0
        assert len(found) == len(set(found))
        assert set(found) == matching(keys)


def test_at_cleanup_what_is_in_memory_becomes_blocks_if_anything_was_spilled(tmp_path):
    join, keys, _ = spilled_join(tmp_path)
    with join:
        assert join.stats.rows_in_memory > 0
        join.finish().drain()
        assert join.stats.rows_spilled == 2 * len(keys)
    with diner(tmp_path) as join:
        fill(join, np.arange(100))
        join.finish().drain()
        assert join.stats.rows_spilled == 0
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operator", [DINER, MINER])
@pytest.mark.parametrize(
    ("memory", "block", "count"), [("600KiB", "1KiB", 9000), ("1000KiB", "2KiB", 12_000), ("1000KiB", "4KiB", 20_000)]
)
def test_the_list_of_the_last_blocks_takes_its_memory_from_tuples_that_are_not_in_blocks_yet(
    tmp_path, operator, memory, block, count
):
    """Memory is full at the end, and the lists have no room for so many blocks. A tuple is in one of them only."""
    rng = np.random.default_rng(0)
    keys = {side: rng.permutation(count) for side in "ab"}
    found = []
    with operator({"a": SCHEMA, "b": SCHEMA}, "x", memory=memory, block=block, spill=tmp_path) as join:
        for start in range(0, count, 200):
            for side, given in keys.items():
                part = np.arange(start, min(start + 200, count))
                found += pairs(join.push(rows(part, given[part]), side=side))
        found += pairs(join.finish())
        assert join.stats.memory.peak <= join.stats.memory.limit
    assert sorted(found) == list(zip(range(count), np.argsort(keys["b"])[keys["a"]].tolist(), strict=True))


def test_stamps_are_of_a_counter_and_not_of_the_clock(tmp_path):
    join, _, _ = spilled_join(tmp_path)
    with join:
        stamps = [store.rows.arrivals for store in join.algorithm.stores]
        every = np.concatenate(stamps)
        assert len(set(every.tolist())) == len(every)
        departures = [join.algorithm.disk[side].block(at).departure for side in (0, 1) for at in range(5)]
        assert not set(departures) & set(every.tolist())
        assert all(type(stamp) is int for stamp in departures)


def test_blocks_whose_keys_are_far_apart_are_not_read(tmp_path):
    with diner(tmp_path) as join:
        fill(join, np.arange(1500), sides="a")
        fill(join, np.arange(100_000, 101_500), sides="b")
        assert min(map(len, join.algorithm.disk)) > 10
        join.finish().drain()
        assert join.stats.blocks_read == 0
        assert join.stats.rows_out == 0


# Parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 100}, "`block`"),
        ({"max_outer_blocks": 0}, "max_outer_blocks"),
        ({"max_outer_blocks": 1.5}, "max_outer_blocks"),
        ({"max_new_arrivals": -1}, "max_new_arrivals"),
    ],
)
def test_parameters_are_checked(tmp_path, options, message):
    with pytest.raises(JoinInputError, match=message):
        diner(tmp_path, **options)


def test_the_defaults_are_those_of_the_paper(tmp_path):
    with DINER({"a": SCHEMA, "b": SCHEMA}, "x", memory="2MiB", spill=tmp_path) as join:
        algorithm = join.algorithm
        assert (algorithm._block, algorithm._max_outer_blocks, algorithm.wait) == (10240, 19, 0.025)
        assert join._max_new_arrivals == 1000


def test_without_a_folder_for_spill_files_too_many_tuples_are_an_error():
    with diner(None) as join, pytest.raises(MemoryBudgetError, match="`spill=` a folder"):
        fill(join, np.arange(4000))


def test_three_inputs_are_refused(tmp_path):
    inputs = dict.fromkeys("abc", SCHEMA)
    with pytest.raises(JoinInputError, match="use MINER"):
        DINER(inputs, [("a.x", "b.x"), ("b.x", "c.x")], spill=tmp_path)
