"""Replicas of a dimension with history follow its Delta table, whatever happened to its versions."""

import datetime as dt
import itertools

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.etl import Dimension, KeyAllocator, shard_of
from headrace.etl.history import History, apply_changes, inferred_entries, special_versions
from headrace.pipelines.delta.tables import DeltaHandle, create_table
from headrace.pipelines.history.layout import delta_schema, entries_of, version_rows
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up
from headrace.pipelines.replica.version_rows import current_rows
from headrace.pipelines.replica.version_rows import version_rows as rows_of_versions
from headrace.storage import Table

CUSTOMER = Dimension("customer", ("id",), "key", pa.schema({"id": pa.int64(), "city": pa.string(), "tel": pa.string()}))
HISTORY = History(CUSTOMER, effective="since", effective_type=pa.date32(), sequence="n", operation="op", type_1="tel")


class Kept:
    """A Delta table with the versions of changes, written by delete and append."""

    def __init__(self, path):
        self.path = str(path)
        special = special_versions(HISTORY)
        rows = [
            *special.columns,
            *(pa.nulls(special.num_rows, field.type) for field in list(delta_schema(HISTORY))[-2:]),
        ]
        create_table(self.path, delta_schema(HISTORY), rows=pa.Table.from_arrays(rows, schema=delta_schema(HISTORY)))
        self.count = itertools.count(1)
        self.greatest = 0

    def table(self):
        return DeltaTable(self.path)

    def entries(self):
        rows = self.table().to_pyarrow_table().cast(delta_schema(HISTORY))
        return entries_of(HISTORY, rows)

    def apply(self, *changes):
        """Apply (id, day, city) changes: replace the rows of their members in two Delta commits."""
        rows = [
            {"id": key, "since": dt.date(2024, 1, day), "city": city, "tel": f"t{key}", "n": next(self.count),
             "op": "U" if city else "D"}
            for key, day, city in changes
        ]  # fmt: skip
        names = {"id": pa.int64(), "since": pa.date32(), "city": pa.string(), "tel": pa.string(), "n": pa.int64(), "op": pa.string()}  # fmt: skip
        table, entries = pa.Table.from_pylist(rows, pa.schema(names)), self.entries()
        applied = apply_changes(HISTORY, entries, table, KeyAllocator(self.greatest))
        self.greatest += applied.new_keys
        members = {row["id"] for row in rows}
        kept = {(row["id"], row["_at"]): row for row in entries.to_pylist() if row["id"] in members}
        for row in applied.deletes.to_pylist():
            del kept[row["id"], row["_at"]]
        kept |= {(row["id"], row["_at"]): row for row in applied.upserts.to_pylist()}
        whole = version_rows(HISTORY, pa.Table.from_pylist(list(kept.values()), HISTORY.entry_schema))
        self.table().delete(f"id IN ({', '.join(map(str, members))})")
        write_deltalake(self.path, whole, mode="append")
        return applied

    def infer(self, *keys):
        added = inferred_entries(HISTORY, pa.table({"id": keys}), self.greatest + 1 + np.arange(len(keys)))
        self.greatest += len(keys)
        write_deltalake(self.path, version_rows(HISTORY, added), mode="append")

    def oracle(self, shards=1, shard=0):
        """Return current versions and all versions of a shard, row by row."""
        rows = [row for row in self.table().to_pyarrow_table().to_pylist() if row["key"] > 0]
        owners = shard_of([pa.array([row["id"] for row in rows], pa.int64())], CUSTOMER.key_schema, shards)
        rows = [row for row, owner in zip(rows, owners, strict=True) if owner == shard]
        current = {row["id"]: (row["key"], row["city"], row["valid_from"]) for row in rows if row["is_current"]}
        return current, {(row["id"], row["valid_from"]): (row["key"], row["city"]) for row in rows}


@pytest.fixture
def kept(tmp_path):
    kept = Kept(tmp_path / "customer")
    kept.apply((1, 1, "Oslo"), (1, 10, "Bergen"), (2, 5, "Narvik"), (3, 1, "Bodo"))
    return kept


def reach(kept, version=None, shards=1, shard=0, base=0):
    """Return the actions of both replicas' catch-ups, and their rows."""
    handle = DeltaHandle(kept.path).latest()
    found = []
    for rows in (current_rows(HISTORY, ["city"]), rows_of_versions(HISTORY, ["city"])):
        spec = ReplicaSpec(rows, kept.path, handle.table_id, shards, None, 1 << 28)
        found.append(catch_up(spec, shard, handle.version if version is None else version, base, contents))
    (one, current), (other, versions) = found
    now = {row["id"]: (row["key"], row["city"], row["valid_from"]) for row in current}
    all_of_them = {(row["id"], row["_at"]): (row["key"], row["city"]) for row in versions}
    assert len(now) == len(current)
    assert len(all_of_them) == len(versions)
    return (one.action, other.action), (now, all_of_them)


def contents(reached):
    with Table.open(reached.file) as table:
        return reached, [row for batch in table.scan() for row in batch.to_pylist()]


def test_a_first_build_holds_current_versions_and_all_versions(kept):
    actions, found = reach(kept)
    assert actions == ("built: missing", "built: missing")
    assert found == kept.oracle()
    assert found[0][1] == (2, "Bergen", dt.date(2024, 1, 10))
    assert len(found[1]) == 4


@pytest.mark.parametrize(
    "changes",
    [
        [(1, 20, "Oslo")],
        [(1, 5, "Molde")],
        [(1, 5, "Bergen")],
        [(2, 1, "Narvik"), (2, 3, "Tromso")],
        [(1, 15, None), (1, 16, "Bergen")],
        [(9, 1, "Kiruna"), (3, 30, "Oslo")],
        [(1, 10, "Oslo")],
    ],
    ids=["new", "split", "earlier", "late first", "deleted and back", "added", "retired"],
)
def test_changed_versions_arrive_by_the_change_feed(kept, changes):
    reach(kept)
    kept.apply(*changes)
    actions, found = reach(kept)
    assert actions == ("advanced", "advanced")
    assert found == kept.oracle()


def test_each_shard_holds_all_versions_of_its_members(kept):
    for shard in range(3):
        reach(kept, shards=3, shard=shard)
    kept.apply((1, 20, "Oslo"), (2, 1, "Alta"), (4, 2, "Hamar"))
    for shard in range(3):
        actions, found = reach(kept, shards=3, shard=shard)
        assert actions == ("advanced", "advanced")
        assert found == kept.oracle(3, shard)


def test_inferred_members_of_a_later_version_are_hidden_above_the_base(kept):
    version, base = kept.table().version(), kept.greatest
    kept.infer(50, 51)
    reach(kept)
    actions, _ = reach(kept, version, base=base)
    assert actions == ("kept", "kept")


def test_a_later_version_of_a_known_member_is_not_hidden(kept):
    version, base = kept.table().version(), kept.greatest
    before = kept.oracle()
    kept.apply((1, 20, "Oslo"))
    reach(kept)
    actions, found = reach(kept, version, base=base)
    assert actions == ("built: ahead", "built: ahead")
    assert found == before


def test_an_inferred_member_is_completed_under_its_key(kept):
    kept.infer(50)
    reach(kept)
    kept.apply((50, 3, "Voss"), (50, 9, "Hol"))
    actions, found = reach(kept)
    assert actions == ("advanced", "advanced")
    assert found == kept.oracle()
    assert found[1][50, dt.date(2024, 1, 3)] == (kept.greatest - 1, "Voss")
