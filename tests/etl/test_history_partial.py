"""Partial changes against an oracle that keeps one register at a time, and properties that hold for any changes."""

import datetime as dt
import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner import MemoryBackend

from headrace.etl import Dimension
from headrace.etl.errors import DeclarationError
from headrace.etl.history import ChangeOutcome, History

ATTRIBUTES = {"a1": pa.string(), "a1c": pa.string(), "a2": pa.float64(), "b2": pa.string(), "au": pa.int64()}
THING = Dimension("thing", ("id",), "key", pa.schema([("id", pa.int64()), *ATTRIBUTES.items()]))
HISTORY = History(
    THING,
    effective="since",
    effective_type=pa.date32(),
    sequence="n",
    operation="op",
    partial="given",
    type_1="a1",
    type_1_current="a1c",
    audit="au",
)
CHANGES = pa.schema(
    [
        ("id", pa.int64()),
        *ATTRIBUTES.items(),
        ("since", pa.date32()),
        ("n", pa.int64()),
        ("op", pa.string()),
        ("given", pa.list_(pa.string())),
    ]
)
DAYS = [dt.date(2024, 1, day) for day in range(1, 6)]

change = st.fixed_dictionaries(
    {
        "id": st.integers(0, 1),
        "a1": st.sampled_from(["m", "n", None]),
        "a1c": st.sampled_from(["v", "w"]),
        "a2": st.sampled_from([1.0, 2.0, math.nan, None]),
        "b2": st.sampled_from(["x", "y"]),
        "au": st.integers(0, 3),
        "since": st.sampled_from(DAYS),
        "n": st.integers(0, 3),
        "op": st.sampled_from(["U", "U", "D"]),
        "given": st.none() | st.lists(st.sampled_from(list(ATTRIBUTES)), unique=True),
        "silent": st.booleans(),
    }
)


def prepared(rows):
    """Return rows in which a partial change may say nothing about whether the member is there."""
    return [
        {**row, "op": None if row["silent"] and row["given"] is not None else row["op"]} | {"silent": None}
        for row in rows
    ]


batches = st.lists(st.lists(change, min_size=1, max_size=4).map(prepared), min_size=1, max_size=4)


def plain(value):
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def rank(value):
    return (2, 0) if value is None else (1, 0) if plain(value) == "NaN" else (0, value)


def registers_of(row):
    """Return what a change says, register by register."""
    names = list(ATTRIBUTES) if row["given"] is None else row["given"]
    names = [name for name in names if row["op"] != "D" or name == "au"]
    said = {name: row[name] for name in names}
    return said if row["op"] is None else {**said, "deleted": row["op"] == "D"}


def states(changes, member):
    """Return the state of a member after each day with a change."""
    best, found = {}, []
    state = {**dict.fromkeys(ATTRIBUTES), "deleted": False}
    for row in (row for row in changes if row["id"] == member):
        day = best.setdefault(row["since"], {})
        for name, value in registers_of(row).items():
            if name not in day or (-row["n"], rank(value)) < (-day[name][0], rank(day[name][1])):
                day[name] = (row["n"], value)
    for day in sorted(best):
        state = state | {name: plain(value) for name, (_, value) in best[day].items()}
        found.append((day, state))
    return found


def expected_versions(changes):
    versions = []
    for member in sorted({row["id"] for row in changes}):
        entries, runs = states(changes, member), []
        for day, state in entries:
            shown = ("deleted",) if state["deleted"] else ("there", state["a2"], state["b2"])
            if runs and runs[-1][0] == shown:
                runs[-1][1].append((day, state))
            else:
                runs.append((shown, [(day, state)]))
        for number, (_, run) in enumerate(runs):
            (begin, first), (_, final) = run[0], run[-1]
            versions.append(
                {
                    "id": member,
                    "a1": entries[-1][1]["a1"],
                    "a1c": final["a1c"],
                    "a2": first["a2"],
                    "b2": first["b2"],
                    "au": first["au"],
                    "valid_from": begin,
                    "valid_to": runs[number + 1][1][0][0] if number + 1 < len(runs) else None,
                    "is_current": number + 1 == len(runs),
                    "version": number + 1,
                    "is_deleted": first["deleted"],
                    "is_inferred": False,
                }
            )
    return versions


class Kept:
    def __init__(self, history=HISTORY):
        self.memory = MemoryBackend(history)

    def apply(self, changes):
        return self.memory.apply(changes if isinstance(changes, pa.Table) else pa.Table.from_pylist(changes, CHANGES))

    def versions(self):
        rows = self.memory.versions().to_pylist()
        names = [name for name in self.memory.history.version_schema.names if name != "key"]
        rows.sort(key=lambda row: (row["id"], row["valid_from"]))
        return [{name: plain(row[name]) for name in names} for row in rows]


@settings(deadline=None, max_examples=60)
@given(batches)
def test_versions_are_those_of_the_oracle(given_batches):
    kept = Kept()
    for rows in given_batches:
        kept.apply(rows)
    assert kept.versions() == expected_versions([row for rows in given_batches for row in rows])


@settings(deadline=None, max_examples=40)
@given(batches, st.randoms(use_true_random=False))
def test_neither_order_nor_batches_matter(given_batches, random):
    rows = [row for batch in given_batches for row in batch]
    once, shuffled = Kept(), Kept()
    once.apply(rows)
    random.shuffle(rows)
    for row in rows:
        shuffled.apply([row])
    assert shuffled.versions() == once.versions()


@settings(deadline=None, max_examples=40)
@given(batches)
def test_a_replay_adds_nothing(given_batches):
    kept = Kept()
    for rows in given_batches:
        kept.apply(rows)
        again = kept.apply(rows)
        for part in (again.upserts, again.deletes, again.inserted, again.updated, again.retired, again.moved):
            assert part.num_rows == 0
        assert set(again.counts) <= {ChangeOutcome.REPLAYED, ChangeOutcome.SUPERSEDED}


def days(*texts):
    return [dt.date.fromisoformat(text) for text in texts]


def test_columns_that_changes_lack_are_carried():
    kept = Kept(History(THING, effective="since", effective_type=pa.date32(), sequence="n", partial="given"))
    full = {"id": [1], "a1": ["m"], "a1c": ["v"], "a2": [1.0], "b2": ["x"], "au": [0], "since": days("2024-01-01")}
    kept.apply(pa.table({**full, "n": [1]}))
    kept.apply(pa.table({"id": [1], "b2": ["y"], "since": days("2024-01-05"), "n": [2]}))
    late = kept.apply(pa.table({"id": [1], "a1": ["n"], "since": days("2024-01-03"), "n": [3]}))
    found = [(row["valid_from"].day, row["a1"], row["b2"]) for row in kept.versions()]
    assert found == [(1, "m", "x"), (3, "n", "x"), (5, "n", "y")]
    assert late.outcomes.to_pylist() == [{"outcome": "versioned", "cause": None, "late": True}]


def test_a_change_that_names_no_attribute_is_rejected():
    row = dict.fromkeys(CHANGES.names) | {"id": 1, "since": DAYS[0], "n": 1, "op": "U", "given": ["a1", "colour"]}
    applied = Kept().apply([row])
    assert applied.outcomes.column("outcome").to_pylist() == ["rejected"]
    assert "'given' names what is no attribute" in applied.outcomes.column("cause")[0].as_py()


def test_a_full_row_needs_an_operation():
    row = dict.fromkeys(CHANGES.names) | {"id": 1, "since": DAYS[0], "n": 1}
    assert Kept().apply([row]).outcomes.column("outcome").to_pylist() == ["rejected"]


def test_a_value_that_is_not_given_is_not_read():
    history = History(
        Dimension(
            "thing", ("id",), "key", pa.schema([("id", pa.int64()), ("level", pa.int8()), ("name", pa.string())])
        ),
        effective="since",
        effective_type=pa.date32(),
        partial="given",
    )
    table = pa.table(
        {"id": [1, 2], "level": [1000, 1000], "name": ["a", "b"], "since": [DAYS[0]] * 2, "given": [["name"], None]}
    )
    applied = Kept(history).apply(table)
    assert applied.outcomes.column("outcome").to_pylist() == ["added", "rejected"]


def test_type_0_has_no_partial_changes():
    with pytest.raises(DeclarationError, match="type 0"):
        History(THING, partial="given", type_0="a1")


def test_a_list_of_something_else_is_refused():
    table = pa.table({"id": [1], "since": [DAYS[0]], "n": [1], "op": ["U"], "given": [1]})
    with pytest.raises(DeclarationError, match="list of text"):
        Kept().apply(table)
