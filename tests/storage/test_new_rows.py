"""Upserts that are read straight from their buffers are what the general way makes of them."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from headrace.storage.changes import prepare
from headrace.storage.columns import stored_schema
from headrace.storage.layout import LeafLayout
from headrace.storage.new_rows import NewRows, WordColumns

VALUES = {
    "a": pa.array([-3, -3, 0, 7], pa.int16()),
    "b": pa.array([0, 2**32 - 1, 5, 5], pa.uint32()),
    "f": pa.array([0.5, -1.0, float("inf"), 0.0], pa.float32()),
    "u": pa.array([0, 2**64 - 1, 1, 2**63], pa.uint64()),
    "i": pa.array([-1, 127, -128, 0], pa.int8()),
    "d": pa.array([dt.date(2013, 1, day) for day in (1, 2, 3, 4)]),
    "t": pa.array([0, -1, 2**62, 5], pa.timestamp("us")),
}
BATCH = pa.record_batch(VALUES)


def layout_of(batch, key):
    return LeafLayout(stored_schema(batch.schema, key), key, 4096)


@pytest.mark.parametrize("key", [["a", "b"], ["t"], ["u"], ["i"]])
@pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 2), slice(2, 4)])
def test_both_ways_give_the_same(key, rows):
    layout = layout_of(BATCH, key)
    batch = BATCH.take(pa.array(np.argsort(layout.codec.encode(BATCH).prefix)))
    batch = batch.slice(rows.start, rows.stop - rows.start)
    read, general = WordColumns.of(layout).read(batch), NewRows.of(layout, prepare(layout, upserts=batch))
    for name in ("touched", "upserted", "keys", "fresh", "words", "spans", "heap", "nulls"):
        assert np.array_equal(getattr(read, name), getattr(general, name)), name
    assert np.array_equal(read.places[:, :3], general.places[:, :3])


@pytest.mark.parametrize(
    "batch",
    [
        BATCH.take(pa.array([1, 0])),
        BATCH.take(pa.array([0, 0])),
        BATCH.slice(0, 0),
        BATCH.select(["b", "a", "f", "u", "i", "d", "t"]),
        BATCH.drop_columns(["f"]),
        BATCH.set_column(2, "f", BATCH["f"].cast(pa.float64())),
        BATCH.set_column(2, "f", BATCH["f"].dictionary_encode()),
        BATCH.set_column(2, pa.field("f", pa.float32(), metadata={"a": "b"}), BATCH["f"]),
        BATCH.rename_columns(["a", "b", "ff", "u", "i", "d", "t"]),
        BATCH.set_column(6, "t", BATCH["t"].cast(pa.timestamp("us", "UTC"))),
        BATCH.set_column(2, "f", pa.array([None, 1.0, 2.0, 3.0], pa.float32())),
    ],
    ids=[
        "descending",
        "a key twice",
        "no rows",
        "another order",
        "a column missing",
        "another type",
        "a dictionary",
        "metadata",
        "another name",
        "a time zone",
        "a null",
    ],
)
def test_others_need_a_closer_look(batch):
    columns = WordColumns(layout_of(BATCH, ["a", "b"]))
    assert columns.read(BATCH) is not None
    assert columns.read(batch) is None
    assert columns.read(BATCH) is not None


@pytest.mark.parametrize("array", [pa.array([True]), pa.array(["x"]), pa.array([1], pa.decimal128(5, 1))])
def test_not_all_columns_are_words_of_their_buffer(array):
    batch = pa.record_batch({"k": [1], "v": array})
    assert WordColumns.of(layout_of(batch, ["k"])) is None


def test_names_that_are_one_in_c_need_a_closer_look():
    schema = stored_schema(pa.schema([("k", pa.int64()), ("v\0a", pa.int64()), ("v\0b", pa.int64())]), ["k"])
    assert WordColumns.of(LeafLayout(schema, ("k",), 4096)) is None
