"""Row differences applied to rows must give the rows of the new entries, whatever the changes."""

import pyarrow as pa
from hypothesis import given, settings
from test_history_layout import multiset
from test_history_properties import DAYS, HISTORY, Kept, batches, plain

from headrace.pipelines.history.differences import row_differences
from headrace.pipelines.history.layout import delta_schema, entries_of, version_rows
from headrace.pipelines.replica.entry_rows import EntryRows


class Rows:
    """Rows by surrogate key, to which differences are applied, and a replica that follows their feed."""

    def __init__(self):
        self.kept = Kept()
        self.rows = {}
        self.replica = {}
        self.version = 0

    def apply(self, changes):
        before = self.kept.entries
        applied = self.kept.apply(changes)
        differences = row_differences(HISTORY, before, applied)
        self._remove(differences)
        self._add(differences)
        self._follow(differences.feed)
        return applied, differences

    def _remove(self, differences):
        for row in differences.before.to_pylist():
            assert repr(self.rows.pop(row["key"])) == repr(row)

    def _add(self, differences):
        for row in differences.after.to_pylist():
            assert row["key"] not in self.rows
            self.rows[row["key"]] = row

    def _follow(self, feed):
        self.version += 1
        versioned = feed.append_column("_commit_version", pa.repeat(self.version, feed.num_rows))
        changes = EntryRows(HISTORY).changes(versioned)
        for row in [*changes.inserts.to_pylist(), *changes.absent.to_pylist()]:
            assert (row["id"], row["_at"]) not in self.replica
        for row in changes.deletes.to_pylist():
            del self.replica[row["id"], row["_at"]]
        self.replica |= {
            (row["id"], row["_at"]): row for row in pa.concat_tables([changes.inserts, changes.upserts]).to_pylist()
        }


@settings(deadline=None, max_examples=60)
@given(batches)
def test_differences_turn_the_old_rows_into_the_new(given_batches):
    rows = Rows()
    for changes in given_batches:
        rows.apply(changes)
        expected = version_rows(HISTORY, rows.kept.entries)
        assert multiset(pa.Table.from_pylist(list(rows.rows.values()), delta_schema(HISTORY))) == multiset(expected)
        followed = pa.Table.from_pylist(list(rows.replica.values()), HISTORY.entry_schema)
        assert multiset(followed) == multiset(rows.kept.entries)


@settings(deadline=None, max_examples=40)
@given(batches)
def test_the_feed_says_what_the_changes_report(given_batches):
    rows = Rows()
    for changes in given_batches:
        applied, differences = rows.apply(changes)
        feed = differences.feed.to_pylist()
        by_type = {kind: {r["key"] for r in feed if r["_change_type"] == kind} for kind in ("insert", "delete")}
        assert by_type["insert"] == set(applied.inserted.column("key").to_pylist())
        assert by_type["delete"] == set(applied.retired.column("key").to_pylist())
        images = [[r for r in feed if r["_change_type"] == f"update_{kind}image"] for kind in ("pre", "post")]
        assert [r["key"] for r in images[0]] == [r["key"] for r in images[1]]
        assert {r["key"] for r in images[1]} >= set(applied.updated.column("key").to_pylist())
        same = [pair for pair in zip(*images, strict=True) if comparable(pair[0]) == comparable(pair[1])]
        assert same == []


def comparable(row):
    return repr({name: plain(value) for name, value in row.items() if name != "_change_type"})


def test_a_replay_makes_no_difference():
    rows = Rows()
    change = {"id": 1, "a0": "p", "a1": "m", "a1c": "v", "a2": 1.0, "au": 1, "n": 1, "op": "U"}
    changes = [{**change, "since": day} for day in DAYS]
    rows.apply(changes)
    _, differences = rows.apply(changes)
    assert (differences.before.num_rows, differences.after.num_rows, differences.feed.num_rows) == (0, 0, 0)
    assert entries_of(HISTORY, pa.Table.from_pylist(list(rows.rows.values()), delta_schema(HISTORY))).num_rows == 6
