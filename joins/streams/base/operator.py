"""Base classes of joins of streams with streams: the handle that the user holds, and the algorithm.

`StreamsJoin` has the calls, `StreamsAlgorithm` what all algorithms share: inputs, conditions, memory budget, stamps,
clock, phases, spill files, results. See `headrace.joins.streams` for how to derive an operator.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import numpy as np

from headrace.joins.errors import FinishedError, JoinInputError, StreamSchemaError
from headrace.joins.handle import (
    JoinHandle,
    check_batch,
    check_clock,
    check_function,
    check_seconds,
    check_time,
    columns_of,
    parsed,
)
from headrace.joins.memory import MemoryBudget
from headrace.joins.protocol import Output, Progress
from headrace.joins.streams.base.stats import PhaseCounters, StreamsStats
from headrace.joins.streams.tuples._row_kernels import number_records, set_flags
from headrace.joins.streams.tuples.conditions import Conditions, JoinGraph
from headrace.joins.streams.tuples.layout import MATCHED, RowLayout
from headrace.joins.streams.tuples.results import ResultBuilder, result_schema
from headrace.joins.streams.tuples.rows import Rows, RowsEncoder
from headrace.joins.timing import OperatorTime
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.spill import SpillFile, SpillFolder
from headrace.storage.units import format_size, parse_duration, parse_memory

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.pairs import Pairing
    from headrace.joins.streams.tuples.store import TupleStore
    from headrace.storage.file import StorageBackend

__all__ = [
    "HOWS",
    "How",
    "Phase",
    "StreamsAlgorithm",
    "StreamsJoin",
    "StreamsParameters",
    "check_idle",
    "partition_bits",
]

How = Literal["inner", "left", "right", "full"]
HOWS: tuple[How, ...] = ("inner", "left", "right", "full")
"""All join types."""
Phase = Literal["arriving", "reactive", "cleanup"]

WAIT_THRESHOLD = 0.025
"""Seconds without an arrival after which inputs are blocked (the paper's WaitThresh)."""

_TWO = 2
_MOST_BITS = 6  # each partition of each input has a file
_MOST_WORKSPACE = 16 << 20
_LEAST_WORKSPACE = 16 << 10
_SHARE = 8
_SLOT_NBYTES = 64  # of a slot in all lists while its tuple is removed


@dataclass(frozen=True, slots=True)
class StreamsParameters:
    """Parameters that all joins of streams share, checked.

    Attributes
    ----------
    graph
        Inputs and conditions.
    how
        Join type: which inputs' tuples without a match are results too, with nulls.
    memory
        Limit in bytes (the paper's MemThresh).
    wait
        Seconds without an arrival after which inputs are blocked (the paper's WaitThresh).
    spill
        Parent of the folder for spill files; None if the operator may not spill.
    backend
        Creates the storage backend of a spill file; None for files on disk.
    clock
        Returns the time in seconds; None for the system's.
    """

    graph: JoinGraph
    how: How
    memory: int
    wait: float
    spill: str | os.PathLike[str] | None
    backend: Callable[[Path], StorageBackend] | None
    clock: Callable[[], float] | None

    @classmethod
    def check(
        cls,
        inputs: Mapping[str, pa.Schema],
        on: Conditions,
        how: str,
        memory: int | str,
        *,
        hows: Sequence[How] = ("inner",),
        wait: float | str = WAIT_THRESHOLD,
        spill: str | os.PathLike[str] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> Self:
        """Return the parameters as given to an operator.

        Parameters
        ----------
        hows
            Join types that the operator supports.

        Raises
        ------
        JoinInputError
            If a parameter cannot be used.
        StreamSchemaError
            If an input lacks a column, or has it twice.
        KeyInputError
            If two columns of a condition have types that never match.
        """
        graph = JoinGraph(inputs, on)
        allowed = [choice for choice in hows if choice == "inner" or len(graph.names) == _TWO]
        chosen = next((choice for choice in allowed if isinstance(how, str) and choice == how), None)
        if chosen is None:
            others = "; SymmetricHash, XJoin and DoublePipelinedHash make outer joins, of two inputs"
            raise JoinInputError(
                f"`how` must be {' or '.join(map(repr, allowed))} for this join of {len(graph.names)} inputs, not "
                f"{how!r}{others if isinstance(how, str) and how in HOWS else ''}"
            )
        check_clock(clock)
        if backend is not None:
            check_function("backend", backend)
        limit, longest = parsed("memory", parse_memory, memory), parsed("wait", parse_duration, wait)
        return cls(graph, chosen, limit, longest, spill, backend, clock)


def partition_bits(partitions: object) -> int:
    """Return how many bits of a hash name a partition.

    Raises
    ------
    JoinInputError
        If the number of partitions is not a power of 2 from 2 to 64.
    """
    for bits in range(1, _MOST_BITS + 1):
        if isinstance(partitions, int) and partitions == 1 << bits:
            return bits
    raise JoinInputError(f"`partitions` must be a power of 2 from 2 to {1 << _MOST_BITS}, not {partitions!r}")


class StreamsAlgorithm(ABC):
    """A join of streams with everything that it holds: memory budget, tuples, spill files, statistics.

    Subclasses implement `_arrive` and `_cleanup`, and if they have such phases `_react` and `_ended`.

    Parameters
    ----------
    parameters
        Parameters of the join.

    Attributes
    ----------
    graph
        Inputs and conditions.
    layouts, encoders
        For each input, the layout of its tuples, and what makes them.
    budget
        Memory budget. The workspace, an eighth of it, is charged once: for one arriving slice and one result batch.
    counters
        Running counts.
    ended
        For each input, whether all of it has arrived.
    stores
        For each input, the tuples in memory; set by the algorithms that keep them so.
    """

    def __init__(self, parameters: StreamsParameters) -> None:
        self.graph = parameters.graph
        self.how = parameters.how
        self.wait = parameters.wait
        self.budget = MemoryBudget(parameters.memory)
        self.counters = PhaseCounters()
        self.time = OperatorTime(parameters.clock)
        self.progress = Progress(parameters.clock or time.monotonic)
        self.layouts = [
            RowLayout.of(schema, [key.wide for key in keys], name)
            for name, schema, keys in zip(self.graph.names, self.graph.schemas, self.graph.keys, strict=True)
        ]
        self.encoders = [RowsEncoder(layout, keys) for layout, keys in zip(self.layouts, self.graph.keys, strict=True)]
        self.ended = [False] * len(self.graph.names)
        self.stores: list[TupleStore] = []
        self._said_ended = list(self.ended)  # before the tasks of earlier calls have run
        self._spill_parent = parameters.spill
        self._spill_backend = parameters.backend
        self._spill: SpillFolder | None = None
        self._files: dict[tuple[int, int], SpillFile] = {}
        self._next_stamp = 0
        self._latest = -math.inf
        self._phase: Phase = "arriving"
        self._workspace = max(min(parameters.memory // _SHARE, _MOST_WORKSPACE), _LEAST_WORKSPACE)
        self.budget.charge("workspace", self._workspace)
        self._slices = 1  # arriving slices of more than one tuple that share the workspace
        self._scratch = np.empty(0, dtype=np.uint8)  # a part of the workspace
        self.schema = result_schema(self.graph.names, self.graph.schemas, [self.optional(s) for s in self.sides])
        self.results = ResultBuilder(self.schema, self.layouts, self._workspace // 2)

    # Calls of the operator

    def push(self, batch: pa.RecordBatch, side: int, at: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of joining a batch that arrived at `at`."""
        name, schema = self.graph.names[side], self.graph.schemas[side]
        if self._said_ended[side]:
            raise FinishedError(f"input {name!r} has ended; push to it before `end`, or make a new operator")
        if not batch.schema.equals(schema):
            raise StreamSchemaError(
                f"batches of {name!r} must have the schema that the join was made with, {columns_of(schema)}; this one "
                f"has {columns_of(batch.schema)}"
            )
        self._latest = max(self._latest, self.time.reach(at))
        self.counters.batches_in += 1
        self.counters.rows_in += len(batch)
        return self.counted(self._take_in(batch, side), "arriving")

    def end(self, side: int, at: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of noting that all of an input has arrived."""
        self.time.reach(at)
        if self._said_ended[side]:
            raise FinishedError(f"input {self.graph.names[side]!r} has ended before")
        self._said_ended[side] = True
        return self.counted(self._end(side), "arriving")

    def tick(self, now: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of one step of reactive work, if all inputs are blocked at `now`."""
        return self.counted(self._one_step(self.time.reach(now)), "reactive")

    def idle(self, now: float | None, until: float, waiting: Callable[[], bool] | None) -> Iterator[pa.RecordBatch]:
        """Return the task of reactive work up to a time, or until tuples wait."""
        return self.counted(self._steps(self.time.reach(now), until, waiting), "reactive")

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Return the task of everything that is left when all inputs have arrived."""
        return self.counted(self._finish(), "cleanup")

    def counted(self, results: Iterator[pa.RecordBatch], phase: Phase) -> Iterator[pa.RecordBatch]:
        """Yield the results of a task and count them."""
        for batch in results:
            counters, rows = self.counters, len(batch)
            counters.batches_out += 1
            counters.rows_out += rows
            counters.rows_arriving += rows if phase == "arriving" else 0
            counters.rows_reactive += rows if phase == "reactive" else 0
            counters.rows_cleanup += rows if phase == "cleanup" else 0
            self.budget.settle()
            yield batch

    def close(self) -> None:
        """Remove the spill files."""
        if self._spill is not None:
            self._spill.close()

    # Steps of the algorithm

    @abstractmethod
    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Join tuples that arrived with those of the other inputs, and keep them. All of them have all keys.

        Other tuples take their memory afterwards, so keep copies, as stores do.
        If tuples are flushed meanwhile, see `stamp_arrivals`.
        """

    @abstractmethod
    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining results. All inputs have arrived."""

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        """Return the smallest unit of reactive work, or None if there is none to do now."""
        return None

    def _ended(self, side: int) -> Iterator[pa.RecordBatch]:
        """Take note that all of an input has arrived."""
        del side
        return iter(())

    @property
    def rows_in_memory(self) -> int:
        """Number of tuples in memory: those in `stores`, unless an algorithm keeps them elsewhere."""
        return sum(map(len, self.stores))

    # What algorithms use

    @property
    def sides(self) -> range:
        """Positions of the inputs."""
        return range(len(self.graph.names))

    def optional(self, side: int) -> bool:
        """Whether a result may lack a tuple of this input."""
        return self.how == "full" or (self.how == "left" and side == 1) or (self.how == "right" and side == 0)

    def preserved(self, side: int) -> bool:
        """Whether tuples of this input without a match are results."""
        return self.how == "full" or (self.how == "left" and side == 0) or (self.how == "right" and side == 1)

    def has_ended(self, side: int) -> bool:
        """Whether the end of an input was announced, though tasks of earlier calls may be left."""
        return self._said_ended[side]

    def require(self, nbytes: int, purpose: str) -> None:
        """Refuse a memory that leaves less than `nbytes`. Call it when everything that is held always was charged.

        Parameters
        ----------
        nbytes
            Bytes that must be left.
        purpose
            What they are for, for the message.

        Raises
        ------
        MemoryBudgetError
            The message says which memory is enough.
        """
        if self.budget.available < nbytes:
            used, share = self.budget.limit - self.budget.available, 1
            if self._workspace == self.budget.limit // _SHARE:  # it grows with the memory
                used, share = used - self._workspace, _SHARE
            least = used + nbytes if share == 1 else -(-(used + nbytes) * share // (share - 1)) + share
            raise MemoryBudgetError.of(
                f"a memory of {format_size(self.budget.limit)} leaves less than {format_size(nbytes)} for {purpose}",
                least,
            )

    def next_stamp(self) -> int:
        """Return a stamp that is greater than all before it. Arrival and departure stamps are of one sequence."""
        self._next_stamp += 1
        return self._next_stamp - 1

    def stamp_arrivals(self, rows: Rows, start: int = 0) -> None:
        """Give the tuples from position `start` on arrival stamps that are greater than all stamps so far.

        The base does so before `_arrive`. After a flush within `_arrive`, the tuples that are not in memory yet must be
        stamped again. Otherwise they would seem to have been in memory together with the tuples that left before them.
        """
        layout = rows.layout
        number_records(rows.records, layout.stride, layout.arrival, start, len(rows), self._next_stamp)
        self._next_stamp += len(rows) - start

    def require_two_inputs(self, name: str) -> None:
        """Refuse more inputs than two, for the operator of this name."""
        if len(self.sides) != _TWO:
            raise JoinInputError(f"{name} has two inputs, not {len(self.sides)}; use MJoin or MINER")

    def no_room(self, side: int) -> MemoryBudgetError:
        """Return the error for a tuple of an input that an empty memory does not take."""
        return MemoryBudgetError.of(
            f"a tuple of {self.graph.names[side]!r} does not fit into what a memory of "
            f"{format_size(self.budget.limit)} leaves for tuples"
        )

    def join_in_memory(
        self, pairing: Pairing, side: int, rows: Rows, index: NDArray[np.int64]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the results of arriving tuples, those at `index`, with the other of two inputs in memory."""
        other = self.stores[1 - side]
        for positions, slots in pairing.find(other, side, rows, index, self.pair_limit):
            sources = [(rows, positions), (other.rows, slots)]
            if self.how != "inner":
                for source, at in sources:
                    set_flags(source.records, source.layout.stride, source.layout.flags, MATCHED, at)
            yield from self.results.batches(sources if side == 0 else sources[::-1])

    def spill_file(self, side: int, partition: int = 0) -> SpillFile:
        """Return a spill file of an input (the paper's Disk), created on first use.

        Parameters
        ----------
        side
            Input.
        partition
            Number of the file, for operators that keep several.

        Raises
        ------
        MemoryBudgetError
            If the operator was made without a folder for spill files.
        StorageIOError
            If the folder or the file cannot be created.
        """
        place = side, partition
        if place not in self._files:
            self._files[place] = self.spill_folder().file(f"{self.graph.names[side]}-{partition}")
        return self._files[place]

    def drop_spill_file(self, side: int, partition: int = 0) -> None:
        """Remove a spill file whose blocks are not needed any more. Its number may be used again."""
        file = self._files.pop((side, partition), None)
        if file is not None:
            self.spill_folder().remove(file)

    def spill_folder(self) -> SpillFolder:
        """Return the folder of the spill files, created on first use; see `spill_file`."""
        if self._spill_parent is None:
            raise MemoryBudgetError.of(
                f"the tuples exceed the memory of {format_size(self.budget.limit)} and the join has no folder for "
                "spill files",
                otherwise="`spill=` a folder",
            )
        if self._spill is None:
            self._spill = SpillFolder(self._spill_parent, self._spill_backend)
        return self._spill

    def unmatched(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Yield tuples without a match as results with nulls."""
        nothing = np.full(len(index), -1, dtype=np.int64)
        none = Rows(self.layouts[1 - side], 0, np.zeros(8, dtype=np.uint8), np.zeros(0, dtype=np.uint8))
        sources = [(rows, index), (none, nothing)]
        yield from self.results.batches(sources if side == 0 else sources[::-1])

    def alone(self, side: int, store: TupleStore) -> Iterator[pa.RecordBatch]:
        """Yield the tuples of a store that have not been part of a result as results with nulls."""
        for start in range(0, len(store), self.pair_limit):
            rows = store.rows
            index = np.flatnonzero((rows.flags[start : start + self.pair_limit] & MATCHED) == 0) + start
            yield from self.unmatched(side, rows, index)

    @property
    def slots_limit(self) -> int:
        """Most tuples to remove from a store at once, so that the lists of their slots fit into the workspace."""
        return max(64, self._workspace // 2 // _SLOT_NBYTES)

    @property
    def pair_limit(self) -> int:
        """Most pairs that a probe should return at once."""
        return self.results.most_rows

    @property
    def stats(self) -> StreamsStats:
        """Statistics so far."""
        counters = self.counters
        values: dict[str, Any] = {name: getattr(counters, name) for name in counters.__slots__}
        if self._spill is not None:
            spilled = self._spill.stats
            values |= {
                "blocks_spilled": spilled.blocks_written,
                "blocks_read": spilled.blocks_read,
                "bytes_spilled": spilled.bytes_written,
                "bytes_read": spilled.bytes_read,
            }
        return StreamsStats(
            **values,
            rows_in_memory=self.rows_in_memory,
            busy_seconds=self.progress.busy_seconds,
            memory=self.budget.use(),
        )

    # Phases

    def _take_in(self, batch: pa.RecordBatch, side: int) -> Iterator[pa.RecordBatch]:
        start = 0
        while start < len(batch):
            part = self._slice(batch, start, side)
            start += len(part)
            rows, valid = self.encoders[side].encode(part, self._scratch_for(side, len(part)))
            if valid is not None and not valid.all():
                yield from self._drop_keyless(side, rows, np.flatnonzero(~valid))
                rows = rows.take(np.flatnonzero(valid))
            self.counters.rows_done += len(part)
            if len(rows):
                self.stamp_arrivals(rows)
                yield from self._arrive(side, rows)

    def _scratch_for(self, side: int, rows: int) -> NDArray[np.uint8]:
        """Return memory for the records of an arriving slice, the same again and again: new pages take much time."""
        nbytes = self.encoders[side].records_nbytes(rows)
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(nbytes, dtype=np.uint8)
        return self._scratch

    def _drop_keyless(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        self.counters.rows_dropped += len(index)
        if self.preserved(side):
            yield from self.unmatched(side, rows, index)

    def _slice(self, batch: pa.RecordBatch, start: int, side: int) -> pa.RecordBatch:
        """Return the rows from `start` on that fit into the workspace together."""
        room, rows = self._workspace // 2, len(batch) - start
        while rows > 1 and self.encoders[side].nbytes(batch.slice(start, rows)) > room // self._slices:
            rows = (rows + 1) // 2
        part = batch.slice(start, rows)
        needed, most = self.encoders[side].nbytes(part), _MOST_WORKSPACE // 2
        if needed > most:
            raise MemoryBudgetError(
                f"a tuple of {self.graph.names[side]!r} needs {format_size(needed)} while it is taken in, more than "
                f"the {format_size(most)} that a join of streams takes, however much memory it has; leave its largest "
                "column out, and add it to the results by their key"
            )
        if needed > room:
            raise MemoryBudgetError.of(
                f"a tuple of {self.graph.names[side]!r} needs {format_size(needed)} while it is taken in, more than "
                f"the {format_size(room)} that a memory of {format_size(self.budget.limit)} leaves for it",
                2 * _SHARE * needed,
            )
        return part

    def _steps(self, now: float, until: float, waiting: Callable[[], bool] | None) -> Iterator[pa.RecordBatch]:
        while self.time.now() < until:
            before = self.counters.reactive_steps
            yield from self._one_step(now)
            if self.counters.reactive_steps == before or (waiting is not None and waiting()):
                return

    def _one_step(self, now: float) -> Iterator[pa.RecordBatch]:
        """Do one step of reactive work, if there is any and all inputs are blocked at `now`."""
        if all(self._said_ended) or now - self._latest < self.wait:
            return
        step = self._react()
        if step is not None:
            self.counters.reactive_steps += 1
            yield from step

    def _end(self, side: int) -> Iterator[pa.RecordBatch]:
        self.ended[side] = True
        yield from self._ended(side)

    def _finish(self) -> Iterator[pa.RecordBatch]:
        for side in self.sides:
            if not self.ended[side]:
                yield from self._end(side)
        self._scratch = np.empty(0, dtype=np.uint8)
        yield from self._cleanup()


def check_idle(now: object, until: object, **functions: object) -> None:
    """Refuse arguments of `idle` that are not times, or not functions where they are given."""
    check_time(now)
    check_seconds("until", until, -math.inf)
    for name, function in functions.items():
        if function is not None:
            check_function(name, function)


AlgorithmT = TypeVar("AlgorithmT", bound=StreamsAlgorithm)


class StreamsJoin(JoinHandle[AlgorithmT], Generic[AlgorithmT]):
    """Base of the joins of streams with streams. See each operator for its parameters.

    The sum of all outputs, once the output of `finish` has been consumed, is the relational join as a multiset of rows.
    No result is given twice or taken back.

    Parameters
    ----------
    algorithm
        Algorithm that does the work.
    """

    def push(self, batch: pa.RecordBatch, *, side: str, at: float | None = None) -> Output:
        """Take a batch of an input and return the results that are ready.

        Parameters
        ----------
        batch
            Tuples, in the schema of the input. Tuples that wait until the output is consumed belong to the caller, not
            to the operator's memory.
        side
            Name of the input.
        at
            Time of arrival in seconds of the operator's clock; by default now. Push batches in order of arrival.

        Raises
        ------
        StreamSchemaError
            If `batch` is not a record batch of the input's schema.
        JoinInputError
            If the side or the time is not valid.
        FinishedError
            After `finish`, or after `end` of this input.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        position = algorithm.graph.side(side)
        check_batch(batch)
        check_time(at)
        return self._work.start(algorithm.push(batch, position, at))

    def end(self, side: str, *, at: float | None = None) -> Output:
        """Note that all of an input has arrived; return the results that are ready because of that.

        Parameters
        ----------
        side
            Name of the input.
        at
            Time in seconds of the operator's clock; by default now.

        Raises
        ------
        JoinInputError
            If the side or the time is not valid.
        FinishedError
            After `finish`, or after `end` of this input.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        position = algorithm.graph.side(side)
        check_time(at)
        return self._work.start(algorithm.end(position, at))

    def idle(
        self, now: float | None = None, *, until: float = math.inf, waiting: Callable[[], bool] | None = None
    ) -> Output:
        """Work while no input delivers tuples, if that is so for longer than the operator waits.

        `tick` does one step of such work, this does many.

        Parameters
        ----------
        now
            Time in seconds of the operator's clock; by default the clock's.
        until
            Time after which no step begins. Steps take time on the clock that the operator was made with.
        waiting
            Returns whether so many tuples wait that no further step should begin; asked after each step.

        Raises
        ------
        JoinInputError
            If a time or `waiting` is not valid.
        FinishedError
            After `finish`.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        check_idle(now, until, waiting=waiting)
        return self._work.start(algorithm.idle(now, until, waiting))

    @property
    def schema(self) -> pa.Schema:
        """Schema of the results."""
        return self.algorithm.schema

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(self.algorithm.graph.names)

    @property
    def stats(self) -> StreamsStats:
        """Statistics so far. They stay readable after `close`."""
        stats = super().stats
        assert isinstance(stats, StreamsStats)
        return stats
