"""Files that tasks write, and their commits: what the log says of them, and that a commit counts once."""

import contextlib
import datetime as dt
import errno
import json
import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import DeltaHandle, create_table, open_table
from headrace.pipelines.errors import DeltaTableError

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC")), ("day", pa.date32())])
AT = dt.datetime(2024, 5, 1, 12, 0, 0, 1500, tzinfo=dt.UTC)


def rows(*ids, name="x"):
    return pa.record_batch(
        [pa.array(ids), pa.array([name] * len(ids)), pa.array([AT] * len(ids), SCHEMA.field("at").type),
         pa.array([dt.date(2024, 5, 1 + (i or 0) % 2) for i in ids])],
        schema=SCHEMA,
    )  # fmt: skip


def written(path, *batches, partition_by=()):
    with FileWriter(FileSpec(str(path), SCHEMA, partition_by)) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.close()


@pytest.fixture
def table(tmp_path):
    create_table(str(tmp_path / "t"), SCHEMA)
    return open_table(str(tmp_path / "t"))


def ids_of(table):
    return sorted(DeltaTable(table.table_uri).to_pyarrow_table()["id"].to_pylist())


def test_files_are_part_of_the_table_once_they_are_committed(table, tmp_path):
    files = written(tmp_path / "t", rows(1, 2), rows(3))
    assert ids_of(table) == []
    commit_files(str(tmp_path / "t"), table, files, Commit("app", 7, {"plain": "note"}))
    assert ids_of(table) == [1, 2, 3]
    (note,) = DeltaHandle(str(tmp_path / "t")).commit_notes("app", 7)
    assert (note["plain"], note["rows_written"]) == ("note", 3)


def test_only_columns_whose_values_repeat_have_dictionaries(tmp_path):
    (file,) = written(tmp_path, rows(*range(100)))
    columns = [pq.read_metadata(tmp_path / file.path).row_group(0).column(place) for place in range(4)]
    assert ["RLE_DICTIONARY" in column.encodings for column in columns] == [False, True, True, True]
    assert json.loads(file.statistics)["maxValues"]["id"] == 99


def test_a_transaction_counts_once_even_from_a_handle_that_is_behind(table, tmp_path):
    behind = open_table(str(tmp_path / "t"))
    commit_files(str(tmp_path / "t"), table, written(tmp_path / "t", rows(1)), Commit("app", 1))
    write_deltalake(str(tmp_path / "t"), pa.table(rows(9)), mode="append")
    for again in (table, behind):
        commit_files(str(tmp_path / "t"), again, written(tmp_path / "t", rows(1)), Commit("app", 1))
    assert ids_of(table) == [1, 9]
    commit_files(str(tmp_path / "t"), behind, [], Commit("app", 2))
    assert DeltaHandle(str(tmp_path / "t")).transaction("app") == 2


def test_statistics_hold_rows_nulls_and_bounds_rounded_outwards(tmp_path):
    (file,) = written(tmp_path, rows(3, 1), rows(None, name="y" * 40))
    assert json.loads(file.statistics) == {
        "numRecords": 3,
        "minValues": {"id": 1, "name": "x", "at": "2024-05-01T12:00:00.001Z", "day": "2024-05-01"},
        "maxValues": {"id": 3, "name": "y" * 32 + "\U0010ffff", "at": "2024-05-01T12:00:00.002Z", "day": "2024-05-02"},
        "nullCount": {"id": 1, "name": 0, "at": 0, "day": 0},
    }


LAST = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)  # noqa: DTZ001 - a time without a zone
VALUES = {
    "f": (pa.float64(), [-0.0, 1.5, 1e308, math.inf, -math.inf]),
    "g": (pa.float32(), [0.1, 3.0]),
    "b": (pa.bool_(), [True, False]),
    "d": (pa.decimal128(38, 2), [Decimal("0.10"), Decimal("-785.69"), Decimal("123456789012345678901234.56")]),
    "s": (pa.string(), ["", "a", "y" * 33, "z" * 32 + "\U0010ffff\U0010ffff", "\x00", "😀" * 40]),
    "x": (pa.binary(), [b"", b"\xff"]),
    "t": (pa.timestamp("us", "UTC"), [dt.datetime(1, 1, 1, tzinfo=dt.UTC), LAST.replace(tzinfo=dt.UTC)]),
    "u": (pa.timestamp("us"), [LAST, LAST.replace(microsecond=998_001), LAST.replace(year=1969, microsecond=1)]),
    "day": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "i": (pa.int8(), [-128, 127]),
    "n": (pa.int64(), [None]),
}
TYPED = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])


@pytest.mark.parametrize("name", VALUES)
def test_a_filter_of_a_reader_finds_every_value_whatever_stands_beside_it(tmp_path, name):
    create_table(str(tmp_path / "t"), TYPED)
    files = []
    for value in VALUES[name][1]:
        row = {other: values[0] for other, (_, values) in VALUES.items()} | {name: value}
        with FileWriter(FileSpec(str(tmp_path / "t"), TYPED)) as writer:
            writer.write(pa.RecordBatch.from_pylist([row], TYPED))
            files += writer.close()
    commit_files(str(tmp_path / "t"), open_table(str(tmp_path / "t")), files, Commit("app", 0))
    dataset = DeltaTable(str(tmp_path / "t")).to_pyarrow_dataset()
    kind, values = VALUES[name]
    for value in values:
        equal = pc.field(name).is_null() if value is None else pc.field(name) == pa.scalar(value, kind)
        assert dataset.to_table(filter=equal)[name].to_pylist() == pa.array([value], kind).to_pylist()
    for other, (_, (value, *_)) in VALUES.items():
        if other not in {name, "n"}:
            equal = pc.field(other) == pa.scalar(value, TYPED.field(other).type)
            assert dataset.to_table(filter=equal).num_rows == len(values)


def test_a_file_of_whole_row_groups_has_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.delta.data_files._GROUP_ROWS", 2)
    (file,) = written(tmp_path, rows(1, 2), rows(3, 4))
    statistics = json.loads(file.statistics)
    assert (statistics["minValues"]["id"], statistics["maxValues"]["id"]) == (1, 4)
    assert pq.read_metadata(tmp_path / file.path).num_row_groups == 2


def test_a_file_with_nan_has_no_bounds(tmp_path):
    schema = pa.schema([("f", pa.float64()), ("i", pa.int64())])
    with FileWriter(FileSpec(str(tmp_path), schema)) as writer:
        writer.write(pa.RecordBatch.from_pylist([{"f": 1.0, "i": 1}, {"f": math.nan, "i": 2}, {"f": None}], schema))
        (file,) = writer.close()
    assert json.loads(file.statistics) == {"numRecords": 3, "nullCount": {"f": 1, "i": 1}}


def test_each_partition_has_its_file(tmp_path):
    create_table(str(tmp_path / "p"), SCHEMA, ("day", "name"))
    batch = pa.concat_batches([rows(1, 2, 3), rows(4, name=None), rows(6, name="")])
    files = written(tmp_path / "p", batch, partition_by=("day", "name"))
    found = {(file.partition["day"], file.partition["name"]) for file in files}
    assert found == {("2024-05-02", "x"), ("2024-05-01", "x"), ("2024-05-01", None)}
    table = open_table(str(tmp_path / "p"))
    assert takes_files(table)
    commit_files(str(tmp_path / "p"), table, files, Commit("app", 0))
    back = DeltaTable(str(tmp_path / "p")).to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["day"].day, row["name"]) for row in back) == [
        (1, 2, "x"), (2, 1, "x"), (3, 2, "x"), (4, 1, None), (6, 1, None),
    ]  # fmt: skip


def test_an_error_leaves_no_file(tmp_path):
    with contextlib.suppress(RuntimeError), FileWriter(FileSpec(str(tmp_path), SCHEMA)) as writer:
        writer.write(rows(1))
        raise RuntimeError("the task ended")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DeltaTableError, match="gone cannot be written"):
        written(tmp_path / "gone", rows(1))


def test_tables_that_ask_for_more_are_left_to_spark(tmp_path):
    for name, schema, extra in (
        ("strict", pa.schema([pa.field("id", pa.int64(), nullable=False)]), {}),
        ("checked", SCHEMA, {"constraint": {"positive": "id > 0"}}),
        ("timed", SCHEMA, {"partition_by": ["at"]}),
    ):
        path = str(tmp_path / name)
        write_deltalake(path, schema.empty_table(), partition_by=extra.get("partition_by"))
        if "constraint" in extra:
            DeltaTable(path).alter.add_constraint(extra["constraint"])
        assert not takes_files(open_table(path)), name


def test_files_of_a_full_disk_are_removed(table, monkeypatch, tmp_path):
    def fails(writer):
        writer.is_open = False
        raise OSError(errno.ENOSPC, "No space left on device")

    def write():
        with FileWriter(FileSpec(str(tmp_path / "t"), SCHEMA, ("name",))) as writer:
            writer.write(rows(1, name="a"))
            writer.write(rows(2, name="b"))
            writer.close()

    monkeypatch.setattr(pq.ParquetWriter, "close", fails)
    with pytest.raises(DeltaTableError, match="No space left"):
        write()
    assert table.version() == 0
    assert list((tmp_path / "t").rglob("*.parquet")) == []


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_times_that_python_has_not_are_written_without_bounds(tmp_path, kind, sign):
    far = sign * (10**7 if kind == pa.date32() else 10**18)
    schema = pa.schema({"x": kind})
    with FileWriter(FileSpec(str(tmp_path), schema)) as writer:
        width = pa.int32() if kind == pa.date32() else pa.int64()
        writer.write(pa.record_batch([pa.array([0, far], width).cast(kind)], schema=schema))
        (file,) = writer.close()
    assert json.loads(file.statistics) == {"numRecords": 2, "nullCount": {"x": 0}}
    assert pq.read_table(tmp_path / file.path).column("x").cast(width).to_pylist() == [0, far]
