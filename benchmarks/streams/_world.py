"""Arrivals, the simulated clock, and one run of an operator up to the end of its online phase."""

import tempfile
from dataclasses import dataclass

import numpy as np

from benchmarks.streams._data import SCHEMA, batch
from headrace.joins.streams import DINER, MINER, RPJ, HashMerge, MJoin
from headrace.storage.file import FileBackend

OPERATORS = {"DINER": DINER, "RPJ": RPJ, "HMJ": HashMerge}
MULTIWAY = {"MINER": MINER, "MJoin": MJoin}
GROUP = 64  # arrivals that are pushed together, those of one side after those of the other


@dataclass(frozen=True)
class Settings:
    """Times in seconds, and bytes in a second.

    A read seeks unless it goes on where the last read ended. Appended blocks are written behind, without a seek.

    The papers do not say how fast their disk is, and give the delays of arrivals as exponential with a lambda of 0.1
    without a unit. They also say that 100,000 tuples of each stream take 10 periods of 10 s: 1 ms for each.
    """

    between: float = 0.001
    seek: float = 0.005
    append: float = 0.0001
    rate: float = 50e6
    wait: float = 0.025
    max_new_arrivals: int = 1000


class Clock:
    """A clock that arrivals and disk accesses move, and where the disk's last read ended: file and offset."""

    def __init__(self):
        self.now, self.head = 0.0, None

    def __call__(self):
        return self.now


def timed_backend(clock, settings):
    """Return what creates files whose accesses take time on the clock."""

    class TimedBackend(FileBackend):
        def pwrite(self, offset, data):
            clock.now += settings.append + len(data) / settings.rate
            super().pwrite(offset, data)

        def pread_into(self, offset, buffers):
            nbytes = sum(len(buffer) for buffer in buffers)
            clock.now += nbytes / settings.rate + (settings.seek if clock.head != (self.path, offset) else 0.0)
            clock.head = self.path, offset + nbytes
            super().pread_into(offset, buffers)

    return lambda path: TimedBackend(path, "x")


@dataclass(frozen=True)
class Arrivals:
    """Tuples of two streams in order of arrival: their times, sides, numbers in their stream, and keys."""

    times: np.ndarray
    sides: np.ndarray
    ids: np.ndarray
    keys: np.ndarray


def arrivals(streams, settings, seed, *, fragments=1, delay=0.0):
    """Return the arrivals of two streams with exponential times between them.

    Parameters
    ----------
    fragments, delay
        Each stream is divided into fragments, and after each a pause follows: this share of the time of the fragment.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for side, keys in enumerate(streams):
        gaps, pauses = rng.exponential(settings.between, len(keys)), np.zeros(len(keys))
        each = -(-len(keys) // fragments)
        for start in range(each, len(keys), each):
            pauses[start] = delay * gaps[start - each : start].sum()
        parts.append((np.cumsum(gaps + pauses), np.full(len(keys), side), np.arange(len(keys)), keys))
    times, sides, ids, keys = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(times, kind="stable")
    return Arrivals(times[order], sides[order], ids[order], keys[order])


@dataclass(frozen=True)
class Online:
    """Results online, and how many tuples waited in the input buffer at the end of each reactive phase."""

    results: int
    reactive: int
    buffers: tuple


def online(name, arriving, memory, settings, *, inputs=("a", "b"), on="x", schema=SCHEMA, **options):
    """Run an operator until all tuples have arrived and return its results up to then.

    Every operator goes back to the arriving phase once more than `max_new_arrivals` tuples wait, after the unit of work
    that it has begun.
    """
    clock = Clock()
    operator = (OPERATORS | MULTIWAY)[name]
    with tempfile.TemporaryDirectory(prefix="headrace-streams-") as folder:
        backend = timed_backend(clock, settings)
        join = operator(
            dict.fromkeys(inputs, schema), on, memory=memory, spill=folder, wait=settings.wait, clock=clock,
            backend=backend, **options,
        )  # fmt: skip
        with join:
            buffers = _arrive(join, arriving, clock, settings)
            stats = join.stats
            return Online(stats.rows_out, stats.rows_reactive, tuple(buffers))


def _arrive(join, arriving, clock, settings):
    done, buffers, times = 0, [], arriving.times

    def waiting():
        return int(np.searchsorted(times, clock.now, side="right")) - done

    while done < len(times):
        if waiting() == 0:
            blocked = clock.now + settings.wait * (1 + 1e-9)  # the last arrivals were taken in just now
            if times[done] > blocked:
                clock.now = blocked
                steps = join.stats.reactive_steps
                join.idle(clock.now, waiting=lambda: waiting() > settings.max_new_arrivals).drain()
                if join.stats.reactive_steps > steps:
                    buffers.append(waiting())
            clock.now = max(clock.now, _group_end(times, done, settings))
        stop = min(done + max(waiting(), 1), done + GROUP)
        for side, name in enumerate(join.sides):
            chosen = done + np.flatnonzero(arriving.sides[done:stop] == side)
            if len(chosen):
                join.push(
                    batch(arriving.ids[chosen], arriving.keys[chosen]), side=name, at=float(times[stop - 1])
                ).drain()
        done = stop
    return buffers


def _group_end(times, start, settings):
    """Return the time of the last arrival of a group: one without a blocked time in it, or a single arrival."""
    group = times[start : start + GROUP]
    return float(group[-1] if np.diff(group).max(initial=0.0) <= settings.wait else group[0])
