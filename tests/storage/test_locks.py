import contextlib
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import NoLocks

from headrace.storage.commit.locks import Claims, FileLocks
from headrace.storage.errors import LockedError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.format.slots import write_superblock
from headrace.storage.format.superblock import Superblock

HOLDER = """
import sys
from headrace.storage.file.backend import FileBackend
from headrace.storage.commit.locks import FileLocks
backend = FileBackend(sys.argv[1], "w")
locks = FileLocks(backend.fileno(), sys.argv[1])
locks.take_writer()
locks.claim(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "table"
    file.write_bytes(b"x")
    return file


@pytest.fixture
def handle(path):
    opened = []

    def open_one(mode="w", **options):
        backend = FileBackend(path, mode)
        opened.append(backend)
        return FileLocks(backend.fileno(), str(path), **options)

    yield open_one
    for backend in opened:
        backend.close()


def test_there_is_one_writer(handle):
    first, second = handle(), handle()
    first.take_writer()
    with pytest.raises(LockedError, match=r"table is being written .*wait=SECONDS"):
        second.take_writer()
    first.release_writer()
    second.take_writer()


def test_a_writer_waits_on_request(handle):
    first = handle()
    first.take_writer()
    now = [0.0]
    slept = []

    def pause(seconds):
        slept.append(seconds)
        now[0] += seconds
        if now[0] > 0.5:
            first.release_writer()

    second = handle(clock=lambda: now[0], pause=pause)
    second.take_writer(wait=2.0)
    assert max(slept) <= 0.1
    third = handle(clock=lambda: now[0], pause=pause)
    with pytest.raises(LockedError):
        third.take_writer(wait=1.0)
    assert now[0] == pytest.approx(1.5, abs=0.3)


def test_a_writer_that_waits_is_not_overtaken_by_one_that_writes_again_and_again(handle):
    busy = handle()
    busy.take_writer()
    now = [0.0]

    def pause(seconds):
        now[0] += seconds
        busy.release_writer()
        with contextlib.suppress(LockedError):
            busy.take_writer()

    waiting = handle(clock=lambda: now[0], pause=pause)
    waiting.take_writer(wait=1.0)
    waiting.release_writer()
    busy.take_writer()


def test_a_writer_that_gave_up_waiting_holds_up_nobody(handle):
    first, second, third = handle(), handle(), handle()
    first.take_writer()
    with pytest.raises(LockedError):
        second.take_writer()
    first.release_writer()
    third.take_writer()


def test_claims_are_shared_and_seen_by_others(handle):
    writer, one, two = handle(), handle("r"), handle("r")
    assert writer.oldest_claim(100) is None
    one.claim(7)
    two.claim(7)
    two.claim(12)
    assert writer.oldest_claim(100) == 7
    assert writer.oldest_claim(7) is None
    one.release(7)
    assert writer.oldest_claim(100) == 7
    two.release(7)
    assert writer.oldest_claim(100) == 12


@given(claims=st.sets(st.integers(0, 2**40), min_size=1, max_size=12), before=st.integers(0, 2**40))
def test_the_oldest_claim_is_found(tmp_path_factory, claims, before):
    path = tmp_path_factory.mktemp("claims") / "t"
    path.write_bytes(b"")
    backends = [FileBackend(path, "w") for _ in range(3)]
    writer, *readers = (FileLocks(backend.fileno(), str(path)) for backend in backends)
    for at, txid in enumerate(sorted(claims, reverse=True)):
        readers[at % 2].claim(txid)
    assert writer.oldest_claim(before) == min((txid for txid in claims if txid < before), default=None)
    for backend in backends:
        backend.close()


def test_a_dead_process_frees_its_locks(handle, path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "held\n"
        locks = handle()
        assert locks.oldest_claim(9) == 5
        with pytest.raises(LockedError):
            locks.take_writer()
        child.kill()
        child.wait()
    locks.take_writer()
    assert locks.oldest_claim(9) is None


def test_a_reader_cannot_become_the_writer(handle):
    with pytest.raises(StorageIOError, match="cannot lock"):
        handle("r").take_writer()


SUPERBLOCK = Superblock(4096, 1, 0, 0, 0, 0, 0, 3, 2, 0, 0, 0.8, unique=True)


def test_a_claim_is_held_on_a_commit_before_the_newest_is_read(path):
    backend = FileBackend(path, "w")
    for txid in (1, 2):
        write_superblock(backend, replace(SUPERBLOCK, txid=txid))
    backend.truncate(3 * 4096)

    class Racing(NoLocks):
        def __init__(self):
            self.claims = []

        def claim(self, txid):
            self.claims.append(txid)
            for later in range(3, 9):
                write_superblock(backend, replace(SUPERBLOCK, txid=later))

        def release(self, txid):
            self.claims.remove(txid)

    locks = Racing()
    with Claims(locks).newest(backend) as newest:
        assert (newest.txid, locks.claims) == (8, [1])
    assert locks.claims == []
    backend.close()


def test_claims_hold_while_a_writer_commits(path):
    """A writer that commits and looks for claims, and a reader that claims: the claim is never missed."""
    writer = FileBackend(path, "w")
    for txid in (1, 2):
        write_superblock(writer, replace(SUPERBLOCK, txid=txid))
    writer.truncate(3 * 4096)
    locks = FileLocks(writer.fileno(), str(path))
    reused = [0]
    stop = threading.Event()

    def commit():
        for txid in range(3, 400):
            oldest = locks.oldest_claim(txid)
            reused[0] = (txid - 1) if oldest is None else min(oldest, txid - 1)
            write_superblock(writer, replace(SUPERBLOCK, txid=txid))
        stop.set()

    thread = threading.Thread(target=commit)
    thread.start()
    backend = FileBackend(path)
    reader = FileLocks(backend.fileno(), str(path))
    claims = Claims(reader)
    while not stop.is_set():
        with claims.newest(backend) as newest:
            for _ in range(3):
                assert reused[0] <= newest.txid
    thread.join()
    backend.close()
    writer.close()


def test_locks_leave_the_file_alone(handle, path):
    locks = handle()
    locks.take_writer()
    locks.claim(3)
    assert path.read_bytes() == b"x"
    assert list(path.parent.iterdir()) == [path]
