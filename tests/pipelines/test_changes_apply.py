"""Changes applied to a dimension in Delta: any batches, kills at every step, other writers, damage, small tasks."""

import datetime as dt
import errno
import io
import random

import pyarrow as pa
import pytest
from changes_scenario import DeltaDimension
from deltalake import DeltaTable
from runner import MemoryBackend
from test_history_layout import multiset
from test_history_properties import CHANGES, DAYS, HISTORY, expected_versions, plain

from headrace.pipelines.changes import engines
from headrace.pipelines.changes.engines import LocalEngine
from headrace.pipelines.changes.stages import text_limit
from headrace.pipelines.delta.commits import Commit, commit_exactly
from headrace.pipelines.delta.compaction import compact_table
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.errors import BatchError
from headrace.pipelines.history.layout import version_rows
from headrace.storage.errors import StorageIOError

STEPS = (
    "before apply", "after apply", "before changes", "after changes", "before errors", "after errors", "before moved",
    "after moved",
)  # fmt: skip


class KilledError(BaseException):
    """Ends a run at a step, as kill -9 would; nothing may catch it."""


def killed_at(step):
    def hook(name):
        if name == step:
            raise KilledError(step)

    return hook


def drawn(rng, count, members=40):
    return [
        {
            "id": rng.randrange(members) if rng.random() > 0.02 else None,
            "a0": rng.choice("pq"),
            "a1": rng.choice("mn"),
            "a1c": rng.choice("vw"),
            "a2": rng.choice([1.0, 2.0, None]),
            "au": rng.randrange(9),
            "since": rng.choice(DAYS),
            "n": rng.randrange(3),
            "op": rng.choice("UUUD"),
        }
        for _ in range(count)
    ]


def table_of(rows):
    return pa.Table.from_pylist(rows, CHANGES)


def shown(dimension):
    rows = dimension.versions().filter(pa.compute.greater(dimension.versions().column("key"), 0)).to_pylist()
    rows.sort(key=lambda row: (row["id"], row["valid_from"]))
    return [{name: plain(value) for name, value in row.items() if name != "key"} for row in rows]


def check(dimension, rows):
    """Compare a dimension with the oracle that sorts and groups one row at a time."""
    assert shown(dimension) == expected_versions([row for row in rows if row["id"] is not None])
    assert dimension.violations() == ()
    keys = dimension.versions().column("key").to_pylist()
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("seed", range(3))
def test_batches_end_in_the_versions_of_the_oracle(seed, tmp_path):
    rng = random.Random(seed)
    dimension, memory, all_rows = DeltaDimension(HISTORY, tmp_path / "d"), MemoryBackend(HISTORY), []
    for _ in range(5):
        rows = drawn(rng, 60)
        all_rows += rows
        record = dimension.apply(table_of(rows))
        expected = memory.apply(table_of(rows))
        assert record.outcomes == {str(outcome): count for outcome, count in expected.counts.items()}
    check(dimension, all_rows)
    rejected_or_routed = sum(record for name, record in record.outcomes.items() if name in {"rejected", "routed"})
    batch = [row for row in dimension.errors() if row["batch"] == 4]
    assert len(batch) == rejected_or_routed
    assert {row["_file"] for row in batch} == {"4.parquet"}


def test_the_rows_are_those_of_the_entries(tmp_path):
    """Nothing is in the table but what the entries of the functions alone give, surrogate keys aside."""
    rng = random.Random(7)
    dimension, memory = DeltaDimension(HISTORY, tmp_path / "d", shards=1), MemoryBackend(HISTORY)
    for _ in range(3):
        rows = table_of(drawn(rng, 50))
        dimension.apply(rows)
        memory.apply(rows)
    rows = dimension.rows()
    assert multiset(rows.filter(pa.compute.greater(rows.column("key"), 0))) == multiset(
        version_rows(HISTORY, memory.entries)
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_changes_nothing_but_time(step, tmp_path):
    rng = random.Random(step)
    first, second, third = (drawn(rng, 60) for _ in range(3))
    plain_run, killed = DeltaDimension(HISTORY, tmp_path / "a"), DeltaDimension(HISTORY, tmp_path / "b")
    for dimension in (plain_run, killed):
        dimension.apply(table_of(first))
    plain_run.apply(table_of(second))
    with pytest.raises(KilledError):
        killed.apply(table_of(second), hook=killed_at(step))
    record = killed.protocol().finish(1, "stream")
    if STEPS.index(step) < STEPS.index("after changes"):
        assert record is None
        killed.batch -= 1
        killed.apply(table_of(second))
    else:
        assert record.recovered
        assert record.version == DeltaTable(killed.path).version()
    for dimension in (plain_run, killed):
        dimension.apply(table_of(third))
    check(killed, [*first, *second, *third])
    assert multiset(killed.rows()) == multiset(plain_run.rows())
    assert multiset(killed.moved()) == multiset(plain_run.moved())
    assert [strip(row) for row in killed.errors()] == [strip(row) for row in plain_run.errors()]


def strip(row):
    return {name: value for name, value in row.items() if name != "stream"}


def test_another_writer_before_the_commit(tmp_path):
    rng = random.Random(5)
    first, ours, theirs = (drawn(rng, 60) for _ in range(3))
    dimension = DeltaDimension(HISTORY, tmp_path / "d")
    dimension.apply(table_of(first))
    done = []

    def hook(step):
        if step == "after apply" and not done:
            done.append(step)
            dimension.batch += 1
            other = dimension.write(table_of(theirs))
            dimension.protocol().run_batch([other], 0, "other stream")

    dimension.apply(table_of(ours), hook=hook)
    assert done
    check(dimension, [*first, *ours, *theirs])


def test_optimize_before_the_commit(tmp_path):
    """A commit that only rearranges rows moves their positions, which are searched after it."""
    rng = random.Random(6)
    first, second, third = (drawn(rng, 60) for _ in range(3))
    dimension = DeltaDimension(HISTORY, tmp_path / "d")
    dimension.apply(table_of(first))
    dimension.apply(table_of(second))
    dimension.apply(
        table_of(third), hook=lambda step: compact_table(dimension.path) if step == "before changes" else None
    )
    check(dimension, [*first, *second, *third])


def test_a_property_before_the_commit_plans_again(tmp_path):
    dimension = DeltaDimension(HISTORY, tmp_path / "d")
    rows = drawn(random.Random(1), 30)
    done = []

    def hook(step):
        if step == "before changes" and not done:
            done.append(step)
            table = DeltaTable(dimension.path)
            commit_exactly(dimension.path, table, table.version(), (), Commit("", 0, properties={"note": "x"}))

    dimension.apply(table_of(rows), hook=hook)
    check(dimension, rows)
    assert DeltaTable(dimension.path).metadata().configuration["note"] == "x"


def test_a_writer_that_never_rests(tmp_path):
    dimension = DeltaDimension(HISTORY, tmp_path / "d")

    def hook(step):
        if step == "before changes":
            table = DeltaTable(dimension.path)
            properties = {"note": str(table.version())}
            commit_exactly(dimension.path, table, table.version(), (), Commit("", 0, properties=properties))

    protocol = dimension.protocol(hook=hook)
    protocol.attempts = 3
    with pytest.raises(BatchError, match="other writers changed"):
        protocol.run_batch([dimension.write(table_of(drawn(random.Random(1), 5)))], 0, "stream")


def test_a_replay_commits_nothing(tmp_path):
    dimension = DeltaDimension(HISTORY, tmp_path / "d")
    rows = [row for row in drawn(random.Random(2), 50) if row["id"] is not None]
    rows = [dict(row, a0="p") for row in rows]
    dimension.apply(table_of(rows))
    version = DeltaTable(dimension.path).version()
    record = dimension.apply(table_of(rows))
    assert set(record.outcomes) <= {"replayed", "superseded"}
    assert DeltaTable(dimension.path).version() == version == record.version


def test_a_retired_key_is_never_given_again(tmp_path):
    dimension = DeltaDimension(HISTORY, tmp_path / "d", shards=1)
    base = {"a0": "p", "a1": "m", "a1c": "v", "au": 1, "op": "U", "id": 1}
    day = [dt.date(2024, 1, number) for number in (1, 2, 3)]
    dimension.apply(
        table_of([{**base, "a2": 1.0, "since": day[0], "n": 1}, {**base, "a2": 2.0, "since": day[1], "n": 1}])
    )
    record = dimension.apply(table_of([{**base, "a2": 1.0, "since": day[1], "n": 2}]))
    assert record.retired == 1
    dimension.apply(table_of([{**base, "a2": 3.0, "since": day[2], "n": 1}]))
    assert sorted(dimension.versions().column("key").to_pylist()) == [-1, 1, 3]


def test_more_shards_than_replicas_bound_a_task(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.pipelines.changes.protocol._LEAST_TASK_BYTES", 500)
    monkeypatch.setattr("headrace.pipelines.changes.protocol.parse_memory", lambda _text: 16 << 20)
    monkeypatch.setattr("headrace.pipelines.changes.protocol._TASK_SHARE", 1 << 30)
    dimension = DeltaDimension(HISTORY, tmp_path / "d", LocalEngine(str(tmp_path / "r"), cores=2))
    rng = random.Random(11)
    rows = [drawn(rng, 200), drawn(rng, 200)]
    for each in rows:
        dimension.apply(table_of(each))
    check(dimension, [*rows[0], *rows[1]])


def test_a_damaged_replica_is_built_again(tmp_path):
    dimension = DeltaDimension(HISTORY, tmp_path / "d", shards=1)
    rng = random.Random(3)
    first, second = drawn(rng, 80), drawn(rng, 80)
    dimension.apply(table_of(first))
    dimension.apply(table_of(second[:40]))
    (replica,) = (tmp_path / "d" / "replicas").rglob("table.headrace")
    data = bytearray(replica.read_bytes())
    for at in range(3 * 8192, len(data), 512):
        data[at] ^= 0xFF
    replica.write_bytes(data)
    dimension.apply(table_of(second[40:]))
    check(dimension, [*first, *second])


def test_text_that_fits_in_no_page_is_rejected(tmp_path):
    """The longest texts that are accepted, each from another change, must fit in one entry."""
    limit = text_limit(HISTORY)
    day = [dt.date(2024, 1, number) for number in (1, 2, 3, 4)]
    base = {"id": 1, "a0": "p", "a1": "m", "a1c": "v", "a2": 1.0, "au": 1, "n": 1, "op": "U"}
    long = [
        {**base, "a0": "x" * (limit - 2), "since": day[0]},
        {**base, "a0": "x", "a1c": "y" * (limit - 2), "since": day[1]},
        {**base, "a0": "x", "a1": "z" * (limit - 2), "since": day[2]},
        {**base, "a1": "z" * limit, "since": day[3]},
    ]
    dimension = DeltaDimension(HISTORY, tmp_path / "d")
    record = dimension.apply(table_of(long))
    assert record.outcomes["rejected"] == 1
    assert sum(record.outcomes.values()) == 4
    (error,) = [row for row in dimension.errors() if "bytes of text" in row["reason"]]
    assert error["_record_number"] == 4
    again = dimension.apply(table_of([{**base, "a0": "x", "since": day[3]}]))
    assert sum(again.outcomes.values()) == 1
    (version,) = [row for row in shown(dimension) if row["is_current"]]
    assert len(version["a0"]) == limit - 2
    assert dimension.violations() == ()


def test_facts_at_and_after_the_end_meet_the_current_version_so_its_ranges_are_open(tmp_path):
    dimension = DeltaDimension(HISTORY, tmp_path / "d")
    row = {"id": 1, "a0": "p", "a1": "m", "a1c": "v", "a2": 1.0, "au": 1, "since": DAYS[0], "n": 1, "op": "U"}
    dimension.apply(table_of([row]))
    dimension.apply(table_of([row | {"n": 2, "a1": "n", "au": 2}]))
    ranges = {(each["_moved_from"], each["_moved_to"]) for each in dimension.moved().to_pylist()}
    assert ranges == {(DAYS[0], None), (None, DAYS[0])}


class FullFile(io.RawIOBase):
    """A file on a full disk."""

    def writable(self):
        return True

    def write(self, data):  # noqa: ARG002 - as in the base
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_between_the_stages_is_told_and_loses_nothing(tmp_path, monkeypatch):
    dimension, rows = DeltaDimension(HISTORY, tmp_path), drawn(random.Random(1), 60)
    file = dimension.write(table_of(rows))
    version = DeltaHandle(dimension.path).latest().version
    with monkeypatch.context() as patch:
        patch.setattr(engines, "_created", lambda _path: pa.PythonFile(FullFile(), "w"))
        with pytest.raises(StorageIOError, match=r"replicas.*No space.*nothing was committed.*run again"):
            dimension.protocol().run_batch([file], 0, "stream")
    assert DeltaHandle(dimension.path).latest().version == version
    assert list((tmp_path / "replicas").glob("changes-*")) == []
    dimension.protocol().run_batch([file], 0, "stream")
    check(dimension, rows)
