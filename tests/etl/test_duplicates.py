from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.etl import DUPLICATE_COLUMN, Duplicates, KeyRule, mark_duplicates
from headrace.etl.errors import DeclarationError
from headrace.storage.errors import KeyInputError

SCHEMA = pa.schema({"a": pa.string(), "b": pa.int64(), "seen": pa.int64(), "more": pa.list_(pa.int64())})
KEY = pa.schema({"a": pa.string(), "b": pa.int64()})
ROW = st.tuples(
    st.none() | st.sampled_from(["x", "X", "y"]),
    st.none() | st.integers(0, 2),
    st.none() | st.integers(0, 2),
    st.none() | st.lists(st.integers(0, 1), max_size=2),
)


def batches(rows, cuts=(), schema=SCHEMA):
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    return [
        pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows[i:j]], schema=schema)
        for i, j in pairwise(edges)
    ]


def marked(duplicates, given_batches, operator=None, **options):
    out = list(mark_duplicates(duplicates, given_batches, operator, **options))
    return [tuple(map(repr, row.values())) for batch in out for row in batch.to_pylist()]


def loaded_join(dict_join, duplicates, rows):
    table = pa.Table.from_pylist(
        [dict(zip(duplicates.table_schema.names, row, strict=True)) for row in rows], schema=duplicates.table_schema
    )
    return dict_join(table, duplicates.operator_on, duplicates.operator_columns)


@given(st.lists(ROW, max_size=30), st.randoms(use_true_random=False), st.lists(st.integers(0, 40), max_size=3))
def test_what_is_kept_depends_on_neither_order_nor_batches(rows, order, cuts):
    duplicates = Duplicates(KEY, order_by=("seen",), rules={"a": KeyRule(("casefold",))})
    first = marked(duplicates, batches(rows))
    shuffled = list(rows)
    order.shuffle(shuffled)
    assert sorted(first) == sorted(marked(duplicates, batches(shuffled, cuts)))


@given(st.lists(ROW, max_size=30), st.sets(st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 2))))
def test_one_row_of_each_key_is_kept_unless_it_was_loaded(dict_join, rows, loaded):
    duplicates = Duplicates(KEY, rules={"a": KeyRule(("casefold",))})
    join = loaded_join(dict_join, duplicates, [(*key, 1) for key in loaded])
    out = [row for batch in mark_duplicates(duplicates, batches(rows), join) for row in batch.to_pylist()]
    assert len(out) == len(rows)
    kept = [row for row in out if row[DUPLICATE_COLUMN] is None]
    nulls = [row for row in rows if row[0] is None or row[1] is None]
    keys = {(row[0].casefold(), row[1]) for row in rows if row[0] is not None and row[1] is not None}
    assert len(kept) == len(nulls) + len(keys - loaded)
    marks = {(row["a"].casefold(), row["b"]): row[DUPLICATE_COLUMN] for row in out if row[DUPLICATE_COLUMN] == "loaded"}
    assert set(marks) == keys & loaded


def test_the_first_by_order_is_kept_and_nulls_come_last():
    duplicates = Duplicates(KEY, order_by=("seen",))
    rows = [("x", 1, None, None), ("x", 1, 2, None), ("x", 1, 1, None)]
    out = [row for batch in mark_duplicates(duplicates, batches(rows)) for row in batch.to_pylist()]
    assert [row["seen"] for row in out if row[DUPLICATE_COLUMN] is None] == [1]


def test_a_batch_that_is_replayed_does_not_meet_itself(dict_join):
    duplicates = Duplicates(KEY)
    join = loaded_join(dict_join, duplicates, [("x", 1, 4), ("y", 1, 5), ("z", 1, 6)])
    rows = [("x", 1, 0, None), ("y", 1, 0, None), ("z", 1, 0, None)]
    out = mark_duplicates(duplicates, batches(rows), join, visible_before=5)
    assert {row["a"]: row[DUPLICATE_COLUMN] for batch in out for row in batch.to_pylist()} == {
        "x": "loaded",
        "y": None,
        "z": None,
    }


def test_rows_that_differ_in_a_struct_only_are_told_apart():
    schema = pa.schema({"k": pa.int64(), "s": pa.struct({"u": pa.string(), "v": pa.list_(pa.int64())})})
    rows = [(1, {"u": "b", "v": [1]}), (1, {"u": "a", "v": [2]}), (1, {"u": "a", "v": [1]}), (1, None)]
    duplicates = Duplicates(pa.schema({"k": pa.int64()}))
    results = {tuple(sorted(marked(duplicates, batches(order, schema=schema)))) for order in (rows, rows[::-1])}
    assert len(results) == 1


def test_loaded_keys_are_distinct_and_never_null():
    rows = batches([("x", 1, 0, None), ("x", 1, 1, None), (None, 1, 0, None)])[0]
    keys = Duplicates(KEY).loaded_keys(rows, 7)
    assert keys.to_pylist() == [{"a": "x", "b": 1, "_loaded_by": 7}]


def test_rows_with_one_key_share_a_shard():
    duplicates = Duplicates(KEY, rules={"a": KeyRule(("casefold",))})
    rows = batches([("x", 1, 0, None), ("X", 1, 1, None)])[0]
    assert len(set(duplicates.shard_of(rows, 64).tolist())) == 1


def test_no_input_gives_no_output():
    assert list(mark_duplicates(Duplicates(KEY), [])) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": pa.schema([])}, "no column"),
        ({"key": KEY, "action": "ignore"}, "drop, flag, route"),
        ({"key": KEY, "rules": {"c": KeyRule()}}, "no key column 'c'"),
        ({"key": KEY, "rules": {"b": KeyRule(("trim",))}}, "applies to text only"),
        ({"key": pa.schema({"f": pa.float64()})}, "cannot be a key"),
        ({"key": pa.schema({"f": pa.list_(pa.int64())})}, "cannot be a key"),
    ],
)
def test_a_wrong_declaration_says_what_is_valid(arguments, message):
    with pytest.raises(DeclarationError, match=message):
        Duplicates(**arguments)


def test_a_stream_without_the_key_or_with_the_mark_is_refused():
    with pytest.raises(DeclarationError, match="no column 'a'"):
        list(mark_duplicates(Duplicates(KEY), [pa.record_batch({"b": [1]})]))
    with pytest.raises(DeclarationError, match="already"):
        list(mark_duplicates(Duplicates(KEY), [pa.record_batch({"a": ["x"], "b": [1], DUPLICATE_COLUMN: ["y"]})]))


def test_a_key_of_another_type_is_refused():
    with pytest.raises(KeyInputError, match="'a'"):
        list(mark_duplicates(Duplicates(KEY), [pa.record_batch({"a": [1], "b": [1]})]))


def test_rows_that_differ_in_the_sign_of_zero_are_kept_whatever_their_order():
    schema = pa.schema({"a": pa.string(), "x": pa.float64()})
    duplicates = Duplicates(pa.schema({"a": pa.string()}))
    rows = [("x", -0.0), ("x", 0.0)]
    assert sorted(marked(duplicates, batches(rows, schema=schema))) == sorted(
        marked(duplicates, batches(rows[::-1], schema=schema))
    )
