"""`headrace table`: what is built can be looked at, checked, scanned and dumped."""

import csv
import io
import math
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage import Table

ROWS = pa.table(
    {
        "k": pa.array([3, 1, 2], pa.int64()),
        "name": ["c", None, 'say "b", please'],
        "day": pa.array([2, 0, 1], pa.date32()),
        "raw": [b"\xff", b"", None],
    }
)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(ROWS, path)
    return path


@pytest.fixture
def table(tmp_path, source, invoke):
    path = tmp_path / "rows.tbl"
    outcome = invoke("table", "build", source, "--key", "k", "--unique", "-o", path)
    assert outcome.code == 0, outcome
    return path


def test_build_reports_what_the_table_became(tmp_path, source, invoke):
    document = invoke(
        "table", "build", source, "--key", "k", "--page-size", "4KiB", "-o", tmp_path / "t", "--json"
    ).document
    assert document["key"] == ["k"]
    assert document["stats"]["rows"] == 3
    assert document["stats"]["page_size"] == 4096
    assert document["columns"] == {"k": "int64", "name": "string", "day": "date32[day]", "raw": "binary"}


@pytest.mark.parametrize(("text", "told"), [("code,name\n", True), ("code,name\n1,a\n", False)])
def test_a_build_without_rows_tells_that_no_row_shows_the_types(tmp_path, invoke, text, told):
    (tmp_path / "a.csv").write_text(text)
    outcome = invoke("table", "build", tmp_path / "a.csv", "--key", "code", "-o", tmp_path / "t")
    assert outcome.code == 0
    shown = "has no record that shows the types of its columns, so all are string; build the table again when it has"
    assert (shown in outcome.out) is told


def test_info_shows_schema_and_size(table, invoke):
    outcome = invoke("table", "info", table)
    assert outcome.code == 0
    assert "rows per leaf" in outcome.out
    columns = dict(line.split()[:2] for line in outcome.out.partition("Columns\n")[2].splitlines()[2:])
    assert columns == {"k": "bigint", "name": "string", "day": "date", "raw": "binary"}
    assert invoke("table", "info", table, "--json").document["stats"]["unique"] is True


def test_a_sound_table_checks_with_zero(table, invoke):
    outcome = invoke("table", "check", table, "--json")
    assert outcome.code == 0
    assert outcome.document == {"table": str(table), "ok": True, "violations": [], "unfiltered": 0}


def test_a_flipped_bit_checks_with_three(table, invoke):
    content = bytearray(table.read_bytes())
    content[2 * 8192 + 100] ^= 1
    table.write_bytes(content)
    outcome = invoke("table", "check", table)
    assert outcome.code == 3
    assert "2" in outcome.out + outcome.err


def test_damage_is_told_as_json_too(table, invoke):
    content = bytearray(table.read_bytes())
    content[2 * 8192 + 100] ^= 1
    table.write_bytes(content)
    outcome = invoke("table", "check", table, "--json")
    assert (outcome.code, outcome.document["ok"]) == (3, False)
    (violation,) = outcome.document["violations"]
    assert violation["page"] == 2


def test_a_truncated_table_checks_with_three(table, invoke):
    table.write_bytes(table.read_bytes()[: 2 * 8192 + 10])
    assert invoke("table", "check", table).code == 3


def test_scan_prints_csv_in_key_order(table, invoke):
    outcome = invoke("table", "scan", table)
    assert list(csv.reader(io.StringIO(outcome.out))) == [
        ["k", "name", "day", "raw"],
        ["1", "", "1970-01-01", ""],
        ["2", 'say "b", please', "1970-01-02", ""],
        ["3", "c", "1970-01-03", "ff"],
    ]


def test_scan_prints_one_json_object_a_line(table, invoke):
    outcome = invoke("table", "scan", table, "--json", "--low", "2", "--high", "2", "--columns", "k,day")
    assert outcome.document == {"k": 2, "day": "1970-01-02"}


def test_scan_stops_at_the_limit(table, invoke):
    assert len(invoke("table", "scan", table, "--limit", "2").out.splitlines()) == 3
    everything = invoke("table", "scan", table).out
    assert invoke("table", "scan", table, "--limit", str(10**30)).out == everything


def test_a_reader_that_has_had_enough_is_no_failure(tmp_path, invoke):
    pq.write_table(pa.table({"k": range(200_000)}), tmp_path / "many.parquet")
    assert invoke("table", "build", tmp_path / "many.parquet", "--key", "k", "-o", tmp_path / "many").code == 0
    scan = subprocess.Popen(
        [sys.executable, "-m", "headrace", "table", "scan", tmp_path / "many"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert scan.stdout.readline() == b"k\n"
    scan.stdout.close()
    assert scan.stderr.read() == b""
    scan.stderr.close()
    assert scan.wait() == 0


def test_a_bound_that_is_no_key_is_named(table, invoke):
    outcome = invoke("table", "scan", table, "--low", "x")
    assert outcome.code == 1
    assert "'x' is no bigint, the type of key column 'k'" in outcome.err


def test_dump_lists_the_pages(table, invoke):
    document = invoke("table", "dump", table, "--json").document
    assert {page["type"] for page in document["pages"]} >= {"leaf"}
    assert all(page["sound"] for page in document["pages"])
    assert "Pages" in invoke("table", "dump", table).out


def test_dump_lists_moved_leaves(table, invoke):
    with Table.open(table) as opened:
        opened.apply(pa.Table.from_batches(list(opened.scan())).slice(0, 1))
        page = int(opened.snapshot().leaf_pages[0])
    ((leaf, rows, moved_to, _),) = invoke("table", "dump", table, "--json").document["superblock"]["relocations"]
    assert (leaf, rows, moved_to) == (0, 3, page)
    assert "Relocated leaves" in invoke("table", "dump", table).out


@pytest.mark.parametrize("page", [0, 1, 10**6, 10**18, 10**30])
def test_dump_names_the_pages_that_there_are(table, invoke, page):
    outcome = invoke("table", "dump", table, "--page", page)
    assert outcome.code == 1, outcome
    assert f"has pages 2 to 3, not page {page}" in outcome.err


def test_dump_shows_the_directory_of_a_leaf(table, invoke):
    pages = invoke("table", "dump", table, "--json").document["pages"]
    leaf = next(page["page"] for page in pages if page["type"] == "leaf")
    document = invoke("table", "dump", table, "--page", leaf, "--json").document
    assert document["count"] == 3
    assert len(document["directory"]) == 4


def test_dump_shows_a_damaged_page(table, invoke):
    pages = invoke("table", "dump", table, "--json").document["pages"]
    leaf = next(page["page"] for page in pages if page["type"] == "leaf")
    content = bytearray(table.read_bytes())
    content[leaf * 8192 + 100] ^= 1
    table.write_bytes(content)
    pages = invoke("table", "dump", table, "--json").document["pages"]
    assert [page["page"] for page in pages if not page["sound"]] == [leaf]


def test_a_table_that_is_there_is_replaced_only_when_asked(table, source, invoke):
    before = table.read_bytes()
    assert invoke("table", "build", source, "--key", "k", "-o", table).code == 1
    assert table.read_bytes() == before
    assert invoke("table", "build", source, "--key", "k", "-o", table, "--overwrite").code == 0


def test_two_rows_with_one_key_in_a_unique_table(tmp_path, invoke):
    (tmp_path / "a.csv").write_text("k,v\n1,a\n1,b\n")
    outcome = invoke("table", "build", tmp_path / "a.csv", "--key", "k", "--unique", "-o", tmp_path / "t")
    assert outcome.code == 1
    assert "nothing;" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.fixture
def stored(tmp_path, invoke):
    """Return a function that builds a table whose key is the first column."""

    def build(rows):
        pq.write_table(rows, tmp_path / "stored.parquet")
        path = tmp_path / "stored"
        outcome = invoke("table", "build", tmp_path / "stored.parquet", "--key", rows.column_names[0], "-o", path)
        assert outcome.code == 0, outcome
        return path

    return build


def test_scan_quotes_names_that_hold_a_comma(stored, invoke):
    outcome = invoke("table", "scan", stored(pa.table({"k": [1], "a,b": [2]})))
    assert outcome.out == 'k,"a,b"\n1,2\n'


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array([10**7], pa.date32()), "29349-01-26"),
        (pa.array([2**62], pa.duration("ms")), str(2**62)),
        (pa.array([2**60], pa.timestamp("us")), f"<value out of range: {2**60}>"),
        (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
        (pa.array([1_000], pa.time64("ns")), "00:00:00.000001"),
        (pa.array([math.nan]), "nan"),
        (pa.array([-math.inf], pa.float32()), "-inf"),
    ],
)
def test_scan_shows_values_that_python_or_json_lacks(stored, invoke, values, shown):
    outcome = invoke("table", "scan", stored(pa.table({"k": [1], "v": values})), "--json")
    assert outcome.code == 0, outcome
    assert outcome.document == {"k": 1, "v": shown}


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_scan_shows_instants_of_an_unknown_time_zone_in_utc(stored, invoke, option):
    instants = pa.array([0], pa.timestamp("us", "Nowhere/Zone"))
    outcome = invoke("table", "scan", stored(pa.table({"k": [1], "v": instants})), *option)
    assert outcome.code == 0, outcome
    assert "1970-01-01" in outcome.out


@pytest.mark.parametrize("text", ["", "a\nb", 'a"b', "a,b"])
def test_scan_takes_any_text_as_the_bound_of_one_column(stored, invoke, text):
    path = stored(pa.table({"k": ["", "a\nb", 'a"b', "a,b"]}))
    outcome = invoke("table", "scan", path, "--low", text, "--high", text, "--json")
    assert outcome.code == 0, outcome
    assert outcome.document == {"k": text}


def test_scan_takes_bytes_as_it_prints_them(stored, invoke):
    path = stored(pa.table({"k": [b"\x01", b"\xff"]}))
    assert invoke("table", "scan", path, "--low", "ff").out == 'k\n"ff"\n'
    assert "'junk' is no binary" in invoke("table", "scan", path, "--low", "junk").err


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        (pa.array([0, 3_661_000_000_001], pa.time64("ns")), "01:01:01.000000001"),
        (pa.array([0, 3661], pa.time32("s")), "01:01:01"),
        (pa.array([0, 5], pa.duration("us")), "5"),
        (pa.array([0, 1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
        (pa.array([0, 1], pa.timestamp("us", "UTC")), "1970-01-01 00:00:00.000001Z"),
        (pa.array([0, 1], pa.decimal128(5, 2)), "1.00"),
        (pa.array([False, True]), "true"),
    ],
)
def test_scan_takes_a_bound_as_it_prints_it(stored, invoke, keys, bound):
    path = stored(pa.table({"k": keys}))
    for option in ("--low", "--high"):
        outcome = invoke("table", "scan", path, option, bound)
        assert outcome.code == 0, outcome
        assert bound in outcome.out
        assert len(outcome.out.splitlines()) == (2 if option == "--low" else 3)
    assert "'junk' is no " in invoke("table", "scan", path, "--low", "junk").err


def test_scan_prints_no_heading_over_a_column_that_is_not_there(table, invoke):
    outcome = invoke("table", "scan", table, "--columns", "nope")
    assert outcome.code == 1
    assert outcome.out == ""
    assert "'nope'" in outcome.err


def test_names_that_hold_a_comma_are_quoted(tmp_path, invoke):
    pq.write_table(pa.table({"a,b": [1], 'c"=d': [2], "e": [3]}), tmp_path / "r.parquet")
    names = '"a,b","c""=d"'
    outcome = invoke("table", "build", tmp_path / "r.parquet", "--key", names, "-o", tmp_path / "t", "--json")
    assert outcome.document["key"] == ["a,b", 'c"=d']
    assert invoke("table", "scan", tmp_path / "t", "--columns", '"a,b" , e').out == '"a,b",e\n1,3\n'
    pairs = '"a,b","c""=d"=c"=d'
    outcome = invoke("join", tmp_path / "t", tmp_path / "r.parquet", "--on", pairs, "-o", tmp_path / "o.parquet")
    assert outcome.code == 0, outcome
    assert pq.read_table(tmp_path / "o.parquet")["e_right"].to_pylist() == [3]


def test_a_bound_whose_quote_is_never_closed_is_refused(stored, invoke):
    path = stored(pa.table({"k": ["a", "b"]}))
    assert "not quoted as in CSV" in invoke("table", "scan", path, "--low", '"b').err
    assert invoke("table", "scan", path, "--low", '"b"').out == 'k\n"b"\n'


def test_a_tab_may_be_written_with_a_backslash(tmp_path, invoke):
    (tmp_path / "a.tsv").write_text("k\tv\n1\t2\n")
    outcome = invoke("table", "build", tmp_path / "a.tsv", "--key", "k", "--delimiter", r"\t", "-o", tmp_path / "t")
    assert outcome.code == 0, outcome


def test_compact_gives_space_back(table, invoke):
    with Table.open(table) as changing:
        rows = pa.Table.from_batches(list(changing.scan()))
        changing.apply(rows)
        changing.apply(rows)
    outcome = invoke("table", "compact", table, "--json")
    assert outcome.code == 0
    assert outcome.document["shrunk"]
    assert outcome.document["bytes_before"] > outcome.document["bytes_after"] == table.stat().st_size
    assert invoke("table", "check", table).code == 0


def test_compact_says_what_it_did(table, invoke):
    assert "is in key order" in invoke("table", "compact", table).out


def test_a_filter_is_made_shown_checked_and_dropped(table, invoke):
    made = invoke("table", "filter", table, "--bits", "16", "--json").document
    assert made["filter_bits"] >= 16
    assert invoke("table", "info", table, "--json").document["stats"]["filter_bytes"] == made["filter_bytes"] > 0
    path = table.with_name(f"{table.name}.filter")
    path.write_bytes(path.read_bytes()[:100])
    outcome = invoke("table", "check", table)
    assert outcome.code == 0
    assert "table filter" in outcome.out
    assert "has no filter any more" in invoke("table", "filter", table, "--drop").out
    assert "had no filter" in invoke("table", "filter", table, "--drop").out
    assert not path.exists()
    assert invoke("table", "filter", table, "--bits", "3").code == 2


def test_a_table_can_be_built_with_a_filter(tmp_path, source, invoke):
    options = ("--key", "k", "--filter-bits", "8", "--json", "-o", tmp_path / "t")
    assert invoke("table", "build", source, *options).document["stats"]["filter_bits"] > 0
