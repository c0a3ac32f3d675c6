"""What is particular to MeshJoin and to index nested loops."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.joins import IndexNestedLoops, MeshJoin
from headrace.joins.errors import JoinInputError
from headrace.joins.meshjoin.split import split_memory
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read import DeviceModel

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


def test_meshjoin_says_what_it_needs(table):
    with pytest.raises(MemoryBudgetError, match="at least"):
        MeshJoin(table, on="k", memory="80KiB").push(pa.record_batch({"k": [1], "t": ["y" * 5000]})).drain()


def test_index_nested_loops_read_one_page_at_a_time(table, monkeypatch):
    join = IndexNestedLoops(table, on="k", memory="4MiB")
    calls = reads_of(table, monkeypatch)
    assert join.push(pa.record_batch({"k": [1, 2999, 2, 1500]})).drain() == 4
    assert [len(call) for call in calls] == [1, 1, 1]
    assert calls != sorted(calls), "in the order of the stream"
    assert join.stats.rows_cached == 1


def test_index_nested_loops_answer_every_push_at_once(table):
    join = IndexNestedLoops(table, on="k", memory="96KiB")
    assert join.push(pa.record_batch({"k": np.arange(0, KEYS, 7)})).drain() == len(range(0, KEYS, 7))
    assert join.stats.rows_held == 0
    assert join.finish().drain() == 0
