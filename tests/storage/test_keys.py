import decimal

import numpy as np
import pyarrow as pa
import pytest
from arrow_strategies import KEY_TYPES, arrays, rows_of, tables, values_in
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage.errors import KeyInputError, SchemaError
from headrace.storage.format.keys import KeyCodec, Keys


def key_bytes(keys):
    return [keys.comparable(row) for row in range(len(keys))]


@st.composite
def encoded(draw, max_rows=30):
    table, key = draw(tables(max_rows=max_rows, max_payload=0))
    codec = KeyCodec(table.schema, key)
    return table.select(key), codec, codec.encode(table)


@given(encoded())
def test_decoding_gives_the_columns_back(case):
    table, codec, keys = case
    assert list(map(values_in, codec.decode(keys))) == list(map(values_in, table.columns))


@given(encoded())
def test_keys_order_as_the_rows_do(case):
    table, codec, keys = case
    ordered = table.take(pa.array(keys.argsort()))
    assert ordered.equals(table.sort_by([(name, "ascending") for name in codec.columns]))


@given(encoded())
def test_byte_order_is_key_order(case):
    _, _, keys = case
    assert key_bytes(keys.take(keys.argsort())) == sorted(key_bytes(keys))


@given(encoded())
def test_keys_are_equal_only_if_the_rows_are(case):
    table, _, keys = case
    assert len(set(key_bytes(keys))) == len(set(rows_of(table)))


@given(encoded(), st.data())
def test_slices_and_concatenations_keep_the_keys(case, data):
    _, codec, keys = case
    cut = data.draw(st.integers(0, len(keys)))
    joined = Keys.concat([keys.slice(cut, len(keys)), Keys.empty(codec.kind), keys.slice(0, cut)])
    assert key_bytes(joined) == key_bytes(keys)[cut:] + key_bytes(keys)[:cut]


@given(encoded())
def test_order_and_equality_of_neighbours_are_found(case):
    _, _, keys = case
    raw = key_bytes(keys)
    falls = [row for row in range(1, len(raw)) if raw[row] < raw[row - 1]]
    assert keys.first_descent() == (falls[0] if falls else -1)
    assert keys.same_as_next().tolist() == [raw[row] == raw[row + 1] for row in range(len(raw) - 1)]


@given(encoded())
def test_the_prefix_is_the_first_eight_bytes(case):
    _, _, keys = case
    expected = [int.from_bytes(raw[:8].ljust(8, b"\0"), "big") for raw in key_bytes(keys)]
    assert keys.prefix.tolist() == expected


@pytest.mark.parametrize(
    ("types", "kind"),
    [
        ([pa.int64()], "u64"),
        ([pa.int32(), pa.uint16(), pa.bool_(), pa.int8()], "u64"),
        ([pa.date32(), pa.time32("s")], "u64"),
        ([pa.decimal128(18, 3)], "u64"),
        ([pa.decimal128(19, 3)], "bytes"),
        ([pa.int64(), pa.bool_()], "bytes"),
        ([pa.string()], "bytes"),
    ],
)
def test_keys_of_at_most_eight_bytes_are_integers(types, kind):
    schema = pa.schema([(f"c{n}", dtype) for n, dtype in enumerate(types)])
    assert KeyCodec(schema, schema.names).kind == kind


def test_composite_text_never_collides_by_concatenation():
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    left = pa.array(["ab", "a", "a\0", "a", ""])
    right = pa.array(["c", "bc", "b", "\0b", "abc"])
    keys = KeyCodec(schema, ("a", "b")).encode([left, right])
    assert len(set(key_bytes(keys))) == 5


def test_a_null_key_is_refused_with_column_and_row():
    codec = KeyCodec(pa.schema([("a", pa.int32()), ("b", pa.string())]), ("a", "b"))
    with pytest.raises(KeyInputError, match=r"'b' is null.*row 1"):
        codec.encode([pa.array([1, 2], pa.int32()), pa.array(["x", None])])


def test_a_value_out_of_range_is_refused_when_stored():
    codec = KeyCodec(pa.schema([("a", pa.int8())]), ("a",))
    with pytest.raises(KeyInputError, match=r"'a' is 300, which int8 cannot hold \(row 1\)"):
        codec.encode([pa.array([1, 300])])


def test_stream_keys_that_cannot_match_are_flagged():
    codec = KeyCodec(pa.schema([("a", pa.int8()), ("b", pa.string())]), ("a", "b"))
    _, valid = codec.encode_stream([pa.array([1, 300, 2]), pa.array(["x", "y", None])])
    assert valid.tolist() == [True, False, False]


def test_stream_keys_that_all_can_match_carry_no_flags():
    codec = KeyCodec(pa.schema([("a", pa.int8())]), ("a",))
    keys, valid = codec.encode_stream(pa.record_batch({"z": ["q"], "a": pa.array([5], pa.int64())}))
    assert valid is None
    assert codec.decode(keys)[0].to_pylist() == [5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), "one or more different columns"),
        (("a", "a"), "one or more different columns"),
        (("z",), "no column 'z' for the key; the columns are 'a', 'f'"),
        (("f",), "'f' has type double, which cannot be a key"),
    ],
)
def test_unusable_key_columns_are_named(columns, message):
    with pytest.raises(SchemaError, match=message):
        KeyCodec(pa.schema([("a", pa.int8()), ("f", pa.float64())]), columns)


def test_a_missing_key_column_in_a_batch_is_named():
    codec = KeyCodec(pa.schema([("a", pa.int8())]), ("a",))
    with pytest.raises(SchemaError, match="key column 'a' is missing; the columns are 'b'"):
        codec.encode(pa.record_batch({"b": [1]}))


@pytest.mark.parametrize("dtype", KEY_TYPES, ids=str)
@settings(max_examples=10)
@given(st.data())
def test_keys_of_sliced_arrays_are_those_of_the_slice(dtype, data):
    array = data.draw(arrays(dtype, 12, nulls=False))
    codec = KeyCodec(pa.schema([("k", dtype)]), ("k",))
    assert key_bytes(codec.encode([array.slice(5, 4)])) == key_bytes(codec.encode([array]))[5:9]


def test_a_key_is_described_as_people_read_it():
    codec = KeyCodec(pa.schema([("a", pa.decimal128(5, 2)), ("b", pa.string())]), ("a", "b"))
    keys = codec.encode([pa.array([decimal.Decimal("1.50")], pa.decimal128(5, 2)), pa.array(["x" * 100])])
    assert codec.describe(keys, 0) == f"a=1.50, b={'x' * 60}..."


def test_size_counts_only_the_bytes_in_use():
    keys = KeyCodec(pa.schema([("a", pa.string())]), ("a",)).encode([pa.array(["abc", "de", "f"])])
    assert keys.slice(1, 3).nbytes == 2 * 8 + 3 * 8 + 3
    assert Keys("u64", np.zeros(3, dtype=np.uint64)).nbytes == 24


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9) | st.integers(2**63, 2**63 + 9), max_size=200),
)
def test_the_order_of_integers_is_stable(values):
    keys = Keys("u64", np.array(values, dtype=np.uint64))
    assert keys.argsort().tolist() == sorted(range(len(values)), key=values.__getitem__)


@given(st.lists(st.binary(max_size=3).map(lambda tail: b"the same head" + tail) | st.binary(max_size=9), max_size=60))
def test_the_order_of_bytes_is_stable(values):
    keys = KeyCodec(pa.schema([("k", pa.binary())]), ("k",)).encode([pa.array(values, pa.binary())])
    assert keys.argsort().tolist() == sorted(range(len(values)), key=values.__getitem__)


@given(st.lists(st.integers(0, 5), max_size=40))
def test_a_strict_order_stops_at_equal_neighbours(values):
    keys = Keys("u64", np.array(values, dtype=np.uint64))
    faults = [row for row in range(1, len(values)) if values[row] <= values[row - 1]]
    assert keys.first_descent(strictly=True) == (faults[0] if faults else -1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(pa.array([-62_167_305_600_000], pa.date64()), "-12-3"), (pa.array([2**62], pa.timestamp("us")), str(2**62))],
)
def test_a_time_that_python_does_not_know_is_described(value, shown):
    codec = KeyCodec(pa.schema([("k", value.type)]), ("k",))
    assert shown in codec.describe(codec.encode([value]), 0)
