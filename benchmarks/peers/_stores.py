"""Stores that serve one thread at a time: a batch is split over as many processes as Headrace has threads.

Each process has its half of the keys ready as its library wants them, in key order. Timed is from the word to go until
all have found their values; conversion to arrays is not timed.
"""

import json
import multiprocessing
import sqlite3
import time
import traceback
from contextlib import suppress

import numpy as np

from benchmarks.peers._joiners import THREADS, Joiner
from benchmarks.peers._tally import Tally

__all__ = ["LMDB", "RocksDB", "SQLite", "SQLiteByRow", "StoreJoiner"]

CHUNK = 1 << 20
AT_ONCE = 10_000  # keys of a MultiGet, which holds the blocks of all
OWN_SHARE = 0.75  # share of the memory for an engine's own cache
CONTEXT = multiprocessing.get_context("spawn")


class StoreJoiner(Joiner):
    """Processes with a store each.

    Parameters
    ----------
    store
        Class of the store.
    setup
        Setup of the contestant.
    """

    def __init__(self, store, setup):
        super().__init__()
        self._pipes, self._processes = [], []
        for _ in range(THREADS):
            near, far = CONTEXT.Pipe()
            arguments = far, store, setup.table, setup.memory // THREADS
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            far.close()
            self._pipes.append(near)
            self._processes.append(process)
        self._all("open")
        self._processor = 0.0

    def start(self):
        """Let the stores take their memory."""
        self._all("start")
        self._processor = sum(self._all("processor"))

    def details(self):
        """Return the processor time of the stores since the last call."""
        before, self._processor = self._processor, sum(self._all("processor"))
        return {"processor_seconds": self._processor - before}

    def timed(self, batch):
        keys, numbers = batch["key"].to_numpy(), batch["number"].to_numpy()
        order = np.argsort(keys)
        halves = np.array_split(order, THREADS)
        for pipe, half in zip(self._pipes, halves, strict=True):
            pipe.send(("prepare", keys[half], numbers[half]))
        self._answers()
        began = time.perf_counter()
        self._all("look_up")
        seconds = time.perf_counter() - began
        self.done += len(batch)
        return sum(self._all("tally"), Tally()), seconds

    def _all(self, command):
        for pipe in self._pipes:
            pipe.send((command,))
        return self._answers()

    def _answers(self):
        answers = [pipe.recv() for pipe in self._pipes]
        if failed := [answer for done, answer in answers if not done]:
            raise RuntimeError(failed[0])
        return [answer for _, answer in answers]


def _serve(connection, store, table, memory):
    worker = _Worker(store, table, memory)
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(worker, command)(*arguments)
        except Exception:  # noqa: BLE001 - any error goes to the contestant
            answer = False, traceback.format_exc()
        with suppress(BrokenPipeError):  # the contestant has ended
            connection.send(answer)


class _Worker:
    """A process of a contestant: its store, and its share of the batch."""

    def __init__(self, store, table, memory):
        self._of = store, table, memory

    def open(self):
        store, table, memory = self._of
        self._store = store(table, memory)

    def start(self):
        self._store.start()

    def processor(self):
        return time.process_time()

    def prepare(self, keys, numbers):
        self._keys, self._numbers = self._store.prepare(keys), numbers

    def look_up(self):
        self._found = self._store.look_up(self._keys)

    def tally(self):
        values, there = self._store.values(self._found, len(self._numbers))
        return Tally.of(self._numbers[there], values)


class SQLite:
    """SQLite joins a list of keys with an ordinary table, whose INTEGER PRIMARY KEY is the row id."""

    def __init__(self, table, memory):
        self._memory = memory
        self._connection = sqlite3.connect(f"file:{table}?mode=ro&immutable=1", uri=True, isolation_level=None)

    def start(self):
        self._connection.executescript(
            f"PRAGMA cache_size = -{int(self._memory * OWN_SHARE) >> 10}; PRAGMA mmap_size = {1 << 40}"
        )
        self._connection.execute("SELECT sum(v) FROM t").fetchone()

    def prepare(self, keys):
        return json.dumps(keys.tolist())

    def look_up(self, keys):
        query = "SELECT j.key, v FROM json_each(?) AS j CROSS JOIN t ON k = j.value"
        return self._connection.execute(query, (keys,)).fetchall()

    def values(self, found, _count):
        pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 1]), pairs[:, 0]


class SQLiteByRow(SQLite):
    """SQLite with one query per tuple."""

    def prepare(self, keys):
        return [(key,) for key in keys.tolist()]

    def look_up(self, keys):
        ask = self._connection.execute
        return [ask("SELECT v FROM t WHERE k = ?", key).fetchone() for key in keys]

    def values(self, found, _count):
        there = np.array([row is not None for row in found], dtype=np.bool_)
        return np.array([row[0] for row in found if row is not None], dtype=np.int64), there


class LMDB:
    """LMDB with one request for all keys; it uses the system's cache."""

    def __init__(self, table, _memory):
        import lmdb  # noqa: PLC0415 - charged to the group of the process

        self._environment = lmdb.open(str(table), readonly=True, lock=False, readahead=False)

    def start(self):
        """Do nothing: the file is memory-mapped."""

    def prepare(self, keys):
        self._sorted = keys
        return _key_bytes(keys)

    def look_up(self, keys):
        with self._environment.begin() as transaction:
            return transaction.cursor().getmulti(keys)

    def values(self, found, count):
        keys = np.frombuffer(b"".join([key for key, _ in found]), dtype=">i8")
        values = np.frombuffer(b"".join([value for _, value in found]), dtype="<i8")
        if len(found) == count:
            return values, slice(None)
        there = np.isin(self._sorted, keys)  # each of equal keys is found
        return values, there


def _key_bytes(keys):
    """Encode non-negative integers as bytes that sort in the same order."""
    return keys.astype(">i8").view("V8").tolist()


class RocksDB:
    """RocksDB asked for many keys at once (its MultiGet): Bloom filters, blocks not compressed, files mapped."""

    def __init__(self, table, memory):
        from rocksdict import AccessType, Rdict  # noqa: PLC0415 - as above

        from benchmarks._engines import rocksdb_options  # noqa: PLC0415 - as above

        self._database = Rdict(str(table), rocksdb_options(memory // 4), access_type=AccessType.read_only())

    def start(self):
        """Do nothing: the files are memory-mapped."""

    def prepare(self, keys):
        some = _key_bytes(keys)
        return [some[start : start + AT_ONCE] for start in range(0, len(some), AT_ONCE)]

    def look_up(self, keys):
        return [self._database.get(some) for some in keys]

    def values(self, found, _count):
        values = [value for some in found for value in some]
        there = np.array([value is not None for value in values], dtype=np.bool_)
        return np.frombuffer(b"".join([value for value in values if value is not None]), dtype="<i8"), there
