"""Correlations in Spark: results, shards that change, killed workers and drivers, the command line."""

import json
import os
import subprocess
import sys
import threading

import pytest
from correlation_world import World
from workers import kill_one_worker, kill_when, start

from headrace.pipelines.errors import StateDamagedError
from headrace.pipelines.runner import run

pytestmark = pytest.mark.spark

EQUAL = 'orders.id = payments."order"'


@pytest.fixture
def world(tmp_path):
    conf = {"spark.sql.shuffle.partitions": 2}
    return World(tmp_path, options={"spark": {"master": "local[2,4]", "conf": conf}})


@pytest.mark.usefixtures("spark")
def test_batches_with_killed_workers_and_other_shards_give_the_join_of_all_rows(world, rng):
    killed = []

    def hook(step):
        if step == "before join" and len(killed) == 0:
            threading.Thread(target=kill_one_worker, args=(killed,), daemon=True).start()

    world.add_random(rng, 300, keys=50)
    world.add("orders", [("no number", "x", "2024-01-01")])
    world.rows["orders"].pop()
    run(world.pipeline, hook=hook)
    world.shards(3)
    world.add_random(rng, 300, keys=50)
    run(world.pipeline)
    assert killed
    assert world.results() == world.expected(EQUAL)
    assert [row["record"] for row in world.rejected()] == ["no number,x,2024-01-01"]
    next(world.state.glob("*.run")).unlink()
    with pytest.raises(StateDamagedError, match="is missing"):
        run(world.pipeline)


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_three_sources_in_spark(tmp_path, rng):
    on = ["orders.id = payments.order", "shipments.order = orders.id"]
    world = World(tmp_path, {"on": on, "shards": 3}, ("orders", "payments", "shipments"))
    for _ in range(3):
        world.add_random(rng, 60, keys=20)
        run(world.pipeline)
    assert world.results() == world.expected(f'{EQUAL} and shipments."order" = orders.id')


def commits(world):
    return len(list((world.folder / "w/paid/_delta_log").glob("*.json")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("spark")
def test_a_driver_that_is_killed_within_and_between_batches_loses_and_doubles_nothing(world, rng):
    for number in range(6):
        world.shards(1 + number % 3)
        for _ in range(3):
            world.add_random(rng, 40)
        runs, done = len(list(world.state.glob("*.run"))), commits(world)
        wanted = {
            0: lambda: len(list(world.state.glob("*.run"))) > runs,  # noqa: B023 - called within the loop
            1: lambda: len(list(world.state.glob("*.manifest"))) > 1,
            2: lambda: commits(world) > done + number % 2,  # noqa: B023 - as above
        }
        kill_when(start(world), wanted[number % 3])
    run(world.pipeline)
    assert world.results() == world.expected(EQUAL)
    assert {file.name for file in world.state.glob("*.run")} == {entry["file"] for entry in world.manifest()["runs"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_line_runs_a_correlation(world, rng):
    world.add_random(rng, 30)
    script = "from headrace.cli.main import entry_point; entry_point()"
    command = [sys.executable, "-c", script, "run", str(world.pipeline), "--once", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["loaded"] == len(world.expected(EQUAL))
    assert world.results() == world.expected(EQUAL)
