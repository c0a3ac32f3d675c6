"""CSV as RFC 4180 has it, with Python's csv module as the oracle of what is well formed."""

import bz2
import csv
import gzip
import io
import itertools
import re

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.storage.records import Piece, RecordFileError, RecordFormat, raw_records, read_records, split
from headrace.storage.records import sources as byte_sources

ID, TEXT = ("id", pa.int64()), ("c", pa.string())
BOTH = [ID, TEXT]
many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def texts(found):
    return [row["c"] for row in found.rows]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('id,c\n1,"Acme ""Best"" Inc"\n', ['Acme "Best" Inc']),
        ('id,c\n1,""\n2,\n3,""""\n', ["", None, '"']),
        ('id,c\n1,"a\nb"\r\n2,"a\r\nb"\n', ["a\nb", "a\r\nb"]),
        ('id,c\r\n1,"a,b"\r\n2,x\r\n', ["a,b", "x"]),
        ("id,c\n\n1,x\n\n\n2,y", ["x", "y"]),
        ("\ufeffid,c\n1,x\n", ["x"]),
        ("id,c\r1,x\r2,y\r", ["x", "y"]),
        ("id,c\n1,  x \n", ["  x "]),
        ("id,c\n1,NULL\n2,NA\n", ["NULL", "NA"]),
        ('"id","c"\n1,x\n', ["x"]),
        ("id,c\n", []),
        ("", []),
        ("\n\n", []),
        ("id,c\n1,\0x\n", ["\0x"]),
        ("id,c\n1,é\u2028\U0001f600\n", ["é\u2028\U0001f600"]),
    ],
)
def test_text_comes_as_it_is_written(read, content, expected):
    found = read(content, BOTH)
    assert texts(found) == expected
    assert not found.causes
    assert found.numbers == list(range(1, len(expected) + 1))


def test_columns_are_read_by_name_in_any_order(read):
    assert read("c,id\nx,1\n", BOTH).rows == [{"id": 1, "c": "x"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ID,c\n1,x\n", "column 'id' is missing (there is 'ID'); column 'ID' is not declared. Its heading: ID, c"),
        ("id\n1\n", "column 'c' is missing. Its heading: id; expected: id, c"),
        ("id,c,d\n1,x,y\n", "column 'd' is not declared. Its heading: id, c, d"),
        ("id,c,c\n1,x,y\n", "column 'c' is there 2 times"),
        ("id, c\n1,x\n", "(there is ' c')"),
        ("id;c\n1;x\n", "Its heading: id;c; expected: id, c"),
        ("1,x\n", "column 'id' is missing"),
        ('id,"c\n1,x\n', "the heading has a quote that is never closed"),
        ("id,\xe9\n".encode("latin-1"), "the heading is not utf-8 (byte 0xe9 at 4); declare the file's encoding"),
        ("id,c\n1,x\n".encode("utf-16"), "the heading is not utf-8"),
    ],
)  # fmt: skip
def test_another_heading_is_refused_with_the_file_and_what_was_expected(read, content, message):
    with pytest.raises(RecordFileError, match=r"f\.csv: .*" + re.escape(message)):
        read(content, BOTH)


def test_columns_beside_the_declared_ones_are_ignored_and_missing_ones_null_where_that_is_declared(read):
    found = read("x,id\n9,1\n", BOTH, unknown_fields="ignore", missing_fields="null")
    assert found.rows == [{"id": 1, "c": None}]


def test_without_a_heading_columns_come_by_position(read):
    assert read("1,x\n2,y\n", BOTH, header=False).rows == [{"id": 1, "c": "x"}, {"id": 2, "c": "y"}]
    assert "3 fields where the schema has 2" in read("1,x,y\n", BOTH, header=False).reasons[1]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("2", "1 field where the heading has 2; write every field, an empty one for null, and quote a field that"),
        ("2,x,y", "3 fields where the heading has 2; quote a field that holds ','"),
        ("2,785,69", "3 fields where the heading has 2"),
        ('2,5" pipe', 'a quote (") is inside a field that is not quoted'),
        ('2,"a"b', "text follows a closing quote"),
        ('2,"a" ', "text follows a closing quote"),
        ('2, "a"', "is inside a field that is not quoted"),
        ('2,"a"b,"c\nd"', "text follows a closing quote"),
        (" ", "1 field where the heading has 2"),
        (b"2,M\xfcller", "is not UTF-8 (byte 0xfc); declare the file's encoding"),
        (b"2,\xc3", "is not UTF-8 (byte 0xc3)"),
        (b"2,\xed\xa0\x80", "is not UTF-8 (byte 0xed)"),
        (b"2,\xc0\x80", "is not UTF-8 (byte 0xc0)"),
        (b"2,\xf4\x90\x80\x80", "is not UTF-8 (byte 0xf4)"),
        ("x,x", "is not a whole number"),
        ('"",x', "is not a whole number; leave the field empty for null"),
    ],
)
def test_a_bad_record_is_rejected_alone_and_kept_as_it_came(read, record, reason):
    raw = record if isinstance(record, bytes) else record.encode()
    found = read(b"id,c\n1,a\n" + raw + b"\n3,c\n", BOTH)
    assert found.good == [{"id": 1, "c": "a"}, {"id": 3, "c": "c"}]
    assert reason in found.reasons[2]
    assert found.raw == {2: raw.decode("utf-8", "backslashreplace")}


def test_each_value_of_a_record_that_is_wrong_is_told(read):
    found = read("id,n,c\nx,y,z\n", [ID, ("n", pa.int8()), TEXT])
    assert [(cause["column"], cause["value"]) for cause in found.causes[1]] == [("id", "x"), ("n", "y")]


def test_a_long_value_is_told_by_its_beginning(read):
    (cause,) = read("id,c\n" + "9" * 5000 + ",x\n", BOTH).causes[1]
    assert cause["value"] == "9" * 1000 + "… (5,000 characters)"


@pytest.mark.parametrize("block", [1 << 20, 7])
def test_a_quote_that_is_never_closed_is_told_with_its_record(read, monkeypatch, block):
    monkeypatch.setattr(byte_sources, "_BLOCK_BYTES", block)
    with pytest.raises(
        RecordFileError, match=r"f\.csv: record 2 opens a quote that is never closed.*begins with '2,\"b'"
    ):
        read('id,c\n1,a\n2,"b\n3,c\n4,d\n', BOTH)


def test_spellings_of_null_are_declared_and_a_quoted_one_is_text(read):
    found = read('id,c\nNA,NA\n2,"NA"\n3,\n4,NAN\n', BOTH, nulls=("NA", "-"))
    assert [tuple(row.values()) for row in found.rows] == [(None, None), (2, "NA"), (3, None), (4, "NAN")]


@pytest.mark.parametrize(
    ("options", "content", "expected"),
    [
        ({"delimiter": "\t"}, "id\tc\n1\ta,b\n", ["a,b"]),
        ({"quote": "'"}, "id,c\n1,'it''s \"x\"'\n", ['it\'s "x"']),
        ({"quote": ""}, 'id,c\n1,5" pipe\n2,"a"\n', ['5" pipe', '"a"']),
        ({"escape": "\\"}, 'id,c\n1,"a \\"b\\" c"\n2,a\\,b\n3,"\\\\"\n', ['a "b" c', "a,b", "\\"]),
    ],
)
def test_other_dialects(read, options, content, expected):
    found = read(content, BOTH, **options)
    assert (texts(found), found.causes) == (expected, {})


@pytest.mark.parametrize(
    "encoding", ["latin-1", "windows-1252", "utf-16", "utf-16-le", "utf-8-sig", "shift_jis", "gb18030"]
)
@pytest.mark.parametrize("block", [1 << 20, 5])
def test_text_in_a_declared_encoding(read, encoding, block, monkeypatch):
    monkeypatch.setattr(byte_sources, "_BLOCK_BYTES", block)
    word = "日本, 語" if encoding in {"shift_jis", "gb18030"} else "Müller, é"
    found = read(f'id,c\n1,"{word}"\n2,x\n'.encode(encoding), BOTH, encoding=encoding)
    assert texts(found) == [word, "x"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize(("name", "content"), [("f.csv", "id,c\n1,a\n"), ("f.jsonl", '{"id": 1, "c": "a"}\n')])
def test_a_file_without_the_byte_order_mark_of_its_encoding_is_named_with_the_remedy(read, name, content, encoding):
    raw = content.encode(f"{encoding}-le")
    with pytest.raises(RecordFileError, match=rf"{name} as .*BOM; declare the encoding .*utf-16-le"):
        read(raw, BOTH, name=name, encoding=encoding)
    assert read(raw, BOTH, name=name, encoding=f"{encoding}-le").good == [{"id": 1, "c": "a"}]


def test_a_byte_that_the_declared_encoding_does_not_know_rejects_its_record(read):
    found = read(b"id,c\n1,a\n2,\x81\n3,\x80\n", BOTH, encoding="windows-1252")
    assert found.good == [{"id": 1, "c": "a"}, {"id": 3, "c": "€"}]
    assert "has a byte that windows-1252 does not know" in found.reasons[2]


def test_two_keys_in_another_encoding_never_become_one(read):
    found = read(b"id,c\n1,M\xfcller\n2,M\xf6ller\n", BOTH)
    assert (found.good, len(found.causes)) == ([], 2)


@pytest.mark.parametrize("size", [100, 3 << 20, 5 << 20])
def test_large_fields(read, size):
    word = "x" * size
    found = read(f'id,c\n1,a\n2,"{word}"\n3,{word}\n4,b\n', BOTH)
    assert texts(found) == ["a", word, word, "b"]


COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda raw: pa.compress(raw, codec="zstd", asbytes=True),
}


def compressed(tmp_path, suffix, raw):
    path = tmp_path / f"f.csv{suffix}"
    with pa.output_stream(str(path), compression="zstd") if suffix == ".zst" else path.open("wb") as file:
        file.write(raw if suffix == ".zst" else COMPRESS[suffix](raw))
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_archives(tmp_path, suffix):
    lines = "".join(f"{n},text {n}\n" for n in range(200_000))
    path = compressed(tmp_path, suffix, f"id,c\n{lines}".encode())
    form = RecordFormat("csv", pa.schema(BOTH))
    assert sum(part.rows.num_rows for part in read_records(Piece(str(path)), form)) == 200_000
    assert raw_records(path, form, [200_000, 1]) == ["199999,text 199999", "0,text 0"]
    for cut in (-1, -9, 1000, 10, 1, 0):
        short = tmp_path / f"cut.csv{suffix}"
        short.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(RecordFileError, match=rf"cannot read .*cut\.csv\{suffix} as CSV: .*deliver it again"):
            list(read_records(Piece(str(short)), form))
    if suffix == ".zst":
        return  # Arrow writes no checksums into it
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    short.write_bytes(damaged)
    with pytest.raises(RecordFileError, match=r"cut\.csv"):
        list(read_records(Piece(str(short)), form))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_archives_of_several_parts(tmp_path, suffix):
    first, second = (compressed(tmp_path, suffix, raw).read_bytes() for raw in (b"id,c\n1,x\n", b"2,y\n"))
    path = tmp_path / f"both.csv{suffix}"
    path.write_bytes(first + second)
    parts = list(read_records(Piece(str(path)), RecordFormat("csv", pa.schema(BOTH))))
    assert sum(part.rows.num_rows for part in parts) == 2


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["another text behind it", "second part cut", "second part without its mark"])
def test_an_archive_whose_later_part_is_damaged_is_not_read_in_part(tmp_path, suffix, damage):
    first, second = (compressed(tmp_path, suffix, raw).read_bytes() for raw in (b"id,c\n1,x\n", b"2,y\n"))
    more = {"another text behind it": b"more", "second part cut": second[:-1]}.get(damage, b"XX" + second[2:])
    path = tmp_path / f"both.csv{suffix}"
    path.write_bytes(first + more)
    with pytest.raises(RecordFileError, match=r"cannot read .*both\.csv.* deliver it again"):
        list(read_records(Piece(str(path)), RecordFormat("csv", pa.schema(BOTH))))


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (gzip.compress(b"id,c\n", mtime=0), r"it is a gzip archive; end its name in \.gz"),
        (bz2.compress(b"id,c\n"), r"end its name in \.bz2"),
        (pa.compress(b"id,c\n1,a\n", codec="zstd", asbytes=True), r"end its name in \.zst"),
        ("id,c\n1,a\n".encode("utf-16"), "declare `encoding: utf-16`"),
        (b"id,caf\xe9\n", "declare the file's encoding"),
    ],
)
def test_a_file_of_another_kind_is_told_with_its_remedy(read, content, remedy):
    with pytest.raises(RecordFileError, match=rf"f\.csv: the heading is not utf-8 .*{remedy}"):
        read(content, BOTH)


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_zeros_behind_an_archive_are_padding(tmp_path, suffix):
    path = compressed(tmp_path, suffix, b"id,c\n1,x\n")
    path.write_bytes(path.read_bytes() + bytes(1000))
    (part,) = read_records(Piece(str(path)), RecordFormat("csv", pa.schema(BOTH)))
    assert part.rows.to_pylist() == [{"id": 1, "c": "x"}]


def test_a_surrogate_in_another_encoding_rejects_its_record(read):
    found = read(b"id,c\n1,+2AA-\n2,b\n", BOTH, encoding="utf-7")
    assert found.good == [{"id": 2, "c": "b"}]
    assert found.reasons == {1: "has a byte that utf-7 does not know"}


def test_a_record_of_more_bytes_than_fit_is_told_with_its_file(read, monkeypatch):
    monkeypatch.setattr(byte_sources, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(byte_sources, "_MOST_BYTES", 1000)
    with pytest.raises(RecordFileError, match=r"cannot read .*f\.csv as CSV: a record is larger than"):
        read("id,c\n1," + "x" * 2000 + "\n", BOTH)


def test_what_cannot_be_opened_is_named(tmp_path):
    form = RecordFormat("csv", pa.schema(BOTH))
    with pytest.raises(RecordFileError, match=r"there is no file .*gone\.csv"):
        list(read_records(Piece(str(tmp_path / "gone.csv")), form))
    with pytest.raises(RecordFileError, match=r"cannot read .* as CSV"):
        list(read_records(Piece(str(tmp_path)), form))


fields = st.one_of(
    st.none(),
    st.text(st.sampled_from("ab\",;\n\r '\\é\U0001f600x"), max_size=8),
    st.text(max_size=5).filter(lambda text: text.isprintable() or not text),
)


@many
@given(
    rows=st.lists(st.tuples(fields, fields, fields), max_size=30),
    line=st.sampled_from(["\n", "\r\n"]),
    delimiter=st.sampled_from(",;|\t"),
    everything=st.booleans(),
    block=st.integers(6, 40),
)
def test_what_python_writes_comes_back(tmp_path, rows, line, delimiter, everything, block):
    """Nulls are written as empty fields and empty text in quotes, in blocks so small that everything crosses them."""
    text = delimiter.join("abc") + line
    for row in rows:
        text += delimiter.join(written(field, delimiter, everything) for field in row) + line
    path = tmp_path / "f.csv"
    path.write_bytes(text.encode())
    assert [
        [field or None for field in row]
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    ][1:] == [[field or None for field in row] for row in rows]
    form = RecordFormat("csv", pa.schema([(name, pa.string()) for name in "abc"]), delimiter=delimiter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_sources, "_BLOCK_BYTES", block)
        parts = list(read_records(Piece(str(path)), form))
        assert [tuple(row.values()) for part in parts for row in part.rows.to_pylist()] == rows
        assert not any(part.rejects.num_rows for part in parts)
        pieces = split(path, form, 20)
        again = [row for piece in pieces for part in read_records(piece, form) for row in part.rows.to_pylist()]
        numbers = [n for piece in pieces for part in read_records(piece, form) for n in part.numbers.to_pylist()]
    assert [tuple(row.values()) for row in again] == rows
    assert numbers == list(range(1, len(rows) + 1))


def written(field, delimiter, everything):
    if field is None:
        return ""
    special = any(letter in field for letter in ('"', "\n", "\r", delimiter))
    return '"' + field.replace('"', '""') + '"' if everything or special or not field else field


@many
@given(
    raw=st.lists(st.sampled_from([b"a", b'"', b",", b"\n", b"\r", b"1", b"\xff", "é".encode()]), max_size=40),
    block=st.integers(8, 30),
)
def test_any_bytes_give_rows_or_reasons_in_any_blocks_and_pieces(tmp_path, raw, block):
    """What is read does not depend on how the file is cut into blocks; every record is a row once."""
    path = tmp_path / "f.csv"
    path.write_bytes(b"id,c\n" + b"".join(raw))
    form = RecordFormat("csv", pa.schema(BOTH))
    whole = attempt(form, [Piece(str(path))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_sources, "_BLOCK_BYTES", block)
        assert attempt(form, [Piece(str(path))]) == whole
        assert attempt(form, split(path, form, 10)) == whole


def attempt(form, pieces):
    found = []
    try:
        for piece in pieces:
            for part in read_records(piece, form):
                numbers = part.numbers.to_pylist()
                rejects = [(numbers[row.pop("row")], row) for row in part.rejects.to_pylist()]
                found.append((list(zip(numbers, part.rows.to_pylist(), strict=True)), rejects))
    except RecordFileError as error:
        return str(error)
    return [row for rows, _ in found for row in rows], [cause for _, causes in found for cause in causes]


def test_well_formed_records_are_those_of_python(tmp_path):
    """The strict reader of Python's csv module refuses what is refused here, and reads the rest alike."""
    for record in ('a,"b"', 'a,"b""c"', "a,", '"",x', "a,b,c", 'a,"b" ', '"a\nb",c'):
        path = tmp_path / "f.csv"
        path.write_text(f"x,y\n{record}\n")
        form = RecordFormat("csv", pa.schema([("x", pa.string()), ("y", pa.string())]))
        (part,) = read_records(Piece(str(path)), form)
        try:
            wanted = next(csv.reader(io.StringIO(record), strict=True))
        except csv.Error:
            wanted = None
        good = wanted is not None and len(wanted) == 2
        assert (part.rejects.num_rows == 0) == good, record
        if good:
            assert [value or "" for value in part.rows.to_pylist()[0].values()] == wanted


def test_pieces_of_a_large_file_are_cut_between_records(tmp_path):
    path = tmp_path / "f.csv"
    rows = [f'{n},"line\n{n},\n""x"""\n\n' for n in range(100_000)]
    path.write_text("id,c\n" + "".join(rows))
    form = RecordFormat("csv", pa.schema(BOTH))
    pieces = split(path, form, 1 << 20)
    assert len(pieces) > 1
    assert pieces[-1].stop is None
    assert all(before.stop == after.start for before, after in itertools.pairwise(pieces))
    found = [row for piece in pieces for part in read_records(piece, form) for row in part.rows.to_pylist()]
    assert found == [{"id": n, "c": f'line\n{n},\n"x"'} for n in range(100_000)]
    assert raw_records(path, form, [100_000]) == [rows[-1].strip("\n")]
    assert split(path, form, 1 << 30) == [Piece(str(path))]
    assert split(path, RecordFormat("csv", pa.schema(BOTH), encoding="latin-1"), 1 << 20) == [Piece(str(path))]


def test_a_record_that_is_not_there_is_told(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text("id,c\n1,x\n")
    with pytest.raises(RecordFileError, match=r"has no record 2; it has changed"):
        raw_records(path, RecordFormat("csv", pa.schema(BOTH)), [2])
