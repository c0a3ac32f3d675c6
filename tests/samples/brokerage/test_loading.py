"""Loads of the brokerage: equal tables, batches one at a time or at once, repeats, kills, refusals."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from checker import compare, dangling, differences, read
from corners import add_corners
from deltalake import DeltaTable
from oracle import TABLES, Warehouse

from headrace.pipelines.errors import BatchError
from headrace.samples.brokerage import dimensions, facts, load
from headrace.samples.brokerage.delta import Warehouse as Tables
from headrace.samples.brokerage.generate import generate
from headrace.storage.errors import InputError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]


def headrace(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "headrace", *map(str, arguments)],
        env={**os.environ, "PYTHONWARNINGS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def versions(folder):
    return {table: DeltaTable(str(folder / "warehouse" / table)).version() for table in TABLES}


def assert_oracle(folder, source, batches):
    expected = Warehouse(source)
    for batch in range(1, batches + 1):
        expected.load(batch)
    found = {
        table: differences(read(folder / "warehouse", table), TABLES[table], rows)
        for table, rows in expected.tables().items()
    }
    assert {table: texts[:3] for table, texts in found.items() if texts} == {}
    assert dangling(folder / "warehouse")[:3] == []


@pytest.fixture(scope="module")
def one_by_one(small, tmp_path_factory):
    """Load one more batch in each process, and compare after each."""
    folder, found = tmp_path_factory.mktemp("one") / "out", {}
    for batch in (1, 2, 3):
        arguments = ("--source", small / "source", "--dir", folder, "--batches", batch, "--json")
        done = headrace("demo", "brokerage", *arguments)
        assert done.returncode == 0, done.stderr
        found[batch] = compare(folder / "warehouse", small / "expected" / f"after_batch{batch}")
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("table", [*TABLES, "keys"])
def test_the_tables_equal_the_expected_ones(one_by_one, table, batch):
    assert one_by_one[1][batch][table] == []


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_load_of_loaded_batches_writes_nothing(one_by_one, small):
    folder, _ = one_by_one
    before = versions(folder)
    assert [loaded.rows for loaded in load(small / "source", folder)] == [{}, {}, {}]
    assert versions(folder) == before


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_batches_at_once_end_in_the_same_tables(small, tmp_path):
    load(small / "source", tmp_path / "out")
    found = compare(tmp_path / "out" / "warehouse", small / "expected" / "after_batch3")
    assert {table: texts[:3] for table, texts in found.items() if texts} == {}


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("seed", [1, 2])
def test_generated_batches_end_in_the_tables_of_the_oracle(tmp_path, seed):
    generate(tmp_path / "source", seed, 30)
    load(tmp_path / "source", tmp_path / "out")
    assert_oracle(tmp_path / "out", tmp_path / "source", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("seed", [21, 22, 23])
def test_larger_batches_with_rare_corners_end_in_the_tables_of_the_oracle(tmp_path, seed):
    generate(tmp_path / "source", seed, 300)
    add_corners(tmp_path / "source", seed)
    load(tmp_path / "source", tmp_path / "out")
    assert_oracle(tmp_path / "out", tmp_path / "source", 3)


class Killed(BaseException):
    """Ends a load where a kill would."""


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_load_that_ends_at_any_commit_is_completed_by_the_next(tmp_path, monkeypatch):
    generate(tmp_path / "source", 3, 8)
    merge, mark = Tables._merged, []

    def commit_and_end(self, *arguments):
        merge(self, *arguments)
        mark.append(arguments)
        raise Killed

    monkeypatch.setattr(Tables, "_merged", commit_and_end)
    while True:
        try:
            load(tmp_path / "source", tmp_path / "out")
        except Killed:
            continue
        break
    assert len(mark) == 7 + 5 + 5  # the pipeline commits watches; brokers and securities come with the history alone
    assert_oracle(tmp_path / "out", tmp_path / "source", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_load_that_ends_after_any_step_of_the_pipeline_file_is_completed_by_the_next(tmp_path, monkeypatch):
    generate(tmp_path / "source", 6, 8)
    ended = set()

    def ending(name, work):
        def end_after(*arguments, **options):
            result = work(*arguments, **options)
            key = (
                name,
                str(arguments[1] if name == "apply_files" else arguments[0]),
                len(list(tmp_path.rglob("batch*"))),
            )
            if key not in ended:
                ended.add(key)
                raise Killed
            return result

        return end_after

    for module, name in ((dimensions, "stage"), (dimensions, "apply_files"), (facts, "stage"), (facts, "run")):
        monkeypatch.setattr(module, name, ending(name, getattr(module, name)))
    monkeypatch.setattr(Tables, "mark", ending("mark", Tables.mark))
    for _ in range(60):
        try:
            load(tmp_path / "source", tmp_path / "out")
        except Killed:
            continue
        break
    assert len(ended) > 20
    assert_oracle(tmp_path / "out", tmp_path / "source", 3)


@pytest.mark.slow
def test_a_killed_process_is_completed_by_the_next(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "out"
    generate(source, 4, 8)
    script = f"""
        import os, pathlib
        from headrace.samples.brokerage import load
        from headrace.samples.brokerage.dimensions import Dimensions
        Dimensions.tables = lambda *_: os._exit(9)
        load(pathlib.Path({str(source)!r}), pathlib.Path({str(folder)!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False)
    assert done.returncode == 9, done.stderr
    again = headrace("demo", "brokerage", "--source", source, "--dir", folder)
    assert again.returncode == 0, again.stderr
    assert_oracle(folder, source, 3)


def test_a_folder_with_other_files_is_refused(small, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds files that no load of the brokerage wrote"):
        load(small / "source", tmp_path)


def test_more_batches_than_there_are_is_refused(small, tmp_path):
    with pytest.raises(InputError, match="has 3 batches, so --batches is at most 3"):
        load(small / "source", tmp_path / "out", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_another_source_for_the_same_folder_is_refused(one_by_one, small, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(small / "source", folder)
    with (folder / "Batch2" / "Trade.txt").open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match="holds batch 2 of other files"):
        load(folder, one_by_one[0])


def test_a_source_whose_path_is_a_pattern_is_refused(tmp_path):
    generate(tmp_path / "[1]", 5, 3, batches=1)
    with pytest.raises(InputError, match=r"\[1\] holds '\[', which Spark's readers take for a pattern"):
        load(tmp_path / "[1]", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_missing_is_an_error_with_a_remedy(tmp_path):
    done = headrace("demo", "brokerage", "--source", tmp_path / "nowhere", "--dir", tmp_path / "out", "--json")
    assert done.returncode == 1
    assert "has no folder Batch1" in json.loads(done.stdout)["error"]["cause"]
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("spark")
def test_a_record_with_a_field_too_few_fails_and_names_the_file(tmp_path):
    generate(tmp_path / "source", 5, 8, batches=1)
    with (tmp_path / "source" / "Batch1" / "CashTransaction.txt").open("a") as file:
        file.write("1|2015-01-01 00:00:00|3.00\n")
    with pytest.raises(BatchError, match=r"CashTransaction\.txt: a record has not 4 fields: 1\|2015"):
        load(tmp_path / "source", tmp_path / "out")
