"""Runs with as-of lookups: facts point to the version of their event time, also after crashes and later changes."""

import datetime as dt
import itertools

import numpy as np
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable
from history_scenario import Orders, first_changes, random_changes, random_orders

from headrace.etl.history import inferred_entries, violations
from headrace.pipelines.changes import apply_files
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.errors import BatchError, PipelineFileError
from headrace.pipelines.runner import run

spark = pytest.mark.spark
STEPS = ("after join", "after members:buyer", "before facts", "after facts", "before record")


def day(number):
    return dt.date(2024, 1, number)


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


def crash_at(step):
    def hook(name):
        if name == step:
            raise CrashError(step)

    return hook


def consistent(members):
    """Check the versions against the changes that their entries record."""
    entries = members.entries()
    current = entries.filter(pa.compute.equal(entries.column("_at"), entries.column("valid_from")))
    current = current.filter(current.column("is_current"))
    return violations(members.history, entries, current, members.greatest)


@spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_facts_meet_the_version_of_their_event_time(tmp_path, shards):
    rng = np.random.default_rng(shards)
    world = Orders(tmp_path / "world", shards)
    world.members.apply(*first_changes(15))
    for number in range(2):
        world.members.apply(*random_changes(rng, 60, 15))
        world.put(random_orders(rng, 200, 15, number * 1000))
        result = run(world.pipeline)
        facts = world.check([number])
        outcomes = {fact["_outcome"] for fact in facts.values()}
        assert outcomes == {"matched", "late", "inferred", "unknown"}
        assert result.total("loaded") + result.total("rejected") == 200
        assert consistent(world.members) == ()


@spark
@pytest.mark.usefixtures("spark")
def test_a_time_has_the_day_in_utc_and_a_local_day_may_be_derived(tmp_path):
    """The example of docs/dimensions.md: half an hour after midnight in Oslo, on the day of a move."""
    times = {"utc": "at", "derived": "day", "written": "wall"}
    document = {
        "name": "orders",
        "source": {
            "format": "csv", "path": "in", "time_zone": "Europe/Oslo",
            "schema": {"order": "bigint", "customer": "bigint", "at": "timestamp", "wall": "timestamp_ntz"},
        },
        "transform": [{"derive": {"day": "cast(from_utc_timestamp(at, 'Europe/Oslo') as date)"}}],
        "dimensions": {
            "customer": {
                "path": "w/customer", "natural_key": ["id"], "columns": {"id": "bigint", "city": "string"}, "shards": 1,
                "history": {"effective": "since", "effective_type": "date"},
            }
        },
        "lookups": [
            {"dimension": "customer", "role": role, "on": {"customer": "id"}, "event_time": time, "carry": ["city"]}
            for role, time in times.items()
        ],
        "sink": {"path": "w/facts"},
        "replicas": "replicas",
    }  # fmt: skip
    pipeline = tmp_path / "pipeline.yml"
    pipeline.write_text(yaml.safe_dump(document))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.csv").write_text("order,customer,at,wall\n1,7,2024-05-02 00:30:00,2024-05-02 00:30:00\n")
    (tmp_path / "moves.csv").write_text("id,city,since\n7,Oslo,2024-01-01\n7,Bergen,2024-05-02\n")
    apply_files(load_pipeline(pipeline), "customer", tmp_path / "moves.csv")
    run(pipeline)
    (fact,) = DeltaTable(str(tmp_path / "w/facts")).to_pyarrow_table().to_pylist()
    assert {role: fact[f"{role}_city"] for role in times} == {"utc": "Oslo", "derived": "Bergen", "written": "Bergen"}


@spark
@pytest.mark.usefixtures("spark")
def test_an_inferred_member_is_an_entry_as_history_expects_it_and_is_completed_under_its_key(tmp_path):
    world = Orders(tmp_path / "world")
    world.members.apply(("c1", 1, "Oslo"))
    world.put([(1, " New ", "c1", day(5)), (2, "new", "c1", day(9)), (3, "c1", "c1", day(9))])
    run(world.pipeline)
    (row,) = [row for row in world.members.version_rows() if row["id"] == "new"]
    entries = world.members.entries()
    added = entries.filter(pa.compute.equal(entries.column("id"), "new"))
    expected = inferred_entries(world.members.history, pa.table({"id": [" New "]}), [row["customer_key"]])
    assert added.to_pylist() == expected.to_pylist()
    applied = world.members.apply(("new", 7, "Voss"))
    assert applied.outcomes.column("outcome").to_pylist() == ["completed"]
    world.put([(4, "new", "c1", day(8))])
    run(world.pipeline)
    facts = {fact["order"]: (fact["buyer_key"], fact["buyer_city"]) for fact in world.read("facts")}
    key = row["customer_key"]
    assert facts == {1: (key, None), 2: (key, None), 3: (1, "Oslo"), 4: (key, "Voss")}


@pytest.mark.slow
@spark
@pytest.mark.usefixtures("spark")
def test_a_killed_run_is_replayed_with_the_same_keys(tmp_path):
    rng = np.random.default_rng(7)
    world = Orders(tmp_path / "world")
    world.members.apply(*first_changes(15))
    for number, step in enumerate(STEPS):
        world.members.apply(*random_changes(rng, 20, 15))
        world.put([*random_orders(rng, 40, 15, number * 1000), (number * 1000 + 999, f"x{number}", None, day(20))])
        with pytest.raises(BatchError, match=step):
            run(world.pipeline, hook=crash_at(step))
        added = {row["id"]: row["customer_key"] for row in world.members.version_rows() if row["id"][0] in "nx"}
        run(world.pipeline)
        world.check([number])
        now = {row["id"]: row["customer_key"] for row in world.members.version_rows() if row["id"][0] in "nx"}
        assert now.items() >= added.items()
        assert consistent(world.members) == ()


@spark
@pytest.mark.usefixtures("spark")
def test_without_older_facts_the_replica_of_all_versions_is_not_built(tmp_path):
    world = Orders(tmp_path / "world", 1)
    replicas = world.folder / "replicas"
    world.members.apply(("c1", 1, "Oslo"), ("c1", 9, "Bergen"))
    world.put([(1, "c1", "c1", day(20))])
    run(world.pipeline)
    assert [place.name.split("-")[1] for place in replicas.iterdir()] == ["current"]
    world.put([(2, "c1", "c1", day(5))])
    run(world.pipeline)
    assert sorted(place.name.split("-")[1] for place in replicas.iterdir()) == ["current", "versions"]
    world.check([0, 1])


WRONG = {
    "an event time that the source lacks": ({"event_time": "dat"}, "no column 'dat'"),
    "an event time that is no time": ({"event_time": "order"}, "is no time"),
    "a policy for times without a time": ({"event_time": None, "before_first": "first"}, "without `event_time`"),
    "a special member that is not declared": ({"null_time": "invalid"}, "has no member 'invalid'"),
    "an attribute that is not there": ({"carry": ["street"]}, "no attribute 'street'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_lookup_is_refused_with_its_place(tmp_path, name):
    change, message = WRONG[name]
    world = Orders(tmp_path / "world")
    document = world.document()
    lookup = {**document["lookups"][0], **change}
    document["lookups"][0] = {key: value for key, value in lookup.items() if value is not None}
    world.pipeline.write_text(yaml.safe_dump(document))
    with pytest.raises(PipelineFileError, match=message) as error:
        load_pipeline(world.pipeline)
    assert "orders.yml, line " in str(error.value)


def test_an_event_time_needs_a_history(tmp_path):
    world = Orders(tmp_path / "world")
    document = world.document()
    del document["dimensions"]["customer"]["history"]
    for lookup in document["lookups"]:
        lookup.pop("carry", None)
    world.pipeline.write_text(yaml.safe_dump(document))
    with pytest.raises(PipelineFileError, match="has no history") as error:
        load_pipeline(world.pipeline)
    assert str(error.value).count("has no history") == len([*itertools.chain(["event_time"] * 2, ["rest"] * 2)])
