"""Continuous join phases of SSIJ: sweeps that stop after each range of pages until tuples need the room."""

import contextlib

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ, AsOf, workers
from headrace.joins.ssij.memory import stream_buffer
from headrace.joins.ssij.memory.page_ranges import PageRanges
from headrace.joins.ssij.memory.store import Store
from headrace.joins.ssij.memory.stream_buffer import WANTED_NBYTES, Chunk, StreamBuffer
from headrace.joins.ssij.schedule import Thresholds
from headrace.storage.errors import StorageIOError
from headrace.storage.file import FileBackend
from headrace.storage.format import take
from headrace.storage.read import DeviceModel, PageReader, ReadQueue

KEYS, TUPLES, BATCH, MEMORY = 150_000, 800_000, 100_000, "6MiB"
DISK = DeviceModel(seek=50e-6, transfer=200e-6, page_size=4096)


@pytest.fixture(scope="module")
def rows():
    """One row for each even key, and more for some of them; the payload says which."""
    keys = np.arange(0, 2 * KEYS, 2)
    return pa.table({"k": keys, "v": keys * 31, "pad": [f"{key:>60}" for key in keys]})


@pytest.fixture(scope="module", params=["in key order", "changed"])
def table(request, build, rows):
    """The rows, and again after changes that moved a part of the pages behind the others."""
    with build(rows, ["k"], unique=True, page_size=4096) as table:
        if request.param == "changed":
            table.apply(upserts=rows.slice(KEYS // 3, KEYS // 4))
            table.apply(upserts=rows.slice(KEYS // 2, 200))
            assert not table.snapshot().in_key_order
        yield table


@pytest.fixture(scope="module")
def stream():
    rng = np.random.default_rng(5)
    return pa.record_batch({"n": np.arange(TUPLES), "s": rng.integers(-100, 2 * KEYS + 100, TUPLES)})


def batches(stream):
    return [stream.slice(start, BATCH) for start in range(0, len(stream), BATCH)]


@contextlib.contextmanager
def reader_of(table, device=DISK):
    backend = FileBackend(table.snapshot().path)
    yield PageReader(backend, 4096, device)
    backend.close()


def run(table, stream, how="inner", device=DISK, **options):
    """Return the sorted results and the statistics."""
    options |= {"how": how, "memory": MEMORY, "columns": ["v"]}
    with reader_of(table, device) as reader, SSIJ(table, on=[("s", "k")], reader=reader, **options) as join:
        found = [result for batch in batches(stream) for result in join.push(batch)]
        found += join.finish()
        result, stats = pa.Table.from_batches(found), join.stats
    assert stats.memory.peak <= stats.memory.limit
    return result.select(["n", "v"]).sort_by([("n", "ascending"), ("v", "ascending")]), stats


def expected(rows, stream, how):
    with duckdb.connect() as database:
        database.register("relation", rows).register("stream", stream)
        query = f"SELECT n, v FROM stream {how} JOIN relation ON s = k ORDER BY n, v"
        return database.sql(query).to_arrow_table()


@pytest.fixture
def divided(monkeypatch):
    """Number of chunks into which tuples were divided, each time."""
    numbers, divide = [], StreamBuffer.chunks_at

    def noted(self, *tuples):
        chunks = divide(self, *tuples)
        numbers.append(len(chunks))
        return chunks

    monkeypatch.setattr(StreamBuffer, "chunks_at", noted)
    return numbers


@pytest.mark.parametrize("how", ["inner", "left"])
def test_every_tuple_is_joined_once(table, rows, stream, divided, how):
    found, _ = run(table, stream, how)
    assert max(divided) == PageRanges.count
    assert found.equals(expected(rows, stream, how).cast(found.schema))


def assert_in_order(join):
    """Assert that the stream buffer's account, demand, and division are those of its chunks."""
    waiting, ranges = join.store.stream, join.store.ranges
    demand = np.zeros_like(waiting.demand)
    for chunk in waiting.chunks:
        leaves = chunk.first if chunk.alive is None else chunk.first[chunk.alive]
        np.add.at(demand, leaves, 1)
        assert bool((np.diff(chunk.first) >= 0).all())
        assert chunk.within is None or set(ranges.of(leaves)) <= {chunk.within}
    assert np.array_equal(demand, waiting.demand)
    assert waiting.pages == np.count_nonzero(demand)
    assert waiting.rows == demand.sum()
    own = sum(chunk.tuple_nbytes for chunk in waiting.chunks)
    assert own <= waiting.tuple_nbytes <= join.stats.memory.stream_buffer
    assert waiting.index_nbytes <= join.stats.memory.inverted_index
    assert join.stats.rows_held == waiting.rows + join.store.input.rows


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.sampled_from([0, 1, 7, 400, 5000]), min_size=5, max_size=40),
    spare=st.sampled_from([100_000, 200_000]),
    divided=st.sampled_from([1, 100]),
    fan_in=st.sampled_from([2, 8]),
    threads=st.sampled_from([1, 2]),
)
def test_tuples_are_joined_as_the_relation_was_when_they_came(
    build, tools, seed, sizes, spare, divided, fan_in, threads
):
    rng, size = np.random.default_rng(seed), 4000
    version, pad = np.zeros(size, dtype=np.int64), pa.array([f"{key:>60}" for key in range(size)])
    rows = pa.table({"k": np.arange(size), "v": version, "pad": pad})
    with pytest.MonkeyPatch.context() as patch, build(rows, ["k"], unique=True, page_size=4096) as table:
        patch.setattr(stream_buffer, "_LEAST_DIVIDED", divided)
        patch.setattr(stream_buffer, "_FAN_IN", fan_in)
        patch.setattr(workers, "_LEAST_ROWS", 200)
        with reader_of(table) as reader:
            options = {"how": "left", "columns": ["v"], "reader": reader, "threads": threads}
            memory = tools.least_memory(SSIJ, table, "k", **options) + spare
            join, found, pushed = SSIJ(table, on="k", memory=memory, **options), [], []
            for at, count in enumerate(sizes):
                keys = rng.integers(-20, size + 20, count)
                known = (keys >= 0) & (keys < size)
                pushed.append((keys, np.where(known, version[np.clip(keys, 0, size - 1)], -1)))
                name = pa.array([str(key) for key in keys], pa.string()).dictionary_encode()
                batch = pa.record_batch({"n": np.full(count, at), "k": keys, "name": name})
                found += join.push(batch)
                assert_in_order(join)
                if rng.random() < 0.1:
                    found += join.flush()
                if rng.random() < 0.1:
                    changed = np.unique(rng.integers(0, size, rng.choice([1, 300])))
                    version[changed] = at + 1
                    new = pa.table({"k": changed, "v": version[changed], "pad": pad.take(pa.array(changed))})
                    found += join.apply(new)
            found = pa.Table.from_batches([*found, *join.finish()], join.output_schema(batch.schema))
            assert join.stats.rows_done == join.stats.rows_in == sum(sizes)
            assert join.stats.memory.peak <= memory
            join.close()
    assert found["name"].to_pylist() == [str(key) for key in found["k"].to_pylist()]
    keys, versions = map(np.concatenate, zip(*pushed, strict=True))
    wanted = np.stack([np.repeat(np.arange(len(sizes)), sizes), keys, versions])
    got = np.stack([found["n"].to_numpy(), found["k"].to_numpy(), found["v"].fill_null(-1).to_numpy()])
    assert np.array_equal(got[:, np.lexsort(got)], wanted[:, np.lexsort(wanted)])


def test_each_read_serves_more_tuples_than_in_whole_phases(table, stream, monkeypatch):
    served = []
    for sharing in (Thresholds.sharing_pays, lambda _self: False):
        monkeypatch.setattr(Thresholds, "sharing_pays", sharing)
        with reader_of(table) as reader, SSIJ(table, on=[("s", "k")], memory=MEMORY, reader=reader) as join:
            for batch in [*batches(stream), *batches(stream)]:
                join.push(batch).drain()
            served.append(join.stats.rows_done / join.stats.pages_read)
    assert served[0] > 1.4 * served[1]


def test_quick_reads_and_given_thresholds_leave_phases_whole(table, stream, divided):
    run(table, stream, device=DeviceModel(seek=1e-6, transfer=1e-7, page_size=4096))
    run(table, stream, stream_threshold=10_000)
    assert set(divided) == {1}


def test_keys_with_several_rows_are_joined_with_each(build, stream):
    keys = np.repeat(np.arange(0, 2 * KEYS, 2), np.random.default_rng(6).choice([0, 1, 9], KEYS))
    rows = pa.table({"k": keys, "v": np.arange(len(keys)), "pad": [f"{key:>30}" for key in keys]})
    with build(rows, ["k"], page_size=4096) as table:
        found, _ = run(table, stream, "left")
    assert found.equals(expected(rows, stream, "left").cast(found.schema))


def test_a_failed_read_is_an_error_and_no_result_comes_twice(table, stream, monkeypatch):
    begin, reads = ReadQueue.begin, []

    def failing(self, blocks):
        reads.append(blocks)
        if len(reads) == 40:
            raise StorageIOError("the disk failed")
        return begin(self, blocks)

    monkeypatch.setattr(ReadQueue, "begin", failing)
    found = []
    with reader_of(table) as reader:
        join = SSIJ(table, on=[("s", "k")], memory=MEMORY, columns=["v"], reader=reader)
        with pytest.raises(StorageIOError, match="the disk failed"):
            found.extend(result for batch in batches(stream) for result in join.push(batch))
        join.close()
    numbers = pa.Table.from_batches(found)["n"].to_numpy()
    assert 0 < len(numbers) == len(np.unique(numbers))


def test_a_sweep_lists_the_pages_of_one_range_at_a_time(table, stream):
    with reader_of(table) as reader, SSIJ(table, on=[("s", "k")], memory=MEMORY, reader=reader) as join:
        for batch in batches(stream):
            join.push(batch).drain()
        waiting, most = join.store.stream, join.store.ranges.most
        assert waiting.by_range
        assert waiting.pages > 3 * most
        listed = waiting.index_nbytes - sum(chunk.index_nbytes for chunk in waiting.chunks)
        assert listed == WANTED_NBYTES * most
        assert waiting.unlisted_nbytes == WANTED_NBYTES * (waiting.pages - most)


@pytest.mark.parametrize("room", [True, False])
def test_a_sweep_stays_continuous_unless_there_is_room_to_list_all_pages(table, rows, stream, monkeypatch, room):
    asked, continuous, limited = [], [], Store._reclaimable

    def alternating(self):
        asked.append(self)
        return len(asked) % 3 > 0

    def listing(self, *, by_range):
        with monkeypatch.context() as patch:
            patch.setattr(Store, "_reclaimable", limited if room else 0)
            listed = list_by_range(self, by_range=by_range)
        continuous.append(by_range or not listed)
        return listed

    list_by_range = Store.list_by_range
    monkeypatch.setattr(Thresholds, "sharing_pays", alternating)
    monkeypatch.setattr(Store, "list_by_range", listing)
    found, _ = run(table, stream, "left")
    assert found.equals(expected(rows, stream, "left").cast(found.schema))
    assert all(continuous[1:]) != room


@pytest.mark.parametrize("ordered", [True, False])
def test_ranges_divide_leaves_by_their_place_on_disk(ordered, rng):
    leaves = 101
    pages = np.arange(leaves) * 3 if ordered else rng.permutation(leaves).astype(np.int64) * 3
    order = np.empty(0, dtype=np.int32) if ordered else np.argsort(pages).astype(np.int32)
    ranges = PageRanges(pages, order)
    rank = np.argsort(np.argsort(pages))
    of = ranges.of(np.arange(leaves, dtype=np.int32))
    assert all(np.bincount(of) >= leaves // ranges.count)
    assert bool((np.diff(of[np.argsort(rank)]) >= 0).all())
    some = np.sort(rng.integers(0, leaves, 400)).astype(np.int32)
    for number, places in enumerate(ranges.divide(some)):
        assert np.array_equal(places, np.flatnonzero(of[some] == number))
    demand, in_order = rng.integers(0, 2, leaves).astype(np.int32), np.argsort(pages).astype(np.int32)
    for number in range(ranges.count):
        expected = in_order[(of[in_order] == number) & (demand[in_order] > 0)]
        assert np.array_equal(ranges.wanted(number, demand), expected)
    assert np.bincount(of).max() == ranges.most


@pytest.mark.parametrize("on", [[("s", "k")], AsOf("s", "k")])
def test_waiting_tuples_of_a_sorted_stream_do_not_keep_the_batch_that_they_were_a_part_of(table, stream, on):
    ordered = stream.sort_by("s").slice(0, BATCH)
    with reader_of(table) as reader, SSIJ(table, on=on, memory=MEMORY, reader=reader, threads=1) as join:
        join.push(ordered).drain()
        waiting = join.store.stream.batches
        assert len(waiting) > 0
        assert sum(rows.get_total_buffer_size() for rows in waiting) <= 1.5 * sum(rows.nbytes for rows in waiting)


@contextlib.contextmanager
def reached(build, tools, *, changed=False):
    """Yield a join whose continuous sweep has reached a key with many rows, on a third of the leaves, and that key."""
    keys = np.sort(np.append(np.arange(0, 800, 2), np.full(240, 400)))
    rows = pa.table({"k": keys, "pad": [f"{key:>900}" for key in keys]})
    with build(rows, ["k"], page_size=4096) as table:
        if changed:
            table.apply(upserts=rows.slice(0, 75))
            assert not table.snapshot().in_key_order
        with reader_of(table) as reader:
            options = {"how": "left", "columns": [], "reader": reader, "record_tier": False, "threads": 1}
            memory = tools.least_memory(SSIJ, table, [("s", "k")], **options) + 20_000
            absent = np.random.default_rng(1).integers(0, 388, (3000, 37)) | 1
            with SSIJ(table, on=[("s", "k")], memory=memory, input_threshold=1, **options) as join:
                for keys in absent:
                    join.push(pa.record_batch({"s": keys})).drain()
                    phase = join.algorithm._phase
                    if phase is not None and phase.continuous:
                        break
                yield join, pa.record_batch({"s": [400]})


def test_there_is_room_for_the_leaves_before_and_behind_a_step(build, tools):
    with reached(build, tools) as (join, tuple_):
        found = sum(join.push(tuple_).drain() for _ in range(1000)) + join.finish().drain()
        assert join.stats.rows_done == join.stats.rows_in
        assert found > 1000 * 240
        assert join.stats.memory.peak <= join.stats.memory.limit


def test_a_step_leaves_no_part_of_a_tuple_where_leaves_do_not_lie_in_key_order(build, tools):
    with reached(build, tools, changed=True) as (join, tuple_):
        pushed = waiting = 0
        while join.store.stream.rows >= waiting:
            waiting = join.store.stream.rows
            join.push(tuple_).drain()
            pushed += 1
        assert pushed > 1
        assert join.store.stream.rows <= 1


def test_a_step_copies_the_tuples_that_stay_chunk_by_chunk(monkeypatch):
    """So it never holds much more than the stream buffer does."""
    chunks, tuples, pool = 16, 20_000, pa.system_memory_pool()
    leaf = np.arange(tuples, dtype=np.int32)
    rows = pa.record_batch({"n": leaf.astype(np.int64)})
    stream, held = StreamBuffer(tuples), []

    def noted(values, index):
        copy = take(values, index)
        held.append(pool.bytes_allocated())
        return copy

    before = pool.bytes_allocated()
    for _ in range(chunks):
        stream.add(Chunk(take(rows, leaf), 0.0, leaf, leaf))
    full = pool.bytes_allocated() - before
    monkeypatch.setattr(stream_buffer, "take", noted)
    stream.settle(leaf[: tuples // 2], 0)
    assert len(held) == chunks
    assert max(held) - before < full + 2 * full / chunks
    assert stream.rows == chunks * tuples // 2
