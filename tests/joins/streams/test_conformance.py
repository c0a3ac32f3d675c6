"""What every join of streams promises. The operators are listed in `OPERATORS` of conftest.py."""

import errno
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.joins.errors import ClosedError, FinishedError, JoinInputError, StreamSchemaError
from headrace.storage.errors import CorruptPageError, KeyInputError, StorageIOError
from headrace.storage.file import FileBackend

EXAMPLES = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
MANY = settings(EXAMPLES, max_examples=150)
FACTORS = st.sampled_from([1.0, 1.3, 3.0, None])


@pytest.fixture
def large(tools, contestant):
    """Inputs that exceed the least memory several times, if the operator spills."""
    rng, rows = np.random.default_rng(5), 1500 if contestant.spills else 60
    inputs = {name: tools.make_input(rng, ["int64"], rows, 1000) for name in "ab"}
    return tools.Case(inputs, [("a.x", "b.x")], "a.x = b.x", events=tools.schedule(rng, [rows, rows], 100))


@given(data=st.data())
@EXAMPLES
def test_the_results_are_the_relational_join(tools, contestant, tmp_path, data):
    check_results(tools, contestant, tmp_path, data)


@pytest.mark.slow
@given(data=st.data())
@MANY
def test_the_results_are_the_relational_join_in_many_cases(tools, contestant, tmp_path, data):
    check_results(tools, contestant, tmp_path, data)


def check_results(tools, contestant, tmp_path, data):
    case = data.draw(tools.cases(contestant))
    with tools.make(contestant, case, tmp_path, data.draw(FACTORS)) as join:
        result = tools.run(join, case)
        assert join.stats.memory.peak <= join.stats.memory.limit
        assert join.stats.rows_out == len(result)
        tools.assert_same_rows(result, tools.expected(case))
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
@EXAMPLES
def test_results_only_grow_and_belong_to_what_has_arrived(tools, contestant, tmp_path, data):
    check_prefixes(tools, contestant, tmp_path, data)


@pytest.mark.slow
@given(data=st.data())
@MANY
def test_results_only_grow_and_belong_to_what_has_arrived_in_many_cases(tools, contestant, tmp_path, data):
    check_prefixes(tools, contestant, tmp_path, data)


def check_prefixes(tools, contestant, tmp_path, data):
    case = tools.replace(data.draw(tools.cases(contestant)), how="inner")
    seen = set()
    with tools.make(contestant, case, tmp_path, data.draw(FACTORS)) as join:
        ids = tools.id_columns(join)
        for _, arrived, batches in tools.play(join, case):
            for batch in batches:
                rows = list(zip(*(batch.column(at).to_pylist() for at in ids), strict=True))
                assert len(set(rows)) == len(rows)
                assert not seen & set(rows), "given before"
                seen |= set(rows)
                assert all(row[side] < arrived[side] for row in rows for side in range(len(arrived)))
    assert seen == tools.naive(case, [len(table) for table in case.inputs.values()])


def test_inputs_larger_than_memory_are_joined_in_the_same_way_each_time(tools, contestant, large, tmp_path):
    def once():
        with tools.make(contestant, large, tmp_path, 1.2) as join:
            results = [(kind, batch) for kind, _, batches in tools.play(join, large) for batch in batches]
            stats = join.stats
        assert stats.memory.peak <= stats.memory.limit
        assert (stats.rows_spilled > 0) == contestant.spills
        assert stats.rows_out == stats.rows_arriving + stats.rows_reactive + stats.rows_cleanup
        return results

    results = once()
    table = pa.Table.from_batches([batch for _, batch in results])
    tools.assert_same_rows(table, tools.expected(large))
    assert once() == results


def test_results_come_while_tuples_arrive(tools, contestant, tmp_path):
    batch = pa.record_batch({"id": [0], "x": [7]})
    case = tools.Case({name: pa.table(batch) for name in "ab"}, ["x"], "a.x = b.x")
    with tools.make(contestant, case, tmp_path) as join:
        join.push(batch, side="a", at=0.0).drain()
        early = join.push(batch, side="b", at=1.0).drain()
        assert early + join.finish().drain() == 1


class FailingBackend(FileBackend):
    """A file on a disk that is full after some writes, or that damages what it reads."""

    writes_left = 10**9
    damage = False

    def pwrite(self, offset, data):
        if type(self).writes_left <= 0:
            raise StorageIOError(f"cannot write {self.path}: {os.strerror(errno.ENOSPC)}; free space and try again")
        type(self).writes_left -= 1
        super().pwrite(offset, data)

    def pread_into(self, offset, buffers):
        super().pread_into(offset, buffers)
        if self.damage:
            buffers[0][40] ^= 1


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"writes_left": 1}, StorageIOError, "free space"),
        ({"damage": True}, CorruptPageError, "damaged"),
    ],
    ids=["full disk", "damaged block"],
)
def test_a_failing_disk_ends_the_join_with_an_error(tools, contestant, large, tmp_path, fault, error, message):
    if not contestant.spills:
        pytest.skip("this operator does not spill")
    backend = type("Backend", (FailingBackend,), fault)
    options = {"backend": lambda path: backend(path, "x")}
    seen = set()
    with tools.make(contestant, large, tmp_path, 1.2, **options) as join:
        with pytest.raises(error, match=message):  # noqa: PT012 - results come until the error
            for _, _, batches in tools.play(join, large):
                for batch in batches:
                    rows = set(zip(*(batch.column(at).to_pylist() for at in tools.id_columns(join)), strict=True))
                    assert not seen & rows
                    seen |= rows
        with pytest.raises(Exception, match=r"failed before|is finished"):
            join.finish()
    wanted = tools.expected(large)
    assert seen <= set(zip(wanted["id"].to_pylist(), wanted["id_right"].to_pylist(), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_calls_are_checked(tools, contestant, tmp_path):
    batch = pa.record_batch({"id": [0], "x": [7]})
    case = tools.Case({name: pa.table(batch) for name in "ab"}, ["x"], "a.x = b.x")
    join = tools.make(contestant, case, tmp_path)
    with pytest.raises(JoinInputError, match="no input 'z'"):
        join.push(batch, side="z")
    with pytest.raises(StreamSchemaError, match="schema that the join was made with"):
        join.push(batch.select(["x"]), side="a")
    with pytest.raises(StreamSchemaError, match="to_batches"):
        join.push(pa.table(batch), side="a")
    with pytest.raises(JoinInputError, match="finite number"):
        join.push(batch, side="a", at=float("nan"))
    join.end("a").drain()
    with pytest.raises(FinishedError, match="has ended"):
        join.push(batch, side="a")
    join.push(batch, side="b").drain()
    join.finish().drain()
    with pytest.raises(FinishedError):
        join.tick()
    join.close()
    join.close()
    assert join.stats.rows_in == 1
    with pytest.raises(ClosedError):
        join.push(batch, side="b")


@pytest.mark.parametrize(
    ("right", "error", "message"),
    [
        (pa.string(), KeyInputError, "can never equal"),
        (pa.float64(), KeyInputError, "both are floats"),
        (pa.list_(pa.int64()), Exception, "type list"),
    ],
)
def test_types_that_never_match_are_refused_before_the_first_row(contestant, right, error, message):
    inputs = {"a": pa.schema([("x", pa.int64())]), "b": pa.schema([("x", right)])}
    with pytest.raises(error, match=message):
        contestant.make(inputs, "x")
