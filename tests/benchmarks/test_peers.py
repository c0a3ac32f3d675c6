"""A contestant that fails is recorded, and the others finish. Fakes replace the processes."""

import json

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.peers import run
from benchmarks.peers._cases import Cell, Choice, Side
from benchmarks.peers._inputs import GAP, Inputs, StreamFile, _keys, payload
from benchmarks.peers._processes import ContestantError
from benchmarks.peers._report import summary, write_report
from benchmarks.peers._tally import Tally

OUT_OF_MEMORY = "was ended with -9, -9 for want of memory"


class FakeContestant:
    """Joins a million tuples a second, and fails where the test says so."""

    fails = ()  # (name, batch rows), (name, limit) or (name, call)
    most = 1.5e6  # tuples a second that can arrive
    slow = ()  # names of contestants for which no rate is low enough

    def __init__(self, name, *_, **__):
        self.name, self.group, self.idle, self.closed = name, None, 0, 0

    def open(self):
        self._fail("open")

    def reopen(self):
        self.open()

    def run(self, seconds, choice, tuples=0):  # noqa: ARG002 - as the contestant has it
        self._fail(choice.batch_rows)
        self._fail(choice.limit)
        return {
            "tuples": int(seconds * 1e6 * choice.limit), "seconds": seconds, "processor_seconds": seconds,
            "longest_batch_seconds": 0.0, "memory": {"records": 0},
        }  # fmt: skip

    def arrive(self, rate, deadline, warm, seconds):  # noqa: ARG002 - as above
        late = rate > self.most or self.name in self.slow
        return {"rate": rate, "longest_wait": 2 * deadline if late else deadline / 2, "fits": True}

    def finish(self):
        self._fail("finish")
        return 0, 0, 0

    def close(self):
        self.closed += 1

    def _fail(self, what):
        if (self.name, what) in self.fails:
            raise ContestantError(f"{self.name} {OUT_OF_MEMORY}")


SIDES = (
    Side("SSIJ", deadline=1.0),
    Side("DuckDB", choices=(Choice(100), Choice(200))),
    Side("Polars", choices=(Choice(300),)),
)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that measures SSIJ, DuckDB and Polars, of which some fail."""

    def measure(*fails, sides=SIDES, **options):
        monkeypatch.setattr(FakeContestant, "fails", fails)
        monkeypatch.setattr(run, "Contestant", FakeContestant)
        monkeypatch.setattr(run, "_check", lambda _, contestant, __: contestant.finish())
        cell = Cell("a case", sides[0], ((sides[1], 2.0), (sides[2], 1.0)), seconds=1.0, rounds=2, **options)
        return run._measure(cell, sides, [(tmp_path / "table", tmp_path / "stream")] * 3)

    return measure


def ratios(result):
    return {peer["peer"]: peer["ratio"] for peer in result["peers"]}


def test_a_batch_size_that_fails_is_recorded_and_the_other_size_is_measured(measure):
    result = measure(("DuckDB", 200))
    assert result["failures"] == {}
    assert result["trials"]["DuckDB"] == {"100": pytest.approx(1e6), "200": f"DuckDB {OUT_OF_MEMORY}"}
    assert ratios(result) == {"DuckDB": 1.0, "Polars": 1.0}


@pytest.mark.parametrize("when", ["open", 300, "finish"])
def test_a_contestant_that_fails_is_recorded_and_the_others_finish(measure, when):
    result = measure(("Polars", when))
    assert result["failures"] == {"Polars": f"Polars {OUT_OF_MEMORY}"}
    assert ratios(result) == {"DuckDB": 1.0, "Polars": None}
    assert {sample["name"] for sample in result["samples"]} == {"SSIJ", "DuckDB"}


def test_settings_that_fail_in_a_round_give_way_to_the_next_best(measure, monkeypatch):
    runs, run_of = [], FakeContestant.run

    def fail_later(contestant, seconds, choice, tuples=0):
        if contestant.name == "DuckDB":
            runs.append(choice.batch_rows)
            if runs.count(200) > 1 and choice.batch_rows == 200:
                raise ContestantError(f"DuckDB {OUT_OF_MEMORY}")
        return run_of(contestant, seconds, choice, tuples)

    monkeypatch.setattr(FakeContestant, "run", fail_later)
    sides = (SIDES[0], Side("DuckDB", choices=(Choice(100, 0.5), Choice(200))), SIDES[2])
    result = measure(sides=sides)
    assert result["settings"]["DuckDB"] == "100, limit 50%"
    assert result["trials"]["DuckDB"]["200"] == f"DuckDB {OUT_OF_MEMORY} in a round"
    assert ratios(result)["DuckDB"] == pytest.approx(2.0)


def test_limits_are_tried_with_the_best_size_and_the_best_of_all_is_taken(measure):
    tuned = Side("DuckDB", choices=(Choice(100, 0.5, streams=True), Choice(200, 0.75, streams=True)), limits=(0.9, 1.0))
    result = measure(("DuckDB", 1.0), sides=(SIDES[0], tuned, SIDES[2]))
    assert result["settings"]["DuckDB"] == "200, limit 90%, results as a stream"
    assert {text for text, found in result["trials"]["DuckDB"].items() if isinstance(found, str)} == {
        "100, results as a stream",
        "200, results as a stream",
    }
    assert ratios(result)["DuckDB"] == pytest.approx(1 / 0.9)


def test_the_greatest_rate_of_arrivals_is_searched(measure):
    result = measure(clocked=True)
    rates = {contestant["name"]: contestant["rate"] for contestant in result["contestants"]}
    assert all(0.85 * FakeContestant.most < rate <= FakeContestant.most for rate in rates.values())


def test_one_that_is_late_at_every_rate_has_that_without_a_clock(measure, monkeypatch):
    monkeypatch.setattr(FakeContestant, "slow", ("DuckDB",))
    result = measure(clocked=True)
    clocked = {sample["name"]: sample["details"]["clocked"] for sample in result["samples"]}
    assert clocked == {"SSIJ": True, "DuckDB": False, "Polars": True}
    assert next(c["rate"] for c in result["contestants"] if c["name"] == "DuckDB") == pytest.approx(1e6)


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


class Finished:
    """A contestant that has joined the whole stream with a table of two rows a key, and perhaps swapped two values."""

    name = "Finished"

    def __init__(self, keys, *, swaps):
        numbers = np.repeat(np.arange(len(keys)), 2)
        values = np.column_stack([payload(keys), payload(keys, 1)]).ravel()
        if swaps:
            values[[0, -1]] = values[[-1, 0]]
        self._answer = len(keys), Tally.of_batch(pa.table({"number": numbers, "v": values}))

    def finish(self):
        return self._answer


def test_swapped_payloads_are_noticed(tmp_path):
    keys = np.tile(_keys(np.arange(100)), 3)
    (tmp_path / "stream").write_bytes(keys[:200].tobytes())
    run._check(Side("DuckDB", each=2), Finished(keys, swaps=False), tmp_path / "stream")
    with pytest.raises(ContestantError, match="which is wrong"):
        run._check(Side("DuckDB", each=2), Finished(keys, swaps=True), tmp_path / "stream")


def test_the_tally_of_a_stream_that_is_read_over_and_over(tmp_path):
    keys = np.concatenate([_keys(np.arange(50)), _keys(np.arange(50)) ^ 1])  # half of them absent
    (tmp_path / "stream").write_bytes(keys.tobytes())
    numbers = np.arange(1030)
    pushed = keys[numbers % 100]
    there = _keys(pushed // GAP) == pushed
    assert 0 < there.sum() < len(there)
    stream = StreamFile(tmp_path / "stream")
    assert stream.expected(1030, "inner") == Tally.of(numbers[there], payload(pushed[there]))
    assert stream.expected(1030, "absent") == Tally.of(numbers[~there], pushed[~there])


@pytest.mark.slow
def test_a_limit_that_has_to_fail_is_recorded_and_the_next_is_measured(tmp_path):
    inputs = Inputs(tmp_path)
    choices = Choice(10_000, 1e-5, streams=True), Choice(10_000, 0.9)
    sides = [
        Side("SSIJ", 50_000, length=50_000, tuples=1, choices=(Choice(10_000),)),
        Side("DuckDB", 50_000, length=50_000, choices=choices),
        Side("DuckDB", 50_000, length=50_000, choices=choices[:1], label="DuckDB without memory"),
    ]
    places = [run._places(inputs, side) for side in sides]
    cell = Cell("a case", sides[0], ((sides[1], None), (sides[2], None)), seconds=0.05, rounds=1)
    result = run._measure(cell, sides, places)
    assert "OutOfMemory" in result["trials"]["DuckDB"][choices[0].text]
    assert result["trials"]["DuckDB"][choices[1].text] > 0
    assert ratios(result)["DuckDB"] > 0
    assert list(result["failures"]) == ["DuckDB without memory"]
