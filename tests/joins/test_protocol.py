"""Outputs are lazy, begin their work at once and lose nothing; statistics subtract; misuse is refused."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins import SSIJ, Equality, IndexNestedLoops, MeshJoin, Operator
from headrace.joins.errors import FinishedError, JoinInputError, JoinStateError, StreamSchemaError
from headrace.joins.protocol import Progress, WorkQueue
from headrace.joins.stats import JoinStats, MemoryUse, SSIJStats
from headrace.storage.errors import CorruptPageError, KeyInputError, SchemaError
from headrace.storage.format import KeyCodec


def batch(*numbers):
    return pa.record_batch({"k": pa.array(numbers, pa.int64())})


def numbers(output):
    return [value for result in output for value in result["k"].to_pylist()]


@pytest.fixture(scope="module")
def table(build):
    with build(pa.table({"k": np.arange(100), "v": np.arange(100)}), ["k"], unique=True) as table:
        yield table


def test_every_operator_has_the_protocol(table, operator):
    assert isinstance(operator(table, on="k"), Operator)


def test_work_starts_with_the_call_and_goes_on_with_each_result():
    done = []

    def task():
        for number in range(3):
            done.append(number)
            yield batch(number)

    output = WorkQueue().start(task())
    assert done == [0]
    next(output)
    assert done == [0]
    next(output)
    assert done == [0, 1]


def test_work_without_results_is_done_when_the_call_returns():
    done = []

    def task():
        done.append(True)
        yield from ()

    WorkQueue().start(task())
    assert done == [True]


def test_what_an_output_had_left_comes_first_in_the_next_one():
    work = WorkQueue()
    first = work.start(iter([batch(1), batch(2)]))
    next(first)
    second = work.start(iter([batch(3)]))
    assert numbers(first) == []
    assert numbers(second) == [2, 3]


def test_after_a_failure_the_work_refuses_to_go_on():
    def task():
        yield batch(1)
        raise CorruptPageError("page 7")

    work = WorkQueue()
    output = work.start(task())
    next(output)
    with pytest.raises(CorruptPageError):
        next(output)
    with pytest.raises(JoinStateError, match="page 7"):
        work.start(iter([batch(2)]))


def test_time_between_results_is_not_counted_as_work():
    now = [0.0]

    def task():
        now[0] += 1
        yield batch(1)
        now[0] += 2
        yield batch(2)

    work = WorkQueue(Progress(lambda: now[0]))
    output = work.start(task())
    now[0] += 100
    assert numbers(output) == [1, 2]
    assert work.progress.busy_seconds == 3


def test_to_table_needs_a_schema_only_without_results():
    assert WorkQueue().start(iter([batch(1)])).to_table().num_rows == 1
    assert WorkQueue().start(iter([])).to_table(batch().schema).num_rows == 0


def test_a_dropped_output_loses_nothing(table, operator):
    join = operator(table, on="k", memory="1MiB")
    join.push(batch(*range(50)))
    join.flush()
    join.push(batch(*range(50, 100)))
    assert sorted(numbers(join.finish())) == list(range(100))


def test_flush_lets_everything_out_and_the_operator_goes_on(table, operator):
    join = operator(table, on="k")
    first = numbers(join.push(batch(1, 2))) + numbers(join.flush())
    assert sorted(first) == [1, 2]
    assert numbers(join.flush()) == []
    assert sorted(numbers(join.push(batch(3))) + numbers(join.finish())) == [3]


def test_after_finish_every_call_is_refused(table, operator):
    join = operator(table, on="k")
    join.finish()
    for call in (lambda: join.push(batch(1)), join.tick, join.flush, join.finish):
        with pytest.raises(FinishedError):
            call()


def test_the_stream_keeps_its_schema(table, operator):
    join = operator(table, on="k")
    join.push(batch(1)).drain()
    with pytest.raises(StreamSchemaError, match="one schema"):
        join.push(pa.record_batch({"k": ["1"]}))
    assert join.push(batch(2)).drain() + join.finish().drain() <= 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"on": [("k", "v")]}, JoinInputError, "the key is 'k'"),
        ({"on": [("k", "kk")]}, JoinInputError, "no key column 'kk' .did you mean 'k'[?][)]; the key is 'k'"),
        ({"on": []}, JoinInputError, "names none"),
        ({"on": [("a", "b", "c")]}, JoinInputError, "pairs"),
        ({"on": [1]}, JoinInputError, "pairs, not 1"),
        ({"on": [("k", 1)]}, JoinInputError, "pairs"),
        ({"on": 5}, JoinInputError, "pairs, not 5"),
        ({"on": {"k": "k"}}, JoinInputError, "pairs"),
        ({"on": "k", "columns": 5}, SchemaError, "a list of their names, not by 5"),
        ({"on": "k", "how": "outer"}, JoinInputError, "'inner' or 'left'"),
        ({"on": "k", "columns": ["x"]}, SchemaError, "'x'"),
        ({"on": "k", "memory": "lots"}, ValueError, "`memory`: not a size"),
        ({"on": "k", "how": np.array(["a", "b"])}, JoinInputError, "'inner' or 'left'"),
        ({"on": "k", "memory": 2**63}, JoinInputError, "`memory` must be below 8 EiB"),
        ({"on": "k", "clock": 5}, JoinInputError, "`clock` must be a function that returns seconds, not 5"),
        ({"on": "k", "clock": len}, JoinInputError, "`clock` must be a function without parameters"),
        ({"on": "k", "clock": lambda: "now"}, JoinInputError, "`clock` must return a finite number.*not 'now'"),
        ({"on": "k", "reader": 5}, JoinInputError, "`reader` must be a reader of the table's pages.*not 5"),
        ({"on": "k", "reader": ""}, JoinInputError, "`reader` must be a reader of the table's pages.*not ''"),
    ],
)
def test_parameters_are_checked(table, operator, given, error, message):
    with pytest.raises(error, match=message):
        operator(table, **given)


def test_a_reader_of_other_pages_is_refused(table, build, operator):
    with build(pa.table({"k": [1]}), ["k"], page_size=16_384) as other:
        for source in (table, table.snapshot()):
            with pytest.raises(JoinInputError, match="`reader` reads pages of 16384 bytes, and those of"):
                operator(source, on="k", reader=other.reader())


@pytest.mark.parametrize("value", ["x", 0, 1.5, True, [1], np.array([1, 2])])
def test_numbers_of_pages_and_reads_are_checked(table, value):
    with pytest.raises(JoinInputError, match="`read_pages` must be a whole number of at least 1"):
        MeshJoin(table, on="k", read_pages=value)
    with pytest.raises(JoinInputError, match="`queue_depth` must be a whole number of at least 1"):
        IndexNestedLoops(table, on="k", queue_depth=value)


@pytest.mark.parametrize("option", ["cache_policy", "read_plan", "index"])
def test_names_of_choices_are_checked(table, option):
    with pytest.raises(JoinInputError, match=f"`{option}` must be"):
        SSIJ(table, on="k", **{option: np.array(["a", "b"])})


@pytest.mark.parametrize("other", ["planes", None, pa.table({"k": [1]})])
def test_a_join_is_made_over_a_table(operator, other):
    with pytest.raises(JoinInputError, match="over a table or a snapshot of one, not over"):
        operator(other, on="k")


@pytest.mark.parametrize("other", ["x", None, pa.table({"k": [1]})])
def test_what_is_pushed_is_a_record_batch(table, operator, other):
    join = operator(table, on="k")
    with pytest.raises(StreamSchemaError, match="comes as pyarrow record batches, not as"):
        join.push(other)
    assert numbers(join.push(batch(1))) + numbers(join.finish()) == [1]


@pytest.mark.parametrize("time", ["x", float("nan"), float("inf")])
def test_a_time_is_a_finite_number(table, operator, time):
    join = operator(table, on="k")
    with pytest.raises(JoinInputError, match="a time must be a finite number of seconds"):
        join.push(batch(1), at=time)
    with pytest.raises(JoinInputError, match="a time must be a finite number of seconds"):
        join.tick(time)
    assert numbers(join.push(batch(1))) + numbers(join.finish()) == [1]


def test_a_missing_join_column_is_named(table, operator):
    with pytest.raises(StreamSchemaError, match=r"'x'.*'k'"):
        operator(table, on=[("x", "k")]).push(batch(1))


def test_types_that_cannot_match_are_an_error_before_the_first_row(table, operator):
    with pytest.raises(KeyInputError, match="never equal"):
        operator(table, on="k").push(pa.record_batch({"k": pa.array([], pa.string())}))


def test_a_column_whose_rows_cannot_be_picked_is_refused(table, operator):
    with pytest.raises(StreamSchemaError, match="'text' has type string_view"):
        operator(table, on="k").push(pa.record_batch({"k": [1], "text": pa.array(["x"], pa.string_view())}))


def test_columns_of_many_types_pass_through(build, operator, rng):
    names = [f"key {number}" for number in range(600)]
    with build(pa.table({"name": names, "v": range(600)}), ["name"], unique=True, page_size=4096) as table:
        join = operator(table, on=[("code", "name")], how="left", memory="512KiB")
        rows = []
        for _ in range(4):
            picked = [f"key {number}" for number in rng.integers(0, 700, 50)]
            columns = {
                "code": pa.array(picked).dictionary_encode(),
                "large": pa.array(picked, pa.large_string()),
                "list": pa.array([[name, None] for name in picked]),
                "struct": pa.array([{"a": name} for name in picked]),
                "flag": pa.array([True, None] * 25),
            }
            results = join.push(pa.record_batch(columns))
            rows += [row for result in results for row in result.to_pylist()]
        rows += [row for result in join.finish() for row in result.to_pylist()]
    assert len(rows) == 200
    for row in rows:
        number = int(row["code"].split()[1])
        assert row["v"] == (number if number < 600 else None)
        assert row["large"] == row["list"][0] == row["struct"]["a"] == row["code"]


def test_there_is_one_streaming_side(table, operator):
    with pytest.raises(JoinInputError, match="side"):
        operator(table, on="k").push(batch(1), side="relation")


def test_a_snapshot_needs_a_reader(table, operator):
    with pytest.raises(JoinInputError, match="reader"):
        operator(table.snapshot(), on="k")
    join = operator(table.snapshot(), on="k", reader=table.reader())
    assert numbers(join.push(batch(1))) + numbers(join.finish()) == [1]


def test_a_join_over_a_snapshot_does_not_change(table):
    with pytest.raises(JoinStateError, match="snapshot"):
        SSIJ(table.snapshot(), on="k", reader=table.reader()).refresh()


def test_meshjoin_refuses_a_deadline(table):
    with pytest.raises(JoinInputError, match="SSIJ"):
        MeshJoin(table, on="k", deadline="1s")
    assert IndexNestedLoops(table, on="k", deadline="1s").deadline == 1.0


def test_counters_subtract_and_gauges_stay():
    earlier = SSIJStats(rows_in=5, join_phases=1, longest_wait=2.0, memory=MemoryUse(limit=9, used=4))
    later = SSIJStats(rows_in=12, join_phases=3, longest_wait=1.0, memory=MemoryUse(limit=9, used=3))
    interval = later - earlier
    assert (interval.rows_in, interval.join_phases, interval.longest_wait) == (7, 2, 1.0)
    assert interval.memory.used == 3


def test_unlike_statistics_do_not_subtract():
    with pytest.raises(TypeError):
        SSIJStats() - JoinStats()


def test_ratios_of_nothing_are_zero():
    assert (JoinStats().hit_ratio, JoinStats().rate) == (0.0, 0.0)
    assert JoinStats(rows_done=4, rows_cached=1, busy_seconds=2.0).hit_ratio == 0.25


def test_an_equality_names_each_key_column_once():
    with pytest.raises(JoinInputError):
        Equality((("a", "k"), ("b", "k"))).check(KeyCodec(pa.schema([("k", pa.int64())]), ("k",)))
