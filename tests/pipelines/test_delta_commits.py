"""Commits to Delta's log: once, exactly at a version, beside other writers. Read back by deltalake and by Spark."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.delta.commits import (
    Commit,
    append,
    append_exactly,
    commit_exactly,
    commit_files,
)
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import GREATEST_KEY, DeltaHandle, create_table, read_changes
from headrace.pipelines.errors import BatchError, DeltaTableError, TableMovedError

SCHEMA = pa.schema([("k", pa.int64()), ("c", pa.string())])


@pytest.fixture
def path(tmp_path):
    create_table(str(tmp_path / "t"), SCHEMA)
    return str(tmp_path / "t")


def written(path, rows):
    with FileWriter(FileSpec(path, SCHEMA)) as writer:
        writer.write(pa.RecordBatch.from_pylist([{"k": k, "c": c} for k, c in rows], SCHEMA))
        return writer.close()


def rows(path):
    return sorted((row["k"], row["c"]) for row in DeltaTable(path).to_pyarrow_table().to_pylist())


def test_files_are_committed_once(path):
    table = DeltaTable(path)
    files = written(path, [(1, "a")])
    assert commit_files(path, table, files, Commit("app", 4, {"x": 1}))
    assert not commit_files(path, table, written(path, [(2, "b")]), Commit("app", 4))
    assert not commit_files(path, DeltaTable(path), written(path, [(2, "b")]), Commit("app", 3))
    assert rows(path) == [(1, "a")]
    (note,) = DeltaHandle(path).commit_notes("app", 4)
    assert (note["x"], note["rows_written"]) == (1, 1)


def test_a_commit_at_a_version_goes_through_if_the_table_has_not_changed(path):
    table = DeltaTable(path)
    commit_exactly(path, table, 0, written(path, [(7, "a")]), Commit("app", 1, properties={GREATEST_KEY: "7"}))
    there = DeltaTable(path)
    assert there.version() == 1
    assert there.metadata().configuration[GREATEST_KEY] == "7"
    assert there.metadata().configuration["delta.enableChangeDataFeed"] == "true"
    assert rows(path) == [(7, "a")]
    assert read_changes(path, 1, 1, ["k"]).column("k").to_pylist() == [7]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: write_deltalake(path, pa.table({"k": [9], "c": ["z"]}), mode="append"),
        lambda path: DeltaTable(path).delete("k = 1"),
        lambda path: DeltaTable(path).update(updates={"c": "'x'"}, predicate="k = 1"),
        lambda path: DeltaTable(path).alter.set_table_properties({"delta.appendOnly": "false"}),
        lambda path: commit_exactly(path, DeltaTable(path), 1, written(path, [(5, "e")]), Commit("other", 1)),
    ],
    ids=["append", "delete", "update", "property", "members"],
)
def test_a_commit_at_a_version_is_refused_if_another_writer_was_first(path, change):
    write_deltalake(path, pa.table({"k": [1], "c": ["a"]}), mode="append")
    table = DeltaTable(path)
    change(path)
    before = rows(path)
    with pytest.raises(TableMovedError, match="after version 1"):
        commit_exactly(path, table, 1, written(path, [(2, "b")]), Commit("app", 1))
    assert rows(path) == before


def test_a_commit_at_a_version_may_come_after_one_that_moved_no_row(path):
    for number in range(3):
        write_deltalake(path, pa.table({"k": [number], "c": ["a"]}), mode="append")
    DeltaTable(path).optimize.compact()
    assert DeltaTable(path).version() == 4
    commit_exactly(path, DeltaTable(path), 3, written(path, [(9, "b")]), Commit("app", 1))
    assert rows(path) == [(0, "a"), (1, "a"), (2, "a"), (9, "b")]


def test_writers_that_commit_at_once_take_turns(path):
    done = []

    def write(number):
        table = DeltaTable(path)
        files = written(path, [(number, "w")])
        done.append(commit_files(path, table, files, Commit(f"app{number}", 1)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 12
    assert [k for k, _ in rows(path)] == list(range(12))
    assert DeltaTable(path).version() == 12


def test_of_writers_at_one_version_one_wins(path):
    outcomes = []

    def write(number):
        try:
            commit_exactly(path, DeltaTable(path), 0, written(path, [(number, "w")]), Commit(f"app{number}", 1))
            outcomes.append("won")
        except TableMovedError:
            outcomes.append("moved")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["moved"] * 7 + ["won"]
    assert len(rows(path)) == 1


def test_a_file_that_a_vacuum_removed_is_not_committed(path, tmp_path):
    files = written(path, [(1, "a")])
    (tmp_path / "t" / files[0].path).unlink()
    with pytest.raises(DeltaTableError, match=f"{files[0].path} .*removed"):
        commit_files(path, DeltaTable(path), files, Commit("app", 1))
    assert DeltaTable(path).version() == 0


def test_a_table_that_stopped_taking_files_is_refused(path):
    files = written(path, [(1, "a")])
    DeltaTable(path).alter.add_constraint({"small": "k < 10"})
    assert not takes_files(DeltaTable(path))
    with pytest.raises(BatchError, match="no longer takes plain files"):
        commit_files(path, DeltaTable(path), files, Commit("app", 1))


def test_the_log_gets_checkpoints(path):
    DeltaTable(path).alter.set_table_properties({"delta.checkpointInterval": "5"})
    for number in range(5):
        commit_files(path, DeltaTable(path), written(path, [(number, "a")]), Commit("app", number))
    kept = json.loads(Path(path, "_delta_log", "_last_checkpoint").read_text())
    assert kept["version"] == 5
    assert len(rows(path)) == 5


@pytest.mark.spark
def test_spark_reads_what_was_committed_and_commits_at_a_version_too(path, spark):
    commit_exactly(
        path, DeltaTable(path), 0, written(path, [(7, "a")]), Commit("app", 1, properties={GREATEST_KEY: "7"})
    )
    frame = spark.createDataFrame([(8, "b")], "k bigint, c string")
    append_exactly(frame, path, 1, Commit("app", 2, {"base": 7}, {GREATEST_KEY: "8"}))
    with pytest.raises(TableMovedError):
        append_exactly(frame, path, 1, Commit("app", 3))
    found = spark.read.format("delta").load(path).orderBy("k").collect()
    assert [tuple(row) for row in found] == [(7, "a"), (8, "b")]
    assert rows(path) == [(7, "a"), (8, "b")]
    handle = DeltaHandle(path)
    assert handle.transaction("app") == 2
    (note,) = handle.commit_notes("app", 2)
    assert (note["base"], note["rows_written"]) == (7, 1)
    assert DeltaTable(path).metadata().configuration[GREATEST_KEY] == "8"
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0).load(path)
    assert feed.count() == 2


def members(path, rows, greatest):
    """Commit members at the newest version, as a batch does."""
    commit = Commit("headrace:s:members:a", 1, {"greatest_key": greatest}, {GREATEST_KEY: str(greatest)})
    commit_exactly(path, DeltaTable(path), DeltaTable(path).version(), written(path, rows), commit)


def test_a_number_that_restore_took_away_is_not_given_again(path):
    members(path, [(1, "a")], 1)
    handle = DeltaHandle(path)
    members(path, [(2, "b")], 2)
    handle.latest()
    assert handle.greatest_key("k") == 2
    DeltaTable(path).restore(1)
    assert rows(path) == [(1, "a")]
    for each in (handle, DeltaHandle(path)):
        each.latest()
        assert each.greatest_key("k") == 2


def test_the_greatest_key_in_files_without_statistics_is_read_from_their_rows_once(path, monkeypatch):
    for number, keys in enumerate([(3, 9), (5,)]):
        files = [replace(file, statistics="{}") for file in written(path, [(key, "a") for key in keys])]
        commit_files(path, DeltaTable(path), files, Commit("app", number))
    handle = DeltaHandle(path)
    assert handle.greatest_key("k") == 9
    monkeypatch.setattr("headrace.pipelines.delta.tables.read_live_file", None)
    assert handle.greatest_key("k") == 9


def test_files_that_are_gone_are_written_anew_while_that_is_possible(path):
    files = written(path, [(1, "a")])
    Path(path, files[0].path).unlink()
    with pytest.raises(TableMovedError, match="removed before it was committed"):
        commit_exactly(path, DeltaTable(path), 0, files, Commit("app", 1))
    with pytest.raises(TableMovedError, match="removed before it was committed"):
        commit_files(path, DeltaTable(path), files, Commit("app", 1), final=False)
    assert DeltaTable(path).version() == 0


@pytest.mark.parametrize("versions", [0, 1, 3])
def test_a_table_that_was_made_anew_is_not_written_to(path, versions):
    write_deltalake(path, pa.table({"k": [1], "c": ["a"]}), mode="append")
    handle = DeltaHandle(path)
    shutil.rmtree(path)
    with pytest.raises(DeltaTableError, match="removed or recreated"):
        handle.latest()
    create_table(path, SCHEMA)
    for number in range(versions):
        write_deltalake(path, pa.table({"k": [number], "c": ["b"]}), mode="append")
    with pytest.raises(DeltaTableError, match="removed or recreated"):
        handle.require_form()


def test_a_log_that_was_cleaned_up_is_no_new_table(path):
    write_deltalake(path, pa.table({"k": [1], "c": ["a"]}), mode="append")
    handle = DeltaHandle(path)
    DeltaTable(path).create_checkpoint()
    Path(path, "_delta_log", f"{0:020d}.json").unlink()
    assert handle.latest().version == 1
    handle.require_form()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            lambda path: write_deltalake(
                path, pa.table({"k": ["x"], "c": ["b"]}), mode="overwrite", schema_mode="overwrite"
            ),
            "column 'k'",
        ),
        (
            lambda path: write_deltalake(
                path, pa.table({"k": [1], "c": ["b"]}), mode="overwrite", schema_mode="overwrite", partition_by=["c"]
            ),
            "the partitioning",
        ),
    ],
    ids=["type", "partitions"],
)
def test_a_table_of_another_form_is_not_written_to(path, change, names):
    handle = DeltaHandle(path)
    write_deltalake(path, pa.table({"k": [1], "c": ["a"], "e": [1]}), mode="append", schema_mode="merge")
    handle.require_form()
    change(path)
    with pytest.raises(DeltaTableError, match=f"{names} of the Delta table .* was changed"):
        handle.require_form()


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["append", "delete", "property"])
def test_a_commit_by_spark_is_refused_if_the_table_changes_while_it_writes(path, spark, kind):
    def changes(batches):
        if kind == "append":
            write_deltalake(path, pa.table({"k": [9], "c": ["z"]}), mode="append")
        elif kind == "delete":
            DeltaTable(path).delete("k = 1")
        elif kind == "property":
            DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        yield from batches

    write_deltalake(path, pa.table({"k": [1], "c": ["a"]}), mode="append")
    frame = spark.createDataFrame([(8, "b")], "k bigint, c string").coalesce(1)
    with pytest.raises(TableMovedError, match="after version 1"):
        append_exactly(frame.mapInArrow(changes, frame.schema), path, 1, Commit("app", 1))
    assert (8, "b") not in rows(path)
    append_exactly(frame.limit(0), path, 2, Commit("", 0, properties={GREATEST_KEY: "9"}))
    assert DeltaTable(path).metadata().configuration[GREATEST_KEY] == "9"
    assert (8, "b") not in rows(path)


@pytest.mark.spark
def test_an_append_by_spark_goes_on_if_properties_change_while_it_writes(path, spark):
    def changes(batches):
        if DeltaTable(path).version() < 2:
            DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        yield from batches

    frame = spark.createDataFrame([(8, "b")], "k bigint, c string").coalesce(1)
    append(frame.mapInArrow(changes, frame.schema), path, Commit("app", 1))
    assert rows(path) == [(8, "b")]
