"""Arrivals: every row once, in order of time, and a replay that keeps to it."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.streams import Near, ProgressiveMerge, SymmetricHash
from headrace.joins.streams.arrivals import (
    Arrival,
    arrivals_at_rates,
    arrivals_by_time,
    arrivals_in_turn,
    replay,
    seconds_of,
)
from headrace.joins.streams.catalog import ALGORITHMS, choose_algorithm, make_join

SCHEMA = pa.schema([("t", pa.int64()), ("n", pa.int64())])


def batches_of(times, size, first=0):
    rows = pa.table({"t": pa.array(times, pa.int64()), "n": range(first, first + len(times))}, schema=SCHEMA)
    return [batch for batch in rows.to_batches(max_chunksize=size) if len(batch)]


sorted_times = st.lists(st.integers(0, 30), max_size=40).map(sorted)


@given(
    st.lists(sorted_times, min_size=2, max_size=4), st.integers(1, 7), st.integers(1, 5), st.sampled_from([0, 2, 99])
)
def test_all_rows_arrive_once_and_in_order_up_to_the_size_of_a_batch(inputs, size, rows, window):
    streams = {f"i{side}": batches_of(times, size) for side, times in enumerate(inputs)}
    found = list(arrivals_by_time(streams, dict.fromkeys(streams, "t"), window=window, rows=rows))
    for side, times in enumerate(inputs):
        mine = [arrival for arrival in found if arrival.side == f"i{side}"]
        assert mine[-1].batch is None
        assert [n for arrival in mine[:-1] for n in arrival.batch["n"].to_pylist()] == list(range(len(times)))
        assert all(arrival.at == arrival.batch["t"][-1].as_py() for arrival in mine[:-1])
    latest = 0
    for arrival in found:
        if arrival.batch is not None:
            first = arrival.batch["t"][0].as_py()
            assert arrival.at - first <= window
            latest = max(latest, arrival.at)
            assert first >= latest - window


def test_rows_of_two_inputs_alternate_within_a_few_rows():
    streams = {side: batches_of(range(1000), 1000) for side in "ab"}
    seen = dict.fromkeys(streams, 0)
    for arrival in arrivals_by_time(streams, {"a": "t", "b": "t"}, rows=10):
        if arrival.batch is not None:
            seen[arrival.side] += len(arrival.batch)
            assert abs(seen["a"] - seen["b"]) <= 10


def test_rates_give_the_same_arrivals_for_the_same_seed():
    streams = {side: batches_of(range(2000), 300) for side in "ab"}

    def arrivals(seed):
        found = arrivals_at_rates(streams, {"a": 100.0, "b": 400.0}, seed)
        return [(arrival.side, arrival.at, arrival.batch and len(arrival.batch)) for arrival in found]

    assert arrivals(1) == arrivals(1) != arrivals(2)
    ends = {side: at for side, at, rows in arrivals(1) if rows}
    assert ends["a"] == pytest.approx(20, rel=0.1)
    assert ends["b"] == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_are_positive(rate):
    with pytest.raises(JoinInputError, match="positive number"):
        arrivals_at_rates({"a": []}, {"a": rate}, 0)


@pytest.mark.parametrize(
    ("array", "seconds"),
    [
        (pa.array([1, None], pa.int32()), 1.0),
        (pa.array([Decimal("1.5"), None]), 1.5),
        (pa.array([2_500_000_000, None], pa.timestamp("ns", "Europe/Athens")), 2.5),
        (pa.array([dt.date(1970, 1, 2), None], pa.date32()), 86400.0),
        (pa.array([dt.date(1970, 1, 2), None], pa.date64()), 86400.0),
        (pa.array([dt.time(0, 1), None], pa.time32("ms")), 60.0),
        (pa.array([dt.time(0, 1), None], pa.time64("us")), 60.0),
        (pa.array([dt.timedelta(seconds=3), None], pa.duration("us")), 3.0),
    ],
)
def test_times_of_all_types_are_seconds(array, seconds):
    first, missing = seconds_of(array, "t")
    assert first == seconds
    assert np.isnan(missing)


class Pace:
    """A clock that only sleep moves."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_replay_keeps_to_the_times_of_the_arrivals():
    batch, pace, at = pa.record_batch({"x": [1]}), Pace(), []

    def arrivals():
        for side, time in (("a", 100.0), ("b", 160.0), ("a", 190.0)):
            yield Arrival(side, batch, time)
            at.append(pace.now)
        yield from (Arrival(side, None, 190.0) for side in "ab")

    with SymmetricHash({"a": batch.schema, "b": batch.schema}, "x", clock=pace) as join:
        results = list(replay(join, arrivals(), speed=60, clock=pace, sleep=pace.sleep))
    assert at == pytest.approx([0.0, 1.0, 1.5])
    assert sum(map(len, results)) == 2


def test_a_replay_works_on_spilled_tuples_while_it_waits(tmp_path):
    rng, pace = np.random.default_rng(1), Pace()
    inputs = {side: pa.record_batch({"x": rng.integers(0, 4000, 4000)}) for side in "ab"}
    on, schemas = [("a.x", "b.x")], {side: batch.schema for side, batch in inputs.items()}
    found = [Arrival(side, batch, 0.0) for side, batch in inputs.items()]
    found += [Arrival("a", inputs["a"].slice(0, 1), 60.0)]
    with make_join("hash-merge", schemas, on, "inner", "192KiB", spill=tmp_path, clock=pace) as join:
        list(replay(join, found, speed=1, clock=pace, sleep=pace.sleep))
        assert join.stats.rows_reactive > 0
        assert pace.now == pytest.approx(60)


ROWS = pa.record_batch({"t": [1, 2]})
GIVEN = {"a": [ROWS]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arrivals_in_turn(None), "`streams` must map the names"),
        (lambda: arrivals_in_turn({"a": 5}), "batches of input 'a' must be iterable"),
        (lambda: arrivals_by_time([ROWS], {"a": "t"}), "`streams` must map the names"),
        (lambda: arrivals_by_time(GIVEN, "t"), "`columns` must have an entry for input 'a'"),
        (lambda: arrivals_by_time(GIVEN, {}), "`columns` must have an entry for input 'a'"),
        (lambda: arrivals_by_time(GIVEN, {"a": "t"}, window=-1), "`window` must be a number of seconds of at least 0"),
        (lambda: arrivals_by_time(GIVEN, {"a": "t"}, window=float("nan")), "`window` must be"),
        (lambda: arrivals_by_time(GIVEN, {"a": "t"}, rows=0), "`rows` must be a whole number of at least 1"),
        (lambda: arrivals_at_rates(GIVEN, 5, 1), "`rates` must have an entry for input 'a'"),
        (lambda: arrivals_at_rates(GIVEN, {"a": "5"}, 1), "rate of input 'a' must be a positive number"),
        (lambda: arrivals_at_rates(GIVEN, {"a": 5}, None), "`seed` must be a whole number of at least 0"),
        (lambda: seconds_of([1], "at"), "at must be a pyarrow array, not list"),
        (lambda: replay(None, []), "`join` must be a join of streams"),
        (lambda: replay(joined(), 5), "arrivals must be iterable"),
        (lambda: replay(joined(), [ROWS]), "a replay takes Arrivals"),
        (lambda: replay(joined(), [], speed=0), "`speed` must be a positive number"),
        (lambda: replay(joined(), [], clock=5), "`clock` must be a function"),
        (lambda: replay(joined(), [], sleep=5), "`sleep` must be a function"),
        (lambda: [choose_algorithm([], 2, ["x"], "inner")], r"no algorithm \[\]"),
        (lambda: [choose_algorithm("auto", None, ["x"], "inner")], "`inputs` must be a whole number"),
        (lambda: [choose_algorithm("auto", 2, None, "inner")], "`on` must be pairs of columns"),
        (lambda: [make_join("auto", [SCHEMA], "n")], "`inputs` must map the names"),
    ],
)
def test_wrong_arguments_are_refused_by_their_names(call, message):
    with pytest.raises(JoinInputError, match=message):
        list(call())


@pytest.mark.parametrize(
    "call",
    [
        lambda given: arrivals_in_turn({"a": given}),
        lambda given: arrivals_by_time({"a": given}, {"a": "t"}),
        lambda given: arrivals_at_rates({"a": given}, {"a": 1.0}, 1),
    ],
)
def test_inputs_come_as_record_batches(call):
    with pytest.raises(StreamSchemaError, match="record batches, not as Table"):
        list(call([pa.table({"t": [1]})]))


def test_a_time_column_that_the_input_lacks_is_named():
    with pytest.raises(StreamSchemaError, match="input 'a' must have one time column 'z'; its columns are 't'"):
        list(arrivals_by_time(GIVEN, {"a": "z"}))


def test_a_single_condition_chooses_an_operator():
    with make_join("auto", {"a": SCHEMA, "b": SCHEMA}, Near("a.t", "b.t", 1)) as join:
        assert type(join).__name__ == "DINER"


def joined():
    return SymmetricHash({"a": ROWS.schema, "b": ROWS.schema}, "t")


def test_inputs_in_turn_end_when_they_are_empty():
    found = list(arrivals_in_turn({"a": [], "b": batches_of([1, 2], 1)}))
    assert [(arrival.side, arrival.batch is None) for arrival in found] == [
        ("a", True), ("b", False), ("b", False), ("b", True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_tells_what_an_operator_can_do(name):
    entry, schema = ALGORITHMS[name], pa.schema([("x", pa.int64())])
    for how in ("inner", "left", "right", "full"):
        if how in entry.hows:
            make_join(name, {"a": schema, "b": schema}, [("a.x", "b.x")], how).close()
        else:
            with pytest.raises(JoinInputError, match=f"{name} makes no {how} join of 2 inputs; choose "):
                choose_algorithm(name, 2, [("a.x", "b.x")], how)


def test_a_parameter_that_the_operator_does_not_have_is_refused():
    schema = pa.schema([("x", pa.int64())])
    with pytest.raises(JoinInputError, match="XJoin has no parameter fan_in"):
        make_join("xjoin", {"a": schema, "b": schema}, [("a.x", "b.x")], fan_in=4)
    join = make_join("progressive-merge", {"a": schema, "b": schema}, [("a.x", "b.x")], fan_in=4)
    assert isinstance(join, ProgressiveMerge)
