"""Features of Delta tables times roles: what is supported gives the right rows, read by Spark; the rest is refused.

Spark makes the tables. Where a feature is supported, one pipeline loads facts, members, rejected rows and routed
duplicates into tables that have it, over two batches, and plain Python says what must be in them.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable

from headrace.etl import Dimension
from headrace.pipelines.batch.error_rows import ERROR_SCHEMA
from headrace.pipelines.batch.preparation import prepare
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.replica.catch_up import ReplicaSpec, catch_up
from headrace.pipelines.replica.rows import MemberRows
from headrace.pipelines.runner import run
from headrace.pipelines.spark.columns import spark_schema
from headrace.storage import Table

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

SOURCE = {"id": "bigint", "c": "string", "d": "string", "v": "int"}
FACTS = {
    "id": "bigint", "c": "string", "d": "string", "v": "int", "a_key": "bigint", "a_note": "string", "b_key": "bigint",
    "_outcome": "string",
}  # fmt: skip
MEMBERS = {"k_key": "bigint", "c": "string", "note": "string", "is_inferred": "boolean"}
ROUTED = {"id": "bigint", "c": "string", "d": "string", "v": "int", "_duplicate": "string", "_file": "string"}
ERRORS = {each.name: each.dataType.simpleString() for each in spark_schema(ERROR_SCHEMA)}
FILES = (
    [(1, "AAA", "AAA", 5), (2, "NEW1", "AAA", 6), (3, "AAA", "ZZZ", 7), (1, "AAA", "AAA", 5)],
    [(4, "NEW1", "AAA", 8), (2, "NEW1", "AAA", 9), (5, "NEW2", "AAA", 1), (6, "", "AAA", 2)],
)
STORED = {1: ("AAA", 5), 2: ("NEW1", 6), 4: ("NEW1", 8), 5: ("NEW2", 1), 6: (None, 2)}


@dataclass(frozen=True)
class Shape:
    """How Spark makes a table: columns in place of the usual ones, more of them, clauses, properties, statements."""

    columns: dict = field(default_factory=dict)
    more: str = ""
    clause: str = ""
    properties: dict = field(default_factory=dict)
    then: tuple = ()

    def make(self, spark, path, columns):
        given = ", ".join(f"`{name}` {self.columns.get(name, kind)}" for name, kind in columns.items())
        properties = {"delta.enableChangeDataFeed": "true", **self.properties}
        listed = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
        spark.sql(
            f"CREATE TABLE delta.`{path}` ({given}{self.more}) USING delta {self.clause} TBLPROPERTIES ({listed})"
        )
        for statement in self.then:
            spark.sql(statement.format(table=f"delta.`{path}`"))


def with_properties(**properties):
    return Shape(properties={f"delta.{name}": value for name, value in properties.items()})


@dataclass
class World:
    """A pipeline whose tables Spark makes."""

    folder: Path
    spark: object
    options: dict = field(default_factory=dict)
    rules: dict = field(default_factory=dict)

    def __post_init__(self):
        (self.folder / "in").mkdir(parents=True)

    @property
    def pipeline(self):
        document = {
            "name": "p",
            "source": {"format": "csv", "path": "in", "schema": SOURCE},
            "dimensions": {"k": {"path": "w/k", "natural_key": ["c"], "columns": {"c": "string", "note": "string"},
                                 "rules": self.rules, "shards": 1}},
            "lookups": [
                {"dimension": "k", "role": "a", "on": {"c": "c"}, "policy": "infer", "carry": ["note"]},
                {"dimension": "k", "role": "b", "on": {"d": "c"}, "policy": "reject"},
            ],
            "duplicates": {"key": ["id"], "action": "route", "shards": 1},
            "sink": {"path": "w/fact"},
            "trigger": {"max_files": 1},
            "replicas": "replicas",
            **self.options,
        }  # fmt: skip
        file = self.folder / "p.yml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return file

    def path(self, name):
        return str(self.folder / "w" / name)

    def make(self, name, shape):
        columns = {"k": MEMBERS, "fact": FACTS, "fact_errors": ERRORS, "fact_duplicates": ROUTED}[name]
        shape.make(self.spark, self.path(name), columns)

    def add_members(self):
        """Fill the dimension as a job of Spark would: several commits, an update and a delete."""
        table = f"delta.`{self.path('k')}`"
        insert = f"INSERT INTO {table} (k_key, c, note, is_inferred) VALUES "
        self.spark.sql(f"{insert} (1, 'AAA', 'old', false), (2, 'BBB', 'gone', false), (-1, null, null, false)")
        self.spark.sql(f"UPDATE {table} SET note = 'n1' WHERE k_key = 1")
        self.spark.sql(f"DELETE FROM {table} WHERE k_key = 2")

    def add_files(self, files=FILES):
        for number, rows in enumerate(files):
            lines = ["id,c,d,v", *(",".join(map(str, row)) for row in rows)]
            (self.folder / "in" / f"{number}.csv").write_text("\n".join(lines) + "\n")

    def read(self, name, *columns):
        """Return rows as Spark reads them."""
        rows = self.spark.read.format("delta").load(self.path(name)).select(*columns).collect()
        return sorted((tuple(row) for row in rows), key=str)

    def members(self):
        """Return the natural key of each surrogate key, and check that both are unique."""
        rows = [(key, code.rstrip() if code is not None else None) for key, code in self.read("k", "k_key", "c")]
        found = dict(rows)
        assert len(found) == len(rows) == len(set(found.values()))
        return found

    def check(self):
        """Compare facts, members, rejected rows and duplicates with what the files say."""
        members = self.members()
        assert set(members.values()) == {None, "AAA", "NEW1", "NEW2"}
        assert members[1] == "AAA"
        assert members[-1] is None
        facts = self.read("fact", *FACTS)
        assert [(row[0], row[3]) for row in facts] == [(key, value) for key, (_, value) in STORED.items()]
        for key, code, where, _, a_key, note, b_key, _ in facts:
            assert (code.rstrip() if code is not None else None) == STORED[key][0] == members[a_key]
            assert where.rstrip() == "AAA"
            assert b_key == 1
            assert note == ("n1" if a_key == 1 else None)
        rejected = self.read("fact_errors", "_file", "reason", "record")
        assert [(name, record) for name, _, record in rejected] == [("0.csv", "3,AAA,ZZZ,7")]
        assert self.read("fact_duplicates", "id", "v", "_duplicate") == [(1, 5, "batch"), (2, 9, "loaded")]

    def listing(self):
        """Return all files of the project, and their sizes."""
        return {file: file.stat().st_size for file in self.folder.rglob("*") if file.is_file() and "w" in file.parts}


@pytest.fixture
def world(tmp_path, spark):
    return World(tmp_path / "world", spark)


TABLES = ("k", "fact", "fact_errors", "fact_duplicates")
MAPPED_BY_NAME = with_properties(**{"columnMapping.mode": "name"})
SUPPORTED = {
    "plain": Shape(),
    "change data feed off": with_properties(enableChangeDataFeed="false"),
    "deletion vectors": with_properties(enableDeletionVectors="true"),
    "column mapping by name": MAPPED_BY_NAME,
    "column mapping by id": with_properties(**{"columnMapping.mode": "id"}),
    "row tracking": with_properties(enableRowTracking="true"),
    "in-commit timestamps": with_properties(enableInCommitTimestamps="true"),
    "v2 checkpoints": with_properties(checkpointPolicy="v2", checkpointInterval="2"),
    "more columns": Shape(more=", t timestamp_ntz, s struct<a: int, l: array<string>>"),
    "variant": Shape(more=", x variant"),
}
QUICK = ("column mapping by name",)


@pytest.mark.parametrize(
    "feature", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED]
)
def test_tables_with_a_feature_are_loaded(world, feature):
    for name in TABLES:
        world.make(name, SUPPORTED[feature])
    world.add_members()
    world.add_files()
    run(world.pipeline)
    world.check()


OF_FACTS = {
    "partitioned by a column the file does not name": (Shape(clause="PARTITIONED BY (c, v)"), "fact"),
    "partitioned by a key": (Shape(clause="PARTITIONED BY (a_key)"), "fact"),
    "liquid clustering": (Shape(clause="CLUSTER BY (id)"), "fact"),
    "type widening": (with_properties(enableTypeWidening="true"), "fact_errors"),
    "generated": (Shape(more=", g int GENERATED ALWAYS AS (v + 1)"), "fact"),
    "identity": (Shape(more=", i bigint GENERATED ALWAYS AS IDENTITY"), "fact"),
    "default": (Shape(more=", x string DEFAULT 'x'", properties={"delta.feature.allowColumnDefaults": "supported"}),
                "fact"),
    "append-only": (with_properties(appendOnly="true"), "fact"),
    "not null": (Shape(columns={"id": "bigint NOT NULL", "_outcome": "string NOT NULL"}), "fact"),
    "varchar": (Shape(columns={"c": "varchar(4)", "d": "char(5)"}), "fact"),
    "dimension partitioned by its natural key": (Shape(clause="PARTITIONED BY (c)"), "k"),
    "dimension with a generated column": (Shape(more=", g string GENERATED ALWAYS AS (upper(note))"), "k"),
    "dimension with a default": (
        Shape(more=", x string DEFAULT 'x'", properties={"delta.feature.allowColumnDefaults": "supported"}), "k"),
    "dimension with an identity beside": (Shape(more=", i bigint GENERATED ALWAYS AS IDENTITY"), "k"),
    "dimension with clustering": (Shape(clause="CLUSTER BY (c)"), "k"),
}  # fmt: skip
FILLED = {
    "generated": ("fact", ["id", "g"], [(1, 6), (2, 7), (4, 9), (5, 2), (6, 3)]),
    "default": ("fact", ["id", "x"], [(1, "x"), (2, "x"), (4, "x"), (5, "x"), (6, "x")]),
    "dimension with a generated column": ("k", ["k_key", "g"], [(-1, None), (1, "N1"), (2, None), (3, None)]),
    "dimension with a default": ("k", ["c", "x"], [("AAA", "x"), ("NEW1", "x"), ("NEW2", "x"), (None, "x")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", OF_FACTS)
def test_a_table_with_a_feature_among_plain_ones_is_loaded(world, feature):
    shape, table = OF_FACTS[feature]
    world.make("k", shape if table == "k" else Shape())
    if table != "k":
        world.make(table, shape)
    world.add_members()
    world.add_files()
    run(world.pipeline)
    world.check()
    if feature in FILLED:
        name, columns, rows = FILLED[feature]
        found = world.read(name, *columns)
        if "k_key" in columns:
            found = [(key if key < 2 else 2 + i - 2, value) for i, (key, value) in enumerate(found)]
        assert found == sorted(rows, key=str)


def test_rows_that_a_table_cannot_hold_go_to_the_error_table(world):
    world.options["duplicates"] = None
    world.make("k", Shape(clause="PARTITIONED BY (c)", columns={"c": "varchar(6)"}))
    world.add_members()
    checked = Shape(
        columns={"id": "bigint NOT NULL", "c": "varchar(4)"},
        clause="PARTITIONED BY (d)",
        then=("ALTER TABLE {table} ADD CONSTRAINT small CHECK (v < 100 AND a_key > -5)",),
    )
    world.make("fact", checked)
    rows = [(1, "AAA", "AAA", 5), ("", "AAA", "AAA", 6), (3, "LONGER", "AAA", 7), (4, "AAA", "AAA", 100),
            (5, "NEW1", "AAA", ""), (6, "TOOLONG", "AAA", 1), (7, "NEW2", '""', 1)]  # fmt: skip
    world.add_files([rows])
    result = run(world.pipeline)
    assert world.read("fact", "id", "c", "d", "v") == [(1, "AAA", "AAA", 5)]
    reasons = dict(world.read("fact_errors", "record", "reason"))
    expected = {
        ",AAA,AAA,6": "is null, but the column is NOT NULL",
        "3,LONGER,AAA,7": "longer than the 4 characters",
        "4,AAA,AAA,100": "breaks CHECK small",
        "5,NEW1,AAA,": "breaks CHECK small",
        "6,TOOLONG,AAA,1": "longer than the 6 characters",
        '7,NEW2,"",1': "is empty",
    }
    assert set(reasons) == set(expected)
    assert all(text in reasons[record] for record, text in expected.items()), reasons
    assert (result.total("loaded"), result.total("rejected")) == (1, 6)
    assert set(world.members().values()) == {None, "AAA", "NEW1"}


@pytest.mark.slow
def test_an_empty_key_of_a_partitioned_dimension_is_rejected(world):
    world.make("k", Shape(clause="PARTITIONED BY (c)"))
    world.add_members()
    world.add_files([[(1, '""', "AAA", 5), (2, "AAA", "AAA", 5)]])
    run(world.pipeline)
    assert world.members() == {-1: None, 1: "AAA"}
    assert world.read("fact", "id") == [(2,)]
    ((reason,),) = world.read("fact_errors", "reason")
    assert "is a key that is empty, which Delta stores as null, since dimension 'k' is partitioned by it" in reason


READ = {
    **{name: SUPPORTED[name] for name in ("column mapping by id", "deletion vectors", "change data feed off")},
    "checkpoint of version 2": SUPPORTED["v2 checkpoints"],
    "partitioned": Shape(clause="PARTITIONED BY (note)"),
    "deletion vectors without feed": with_properties(enableDeletionVectors="true", enableChangeDataFeed="false"),
    "checked by a constraint": Shape(then=("ALTER TABLE {table} ADD CONSTRAINT odd CHECK (hash(c) <> 5)",)),
}


QUICK_READ = ("deletion vectors without feed",)


@pytest.mark.parametrize(
    "feature", [name if name in QUICK_READ else pytest.param(name, marks=pytest.mark.slow) for name in READ]
)
def test_a_replica_follows_a_table_with_a_feature(world, spark, feature):
    world.make("k", READ[feature])
    world.add_members()
    table = f"delta.`{world.path('k')}`"
    dimension = Dimension("k", ("c",), "k_key", pa.schema({"c": pa.string(), "note": pa.string()}), inferred_flag=None)
    handle = DeltaHandle(world.path("k"))
    spec = ReplicaSpec(MemberRows(dimension), world.path("k"), handle.latest().table_id, 1, None, 1 << 28)

    def rows(reached):
        with Table.open(reached.file) as replica:
            return [(row["c"], row["k_key"], row["note"]) for batch in replica.scan() for row in batch.to_pylist()]

    for statement in (
        "SELECT 1",
        f"INSERT INTO {table} (k_key, c, note, is_inferred) SELECT id, concat('m', id), 'x', false FROM range(10, 60)",
        f"DELETE FROM {table} WHERE k_key % 7 = 0",
        f"UPDATE {table} SET note = concat('u', k_key) WHERE k_key % 5 = 0",
        f"DELETE FROM {table} WHERE k_key % 5 = 0 AND k_key > 40",
    ):
        spark.sql(statement)
        version = handle.latest().version
        found = catch_up(spec, 0, version, 0, rows)
        expected = [(code, key, note) for key, code, note in world.read("k", "k_key", "c", "note") if key != -1]
        assert sorted(found) == sorted(expected)
        assert handle.greatest_key("k_key") >= max(key for _, key, _ in expected)


def test_far_timestamps_of_spark_are_read_exactly(world, spark):
    path = world.path("times")
    spark.sql(f"CREATE TABLE delta.`{path}` (k_key bigint, t timestamp) USING delta")
    spark.sql(
        f"INSERT INTO delta.`{path}` VALUES (1, timestamp'0900-01-01 00:00:00'), (2, timestamp'9999-12-31 23:59:59')"
    )
    dimension = Dimension("k", ("t",), "k_key", pa.schema({"t": pa.timestamp("us", "UTC")}), inferred_flag=None)
    handle = DeltaHandle(path)
    spec = ReplicaSpec(MemberRows(dimension), path, handle.latest().table_id, 1, None, 1 << 28)

    def keys(reached):
        with Table.open(reached.file) as replica:
            batches = list(replica.scan())
        return {each for batch in batches for each in batch.column("t").cast(pa.int64()).to_pylist()}

    for statement in ("SELECT 1", f"INSERT INTO delta.`{path}` VALUES (3, timestamp'1500-06-01 12:00:00.000001')"):
        spark.sql(statement)
        expected = {row[0] for row in spark.sql(f"SELECT unix_micros(t) FROM delta.`{path}`").collect()}
        assert catch_up(spec, 0, handle.latest().version, 0, keys) == expected
    mapped = world.path("mapped")
    spark.sql(
        f"CREATE TABLE delta.`{mapped}` USING delta TBLPROPERTIES ('delta.columnMapping.mode' = 'name') AS "
        f"SELECT * FROM delta.`{path}`"
    )
    other = ReplicaSpec(MemberRows(dimension), mapped, DeltaHandle(mapped).latest().table_id, 1, None, 1 << 28)
    with pytest.raises(DeltaTableError, match="outside the years 1677 to 2262"):
        catch_up(other, 0, 0, 0, keys)


@dataclass(frozen=True)
class Refused:
    """A table that is refused: which, how it is made, what the message says, and whether its SQL helps."""

    table: str
    shape: Shape
    says: str
    remedy: bool = True


CHECKED = ("ALTER TABLE {table} ADD CONSTRAINT odd CHECK (hash(c) <> 5)",)
WIDENED = with_properties(enableTypeWidening="true")
DEFAULTS = {"delta.feature.allowColumnDefaults": "supported"}
REFUSED = {
    "dimension with type widening": Refused("k", WIDENED, "typeWidening.*cannot be read without Spark"),
    "facts with type widening and duplicates": Refused("fact", WIDENED, "typeWidening.*cannot be read"),
    "dimension with vacuum protocol check": Refused(
        "k", Shape(properties={"delta.feature.vacuumProtocolCheck": "supported"}), "vacuumProtocolCheck"
    ),
    "dimension with a constraint": Refused("k", Shape(then=CHECKED), "CHECK constraints.*odd"),
    "facts with a constraint of a function": Refused("fact", Shape(then=CHECKED), "CHECK constraints.*odd"),
    "errors with a constraint": Refused(
        "fact_errors", Shape(then=("ALTER TABLE {table} ADD CONSTRAINT odd CHECK (batch < 5)",)), "CHECK"
    ),
    "dimension with a required attribute": Refused(
        "k", Shape(columns={"note": "string NOT NULL"}), r"NOT NULL columns.*\(note\)"
    ),
    "facts with a required column of their own": Refused(
        "fact", Shape(more=", x int NOT NULL"), r"NOT NULL columns.*\(x\)"
    ),
    "errors with a required column": Refused(
        "fact_errors", Shape(columns={"causes": f"{ERRORS['causes']} NOT NULL"}), r"NOT NULL columns.*\(causes\)"
    ),
    "surrogate key that is an identity": Refused(
        "k", Shape(columns={"k_key": "bigint GENERATED BY DEFAULT AS IDENTITY"}), "one number twice", remedy=False
    ),
    "generated column that is written": Refused(
        "fact", Shape(columns={"v": "int GENERATED ALWAYS AS (cast(id as int))"}), "from their expression", remedy=False
    ),
    "natural key of type char": Refused("k", Shape(columns={"c": "char(8)"}), "pads their text with blanks"),
    "natural key of type double": Refused("k", Shape(columns={"c": "double"}), "as double, but", remedy=False),
}


SLOWLY_REFUSED = ("dimension with vacuum protocol check", "facts with type widening and duplicates")
SLOWLY_REMEDIED = ("dimension with type widening",)


def remedy_of(world, refused):
    """Make a table, check that it is refused, and return the SQL that the message names."""
    world.make(refused.table, refused.shape)
    config, before = load_pipeline(world.pipeline), world.listing()
    version = DeltaTable(world.path(refused.table)).version()
    with pytest.raises(DeltaTableError, match=refused.says) as told:
        prepare(config, 1)
    assert world.path(refused.table) in str(told.value)
    assert world.listing() == before
    assert DeltaTable(world.path(refused.table)).version() == version
    return re.search(r"ALTER TABLE .*$", str(told.value))[0] if refused.remedy else None


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name in SLOWLY_REFUSED else name for name in REFUSED]
)
def test_a_table_that_is_not_supported_is_refused_before_anything_is_written(world, spark, case):
    statement = remedy_of(world, REFUSED[case])
    if statement and case not in SLOWLY_REMEDIED:
        spark.sql(statement)
        prepare(load_pipeline(world.pipeline), 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOWLY_REMEDIED)
def test_a_table_that_took_its_remedy_is_supported(world, spark, case):
    spark.sql(remedy_of(world, REFUSED[case]))
    prepare(load_pipeline(world.pipeline), 1)


MISSING = {
    "facts lack a column": ("fact", "v"),
    "errors lack a column": ("fact_errors", "reason"),
    "duplicates lack a column": ("fact_duplicates", "_duplicate"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_column_is_told_with_the_statement_that_adds_it(world, spark, case):
    table, column = MISSING[case]
    columns = {"fact": FACTS, "fact_errors": ERRORS, "fact_duplicates": ROUTED}[table]
    Shape().make(spark, world.path(table), {name: kind for name, kind in columns.items() if name != column})
    config, before = load_pipeline(world.pipeline), world.listing()
    with pytest.raises(DeltaTableError, match=f"no column '{column}'.*add it: ALTER TABLE") as told:
        prepare(config, 1)
    assert world.listing() == before
    spark.sql(re.search(r"ALTER TABLE .*?\)", str(told.value))[0])
    prepare(config, 1)


def test_names_that_differ_by_case_only_are_refused_before_anything_is_written(world, spark):
    spark.sql(f"CREATE TABLE delta.`{world.path('fact')}` USING delta AS SELECT 1L AS ID")
    before = world.listing()
    with pytest.raises(DeltaTableError, match="no column 'id', but 'ID': names that differ only in case"):
        prepare(load_pipeline(world.pipeline), 1)
    world.options["source"] = {"format": "csv", "path": "in", "schema": {**SOURCE, "ID": "bigint"}}
    with pytest.raises(PipelineFileError, match="'id' and 'ID' differ only in case"):
        prepare(load_pipeline(world.pipeline), 1)
    assert world.listing() == before


def test_a_partitioning_that_the_table_does_not_have_is_refused(world):
    world.make("fact", Shape(clause="PARTITIONED BY (c)"))
    world.options["sink"] = {"path": "w/fact", "partition_by": ["d"]}
    before = world.listing()
    with pytest.raises(DeltaTableError, match=r"partition_by is d, but .* partitioned by c; write partition_by: \[c\]"):
        prepare(load_pipeline(world.pipeline), 1)
    assert world.listing() == before


@pytest.mark.parametrize("shape", [Shape(), MAPPED_BY_NAME, Shape(clause="PARTITIONED BY (c)")])
def test_a_missing_unknown_member_is_added_once(world, spark, shape):
    world.make("k", shape)
    spark.sql(f"INSERT INTO delta.`{world.path('k')}` (k_key, c) VALUES (1, 'AAA')")
    config = load_pipeline(world.pipeline)
    (notice,) = prepare(config, 1).notices
    assert "had no unknown member" in notice
    assert prepare(config, 1).notices == ()
    assert world.read("k", "k_key", "c", "note", "is_inferred") == [(-1, None, None, False), (1, "AAA", None, None)]
