"""Extraction from a PostgreSQL server that the tests start, compared with what the server itself prints."""

import datetime as dt
import math
import subprocess
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from postgresql_server import needs_server, running_server

from headrace.pipelines import extract
from headrace.pipelines.database import extraction, folder
from headrace.pipelines.errors import ExtractionError


@pytest.fixture(scope="module")
def server():
    with running_server() as place:
        yield place


class Database:
    """One database of the server."""

    def __init__(self, server, out):
        self.server = server
        self.url = f"postgresql://loader@/postgres?host={server}"
        self.out = out

    def execute(self, statement, *options):
        command = [
            "psql",
            "-h",
            self.server,
            "-U",
            "loader",
            "-d",
            "postgres",
            "-v",
            "ON_ERROR_STOP=1",
            "-At",
            *options,
        ]
        done = subprocess.run([*command, "-c", statement], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def extract(self, table, out=None, **options):
        return extract(self.url, table, out or self.out, **options)

    def read(self, out=None):
        return pa.concat_tables(pq.read_table(path) for path in sorted((out or self.out).glob("*.parquet")))

    def refuses(self, match, table, **options):
        with pytest.raises(ExtractionError, match=match) as caught:
            self.extract(table, **options)
        return str(caught.value)


@pytest.fixture
def database(server, tmp_path):
    found = Database(server, tmp_path / "out")
    found.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return found


pytestmark = needs_server


def test_all_types_and_nulls_are_exact(database):
    declared = {
        "i2": ("smallint", pa.int16(), "-32768", -32768),
        "i4": ("integer", pa.int32(), "2147483647", 2**31 - 1),
        "i8": ("bigint", pa.int64(), "-9223372036854775808", -(2**63)),
        "n": ("numeric(20,5)", pa.decimal128(20, 5), "123456789012345.00001", Decimal("123456789012345.00001")),
        "n0": ("numeric(5)", pa.decimal128(5, 0), "-99999", Decimal(-99999)),
        "wide": ("numeric(60,30)", pa.decimal256(60, 30), "0.1", Decimal("0.1")),
        "r": ("real", pa.float32(), "0.1", 0.10000000149011612),
        "d": ("double precision", pa.float64(), "0.30000000000000004", 0.1 + 0.2),
        "inf": ("double precision", pa.float64(), "'-Infinity'", -math.inf),
        "o": ("boolean", pa.bool_(), "true", True),
        "t": ("text", pa.string(), "E'a\\n''ü'", "a\n'ü"),
        "v": ("varchar(5)", pa.string(), "''", ""),
        "c": ("char(4)", pa.string(), "'ab'", "ab  "),
        "x": ("bytea", pa.binary(), "'\\x00ff'", b"\0\xff"),
        "day": ("date", pa.date32(), "'9999-12-31'", dt.date(9999, 12, 31)),
        "at": (
            "timestamp", pa.timestamp("us"), "'1900-01-01 00:00:00.000001'",
            dt.datetime.fromisoformat("1900-01-01 00:00:00.000001"),
        ),
        "atz": (
            "timestamptz", pa.timestamp("us", "UTC"), "'9999-12-31 23:59:59.999999+00'",
            dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC),
        ),
        "clock": ("time", pa.time64("us"), "'23:59:59.9'", dt.time(23, 59, 59, 900000)),
        "span": ("interval", pa.duration("us"), "'-1 day +02:03:04.5'", dt.timedelta(-1, 2 * 3600 + 184, 500000)),
        "u": (
            "uuid", pa.string(), "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        ),
        "mood": ("mood", pa.string(), "'so so'", "so so"),
        "cents": ("cents", pa.int32(), "12", 12),
    }  # fmt: skip
    database.execute("CREATE TYPE mood AS ENUM ('so so'); CREATE DOMAIN cents AS integer CHECK (VALUE >= 0)")
    database.execute(f"CREATE TABLE t ({', '.join(f'{name} {entry[0]}' for name, entry in declared.items())})")
    database.execute(f"INSERT INTO t VALUES ({', '.join(entry[2] for entry in declared.values())})")
    database.execute("INSERT INTO t (i2) VALUES (NULL)")
    database.execute("ALTER ROLE loader SET extra_float_digits = -5; ALTER ROLE loader SET timezone = 'Asia/Kathmandu'")
    database.execute("ALTER ROLE loader SET datestyle = 'German'; ALTER ROLE loader SET intervalstyle = 'iso_8601'")
    database.execute("ALTER ROLE loader SET bytea_output = 'escape'")
    try:
        database.extract("t")
    finally:
        database.execute("ALTER ROLE loader RESET ALL")
    found = database.read()
    assert found.schema == pa.schema([(name, entry[1]) for name, entry in declared.items()])
    assert found.to_pylist() == [{name: entry[3] for name, entry in declared.items()}, dict.fromkeys(declared)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("integer", "-2147483648 0 7"),
        ("numeric(9,3)", "-0.001 999999.999 0"),
        ("real", "1.17549435e-38 3.4028235e+38 1e-45 16777216 0.3"),
        ("double precision", "5e-324 1.7976931348623157e+308 0.1 NaN Infinity"),
        ("interval", "00:00:00 -00:00:00.5 3.days -2.days+01:00:00 100:00:00.000001"),
        ("timestamptz", "0001-01-01T00:00:00+00 2024-03-31T01:30:00.123456+05:45"),
    ],
)
def test_values_are_those_that_the_server_has(database, kind, text):
    values = [each.replace(".days", " days ") if kind == "interval" else each for each in text.split()]
    database.execute(f"CREATE TABLE t (id integer, a {kind})")
    for number, value in enumerate(values):
        database.execute(f"INSERT INTO t VALUES ({number}, '{value}')")
    database.extract("t")
    shown = {
        "integer": "a::text",
        "numeric(9,3)": "a::text",
        "real": "a::float8::text",
        "double precision": "a::text",
        "interval": "round(extract(epoch from a) * 1000000)::text",
        "timestamptz": "round(extract(epoch from a) * 1000000)::text",
    }[kind]
    expected = database.execute(f"SELECT {shown} FROM t ORDER BY id").split()
    found = database.read()["a"]
    if pa.types.is_floating(found.type):
        assert list(map(repr, found.to_pylist())) == [repr(float(each)) for each in expected]
    elif pa.types.is_temporal(found.type):
        assert found.cast(pa.int64()).to_pylist() == [int(each) for each in expected]
    else:
        assert list(map(str, found.to_pylist())) == expected


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("date", "infinity", "'infinity' is not a date"),
        ("date", "0044-03-15 BC", "is not a date YYYY-MM-DD of the years 1 to 9999"),
        ("date", "10000-01-01", "is not a date"),
        ("timestamp", "-infinity", "is not a time"),
        ("timestamptz", "10000-01-01 00:00:00+00", "is not a time of the years 1 to 9999"),
        ("time", "24:00:00", "is not a time"),
        ("interval", "1 mon", "years and months have no fixed length"),
        ("numeric(9,2)", "NaN", "is not a number that a decimal has"),
    ],
)
def test_a_value_without_an_exact_counterpart_is_refused_with_a_remedy(database, kind, value, reason):
    database.execute(f"CREATE TABLE t (id integer PRIMARY KEY, a {kind})")
    database.execute(f"INSERT INTO t VALUES (3, NULL), (7, '{value}')")
    message = database.refuses(rf"column 'a', row 2 \(id = 7\): .*{reason}", "t")
    assert "extract a view that casts them" in message
    assert not database.out.exists()
    database.execute("CREATE VIEW v AS SELECT id, a::text AS a FROM t")
    database.extract("v")
    assert database.read()["a"].to_pylist() == [None, value]


def test_types_without_an_exact_counterpart_are_refused_before_anything_is_written(database):
    columns = "a integer, j json, jb jsonb, n numeric, l integer[], m money, i inet, tz timetz, s numeric(3, -2)"
    database.execute(f"CREATE TABLE t ({columns}, p point, r int4range)")
    message = database.refuses("does not extract exactly", "t")
    assert [name for name in ("j", "jb", "n", "l", "m", "i", "tz", "s", "p", "r") if f"'{name}' (" not in message] == []
    assert "leave them out with: --columns a, or extract a view that casts them" in message
    assert not database.out.exists()
    database.extract("t", columns=["a"])
    assert database.read().schema.names == ["a"]


def test_names_are_taken_literally(database):
    database.execute(
        'CREATE SCHEMA "Od""d"; CREATE TABLE "Od""d"."Or%der:" ("a" integer, "A" integer, "%(x)s" text, "user" text)'
    )
    database.execute("""INSERT INTO "Od""d"."Or%der:" VALUES (1, 2, 'x', 'y')""")
    database.extract("Or%der:", schema='Od"d')
    assert database.read().to_pylist() == [{"a": 1, "A": 2, "%(x)s": "x", "user": "y"}]
    database.refuses(r"no table or view 'or%der:' \(did you mean 'Or%der:'\?\)", "or%der:", schema='Od"d')


def test_a_materialized_view_and_an_empty_table(database):
    database.execute("CREATE TABLE t (a integer); CREATE MATERIALIZED VIEW m AS SELECT 1::bigint AS b")
    database.extract("m")
    assert database.read().to_pylist() == [{"b": 1}]
    database.refuses("is a view", "m", new_by="b", out=database.out.with_name("new"))
    assert database.extract("t", database.out.with_name("empty")).rows == 0
    assert database.read(database.out.with_name("empty")).schema.names == ["a"]


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [
        ("bigint GENERATED ALWAYS AS IDENTITY", ["DEFAULT"] * 2, ["DEFAULT"]),
        ("numeric(9,2)", ["9.99", "1.1"], ["10.00"]),
        ("date", ["'2024-01-01'", "'2023-12-31'"], ["'2024-01-02'"]),
        ("timestamptz", ["'2024-01-01 00:00+05'", "'2024-01-01 00:00:00.000001+05'"], ["'2024-01-01 00:00+04'"]),
    ],
)
def test_only_new_rows_are_extracted(database, kind, first, later):
    database.execute(f"CREATE TABLE t (id {kind} PRIMARY KEY, a text)")
    database.execute(f"INSERT INTO t VALUES {', '.join(f'({value}, 1)' for value in first)}")
    assert database.extract("t", new_by="id", rows_per_file=1).rows == 2
    assert database.extract("t", new_by="id").rows == 0
    database.execute(f"INSERT INTO t VALUES {', '.join(f'({value}, 2)' for value in later)}")
    assert database.extract("t", new_by="id").rows == 1
    found = database.read()
    assert found["a"].to_pylist() == ["1", "1", "2"]
    assert found["id"].to_pylist() == sorted(found["id"].to_pylist())


def test_a_unique_index_by_an_expression_or_of_some_rows_is_not_enough(database):
    database.execute("CREATE TABLE t (id integer NOT NULL, b integer)")
    database.execute("CREATE UNIQUE INDEX e ON t (abs(id)); CREATE UNIQUE INDEX p ON t (id) WHERE b > 0")
    database.execute("CREATE UNIQUE INDEX two ON t (id, b)")
    database.refuses("is not declared unique", "t", new_by="id")
    database.execute("CREATE UNIQUE INDEX whole ON t (id) INCLUDE (b)")
    assert database.extract("t", new_by="id").rows == 0


def test_a_constraint_that_does_not_cover_all_rows_is_not_enough(database):
    database.execute("CREATE TABLE parent (id integer PRIMARY KEY); CREATE TABLE child () INHERITS (parent)")
    database.refuses("not unique together with the rows of the tables that inherit", "parent", new_by="id")
    message = database.refuses("of the tables that inherit from it", "parent", schema="public", new_by="id")
    assert message.endswith("; extract without --new-by")
    database.execute("CREATE TABLE parted (id integer PRIMARY KEY) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (9); INSERT INTO parted VALUES (1)")
    assert database.extract("parted", new_by="id").rows == 1


@pytest.mark.parametrize("kind", ["VIEW", "MATERIALIZED VIEW"])
@pytest.mark.parametrize("schema", [None, "public"])
def test_views_have_no_new_rows(database, kind, schema):
    database.execute(f"CREATE TABLE t (id integer PRIMARY KEY); CREATE {kind} v AS SELECT * FROM t")
    if kind == "MATERIALIZED VIEW":
        database.execute("CREATE UNIQUE INDEX u ON v (id)")
    database.refuses("'v' is a view, .* so --new-by is not possible", "v", schema=schema, new_by="id")
    assert database.extract("t", new_by="id").rows == 0


def test_no_view_is_advised_for_new_rows(database):
    database.execute("CREATE TABLE t (id integer PRIMARY KEY, j json); CREATE TABLE copy (LIKE t INCLUDING ALL)")
    database.refuses("or extract a view that casts them", "t")
    database.refuses("or extract a table to which they are copied as another type", "t", new_by="id")
    database.execute("ALTER TABLE copy ALTER j TYPE text")
    assert database.extract("copy", new_by="id").rows == 0


def test_a_unique_index_that_could_not_be_made_is_none(database):
    database.execute("CREATE TABLE failed (id integer NOT NULL); INSERT INTO failed VALUES (1), (1)")
    with pytest.raises(AssertionError, match="could not create unique index"):
        database.execute("CREATE UNIQUE INDEX CONCURRENTLY once ON failed (id)")
    database.refuses("is not declared unique", "failed", new_by="id")
    database.execute("DELETE FROM failed")
    database.execute("REINDEX INDEX once")
    assert database.extract("failed", new_by="id").rows == 0


def test_all_rows_are_of_one_state_of_the_database(database, monkeypatch):
    monkeypatch.setattr(extraction, "_PARTITION_ROWS", 2)
    database.execute("CREATE TABLE t (a integer); INSERT INTO t SELECT 1 FROM generate_series(1, 8)")
    changes = iter(["UPDATE t SET a = 2", "DELETE FROM t"])
    database.extract("t", on_rows=lambda _rows: [database.execute(each) for each in changes])
    assert database.read()["a"].to_pylist() == [1] * 8


def test_columns_and_rows_are_of_one_state_of_the_database(database, monkeypatch):
    database.execute("CREATE TABLE t (id integer PRIMARY KEY); INSERT INTO t VALUES (1)")
    inner = extraction._destination

    def later(*arguments):
        database.execute("INSERT INTO t VALUES (2)")
        return inner(*arguments)

    monkeypatch.setattr(extraction, "_destination", later)
    assert database.extract("t", new_by="id").rows == 1


def test_a_full_disk_ends_the_reading_too(database, monkeypatch):
    database.execute("CREATE TABLE t AS SELECT generate_series(1, 5000) AS a")

    def refused(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "sync_file", refused)
    database.refuses("No space left on device; free space", "t", rows_per_file=10)  # an open cursor would warn
    assert not database.out.exists()


def test_rows_come_in_partitions_by_a_cursor_of_the_server(database, monkeypatch):
    monkeypatch.setattr(extraction, "_PARTITION_ROWS", 100)
    database.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS a")
    cursors = []
    database.extract(
        "t", on_rows=lambda rows: cursors.append((rows, database.execute("SELECT query FROM pg_stat_activity")))
    )
    assert [rows for rows, _ in cursors] == [100] * 10
    assert "FETCH FORWARD" in cursors[0][1]


def test_nothing_can_be_written_to_the_source(database):
    database.execute("CREATE TABLE t (a integer); CREATE SEQUENCE s")
    database.execute("CREATE FUNCTION next() RETURNS bigint LANGUAGE sql AS $$ SELECT nextval('s') $$")
    database.execute("CREATE VIEW v AS SELECT next() AS a")
    database.refuses("cannot execute nextval.* in a read-only transaction", "v")


def test_a_refused_or_unreachable_server_is_one_line_without_the_password(database, monkeypatch, tmp_path):
    monkeypatch.setenv("PASSWORD", "tiger")
    for place, reason in (
        ("127.0.0.1:1/postgres", "refused"),
        (f"/postgres?host={database.server}/nowhere", "check that it can be reached and read"),
        (f"/none?host={database.server}", 'database "none" does not exist'),
        (f"/postgres?host={database.server}&sslmode=${{PASSWORD}}", r"\*\*\*|sslmode"),
    ):
        with pytest.raises(ExtractionError, match=reason) as caught:
            extract(f"postgresql://loader:${{PASSWORD}}@{place}", "t", tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert "tiger" not in str(caught.value)
        assert caught.value.__cause__ is None
