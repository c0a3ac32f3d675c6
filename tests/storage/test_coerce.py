import datetime as dt
import decimal
import math
from fractions import Fraction

import pyarrow as pa
import pytest
from arrow_strategies import INT_RANGES, array_of, values_of
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.errors import KeyInputError
from headrace.storage.format.coercion import at_scale, coerce, plain
from headrace.storage.format.columns import fixed_values

DECIMALS = (pa.decimal128(4, 1), pa.decimal128(18, 6), pa.decimal128(38, 0), pa.decimal128(38, 38))
EXACT = (*INT_RANGES, *DECIMALS)
FLOATS = (pa.float16(), pa.float32(), pa.float64())
NUMBERS = (*EXACT, *FLOATS)
TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def holds(value, target):
    """Whether a type can hold an exact value."""
    if target in INT_RANGES:
        low, high = INT_RANGES[target]
        return value.denominator == 1 and low <= value <= high
    scaled = value * 10**target.scale
    return scaled.denominator == 1 and abs(scaled) < 10**target.precision


def expected_flags(values, flags):
    return [True] * len(values) if flags is None else flags.tolist()


@given(st.sampled_from(EXACT), st.sampled_from(EXACT), st.data())
def test_numbers_match_by_value(source, target, data):
    values = data.draw(st.lists(st.none() | values_of(source), max_size=8))
    array, flags = coerce(pa.array(values, source), target, "k")
    exact = [None if value is None else Fraction(value) for value in values]
    assert expected_flags(values, flags) == [value is not None and holds(value, target) for value in exact]
    assert array.type == target
    kept = [
        (got.as_py(), value)
        for got, value in zip(array, exact, strict=True)
        if value is not None and holds(value, target)
    ]
    assert [Fraction(got) for got, _ in kept] == [value for _, value in kept]


@given(st.sampled_from(list(TICKS)), st.sampled_from(list(TICKS)), st.data())
def test_instants_match_by_the_time_they_mean(source, target, data):
    ends = st.sampled_from([-(2**63), 2**63 - 1])
    values = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3000, 3000) | ends, max_size=8))
    array, flags = coerce(array_of(values, pa.timestamp(source, "UTC")), pa.timestamp(target, "Asia/Tokyo"), "k")
    exact = [Fraction(value * TICKS[target], TICKS[source]) for value in values]
    fits = [value.denominator == 1 and -(2**63) <= value < 2**63 for value in exact]
    assert expected_flags(values, flags) == fits
    got = fixed_values(array)[0].tolist() if values else []
    for value, flag, result in zip(exact, expected_flags(values, flags), got, strict=True):
        assert not flag or result == value


def test_every_instant_that_fits_is_matched():
    array, flags = coerce(pa.array([-5, 0, 7], pa.timestamp("s")), pa.timestamp("ns"), "k")
    assert flags is None
    assert fixed_values(array)[0].tolist() == [-5 * 10**9, 0, 7 * 10**9]


def test_dates_of_both_widths_match():
    array, flags = coerce(array_of([86_400_000 * 3, 5], pa.date64()), pa.date32(), "k")
    assert flags.tolist() == [True, False]
    assert array[0].as_py().isoformat() == "1970-01-04"


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_text_of_any_layout_matches(dtype):
    array, flags = coerce(pa.array(["a", None, "b"]).cast(dtype), pa.string(), "k")
    assert flags.tolist() == [True, False, True]
    assert array.take(pa.array([0, 2])).to_pylist() == ["a", "b"]


def test_a_column_of_nulls_matches_nothing():
    _, flags = coerce(pa.nulls(2), pa.decimal128(38, 2), "k")
    assert flags.tolist() == [False, False]


def test_chunked_columns_are_taken_whole():
    array, flags = coerce(pa.chunked_array([[1], [2, 3]]), pa.int16(), "k")
    assert flags is None
    assert array.to_pylist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (pa.string(), pa.int64()),
        (pa.int64(), pa.string()),
        (pa.string(), pa.binary()),
        (pa.float64(), pa.int64()),
        (pa.bool_(), pa.int8()),
        (pa.timestamp("s"), pa.timestamp("s", "UTC")),
        (pa.date32(), pa.timestamp("s")),
        (pa.list_(pa.int8()), pa.int8()),
    ],
    ids=str,
)
def test_types_that_can_never_be_equal_are_refused(source, target):
    with pytest.raises(KeyInputError, match=r"'k' has type .* can never equal a key of type"):
        coerce(pa.array([], source), target, "k")


def test_the_largest_decimals_are_compared_exactly():
    top = decimal.Decimal(10**38 - 1)
    array, flags = coerce(pa.array([top, top.copy_negate()], pa.decimal128(38, 0)), pa.decimal128(38, 1), "k")
    assert flags.tolist() == [False, False]
    assert array.type == pa.decimal128(38, 1)


@pytest.mark.parametrize("scale", range(39))
def test_decimals_whose_digits_are_all_ones_in_binary_are_divided_exactly(scale):
    whole = [number for bits in (32, 64, 96, 127) if (number := 2**bits - 1) < 10 ** (76 - scale)]
    units = [decimal.Decimal(number) for number in whole]
    scaled = pa.array(units, pa.decimal256(76 - scale, 0)).cast(pa.decimal256(76, scale))
    assert at_scale(scaled, 0).to_pylist() == units


def test_a_key_of_many_digits_is_found_at_another_scale():
    key = pa.array([2**64 - 1], pa.uint64())
    array, flags = coerce(key, pa.decimal128(38, 18), "k")
    assert (array.to_pylist(), flags) == ([decimal.Decimal(2**64 - 1)], None)
    back, flags = coerce(array, pa.uint64(), "k")
    assert (back.to_pylist(), flags) == ([2**64 - 1], None)


def test_decimals_that_arrow_cannot_convert_are_refused():
    hundreds = pa.Array.from_buffers(pa.decimal128(5, -2), 1, [None, pa.py_buffer(bytes(16))])
    with pytest.raises(KeyInputError, match="can never equal a key of type int64"):
        coerce(hundreds, pa.int64(), "k")
    assert coerce(hundreds, hundreds.type, "k")[1] is None


def exact(value):
    return value if value is None or not math.isfinite(value) else Fraction(value)


@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.data())
def test_numbers_are_stored_as_equal_numbers_or_not_at_all(source, target, data):
    given_values = pa.array(data.draw(st.lists(st.none() | values_of(source), max_size=8)), source)
    values = [exact(value) for value in given_values.to_pylist()]
    try:
        stored = plain(given_values, target)
    except pa.ArrowInvalid:
        floats = pa.types.is_floating(source) or pa.types.is_floating(target)
        assert floats or not all(value is None or holds(value, target) for value in values)
    else:
        assert stored.type == target
        assert repr([exact(value) for value in stored.to_pylist()]) == repr(values)


@given(st.sampled_from(list(TICKS)), st.sampled_from(list(TICKS)), st.data())
def test_instants_are_stored_as_the_time_they_mean_or_not_at_all(source, target, data):
    values = data.draw(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-3000, 3000), max_size=8))
    wanted = [None if value is None else Fraction(value * TICKS[target], TICKS[source]) for value in values]
    fits = all(value is None or (value.denominator == 1 and -(2**63) <= value < 2**63) for value in wanted)
    instants = pa.array(values, pa.int64()).cast(pa.timestamp(source, "UTC"))
    try:
        stored = plain(instants, pa.timestamp(target, "Asia/Tokyo"))
    except pa.ArrowInvalid:
        assert not fits
    else:
        assert fits
        assert stored.cast(pa.int64()).to_pylist() == wanted


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (5, pa.int64(), pa.bool_()),
        (True, pa.bool_(), pa.int64()),
        (0.5, pa.float64(), pa.decimal128(5, 2)),
        (decimal.Decimal("0.5"), pa.decimal128(5, 2), pa.float64()),
        (5, pa.int64(), pa.timestamp("us")),
        (1500, pa.timestamp("ms"), pa.date32()),
        (1500, pa.timestamp("ms"), pa.time32("ms")),
        (1500, pa.timestamp("ms"), pa.timestamp("ms", "UTC")),
        (1500, pa.timestamp("ms", "UTC"), pa.timestamp("ms")),
        (3, pa.date32(), pa.timestamp("ms")),
        (decimal.Decimal(5), pa.decimal256(50, 0), pa.decimal128(38, 0)),
    ],
)
def test_other_kinds_of_values_are_not_stored(value, source, target):
    with pytest.raises(pa.ArrowInvalid, match=r"is not .*; cast the column"):
        plain(pa.array([value], source), target)


def test_dates_times_and_spans_are_stored_in_another_unit():
    for source, target, value in [
        (pa.date32(), pa.date64(), dt.date(2024, 2, 29)),
        (pa.time32("s"), pa.time64("ns"), dt.time(1, 2, 3)),
        (pa.duration("s"), pa.duration("ns"), dt.timedelta(days=-3)),
    ]:
        there = plain(pa.array([value, None], source), target)
        assert there.type == target
        assert plain(there, source).to_pylist() == [value, None]


@pytest.mark.parametrize(("dtype", "digits"), [*zip(FLOATS, (11, 24, 53), strict=True)])
def test_whole_numbers_are_stored_as_floats_as_far_as_these_have_digits(dtype, digits):
    assert plain(pa.array([2**digits]), dtype).cast(pa.float64()).to_pylist() == [2**digits]
    with pytest.raises(pa.ArrowInvalid):
        plain(pa.array([2**digits + 1]), dtype)


def test_a_value_that_a_column_cannot_store_is_named():
    with pytest.raises(pa.ArrowInvalid, match=r"^0\.1 is not a value of float \(row 1\)"):
        plain(pa.array([None, 0.1]), pa.float32())
