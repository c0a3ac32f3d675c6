"""SSIJ with a table's negative filter: the same results, fewer reads, within the account."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ
from headrace.joins.ssij.memory import filter_tier as _filter
from headrace.storage import Table
from headrace.storage.filter import filter_path

KEYS = 60_000


def run(join, batches):
    parts = [result for batch in batches for result in join.push(batch)]
    return [*parts, *join.finish()]


@settings(max_examples=15)
@given(data=st.data(), spare=st.integers(0, 200_000), threshold=st.sampled_from([1, 20, None]), bits=st.integers(4, 16))
def test_results_are_those_of_the_oracle(build, any_case, tools, data, spare, threshold, bits):
    case = data.draw(any_case)
    options = {"unique": case.unique, "page_size": case.page_size, "filter_bits": bits}
    with build(case.relation, case.key, **options) as table:
        memory = tools.least_memory(SSIJ, table, case.on) + spare
        options = {"memory": memory, "input_threshold": threshold, "stream_threshold": threshold}
        result, join = tools.run(SSIJ, case, table, **options)
        tools.assert_same_rows(result, tools.expected(case))
        assert join.stats.memory.peak <= memory
        assert join.stats.rows_done == len(case.stream)
        table.drop_filter()


@pytest.fixture
def table(tmp_path):
    rows = pa.table({"k": np.arange(0, 2 * KEYS, 2), "v": np.arange(KEYS)})
    with Table.build(tmp_path / "t", rows, key="k", unique=True, page_size=4096, filter_bits=8) as table:
        yield table


def batches(rng, absent, number=12, size=20_000):
    """Yield batches of which a share asks for odd keys."""
    for _ in range(number):
        keys = 2 * rng.integers(0, KEYS, size) + (rng.random(size) < absent)
        yield pa.record_batch({"k": keys})


def assert_right(results, given):
    got = pa.Table.from_batches(results)
    wanted = np.concatenate([batch["k"].to_numpy() for batch in given])
    keys, found = got["k"].to_numpy(), got["v"]
    assert np.array_equal(np.sort(keys), np.sort(wanted))
    assert np.array_equal(np.asarray(found.is_valid()), keys % 2 == 0)
    present = keys % 2 == 0
    assert np.array_equal(found.drop_null().to_numpy(), keys[present] // 2)


def test_absent_keys_cost_few_reads_and_are_counted(table):
    given = list(batches(np.random.default_rng(1), 0.99))
    join = SSIJ(table, "k", "left", "600KiB")
    assert_right(run(join, given), given)
    stats = join.stats
    assert stats.rows_filtered > 0.6 * stats.rows_in
    assert 0 < stats.false_positives < 0.1 * stats.rows_filtered
    assert stats.rows_cached >= stats.rows_filtered
    table.drop_filter()
    without = SSIJ(table, "k", "left", "600KiB")
    assert_right(run(without, given), given)
    assert stats.pages_read < without.stats.pages_read
    assert (without.stats.rows_filtered, without.stats.filter_bits, without.stats.memory.filter) == (0, 0, 0)


def test_what_the_filter_takes_is_charged_and_leaves_a_quarter_for_the_rest(table):
    for memory in ("300KiB", "400KiB", "600KiB"):
        use = SSIJ(table, "k", memory=memory).stats.memory
        assert 0 < use.filter <= use.limit * 3 // 4
    assert SSIJ(table, "k", memory="90KiB").stats.memory.filter == 0


def test_leaves_whose_segments_are_lost_are_known_again_once_they_have_been_read(table):
    path = filter_path(table.path)
    content = bytearray(path.read_bytes())
    content[200:] = bytes(len(content) - 200)
    path.write_bytes(content)
    rng = np.random.default_rng(2)
    join = SSIJ(table, "k", "left", "600KiB", stream_threshold=20_000)
    first, second = list(batches(rng, 0.9, 6)), list(batches(rng, 0.9, 6))
    results = [result for batch in first for result in join.push(batch)]
    before = join.stats
    assert_right(results + run(join, second), first + second)
    assert (join.stats - before).rows_filtered > 0.7 * (join.stats - before).rows_in


def test_changes_are_known_after_they_were_made_through_the_join_and_elsewhere(table):
    rng = np.random.default_rng(3)
    join = SSIJ(table, "k", "left", "600KiB", stream_threshold=20_000)
    [batch] = batches(rng, 0.9, 1)
    join.push(batch).drain()
    odd = np.arange(1, 2 * KEYS, 2)
    join.apply(upserts=pa.table({"k": odd[::3], "v": odd[::3]}), deletes=pa.table({"k": odd[::3] - 1})).drain()
    with Table.open(table.path) as other:
        other.apply(upserts=pa.table({"k": odd[1::3], "v": odd[1::3]}))
    join.refresh().drain()
    got = pa.Table.from_batches([*join.push(pa.record_batch({"k": np.arange(2 * KEYS)})), *join.finish()])
    there = np.zeros(2 * KEYS, dtype=bool)
    there[::2] = True
    there[odd[::3]], there[odd[::3] - 1], there[odd[1::3]] = True, False, True
    found = np.zeros(2 * KEYS, dtype=bool)
    found[got.filter(got["v"].is_valid())["k"].to_numpy()] = True
    assert np.array_equal(found, there)
    assert join.stats.memory.peak <= join.stats.memory.limit


def test_a_join_over_an_old_snapshot_is_right_while_the_filter_goes_on(table):
    held, reader = table.snapshot(), table.reader()
    with Table.open(table.path) as other:
        other.apply(upserts=pa.table({"k": np.arange(1, 2 * KEYS, 2), "v": np.zeros(KEYS, dtype=np.int64)}))
    given = list(batches(np.random.default_rng(4), 0.5, 2))
    join = SSIJ(held, "k", "left", "600KiB", reader=reader)
    assert_right(run(join, given), given)


def test_few_absent_keys_deactivate_the_filter_and_many_unmatched_tuples_activate_it(table, monkeypatch):
    monkeypatch.setattr(_filter, "_EPOCH", 20_000)
    rng = np.random.default_rng(5)
    join = SSIJ(table, "k", "left", "600KiB", stream_threshold=10_000)
    for batch in batches(rng, 0.0, 4):
        join.push(batch).drain()
    assert (join.stats.memory.filter, join.stats.filter_bits) == (0, 0)
    for batch in batches(rng, 0.9, 6):
        join.push(batch).drain()
    before = join.stats
    assert before.memory.filter > 0
    for batch in batches(rng, 0.9, 4):
        join.push(batch).drain()
    assert (join.stats - before).rows_filtered > 0.5 * (join.stats - before).rows_in
    join.finish().drain()
