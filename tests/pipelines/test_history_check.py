"""The check of a dimension with history finds every kind of damage, and none where there is none."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from headrace.pipelines.changes import apply_files, check_history, plan_history_repair
from headrace.pipelines.changes.sources import change_columns, change_source
from headrace.pipelines.changes.targets import ChangeTarget, prepare_target
from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.commits import Commit
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles
from headrace.pipelines.delta.row_changes import RowChanges, change_rows_exactly, feed_files
from headrace.pipelines.delta.tables import read_rows
from headrace.pipelines.history.layout import delta_schema
from headrace.storage import Table

DOCUMENT = {
    "name": "shop",
    "source": {"format": "csv", "path": "in", "schema": {"order": "bigint", "buyer": "bigint"}},
    "dimensions": {
        "customer": {
            "path": "w/customer", "natural_key": ["id"], "shards": 2,
            "columns": {"id": "bigint", "city": "string", "tel": "string"},
            "special": {"unknown": {"city": "Unknown"}},
            "history": {"effective": "since", "effective_type": "date", "operation": "op", "type_1": ["tel"]},
        }
    },
    "lookups": [{"dimension": "customer", "role": "buyer", "on": {"buyer": "id"}}],
    "sink": {"path": "w/facts"},
    "replicas": "replicas",
}  # fmt: skip


class Shop:
    def __init__(self, folder):
        self.folder = folder
        (folder / "in").mkdir()
        self.declare(DOCUMENT)
        rows = [
            (i, f"c{i % 7}{'' if day < 3 else 'x'}", f"t{day % 2}", dt.date(2024, 1, day), "D" if i % 9 == day else "U")
            for i in range(1, 60)
            for day in range(1, 5)
        ]
        names = ("id", "city", "tel", "since", "op")
        pq.write_table(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]), folder / "a.parquet")
        apply_files(self.config, "customer", folder / "a.parquet")
        self.path = self.config.dimensions["customer"].path

    def declare(self, document):
        (self.folder / "shop.yml").write_text(yaml.safe_dump(document))
        self.config = load_pipeline(self.folder / "shop.yml")
        self.history = history_of(self.config, "customer")

    def rows(self):
        schema = delta_schema(self.history)
        found = read_rows(self.path, DeltaTable(self.path).version(), schema.names).read_all().cast(schema)
        return sorted(found.to_pylist(), key=lambda row: row["customer_key"])

    def damage(self, key, **values):
        """Change a row of the table behind the back of everything else; with no values, remove it."""
        row = next(row for row in self.rows() if row["customer_key"] == key)
        schema, spec = delta_schema(self.history), feed_files(self.path, delta_schema(self.history))
        new = [{**row, **values}] if values else []
        feed = [{**row, "_change_type": "delete"}, *({**each, "_change_type": "insert"} for each in new)]
        changes = RowChanges(
            "customer_key",
            np.array([key]),
            written(FileSpec(self.path, schema), new),
            written(spec, feed),
        )
        table = DeltaTable(self.path)
        change_rows_exactly(self.path, table, LiveFiles(self.path), table.version(), changes, Commit("damage", key))

    def broken(self):
        return {finding.rule: finding.rows for finding in check_history(self.config, "customer")}


def written(spec, rows):
    if not rows:
        return []
    with FileWriter(spec) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, spec.schema))
        return writer.close()


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


FOLLOW = "versions follow from the recorded changes"
SAY = "rows are what their entries say"
SPECIAL = "special members are those that are declared"


@pytest.mark.parametrize("part_rows", [1 << 18, 20])
def test_a_sound_dimension_breaks_no_rule(shop, monkeypatch, part_rows):
    monkeypatch.setattr("headrace.pipelines.changes.checking._PART_ROWS", part_rows)
    assert shop.broken() == {}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"valid_to": dt.date(2030, 1, 1)}, FOLLOW),
        ({"is_current": True}, FOLLOW),
        ({"version": 7}, FOLLOW),
        ({"tel": "wrong"}, FOLLOW),
        ({"is_deleted": False}, FOLLOW),
        ({"customer_key": 9999}, "the property headrace.greatestKey is not less than the greatest key"),
        ({"customer_key": -7}, "surrogate keys are positive, or those of special members"),
        ({"customer_key": 5}, "surrogate keys are unique"),
        ({"valid_from": dt.date(2023, 12, 31)}, FOLLOW),
        ({"_sequence": dt.date(2023, 12, 31)}, SAY),
    ],
)
def test_a_changed_value_is_found(shop, values, rule):
    shop.damage(3, **values)
    assert rule in shop.broken()


def test_a_missing_version_is_found(shop):
    shop.damage(3)
    assert FOLLOW in shop.broken()


def test_a_missing_special_member_is_found_and_added(shop):
    shop.damage(-1)
    assert shop.broken() == {SPECIAL: 1}
    apply_files(shop.config, "customer", shop.folder / "a.parquet", again=True)
    assert shop.broken() == {}


def test_a_special_member_that_was_declared_later_is_added_once(shop):
    document = yaml.safe_load(yaml.safe_dump(DOCUMENT))
    document["dimensions"]["customer"]["special"]["invalid"] = {"city": "Invalid"}
    shop.declare(document)
    assert shop.broken() == {SPECIAL: 1}
    for _ in range(2):
        apply_files(shop.config, "customer", shop.folder / "a.parquet", again=True)
        special = [(row["customer_key"], row["city"]) for row in shop.rows() if row["customer_key"] < 0]
        assert special == [(-3, "Invalid"), (-1, "Unknown")]
    assert shop.broken() == {}


def test_a_replica_that_says_something_else_is_found(shop):
    assert shop.broken() == {}
    apply_files(shop.config, "customer", shop.folder / "a.parquet", again=True)  # brings replicas up to date
    file = next(iter((shop.folder / "replicas").rglob("0-of-2/table.headrace")))
    with Table.open(file, mode="w") as table:
        row = next(iter(table.scan())).slice(0, 1)
        changed = row.set_column(
            row.schema.get_field_index("city"),
            row.schema.field("city"),
            pa.array(["other"], row.schema.field("city").type),
        )
        table.apply(upserts=pa.Table.from_batches([changed]))
    assert shop.broken() == {"replicas have the entries of the table": 1}


def test_a_nested_entry_that_was_lost_is_found(shop):
    row = next(row for row in shop.rows() if row["_entries"] and len(row["_entries"]) > 1)
    shop.damage(row["customer_key"], _entries=row["_entries"][:1])
    assert shop.broken()


def test_targets_are_prepared_again_without_a_change(shop):
    source = change_source(shop.config, change_columns(shop.history), shop.folder / "a.parquet")
    version = DeltaTable(shop.path).version()
    assert not prepare_target(ChangeTarget(shop.config, "customer", shop.history, source))
    assert DeltaTable(shop.path).version() == version


def test_each_finding_has_a_repair(shop):
    shop.damage(3, customer_key=9999, valid_to=dt.date(2030, 1, 1))
    findings, repairs = check_history(shop.config, "customer"), plan_history_repair(shop.config, "customer")
    assert [repair.rule for repair in repairs] == [finding.rule for finding in findings]
    assert all(repair.action for repair in repairs)
