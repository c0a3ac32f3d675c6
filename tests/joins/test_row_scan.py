"""The first scan of SSIJ moves all rows into the row tier, or is given up; the results are the same."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from test_row_tier import WORLDS, oracle, stream_of, world

from headrace.joins import SSIJ
from headrace.storage.errors import CorruptPageError
from headrace.storage.format import _page_kernels
from headrace.storage.read import ReadQueue
from headrace.storage.read import read_queue as read_queue_module

ENOUGH = 8000  # tuples that pay for a scan of a few hundred pages


def scanning(table, how="left", memory="64MiB", **options):
    """Return an operator whose tuples wait in the stream buffer at once."""
    return SSIJ(table, [("s", "k")], how, memory, **{"input_threshold": 1, **options})


def joined(*outputs):
    return pa.Table.from_batches([batch for output in outputs for batch in output]).sort_by("at")


def check(found, stream, source, how="left"):
    assert found.equals(oracle(stream, source, how, found.column_names).cast(found.schema))


def wide_relation(rng, leaves=300, page_size=4096):
    """Columns of few bytes, on at least this many pages."""
    keys = np.arange(leaves * page_size // 8) * 3
    return pa.table({"k": keys, "v": rng.integers(0, 1000, len(keys)), "w": rng.integers(-9, 9, len(keys))})


@pytest.fixture
def wide(build):
    """Return a generator, such a relation, its keys, and its table."""
    rng = np.random.default_rng(3)
    source = wide_relation(rng)
    with build(source, ["k"], unique=True, page_size=4096) as table:
        yield rng, source, source["k"].to_numpy(), table


@settings(max_examples=12, deadline=None)
@given(**WORLDS)
def test_results_are_those_of_arrow(tools, build, seed, shape, how, nulls, threads, rows):
    with world(tools, build, seed, shape, nulls, rows) as (rng, keys, source, table):
        join = scanning(table, how, threads=threads)
        stream = stream_of(rng, keys, ENOUGH)
        check(joined(join.push(stream), join.flush()), stream, source, how)
        if shape == "even":
            assert join.store.tiers.rows.ready
        if join.store.tiers.rows.ready:
            assert (join.stats.pages_cached, join.stats.rows_cached) == (0, 0)
        again = stream_of(rng, keys, 1000)
        check(joined(join.push(again), join.flush()), again, source, how)
        assert join.stats.rows_done == ENOUGH + 1000


def test_tuples_that_waited_before_the_scan_are_joined_with_its_rows(wide):
    rng, source, keys, table = wide
    join = scanning(table)
    parts = [stream_of(rng, keys, 1500) for _ in range(6)]
    stream = pa.Table.from_batches(parts).combine_chunks()
    stream = stream.set_column(0, "at", pa.array(np.arange(len(stream)))).to_batches()[0]
    outputs = [list(join.push(stream.slice(0, 1500)))]
    assert join.stats.rows_held == join.store.stream.rows > 1000
    outputs += [list(join.push(stream.slice(at, 1500))) for at in range(1500, len(stream), 1500)]
    assert join.store.tiers.rows.ready
    assert join.store.stream.rows == 0
    check(joined(*outputs, join.flush()), stream, source)
    assert join.stats.join_phases == 1
    assert join.stats.memory.peak <= join.stats.memory.limit


@pytest.mark.parametrize(("column", "value"), [("v", None), ("v", 2**60), ("v", -(2**60)), ("w", 70_000), ("w", None)])
def test_a_scan_is_given_up_if_a_page_needs_wider_slots(build, column, value):
    rng = np.random.default_rng(4)
    source = wide_relation(rng)
    keys = source["k"].to_numpy()
    values = source[column].to_pylist()
    values[len(keys) // 240] = value  # in the second leaf, which no sample of 64 has
    source = source.set_column(source.schema.get_field_index(column), column, pa.array(values, pa.int64()))
    with build(source, ["k"], unique=True, page_size=4096) as table:
        join = scanning(table)
        stream = stream_of(rng, keys, 60_000)
        check(joined(join.push(stream), join.flush()), stream, source)
        leaves = len(table.snapshot().leaf_pages)
        assert leaves > 200
        assert (join.stats.pages_cached, join.stats.memory.rows) == (leaves, 0)
        assert leaves + 64 < join.stats.pages_read <= 3 * leaves + 64, "twice, and what was requested ahead"
        check(joined(join.push(stream), join.flush()), stream, source)
        assert join.store.tiers.rows.ready, "filled from the cached pages, which are all known by then"
        assert join.stats.memory.peak <= join.stats.memory.limit


def test_keys_that_collide_in_order_are_scattered_after_a_second_scan(build):
    """Separators alone do not show that the keys of a page are bunched."""
    rng = np.random.default_rng(5)
    start = np.arange(0, 60_000, 200)
    keys = (start[:, None] * 1000 + np.arange(200)).ravel()
    source = pa.table({"k": keys, "v": rng.integers(0, 99, len(keys))})
    with build(source, ["k"], unique=True, page_size=4096) as table:
        join = scanning(table)
        stream = stream_of(rng, keys, 30_000)
        for _ in range(3):
            check(joined(join.push(stream), join.flush()), stream, source)
        assert join.store.tiers.rows.ready


@pytest.mark.parametrize("how", ["inner", "left"])
def test_pages_out_of_key_order_and_dropped_leaves_are_scanned_too(wide, how):
    rng, source, keys, table = wide
    gone = np.concatenate([keys[:2000], keys[70_000:74_000], keys[-2000:]])
    changed = rng.choice(keys[3000:60_000], 3000, replace=False)
    table.apply(pa.table({"k": changed, "v": changed % 7, "w": changed % 5}), pa.table({"k": gone}))
    assert not table.snapshot().in_key_order
    source = pa.Table.from_batches(table.scan())
    join = scanning(table, how)
    stream = stream_of(rng, keys, 60_000)
    check(joined(join.push(stream), join.flush()), stream, source, how)
    assert join.store.tiers.rows.ready
    assert join.stats.pages_cached == 0


def test_a_commit_during_the_scan_is_seen_after_the_next_refresh(wide, monkeypatch):
    rng, source, keys, table = wide
    begin, commits = ReadQueue.begin, []

    def changing(queue, reads):
        changed = keys[len(commits) :: 9]
        commits.append(table.apply(pa.table({"k": changed, "v": -changed, "w": changed})))
        return begin(queue, reads)

    monkeypatch.setattr(ReadQueue, "begin", changing)
    join = scanning(table)
    stream = stream_of(rng, keys, 30_000)
    check(joined(join.push(stream), join.flush()), stream, source)
    assert join.store.tiers.rows.ready
    assert len(commits) > 1
    monkeypatch.undo()
    join.refresh().drain()
    newest = pa.Table.from_batches(table.scan())
    for _ in range(3):
        check(joined(join.push(stream), join.flush()), stream, newest)


def test_a_change_after_the_scan_is_seen_and_has_pages_cached(wide):
    rng, _, keys, table = wide
    join = scanning(table)
    stream = stream_of(rng, keys, 30_000)
    join.push(stream).drain()
    assert join.store.tiers.rows.ready
    for version in range(3):
        join.apply(pa.table({"k": keys[::50], "v": keys[::50] + version, "w": keys[::50]})).drain()
        assert join.stats.memory.rows == 0
        newest = pa.Table.from_batches(table.scan())
        check(joined(join.push(stream), join.flush()), stream, newest)
    assert join.stats.pages_cached > 0, "only the first scan caches none"


def test_a_damaged_page_ends_the_scan_and_the_join(wide, monkeypatch):
    rng, _, keys, table = wide
    checked, verify = [], _page_kernels.verify_pages

    def damaged(*args):
        checked.append(len(args[2]))
        return verify(*args) if len(checked) < 3 else 0

    monkeypatch.setattr(read_queue_module, "verify_pages", damaged)
    join = scanning(table, memory="8MiB")
    with pytest.raises(CorruptPageError, match="does not match"):
        join.push(stream_of(rng, keys, 30_000)).drain()
    assert len(checked) >= 3
    assert not join.store.tiers.rows.ready
    join.close()
    assert join.stats.memory.used == 0


@pytest.mark.parametrize(
    "options",
    [{"deadline": 3600.0}, {"stream_threshold": 10**9}, {"record_tier": False}, {"memory": "3MiB"}],
)
def test_there_is_no_such_scan(build, options):
    """Not with deadlines, whose steps are small; if join phases start at a given number; or without room for rows."""
    rng = np.random.default_rng(10)
    source = pa.table({"k": np.arange(200_000), "v": np.arange(200_000) * 7919})
    with build(source, ["k"], unique=True) as table:
        join = scanning(table, **options)
        stream = stream_of(rng, np.arange(200_000), 10_000)
        check(joined(join.push(stream), join.flush()), stream, source)
        assert join.stats.memory.rows == 0
        assert join.stats.pages_cached > 0
        assert join.stats.memory.peak <= join.stats.memory.limit


def test_few_tuples_are_not_worth_a_scan(build):
    source = wide_relation(np.random.default_rng(11))
    with build(source, ["k"], unique=True, page_size=4096) as table:
        join = scanning(table)
        stream = pa.record_batch({"at": np.arange(100), "s": source["k"].to_numpy()[::1000][:100]})
        check(joined(join.push(stream), join.flush()), stream, source)
        assert (join.stats.memory.rows, join.stats.pages_wanted) == (0, join.stats.pages_cached)


def test_batches_pushed_before_all_results_are_taken_come_after_them(wide):
    rng, source, keys, table = wide
    join = scanning(table)
    stream = stream_of(rng, keys, 200_000)
    output = join.push(stream.slice(0, 150_000))
    first = next(output)
    rest = [*join.push(stream.slice(150_000)), *join.flush()]
    assert list(output) == []
    check(joined([first, *rest]), stream, source)
    assert join.stats.memory.peak <= join.stats.memory.limit


def test_memory_that_tuples_take_from_the_rows_leaves_the_results_right(wide):
    rng, source, keys, table = wide
    join = scanning(table, memory="8MiB")
    stream = stream_of(rng, keys, 30_000)
    check(joined(join.push(stream), join.flush()), stream, source)
    assert join.store.tiers.rows.ready
    assert join.store.try_make_room(join.algorithm.budget.available + (1 << 20))
    assert join.stats.memory.rows == 0
    for _ in range(2):
        check(joined(join.push(stream), join.flush()), stream, source)
    assert join.stats.memory.peak <= join.stats.memory.limit
