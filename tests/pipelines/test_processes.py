"""Drivers as processes of their own: killed at any moment, started by spark-submit, with executors beside them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home
from scenario import World, random_rows
from workers import kill_when, start

import headrace.pipelines
from headrace.pipelines.runner import run

pytestmark = pytest.mark.spark

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@pytest.fixture
def world(tmp_path):
    settings = {
        "master": "local[2,4]",
        "conf": {"spark.sql.shuffle.partitions": 2},
    }
    return World(tmp_path / "world", options={"spark": settings})


def commits(world, table):
    return len(list((world.folder / "w" / table / "_delta_log").glob("*.json")))


@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_loses_and_doubles_nothing(world, rng, spark):  # noqa: ARG001 - finishes in the session
    for number in range(3):
        world.add_file(random_rows(rng, 50, number), ["broken"])
    before = commits(world, "plane")
    assert kill_when(start(world), lambda: commits(world, "plane") > before)
    run(world.pipeline)
    world.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_submit_runs_the_same_entry_point_on_two_executors(world, rng):
    world.add_file(random_rows(rng, 60, 1), ["broken"])
    script = Path(headrace.pipelines.__file__).with_name("__main__.py")
    submit = Path(_find_spark_home()) / "bin" / "spark-submit"
    options = ["--master", "local-cluster[2,1,1024]", "--conf", f"spark.executor.extraJavaOptions={JAVA}"]
    command = [str(submit), *options, str(script), str(world.pipeline), "--once"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["rows_in"] == 62
    hosts = {note for batch in report["batches"] for note in batch["detail"]["workers"]}
    assert len(hosts) >= 2
    world.check()
    shutil.rmtree(Path(_find_spark_home()) / "work", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_driver_that_is_killed_at_many_moments(world, rng, spark):  # noqa: ARG001 - finishes in the session
    """Kill at random moments between the first commit and the end, with shards and replicas changing as well."""
    number = 0
    for _ in range(30):
        world.shards = int(rng.integers(1, 4))
        world.write_pipeline()
        for _ in range(2):
            world.add_file(random_rows(rng, 50, number), ["broken"])
            number += 1
        before = {table: commits(world, table) for table in ("plane", "airport", "facts", "facts_errors")}
        driver = start(world)
        table = str(rng.choice(list(before)))
        kill_when(driver, lambda before=before, table=table: commits(world, table) > before[table])
        if rng.random() < 0.3:
            shutil.rmtree(world.folder.parent / "replicas", ignore_errors=True)
    run(world.pipeline)
    world.check()
