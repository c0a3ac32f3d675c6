"""A join whose memory has no room for all inner nodes reads them when it needs them, and returns the same rows."""

import re
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, AsOf, Band
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read import PagedSnapshot
from headrace.storage.table import Table

ROWS = 1_000_000
PAGE = 4096


@pytest.fixture(scope="module")
def table(build):
    """A table whose inner nodes take far more memory than what a join needs beside them."""
    keys = np.arange(ROWS)
    rows = pa.table({"k": keys, "v": keys * 2_654_435_761 & (2**62 - 1), "t": (keys % 7).astype(str).astype(object)})
    with build(rows, ["k"], unique=True, page_size=PAGE) as table:
        yield table


def values(keys):
    return keys * 2_654_435_761 & (2**62 - 1)


def joined(join, keys, size):
    results = []
    for start in range(0, len(keys), size):
        part = keys[start : start + size]
        results += join.push(pa.record_batch({"key": part, "number": np.arange(start, start + len(part))}))
        use = join.stats.memory
        assert use.used <= use.peak <= use.limit
    results += join.finish()
    return pa.Table.from_batches(results).sort_by("number")


def test_it_works_with_the_least_memory_that_the_message_names(table, tools):
    on = [("key", "k")]
    whole, paged = (tools.least_memory(SSIJ, table, on, index=index) for index in ("whole", "paged"))
    assert tools.least_memory(SSIJ, table, on) == paged < whole / 2
    with pytest.raises(MemoryBudgetError, match=f"{paged} bytes"):
        SSIJ(table, on=on, memory=paged - 1)
    keys = np.random.default_rng(1).integers(-9, ROWS + 9, 3000)
    with SSIJ(table, on=on, how="left", memory=paged) as join:
        assert isinstance(join.store.snapshot, PagedSnapshot)
        found = joined(join, keys, 1000)
        assert join.stats.nodes_read > 0
        assert join.stats.memory.peak <= paged
    assert found["key"].to_pylist() == keys.tolist()
    wanted = [int(values(key)) if 0 <= key < ROWS else None for key in keys]
    assert found["v"].to_pylist() == wanted


def test_the_least_memory_is_as_guarantees_md_says(table, tools):
    nodes = sum(len(level.pages) for level in table.snapshot().levels)
    assert nodes > 20
    least = tools.least_memory(SSIJ, table, [("key", "k")])
    assert 9 * PAGE <= least <= 9 * PAGE + 45 * nodes + 22 * 1024
    assert 41 * table.stats.leaves > least / 2


def test_all_nodes_are_in_memory_as_soon_as_they_fit(table, tools):
    whole = tools.least_memory(SSIJ, table, [("key", "k")], index="whole")
    with SSIJ(table, on=[("key", "k")], memory=whole) as join:
        assert not isinstance(join.store.snapshot, PagedSnapshot)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    how=st.sampled_from(["inner", "left"]),
    spare=st.integers(0, 200_000),
    size=st.sampled_from([7, 500, 4000]),
    skew=st.booleans(),
    threads=st.sampled_from([1, 3]),
    columns=st.sampled_from([["v"], ["v", "t"]]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_are_those_of_the_table(table, tools, how, spare, size, skew, threads, columns, seed):
    rng = np.random.default_rng(seed)
    keys = rng.integers(-ROWS // 20, ROWS, 2 * size)
    if skew:
        keys = np.exp(rng.random(2 * size) * np.log(ROWS)).astype(np.int64)
    memory = tools.least_memory(SSIJ, table, [("key", "k")]) + spare
    with SSIJ(table, on=[("key", "k")], how=how, memory=memory, threads=threads, columns=columns) as join:
        found = joined(join, keys, size)
    present = (keys >= 0) & (keys < ROWS)
    numbers = np.arange(len(keys)) if how == "left" else np.flatnonzero(present)
    assert found["number"].to_pylist() == numbers.tolist()
    assert found["v"].to_pylist() == [int(values(keys[n])) if present[n] else None for n in numbers]
    if "t" in columns:
        assert found["t"].to_pylist() == [str(keys[n] % 7) if present[n] else None for n in numbers]


@pytest.mark.parametrize("deadline", [None, 0.01])
def test_a_deadline_is_kept_or_missed_without_losing_a_tuple(table, tools, deadline):
    now = [0.0]
    memory = tools.least_memory(SSIJ, table, [("key", "k")]) + 50_000
    rng, count = np.random.default_rng(5), 0
    with SSIJ(table, on=[("key", "k")], memory=memory, deadline=deadline, clock=lambda: now[0]) as join:
        for _ in range(30):
            now[0] += 0.003
            count += join.push(pa.record_batch({"key": rng.integers(0, ROWS, 200)})).drain()
            count += join.tick().drain()
        if deadline is not None:
            assert count > 0
        assert count + join.finish().drain() == 30 * 200


def test_ranges_and_nearest_rows(table, tools):
    rng = np.random.default_rng(6)
    keys = rng.integers(0, ROWS, 400)
    for predicate, wanted in (
        (Band("key", "k", 2, 1), [[key + d for d in (-2, -1, 0, 1) if 0 <= key + d < ROWS] for key in keys]),
        (AsOf("key", "k", strict=True), [[key - 1] if key else [] for key in keys]),
    ):
        memory = tools.least_memory(SSIJ, table, predicate) + 30_000
        with SSIJ(table, on=predicate, memory=memory, columns=["k"]) as join:
            assert isinstance(join.store.snapshot, PagedSnapshot)
            found = joined(join, keys, 100)
        pairs = sorted(zip(found["number"].to_pylist(), found["k"].to_pylist(), strict=True))
        assert pairs == [(n, key) for n, matches in enumerate(wanted) for key in sorted(matches)]


def test_a_range_over_more_leaves_than_there_is_room_for_is_refused_by_name(table, tools):
    predicate = Band("key", "k", ROWS, ROWS)
    memory = tools.least_memory(SSIJ, table, predicate)
    with (
        SSIJ(table, on=predicate, memory=memory, columns=["k"]) as join,
        pytest.raises(MemoryBudgetError, match="one stream tuple"),
    ):
        joined(join, np.array([5]), 1)


def test_a_table_that_outgrows_the_memory_is_paged_from_then_on(build):
    rows = pa.table({"k": np.arange(1000), "v": np.arange(1000)})
    with build(rows, ["k"], unique=True, page_size=PAGE) as table:
        join = SSIJ(table, on="k", how="left", memory=75_000)
        assert join.push(pa.record_batch({"k": np.arange(0, 2000, 5)})).drain() + join.flush().drain() == 400
        assert not isinstance(join.store.snapshot, PagedSnapshot)
        more = np.arange(1000, 700_000)
        join.apply(pa.table({"k": more, "v": more})).drain()
        assert isinstance(join.store.snapshot, PagedSnapshot)
        found = [*join.push(pa.record_batch({"k": np.arange(0, 700_000, 401)})), *join.flush()]
        assert pa.Table.from_batches(found)["v"].null_count == 0
        join.apply(deletes=pa.table({"k": more})).drain()
        assert not isinstance(join.store.snapshot, PagedSnapshot)
        found = [*join.push(pa.record_batch({"k": np.arange(0, 2000, 5)})), *join.finish()]
        assert pa.Table.from_batches(found)["v"].null_count == 200
        assert join.stats.memory.peak <= 75_000


def test_a_table_that_outgrows_even_that_ends_the_join_with_the_memory_for_a_new_one(build, tools):
    rows = pa.table({"k": np.arange(1000), "v": np.arange(1000)})
    with build(rows, ["k"], unique=True, page_size=PAGE) as table:
        memory = tools.least_memory(SSIJ, table, "k") + 1000
        join = SSIJ(table, on="k", how="left", memory=memory)
        more = np.arange(1000, 700_000)
        with pytest.raises(MemoryBudgetError, match="at least") as error:
            join.apply(pa.table({"k": more, "v": more})).drain()
        memory = int(re.search(r"\((\d+) bytes\)", str(error.value))[1])
        with SSIJ(table, on="k", how="left", memory=memory) as join:
            found = [*join.push(pa.record_batch({"k": np.arange(0, 700_200, 401)})), *join.finish()]
        assert pa.Table.from_batches(found)["v"].null_count == 1


@pytest.mark.parametrize("step", [1, 997])
@pytest.mark.parametrize("spare", [0, 100_000])
def test_leaves_may_lie_on_disk_in_any_order(build, tools, step, spare):
    """A small commit relocates some leaves, and a large one writes all inner nodes anew."""
    keys = np.arange(100_000)
    with build(pa.table({"k": keys, "v": keys}), ["k"], unique=True, page_size=PAGE) as table:
        for start in (0, 3, 500):
            changed = np.arange(start, 100_000, 7)[:: step * 3]
            table.apply(pa.table({"k": changed, "v": -changed}))
            keys = np.where(np.isin(np.arange(100_000), changed), -np.arange(100_000), keys)
        memory = tools.least_memory(SSIJ, table, "k", index="paged") + spare
        with SSIJ(table, on="k", memory=memory, index="paged") as join:
            assert not join.store.snapshot.in_key_order
            asked = np.random.default_rng(8).permutation(100_000)[:20_000]
            found = []
            for part in np.array_split(asked, 20):
                found += join.push(pa.record_batch({"k": part}))
            found += join.finish()
        rows = pa.Table.from_batches(found).sort_by("k")
        assert rows["v"].to_pylist() == keys[np.sort(asked)].tolist()


def test_pages_of_its_snapshot_are_not_reused_by_a_writer(build, tools):
    """The table moves on, and other commits free its pages, while the join still reads its old state."""
    rows = pa.table({"k": np.arange(200_000), "v": np.zeros(200_000, dtype=np.int64)})
    with build(rows, ["k"], unique=True, page_size=PAGE) as table:
        join = SSIJ(table, on="k", memory=tools.least_memory(SSIJ, table, "k", index="paged") + 50_000, index="paged")
        with Table.open(table.path) as other:
            for version in range(1, 5):
                other.apply(pa.table({"k": np.arange(0, 200_000, 3), "v": np.full(66_667, version)}))
                table.refresh()
        found = [*join.push(pa.record_batch({"k": np.arange(0, 200_000, 77)})), *join.flush()]
        assert set(pa.Table.from_batches(found)["v"].to_pylist()) == {0}
        join.refresh().drain()
        found = [*join.push(pa.record_batch({"k": np.arange(0, 200_000, 77)})), *join.finish()]
        assert set(pa.Table.from_batches(found)["v"].to_pylist()) == {0, 4}


def test_operators_with_paged_nodes_may_run_side_by_side(table, tools):
    memory = tools.least_memory(SSIJ, table, [("key", "k")]) + 60_000
    counts = []

    def run(seed):
        keys = np.random.default_rng(seed).integers(0, ROWS, 2000)
        with SSIJ(table, on=[("key", "k")], memory=memory, columns=["v"]) as join:
            found = joined(join, keys, 500)
        counts.append(found["v"].to_pylist() == values(keys).tolist())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [True] * 3
