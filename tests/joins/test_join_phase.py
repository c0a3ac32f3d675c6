"""Join phases of SSIJ in which threads gather the next pairs, and divide the record tier, while a block is joined."""

import copy
import gc
import threading

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from headrace.joins import SSIJ, AsOf, Band
from headrace.joins.errors import JoinStateError
from headrace.joins.memory import MemoryBudget
from headrace.joins.ssij.memory import _record_kernels as kernels
from headrace.joins.ssij.memory import record_tier
from headrace.joins.ssij.memory.record_tier import RecordTier
from headrace.joins.ssij.memory.stream_buffer import Chunk
from headrace.joins.ssij.phases.join import _PairResults
from headrace.joins.ssij.phases.pair_batches import PairBatches
from headrace.joins.workers import Workers
from headrace.storage.errors import StorageIOError
from headrace.storage.read import ReadQueue

ROWS, TUPLES = 200_000, 150_000
MEMORY = "96MiB"  # so that the workspace has room for two batches of pairs that are worth a thread
PREDICATES = {
    "equality": ([("s", "k")], "stream {kind} JOIN relation ON s = k"),
    "band": (Band("s", "k", 1, 2), "stream {kind} JOIN relation ON k BETWEEN s - 1 AND s + 2"),
    "as of": (AsOf("s", "k"), "stream ASOF {kind} JOIN (SELECT k, max(v) AS v FROM relation GROUP BY k) ON k <= s"),
}


@pytest.fixture(scope="module")
def relation():
    keys = np.sort(np.random.default_rng(3).integers(0, ROWS, ROWS))
    return pa.table({"k": keys, "v": np.arange(ROWS), "pad": np.arange(ROWS) * 7})


@pytest.fixture(scope="module")
def table(build, relation):
    with build(relation, ["k"], page_size=4096) as table:
        yield table


@pytest.fixture(scope="module")
def stream():
    return pa.record_batch({"n": np.arange(TUPLES), "s": np.random.default_rng(4).integers(-50, ROWS + 50, TUPLES)})


@pytest.fixture
def gatherers(monkeypatch):
    """Names of the threads that gathered pairs."""
    names, gather = [], PairBatches.gather

    def noted(self, start):
        names.append(threading.current_thread().name)
        return gather(self, start)

    monkeypatch.setattr(PairBatches, "gather", noted)
    return names


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("predicate", PREDICATES)
def test_pairs_that_a_thread_gathers_are_joined_once(table, relation, stream, gatherers, how, predicate):
    on, joined = PREDICATES[predicate]
    join = SSIJ(table, on=on, how=how, memory=MEMORY, columns=["v"], threads=2)
    found = pa.Table.from_batches([*join.push(stream), *join.finish()]).select(["n", "v"])
    assert any(name != "MainThread" for name in gatherers)
    with duckdb.connect() as database:
        database.register("relation", relation).register("stream", stream)
        expected = database.sql(f"SELECT n, v FROM {joined.format(kind=how)}").to_arrow_table()
    order = [("n", "ascending"), ("v", "ascending")]
    assert found.sort_by(order).to_pydict() == expected.sort_by(order).to_pydict()
    assert join.stats.memory.peak <= join.stats.memory.limit


@pytest.mark.parametrize("predicate", ["equality", "as of"])
def test_no_tuple_is_referenced_when_a_phase_returns_their_memory(table, stream, monkeypatch, predicate):
    alive = []

    def count_chunks(*_):
        alive.append(sum(isinstance(each, Chunk) for each in gc.get_objects()))

    monkeypatch.setattr(MemoryBudget, "give_back", count_chunks)
    with SSIJ(table, on=PREDICATES[predicate][0], memory="16MiB") as join:
        assert sum(len(batch) for batch in join.push(stream)) + sum(len(batch) for batch in join.finish()) > 0
    begins, ends = alive[::2], alive[1::2]
    assert min(begins) > 0
    assert max(ends) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_phase_that_fails_leaves_no_thread_behind(table, stream, monkeypatch, threads):
    begin, reads = ReadQueue.begin, iter(range(1))

    def fail_later(self, wanted):
        if next(reads, None) is None:
            raise StorageIOError("the disk is gone")
        return begin(self, wanted)

    before = set(threading.enumerate())
    with SSIJ(table, on=[("s", "k")], memory=MEMORY, threads=threads) as join:
        monkeypatch.setattr(ReadQueue, "begin", fail_later)
        with pytest.raises(StorageIOError, match="the disk is gone"):
            [*join.push(stream), *join.flush()]
        with pytest.raises(JoinStateError, match="start over"):
            join.flush()
    assert set(threading.enumerate()) <= before


def test_threads_that_divide_the_buckets_admit_the_same_rows(build, monkeypatch):
    rng = np.random.default_rng(5)
    begin, compared = RecordTier.begin_admission, []

    def begin_both(tier, _, frames, frame, row, count, keys):
        alone = copy.deepcopy(tier._table)
        begin(tier, Workers(3), frames, frame, row, count, keys)()
        size, entries = tier._page_size, tier._entries
        kernels.admit_rows(frames, size, frame, row, count, keys.prefix, entries, alone, 0, len(alone.buckets))
        compared.append([np.array_equal(*parts) for parts in zip(alone, tier._table, strict=True)])
        return lambda: None

    monkeypatch.setattr(RecordTier, "begin_admission", begin_both)
    monkeypatch.setattr(record_tier, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(record_tier, "_OFFERED_SHARE", 1)  # all rows, of a settled tier too
    source = pa.table({"k": np.arange(60_000), "v": rng.integers(0, 2**62, 60_000), "w": np.arange(60_000)})
    with build(source, ["k"], unique=True, page_size=4096) as table, SSIJ(table, "k", memory="512KiB") as join:
        for _ in range(20):
            keys = np.where(rng.random(9000) < 0.8, rng.integers(0, 300, 9000) * 200, rng.integers(0, 60_000, 9000))
            found = pa.Table.from_batches([*join.push(pa.record_batch({"k": keys})), *join.flush()])
            assert found["v"].equals(source["v"].take(found["k"].combine_chunks()))
    assert np.all(compared)
    assert len(compared) > 20


def test_work_that_was_begun_is_done_once_whoever_does_it():
    workers, done = Workers(2), []
    free = threading.Event()
    busy = [workers.start(lambda: free.wait(10)) for _ in range(3)]
    finish = workers.begin(done.append, range(5))
    finish()  # no thread is free
    assert done == list(range(5))
    free.set()
    assert all(wait() for wait in busy)
    workers.begin(done.append, range(5, 30))()
    assert sorted(done) == list(range(30))
    with pytest.raises(ZeroDivisionError):
        workers.begin(lambda item: 1 // item, [1, 1, 0])()
    with pytest.raises(ZeroDivisionError):
        workers.begin(lambda item: 1 // item, [0, 1, 1])()
    workers.close()


@pytest.mark.parametrize("predicate", ["equality", "band"])
@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize(("memory", "threads"), [("48MiB", 2), ("4MiB", 1)])
def test_many_results_of_a_block_are_copied_by_runs(build, monkeypatch, predicate, how, memory, threads):
    """In the join phase and, for what is cached, in the online phase; keys' rows reach over several pages.

    The band of a tuple may lie in two pages and have matches in one of them only.
    """
    keys, each, tuples = 3_000, 150, 24_000
    rows = pa.table({"k": np.repeat(np.arange(0, 3 * keys, 3), each), "v": np.arange(keys * each)})
    stream = pa.record_batch({"n": np.arange(tuples), "s": np.random.default_rng(8).integers(-9, 3 * keys, tuples)})
    on, joined = PREDICATES[predicate]
    calls, many = [], _PairResults._many

    def noted(self, *args):
        calls.append(self)
        return many(self, *args)

    monkeypatch.setattr(_PairResults, "_many", noted)
    with build(rows, ["k"], page_size=4096) as table:
        join = SSIJ(table, on=on, how=how, memory=memory, columns=["v"], threads=threads)
        found = [result for at in range(0, tuples, 8_000) for result in join.push(stream.slice(at, 8_000))]
        found = pa.Table.from_batches([*found, *join.finish()]).select(["n", "v"])
    assert calls
    assert join.stats.memory.peak <= join.stats.memory.limit
    with duckdb.connect() as database:
        database.register("relation", rows).register("stream", stream)
        query = f"SELECT n, v FROM {joined.format(kind=how)} ORDER BY n, v"
        expected = database.sql(query).to_arrow_table()
    assert found.sort_by([("n", "ascending"), ("v", "ascending")]).equals(expected.cast(found.schema))
