"""Parquet's values are converted without loss or their row is rejected; types that lose something are refused."""

import datetime as dt
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.records import Piece, RecordFileError, RecordFormat, raw_records, read_records, split

UTC = dt.UTC
INSTANT, LOCAL = pa.timestamp("us", "UTC"), pa.timestamp("us")


def local(*parts):
    return dt.datetime(*parts)  # noqa: DTZ001 - a local time


@pytest.fixture
def column(tmp_path):
    """Return a function that writes one column, reads it as a type, and returns values or reasons."""

    def run(values, dtype, writer=None, **options):
        path = tmp_path / "f.parquet"
        pq.write_table(pa.table({"v": values}), path, **(writer or {}))
        form = RecordFormat("parquet", pa.schema([("v", dtype)]), **options)
        found = []
        for part in read_records(Piece(str(path)), form):
            part.rows.validate(full=True)
            assert part.rows.schema == form.columns
            rows = part.rows.column(0).to_pylist()
            for cause in part.rejects.to_pylist():
                assert rows[cause["row"]] is None
                rows[cause["row"]] = cause["reason"]
            found += rows
        return found

    return run


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (pa.array([1, None], pa.int32()), pa.int64(), [1, None]),
        (pa.array([1, 2**63, None], pa.uint64()), pa.int64(), [1, "is out of the range of bigint", None]),
        (pa.array([-129, 127]), pa.int8(), ["is out of the range of tinyint", 127]),
        (pa.array([decimal.Decimal(5), decimal.Decimal(2**63)], pa.decimal128(38, 0)), pa.int64(), [5, "is out of"]),
        (pa.array([1, 10**9]), pa.decimal128(10, 2), [decimal.Decimal("1.00"), "is out of the range of decimal(10,2)"]),
        (
            pa.array([decimal.Decimal(text) for text in ("1.500", "1.505", "-99999999.990", "1e8", "-1.001")]),
            pa.decimal128(10, 2),
            [decimal.Decimal("1.50"), "has more than 2", decimal.Decimal("-99999999.99"), "is out of", "has more"],
        ),
        (pa.array([decimal.Decimal("1.5")], pa.decimal128(38, 37)), pa.decimal128(38, 1), [decimal.Decimal("1.5")]),
        (
            pa.array([decimal.Decimal(2**64 - 1)], pa.decimal128(38, 14)),
            pa.decimal128(38, 0),
            [decimal.Decimal(2**64 - 1)],
        ),
        (pa.array([1.5, None], pa.float32()), pa.float64(), [1.5, None]),
        (pa.array([1, 2**53, 2**53 + 1]), pa.float64(), [1.0, 2.0**53, "has more digits than double"]),
        (pa.array(["a", None], pa.large_string()), pa.string(), ["a", None]),
        (pa.array(["a", "b", "a", None]).dictionary_encode(), pa.string(), ["a", "b", "a", None]),
        (pa.array(["a"], pa.string_view()), pa.string(), ["a"]),
        (pa.array([b"abc"], pa.binary(3)), pa.binary(), [b"abc"]),
        (pa.array([True, None]), pa.bool_(), [True, None]),
        (pa.nulls(2), pa.int64(), [None, None]),
        (pa.array([0, -(10**7), None], pa.date32()), pa.date32(), [dt.date(1970, 1, 1), "is not within", None]),
        (pa.array([10**7], pa.date32()), pa.date32(), ["is not within the years 1 to 9999"]),
        (pa.array([local(2024, 5, 1), local(2024, 5, 1, 1)]), pa.date32(), [dt.date(2024, 5, 1), "has a time of day"]),
        (pa.array([0, 86_400_000], pa.date64()), pa.date32(), [dt.date(1970, 1, 1), dt.date(1970, 1, 2)]),
        (pa.array([1_000, 1_001], pa.timestamp("ns")), LOCAL, [local(1970, 1, 1, 0, 0, 0, 1), "has a fraction"]),
        (pa.array([1_000], pa.timestamp("ms", "Asia/Tokyo")), INSTANT, [dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]),
        (pa.array([2**60], INSTANT), INSTANT, ["is not within the years 1 to 9999"]),
        (pa.array([dt.date(2024, 5, 1)]), INSTANT, [dt.datetime(2024, 5, 1, tzinfo=UTC)]),
    ],
)  # fmt: skip
def test_values_are_kept_or_their_row_is_rejected(column, values, dtype, expected):
    found = column(values, dtype, {"store_schema": True})
    assert len(found) == len(expected)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.startswith(wanted) if isinstance(wanted, str) and isinstance(mine, str) else mine == wanted


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (pa.array([1.0]), pa.decimal128(10, 2)),
        (pa.array([1.0]), pa.int64()),
        (pa.array([1.0]), pa.float32()),
        (pa.array([1.0]), pa.string()),
        (pa.array(["1"]), pa.int64()),
        (pa.array([b"1"]), pa.string()),
        (pa.array(["1"]), pa.binary()),
        (pa.array([1]), pa.bool_()),
        (pa.array([1]), INSTANT),
        (pa.array([dt.datetime(2024, 1, 1, tzinfo=UTC)]), LOCAL),
        (pa.array([dt.datetime(2024, 1, 1, tzinfo=UTC)]), pa.date32()),
        (pa.array([[1]]), pa.int64()),
        (pa.array([dt.time(1)]), INSTANT),
    ],
)
def test_types_that_lose_something_are_refused_with_file_column_and_types(column, values, dtype):
    with pytest.raises(RecordFileError, match=r"f\.parquet: column 'v' is .*, which .* does not hold without loss"):
        column(values, dtype)


DECIMALS = (
    pa.decimal128(5, 2),
    pa.decimal128(38, 0),
    pa.decimal128(38, 3),
    pa.decimal128(38, 38),
    pa.decimal256(76, 0),
    pa.decimal256(76, 60),
)


def numbers_of(dtype, rng):
    if pa.types.is_integer(dtype):
        return [1 << 60, -(1 << 60), 0, 1, -1, None]
    digits = rng.integers(0, dtype.precision + 1, 30)
    whole = [int("".join(map(str, rng.integers(1, 10, count))) or 0) * int(rng.choice([-1, 1])) for count in digits]
    exact = decimal.Context(prec=76)
    return [decimal.Decimal(value).scaleb(-dtype.scale, exact) for value in whole] + [None]


@pytest.mark.parametrize("target", [kind for kind in DECIMALS if pa.types.is_decimal128(kind)])
@pytest.mark.parametrize("source", [*DECIMALS, pa.int64()])
def test_decimals_of_any_digits_are_kept_or_their_row_is_rejected(column, rng, source, target):
    exact = decimal.Context(prec=200)
    values = numbers_of(source, rng)
    alone = [column(pa.array([value], source), target)[0] for value in values]
    assert column(pa.array(values, source), target) == alone
    for value, found in zip(values, alone, strict=True):
        if isinstance(found, str):
            wanted = exact.create_decimal(value).scaleb(target.scale, exact)
            too_long = abs(wanted) >= 10**target.precision
            assert ("out of the range" in found) == too_long
            assert too_long or wanted != wanted.to_integral_value(context=exact)
        else:
            assert found == value


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_naive_times_are_in_the_declared_zone(column, unit):
    values = pa.array(
        [local(2024, 7, 1, 12), local(2024, 3, 31, 2, 30), local(2024, 10, 27, 2, 30)], pa.timestamp(unit)
    )
    noon, gap, twice = column(values, INSTANT, time_zone="Europe/Paris")
    assert noon == dt.datetime(2024, 7, 1, 10, tzinfo=UTC)
    assert "does not exist in Europe/Paris" in gap
    assert "occurs twice" in twice
    assert column(values, INSTANT, time_zone="Europe/Paris", ambiguous_time="later")[2] == dt.datetime(
        2024, 10, 27, 1, 30, tzinfo=UTC
    )


def test_timestamps_of_96_bits_are_instants_as_spark_means_them(column):
    instant = dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    values = pa.array([instant, dt.datetime(2024, 7, 1, 12, tzinfo=UTC)], INSTANT)
    found = column(values, INSTANT, {"use_deprecated_int96_timestamps": True}, time_zone="Europe/Paris")
    assert found[1] == dt.datetime(2024, 7, 1, 12, tzinfo=UTC)


OLD = {"use_deprecated_int96_timestamps": True}
FINER = "has a fraction of a second that timestamp does not hold"


def test_timestamps_of_96_bits_finer_than_a_microsecond_are_rejected(column):
    limits = np.iinfo(np.int64)
    ticks = [0, 1, None, -1, -1000, 1_700_000_000_123_456_789, 1_700_000_000_123_456_000, limits.max, limits.min]
    found = column(pa.array(ticks, pa.timestamp("ns")), INSTANT, {**OLD, "row_group_size": 4})
    second = dt.datetime(1970, 1, 1, tzinfo=UTC)
    assert found == [
        second, FINER, None, FINER, second - dt.timedelta(microseconds=1), FINER,
        dt.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC), FINER, FINER,
    ]  # fmt: skip


def test_timestamps_of_96_bits_are_exact_where_64_bits_of_nanoseconds_wrap(column):
    first, last = -62_135_596_800_000_000, 253_402_300_799_999_999
    ticks = [first, last, None, first - 1, last + 1, 9_223_372_036_854_776, -9_223_372_036_854_776]
    found = column(pa.array(ticks, LOCAL), INSTANT, OLD)
    assert found == [
        dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), None,
        *["is not within the years 1 to 9999 in UTC"] * 2,
        dt.datetime(2262, 4, 11, 23, 47, 16, 854776, tzinfo=UTC),
        dt.datetime(1677, 9, 21, 0, 12, 43, 145224, tzinfo=UTC),
    ]  # fmt: skip


def test_timestamps_of_96_bits_stay_beside_the_other_columns_of_their_rows(tmp_path):
    rows = 150_000
    numbers = np.arange(rows)
    texts = pa.array([f"t{number % 70_000}" for number in numbers]).dictionary_encode()
    times = pa.array(numbers * 10**9 + 1000, pa.timestamp("ns"))
    pq.write_table(
        pa.table({"n": numbers, "t": texts, "v": times}), tmp_path / "f.parquet", row_group_size=40_001, **OLD
    )
    form = RecordFormat("parquet", pa.schema([("v", INSTANT), ("n", pa.int64()), ("t", texts.type)]))
    whole = pa.Table.from_batches([part.rows for part in read_records(Piece(str(tmp_path / "f.parquet")), form)])
    assert np.array_equal(whole["n"], numbers)
    assert np.array_equal(whole["v"].cast(pa.int64()), numbers * 10**6 + 1)


def test_nested_timestamps_of_96_bits_are_refused(tmp_path):
    kind = pa.list_(LOCAL)
    pq.write_table(pa.table({"v": pa.array([[1]], kind)}), tmp_path / "f.parquet", **OLD)
    form = RecordFormat("parquet", pa.schema([("v", kind)]), any_year=True)
    with pytest.raises(RecordFileError, match=r"column 'v' has timestamps of 96 bits within .* timestamps of 64 bits"):
        list(read_records(Piece(str(tmp_path / "f.parquet")), form))


def test_times_outside_the_calendar_are_shown_as_numbers(tmp_path):
    path = tmp_path / "f.parquet"
    times = pa.array([2**63 - 1, 0, None], pa.timestamp("ms"))
    pq.write_table(pa.table({"v": times}), path)
    (part,) = read_records(Piece(str(path)), RecordFormat("parquet", pa.schema([("v", INSTANT)]), time_zone="UTC"))
    assert part.rejects["value"].to_pylist() == [f"{2**63 - 1} ms since 1970"]
    shown = [json.loads(text)["v"] for text in raw_records(path, RecordFormat("parquet"), [1, 2, 3])]
    assert shown == [f"{2**63 - 1} ms since 1970", "1970-01-01 00:00:00.000", None]


def test_text_that_is_not_utf8_is_rejected(column):
    raw = pa.array([b"a", b"\xfc", None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    assert column(text, pa.string()) == ["a", "is not UTF-8", None]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["id"], {}, "column 'c' is missing. Its columns: id; expected: id, c"),
        (["ID", "c"], {}, "column 'id' is missing"),
        (["id", "c", "d"], {"unknown_fields": "error"}, "column 'd' is not declared"),
        (["id", "c", "c"], {}, "column 'c' is there 2 times"),
    ],
)
def test_columns_are_found_by_their_exact_names(tmp_path, names, options, message):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * len(names), names=names), path)
    form = RecordFormat("parquet", pa.schema([("id", pa.int64()), ("c", pa.int64())]), **options)
    with pytest.raises(RecordFileError, match=rf"f\.parquet: .*{message}"):
        list(read_records(Piece(str(path)), form))


def test_more_columns_are_ignored_and_their_order_does_not_matter(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"x": [[1]], "c": ["a"], "id": [1]}), path)
    form = RecordFormat("parquet", pa.schema([("id", pa.int64()), ("c", pa.string())]))
    (part,) = read_records(Piece(str(path)), form)
    assert part.rows.to_pylist() == [{"id": 1, "c": "a"}]


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"id": range(10_000)}), path)
    raw = path.read_bytes()
    form = RecordFormat("parquet", pa.schema([("id", pa.int64())]))
    for content in (b"", b"PAR1", raw[:-1], raw[:-100], raw[:4] + bytes(2000) + raw[2004:]):
        path.write_bytes(content)
        with pytest.raises(RecordFileError, match=r"cannot read .*f\.parquet as Parquet"):
            list(read_records(Piece(str(path)), form))


def test_a_page_that_does_not_match_its_checksum_is_refused(tmp_path):
    path = tmp_path / "f.parquet"
    table = pa.table({"id": range(1_000)})
    pq.write_table(table, path, use_dictionary=False, compression="none", write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[raw.index((500).to_bytes(8, "little"))] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RecordFileError, match=r"cannot read .*f\.parquet as Parquet"):
        list(read_records(Piece(str(path)), RecordFormat("parquet", pa.schema([("id", pa.int64())]))))


def test_pieces_are_row_groups_and_rejected_rows_come_as_json(tmp_path):
    path = tmp_path / "f.parquet"
    table = pa.table(
        {
            "id": np.arange(10_000),
            "t": pa.array(np.arange(10_000), pa.timestamp("ns")),
            "d": pa.array([decimal.Decimal("1.50")] * 10_000),
            "b": [b"\xff"] * 10_000,
        }
    )
    pq.write_table(table, path, row_group_size=1000)
    form = RecordFormat("parquet", pa.schema([("id", pa.int64()), ("t", LOCAL)]))
    pieces = split(path, form, path.stat().st_size // 5)
    assert 3 <= len(pieces) <= 6
    parts = [part for piece in pieces for part in read_records(piece, form)]
    assert [n for part in parts for n in part.numbers.to_pylist()] == list(range(1, 10_001))
    assert sum(part.rejects.num_rows for part in parts) == 9990
    assert [json.loads(text) for text in raw_records(path, form, [10_000, 2])] == [
        {"id": 9999, "t": "1970-01-01 00:00:00.000009999", "d": "1.50", "b": "ff"},
        {"id": 1, "t": "1970-01-01 00:00:00.000000001", "d": "1.50", "b": "ff"},
    ]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_archives_of_parquet(tmp_path, suffix):
    plain, path = tmp_path / "f.parquet", tmp_path / f"f.parquet{suffix}"
    pq.write_table(pa.table({"id": [1, 2]}), plain)
    with pa.output_stream(str(path), compression="detect" if suffix != ".zst" else "zstd") as file:
        file.write(plain.read_bytes())
    (part,) = read_records(Piece(str(path)), RecordFormat("parquet", pa.schema([("id", pa.int64())])))
    assert part.rows.column(0).to_pylist() == [1, 2]
