"""The main job as a user starts it: `headrace demo` in a process of its own, and its result read by others."""

import json
import os
import subprocess
import sys

import duckdb
import pytest
from deltalake import DeltaTable

from headrace.samples import NYCFLIGHTS13_FACTS
from headrace.samples.demo import prepare
from headrace.storage.errors import InputError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]


def headrace(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "headrace", *map(str, arguments)],
        cwd=cwd, env={**os.environ, "PYTHONWARNINGS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = headrace("demo", "--dir", "d", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "d", json.loads(done.stdout), done.stderr


@pytest.fixture
def warehouse(demo):
    with duckdb.connect() as connection:
        for table in (demo[0] / "warehouse").iterdir():
            connection.register(table.name, DeltaTable(table).to_pyarrow_dataset())
        yield lambda sql: connection.execute(sql).fetchone()[0]


def test_the_known_facts_are_in_the_warehouse(warehouse):
    flights = "fact_flights JOIN dim_plane USING (plane_key)"
    assert warehouse("SELECT count(*) FROM fact_flights") == NYCFLIGHTS13_FACTS.flights
    assert (
        warehouse("SELECT count(*) FROM fact_flights WHERE plane_key = -1") == NYCFLIGHTS13_FACTS.flights_without_plane
    )
    assert (
        warehouse(f"SELECT count(*) FROM {flights} WHERE plane_key = -1 OR is_inferred")
        == NYCFLIGHTS13_FACTS.flights_not_in_planes
    )
    assert (
        warehouse("SELECT count(*) FROM dim_airport WHERE is_inferred")
        == NYCFLIGHTS13_FACTS.destinations_not_in_airports
    )


@pytest.mark.parametrize(
    ("role", "dimension", "natural"),
    [
        ("plane", "plane", "tailnum"),
        ("origin", "airport", "faa"),
        ("dest", "airport", "faa"),
        ("carrier", "carrier", "carrier"),
    ],
)  # fmt: skip
def test_every_surrogate_key_leads_back_to_the_natural_key(warehouse, role, dimension, natural):
    column = {"plane": "tailnum"}.get(role, role)
    assert (
        warehouse(
            f"SELECT count(*) FROM fact_flights f LEFT JOIN dim_{dimension} d ON d.{dimension}_key = f.{role}_key "
            f"WHERE d.{dimension}_key IS NULL OR d.{natural} IS DISTINCT FROM f.{column}"
        )
        == 0
    )


def test_the_report_accounts_for_every_row(demo):
    _, document, _ = demo
    run = document["run"]
    assert run["rows_in"] == run["loaded"] == sum(run["outcomes"].values()) == NYCFLIGHTS13_FACTS.flights
    assert document["facts"]["flights_not_in_planes"] == NYCFLIGHTS13_FACTS.flights_not_in_planes
    assert [len(answer["rows"]) > 0 for answer in document["answers"]] == [True, True, True]


def test_progress_goes_to_standard_error_without_spark_s_noise(demo):
    _, _, errors = demo
    assert "batch 0:" in errors
    assert "WARN" not in errors


def test_running_its_pipeline_again_loads_nothing_twice(demo):
    folder, _, _ = demo
    before = DeltaTable(folder / "warehouse" / "fact_flights").version()
    done = headrace("run", folder / "pipeline.yml", "--once", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_in"] == 0
    assert DeltaTable(folder / "warehouse" / "fact_flights").version() == before


def test_a_folder_that_no_demo_wrote_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="no demo wrote"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
