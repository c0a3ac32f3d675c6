"""`headrace join`: files in, a Parquet file out, equal to the relational join whatever the algorithm."""

import subprocess
import sys

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.samples import NYCFLIGHTS13

FIRST_WEEK = NYCFLIGHTS13.flights / "flights-2013-01-01.parquet"
MULTISET_DIFFERENCE = "(FROM {0} EXCEPT ALL FROM {1}) UNION ALL (FROM {1} EXCEPT ALL FROM {0})"


@pytest.fixture(scope="module")
def planes(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "planes.tbl"
    command = ["table", "build", NYCFLIGHTS13.planes, "--key", "tailnum", "--unique", "-o", path]
    subprocess.run([sys.executable, "-m", "headrace", *map(str, command)], check=True, capture_output=True)
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
    for told in ("rows in", "rate", "hit ratio", "wanted", "longest wait", "deadline misses", "memory"):
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


def test_rows_may_state_their_deadlines(invoke, planes, tmp_path):
    outcome = invoke(
        "join", planes, FIRST_WEEK, "--on", "tailnum", "--deadline-column", "distance", "-o", tmp_path / "o"
    )
    assert outcome.code == 0, outcome
    missing = invoke("join", planes, FIRST_WEEK, "--on", "tailnum", "--deadline-column", "due", "-o", tmp_path / "p")
    assert missing.code == 1
    assert "no column 'due' for the deadlines" in missing.err


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


def peak_of_join(table, stream, out):
    """Return the greatest resident size in bytes of a join in a process of its own."""
    script = (
        "import resource, sys\nfrom headrace.cli.main import headrace\n"
        "try:\n    headrace(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    command = ["join", table, stream, "--on", "s=k", "--memory", "32MiB", "-o", out]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, command)], check=True, capture_output=True, text=True
    )
    return int(done.stdout.rsplit("PEAK", 1)[1])


@pytest.mark.slow
def test_the_process_stays_within_its_budget_over_a_table_six_times_as_large(invoke, tmp_path, rng):
    rows, stream_rows = 6_000_000, 3_000_000
    columns = {name: rng.random(rows) for name in "abcd"}
    pq.write_table(pa.table({"k": pa.array(range(rows), pa.int64()), **columns}), tmp_path / "t.parquet")
    stream = pa.table({"s": rng.zipf(1.3, stream_rows) % rows, "x": rng.random(stream_rows)})
    pq.write_table(stream, tmp_path / "s.parquet", row_group_size=100_000)
    pq.write_table(stream.slice(0, 100), tmp_path / "few.parquet")
    assert invoke("table", "build", tmp_path / "t.parquet", "--key", "k", "-o", tmp_path / "t").code == 0
    assert (tmp_path / "t").stat().st_size > 6 * 32 * 2**20
    least, most = (peak_of_join(tmp_path / "t", tmp_path / f"{name}.parquet", tmp_path / "o") for name in ("few", "s"))
    assert most <= least + 64 * 2**20, (least, most)


@pytest.fixture
def prices(invoke, tmp_path):
    (tmp_path / "prices.csv").write_text("symbol,second,price\nA,10,1.0\nA,20,1.5\nB,15,7.0\n")
    outcome = invoke(
        "table", "build", tmp_path / "prices.csv", "--key", "symbol,second", "--unique", "-o", tmp_path / "p"
    )
    assert outcome.code == 0, outcome
    (tmp_path / "trades.csv").write_text("symbol,at\nA,19\nA,30\nB,14\n")
    return tmp_path / "p", tmp_path / "trades.csv"


@pytest.mark.parametrize(
    ("options", "matches"),
    [
        (["--as-of", "at=second"], [("A", 19, 10), ("A", 30, 20)]),
        (["--as-of", "at=second", "--tolerance", "9"], [("A", 19, 10)]),
        (["--as-of", "at=second", "--direction", "forward"], [("A", 19, 20), ("B", 14, 15)]),
        (
            ["--band", "at=second", "--below", "10", "--above", "1"],
            [("A", 19, 10), ("A", 19, 20), ("A", 30, 20), ("B", 14, 15)],
        ),
    ],
)
def test_the_nearest_key_or_those_near_by(invoke, prices, tmp_path, options, matches):
    outcome = invoke("join", *prices, "--on", "symbol", *options, "-o", tmp_path / "o.parquet")
    assert outcome.code == 0, outcome
    rows = pq.read_table(tmp_path / "o.parquet").select(["symbol", "at", "second"]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == matches


@pytest.mark.parametrize(
    ("options", "matches"),
    [
        (["--band", "at=since", "--below", "0s", "--above", "1d"], 1),
        (["--band", "at=since", "--below", "90s", "--above", "0s"], 1),
        (["--band", "at=since", "--below", "-1s", "--above", "1d"], 1),
        (["--band", "at=since", "--below", "89.999999s", "--above", "-89s"], 0),
        (["--as-of", "at=since", "--tolerance", "0s"], 0),
    ],
)
def test_distances_between_times_may_be_zero_or_negative(invoke, tmp_path, options, matches):
    (tmp_path / "p.csv").write_text("since\n2024-01-01T10:00:00\n2024-01-01T11:00:00\n")
    assert invoke("table", "build", tmp_path / "p.csv", "--key", "since", "-o", tmp_path / "p").code == 0
    (tmp_path / "t.csv").write_text("at\n2024-01-01T10:01:30\n")
    outcome = invoke("join", tmp_path / "p", tmp_path / "t.csv", *options, "-o", tmp_path / "o.parquet")
    assert outcome.code == 0, outcome
    assert pq.read_metadata(tmp_path / "o.parquet").num_rows == matches


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        (["--as-of", "at=since", "--tolerance", "90"], "--tolerance 90 has no unit, but key column since is a time"),
        (["--band", "at=since", "--below", "90"], "--below 90 has no unit"),
        (["--band", "at=since", "--above", "90", "--below", "1m"], "--above 90 has no unit"),
    ],
)
def test_a_distance_between_times_needs_a_unit(invoke, tmp_path, options, unit):
    (tmp_path / "p.csv").write_text("since,price\n2024-01-01T10:00:00,1\n2024-01-01T11:00:00,2\n")
    outcome = invoke("table", "build", tmp_path / "p.csv", "--key", "since", "-o", tmp_path / "p")
    assert outcome.code == 0, outcome
    (tmp_path / "t.csv").write_text("at\n2024-01-01T10:01:30\n2024-01-01T11:02:00\n")
    files = (tmp_path / "p", tmp_path / "t.csv")
    outcome = invoke("join", *files, *options, "-o", tmp_path / "o.parquet")
    assert outcome.code in {1, 2}
    assert unit in outcome.err
    assert "write a duration such as 90s" in outcome.err
    assert not (tmp_path / "o.parquet").exists()
    given = ["90s" if text == "90" else text for text in options]
    outcome = invoke("join", *files, *given, "-o", tmp_path / "o.parquet")
    assert outcome.code == 0, outcome
    assert pq.read_table(tmp_path / "o.parquet").num_rows == ("--above" not in options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--on, --as-of or --band"),
        (["--as-of", "at=second", "--band", "at=second"], "do not go together"),
        (["--on", "symbol", "--tolerance", "3"], "--tolerance belongs to --as-of"),
        (["--band", "at=second,symbol=symbol"], "--band takes one pair"),
        (["--on", "symbol", "--as-of", "at=second", "--tolerance", "soon"], "soon"),
        (["--on", "symbol", "--as-of", "at=second", "--tolerance", "1e99999999"], "no distance between keys"),
        (["--on", "symbol", "--band", "at=second", "--below", "Infinity"], "no distance between keys"),
        (["--on", "symbol", "--band", "at=second", "--above", "sNaN"], "no distance between keys"),
    ],
)
def test_options_that_say_no_match_are_refused(invoke, prices, tmp_path, options, told):
    outcome = invoke("join", *prices, *options, "-o", tmp_path / "o.parquet")
    assert outcome.code in {1, 2}
    assert told in outcome.err
    assert not (tmp_path / "o.parquet").exists()


def test_views_are_read_as_plain_text(invoke, prices, tmp_path):
    views = {"symbol": pa.array(["A", "B"], pa.string_view()), "raw": pa.array([b"1", None]).cast(pa.binary_view())}
    pq.write_table(pa.table({**views, "second": [10, 15]}), tmp_path / "s.parquet")
    on = ["--on", "symbol,second", "-o", tmp_path / "o.parquet"]
    outcome = invoke("join", prices[0], tmp_path / "s.parquet", *on)
    assert outcome.code == 0, outcome
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [("A", b"1", 10, 1.0), ("B", None, 15, 7.0)]
