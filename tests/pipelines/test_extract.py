"""Extraction from SQLite, compared with the plain `sqlite3` module: exact values or a refusal, in complete files."""

import datetime as dt
import itertools
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipelines import extract
from headrace.pipelines.database import extraction, folder
from headrace.pipelines.errors import ExtractionError

PROCESS = Path(__file__).with_name("extracting_process.py")


class Shop:
    """A SQLite file with tables, and folders of extractions beside it."""

    def __init__(self, place):
        self.place = place
        self.file = place / "shop.db"
        self.url = f"sqlite:///{self.file}"
        self.out = place / "out"
        self.execute("PRAGMA user_version = 1")

    def execute(self, statement, rows=None):
        connection = sqlite3.connect(self.file)
        with connection:
            found = (
                connection.execute(statement).fetchall() if rows is None else connection.executemany(statement, rows)
            )
        connection.close()
        return found

    def fill(self, name, columns, rows=()):
        self.execute(f"CREATE TABLE {name} ({columns})")
        if rows:
            self.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def extract(self, table, out=None, **options):
        return extract(self.url, table, out or self.out, **options)

    def read(self, out=None):
        return pa.concat_tables(pq.read_table(path) for path in visible(out or self.out))

    def refuses(self, match, table, **options):
        """Assert that an extraction is refused with a message, and leaves nothing."""
        before = sorted(self.place.rglob("*"))
        with pytest.raises(ExtractionError, match=match) as caught:
            self.extract(table, **options)
        assert sorted(self.place.rglob("*")) == before
        return str(caught.value)


def visible(out):
    return sorted(path for path in out.iterdir() if not path.name.startswith((".", "_")))


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


def test_all_types_and_nulls_are_exact(shop):
    declared = {
        "i": ("INTEGER", pa.int64()), "s": ("SMALLINT", pa.int64()), "b": ("BIGINT", pa.int64()),
        "n": ("DECIMAL(10, 2)", pa.decimal128(10, 2)), "w": ("NUMERIC(50, 4)", pa.decimal256(50, 4)),
        "f": ("FLOAT", pa.float64()), "r": ("REAL", pa.float64()), "d": ("DOUBLE PRECISION", pa.float64()),
        "o": ("BOOLEAN", pa.bool_()), "t": ("TEXT", pa.string()), "v": ("VARCHAR(3)", pa.string()),
        "x": ("BLOB", pa.binary()), "day": ("DATE", pa.date32()), "at": ("TIMESTAMP", pa.timestamp("us")),
        "moment": ("DATETIME", pa.timestamp("us")), "clock": ("TIME", pa.time64("us")),
    }  # fmt: skip
    rows = [
        (
            2**63 - 1, 70_000, -(2**63), "1234.50", "99.0625", 0.1, 1e308, -0.5, 1, "a\0b", "longer", b"\xff\0",
            "0001-01-01", "9999-12-31 23:59:59.999999", "1969-12-31T23:59:59.5", "00:00:00",
        ),
        (None,) * 16,
        (
            0, -1, 1, 7, -3, math.inf, -math.inf, 5e-324, 0, "", "ü", b"", "2024-02-29", "2024-02-29 00:00:00",
            "1900-03-01 12:00:00.000001", "23:59:59.999999",
        ),
    ]  # fmt: skip
    shop.fill("types", ", ".join(f"{name} {kind}" for name, (kind, _) in declared.items()), rows)
    assert shop.extract("types").rows == 3
    found = shop.read()
    assert found.schema == pa.schema([(name, dtype) for name, (_, dtype) in declared.items()])
    expected = [list(row) for row in rows]
    for row in expected[::2]:
        row[3], row[4], row[8] = Decimal(row[3]), Decimal(row[4]), bool(row[8])
        row[12], row[15] = dt.date.fromisoformat(row[12]), dt.time.fromisoformat(row[15])
        row[13], row[14] = dt.datetime.fromisoformat(row[13]), dt.datetime.fromisoformat(row[14])
    assert [list(row.values()) for row in found.to_pylist()] == expected


def of_class(*classes):
    return lambda value: value if type(value) in classes else ...


def decimal_62(value):
    """Return what a number of SQLite is as DECIMAL(6, 2): the decimal that prints as it does in 15 digits."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return ...
    exact = Decimal(value if type(value) is int else f"{value:.15g}")
    if float(exact) != value or Fraction(exact) * 100 % 1 or abs(exact) >= 10_000:
        return ...
    return exact


def date_of(value):
    if type(value) is str and len(value) == 10 and value.isascii():
        try:
            return dt.datetime.strptime(value, "%Y-%m-%d").date()  # noqa: DTZ007 - a date has no zone
        except ValueError:
            pass
    return ...


ORACLES = {
    "INTEGER": of_class(int),
    "REAL": of_class(float),
    "TEXT": of_class(str),
    "BLOB": of_class(bytes),
    "BOOLEAN": lambda value: bool(value) if type(value) is int and value in (0, 1) else ...,
    "DECIMAL(6, 2)": decimal_62,
    "DATE": date_of,
}
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-20_000, 20_000),
    st.floats(allow_nan=False),
    st.decimals(-12_000, 12_000, places=2).map(float),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.dates().map(str),
    st.binary(max_size=8),
)


@given(st.sampled_from(sorted(ORACLES)), st.lists(VALUES, min_size=1, max_size=4))
def test_any_value_in_a_column_is_exact_or_refused(kind, values):
    with tempfile.TemporaryDirectory() as place:
        shop = Shop(Path(place))
        shop.fill("t", f"a {kind}", [(value,) for value in values])
        expected = [ORACLES[kind](value) for (value,) in shop.execute("SELECT a FROM t ORDER BY rowid")]
        if ... in expected:
            shop.refuses(rf"'t', column 'a', row {expected.index(...) + 1}: ", "t")
        else:
            shop.extract("t")
            found = shop.read()["a"].to_pylist()
            assert found == expected
            assert list(map(repr, found)) == list(map(repr, expected)) or kind == "DECIMAL(6, 2)"


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("INTEGER", "twelve", "'twelve' is text; the column is INTEGER"),
        ("INTEGER", 1.5, "1.5 is a float"),
        ("REAL", "x", "'x' is text"),
        ("TEXT", b"\xff", "is bytes"),
        ("BLOB", "text", "'text' is text"),
        ("BOOLEAN", 2, "2 is neither 0 nor 1"),
        ("DECIMAL(6, 2)", 0.1 + 0.2, "0.30000000000000004 is a float of more than 15 digits"),
        ("DECIMAL(6, 2)", 1.005, r"1.005 has more digits than decimal\(6, 2\)"),
        ("DECIMAL(6, 2)", 10_000, r"10000 has more digits"),
        ("DECIMAL(6, 2)", math.inf, "inf is not a number"),
        ("DATE", "2023-02-29", "is not a date"),
        ("DATE", "٢٠٢٤-01-01", "is not a date"),
        ("DATETIME", "2024-01-01", "is not a time"),
        ("DATETIME", "2024-01-01 00:00:00+01:00", "without a zone"),
        ("DATETIME", "0000-01-01 00:00:00", "of the years 1 to 9999"),
        ("DATETIME", "2024-01-01 00:00:00.1234567", "at most 6 decimals"),
        ("TIME", "24:00:00", "is not a time"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place_and_a_remedy(shop, kind, value, reason):
    shop.fill("t", f"id INTEGER PRIMARY KEY, k TEXT, a {kind}", [(7, "k", None), (9, "k", value)])
    message = shop.refuses(rf"table 't', column 'a', row 2 \(id = 9\): .*{reason}", "t")
    assert "leave the column out with --columns" in message
    shop.extract("t", columns=["id", "k"])
    assert shop.read().to_pylist() == [{"id": 7, "k": "k"}, {"id": 9, "k": "k"}]


def test_a_bad_value_for_a_folder_with_files_is_left_out_in_another_folder(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY, a INTEGER", [(1, 1)])
    shop.extract("t", new_by="id")
    shop.execute("INSERT INTO t VALUES (2, 'x')")
    with pytest.raises(ExtractionError, match=r"or name another folder than .*out, whose files have this") as told:
        shop.extract("t", new_by="id")
    assert "leave the column out with --columns there" in str(told.value)
    with pytest.raises(ExtractionError, match="select the same columns"):  # why the folder must be another one
        shop.extract("t", new_by="id", columns=["id"])
    assert shop.extract("t", shop.place / "there", new_by="id", columns=["id"]).rows == 2
    shop.execute("UPDATE t SET a = 2 WHERE id = 2")
    assert shop.extract("t", new_by="id").rows == 1


def test_a_bad_value_for_a_folder_without_files_is_left_out_there(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY, a INTEGER", [(1, "x")])
    with pytest.raises(ExtractionError, match="correct such values, leave the column out with --columns, or"):
        shop.extract("t", new_by="id")
    assert shop.extract("t", new_by="id", columns=["id"]).rows == 1


def test_views_have_no_new_rows(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])
    shop.execute("CREATE VIEW v AS SELECT * FROM t")
    message = shop.refuses("'v' is a view, .* so --new-by is not possible", "v", new_by="id")
    assert "extract the table that it reads, or extract it without --new-by" in message
    assert shop.extract("t", new_by="id").rows == 1
    assert shop.extract("v", shop.place / "view").rows == 1


@pytest.mark.parametrize("kind", ["TEXT", "BLOB"])
def test_text_that_is_not_utf8_is_refused(shop, kind):
    shop.fill("t", f"a {kind}")
    shop.execute("INSERT INTO t VALUES (CAST(x'ff41' AS TEXT))")
    shop.refuses("column 'a', row 1: .*is text that is not UTF-8", "t")


def test_types_without_an_exact_counterpart_are_refused_before_anything_is_written(shop):
    shop.fill("t", 'a INTEGER, j JSON, n NUMERIC, w DECIMAL(77, 0), u, "x,y" TEXT')
    message = shop.refuses("do not|does not extract exactly", "t")
    for shown in ("'j' (JSON)", "'n' (NUMERIC without a number of digits)", "'w' (DECIMAL)", "'u' (a type that"):
        assert shown in message
    assert """leave them out with: --columns 'a,"x,y"'""" in message
    shop.extract("t", columns=["a", "x,y"])
    assert shop.read().schema.names == ["a", "x,y"]


def test_huge_text_is_exact_and_rows_are_divided_among_files(shop):
    texts = ["é" * 10_000_000, "b" * 5_000_000, "c"]
    shop.fill("t", "a TEXT", [(text,) for text in texts])
    assert shop.extract("t", rows_per_file=2).files == ("part-000001.parquet", "part-000002.parquet")
    assert [pq.read_table(path).num_rows for path in visible(shop.out)] == [2, 1]
    assert shop.read()["a"].to_pylist() == texts


def test_many_rows_are_in_few_row_groups(shop):
    shop.fill("t", "a INTEGER", [(number,) for number in range(5_000)])
    shop.extract("t", rows_per_file=4_500)
    assert [pq.ParquetFile(path).num_row_groups for path in visible(shop.out)] == [1, 1]
    assert shop.read()["a"].to_pylist() == list(range(5_000))


def test_memory_is_bounded_by_the_size_of_a_row_group(shop, monkeypatch):
    monkeypatch.setattr(extraction, "_GROUP_BYTES", 1_000)
    shop.fill("t", "a TEXT", [("x" * 100,) for _ in range(3_000)])
    shop.extract("t")
    assert pq.ParquetFile(visible(shop.out)[0]).num_row_groups == 3  # one for each partition of 1,000 rows


def test_an_empty_table_is_one_file_with_its_columns(shop):
    shop.fill("t", "a INTEGER, b DATE")
    assert shop.extract("t") == extraction.ExtractResult(0, ("part-000001.parquet",), None)
    assert shop.read().schema == pa.schema([("a", pa.int64()), ("b", pa.date32())])
    assert shop.read().num_rows == 0


def test_names_are_taken_literally(shop):
    names = ["select", 'q"uote', "per%cent", "a:b", "semi;colon", "--", "(x)", "It's", "Ünï", "c0"]
    columns = ", ".join('"{}" INTEGER'.format(name.replace('"', '""')) for name in names)
    shop.fill('"or""der; DROP TABLE x"', columns, [tuple(range(10))])
    shop.extract('or"der; DROP TABLE x')
    assert shop.read().to_pylist() == [dict(zip(names, range(10), strict=True))]
    chosen = ["c0", 'q"uote', "select"]
    shop.extract('or"der; DROP TABLE x', shop.place / "chosen", columns=chosen)
    assert shop.read(shop.place / "chosen").to_pylist() == [{"c0": 9, 'q"uote': 1, "select": 0}]


def test_a_view_and_a_schema(shop):
    shop.fill("t", "a INTEGER, b REAL", [(1, 0.5), (2, 0.25)])
    shop.execute("CREATE VIEW v AS SELECT b, a FROM t WHERE a > 1")
    shop.extract("v", schema="main")
    assert shop.read().to_pylist() == [{"b": 0.25, "a": 2}]
    shop.refuses("is a view", "v", new_by="a")
    shop.refuses(
        "schema 'temp' of .* has no table or view 'v'; correct the name, or name its schema", "v", schema="temp"
    )


def test_columns_of_other_types_may_be_copied(shop):
    shop.fill("t", "a NUMERIC, j JSON", [(0.5, "[1]")])
    shop.refuses("extract a table to which they are copied as another type", "t")
    shop.fill("copied", "a REAL, j TEXT")
    shop.execute("INSERT INTO copied SELECT a, j FROM t")
    shop.extract("copied")
    assert shop.read().to_pylist() == [{"a": 0.5, "j": "[1]"}]


def test_what_is_not_there_is_named_with_the_nearest_name(shop):
    shop.fill("orders", "amount INTEGER")
    shop.refuses(r"no table or view 'order' \(did you mean 'orders'\?\)", "order")
    shop.refuses(r"no column 'amout' \(did you mean 'amount'\?\); its columns are amount", "orders", columns=["amout"])
    shop.refuses("not different names", "orders", columns=["amount", "amount"])
    shop.refuses("give a number from 1", "orders", rows_per_file=0)
    shop.execute("DROP TABLE orders")
    shop.refuses("no table or view 'orders'", "orders")


def test_names_of_tables_are_not_folded(shop):
    shop.fill("Orders", "id INTEGER PRIMARY KEY")
    shop.refuses(r"no table or view 'orders' \(did you mean 'Orders'\?\)", "orders")


def test_a_view_of_a_dropped_table_is_one_line(shop):
    shop.fill("t", "a INTEGER")
    shop.execute("CREATE VIEW v AS SELECT a FROM t")
    shop.execute("DROP TABLE t")
    assert "\n" not in shop.refuses("no such table: main.t; check that it can be reached and read", "v")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense", "is malformed; write sqlite:///FILE or postgresql"),
        ("sqlite://", "no path of a SQLite file"),
        ("sqlite:////nowhere/x.db", "there is no SQLite file /nowhere/x.db"),
        ("mysql://host/db", "from SQLite and PostgreSQL, not from 'mysql'"),
        ("postgresql+asyncpg://host/db", r"'asyncpg' is not supported; write postgresql\+psycopg"),
        ("postgresql://u:${NO_SUCH}@host/db", "no variable NO_SUCH; set it"),
    ],
)
def test_a_wrong_url(tmp_path, url, reason):
    with pytest.raises(ExtractionError, match=reason):
        extract(url, "t", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:tiger@host/db",
        "postgresql://u:${A}tiger@host/db",
        "postgresql://u@host/db?password=tiger",
        "postgresql://u@host/db?sslpassword=${A}&sslpassword=tiger",
        "postgresql:/u:tiger@host/db",
        "postgresql://u:tiger@host:port/db",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_shown(tmp_path, url):
    with pytest.raises(ExtractionError, match=r"holds a password|is malformed") as caught:
        extract(url, "t", tmp_path / "out")
    assert "tiger" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_missing_driver_is_named_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setenv("DATABASE", "postgresql://u:tiger@host/db")
    with pytest.raises(ExtractionError, match=r"pip install 'headrace\[postgresql\]'") as caught:
        extract("${DATABASE}", "t", tmp_path / "out")
    assert "tiger" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "x.db").write_text("no database " * 100)
    with pytest.raises(ExtractionError, match="file is not a database"):
        extract(f"sqlite:///{tmp_path / 'x.db'}", "t", tmp_path / "out")


def test_the_url_and_its_parts_may_be_variables(shop, monkeypatch):
    shop.fill("t", "a INTEGER", [(1,)])
    monkeypatch.setenv("SHOP_URL", shop.url)
    monkeypatch.setenv("SHOP_FILE", str(shop.file))
    for at, url in enumerate(("${SHOP_URL}", "sqlite:///${SHOP_FILE}")):
        assert extract(url, "t", shop.place / f"out{at}").rows == 1


def test_only_a_new_or_empty_folder_is_taken(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])
    shop.out.mkdir(mode=0o750)
    shop.extract("t")
    assert shop.out.stat().st_mode & 0o777 == 0o750
    shop.refuses("holds part-000001.parquet already; name a new or empty folder", "t")
    shop.refuses("holds part-000001.parquet already", "t", new_by="id")
    shop.extract("t", shop.place / "growing", new_by="id")
    shop.refuses("an extraction with --new-by", "t", out=shop.place / "growing")
    shop.refuses("is no folder", "t", out=shop.file)
    shop.refuses("there is no folder", "t", out=shop.place / "no" / "out")


def test_the_current_folder_is_not_replaced(shop, monkeypatch):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])
    shop.out.mkdir()
    monkeypatch.chdir(shop.out)
    shop.refuses("is the current folder, which cannot be replaced; name a new folder in it", "t", out=Path())
    assert shop.extract("t", out=Path("new")).rows == 1
    assert [path.name for path in Path().iterdir()] == ["new"]


def refusing(number):
    def call(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("new_by", [None, "id"])
@pytest.mark.parametrize("step", ["sync_file", "sync_folder"])
def test_a_full_disk_leaves_nothing_that_is_read(shop, monkeypatch, new_by, step):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])
    with monkeypatch.context() as patch:
        patch.setattr(folder, step, refusing(28))
        with pytest.raises(ExtractionError, match=r"cannot write .*out: No space left on device; free space"):
            shop.extract("t", new_by=new_by)
    assert [path.name for path in shop.place.rglob("*") if path.suffix in {".parquet", ".partial"}] == []
    assert shop.extract("t", new_by=new_by).rows == 1
    assert shop.read()["id"].to_pylist() == [1]


@pytest.mark.parametrize("new_by", [None, "id"])
def test_a_folder_that_cannot_be_made_is_named(shop, monkeypatch, new_by):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])
    monkeypatch.setattr(Path, "mkdir", refusing(30))
    shop.refuses("cannot write .*out: Read-only file system", "t", new_by=new_by)


def rows_of_new_files(out):
    """Return the ids in the visible files, which are removed, as after a load."""
    found = [number for path in visible(out) for number in pq.read_table(path)["id"].to_pylist()]
    for path in visible(out):
        path.unlink()
    return found


def test_only_new_rows_are_extracted_in_order(shop):
    shop.fill("t", "id INT PRIMARY KEY, a TEXT", [(number, "x") for number in (5, 3, 9)])  # stored in this order
    assert shop.extract("t", new_by="id", rows_per_file=2) == extraction.ExtractResult(
        3, ("part-000001.parquet", "part-000002.parquet"), "9"
    )
    assert rows_of_new_files(shop.out) == [3, 5, 9]
    assert shop.extract("t", new_by="id") == extraction.ExtractResult(0, (), "9")
    shop.execute("INSERT INTO t VALUES (?, ?)", [(10, "y"), (4, "comes too late")])
    assert shop.extract("t", new_by="id") == extraction.ExtractResult(1, ("part-000003.parquet",), "10")
    assert rows_of_new_files(shop.out) == [10]


def test_the_first_file_of_a_growing_folder_may_be_empty(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY")
    assert shop.extract("t", new_by="id").files == ("part-000001.parquet",)
    assert shop.extract("t", new_by="id").files == ()
    shop.execute("INSERT INTO t VALUES (-5)")
    assert shop.extract("t", new_by="id").position == "-5"
    assert shop.read()["id"].to_pylist() == [-5]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("id INTEGER", "is not declared unique"),
        ("id INTEGER NOT NULL, b INTEGER, UNIQUE (id, b)", "is not declared unique"),
        ("id INTEGER UNIQUE", "may be null"),
        ("id TEXT PRIMARY KEY", "has the type TEXT, which is not compared exactly"),
        ("id DATETIME PRIMARY KEY", "has the type DATETIME, which is not compared exactly"),
        ("id DECIMAL(9, 2) PRIMARY KEY", "has the type DECIMAL, which is not compared exactly"),
        ("other INTEGER PRIMARY KEY", "'id' of --new-by is not extracted; the columns are other"),
    ],
)
def test_a_column_that_does_not_order_all_rows_is_refused(shop, columns, reason):
    shop.fill("t", columns)
    shop.refuses(reason, "t", new_by="id")


@pytest.mark.parametrize("index", ["t (id) WHERE id > 5", "t (id)WHERE id > 5", "t (id) /* some */ WHERE id > 5"])
def test_a_partial_unique_index_is_not_enough(shop, index):
    shop.fill("t", "id INTEGER NOT NULL")
    shop.execute(f"CREATE UNIQUE INDEX u ON {index}")
    shop.refuses("is not declared unique", "t", new_by="id")
    shop.execute("CREATE UNIQUE INDEX whole ON t (id)")
    assert shop.extract("t", new_by="id").rows == 0


@pytest.mark.parametrize("index", ["t (id + 1)", "t (id, a)", "t (id, a + 1)", "t (a)"])
def test_an_index_of_something_else_is_not_enough(shop, index):
    shop.fill("t", "id INTEGER NOT NULL, a INTEGER")
    shop.execute(f"CREATE UNIQUE INDEX u ON {index}")
    shop.refuses("is not declared unique", "t", new_by="id")


def test_a_unique_column_of_any_name_orders_rows(shop):
    name = 'a, "b" %(c)s'
    quoted = '"' + name.replace('"', '""') + '"'
    shop.fill("t", f"{quoted} INTEGER NOT NULL UNIQUE", [(1,), (2,)])
    assert shop.extract("t", new_by=name).position == "2"
    shop.execute("INSERT INTO t VALUES (3)")
    assert shop.extract("t", new_by=name).rows == 1
    assert shop.read()[name].to_pylist() == [1, 2, 3]


def test_a_null_in_a_key_of_sqlite_is_refused(shop):
    shop.fill("t", "id INT PRIMARY KEY", [(1,), (None,)])
    shop.refuses("may be null", "t", new_by="id")
    shop.execute("DELETE FROM t WHERE id IS NULL")
    assert shop.extract("t", new_by="id").rows == 1


def test_values_that_are_equal_despite_the_declaration_are_refused(shop, monkeypatch):
    shop.fill("t", "id INTEGER NOT NULL", [(1,), (2,), (2,)])
    monkeypatch.setattr(extraction, "_unique_columns", lambda *_: [["id"]])
    with pytest.raises(ExtractionError, match="has equal values or null in several rows"):
        shop.extract("t", new_by="id")
    monkeypatch.setattr(extraction, "_PARTITION_ROWS", 2)
    with pytest.raises(ExtractionError, match="has equal values or null in several rows"):
        shop.extract("t", new_by="id", rows_per_file=2)


def test_another_subject_in_the_folder_is_refused(shop, tmp_path):
    shop.fill("t", "id INTEGER PRIMARY KEY, a TEXT, n INTEGER NOT NULL UNIQUE", [(1, "x", 1)])
    shop.fill("other", "id INTEGER PRIMARY KEY, a TEXT, n INTEGER")
    shop.extract("t", new_by="id")
    shop.refuses("extracted from the table 't', not 'other'; name another folder", "other", new_by="id")
    shop.refuses("extracted by the column 'id', not 'n'", "t", new_by="n")
    shop.refuses("select the same columns in the same order by --columns", "t", new_by="id", columns=["a", "id", "n"])
    shop.execute("ALTER TABLE t ADD COLUMN later TEXT")
    shop.refuses("and the table now gives id int64, a string, n int64, later string", "t", new_by="id")
    assert shop.extract("t", new_by="id", columns=["id", "a", "n"]).rows == 0
    elsewhere = Shop(tmp_path / "elsewhere") if (tmp_path / "elsewhere").mkdir() is None else None
    elsewhere.fill("t", "id INTEGER PRIMARY KEY, a TEXT, n INTEGER")
    elsewhere.refuses("extracted from the database 'sqlite:.*/shop.db', not", "t", out=shop.out, new_by="id")


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "files": 1, "position": null, "subject": {"a": 1}}'])
def test_a_damaged_position_is_refused(shop, text):
    shop.fill("t", "id INTEGER PRIMARY KEY")
    shop.out.mkdir()
    (shop.out / "_extract.json").write_text(text)
    shop.refuses("_extract.json is damaged; name a new folder, or restore the file", "t", new_by="id")


def test_a_position_of_a_newer_release_is_refused(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY")
    shop.extract("t", new_by="id")
    state = json.loads((shop.out / "_extract.json").read_text())
    (shop.out / "_extract.json").write_text(json.dumps({**state, "version": 2}))
    shop.refuses("has version 2, this release knows 1; upgrade headrace", "t", new_by="id")


def test_two_extractions_into_a_folder_at_once_are_refused(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])

    def again(_rows):
        with pytest.raises(ExtractionError, match="another command writes to"):
            shop.extract("t", new_by="id")

    assert shop.extract("t", new_by="id", on_rows=again).rows == 1
    assert shop.read()["id"].to_pylist() == [1]


def test_a_file_of_another_origin_is_not_replaced(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,)])
    shop.extract("t", new_by="id")
    shop.execute("INSERT INTO t VALUES (2)")
    (shop.out / "part-000002.parquet").write_text("mine")
    shop.refuses("exists, but no extraction wrote it", "t", new_by="id")
    (shop.out / "part-000002.parquet").unlink()
    assert shop.extract("t", new_by="id").rows == 1


def test_all_rows_are_of_one_state_of_the_database(shop, monkeypatch):
    monkeypatch.setattr(extraction, "_PARTITION_ROWS", 2)
    shop.execute("PRAGMA journal_mode = WAL")
    shop.fill("t", "id INTEGER PRIMARY KEY, a INTEGER", [(number, 1) for number in range(1, 9)])
    changes = iter(["UPDATE t SET a = 2", "DELETE FROM t WHERE id > 6"])
    shop.extract("t", on_rows=lambda _rows: [shop.execute(each) for each in changes])
    assert shop.execute("SELECT sum(a), count(*) FROM t") == [(12, 6)]
    assert shop.read()["a"].to_pylist() == [1] * 8


def test_columns_checks_and_rows_are_of_one_state_of_the_database(shop, monkeypatch):
    shop.execute("PRAGMA journal_mode = WAL")
    shop.fill("t", "id INT PRIMARY KEY", [(1,)])
    inner = extraction._destination

    def later(*arguments):
        shop.execute("INSERT INTO t VALUES (?)", [(2,), (None,)])
        return inner(*arguments)

    monkeypatch.setattr(extraction, "_destination", later)
    assert shop.extract("t", new_by="id").rows == 1
    assert shop.read()["id"].to_pylist() == [1]


def killed_at(shop, table, new_by, step):
    """Extract in a process that is killed at a step; return whether it was."""
    command = [sys.executable, PROCESS, shop.url, table, shop.out, new_by or "", str(step)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def test_each_row_is_in_one_file_wherever_the_extraction_is_killed(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(number,) for number in range(10)])
    loaded, step, killed = [], 0, True
    while killed:
        step += 1
        shop.out = shop.place / f"out{step}"
        killed = killed_at(shop, "t", "id", step)
        loaded = rows_of_new_files(shop.out)
        assert loaded == list(range(len(loaded)))
        if killed:
            shop.extract("t", new_by="id", rows_per_file=3)
        loaded += rows_of_new_files(shop.out)
        assert loaded == list(range(10)), f"killed at step {step}"
        assert sorted(path.name for path in shop.out.iterdir()) == ["_extract.json"]
    assert step > 3 * 7  # three files, each with seven steps


def interrupted_at(line, shop):
    """Extract, and interrupt at a line of those that commit a file; return whether there was such a line."""
    commits = {each.__code__ for each in (folder.GrowingFolder.commit, folder.GrowingFolder._save)}
    lines = itertools.count(1)

    def trace(frame, event, _argument):
        if event == "line" and frame.f_code in commits and next(lines) == line:
            raise KeyboardInterrupt
        return trace if frame.f_code in commits else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        shop.extract("t", new_by="id", rows_per_file=1)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_each_row_is_in_one_file_wherever_a_commit_is_interrupted(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(1,), (2,)])
    line, interrupted = 0, True
    while interrupted:
        line += 1
        shop.out = shop.place / f"out{line}"
        interrupted = interrupted_at(line, shop)
        shop.extract("t", new_by="id")
        assert rows_of_new_files(shop.out) == [1, 2], f"interrupted at line {line}"
        assert sorted(path.name for path in shop.out.iterdir()) == ["_extract.json"]
    assert line > 2 * 8  # two files


def test_a_whole_extraction_that_is_killed_leaves_nothing_that_is_read(shop):
    shop.fill("t", "id INTEGER PRIMARY KEY", [(number,) for number in range(10)])
    step, killed = 0, True
    while killed:
        step += 1
        shop.out = shop.place / f"out{step}"
        killed = killed_at(shop, "t", None, step)
        if not shop.out.exists():
            assert killed
            shop.extract("t")
        assert shop.read()["id"].to_pylist() == list(range(10)), f"killed at step {step}"
        assert [path.name for path in shop.place.iterdir() if path.name.startswith(".")] == []
    assert step > 5  # three files, the folder, its name
