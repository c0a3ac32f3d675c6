"""Random streams and schedules of their arrival, oracles, and the operators that the whole suite applies to.

An operator joins the suite by one line in `OPERATORS`.
"""

import math
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from headrace.joins.errors import MemoryBudgetError
from headrace.joins.streams import (
    DINER,
    MINER,
    RPJ,
    DoublePipelinedHash,
    HashMerge,
    MJoin,
    Near,
    PRJoin,
    ProgressiveMerge,
    PunctuatedJoin,
    SymmetricHash,
    XJoin,
)

sys.path.insert(0, str(Path(__file__).parent))
from twins import NestedLoops, combinations, parsed

NAMES = ("a", "b", "c", "d", "e")
PLENTY = 32 << 20
WAIT = 0.025
HOWS = ("inner", "left", "right", "full")


@dataclass(frozen=True)
class Contestant:
    """An operator of the suite.

    `spills` says whether it takes `spill=` and works from its least memory on.
    """

    make: object
    bands: bool = True
    most_inputs: int = 2
    star_only: bool = False  # whether all inputs must share one key
    hows: tuple = ("inner",)
    spills: bool = True


OPERATORS = {
    "nested loops": Contestant(NestedLoops, most_inputs=5, spills=False),
    "DINER": Contestant(DINER),
    "MINER": Contestant(MINER, most_inputs=5),
    "MJoin": Contestant(MJoin, bands=False, most_inputs=5, star_only=True),
    "RPJ": Contestant(RPJ, bands=False),
    "PR-Join": Contestant(PRJoin, bands=False),
    "symmetric hash": Contestant(SymmetricHash, hows=HOWS, spills=False),
    "progressive merge": Contestant(ProgressiveMerge),
    "hash merge": Contestant(HashMerge, bands=False),
    "xjoin": Contestant(XJoin, bands=False, hows=HOWS),
    "punctuated": Contestant(PunctuatedJoin, bands=False, most_inputs=5, star_only=True),
    "double-pipelined hash": Contestant(DoublePipelinedHash, bands=False, hows=HOWS),
}


@dataclass
class Case:
    inputs: dict
    on: list
    sql: str
    how: str = "inner"
    events: list = field(default_factory=list)

    @property
    def schemas(self):
        return {name: table.schema for name, table in self.inputs.items()}


class SimulatedClock:
    """A clock that each look moves on a little, as if work took time."""

    def __init__(self, step=0.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def column(rng, kind, numbers):
    """Return a column of a kind in which equal numbers are equal keys; one in ten is null."""
    missing = rng.random(len(numbers)) < 0.1
    known = [None if gone else int(number) for gone, number in zip(missing, numbers, strict=True)]
    match kind:
        case "int64":
            return pa.array(known, pa.int64())
        case "int32":
            return pa.array(known, pa.int32())
        case "text":
            return pa.array([None if n is None else f"a common prefix {n}" for n in known], pa.string())
        case "float":
            special = {3: math.nan, 4: math.inf, 5: -0.0, 6: 0.0, 7: -math.inf}
            return pa.array([None if n is None else special.get(n, n / 4) for n in known], pa.float64())
        case "time":
            return pa.array(known, pa.int64()).cast(pa.timestamp("ms"))
    raise AssertionError(kind)


def make_input(rng, kinds, rows, domain, shift=0):
    """Return a table with keys `x` and `y` of these kinds, an `id`, and other columns."""
    skewed = np.minimum(rng.integers(0, domain, rows), rng.integers(0, domain, rows)) + shift
    table = {"id": pa.array(range(rows), pa.int64()), "x": column(rng, kinds[0], skewed)}
    if len(kinds) > 1:
        table["y"] = column(rng, kinds[1], rng.integers(0, max(1, domain // 2), rows))
    words = rng.choice(["", "alpha", "ß", "x" * 30], rows)
    table["w"] = pa.array(words.astype(object), pa.string(), mask=rng.random(rows) < 0.2)
    table["flag"] = pa.array(rng.random(rows) < 0.5, mask=rng.random(rows) < 0.1)
    return pa.table(table)


def two_inputs(bands):
    """Return kinds of the keys, conditions and SQL of joins of two inputs."""
    choices = [
        (("int64",), ("int64",), ["x"], "a.x = b.x"),
        (("int64",), ("int32",), [("a.x", "b.x")], "a.x = b.x"),
        (("text",), ("text",), [("b.x", "a.x")], "a.x = b.x"),
        (("float",), ("float",), ["x"], "a.x = b.x AND NOT isnan(a.x)"),
        (("int64", "text"), ("int32", "text"), ["x", "y"], "a.x = b.x AND a.y = b.y"),
        (("int32", "int32"), ("int32", "int32"), [("x", "y"), ("y", "x")], "a.x = b.y AND a.y = b.x"),
    ]
    near = [
        (("int64",), ("int32",), [Near("x", "x", 2)], "abs(a.x - b.x) <= 2"),
        (("float",), ("float",), [Near("a.x", "b.x", 0.5)], "abs(a.x - b.x) <= 0.5 AND NOT isnan(a.x - b.x)"),
        (
            ("time",),
            ("time",),
            [Near("x", "x", "3ms")],
            "abs(epoch_ms(a.x::TIMESTAMP) - epoch_ms(b.x::TIMESTAMP)) <= 3",
        ),
        (("int64", "text"), ("int64", "text"), ["y", Near("x", "x", 1)], "a.y = b.y AND abs(a.x - b.x) <= 1"),
    ]
    return choices + near * bands


def many_inputs(shape, count):
    """Return conditions and SQL of a join of several inputs."""
    if shape == "one key":
        pairs = [((left, "x"), (left + 1, "x")) for left in range(count - 1)]
    elif shape == "chain":
        pairs = [((left, "y"), (left + 1, "x")) for left in range(count - 1)]
    elif shape == "star":
        pairs = [((0, "xy"[other % 2]), (other, "x")) for other in range(1, count)]
    else:  # a snowflake: a center whose neighbors have neighbors
        pairs = [(((other - 1) // 2, "xy"[other % 2]), (other, "y")) for other in range(1, count)]
    named = [tuple(f"{NAMES[side]}.{name}" for side, name in pair) for pair in pairs]
    return named, " AND ".join(f"{left} = {right}" for left, right in named)


@st.composite
def cases(draw, contestant):
    """Draw inputs, conditions, and a schedule of arrivals, blocked times and ends."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    domain = draw(st.sampled_from([1, 3, 12, 200]))
    count = draw(st.integers(2, contestant.most_inputs))
    most = {1: 12, 3: 20, 12: 60, 200: 400}[domain] if count == 2 else {1: 4, 3: 8, 12: 30, 200: 100}[domain]
    sizes = [draw(st.sampled_from([0, 1, most // 3, most, most])) for _ in range(count)]
    if count == 2:
        left, right, on, sql = draw(st.sampled_from(two_inputs(contestant.bands)))
        kinds = [left, right]
    else:
        shape = "one key" if contestant.star_only else draw(st.sampled_from(["one key", "chain", "star", "snowflake"]))
        on, sql = many_inputs(shape, count)
        kinds = [("int64", "int64")] * count
    inputs = {
        NAMES[side]: make_input(rng, kinds[side], sizes[side], domain, int(rng.integers(0, 3))) for side in range(count)
    }
    how = draw(st.sampled_from(contestant.hows)) if count == 2 else "inner"
    return Case(
        inputs, on, sql, how, schedule(rng, sizes, draw(st.sampled_from([1, 3, 40])), early_ends=draw(st.booleans()))
    )


def schedule(rng, sizes, piece, *, early_ends=False):
    """Return events in order of time: pushes of pieces in any interleaving, ticks, idle times, and ends."""
    left = {side: 0 for side, size in enumerate(sizes)}
    events, now = [], 0.0
    while left:
        side = int(rng.choice(list(left)))
        now += float(rng.choice([0.0, 0.001, 0.1]))
        kind = rng.random()
        if kind < 0.15:
            events.append(("tick", None, now))
            continue
        if kind < 0.25:
            events.append(("idle", None, (now, now + 0.05)))
            continue
        start, stop = left[side], min(sizes[side], left[side] + int(rng.integers(0, piece + 1)))
        events.append(("push", side, (start, stop, now)))
        left[side] = stop
        if stop == sizes[side] and rng.random() < 0.7:
            del left[side]
            if early_ends:
                events.append(("end", side, now))
    return events


def expected(case):
    """Return what DuckDB says."""
    connection = duckdb.connect()
    for name, table in case.inputs.items():
        connection.register(name, table)
    taken, columns = set(), []
    for side, (name, table) in enumerate(case.inputs.items()):
        for label in table.column_names:
            out = label
            while out in taken and side:
                out = f"{out}_right" if len(case.inputs) == 2 else f"{name}_{out}"
            taken.add(out)
            columns.append(f"{name}.{label} AS {out}")
    names = list(case.inputs)
    if len(names) == 2:
        source = f"{names[0]} {case.how} JOIN {names[1]} ON {case.sql}"
    else:
        source = f"{', '.join(names)} WHERE {case.sql}"
    return connection.sql(f"SELECT {', '.join(columns)} FROM {source}").to_arrow_table()


def naive(case, arrived):
    """Return the ids of the result of an inner join of the first rows of each input, by nested loops."""
    rows = [table.slice(0, count).to_pylist() for table, count in zip(case.inputs.values(), arrived, strict=True)]
    names = list(case.inputs)
    conditions = [parsed(condition, names) for condition in case.on]
    found = combinations(rows, [range(len(values)) for values in rows], conditions)
    return {tuple(rows[side][at]["id"] for side, at in enumerate(combination)) for combination in found}


def assert_same_rows(result, wanted):
    """Assert that two tables are the same multiset of rows."""
    assert result.column_names == wanted.column_names
    connection = duckdb.connect()
    connection.register("result", result)
    connection.register("wanted", wanted)
    for first, second in (("result", "wanted"), ("wanted", "result")):
        extra = connection.sql(f"SELECT * FROM {first} EXCEPT ALL SELECT * FROM {second}").limit(3).fetchall()
        assert not extra, f"in {first} only: {extra}; {len(result)} rows against {len(wanted)}"


def id_columns(join):
    """Return positions of the ids of all inputs in the results."""
    positions, start = [], 0
    for schema in join.algorithm.graph.schemas:
        positions.append(start + schema.get_field_index("id"))
        start += len(schema)
    return positions


def play(join, case):
    """Yield the kind of each event, how many rows of each input have arrived, and the results that it gave."""
    arrived, names = [0] * len(case.inputs), list(case.inputs)
    for kind, side, detail in case.events:
        if kind == "push":
            start, stop, now = detail
            rows = case.inputs[names[side]].slice(start, stop - start)
            batch = rows.combine_chunks().to_batches()[0] if len(rows) else pa.RecordBatch.from_pylist([], rows.schema)
            arrived[side] = stop
            yield kind, list(arrived), list(join.push(batch, side=names[side], at=now))
        elif kind == "end":
            yield kind, list(arrived), list(join.end(names[side], at=detail))
        elif kind == "tick":
            yield kind, list(arrived), list(join.tick(detail))
        else:
            yield kind, list(arrived), list(join.idle(detail[0], until=detail[1]))
    yield "finish", list(arrived), list(join.finish())


def run(join, case):
    """Play a case to its end and return the results as a table."""
    batches = [batch for _, _, results in play(join, case) for batch in results]
    return pa.Table.from_batches(batches, join.schema)


def least_memory(contestant, case, spill):
    """Return the least memory with which an operator can be made, as its errors say."""
    memory = 1
    while True:
        try:
            contestant.make(case.schemas, case.on, memory=memory, spill=spill).close()
        except MemoryBudgetError as error:
            told = int(re.search(r"at least (\d+) bytes", str(error))[1])
            assert told > memory
            memory = told
        else:
            return memory
    for _ in range(20):
        try:
            contestant.make(case.schemas, case.on, case.how, memory, spill=spill).close()
        except MemoryBudgetError as error:
            memory = max(memory + 1, int(re.search(r"at least (\d+) bytes", str(error))[1]))
        else:
            return memory
    raise AssertionError(memory)


def make(contestant, case, folder, factor=None, clock=None, **options):
    """Return an operator for a case, with a multiple of its least memory, or with plenty."""
    memory = PLENTY
    if contestant.spills:
        options["spill"] = folder
        if factor is not None:
            memory = int(factor * least_memory(contestant, case, folder))
    return contestant.make(case.schemas, case.on, case.how, memory, clock=clock or SimulatedClock(0.001), **options)


class Tools:
    """What tests take from here: with importlib imports a test cannot import its neighbours."""

    Case = Case
    OPERATORS = OPERATORS
    Contestant = Contestant
    SimulatedClock = SimulatedClock
    WAIT = WAIT
    assert_same_rows = staticmethod(assert_same_rows)
    cases = staticmethod(cases)
    expected = staticmethod(expected)
    id_columns = staticmethod(id_columns)
    least_memory = staticmethod(least_memory)
    make = staticmethod(make)
    make_input = staticmethod(make_input)
    naive = staticmethod(naive)
    play = staticmethod(play)
    replace = staticmethod(replace)
    run = staticmethod(run)
    schedule = staticmethod(schedule)


@pytest.fixture(scope="session")
def tools():
    return Tools


@pytest.fixture(scope="session", params=OPERATORS)
def contestant(request):
    return OPERATORS[request.param]
