"""Original records survive their file: what is parsed again equals what the file gave, record by record."""

import json
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.records import (
    INEXACT,
    Originals,
    Piece,
    RecordFileError,
    RecordFormat,
    check_heading,
    original_heading,
    original_records,
    read_originals,
    read_records,
)

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.decimal128(8, 2))])
CSV = (
    b'\xef\xbb\xbfamount,id,name\r\n1.5,1,plain\r\n"2.5",2,"two\r\nlines, ""quoted"""\n'
    b"x,3,bad\n4,4,caf\xe9\n5,5,\\xe9\n6,6\n\n7,7,\xef\xbb\xbfmark\n   \n"
)
JSON = b'{"id": 1, "name": "a", "amount": 1.5}\r\n\n{"id": "x"}\n{"id": 3, "name": "caf\xe9", "amount": 2}\n[1]\n'


def parsed(parts):
    """Return each record by number: its values, and the columns and reasons of its rejections."""
    found = {}
    for records in parts:
        rows, rejects = records.rows.to_pylist(), records.rejects.to_pylist()
        for row, number in enumerate(records.numbers.to_pylist()):
            assert number not in found
            found[number] = rows[row], [(each["column"], each["reason"]) for each in rejects if each["row"] == row]
    return found


def written(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        table = pa.table({
            "id": pa.array([1, 2, 3], pa.uint8()), "name": pa.array(["a", None, "a"]).dictionary_encode(),
            "amount": pa.array([Decimal("1.500"), Decimal("2.001"), None]), "more": [[1.5], None, []],
        })  # fmt: skip
        pq.write_table(table, path, row_group_size=2)
    else:
        path.write_bytes(CSV if kind == "csv" else JSON)
    return path


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_records_give_the_same_rows_and_rejections_as_their_file(tmp_path, kind, rng):
    path, form = written(tmp_path, kind), RecordFormat(kind, COLUMNS)
    expected = parsed(read_records(Piece(str(path)), form))
    numbers = rng.permutation(sorted(expected)).tolist()
    originals = original_records(path, form, numbers)
    path.unlink()
    found = parsed(read_originals(originals, form))
    assert {numbers[position - 1]: value for position, value in found.items()} == expected


def test_bytes_are_read_in_the_encoding_that_is_declared_now(tmp_path):
    path, form = written(tmp_path, "csv"), RecordFormat("csv", COLUMNS)
    originals = original_records(path, form, [4, 5])
    found = parsed(read_originals(originals, RecordFormat("csv", COLUMNS, encoding="latin-1")))
    assert [found[position][0]["name"] for position in (1, 2)] == ["caf\u00e9", "\\xe9"]
    refused = parsed(read_originals(originals, RecordFormat("csv", COLUMNS, encoding="utf-16")))
    assert refused[1][1] == [(None, "its bytes cannot be read as utf-16")]


def test_bytes_that_an_encoding_does_not_know_are_not_guessed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,name,amount\n1,\x81,1\n")
    form = RecordFormat("csv", COLUMNS, encoding="windows-1252")
    originals = original_records(path, form, [1])
    assert originals.data.to_pylist() == [INEXACT]
    (found,) = parsed(read_originals(originals, form)).values()
    assert "its exact bytes are not in the error table" in found[1][0][1]


def test_a_dialect_that_divides_a_record_loads_no_part_of_it(tmp_path):
    path, form = written(tmp_path, "csv"), RecordFormat("csv", COLUMNS)
    originals = original_records(path, form, [1, 2, 4])
    found = parsed(read_originals(originals, RecordFormat("csv", COLUMNS, quote="")))
    assert found[1] == ({"id": 1, "name": "plain", "amount": Decimal("1.50")}, [])
    assert "is not exactly one record" in found[2][1][0][1]


@pytest.mark.parametrize(
    ("text", "kind", "whole"),
    [
        ('1,"a', "csv", False), ("1,a\n2,b", "csv", False), ('1,"a\n2,b"', "csv", True), ("", "csv", False),
        (" ", "csv", True), ("1,a\r", "csv", True), ('{"a":1}\n{"a":2}', "json", False), ("  ", "json", False),
    ],
)  # fmt: skip
def test_only_a_text_that_is_one_record_is_parsed(text, kind, whole):
    form = RecordFormat(kind, pa.schema([("a", pa.string()), ("b", pa.string())]), header=False)
    texts = pa.array([text, json.dumps({"a": "x", "b": "y"}) if kind == "json" else "x,y"])
    found = parsed(read_originals(Originals(None, texts, pa.nulls(2, pa.binary())), form))
    assert found[2] == ({"a": "x", "b": "y"}, [])
    assert any("exactly one record" in reason for _, reason in found[1][1]) is not whole


def test_a_heading_that_is_not_known_or_does_not_match_rejects_its_records(tmp_path):
    form = RecordFormat("csv", COLUMNS)
    texts, data = pa.array(["1,1,a"]), pa.nulls(1, pa.binary())
    (unknown,) = parsed(read_originals(Originals(None, texts, data), form)).values()
    assert "the heading of its file is not known" in unknown[1][0][1]
    (other,) = parsed(read_originals(Originals("amount,id,nom", texts, data), form)).values()
    assert "column 'name' is missing" in other[1][0][1]
    assert str(tmp_path.parent.parent) not in other[1][0][1]
    assert "records.csv" not in other[1][0][1]


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_a_heading_is_checked_as_that_of_a_file(tmp_path, kind):
    heading = original_heading(written(tmp_path, kind), RecordFormat(kind, COLUMNS)) or ""
    check_heading(heading, RecordFormat(kind, COLUMNS))
    renamed = RecordFormat(kind, COLUMNS.set(2, pa.field("total", pa.decimal128(8, 2))))
    if kind == "json":
        check_heading(heading, renamed)  # each record has names of its own
        return
    with pytest.raises(RecordFileError, match=r"^column 'total' is missing") as refused:
        check_heading(heading, renamed)
    assert "records." not in str(refused.value)
    check_heading(heading, replace(renamed, missing_fields="null", unknown_fields="ignore"))
    check_heading(heading, replace(renamed, header=kind == "parquet", missing_fields="null"))
    with pytest.raises(RecordFileError):
        check_heading(heading, RecordFormat("csv" if kind == "parquet" else "parquet", COLUMNS))


def test_a_timestamp_of_96_bits_that_was_rejected_is_not_cut_when_it_is_retried(tmp_path):
    path = tmp_path / "f.parquet"
    times = pa.array([1, 1000, None, 253_402_300_800], pa.timestamp("ns"))
    pq.write_table(pa.table({"v": times}), path, use_deprecated_int96_timestamps=True)
    form = RecordFormat("parquet", pa.schema([("v", pa.timestamp("us", "UTC"))]))
    originals = original_records(path, form, [1, 2, 3])
    assert json.loads(originals.texts[0].as_py()) == {"v": "1970-01-01 00:00:00.000000001Z"}
    again = parsed(read_originals(originals, form))
    refused = "its exact values are not in the error table; deliver the record in a new file"
    assert again.pop(1) == ({"v": None}, [(None, refused)])
    assert again == {
        number: found for number, found in parsed(read_records(Piece(str(path)), form)).items() if number in {2, 3}
    }
