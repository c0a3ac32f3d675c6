"""A writer process that is killed again and again beside reader processes that never see anything but a commit."""

import errno
import os

import numpy as np
import pyarrow as pa
import pytest
from nursery import ROWS, Nursery, batch, build_table, matches, write

from headrace.storage import check
from headrace.storage.errors import LockedError, StorageIOError, TableNotFoundError
from headrace.storage.file.backend import FileBackend
from headrace.storage.format.slots import read_superblock
from headrace.storage.read.lookup import scan
from headrace.storage.table import Table

MOST_READS = 4  # two of the superblocks, and again if one is being written


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture
def path(tmp_path):
    build_table(tmp_path / "t")
    return tmp_path / "t"


def kill_writers(nursery, path, rounds, readers):
    rng = np.random.default_rng(11)
    readers = [nursery.start("read", path) for _ in range(readers)]
    acknowledged = 0
    for _ in range(rounds):
        writer = nursery.start("write", path)
        seen = [writer.hear() for _ in range(int(rng.integers(0, 6)))]
        acknowledged = [acknowledged, *seen, *writer.kill(after=rng.uniform(0, 0.03))][-1]
        with Table.open(path) as table:
            assert table.check().violations == ()
            found = matches(table)
        assert acknowledged <= found <= acknowledged + 1
        acknowledged = found
    for reader in readers:
        while reader.hear() < acknowledged:
            pass
        reader.kill()
    assert acknowledged >= rounds


def test_killed_writers_lose_nothing_and_block_nobody(nursery, path):
    kill_writers(nursery, path, rounds=10, readers=1)


@pytest.mark.slow
def test_many_killed_writers_lose_nothing_and_block_nobody(nursery, path):
    kill_writers(nursery, path, rounds=150, readers=2)


def test_a_second_writer_is_refused_while_the_first_lives(nursery, path):
    writer = nursery.start("write", path)
    writer.hear()
    with pytest.raises(LockedError, match="being written by another process"):
        Table.open(path, mode="w")
    with Table.open(path) as table:
        with pytest.raises(LockedError):
            table.apply(deletes=pa.table({"k": [1]}))
        writer.kill()
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


def count_of(table):
    return sum(rows.num_rows for rows in table.scan())


def commit_often(path):
    """Make so many commits that pages of the first ones are taken again unless somebody claims them."""
    with Table.open(path, mode="w") as table:
        rows = pa.concat_tables(pa.Table.from_batches([part]) for part in table.scan())
        for _ in range(40):
            table.apply(rows)


class Beside:
    """Counts how often a process reads the superblocks of a table, and lets something happen before each."""

    def __init__(self, monkeypatch, path, happens):
        self.path, self.happens, self.reads, self.inside = str(path), happens, 0, False
        self.read = FileBackend.pread_into
        monkeypatch.setattr(FileBackend, "pread_into", lambda *call: self.pread_into(*call))  # noqa: PLW0108 - passes the backend

    def pread_into(self, backend, offset, buffers):
        if offset == 0 and backend.path == self.path and not self.inside:
            self.reads, self.inside = self.reads + 1, True
            assert self.reads < 100, "the reader does not get ahead"
            self.happens()
            self.inside = False
        self.read(backend, offset, buffers)


@pytest.fixture
def writer(path):
    with Table.open(path, mode="w") as table:
        yield table


def test_a_writer_that_commits_between_all_reads_does_not_hold_up_a_reader(path, writer, monkeypatch):
    with Table.open(path) as reader:
        beside = Beside(monkeypatch, path, lambda: write(writer))
        reader.refresh()
        assert beside.reads <= 2
        beside.happens = lambda: None
        assert matches(reader) == 2


def test_a_refresh_keeps_the_claims_on_snapshots_in_use(path, writer, monkeypatch):
    with Table.open(path) as reader:
        used, pages, before = reader.snapshot(), reader.reader(), count_of(reader)
        beside = Beside(monkeypatch, path, lambda: None)
        beside.happens = lambda: beside.reads == 2 and write(writer)
        reader.refresh()
        beside.happens = lambda: None
        for _ in range(40):
            write(writer)
        assert sum(batch.num_rows for batch in scan(used, pages, None, None, None)) == before


def test_a_check_beside_a_writer_finds_no_damage(path, writer, monkeypatch):
    def then_many_commits(backend):
        head = read_superblock(backend)
        for _ in range(40):
            write(writer)
        return head

    monkeypatch.setattr(check, "read_superblock", then_many_commits)
    assert check.check_file(path).violations == ()


def test_a_refresh_beside_a_busy_writer_takes_few_reads(nursery, path, monkeypatch):
    writer = nursery.start("write", path)
    with Table.open(path) as reader:
        beside = Beside(monkeypatch, path, lambda: None)
        for _ in range(20):
            for _ in range(100):
                beside.reads = 0
                reader.refresh()
                assert beside.reads <= MOST_READS
            found = matches(reader)
    assert writer.hear() <= 1
    assert writer.kill()[-1] >= found > 1


def in_a_child(work):
    """Do something in a process that is forked."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("leave", [lambda tables: (tables[0].refresh(), tables.clear()), list.clear])
def test_a_forked_process_takes_no_claims_from_its_parent(path, leave):
    tables = [Table.open(path)]
    before = count_of(tables[0])
    with Table.open(path) as other:
        other.apply(deletes=pa.table({"k": [1]}))
    in_a_child(lambda: leave(tables))
    commit_often(path)
    assert count_of(tables[0]) == before
    tables[0].close()
