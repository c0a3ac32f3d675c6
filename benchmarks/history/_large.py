"""Many changes of a large dimension: `headrace dimension apply` in a process of its own.

Of each process, the peak of its memory and the bytes that it wrote are measured: those of the dimension, whose size
they do not follow, and those of the replicas on this host, if it has some. What the command takes without work (the
same file again, which is skipped) is given for comparison. At the end, the dimension is compared with its initial
versions, to which a query of DuckDB applies the changes.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.history._changes import changes
from benchmarks.history._contents import require_expected
from benchmarks.history._members import Members, pipeline

__all__ = ["CONTESTANTS", "measure"]

CONTESTANTS = (OURS,) = ("headrace dimension apply",)
MIB = 1 << 20
PAUSE = 0.05  # in seconds, between looks at the memory of the process


def measure(_spark, folder, settings):
    """Yield a row for each round."""
    members = Members(settings.large_members)
    config = pipeline(folder, "large", settings.memory)
    path = members.create(config, settings.kept or None)
    print(f"{settings.large_members:,} members, {_bytes(path) / MIB:,.0f} MiB")
    files = _write_changes(members, folder / "changed", settings)
    del members
    for number, file in enumerate(files):
        before = _bytes(path)
        seconds, processor, peak = _apply(folder, file)
        written = _bytes(path) - before
        _, _, idle = _apply(folder, file)
        print(f"  peak memory {peak / MIB:,.0f} MiB, {idle / MIB:,.0f} MiB without work")
        print(f"  wrote {written / MIB:,.0f} MiB; replicas take {_bytes(folder / 'replicas') / MIB:,.0f} MiB")
        yield {"contestant": OURS, "round": number, "counted": number > 0, "rows": settings.large_changes,
               "seconds": seconds, "processor": processor, "peak_memory": peak, "written": written}  # fmt: skip
    versions = require_expected(path, files)
    print(f"contents equal: the dimension has the same {versions:,} versions as the query gives")


def _write_changes(members, folder, settings):
    """Write a file of changes for each round, and return the files."""
    folder.mkdir()
    changed = np.random.default_rng(2).permutation(settings.large_members)
    files = []
    for number in range(settings.rounds + 1):
        chosen = np.sort(changed[number * settings.large_changes : (number + 1) * settings.large_changes])
        files.append(folder / f"{number}.parquet")
        pq.write_table(changes(members, chosen, number), files[-1])
    return files


def _apply(folder, file):
    """Run the command, and return its seconds, processor seconds, and the peak of its memory in bytes."""
    command = Path(sys.executable).with_name("headrace"), "dimension", "apply", "customer", file
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([*command, "--pipeline", folder / "large.yml"], stdout=subprocess.DEVNULL)
    ended, status, used = os.wait4(process.pid, os.WNOHANG)
    while not ended:
        peak = max(peak, _peak(process.pid))
        time.sleep(PAUSE)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"headrace dimension apply ended with exit code {process.returncode}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, peak


def _peak(process):
    """Return the peak of a process's memory so far; that of `wait4` includes the process that started it."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), default=0)


def _bytes(folder):
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
