import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.errors import InputError
from headrace.storage.units import format_size, parse_duration, parse_exact_duration, parse_memory


@given(st.integers(1, 2**50))
def test_a_size_that_is_read_back_is_enough_and_not_much_more(size):
    read = parse_memory(format_size(size))
    assert size <= read <= size * 1.1


@pytest.mark.parametrize(
    ("size", "text"),
    [(1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB"), (1024**2 + 1, "1.1 MiB"), (2**50, "1048576.0 GiB")],
)
def test_sizes_are_rounded_up(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize("text", ["", "x", "-1", "1 parsec", "0", "1e3", None, 1.5j, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="size"):
        parse_memory(text)


def test_a_size_of_many_digits_is_one():
    assert parse_memory("9" * 400 + "GB") > 10**400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250us", 0.00025), ("500 ms", 0.5), ("1.5m", 90), ("2min", 120), ("3H", 10_800), ("7d", 604_800)],
)
def test_durations_are_read_in_every_unit(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


def test_a_duration_is_exact_to_the_last_digit():
    assert parse_exact_duration("123456789.123456789s") * 10**9 == 123_456_789_123_456_789


@pytest.mark.parametrize(
    "value", ["9" * 400 + "d", "", "1", "1w", "-1s", "0s", 0, -1, True, None, float("nan"), float("inf"), "1e999s"]
)
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(InputError, match="duration"):
        parse_duration(value)
