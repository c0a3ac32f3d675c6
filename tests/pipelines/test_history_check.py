"""The check of a dimension with history finds every kind of damage, and none where there is none."""

import copy
import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.pipelines.changes import apply_files, check_history, checking, repair_history
from headrace.pipelines.changes.sources import change_columns, change_source
from headrace.pipelines.changes.targets import ChangeTarget, prepare_target
from headrace.pipelines.config.history import history_of
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.commits import Commit
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles
from headrace.pipelines.delta.row_changes import RowChanges, change_rows_exactly, feed_files
from headrace.pipelines.delta.tables import read_rows
from headrace.pipelines.dimension.check import came_before
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

    def broken(self, *, allowed=False):
        found = check_history(self.config, "customer")
        return {finding.rule: finding.rows for finding in found if finding.allowed == allowed}


def written(spec, rows):
    if not rows:
        return []
    with FileWriter(spec) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, spec.schema))
        return writer.close()


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


REPLICAS = "replicas have the rows of the table"
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


def change_replica(shop, column):
    file = next(iter((shop.folder / "replicas").rglob("0-of-2/table.headrace")))
    with Table.open(file, mode="w") as table:
        row = next(iter(table.scan())).slice(0, 1)
        place, field = row.schema.get_field_index(column), row.schema.field(column)
        table.apply(upserts=pa.Table.from_batches([row.set_column(place, field, pa.array(["other"], field.type))]))


def test_a_replica_that_says_something_else_is_found(shop):
    assert shop.broken() == {}
    apply_files(shop.config, "customer", shop.folder / "a.parquet", again=True)  # brings replicas up to date
    change_replica(shop, "city")
    assert shop.broken() == {REPLICAS: 1}


def test_a_nested_entry_that_was_lost_is_found(shop):
    row = next(row for row in shop.rows() if row["_entries"] and len(row["_entries"]) > 1)
    shop.damage(row["customer_key"], _entries=row["_entries"][:1])
    assert shop.broken()


def test_targets_are_prepared_again_without_a_change(shop):
    source = change_source(shop.config, change_columns(shop.history), shop.folder / "a.parquet")
    version = DeltaTable(shop.path).version()
    assert not prepare_target(ChangeTarget(shop.config, "customer", shop.history, source))
    assert DeltaTable(shop.path).version() == version


def repaired(shop, **options):
    result = repair_history(shop.config, "customer", **options)
    return {each.rule: each.rows for each in result.fixed}, {each.rule: each.rows for each in result.left}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"is_current": True}, FOLLOW),
        pytest.param({"version": 7}, FOLLOW, marks=pytest.mark.slow),
        pytest.param({"is_current": False, "version": 3}, FOLLOW, marks=pytest.mark.slow),
        pytest.param({"_sequence": dt.date(2023, 12, 31)}, FOLLOW, marks=pytest.mark.slow),
    ],
)
def test_what_needs_no_decision_is_fixed(shop, values, rule):
    sound = shop.rows()
    shop.damage(3, **values)
    damaged, version = shop.rows(), DeltaTable(shop.path).version()
    assert repaired(shop, dry_run=True) == ({rule: 1}, {})
    assert (shop.rows(), DeltaTable(shop.path).version()) == (damaged, version)
    assert repaired(shop) == ({rule: 1}, {})
    assert shop.rows() == sound
    assert shop.broken() == {}
    assert repaired(shop) == ({}, {})


def test_the_end_of_a_current_version_is_fixed_and_another_end_is_left(shop):
    sound = shop.rows()
    current = next(row["customer_key"] for row in sound if row["is_current"] and row["customer_key"] > 0)
    earlier = next(row for row in sound if not row["is_current"])
    shop.damage(current, valid_to=dt.date(2030, 1, 1))
    assert repaired(shop) == ({FOLLOW: 1}, {})
    assert shop.rows() == sound
    shop.damage(earlier["customer_key"], valid_to=dt.date(2030, 1, 1))
    damaged = shop.rows()
    fixed, left = repaired(shop)
    assert (fixed, list(left)) == ({}, [FOLLOW])
    assert shop.rows() == damaged


@pytest.mark.parametrize(
    "values",
    [
        {"tel": "wrong"},
        pytest.param({"valid_from": dt.date(2023, 12, 31)}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_what_needs_a_decision_is_left_beside_what_does_not(shop, values):
    shop.damage(3, **values)
    other = next(row for row in shop.rows() if row["is_current"] and row["customer_key"] > 0 and row["id"] == 30)
    shop.damage(other["customer_key"], is_current=False)
    fixed, left = repaired(shop)
    assert (fixed, list(left)) == ({FOLLOW: 1}, [FOLLOW])
    assert next(row for row in shop.rows() if row["customer_key"] == other["customer_key"])["is_current"]
    assert repaired(shop) == ({}, left)


def test_special_members_are_added_and_corrected(shop):
    sound = shop.rows()
    shop.damage(-1)
    assert repaired(shop) == ({SPECIAL: 1}, {})
    assert shop.rows() == sound
    shop.damage(-1, city="Nowhere")
    assert repaired(shop) == ({SPECIAL: 1}, {})
    assert shop.rows() == sound


def test_the_property_is_raised_and_a_wrong_key_is_left(shop):
    shop.damage(3, customer_key=9999)
    fixed, left = repaired(shop)
    assert list(fixed) == ["the property headrace.greatestKey is not less than the greatest key"]
    assert left == {}
    assert shop.broken() == {}
    shop.damage(4, customer_key=-7)
    assert "surrogate keys are positive, or those of special members" in repaired(shop)[1]


def test_a_damaged_replica_is_built_again(shop):
    apply_files(shop.config, "customer", shop.folder / "a.parquet", again=True)
    change_replica(shop, "city")
    assert shop.broken() == {REPLICAS: 1}
    version = DeltaTable(shop.path).version()
    assert repaired(shop) == ({REPLICAS: 1}, {})
    assert shop.broken() == {}
    assert DeltaTable(shop.path).version() == version


def test_another_writer_during_a_repair(shop, monkeypatch):
    shop.damage(3, is_current=True)
    real, moves = checking.repaired_rows, [True]

    def moved(history, rows):
        if moves:
            moves.clear()
            apply_files(shop.config, "customer", changed(shop))
        return real(history, rows)

    monkeypatch.setattr(checking, "repaired_rows", moved)
    monkeypatch.setattr(checking, "leases_of", lambda *_: [])
    assert repaired(shop) == ({FOLLOW: 1}, {})
    assert shop.broken() == {}
    assert any(row["city"] == "later" for row in shop.rows())


def changed(shop):
    row = {"id": 50, "city": "later", "tel": "t", "since": dt.date(2025, 1, 1), "op": "U"}
    pq.write_table(pa.Table.from_pylist([row]), shop.folder / "b.parquet")
    return shop.folder / "b.parquet"


FACTS = pa.schema([
    ("order", pa.int64()), ("buyer", pa.int64()), ("day", pa.date32()), ("buyer_key", pa.int64()),
    ("buyer_city", pa.string()), ("buyer_tel", pa.string()), ("_outcome", pa.string()),
])  # fmt: skip


def with_facts(shop, *damages, **policies):
    """Write the fact of each version, as a run would, with some changes by number of the fact."""
    document = copy.deepcopy(DOCUMENT)
    document["source"]["schema"]["day"] = "date"
    document["lookups"][0] |= {"event_time": "day", "carry": ["city", "tel"], **policies}
    shop.declare(document)
    facts = [
        {"order": row["customer_key"], "buyer": row["id"], "day": row["valid_from"], "buyer_key": row["customer_key"],
         "buyer_city": row["city"], "buyer_tel": row["tel"], "_outcome": "matched"}
        for row in shop.rows()
    ]  # fmt: skip
    for number, values in damages:
        facts[number] |= values
    write_deltalake(str(shop.folder / "w" / "facts"), pa.Table.from_pylist(facts, FACTS), mode="overwrite")


def test_sound_facts_break_no_rule(shop):
    early = {"day": dt.date(2020, 1, 1)}
    first = next(place for place, row in enumerate(shop.rows()) if row["version"] == 1 and row["customer_key"] > 0)
    with_facts(shop, (first, early), (first + 1, {"day": None}))
    assert shop.broken() == {}


def test_facts_that_the_policy_leaves_are_counted_and_are_no_fault(shop):
    rows = shop.rows()
    early = {"day": dt.date(2020, 1, 1)}
    first = next(place for place, row in enumerate(rows) if row["version"] == 1 and row["customer_key"] > 0)
    closed = next(place for place, row in enumerate(rows) if not row["is_current"] and place != first)
    retired = {"buyer_key": 12345, "buyer": rows[first]["id"], **early}
    with_facts(shop, (first, early | {"buyer_city": "old"}), (first + 1, retired), before_first="reject")
    assert shop.broken() == {}
    left = {"facts of role buyer are older than the first version of their member, and are left as is": 2}
    assert shop.broken(allowed=True) == left
    assert repaired(shop) == ({}, {})
    with_facts(shop, (first, early), (closed, {"day": dt.date(2031, 1, 1)}), before_first="reject")
    assert shop.broken() == {
        "facts of role buyer have the key of the version that was valid at their time": 1,
    }
    assert list(shop.broken(allowed=True).values()) == [1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param({"buyer_key": 12345}, "have the key of a version", marks=pytest.mark.slow),
        pytest.param({"buyer": 58}, "have the key of a version of their member", marks=pytest.mark.slow),
        ({"day": dt.date(2031, 1, 1)}, "have the key of the version that was valid at their time"),
        ({"buyer_tel": "other"}, "carry the values of their version"),
        pytest.param({"buyer_city": None}, "carry the values of their version", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_fact_is_found(shop, values, says):
    closed = next(place for place, row in enumerate(shop.rows()) if not row["is_current"])
    with_facts(shop, (closed, values))
    assert shop.broken() == {f"facts of role buyer {says}": 1}
    assert repaired(shop) == ({}, {f"facts of role buyer {says}": 1})


TIMES = [None, dt.date(2019, 6, 1), *(dt.date(2024, 1, day) for day in (1, 2, 3, 9)), dt.date(2031, 1, 1)]


def key_now(rows, fact, policies):
    """Return the key that a lookup gives a fact now, by a reading of the rows of the dimension."""
    mine = sorted((row for row in rows if row["id"] == fact["buyer"] is not None), key=lambda row: row["valid_from"])
    day = fact["day"]
    if policies["event_time"] is None or (day is None and policies["null_time"] == "current"):
        return mine[-1]["customer_key"] if mine else -1
    if day is None or not mine:
        return -1
    before = [row["customer_key"] for row in mine if row["valid_from"] <= day]
    early = mine[0]["customer_key"] if policies["before_first"] == "first" else -1
    return before[-1] if before else early


@pytest.mark.parametrize("null_time", ["current", "unknown"])
@pytest.mark.parametrize("before_first", ["first", "unknown", "reject", None])
def test_facts_that_came_before_their_member_are_counted(shop, rng, null_time, before_first):
    policies = {"event_time": "day", "null_time": null_time, "before_first": before_first}
    if before_first is None:
        policies = {"event_time": None}
    with_facts(shop, **policies)
    facts = [
        {"order": 1000 + at, "buyer": int(rng.integers(1, 120)) if at % 11 else None, "day": TIMES[at % len(TIMES)],
         "buyer_key": -1, "buyer_city": "Unknown", "buyer_tel": None, "_outcome": "unknown"}
        for at in range(150)
    ]  # fmt: skip
    write_deltalake(str(shop.folder / "w" / "facts"), pa.Table.from_pylist(facts, FACTS), mode="append")
    rows = [row for row in shop.rows() if row["customer_key"] > 0]
    count = sum(key_now(rows, fact, policies) != -1 for fact in facts)
    assert 0 < count < len(facts)
    assert shop.broken() == {}
    assert shop.broken(allowed=True) == {came_before("buyer"): count}
