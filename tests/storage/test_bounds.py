"""A bound says of every value of the key's type what plain comparison of exact numbers says."""

from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.errors import KeyInputError
from headrace.storage.format.bounds import extreme, high_bound, low_bound, scale_of

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS = [*INTEGERS, pa.decimal128(5, 2), pa.decimal128(18, 0), pa.decimal128(18, 18)]
TIMES = [pa.date32(), pa.date64(), *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns"))]


def ends(dtype):
    if pa.types.is_decimal(dtype):
        return 1 - 10**dtype.precision, 10**dtype.precision - 1
    bits = dtype.bit_width
    return (0, 2**bits - 1) if pa.types.is_unsigned_integer(dtype) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def array_of(steps, dtype):
    """Return one value, so many of the type's steps from zero."""
    if pa.types.is_decimal(dtype):
        return pa.array([Decimal(steps).scaleb(-dtype.scale)], dtype)
    if pa.types.is_integer(dtype):
        return pa.array([steps], dtype)
    return pa.array([steps], pa.int32() if dtype.bit_width == 32 else pa.int64()).view(dtype)


def steps_of(array):
    if pa.types.is_decimal(array.type):
        return int(array[0].as_py().scaleb(array.type.scale))
    if pa.types.is_integer(array.type):
        return array[0].as_py()
    return array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())[0].as_py()


@st.composite
def questions(draw):
    family = draw(st.sampled_from([NUMBERS, TIMES]))
    source, target = draw(st.sampled_from(family)), draw(st.sampled_from(family))
    least, most = ends(source)
    value = draw(
        st.integers(least, most) | st.integers(max(least, -2000), min(most, 2000)) | st.sampled_from([least, most])
    )
    offset = draw(st.fractions(max_denominator=50) | st.integers(-(2**66), 2**66).map(Fraction))
    return source, target, value, offset, draw(st.booleans())


@given(questions())
def test_a_bound_is_exact(question):
    source, target, value, offset, strict = question
    exact = Fraction(value) / scale_of(source).ticks * scale_of(target).ticks + offset
    least, most = ends(target)
    low = exact.__floor__() + 1 if strict else exact.__ceil__()
    high = exact.__ceil__() - 1 if strict else exact.__floor__()
    array, valid = low_bound(array_of(value, source), target, "x", offset, strict=strict)
    assert (valid is None) == (low <= most)
    assert array.type == target
    assert low > most or steps_of(array) == max(low, least)
    array, valid = high_bound(array_of(value, source), target, "x", offset, strict=strict)
    assert (valid is None) == (high >= least)
    assert high < least or steps_of(array) == min(high, most)


def test_nulls_have_no_bound():
    column = pa.array([None, 5, None], pa.int16())
    for bound in (low_bound, high_bound):
        array, valid = bound(column, pa.int64(), "x")
        assert valid.tolist() == [False, True, False]
        assert array[1].as_py() == 5
        assert bound(pa.nulls(2), pa.int64(), "x")[1].tolist() == [False, False]


def test_encoded_columns_and_chunks_are_read():
    column = pa.chunked_array([pa.array([3, 4, 3]).dictionary_encode()])
    assert low_bound(column, pa.int8(), "x")[0].to_pylist() == [3, 4, 3]


def test_the_least_text_above_another():
    array, valid = low_bound(pa.array(["", "a\0", None]), pa.string(), "x", strict=True)
    assert array.to_pylist()[:2] == ["\0", "a\0\0"]
    assert valid.tolist() == [True, True, False]
    assert low_bound(pa.array([b"\xff"]), pa.binary(), "x", strict=True)[0].to_pylist() == [b"\xff\0"]


def test_dates_and_times_share_a_line():
    noon = pa.array([datetime(2024, 2, 29, 12)], pa.timestamp("us"))  # noqa: DTZ001 - a local time
    assert high_bound(noon, pa.date32(), "x")[0].to_pylist() == [date(2024, 2, 29)]
    assert low_bound(noon, pa.date32(), "x")[0].to_pylist() == [date(2024, 3, 1)]


@pytest.mark.parametrize(
    ("column", "target"),
    [
        (pa.array([datetime(2024, 1, 1, tzinfo=UTC)]), pa.timestamp("us")),
        (pa.array([1.5]), pa.int64()),
        (pa.array(["1"]), pa.int64()),
        (pa.array([1]), pa.timestamp("s")),
        (pa.array([[1]]), pa.int64()),
        (pa.array([1]), pa.string()),
        (pa.array([True]), pa.int8()),
    ],
)
def test_types_without_a_common_order_are_refused(column, target):
    with pytest.raises(KeyInputError, match="x"):
        low_bound(column, target, "x")


@pytest.mark.parametrize("dtype", [*NUMBERS, pa.decimal128(38, 2), pa.bool_(), pa.time64("us"), *TIMES])
def test_nothing_lies_beyond_the_extremes(dtype):
    least, greatest = extreme(dtype, 3, greatest=False), extreme(dtype, 3, greatest=True)
    assert least.type == greatest.type == dtype
    assert len(least) == len(greatest) == 3
    if dtype in NUMBERS:
        assert (steps_of(least), steps_of(greatest)) == ends(dtype)
    assert np.array_equal(extreme(pa.string(), 2, greatest=False).to_pylist(), ["", ""])
