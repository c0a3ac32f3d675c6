"""The layout of a dimension with history in Delta: versions hold their entries, and give them back unchanged."""

import datetime as dt
import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from test_history_properties import HISTORY, Kept, batches

from headrace.etl import Dimension, KeyRule
from headrace.etl.history import History, SpecialMembers, inferred_entries, special_versions
from headrace.pipelines.history.layout import ENTRIES, delta_schema, entries_of, entry_type, version_rows


def plain(value):
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def multiset(table):
    return sorted((plain(row) for row in table.to_pylist()), key=repr)


def expected_rows(entries):
    """Nest entries one row at a time."""
    versions = {}
    for entry in sorted(entries.to_pylist(), key=lambda row: row["_at"]):
        versions.setdefault(entry["key"], []).append(entry)
    rows = []
    for _, held in sorted(versions.items()):
        own = [{name: entry[name] for name in entry_type(HISTORY).names} for entry in held]
        row = {name: held[0][name] for name in HISTORY.version_schema.names} | {"_sequence": held[0]["_sequence"]}
        says_nothing_new = all(plain(held[0][f"_recorded_{n}"]) == plain(row[n]) for n in ("a0", "a1", "a1c", "au"))
        rows.append(row | {ENTRIES: None if len(held) == 1 and says_nothing_new else own})
    return rows


@settings(deadline=None, max_examples=100)
@given(batches)
def test_versions_hold_their_entries_and_give_them_back(given_batches):
    kept = Kept()
    for rows in given_batches:
        kept.apply(rows)
    nested = version_rows(HISTORY, kept.entries)
    assert nested.schema == delta_schema(HISTORY)
    assert plain(nested.to_pylist()) == plain(expected_rows(kept.entries))
    back = entries_of(HISTORY, nested)
    assert back.schema == HISTORY.entry_schema
    assert multiset(back) == multiset(kept.entries)


@settings(deadline=None, max_examples=50)
@given(batches)
def test_chunks_slices_and_order_do_not_matter(given_batches):
    kept = Kept()
    for rows in given_batches:
        kept.apply(rows)
    nested = version_rows(HISTORY, kept.entries)
    cut = nested.num_rows // 2
    pieces = pa.concat_tables([nested.slice(cut), nested.slice(0, cut)])
    assert multiset(entries_of(HISTORY, pieces)) == multiset(kept.entries)
    halves = [entries_of(HISTORY, nested.slice(cut)), entries_of(HISTORY, nested.slice(0, cut))]
    assert multiset(pa.concat_tables(halves)) == multiset(kept.entries)


def change(day, n, a1="m", a2=1.0, op="U"):
    since = dt.date(2024, 1, day)
    return {"id": 7, "a0": "p", "a1": a1, "a1c": "v", "a2": a2, "au": n, "since": since, "n": n, "op": op}


def test_the_usual_version_needs_no_list():
    kept = Kept()
    kept.apply([change(1, 1), change(3, 2, a2=2.0)])
    assert version_rows(HISTORY, kept.entries).column(ENTRIES).null_count == 2


def test_an_entry_that_changes_nothing_is_in_the_list_of_its_version():
    kept = Kept()
    kept.apply([change(1, 1), change(5, 2)])
    (row,) = version_rows(HISTORY, kept.entries).to_pylist()
    assert [entry["_at"].day for entry in row[ENTRIES]] == [1, 5]


def test_more_columns_go_with_each_entry():
    kept = Kept()
    kept.apply([change(1, 1), change(5, 2), change(6, 3, a2=2.0)])
    rows = version_rows(HISTORY, kept.entries).append_column("_change_type", pa.array(["delete", "insert"]))
    assert entries_of(HISTORY, rows).column("_change_type").to_pylist() == ["delete", "delete", "insert"]


@pytest.mark.parametrize("end", [None, dt.date(9999, 12, 31)])
def test_special_members_have_no_entries(end):
    dimension = Dimension("thing", ("id",), "key", pa.schema({"id": pa.string(), "a": pa.string()}))
    history = History(dimension, end=end, special=SpecialMembers(invalid={"a": "?"}))
    special = special_versions(history)
    empty = [pa.nulls(special.num_rows, field.type) for field in delta_schema(history)][-2:]
    rows = pa.Table.from_arrays([*special.columns, *empty], schema=delta_schema(history))
    assert entries_of(history, rows) == history.entry_schema.empty_table()


def test_inferred_members_and_spellings_come_back():
    dimension = Dimension(
        "thing", ("id",), "key", pa.schema({"id": pa.string(), "a": pa.string()}), {"id": KeyRule(("trim",))}
    )
    history = History(dimension, type_1="a")
    added = inferred_entries(history, pa.table({"id": [" x ", "y"]}), [4, 5])
    rows = version_rows(history, added)
    assert rows.column("id_spelled").to_pylist() == [" x ", "y"]
    assert rows.column(ENTRIES).null_count == 2
    assert multiset(entries_of(history, rows)) == multiset(added)


def test_no_entries_make_no_rows():
    assert version_rows(HISTORY, HISTORY.entry_schema.empty_table()) == delta_schema(HISTORY).empty_table()
    assert entries_of(HISTORY, delta_schema(HISTORY).empty_table()) == HISTORY.entry_schema.empty_table()
