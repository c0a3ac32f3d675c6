"""Compaction leaves every row as it was, and the change feed empty."""

import random
from pathlib import Path

import pytest
from deltalake import DeltaTable
from test_row_changes import SCHEMA, Shadow, row

from headrace.pipelines.delta.compaction import compact_table
from headrace.pipelines.delta.live_files import LiveFiles
from headrace.pipelines.delta.tables import read_changes
from headrace.pipelines.errors import TableMovedError


@pytest.fixture
def shadow(tmp_path):
    made = Shadow(tmp_path / "t", [row(k) for k in range(400)])
    rng = random.Random(2)
    for number in range(6):
        chosen = rng.sample(sorted(made.rows), 60)
        made.change(updates=[row(k, f"v{number}") for k in chosen[:50]], deletes=chosen[50:])
    return made


def test_rows_stay_and_the_feed_is_empty(shadow):
    found = compact_table(shadow.path)
    shadow.check()
    assert (found.files_before, found.files_after, found.rows) == (7, 1, 340)
    assert found.removed == 6 * 60
    assert found.version == shadow.version == 7
    assert read_changes(shadow.path, 7, 7, SCHEMA.names).num_rows == 0
    assert all(file.vector is None for file in LiveFiles(shadow.path).at(7))


def test_a_compact_table_is_left_alone(shadow):
    compact_table(shadow.path)
    assert compact_table(shadow.path).version == 7
    assert shadow.version == 7


def test_files_have_the_target_size(shadow):
    found = compact_table(shadow.path, target=500)
    assert found.files_after > 1
    shadow.check()


def test_changes_go_on_after_it(shadow):
    compact_table(shadow.path)
    shadow.change(updates=[row(min(shadow.rows), "late")])
    shadow.check()


def test_another_writer_before_the_commit(shadow):
    done = []

    def hook(_step):
        if not done:
            done.append(1)
            shadow.change(deletes=[min(shadow.rows)])

    compact_table(shadow.path, hook=hook)
    shadow.check()
    assert len(LiveFiles(shadow.path).at(shadow.version)) == 1


def test_an_append_before_the_commit_does_not_matter(shadow):
    done = []

    def hook(_step):
        if not done:
            done.append(1)
            shadow.change(inserts=[row(5000)])

    assert compact_table(shadow.path, hook=hook).version == 8
    shadow.check()


def test_a_writer_that_never_rests(shadow):
    def hook(_step):
        shadow.change(updates=[row(min(shadow.rows), "again")])

    with pytest.raises(TableMovedError, match="run again"):
        compact_table(shadow.path, hook=hook)
    shadow.check()


@pytest.mark.slow
@pytest.mark.spark
def test_spark_reads_a_compacted_table_and_vacuums_it(shadow, spark):
    compact_table(shadow.path)
    there = spark.read.format("delta").load(shadow.path)
    assert {found["k"]: found["c"] for found in there.collect()} == {k: each["c"] for k, each in shadow.rows.items()}
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.sql(f"VACUUM delta.`{shadow.path}` RETAIN 0 HOURS")
    shadow.check()
    assert len(list(Path(shadow.path).glob("*.parquet"))) == len(DeltaTable(shadow.path).file_uris()) == 1
