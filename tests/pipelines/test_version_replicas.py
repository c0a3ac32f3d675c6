"""Replicas of a dimension with history follow its Delta table, whatever happened to its versions."""

import datetime as dt

import pyarrow as pa
import pytest
from history_scenario import Members

from headrace.etl import Dimension, shard_of
from headrace.etl.history import History
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up
from headrace.pipelines.replica.version_rows import current_rows
from headrace.pipelines.replica.version_rows import version_rows as rows_of_versions
from headrace.storage import Table

CUSTOMER = Dimension("customer", ("id",), "key", pa.schema({"id": pa.int64(), "city": pa.string(), "tel": pa.string()}))
HISTORY = History(CUSTOMER, effective="since", effective_type=pa.date32(), sequence="n", operation="op", type_1="tel")


def oracle(kept, shards=1, shard=0):
    """Return current versions and all versions of a shard, row by row."""
    rows = kept.version_rows()
    owners = shard_of([pa.array([row["id"] for row in rows], pa.int64())], CUSTOMER.key_schema, shards)
    rows = [row for row, owner in zip(rows, owners, strict=True) if owner == shard]
    current = {row["id"]: (row["key"], row["city"], row["valid_from"]) for row in rows if row["is_current"]}
    return current, {(row["id"], row["valid_from"]): (row["key"], row["city"]) for row in rows}


@pytest.fixture
def kept(tmp_path):
    kept = Members(tmp_path / "customer", HISTORY)
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
    assert found == oracle(kept)
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
    assert found == oracle(kept)


def test_each_shard_holds_all_versions_of_its_members(kept):
    for shard in range(3):
        reach(kept, shards=3, shard=shard)
    kept.apply((1, 20, "Oslo"), (2, 1, "Alta"), (4, 2, "Hamar"))
    for shard in range(3):
        actions, found = reach(kept, shards=3, shard=shard)
        assert actions == ("advanced", "advanced")
        assert found == oracle(kept, 3, shard)


def test_inferred_members_of_a_later_version_are_hidden_above_the_base(kept):
    version, base = kept.table().version(), kept.greatest
    kept.infer(50, 51)
    reach(kept)
    actions, _ = reach(kept, version, base=base)
    assert actions == ("kept", "kept")


def test_a_later_version_of_a_known_member_is_not_hidden(kept):
    version, base = kept.table().version(), kept.greatest
    before = oracle(kept)
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
    assert found == oracle(kept)
    assert found[1][50, dt.date(2024, 1, 3)] == (kept.greatest - 1, "Voss")
