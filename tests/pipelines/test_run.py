"""Runs from files to Delta tables under Spark: against a plain-Python oracle, across crashes, damage and changes."""

import datetime as dt
import os
import shutil
import signal
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake
from scenario import World, random_rows
from workers import kill_one_worker

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.errors import (
    BatchError,
    DeltaTableError,
    LeaseHeldError,
    LedgerError,
    PipelineFileError,
    PolicyViolationError,
)
from headrace.pipelines.lease import Leases
from headrace.pipelines.runner import run
from headrace.pipelines.source.source_files import adopt_files

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

STEPS = ("after join", "after members:plane", "after members:dest", "after errors", "after facts")
MORE_STEPS = (
    "before join",
    "before members:plane",
    "after members:origin",
    "before members:dest",
    "before errors",
    "before facts",
    "before record",
    "after record",
)


class CrashError(Exception):
    """Raised by a hook in place of a crash."""


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "world")


class Crash:
    """Raises at a step of the batch after `skipped` ones, which an earlier run had left to be done."""

    def __init__(self, step, skipped):
        self.step = step
        self.skipped = skipped

    def hook(self, name):
        if name == self.step and self.skipped <= 0:
            raise CrashError(self.step)

    def on_batch(self, _record):
        self.skipped -= 1


def test_files_become_facts_and_every_row_is_accounted_for(world, rng):
    unknown = (1998, "N1", "JFK", "LAX", "ZZ", 5.0)
    broken = ["1,2,3", '7,N1,JFK,LAX,AA,"not a number"', "8,N1,JFK,LAX,AA,1,extra"]
    world.add_file([*random_rows(rng, 59, 1), unknown], broken)
    world.add_file(random_rows(rng, 40, 1))
    result = run(world.pipeline)
    world.check()
    assert (result.state, len(result.batches)) == ("done", 2)
    assert result.total("rows_in") == 105
    assert result.total("loaded") + result.total("dropped") + result.total("rejected") == 105
    with Catalog(load_pipeline(world.pipeline).catalog) as catalog:
        (recorded,) = catalog.runs("flights")
        assert (recorded.state, recorded.rows_in, recorded.batches) == ("done", 105, 2)
        detail = catalog.batches(recorded.id)[0].detail
    assert set(detail["joins"]) == {"plane", "origin", "dest", "carrier", "(duplicates)"}
    assert {"plan", "join", "facts", "errors"} <= set(detail["phases"])
    errors = [row for row in world.read("facts_errors") if row["causes"][0]["role"] == "carrier"]
    lines = {f"{number:04d}.csv": (world.folder / f"in/{number:04d}.csv").read_text().splitlines() for number in (0, 1)}
    assert errors
    for row in errors:
        assert ",ZZ," in row["record"]
        assert row["record"] == lines[row["_file"]][row["_record_number"]]


@pytest.mark.slow
def test_tables_that_take_no_files_are_written_by_spark(world, rng, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.batch.tables.takes_files", lambda _: False)
    world.add_file(random_rows(rng, 40, 1), ["broken"])
    result = run(world.pipeline)
    assert result.total("loaded") == len(world.check())


def test_a_run_without_new_files_does_nothing(world, rng):
    world.add_file(random_rows(rng, 10, 1))
    run(world.pipeline)
    assert run(world.pipeline).batches == ()
    world.check()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [STEPS, pytest.param(MORE_STEPS * 2, marks=pytest.mark.slow)])
def test_a_crash_at_any_step_changes_nothing(world, rng, steps):
    for number, step in enumerate(steps):
        world.shards = 1 + number % 3
        world.write_pipeline()
        world.add_file(random_rows(rng, 30, number), ["broken"])
        crash = Crash(step, skipped=min(number, 1))
        with pytest.raises(BatchError, match=step):
            run(world.pipeline, hook=crash.hook, on_batch=crash.on_batch)
        if number % 4 == 2:
            shutil.rmtree(world.folder.parent / "replicas")
    result = run(world.pipeline)
    assert result.total("rows_in") == 32
    facts = world.check()
    with Catalog(load_pipeline(world.pipeline).catalog) as catalog:
        runs = catalog.runs("flights", limit=100)
    assert sum(each.loaded for each in runs) == len(facts)
    assert sum(each.rows_in for each in runs) == 32 * len(steps)


def test_a_replica_that_is_damaged_between_runs_is_built_again(world, rng):
    world.add_file(random_rows(rng, 30, 1))
    run(world.pipeline)
    for file in (world.folder.parent / "replicas").glob("*/*/table.headrace"):
        with file.open("r+b") as stream:
            stream.seek(100)
            stream.write(os.urandom(file.stat().st_size))
    world.add_file(random_rows(rng, 30, 2))
    result = run(world.pipeline)
    world.check()
    replicas = [name for join in result.batches[0].detail["joins"].values() for name in join["replicas"]]
    assert "built: damaged" in replicas


def test_killed_workers_are_replaced(world, rng):
    world.add_file(random_rows(rng, 400, 1))
    killed = []

    def hook(name):
        if name == "before join":
            threading.Thread(target=kill_one_worker, args=(killed,), daemon=True).start()

    run(world.pipeline, hook=hook)
    assert killed
    world.check()


def test_of_equal_duplicates_the_first_by_file_and_record_is_kept(tmp_path):
    document = {
        "name": "ties",
        "source": {"format": "csv", "path": "in", "schema": {"id": "bigint", "N": "int", "A": "string"}},
        "duplicates": {"key": ["id"], "order_by": ["N"], "shards": 1},
        "sink": {"path": "w/facts"},
        "replicas": "replicas",
    }
    (tmp_path / "pipeline.yml").write_text(yaml.safe_dump(document))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/2.csv").write_text("id,N,A\n1,5,a\n2,5,z\n2,5,a\n3,4,z\n4,,a\n")
    (tmp_path / "in/1.csv").write_text("id,N,A\n1,5,z\n3,5,a\n4,5,z\n")
    run(tmp_path / "pipeline.yml")
    facts = DeltaTable(str(tmp_path / "w/facts")).to_pyarrow_table().to_pylist()
    assert sorted((fact["id"], fact["N"], fact["A"]) for fact in facts) == [
        (1, 5, "z"),
        (2, 5, "z"),
        (3, 4, "z"),
        (4, 5, "z"),
    ]


def test_a_run_that_fails_in_a_later_batch_has_the_totals_of_those_before(world, rng):
    for _ in range(3):
        world.add_file(random_rows(rng, 10, 1), ["broken"])
    crash = Crash("before facts", 2)
    with pytest.raises(BatchError) as failed:
        run(world.pipeline, hook=crash.hook, on_batch=crash.on_batch)
    (told,) = failed.value.__notes__
    with Catalog(load_pipeline(world.pipeline).catalog) as catalog:
        (last,) = catalog.runs("flights")
        batches = catalog.batches(last.id)
    assert len(batches) == 2
    rows, loaded, dropped, rejected, members = (
        sum(getattr(each, name) for each in batches)
        for name in ("rows_in", "loaded", "dropped", "rejected", "new_members")
    )
    assert 0 < loaded < rows == loaded + dropped + rejected
    assert told == (
        f"2 batches: {rows} rows in, {loaded} loaded, {dropped} duplicates dropped, 0 duplicates routed, {rejected} "
        f"rejected, {members} new members"
    )
    with pytest.raises(BatchError) as failed:
        run(world.pipeline, hook=Crash("before facts", 0).hook)
    assert not hasattr(failed.value, "__notes__")


def test_the_policy_fail_stops_the_run_and_nothing_is_written(tmp_path):
    world = World(tmp_path / "world")
    text = world.pipeline.read_text().replace("policy: reject", "policy: fail")
    world.pipeline.write_text(text)
    world.add_file([(1, "X1", "JFK", "LAX", "ZZ", 1.0)])
    with pytest.raises(PolicyViolationError, match="ZZ"):
        run(world.pipeline)
    assert world.read("facts") == []
    assert set(world.members("plane", "plane_key", "tailnum")) == {None, "N1", "N2", "N3"}


def test_a_pipeline_that_is_running_is_not_run_twice(world):
    config = load_pipeline(world.pipeline)
    held = pytest.raises(LeaseHeldError, match="in use by process")
    with Catalog(config.catalog) as catalog, Leases(catalog, [f"pipeline:{config.checkpoint}"]), held:
        run(world.pipeline)


def test_a_followed_stream_ends_after_the_batch_when_it_is_told(world, rng):
    world.add_file(random_rows(rng, 20, 1))

    def stop(_):
        os.kill(os.getpid(), signal.SIGTERM)

    result = run(world.pipeline, follow=True, on_batch=stop)
    assert (result.state, result.signal) == ("stopped", signal.SIGTERM)
    world.check()
    world.add_file(random_rows(rng, 20, 2))
    run(world.pipeline)
    world.check()


def test_a_lost_checkpoint_is_refused_although_duplicates_are_declared(world, rng):
    world.add_file([row for row in random_rows(rng, 20, 1) if row[4] != "ZZ"])
    run(world.pipeline)
    shutil.rmtree(world.folder / ".headrace/flights/checkpoint")
    with pytest.raises(LedgerError, match="a run would load every file again"):
        run(world.pipeline)
    adopt_files(load_pipeline(world.pipeline))
    assert run(world.pipeline).batches == ()
    world.check()


def test_a_header_that_is_not_the_schema_fails_with_the_file(world):
    (world.folder / "in" / "a.csv").write_text("id,tail,origin,destination,carrier,amount\n1,N1,JFK,LAX,AA,1\n")
    with pytest.raises(BatchError, match=r"(?i)header"):
        run(world.pipeline)


def simple(tmp_path, **source):
    """Return a pipeline of one lookup whose dimension begins empty."""
    (tmp_path / "in").mkdir()
    document = {
        "name": "simple",
        "source": {"path": "in", "schema": {"id": "bigint", "code": "string", "at": "timestamp"}, **source},
        "dimensions": {"code": {"path": "w/code", "natural_key": ["code"], "columns": {"code": "string"}}},
        "lookups": [{"dimension": "code", "role": "code", "on": {"code": "code"}, "policy": "infer"}],
        "sink": {"path": "w/facts"},
        "replicas": "../replicas",
    }
    (tmp_path / "p.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return tmp_path / "p.yml"


def rows_of(path):
    return DeltaTable(str(path)).to_pyarrow_table().to_pylist()


def test_json_that_does_not_fit_goes_to_the_errors_as_it_came(tmp_path):
    pipeline = simple(tmp_path, format="json", time_zone="America/New_York")
    lines = ['{"id": 1, "code": "A", "at": "2024-01-01T00:00:00"}', '{"id": "x", "code": "B"}', "{broken"]
    (tmp_path / "in" / "a.json").write_text("\n".join(lines))
    result = run(pipeline)
    assert (result.total("loaded"), result.total("rejected")) == (1, 2)
    (fact,) = rows_of(tmp_path / "w/facts")
    assert fact["at"] == dt.datetime(2024, 1, 1, 5, tzinfo=dt.UTC)
    assert sorted(row["record"] for row in rows_of(tmp_path / "w/facts_errors")) == sorted(lines[1:])


def test_parquet_files_are_loaded_and_one_without_a_column_is_named(tmp_path):
    pipeline = simple(tmp_path, format="parquet")
    at = pa.array([dt.datetime(2024, 1, 1, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"id": [1], "code": ["A"], "at": at}), tmp_path / "in" / "a b.parquet")
    assert run(pipeline).total("loaded") == 1
    pq.write_table(pa.table({"id": [2], "cod": ["A"], "at": at}), tmp_path / "in" / "c.parquet")
    with pytest.raises(BatchError, match=r"c.parquet.*column 'code' is missing"):
        run(pipeline)
    assert len(rows_of(tmp_path / "w/facts")) == 1


def test_an_empty_folder_is_nothing_to_do_and_a_missing_one_is_named(tmp_path):
    pipeline = simple(tmp_path, format="csv")
    assert run(pipeline).batches == ()
    (tmp_path / "in").rmdir()
    with pytest.raises(PipelineFileError, match="there is no folder"):
        run(pipeline)


def test_a_checkpoint_that_has_gone_does_not_load_every_file_again(tmp_path):
    pipeline = simple(tmp_path, format="csv")
    (tmp_path / "in" / "a.csv").write_text("id,code,at\n1,A,2024-01-01 00:00:00\n")
    assert run(pipeline).total("loaded") == 1
    shutil.rmtree(tmp_path / ".headrace/simple/checkpoint")
    with pytest.raises(LedgerError, match="a run would load every file again"):
        run(pipeline)


def test_a_fact_table_of_another_form_is_refused(tmp_path):
    pipeline = simple(tmp_path, format="csv")
    write_deltalake(str(tmp_path / "w/facts"), pa.table({"id": ["text"]}))
    with pytest.raises(DeltaTableError, match="'id' as string, but the pipeline declares bigint"):
        run(pipeline)
