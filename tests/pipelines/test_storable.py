"""Rows that a table cannot hold are found with their reasons; CHECK constraints mean here what they mean to Spark."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from headrace.pipelines.batch import preparation, storable
from headrace.pipelines.batch.storable import ColumnRule, ConstraintRule, KeyLimit, StorableStep, unstorable
from headrace.pipelines.delta.constraints import broken, constraint_columns, unsupported_part
from headrace.pipelines.delta.tables import DeltaHandle, create_table, remember_greatest_key
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.spark.frame import STATE, State, source_schema

SCHEMA = pa.schema({"n": pa.int32(), "x": pa.float64(), "d": pa.decimal128(10, 2), "s": pa.string(), "b": pa.bool_()})
EXPRESSIONS = (
    "n > 0", "n BETWEEN -2 AND 2 OR x IS NULL", "s IN ('a', 'b''c')", "s NOT IN ('a')", "NOT b", "b = true AND n <> 3",
    "x >= 0.5", "d < 1.10", "`s` IS NOT NULL", "N <= x", "s > 'a'", "s = 'ä'", "n != 2", "d = n",
)  # fmt: skip


def some_rows(rng, count):
    def pick(*values):
        return values[int(rng.integers(len(values)))]

    choices = {
        "n": [None, -3, 0, 1, 2, 3], "x": [None, -0.0, 0.5, 2.0, float("nan")], "d": [None, "1.00", "1.10"],
        "s": [None, "", "a", "b'c", "A", "ä"], "b": [None, True, False],
    }  # fmt: skip
    rows = [{name: pick(*values) for name, values in choices.items()} for _ in range(count)]
    return pa.table(
        [pa.array([row[name] for row in rows]).cast(SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA
    )


@pytest.mark.spark
def test_constraints_mean_what_spark_says(spark, rng):
    rows = some_rows(rng, 300).append_column("at", pa.array(range(300)))
    frame = spark.createDataFrame(rows)
    for expression in EXPRESSIONS:
        assert unsupported_part(expression, SCHEMA) is None, expression
        kept = {row["at"] for row in frame.where(expression).select("at").collect()}
        found = broken(expression, rows)
        assert {at for at in range(300) if not found[at]} == kept, expression


@pytest.mark.parametrize(
    "expression",
    ["hash(s) > 0", "length(s) < 3", "n + 1 > 0", "s > 5", 's = "a"', "other > 1", "s LIKE 'a%'", "n > (SELECT 1)", "n",
     "s = 'a\\tb'", "n >"],
)  # fmt: skip
def test_constraints_that_may_mean_something_else_are_not_supported(expression):
    assert unsupported_part(expression, SCHEMA) is not None


def test_the_columns_of_a_constraint_are_those_of_the_table():
    assert constraint_columns("N > 0 AND (s = 'x' OR n < 3)", SCHEMA) == ("n", "s")


def test_each_broken_rule_is_a_cause():
    batch = pa.record_batch({"c": ["ok", "", None, "long one"], "v": pa.array([1, -1, 2, None], pa.int32())})
    rules = (
        ColumnRule("the fact table", "c", required=True, partition=True, characters=5),
        ConstraintRule("the fact table", "positive", "v > 0", ("v",)),
    )
    mask, causes = unstorable(batch, rules)
    assert mask.tolist() == [False, True, True, True]
    assert [[(cause["column"], cause["value"]) for cause in row] for row in causes.to_pylist()] == [
        [], [("c", ""), ("v", "-1")], [("c", None)], [("c", "long one"), ("v", None)],
    ]  # fmt: skip


EMPTIES = pa.record_batch({"n": [1, 2], "t": ["a", ""], "x": [b"", b"a"]})


def test_partition_columns_of_text_and_bytes_cannot_be_empty():
    use = SimpleNamespace(label="the fact table", never_null=frozenset())
    rules = list(preparation._table_rules(use, EMPTIES.schema, None, tuple(EMPTIES.schema.names)))
    _, causes = unstorable(EMPTIES, rules)
    assert [[cause["column"] for cause in row] for row in causes.to_pylist()] == [["x"], ["t"]]


def test_a_dimension_may_be_partitioned_by_keys_of_any_type():
    names = tuple(EMPTIES.schema.names)
    dimension = SimpleNamespace(name="k", natural_key=names, key_schema=EMPTIES.schema, rules={})
    lookup = SimpleNamespace(dimension=dimension, stream_columns=names)
    prepared = SimpleNamespace(lookups={"k": lookup}, infers=lambda _role: True, duplicates=None)
    table = SimpleNamespace(partition_columns=names, text_limits=dict)
    mask, causes = unstorable(EMPTIES, preparation._key_limits(prepared, {"k": SimpleNamespace(table=table)}))
    assert mask.all()
    assert all("is a key that is empty" in row[0]["reason"] for row in causes.to_pylist())


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
@pytest.mark.parametrize("column", ["leg", "é:"])
def test_values_of_partition_columns_name_folders(kind, column):
    room = 255 - len(b"leg=") if column == "leg" else 255 - len("é%3A=".encode())
    good = ["a", None, "q" * room, "é" * (room // 2), "%" * (room // 3), ".", "a/b", " ", "\x01", "🎉" * (room // 4)]
    bad = {
        "": "is empty", "a\0b": "is text with U+0000", "__HIVE_DEFAULT_PARTITION__": "is Spark's name for null",
        "q" * (room + 1): "is too long", "é" * (room // 2 + 1): "is too long", "🎉" * (room // 4 + 1): "is too long",
        **{mark * (room // 3 + 1): "is too long" for mark in "\x01\n\x1f\"#%'*/:=?[\\]^{\x7f"},
    }  # fmt: skip
    batch = pa.record_batch({column: pa.array([*good, *bad], pa.string()).cast(kind)})
    _, causes = unstorable(batch, [ColumnRule("the fact table", column, partition=True)])
    found = [[cause["reason"] for cause in row] for row in causes.to_pylist()]
    assert found[: len(good)] == [[]] * len(good)
    for reasons, begin in zip(found[len(good) :], bad.values(), strict=True):
        assert [reason.startswith(begin) for reason in reasons] == [True]


@pytest.mark.spark
def test_folders_of_partitions_are_escaped_as_spark_does(spark):
    escaped = spark._jvm.org.apache.spark.sql.catalyst.catalog.ExternalCatalogUtils.escapePathName
    texts = [chr(code) for code in range(1, 0x180)]
    counted = pc.count_substring_regex(pa.array(texts), storable._ESCAPED).to_pylist()
    assert [len(escaped(text)) for text in texts] == [1 + 2 * count for count in counted]


@pytest.mark.parametrize("key", [["c"], ["c", "e"]])
def test_keys_are_limited_by_the_bytes_that_a_replica_holds(key):
    limit = KeyLimit("k", tuple(key), pa.schema([(name, pa.string()) for name in key]))
    own = 16_384 if len(key) == 1 else 16_384 - 3  # two bytes end a text that is not the last, one is the other key
    batch = pa.record_batch({"c": ["q" * own, "q" * (own + 1), None, "\0" * own], "e": ["x"] * 4})
    mask, _ = unstorable(batch, [limit])
    assert mask.tolist() == [False, True, False, len(key) == 2]


def test_a_key_that_is_too_long_is_shown_by_its_beginning():
    limit = KeyLimit("k", ("c",), pa.schema({"c": pa.string()}))
    _, causes = unstorable(pa.record_batch({"c": ["q" * 300_000, "x"]}), [limit])
    ((cause,), ()) = causes.to_pylist()
    assert cause["value"] == "q" * 1000 + "… (300,000 characters)"


def test_only_open_rows_are_set_aside():
    stream = pa.schema({"c": pa.string()})
    rows = pa.table({"c": ["", "", "x"], STATE: pa.array([State.OPEN, State.DUPLICATE, State.OPEN], pa.int8())})
    whole = pa.Table.from_pylist(rows.to_pylist(), schema=source_schema(stream))
    step = StorableStep((ColumnRule("the fact table", "c", partition=True),))
    found = pa.Table.from_batches(step.run(whole.to_batches(), None))
    assert found.column(STATE).to_pylist() == [State.MALFORMED, State.DUPLICATE, State.OPEN]
    assert [row is not None for row in found.column("_malformed").to_pylist()] == [True, False, False]


def test_the_greatest_key_is_remembered_when_its_member_is_deleted(tmp_path):
    path = str(tmp_path / "k")
    rows = pa.table({"k_key": [1, 2, 9]})
    create_table(path, rows.schema, rows=rows)
    handle = DeltaHandle(path)
    assert handle.greatest_key("k_key") == 9
    remember_greatest_key(path, 9)
    DeltaTable(path).delete("k_key = 9")
    handle.latest()
    assert handle.greatest_key("k_key") == 9
    DeltaTable(path).alter.set_table_properties({"headrace.greatestKey": "nine"}, raise_if_not_exists=False)
    handle.latest()
    with pytest.raises(DeltaTableError, match=r"at version 3 has the property headrace\.greatestKey = 'nine'"):
        handle.greatest_key("k_key")
