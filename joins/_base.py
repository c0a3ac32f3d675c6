"""What all operators share: the protocol's calls, binding to the stream, the queue of work, the counters."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from numbers import Real
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.joins._counters import Counters
from headrace.joins._emit import Emitter, check_how, output_schema
from headrace.joins._relation import TableLike, open_relation
from headrace.joins._waits import OperatorTime, WaitRecord
from headrace.joins.errors import FinishedError, JoinInputError, StreamSchemaError
from headrace.joins.memory import MemoryBudget
from headrace.joins.predicates import Bound, On, as_predicate
from headrace.joins.protocol import Output, Work
from headrace.storage.units import parse_duration, parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.joins._input_buffer import Arrivals
    from headrace.joins.stats import JoinStats
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["StreamJoin"]


class StreamJoin(ABC):
    """Base of the operators. See `joins.protocol.Operator` for the calls and each operator for its parameters."""

    def __init__(
        self,
        table: TableLike | Snapshot,
        on: On,
        how: str,
        memory: int | str,
        *,
        columns: Sequence[str] | None,
        deadline: float | str | None,
        reader: PageReader | None,
        clock: Callable[[], float] | None,
    ) -> None:
        self.relation = open_relation(table, reader)
        self.predicate = as_predicate(on)
        self.predicate.check(self.relation.snapshot.codec)
        self.how = check_how(how)
        self.columns = self._chosen(columns)
        self.deadline = None if deadline is None else parse_duration(deadline)
        self.budget = MemoryBudget(parse_memory(memory))
        self.counters = Counters()
        self.waits = WaitRecord(self.deadline)
        if clock is not None and not callable(clock):
            raise JoinInputError(f"`clock` is a function that returns seconds, not {clock!r}")
        self.time = OperatorTime(clock)
        self._work = Work(clock or time.monotonic)
        self._bound: Bound | None = None
        self._emitter: Emitter | None = None
        self._stream: pa.Schema | None = None
        self._finished = False
        self._latest = -math.inf

    # The protocol

    def push(self, batch: pa.RecordBatch, *, side: str = "stream", at: float | None = None) -> Output:
        """Take a batch of the stream and return what became ready.

        Parameters
        ----------
        batch
            Stream tuples. All batches have the same schema.
        side
            ``"stream"``; the relation does not arrive.
        at
            When the batch arrived, in seconds of the operator's clock; now if not given. Batches are pushed in the
            order in which they arrived.

        Raises
        ------
        StreamSchemaError
            If what is pushed is not a record batch, lacks the join column, or its schema differs from the one before.
        KeyInputError
            If the join column has a type that can never equal the key's.
        JoinInputError
            If the side or the time is none.
        FinishedError
            After `finish`.
        """
        self._open()
        if side != "stream":
            raise JoinInputError(f"this join has one streaming side, 'stream', not {side!r}")
        _refuse_other(batch)
        _check_time(at)
        self._latest = max(self._latest, self.time.reach(at))
        self._bind(batch.schema)
        self.counters.batches_in += 1
        self.counters.rows_in += len(batch)
        return self._work.start(self._counted(self._consume(batch, self._latest)))

    def tick(self, now: float | None = None) -> Output:
        """Return what became due without an arrival.

        Parameters
        ----------
        now
            Time in seconds of the operator's clock; the clock's if not given.

        Raises
        ------
        JoinInputError
            If the time is none.
        FinishedError
            After `finish`.
        """
        self._open()
        _check_time(now)
        self.time.reach(now)
        return self._work.start(self._counted(self._due_work()))

    def flush(self) -> Output:
        """Return the results of all that was pushed so far; the operator goes on."""
        self._open()
        return self._work.start(self._counted(self._drain()))

    def finish(self) -> Output:
        """Return the rest; afterwards the operator takes nothing more."""
        self._open()
        self._finished = True
        return self._work.start(self._counted(self._drain()))

    def output_schema(self, stream: pa.Schema) -> pa.Schema:
        """Return the schema of the results for a stream of this schema."""
        return output_schema(stream, self.relation.snapshot.schema, self.columns, self.how)

    @property
    def due(self) -> float | None:
        """Time at which `tick` is to be called at the latest; None if nothing waits for it."""
        return None

    @property
    @abstractmethod
    def stats(self) -> JoinStats:
        """What was counted so far."""

    # What an operator does

    @abstractmethod
    def _consume(self, batch: pa.RecordBatch, arrival: float) -> Iterator[pa.RecordBatch]:
        """Take a batch in."""

    @abstractmethod
    def _drain(self) -> Iterator[pa.RecordBatch]:
        """Complete all tuples that are held."""

    @abstractmethod
    def _rebound(self) -> None:
        """Take note of the stream's schema, or of another snapshot."""

    def _due_work(self) -> Iterator[pa.RecordBatch]:
        """Do what became due."""
        return iter(())

    # Helpers

    @property
    def snapshot(self) -> Snapshot:
        """The relation that is joined with now."""
        return self.relation.snapshot

    @property
    def bound(self) -> Bound:
        """The predicate, once the stream's schema is known."""
        assert self._bound is not None
        return self._bound

    @property
    def emitter(self) -> Emitter:
        """The maker of results, once the stream's schema is known."""
        assert self._emitter is not None
        return self._emitter

    def completed(self, arrival: Arrivals, rows: int) -> None:
        """Note that the join of so many tuples is complete."""
        self.counters.rows_done += rows
        self.waits.note(arrival, rows, self.time.now())

    def _open(self) -> None:
        if self._finished:
            raise FinishedError("the join is finished; make a new operator")

    def _chosen(self, columns: Sequence[str] | None) -> list[str]:
        layout = self.relation.snapshot.layout
        if columns is None:
            columns = [name for name in layout.schema.names if name not in self.predicate.equated]
        return layout.select(columns)

    def _bind(self, stream: pa.Schema) -> None:
        if self._stream is None:
            _check_movable(stream)
            self._bound = self.predicate.bind(self.relation.snapshot.codec, stream)
            self._stream = stream
            self._rebind()
        elif not stream.equals(self._stream):
            raise StreamSchemaError(
                f"all batches of a stream must have one schema; the first had {_columns(self._stream)}, this one has "
                f"{_columns(stream)}"
            )

    def _rebind(self) -> None:
        """Make what depends on both the stream's schema and the snapshot."""
        if self._stream is None:
            return
        schema = self.output_schema(self._stream)
        self._emitter = Emitter(self.snapshot, self.columns, schema, self._output_nbytes())
        self._rebound()

    @abstractmethod
    def _output_nbytes(self) -> int:
        """Return how large a result batch may be."""

    def _counted(self, results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in results:
            self.counters.batches_out += 1
            self.counters.rows_out += len(batch)
            yield batch

    def _base_stats(self) -> dict[str, Any]:
        """Return the values of `JoinStats`' fields."""
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
            "busy_seconds": self._work.busy_seconds,
            "rows_held": counters.rows_in - counters.rows_done,
            "longest_wait": self.waits.longest,
            "deadline_misses": self.waits.misses,
            "memory": self.budget.use(),
        }


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _refuse_other(batch: object) -> None:
    if not isinstance(batch, pa.RecordBatch):
        raise StreamSchemaError(
            f"a stream comes as pyarrow record batches, not as {type(batch).__name__}; "
            "of a table, push each of `to_batches()`"
        )


def _check_time(at: object) -> None:
    if at is not None and (not isinstance(at, Real) or not math.isfinite(at)):
        raise JoinInputError(f"a time is a finite number of seconds on the operator's clock, not {at!r}")


def _check_movable(stream: pa.Schema) -> None:
    """Refuse columns whose rows Arrow cannot pick."""
    for field in stream:
        try:
            pa.array([], field.type).take(pa.array([], pa.int32()))
        except pa.ArrowNotImplementedError as error:
            raise StreamSchemaError(
                f"column {field.name!r} has type {field.type}, whose rows Arrow cannot pick; cast it first"
            ) from error
