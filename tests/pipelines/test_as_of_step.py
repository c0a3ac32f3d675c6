"""The step of an as-of lookup without Spark: memory, and damage to either of its replicas."""

import datetime as dt

import pyarrow as pa
import pytest
import yaml
from history_scenario import Orders

from headrace.pipelines.batch.error_rows import Origin
from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.batch.read_step import record_format
from headrace.pipelines.batch.stages import StageRun, Target
from headrace.pipelines.batch.steps import Task
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.errors import ReplicaDamagedError
from headrace.pipelines.replica import operators
from headrace.pipelines.spark.frame import STATE, State
from headrace.storage.units import parse_memory

COUNT = 3000
OLD, NEW = dt.date(2024, 1, 5), dt.date(2024, 1, 25)


@pytest.fixture
def world(tmp_path):
    world = Orders(tmp_path / "world")
    changes = [(f"c{i:05d}", day, city) for i in range(COUNT) for day, city in ((1, "Oslo"), (20, "Bergen"))]
    world.members.apply(*changes)
    yield world
    for kept in operators._KEPT.values():
        kept.close()
    operators._KEPT.clear()


@pytest.fixture
def prepared(world):
    return check_pipeline(world.config, 2).prepared


def step_of(prepared, role="seller"):
    config, latest = prepared.config, DeltaHandle(prepared.path(role)).latest()
    origin = Origin(config.name, "s", 1, dt.datetime.now(dt.UTC), config.source.path, record_format(config.source))
    run = StageRun("run", prepared.shards, {}, origin)
    return prepared.step(role, Target(latest.version, 10 * COUNT, prepared.shards.get(role, 1), latest.table_id), run)


KEYS = [f"c{i:05d}" for i in range(0, COUNT, 7)]


def looked_up(step, days, keys=KEYS):
    """Return the key of each member, looked up at a day, and the notes of the joins."""
    days = [days] * len(keys)
    rows = pa.record_batch(
        {"seller": keys, "day": days, STATE: pa.repeat(pa.scalar(int(State.OPEN), pa.int8()), len(keys))}
    )
    task = Task("run", 0)
    found = pa.Table.from_batches(step.run([rows], task))
    return found.column("seller_key").to_pylist(), {join["role"]: join["replica"] for join in task.joins}


@pytest.mark.parametrize("damaged", ["seller", pytest.param("seller (backward)", marks=pytest.mark.slow)])
def test_a_damaged_replica_alone_is_discarded_and_built_again(world, prepared, damaged):
    step = step_of(prepared)
    expected, joins = looked_up(step, OLD)
    assert expected == [world.members.as_of(f"c{i:05d}", OLD)[0]["customer_key"] for i in range(0, COUNT, 7)]
    assert joins == {"seller": "built: missing", "seller (backward)": "built: missing"}
    kept = {key[0]: each for key, each in operators._KEPT.items()}
    file = kept[damaged].table.path
    for each in operators._KEPT.values():
        each.close()
    operators._KEPT.clear()
    looked_up(step, NEW) if damaged != "seller" else None
    with file.open("r+b") as stream:
        stream.seek(4 * 8192)
        stream.write(b"\xff" * (file.stat().st_size - 5 * 8192))
    with pytest.raises(ReplicaDamagedError, match="the replica has been discarded"):
        looked_up(step, OLD)
    again, joins = looked_up(step, OLD)
    assert again == expected
    assert {role for role, action in joins.items() if action == "built: missing"} == {damaged}


def test_members_that_batches_added_are_known_while_both_replicas_stay_as_they_are(world, prepared):
    before, _ = looked_up(step_of(prepared), OLD)
    for number in (1, 2):
        added = [f"n{number}{i}" for i in range(50)]
        world.members.infer(*added)
        found, joins = looked_up(step_of(prepared), OLD, [*KEYS, *added])
        assert set(joins.values()) == {"followed"}
        assert found[: len(KEYS)] == before
        wanted = {row["id"]: row["customer_key"] for row in world.members.version_rows()}
        assert found[len(KEYS) :] == [wanted[key] for key in added]
    world.members.apply(("n10", 20, "Oslo"), ("n11", 20, "Oslo"), ("n11", 25, "Voss"))
    found, joins = looked_up(step_of(prepared), NEW, ["n10", "n11", "n12", "none"])
    assert set(joins.values()) == {"advanced"}
    keys = [world.members.as_of(key, NEW)[0]["customer_key"] for key in ("n10", "n11", "n12")]
    assert found == [*keys, -1]


def test_all_operators_of_a_worker_share_its_memory(prepared):
    steps = {role: step_of(prepared, role) for role in prepared.lookups}
    joiners = [
        joiner for step in steps.values() for joiner in (step.joiner, *step.older) for _ in range(joiner.replica.shards)
    ]
    assert sum(joiner.memory for joiner in joiners) <= parse_memory(prepared.config.memory)
    assert [len(step.older) for step in steps.values()] == [2, 1, 0]


def test_special_members_that_are_declared_later_are_added_once(tmp_path):
    world = Orders(tmp_path / "world")
    document = world.document()
    document["dimensions"]["customer"]["special"] = {"not_applicable": {"city": "none"}}
    document["lookups"][1]["null_time"] = "not_applicable"
    world.pipeline.write_text(yaml.safe_dump(document))
    config = load_pipeline(world.pipeline)
    notices = [check_pipeline(config, 2).create().notices for _ in range(2)]
    assert [len(each) for each in notices] == [1, 0]
    rows = {row["customer_key"]: row["city"] for row in world.members.rows().to_pylist()}
    assert rows == {-1: None, -2: "none"}
