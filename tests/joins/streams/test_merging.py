"""Progressive merge and hash-merge join: the twins that they equal, and the runs that they merge."""

import gc
import tracemalloc
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import JoinInputError
from headrace.joins.streams import HashMerge, Near, ProgressiveMerge
from headrace.joins.streams.merging.hash_merge import choose_bucket

OPERATORS = [ProgressiveMerge, HashMerge]


def nested_loops(left, right):
    return sorted((a, b) for a, x in enumerate(left) for b, y in enumerate(right) if x is not None and x == y)


def hashed(left, right):
    places = defaultdict(list)
    for b, y in enumerate(right):
        places[y].append(b)
    return sorted((a, b) for a, x in enumerate(left) if x is not None for b in places[x])


def sorted_and_merged(left, right):
    lefts = sorted((x, a) for a, x in enumerate(left) if x is not None)
    rights = sorted((y, b) for b, y in enumerate(right) if y is not None)
    found, first = [], 0
    for x, a in lefts:
        while first < len(rights) and rights[first][0] < x:
            first += 1
        at = first
        while at < len(rights) and rights[at][0] == x:
            found.append((a, rights[at][1]))
            at += 1
    return sorted(found)


def case_of(tools, rng, on, sql, rows=3000, domain=400, kinds=("int64",)):
    inputs = {name: tools.make_input(rng, list(kinds), rows, domain) for name in "ab"}
    return tools.Case(inputs, on, sql, events=tools.schedule(rng, [rows, rows], 200))


def contest(tools, make, **fixed):
    return tools.Contestant(lambda *args, **options: make(*args, **fixed, **options))


@pytest.mark.parametrize("make", OPERATORS)
@pytest.mark.parametrize("twin", [nested_loops, hashed, sorted_and_merged])
@pytest.mark.parametrize("kind", ["int64", "text"])
def test_the_pairs_are_those_of_the_twin(tools, tmp_path, make, twin, kind):
    case = case_of(tools, np.random.default_rng(7), ["x"], "a.x = b.x", rows=800, domain=300, kinds=(kind,))
    with tools.make(contest(tools, make), case, tmp_path, 1.0) as join:
        result = tools.run(join, case)
        assert join.stats.rows_spilled
    pairs = sorted(zip(result["id"].to_pylist(), result["id_right"].to_pylist(), strict=True))
    assert pairs == twin(*(table["x"].to_pylist() for table in case.inputs.values()))


@pytest.mark.parametrize("make", OPERATORS)
@pytest.mark.parametrize(("domain", "rows"), [(3000, 4000), (4, 500)])
def test_runs_are_merged_in_several_turns_whatever_the_skew(tools, tmp_path, make, domain, rows):
    case = case_of(tools, np.random.default_rng(8), ["x"], "a.x = b.x", rows=rows, domain=domain)
    with tools.make(contest(tools, make, fan_in=4), case, tmp_path, 1.0) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))
        assert join.stats.memory.peak <= join.stats.memory.limit
        assert join.stats.rows_cleanup


@pytest.mark.parametrize("make", OPERATORS)
def test_a_larger_fan_in_writes_fewer_blocks(tools, tmp_path, make):
    case = case_of(tools, np.random.default_rng(9), ["x"], "a.x = b.x", rows=4000, domain=3000)
    written = []
    for fan_in in (4, 1000):
        with tools.make(contest(tools, make, fan_in=fan_in), case, tmp_path, 1.0) as join:
            rows = len(tools.run(join, case))
            written.append((join.stats.blocks_spilled, rows))
    (many, rows), (few, same) = written
    assert rows == same
    assert many > few


def test_bands_are_merged_across_blocks(tools, tmp_path):
    case = case_of(tools, np.random.default_rng(10), [Near("x", "x", 3)], "abs(a.x - b.x) <= 3", rows=2000, domain=3000)
    with tools.make(contest(tools, ProgressiveMerge, fan_in=4), case, tmp_path, 1.0) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))
        assert join.stats.rows_spilled == sum(2000 - table["x"].null_count for table in case.inputs.values())


def test_a_band_filters_the_equal_pairs_of_a_hash_merge_join(tools, tmp_path):
    on, sql = ["x", Near("y", "y", 1)], "a.x = b.x AND abs(a.y - b.y) <= 1"
    case = case_of(tools, np.random.default_rng(11), on, sql, kinds=("text", "int64"))
    with tools.make(contest(tools, HashMerge), case, tmp_path, 1.0) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))


def test_a_hash_merge_join_merges_while_its_inputs_are_blocked(tools, tmp_path):
    case = case_of(tools, np.random.default_rng(12), ["x"], "a.x = b.x")
    with tools.make(contest(tools, HashMerge), case, tmp_path, 1.0) as join:
        for side, table in case.inputs.items():
            for batch in table.to_batches(max_chunksize=500):
                join.push(batch, side=side, at=1.0).drain()
        assert join.tick(1.01).drain() == 0, "not blocked yet"
        assert join.tick(2.0).drain() > 0
        early = join.idle(2.0, until=1e9).drain()
        assert join.stats.rows_reactive > early > 0
        join.finish().drain()
        assert join.stats.rows_out == len(tools.expected(case))


@pytest.mark.parametrize("columns", [["x"], ["x", "w"]])
def test_a_full_memory_suffices_for_merging_after_each_arrival(tools, tmp_path, columns):
    rng = np.random.default_rng(13)
    inputs = {name: tools.make_input(rng, ["int64"], 5000, 4000).select(["id", *columns]) for name in "ab"}
    case = tools.Case(inputs, ["x"], "a.x = b.x")
    for number in range(25):
        for side in (0, 1):
            case.events.append(("push", side, (200 * number, 200 * number + 200, float(number))))
        case.events.append(("idle", None, (number + 0.5, 1e9)))
    with tools.make(contest(tools, HashMerge), case, tmp_path, 1.0) as join:
        tools.assert_same_rows(tools.run(join, case), tools.expected(case))
        assert join.stats.rows_reactive > join.stats.rows_cleanup
        assert join.stats.memory.peak <= join.stats.memory.limit


@pytest.mark.parametrize("make", OPERATORS)
def test_the_lists_of_blocks_are_counted(tmp_path, make):
    schema = pa.schema([("x", pa.int64()), ("v", pa.int64())])
    keys, rows = np.random.default_rng(14).integers(0, 10**6, 20_000), 500
    with make({"a": schema, "b": schema}, "x", memory=300 << 10, spill=tmp_path) as join:
        budget = join.algorithm.budget
        for start in range(0, len(keys), rows):
            batch = pa.record_batch([keys[start : start + rows], np.arange(rows)], schema=schema)
            join.push(batch, side="a").drain()
            join.push(batch, side="b").drain()
            if start == 5_000:
                before = budget.held("statistics")
                tracemalloc.start()
        gc.collect()
        lists = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/merging/*.py")])  # noqa: FBT003 - it takes no keyword
        tracemalloc.stop()
        grown = sum(trace.size for trace in lists.traces)
        assert 10_000 < grown <= budget.held("statistics") - before


def test_the_larger_input_is_flushed_until_the_memory_is_balanced():
    assert choose_bucket(np.array([[50, 10, 40], [0, 10, 20]]), 0.1) == 2
    assert choose_bucket(np.array([[30, 10], [10, 30]]), 0.6) == 0
    assert choose_bucket(np.array([[3, 0], [0, 2]]), 0.0) == 0


def test_a_hash_merge_join_refuses_bands_alone(tmp_path):
    schema = pa.schema([("x", pa.int64())])
    with pytest.raises(JoinInputError, match="needs an equality"):
        HashMerge({"a": schema, "b": schema}, [Near("x", "x", 3)], spill=tmp_path)


@pytest.mark.parametrize("make", OPERATORS)
@pytest.mark.parametrize("fan_in", [3, 4.5, "4"])
def test_a_fan_in_that_cannot_merge_is_refused(make, fan_in):
    schema = pa.schema([("x", pa.int64())])
    with pytest.raises(JoinInputError, match="fan_in"):
        make({"a": schema, "b": schema}, "x", fan_in=fan_in)


@pytest.mark.parametrize("make", OPERATORS)
def test_more_than_two_inputs_are_refused(make):
    schema = pa.schema([("x", pa.int64())])
    on = [("a.x", "b.x"), ("b.x", "c.x")]
    with pytest.raises(JoinInputError, match="two inputs"):
        make({"a": schema, "b": schema, "c": schema}, on)
