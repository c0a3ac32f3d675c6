"""Row changes by deletion vectors, read back by deltalake, by its change feed, by our own reader, and by Spark."""

import datetime as dt
import json
import random
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from headrace.pipelines.delta.commits import Commit
from headrace.pipelines.delta.data_files import DataFile, FileSpec, FileWriter
from headrace.pipelines.delta.deletion_vectors import DeletionVector, write_vectors
from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.delta.rewrites import rewrite
from headrace.pipelines.delta.row_changes import (
    RowChanges,
    change_rows_exactly,
    create_row_table,
    feed_files,
)
from headrace.pipelines.delta.support import describe, require_row_changes, takes_files
from headrace.pipelines.delta.tables import CHANGE_TYPE, create_table, read_changes, read_rows
from headrace.pipelines.errors import DeltaTableError, TableMovedError

ENTRIES = pa.list_(pa.struct([("at", pa.date32()), ("n", pa.int64())]))
SCHEMA = pa.schema([("k", pa.int64()), ("c", pa.string()), ("e", ENTRIES)])


class Shadow:
    """A table beside a dictionary that has the rows it must have."""

    def __init__(self, path, rows=()):
        self.path = str(path)
        self.live = LiveFiles(self.path)
        self.rows = {}
        Path(path).mkdir()
        create_row_table(self.path, SCHEMA, self._written(SCHEMA, rows))
        self.rows |= {row["k"]: row for row in rows}

    def _written(self, schema, rows, spec=None):
        if not rows:
            return []
        with FileWriter(spec or FileSpec(self.path, schema)) as writer:
            writer.write(pa.RecordBatch.from_pylist(rows, schema))
            return writer.close()

    def change(self, updates=(), inserts=(), deletes=(), version=None, transaction=1):
        """Change rows, and return the feed as it must be read."""
        feed = [{**self.rows[row["k"]], CHANGE_TYPE: "update_preimage"} for row in updates]
        feed += [{**row, CHANGE_TYPE: "update_postimage"} for row in updates]
        feed += [{**row, CHANGE_TYPE: "insert"} for row in inserts]
        feed += [{**self.rows[k], CHANGE_TYPE: "delete"} for k in deletes]
        removed = np.array(sorted([*(row["k"] for row in updates), *deletes]), dtype=np.int64)
        spec = feed_files(self.path, SCHEMA)
        changes = RowChanges(
            "k", removed, self._written(SCHEMA, [*updates, *inserts]), self._written(spec.schema, feed, spec)
        )
        table = DeltaTable(self.path)
        at = table.version() if version is None else version
        change_rows_exactly(self.path, table, self.live, at, changes, Commit("app", transaction))
        for k in deletes:
            del self.rows[k]
        self.rows |= {row["k"]: row for row in (*updates, *inserts)}
        return feed

    @property
    def version(self):
        return DeltaTable(self.path).version()

    def check(self):
        wanted = ordered(self.rows.values())
        table = DeltaTable(self.path)
        assert ordered(pa.table(table.scan(columns=SCHEMA.names)).cast(SCHEMA).to_pylist()) == wanted
        assert ordered(read_rows(self.path, self.version, SCHEMA.names).read_all().to_pylist()) == wanted
        files = LiveFiles(self.path).at(self.version)
        own = [batch for file in files for _, batch in read_live_file(self.path, file, SCHEMA)]
        assert ordered(row for batch in own for row in batch.to_pylist()) == wanted


def ordered(rows):
    return sorted(rows, key=lambda row: json.dumps(row, default=str, sort_keys=True))


def row(k, c="a", entries=None):
    return {"k": k, "c": c, "e": entries}


def feed_of(path, version):
    found = read_changes(path, version, version, SCHEMA.names).drop_columns(["_commit_version"])
    return ordered(found.to_pylist())


def test_changes_are_read_back_in_every_way(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(10)])
    entries = [{"at": None, "n": 1}, {"at": None, "n": 2}]
    feed = shadow.change(updates=[row(3, "b", entries), row(7, "c")], inserts=[row(10)], deletes=[5])
    shadow.check()
    assert feed_of(shadow.path, 1) == ordered(feed)


def test_a_table_takes_files_and_row_changes(tmp_path):
    path = Shadow(tmp_path / "t").path
    assert takes_files(DeltaTable(path))
    require_row_changes(describe(DeltaTable(path), path), "dimension 'd'")


def test_the_rows_of_a_file_are_removed_again_and_again(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(200)])
    rng = random.Random(3)
    for number in range(12):
        chosen = rng.sample(sorted(shadow.rows), 12)
        feed = shadow.change(
            updates=[row(k, f"v{number}") for k in chosen[:8]], deletes=chosen[8:], inserts=[row(1000 + number)]
        )
        assert feed_of(shadow.path, shadow.version) == ordered(feed)
    shadow.check()
    assert DeltaTable(shadow.path).history(1)[0]["operation"] == "MERGE"


def test_a_checkpoint_keeps_the_vectors(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(50)])
    shadow.change(deletes=[1, 2, 3])
    DeltaTable(shadow.path).create_checkpoint()
    for version in range(2):
        (Path(shadow.path) / "_delta_log" / f"{version:020d}.json").unlink()
    shadow.live = LiveFiles(shadow.path)
    shadow.change(deletes=[4, 40])
    shadow.check()


def test_a_file_without_rows_is_removed(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(3)])
    shadow.change(deletes=[0])
    shadow.change(deletes=[1, 2], inserts=[row(9)])
    shadow.check()
    assert len(LiveFiles(shadow.path).at(2)) == 1


def test_a_row_that_is_not_there_is_refused(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(3)])
    shadow.rows[4] = row(4)
    with pytest.raises(DeltaTableError, match="has 1 rows whose 'k' is one of the 2 rows"):
        shadow.change(deletes=[1, 4])
    assert shadow.version == 0


def test_another_writer_in_between_is_noticed(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(3)])
    shadow.change(deletes=[0])
    with pytest.raises(TableMovedError, match="after version 0"):
        shadow.change(deletes=[1], version=0)


def test_vectors_long_and_short_come_back(tmp_path):
    rng = np.random.default_rng(5)
    sets = [np.array([0]), np.array([2**33, 2**33 + 5]), np.arange(1000), np.unique(rng.integers(0, 10**7, 10**5))]
    vectors = write_vectors(str(tmp_path), sets)
    assert {vector.storage for vector in vectors} == {"i", "u"}
    for vector, positions in zip(vectors, sets, strict=True):
        again = DeletionVector.of(json.loads(json.dumps(vector.descriptor())))
        assert again == vector
        assert again.positions(str(tmp_path)).tolist() == positions.tolist()


def test_a_damaged_vector_is_noticed(tmp_path):
    (vector,) = write_vectors(str(tmp_path), [np.arange(0, 3000, 3)])
    (file,) = tmp_path.glob("*.bin")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(DeltaTableError, match="checksum is wrong"):
        vector.positions(str(tmp_path))
    file.unlink()
    with pytest.raises(DeltaTableError, match="cannot be read"):
        vector.positions(str(tmp_path))


@pytest.mark.spark
def test_spark_reads_rows_and_changes_and_purges(tmp_path, spark):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(3000)])
    feed = shadow.change(updates=[row(k, "b", [{"at": None, "n": k}]) for k in range(0, 3000, 3)], deletes=[1, 4])
    shadow.change(updates=[row(10, "c")], inserts=[row(5000)])
    there = spark.read.format("delta").load(shadow.path)
    assert ordered(found.asDict(recursive=True) for found in there.collect()) == ordered(shadow.rows.values())
    reader = spark.read.format("delta").option("readChangeFeed", "true")
    changes = reader.option("startingVersion", 1).option("endingVersion", 1).load(shadow.path)
    found = changes.select(*SCHEMA.names, CHANGE_TYPE).collect()
    assert ordered(each.asDict(recursive=True) for each in found) == ordered(feed)
    short = Shadow(tmp_path / "short", [row(k) for k in range(9)])
    short.change(deletes=[2, 3])
    assert {file.vector.storage for file in LiveFiles(short.path).at(1)} == {"i"}
    assert {found["k"] for found in spark.read.format("delta").load(short.path).collect()} == set(short.rows)
    spark.sql(f"DELETE FROM delta.`{shadow.path}` WHERE k = 7")
    del shadow.rows[7]
    shadow.change(updates=[row(8, "d")], deletes=[11])
    shadow.check()
    spark.sql(f"OPTIMIZE delta.`{shadow.path}`")
    spark.sql(f"REORG TABLE delta.`{shadow.path}` APPLY (PURGE)")
    shadow.check()
    shadow.change(updates=[row(8, "e")], deletes=[14])
    shadow.check()


def test_far_times_are_read_exactly(tmp_path):
    """Spark writes INT96 timestamps, which DataFusion's scan wraps outside the years 1677 to 2262."""
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
    path = tmp_path / "t"
    path.mkdir()
    times = [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, tzinfo=dt.UTC)]
    pq.write_table(
        pa.table({"k": [1, 2], "t": times}, schema=schema), path / "a.parquet", use_deprecated_int96_timestamps=True
    )
    size = (path / "a.parquet").stat().st_size
    create_row_table(str(path), schema, [DataFile("a.parquet", {}, size, 0, 2, '{"numRecords": 2}')])
    change_rows_exactly(
        str(path), DeltaTable(path), LiveFiles(str(path)), 0, RowChanges("k", np.array([2]), []), Commit("a", 1)
    )
    assert read_rows(str(path), 1, ["k", "t"]).read_all().to_pylist() == [{"k": 1, "t": times[0]}]


def test_rows_of_decimal_partitions_are_read_exactly(tmp_path):
    """delta-rs gives Arrow's dataset the partition -0.50 as `0.-50`."""
    path, schema = str(tmp_path / "t"), pa.schema({"k": pa.int64(), "m": pa.decimal128(10, 2)})
    rows = pa.table({"k": range(4), "m": [Decimal(text) for text in ("-1.50", "-0.50", "-0.01", "0.01")]}, schema)
    create_table(path, schema, ("m",))
    with FileWriter(FileSpec(path, schema, ("m",))) as writer:
        writer.write(rows.to_batches()[0])
        files = writer.close()
    adds = [
        {"path": file.path, "partitionValues": file.partition, "size": file.size, "modificationTime": 0,
         "dataChange": True, "stats": file.statistics}
        for file in files
    ]  # fmt: skip
    log = "\n".join(json.dumps({"add": add}) for add in adds)
    (tmp_path / "t/_delta_log/00000000000000000001.json").write_text(log)
    assert read_rows(path, 1, ["k", "m"]).read_all().sort_by("k") == rows


def test_a_column_that_was_added_later_is_null(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(1)])
    DeltaTable(shadow.path).alter.add_columns([Field("late", PrimitiveType("string"))])
    assert read_rows(shadow.path, 1, ["k", "late"]).read_all().to_pylist() == [{"k": 1, "late": None}]


def test_a_rewrite_leaves_no_file_with_a_vector(tmp_path):
    shadow = Shadow(tmp_path / "t", [row(k) for k in range(10)])
    shadow.change(deletes=[2, 3], inserts=[row(20)])
    table = DeltaTable(shadow.path)
    fields = json.loads(table.schema().to_json())["fields"]
    assert rewrite(shadow.path, table, fields, SCHEMA, lambda batch: batch.cast(SCHEMA))
    shadow.live = LiveFiles(shadow.path)
    shadow.check()
    assert len(LiveFiles(shadow.path).at(shadow.version)) == 1
