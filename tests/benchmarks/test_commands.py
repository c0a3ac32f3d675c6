"""Every experiment runs from its command on small data and leaves its results. What it measures is not judged here."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def benchmark(*arguments):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["joins", "storage", pytest.param("spark", marks=pytest.mark.spark)])
def test_an_experiment_writes_its_table_and_its_plot(tmp_path, experiment):
    done = benchmark(experiment, "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".png"]
    with (tmp_path / f"{experiment}.csv").open() as table:
        assert len(list(csv.DictReader(table))) > 1


@pytest.mark.slow
def test_absent_keys_are_measured_with_and_without_a_filter(tmp_path):
    done = benchmark("filter", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "filter.csv").open() as table:
        assert len({row["contestant"] for row in csv.DictReader(table)}) == 3


@pytest.mark.slow
def test_joins_of_two_streams_are_measured_in_memory_and_with_spill_files(tmp_path):
    done = benchmark("two-streams", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "two_streams.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert {row["case"] for row in rows} == {"in memory", "with spill files"}
    assert {int(row["rows_out"]) for row in rows} == {int(rows[0]["rows_out"])}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cached-zipf", "large-deadline", "absent", "scale10"])
def test_a_case_of_the_peers_checks_the_rows_and_writes_its_ratios(tmp_path, case):
    done = benchmark("peers", case, "--quick", "--inputs", tmp_path / "inputs", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / f"{case}-0.json").read_text())
    assert all(peer["ratio"] > 0 for peer in result["peers"])
    assert (tmp_path / "peers.md").read_text().count("\n") >= 3


def test_an_unknown_case_of_the_peers_is_refused_with_the_valid_names():
    done = benchmark("peers", "cached")
    assert done.returncode == 2
    assert "the cases are cached-zipf" in done.stderr


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("case", ["facts", "changes", "restate"])
def test_a_case_of_histories_ends_with_equal_content_on_both_sides(tmp_path, case):
    done = benchmark("history", case, "--quick", "--folder", tmp_path, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout
    with (tmp_path / "history.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert {row["contestant"].split()[0] for row in rows} >= {"Spark" if case == "facts" else "Delta"}
    assert all(float(row["processor"]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.spark
def test_changes_of_a_large_dimension_give_what_a_query_expects(tmp_path):
    done = benchmark("history", "large", "--quick", "--kept", tmp_path, "--folder", tmp_path, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the dimension has the same 61,001 versions" in done.stdout
    with (tmp_path / "history.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert all(int(row["peak_memory"]) > 0 and int(row["written"]) > 0 for row in rows)
    assert (tmp_path / "customers-50000").is_dir()


def test_an_unknown_case_of_histories_is_refused_with_the_valid_names():
    done = benchmark("history", "merge")
    assert done.returncode == 2
    assert "the cases are facts, changes, large, restate" in done.stderr


@pytest.mark.slow
def test_predicates_are_measured_once_their_answers_agree(tmp_path):
    done = benchmark("predicates", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "predicates.csv").open() as table:
        assert {row["predicate"] for row in csv.DictReader(table)} == {"as-of", "band"}


@pytest.mark.slow
def test_a_cold_start_is_measured_once_its_results_are_right(tmp_path):
    done = benchmark("cold", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "cold_start.csv").open() as table:
        contestants = {row["contestant"] for row in csv.DictReader(table)}
    assert contestants == {"SSIJ", "DuckDB", "DuckDB, its file in the system's cache"}


def test_an_unknown_experiment_is_refused_with_the_valid_names():
    done = benchmark("join")
    assert done.returncode == 2
    assert "the experiments are joins, cold, predicates, filter, spark, correlate, two-streams, storage" in done.stderr
