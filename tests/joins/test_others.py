"""What is particular to MeshJoin and to index nested loops."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.joins import IndexNestedLoops, MeshJoin
from headrace.joins.errors import JoinInputError
from headrace.joins.meshjoin.split import split_memory
from headrace.storage.errors import CorruptPageError, MemoryBudgetError
from headrace.storage.read import DeviceModel, ReadQueue

KEYS = 3000


@pytest.fixture(scope="module")
def table(build):
    relation = pa.table({"k": np.arange(KEYS), "pad": [f"{key:>60}" for key in range(KEYS)]})
    with build(relation, ["k"], unique=True, page_size=4096) as table:
        yield table


def reads_of(table, monkeypatch):
    """Record the pages of each call that reads."""
    reader, calls = table.reader(), []
    read_plan = reader.read_plan

    def record(plan, part, pages, *rest):
        calls.append(pages.tolist())
        return read_plan(plan, part, pages, *rest)

    monkeypatch.setattr(reader, "read_plan", record)
    return calls


def test_meshjoin_scans_the_relation_in_a_cycle(table, monkeypatch):
    join = MeshJoin(table, on="k", memory="192KiB")
    calls = reads_of(table, monkeypatch)
    rng = np.random.default_rng(1)
    for _ in range(20):
        join.push(pa.record_batch({"k": rng.integers(0, KEYS, 100)})).drain()
    join.finish().drain()
    chunks, leaves = join.split.chunks, table.snapshot().leaf_pages.tolist()
    assert chunks > 2
    assert [page for call in calls[:chunks] for page in call] == sorted(leaves)
    assert all(call == calls[step % chunks] for step, call in enumerate(calls))
    assert len(calls[chunks - 1]) == len(leaves) - (chunks - 1) * join.split.pages, "a short last chunk"


def test_every_batch_meets_every_chunk_once(table, monkeypatch):
    join = MeshJoin(table, on="k", memory="192KiB")
    calls = reads_of(table, monkeypatch)
    join.push(pa.record_batch({"k": [5]})).drain()
    assert calls == []
    assert join.finish().drain() == 1
    assert len(calls) == join.split.chunks, "one full cycle at the end of the stream"


def test_tuples_leave_in_the_order_in_which_they_came(table):
    join = MeshJoin(table, on="k", how="left", memory="192KiB")
    found = []
    for start in range(0, 4000, 100):
        for result in join.push(pa.record_batch({"k": np.arange(KEYS + start, KEYS + start + 100)})):
            found += result["k"].to_pylist()
    for result in join.finish():
        found += result["k"].to_pylist()
    assert found == list(range(KEYS, KEYS + 4000))


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("nulls", [0.0, 0.3])
def test_tuples_of_every_type_come_out_of_the_window_as_they_went_in(table, how, nulls):
    rng = np.random.default_rng(8)

    def column(values, dtype):
        return pa.array(values, dtype, mask=rng.random(len(values)) < nulls)

    def batch(start, size):
        numbers = list(range(start, start + size))
        columns = {
            "k": pa.array(rng.integers(-KEYS, KEYS, size), pa.int64(), mask=rng.random(size) < nulls),
            "n": pa.array(numbers),
            "flag": column([number % 3 == 0 for number in numbers], pa.bool_()),
            "small": column([number % 100 for number in numbers], pa.int8()),
            "half": column([number / 8 for number in numbers], pa.float32()),
            "price": column([Decimal(number) / 4 for number in numbers], pa.decimal128(30, 2)),
            "at": column(numbers, pa.timestamp("us", "UTC")),
            "text": column([f"{number}" * (number % 4) for number in numbers], pa.string()),
            "list": column([[number] * (number % 3) for number in numbers], pa.list_(pa.int64())),
        }
        return pa.record_batch(columns).slice(1)

    join = MeshJoin(table, on="k", how=how, memory="384KiB", read_pages=8)
    pushed = [batch(start, 70) for start in range(0, 2100, 70)]
    results = [result for rows in pushed for result in join.push(rows)]
    assert join.split.chunks > 2
    results += join.finish()
    given = pa.Table.from_batches(pushed)
    found = pa.Table.from_batches(results).sort_by("n")
    has_match = [key is not None and key >= 0 for key in given["k"].to_pylist()]
    kept = given if how == "left" else given.filter(pa.array(has_match))
    assert found.select(given.column_names).to_pylist() == kept.to_pylist()
    assert [pad is not None and int(pad) for pad in found["pad"].to_pylist()] == [
        key is not None and key >= 0 and key for key in kept["k"].to_pylist()
    ]


def test_a_chunk_that_is_the_whole_relation_is_read_once(table, monkeypatch):
    join = MeshJoin(table, on="k", memory="64MiB")
    calls = reads_of(table, monkeypatch)
    for _ in range(3):
        join.push(pa.record_batch({"k": np.arange(10)})).drain()
        join.flush().drain()
    assert (join.split.chunks, len(calls)) == (1, 1)


def test_meshjoin_reads_as_many_pages_at_once_as_it_is_told(table, monkeypatch):
    join = MeshJoin(table, on="k", memory="256KiB", read_pages=3)
    calls = reads_of(table, monkeypatch)
    assert join.push(pa.record_batch({"k": np.arange(0, KEYS, 9)})).drain() + join.finish().drain() == len(
        range(0, KEYS, 9)
    )
    leaves = len(table.snapshot().leaf_pages)
    assert [len(call) for call in calls[: leaves // 3]] == [3] * (leaves // 3)
    assert (join.split.pages, join.split.chunks) == (3, -(-leaves // 3))


def test_a_read_of_no_pages_or_of_more_than_fit_is_refused(table):
    with pytest.raises(JoinInputError, match="at least 1, not 0"):
        MeshJoin(table, on="k", read_pages=0)
    with pytest.raises(MemoryBudgetError, match="at least"):
        MeshJoin(table, on="k", memory="192KiB", read_pages=60).push(pa.record_batch({"k": [1]})).drain()


@given(
    memory=st.integers(50_000, 10**8), leaves=st.integers(1, 5000), size=st.floats(8, 200), seek=st.floats(1e-6, 1e-2)
)
def test_the_split_fits_in_the_memory_and_no_other_one_is_faster(memory, leaves, size, seek):
    device = DeviceModel(seek, 1e-5, 4096)
    try:
        split = split_memory(memory, leaves, 100, size, device)
    except MemoryBudgetError:
        assert all(p * 4096 + (-(-leaves // p) + 1) * size > memory for p in range(1, leaves + 1))
        return

    def rate(pages):
        chunks = -(-leaves // pages)
        tuples = (memory - pages * 4096) // ((chunks + 1) * size)
        return tuples / ((seek + 1e-5 * pages if chunks > 1 else 0.0) + 5e-4 + 5e-7 * pages)

    assert split.chunks == -(-leaves // split.pages)
    assert split.pages * 4096 + (split.chunks + 1) * split.tuples * size <= memory
    assert rate(split.pages) == pytest.approx(max(rate(p) for p in range(1, min(leaves, memory // 4096) + 1)))


@pytest.mark.parametrize("text", [500, 50_000])
def test_meshjoin_says_how_much_memory_is_enough(table, tools, text):
    batch = pa.record_batch({"k": [1], "t": ["y" * text]})
    least = tools.least_memory(MeshJoin, table, "k")
    with pytest.raises(MemoryBudgetError, match="at least") as error:
        MeshJoin(table, on="k", memory=least).push(batch).drain()
    with MeshJoin(table, on="k", memory=error.value.least) as join:
        assert join.push(batch).drain() + join.finish().drain() == 1


LATER = {
    "text": pa.array,
    "text with nulls": lambda words: pa.array([word or None for word in words], pa.string()),
    "dictionary": lambda words: pa.array(words).dictionary_encode(),
}


@pytest.mark.parametrize("column", LATER.values(), ids=LATER)
@pytest.mark.parametrize("seed", range(10))
def test_tuples_larger_than_the_first_ones_end_no_meshjoin(table, column, seed):
    """Only a tuple that does not fit alone is refused, and the memory that the error advises joins it in the end."""
    rng, batches, wanted = np.random.default_rng(seed), [], []
    for longest in (3, *rng.choice([0, 5, 50, 500, 20_000], 8).tolist()):
        keys = rng.integers(0, KEYS + 100, 3 if longest > 500 else int(rng.choice([1, 10, 300])))
        words = ["x" * int(rng.integers(0, longest + 1)) for _ in keys]
        pads = [f"{key:>60}" if key < KEYS else None for key in keys]
        wanted += zip(keys.tolist(), [word or None for word in words], pads, strict=True)
        batches.append(pa.record_batch({"k": keys, "x": column(words)}))
    memory, refused = 160_000, True
    for _ in range(6):
        got = []
        with MeshJoin(table, on="k", how="left", memory=memory) as join:
            try:
                for batch in batches:
                    got += list(join.push(batch))
                got += list(join.finish())
                refused = False
            except MemoryBudgetError as error:
                if "one stream tuple of" not in str(error):
                    raise
                memory = error.least
        assert join.stats.memory.peak <= join.stats.memory.limit
        if not refused:
            break
    assert not refused
    found = [(row["k"], row["x"] or None, row["pad"]) for batch in got for row in batch.to_pylist()]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_without_a_queue_index_nested_loops_read_one_page_at_a_time(table, monkeypatch):
    join = IndexNestedLoops(table, on="k", memory="4MiB", queue_depth=1)
    calls = reads_of(table, monkeypatch)
    assert join.push(pa.record_batch({"k": [1, 2999, 2, 1500]})).drain() == 4
    assert [len(call) for call in calls] == [1, 1, 1]
    assert calls != sorted(calls), "in the order of the stream"
    assert join.stats.rows_cached == 1


def test_index_nested_loops_read_each_page_by_itself_with_many_in_flight(table, monkeypatch):
    join = IndexNestedLoops(table, on="k", memory="4MiB", queue_depth=2)
    groups, begin = [], ReadQueue.begin

    def record(queue, reads):
        groups.append(reads.lengths.tolist())
        return begin(queue, reads)

    monkeypatch.setattr(ReadQueue, "begin", record)
    assert join.push(pa.record_batch({"k": [1, 2999, 2, 1500]})).drain() == 4
    assert groups == [[4096, 4096], [4096]]
    assert (join.stats.seeks, join.stats.pages_read, join.stats.rows_cached) == (3, 3, 1)
    with pytest.raises(JoinInputError, match="at least 1, not 0"):
        IndexNestedLoops(table, on="k", queue_depth=0)


@pytest.mark.parametrize("depth", [1, 64])
def test_a_damaged_page_is_refused_however_it_is_read(build, depth):
    with build(pa.table({"k": np.arange(KEYS)}), ["k"], unique=True, page_size=4096) as table:
        snapshot = table.snapshot()
        path, page = Path(snapshot.path), int(snapshot.leaf_pages[0])
        with path.open("r+b") as file:
            file.seek(page * 4096 + 100)
            byte = file.read(1)
            file.seek(page * 4096 + 100)
            file.write(bytes([byte[0] ^ 1]))
        join = IndexNestedLoops(table, on="k", memory="4MiB", queue_depth=depth)
        with pytest.raises(CorruptPageError, match=f"page {page}"):
            join.push(pa.record_batch({"k": [0]})).drain()


def test_index_nested_loops_answer_every_push_at_once(table):
    join = IndexNestedLoops(table, on="k", memory="96KiB")
    assert join.push(pa.record_batch({"k": np.arange(0, KEYS, 7)})).drain() == len(range(0, KEYS, 7))
    assert join.stats.rows_held == 0
    assert join.finish().drain() == 0
