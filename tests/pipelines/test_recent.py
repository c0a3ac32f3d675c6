"""An operator serves versions to which batches added members, without its replica, and gives what the table holds."""

import re

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.etl import Dimension, shard_of
from headrace.pipelines.delta.commits import NEW_MEMBERS, Commit, commit_exactly, member_files
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.tables import DeltaHandle, create_dimension
from headrace.pipelines.replica import operators
from headrace.pipelines.replica.catch_up import ReplicaSpec
from headrace.pipelines.replica.operators import Joiner, serve
from headrace.pipelines.replica.rows import MemberRows
from headrace.storage.errors import MemoryBudgetError

SCHEMA = pa.schema({"maker": pa.string(), "number": pa.int32(), "seats": pa.int32(), "town": pa.string()})
PLANE = Dimension("plane", ("maker", "number"), "plane_key", SCHEMA)
NARROW = Dimension("plane", PLANE.natural_key, "plane_key", SCHEMA, inferred_flag=None)
MEMORY = 4 << 20
KEYS = [(maker, number) for maker in ("a", "aa", "ab", "b") for number in (-1, 0, 1, 12, 112)]


def rows(keys, first):
    names = {"maker": [key[0] for key in keys], "number": pa.array([key[1] for key in keys], pa.int32())}
    return PLANE.members(pa.table(names), list(range(first, first + len(keys))), inferred=True)


class World:
    """A dimension, and an operator that a worker keeps for a shard of it."""

    def __init__(self, folder, shards=1, shard=0):
        self.path, self.shards, self.shard = str(folder / "dim_plane"), shards, shard
        given = {"maker": "z", "number": 0, "seats": 7, "town": "Oslo"}
        create_dimension(self.path, PLANE, pa.Table.from_pylist([given], SCHEMA))

    @property
    def version(self):
        return DeltaTable(self.path).version()

    @property
    def greatest(self):
        return max(DeltaTable(self.path).to_pyarrow_table()["plane_key"].to_pylist())

    def add(self, keys, note=NEW_MEMBERS):
        """Add members as a batch does."""
        with FileWriter(FileSpec(self.path, PLANE.table_schema)) as writer:
            for batch in rows(keys, self.greatest + 1).to_batches():
                writer.write(batch)
            files = writer.close()
        version = self.version
        commit_exactly(self.path, DeltaTable(self.path), version, files, Commit("batch", version, {note: len(keys)}))

    def serving(self, version=None, memory=MEMORY, shares=1):
        latest = DeltaHandle(self.path).latest()
        spec = ReplicaSpec(MemberRows(NARROW), self.path, latest.table_id, self.shards, None, 1 << 28)
        version = latest.version if version is None else version
        on, columns = (("m", "maker"), ("n", "number")), ("plane_key", "seats", "town")
        joiner = Joiner("plane", spec, version, self.greatest, on, columns, memory // shares, memory, None)
        served = serve(joiner, self.shard, "run", "schema")
        return served, None if served.reached is None else served.reached.action

    def found(self, served, keys):
        """Return what the operator finds for keys: a tuple each, or None."""
        asked = pa.record_batch({"m": [key[0] for key in keys], "n": pa.array([key[1] for key in keys], pa.int32())})
        pushed = [output for part in (asked.slice(0, 3), asked.slice(3)) for output in served.operator.push(part)]
        result = pa.Table.from_batches([*pushed, *served.operator.flush()]).to_pylist()
        assert len(result) == len(keys)
        return {(row["m"], row["n"]): (row["plane_key"], row["seats"], row["town"]) for row in result}

    def held(self, keys, version=None):
        """Return what the table holds for keys."""
        table = DeltaTable(self.path, version=version).to_pyarrow_table().to_pylist()
        held = {(row["maker"], row["number"]): (row["plane_key"], row["seats"], row["town"]) for row in table}
        return {key: held.get(key, (None, None, None)) for key in keys}


@pytest.fixture
def world(tmp_path):
    yield World(tmp_path)
    for kept in operators._KEPT.values():
        kept.close()
    operators._KEPT.clear()


def test_members_of_batches_are_found_without_a_change_of_the_replica(world):
    world.serving()
    for keys in (KEYS[:5], KEYS[5:6], KEYS[6:12]):
        world.add(keys)
        served, action = world.serving()
        assert action == "followed"
        assert world.found(served, [*KEYS, ("z", 0)]) == world.held([*KEYS, ("z", 0)])
    assert world.serving()[1] is None


@pytest.mark.parametrize("shares", [1, 6])
def test_memory_that_is_too_small_says_how_much_the_pipeline_needs(world, shares):
    with pytest.raises(MemoryBudgetError, match="set that to") as refused:
        world.serving(memory=20_000, shares=shares)
    enough = int(re.search(r"set that to (\d+)KiB", str(refused.value))[1]) * 1024
    with pytest.raises(MemoryBudgetError):
        world.serving(memory=int(0.98 * enough), shares=shares)
    served, _ = world.serving(memory=enough, shares=shares)
    assert world.found(served, [("z", 0)]) == world.held([("z", 0)])


def test_the_file_of_the_replica_stays_as_it_was(world):
    before = world.serving()[0].reached.file.read_bytes()
    world.add(KEYS)
    assert world.serving()[0].reached.file.read_bytes() == before


def test_several_versions_are_followed_at_once_and_an_older_one_is_served_again(world):
    world.serving()
    world.add(KEYS[:3])
    world.add(KEYS[3:7])
    served, action = world.serving()
    assert action == "followed"
    assert world.found(served, KEYS) == world.held(KEYS)
    served, action = world.serving(version=1)
    assert action == "advanced"
    assert world.found(served, KEYS) == world.held(KEYS, 1)


@pytest.mark.parametrize("change", ["append", "other note", "update", "delete"])
def test_after_any_other_change_the_replica_catches_up(world, change):
    world.add(KEYS[:8])
    world.serving()
    world.add(KEYS[8:12])
    world.serving()
    if change == "append":
        write_deltalake(world.path, rows(KEYS[12:14], 100), mode="append")
    elif change == "other note":
        world.add(KEYS[12:14], note="members")
    elif change == "update":
        DeltaTable(world.path).update(updates={"seats": "9"}, predicate="maker = 'a'")
    else:
        DeltaTable(world.path).delete("maker = 'a'")
    served, action = world.serving()
    assert action == "advanced"
    assert world.found(served, KEYS) == world.held(KEYS)


def test_a_compaction_is_followed(world):
    world.serving()
    world.add(KEYS[:3])
    world.add(KEYS[3:7])
    DeltaTable(world.path).optimize.compact()
    served, action = world.serving()
    assert action == "followed"
    assert world.found(served, KEYS) == world.held(KEYS)


def test_when_a_file_of_new_members_is_gone_the_replica_is_brought_up(world):
    world.serving()
    world.add(KEYS[:3])
    world.add(KEYS[3:7])
    table = DeltaTable(world.path)
    table.optimize.compact()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    served, action = world.serving()
    assert action == "built: change feed gone"
    assert world.found(served, KEYS) == world.held(KEYS)


def test_members_beyond_their_share_of_the_memory_go_into_the_replica(world):
    keys = [("x", number) for number in range(MEMORY // operators._RECENT_SHARE // 30)]
    world.serving()
    for start, expected in ((0, "followed"), (1, "advanced"), (2, "followed")):
        world.add(keys[start::3])
        served, action = world.serving()
        assert action == expected
        assert world.found(served, keys) == world.held(keys)


def test_operator_and_members_share_the_memory(world):
    world.serving()
    world.add(KEYS)
    world.serving()
    (kept,) = operators._KEPT.values()
    assert kept.operator.store.budget.limit + MEMORY // operators._RECENT_SHARE <= MEMORY
    assert 0 < kept.recent.nbytes <= MEMORY // operators._RECENT_SHARE


@pytest.mark.parametrize("shards", [1, 2])
def test_random_histories_give_what_the_table_holds(world, rng, shards):
    world.shards = shards
    owner = shard_of(
        [pa.array([key[0] for key in KEYS]), pa.array([key[1] for key in KEYS], pa.int32())], PLANE.key_schema, shards
    )
    own = [key for key, shard in zip(KEYS, owner, strict=True) if shard == 0]
    absent = [KEYS[i] for i in rng.permutation(len(KEYS))]
    while absent:
        step = rng.integers(0, 6)
        if step == 5:
            DeltaTable(world.path).update(updates={"seats": "seats + 1"}, predicate="number = 1")
        elif step == 4:
            write_deltalake(world.path, rows(absent[:2], world.greatest + 1), mode="append")
        else:
            world.add(absent[:2])
        absent = absent if step == 5 else absent[2:]
        if rng.random() < 0.7:
            assert world.found(world.serving()[0], own) == world.held(own)


def test_what_a_version_did_is_read_from_its_entry(world):
    world.add(KEYS[:2])
    world.add(KEYS[2:3])
    files = member_files(world.path, 1, 2)
    assert {f"{world.path}/{file}" for file in files} == {*DeltaTable(world.path).file_uris()} - {
        *DeltaTable(world.path, version=0).file_uris()
    }
    assert member_files(world.path, 0, 2) is None
    assert member_files(world.path, 1, 3) is None
    assert member_files(world.path, 3, 2) == []
