"""SSIJ's phases, its cache and its memory, beyond the results that every operator has in common."""

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, Band
from headrace.joins.errors import JoinInputError
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.file import FileBackend
from headrace.storage.read import DeviceModel, PageReader, ReadQueue

KEYS = 3000


def stream_of(keys, start=0):
    keys = np.asarray(keys)
    return pa.record_batch({"id": np.arange(start, start + len(keys)), "s_k": keys.astype(np.int64)})


def results(*outputs):
    return [row for output in outputs for result in output for row in result.to_pylist()]


@pytest.fixture(scope="module")
def relation():
    return pa.table({"k": np.arange(KEYS), "pad": [f"{key:>60}" for key in range(KEYS)]})


@pytest.fixture(scope="module")
def table(build, relation):
    with build(relation, ["k"], unique=True, page_size=4096) as table:
        yield table


def make(table, **options):
    return SSIJ(table, on=[("s_k", "k")], **options)


def test_tuples_wait_for_the_input_threshold(table):
    join = make(table, input_threshold=10, stream_threshold=1)
    assert join.push(stream_of(range(6))).drain() == 0
    assert join.stats.online_phases == 0
    assert join.push(stream_of(range(6))).drain() == 12
    assert join.stats.online_phases >= 1


def test_tuples_wait_for_the_stream_threshold(table):
    join = make(table, input_threshold=1, stream_threshold=10)
    assert join.push(stream_of(range(0, 9 * 200, 200))).drain() == 0
    assert join.stats.join_phases == 0
    assert join.push(stream_of([2000])).drain() == 10
    assert join.stats.join_phases == 1


def test_cached_pages_answer_at_once_and_without_reading(table):
    join = make(table, input_threshold=1, stream_threshold=1000)
    join.push(stream_of([5])).drain()
    join.flush().drain()
    before = join.stats
    assert join.push(stream_of([6])).drain() == 1
    assert (join.stats - before).pages_read == 0
    assert (join.stats - before).hit_ratio == 1.0


def test_a_page_is_read_once_for_all_tuples_of_a_join_phase(table):
    join = make(table, input_threshold=1)
    join.push(stream_of([7] * 50)).drain()
    join.push(stream_of([8] * 50)).drain()
    assert join.flush().drain() == 100
    assert join.stats.pages_wanted == 1


def leaves_of(table, keys):
    first, _ = table.snapshot().locate(table.snapshot().codec.encode([pa.array(keys)]))
    return set(first.tolist())


def crowded(table, policy="utility"):
    """Return a join that can cache a few pages, after phases that wanted `hot` often and all others once."""
    memory = 4096 * 24 + table.snapshot().index_nbytes + 20_000
    join = make(table, memory=memory, cache_policy=policy, input_threshold=1, stream_threshold=100_000)
    hot = [100, 1500, 2900]
    join.push(stream_of(hot * 20)).drain()
    join.flush().drain()
    for _ in range(2):
        join.push(stream_of(hot * 20)).drain()
        join.push(stream_of(range(0, KEYS, 40))).drain()
        join.flush().drain()
    return join, leaves_of(table, hot)


def test_pages_of_high_utility_stay_when_many_others_are_read(table):
    join, hot = crowded(table)
    assert join.stats.pages_cached < table.stats.leaves
    assert hot <= set(join.store.cache.resident.tolist())


def test_under_lru_pages_read_in_the_join_phase_push_out_useful_ones(table):
    join, hot = crowded(table, "lru")
    assert not hot <= set(join.store.cache.resident.tolist())


def test_utility_is_cleared_after_a_join_phase(table):
    join = make(table, input_threshold=1, stream_threshold=1000)
    join.push(stream_of([1, 1, 2000])).drain()
    join.flush().drain()
    join.push(stream_of([1, 1])).drain()
    assert join.store.cache.utility.max() == 2
    join.push(stream_of([700])).drain()
    join.flush().drain()
    assert join.store.cache.utility.max() == 0


def test_under_ageing_utility_is_halved_after_a_join_phase(table):
    join = make(table, input_threshold=1, stream_threshold=1000, cache_policy="ageing")
    join.push(stream_of([1, 1, 2000])).drain()
    join.flush().drain()
    assert join.store.cache.utility.max() == 1
    join.push(stream_of([1, 1, 1])).drain()
    join.push(stream_of([700])).drain()
    join.flush().drain()
    assert join.store.cache.utility.max() == 2


def test_pages_read_over_a_gap_are_not_cached(table):
    join = make(table, input_threshold=1)
    join.push(stream_of([0, 200])).drain()
    join.flush().drain()
    wanted = leaves_of(table, [0, 200])
    assert max(wanted) - min(wanted) > 1
    assert join.stats.pages_read > join.stats.pages_wanted == 2
    assert set(join.store.cache.resident.tolist()) == wanted


@pytest.mark.parametrize("max_scan", [1, 2, 7, 10_000])
def test_no_read_is_longer_than_max_scan(table, monkeypatch, max_scan):
    join = make(table, max_scan=max_scan, input_threshold=1, memory="4MiB")
    lengths, begin = [], ReadQueue.begin
    monkeypatch.setattr(
        ReadQueue,
        "begin",
        lambda self, reads: (lengths.extend((reads.lengths // 4096).tolist()), begin(self, reads))[1],
    )
    join.push(stream_of(range(0, KEYS, 50))).drain()
    assert join.flush().drain() == len(range(0, KEYS, 50))
    assert max(lengths) <= max_scan
    assert (max(lengths) > 7) == (max_scan > 7)


def test_stream_tuples_take_the_frames_of_cached_pages(table):
    join = make(table, memory="256KiB", input_threshold=1, stream_threshold=100_000)
    join.push(stream_of(range(0, KEYS, 40))).drain()
    join.flush().drain()
    cached = join.stats.pages_cached
    join.push(stream_of(range(KEYS, KEYS + 9000))).drain()
    held = join.stats
    assert held.pages_cached < cached or held.join_phases > 1
    assert held.memory.used <= held.memory.limit


def test_tuples_that_arrive_during_a_join_phase_shrink_the_cache(table):
    join = make(table, memory="256KiB", input_threshold=1, stream_threshold=100_000)
    join.push(stream_of(range(0, KEYS, 3))).drain()
    output = join.flush()
    next(output)
    capacity = join.store.cache.capacity
    later = join.push(stream_of(np.arange(0, KEYS), start=10_000))
    assert join.store.cache.capacity < capacity
    rows = results(later, join.finish())
    assert len(rows) + join.store.stream.rows >= KEYS
    assert join.stats.memory.peak <= join.stats.memory.limit


def test_thresholds_follow_the_memory(table):
    large, small = make(table, memory="1GiB").algorithm.thresholds, make(table, memory="128KiB").algorithm.thresholds
    row_nbytes = stream_of([1]).nbytes
    assert (large.online(row_nbytes), large.join(row_nbytes)) == (250_000, 1_000_000)
    assert small.online(row_nbytes) < small.join(row_nbytes) < 10_000


def test_too_little_memory_is_refused_with_the_amount_that_suffices(table, tools):
    least = tools.least_memory(SSIJ, table, [("s_k", "k")])
    with pytest.raises(MemoryBudgetError, match=str(least)):
        make(table, memory=least - 1)
    assert len(results(make(table, memory=least).push(stream_of([1])))) <= 1


@pytest.mark.parametrize("spare", [0, 1, 5000, 20_000])
def test_no_page_is_read_beyond_the_read_buffer(table, tools, monkeypatch, spare):
    memory = tools.least_memory(SSIJ, table, [("s_k", "k")]) + spare
    join = make(table, memory=memory, input_threshold=1)
    ends, begin = [], ReadQueue.begin
    monkeypatch.setattr(
        ReadQueue,
        "begin",
        lambda self, reads: (ends.append(int((reads.places + reads.lengths).max())), begin(self, reads))[1],
    )
    assert join.push(stream_of([0, 900, 1800, 2900])).drain() + join.finish().drain() == 4
    assert len(ends) > 1
    assert max(ends) <= join.store.read_buffer.pages * 4096


QUICK_DISK, SLOW_DISK = DeviceModel(20e-6, 5e-6, 4096), DeviceModel(8e-3, 50e-6, 4096)


@contextlib.contextmanager
def reader_of(table, device):
    backend = FileBackend(table.snapshot().path)
    yield PageReader(backend, 4096, device)
    backend.close()


@pytest.mark.parametrize(("device", "spare", "parts"), [(QUICK_DISK, 170, 2), (QUICK_DISK, 50, 1), (SLOW_DISK, 170, 1)])
def test_reads_are_as_long_as_the_read_buffer_where_seeks_are_slow_or_pages_few(
    table, tools, monkeypatch, device, spare, parts
):
    memory = tools.least_memory(SSIJ, table, [("s_k", "k")]) + spare * 4096
    lengths, begin = [], ReadQueue.begin
    monkeypatch.setattr(
        ReadQueue,
        "begin",
        lambda self, reads: (lengths.append(int(reads.lengths.sum()) // 4096), begin(self, reads))[1],
    )
    with reader_of(table, device) as reader:
        join = make(table, memory=memory, reader=reader, input_threshold=1)
        assert join.push(stream_of(range(0, KEYS, 5))).drain() + join.finish().drain() == len(range(0, KEYS, 5))
    most = join.store.read_buffer.pages // parts
    assert max(lengths) == min(most, join.stats.pages_read)


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_a_small_read_buffer_has_the_size_with_which_scans_complete_most_tuples(table, tools, deadline):
    """Unless there are deadlines, for which scans must be short."""
    pages, gap = 160, (0.8e-3 + 0.5e-3) / (50e-6 + 5e-6)
    memory = tools.least_memory(SSIJ, table, [("s_k", "k")]) + pages * 4096
    with reader_of(table, DeviceModel(0.8e-3, 50e-6, 4096)) as reader:
        chosen = make(table, memory=memory, reader=reader, deadline=deadline).store.read_buffer.pages - 2
    rates = [(pages - size) * size / (size + gap) for size in range(1, pages)]
    best = 1 + int(np.argmax(rates))
    assert abs(chosen - (best if deadline is None else 3 * pages // 8)) <= 1


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("device", [QUICK_DISK, SLOW_DISK])
def test_no_block_is_read_over_before_it_has_been_joined(build, tools, rng, how, threads, device):
    relation = tools.make_relation(rng, "int64", np.repeat(np.arange(800), rng.choice([0, 1, 30], 800)), 40)
    stream = tools.make_stream(rng, "int64", rng.integers(-1, 801, 900))
    case = tools.Case(relation, stream, ["k"], [("s_k", "k")], unique=False, how=how)
    with build(relation, ["k"], page_size=4096) as table, reader_of(table, device) as reader:
        memory = tools.least_memory(SSIJ, table, case.on, reader=reader) + 8 * 4096
        join = make(table, how=how, memory=memory, reader=reader, threads=threads, input_threshold=200)
        outputs = [join.push(batch) for batch in stream.combine_chunks().to_batches(max_chunksize=150)]
        found = [result for output in (*outputs, join.finish()) for result in output]
    assert join.stats.join_phases > 1
    tools.assert_same_rows(pa.Table.from_batches(found, join.output_schema(stream.schema)), tools.expected(case))


@pytest.mark.parametrize("options", [{}, {"memory_split": 0.9}, {"cache_policy": "none"}, {"index": "paged"}])
def test_a_tuple_larger_than_the_memory_is_an_error_that_says_how_much_is_enough(table, options):
    batch = pa.record_batch({"s_k": [3], "text": ["x" * 300_000]})
    join = make(table, memory="128KiB", input_threshold=1, **options)
    with pytest.raises(MemoryBudgetError, match=r"one stream tuple of 30\d+ bytes") as error:
        join.push(batch).drain()
    with make(table, memory=error.value.least, input_threshold=1, **options) as join:
        assert join.push(batch).drain() + join.finish().drain() == 1


@pytest.mark.parametrize("name", ["max_scan", "input_threshold", "stream_threshold", "threads"])
def test_parameters_below_one_are_refused(table, name):
    with pytest.raises(JoinInputError, match=name):
        make(table, **{name: 0})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cache_policy", "mru", "'utility' or 'ageing' or 'lru' or 'none', not 'mru'"),
        ("read_plan", "best", "'optimal' or 'greedy', not 'best'"),
        ("cache_policy", ["lru"], r"not \['lru'\]"),
        ("record_tier", "no", "must be True or False, not 'no'"),
        ("deadline", 0, "a duration must be positive"),
        ("memory_split", 1.0, "at least 0 and below 1, not 1.0"),
        ("memory_split", "half", "at least 0 and below 1, not 'half'"),
    ],
)
def test_an_unknown_variant_names_the_known_ones(table, name, value, message):
    with pytest.raises(JoinInputError, match=f"`{name}`.*{message}"):
        make(table, **{name: value})


def test_an_unknown_option_names_the_known_ones(table):
    with pytest.raises(TypeError, match=r"no parameter 'max_scam' .did you mean 'max_scan'"):
        make(table, max_scam=3)
    with pytest.raises(TypeError, match=r"'dedline' .did you mean 'deadline'.*; it has table, on, how, memory, deadl"):
        make(table, dedline=1)


def test_memory_for_a_cache_that_is_none_is_refused(table):
    with pytest.raises(JoinInputError, match="without a cache"):
        make(table, cache_policy="none", memory_split=0.5)


def test_without_a_cache_every_tuple_waits_for_its_page(table):
    join = make(table, input_threshold=1, cache_policy="none")
    for _ in range(2):
        join.push(stream_of([5])).drain()
        join.flush().drain()
    assert join.stats.pages_read == 2
    assert (join.stats.hit_ratio, join.stats.pages_cached, join.stats.memory.cache) == (0.0, 0, 0)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_a_fixed_split_neither_lends_nor_takes(table, share):
    memory = 4096 * 60 + table.snapshot().index_nbytes + 20_000
    join = make(table, memory=memory, memory_split=share, input_threshold=1, stream_threshold=100_000)
    at_first = join.stats.memory.cache
    free = memory - at_first - sum(map(join.algorithm.budget.held, ("index", "workspace", "read_buffer", "statistics")))
    assert share - 0.1 < at_first / (at_first + free) <= share
    seen = set()
    for _ in range(4):
        join.push(stream_of(range(0, KEYS, 3))).drain()
        seen.add(join.stats.memory.cache)
    join.flush().drain()
    assert seen == {at_first}
    assert join.stats.memory.cache == at_first
    assert join.stats.pages_evicted == 0 or join.stats.pages_cached <= at_first // 4096


def test_tuples_that_arrive_during_a_join_phase_take_room_each(table):
    memory = 4096 * 40 + table.snapshot().index_nbytes + 20_000
    join = make(table, memory=memory, input_threshold=1, stream_threshold=100_000)
    join.push(stream_of(range(0, KEYS, 2))).drain()
    join.flush().drain()
    join.push(stream_of(range(1, KEYS, 2))).drain()
    flushed = iter(join.flush())
    next(flushed)
    before = join.algorithm.budget.available + join.stats.memory.cache
    arriving = [stream_of([key] * 500) for key in (3, 5)]
    for batch in arriving:
        join.push(batch)
    waiting = sum(batch.nbytes for batch in arriving)
    assert join.algorithm.budget.available >= min(waiting, before)
    assert join.flush().drain() > 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    how=st.sampled_from(["inner", "left"]),
    share=st.sampled_from([0.2, 0.5, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_candidate_pages_may_be_split_between_cache_and_disk_anyhow(build, tools, how, share, seed):
    rng = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(12), rng.choice([0, 1, 30, 700], 12))
    relation = tools.make_relation(rng, "int64", numbers, 40)
    stream = tools.make_stream(rng, "int64", rng.integers(-1, 13, 60))
    case = tools.Case(relation, stream, ["k"], [("s_k", "k")], unique=False, how=how)
    batch = stream.combine_chunks().to_batches()[0]
    with build(relation, ["k"], page_size=4096) as table:
        join = make(table, how=how, memory="4MiB", input_threshold=1, stream_threshold=1000)
        for part in (batch.slice(0, 20), batch):
            join.push(part).drain()
            join.flush().drain()
        leaves = np.arange(len(table.snapshot().leaf_pages))
        join.store.cache.remove(leaves[rng.random(len(leaves)) < share])
        outputs = [join.push(batch.slice(0, 30)), join.push(batch.slice(30))]
        found = [result for output in (*outputs, join.finish()) for result in output]
    got = pa.Table.from_batches(found, join.output_schema(stream.schema))
    tools.assert_same_rows(got, tools.expected(case))


def test_many_small_online_phases_leave_few_chunks(table):
    join = make(table, memory="16MiB", input_threshold=1, stream_threshold=100_000)
    for start in range(300):
        join.push(stream_of([(7 * start) % KEYS], start)).drain()
    assert len(join.store.stream.chunks) < 30
    rows = results(join.finish())
    assert sorted(row["id"] for row in rows) == list(range(300))
    assert all(int(row["pad"]) == row["s_k"] for row in rows)


@pytest.mark.parametrize("how", ["inner", "left"])
def test_many_tuples_that_span_leaves_leave_few_chunks_too(table, how):
    join = SSIJ(table, Band("s_k", "k", 40, 40), how, "16MiB", input_threshold=1, stream_threshold=100_000)
    keys = [(70 * start) % (KEYS + 400) for start in range(300)]
    for at, key in enumerate(keys):
        join.push(stream_of([key], at)).drain()
    chunks = join.store.stream.chunks
    assert any(not chunk.simple for chunk in chunks)
    assert len(chunks) < 60
    rows = results(join.finish())
    expected = {(at, other) for at, key in enumerate(keys) for other in range(max(0, key - 40), min(KEYS, key + 41))}
    unmatched = {at for at, key in enumerate(keys) if key - 40 >= KEYS} if how == "left" else set()
    assert len(rows) == len(expected) + len(unmatched)
    assert {(row["id"], int(row["pad"])) for row in rows if row["pad"] is not None} == expected
    assert {row["id"] for row in rows if row["pad"] is None} == unmatched
    assert join.stats.rows_done == 300


def test_a_slice_of_a_large_batch_is_copied_when_it_has_to_wait(table):
    large = stream_of(range(100_000))
    join = make(table, input_threshold=10)
    join.push(large.slice(5, 3)).drain()
    (rows,) = (batch for batch, _ in join.store.input._batches)
    assert rows.get_total_buffer_size() < 1000


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_batches_are_joined_in_parts(table, rng, how, threads):
    join = make(table, memory="64MiB", how=how, threads=threads, columns=[], record_tier=False)
    keys = rng.integers(0, KEYS + 1000, 70_000)
    join.push(stream_of(range(KEYS))).drain()
    join.flush().drain()
    result = pa.Table.from_batches([*join.push(stream_of(keys)), *join.finish()])
    wanted = np.arange(len(keys)) if how == "left" else np.flatnonzero(keys < KEYS)
    assert result["id"].to_pylist() == wanted.tolist(), "in the order of the stream"


def test_pages_that_can_all_be_cached_are_read_as_soon_as_waiting_has_cost_as_much(table):
    join = make(table, input_threshold=1, memory="8MiB", record_tier=False)
    batches = [stream_of([key] * 20_000) for key in (7, 8)]
    assert join.push(batches[0]).drain() == 20_000, "rather than wait for hundreds of thousands more"
    assert join.push(batches[1]).drain() == 20_000
    assert (join.stats.join_phases, join.stats.pages_wanted) == (1, 1)
