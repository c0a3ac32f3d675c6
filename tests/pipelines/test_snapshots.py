"""Snapshots against a comparison of dictionaries, and Delta tables as sources of changes."""

import datetime as dt
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.changes import SnapshotOptions, apply_files
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import create_table
from headrace.pipelines.errors import DeltaTableError, PipelineFileError, QualityError, SourceFileError

MEMBER = pa.schema([("id", pa.int64()), ("part", pa.string()), ("city", pa.string()), ("tel", pa.string())])


def document(**history):
    history = {"effective": "since", "effective_type": "date", "sequence": "n", "type_1": ["tel"], **history}
    return {
        "name": "shop",
        "source": {"format": "parquet", "path": "in", "schema": {"order": "bigint", "buyer": "bigint", "p": "string"}},
        "dimensions": {
            "customer": {
                "path": "w/customer", "natural_key": ["id", "part"], "shards": 2,
                "columns": {"id": "bigint", "part": "string", "city": "string", "tel": "string"}, "history": history,
            }
        },
        "lookups": [{"dimension": "customer", "role": "buyer", "on": {"buyer": "id", "p": "part"}}],
        "sink": {"path": "w/facts"},
        "replicas": "replicas",
    }  # fmt: skip


class Shop:
    def __init__(self, folder, **history):
        self.folder = folder
        (folder / "in").mkdir()
        (folder / "shop.yml").write_text(yaml.safe_dump(document(**history)))
        self.config = load_pipeline(folder / "shop.yml")
        self.files = 0

    def apply(self, rows, day, missing="keep", sequence="1", name=None, engine="local"):
        """Apply a snapshot given as {(id, part): (city, tel)}."""
        self.files += 1
        file = self.folder / (name or f"snapshot{self.files}.parquet")
        found = [{"id": i, "part": p, "city": city, "tel": tel} for (i, p), (city, tel) in rows.items()]
        if not file.exists():
            pq.write_table(pa.Table.from_pylist(found, MEMBER), file)
        options = SnapshotOptions(day, sequence, missing)
        return apply_files(self.config, "customer", file, snapshot=options, engine=engine)

    def versions(self):
        rows = pa.table(DeltaTable(str(self.folder / "w" / "customer")).scan()).to_pylist()
        return sorted((row for row in rows if row["customer_key"] > 0), key=lambda row: (row["id"], row["valid_from"]))

    def valid_at(self, day):
        return {
            (row["id"], row["part"]): (row["city"], row["tel"])
            for row in self.versions()
            if row["valid_from"] <= day and (row["valid_to"] is None or day < row["valid_to"]) and not row["is_deleted"]
        }


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


@pytest.mark.parametrize("missing", ["keep", "delete"])
@pytest.mark.parametrize("seed", range(2))
def test_after_each_snapshot_the_dimension_says_what_it_says(shop, seed, missing):
    rng = random.Random(seed)
    expected = {}
    for day in range(1, 6):
        keys = rng.sample([(i, p) for i in range(30) for p in "ab"], 40)
        rows = {key: (rng.choice(["Oslo", "Bergen", None]), rng.choice("xy")) for key in keys}
        result = shop.apply(rows, f"2024-01-0{day}", missing)
        before, expected = expected, rows if missing == "delete" else {**expected, **rows}
        found = shop.valid_at(dt.date(2024, 1, day))
        assert {key: city for key, (city, _) in found.items()} == {key: city for key, (city, _) in expected.items()}
        assert found == expected  # of type 1, but newest here
        same = sum(before.get(key) == value for key, value in rows.items())
        assert result.outcomes.get("unchanged", 0) == same
        gone = len(before.keys() - rows.keys()) if missing == "delete" else 0
        assert result.outcomes.get("deleted", 0) == gone
        assert result.total("rows") == len(rows) + gone


def test_a_row_that_says_nothing_new_leaves_no_entry(shop):
    rows = {(1, "a"): ("Oslo", "x"), (2, "a"): (None, None)}
    shop.apply(rows, "2024-01-01")
    version = DeltaTable(str(shop.folder / "w" / "customer")).version()
    result = shop.apply(rows, "2024-02-01")
    assert result.outcomes == {"unchanged": 2}
    assert DeltaTable(str(shop.folder / "w" / "customer")).version() == version
    assert all(row["_entries"] is None for row in shop.versions())


def test_a_snapshot_is_applied_once(shop):
    rows = {(1, "a"): ("Oslo", "x"), (None, "b"): ("Nowhere", "y")}
    first = shop.apply(rows, "2024-01-01", name="s.parquet")
    again = shop.apply(rows, "2024-01-01", name="s.parquet")
    assert first.outcomes == again.outcomes == {"added": 1, "rejected": 1}
    assert again.batches[0].recovered
    assert DeltaTable(again.errors).to_pyarrow_table().num_rows == 1


def test_a_record_without_key_would_delete_its_member(shop):
    shop.apply({(1, "a"): ("Oslo", "x")}, "2024-01-01")
    with pytest.raises(QualityError, match="1 records of the snapshot do not fit"):
        shop.apply({(None, "a"): ("Oslo", "x")}, "2024-02-01", "delete")
    assert shop.valid_at(dt.date(2024, 2, 1)) == {(1, "a"): ("Oslo", "x")}


@pytest.mark.parametrize("place", ["snapshot", "folder"])
def test_an_empty_file_would_delete_every_member(tmp_path, place):
    """A delivery that was cut to nothing is not a snapshot without members, which has a heading."""
    declared = document()
    declared["source"]["format"] = "csv"
    (tmp_path / "shop.yml").write_text(yaml.safe_dump(declared))
    config, options = load_pipeline(tmp_path / "shop.yml"), SnapshotOptions("2024-01-01", "1")
    (tmp_path / "all.csv").write_text("id,part,city,tel\n1,a,Oslo,x\n2,a,Bodo,y\n")
    apply_files(config, "customer", tmp_path / "all.csv", snapshot=options)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1.csv").write_text("id,part,city,tel\n1,a,Oslo,x\n")
    source = tmp_path / "folder" if place == "folder" else tmp_path / "2.csv"
    empty = tmp_path / "folder" / "2.csv" if place == "folder" else source
    empty.touch()
    later = SnapshotOptions("2024-02-01", "2", "delete")
    with pytest.raises(QualityError, match=r"'2\.csv' is empty"):
        apply_files(config, "customer", source, snapshot=later)
    kept = apply_files(config, "customer", source, snapshot=SnapshotOptions("2024-02-01", "2", "keep"))
    assert kept.outcomes.get("deleted", 0) == 0
    empty.write_text("id,part,city,tel\n")
    gone = apply_files(config, "customer", source, snapshot=later)
    assert gone.outcomes["deleted"] == (1 if place == "folder" else 2)


def test_a_late_snapshot_finds_what_was_missing_then(shop):
    shop.apply({(1, "a"): ("Oslo", "x")}, "2024-01-01")
    shop.apply({(1, "a"): ("Bergen", "x"), (2, "a"): ("Bodo", "x")}, "2024-03-01")
    shop.apply({}, "2024-02-01", "delete")
    assert shop.valid_at(dt.date(2024, 2, 1)) == {}
    assert shop.valid_at(dt.date(2024, 3, 1)) == {(1, "a"): ("Bergen", "x"), (2, "a"): ("Bodo", "x")}


@pytest.mark.parametrize(
    ("day", "sequence", "message"),
    [
        ("2024-13-01", "1", "is no date"),
        ("2024-01-01", None, "add --sequence"),
        ("2024-01-01", "one", "is no bigint"),
    ],
)
def test_options_that_do_not_fit(shop, day, sequence, message):
    with pytest.raises(PipelineFileError, match=message):
        shop.apply({(1, "a"): ("Oslo", "x")}, day, sequence=sequence)


@pytest.mark.spark
def test_spark_looks_for_missing_members_in_every_shard(shop, spark):  # noqa: ARG001 - the session
    rows = {(i, "a"): ("Oslo", "x") for i in range(20)}
    shop.apply(rows, "2024-01-01", engine="spark")
    result = shop.apply({(3, "a"): ("Oslo", "x")}, "2024-02-01", "delete", engine="spark")
    assert result.outcomes == {"unchanged": 1, "deleted": 19}
    assert shop.valid_at(dt.date(2024, 2, 1)) == {(3, "a"): ("Oslo", "x")}


OF_FEED = {
    "effective": "_commit_timestamp", "effective_type": "timestamp", "sequence": "_commit_version",
    "operation": "_change_type",
}  # fmt: skip


def members(*rows):
    return pa.Table.from_pylist([dict(zip(MEMBER.names, row, strict=True)) for row in rows], MEMBER)


@pytest.fixture
def source(tmp_path):
    path = str(tmp_path / "source")
    create_table(path, MEMBER, rows=members((1, "a", "Oslo", "x"), (2, "a", "Bodo", "y")))
    return path


def newest(shop):
    rows = [row for row in shop.versions() if row["is_current"]]
    return sorted((row["id"], row["city"], row["is_deleted"]) for row in rows)


def test_a_change_feed_becomes_versions(tmp_path, source):
    shop = Shop(tmp_path, **OF_FEED)
    assert apply_files(shop.config, "customer", source).outcomes == {"added": 2}
    DeltaTable(source).update(updates={"city": "'Bergen'"}, predicate="id = 1")
    write_deltalake(source, members((3, "a", "Voss", "z")), mode="append")
    DeltaTable(source).delete("id = 2")
    result = apply_files(shop.config, "customer", source)
    assert result.outcomes == {"added": 1, "versioned": 1, "deleted": 1}
    assert newest(shop) == [(1, "Bergen", False), (2, "Bodo", True), (3, "Voss", False)]
    assert [row["_sequence"] for row in shop.versions()] == [0, 1, 0, 3, 2]
    assert apply_files(shop.config, "customer", source).batches == ()
    assert not (tmp_path / "w" / "customer" / "_headrace_staged").exists()


def test_a_table_of_changes_needs_no_feed_columns(tmp_path):
    shop = Shop(tmp_path, operation="op")
    path = str(tmp_path / "changes")
    schema = pa.schema([*MEMBER, ("since", pa.date32()), ("n", pa.int64()), ("op", pa.string())])
    rows = members((1, "a", "Oslo", "x"), (1, "a", "Bodo", "x"))
    day = dt.date(2024, 1, 1)
    for name, values in (("since", [day, day + dt.timedelta(9)]), ("n", [1, 2]), ("op", ["I", "U"])):
        rows = rows.append_column(name, pa.array(values, schema.field(name).type))
    create_table(path, schema, rows=rows)
    assert apply_files(shop.config, "customer", path).outcomes == {"added": 1, "versioned": 1}
    assert newest(shop) == [(1, "Bodo", False)]


def test_versions_of_a_source_without_effect_are_read_once(tmp_path, source):
    shop = Shop(tmp_path, **OF_FEED)
    apply_files(shop.config, "customer", source)
    write_deltalake(source, members(), mode="append")
    (record,) = apply_files(shop.config, "customer", source).batches
    assert (record.rows, record.outcomes) == (0, {})
    version = DeltaTable(shop.config.dimensions["customer"].path).version()
    assert apply_files(shop.config, "customer", source).batches == ()
    assert DeltaTable(shop.config.dimensions["customer"].path).version() == version


def test_lists_of_attributes_in_a_table_are_partial_changes(tmp_path):
    shop = Shop(tmp_path, partial="given", operation="op")
    path = str(tmp_path / "changes")
    schema = pa.schema([*MEMBER, ("since", pa.date32()), ("n", pa.int64()), ("op", pa.string())])
    day, listed = dt.date(2024, 1, 1), pa.array([None, ["city"]], pa.list_(pa.string()))
    rows = members((1, "a", "Oslo", "x"), (1, "a", "Bodo", "other"))
    for name, values in (("since", [day, day + dt.timedelta(9)]), ("n", [1, 2]), ("op", ["I", "U"])):
        rows = rows.append_column(name, pa.array(values, schema.field(name).type))
    rows = rows.append_column("given", listed)
    create_table(path, rows.schema, rows=rows)
    apply_files(shop.config, "customer", path)
    assert shop.valid_at(day) == {(1, "a"): ("Oslo", "x")}
    assert shop.valid_at(day + dt.timedelta(9)) == {(1, "a"): ("Bodo", "x")}


@pytest.mark.parametrize("listed", [["city", None], [None], [""], ["city,tel"]])
def test_a_list_in_a_table_with_what_names_no_attribute_is_rejected(tmp_path, listed):
    shop = Shop(tmp_path, partial="given", operation="op")
    path = str(tmp_path / "changes")
    day = dt.date(2024, 1, 1)
    rows = members((1, "a", "Oslo", "x"), (1, "a", "Bodo", None))
    for name, values in (("since", [day, day + dt.timedelta(9)]), ("n", [1, 2]), ("op", ["I", "U"])):
        rows = rows.append_column(name, pa.array(values))
    rows = rows.append_column("given", pa.array([None, listed], pa.list_(pa.string())))
    create_table(path, rows.schema, rows=rows)
    assert apply_files(shop.config, "customer", path).outcomes == {"added": 1, "rejected": 1}
    assert shop.valid_at(day + dt.timedelta(9)) == {(1, "a"): ("Oslo", "x")}


def test_a_file_that_cannot_be_read_is_moved_away_as_the_message_says(tmp_path):
    shop = Shop(tmp_path)
    folder = tmp_path / "waiting"
    folder.mkdir()
    (folder / "1.csv").write_text("id,part,town\n1,a,Oslo\n")
    (folder / "2.csv").write_text("id,part,city,tel,since,n\n1,a,Oslo,x,2024-01-01,1\n")
    with pytest.raises(SourceFileError, match="leave it out: move it to another folder, and run again") as told:
        apply_files(shop.config, "customer", folder)
    assert "source skip" not in str(told.value)
    (folder / "1.csv").rename(tmp_path / "1.csv")
    assert apply_files(shop.config, "customer", folder).outcomes == {"added": 1}


def test_a_delete_that_the_history_cannot_represent(tmp_path, source):
    shop = Shop(tmp_path, **{**OF_FEED, "operation": None})
    apply_files(shop.config, "customer", source)
    DeltaTable(source).delete("id = 2")
    with pytest.raises(DeltaTableError, match="declare _change_type as the operation"):
        apply_files(shop.config, "customer", source)


def test_a_table_without_feed(tmp_path):
    shop = Shop(tmp_path, **OF_FEED)
    path = str(tmp_path / "plain")
    write_deltalake(path, members((1, "a", "Oslo", "x")))
    with pytest.raises(DeltaTableError, match="has no change feed for its versions 0 to 0"):
        apply_files(shop.config, "customer", path)


def test_a_table_may_be_a_snapshot(shop, source):
    options = SnapshotOptions("2024-01-01", "1", "delete")
    assert apply_files(shop.config, "customer", source, snapshot=options).outcomes == {"added": 2}
    DeltaTable(source).delete("id = 2")
    options = SnapshotOptions("2024-02-01", "1", "delete")
    result = apply_files(shop.config, "customer", source, snapshot=options)
    assert result.outcomes == {"unchanged": 1, "deleted": 1}
    assert newest(shop) == [(1, "Oslo", False), (2, "Bodo", True)]


def test_a_table_without_a_column(shop, source):
    with pytest.raises(DeltaTableError, match="has no column 'since'"):
        apply_files(shop.config, "customer", source)
