"""Replicas follow their Delta table to the planned version, whatever happened to either."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.etl import Dimension, Duplicates, shard_of
from headrace.pipelines.delta.tables import DeltaHandle, create_dimension, create_table
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up, discard, replica_folder
from headrace.pipelines.replica.rows import LoadedKeyRows, MemberRows
from headrace.storage import Table

PLANE = Dimension("plane", ("tail",), "plane_key", pa.schema({"tail": pa.string(), "seats": pa.int32()}))
NARROW = Dimension("plane", ("tail",), "plane_key", PLANE.schema, inferred_flag=None)


def planes(*names, first=1, inferred=False):
    rows = pa.table({"tail": pa.array(names, pa.string())})
    return PLANE.members(rows, list(range(first, first + len(names))), inferred=inferred)


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "dim_plane")
    rows = pa.table({"tail": ["N1", "N2", "N3"], "seats": pa.array([10, 20, 30], pa.int32())})
    create_dimension(path, PLANE, rows)
    return path


def spec_of(path, shards=1, rows=None):
    return ReplicaSpec(rows or MemberRows(NARROW), path, DeltaHandle(path).latest().table_id, shards, None, 1 << 28)


def reach(spec, version, shard=0, base=0):
    """Return what a catch-up did, and the rows of the replica by natural key."""

    def use(reached):
        with Table.open(reached.file) as table:
            rows = [row for batch in table.scan() for row in batch.to_pylist()]
        return reached, {row["tail"]: (row["plane_key"], row["seats"]) for row in rows}

    return catch_up(spec, shard, version, base, use)


def members_at(path, version, shards=1, shard=0):
    """Return what a replica at a version must hold, read from the Delta table by its own means."""
    rows = DeltaTable(path, version=version).to_pyarrow_table().to_pylist()
    rows = [row for row in rows if row["plane_key"] != -1]
    owner = shard_of([pa.array([row["tail"] for row in rows], pa.string())], PLANE.key_schema, shards)
    return {row["tail"]: (row["plane_key"], row["seats"]) for row, of in zip(rows, owner, strict=True) if of == shard}


def append(path, rows):
    write_deltalake(path, rows, mode="append")


def test_a_first_build_holds_all_members_but_the_unknown_one(path):
    reached, rows = reach(spec_of(path), 0)
    assert reached.action == "built: missing"
    assert rows == {"N1": (1, 10), "N2": (2, 20), "N3": (3, 30)}


def test_appended_members_arrive_by_the_change_feed(path):
    reach(spec_of(path), 0)
    append(path, planes("N9", first=4))
    reached, rows = reach(spec_of(path), 1)
    assert (reached.action, reached.rows) == ("advanced", 1)
    assert rows["N9"] == (4, None)


def test_a_replica_at_the_version_is_kept(path):
    reach(spec_of(path), 0)
    assert reach(spec_of(path), 0)[0].action == "kept"


def test_updates_and_deletes_arrive_as_their_net_effect(path):
    reach(spec_of(path), 0)
    table = DeltaTable(path)
    table.update(updates={"seats": "99"}, predicate="tail = 'N1'")
    table.delete("tail = 'N2'")
    table.update(updates={"seats": "100"}, predicate="tail = 'N1'")
    append(path, planes("N2", first=7))
    reached, rows = reach(spec_of(path), 4)
    assert reached.action == "advanced"
    assert rows == {"N1": (1, 100), "N2": (7, None), "N3": (3, 30)} == members_at(path, 4)


def test_a_restored_table_is_followed(path):
    append(path, planes("N9", first=4))
    DeltaTable(path).delete("tail = 'N1'")
    reach(spec_of(path), 2)
    DeltaTable(path).restore(0)
    reached, rows = reach(spec_of(path), 3)
    assert rows == members_at(path, 0)
    assert reached.exact


def test_a_compacted_table_changes_nothing(path):
    for first in (4, 5, 6):
        append(path, planes(f"N{first}", first=first))
    reach(spec_of(path), 3)
    DeltaTable(path).optimize.compact()
    reached, rows = reach(spec_of(path), 4)
    assert (reached.action, reached.rows) == ("advanced", 0)
    assert rows == members_at(path, 4)


def test_when_files_of_the_feed_were_removed_it_is_built_again(path):
    reach(spec_of(path), 0)
    append(path, planes("N4", first=4))
    append(path, planes("N5", first=5))
    table = DeltaTable(path)
    table.optimize.compact()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    reached, rows = reach(spec_of(path), table.version())
    assert reached.action == "built: change feed gone"
    assert set(rows) == {"N1", "N2", "N3", "N4", "N5"}


def test_a_replica_that_is_ahead_by_new_members_only_is_joined_with_a_base(path):
    append(path, planes("N9", first=4))
    reach(spec_of(path), 1)
    reached, rows = reach(spec_of(path), 0, base=3)
    assert (reached.action, reached.exact) == ("kept", False)
    assert {tail for tail, (key, _) in rows.items() if key <= 3} == {"N1", "N2", "N3"}


def test_a_replica_that_is_ahead_by_anything_else_is_built_at_the_version(path):
    DeltaTable(path).update(updates={"seats": "99"}, predicate="tail = 'N1'")
    reach(spec_of(path), 1)
    reached, rows = reach(spec_of(path), 0, base=3)
    assert (reached.action, reached.exact) == ("built: ahead", True)
    assert rows == members_at(path, 0)


def test_a_missing_replica_is_built_again(path):
    reached, rows = reach(spec_of(path), 0)
    reached.file.unlink()
    again, rows_again = reach(spec_of(path), 0)
    assert again.action == "built: missing"
    assert rows_again == rows


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty"])
def test_a_damaged_replica_is_built_again(path, damage):
    reached, rows = reach(spec_of(path), 0)
    size = reached.file.stat().st_size
    with reached.file.open("r+b") as file:
        if damage == "truncated":
            file.truncate(size // 2)
        elif damage == "empty":
            file.truncate(0)
        else:
            file.write(b"\xff" * size)
    again, rows_again = reach(spec_of(path), 0)
    assert again.action == "built: damaged"
    assert rows_again == rows


def test_a_replica_is_discarded_once(path):
    reached, _ = reach(spec_of(path), 0)
    old = reached.file.stat().st_ino
    discard(spec_of(path), 0, old + 1)
    assert reached.file.exists()
    discard(spec_of(path), 0, old)
    assert not reached.file.exists()


def test_shards_divide_the_members(path):
    append(path, planes(*(f"X{i}" for i in range(40)), first=4))
    spec = spec_of(path, shards=3)
    parts = [reach(spec, 1, shard)[1] for shard in range(3)]
    assert parts == [members_at(path, 1, 3, shard) for shard in range(3)]
    assert sum(len(part) for part in parts) == 43


def test_shards_follow_changes_of_their_own_keys_only(path):
    spec = spec_of(path, shards=2)
    for shard in range(2):
        reach(spec, 0, shard)
    append(path, planes(*(f"X{i}" for i in range(20)), first=4))
    DeltaTable(path).delete("tail = 'N1'")
    for shard in range(2):
        assert reach(spec, 2, shard)[1] == members_at(path, 2, 2, shard)


def test_a_table_made_anew_at_the_same_path_has_replicas_of_its_own(path, tmp_path):
    reach(spec_of(path), 0)
    DeltaTable(path).delete()
    other = str(tmp_path / "other")
    create_dimension(other, PLANE, pa.table({"tail": ["M1"], "seats": pa.array([1], pa.int32())}))
    (tmp_path / "dim_plane").rename(tmp_path / "old")
    (tmp_path / "other").rename(tmp_path / "dim_plane")
    reached, rows = reach(spec_of(path), 0)
    assert reached.action == "built: missing"
    assert rows == {"M1": (1, 1)}


def test_a_natural_key_that_occurs_twice_is_refused_when_it_is_built(path):
    append(path, planes("N1", first=9))
    with pytest.raises(DeltaTableError, match="'plane' has a natural key more than once"):
        reach(spec_of(path), 1)


def test_a_natural_key_that_occurs_twice_is_refused_when_it_arrives(path):
    reach(spec_of(path), 0)
    append(path, planes("N1", first=9))
    with pytest.raises(DeltaTableError, match="'plane' has a natural key more than once"):
        reach(spec_of(path), 1)


def test_a_natural_key_given_twice_in_one_version_is_refused(path):
    reach(spec_of(path), 0)
    append(path, planes("N8", "N8", first=9))
    with pytest.raises(DeltaTableError, match="N8"):
        reach(spec_of(path), 1)


def test_a_version_that_is_not_there_is_refused(path):
    with pytest.raises(DeltaTableError, match="at version 5"):
        reach(spec_of(path), 5)


def test_what_a_killed_build_left_behind_is_removed(path):
    spec = spec_of(path)
    place = spec.place(0)
    place.mkdir(parents=True)
    (place / "table.headrace.tmp-1-2").write_bytes(b"x" * 100)
    reach(spec, 0)
    assert sorted(item.name for item in place.iterdir() if "tmp" in item.name) == []


def test_random_histories_are_followed(path, rng):
    """Any mix of changes and catch-ups leaves each shard with the members of the version."""
    spec = spec_of(path, shards=2)
    next_key = 4
    for _ in range(25):
        table = DeltaTable(path)
        names = sorted(members_at(path, table.version()))
        kind = rng.integers(5)
        if kind == 0 or not names:
            fresh = [f"R{next_key + i}" for i in range(int(rng.integers(1, 6)))]
            append(path, planes(*fresh, first=next_key))
            next_key += len(fresh)
        elif kind == 1:
            table.update(updates={"seats": str(int(rng.integers(100)))}, predicate=f"tail = '{rng.choice(names)}'")
        elif kind == 2:
            table.delete(f"tail = '{rng.choice(names)}'")
        elif kind == 3:
            table.optimize.compact()
        version = DeltaTable(path).version()
        if rng.random() < 0.6:
            shard = int(rng.integers(2))
            assert reach(spec, version, shard)[1] == members_at(path, version, 2, shard)


BUILDER = """
import sys, pyarrow as pa
from headrace.etl import Dimension
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up
from headrace.pipelines.replica.rows import MemberRows
schema = pa.schema({"tail": pa.string(), "seats": pa.int32()})
rows = MemberRows(Dimension("plane", ("tail",), "plane_key", schema, inferred_flag=None))
spec = ReplicaSpec(rows, sys.argv[1], DeltaHandle(sys.argv[1]).latest().table_id, 1, None, 1 << 28)
print(catch_up(spec, 0, 0, 0, lambda reached: reached.action))
"""


def test_several_processes_that_need_a_replica_build_it_once(path):
    command = [sys.executable, "-c", BUILDER, path]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    actions = [process.communicate()[0].strip() for process in processes]
    assert sorted(actions) == ["built: missing", "kept", "kept"]


LOADED = Duplicates(pa.schema({"id": pa.int64()}))


def loaded_ids(spec, version):
    def use(reached):
        with Table.open(reached.file) as table:
            rows = pa.Table.from_batches(list(table.scan()), schema=table.schema)
        return reached.action, sorted(set(rows.column("id").to_pylist()))

    return catch_up(spec, 0, version, 0, use)


def facts(*ids):
    return pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array(np.zeros(len(ids)))})


def test_loaded_keys_follow_the_facts(tmp_path):
    path = str(tmp_path / "facts")
    create_table(path, facts().schema)
    spec = spec_of(path, rows=LoadedKeyRows(LOADED))
    assert loaded_ids(spec, 0) == ("built: missing", [])
    append(path, facts(1, 2, 2))
    append(path, facts(2, 3, None))
    assert loaded_ids(spec, 2) == ("advanced", [1, 2, 3])


def test_loaded_keys_are_built_again_when_facts_were_removed(tmp_path):
    path = str(tmp_path / "facts")
    create_table(path, facts().schema)
    append(path, facts(1, 2))
    spec = spec_of(path, rows=LoadedKeyRows(LOADED))
    loaded_ids(spec, 1)
    DeltaTable(path).delete("id = 1")
    assert loaded_ids(spec, 2) == ("built: rows were removed", [2])


@pytest.mark.parametrize(
    ("change", "action"), [({"x": "9.0"}, "advanced"), ({"id": "id + 5"}, "built: rows were removed")]
)
def test_loaded_keys_are_kept_when_facts_are_updated_without_their_keys(tmp_path, change, action):
    path = str(tmp_path / "facts")
    create_table(path, facts().schema)
    append(path, facts(1, 2, 2, None))
    spec = spec_of(path, rows=LoadedKeyRows(LOADED))
    loaded_ids(spec, 1)
    DeltaTable(path).update(updates=change, predicate="id = 2")
    append(path, facts(3))
    assert loaded_ids(spec, 3) == (action, [1, 2, 3] if action == "advanced" else [1, 3, 7])


def test_the_folder_for_replicas_can_be_chosen(tmp_path, monkeypatch):
    assert replica_folder(str(tmp_path / "x")) == tmp_path / "x"
    monkeypatch.setenv("HEADRACE_REPLICAS", str(tmp_path / "y"))
    assert replica_folder() == tmp_path / "y"
    monkeypatch.delenv("HEADRACE_REPLICAS")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "z"))
    assert replica_folder() == tmp_path / "z" / "replicas"


def test_a_natural_key_that_was_inserted_again_and_removed_is_no_obstacle(path):
    reach(spec_of(path), 0)
    append(path, planes("N1", first=9))
    DeltaTable(path).delete("plane_key = 9")
    reached, rows = reach(spec_of(path), 2)
    assert reached.action == "built: a natural key was inserted again"
    assert rows["N1"][0] != 9
