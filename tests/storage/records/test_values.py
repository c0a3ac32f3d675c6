"""The same text is the same value, exactly, or its record is rejected; Python's own types are the oracle."""

import datetime as dt
import decimal
import math
import re
import struct
import zoneinfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.storage.errors import InputError
from headrace.storage.records import Piece, RecordFormat, read_records
from headrace.storage.records.zones import local_offsets

UTC = dt.UTC
INSTANT, LOCAL = pa.timestamp("us", "UTC"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("dtype", "text", "expected"),
    [
        (pa.int8(), "127", 127),
        (pa.int8(), "-128", -128),
        (pa.int64(), "9223372036854775807", 2**63 - 1),
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.int64(), "+5", 5),
        (pa.int64(), "007", 7),
        (pa.int64(), "-0", 0),
        (pa.uint64(), "18446744073709551615", 2**64 - 1),
        (pa.decimal128(10, 2), "12.34", decimal.Decimal("12.34")),
        (pa.decimal128(10, 2), "-12.3", decimal.Decimal("-12.30")),
        (pa.decimal128(10, 2), "12.340", decimal.Decimal("12.34")),
        (pa.decimal128(10, 2), "1e2", decimal.Decimal("100.00")),
        (pa.decimal128(10, 2), "1234E-2", decimal.Decimal("12.34")),
        (pa.decimal128(10, 2), ".5", decimal.Decimal("0.50")),
        (pa.decimal128(10, 2), "5.", decimal.Decimal("5.00")),
        (pa.decimal128(10, 2), "0e99999", decimal.Decimal("0.00")),
        (pa.decimal128(10, 2), "00000000000012.30", decimal.Decimal("12.30")),
        (pa.decimal128(38, 0), "9" * 38, decimal.Decimal("9" * 38)),
        (pa.decimal128(38, 38), "-0." + "9" * 38, decimal.Decimal("-0." + "9" * 38)),
        (pa.float64(), "1.5", 1.5),
        (pa.float64(), "1e5", 1e5),
        (pa.float64(), "-Infinity", -math.inf),
        (pa.float64(), "inf", math.inf),
        (pa.float32(), "0.1", struct.unpack("f", struct.pack("f", 0.1))[0]),
        (pa.bool_(), "TRUE", True),
        (pa.bool_(), "false", False),
        (pa.date32(), "2024-02-29", dt.date(2024, 2, 29)),
        (pa.date32(), "0001-01-01", dt.date(1, 1, 1)),
        (pa.date32(), "9999-12-31", dt.date(9999, 12, 31)),
        (INSTANT, "9999-12-31 23:59:59.999999", dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)),
        (INSTANT, "2024-05-01", dt.datetime(2024, 5, 1, tzinfo=UTC)),
        (INSTANT, "2024-05-01T10:30", dt.datetime(2024, 5, 1, 10, 30, tzinfo=UTC)),
        (INSTANT, "2024-05-01 10:30:00.5", dt.datetime(2024, 5, 1, 10, 30, 0, 500000, UTC)),
        (INSTANT, "2024-05-01T10:30:00Z", dt.datetime(2024, 5, 1, 10, 30, tzinfo=UTC)),
        (INSTANT, "2024-05-01 10:30:00+02:00", dt.datetime(2024, 5, 1, 8, 30, tzinfo=UTC)),
        (INSTANT, "2024-05-01 10:30:00 -0330", dt.datetime(2024, 5, 1, 14, 0, tzinfo=UTC)),
        (INSTANT, "2024-05-01 10:30:00+02", dt.datetime(2024, 5, 1, 8, 30, tzinfo=UTC)),
        (INSTANT, "2024-05-01 10:30:00.123456000", dt.datetime(2024, 5, 1, 10, 30, 0, 123456, UTC)),
        (LOCAL, "2024-05-01 10:30:00", dt.datetime(2024, 5, 1, 10, 30)),  # noqa: DTZ001 - a local time
        (pa.time32("s"), "10:30:00", dt.time(10, 30)),
        (pa.string(), "", ""),
        (pa.binary(), "é", "é".encode()),
        (pa.large_string(), "x", "x"),
        (pa.dictionary(pa.int32(), pa.string()), "x", "x"),
    ],
)
def test_a_text_that_fits_its_type_is_its_value(value, dtype, text, expected):
    assert value(text, dtype) == expected


@pytest.mark.parametrize(
    ("dtype", "text", "reason"),
    [
        *[
            (pa.int64(), text, "is not a whole number")
            for text in ("1.0", "1e3", "", " 5", "5 ", "-", "+", "0x1", "१", "1_0")
        ],
        (pa.int8(), "128", "out of the range of tinyint, -128 to 127"),
        (pa.int8(), "-129", "out of the range"),
        (pa.int64(), "9223372036854775808", "out of the range of bigint"),
        (pa.int64(), "-9223372036854775809", "out of the range"),
        (pa.int64(), "18446744073709551621", "out of the range"),  # 5, modulo 2**64
        (pa.int64(), "1" + "0" * 40, "out of the range"),
        (pa.uint64(), "-1", "out of the range"),
        (pa.decimal128(10, 2), "12.345", "more than 2 digits after the point"),
        (pa.decimal128(10, 2), "1.005", "more than 2 digits after the point"),
        (pa.decimal128(10, 2), "1e-3", "more than 2 digits after the point"),
        (pa.decimal128(10, 2), "1e-99999999", "more than 2 digits after the point"),
        (pa.decimal128(10, 2), "123456789.00", "more digits before the point than decimal.10,2. holds"),
        (pa.decimal128(10, 2), "1e99999999", "more digits before the point"),
        (pa.decimal128(38, 0), "1" + "0" * 38, "more digits before the point"),
        *[
            (pa.decimal128(10, 2), text, "is not a number")
            for text in (
                "785,69", "1,2,3,4", "5,00", "1.234,50", "1,234.50", "1 000", "€5", "NaN", "1e", "e5", ".", "--1", "",
            )
        ],
        *[
            (pa.float64(), text, "is not a number")
            for text in ("785,69", "1.5f", "0x1p3", "nanny", "-nan", "infinit", "", "1e")
        ],
        (pa.float64(), "1e400", "out of the range of double"),
        (pa.float32(), "1e39", "out of the range of float"),
        *[(pa.bool_(), text, "neither true nor false") for text in ("1", "0", "t", "yes", "", "truee")],
        *[
            (pa.date32(), text, "is not a date")
            for text in (
                "20244-05-01", "24-05-01", "2024-5-1", "2024/05/01", "2024-05-01 00:00:00", "20240501", "",
            )
        ],
        *[
            (pa.date32(), text, "not a day of the calendar")
            for text in (
                "2023-02-29", "1900-02-29", "2024-13-01", "2024-00-10", "2024-01-00", "2024-04-31", "0000-01-01",
            )
        ],
        *[
            (INSTANT, text, "is not a timestamp")
            for text in (
                "10:30:00", "20244-05-01", "2024-05-01 10", "2024-05-01 10:30:00 Europe/Paris", "2024-05-01 1:30:00",
                "2024-05-01  10:30:00", "2024-05-01 10:30:00.", "2024-05-01 10:30:00+2", "2024-05-01 10:30:00+19:00",
                "2024-05-01 10:30:00+02:60", "2024-05-01T", "2024-05-01 10:30:00 ", "1714559400",
            )
        ],
        *[
            (INSTANT, text, "calendar and a time of day")
            for text in ("2024-02-30 10:30:00", "2024-05-01 24:00:00", "2024-05-01 10:60:00", "2024-05-01 23:59:60")
        ],
        (INSTANT, "2024-05-01 10:30:00.1234567", "fraction of a second that timestamp does not hold"),
        (INSTANT, "9999-12-31 23:59:59-01:00", "not within the years 1 to 9999"),
        (INSTANT, "0001-01-01 00:00:00+01:00", "not within the years 1 to 9999"),
        (LOCAL, "2024-05-01 10:30:00Z", "names a time zone, but timestamp_ntz has none"),
        (pa.timestamp("ns"), "1500-01-01", "out of the range"),
    ],
)  # fmt: skip
def test_a_text_that_does_not_fit_its_type_is_rejected(value, dtype, text, reason):
    assert isinstance(found := value(text, dtype), str)
    assert re.search(reason, found), found


def test_not_a_number_is_a_number_of_floating_point(value):
    assert math.isnan(value("NaN", pa.float64()))


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("785,69", pa.decimal128(10, 2), decimal.Decimal("785.69")),
        ("785", pa.decimal128(10, 2), decimal.Decimal("785.00")),
        ("-0,5", pa.float64(), -0.5),
        ("0,12345678901234567", pa.float64(), 0.12345678901234567),
        ("785.69", pa.decimal128(10, 2), "is not a number with ','"),
        ("1.234,50", pa.decimal128(10, 2), "is not a number with ','"),
        ("1,2,3,4", pa.decimal128(10, 2), "is not a number with ','"),
        ("1.5", pa.float64(), "is not a number with ','"),
    ],
)
def test_a_decimal_comma_is_declared(value, text, dtype, expected):
    found = value(text, dtype, decimal=",")
    assert found.startswith(expected) if isinstance(expected, str) else found == expected


def column_of(tmp_path, texts, dtype, **options):
    path = tmp_path / "f.csv"
    path.write_text("v\n" + "".join(f'"{text}"\n' for text in texts))
    form = RecordFormat("csv", pa.schema([("v", dtype)]), **options)
    parts = list(read_records(Piece(str(path)), form))
    rejected = {row for part in parts for row in part.rejects["row"].to_pylist()}
    return [value for part in parts for value in part.rows.column(0).to_pylist()], rejected


many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(
    texts=st.lists(
        st.one_of(
            st.decimals(allow_nan=False, allow_infinity=False).map(str),
            st.from_regex(r"\A[+-]?[0-9]{0,12}\.?[0-9]{0,6}([eE][+-]?[0-9]{1,2})?\Z"),
        ),
        min_size=1,
    ),
    shape=st.sampled_from([(10, 2), (38, 0), (38, 38), (18, 18), (20, 19), (5, 0)]),
)
def test_decimals_are_those_of_python(tmp_path, texts, shape):
    precision, scale = shape
    found, rejected = column_of(tmp_path, texts, pa.decimal128(*shape))
    context = decimal.Context(prec=2000, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
    for row, text in enumerate(texts):
        try:
            number = context.create_decimal(text)
        except decimal.InvalidOperation:
            number = None
        fits = number is not None and abs(number) < decimal.Decimal(10) ** (precision - scale)
        fits = fits and number == round_down(number, scale)
        assert (row not in rejected) == fits, text
        assert found[row] == (number if fits else None), text


def round_down(number, scale):
    if number.adjusted() < -scale - 40 and number:
        return None
    return number.quantize(decimal.Decimal(1).scaleb(-scale), decimal.ROUND_DOWN, decimal.Context(prec=2000))


@many
@given(values=st.lists(st.floats(allow_nan=False), min_size=1), dtype=st.sampled_from([pa.float32(), pa.float64()]))
def test_floats_are_those_of_python(tmp_path, values, dtype):
    texts = [repr(value) for value in values] + [f"{value:.3f}" for value in values if abs(value) < 1e20]
    found, rejected = column_of(tmp_path, texts, dtype)
    with np.errstate(over="ignore"):
        wanted = [float(dtype.to_pandas_dtype()(text)) for text in texts]
    for row, (text, expected) in enumerate(zip(texts, wanted, strict=True)):
        if math.isinf(expected) and "inf" not in text:
            assert row in rejected
        else:
            assert found[row] == expected
            assert math.copysign(1, found[row]) == math.copysign(1, expected)


@many
@given(values=st.lists(st.integers(-(2**65), 2**65), min_size=1), width=st.sampled_from([8, 16, 32, 64]))
def test_whole_numbers_are_those_of_python(tmp_path, values, width):
    found, rejected = column_of(tmp_path, values, getattr(pa, f"int{width}")())
    least, most = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    assert found == [value if least <= value <= most else None for value in values]
    assert rejected == {row for row, value in enumerate(values) if not least <= value <= most}


@many
@given(
    values=st.lists(st.datetimes(), min_size=1),
    zone=st.sampled_from(
        ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/St_Johns"]
    ),
    choice=st.sampled_from(["reject", "earlier", "later"]),
)
def test_local_times_are_those_of_python(tmp_path, values, zone, choice):
    found, rejected = column_of(
        tmp_path, [value.isoformat(" ") for value in values], INSTANT, time_zone=zone, ambiguous_time=choice
    )
    for row, local in enumerate(values):
        assert (found[row], row in rejected) == expected_instant(local, zone, choice)


def expected_instant(local, zone, choice):
    here = zoneinfo.ZoneInfo(zone)
    both = []
    try:
        for fold in (0, 1):
            instant = local.replace(tzinfo=here, fold=fold).astimezone(UTC)
            if instant.astimezone(here).replace(tzinfo=None) != local:
                return None, True
            both.append(instant)
    except OverflowError:
        return None, True
    if both[0] != both[1] and choice == "reject":
        return None, True
    return both[choice == "later"], False


@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Gaza"]
)
def test_each_minute_around_the_changes_of_clocks(zone):
    start = dt.datetime(2023, 1, 1)  # noqa: DTZ001 - a local time
    seconds = np.arange(0, 366 * 86_400, 600) + int((start - dt.datetime(1970, 1, 1)).total_seconds())  # noqa: DTZ001
    before, after = local_offsets(seconds, zone)
    here = zoneinfo.ZoneInfo(zone)
    for place, second in enumerate(range(0, 366 * 86_400, 600)):
        local = (start + dt.timedelta(seconds=second)).replace(tzinfo=here)
        assert before[place] == local.utcoffset().total_seconds()
        assert after[place] == local.replace(fold=1).utcoffset().total_seconds()


def test_an_hour_that_is_not_there_or_is_there_twice(value):
    paris = {"time_zone": "Europe/Paris"}
    assert "does not exist in Europe/Paris" in value("2024-03-31 02:30:00", INSTANT, **paris)
    assert "does not exist" in value("2024-03-31 02:30:00", INSTANT, **paris, ambiguous_time="earlier")
    assert "occurs twice in Europe/Paris" in value("2024-10-27 02:30:00", INSTANT, **paris)
    earlier = value("2024-10-27 02:30:00", INSTANT, **paris, ambiguous_time="earlier")
    later = value("2024-10-27 02:30:00", INSTANT, **paris, ambiguous_time="later")
    assert (earlier.astimezone(UTC).hour, later.astimezone(UTC).hour) == (0, 1)
    assert value("2024-10-27 02:30:00+01:00", INSTANT, **paris).astimezone(UTC).hour == 1


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("%d.%m.%Y", "31.12.2024", dt.date(2024, 12, 31)),
        ("%d.%m.%Y", "1.2.2024", dt.date(2024, 2, 1)),
        ("%Y%m%d", "20241231", dt.date(2024, 12, 31)),
        ("%d/%m/%y", "01/02/69", dt.date(1969, 2, 1)),
        ("%d %B %Y", "3 March 2024", dt.date(2024, 3, 3)),
        ("%b %d, %Y", "Mar 03, 2024", dt.date(2024, 3, 3)),
        ("%d%%%m%%%Y", "01%02%2024", dt.date(2024, 2, 1)),
        ("%d.%m.%Y", "2024-12-31", "is not a date of the form %d.%m.%Y"),
        ("%d.%m.%Y", "31.02.2024", "is not a day of the calendar"),
        ("%d.%m.%Y", "31.12.2024 ", "is not a date of the form"),
        ("%d.%m.%Y", "31.12.20244", "is not a date of the form"),
        ("%Y%m%d", "2024111", "is not a date of the form"),
    ],
)
def test_dates_of_a_declared_pattern(value, pattern, text, expected):
    found = value(text, pa.date32(), date_format=pattern)
    assert found.startswith(expected) if isinstance(expected, str) else found == expected


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("%d.%m.%Y %H:%M:%S", "31.12.2024 23:59:01"),
        ("%m/%d/%Y %I:%M %p", "12/31/2024 12:05 AM"),
        ("%m/%d/%Y %I:%M %p", "12/31/2024 12:05 pm"),
        ("%Y-%m-%dT%H:%M:%S.%f%z", "2024-12-31T10:00:00.25+0200"),
        ("%Y-%m-%dT%H:%M:%S.%f%z", "2024-12-31T10:00:00.000001Z"),
    ],
)
def test_timestamps_of_a_declared_pattern_are_those_of_python(value, pattern, text):
    wanted = dt.datetime.strptime(text, pattern)  # noqa: DTZ007 - with a zone where the pattern has one
    assert value(text, INSTANT, timestamp_format=pattern) == (wanted if wanted.tzinfo else wanted.replace(tzinfo=UTC))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"date_format": "yyyy-MM-dd"}, "tells the year, the month and the day"),
        ({"date_format": "%d.%m"}, "tells the year, the month and the day"),
        ({"date_format": "%d.%m.%Y %H"}, "no time of day"),
        ({"timestamp_format": "%d.%m.%Y %Q"}, "%Q is not known; the directives are"),
        ({"delimiter": "||"}, "delimiter is '||'"),
        ({"delimiter": "§"}, "write one ASCII character"),
        ({"delimiter": '"'}, "must differ"),
        ({"decimal": ";"}, "write '.' or ','"),
        ({"encoding": "klingon"}, "unknown encoding"),
        ({"encoding": "hex"}, "unknown encoding of text 'hex'"),
        ({"encoding": "rot13"}, "unknown encoding of text"),
        ({"encoding": "punycode"}, "unknown encoding of text"),
        ({"encoding": "a\0b"}, "unknown encoding of text"),
        ({"time_zone": "Europe/Atlantis"}, "Atlantis"),
    ],
)
def test_options_that_are_not_valid_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        RecordFormat("csv", pa.schema([("a", pa.string())]), **options)


def test_types_that_no_text_has_are_refused(read):
    with pytest.raises(InputError, match="'v' is list<item: string>, which cannot be read from text"):
        read("v\n1\n", [("v", pa.list_(pa.string()))])
