"""`headrace extract`: its output, its errors, and what other commands make of its files."""

import re
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.pipelines import database
from headrace.pipelines.database import extract
from headrace.storage import Table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    connection = sqlite3.connect("shop.db")
    with connection:
        connection.execute("CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, since DATE, Name2 TEXT)")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, paid DECIMAL(8, 2))")
        connection.execute("CREATE TABLE no_rows (id INTEGER PRIMARY KEY, a TEXT)")
        customers = [(1, "Ada", "1843-01-01", None), (2, "Bob\0", None, "x")]
        connection.executemany("INSERT INTO customer VALUES (?, ?, ?, ?)", customers)
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", [(10, 2, 0.1), (11, 1, 5), (12, 9, None)])
    connection.close()
    return "sqlite:///shop.db"


def test_tables_of_a_database_are_joined_as_sqlite_joins_them(shop, invoke, tmp_path):
    assert invoke("extract", shop, "customer", "-o", "customer").code == 0
    assert invoke("extract", shop, "orders", "-o", "orders", "--rows-per-file", 2, "--new-by", "id").code == 0
    assert invoke("table", "build", "customer", "--key", "id", "--unique", "-o", "customer.tbl").code == 0
    joined = invoke("join", "customer.tbl", "orders", "--on", "customer=id", "--how", "left", "-o", "joined.parquet")
    assert joined.code == 0, joined
    connection = sqlite3.connect("shop.db")
    expected = connection.execute(
        "SELECT o.id, customer, printf('%.2f', paid), name, since, Name2 FROM orders o LEFT JOIN customer c "
        "ON c.id = o.customer ORDER BY o.id"
    ).fetchall()
    connection.close()
    found = pq.read_table(tmp_path / "joined.parquet").sort_by("id")
    assert found.schema.names == ["id", "customer", "paid", "name", "since", "Name2"]
    shown = [tuple(None if value is None else str(value) for value in row.values()) for row in found.to_pylist()]
    nulls = {"0.00": None}  # SQLite prints null as that
    assert shown == [
        tuple(None if value is None else nulls.get(value, str(value)) for value in row) for row in expected
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/databases.md"])
def test_the_example_of_a_page_is_made_and_extracted_as_it_is_printed(invoke, tmp_path, monkeypatch, page):
    text = (ROOT / page).read_text()
    (program,) = re.findall(r"    \$ python -c \"(.*?)\"\n", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a reader may repeat it
        subprocess.run([sys.executable, "-c", program], check=True)
    printed = re.findall(r"    \$ headrace (extract sqlite:///shop.db .*)\n((?:    [^$].*\n)+)", text)
    assert printed
    for command, output in printed:
        outcome = invoke(*command.split())
        assert outcome.code == 0, outcome
        assert without_rate(outcome.out) == without_rate(textwrap.dedent(output))
    for command in re.findall(r"    \$ headrace ((?:table|join) .*(?:customers|joined.parquet).*)\n", text):
        assert command.split()[1] == "planes.tbl" or invoke(*command.split()).code == 0


def without_rate(output):
    return [line for line in output.splitlines() if not line.startswith("  rate")]


def test_the_file_of_an_empty_table_is_read(shop, invoke, tmp_path):
    assert invoke("extract", shop, "no_rows", "-o", "nothing").code == 0
    built = invoke("table", "build", "nothing", "--key", "id", "-o", "nothing.tbl")
    assert built.code == 0, built
    with Table.open(tmp_path / "nothing.tbl") as table:
        assert table.stats.rows == 0
        assert {field.name: field.type for field in table.schema} == {"id": pa.int64(), "a": pa.string()}
    assert invoke("join", "nothing.tbl", "nothing", "--on", "id=id", "-o", "joined.parquet").code == 0


def test_the_result_is_printed(shop, invoke):
    outcome = invoke("extract", shop, "orders", "-o", "out", "--new-by", "id")
    assert outcome.out.splitlines()[:3] == ["Extracted orders to out", "  rows      3", "  files     1"]
    assert outcome.out.splitlines()[-1] == "  position  id = 12"
    document = invoke("extract", shop, "customer", "-o", "some", "--columns", "name,id", "--json").document
    assert document.pop("seconds") > 0
    assert document == {
        "table": "customer", "out": "some", "rows": 2, "files": ["part-000001.parquet"], "position": None,
    }  # fmt: skip
    assert pq.read_schema("some/part-000001.parquet").names == ["name", "id"]


@pytest.mark.parametrize(
    "url", ["postgresql://u:tiger@host/db", "postgresql://u:tiger@host:x/db", "sqlite:///x?password=tiger", "tiger"]
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(invoke, url, flags):
    outcome = invoke("extract", url, "orders", "-o", "out", *flags)
    assert outcome.code == 2
    assert "'${VARIABLE}' in single quotes" in outcome.err or "is malformed" in outcome.err
    assert "tiger" not in outcome.out + outcome.err


def test_a_failure_names_the_table_what_is_left_and_how_to_go_on(shop, invoke, tmp_path):
    connection = sqlite3.connect("shop.db")
    with connection:
        connection.execute("UPDATE orders SET paid = 'free' WHERE id = 11")
    connection.close()
    outcome = invoke("extract", shop, "orders", "-o", "out")
    assert outcome.code == 1
    assert "headrace: failed while extracting orders to out\n" in outcome.err
    assert "row 2 (id = 11): 'free' is text" in outcome.err
    assert "  left   nothing; out was not written or changed\n" in outcome.err
    assert (
        "  go on  correct the command or the cause, then run it again; its arguments: headrace extract --help\n"
        in outcome.err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["shop.db"]
    outcome = invoke("extract", shop, "orders", "-o", "out", "--new-by", "id")
    assert "  left   the complete files in out, if there are any; the next run continues after them\n" in outcome.err


@pytest.mark.parametrize("url", ["mysql://localhost/x", "sqlite:///missing.db"])
def test_a_wrong_url_is_not_repeated_as_the_way_to_go_on(invoke, url):
    outcome = invoke("extract", url, "orders", "-o", "out")
    assert outcome.code == 1
    assert "  go on  correct the command or the cause, then run it again" in outcome.err
    assert f"headrace extract {url}" not in outcome.err


def test_an_interrupt_after_the_last_step_leaves_the_table(shop, invoke, monkeypatch):
    def interrupted(*arguments, **options):
        extract(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "extract", interrupted)
    outcome = invoke("extract", shop, "orders", "-o", "out")
    assert outcome.code == 130
    assert "  left   the complete table in out; only the report is missing\n" in outcome.err
    again = invoke("extract", shop, "orders", "-o", "out")
    assert "  left   nothing; out was not written or changed\n" in again.err


def test_the_password_of_a_variable_is_in_no_message(invoke, monkeypatch):
    monkeypatch.setenv("PASSWORD", "tiger")
    outcome = invoke("extract", "postgresql://u:${PASSWORD}@127.0.0.1:1/db", "orders", "-o", "out")
    assert outcome.code == 1
    assert "postgresql://127.0.0.1:1/db" in outcome.err  # it has no driver here, or no one listens there
    assert "tiger" not in outcome.out + outcome.err
