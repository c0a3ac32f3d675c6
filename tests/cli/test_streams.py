"""Files become batches of one schema, or an error that names the file and the line; nothing is dropped silently."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.cli.arguments.streams import CsvFormat, open_stream
from headrace.cli.reporting.errors import InputFileError
from headrace.storage.errors import InputError


def rows_of(path, **options):
    stream = open_stream(path, **options)
    return pa.Table.from_batches(stream.batches(), stream.schema).to_pylist()


def write(path, text):
    path.write_text(text)
    return path


def test_a_folder_is_read_file_by_file_in_name_order(tmp_path):
    for name in ("b", "a"):
        pq.write_table(pa.table({"k": [name]}), tmp_path / f"{name}.parquet")
    write(tmp_path / "_SUCCESS", "")
    write(tmp_path / ".hidden.csv", "")
    assert rows_of(tmp_path) == [{"k": "a"}, {"k": "b"}]


def test_parquet_tells_its_rows_before_it_is_read(tmp_path):
    pq.write_table(pa.table({"k": range(10)}), tmp_path / "a.parquet")
    stream = open_stream(tmp_path, batch_rows=3)
    assert stream.rows == 10
    assert [batch.num_rows for batch in stream.batches()] == [3, 3, 3, 1]


def test_files_without_a_known_name_are_known_by_their_content(tmp_path):
    pq.write_table(pa.table({"k": [1]}), tmp_path / "part-0")
    assert rows_of(tmp_path) == [{"k": 1}]


def test_columns_are_matched_by_name(tmp_path):
    write(tmp_path / "1.csv", "a,b\n1,x\n")
    write(tmp_path / "2.csv", "b,a\ny,2\n")
    assert rows_of(tmp_path) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_an_unquoted_empty_field_is_missing_and_a_quoted_one_is_text(tmp_path):
    assert rows_of(write(tmp_path / "a.csv", 'a,b\n,1\n"",2\nNA,3\n')) == [
        {"a": None, "b": 1},
        {"a": "", "b": 2},
        {"a": "NA", "b": 3},
    ]


def test_other_spellings_of_a_missing_value_are_declared(tmp_path):
    path = write(tmp_path / "a.csv", "a,b\nNA,1\nx,NA\n")
    assert rows_of(path, csv=CsvFormat(nulls=("NA",))) == [{"a": None, "b": 1}, {"a": "x", "b": None}]


def test_a_known_type_wins_over_the_look_of_the_values(tmp_path):
    path = write(tmp_path / "a.csv", "a\n007\n")
    assert rows_of(path, csv=CsvFormat(types={"a": pa.string()})) == [{"a": "007"}]


def test_a_column_that_begins_empty_is_text(tmp_path):
    write(tmp_path / "1.csv", "a,b\n,1\n")
    write(tmp_path / "2.csv", "a,b\nx,2\n")
    assert [row["a"] for row in rows_of(tmp_path)] == [None, "x"]


def test_quoted_fields_may_hold_delimiters_and_line_ends(tmp_path):
    assert rows_of(write(tmp_path / "a.csv", 'a,b\n"x,\ny",1\n')) == [{"a": "x,\ny", "b": 1}]


def test_a_stream_may_be_read_twice(tmp_path):
    stream = open_stream(write(tmp_path / "a.csv", "a\n1\n"))
    assert [batch.num_rows for _ in range(2) for batch in stream.batches()] == [1, 1]


def test_a_row_is_placed_in_its_file_across_batches(tmp_path):
    for name in ("a", "b"):
        pq.write_table(pa.table({"k": range(10)}), tmp_path / f"{name}.parquet")
    stream = open_stream(tmp_path, batch_rows=3)
    assert sum(batch.num_rows for batch in stream.batches()) == 20
    with pytest.raises(InputError, match=r"bad: .*b\.parquet, record 8$"), stream.placing():
        raise InputError.of_row(17, "bad: {}".format)


BAD = {
    "missing": (lambda _: None, "there is no file or folder"),
    "empty folder": (lambda path: path.mkdir(), "holds no files"),
    "unknown kind": (lambda path: path.write_bytes(b"\x00\x01"), "cannot tell the format of"),
    "two kinds": (
        lambda path: (
            path.mkdir(),
            write(path / "a.csv", "k\n1\n"),
            pq.write_table(pa.table({"k": [1]}), path / "b.parquet"),
        ),
        "is csv but .*b.parquet is parquet",
    ),
    "too many fields": (
        lambda path: (path.mkdir(), write(path / "a.csv", "a,b\n1,2\n3,4,5\n")),
        r"a\.csv, record 3 .*: 3 fields where the heading has 2",
    ),
    "too few fields": (
        lambda path: (path.mkdir(), write(path / "a.csv", "a,b\n1,2\n3\n")),
        r"a\.csv, record 3 .*: 1 field where the heading has 2",
    ),
    "unclosed quote": (
        lambda path: (path.mkdir(), write(path / "a.csv", 'a,b\n1,"x\n2,y\n3,z\n')),
        r"a\.csv: record 1 opens a quote that is never closed",
    ),
    "text in a column of numbers": (
        lambda path: (path.mkdir(), write(path / "a.csv", "a\n1\n"), write(path / "b.csv", "a\nx\n")),
        r"b\.csv, record 2 .*, column 'a': 'x' is not a whole number; name the column in --text",
    ),
    "a column too many": (
        lambda path: (path.mkdir(), write(path / "a.csv", "a\n1\n"), write(path / "b.csv", "a,b\n1,2\n")),
        r"b\.csv: column 'b' is not declared. Its heading: a, b; expected: a",
    ),
    "an unknown column to keep as text": (
        lambda path: (path.mkdir(), write(path / "a.csv", "a,b\n1,2\n")),
        "no column 'c'; its columns are a, b",
        {"csv": CsvFormat(types={"c": pa.string()})},
    ),
    "a column twice": (lambda path: (path.mkdir(), write(path / "a.csv", "a,a\n1,2\n")), "names a column twice"),
    "no header": (lambda path: (path.mkdir(), write(path / "a.csv", "")), "does not begin with a line of column names"),
    "text that is not UTF-8": (
        lambda path: (path.mkdir(), (path / "a.csv").write_bytes(b"a,b\n1,M\xfcller\n")),
        r"a\.csv, record 2 .*, column 'b': 'M\\xfcller' is not UTF-8 \(byte 0xfc\)",
    ),
    "text that is not UTF-8 behind a mebibyte": (
        lambda path: (path.mkdir(), (path / "a.csv").write_bytes(b"a,b\n" + b"1,b\n" * 400_000 + b"1,\xfc\n")),
        r"a\.csv, record 400002 .* is not UTF-8",
    ),
    "a heading that is not UTF-8": (
        lambda path: (path.mkdir(), (path / "a.csv").write_bytes(b"a,\xfc\n1,2\n")),
        r"a\.csv: the heading is not utf-8",
    ),
    "UTF-16": (
        lambda path: (path.mkdir(), (path / "a.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))),
        r"a\.csv: the heading is not utf-8",
    ),
    "cut Parquet": (lambda path: (path.mkdir(), write(path / "a.parquet", "PAR1 no more")), "cannot read .*a.parquet"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(tmp_path, case):
    make, message, *options = BAD[case]
    path = tmp_path / "input"
    make(path)
    with pytest.raises(InputFileError, match=message):
        rows_of(path, **(options[0] if options else {}))
