"""Correlations in this process: results, replays, shards, merges, damage. `test_correlate_run` runs them in Spark."""

import errno
import itertools
import os
import re
import shutil
import tempfile
import uuid
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from correlation_world import BEGIN, ORDERS, Killed, World
from deltalake import write_deltalake

from headrace.cli.commands.run import _blocks
from headrace.cli.reporting.blocks import render
from headrace.joins.streams.hashing.kept_rows import KeptRows
from headrace.pipelines.config import load_any, load_pipeline, load_steps
from headrace.pipelines.correlate import residents, shard_join
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.errors import (
    BatchError,
    DeltaTableError,
    LedgerError,
    PipelineFileError,
    RejectedRowsError,
    SourceFileError,
    StateDamagedError,
)
from headrace.pipelines.rejects import RowId, Selection, dismiss_rows, list_rejects, show_rejects
from headrace.pipelines.retries import retry
from headrace.pipelines.runner import run as run_pipeline
from headrace.pipelines.source import list_files, skip_files
from headrace.pipelines.source.identity import application
from headrace.pipelines.source.ledger import Ledger
from headrace.storage.errors import StorageIOError

EQUAL = 'orders.id = payments."order"'
NEAR = "abs(epoch_us(orders.at) - epoch_us(payments.at)) <= 3600000000"
STEPS = (
    "after listing", "after plan", "before join", "after join", "after manifest", "before facts", "after facts",
    "before errors", "after errors", "after record", "after done",
)  # fmt: skip
QUICK = {"after manifest", "after facts"}


def killing(step, times=1):
    left = [times]

    def hook(name):
        if name == step and left[0]:
            left[0] -= 1
            raise Killed(step)

    return hook


@pytest.fixture
def folder(tmp_path):
    """Return a folder in memory if there is one: the tests sync often, and the disk is not what they test."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="headrace-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def world(folder):
    return World(folder)


@pytest.fixture
def from_disk(monkeypatch):
    """Make every join read its state, as if it did not fit into memory."""
    monkeypatch.setattr(residents, "_likely", lambda *_: False)


@pytest.fixture
def merging(monkeypatch):
    """Merge runs as soon as there are two of a size, in blocks of a few rows."""
    monkeypatch.setattr(shard_join, "_RUNS_OF_A_TIER", 2)
    monkeypatch.setattr(shard_join, "YOUNG_BATCHES", 1)
    monkeypatch.setattr("headrace.pipelines.correlate.runs.BLOCK_BYTES", 256)


@pytest.fixture
def spilling(monkeypatch):
    """Write the new rows of an input as a run whenever a few kilobytes of them wait."""
    monkeypatch.setattr(shard_join, "_MOST_WAITING", 2000)


def test_batches_give_the_join_of_all_rows(world, rng):
    for _ in range(4):
        world.add_random(rng, 40)
    result = world.run()
    assert [batch.batch for batch in result.batches] == [0, 1, 2, 3]
    assert world.results() == world.expected(EQUAL)
    assert result.total("loaded") == len(world.results())
    assert result.total("rows_in") == 320


@pytest.mark.usefixtures("from_disk", "merging")
def test_state_on_disk_gives_the_same_results(world, rng):
    for _ in range(5):
        world.add_random(rng, 40)
    world.run()
    assert world.results() == world.expected(EQUAL)


@pytest.mark.usefixtures("from_disk", "merging")
def test_bands_use_only_blocks_near_the_new_rows(folder, rng):
    near = [{"columns": "payments.at = orders.at", "within": "1h"}]
    world = World(folder, {"on": ["orders.id = payments.order"], "near": near, "shards": 3})
    for _ in range(4):
        world.add_random(rng, 60, keys=4)
    world.run()
    assert world.results() == world.expected(f"{EQUAL} and {NEAR}")


def test_a_source_may_be_behind_the_other(world, rng):
    world.add_random(rng, 30)
    orders = world.folder / "orders"
    hidden = [file.rename(world.folder / file.name) for file in sorted(orders.iterdir())]
    world.run()
    assert world.results() == []
    for file in hidden:
        file.rename(orders / file.name)
    world.run()
    assert world.results() == world.expected(EQUAL)


def test_three_sources_are_joined_in_a_chain(folder, rng):
    on = ["shipments.order = orders.id", "orders.id = payments.order", "shipments.item = orders.item"]
    world = World(folder, {"on": on, "shards": 2}, ("shipments", "payments", "orders"))
    for _ in range(3):
        world.add_random(rng, 25, keys=6)
    world.run()
    where = f'{EQUAL} and shipments."order" = orders.id and shipments.item = orders.item'
    assert world.results() == world.expected(where)
    assert world.results()


@pytest.mark.usefixtures("from_disk")
def test_small_memory_takes_several_parts(folder, rng, monkeypatch):
    kept = []
    keep = KeptRows.keep
    monkeypatch.setattr(KeptRows, "keep", lambda *given: kept.append(keep(*given)) or kept[-1])
    world = World(folder, options={"memory": "160KiB"})
    for _ in range(2):
        world.add_random(rng, 500, keys=200)
    world.run()
    assert world.results() == world.expected(EQUAL)
    assert kept.count(False) > 2, kept


def test_a_memory_that_holds_no_row_is_refused(folder, rng):
    world = World(folder, options={"memory": "8KiB"})
    world.add_random(rng, 10)
    with pytest.raises(Exception, match="memory"):
        world.run()


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 2, 5])
def test_another_number_of_shards_keeps_the_state(world, rng, before):
    world.shards(before)
    for shards in (3, 2, 7, before):
        world.add_random(rng, 30)
        world.run()
        world.shards(shards)
    assert world.results() == world.expected(EQUAL)
    whole = {run["low"] for run in world.manifest()["runs"]}
    assert len(whole) <= 7


def test_a_worker_with_rows_of_before_a_change_of_shards_reads_none_twice(world, rng):
    """A run that was rewritten for other shards may hold rows that the worker has, and later ones."""
    residents.forget_residents()
    before = {}
    for number, shards in enumerate((2, 3, 2, 2)):
        world.shards(shards)
        world.add_random(rng, 30)
        if number == 3:
            residents._residents.update(before)
        world.run()
        if number == 0:
            before = dict(residents._residents)
            assert before
        residents.forget_residents()
    assert world.results() == world.expected(EQUAL)


def test_state_of_other_shards_is_rewritten_in_one_batch(world, rng):
    world.shards(5)
    world.add_random(rng, 50)
    world.run()
    world.shards(2)
    world.add_random(rng, 50)
    world.run()
    assert all(run["low"] >= 2**31 or run["high"] <= 2**31 for run in world.manifest()["runs"])
    assert sum(run["rows"] for run in world.manifest()["runs"]) == keyed_rows(world)


def keyed_rows(world):
    return sum(row[0] is not None for rows in world.rows.values() for row in rows)


@pytest.mark.parametrize(
    "step", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in STEPS]
)
def test_a_run_that_ends_at_any_step_is_repeated_exactly(world, rng, step):
    for _ in range(2):
        world.add_random(rng, 20)
        world.add("orders", [("no number", "x", BEGIN)])
        world.rows["orders"].pop()
    seen = []
    with pytest.raises(Killed):
        world.run(killing(step))
    world.run(seen.append)
    world.run()
    assert world.results() == world.expected(EQUAL)
    assert len(world.rejected()) == 2
    named = {run["file"] for run in world.manifest()["runs"]}
    assert {file.name for file in world.state.glob("*.run")} == named
    assert not list(world.state.glob("*.host"))


@pytest.mark.parametrize("step", ["after finish", pytest.param("after forget", marks=pytest.mark.slow)])
def test_a_second_end_while_the_first_is_repaired_changes_nothing(world, rng, step):
    world.add_random(rng, 20)
    for first in ("after facts", "after manifest"):
        with pytest.raises(Killed):
            world.run(killing(first))
        try:
            world.run(killing(step))
        except Killed:
            world.run()
        world.add_random(rng, 20)
    world.run()
    assert world.results() == world.expected(EQUAL)


def test_rows_with_a_missing_key_match_nothing(world):
    world.add("orders", [(None, "a", BEGIN), (1, "b", BEGIN)])
    world.add("payments", [(None, 1.0, BEGIN), (1, 2.0, None)])
    result = world.run()
    assert world.results() == [(1, "b", BEGIN, 1, 2.0, None)]
    assert result.batches[0].detail["sources"]["orders"]["keyless"] == 1


class TestLateness:
    @pytest.fixture
    def world(self, folder):
        near = [{"columns": "orders.at = payments.at", "within": "1h"}]
        return World(folder, {"on": ["orders.id = payments.order"], "near": near, "lateness": "10min", "shards": 2})

    def at(self, minutes):
        return BEGIN + timedelta(minutes=minutes)

    def test_late_rows_are_reported(self, world):
        world.add("orders", [(1, "a", self.at(100))])
        world.run()
        world.add("orders", [(2, "on time", self.at(90)), (3, "late", self.at(89))])
        world.add("payments", [(2, 1.0, self.at(0)), (1, 2.0, self.at(60)), (2, 2.0, self.at(31))])
        result = world.run()
        assert world.results() == [(1, "a", self.at(100), 1, 2.0, self.at(60)),
                                   (2, "on time", self.at(90), 2, 2.0, self.at(31))]  # fmt: skip
        (rejected,) = world.rejected()
        assert (rejected["_file"], rejected["record"]) == ("orders/0002.csv", "3,late,2024-01-01 01:29:00")
        assert "late" in rejected["reason"]
        assert (result.total("rejected"), result.total("rows_in")) == (1, 5)

    @pytest.mark.parametrize("step", ["after manifest", "after facts"])
    def test_the_same_rows_are_late_when_a_batch_is_repeated(self, world, step):
        """A row at the watermark is in time, one without a time is keyless, and later files of the batch count."""
        microsecond = timedelta(microseconds=1)
        world.add("orders", [(1, "a", self.at(100))])
        world.run()
        world.add("orders", [(1, "in time", self.at(90)), (1, "late", self.at(90) - microsecond), (1, "none", None)])
        world.add("payments", [(1, 2.0, self.at(30)), (1, 3.0, self.at(30) - microsecond)])
        with pytest.raises(Killed):
            world.run(killing(step))
        world.add("orders", [(1, "late later", self.at(89)), (1, "new", self.at(200))])
        world.run()
        late = ["late", "late later"]
        assert sorted(row["record"].split(",")[1] for row in world.rejected()) == late
        kept = [row for row in world.rows["orders"] if row[1] not in late]
        world.rows["orders"] = kept
        assert world.results() == world.expected(f"{EQUAL} and {NEAR}")
        assert len(world.results()) == 1

    @pytest.mark.parametrize("resident", [pytest.param(True, marks=pytest.mark.slow), False])
    @pytest.mark.usefixtures("merging")
    def test_purged_state_loses_no_result(self, world, rng, monkeypatch, resident):
        if not resident:
            monkeypatch.setattr(residents, "_likely", lambda *_: False)
        for batch in range(8):
            for source in world.sources:
                start = 40 * batch + (15 if source == "orders" else 0)
                times = [self.at(start + int(rng.integers(0, 40))) for _ in range(25)]
                keys = [int(rng.integers(5)) for _ in times]
                rows = [(key, float(key), at) if source == "payments" else (key, "i", at)
                        for key, at in zip(keys, times, strict=True)]  # fmt: skip
                world.add(source, rows)
            world.run()
        late = {(row["_file"], row["_record_number"]) for row in world.rejected()}
        assert late == set(), "rows are at most 40 minutes behind, but batches overlap by less than 10"
        assert world.results() == world.expected(f"{EQUAL} and {NEAR}")
        stored = sum(run["rows"] for run in world.manifest()["runs"])
        assert stored < keyed_rows(world) * 2 / 3

    @pytest.mark.parametrize("behind", ["orders", "payments"])
    @pytest.mark.usefixtures("merging", "spilling")
    def test_new_rows_on_disk_behind_the_other_source_lose_no_result(self, world, rng, monkeypatch, behind):
        """The watermark of the other source says what its later rows match, not what its earlier rows do."""
        spilled = []
        write = shard_join.ShardJoin._write_waiting
        monkeypatch.setattr(
            shard_join.ShardJoin, "_write_waiting",
            lambda self, side, keep: spilled.append(keep) or write(self, side, keep=keep),
        )  # fmt: skip
        for batch in range(6):
            for source in rng.permutation(world.sources).tolist():
                slow = source == behind
                if slow and batch < 2:
                    continue
                start = 30 * (batch - 2) if slow else 200 * (batch > 0) + 30 * batch - 60
                times = [self.at(start + int(rng.integers(-25, 40))) for _ in range(300)]
                keys = rng.integers(150, size=300).tolist()
                world.add(source, [(key, float(key), at) if source == "payments" else (key, "i", at)
                                   for key, at in zip(keys, times, strict=True)])  # fmt: skip
            world.run()
        assert spilled.count(False) > 4, "the new rows stayed in memory"
        self.assert_all_but_late(world)

    @pytest.mark.slow
    @pytest.mark.usefixtures("merging", "spilling")
    @pytest.mark.parametrize("seed", range(12))
    def test_any_order_of_batches_loses_no_result(self, world, seed):
        rng = np.random.default_rng(seed)
        clocks = dict.fromkeys(world.sources, 0)
        for _ in range(10):
            world.shards(int(rng.integers(1, 4)))
            for source in world.sources:
                if rng.random() < 0.4:
                    continue
                clocks[source] += int(rng.integers(0, 90))
                count = int(rng.choice([1, 40, 400]))
                times = [self.at(clocks[source] + int(rng.integers(-30, 30))) for _ in range(count)]
                keys = rng.integers(60, size=count).tolist()
                world.add(source, [(key, float(key), at) if source == "payments" else (key, "i", at)
                                   for key, at in zip(keys, times, strict=True)])  # fmt: skip
            world.run()
        self.assert_all_but_late(world)

    def assert_all_but_late(self, world):
        """Compare the results with those of all rows but the rejected ones, each of which is of its source's past."""
        for row in world.rejected():
            assert "late" in row["reason"]
            rows = world.rows[row["_file"].partition("/")[0]]
            rows.remove(world.row_of(row["_file"], row["_record_number"]))
        expected = world.expected(f"{EQUAL} and {NEAR}")
        assert expected
        assert world.results() == expected

    def test_a_later_limit_does_not_bring_purged_rows_back(self, world):
        world.add("orders", [(1, "a", self.at(300))])
        world.run()
        world.document["correlate"]["lateness"] = "5h"
        world.write()
        world.add("orders", [(2, "late", self.at(200))])
        world.run()
        assert [row["record"].split(",")[1] for row in world.rejected()] == ["late"]

    def test_a_lateness_before_the_earliest_time_makes_no_row_late(self, world):
        world.document["correlate"]["lateness"] = f"{10**9}d"
        world.write()
        for minutes in (0, 50, -(10**6)):
            world.add("orders", [(1, "a", self.at(minutes))])
            world.add("payments", [(1, 1.0, self.at(minutes))])
            world.run()
        assert not world.rejected()
        assert world.results() == world.expected(f"{EQUAL} and {NEAR}")

    def test_lateness_cannot_be_left_out_later(self, world):
        world.add("orders", [(1, "a", self.at(300))])
        world.run()
        del world.document["correlate"]["lateness"]
        world.write()
        with pytest.raises(PipelineFileError, match="give it again"):
            world.run()

    def test_dates_are_purged_by_whole_days(self, folder):
        near = [{"columns": "orders.day = payments.day", "within": "1d"}]
        correlate = {"on": ["orders.id = payments.order"], "near": near, "lateness": "2d", "shards": 1}
        world = World(folder, correlate)
        world.document["sources"]["orders"]["schema"] = {"id": "bigint", "day": "date"}
        payments = {"format": "csv", "path": "payments", "schema": {"order": "bigint", "day": "date"}}
        world.document["sources"]["payments"] = payments
        world.write()
        for day in range(1, 13, 2):
            world.add("orders", [(1, f"1969-12-{20 + day}" if day < 12 else "1970-01-01")])
            lines = ["order,day", f"1,1969-12-{19 + day}"]
            (world.folder / "payments" / f"{day:02d}.csv").write_text("\n".join(lines))
            world.run()
        found = [(row[1].day, row[3].day) for row in world.results()]
        expected = [(20 + a, 19 + b) for a in range(1, 13, 2) for b in range(1, 13, 2) if abs(a - b + 1) <= 1]
        assert sorted(found) == sorted(expected)
        assert not world.rejected()
        kept = [sum(run["rows"] for run in world.manifest()["runs"] if run["side"] == side) for side in (0, 1)]
        assert kept == [4, 3], "the last batch dropped orders before 26 December, and payments before 26 December"


class TestDamage:
    @pytest.fixture
    def world(self, folder, rng):
        world = World(folder)
        world.add_random(rng, 60)
        world.run()
        world.add_random(rng, 60)
        residents.forget_residents()
        return world

    def refused(self, world, match):
        before = world.results()
        with pytest.raises(StateDamagedError, match=match) as raised:
            world.run()
        assert str(world.state) in str(raised.value)
        assert "restore the folder" in str(raised.value)
        assert world.results() == before

    def test_a_missing_run(self, world):
        next(world.state.glob("*.run")).unlink()
        self.refused(world, "is missing")

    def test_a_short_run(self, world):
        file = next(world.state.glob("*.run"))
        file.write_bytes(file.read_bytes()[:-4096])
        self.refused(world, "bytes, but")

    @pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
    def test_a_changed_byte(self, world, place):
        for file in world.state.glob("*.run"):
            content = bytearray(file.read_bytes())
            used = [at for at, byte in enumerate(content) if byte]
            content[used[int(place * (len(used) - 1))]] ^= 0x10
            file.write_bytes(bytes(content))
        self.refused(world, "is damaged")

    def test_a_run_in_place_of_another(self, world):
        by_size = {}
        for run in world.manifest()["runs"]:
            by_size.setdefault(run["nbytes"], []).append(world.state / run["file"])
        first, second, *_ = max(by_size.values(), key=len)
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        self.refused(world, "belongs to run")

    def test_a_missing_manifest(self, world):
        next(world.state.glob("*.manifest")).unlink()
        self.refused(world, "is missing")

    def test_a_folder_in_place_of_a_manifest(self, world):
        file = next(world.state.glob("*.manifest"))
        file.unlink()
        file.mkdir()
        self.refused(world, "is not a readable file")

    def test_a_changed_manifest(self, world):
        file = next(world.state.glob("*.manifest"))
        file.write_bytes(file.read_bytes().replace(b'"batch": 0', b'"batch": 7'))
        self.refused(world, "not what was written")


@pytest.mark.parametrize("lost", ["removed", "empty", "older"])
def test_a_source_whose_ledger_is_lost_is_not_loaded_again(world, rng, lost):
    world.add_random(rng, 20)
    world.run()
    ledger = world.state.parent / "sources/payments/ledger.db"
    older = ledger.read_bytes()
    world.add_random(rng, 20)
    world.run()
    before = world.results()
    newest = ledger.read_bytes()
    ledger.unlink()
    if lost != "removed":
        ledger.write_bytes(b"" if lost == "empty" else older)
    world.add("orders", [(1, "nut", BEGIN)])
    with pytest.raises(LedgerError, match=r"ledger\.db of source 'payments' does not have batch 1") as raised:
        world.run()
    assert f"remove {world.folder / 'w/paid'}, {world.folder / 'w/paid_errors'} and {world.state.parent}" in str(
        raised.value
    )
    assert world.results() == before
    ledger.write_bytes(newest)
    world.run()
    assert world.results() == world.expected(EQUAL)


def test_a_source_without_files_so_far_has_no_batch_that_its_ledger_must_know(world, rng):
    world.add("orders", [(1, "nut", BEGIN)])
    world.run()
    (world.state.parent / "sources/payments/ledger.db").unlink()
    world.add_random(rng, 20)
    world.run()
    assert world.results() == world.expected(EQUAL)


@pytest.mark.parametrize("call", range(4))
def test_a_state_folder_that_cannot_be_claimed_at_first_is_claimed_later(world, rng, monkeypatch, call):
    world.add_random(rng, 10)
    calls = itertools.count()
    sync = os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(world.state) and next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("headrace.pipelines.durable.os.fsync", full)
        with pytest.raises(StorageIOError, match=r"cannot be written.* nothing is lost"):
            world.run()
    world.run()
    assert world.results() == world.expected(EQUAL)
    assert {file.suffix for file in world.state.iterdir()} == {".json", ".manifest", ".run"}


def test_files_that_no_manifest_names_are_removed(world, rng):
    world.add_random(rng, 10)
    world.run()
    attempt = str(uuid.uuid4())
    left = [f"0000000001-{attempt[:8]}-{uuid.uuid4().hex}.run", f"0000000001-{attempt}.manifest", f"{attempt}.host"]
    others = ["note.txt", "morning.run", "ship.manifest"]
    for name in [*left, *others]:
        (world.state / name).write_text("left by a killed run, or of the user")
    world.run()
    assert not [name for name in left if (world.state / name).exists()]
    assert all((world.state / name).exists() for name in others)


def test_the_state_folder_of_another_pipeline_is_refused(folder, rng):
    """The second run removes and writes nothing, and the first pipeline goes on."""
    worlds = [World(folder / name) for name in ("one", "two")]
    for world, name in zip(worlds, ("one", "two"), strict=True):
        world.document |= {"name": name}
        world.document["correlate"]["state"] = str(folder / "state")
        world.write()
        world.add_random(rng, 10)
    worlds[0].run()
    before = sorted(file.name for file in (folder / "state").iterdir())
    with pytest.raises(PipelineFileError, match=r"holds the state of pipeline one .* name another folder"):
        worlds[1].run()
    assert sorted(file.name for file in (folder / "state").iterdir()) == before
    assert not (folder / "two/w").exists()
    worlds[0].add_random(rng, 10)
    worlds[0].run()
    assert worlds[0].results() == worlds[0].expected(EQUAL)
    (folder / "state/owner.json").unlink()
    for world in worlds:
        with pytest.raises(StateDamagedError, match="says whose state it is"):
            world.run()


def test_a_run_notices_that_its_state_folder_became_anothers(world, rng):
    world.add_random(rng, 10)
    owner = world.state / "owner.json"

    def taken(step):
        if step == "before join":
            owner.write_text('{"stream": "other", "pipeline": "two"}')

    with pytest.raises(PipelineFileError, match="holds the state of pipeline two"):
        world.run(taken)
    assert world.results() == []


def test_other_conditions_do_not_continue_the_state(world, rng):
    world.add_random(rng, 10)
    world.run()
    world.document["correlate"]["on"].append("orders.at = payments.at")
    world.write()
    world.add_random(rng, 10)
    with pytest.raises(PipelineFileError, match="other sources, columns or conditions") as raised:
        world.run()
    assert "before: nothing; now: condition orders.at = payments.at" in str(raised.value)


def test_a_new_column_of_a_source_is_refused_by_the_state_before_a_change_of_the_table_is_advised(world, rng):
    world.add_random(rng, 10)
    world.run()
    world.document["sources"]["orders"]["schema"]["note"] = "string"
    world.write()
    with pytest.raises(PipelineFileError, match=r"other sources, columns or conditions .* column orders\.note"):
        world.run()
    del world.document["sources"]["orders"]["schema"]["note"]
    world.write()
    world.add_random(rng, 10)
    world.run()
    assert world.results() == world.expected(EQUAL)


def test_a_distance_is_the_same_in_another_unit_and_differs_by_its_value(folder, rng):
    near = [{"columns": "orders.at = payments.at", "within": "1h"}]
    world = World(folder, {"on": ["orders.id = payments.order"], "near": near})
    for within in ("1h", "1 h", "60m", "3600s"):
        world.document["correlate"]["near"][0]["within"] = within
        world.write()
        world.add_random(rng, 10)
        world.run()
    assert world.results() == world.expected(f"{EQUAL} and {NEAR}")
    world.document["correlate"]["near"][0]["within"] = "2h"
    world.write()
    with pytest.raises(PipelineFileError, match=r"within 3600000000 units of .*; now: .* within 7200000000 units of"):
        world.run()


def test_a_lost_checkpoint_is_refused(world, rng, folder):
    world.add_random(rng, 10)
    world.run()
    (folder / ".headrace/paid/checkpoint").rename(folder / "elsewhere")
    with pytest.raises(LedgerError, match="Restore the checkpoint"):
        world.run()


def test_a_copied_checkpoint_loads_no_batch_twice(world, rng, folder):
    world.add_random(rng, 10)
    world.run()
    checkpoint = folder / ".headrace/paid/checkpoint"
    shutil.copytree(checkpoint, folder / "copy")
    world.add_random(rng, 10)
    world.run()
    before = world.results()
    shutil.rmtree(checkpoint)
    (folder / "copy").rename(checkpoint)
    with pytest.raises(LedgerError, match="older copy"):
        world.run()
    assert world.results() == before


def test_a_renamed_pipeline_is_refused(world, rng):
    world.add_random(rng, 40)
    world.run()
    before = world.results()
    assert before
    world.document["name"] = "bought"
    world.write()
    with pytest.raises(LedgerError, match=r"pipeline paid loaded from the same sources, .*orders, .*payments"):
        world.run()
    assert world.results() == before
    world.document["sink"]["path"] = "w/bought"
    world.write()
    assert world.run().total("loaded") == len(before)


def test_a_pipeline_renamed_together_with_its_sources_is_refused(world, rng):
    world.add_random(rng, 40)
    world.run()
    before = world.results()
    sources = world.document["sources"]
    world.document |= {"name": "bought", "sources": {"pays": sources["payments"], "buys": sources["orders"]}}
    world.document["correlate"]["on"] = ["buys.id = pays.order"]
    world.document["sink"]["path"] = "w/bought"
    world.write()
    (world.folder / "w/paid").rename(world.folder / "w/bought")
    with pytest.raises(LedgerError, match="pipeline paid loaded from the same sources"):
        world.run()
    (world.folder / "w/bought").rename(world.folder / "w/paid")
    assert world.results() == before


def test_a_file_that_a_worker_cannot_read_is_skipped_by_the_name_of_its_source(world, rng):
    world.add_random(rng, 10)

    def changed(step):
        if step == "before join":
            with (world.folder / "orders/0001.csv").open("a") as file:
                file.write("1,x,2024-01-01\n")

    with pytest.raises(SourceFileError, match="changed while the batch was loading"):
        world.run(changed)

    def removed(step):
        if step == "before join":
            (world.folder / "orders/0001.csv").unlink()

    with pytest.raises(SourceFileError, match=r"headrace source skip PIPELINE 0001\.csv --source orders"):
        world.run(removed)
    assert world.results() == []


def test_rejected_records_of_sources_are_listed_and_dismissed_but_not_retried(world):
    world.add("orders", [(1, "nut", BEGIN), ("no number", "x", BEGIN)])
    world.add("payments", [(1, 2.0, BEGIN)])
    world.run()
    steps = load_steps(world.pipeline)
    (group,) = list_rejects(steps)
    assert (group.status, group.batch, group.file, group.rows) == ("open", 0, "orders/0001.csv", 1)
    (record,), total = show_rejects(steps)
    assert (total, record.id, record.record) == (1, "0/orders/0001.csv:2", f"no number,x,{BEGIN}")
    for selection in (Selection(), Selection(ids=(RowId.parse(record.id),))):
        with pytest.raises(RejectedRowsError, match=r"1 of the selected rows are records of sources.*orders/0001\.csv"):
            retry(world.pipeline, selection)
    assert dismiss_rows(steps, Selection(ids=(RowId.parse(record.id),)), "no order") == 1
    assert [group.status for group in list_rejects(steps)] == ["dismissed"]
    world.add("payments", [(1, 3.0, BEGIN)])
    world.run()
    assert len(world.results()) == 2


def test_the_summary_of_a_run_without_new_files_is_that_of_several_sources(world):
    world.add("orders", [(1, "nut", BEGIN)])
    texts = []
    for result in (world.run(), world.run()):
        texts.append("\n".join(line for block in _blocks(result) for line in render(block)))
        assert "hit ratio" not in texts[-1]
        assert all(f"  {name}  " in texts[-1] for name in ("orders", "payments", "results"))
        assert result.as_dict()["sources"] == ["orders", "payments"]
    assert re.search(r"state +1 row, [\d.]+ KiB in 1 run", texts[0])
    assert re.search(r"state +not changed", texts[1])


def test_a_run_beside_another_does_not_commit(world, rng):
    """The other run commits the same batch first, with a copy of the checkpoint and a catalog of its own."""
    world.add_random(rng, 10)

    def other(step):
        if step == "before facts":
            config = load_any(world.pipeline)
            handle = DeltaHandle(config.sink.path)
            with Ledger(config.checkpoint) as ledger:
                commit_files(handle.path, handle.table, [], Commit(application(ledger.stream, "facts"), 0, {}))

    with pytest.raises(BatchError, match="another run has just loaded batch 0"):
        world.run(other)
    assert world.results() == []


def test_steps_that_come_while_a_batch_is_unfinished_are_refused_with_the_remedy(world, rng):
    world.add_random(rng, 10)
    with pytest.raises(Killed):
        world.run(killing("after facts"))
    world.document["duplicates"] = {"key": ["id"]}
    world.write()
    with pytest.raises(PipelineFileError, match=r"batch 0 was loaded without steps.* remove `transform`"):
        world.run()
    del world.document["duplicates"]
    world.write()
    world.run()
    assert world.results() == world.expected(EQUAL)


def test_a_removed_file_of_an_unfinished_batch_is_named(world, rng):
    world.add_random(rng, 10)
    with pytest.raises(Killed):
        world.run(killing("before join"))
    next((world.folder / "orders").iterdir()).unlink()
    with pytest.raises(SourceFileError, match=r"orders: '0001\.csv'.* --source orders"):
        world.run()


def test_the_example_of_the_documentation(folder):
    page = (Path(__file__).parents[2] / "docs/streams.md").read_text()
    section = page.partition("## In a pipeline on Spark")[2].partition("### Rows that were read")[0]
    lines = [line[4:] if line.startswith("    ") else "" for line in section.splitlines()]
    text = "\n".join(lines).replace("warehouse/paid", "w/paid")
    (folder / "pipeline.yml").write_text(text[text.index("name: paid") : text.index("$ cat orders")].strip())
    world = World.__new__(World)
    world.folder = folder
    for name in ("orders/1.csv", "payments/1.json"):
        (folder / name).parent.mkdir()
        content = text.partition(f"$ cat {name}\n")[2].partition("\n\n")[0]
        (folder / name).write_text(content + "\n")
    assert world.run().total("loaded") == 1
    (folder / "payments/2.json").write_text('{"order": 1, "paid": 2.0, "at": "2026-03-01T11:00:00Z"}\n')
    assert world.run().total("loaded") == 1
    assert [row[0] for row in world.results()] == [1, 2]
    assert not world.rejected()


WRONG = {
    "one source": (["sources"], {"orders": {"format": "csv", "path": "orders", "schema": ORDERS}}, "at least 2 items"),
    "an outer join": (["correlate", "how"], "left", "needs the end of a source"),
    "an unknown join type": (["correlate", "how"], "lfet", "the only one is 'inner'"),
    "no condition": (["correlate", "on"], [], "at least 1 item"),
    "no equality": (["correlate", "on"], ["orders.id"], "write it as 'orders.id = payments.order'"),
    "an unknown source": (["correlate", "on"], ["order.id = payments.order"], "did you mean 'orders'"),
    "an unknown column": (["correlate", "on"], ["orders.ids = payments.order"], "did you mean 'id'"),
    "types that never match": (["correlate", "on"], ["orders.item = payments.order"], "correlate: "),
    "a source compared with itself": (["correlate", "on"], ["orders.id = orders.id"], "compares an input with itself"),
    "a distance of another unit": (
        ["correlate", "near"], [{"columns": "orders.at = payments.at", "within": 1.5}], "within",
    ),
    "a distance without a unit": (
        ["correlate", "near"], [{"columns": "orders.at = payments.at", "within": 5}], "5 has no unit",
    ),
    "a lateness without a unit": (
        ["correlate"],
        {"on": ["orders.id = payments.order"], "near": [{"columns": "orders.at = payments.at", "within": "5s"}],
         "lateness": 10},
        "write a duration such as 10s",
    ),
    "lateness without times": (["correlate", "lateness"], "5min", "between times"),
    "lateness of less than a unit": (
        ["correlate"],
        {"on": ["orders.id = payments.order"], "near": [{"columns": "orders.at = payments.at", "within": "1s"}],
         "lateness": "0.0000005s"},
        "whole",
    ),
    "lateness of numbers": (
        ["correlate"],
        {"on": ["orders.item = payments.item"], "near": [{"columns": "orders.id = payments.order", "within": 1}],
         "lateness": "5min"},
        "item",
    ),
    "a partition of no column": (["sink", "partition_by"], ["day"], "names 'day'"),
    "a partition of times": (["sink", "partition_by"], ["at"], "whose type is timestamp_ntz; results are"),
    "a partition of doubles": (["sink", "partition_by"], ["item", "paid"], "'paid', whose type is double"),
    "changed files loaded again": (["sources", "orders", "changed"], "reload", "results would come twice"),
    "tables elsewhere": (["sink", "path"], "s3a://bucket/paid", "not to s3a://bucket/paid"),
    "a state elsewhere": (["correlate", "state"], "s3a://bucket/state", "name one that all hosts share"),
    "a state in a source": (["correlate", "state"], "orders/state", "overlaps sources.orders"),
    "a state around a source": (
        ["sources", "orders", "path"], ".headrace/paid/checkpoint/state/orders", "overlaps sources.orders",
    ),
    "a state in a table": (["correlate", "state"], "w/paid", "overlaps sink.path"),
    "a state around the tables": (["correlate", "state"], "w", "overlaps sink.path"),
    "a state in the error table": (["correlate", "state"], "w/paid_errors/state", "overlaps sink.errors"),
    "the checkpoint as state": (["correlate", "state"], ".headrace/paid/checkpoint", "overlaps the checkpoint"),
    "a state among the ledgers": (
        ["correlate", "state"], ".headrace/paid/checkpoint/sources", "overlaps the checkpoint",
    ),
    "a state around the checkpoint": (["correlate", "state"], ".headrace/paid", "overlaps the checkpoint"),
    "the project as state": (["correlate", "state"], ".", "overlaps sources.orders"),
    "results in a source": (["sink", "path"], "orders", "sources.orders.path: "),
    "rejected rows among the results": (["sink", "errors"], "w/paid/errors", "the table of sink.path, or lies in its"),
    "a merge": (["sink", "mode"], "merge", "unknown field"),
    "a reserved column": (["sources", "orders", "schema", "_id"], "int", "kept for Headrace"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pipeline_file_is_refused_with_its_line(world, name):
    world.assert_refused(*WRONG[name])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("project", "the folder of the pipeline file"),
        ("project/.headrace", "the folder of all checkpoints"),
        ("catalogs", "the run catalog"),
        ("project/state", None),
        ("checkpoint/state", None),
    ],
)
def test_a_state_around_other_things_is_refused(folder, state, message):
    """Sources, tables, checkpoint and catalog are outside the project."""
    world = World(folder / "project")
    for name in world.sources:
        world.document["sources"][name]["path"] = str(folder / "sources" / name)
    world.document |= {"checkpoint": "../checkpoint", "sink": {"path": "../tables/paid"}}
    world.document |= {"catalog": f"sqlite:///{folder}/catalogs/runs.db"}
    world.document["correlate"]["state"] = str(folder / state)
    world.write()
    if message is None:
        assert load_any(world.pipeline).state_path == str(folder / state)
        return
    with pytest.raises(PipelineFileError, match=r"line \d+, column \d+") as raised:
        load_any(world.pipeline)
    assert f"overlaps {message}" in str(raised.value)
    assert "name a folder that holds nothing else" in str(raised.value)


def test_a_source_that_no_equality_connects_is_refused(folder):
    on = ["orders.id = payments.order"]
    near = [{"columns": "orders.id = shipments.order", "within": 1}]
    world = World(folder, {"on": on, "near": near}, ("orders", "payments", "shipments"))
    with pytest.raises(PipelineFileError, match="no equality in `on` connects 'shipments'"):
        load_any(world.pipeline)


def test_other_commands_refuse_a_pipeline_with_several_sources(world):
    with pytest.raises(PipelineFileError, match=r"pipeline\.yml has several sources, and"):
        load_pipeline(world.pipeline)


def test_the_files_of_a_source_are_listed_and_skipped_by_its_name(world, rng):
    world.add_random(rng, 10)
    config = load_any(world.pipeline)
    skip_files(config.of_source("orders"), ["0001.csv"])
    world.run()
    assert [file.state for file in list_files(config.of_source("orders")).files] == ["skipped"]
    assert [file.state for file in list_files(config.of_source("payments")).files] == ["loaded"]
    assert world.results() == []


def test_remedies_name_the_source_of_a_file(world, rng):
    world.add_random(rng, 10)
    world.run()
    (world.folder / "orders/0001.csv").write_text("id,item,at\n")
    with pytest.raises(SourceFileError) as raised:
        world.run()
    assert "`headrace source skip PIPELINE 0001.csv --source orders`" in str(raised.value)
    assert "sources.orders.changed what happens to such files: ignore" in str(raised.value)
    (world.folder / "payments/folder").mkdir()
    (left,) = list_files(load_any(world.pipeline).of_source("payments")).left_out
    assert "sources.payments.recursive" in left.reason


def test_a_missing_folder_of_a_source_is_named(world):
    (world.folder / "orders").rmdir()
    with pytest.raises(PipelineFileError, match=r"^sources\.orders\.path: "):
        run_pipeline(world.pipeline)


def test_a_table_with_other_columns_is_refused_before_anything_is_written(world, rng):
    world.add_random(rng, 10)
    write_deltalake(str(world.folder / "w/paid"), pa.table({"id": pa.array([1], pa.int64())}))
    with pytest.raises(DeltaTableError, match="no columns 'item'"):
        world.run()
    assert not world.state.exists()
