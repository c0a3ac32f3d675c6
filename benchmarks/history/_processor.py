"""Processor time of this process and all that it started: Spark's JVM and the workers of that."""

import os
from pathlib import Path

__all__ = ["Stopwatch"]

TICKS = os.sysconf("SC_CLK_TCK")
PARENT, FIRST_TIME, LAST_TIME = 1, 11, 15  # in the fields after the name: own time, and that of ended children


class Stopwatch:
    """Measures the processor time since it was made. What a process spends after the last look at it is lost."""

    def __init__(self):
        self._began = _spent()

    def seconds(self):
        """Return the processor seconds since then, of the processes that still run."""
        now = _spent()
        return sum(now[process] - self._began.get(process, 0) for process in now) / TICKS


def _spent():
    """Return the processor time of this process and its descendants, in ticks."""
    times, children = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            _read(folder, times, children)
    family, spent = [os.getpid()], {}
    while family:
        process = family.pop()
        spent[process] = times.get(process, 0)
        family += children.get(process, [])
    return spent


def _read(folder, times, children):
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return  # it ended
    times[int(folder.name)] = sum(map(int, fields[FIRST_TIME:LAST_TIME]))
    children.setdefault(int(fields[PARENT]), []).append(int(folder.name))
