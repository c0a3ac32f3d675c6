"""Crash at every write and sync of a long random workload: what is reopened is the last acknowledged commit or the one
in flight, whole, and it can be written to again."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from crashes import KINDS, crash_everywhere, distinct, one_row, random_rows, table_of
from simulated import Model, SimulatedDisk, build, rows_of, writer_of

from headrace.storage.commit import page_writer
from headrace.storage.errors import PoisonedHandleError, StorageIOError


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_at_every_write_leaves_a_commit(kind):
    assert crash_everywhere([len(kind), 1], kind, commits=80, resume_every=8) >= 500


@pytest.mark.parametrize("kind", ["unique integers", "text"])
def test_a_crash_among_many_commits_of_one_row_leaves_a_commit(kind):
    assert crash_everywhere([len(kind), 5], kind, commits=90, resume_every=9, changes=one_row) >= 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_among_very_many_commits_of_one_row_leaves_a_commit(kind, processes):
    runs = [processes.submit(crash_everywhere, [len(kind), 6, seed], kind, 450, 11, one_row) for seed in range(4)]
    assert min(run.result() for run in runs) >= 1500


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_at_every_write_of_long_workloads(kind, processes):
    runs = [processes.submit(crash_everywhere, [len(kind), 2, seed], kind, 500, 11) for seed in range(10)]
    assert min(run.result() for run in runs) >= 2500


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
