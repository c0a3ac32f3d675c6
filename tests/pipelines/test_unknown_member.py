"""A dimension of another job gets its unknown member once, whoever else writes."""

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.etl import Dimension
from headrace.pipelines.delta.support import describe
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.dimension import unknown_member
from headrace.pipelines.dimension.unknown_member import add_unknown_member
from headrace.pipelines.errors import DeltaTableError

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
    assert "added" in add_unknown_member(DIMENSION, described(path))
    assert add_unknown_member(DIMENSION, described(path)) is None
    assert keys(path) == [-1, 1]


@pytest.mark.parametrize("other", [-1, 2])
def test_a_writer_between_the_search_and_the_commit_does_not_double_it(path, monkeypatch, other):
    search, waiting = unknown_member.has_unknown_member, [other]

    def then_another_writes(table, key):
        found = search(table, key)
        if waiting:
            write_deltalake(
                path, pa.table({"k_key": [waiting.pop()], "c": pa.array([None], pa.string())}), mode="append"
            )
        return found

    monkeypatch.setattr(unknown_member, "has_unknown_member", then_another_writes)
    add_unknown_member(DIMENSION, described(path))
    assert keys(path) == sorted({-1, 1, other})


def test_a_deleted_unknown_member_is_added_again(path):
    write_deltalake(path, pa.table({"k_key": [-1], "c": pa.array([None], pa.string())}), mode="append")
    DeltaTable(path).delete("k_key = -1")
    add_unknown_member(DIMENSION, described(path))
    assert keys(path) == [-1, 1]


def test_a_dimension_whose_key_cannot_be_null_is_refused_with_the_statement(tmp_path):
    path = str(tmp_path / "strict")
    schema = pa.schema([pa.field("k_key", pa.int64()), pa.field("c", pa.string(), nullable=False)])
    write_deltalake(path, pa.table({"k_key": [1], "c": ["a"]}, schema=schema))
    with pytest.raises(DeltaTableError, match=r"c is NOT NULL.*ALTER COLUMN `c` DROP NOT NULL"):
        add_unknown_member(DIMENSION, described(path))
    assert DeltaTable(path).version() == 0
