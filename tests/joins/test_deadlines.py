"""Deadlines under a simulated clock and a simulated disk: only reads take time."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_disk import READ, SEEK, TRANSFER, Clock, SlowReader

from headrace.joins import SSIJ
from headrace.joins.deadlines import Deadlines
from headrace.joins.ssij.cost import PhaseEstimate
from headrace.joins.timing import OperatorTime, WaitRecord

KEYS = 4000


@pytest.fixture(scope="module")
def table(build):
    rows = pa.table({"k": np.arange(KEYS), "pad": [f"{key:>60}" for key in range(KEYS)]})
    with build(rows, ["k"], unique=True, page_size=4096) as table:
        yield table


def drive(join, clock, arrivals):
    """Push batches at their times and tick when something is due; return the wait of each result row."""
    waits = []

    def consume(output):
        for result in output:
            waits.extend((clock.now - result["at"].to_numpy()).tolist())

    for at, keys in arrivals:
        while join.due is not None and join.due <= at:
            clock.now = max(clock.now, join.due)
            consume(join.tick(clock.now))
        clock.now = max(clock.now, at)
        consume(join.push(pa.record_batch({"k": keys, "at": np.full(len(keys), at)}), at=at))
    while join.due is not None:
        clock.now = max(clock.now, join.due)
        consume(join.tick(clock.now))
    return np.array(waits)


def arrivals_at(rng, gaps, size):
    return [(at, rng.integers(0, KEYS, size)) for at in np.cumsum(gaps).tolist()]


def make(table, clock, deadline, memory="256KiB", slowness=1.0, **options):
    reader = SlowReader(table, clock, slowness=slowness)
    return SSIJ(table, on="k", memory=memory, deadline=deadline, reader=reader, clock=clock, **options)


@settings(max_examples=40)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.01, 0.3, 2.0]), max_size=25),
    size=st.sampled_from([1, 20, 300]),
    spare=st.sampled_from([0.0, 0.5, 20.0]),
    memory=st.sampled_from(["96KiB", "256KiB", "4MiB"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_deadline_that_can_be_met_is_missed_by_a_few_reads_at_most(table, gaps, size, spare, memory, seed):
    clock = Clock()
    # A tuple that comes when the longest join phase has just begun waits for that one and for its own; the least
    # memory holds some hundred tuples, so that more than these need several phases.
    phases = 2 + (size * len(gaps) // 300 if memory == "96KiB" else 0)
    deadline = phases * table.stats.leaves * (SEEK + TRANSFER) + 0.001 + spare
    join = make(table, clock, deadline, memory)
    waits = drive(join, clock, arrivals_at(np.random.default_rng(seed), gaps, size))
    stats = join.stats
    assert len(waits) == stats.rows_in == stats.rows_done
    assert stats.longest_wait == pytest.approx(max(waits, default=0.0))
    assert stats.longest_wait <= deadline + 3 * (SEEK + TRANSFER), "the next phase may be a little worse than the worst"


@settings(max_examples=20)
@given(deadline=st.sampled_from([0.001, 0.05, 0.4]), seed=st.integers(0, 2**32 - 1))
def test_deadlines_that_cannot_be_met_are_counted(table, deadline, seed):
    clock, rng = Clock(), np.random.default_rng(seed)
    join = make(table, clock, deadline)
    waits = drive(join, clock, arrivals_at(rng, rng.choice([0.0, 0.02, 0.5], 20), 30))
    assert len(waits) == join.stats.rows_in
    assert join.stats.deadline_misses == int((waits > deadline + 1e-9).sum())
    assert join.stats.longest_wait == pytest.approx(waits.max())


def test_a_slow_disk_misses_until_the_estimate_has_learnt_it(table):
    clock = Clock()
    join = make(table, clock, 1.0, slowness=60.0, memory="96KiB")
    rng = np.random.default_rng(5)
    drive(join, clock, arrivals_at(rng, [20.0] * 5, 1))
    before = join.stats
    assert before.deadline_misses == 1, "0.66 s a page, where 0.011 s were expected"
    drive(join, clock, [(clock.now + 50 + 10 * at, rng.integers(0, KEYS, 1)) for at in range(5)])
    assert (join.stats - before).deadline_misses == 0


def test_the_first_phase_may_take_longer_than_estimated_by_half_of_the_deadline(table):
    """No kernel was loaded before it, and what tuples cost beside reads was not known."""
    clock, rng = Clock(), np.random.default_rng(5)
    join = make(table, clock, 1.0, slowness=40.0, memory="96KiB")
    waits = drive(join, clock, arrivals_at(rng, [20.0] * 5, 1))
    assert 0.5 < waits[0] < 1
    assert join.stats.deadline_misses == 0


def test_without_a_deadline_nothing_is_due(table):
    join = make(table, Clock(), None, input_threshold=10)
    join.push(pa.record_batch({"k": [1], "at": [0.0]})).drain()
    assert join.due is None
    assert join.tick(1e9).drain() == 0


def test_tuples_that_would_expire_during_a_join_phase_are_part_of_it(table):
    clock = Clock()
    join = make(table, clock, 2.0, input_threshold=50, stream_threshold=1000)
    join.push(pa.record_batch({"k": np.arange(0, KEYS, 40), "at": np.zeros(100)}), at=0.0).drain()
    assert join.store.stream.rows == 100
    phase = join.algorithm.estimate.seconds(join.store.stream.pages)
    clock.now = join.due - phase / 2
    join.push(pa.record_batch({"k": [7], "at": [clock.now]}), at=clock.now).drain()
    late = join.push(pa.record_batch({"k": [9], "at": [clock.now]}), at=clock.now)
    late.drain()
    clock.now = join.due
    phases = join.stats.join_phases
    while join.due is not None and join.due <= clock.now:
        join.tick().drain()
    assert join.stats.join_phases == phases + 1
    assert join.stats.deadline_misses == 0


def test_due_moves_forward_as_tuples_leave(table):
    clock = Clock()
    join = make(table, clock, 5.0, input_threshold=1)
    join.push(pa.record_batch({"k": [1, 2000], "at": [0.0, 0.0]}), at=0.0).drain()
    assert 0 < join.due < 5.0
    join.flush().drain()
    assert join.due is None


def test_the_estimate_begins_with_random_reads_and_remembers_the_worst_plans():
    estimate = PhaseEstimate(SEEK, TRANSFER)
    assert estimate.seconds(0) == 0
    assert estimate.seconds(10) == pytest.approx(10 * READ + READ)
    for planned in (0.05, 0.02):
        estimate.learn(100, planned, planned)
    disk = 1.25  # not known yet
    assert estimate.seconds(100) == pytest.approx(disk * 1.1 * 0.045 + READ), "the worst, which fades"
    assert estimate.seconds(200) == pytest.approx(disk * 1.1 * 0.09 + READ), "more pages at most in proportion"
    assert estimate.seconds(50) == pytest.approx(disk * 1.1 * 0.045 + READ), "fewer at most as much"
    assert estimate.seconds(1) == pytest.approx(disk * READ + READ), "never more than a random read a page"


def test_how_the_disk_errs_holds_for_all_numbers_of_pages():
    estimate = PhaseEstimate(SEEK, TRANSFER)
    for _ in range(7):
        estimate.learn(1, 0.011, 0.022)
    assert estimate.seconds(10) == pytest.approx(1.25 * 2 * 0.11 + READ)
    estimate.learn(1, 0.011, 0.022)
    assert estimate.seconds(10) == pytest.approx(2 * 0.11 + READ), (
        "it errs always alike, so that there is nothing to fear"
    )
    estimate.learn(1, 0.011, 0.021)
    assert estimate.seconds(10) == pytest.approx(2 * 0.11 + 2 * 0.01 + READ), "a margin twice as wide as it varied"


def test_a_hiccup_is_forgotten_after_some_phases():
    estimate = PhaseEstimate(SEEK, TRANSFER, scan=0.5)
    estimate.learn(1000, 0.5, 20.0)
    assert estimate.seconds(1000) > 20.0
    for _ in range(8):
        estimate.learn(1000, 0.5, 0.5)
    assert 0.5 <= estimate.seconds(1000) < 0.75


def test_a_few_reads_longer_than_a_scan_should_be_say_that_a_scan_is_longer():
    estimate = PhaseEstimate(SEEK, TRANSFER, scan=0.5)
    estimate.learn(1, 0.011, 0.6)
    assert estimate.seconds(1000) == pytest.approx(1.25 * 0.6 + READ)
    assert estimate.seconds(1) == pytest.approx(1.25 * 0.6 + READ)


def test_no_phase_is_expected_to_take_longer_than_a_scan():
    estimate = PhaseEstimate(SEEK, TRANSFER, scan=3.0)
    assert estimate.seconds(100) == pytest.approx(100 * READ + READ)
    assert estimate.seconds(10_000) == 3.0 + READ


def test_a_stream_that_a_scan_serves_in_time_is_not_cut_into_small_phases(table):
    clock = Clock()
    join = make(table, clock, 0.6, input_threshold=10, stream_threshold=100_000)
    scan = join.algorithm.estimate.scan
    assert 2.2 * scan < 0.6 < table.stats.leaves * (SEEK + TRANSFER)
    rng = np.random.default_rng(3)
    drive(join, clock, [(at * scan / 10, rng.integers(0, KEYS, 20)) for at in range(100)])
    assert join.stats.longest_wait <= 0.6 + 3 * (SEEK + TRANSFER)
    assert join.stats.join_phases <= 12


def test_a_stream_that_is_pulled_shares_phases_longer_than_half_of_the_deadline(table):
    clock = Clock()
    join = make(table, clock, 0.15, input_threshold=10, stream_threshold=100_000, memory="512KiB")
    scan, rng, pushes = join.algorithm.estimate.scan, np.random.default_rng(6), 200
    assert 0.15 / 2 < scan < 0.15
    for _ in range(pushes):
        if join.due is not None and join.due < clock.now + 0.005:
            clock.now = max(clock.now, join.due)
            join.tick().drain()
        clock.now += 0.005
        join.push(pa.record_batch({"k": rng.integers(0, KEYS, 50), "at": np.zeros(50)})).drain()
    assert join.stats.deadline_misses == 0
    assert join.stats.join_phases <= pushes / 5


def test_pages_that_lay_close_together_do_not_bound_those_that_do_not():
    estimate = PhaseEstimate(SEEK, TRANSFER, scan=100.0)
    estimate.learn(4000, 1.0, 1.0)
    assert estimate.seconds(1500) < 1.5
    estimate.learn(1500, 3.0, 3.0)
    assert 3.0 <= estimate.seconds(1500) <= estimate.seconds(3000) <= estimate.seconds(8000) <= 6.0 * 1.1 * 1.25 + READ
    assert estimate.seconds(100) <= 100 * READ * 1.25 + READ


def test_pages_that_are_known_cost_at_least_what_their_reads_do():
    estimate = PhaseEstimate(SEEK, TRANSFER, scan=100.0)
    estimate.learn(4000, 1.0, 1.0)
    assert estimate.seconds(1500, 3.0) >= 3.0
    assert estimate.seconds(1500, 3000.0) <= 100.0 * 1.25 + READ


def test_phases_start_early_enough_after_phases_whose_pages_lay_closer_together(table):
    """While the cache is cold the popular pages are read, which lie together; those read later are scattered."""
    clock = Clock()
    deadline, rng = 3.0, np.random.default_rng(12)
    join = make(table, clock, deadline, memory="192KiB", input_threshold=10**6, stream_threshold=10**6)
    drive(join, clock, [(0.001 * at, rng.integers(0, KEYS // 3, 400)) for at in range(5)])
    begin = clock.now + 1
    scattered = [(begin + 0.1 * at, rng.integers(0, KEYS, 2)) for at in range(300)]
    drive(join, clock, scattered[:100])
    learned = join.stats.deadline_misses
    drive(join, clock, scattered[100:])
    assert join.stats.deadline_misses == learned


def test_a_phase_that_takes_a_little_longer_than_estimated_is_in_time(table):
    clock, deadline = Clock(), 5.0
    reader = SlowReader(table, clock)
    join = SSIJ(table, on="k", memory="256KiB", deadline=deadline, reader=reader, clock=clock)
    drive(join, clock, [(10.0 * at, np.arange(at, KEYS, 40)) for at in range(5)])
    keys, now = np.arange(7, KEYS, 40), clock.now + 10
    clock.now = now
    found = join.push(pa.record_batch({"k": keys, "at": np.full(len(keys), now)}), at=now).drain()
    reader.slowness = 1 + deadline / 50 / (now + deadline - join.due)
    clock.now = join.due
    while join.due is not None:
        found += join.tick(clock.now).drain()
    assert found == len(keys)
    assert now < clock.now <= now + deadline
    assert join.stats.deadline_misses == 0


def test_a_phase_is_not_estimated_by_the_reads_of_the_one_before(table):
    clock, deadline = Clock(), 3.0
    join = make(table, clock, deadline, memory="192KiB", input_threshold=1, stream_threshold=10**6)
    leaf, _ = table.snapshot().locate(table.snapshot().codec.encode([pa.array(range(KEYS))]))
    first = np.searchsorted(leaf, np.arange(leaf[-1] + 1))  # key of each leaf
    together, apart = first[:15], first[15::4][:15]
    drive(join, clock, [(0.0, together)])
    at = clock.now
    join.push(pa.record_batch({"k": apart, "at": np.full(len(apart), at)}), at=at).drain()
    reads = SEEK + TRANSFER * (int(leaf[apart[-1]] - leaf[apart[0]]) + 1)  # over the gaps, which cost less than seeks
    assert join.due <= at + deadline - reads


@pytest.mark.parametrize("work", [0.02, 0.1])
def test_a_stream_that_is_only_pulled_does_not_cut_phases(build, work):
    """Each push costs `work`, and the next one comes at once: stopping for it makes those late that wait."""
    clock, rng, keys = Clock(), np.random.default_rng(6), 60_000
    rows = pa.table({"k": np.arange(keys), "pad": [f"{key:>60}" for key in range(keys)]})
    with build(rows, ["k"], unique=True, page_size=4096) as table:
        join = make(table, clock, 2.0, input_threshold=10, stream_threshold=100_000, memory="512KiB")
        assert 2.0 / 2 < join.algorithm.estimate.scan < 2.0
        for _ in range(300):
            clock.now += work
            join.push(pa.record_batch({"k": rng.zipf(1.2, 100) * 7919 % keys})).drain()
        assert join.stats.deadline_misses == 0
        assert join.stats.join_phases > 300 * work / 2.0


def test_phases_are_so_short_that_tuples_may_wait_for_two(table):
    clock = Clock()
    deadline = 8 * (SEEK + TRANSFER)
    join = make(table, clock, deadline, input_threshold=1)
    rng = np.random.default_rng(4)
    drive(join, clock, [(at * 4 * (SEEK + TRANSFER), rng.integers(0, KEYS, 1)) for at in range(200)])
    assert join.stats.deadline_misses == 0


def test_time_never_goes_back_and_can_be_said():
    clock = Clock()
    time = OperatorTime(clock)
    assert time.reach(5.0) == time.now() == 5.0
    clock.now = 2.0
    assert time.now() == 7.0
    assert (time.reach(6.0), time.now()) == (6.0, 7.0)
    assert time.reach(None) == 7.0


def test_without_a_clock_the_first_time_said_is_the_origin():
    time = OperatorTime(None)
    time.reach(0.0)
    assert 0.0 <= time.now() < 60.0


def test_waits_of_single_tuples():
    waits = WaitRecord(Deadlines(1.0))
    waits.note(np.array([0.0, 5.0]), 2, 5.5)
    waits.note(5.0, 3, 6.5)
    waits.note(0.0, 0, 100.0)
    assert (waits.longest, waits.misses) == (5.5, 4)
