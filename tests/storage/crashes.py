"""A long random workload on a simulated disk, and the proof that a crash anywhere in it leaves a whole commit."""

import bisect

import numpy as np
import pyarrow as pa
import pytest
from simulated import Model, SimulatedDisk, build, crash_images, rows_at, rows_of, writer_of

from headrace.storage.check import check_backend
from headrace.storage.commit import page_writer
from headrace.storage.format import superblock
from headrace.storage.tree.snapshot import open_snapshot, pages_of

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


def one_row(rng, _key, _unique):
    """Return one upsert."""
    return random_rows(rng, 1), []


def sort_rows(rows):
    return sorted(rows, key=lambda row: (row["k"], row["v"] is None, row["v"], row["s"]))


class State:
    """A commit: what its superblock says, and the pages that it is made of, byte for byte."""

    def __init__(self, disk, model):
        self.model = model
        snapshot = open_snapshot(disk)
        self.superblock = snapshot.superblock
        size = snapshot.page_size
        self.pages = [(at * size, (at + 1) * size) for at in pages_of(snapshot).tolist()[2:]]
        self.content = self.content_of(disk.image)

    def content_of(self, image):
        return b"".join([image[begin:end] for begin, end in self.pages])

    def is_on(self, disk, superblock):
        """Return whether this is the commit of a superblock on the disk, every byte as it was written."""
        return superblock == self.superblock and self.content_of(disk.image) == self.content


class Workload:
    """Commits to a simulated disk; knows after which operation each commit was acknowledged.

    Some commits write their superblock with their pages, some after them, as small and large ones do; some list the
    leaves that they move, some have no room for the list and write inner nodes; some lay what they write together
    where there is room; after some the writer leaves. The rows
    of each commit are compared with a model here; after a crash it is enough to find the commit's bytes again.
    """

    def __init__(self, rng, kind, commits, changes=random_changes):
        self.key, self.unique = KINDS[kind]
        rows = random_rows(rng, 500)
        rows = distinct(rows, self.key) if self.unique else rows
        self.disk = build(table_of(rows), self.key, unique=self.unique)
        self.start = bytes(self.disk.image)
        self.states = [self.state(Model(self.key, rows))]
        self.acknowledged = []
        writer = writer_of(self.disk)
        for _ in range(commits):
            upserts, deletes = changes(rng, self.key, self.unique)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(page_writer, "PROOF_PAGES", int(rng.choice([0, 12, 64])))
                patch.setattr(page_writer, "TOGETHER", int(rng.choice([1, 128])))
                patch.setattr(superblock, "MOST_RELOCATIONS", int(rng.choice([0, 2, 6, 72])))
                writer.apply(table_of(upserts), table_of(deletes), app=("crash", len(self.states)))
            model = self.states[-1].model.copy()
            model.apply(upserts, deletes)
            self.acknowledged.append(len(self.disk.log))
            if rng.integers(0, 3) == 0:
                writer.release()
                writer.acquire()
            self.states.append(self.state(model))

    def state(self, model):
        assert_rows(self.disk, model)
        return State(self.disk, model)

    def allowed(self, operations):
        """Return the states that may be found after a crash before the operation of this number."""
        done = bisect.bisect_right(self.acknowledged, operations)
        return self.states[done : done + 2]


def assert_rows(disk, model):
    assert sort_rows(rows_of(disk)) == sort_rows(model.sorted())


def check_crashes(workload, rng, resume_every):
    """Crash before every operation and return how often; read all rows and go on writing after some of the crashes."""
    points = 0
    for operations, image in crash_images(workload.start, workload.disk.log, rng):
        disk = SimulatedDisk(image)
        assert check_backend(disk).violations == ()
        snapshot = open_snapshot(disk)
        found = [state for state in workload.allowed(operations) if state.is_on(disk, snapshot.superblock)]
        assert len(found) == 1, operations
        if operations % resume_every == 0:
            model = found[0].model.copy()
            assert sort_rows(rows_at(disk, snapshot)) == sort_rows(model.sorted())
            upserts, deletes = random_changes(rng, workload.key, workload.unique)
            writer_of(disk).apply(table_of(upserts), table_of(deletes))
            model.apply(upserts, deletes)
            assert_rows(disk, model)
        points += 1
    return points


def crash_everywhere(seed, kind, commits, resume_every, changes=random_changes):
    """Run a workload and crash before each of its operations; return how many there were."""
    rng = np.random.default_rng(seed)
    return check_crashes(Workload(rng, kind, commits, changes), rng, resume_every)
