"""Base classes of the operators: the handle that the user holds, and the algorithm that does the work.

`StreamJoin` checks calls; `JoinHandle` owns the work queue. `JoinAlgorithm` owns everything else: relation, memory,
buffers. Tasks in the queue refer to the algorithm, and nothing refers back to the handle or the queue. So there is no
reference cycle, and a dropped operator frees its memory at once.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace.joins.deadlines import Deadlines
from headrace.joins.dictionaries import WaitingDictionaries
from headrace.joins.emitter import Emitter, How, check_how, output_schema
from headrace.joins.errors import JoinInputError
from headrace.joins.handle import (
    JoinHandle,
    check_batch,
    check_clock,
    check_same_schema,
    check_takeable,
    check_time,
    parsed,
)
from headrace.joins.memory import MemoryBudget
from headrace.joins.predicates import Bound, On, Predicate, as_predicate
from headrace.joins.protocol import Output, Progress
from headrace.joins.relation import Relation, TableLike, open_relation
from headrace.joins.stats import Counters, JoinStats
from headrace.joins.timing import CompletionLog, OperatorTime, WaitRecord
from headrace.storage.units import parse_duration, parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from headrace.joins.deadlines import Arrivals
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["JoinAlgorithm", "JoinParameters", "StreamJoin"]


_TOO_LARGE = 2**63


@dataclass(frozen=True, slots=True)
class JoinParameters:
    """Parameters that all operators share, checked. See `headrace.joins.SSIJ` for their meaning."""

    relation: Relation
    predicate: Predicate
    how: How
    columns: list[str]
    memory: int
    deadlines: Deadlines
    clock: Callable[[], float] | None

    @classmethod
    def check(
        cls,
        table: TableLike | Snapshot,
        on: On,
        how: str,
        memory: int | str,
        *,
        columns: Sequence[str] | None,
        deadline: float | str | None,
        reader: PageReader | None,
        clock: Callable[[], float] | None,
        deadline_column: str | None = None,
    ) -> Self:
        """Return the parameters as given to an operator.

        Raises
        ------
        JoinInputError
            If a parameter cannot be used.
        SchemaError
            If the table lacks one of the columns.
        """
        relation, predicate = open_relation(table, reader), as_predicate(on)
        predicate.check(relation.snapshot.codec)
        how = check_how(how)
        layout = relation.snapshot.layout
        if columns is None:
            columns = [name for name in layout.schema.names if name not in predicate.equated]
        check_clock(clock)
        if deadline_column is not None and not isinstance(deadline_column, str):
            raise JoinInputError(f"`deadline_column` must be the name of a stream column, not {deadline_column!r}")
        default = None if deadline is None else parsed("deadline", parse_duration, deadline)
        deadlines, limit = Deadlines(default, deadline_column), parsed("memory", parse_memory, memory)
        if limit >= _TOO_LARGE:
            raise JoinInputError(f"`memory` must be below 8 EiB, not {memory!r}")
        return cls(relation, predicate, how, layout.select(columns), limit, deadlines, clock)


class JoinAlgorithm(ABC):
    """A join algorithm with everything that it holds: relation, memory budget, buffers, statistics.

    Parameters
    ----------
    parameters
        Parameters of the join.
    """

    def __init__(self, parameters: JoinParameters) -> None:
        self.relation = parameters.relation
        self.predicate = parameters.predicate
        self.how = parameters.how
        self.columns = parameters.columns
        self.deadlines = parameters.deadlines
        self.budget = MemoryBudget(parameters.memory)
        self.counters = Counters()
        self.waits = WaitRecord(self.deadlines)
        self.time = OperatorTime(parameters.clock)
        self.progress = Progress(parameters.clock or time.monotonic)
        self.completed = CompletionLog(self.counters, self.waits, self.time).note
        self._bound: Bound | None = None
        self._emitter: Emitter | None = None
        self._stream: pa.Schema | None = None
        self._latest = -math.inf
        self._dictionaries = WaitingDictionaries()

    # Calls of the operator

    def push(self, batch: pa.RecordBatch, at: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of joining a batch that arrived at `at`."""
        self._latest = max(self._latest, float(self.time.reach(at)))
        self._bind(batch.schema)
        arrivals = self.deadlines.stamp(batch, self._latest)
        self.counters.batches_in += 1
        self.counters.rows_in += len(batch)
        return self.counted(self._apart(batch, self._consume(batch, arrivals)))

    def tick(self, now: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of doing what is due at `now`."""
        self.time.reach(now)
        return self.counted(self._due_work())

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Return the task of completing all tuples that are held."""
        return self.counted(self._drain())

    def _apart(self, batch: pa.RecordBatch, task: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do the task of joining a batch; if Arrow cannot put its rows beside those that wait, complete these first."""
        if not self._dictionaries.admit(batch, self._waiting):
            yield from self._drain()
        yield from task

    def counted(self, results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the results of a task and count them."""
        for batch in results:
            self.counters.batches_out += 1
            self.counters.rows_out += len(batch)
            self.budget.settle()
            yield batch

    def output_schema(self, stream: pa.Schema) -> pa.Schema:
        """Return the schema of the results for a stream of this schema."""
        return output_schema(stream, self.relation.snapshot.schema, self.columns, self.how)

    @property
    def due(self) -> float | None:
        """Latest time for the next call of `tick`; None if nothing waits for it."""
        return None

    def close(self) -> None:  # noqa: B027 - most algorithms hold nothing but memory
        """Stop threads and free what is not memory."""

    # Steps of the algorithm

    @property
    @abstractmethod
    def stats(self) -> JoinStats:
        """Statistics so far."""

    @abstractmethod
    def _consume(self, batch: pa.RecordBatch, arrival: Arrivals) -> Iterator[pa.RecordBatch]:
        """Take a batch in."""

    @abstractmethod
    def _drain(self) -> Iterator[pa.RecordBatch]:
        """Complete all tuples that are held."""

    @abstractmethod
    def _rebound(self) -> None:
        """Adapt to the stream's schema or to another snapshot."""

    @abstractmethod
    def _output_nbytes(self) -> int:
        """Return the largest size of a result batch in bytes."""

    def _due_work(self) -> Iterator[pa.RecordBatch]:
        """Do what is due."""
        return iter(())

    def _waiting(self) -> Sequence[pa.RecordBatch]:
        """Return the batches whose rows may be put together with those of the next batch."""
        return ()

    # State

    @property
    def snapshot(self) -> Snapshot:
        """Current snapshot of the relation."""
        return self.relation.snapshot

    @property
    def bound(self) -> Bound:
        """Bound predicate. Available once the stream's schema is known."""
        assert self._bound is not None
        return self._bound

    @property
    def emitter(self) -> Emitter:
        """Emitter of result batches. Available once the stream's schema is known."""
        assert self._emitter is not None
        return self._emitter

    def _bind(self, stream: pa.Schema) -> None:
        if self._stream is None:
            check_takeable(stream)
            self.deadlines.check(stream)
            self._bound = self.predicate.bind(self.relation.snapshot.codec, stream)
            self._stream = stream
            self._rebind()
        else:
            check_same_schema(stream, self._stream)

    def _rebind(self) -> None:
        """Build what depends on both the stream's schema and the snapshot."""
        if self._stream is None:
            return
        schema = self.output_schema(self._stream)
        self._emitter = Emitter(self.snapshot, self.columns, schema, self._output_nbytes())
        self._rebound()

    def _base_stats(self) -> dict[str, Any]:
        """Return the values of the fields of `JoinStats`."""
        counters = self.counters
        return {
            "rows_in": counters.rows_in,
            "batches_in": counters.batches_in,
            "rows_done": counters.rows_done,
            "rows_out": counters.rows_out,
            "batches_out": counters.batches_out,
            "rows_cached": counters.rows_cached,
            "pages_wanted": counters.pages_wanted,
            "pages_read": counters.pages_read,
            "seeks": counters.seeks,
            "read_seconds": counters.read_seconds,
            "busy_seconds": self.progress.busy_seconds,
            "rows_held": counters.rows_in - counters.rows_done,
            "longest_wait": self.waits.longest,
            "deadline_misses": self.waits.misses,
            "memory": self.budget.use(),
        }


StreamAlgorithmT = TypeVar("StreamAlgorithmT", bound=JoinAlgorithm)


class StreamJoin(JoinHandle[StreamAlgorithmT]):
    """Base of the operators. See `headrace.joins.Operator` for the calls and each operator for its parameters.

    Parameters
    ----------
    algorithm
        Algorithm that does the work.
    """

    def push(self, batch: pa.RecordBatch, *, side: str = "stream", at: float | None = None) -> Output:
        """Take a batch of the stream and return the results that are ready.

        Parameters
        ----------
        batch
            Stream tuples. All batches have the same schema.
        side
            ``"stream"``. The relation does not arrive in batches.
        at
            Time of arrival in seconds of the operator's clock; by default now. Push batches in order of arrival.

        Raises
        ------
        StreamSchemaError
            If `batch` is not a record batch, lacks the join column, differs in schema from earlier batches, or has a
            column that Arrow cannot take rows from or put together exactly.
        KeyInputError
            If the join column has a type that can never equal the key's.
        JoinInputError
            If the side or the time is not valid.
        FinishedError
            After `finish`.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        if side != "stream":
            raise JoinInputError(f"this join has one streaming side, 'stream', not {side!r}")
        check_batch(batch)
        check_time(at)
        return self._work.start(algorithm.push(batch, at))

    def flush(self) -> Output:
        """Return the results of everything pushed so far. The operator stays open for more."""
        return self._work.start(self._open().drain())

    def output_schema(self, stream: pa.Schema) -> pa.Schema:
        """Return the schema of the results for a stream of this schema."""
        return self.algorithm.output_schema(stream)

    @property
    def due(self) -> float | None:
        """Latest time for the next call of `tick` to meet the deadlines; None if nothing waits for one."""
        return None if self._algorithm is None else self._algorithm.due

    @property
    def deadline(self) -> float | None:
        """Seconds that a tuple may wait that states no deadline itself; None for no limit."""
        return self.algorithm.deadlines.default
