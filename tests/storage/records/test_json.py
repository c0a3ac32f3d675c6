"""JSON lines as RFC 8259 has them, with Python's json module as the oracle."""

import decimal
import json

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.storage.records import Piece, RecordFormat, raw_records, read_records, split
from headrace.storage.records import sources as byte_sources

ID, TEXT = ("id", pa.int64()), ("c", pa.string())
BOTH = [ID, TEXT]
many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def lines(read):
    return lambda content, columns=BOTH, **options: read(content, columns, name="f.jsonl", **options)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"id":1,"c":"x"}', (1, "x")),
        ('  { "c" : "x" , "id" : 1 }  \r', (1, "x")),
        ('{"id":null,"c":""}', (None, "")),
        (r'{"id":-5,"c":"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00\u20ac"}', (-5, '"\\/\b\f\n\r\té😀€')),
        (r'{"\u0069d":1,"\u0063":"x"}', (1, "x")),
        ('{"id":"7","c":"7"}', (7, "7")),
        ('\ufeff{"id":1,"c":"é"}', (1, "é")),
    ],
)
def test_an_object_is_a_record(lines, line, expected):
    found = lines(line + "\n")
    assert ([tuple(row.values()) for row in found.rows], found.causes) == ([expected], {})


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ('{"ID":1,"c":"x"}', "ID", "is a field that is not declared (did it mean 'id'?)"),
        ('{"id":1,"c":"x","d":2}', "d", "is a field that is not declared"),
        ('{"id":1}', "c", "is missing; write null for no value (a source of a pipeline with `missing_fields: null`"),
        ('{"id":1,"c":"x","id":2}', "id", "is a field that is there twice"),
        ('{"id":1.0,"c":"x"}', "id", "is not a whole number"),
        ('{"id":1e3,"c":"x"}', "id", "is not a whole number"),
        ('{"id":9223372036854775808,"c":"x"}', "id", "out of the range of bigint"),
        ('{"id":true,"c":"x"}', "id", "is a JSON boolean, not a number for bigint"),
        ('{"id":[1],"c":"x"}', "id", "is a JSON object or array, not a number"),
        ('{"id":1,"c":5}', "c", "is a JSON number, not a JSON string for string"),
        ('{"id":1,"c":true}', "c", "is a JSON boolean, not a JSON string"),
        ('{"id":1,"c":{"a":[1,{"b":null}]}}', "c", "is a JSON object or array"),
        ('{"id":01,"c":"x"}', None, "is not valid JSON at byte 7"),
        ('{"id":+1,"c":"x"}', None, "is not valid JSON"),
        ('{"id":NaN,"c":"x"}', None, "is not valid JSON"),
        ('{"id":1,"c":"x",}', None, "is not valid JSON"),
        ('{"id":1 "c":"x"}', None, "is not valid JSON"),
        ('{"id":1,"c":"x"} x', None, "is not valid JSON"),
        ('{"id":1,"c":"x"', None, "is not valid JSON at its end"),
        ("{'id':1}", None, "is not valid JSON"),
        ('{"id":1,"c":"a\tb"}', None, "is not valid JSON"),
        (r'{"id":1,"c":"\x"}', None, "is not valid JSON"),
        (r'{"id":1,"c":"\ud800"}', None, "is not valid JSON"),
        (r'{"id":1,"c":"\ud800A"}', None, "is not valid JSON"),
        (r'{"id":1,"c":"\udc00"}', None, "is not valid JSON"),
        ("[1]", None, "is not a JSON object; write one object a line"),
        ("5", None, "is not a JSON object"),
        ("nonsense", None, "is not a JSON object"),
        ('{"id":1,"c":' + "[" * 600 + "]" * 600 + "}", None, "is nested deeper than 512 levels"),
        (b'{"id":1,"c":"M\xfcller"}', "c", "is not UTF-8 (byte 0xfc)"),
    ],
)
def test_a_bad_line_is_rejected_alone_and_kept_as_it_came(lines, line, column, reason):
    raw = line if isinstance(line, bytes) else line.encode()
    found = lines(b'{"id":1,"c":"a"}\n\n' + raw + b'\n{"c":"z","id":3}')
    assert found.good == [{"id": 1, "c": "a"}, {"id": 3, "c": "z"}]
    assert (found.causes[2][0]["column"], len(found.causes)) == (column, 1)
    assert reason in found.reasons[2]
    assert found.raw == {2: raw.decode("utf-8", "backslashreplace")}


def test_unknown_and_missing_fields_by_policy(lines):
    found = lines('{"id":1,"x":{"y":[1,2]},"z":"\\n"}\n{}\n', unknown_fields="ignore", missing_fields="null")
    assert (found.rows, found.causes) == ([{"id": 1, "c": None}, {"id": None, "c": None}], {})


def test_digits_are_not_lost_to_floating_point(lines):
    kind = pa.decimal128(38, 20)
    found = lines('{"v":123456789012345678.12345678901234567890}\n{"v":"0.1"}\n{"v":0.1}\n', [("v", kind)])
    assert [str(row["v"]) for row in found.rows] == [
        "123456789012345678.12345678901234567890",
        "0.10000000000000000000",
        "0.10000000000000000000",
    ]


def test_the_numbers_of_json_have_a_point_whatever_is_declared(lines):
    kind = pa.decimal128(10, 2)
    found = lines('{"v":1.5}\n{"v":"1,5"}\n{"v":"1.5"}\n', [("v", kind)], decimal=",")
    assert [row["v"] for row in found.rows] == [decimal.Decimal("1.50")] * 2 + [None]
    assert list(found.causes) == [3]


def test_dates_and_times_are_those_of_csv(lines):
    columns = [("d", pa.date32()), ("t", pa.timestamp("us", "UTC"))]
    found = lines('{"d":"2024-02-30","t":"10:30:00"}\n{"d":20240501,"t":1714559400}\n', columns)
    assert "is not a day of the calendar" in found.reasons[1]
    assert "is not a timestamp" in found.reasons[1]
    assert found.reasons[2].count("is a JSON number") == 2


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=6)
)
objects = st.dictionaries(
    st.sampled_from(["a", "é", "c d", "n"]),
    st.recursive(
        values, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)  # fmt: skip


@many
@given(
    rows=st.lists(objects, min_size=1, max_size=10),
    ascii_only=st.booleans(),
    spaces=st.sampled_from([(",", ":"), (" , ", " : ")]),
    block=st.integers(8, 60),
)
def test_what_python_writes_comes_back(tmp_path, rows, ascii_only, spaces, block):
    path = tmp_path / "f.jsonl"
    text = [json.dumps(row, ensure_ascii=ascii_only, separators=spaces) for row in rows]
    path.write_bytes("\n".join(text).encode("utf-8", "surrogatepass"))
    columns = {"a": pa.int64(), "é": pa.string(), "c d": pa.float64(), "n": pa.bool_()}
    form = RecordFormat("json", pa.schema(columns), missing_fields="null")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_sources, "_BLOCK_BYTES", block)
        for pieces in ([Piece(str(path))], split(path, form, 30)):
            parts = [part for piece in pieces for part in read_records(piece, form)]
            found = [row for part in parts for row in part.rows.to_pylist()]
            rejected = {part.numbers[row].as_py() for part in parts for row in part.rejects["row"].to_pylist()}
            assert len(found) == len(rows)
            for number, (row, mine) in enumerate(zip(rows, found, strict=True), 1):
                assert (number in rejected) == (not fits(row))
                if number not in rejected:
                    assert mine == {name: row.get(name) for name in columns}
    assert raw_records(path, form, list(range(1, len(rows) + 1))) == text


def fits(row):
    def number(value):
        return isinstance(value, int | float) and not isinstance(value, bool)

    a, text, real, flag = (row.get(name) for name in ("a", "é", "c d", "n"))
    good = a is None or (number(a) and isinstance(a, int) and -(2**63) <= a < 2**63)
    good = good or (
        isinstance(a, str) and a.isascii() and a.lstrip("+-").isdigit() and len(a.lstrip("+-")) > len(a) - 2
    )
    good &= text is None or isinstance(text, str)
    good &= real is None or (number(real) and json.dumps(real) not in {"Infinity", "-Infinity"})
    return good and (flag is None or isinstance(flag, bool))


@pytest.mark.parametrize(("end", "hinted"), [("\r", True), ("\r\n", False), (" ", False)])
def test_lines_that_only_carriage_returns_end_are_named(lines, end, hinted):
    found = lines(f'{{"id":1,"c":"x"}}{end}{{"id":2,"c":"y"}} z{end}')
    assert ("a carriage return alone ends no line, so end each line with a line feed" in str(found.causes)) == hinted
    assert "is not valid JSON" in str(found.causes)
