import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.etl import DUPLICATE_COLUMN, Duplicates, KeyRule, mark_duplicates
from headrace.etl.errors import DeclarationError
from headrace.joins.errors import StreamSchemaError
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
        ({"key": pa.schema({"f": pa.list_(pa.int64())})}, "cannot be a key; use an integer"),
        ({"key": pa.schema([("k", pa.int64()), ("k", pa.int64())])}, "2 columns 'k'"),
        ({"key": pa.schema({"_loaded_by": pa.int64()})}, "rename the key column"),
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


FAR = pa.timestamp("s")
UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, b"b" * 16, None], pa.binary(16)))
NAN = float("nan")
IN_ORDER = {
    "far times": pa.array([-(2**62), 2**62, None], FAR),
    "lists of far times": pa.array([[-(2**62)], [2**62], None], pa.list_(FAR)),
    "structs of far times": pa.array([{"t": -(2**62)}, {"t": 2**62}, {"t": None}, None], pa.struct({"t": FAR})),
    "lists by their values": pa.array([[], [2], [2, 1], [2, None], [10], None]),
    "lists of lists": pa.array([[[1]], [[1], [0]], [[1, 0]], None]),
    "lists of fixed size": pa.array([[1, 3], [2, 0], None], pa.list_(pa.int64(), 2)),
    "maps": pa.array([[(1, 2)], [(1, 3)], [(2, 0)], None], pa.map_(pa.int64(), pa.int64())),
    "floats": pa.array([-1.5, -0.0, 0.0, 2.0, NAN, None], from_pandas=False),
    "lists of floats": pa.array([[-0.0], [0.0], [NAN], [NAN, 1.0], None]),
    "dictionaries": pa.array(["a", "b", None]).dictionary_encode(),
    "uuids": UUIDS,
    "intervals": pa.array([pa.MonthDayNano([1, 2, 3]), pa.MonthDayNano([1, 2, 4]), None]),
    "nulls": pa.nulls(1),
}


@pytest.mark.parametrize("values", IN_ORDER.values(), ids=IN_ORDER)
@pytest.mark.parametrize("order_by", [("x",), ()], ids=["declared", "by name"])
def test_the_least_row_is_kept_whatever_the_type(rng, values, order_by):
    """Each value comes twice, with the numbers 0 and 1, which decide if the values are equal."""
    duplicates = Duplicates(pa.schema({"k": pa.int64()}), order_by=order_by)
    for first in range(len(values)):
        places = np.concatenate([rng.permutation(np.arange(first, len(values)))] * 2)
        rows = pa.record_batch(
            {
                "k": pa.array([7] * len(places)),
                "x": values.take(pa.array(places)),
                "zz": pa.array(np.repeat([1, 0], len(places) // 2)),
            }
        )
        out = pa.Table.from_batches(mark_duplicates(duplicates, [rows.slice(0, 1), rows.slice(1)]))
        (kept,) = np.flatnonzero(out[DUPLICATE_COLUMN].is_null())
        assert (places[kept], out["zz"][int(kept)].as_py()) == (first, 0)


def test_dictionaries_that_do_not_fit_into_one_are_left_as_they_are():
    kind = pa.dictionary(pa.int8(), pa.string())
    texts = [[str(number) for number in range(start, start + 100)] for start in (0, 100)]
    given_batches = [pa.record_batch({"k": list(range(100)), "x": pa.array(t).cast(kind)}) for t in texts]
    out = list(mark_duplicates(Duplicates(pa.schema({"k": pa.int64()})), given_batches))
    marks = [mark for batch in out for mark in batch.column(DUPLICATE_COLUMN).to_pylist()]
    assert [text for batch in out for text in batch.column("x").to_pylist()] == texts[0] + texts[1]
    # By text, "100" comes before "2" and behind "0" and "1".
    assert [number for number, mark in enumerate(marks[:100]) if mark is None] == [
        number for number in range(100) if str(number) < str(number + 100)
    ]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (pa.string_view(), pa.string()),
        (pa.binary_view(), pa.binary()),
        (pa.dictionary(pa.int32(), pa.timestamp("s")), pa.timestamp("s")),
        (pa.struct({"s": pa.string_view()}), None),
    ],
    ids=str,
)
def test_types_that_arrow_cannot_take_rows_from_are_refused_with_what_helps(kind, remedy):
    duplicates = Duplicates(pa.schema({"k": pa.int64()}))
    schema = pa.schema({"k": pa.int64(), "x": kind})
    with pytest.raises(StreamSchemaError, match=rf"'x' has .* {re.escape(str(remedy or 'another'))}.*, or leave"):
        list(mark_duplicates(duplicates, [pa.record_batch([pa.array([1]), pa.nulls(1, kind)], schema=schema)]))
    if remedy is not None:
        rows = pa.record_batch({"k": [1, 1], "x": pa.nulls(2, kind).cast(remedy)})
        assert len(marked(duplicates, [rows])) == 2


def test_batches_of_several_schemas_are_refused_with_both():
    rows = [pa.record_batch({"k": [1]}), pa.record_batch({"k": pa.array([1], pa.int32())})]
    with pytest.raises(StreamSchemaError, match="the first had k: int64, this one has k: int32"):
        list(mark_duplicates(Duplicates(pa.schema({"k": pa.int64()})), rows))
    with pytest.raises(StreamSchemaError, match="to_batches"):
        list(mark_duplicates(Duplicates(pa.schema({"k": pa.int64()})), pa.table({"k": [1]})))


@pytest.mark.parametrize("name", ["k", "x"])
def test_a_column_that_is_there_twice_is_refused(name):
    columns = {"k": [1, 1], "x": [1, 2]}
    names = [*columns, name]
    rows = pa.RecordBatch.from_arrays([pa.array(columns[n]) for n in names], names=names)
    with pytest.raises(DeclarationError, match=f"2 columns '{name}'; rename"):
        list(mark_duplicates(Duplicates(pa.schema({"k": pa.int64()})), [rows]))


@pytest.mark.parametrize("use", [lambda d, rows: d.loaded_keys(rows, 1), lambda d, rows: d.shard_of(rows, 2)])
def test_rows_without_the_key_are_refused_wherever_they_come(use):
    with pytest.raises(DeclarationError, match="no column 'a'; it has b"):
        use(Duplicates(KEY), pa.table({"b": [1]}))


def test_one_name_is_as_good_as_a_tuple_of_one():
    duplicates = Duplicates(KEY, order_by="seen", rules={"a": KeyRule("trim")})
    assert (duplicates.order_by, duplicates.rules["a"].normalise) == (("seen",), ("trim",))
