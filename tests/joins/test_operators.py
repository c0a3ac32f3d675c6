"""Every operator returns the relational join, whatever the data, the memory and the batches."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ
from headrace.storage.errors import MemoryBudgetError

HOW = pytest.mark.parametrize("how", ["inner", "left"])


def run_with_enough(tools, operator, case, table, memory):
    """MeshJoin learns only from the first tuple how much it needs."""
    while True:
        try:
            return tools.run(operator, case, table, memory=memory)
        except MemoryBudgetError:
            assert operator not in {SSIJ, tools.paged}
            memory = 2 * memory


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_equals_the_join_of_a_database(build, tools, any_case, operator, data):
    case = data.draw(any_case)
    with build(case.relation, case.key, unique=case.unique, page_size=case.page_size) as table:
        spare = data.draw(st.sampled_from([0, 1, 5_000, 40_000, 300_000, 8_000_000]))
        memory = tools.least_memory(operator, table, case.on) + spare
        result, join = run_with_enough(tools, operator, case, table, memory)
    tools.assert_same_rows(result, tools.expected(case))
    assert join.stats.rows_held == 0
    assert join.stats.rows_done == join.stats.rows_in == len(case.stream)
    assert join.stats.memory.peak <= join.stats.memory.limit


def one_to_many(tools, rng, how, kind="int64"):
    numbers = np.repeat(np.arange(8), [1, 1, 3000, 1, 0, 500, 2, 1])
    relation = tools.make_relation(rng, kind, rng.permutation(numbers), 60)
    stream = tools.make_stream(rng, kind, rng.integers(-1, 9, 40))
    return tools.Case(relation, stream, ["k"], [("s_k", "k")], unique=False, how=how, cuts=[3, 11, 12, 30])


@HOW
@pytest.mark.parametrize("kind", ["int64", "text"])
@pytest.mark.parametrize("spare", [0, 50_000, 4_000_000])
def test_runs_of_one_key_go_over_many_pages(build, tools, operator, rng, how, kind, spare):
    case = one_to_many(tools, rng, how, kind)
    with build(case.relation, case.key, page_size=4096) as table:
        memory = tools.least_memory(operator, table, case.on) + spare
        result, _ = run_with_enough(tools, operator, case, table, memory)
    tools.assert_same_rows(result, tools.expected(case))


@HOW
@pytest.mark.parametrize("relation_rows", [0, 1])
@pytest.mark.parametrize("stream_rows", [0, 1, 30])
def test_empty_and_tiny_sides(build, tools, operator, rng, how, relation_rows, stream_rows):
    relation = tools.make_relation(rng, "int64", [3] * relation_rows, 10)
    stream = tools.make_stream(rng, "int64", rng.integers(2, 5, stream_rows))
    case = tools.Case(relation, stream, ["k"], [("s_k", "k")], unique=True, how=how, cuts=[0, 1, 1, 20])
    with build(relation, ["k"], unique=True) as table:
        result, _ = tools.run(operator, case, table)
    tools.assert_same_rows(result, tools.expected(case))


@HOW
def test_null_and_unrepresentable_keys_never_match(build, operator, how):
    relation = pa.table({"k": pa.array([0, 1, 2], pa.int8()), "v": ["zero", "one", "two"]})
    batch = pa.record_batch({"x": pa.array([None, 0, 300, -1000, 2], pa.int64())})
    with build(relation, ["k"], unique=True) as table:
        join = operator(table, on=[("x", "k")], how=how)
        rows = [row for out in (*join.push(batch), *join.finish()) for row in out.to_pylist()]
    found = {row["x"]: row["v"] for row in rows if row["v"] is not None}
    assert found == {0: "zero", 2: "two"}
    assert len(rows) == (5 if how == "left" else 2)


def test_empty_batches_change_nothing(build, tools, operator, rng):
    relation = tools.make_relation(rng, "int64", np.arange(50), 10)
    stream = tools.make_stream(rng, "int64", np.arange(20), nulls=0).combine_chunks().to_batches()[0]
    with build(relation, ["k"], unique=True) as table:
        join = operator(table, on=[("s_k", "k")])
        batches = [stream.slice(0, 0), stream, stream.slice(0, 0)]
        rows = sum(out.num_rows for batch in batches for out in join.push(batch))
        assert rows + sum(out.num_rows for out in join.finish()) == 20


@HOW
def test_a_stream_without_other_columns(build, operator, how):
    with build(pa.table({"k": [1, 2, 2]}), ["k"]) as table:
        join = operator(table, on="k", how=how)
        rows = [row for out in (*join.push(pa.record_batch({"k": [2, 3]})), *join.finish()) for row in out.to_pylist()]
    assert sorted(row["k"] for row in rows) == [2, 2] + [3] * (how == "left")


def test_chosen_columns_may_be_key_columns(build, operator):
    relation = pa.table({"k": [1, 2], "a": ["x", "y"], "b": [1.0, 2.0]})
    with build(relation, ["k"], unique=True) as table:
        join = operator(table, on=[("id", "k")], how="left", columns=["b", "k"])
        rows = [row for out in (*join.push(pa.record_batch({"id": [2, 5]})), *join.finish()) for row in out.to_pylist()]
    assert sorted(rows, key=lambda row: row["id"]) == [{"id": 2, "b": 2.0, "k": 2}, {"id": 5, "b": None, "k": None}]


def test_clashing_names_get_a_suffix(build, operator):
    with build(pa.table({"k": [1], "v": [10]}), ["k"]) as table:
        join = operator(table, on="k")
        stream = pa.record_batch({"k": [1], "v": [1], "v_right": [2]})
        (row,) = [row for out in (*join.push(stream), *join.finish()) for row in out.to_pylist()]
    assert row == {"k": 1, "v": 1, "v_right": 2, "v_right_right": 10}


def test_the_stream_is_not_copied_into_the_result_of_a_unique_cached_table(build, rng):
    with build(pa.table({"k": np.arange(1000), "v": np.arange(1000)}), ["k"], unique=True) as table:
        join = SSIJ(table, on="k", memory="64MiB", input_threshold=1, record_tier=False)
        batch = pa.record_batch({"k": rng.permutation(1000)})
        join.push(batch).drain()
        join.flush().drain()
        (result,) = join.push(batch)
    assert result["k"].buffers()[1].address == batch["k"].buffers()[1].address
    assert result["v"].equals(batch["k"])
