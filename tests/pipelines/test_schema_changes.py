"""Columns of dimensions that change: added, filled, widened, removed; each named, and refused where it would lose."""

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml
from deltalake import DeltaTable, TableFeatures, write_deltalake

from headrace.etl.errors import DimensionError
from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.reads import scan_table
from headrace.pipelines.dimension import schema_changes
from headrace.pipelines.dimension.columns import add_column, drop_column, widen_column
from headrace.pipelines.dimension.completing import complete_members, completing_columns
from headrace.pipelines.dimension.inferred import inferred_members
from headrace.pipelines.dimension.schema_changes import is_wider
from headrace.pipelines.dimension.tables import check_dimension, create_dimension
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.runner import run

COLUMNS = {"code": "string", "city": "string", "size": "int"}


def document(columns, **lookup):
    return {
        "name": "p",
        "source": {"format": "csv", "path": "in", "schema": {"id": "int", "code": "string"}},
        "dimensions": {
            "k": {
                "path": "w/k",
                "natural_key": ["code"],
                "rules": {"code": ["casefold"]},
                **({} if columns is None else {"columns": columns}),
                "shards": 2,
            }
        },
        "lookups": [{"dimension": "k", "role": "a", "on": {"code": "code"}, "policy": "infer", **lookup}],
        "sink": {"path": "w/facts"},
        "replicas": "replicas",
    }  # fmt: skip


class Project:
    """A pipeline with a dimension of two members, or without it if no columns are declared."""

    def __init__(self, folder, columns=COLUMNS):
        self.folder = folder
        (folder / "in").mkdir(parents=True)
        self.declare(columns)
        if columns is None:
            return
        rows = pa.table({"code": ["A", "b"], "city": ["Rome", "Oslo"], "size": pa.array([1, 2], pa.int32())})
        create_dimension(self.config, "k", rows)

    @property
    def config(self):
        return load_pipeline(self.folder / "p.yml")

    @property
    def path(self):
        return str(self.folder / "w/k")

    def declare(self, columns, **lookup):
        (self.folder / "p.yml").write_text(yaml.safe_dump(document(columns, **lookup), sort_keys=False))

    def put(self, name, *codes):
        rows = "".join(f"{name}{row},{code}\n" for row, code in enumerate(codes))
        (self.folder / "in" / f"{name}.csv").write_text("id,code\n" + rows)

    def members(self):
        rows = DeltaTable(self.path).to_pyarrow_table().to_pylist()
        return {row["code"]: {name: value for name, value in row.items() if name != "code"} for row in rows}

    def facts(self):
        rows = DeltaTable(str(self.folder / "w/facts")).to_pyarrow_table().to_pylist()
        return {row["id"]: row for row in rows}


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def column_of(project, name):
    return {code: row[name] for code, row in project.members().items()}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_declared_columns_are_added_and_widened_once_and_facts_carry_them(project):
    project.put(1, "A", "c")
    assert run(project.folder / "p.yml").notices == ()
    before = {code: row["k_key"] for code, row in project.members().items()}
    project.declare({**COLUMNS, "size": "bigint", "price": "decimal(6,2)"}, carry=[])
    project.put(2, "B", "d")
    notices = run(project.folder / "p.yml").notices
    assert [notice.partition(": ")[2] for notice in notices] == [
        "the column 'size' was widened from int to bigint",
        "the column 'price' decimal(6,2) was added; members have no value in it yet",
    ]
    assert pa.schema(DeltaTable(project.path).schema().to_arrow()).field("size").type == pa.int64()
    assert column_of(project, "size") == {None: None, "a": 1, "b": 2, "c": None, "d": None}
    assert set(column_of(project, "price").values()) == {None}
    project.put(3, "A", "D", "e")
    assert run(project.folder / "p.yml").notices == ()
    after = {code: row["k_key"] for code, row in project.members().items()}
    assert before.items() <= after.items()
    for row in project.facts().values():
        assert row["a_key"] == after[row["code"].casefold()]
    assert check_dimension(project.config, "k") == []

    values = pa.table({"code": ["a", "E", "z"], "price": [Decimal("1.50"), Decimal("2.00"), Decimal("3.00")]})
    change = add_column(project.config, "k", "price", "decimal(6,2)", values)
    assert (change.filled, change.without_value, change.without_member) == (2, 3, 1)
    project.declare({**COLUMNS, "size": "bigint", "price": "decimal(6,2)"}, role="b", carry=["price", "city"])
    document = yaml.safe_load((project.folder / "p.yml").read_text())
    document["sink"]["path"], document["name"] = "w/priced", "q"
    (project.folder / "p.yml").write_text(yaml.safe_dump(document))
    run(project.folder / "p.yml")
    prices = column_of(project, "price")
    assert {prices[key] for key in ("a", "e")} == {Decimal("1.50"), Decimal("2.00")}
    rows = DeltaTable(str(project.folder / "w/priced")).to_pyarrow_table().to_pylist()
    assert len(rows) == 7
    cities = column_of(project, "city")
    for row in rows:
        key = row["code"].casefold()
        assert (row["b_price"], row["b_city"]) == (prices[key], cities[key])


@pytest.mark.spark
def test_late_records_complete_members_and_a_statement_corrects_their_facts(project, spark):
    project.declare(COLUMNS, carry=["city", "size"])
    project.put(1, "A", "x", "y")
    run(project.folder / "p.yml")
    types = completing_columns(project.config, "k")
    done = complete_members(project.config, "k", pa.table([["X"], ["Bern"], [7]], schema=types))
    assert (done.completed, done.inferred) == (1, 1)
    (finding,) = check_dimension(project.config, "k")
    assert (finding.rule.startswith("facts of role a carry other values"), finding.rows, finding.allowed) == (
        True,
        1,
        True,
    )
    spark.sql(f"""
        MERGE INTO delta.`{project.folder}/w/facts` AS fact
        USING delta.`{project.path}` AS member
        ON fact.a_key = member.k_key AND fact.a_key > 0
          AND NOT (fact.a_city <=> member.city AND fact.a_size <=> member.size)
        WHEN MATCHED THEN UPDATE SET a_city = member.city, a_size = member.size
    """)
    assert check_dimension(project.config, "k") == []
    project.put(2, "X", "Y")
    run(project.folder / "p.yml")
    found = {row["id"]: (row["a_city"], row["a_size"]) for row in project.facts().values()}
    assert found == {10: ("Rome", 1), 11: ("Bern", 7), 12: (None, None), 20: ("Bern", 7), 21: (None, None)}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_replica_follows_filled_values_and_removed_columns(project):
    project.declare(COLUMNS, carry=["city"])
    project.put(1, "A", "x")
    run(project.folder / "p.yml")
    project.declare({"code": "string", "city": "string"}, carry=["city"])
    done = drop_column(project.config, "k", "size").done
    assert "the column 'size' was removed" in done
    assert list(project.members()["a"]) == ["k_key", "city", "is_inferred"]
    add_column(project.config, "k", "city", "string", pa.table({"code": ["X", "a"], "city": ["Bern", "Rome"]}))
    project.put(2, "A", "x", "B", "y")
    run(project.folder / "p.yml")
    assert {row["id"]: row["a_city"] for row in project.facts().values()} == {
        10: "Rome", 11: None, 20: "Rome", 21: "Bern", 22: "Oslo", 23: None,
    }  # fmt: skip
    found = inferred_members(project.config, "k", limit=1)
    assert (found.total, found.members.column("code").to_pylist()) == (2, ["x"])
    assert inferred_members(project.config, "k").members.column("code").to_pylist() == ["x", "y"]


def test_an_added_column_is_filled_by_the_rules_of_the_key_and_a_repeated_call_changes_nothing(project):
    values = pa.table({"code": ["B", "A", "q"], "note": ["second", None, "nobody"]})
    change = add_column(project.config, "k", "note", "string", values)
    assert (change.filled, change.without_value, change.without_member) == (1, 0, 1)
    assert column_of(project, "note") == {None: None, "a": None, "b": "second"}
    version = DeltaTable(project.path).version()
    again = add_column(project.config, "k", "note", "string", values)
    assert (again.filled, DeltaTable(project.path).version()) == (0, version)
    assert "was there already" in again.done


def test_a_widened_table_keeps_its_properties_comments_and_greatest_key(project):
    table = DeltaTable(project.path)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 40 days"})
    table.alter.set_column_metadata("city", {"comment": "where it is"})
    before = DeltaTable(project.path)
    project.declare({**COLUMNS, "size": "bigint"})
    widen_column(project.config, "k", "size", "bigint")
    after = DeltaTable(project.path)
    assert after.metadata().configuration == before.metadata().configuration
    assert after.metadata().id == before.metadata().id
    fields = {field["name"]: field for field in json.loads(after.schema().to_json())["fields"]}
    assert (fields["city"]["metadata"], fields["size"]["type"]) == ({"comment": "where it is"}, "long")
    assert column_of(project, "size") == {None: None, "a": 1, "b": 2}
    assert after.to_pyarrow_table(filters=[("size", ">", 1)]).column("code").to_pylist() == ["b"]
    rows = (
        pa.table(after.load_cdf(after.version(), after.version())).select(["code", "size", "_change_type"]).to_pylist()
    )
    kinds = sorted((row["_change_type"], row["code"] or "") for row in rows)
    assert kinds == [(kind, code) for kind in ("delete", "insert") for code in ("", "a", "b")]


@pytest.mark.parametrize("change", ["append", "drop"])
def test_another_writer_between_the_rewrite_and_its_commit_is_not_lost(project, monkeypatch, change):
    rewrite, waiting = schema_changes.rewrite, [1]

    def beaten(path, table, *rest):
        if waiting.pop() if waiting else None:
            row = {"k_key": 7, "code": "late", "city": None, "size": 9, "is_inferred": False}
            if change == "append":
                write_deltalake(path, pa.Table.from_pylist([row], pa.schema(table.schema().to_arrow())), mode="append")
            else:
                drop_column(project.config, "k", "size")
        return rewrite(path, table, *rest)

    monkeypatch.setattr(schema_changes, "rewrite", beaten)
    project.declare({**COLUMNS, "size": "bigint"})
    if change == "append":
        widen_column(project.config, "k", "size", "bigint")
        assert column_of(project, "size") == {None: None, "a": 1, "b": 2, "late": 9}
        return
    project.declare({"code": "string"})
    with pytest.raises(DeltaTableError, match="the column 'size' was removed by another job; run again"):
        widen_column(project.config, "k", "size", "bigint")


REFUSED = [
    (lambda config: add_column(config, "k", "size", "bigint"), "declares dimensions.k.columns.size as int"),
    (lambda config: add_column(config, "k", "CITY", "string"), "differ only in case"),
    (lambda config: add_column(config, "k", "note", "strin"), "unknown type 'strin'"),
    (
        lambda config: add_column(config, "k", "n", "int", pa.table({"code": ["a", "A"], "n": [1, 2]})),
        "more than once: a",
    ),
    (
        lambda config: add_column(config, "k", "n", "int", pa.table({"code": ["a", None], "n": [1, 2]})),
        "no valid 'code' in row 1",
    ),
    (lambda config: add_column(config, "k", "n", "int", pa.table({"code": ["a"], "n": ["x"]})), "does not fit int"),
    (lambda config: add_column(config, "k", "n", "int", pa.table({"code": ["a"]})), "the source has no column 'n'"),
    (lambda config: widen_column(config, "k", "size", "smallint"), "declares dimensions.k.columns.size as int"),
    (lambda config: widen_column(config, "k", "nothing", "int"), "has no column 'nothing'; it has k_key, code"),
    (lambda config: widen_column(config, "k", "k_key", "decimal(20,0)"), "belongs to Headrace"),
    (lambda config: drop_column(config, "k", "city"), "dimensions.k.columns declares it"),
    (lambda config: drop_column(config, "k", "code"), "part of the natural key"),
    (lambda config: drop_column(config, "k", "is_inferred"), "belongs to Headrace"),
    (lambda config: drop_column(config, "other", "city"), "no dimension 'other'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_change_that_would_lose_something_is_refused_before_anything_is_written(project, change, message):
    version = DeltaTable(project.path).version()
    with pytest.raises((DeltaTableError, PipelineFileError), match=message):
        change(project.config)
    assert DeltaTable(project.path).version() == version


def test_a_carried_column_is_neither_widened_nor_removed(project):
    project.declare({"code": "string"})
    document = yaml.safe_load((project.folder / "p.yml").read_text())
    del document["dimensions"]["k"]["columns"]
    document["lookups"][0]["carry"] = ["size"]
    (project.folder / "p.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(DeltaTableError, match="facts carry 'size' as a_size"):
        widen_column(project.config, "k", "size", "bigint")
    with pytest.raises(DeltaTableError, match="facts carry it in the role 'a'"):
        drop_column(project.config, "k", "size")


def test_a_declaration_that_is_not_wider_is_refused_and_one_of_a_partitioned_table_names_the_remedy(project, tmp_path):
    project.declare({**COLUMNS, "size": "smallint"})
    with pytest.raises(DeltaTableError, match="'size' as int, but the pipeline declares smallint; declare it as int"):
        check_pipeline(project.config, 1)
    rows = DeltaTable(project.path).to_pyarrow_table()
    write_deltalake(str(tmp_path / "w/parts"), rows, partition_by=["city"])
    text = (tmp_path / "p.yml").read_text().replace("w/k", "w/parts").replace("size: smallint", "size: bigint")
    (tmp_path / "p.yml").write_text(text)
    with pytest.raises(DeltaTableError, match=r"is partitioned by city.*overwriteSchema"):
        check_pipeline(project.config, 1)


def test_a_table_with_deletion_vectors_is_rewritten(project):
    rows = DeltaTable(project.path).to_pyarrow_table()
    configuration = {"delta.enableDeletionVectors": "true"}
    write_deltalake(project.path, rows, mode="overwrite", configuration=configuration)
    DeltaTable(project.path).alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    project.declare({"code": "string", "city": "string"})
    drop_column(project.config, "k", "size")
    rest = rows.drop_columns("size")
    left = scan_table(DeltaTable(project.path), rest.column_names).read_all()
    assert sorted(left.to_pylist(), key=str) == sorted(rest.to_pylist(), key=str)


def test_wider_types_hold_every_value():
    decimal = pa.decimal128
    wider = [
        (pa.int64(), pa.int8()), (pa.float64(), pa.int32()), (pa.float64(), pa.float32()), (pa.float32(), pa.int16()),
        (decimal(12, 2), decimal(10, 2)), (decimal(12, 4), decimal(10, 2)), (decimal(10, 0), pa.int32()),
        (decimal(21, 2), pa.int64()),
    ]  # fmt: skip
    assert [pair for pair in wider if not is_wider(*pair)] == []
    others = [
        (pa.float64(), pa.int64()), (pa.float32(), pa.int32()), (decimal(12, 6), decimal(10, 2)),
        (decimal(9, 0), pa.int32()), (pa.int32(), pa.int32()), (decimal(10, 2), decimal(10, 2)),
        (pa.timestamp("us"), pa.date32()), (decimal(20, 2), pa.int64()), (pa.string(), pa.int32()),
    ]  # fmt: skip
    assert [pair for pair in others if is_wider(*pair)] == []
    assert [pair for pair in wider if is_wider(*reversed(pair))] == []


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (pa.array([200], pa.uint8()), pa.array([200], pa.int16())),
        (pa.array([2**16 - 1], pa.uint16()), pa.array([2**16 - 1], pa.int32())),
        (pa.array([2**32 - 1], pa.uint32()), pa.array([2**32 - 1])),
        (pa.array([7], pa.uint64()), pa.array([7])),
        (pa.array([0.5], pa.float16()), pa.array([0.5], pa.float32())),
        (pa.array([-1], pa.timestamp("ms", "Asia/Tokyo")), pa.array([-1000], pa.timestamp("us", "UTC"))),
        (pa.array([Decimal("1.5")], pa.decimal64(5, 1)), pa.array([Decimal("1.5")], pa.decimal128(5, 1))),
    ],
)
def test_a_dimension_without_declared_columns_holds_the_values_of_its_source(tmp_path, values, stored):
    project = Project(tmp_path / "other", columns=None)
    create_dimension(project.config, "k", pa.table({"code": ["x"], "v": values}))
    rows = DeltaTable(project.path).to_pyarrow_table()
    member = rows.filter(pc.equal(rows.column("k_key"), 1))
    assert member.column("v").combine_chunks().equals(stored)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([2**63], pa.uint64()), "column 'v' does not fit its type int64: .* or give the column another type"),
        (pa.array([1], pa.timestamp("ns")), r"column 'v' does not fit its type timestamp\[us\]"),
        (pa.array([1], pa.time32("s")), r"column 'v' of the source is time32\[s\], which no Delta table has; cast it"),
        (pa.array([Decimal(1)], pa.decimal256(50, 0)), "column 'v' of the source is decimal256"),
        (pa.array([[1]], pa.list_(pa.timestamp("ns"))), "column 'v' of the source is list<"),
        (pa.array([2_932_897], pa.date32()), "'v' is not within the years 1 to 9999 .*correct it or leave out the row"),
        (pa.array([-719_163], pa.date32()), "'v' is not within the years 1 to 9999"),
        (pa.array([253_402_300_800], pa.timestamp("s", "UTC")), "'v' is not within the years 1 to 9999"),
    ],
)
def test_a_dimension_is_not_made_with_other_values_than_its_source(tmp_path, values, message):
    project = Project(tmp_path / "other", columns=None)
    with pytest.raises((DimensionError, DeltaTableError), match=message):
        create_dimension(project.config, "k", pa.table({"code": ["x"], "v": values}))
    assert not (tmp_path / "other" / "w").exists()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([0.1]), "float"),
        (pa.array([5]), "boolean"),
        (pa.array(["5"]), "int"),
        (pa.array([1], pa.timestamp("us")), "date"),
        (pa.array([1], pa.timestamp("ns")), "timestamp_ntz"),
    ],
)
def test_a_column_is_not_filled_with_other_values_than_its_source(project, values, kind):
    with pytest.raises(DeltaTableError, match=f"the source's column 'v' does not fit {kind}: .*cast"):
        add_column(project.config, "k", "v", kind, pa.table({"code": ["A"], "v": values}))
    assert "v" not in next(iter(project.members().values()))


def test_a_column_is_not_filled_with_dates_that_the_bounds_of_the_table_cannot_name(project):
    source = pa.table({"code": ["A"], "v": pa.array([2_932_897], pa.date32())})
    with pytest.raises(DeltaTableError, match="the source: a value of column 'v' is not within the years 1 to 9999"):
        add_column(project.config, "k", "v", "date", source)


def test_a_table_with_bounds_that_cannot_be_read_is_named(project):
    far = pa.table({"k_key": [9], "code": ["z"], "v": pa.array([2_932_897], pa.date32())})
    write_deltalake(project.path, far, mode="append", schema_mode="merge")
    with pytest.raises(DeltaTableError, match=r"has bounds of a column that cannot be read.*corrected in the table"):
        scan_table(DeltaTable(project.path), ["v"]).read_all()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dimensions.k.surrogate_key", {"surrogate_key": "item_key"}),
        ("dimensions.k.natural_key", {"natural_key": ["sku"], "columns": {"sku": "string"}, "rules": {}}),
    ],
)
def test_a_key_that_the_table_does_not_have_is_to_be_named_and_not_added(project, field, change):
    written = yaml.safe_load((project.folder / "p.yml").read_text())
    written["dimensions"]["k"] |= change
    written["lookups"][0]["on"] = {"code": written["dimensions"]["k"]["natural_key"][0]}
    (project.folder / "p.yml").write_text(yaml.safe_dump(written))
    message = rf"it has k_key, code, city, size, is_inferred; name one of these in {field}, or another table$"
    with pytest.raises(DeltaTableError, match=message):
        check_pipeline(project.config, 2)
