"""Starts and kills drivers in processes of their own, and kills the Python workers of this process's Spark session."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def start(world):
    """Return a driver that runs a world's pipeline."""
    command = [sys.executable, "-m", "headrace.pipelines", str(world.pipeline), "--once"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def kill_when(driver, happened):
    """Kill a driver as soon as something has happened; return whether it was alive until then."""
    waiting = threading.Event()
    while driver.poll() is None:
        if happened():
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            return True
        waiting.wait(0.005)
    return False


def kill_one_worker(killed):
    """Kill one of Spark's Python workers as soon as there is one beside its daemon."""
    waiting = threading.Event()
    for _ in range(2000):
        workers = python_workers()
        if workers:
            os.kill(workers[-1], signal.SIGKILL)
            killed.append(workers[-1])
            return
        waiting.wait(0.01)


def python_workers():
    """Return the processes that Spark's daemon of this process's JVM has forked."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents[int(entry.name)] = (parent, (entry / "cmdline").read_text())
    daemons = {pid for pid, (_, command) in parents.items() if "pyspark.daemon" in command and descends(pid, parents)}
    return [pid for pid, (parent, command) in parents.items() if "pyspark.daemon" in command and parent in daemons]


def descends(pid, parents):
    while pid in parents:
        if pid == os.getpid():
            return True
        pid = parents[pid][0]
    return False
