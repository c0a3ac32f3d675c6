"""Crash at every write and sync of a long random workload: what is reopened is the last acknowledged commit or the one
in flight, whole, and it can be written to again."""

import numpy as np
import pyarrow as pa
import pytest
from simulated import Model, SimulatedDisk, build, crash_images, rows_of, writer_of

from storage import page_writer
from storage.errors import PoisonedHandleError, StorageIOError

KINDS = {
    "unique integers": (["k"], True),
    "integers": (["k"], False),
    "text": (["t"], True),
    "text and integers": (["t", "k"], False),
}
SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.string()), ("v", pa.int32()), ("s", pa.string())])


def random_rows(rng, count, spread=900):
    keys = rng.integers(0, spread, count)
    return [
        {"k": int(k), "t": f"key-{k:05}", "v": int(v) if v else None, "s": "x" * int(size)}
        for k, v, size in zip(keys, rng.integers(0, 9, count), rng.integers(0, 250, count), strict=True)
    ]


def table_of(rows):
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def distinct(rows, key):
    return list({tuple(row[name] for name in key): row for row in rows}.values())


def random_changes(rng, key, unique):
    """Return upserts and deletes, every other time so few that only their leaves and the paths above are written."""
    few = rng.integers(0, 2) == 0
    upserts = random_rows(rng, int(rng.integers(1, 4) if few else rng.integers(0, 25)))
    deletes = [] if few else random_rows(rng, int(rng.choice([0, 3, 10, 150])))
    return (distinct(upserts, key) if unique else upserts), deletes


def sort_rows(rows):
    return sorted(rows, key=lambda row: (row["k"], row["v"] is None, row["v"], row["s"]))


class Workload:
    """Commits to a simulated disk; knows after which operation each commit was acknowledged.

    Some commits write their superblock with their pages, some after them, as small and large ones do.
    """

    def __init__(self, rng, kind, commits, monkeypatch):
        self.key, self.unique = KINDS[kind]
        rows = random_rows(rng, 500)
        rows = distinct(rows, self.key) if self.unique else rows
        self.disk = build(table_of(rows), self.key, unique=self.unique)
        self.start = bytes(self.disk.image)
        model = Model(self.key, rows)
        self.states = [sort_rows(model.sorted())]
        self.acknowledged = []
        writer = writer_of(self.disk)
        for _ in range(commits):
            upserts, deletes = random_changes(rng, self.key, self.unique)
            monkeypatch.setattr(page_writer, "PROOF_PAGES", int(rng.choice([0, 12, 64])))
            writer.apply(table_of(upserts), table_of(deletes), app=("crash", len(self.states)))
            model.apply(upserts, deletes)
            self.states.append(sort_rows(model.sorted()))
            self.acknowledged.append(len(self.disk.log))

    def allowed(self, operations):
        """Return the states that may be found after a crash before the operation of this number."""
        done = sum(at <= operations for at in self.acknowledged)
        return self.states[done : done + 2]


def check_crashes(workload, rng, resume_every):
    points = 0
    for operations, image in crash_images(workload.start, workload.disk.log, rng):
        disk = SimulatedDisk(image)
        found = sort_rows(rows_of(disk))
        assert found in workload.allowed(operations), operations
        if operations % resume_every == 0:
            model = Model(workload.key, found)
            upserts, deletes = random_changes(rng, workload.key, workload.unique)
            writer_of(disk).apply(table_of(upserts), table_of(deletes))
            model.apply(upserts, deletes)
            assert sort_rows(rows_of(disk)) == sort_rows(model.sorted())
        points += 1
    return points


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_at_every_write_leaves_a_commit(kind, monkeypatch):
    rng = np.random.default_rng([len(kind), 1])
    workload = Workload(rng, kind, 65, monkeypatch)
    assert check_crashes(workload, rng, resume_every=7) >= 500


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_crash_at_every_write_of_long_workloads(kind, seed, monkeypatch):
    rng = np.random.default_rng([len(kind), 2, seed])
    workload = Workload(rng, kind, 400, monkeypatch)
    assert check_crashes(workload, rng, resume_every=11) >= 2500


@pytest.mark.parametrize("proof_pages", [0, 64])
@pytest.mark.parametrize("short", [0, 100, 4096])
def test_a_failed_write_or_sync_stops_the_writer_and_loses_nothing(short, proof_pages, monkeypatch):
    """Every operation of a commit fails in turn, after none, some or all of its bytes."""
    monkeypatch.setattr(page_writer, "PROOF_PAGES", proof_pages)
    rng = np.random.default_rng(3)
    rows = distinct(random_rows(rng, 300), ["k"])
    start = build(table_of(rows), ["k"], unique=True)
    upserts, deletes = distinct(random_rows(rng, 25), ["k"]), random_rows(rng, 20)
    after = Model(["k"], rows)
    after.apply(upserts, deletes)
    failing = 0
    while True:
        disk = SimulatedDisk(bytearray(start.image))
        writer = writer_of(disk)
        at = len(disk.log) + failing
        disk.fail = lambda operation, at=at: short if operation == at else None
        try:
            writer.apply(table_of(upserts), table_of(deletes))
        except StorageIOError:
            with pytest.raises(PoisonedHandleError, match="open it again"):
                writer.apply(table_of(upserts))
            with pytest.raises(PoisonedHandleError):
                writer.acquire()
        else:
            break
        disk.fail = None
        assert rows_of(disk) in (Model(["k"], rows).sorted(), after.sorted())
        writer_of(disk).apply(table_of(upserts), table_of(deletes))
        assert rows_of(disk) == after.sorted()
        failing += 1
    assert failing >= 5


def test_an_interrupt_in_a_commit_stops_the_writer():
    rng = np.random.default_rng(4)
    rows = distinct(random_rows(rng, 100), ["k"])
    disk = build(table_of(rows), ["k"], unique=True)

    def interrupt(_operation):
        raise KeyboardInterrupt

    writer = writer_of(disk)
    disk.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        writer.apply(table_of(random_rows(rng, 1)))
    disk.fail = None
    with pytest.raises(PoisonedHandleError):
        writer.apply(table_of(random_rows(rng, 1)))
    assert rows_of(disk) == Model(["k"], rows).sorted()
