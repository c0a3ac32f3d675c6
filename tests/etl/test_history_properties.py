"""Versions against an oracle that sorts and groups one row at a time, and properties that hold for any changes."""

import datetime as dt
import math
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner import MemoryBackend

from headrace.etl import Dimension
from headrace.etl.history import ChangeOutcome, History, inferred_entries

TEXTS = dict.fromkeys(["a0", "a1", "a1c"], pa.string())
KINDS = {"id": pa.int64(), **TEXTS, "a2": pa.float64(), "au": pa.int64()}
END = dt.date(9999, 12, 31)
HISTORY = History(
    Dimension("thing", ("id",), "key", pa.schema(list(KINDS.items()))),
    effective="since",
    effective_type=pa.date32(),
    sequence="n",
    operation="op",
    type_0="a0",
    type_1="a1",
    type_1_current="a1c",
    audit="au",
    end=END,
)
CHANGES = pa.schema([*KINDS.items(), ("since", pa.date32()), ("n", pa.int64()), ("op", pa.string())])
DAYS = [dt.date(2024, 1, day) for day in range(1, 7)]
AROUND = [DAYS[0] - dt.timedelta(1), *DAYS, DAYS[-1] + dt.timedelta(1)]

change = st.fixed_dictionaries(
    {
        "id": st.integers(0, 2),
        "a0": st.sampled_from(["p", "q"]),
        "a1": st.sampled_from(["m", "n", None]),
        "a1c": st.sampled_from(["v", "w"]),
        "a2": st.sampled_from([1.0, 2.0, math.nan, None, -0.0, 0.0]),
        "au": st.integers(0, 3),
        "since": st.sampled_from(DAYS),
        "n": st.integers(0, 2),
        "op": st.sampled_from(["U", "U", "U", "D"]),
    }
)
batches = st.lists(st.lists(change, min_size=1, max_size=4), min_size=1, max_size=4)


def plain(value):
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def tie_rank(row):
    """Return what orders changes of one member, day and sequence; the least wins."""
    names = ["au"] if row["op"] == "D" else ["a0", "a1", "a1c", "a2", "au"]
    cells = [(2, 0) if row[n] is None else (1, 0) if plain(row[n]) == "NaN" else (0, row[n]) for n in names]
    return (row["op"] == "D", cells)


def winners(changes, member):
    by_day = {}
    for row in (row for row in changes if row["id"] == member):
        best = by_day.get(row["since"])
        if best is None or (-row["n"], tie_rank(row)) < (-best["n"], tie_rank(best)):
            by_day[row["since"]] = row
    return [by_day[day] for day in sorted(by_day)]


def expected_versions(changes):
    versions = []
    for member in sorted({row["id"] for row in changes}):
        entries, runs = winners(changes, member), []
        for entry in entries:
            state = "deleted" if entry["op"] == "D" else ("there", plain(entry["a2"]))
            if runs and runs[-1][0] == state:
                runs[-1][1].append(entry)
            else:
                runs.append((state, [entry]))
        nothing = dict.fromkeys(KINDS)
        present = [entry for entry in entries if entry["op"] != "D"]
        for number, (state, run) in enumerate(runs):
            shown = next((entry for entry in present[::-1] if entry["since"] <= run[-1]["since"]), nothing)
            following = runs[number + 1][1][0]["since"] if number + 1 < len(runs) else END
            versions.append(
                {
                    "id": member,
                    "a0": (present or [nothing])[0]["a0"],
                    "a1": (present or [nothing])[-1]["a1"],
                    "a1c": shown["a1c"],
                    "a2": plain(shown["a2"]),
                    "au": run[0]["au"],
                    "valid_from": run[0]["since"],
                    "valid_to": following,
                    "is_current": number + 1 == len(runs),
                    "version": number + 1,
                    "is_deleted": state == "deleted",
                    "is_inferred": False,
                }
            )
    return versions


class Kept:
    """Entries, and versions by surrogate key kept from what each change reported."""

    def __init__(self):
        self.memory = MemoryBackend(HISTORY)
        self.versions = {}

    @property
    def entries(self):
        return self.memory.entries

    def apply(self, rows):
        applied = self.memory.apply(pa.Table.from_pylist(rows, CHANGES))
        for row in applied.retired.to_pylist():
            del self.versions[row["key"]]
        for row in applied.updated.to_pylist():
            assert row["key"] in self.versions
        for row in applied.inserted.to_pylist():
            assert row["key"] not in self.versions
        self.versions |= {row["key"]: row for part in (applied.updated, applied.inserted) for row in part.to_pylist()}
        return applied

    def rows(self):
        rows = sorted(self.versions.values(), key=lambda row: (row["id"], row["valid_from"]))
        return [{name: plain(value) for name, value in row.items() if name != "key"} for row in rows]

    def entry_versions(self):
        heads = self.memory.versions().to_pylist()
        heads.sort(key=lambda row: (row["id"], row["valid_from"]))
        names = [name for name in HISTORY.version_schema.names if name != "key"]
        return [{name: plain(row[name]) for name in names} for row in heads]

    def valid_at(self, member, day):
        """Return the key of the version at a day (before all: that of the first), and whether there is one."""
        rows = sorted((r for r in self.versions.values() if r["id"] == member), key=lambda row: row["valid_from"])
        valid = [row["key"] for row in rows if row["valid_from"] <= day < row["valid_to"]]
        return (valid[0], True) if valid else (rows[0]["key"] if rows else None, False)


@settings(deadline=None, max_examples=60)
@given(batches)
def test_versions_are_those_of_the_oracle(given_batches):
    kept = Kept()
    for rows in given_batches:
        kept.apply(rows)
    expected = expected_versions([row for rows in given_batches for row in rows])
    assert kept.rows() == expected
    assert kept.entry_versions() == expected


@settings(deadline=None, max_examples=40)
@given(batches)
def test_every_instant_has_one_version(given_batches):
    kept = Kept()
    for rows in given_batches:
        kept.apply(rows)
    for member in {row["id"] for row in kept.versions.values()}:
        rows = [row for row in kept.versions.values() if row["id"] == member]
        first = min(row["valid_from"] for row in rows)
        for day in [day for day in AROUND if day >= first]:
            assert sum(row["valid_from"] <= day < row["valid_to"] for row in rows) == 1
        assert sum(row["is_current"] for row in rows) == 1


@settings(deadline=None, max_examples=40)
@given(batches)
def test_moved_ranges_are_where_facts_meet_another_version(given_batches):
    kept = Kept()
    for rows in given_batches:
        before = {(member, day): kept.valid_at(member, day) for member in range(3) for day in AROUND}
        moved = kept.apply(rows).moved.to_pylist()
        for (member, day), was in before.items():
            hit = [
                row
                for row in moved
                if row["id"] == member
                and (row["moved_from"] is None or row["moved_from"] <= day)
                and (row["moved_to"] is None or day < row["moved_to"])
            ]
            assert len(hit) == (was[0] is not None and was != kept.valid_at(member, day))


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


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_members_at_once(seed):
    rng = random.Random(seed)
    rows = [
        {
            "id": rng.randrange(1000),
            "a0": rng.choice("pq"),
            "a1": rng.choice("mn"),
            "a1c": rng.choice("vw"),
            "a2": rng.choice([1.0, None, math.nan]),
            "au": rng.randrange(9),
            "since": rng.choice(DAYS),
            "n": rng.randrange(3),
            "op": rng.choice("UUUD"),
        }
        for _ in range(5000)
    ]
    kept = Kept()
    for start in range(0, len(rows), 1700):
        kept.apply(rows[start : start + 1700])
    assert kept.rows() == expected_versions(rows)


@settings(deadline=None, max_examples=40)
@given(batches, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4))
def test_inferred_members_leave_no_trace_but_their_key(given_batches, announced):
    kept = Kept()
    for position, rows in enumerate([*given_batches, *([[]] * 5)]):
        for _, member in {pair for pair in announced if pair[0] == position}:
            if member not in {row["id"] for row in kept.memory.entries.to_pylist()}:
                kept.memory.base += 1
                named = pa.table({"id": [member]})
                added = inferred_entries(HISTORY, named, [kept.memory.base])
                kept.memory.entries = pa.concat_tables([kept.memory.entries, added])
                kept.versions[kept.memory.base] = added.select(HISTORY.version_schema.names).to_pylist()[0]
        if rows:
            waiting = {row["id"]: key for key, row in kept.versions.items() if row["is_inferred"]}
            kept.apply(rows)
            for member in waiting.keys() & {row["id"] for row in rows}:
                assert kept.versions[waiting[member]]["version"] == 1
    changed = [row for rows in given_batches for row in rows]
    expected = expected_versions(changed)
    assert [row for row in kept.rows() if not row["is_inferred"]] == expected
    assert {row["id"] for row in kept.rows() if row["is_inferred"]} == {m for _, m in announced} - {
        c["id"] for c in changed
    }
