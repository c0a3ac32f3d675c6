"""Row tier of SSIJ: the same results once all rows are beside their pages, and memory that it gives back."""

import contextlib
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, Band
from headrace.joins.workers import Workers

SEEDS = st.integers(0, 2**32 - 1)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
WORLDS = {
    "seed": SEEDS, "shape": st.sampled_from(["even", "bunched", "ends"]), "how": st.sampled_from(["inner", "left"]),
    "nulls": st.sampled_from([0, 0.2]), "threads": st.sampled_from([1, 2]), "rows": st.integers(1, 3000),
}  # fmt: skip


def relation(rng, keys, nulls):
    """A table with columns of all fixed widths."""
    rows = len(keys)

    def some(values):
        return pa.array(values, mask=rng.random(rows) < nulls)

    return pa.table({
        "k": keys,
        "same": some(np.full(rows, -7)),
        "small": some(rng.integers(-9, 9, rows).astype(np.int8)),
        "any": some(rng.integers(LOWEST, HIGHEST, rows)),
        "price": some([Decimal(int(key)) * 10**9 for key in keys]).cast(pa.decimal128(38, 2)),
        "flag": some(rng.random(rows) < 0.5),
        "ratio": some(rng.random(rows)),
    })  # fmt: skip


@contextlib.contextmanager
def world(tools, build, seed, shape, nulls, rows):
    """Yield a generator of random numbers, keys, a relation with these keys, and its table."""
    rng = np.random.default_rng(seed)
    keys = tools.unique_keys(rng, shape, rows)
    source = relation(rng, keys, nulls)
    with build(source, ["k"], unique=True, page_size=4096) as table:
        yield rng, keys, source, table


def stream_of(rng, keys, rows):
    """Keys of the table, keys beside them, and nulls."""
    values = rng.choice(keys, rows).astype(object) + rng.choice([0, 0, 0, 1, -1], rows)
    kept = [int(value) if LOWEST <= value <= HIGHEST else None for value in values]
    return pa.record_batch({"at": np.arange(rows), "s": pa.array(kept, pa.int64(), mask=rng.random(rows) < 0.1)})


def fill(join, keys):
    """Have all pages cached and all rows put into the tier."""
    ask = pa.record_batch({"at": np.arange(len(keys)), "s": keys})
    for _ in range(4):
        join.push(ask).drain()
        join.flush().drain()


def cache_a_page(join, ask):
    """Have one page cached. Then the next scan caches the others, and does not move their rows."""
    join.push(ask.slice(0, 1)).drain()
    join.flush().drain()


def joined(join, stream):
    batches = [*join.push(stream), *join.flush()]
    return pa.Table.from_batches(batches, join.output_schema(stream.schema)).sort_by("at")


def oracle(stream, source, how, names):
    kind = "inner" if how == "inner" else "left outer"
    return pa.table(stream).join(source, "s", "k", kind).select(names).sort_by("at")


@settings(max_examples=40, deadline=None)
@given(**WORLDS)
def test_results_are_those_of_arrow(tools, build, seed, shape, how, nulls, threads, rows):
    with world(tools, build, seed, shape, nulls, rows) as (rng, keys, source, table):
        join = SSIJ(table, [("s", "k")], how, "32MiB", threads=threads)
        fill(join, keys)
        assert join.store.tiers.rows.ready
        assert 0 < join.stats.memory.rows < join.stats.memory.used <= join.stats.memory.limit
        stream = stream_of(rng, keys, 2000)
        before = join.stats
        found = joined(join, stream)
        wanted = oracle(stream, source, how, found.column_names)
        assert found.equals(wanted.cast(found.schema))
        counted = join.stats - before
        assert (counted.rows_done, counted.rows_cached, counted.rows_out) == (2000, 2000, len(found))


def test_a_large_batch_is_joined_in_parts(tools, build):
    rng = np.random.default_rng(1)
    keys = tools.unique_keys(rng, "even", 20_000)
    source = relation(rng, keys, 0)
    with build(source, ["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], "left", "64MiB", input_threshold=1, threads=3)
        fill(join, keys)
        assert join.store.tiers.rows.ready
        stream = stream_of(rng, keys, 150_000)
        batches = list(join.push(stream))
        assert len(batches) > 1
        found = pa.Table.from_batches(batches)
        assert found["at"].equals(pa.chunked_array([stream["at"]]))
        assert found.equals(oracle(stream, source, "left", found.column_names).cast(found.schema))


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, threads=st.sampled_from([1, 2]))
def test_changes_are_seen(tools, build, seed, threads):
    rng = np.random.default_rng(seed)
    value = {int(key): 0 for key in tools.unique_keys(rng, "even", 3000)}
    keys = np.array(list(value))
    with build(pa.table({"k": keys, "v": np.zeros(len(keys), np.int64)}), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, [("s", "k")], "left", "32MiB", threads=threads)
        for version in range(1, 4):
            fill(join, keys)
            assert join.store.tiers.rows.ready
            changed, gone = rng.choice(keys, 9), int(rng.choice(keys))
            changed = np.unique(changed[changed != gone])
            join.apply(pa.table({"k": changed, "v": np.full(len(changed), version)}), pa.table({"k": [gone]})).drain()
            assert join.stats.memory.rows == 0
            value.update(dict.fromkeys(changed.tolist(), version))
            value.pop(gone, None)
            found = joined(join, stream_of(rng, keys, 2000))
            assert found["v"].to_pylist() == [value.get(key) for key in found["s"].to_pylist()]


def test_a_table_that_changes_all_the_time_stays_in_its_pages(build):
    keys = np.arange(3000)
    with build(pa.table({"k": keys, "v": keys}), ["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], memory="32MiB", input_threshold=1)
        for version in range(5):
            join.push(pa.record_batch({"at": keys[:600], "s": keys[:600]})).drain()
            join.flush().drain()
            join.apply(pa.table({"k": [5], "v": [version]})).drain()
            join.push(pa.record_batch({"at": keys[:100], "s": keys[:100]})).drain()
            assert join.stats.memory.rows == 0
        fill(join, keys)
        assert join.store.tiers.rows.ready


def test_refresh_sees_the_commits_of_others(build):
    keys = np.arange(3000)
    with build(pa.table({"k": keys, "v": keys}), ["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], memory="32MiB")
        fill(join, keys)
        table.apply(pa.table({"k": [5], "v": [-1]}))
        ask = pa.record_batch({"at": [0], "s": [5]})
        assert joined(join, ask)["v"].to_pylist() == [5]
        join.refresh().drain()
        assert joined(join, ask)["v"].to_pylist() == [-1]


def test_the_tier_gives_way_before_a_page_does(build):
    keys = np.arange(100_000)
    with build(pa.table({"k": keys, "v": keys}), ["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], memory="8MiB", input_threshold=10)
        ask = pa.record_batch({"text": ["x"] * len(keys), "s": keys})
        cache_a_page(join, ask)
        for _ in range(4):
            join.push(ask).drain()
            join.flush().drain()
        assert join.store.tiers.rows.ready
        pages, tier = join.stats.pages_cached, join.stats.memory.rows
        size = join.algorithm.budget.available + join.store.cache.available * 8192 + tier // 2
        large = pa.record_batch({"text": ["y" * size], "s": [7]})
        rows = [*join.push(large), *join.flush()]
        assert [row["v"].to_pylist() for row in rows] == [[7]]
        assert (join.stats.memory.rows, join.stats.pages_cached) == (0, pages)


def test_keys_that_share_a_home_are_left_in_their_pages(build):
    factor = 0x9E3779B97F4A7C15
    keys = np.array(sorted(at * pow(factor, -1, 2**64) % 2**64 for at in range(3000)), np.uint64)
    source = pa.table({"k": keys, "v": np.arange(3000)})
    with build(source, ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, [("s", "k")], memory="32MiB")
        fill(join, keys)
        found = joined(join, pa.record_batch({"at": np.arange(3000), "s": keys}))
        assert found["v"].to_pylist() == list(range(3000))


def test_only_pages_with_unique_keys_and_fixed_columns_have_it(build):
    rows = pa.table({"k": np.arange(1000), "v": np.arange(1000), "text": ["a"] * 1000})

    def row_tier(table, on="k", **options):
        return SSIJ(table, on, memory="32MiB", **options).store.tiers.rows

    with build(rows, ["k"], unique=True) as table:
        assert row_tier(table) is None
        assert row_tier(table, columns=["v"]) is not None
        assert row_tier(table, columns=["v"], record_tier=False) is None
        assert row_tier(table, columns=["v"], memory_split=0.5) is None
        assert row_tier(table, Band("s", "k", 5, 5), columns=["v"]) is None
    with build(rows, ["k"]) as repeated:
        assert row_tier(repeated, columns=["v"]) is None


def test_memory_for_the_pages_alone_is_not_enough(build):
    keys = np.arange(200_000)
    with build(pa.table({"k": keys, "v": keys * 7919}), ["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], memory="3MiB")
        fill(join, keys)
        assert join.stats.pages_cached == len(table.snapshot().leaf_pages)
        assert join.stats.memory.rows == 0


def test_workers_give_results_in_order_and_the_first_error():
    workers = Workers(3)
    assert list(workers.stream(lambda item: item * 2, range(20))) == list(range(0, 40, 2))
    assert list(workers.stream(str, [])) == []
    with pytest.raises(ZeroDivisionError):
        list(workers.stream(lambda item: 1 // (item - 19), range(20)))


@pytest.mark.parametrize(("bunch", "ascending"), [(1, True), (100, False)])
def test_rows_are_in_key_order_unless_keys_come_in_bunches(build, bunch, ascending):
    rng = np.random.default_rng(5)
    start = np.arange(0, 20_000, bunch)
    keys = (start[:, None] * 10 + np.arange(bunch)).ravel()
    source = relation(rng, keys, 0.1)
    with build(source, ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, [("s", "k")], "left", "32MiB")
        fill(join, keys)
        tier = join.store.tiers.rows
        assert tier.ready
        assert tier._table.ascending == ascending
        stream = stream_of(rng, keys, 5000)
        found = joined(join, stream)
        assert found.equals(oracle(stream, source, "left", found.column_names).cast(found.schema))


def test_the_batch_after_a_scan_fills_the_tier_and_a_change_makes_it_wait(build):
    rows = 20_000
    keys = np.arange(rows)
    with build(pa.table({"k": keys, "v": keys * 7}), ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, [("s", "k")], memory="32MiB")
        few = pa.record_batch({"s": keys[:: rows // 500]})
        join.push(few).drain()
        join.flush().drain()
        assert join.stats.memory.rows == 0  # a stream that ends here has no use for it
        join.push(few).drain()
        join.flush().drain()
        assert join.store.tiers.rows.ready
        join.apply(pa.table({"k": [5], "v": [1]})).drain()
        join.push(few).drain()
        join.flush().drain()
        assert join.stats.memory.rows == 0
        assert joined_values(join, [4, 5, 6]) == [28, 1, 42]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_fill_parts_of_the_tier_and_the_pages_between_them(build, threads):
    rng = np.random.default_rng(8)
    keys = np.unique(rng.integers(0, 10**6, 1_000_000))
    values = rng.integers(0, 10**9, len(keys))
    with build(pa.table({"k": keys, "v": values}), ["k"], unique=True, page_size=4096) as table:
        assert len(table.snapshot().leaf_pages) > 4 * 256  # enough for four parts
        join = SSIJ(table, [("s", "k")], "left", "64MiB", threads=threads)
        join.push(pa.record_batch({"s": keys[::7]})).drain()
        join.flush().drain()
        assert joined_values(join, keys[:2]) == values[:2].tolist()
        assert join.store.tiers.rows.ready
        assert join.store.tiers.rows._table.ascending
        before = join.stats
        assert np.array_equal(joined_values(join, keys), values)
        assert set(joined_values(join, np.setdiff1d(np.arange(10**6), keys))) == {None}
        assert (join.stats - before).pages_read == 0


@pytest.mark.parametrize(("every", "ready"), [(1, True), (2, False)])
def test_a_scan_of_nearly_all_pages_reads_the_others_too(build, every, ready):
    """One missing page would keep all rows in their pages."""
    keys = np.arange(100_000)
    with build(pa.table({"k": keys, "v": keys * 7}), ["k"], unique=True, page_size=4096) as table:
        leaf, _ = table.snapshot().locate(table.snapshot().codec.encode(pa.table({"k": keys})))
        leaves = len(table.snapshot().leaf_pages)
        wanted = keys[(leaf % 5 != 2) & (leaf % every == 0)]
        join = SSIJ(table, [("s", "k")], "left", "64MiB")
        cache_a_page(join, pa.record_batch({"s": wanted}))
        assert sorted(joined_values(join, wanted)) == (wanted * 7).tolist()
        assert (join.stats.pages_cached == leaves) == ready
        assert sorted(joined_values(join, keys[::-1])) == (keys * 7).tolist()
        assert joined_values(join, keys[::-1]) == (keys[::-1] * 7).tolist()
        assert join.store.tiers.rows.ready
        assert join.stats.memory.peak <= join.stats.memory.limit


def joined_values(join, keys):
    return pa.Table.from_batches([*join.push(pa.record_batch({"s": keys})), *join.flush()])["v"].to_pylist()
