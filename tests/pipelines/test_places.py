"""Projects in odd places: everything lands in the project, and a neighbor that a pattern would match is left alone."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from scenario import World, random_rows

from headrace.pipelines.catalog import Catalog
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import create_table
from headrace.pipelines.runner import run

pytestmark = pytest.mark.spark

ODD = ["a?b*", "a%zz b#", "{a,b}:c@v1", "ünï'\"~ "]
NEIGHBORS = ("axbc", "a", "b", "a%25zz b", "azz b#")  # what the names would mean as patterns, escapes or URLs
OWN = {"in", "w", ".headrace", "pipeline.yml"}


@pytest.mark.timeout(900)
def test_a_project_in_an_odd_folder_loads_its_own_files_into_its_own_tables(tmp_path, rng, spark):  # noqa: ARG001 - one session for all runs
    for name in NEIGHBORS:
        (tmp_path / name / "in").mkdir(parents=True)
        (tmp_path / name / "in" / "0000.csv").write_text("of a neighbor\n")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ODD:
        world = World(tmp_path / name, shards=1)
        world.add_file(random_rows(rng, 10, 1), ["broken"])
        run(world.pipeline)
        world.check()
        assert {path.name for path in world.folder.iterdir()} == OWN, name
        with Catalog(load_pipeline(world.pipeline).catalog) as catalog:
            assert [found.state for found in catalog.runs("flights")] == ["done"]
    assert run(world.pipeline).total("rows_in") == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {"replicas", *NEIGHBORS, *ODD}


@pytest.mark.timeout(900)
def test_a_project_may_be_moved_and_reached_by_a_link(tmp_path, rng, spark):  # noqa: ARG001 - one session for all runs
    world = World(tmp_path / "here", shards=1)
    world.add_file(random_rows(rng, 10, 1))
    run(world.pipeline)
    world.folder = world.folder.rename(tmp_path / "there (moved)")
    (tmp_path / "link").symlink_to(world.folder.name)
    world.add_file(random_rows(rng, 10, 2))
    done = run(os.path.relpath(tmp_path / "link" / "pipeline.yml"))
    assert len(done.batches) == 1
    world.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_locale_time_zone_umask_and_a_folder_that_is_gone_change_nothing(tmp_path, rng):
    world = World(tmp_path / "İ ünï", shards=1)
    world.add_file(random_rows(rng, 10, 1), ["broken"])
    script = (
        "import json, os, sys\n"
        "from headrace.pipelines.runner import run\n"
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); os.umask(0o077)\n"
        f"print(json.dumps(run({str(world.pipeline)!r}).as_dict()))\n"
    )
    odd = {"LC_ALL": "C", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **odd},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_in"] == 12
    world.check()
    files = [path for path in (world.folder / "w").rglob("*.parquet") if "facts" in str(path)]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_spark_appends_to_a_table_exactly_where_its_path_says(tmp_path, spark):
    for name in ODD:
        path = tmp_path / name / "t"
        path.parent.mkdir()
        create_table(str(path), pa.schema([("x", pa.int64())]))
        spark.range(3).withColumnRenamed("id", "x").write.format("delta").mode("append").save(str(path))
        assert DeltaTable(str(path)).to_pyarrow_dataset().to_table().num_rows == 3
    assert {path.name for path in tmp_path.iterdir()} == {*ODD}
