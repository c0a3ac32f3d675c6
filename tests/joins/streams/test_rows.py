"""Tuples keep every value of every type, and key words keep the order of values."""

import decimal

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.errors import StreamSchemaError
from headrace.joins.streams import JoinGraph
from headrace.joins.streams.tuples import _index_kernels as index_kernels
from headrace.joins.streams.tuples.layout import NEVER, RowLayout
from headrace.joins.streams.tuples.results import ResultBuilder, result_schema
from headrace.joins.streams.tuples.rows import Rows, RowsEncoder

TYPES = {
    "bool": (pa.bool_(), [True, None, False]),
    "int8": (pa.int8(), [-1, None, 7]),
    "uint16": (pa.uint16(), [1, None, 65535]),
    "half": (pa.float16(), np.array([1.5, -2.0, 0.25], np.float16)),
    "float": (pa.float32(), [1.5, None, -0.0]),
    "decimal32": (pa.decimal32(9, 2), [decimal.Decimal("1.50"), None, decimal.Decimal("-7.25")]),
    "decimal": (pa.decimal128(30, 2), [decimal.Decimal("1.50"), None, decimal.Decimal(-2)]),
    "decimal256": (pa.decimal256(60, 2), [decimal.Decimal("1.50"), None, decimal.Decimal(-2)]),
    "date": (pa.date32(), [1, None, -1]),
    "time": (pa.time64("us"), [1, None, 2]),
    "timestamp": (pa.timestamp("ns", "UTC"), [1, None, -5]),
    "duration": (pa.duration("s"), [1, None, -5]),
    "text": (pa.string(), ["a", None, "longer than a word"]),
    "large": (pa.large_string(), ["", None, "ß"]),
    "binary": (pa.binary(), [b"\0", None, b""]),
    "large binary": (pa.large_binary(), [b"x", None, b""]),
    "fixed binary": (pa.binary(3), [b"abc", None, b"xyz"]),
    "null": (pa.null(), [None, None, None]),
}


def batch_of(names):
    return pa.record_batch({"k": [3, 1, 2], **{name: pa.array(TYPES[name][1], TYPES[name][0]) for name in names}})


def encoder_of(schema):
    graph = JoinGraph({"a": schema, "b": schema}, "k")
    return RowsEncoder(RowLayout.of(schema, [key.wide for key in graph.keys[0]], "a"), graph.keys[0])


@pytest.mark.parametrize("names", [[name] for name in TYPES] + [list(TYPES), list(TYPES)[::-1]])
def test_every_value_of_every_type_is_kept(names):
    data = batch_of(names)
    encoder = encoder_of(data.schema)
    for part in (data, data.slice(1), data.slice(1, 1), data.slice(0, 0)):
        rows, _ = encoder.encode(part)
        assert rows.batch().equals(part)
        backward = np.arange(len(part))[::-1].copy()
        assert rows.take(backward).batch().equals(part.take(pa.array(backward)))


def test_a_position_of_minus_one_is_a_row_of_nulls():
    data = batch_of(TYPES)
    rows, _ = encoder_of(data.schema).encode(data)
    builder = ResultBuilder(data.schema, [rows.layout], 1 << 20)
    (result,) = builder.batches([(rows, np.array([-1, 2, -1]))])
    assert result.to_pylist() == [
        dict.fromkeys(data.schema.names),
        data.to_pylist()[2],
        dict.fromkeys(data.schema.names),
    ]


def test_result_batches_are_no_larger_than_asked_for():
    data = pa.record_batch({"k": [1, 2], "t": ["x" * 10, "y" * 5000]})
    rows, _ = encoder_of(data.schema).encode(data)
    builder = ResultBuilder(data.schema, [rows.layout], 20_000)
    index = np.array([0, 1] * 100)
    batches = list(builder.batches([(rows, index)]))
    assert pa.Table.from_batches(batches) == pa.Table.from_batches([data.take(pa.array(index))]).combine_chunks()
    assert max(batch.nbytes for batch in batches) <= 20_000


@pytest.mark.parametrize("dtype", [pa.list_(pa.int8()), pa.struct([("a", pa.int8())]), pa.string_view()])
def test_nested_types_are_refused_with_the_name_of_the_column(dtype):
    schema = pa.schema([("k", pa.int64()), ("odd", dtype)])
    with pytest.raises(StreamSchemaError, match="column 'odd' of 'a'"):
        encoder_of(schema)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (pa.int64(), [-(2**63), -1, 0, 1, 2**63 - 1]),
        (pa.uint64(), [0, 1, 2**64 - 1]),
        (pa.float64(), [-np.inf, -1e300, -1.0, -1e-300, 0.0, 1e-300, 1.0, np.inf]),
        (pa.float32(), [-1.5, -0.5, 0.0, 0.5]),
        (pa.string(), ["", "a", "ab", "b", "ß"]),
        (pa.timestamp("ms"), [-5, 0, 5]),
    ],
)
def test_key_words_are_in_the_order_of_the_values(dtype, values):
    data = pa.record_batch({"k": pa.array(values, dtype)})
    rows, valid = encoder_of(data.schema).encode(data)
    words = rows.key_words(0).tolist()
    assert valid is None
    assert words == sorted(set(words))


def test_zeros_are_one_key_and_what_is_not_a_number_is_none():
    data = pa.record_batch({"k": [0.0, -0.0, np.nan, None]})
    rows, valid = encoder_of(data.schema).encode(data)
    assert valid.tolist() == [True, True, False, False]
    assert rows.key_words(0)[0] == rows.key_words(0)[1]


def test_names_that_are_taken_are_told_apart():
    one, two = pa.schema([("k", pa.int8()), ("k_right", pa.int8())]), pa.schema([("k", pa.int8())])
    assert result_schema(["a", "b"], [one, two], [False, True]).names == ["k", "k_right", "k_right_right"]
    assert result_schema(["a", "b"], [one, two], [False, True]).field(2).nullable
    assert result_schema(["a", "b", "c"], [two, two, pa.schema([("b_k", pa.int8())])], [False] * 3).names == [
        "k",
        "b_k",
        "c_b_k",
    ]


@pytest.mark.parametrize("count", [0, 1, 100])
def test_tuples_are_divided_by_their_partitions(rng, count):
    layout = RowLayout.of(pa.schema([("x", pa.int64())]), [False], "a")
    records = rng.integers(0, 256, count * layout.stride + 8).astype(np.uint8)
    keyed = Rows(layout, count, records, np.zeros(0, np.uint8)).keyed(0)
    wanted, numbers, counts = rng.random(8) < 0.5, np.empty(count, np.int64), np.full(8, 5)
    partitions, index = np.empty(count, np.int64), np.empty(count, np.int64)
    index_kernels.partitions_of(keyed, 0, count, 3, partitions)
    found = index_kernels.divide(keyed, count, 3, wanted, index, numbers, counts)
    inside = wanted[partitions]
    assert index[:found].tolist() == np.flatnonzero(inside).tolist()
    assert index[found:][::-1].tolist() == np.flatnonzero(~inside).tolist()
    assert numbers[:found].tolist() == partitions[inside].tolist()
    assert counts.tolist() == (5 + np.bincount(partitions[inside], minlength=8)).tolist()


def test_memory_of_earlier_tuples_does_not_show_in_later_ones(rng):
    schema = pa.schema([("x", pa.int64()), ("f", pa.bool_()), ("n", pa.int16())])
    batch = pa.record_batch([[1, None, 3], [True, None, False], [None, 7, -7]], schema=schema)
    layout = RowLayout.of(schema, [], "a")
    encoder = RowsEncoder(layout, [])
    scratch = rng.integers(0, 256, 3 * layout.stride + 500).astype(np.uint8)
    fresh, used = encoder.encode(batch)[0], encoder.encode(batch, scratch)[0]
    nbytes = 3 * layout.stride
    assert used.records[:nbytes].tobytes() == fresh.records[:nbytes].tobytes()
    assert used.batch().equals(batch)
    assert np.shares_memory(used.records, scratch)
    assert fresh.departures.tolist() == [NEVER] * 3


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (pa.string_view(), "string,"),
        (pa.binary_view(), "binary,"),
        (pa.dictionary(pa.int32(), pa.int8()), "int8,"),
        (pa.list_(pa.int8()), "a number, a time, string, or binary,"),
    ],
    ids=str,
)
def test_a_type_that_cannot_be_held_is_refused_with_the_type_that_can(kind, remedy):
    with pytest.raises(StreamSchemaError, match=f"'v' of 'a' has type .* cast it to {remedy} or leave it out"):
        RowLayout.of(pa.schema([("v", kind)]), [], "a")
