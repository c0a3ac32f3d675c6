"""Columns of files whose types nobody declared, by one rule for table build, join and dimension create."""

import gzip
import json

import pyarrow as pa
import pytest

from headrace.storage import Table
from headrace.storage.errors import InputError
from headrace.storage.records import RecordFileError, RecordFormat, infer_columns, sound_batches, with_delimiter

LOCAL, INSTANT = pa.timestamp("us"), pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["1", "-2", ""], pa.int64()),
        (["1", "2.5"], pa.float64()),
        (["1e5", "NaN"], pa.float64()),
        (["NaN", "x"], pa.string()),
        (["007", "8"], pa.string()),
        (["007", "1.5"], pa.string()),
        (["+1"], pa.string()),
        (["123456789012345678901"], pa.string()),
        (["123456789012345678901", "1.5"], pa.string()),
        (["true", "FALSE"], pa.bool_()),
        (["true", "1"], pa.string()),
        (["2024-05-01", ""], pa.date32()),
        (["2024-05-01", "2024-05-01 10:00:00"], LOCAL),
        (["2024-05-01T10:00:00Z"], INSTANT),
        (["2024-05-01T10:00:00Z", "2024-05-01 10:00:00"], pa.string()),
        (["2024-05-01 10:00:00.123456789"], pa.timestamp("ns")),
        (["10:30:00"], pa.time32("s")),
        (["", ""], pa.string()),
        (["785,69"], pa.string()),
        (["20244-05-01"], pa.string()),
    ],
)
def test_the_type_of_a_column_of_text(tmp_path, values, dtype):
    path = tmp_path / "f.csv"
    path.write_text("a;v\n" + "".join(f"x;{value}\n" for value in values))
    form = with_delimiter(path, RecordFormat("csv"))
    assert infer_columns(path, form) == pa.schema([("a", pa.string()), ("v", dtype)])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, None], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([10**20], pa.decimal128(38, 0)),
        ([True], pa.bool_()),
        (["1"], pa.string()),
        (["2024-05-01"], pa.date32()),
        (["2024-05-01T10:00:00Z"], INSTANT),
        ([None], pa.string()),
        (["x", 1], pa.string()),
    ],
)
def test_the_type_of_a_field_of_json(tmp_path, values, dtype):
    path = tmp_path / "f.jsonl"
    path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    assert infer_columns(path, RecordFormat("json")) == pa.schema([("v", dtype)])


@pytest.mark.parametrize(
    ("heading", "mark"), [("a,b", ","), ("a;b,c;d", ";"), ("a\tb", "\t"), ("a|b", "|"), ("a", ","), ('"a;b;c",d', ",")]
)
def test_the_delimiter_divides_the_heading_into_most_names(tmp_path, heading, mark):
    path = tmp_path / "f.csv"
    path.write_text(heading + "\n")
    assert with_delimiter(path, RecordFormat("csv")).delimiter == mark


def test_the_first_mebibyte_decides_and_a_later_value_that_does_not_fit_is_named(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text("v\n" + "1\n" * 600_000 + "x\n")
    form = RecordFormat("csv", infer_columns(path, RecordFormat("csv")))
    assert form.columns.field("v").type == pa.int64()
    with pytest.raises(
        RecordFileError, match=r"record 600002 \(the heading is record 1\), column 'v': 'x' is not a whole"
    ):
        list(sound_batches(path, form))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("f.csv", "", "does not begin with a line of column names"),
    ("f.csv", "a,a\n", "names a column twice: a"),
    ("f.csv", "a\n", "has no column 'v'; its columns are a"),
    ("f.jsonl", "[1]\n", "begins with no JSON object"),
])  # fmt: skip
def test_a_file_without_columns_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    form = RecordFormat("csv" if name.endswith("csv") else "json")
    with pytest.raises(RecordFileError, match=message):
        infer_columns(path, form, {"v": pa.string()})


@pytest.mark.parametrize("name", ["r.jsonl", "r.ndjson.gz", "r.json"])
@pytest.mark.parametrize("memory", ["1GiB", "1KiB"])
def test_a_table_of_json_lines(tmp_path, name, memory):
    text = "".join(json.dumps({"k": 5000 - n, "v": f"text {n}"}) + "\n" for n in range(5000)) + '{"k":0}\n'
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    with Table.build(tmp_path / "t", tmp_path / name, ["k"], memory=memory) as table:
        rows = pa.Table.from_batches(list(table.scan())).to_pylist()
    assert rows == [{"k": k, "v": f"text {5000 - k}" if k else None} for k in range(5001)]


def test_a_bad_line_of_json_is_named(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"k":1}\n\nnonsense\n')
    with pytest.raises(InputError, match=r"r\.jsonl, record 2: is not a JSON object"):
        Table.build(tmp_path / "t", tmp_path / "r.jsonl", ["k"])
