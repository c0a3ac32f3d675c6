"""Writer and reader processes of one table that start at once and can be killed at any time.

They are forked from a process of their own, which has imported and compiled everything and has no threads. So a round
of killing takes milliseconds, most of them spent in commits, and an instant at random lies within one.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.storage.table import Table

ROWS = 6000
KNOWN = 4


def batch(version):
    """Return upserts and deletes of a commit; every process can compute them."""
    rng = np.random.default_rng(version)
    keys = np.unique(rng.integers(0, ROWS, int(rng.integers(1, 400))))
    return keys, np.setdiff1d(rng.integers(0, ROWS, int(rng.integers(0, 300))), keys)


class History:
    """What the table holds at each version; goes on from the versions asked for last."""

    def __init__(self):
        start = np.full(ROWS, -1)
        start[::2] = 0
        self.known = {0: start}

    def at(self, version):
        last = max(at for at in self.known if at <= version)
        values = self.known[last].copy()
        for at in range(last + 1, version + 1):
            upserts, deletes = batch(at)
            values[upserts] = at
            values[deletes] = -1
        self.known[version] = values
        if len(self.known) > KNOWN:
            del self.known[sorted(self.known)[1]]
        return np.flatnonzero(values >= 0), values[values >= 0]


HISTORY = History()


def build_table(path):
    keys, values = HISTORY.at(0)
    source = pa.table({"k": keys, "v": values})
    Table.build(path, source, key=["k"], unique=True, page_size=4096, app=("loop", 0)).close()


def matches(table):
    version = table.app_version("loop")
    rows = pa.Table.from_batches(list(table.scan()), schema=table.schema)
    keys, values = HISTORY.at(version)
    assert np.array_equal(rows.column("k").to_numpy(), keys), version
    assert np.array_equal(rows.column("v").to_numpy(), values), version
    return version


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write(table):
    version = table.app_version("loop") + 1
    upserts, deletes = batch(version)
    rows = pa.table({"k": upserts, "v": np.full(len(upserts), version)})
    table.apply(rows, pa.table({"k": deletes}), app=("loop", version))
    return version


def write_for_ever(path):
    table = Table.open(path, mode="w", wait=60)
    while True:
        say(write(table))


def read(table, path):
    version = matches(table)
    with Table.open(path) as other:
        assert matches(other) >= version
    assert matches(table) == version
    table.refresh()
    return version


def read_for_ever(path):
    table = Table.open(path)
    while True:
        say(read(table, path))


ROLES = {"write": write_for_ever, "read": read_for_ever}


def warm_up():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        build_table(path)
        with Table.open(path) as table, Table.open(path, mode="w") as writer:
            for _ in range(20):
                write(writer)
                read(table, path)


def fork(role, path, pipe):
    assert threading.active_count() == 1
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(pipe, os.O_WRONLY), sys.stdout.fileno())
        ROLES[role](path)
    except BaseException:  # noqa: BLE001 - a fork must not go on with what its parent does
        traceback.print_exc()
    finally:
        os._exit(1)


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve():
    """Fork and wait for processes as the lines of standard input say."""
    warm_up()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        say({"fork": fork, "wait": wait}[command](*arguments))


class Child:
    def __init__(self, nursery, pid, pipe):
        self.nursery = nursery
        self.pid = pid
        self.output = pipe.open()
        pipe.unlink()

    def hear(self):
        """Return the next version that the process tells of."""
        return int(self.output.readline())

    def kill(self, after=0.0):
        """Kill the process so many seconds from now and return the versions that it had told of, or still did."""
        killer = threading.Timer(after, os.kill, (self.pid, signal.SIGKILL))
        killer.start()
        with self.output:
            rest = [int(line) for line in self.output]
        killer.join()
        assert self.nursery.ask("wait", self.pid) == -signal.SIGKILL
        return rest


class Nursery:
    def __init__(self, folder):
        self.folder = folder
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import nursery; nursery.serve()"
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # it would have threads from its import on
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, role, path):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        return Child(self, self.ask("fork", role, str(path), str(pipe)), pipe)

    def close(self):
        with self.process:
            self.process.stdin.close()
