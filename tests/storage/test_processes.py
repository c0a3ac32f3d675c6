"""A writer process that is killed again and again beside reader processes that never see anything but a commit."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.errors import LockedError, StorageIOError, TableNotFoundError
from storage.lookup import scan
from storage.table import Table

ROWS = 6000


def batch(version):
    """Return upserts and deletes of a commit; every process can compute them."""
    rng = np.random.default_rng(version)
    keys = np.unique(rng.integers(0, ROWS, int(rng.integers(1, 400))))
    return keys, np.setdiff1d(rng.integers(0, ROWS, int(rng.integers(0, 300))), keys)


def expected(version):
    values = np.full(ROWS, -1)
    for at in range(version + 1):
        upserts, deletes = (np.arange(0, ROWS, 2), np.empty(0, int)) if at == 0 else batch(at)
        values[upserts] = at
        values[deletes] = -1
    return np.flatnonzero(values >= 0), values[values >= 0]


def matches(table):
    version = table.app_version("loop")
    rows = pa.Table.from_batches(list(table.scan()), schema=table.schema)
    keys, values = expected(version)
    assert np.array_equal(rows.column("k").to_numpy(), keys), version
    assert np.array_equal(rows.column("v").to_numpy(), values), version
    return version


def say(version):
    sys.stdout.write(f"{version}\n")
    sys.stdout.flush()


def write_for_ever(path):
    table = Table.open(path, mode="w", wait=60)
    while True:
        version = table.app_version("loop") + 1
        upserts, deletes = batch(version)
        rows = pa.table({"k": upserts, "v": np.full(len(upserts), version)})
        table.apply(rows, pa.table({"k": deletes}), app=("loop", version))
        say(version)


def read_for_ever(path):
    table = Table.open(path)
    while True:
        version = matches(table)
        with Table.open(path) as other:
            assert matches(other) >= version
        assert matches(table) == version
        table.refresh()
        say(version)


ROLES = {"write": write_for_ever, "read": read_for_ever}


def start(role, path):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_processes as t; "
    command = [sys.executable, "-c", f"{code}t.ROLES[{role!r}]({str(path)!r})"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process):
    process.kill()
    rest = process.stdout.read().split()
    process.wait()
    process.stdout.close()
    return [int(line) for line in rest]


@pytest.fixture
def path(tmp_path):
    keys, values = expected(0)
    source = pa.table({"k": keys, "v": values})
    Table.build(tmp_path / "t", source, key=["k"], unique=True, page_size=4096, app=("loop", 0)).close()
    return tmp_path / "t"


def kill_writers(path, rounds):
    rng = np.random.default_rng(11)
    readers = [start("read", path) for _ in range(1)]
    acknowledged = 0
    for _ in range(rounds):
        writer = start("write", path)
        seen = [int(writer.stdout.readline()) for _ in range(int(rng.integers(1, 6)))]
        acknowledged = (seen + kill(writer))[-1]
        with Table.open(path) as table:
            assert table.check().violations == ()
            assert acknowledged <= matches(table) <= acknowledged + 1
    for reader in readers:
        reader.stdout.readline()
        assert reader.poll() is None
        kill(reader)
    assert acknowledged >= rounds


def test_killed_writers_lose_nothing_and_block_nobody(path):
    kill_writers(path, rounds=2)


@pytest.mark.slow
def test_many_killed_writers_lose_nothing_and_block_nobody(path):
    kill_writers(path, rounds=150)


def test_a_second_writer_is_refused_while_the_first_lives(path):
    writer = start("write", path)
    writer.stdout.readline()
    with pytest.raises(LockedError, match="being written by another process"):
        Table.open(path, mode="w")
    with Table.open(path) as table:
        with pytest.raises(LockedError):
            table.apply(deletes=pa.table({"k": [1]}))
        kill(writer)
        table.refresh()
        version = matches(table)
        table.apply(app=("loop", version), wait=5)
        assert matches(table) == version


def test_handles_of_one_process_take_turns(path):
    with Table.open(path) as one, Table.open(path) as two:
        for turn in range(1, 7):
            upserts, deletes = batch(turn)
            rows = pa.table({"k": upserts, "v": np.full(len(upserts), turn)})
            (one if turn % 2 else two).apply(rows, pa.table({"k": deletes}), app=("loop", turn))
        assert matches(two) == 6
        assert matches(one) == 5
        one.refresh()
        assert matches(one) == 6


def test_a_read_only_file_can_be_read_and_not_written(path, monkeypatch):
    def refuse_writing(name, flags, *mode):
        if name == str(path) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", name)  # root, too
        return open_file(name, flags, *mode)

    open_file = os.open
    monkeypatch.setattr(os, "open", refuse_writing)
    with Table.open(path) as table:
        with pytest.raises(StorageIOError, match="check the permissions"):
            table.apply(deletes=pa.table({"k": [2]}))
        table.refresh()
        assert matches(table) == 0


def test_a_replaced_table_is_not_written_under_its_old_name(path):
    with Table.open(path) as old:
        Table.build(path, pa.table({"k": [1], "v": [1]}), key=["k"], unique=True, overwrite=True).close()
        matches(old)
        snapshot, reader = old.snapshot(), old.reader()
        with pytest.raises(StorageIOError, match="replaced by another file"):
            old.apply(deletes=pa.table({"k": [1]}))
        old.refresh()
        assert old.stats.rows == 1
        assert old.apply(deletes=pa.table({"k": [1]})).deleted == 1
        assert sum(batch.num_rows for batch in scan(snapshot, reader, None, None, None)) == ROWS // 2
        path.unlink()
        with pytest.raises(TableNotFoundError):
            old.refresh()
