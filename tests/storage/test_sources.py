import errno
import os

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from headrace.storage import Table
from headrace.storage.errors import HeadraceError, InputError, KeyInputError, UniqueViolationError
from headrace.storage.load.sources import connect

TINY = "1KiB"  # less than any source here, so that it is sorted on disk
ROWS = 30_000


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(5)
    ticks = rng.integers(-(10**12), 10**12, ROWS)
    return pa.table(
        {
            "k": rng.permutation(ROWS),
            "text": pa.array([None if n % 7 == 0 else f"text {n}" for n in range(ROWS)]),
            "real": pa.array(rng.random(ROWS)),
            "half": pa.array(rng.random(ROWS).astype(np.float16)),
            "instant": pa.array(ticks, pa.timestamp("ns", tz="Europe/Berlin")),
            "local": pa.array(ticks, pa.timestamp("us")),
            "span": pa.array(ticks, pa.duration("s")),
            "time": pa.array(np.abs(ticks), pa.time64("ns")),
            "wide": pa.array(ticks).cast(pa.decimal128(19, 0)).cast(pa.decimal128(38, 10)),
            "raw": pa.array([b"\0\xff" * (n % 3) for n in range(ROWS)]),
        }
    )


def expected(rows, key="k"):
    return rows.sort_by(key).combine_chunks()


def built(tmp_path, source, memory, **options):
    with Table.build(tmp_path / "t", source, ["k"], memory=memory, page_size=4096, **options) as table:
        assert table.check().ok
        return pa.Table.from_batches(list(table.scan()), schema=table.schema)


def assert_same(found, rows):
    wanted = expected(rows)
    assert found.equals(wanted.cast(found.schema))


@pytest.mark.parametrize("memory", ["1GiB", TINY])
@pytest.mark.parametrize(
    "make",
    [
        lambda table: table,
        lambda table: table.combine_chunks().to_batches()[0],
        lambda table: table.to_reader(1000),
        lambda table: iter(table.to_batches(1000)),
        lambda table: table.to_batches(1000),
    ],
    ids=["table", "batch", "reader", "iterator", "list"],
)
def test_arrow_sources_of_any_size_and_order(tmp_path, rows, make, memory):
    assert_same(built(tmp_path, make(rows), memory), rows)


@pytest.mark.parametrize("memory", ["1GiB", TINY])
@pytest.mark.parametrize("columns", [["k", "text", "real", "wide", "local"], None], ids=["plain types", "all types"])
def test_parquet_files_and_folders(tmp_path, rows, columns, memory):
    part = rows if columns is None else rows.select(columns)
    folder = tmp_path / "parts" / "deep"
    folder.mkdir(parents=True)
    for start in (0, 10_000, 20_000):
        pq.write_table(part.slice(start, 10_000), folder / f"{start}.parquet")
    (folder / "_SUCCESS").touch()
    (folder / ".hidden.parquet").touch()
    assert_same(built(tmp_path, tmp_path / "parts", memory), part)
    files = sorted(str(path) for path in folder.glob("[0-9]*"))
    assert_same(built(tmp_path, files, memory, overwrite=True), part)


@pytest.mark.parametrize("memory", ["1GiB", TINY])
def test_parquet_in_key_order_is_passed_on(tmp_path, rows, memory, monkeypatch):
    monkeypatch.setattr("headrace.storage.load.sources.connect", lambda *_args: pytest.fail("was sorted again"))
    monkeypatch.setattr("headrace.storage.load.files._PART_ROWS", 8000)  # row groups are read two by two
    pq.write_table(expected(rows), tmp_path / "r.parquet", row_group_size=5000)
    assert_same(built(tmp_path, tmp_path / "r.parquet", memory), rows)


@pytest.mark.parametrize("memory", ["1GiB", TINY])
@pytest.mark.parametrize("name", ["r.csv", "r.csv.gz"])
def test_csv_files(tmp_path, rows, name, memory):
    part = rows.select(["k", "real", "local"])
    with pa.output_stream(tmp_path / name, compression="detect") as file:
        pa_csv.write_csv(part, file)
    assert_same(built(tmp_path, tmp_path / name, memory), part)


@pytest.mark.parametrize("delimiter", [";", "|", "\t"])
def test_csv_of_other_delimiters(tmp_path, delimiter):
    text = 'k,v\n2,"a b"\n1,\n'.replace(",", delimiter)
    (tmp_path / "r.csv").write_text(text)
    assert built(tmp_path, tmp_path / "r.csv", "1GiB").to_pylist() == [{"k": 1, "v": None}, {"k": 2, "v": "a b"}]


def test_types_of_csv_columns_come_from_all_rows(tmp_path):
    lines = ["k,v", *(f"{n},{n}" for n in range(50_000)), "50000,text"]
    (tmp_path / "r.csv").write_text("\n".join(lines))
    assert built(tmp_path, tmp_path / "r.csv", "1GiB").schema.field("v").type == pa.string()


@pytest.mark.parametrize("memory", ["1GiB", TINY])
def test_an_empty_text_in_a_csv_is_not_missing(tmp_path, memory):
    (tmp_path / "r.csv").write_text('k,v\n2,""\n1,\n')
    with Table.build(tmp_path / "t", tmp_path / "r.csv", "k", memory=memory) as table:
        assert next(table.scan()).to_pylist() == [{"k": 1, "v": None}, {"k": 2, "v": ""}]


@pytest.mark.parametrize("memory", ["1GiB", TINY])
@pytest.mark.parametrize("form", ["table", "stream", "parquet", "csv"])
def test_a_null_key_is_refused_in_any_form(tmp_path, form, memory):
    rows = pa.table({"k": [3, None, 2], "v": [1, 2, 3]})
    source = rows
    if form == "stream":
        source = rows.to_reader()
    elif form == "parquet":
        source = tmp_path / "r.parquet"
        pq.write_table(rows, source)
    elif form == "csv":
        source = tmp_path / "r.csv"
        pa_csv.write_csv(rows, source)
    with pytest.raises(KeyInputError, match=r"key column 'k' is null, but a key never is \(row 1\)"):
        Table.build(tmp_path / "t", source, ["k"], memory=memory)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("source", ["t.parquet", "."])
def test_a_source_is_not_replaced_by_its_own_table(tmp_path, rows, source):
    target = tmp_path / "t.parquet"
    pq.write_table(rows, target)
    with pytest.raises(InputError, match=r"t\.parquet is the source itself.*name another file"):
        Table.build(target, tmp_path / source, "k", overwrite=True)
    assert pq.read_table(target).equals(rows)


def test_a_key_that_occurs_twice_is_named_after_sorting_on_disk(tmp_path, rows):
    twice = pa.concat_tables([rows, rows.slice(77, 1)])
    key = rows["k"][77].as_py()
    with pytest.raises(UniqueViolationError, match=f"key k={key} occurs more than once"):
        Table.build(tmp_path / "t", twice, ["k"], unique=True, memory=TINY)


@pytest.mark.parametrize("memory", ["1GiB", TINY])
def test_errors_of_a_stream_reach_the_caller(tmp_path, rows, memory):
    def broken():
        yield from rows.to_batches(1000)
        raise RuntimeError("the queue is gone")

    with pytest.raises(RuntimeError, match="the queue is gone"):
        Table.build(tmp_path / "t", broken(), ["k"], memory=memory)
    assert list(tmp_path.iterdir()) == []


def test_text_keys_sort_alike_in_memory_and_on_disk(tmp_path):
    words = ["", "a", "B", "é", "z", "a\0b", "\U0001f600", "\uffff"]
    rows = pa.table({"k": words[::-1], "v": range(len(words))})
    in_memory = built(tmp_path, rows, "1GiB")
    assert built(tmp_path, rows, TINY, overwrite=True).equals(in_memory)
    assert in_memory["k"].to_pylist() == sorted(words, key=str.encode)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("k,v\n1,2\n3,4,5\n", r"r.csv, record 3 .*: 3 fields where the heading has 2"),
        ("k,v\n" + "1,2\n" * 50_000 + "3,4,5\n", r"r.csv, record 50002 .*: 3 fields"),
        ("k,v\n1\n", r"r.csv, record 2 .*: 1 field where"),
        ("", "does not begin with a line of column names"),
        ("k,v\n1,\xff\n", r"r.csv, record 2 .*, column 'v': .* is not UTF-8 \(byte 0xff\)"),
        ("k,\xff\n1,2\n", r"r.csv: the heading is not utf-8 \(byte 0xff"),
        ('k,v\n1,"open\n', "r.csv: record 1 opens a quote that is never closed"),
    ],
)
def test_bad_csv_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "r.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        Table.build(tmp_path / "t", tmp_path / "r.csv", ["k"])
    assert not (tmp_path / "t").exists()


def test_damaged_parquet_is_refused(tmp_path, rows):
    path = tmp_path / "r.parquet"
    pq.write_table(rows.select(["k"]), path)
    path.write_bytes(path.read_bytes()[:4] + bytes(1000) + path.read_bytes()[1004:])
    with pytest.raises(InputError, match=r"cannot read .*r.parquet"):
        Table.build(tmp_path / "t", path, ["k"])
    path.write_text("not parquet at all")
    with pytest.raises(InputError, match=r"cannot read .*r.parquet as Parquet"):
        Table.build(tmp_path / "t", path, ["k"])


def test_files_with_different_columns_are_refused(tmp_path):
    pq.write_table(pa.table({"k": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"k": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="do not have the same columns"):
        Table.build(tmp_path / "t", tmp_path, ["k"])


def test_missing_empty_and_mixed_places_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no file or folder .*nowhere"):
        Table.build(tmp_path / "t", tmp_path / "nowhere", ["k"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no Parquet or CSV file"):
        Table.build(tmp_path / "t", tmp_path / "empty", ["k"])
    (tmp_path / "x.dat").touch()
    with pytest.raises(InputError, match="neither Parquet nor CSV by its name"):
        Table.build(tmp_path / "t", tmp_path / "x.dat", ["k"])
    (tmp_path / "a.csv").write_text("k\n1\n")
    pq.write_table(pa.table({"k": [1]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="both Parquet and CSV"):
        Table.build(tmp_path / "t", [tmp_path / "a.csv", tmp_path / "b.parquet"], ["k"])


def test_a_folder_within_that_cannot_be_listed_is_refused(tmp_path, rows, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        pq.write_table(rows, tmp_path / "in" / name / "r.parquet")

    def list_folder(path):
        if str(path).endswith("b"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))  # root, too
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", list_folder)
    with pytest.raises(InputError, match=r"cannot read .*in/b: Permission denied; check the permissions"):
        Table.build(tmp_path / "t", tmp_path / "in", "k")


def test_nothing_is_drawn_on_the_terminal(tmp_path, rows, monkeypatch):
    connections = []

    def noted(config):
        connections.append(connect(config))
        return connections[-1]

    monkeypatch.setattr("headrace.storage.load.sources.connect", noted)
    with Table.build(tmp_path / "t", iter(rows.to_batches(1000)), ["k"], memory=TINY) as table:
        assert table.stats.rows == ROWS
    assert len(connections) == 1
    with connect({}) as connection:
        assert connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() == [(False,)]


@pytest.mark.parametrize("memory", ["1GiB", TINY])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_names_of_files_and_folders_are_names_only(tmp_path, memory, kind):
    folder = tmp_path / "v=7"
    folder.mkdir()
    rows = pa.table({"k": np.random.default_rng(3).permutation(ROWS), "v": np.arange(ROWS)})
    write = pq.write_table if kind == "parquet" else pa_csv.write_csv
    write(rows, folder / f"x[1]*?.{kind}")
    write(pa.table({"k": [-1], "v": [0]}), folder / f"x1yz.{kind}")
    found = built(tmp_path, folder / f"x[1]*?.{kind}", memory)
    assert_same(found, rows)


@pytest.mark.parametrize("memory", ["1GiB", TINY])
def test_names_of_columns_may_differ_by_case_only(tmp_path, memory):
    rows = pa.table({"k": np.random.default_rng(4).permutation(ROWS), "K": np.arange(ROWS), "c0": np.arange(ROWS)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    assert_same(built(tmp_path, tmp_path / "rows.parquet", memory), rows)


class Celsius(pa.ExtensionType):
    def __init__(self):
        super().__init__(pa.float64(), "test.celsius")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls()


def test_a_type_of_somebody_else_makes_no_table_but_its_values_go_into_one(tmp_path):
    warm = pa.ExtensionArray.from_storage(Celsius(), pa.array([20.5]))
    with pytest.raises(InputError, match="celsius"):
        Table.build(tmp_path / "t", pa.table({"k": [1], "v": warm}), ["k"])
    with Table.build(tmp_path / "t", pa.table({"k": [1], "v": [1.5]}), ["k"]) as table:
        table.apply(pa.record_batch({"k": pa.array([1]), "v": warm}))
        assert [row["v"] for batch in table.scan() for row in batch.to_pylist()] == [20.5]


def test_a_damaged_file_that_is_read_by_somebody_else_is_told(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"k": np.random.default_rng(1).permutation(ROWS)}), path)
    raw = bytearray(path.read_bytes())
    raw[2000:30_000] = bytes(28_000)
    path.write_bytes(raw)
    with pq.ParquetFile(path) as file, pytest.raises(HeadraceError) as caught:
        Table.build(tmp_path / "t", file.iter_batches(), ["k"])
    assert "None" not in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_parquet_timestamps_of_96_bits_are_neither_wrapped_nor_cut(tmp_path):
    path = tmp_path / "old.parquet"
    last = 253_402_300_799_999_999  # 9999-12-31 23:59:59.999999
    times = {"us": [last, None], "ns": [1_700_000_000_123_456_789, None]}
    for unit, ticks in times.items():
        rows = pa.table({"k": [1, 2], "at": pa.array(ticks, pa.timestamp(unit))})
        pq.write_table(rows, path, use_deprecated_int96_timestamps=True)
        if unit == "us":
            found = built(tmp_path, path, TINY)["at"]
            assert found.cast(pa.int64()).to_pylist() == [last, None]
        else:
            with pytest.raises(HeadraceError, match=r"record 1, column 'at': .*13:20\.123456789Z' has a fraction"):
                Table.build(tmp_path / "u", path, ["k"])
