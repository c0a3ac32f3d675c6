"""Copies of Arrow rows."""

from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from headrace.storage.format import repeated

VALUES = [
    pa.array([1, None, 3, -4, 5], pa.int8()),
    pa.array([True, False, None, True, False]),
    pa.array([0.5, -0.0, None, 1e300, float("inf")]),
    pa.array([datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)], pa.timestamp("ns", "UTC")),
    pa.array([Decimal("1.25"), None, Decimal("-3.50"), Decimal(0), Decimal(9)], pa.decimal128(20, 2)),
    pa.array(["", "a", None, "ü" * 40, "b"]),
    pa.array([b"", None, b"x" * 99, b"y", b"z"], pa.large_binary()),
    pa.array([b"abc", None, b"def", b"ghi", b"jkl"], pa.binary(3)),
    pa.array(["x", "y", None, "x", "z"]).dictionary_encode(),
    pa.array([[1], None, [], [2, 3], [4]], pa.list_(pa.int64())),
    pa.array([{"a": 1}, None, {"a": None}, {"a": 4}, {"a": 5}], pa.struct([("a", pa.int64())])),
    pa.nulls(5),
]


@pytest.mark.parametrize("values", VALUES, ids=lambda values: str(values.type)[:20])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 2, 1, 3], [9, 1, 40, 7]])
def test_rows_are_repeated_in_sequence(values, counts):
    for column in (values.slice(0, 4), values.slice(1, 4)):
        found = repeated(pa.record_batch({"n": [1, 2, 3, 4], "column": column}), np.cumsum(counts))
        found.validate(full=True)
        assert found["column"].type == column.type
        assert found["n"].to_pylist() == np.repeat([1, 2, 3, 4], counts).tolist()
        assert found["column"].to_pylist() == [
            value for value, n in zip(column.to_pylist(), counts, strict=True) for _ in range(n)
        ]


def test_no_rows_stay_no_rows():
    rows = pa.record_batch({"n": pa.array([], pa.int64())})
    assert repeated(rows, np.empty(0, dtype=np.int64)).equals(rows)


def test_text_that_becomes_too_large_for_its_offsets_is_an_error():
    rows = pa.record_batch({"text": ["x" * 10_000_000, "y"]})
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        repeated(rows, np.array([400, 401]))
