"""Bad input ends with a clear error, the documented exit code, no traceback, and nothing written or lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CAPABILITIES = "-dac_override,-dac_read_search"


@pytest.fixture
def table(tmp_path, invoke):
    pq.write_table(pa.table({"k": pa.array(range(1000), pa.int64()), "v": ["x"] * 1000}), tmp_path / "source.parquet")
    outcome = invoke("table", "build", tmp_path / "source.parquet", "--key", "k", "-o", tmp_path / "t.tbl")
    assert outcome.code == 0, outcome
    return tmp_path / "t.tbl"


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "stream.parquet"
    pq.write_table(pa.table({"s": pa.array([1, 2, 5000], pa.int64())}), path)
    return path


@pytest.fixture
def join(invoke, tmp_path):
    """Return a function that joins and asserts that a failure leaves the older result as it was."""
    out = tmp_path / "result" / "out.parquet"
    out.parent.mkdir()
    out.write_text("older result")

    def run(table, stream, on="s=k"):
        outcome = invoke("join", table, stream, "--on", on, "-o", out)
        assert outcome.code != 0
        assert "Traceback" not in outcome.err
        assert out.read_text() == "older result"
        assert [path.name for path in out.parent.iterdir()] == ["out.parquet"]
        return outcome

    return run


def test_a_missing_table(join, tmp_path, stream):
    outcome = join(tmp_path / "none.tbl", stream)
    assert outcome.code == 1
    assert "none.tbl" in outcome.err


def test_a_missing_stream(join, table, tmp_path):
    outcome = join(table, tmp_path / "none.csv")
    assert outcome.code == 1
    assert "there is no file or folder" in outcome.err


@pytest.mark.parametrize("target", ["t.tbl", "stream.parquet", "link"])
def test_a_join_does_not_replace_what_it_reads(invoke, table, stream, tmp_path, target):
    (tmp_path / "link").symlink_to(stream)
    before = (tmp_path / target).read_bytes()
    outcome = invoke("join", table, stream, "--on", "s=k", "-o", tmp_path / target)
    assert outcome.code == 1
    assert "is what this command reads" in outcome.err
    assert (tmp_path / target).read_bytes() == before


def test_a_build_does_not_replace_its_source(invoke, stream):
    before = stream.read_bytes()
    outcome = invoke("table", "build", stream, "--key", "s", "-o", stream, "--overwrite")
    assert outcome.code == 1
    assert "is what this command reads" in outcome.err
    assert stream.read_bytes() == before


def test_a_type_that_never_matches_is_told_by_the_streams_name(join, table, tmp_path):
    pq.write_table(pa.table({"word": ["x"]}), tmp_path / "words.parquet")
    outcome = join(table, tmp_path / "words.parquet", on="word=k")
    assert outcome.code == 1
    assert "column 'word' has type string" in outcome.err


def test_a_result_that_would_be_taken_for_a_csv(invoke, table, stream, tmp_path):
    outcome = invoke("join", table, stream, "--on", "s=k", "-o", tmp_path / "out.csv")
    assert outcome.code == 1
    assert "out.csv is named as a CSV, but the result is Parquet; write to" in outcome.err
    assert not (tmp_path / "out.csv").exists()


def test_an_empty_folder(join, table, tmp_path):
    (tmp_path / "empty").mkdir()
    outcome = join(table, tmp_path / "empty")
    assert outcome.code == 1
    assert "holds no files" in outcome.err


@pytest.mark.parametrize("content", [b"", b"not a table", bytes(100_000)])
def test_a_file_that_is_not_a_table(join, tmp_path, stream, content):
    (tmp_path / "t.tbl").write_bytes(content)
    outcome = join(tmp_path / "t.tbl", stream)
    assert outcome.code == 1
    assert "headrace: failed while joining" in outcome.err
    assert "t.tbl" in outcome.err
    assert "go on  name a table, or build it from its source: headrace table build" in outcome.err


def test_a_truncated_table(join, table, stream):
    content = table.read_bytes()
    table.write_bytes(content[: len(content) // 2])
    outcome = join(table, stream)
    assert outcome.code == 3
    assert "headrace table check" in outcome.err


def test_a_flipped_bit_in_any_leaf_is_found_before_a_wrong_row(join, table, stream, invoke):
    pages = invoke("table", "dump", table, "--json").document["pages"]
    leaf = next(page["page"] for page in pages if page["type"] == "leaf")
    content = bytearray(table.read_bytes())
    content[leaf * 8192 + 4000] ^= 1
    table.write_bytes(content)
    outcome = join(table, stream)
    assert outcome.code == 3
    assert f"page {leaf}" in outcome.err


def test_a_wrong_stream_column(join, table, stream):
    outcome = join(table, stream, on="nope=k")
    assert outcome.code == 1
    assert "nope" in outcome.err
    assert "s" in outcome.err


def test_a_wrong_key_column(join, table, stream):
    outcome = join(table, stream, on="s=nope")
    assert outcome.code == 1
    assert "its columns are k, v" in outcome.err


def test_a_column_that_is_not_the_key(join, table, tmp_path):
    pq.write_table(pa.table({"s": ["x"]}), tmp_path / "s.parquet")
    outcome = join(table, tmp_path / "s.parquet", on="s=v")
    assert outcome.code == 1
    assert "k" in outcome.err


def test_text_against_an_integer_key_in_parquet(join, table, tmp_path):
    pq.write_table(pa.table({"s": ["1"]}), tmp_path / "s.parquet")
    outcome = join(table, tmp_path / "s.parquet")
    assert outcome.code == 1
    assert "string" in outcome.err
    assert "int64" in outcome.err


def test_text_against_an_integer_key_in_csv(join, table, tmp_path):
    (tmp_path / "s.csv").write_text("s\n1\nabc\n")
    outcome = join(table, tmp_path / "s.csv")
    assert outcome.code == 1
    assert "abc" in outcome.err
    assert "s.csv" in outcome.err


def test_a_csv_row_with_too_many_fields(join, table, tmp_path):
    (tmp_path / "s.csv").write_text("s,t\n1,2\n1,2,3\n")
    outcome = join(table, tmp_path / "s.csv")
    assert outcome.code == 1
    assert "record 3" in outcome.err


def test_a_bad_row_behind_many_good_ones_leaves_no_half_result(join, table, tmp_path):
    (tmp_path / "s.csv").write_text("s,t\n" + "1,2\n" * 500_000 + "1,2,3\n")
    assert "record 500002" in join(table, tmp_path / "s.csv").err


def test_null_keys_in_a_stream_match_nothing_and_a_left_join_keeps_them(invoke, table, tmp_path):
    pq.write_table(pa.table({"s": pa.array([1, None], pa.int64())}), tmp_path / "s.parquet")
    out = tmp_path / "out.parquet"
    assert invoke("join", table, tmp_path / "s.parquet", "--on", "s=k", "--how", "left", "-o", out).code == 0
    assert sorted(pq.read_table(out)["v"].to_pylist(), key=str) == [None, "x"]


def test_null_keys_in_a_table_are_refused_with_their_place(invoke, tmp_path):
    pq.write_table(pa.table({"k": pa.array([1, None], pa.int64())}), tmp_path / "s.parquet")
    outcome = invoke("table", "build", tmp_path / "s.parquet", "--key", "k", "-o", tmp_path / "t")
    assert outcome.code == 1
    assert "null" in outcome.err
    assert "'k'" in outcome.err
    assert not (tmp_path / "t").exists()


def test_an_unknown_time_zone_in_a_stream(invoke, table, tmp_path):
    stream = pa.table({"s": pa.array([1], pa.int64()), "at": pa.array([0], pa.timestamp("us", "Mars/Olympus"))})
    pq.write_table(stream, tmp_path / "s.parquet")
    outcome = invoke("join", table, tmp_path / "s.parquet", "--on", "s=k", "-o", tmp_path / "out.parquet")
    assert outcome.code in {0, 1}
    if outcome.code == 0:
        assert (
            pq.read_table(tmp_path / "out.parquet")["at"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())[0].as_py()
            == 0
        )
    else:
        assert "Mars/Olympus" in outcome.err


def run_bound_by_permissions(command):
    """Run a command so that permissions bind, which they do not for root with all its capabilities."""
    command = [str(word) for word in command]
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("running as root, whom permissions do not bind, and there is no setpriv to change that")
        command = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", [0o000, 0o100])
def test_a_folder_without_permission(table, tmp_path, mode):
    closed = tmp_path / "closed"
    closed.mkdir()
    shutil.copy(tmp_path / "source.parquet", closed)
    closed.chmod(mode)
    command = [sys.executable, "-m", "headrace", "join", table, closed, "--on", "k", "-o", tmp_path / "out.parquet"]
    try:
        done = run_bound_by_permissions(command)
    finally:
        closed.chmod(0o700)
    assert done.returncode == 1, done.stderr
    assert "Permission denied" in done.stderr
    assert "closed" in done.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_a_result_folder_without_permission(table, stream, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    command = [sys.executable, "-m", "headrace", "join", table, stream, "--on", "s=k", "-o", closed / "out.parquet"]
    try:
        done = run_bound_by_permissions(command)
    finally:
        closed.chmod(0o700)
    assert done.returncode == 1, done.stderr
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize(("words", "step"), [(["info"], "printing the result"), (["scan"], "reading ")])
def test_a_full_standard_output_is_named(table, words, step):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "headrace", "table", *words, str(table)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert f"failed while {step}" in done.stderr
    assert "cannot write standard output: No space left on device; free space, or write elsewhere" in done.stderr


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--on", "s=kk"], "the table has no column 'kk' (did you mean 'k'?); its columns are k, v"),
        (["--on", "ss=k"], "has no column 'ss' (did you mean 's'?); its columns are s"),
        (["--on", "s=v"], "--on must name each key column of the table once; the key is k, and --on names v; "),
        (["--on", "s=k", "--as-of", "s=v"], "--as-of needs a table whose key begins with the columns of --on and "),
        (["--as-of", "s=v"], "continues with 'v'; the key is k, and --on names none"),
        (["--on", "s=k", "--algorithm", "inlj", "--deadline", "1s"], "leave out --deadline or use --algorithm ssij"),
        (["--on", "s=k", "--memory", "1KiB"], "the join needs at least"),
        (["--on", "s=k", "-o", "out.csv"], "write to out.parquet"),
    ],
)
def test_a_wrong_command_is_not_advised_again(invoke, table, stream, tmp_path, monkeypatch, options, cause):
    monkeypatch.chdir(tmp_path)
    outcome = invoke("join", table, stream, *([] if "-o" in options else ["-o", "out.parquet"]), *options)
    assert outcome.code == 1, outcome
    assert cause in outcome.err
    assert "(stream column" not in outcome.err
    assert "`by`" not in outcome.err
    (advice,) = [line for line in outcome.err.splitlines() if line.startswith("  go on")]
    assert "correct the command" in advice
    assert advice.endswith("headrace join --help")
    assert invoke(*advice.rpartition(": headrace ")[2].split()).code == 0


def test_a_key_that_is_no_column_names_the_nearest(invoke, tmp_path, stream):
    outcome = invoke("table", "build", stream, "--key", "ss", "-o", tmp_path / "t")
    assert outcome.code == 1
    assert "there is no column 'ss' (did you mean 's'?) for the key" in outcome.err
    assert "correct the command" in outcome.err
    assert "its arguments: headrace table build --help" in outcome.err


def test_a_table_that_exists_is_replaced_as_advised(invoke, table, tmp_path):
    command = ["table", "build", tmp_path / "source.parquet", "--key", "k", "-o", table]
    outcome = invoke(*command)
    assert outcome.code == 1
    assert "name another file, or replace it with --overwrite" in outcome.err
    assert "overwrite=True" not in outcome.err
    assert invoke(*command, "--overwrite").code == 0


@pytest.mark.parametrize(("command", "doing"), [("info", "opening"), ("check", "checking"), ("scan", "reading")])
def test_a_parquet_file_is_not_a_damaged_table(invoke, stream, command, doing):
    outcome = invoke("table", command, stream)
    assert outcome.code == 1
    assert f"headrace: failed while {doing}" in outcome.err
    assert "damage" not in outcome.err
