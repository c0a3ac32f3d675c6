"""Special members: declared, added once whoever else writes, corrected, named by lookups, and checked."""

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.etl import DeclarationError, Dimension, SpecialMembers
from headrace.pipelines.batch.preparation import check_pipeline
from headrace.pipelines.config.column_types import arrow_schema
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.delta.support import describe
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.dimension import special_members
from headrace.pipelines.dimension.check import came_before
from headrace.pipelines.dimension.special_members import add_special_members
from headrace.pipelines.dimension.tables import check_dimension, create_dimension, describe_dimension
from headrace.pipelines.errors import DeltaTableError, PipelineFileError
from headrace.pipelines.runner import run

DIMENSION = Dimension("k", ("c",), "k_key", pa.schema({"c": pa.string()}), inferred_flag=None)


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "k")
    write_deltalake(path, pa.table({"k_key": [1], "c": ["a"]}))
    return path


def described(path):
    return describe(open_table(path), path)


def keys(path):
    return sorted(DeltaTable(path).to_pyarrow_table().column("k_key").to_pylist())


def test_it_is_added_once(path):
    (notice,) = add_special_members(DIMENSION, described(path))
    assert "had no unknown member; the member -1 was added" in notice
    assert add_special_members(DIMENSION, described(path)) == []
    assert keys(path) == [-1, 1]


@pytest.mark.parametrize("other", [-1, 2])
def test_a_writer_between_the_search_and_the_commit_does_not_double_it(path, monkeypatch, other):
    search, waiting = special_members.special_rows, [other]

    def then_another_writes(table, dimension):
        found = search(table, dimension)
        if waiting:
            write_deltalake(
                path, pa.table({"k_key": [waiting.pop()], "c": pa.array([None], pa.string())}), mode="append"
            )
        return found

    monkeypatch.setattr(special_members, "special_rows", then_another_writes)
    add_special_members(DIMENSION, described(path))
    assert keys(path) == sorted({-1, 1, other})


def test_a_deleted_unknown_member_is_added_again(path):
    write_deltalake(path, pa.table({"k_key": [-1], "c": pa.array([None], pa.string())}), mode="append")
    DeltaTable(path).delete("k_key = -1")
    add_special_members(DIMENSION, described(path))
    assert keys(path) == [-1, 1]


def test_a_dimension_whose_key_cannot_be_null_is_refused_with_the_statement(tmp_path):
    path = str(tmp_path / "strict")
    schema = pa.schema([pa.field("k_key", pa.int64()), pa.field("c", pa.string(), nullable=False)])
    write_deltalake(path, pa.table({"k_key": [1], "c": ["a"]}, schema=schema))
    with pytest.raises(DeltaTableError, match=r"c is NOT NULL.*ALTER COLUMN `c` DROP NOT NULL"):
        add_special_members(DIMENSION, described(path))
    assert DeltaTable(path).version() == 0


WITH_TEXTS = Dimension(
    "k", ("c",), "k_key", pa.schema({"c": pa.string(), "city": pa.string(), "since": pa.date32()}), inferred_flag=None,
    special=SpecialMembers(
        {"city": "O'Hara \\", "since": dt.date(1, 1, 1)}, {}, {"city": "invalid", "since": dt.date(2024, 2, 29)}
    ),
)  # fmt: skip


def test_declared_members_are_added_with_their_texts_and_corrected_later(tmp_path):
    path = str(tmp_path / "k")
    rows = pa.table({"k_key": [1, -1], "c": ["a", None], "city": ["Rome", "old"], "since": pa.nulls(2, pa.date32())})
    write_deltalake(path, rows, configuration={"delta.enableChangeDataFeed": "true"})
    notices = add_special_members(WITH_TEXTS, described(path))
    assert [notice.partition(";")[0] for notice in notices[:2]] == [
        "dimension 'k' had no not applicable member", "dimension 'k' had no invalid member"
    ]  # fmt: skip
    assert "the unknown member -1 of" in notices[2]
    found = {
        row["k_key"]: (row["c"], row["city"], row["since"]) for row in DeltaTable(path).to_pyarrow_table().to_pylist()
    }
    assert found == {
        1: ("a", "Rome", None), -1: (None, "O'Hara \\", dt.date(1, 1, 1)), -2: (None, None, None),
        -3: (None, "invalid", dt.date(2024, 2, 29)),
    }  # fmt: skip
    assert add_special_members(WITH_TEXTS, described(path)) == []


def test_a_file_that_is_older_than_a_column_is_read(tmp_path):
    path = str(tmp_path / "k")
    write_deltalake(path, pa.table({"k_key": [1, -1], "c": ["a", None]}))
    new = pa.table({"k_key": [2], "c": ["b"], "city": ["Rome"], "since": pa.nulls(1, pa.date32())})
    write_deltalake(path, new, mode="append", schema_mode="merge")
    add_special_members(WITH_TEXTS, described(path))
    assert keys(path) == [-3, -2, -1, 1, 2]
    assert add_special_members(WITH_TEXTS, described(path)) == []


def test_a_member_with_nan_is_not_corrected_again(tmp_path):
    path = str(tmp_path / "k")
    dimension = Dimension(
        "k", ("c",), "k_key", pa.schema({"c": pa.string(), "share": pa.float64()}), inferred_flag=None,
        special=SpecialMembers(unknown={"share": float("nan")}),
    )  # fmt: skip
    write_deltalake(path, pa.table({"k_key": [1], "c": ["a"], "share": [0.5]}))
    assert len(add_special_members(dimension, described(path))) == 1
    assert add_special_members(dimension, described(path)) == []


DOCUMENT = {
    "name": "p",
    "source": {"format": "csv", "path": "in", "schema": {"id": "int", "code": "bigint", "other": "string"}},
    "dimensions": {
        "k": {
            "path": "w/k", "natural_key": ["c"], "columns": {
                "c": "int", "city": "string", "size": "decimal(4,1)", "days": "int", "since": "date", "share": "float"
            },
            "special": {"not_applicable": {"city": "none"}, "unknown": {"city": "unknown", "size": 1.5}, "invalid": {}},
        },
        "t": {"path": "w/t", "natural_key": ["c"], "columns": {"c": "string", "note": "string"},
              "special": {"invalid": {"note": "bad"}}},
    },
    "lookups": [
        {"dimension": "k", "role": "a", "on": {"code": "c"}, "policy": "infer", "carry": ["city", "size"],
         "null_key": "not_applicable", "unfit_key": "invalid"},
        {"dimension": "t", "role": "b", "on": {"other": "c"}, "policy": "unknown", "carry": ["note"],
         "null_key": "reject"},
    ],
    "sink": {"path": "w/facts"},
}  # fmt: skip


@pytest.fixture
def project(tmp_path):
    (tmp_path / "in").mkdir()
    return write(tmp_path, DOCUMENT)


def write(folder, document):
    (folder / "p.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


def rows_of(path):
    return DeltaTable(str(path)).to_pyarrow_table().to_pylist()


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_lookups_send_facts_to_the_members_that_they_name(project):
    text = "id,code,other\n1,,x\n2,7,x\n3,3000000000,x\n4,8,\n5,7,y\n"
    (project / "in/1.csv").write_text(text)
    run(project / "p.yml")
    write_deltalake(str(project / "w/t"), row_of_t(project, "x", 5), mode="append")
    (project / "in/2.csv").write_text("id,code,other\n6,,x\n7,8,y\n")
    run(project / "p.yml")
    sizes = {-1: Decimal("1.5")}
    cities = {-2: "none", -3: None}
    members = {row["c"]: row["k_key"] for row in rows_of(project / "w/k") if row["k_key"] > 0}
    assert sorted(members) == [7, 8]
    found = {row["id"]: (row["a_key"], row["a_city"], row["a_size"], row["b_key"], row["b_note"])
             for row in rows_of(project / "w/facts")}  # fmt: skip
    assert found == {
        identity: (key, cities.get(key), sizes.get(key), other, None)
        for identity, key, other in [
            (1, -2, -1), (2, members[7], -1), (3, -3, -1), (5, members[7], -1), (6, -2, 5), (7, members[8], -1),
        ]
    }  # fmt: skip
    (rejected,) = rows_of(project / "w/facts_errors")
    assert rejected["reason"] == "b: other = null: the key is null"
    assert sorted(row["k_key"] for row in rows_of(project / "w/k"))[:3] == [-3, -2, -1]
    config = load_pipeline(project / "p.yml")
    assert check_dimension(config, "k") == []
    (finding,) = check_dimension(config, "t")  # the member x came after three facts
    assert (finding.rule, finding.rows, finding.examples, finding.allowed) == (came_before("b"), 3, ("x",), True)
    assert describe_dimension(config, "k").members == 2


def row_of_t(project, code, key):
    table = DeltaTable(str(project / "w/t"))
    return pa.Table.from_pylist([{"t_key": key, "c": code, "is_inferred": False}], pa.schema(table.schema().to_arrow()))


def test_the_check_finds_missing_and_altered_members_and_facts_that_are_sent_wrongly(project):
    config = load_pipeline(project / "p.yml")
    columns = pa.schema(arrow_schema(config.dimensions["k"].columns))
    rows = pa.Table.from_pylist([{"c": 7, "city": "Rome"}], columns)
    create_dimension(config, "k", rows)
    facts = {"id": [1, 2, 3], "code": [7, None, 7], "a_key": [-2, -2, 1]}
    write_deltalake(str(project / "w/facts"), pa.table(facts))
    (finding,) = check_dimension(config, "k")
    assert (finding.rule, finding.rows) == ("facts of role a carry the number of the member with their natural key", 1)
    table = DeltaTable(str(project / "w/k"))
    table.delete("k_key = -3")
    table.update(updates={"city": "'?'"}, predicate="k_key = -1")
    found = {finding.rule: finding.examples for finding in check_dimension(config, "k")}
    assert found["there is one invalid member"] == ("member -3",)
    assert found["special members have the declared values"] == ("member -1: city is '?', and is declared 'unknown'",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("dimensions", "t", "special", {"unknown": {"nte": "x"}}),
            r"no attribute 'nte' for its member 'unknown'; it has note",
        ),
        (("dimensions", "t", "special", None), r"special"),
        (
            ("dimensions", "k", "special", {"not_applicable": {}, "invalid": {"size": "much"}}),
            r"size: 'much' is no value",
        ),
        (
            ("dimensions", "k", "special", {"not_applicable": {}, "invalid": {"size": True}}),
            r"size: True is no value",
        ),
        (
            ("dimensions", "k", "special", {"not_applicable": {}, "invalid": {"days": 1.5}}),
            r"days: 1.5 is no value of type int32 \(.*write one that the column can hold",
        ),
        (
            ("dimensions", "k", "special", {"not_applicable": {}, "invalid": {"since": 5}}),
            r"since: 5 is no value of type date32\[day\]",
        ),
        (
            ("dimensions", "k", "special", {"not_applicable": {}, "invalid": {"share": "1e300"}}),
            r"share: '1e300' is no value of type float \(it is beyond",
        ),
        (("dimensions", "k", "special", {}), r"not_applicable', which dimension 'k' does not declare; add `special"),
    ],
)
def test_a_declaration_that_cannot_be_met_is_refused_before_anything_is_written(project, change, message):
    document = json.loads(json.dumps(DOCUMENT))
    room, name, field, value = change
    document[room][name][field] = value
    write(project, document)
    with pytest.raises((PipelineFileError, DeclarationError), match=message):
        check_pipeline(load_pipeline(project / "p.yml"), 1)
    assert not (project / "w").exists()
