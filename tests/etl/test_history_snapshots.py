"""Snapshots against an oracle that compares dictionaries, and snapshots that the declaration does not admit."""

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.etl import Dimension, KeyAllocator, KeyRule
from headrace.etl.errors import DeclarationError
from headrace.etl.history import (
    History,
    SpecialMembers,
    apply_changes,
    inferred_entries,
    snapshot_changes,
    special_versions,
)
from headrace.etl.history.changes import take_in
from headrace.storage.errors import KeyInputError

SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string()), ("size", pa.float64()), ("load", pa.int64())])
CUSTOMER = Dimension("customer", ("id",), "key", SCHEMA)
HISTORY = History(CUSTOMER, effective="since", effective_type=pa.date32(), sequence="n", operation="op", audit="load")
DAYS = [dt.date(2024, 1, day) for day in range(1, 6)]

members = st.dictionaries(
    st.integers(0, 5), st.tuples(st.sampled_from(["x", "y", None]), st.sampled_from([1.0, float("nan"), None]))
)


class Kept:
    def __init__(self, history=HISTORY):
        self.history = history
        self.entries = history.entry_schema.empty_table()
        self.base = 0

    def apply(self, table):
        applied = apply_changes(self.history, self.entries, table, KeyAllocator(self.base))
        self.base += applied.new_keys
        gone = {(row["id"], row["_at"]) for row in applied.deletes.to_pylist()}
        rows = {(row["id"], row["_at"]): row for row in self.entries.to_pylist()}
        rows |= {(row["id"], row["_at"]): row for row in applied.upserts.to_pylist()}
        kept = [row for key, row in rows.items() if key not in gone]
        self.entries = pa.Table.from_pylist(kept, self.history.entry_schema)
        return applied

    def versions(self):
        heads = [row for row in self.entries.to_pylist() if row["_at"] == row["valid_from"]]
        names = self.history.version_schema.names
        rows = pa.Table.from_pylist(heads, self.history.entry_schema).select(names)
        return pa.concat_tables([special_versions(self.history), rows.cast(self.history.version_schema)])

    def there(self, day):
        """Return what is valid at a day and not deleted."""
        return {
            row["id"]: (row["city"], repr(row["size"]))
            for row in self.versions().to_pylist()
            if row["key"] > 0
            and row["valid_from"] <= day
            and (row["valid_to"] is None or day < row["valid_to"])
            and not row["is_deleted"]
        }


def table_of(state, load=0):
    rows = [{"id": number, "city": city, "size": size, "load": load} for number, (city, size) in state.items()]
    return pa.Table.from_pylist(rows, SCHEMA)


@settings(deadline=None, max_examples=100)
@given(st.lists(members, min_size=1, max_size=4), st.booleans())
def test_snapshots_lead_from_state_to_state(states, keep):
    kept, expected = Kept(), {}
    for number, state in enumerate(states):
        shown = {member: (city, repr(size)) for member, (city, size) in state.items()}
        missing = "keep" if keep else "delete"
        changes = snapshot_changes(
            HISTORY, kept.versions(), table_of(state, number), DAYS[number], sequence=number, missing=missing
        )
        changed = [member for member, values in shown.items() if expected.get(member) != values]
        gone = [] if keep else sorted(expected.keys() - shown.keys())
        assert sorted(changes.filter(pa.compute.equal(changes["op"], "I"))["id"].to_pylist()) == sorted(changed)
        assert sorted(changes.filter(pa.compute.equal(changes["op"], "D"))["id"].to_pylist()) == gone
        kept.apply(changes)
        expected = {**expected, **shown} if keep else shown
        assert kept.there(DAYS[number]) == expected


def test_the_same_snapshot_on_a_later_day_has_no_changes():
    kept = Kept()
    state = {1: ("x", 1.0), 2: (None, float("nan"))}
    kept.apply(snapshot_changes(HISTORY, kept.versions(), table_of(state), DAYS[0], sequence=1))
    assert snapshot_changes(HISTORY, kept.versions(), table_of(state, 7), DAYS[2], sequence=2).num_rows == 0


def test_a_snapshot_of_the_past_is_compared_with_the_state_of_its_time():
    kept = Kept()
    kept.apply(snapshot_changes(HISTORY, kept.versions(), table_of({1: ("x", 1.0)}), DAYS[0], sequence=1))
    kept.apply(snapshot_changes(HISTORY, kept.versions(), table_of({1: ("y", 1.0)}), DAYS[3], sequence=2))
    late = snapshot_changes(HISTORY, kept.versions(), table_of({1: ("x", 1.0), 2: ("x", 1.0)}), DAYS[1], sequence=3)
    assert late.select(["id", "op"]).to_pylist() == [{"id": 2, "op": "I"}]


def test_an_inferred_member_is_completed_or_stays():
    kept = Kept()
    kept.entries = inferred_entries(HISTORY, pa.table({"id": [1, 2]}), [1, 2])
    changes = snapshot_changes(HISTORY, kept.versions(), table_of({1: (None, None)}), DAYS[0], sequence=1)
    assert changes.select(["id", "op"]).to_pylist() == [{"id": 1, "op": "I"}]
    assert kept.apply(changes).outcomes.column("outcome").to_pylist() == ["completed"]


def test_special_members_are_not_deleted():
    history = History(
        CUSTOMER, effective="since", effective_type=pa.date32(), operation="op",
        special=SpecialMembers(unknown={"city": "?"}),
    )  # fmt: skip
    assert snapshot_changes(history, special_versions(history), SCHEMA.empty_table(), DAYS[0]).num_rows == 0


def test_rows_that_do_not_fit_are_rejected_by_the_changes():
    rows = SCHEMA.empty_table().schema
    snapshot = pa.table({"id": [None, 3], "city": ["x", "x"], "size": [1.0, 1.0], "load": [0, 0]}, schema=rows)
    changes = snapshot_changes(HISTORY, HISTORY.version_schema.empty_table(), snapshot, DAYS[0], sequence=1)
    assert Kept().apply(changes).outcomes.column("outcome").to_pylist() == ["rejected", "added"]


def test_equal_keys_are_one_member():
    text = Dimension(
        "c", ("id",), "key", pa.schema({"id": pa.string(), "city": pa.string()}), {"id": KeyRule(("trim",))}
    )
    history = History(text, effective="since", effective_type=pa.date32(), operation="op")
    snapshot = pa.table({"id": ["a", " a"], "city": ["x", "y"]})
    with pytest.raises(KeyInputError, match="two rows of member a"):
        snapshot_changes(history, history.version_schema.empty_table(), snapshot, DAYS[0])


def test_columns_that_the_snapshot_lacks_are_not_compared():
    history = History(
        CUSTOMER, effective="since", effective_type=pa.date32(), sequence="n", partial="given", audit="load"
    )
    kept = Kept(history)
    kept.apply(pa.table({"id": [1], "city": ["x"], "size": [1.0], "load": [0], "since": [DAYS[0]], "n": [1]}))
    snapshot = pa.table({"id": [1], "city": ["x"]})
    options = {"sequence": 2, "missing": "keep"}
    assert snapshot_changes(history, kept.versions(), snapshot, DAYS[1], **options).num_rows == 0
    moved = snapshot_changes(history, kept.versions(), pa.table({"id": [1], "city": ["y"]}), DAYS[1], **options)
    kept.apply(moved)
    assert [(row["city"], row["size"]) for row in kept.versions().to_pylist() if row["key"] > 0] == [
        ("x", 1.0),
        ("y", 1.0),
    ]


def test_deletes_need_an_operation():
    history = History(CUSTOMER, effective="since", effective_type=pa.date32())
    with pytest.raises(DeclarationError, match="has no `operation` that marks deletes"):
        snapshot_changes(history, history.version_schema.empty_table(), SCHEMA.empty_table(), DAYS[0])


def test_a_declared_sequence_is_given():
    with pytest.raises(DeclarationError, match="orders changes by 'n'"):
        snapshot_changes(HISTORY, HISTORY.version_schema.empty_table(), SCHEMA.empty_table(), DAYS[0])


@pytest.mark.parametrize(
    ("values", "kind", "accepted"),
    [
        (pa.array([0.1, 0.5, None, float("nan")]), pa.float32(), [1, 2, 3]),
        (pa.array([2**53 + 1, 2**53, -(2**53), None]), pa.float64(), [1, 2, 3]),
        (pa.array([2**64 - 1, 2**24, 2**24 + 1, 1], pa.uint64()), pa.float32(), [1, 3]),
    ],
)
def test_numbers_that_a_float_does_not_hold_are_rejected(values, kind, accepted):
    history = History(Dimension("c", ("id",), "key", pa.schema({"id": pa.int64(), "size": kind})), effective="since")
    since = pa.array([0] * 4, pa.timestamp("us", "UTC"))
    intake = take_in(history, pa.table({"id": [0, 1, 2, 3], "since": since, "size": values}))
    assert intake.position.tolist() == accepted
    assert set(intake.causes.to_pylist()) == {None, f"'size' does not fit {kind}"}
    assert repr(intake.rows.column("size").to_pylist()) == repr(values.take(accepted).cast(pa.float64()).to_pylist())


@pytest.mark.parametrize("given", [pa.string(), pa.decimal128(5, 2), pa.bool_()], ids=str)
def test_a_float_attribute_takes_only_numbers_that_can_be_equal(given):
    history = History(Dimension("c", ("id",), "key", pa.schema({"id": pa.int64(), "size": pa.float64()})), "since")
    changes = pa.table({"id": [1], "since": pa.array([0], pa.timestamp("us", "UTC")), "size": pa.nulls(1, given)})
    with pytest.raises(DeclarationError, match=r"column 'size' of type .* has no values of type double; cast it"):
        take_in(history, changes)


@pytest.mark.parametrize(
    ("effective", "by_day", "given"),
    [
        (pa.date32(), False, pa.timestamp("us")),
        (pa.timestamp("us"), False, pa.timestamp("ns")),
        (pa.timestamp("us"), True, pa.timestamp("ns")),
    ],
    ids=str,
)
def test_changes_whose_times_would_become_equal_are_rejected(effective, by_day, given):
    schema = pa.schema({"id": pa.int64(), "city": pa.string()})
    history = History(Dimension("c", ("id",), "key", schema), "since", effective, by_day=by_day)
    since = pa.array([0, 1, 2, None], given)
    intake = take_in(history, pa.table({"id": [1, 1, 1, 1], "since": since, "city": ["a", "z", "b", "c"]}))
    causes = ["'since' is null" if time is None else f"'since' does not fit {effective}" for time in since.to_pylist()]
    assert intake.causes.to_pylist() == [None, *causes[1:]]
