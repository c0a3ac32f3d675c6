"""Arrivals, the simulated clock, the memory, and one run of an operator up to the end of its online phase."""

import functools
import tempfile
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from benchmarks.streams._data import SCHEMA, batch
from headrace.joins.streams import DINER, MINER, RPJ, HashMerge, MJoin, PRJoin, ProgressiveMerge, XJoin
from headrace.joins.streams.base.operator import StreamsJoin, StreamsParameters
from headrace.joins.streams.hashing.rpj import RPJAlgorithm
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.file import FileBackend

GROUP = 64  # arrivals that are pushed together, those of one input after those of the other
LIFETIME = "RPJ, all arrivals count"
FAN_IN, PARTITIONS = 10, 16  # the papers' F and n_part, RPJ's defaults
APART = 1_000_000  # keys that no band connects
EACH_NBYTES, FIXED_NBYTES = 280, 50_000  # first guess of what tuples take


@dataclass(frozen=True)
class Settings:
    """Times in seconds, and bytes per second.

    A read seeks unless it starts where the last read ended, or where one began that was not longer, as the read of a
    block does whose header was read before. Appended blocks are written behind, without a seek.

    The papers do not state the speed of their disk. They draw the delays between arrivals from an exponential
    distribution with a lambda of 0.1, without a unit, and send 100,000 tuples of each stream in 10 periods of 10 s,
    which is 1 ms per tuple.
    """

    between: float = 0.001
    seek: float = 0.005
    append: float = 0.0001
    rate: float = 50e6
    wait: float = 0.025
    max_new_arrivals: int = 1000


@dataclass(frozen=True)
class Scale:
    """Size of the streams, as a part of that in a full run."""

    part: int = 1

    def of(self, tuples):
        """Return the scaled number of tuples."""
        return tuples // self.part


FULL, QUICK = Scale(), Scale(10)


class _LifetimeAlgorithm(RPJAlgorithm):
    """RPJ whose probabilities count all arrivals since the start, and do not age."""

    def _kept(self, side, partition):
        counted = self.recent.copy()
        super()._kept(side, partition)
        self.recent = counted
        self.recent[side] += np.bincount(partition, minlength=self.partitions)


class LifetimeRPJ(StreamsJoin):
    """RPJ that estimates probabilities of arrival from all arrivals since the start."""

    def __init__(self, inputs, on, **options):
        parameters = StreamsParameters.check(inputs, on, "inner", **options)
        super().__init__(_LifetimeAlgorithm(parameters, PARTITIONS, FAN_IN))


OPERATORS = {"DINER": DINER, "RPJ": RPJ, "HMJ": HashMerge}
MULTIWAY = {"MINER": MINER, "MJoin": MJoin}
OTHERS = {"PMJ": ProgressiveMerge, LIFETIME: LifetimeRPJ, "PR-Join": PRJoin, "XJoin": XJoin}
KNOWN = OPERATORS | MULTIWAY | OTHERS


@dataclass(frozen=True)
class Query:
    """Inputs of a join, and its conditions.

    Attributes
    ----------
    inputs
        Names of the inputs.
    on
        Conditions, as an operator takes them; a tuple.
    schema
        Schema of each input.
    """

    inputs: tuple = ("a", "b")
    on: tuple = (("a.x", "b.x"),)
    schema: pa.Schema = SCHEMA

    def __hash__(self):
        return hash((self.inputs, repr(self.on)))

    def make(self, name, memory, folder, **options):
        """Return a new operator."""
        inputs = dict.fromkeys(self.inputs, self.schema)
        return KNOWN[name](inputs, list(self.on), memory=memory, spill=folder, **options)


PAIR = Query()


class Counted:
    """Result builder that counts rows and does not build them, since results cost no time on the simulated clock.

    Parameters
    ----------
    builder
        Result builder that it replaces.
    clock
        Clock to look at.

    Attributes
    ----------
    trace
        Time and number of rows of each batch.
    """

    def __init__(self, builder, clock):
        self.most_rows, self.nbytes = builder.most_rows, builder.nbytes
        self.trace, self._clock = [], clock
        self._column = pa.nulls(self.most_rows)

    def batches(self, sources):
        """Yield batches of one empty column, with as many rows as the results have."""
        rows = len(sources[0][1])
        for start in range(0, rows, self.most_rows):
            column = self._column.slice(0, min(self.most_rows, rows - start))
            self.trace.append((self._clock(), len(column)))
            yield pa.RecordBatch.from_arrays([column], names=["nothing"])


class Clock:
    """A clock that arrivals and disk accesses move, and the disk's last read: file, start and end."""

    def __init__(self):
        self.now, self.last_read = 0.0, (None, 0, 0)

    def __call__(self):
        return self.now


def timed_backend(clock, settings):
    """Return what creates files whose accesses take time on the clock."""

    class TimedBackend(FileBackend):
        def pwrite(self, offset, data):
            clock.now += settings.append + len(data) / settings.rate
            super().pwrite(offset, data)

        def pread_into(self, offset, buffers):
            nbytes, (path, start, end) = sum(len(buffer) for buffer in buffers), clock.last_read
            near = path == self.path and (offset == end or (offset == start and nbytes >= end - start))
            clock.now += nbytes / settings.rate + (0.0 if near else settings.seek)
            clock.last_read = self.path, offset, offset + nbytes
            super().pread_into(offset, buffers)

    return lambda path: TimedBackend(path, "x", direct=False)  # its time is simulated


def memory_for(name, tuples, query=PAIR):
    """Return the least memory with which an operator holds so many tuples, to 1 % of them.

    Measured with keys that are all different. The papers' memory holds tuples and small indexes; the buffers, lists and
    statistics of these operators take memory that does not shrink with the data.
    """
    return _memory_for(name, tuples, query)


@functools.cache
def _memory_for(name, tuples, query):
    low, high, guess = 0, None, EACH_NBYTES * tuples + FIXED_NBYTES
    while high is None or high - low > max(2 * tuples, 1024):  # 1 % of 200 B per tuple
        held = _held(name, guess, tuples, query)
        if tuples <= held <= 1.01 * tuples:
            return guess
        low, high = (low, guess) if held >= tuples else (guess, high)
        guess += int((1.005 * tuples - held) * EACH_NBYTES)
        if high is not None and not low < guess < high:
            guess = (low + high) // 2
    return high


def _held(name, memory, tuples, query):
    """Return how many tuples an operator holds at most, of a few more than it should hold; 0 if it refuses them."""
    most, each = 0, GROUP * 4
    with tempfile.TemporaryDirectory(prefix="headrace-streams-") as folder:
        try:
            with query.make(name, memory, folder, clock=Clock()) as join:
                for start in range(0, tuples + tuples // 4 + each * len(query.inputs), each):
                    ids = np.arange(start, start + each)
                    keys = APART * (ids if query.schema is SCHEMA else np.column_stack([ids, ids]))
                    side = query.inputs[start // each % len(query.inputs)]
                    join.push(batch(ids, keys), side=side).drain()
                    most = max(most, join.stats.rows_in_memory)
        except MemoryBudgetError:
            return 0
    return most


@dataclass(frozen=True)
class Arrivals:
    """Tuples of all streams in order of arrival: their times, inputs, numbers in their stream, and keys."""

    times: np.ndarray
    sides: np.ndarray
    ids: np.ndarray
    keys: np.ndarray


def arrivals(streams, settings, seed, *, fragments=1, delay=0.0):
    """Return the arrivals of streams with exponential times between them.

    Parameters
    ----------
    streams
        Keys of each stream.
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
    """Results online, tuples in memory on average after each arrival, and those that waited after reactive phases.

    Attributes
    ----------
    results, reactive
        Results of the arriving and reactive phases, and of the reactive phases alone.
    buffers
        Tuples in the input buffer at the end of each reactive phase.
    held
        Tuples in memory on average, from the first flush on.
    trace
        Times of results, and how many there were at each.
    """

    results: int
    reactive: int
    buffers: tuple
    held: int
    trace: tuple = ()

    def until(self, time):
        """Return the results that there were at a time."""
        return sum(rows for at, rows in self.trace if at <= time)


def online(name, arriving, memory, settings, query=PAIR, **options):
    """Run an operator until all tuples have arrived and return its results up to then.

    Every operator returns to the arriving phase once more than `max_new_arrivals` tuples wait, after the unit of work
    that it has begun.
    """
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="headrace-streams-") as folder:
        backend = timed_backend(clock, settings)
        waiting = {} if name == "PMJ" else {"wait": settings.wait}  # PMJ does not notice that inputs are blocked
        with query.make(name, memory, folder, clock=clock, backend=backend, **waiting, **options) as join:
            join.algorithm.results = Counted(join.algorithm.results, clock)
            trace = join.algorithm.results.trace
            buffers, held = _arrive(join, arriving, clock, settings)
            stats = join.stats
            return Online(stats.rows_out, stats.rows_reactive, tuple(buffers), held, tuple(trace))


def _arrive(join, arriving, clock, settings):
    done, buffers, held, times = 0, [], [], arriving.times

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
                if join.algorithm.counters.rows_spilled:
                    held.append(join.algorithm.rows_in_memory)
        done = stop
    return buffers, round(float(np.mean(held))) if held else 0


def _group_end(times, start, settings):
    """Return the time of the last arrival of a group: one without a blocked time in it, or a single arrival."""
    group = times[start : start + GROUP]
    return float(group[-1] if np.diff(group).max(initial=0.0) <= settings.wait else group[0])
