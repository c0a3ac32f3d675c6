"""The conformance suite of dimensions with history against Delta: its changes, versions and moved facts."""

import datetime as dt
from types import SimpleNamespace

import pyarrow as pa
import pytest
from case_files import case_names, read_case
from changes_scenario import DeltaDimension
from runner import MemoryBackend, run_case

from headrace.etl import Dimension
from headrace.etl.history import History
from headrace.pipelines.changes.engines import SparkEngine
from headrace.pipelines.history.moved import CAUSE, DIMENSION_VERSION, MOVED_FROM, MOVED_TO

SLOW = pytest.mark.slow
OF_FACTS = {"facts", "ensure"}
"""Steps for which a dimension needs lookups, which tests of as-of lookups run."""


def _declarable(case):
    """Whether a pipeline file can declare the dimension: it has neither partial changes nor a parent dimension."""
    return "partial" not in case.get("dimension", {}) and "parent" not in case


def _runs_here(name):
    case = read_case(name)
    return _declarable(case) and not any(set(step) & OF_FACTS for step in case["steps"])


CASES = [name for name in case_names() if _runs_here(name)]
IN_SPARK = (
    "cascade-from-customer-to-account",
    "correction-removes-a-version",
    "delete-and-return-identical",
    "late-middle-change",
    "null-time-and-sequence-are-rejected",
    "day-of-timestamps",
    "type-0-is-routed",
    "type-1-in-all-versions",
)


class DeltaBackend:
    """A dimension in Delta. Outcomes of single changes are those of the functions, and their counts must be equal."""

    def __init__(self, history, folder, engine=None):
        self.history = history
        self.dimension = DeltaDimension(history, folder, engine)
        self.memory = MemoryBackend(history)

    def apply(self, changes):
        expected = self.memory.apply(changes)
        record = self.dimension.apply(changes)
        assert record.outcomes == {str(outcome): count for outcome, count in expected.counts.items()}
        assert record.inserted == expected.inserted.num_rows
        assert record.retired == expected.retired.num_rows
        return SimpleNamespace(outcomes=expected.outcomes, moved=self._moved(record))

    def _moved(self, record):
        rows = self.dimension.moved()
        chosen = pa.compute.equal(rows[DIMENSION_VERSION], record.version if record.moved_ranges else -1)
        of_ranges = pa.compute.is_in(rows[CAUSE], value_set=pa.array(["version", "covered", "completed"]))
        rows = rows.filter(pa.compute.and_(chosen, of_ranges))
        names = [*self.history.dimension.natural_key, MOVED_FROM, MOVED_TO, CAUSE]
        return rows.select(names).rename_columns([*names[:-3], "moved_from", "moved_to", "cause"])

    def versions(self):
        return self.dimension.versions()

    def close(self):
        assert self.dimension.violations() == ()


def test_most_cases_run_here():
    assert len(CASES) >= 45
    assert set(IN_SPARK) <= set(CASES)


@pytest.mark.parametrize("name", [name if name in IN_SPARK else pytest.param(name, marks=SLOW) for name in CASES])
def test_case(name, tmp_path):
    run_case(read_case(name), lambda history: DeltaBackend(history, tmp_path / "dimension"))


@pytest.mark.parametrize("name", IN_SPARK)
def test_case_with_entries_found_by_a_scan(name, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.changes.protocol._SCANNED_CHANGES", 0)
    run_case(read_case(name), lambda history: DeltaBackend(history, tmp_path / "dimension"))
    assert not list(tmp_path.rglob("table.headrace"))


@pytest.mark.spark
@pytest.mark.parametrize("name", IN_SPARK)
def test_case_in_spark(name, tmp_path, spark):
    run_case(read_case(name), lambda history: DeltaBackend(history, tmp_path / "dimension", SparkEngine(spark)))


@pytest.mark.spark
@pytest.mark.parametrize("name", IN_SPARK[:2])
def test_case_in_spark_with_entries_found_by_a_scan(name, tmp_path, spark, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.changes.protocol._SCANNED_CHANGES", 0)
    run_case(read_case(name), lambda history: DeltaBackend(history, tmp_path / "dimension", SparkEngine(spark)))
    assert not list(tmp_path.rglob("table.headrace"))


@pytest.mark.spark
def test_column_names_that_spark_would_parse(tmp_path, spark):
    names = ["x.y", "q`q", "a b"]
    columns = pa.schema([(names[0], pa.int64()), (names[1], pa.string()), (names[2], pa.string())])
    history = History(Dimension("thing", (names[0],), "key", columns), effective="the.time", effective_type=pa.date32())
    dimension = DeltaDimension(history, tmp_path / "dimension", SparkEngine(spark))
    days = [dt.date(2024, 1, 1), dt.date(2024, 1, 2)]
    dimension.apply(pa.table({"x.y": [1, 1], "q`q": ["a", "b"], "a b": ["c", "d"], "the.time": days}))
    rows = dimension.versions().filter(pa.compute.greater(dimension.versions().column("key"), 0)).to_pylist()
    found = sorted((row["x.y"], row["q`q"], row["a b"], row["valid_from"]) for row in rows)
    assert found == [(1, "a", "c", days[0]), (1, "b", "d", days[1])]
