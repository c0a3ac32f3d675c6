"""A contestant that fails is recorded, and the others finish. The processes are stood in for."""

import json

import pytest

from benchmarks.peers import run
from benchmarks.peers._cases import Cell, Side
from benchmarks.peers._processes import ContestantError
from benchmarks.peers._report import summary, write_report

OUT_OF_MEMORY = "was ended with -9, -9 for want of memory"


class FakeContestant:
    """Joins a million tuples a second, and fails where it is told to."""

    fails = ()  # names, (name, batch rows) or (name, call)

    def __init__(self, name, *_):
        self.name, self.group, self.idle, self.closed = name, None, 0, 0

    def open(self):
        self._fail("open")

    def reopen(self):
        self.open()

    def run(self, seconds, rows, tuples=0):  # noqa: ARG002 - as the contestant has it
        self._fail(rows)
        return {
            "tuples": int(seconds * 1e6), "seconds": seconds, "processor_seconds": seconds, "batch_rows": rows,
            "longest_batch_seconds": 0.0, "memory": {"records": 0},
        }  # fmt: skip

    def finish(self):
        self._fail("finish")
        return 0, 0, 0

    def close(self):
        self.closed += 1

    def _fail(self, what):
        if (self.name, what) in self.fails:
            raise ContestantError(f"{self.name} {OUT_OF_MEMORY}")


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that measures SSIJ, DuckDB and Polars, of which some fail."""

    def measure(*fails):
        monkeypatch.setattr(FakeContestant, "fails", fails)
        monkeypatch.setattr(run, "Contestant", FakeContestant)
        monkeypatch.setattr(run, "forget", lambda _: None)
        monkeypatch.setattr(run, "_check", lambda _, contestant, __: contestant.finish())
        sides = [Side("SSIJ"), Side("DuckDB", batches=(100, 200)), Side("Polars", batches=(300,))]
        cell = Cell("a case", sides[0], ((sides[1], 2.0), (sides[2], 1.0)), seconds=1.0, rounds=2)
        return run._measure(cell, sides, [(tmp_path / "table", tmp_path / "stream")] * 3)

    return measure


def ratios(result):
    return {peer["peer"]: peer["ratio"] for peer in result["peers"]}


def test_a_batch_size_that_fails_is_recorded_and_the_other_size_is_measured(measure):
    result = measure(("DuckDB", 200))
    assert result["failures"] == {}
    assert result["trials"]["DuckDB"] == {100: 1e6, 200: f"DuckDB {OUT_OF_MEMORY}"}
    assert ratios(result) == {"DuckDB": 1.0, "Polars": 1.0}


@pytest.mark.parametrize("when", ["open", 300, "finish"])
def test_a_contestant_that_fails_is_recorded_and_the_others_finish(measure, when):
    result = measure(("Polars", when))
    assert result["failures"] == {"Polars": f"Polars {OUT_OF_MEMORY}"}
    assert ratios(result) == {"DuckDB": 1.0, "Polars": None}
    assert {sample["name"] for sample in result["samples"]} == {"SSIJ", "DuckDB"}


def test_a_contestant_without_a_batch_size_that_works_is_recorded(measure):
    result = measure(("DuckDB", 100), ("DuckDB", 200))
    assert "can join no batch" in result["failures"]["DuckDB"]
    assert ratios(result) == {"DuckDB": None, "Polars": 1.0}


def test_the_others_finish_when_ours_fails(measure):
    result = measure(("SSIJ", 250_000))
    assert ratios(result) == {"DuckDB": None, "Polars": None}
    assert {sample["name"] for sample in result["samples"]} == {"DuckDB", "Polars"}


def test_the_report_says_who_failed(measure, tmp_path):
    result = measure(("Polars", 300))
    rows = {row[3]: row[4:] for row in summary(result)[1]}
    assert rows == {"DuckDB": ["1", "1.00", "2", "missed"], "Polars": ["-", "-", "1", "failed"]}
    (tmp_path / "a-0.json").write_text(json.dumps(result))
    assert "| Polars | - | - | 1 | failed |" in write_report(tmp_path).read_text()
