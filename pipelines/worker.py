"""What runs in Spark's Python workers: the stages of a batch, each a function over Arrow batches for `mapInArrow`.

A stage takes the rows of one shard (or of any part, when it needs no shard), brings the replicas it joins with up to
the planned version, and yields its rows, the members it inferred and one note of what it counted. The same input gives
the same rows, whatever was cached and however often the task is tried. Planning is in `pipelines.stages`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl import (
    DUPLICATE_COLUMN,
    DuplicateAction,
    Duplicates,
    KeyAllocator,
    Lookup,
    MissingMembersError,
    Outcome,
    OutcomeCounts,
    Policy,
    mark_duplicates,
    new_members,
    resolve,
    settle,
)
from pipelines.errors import BatchError, ReplicaDamagedError
from pipelines.frame import NOTE, SHARD, STATE, ShardRule, State, channel_row, conform, member_column
from pipelines.operators import Joiner, Serving, close, serve
from storage.errors import CorruptionError, StorageIOError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from pipelines.file_check import FileCheckStep

__all__ = ["DuplicateStep", "LookupStep", "Stage"]

_STATISTICS = (
    "rows_in",
    "rows_done",
    "rows_cached",
    "pages_wanted",
    "pages_read",
    "seeks",
    "deadline_misses",
    "read_seconds",
    "busy_seconds",
)


@dataclass
class Task:
    """One task of a stage: its shard, whose operators it uses, and what it counted."""

    owner: str
    shard: int
    joins: list[dict[str, Any]] = field(default_factory=list)
    members: list[pa.RecordBatch] = field(default_factory=list)

    def serving(self, joiner: Joiner, shard: int, schema: pa.Schema) -> Serving:
        """Return the operator for a join of this task."""
        return serve(joiner, shard, self.owner, schema.to_string(show_schema_metadata=False))


@dataclass(frozen=True)
class LookupStep:
    """One lookup, and the replicas it joins with: one shard for a lookup that infers, else the whole dimension."""

    lookup: Lookup
    joiner: Joiner

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:
        """Yield all rows with the lookup's columns; rows that are not open pass by."""
        infers = self.lookup.policy is Policy.INFER
        shard = task.shard if infers else 0
        shards = self.joiner.replica.shards
        allocator = KeyAllocator(self.joiner.base, shards, shard) if infers else None
        passing = _Passing(batches)
        first = next(passing, None)
        if first is not None:
            with _Join(self.joiner, shard, task, first.schema) as join:
                resolved = resolve(
                    self.lookup,
                    join.serving.operator,
                    chain([first], passing),
                    allocator,
                    visible_to=join.serving.visible_to,
                )
                yield from self._outcomes(resolved, join, task)
        for batch in passing.closed():
            yield self._passed(batch)

    def _outcomes(self, resolved: Iterator[pa.RecordBatch], join: _Join, task: Task) -> Iterator[pa.RecordBatch]:
        """Yield resolved rows with their new state, and keep the members that were inferred."""
        inferred = []
        for batch in resolved:
            outcomes = batch.column(self.lookup.outcome_column)
            join.tally(outcomes)
            if pc.any(pc.equal(outcomes, str(Outcome.INFERRED)), min_count=0).as_py():
                inferred.append(batch)
            rejected = pc.equal(outcomes, str(Outcome.REJECTED))
            yield _with_state(batch, rejected, State.REJECTED)
        if inferred:
            members = new_members(self.lookup, inferred).combine_chunks()
            column = member_column(self.lookup.role)
            values = pa.chunked_array(members.to_struct_array()).combine_chunks()
            task.members.append(pa.RecordBatch.from_arrays([values], names=[column]))
            join.note["new_members"] = members.num_rows

    def _passed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows that pass by with this lookup's columns: no key, and the outcome that closed them."""
        state = np.asarray(batch.column(STATE))
        outcome = np.where(state == State.DUPLICATE, str(Outcome.DUPLICATE), str(Outcome.REJECTED))
        for added in self.lookup.added_schema():
            values = pa.nulls(batch.num_rows, added.type)
            if added.name == self.lookup.outcome_column:
                values = pa.array(outcome, pa.string())
            batch = batch.append_column(added, values)
        return batch


@dataclass(frozen=True)
class DuplicateStep:
    """The search for duplicates, over one shard of the keys."""

    duplicates: Duplicates
    joiner: Joiner

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:
        """Yield all rows with `_duplicate`; rows that are not open pass by."""
        passing = _Passing(batches)
        first = next(passing, None)
        if first is not None:
            with _Join(self.joiner, task.shard, task, first.schema) as join:
                rows = chain([first], passing)
                for batch in mark_duplicates(self.duplicates, rows, join.serving.operator):
                    repeats = batch.column(DUPLICATE_COLUMN).is_valid()
                    join.tally(pc.if_else(repeats, str(Outcome.DUPLICATE), str(Outcome.MATCHED)))
                    closes = self.duplicates.action is not DuplicateAction.FLAG
                    yield _with_state(batch, repeats, State.DUPLICATE) if closes else batch
        for batch in passing.closed():
            yield batch.append_column(pa.field(DUPLICATE_COLUMN, pa.string()), pa.nulls(batch.num_rows, pa.string()))


@dataclass(frozen=True)
class Stage:
    """What one `mapInArrow` does. Picklable; called with the batches of a partition.

    Parameters
    ----------
    number
        Position of the stage in the batch.
    owner
        The run, see `pipelines.operators.serve`.
    steps
        Checks, lookups and the search for duplicates, in order.
    next_shard
        Where rows go for the next stage; None for the last one of a round.
    settles
        All lookups and the duplicates, for the last stage of the batch, which decides where each row goes; else None.
    schema
        The columns that come out.
    """

    number: int
    owner: str
    steps: tuple[FileCheckStep | LookupStep | DuplicateStep, ...]
    next_shard: ShardRule | None
    settles: tuple[tuple[Lookup, ...], Duplicates | None] | None
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage over one partition, to the end of its input."""
        began = time.monotonic()
        source = iter(batches)
        first = next(source, None)
        if first is None:
            return
        task = Task(self.owner, _shard(first))
        note: dict[str, Any] = {"stage": self.number, "shard": task.shard, "rows": 0}
        try:
            rows = self._counted(chain([first], source), task, note)
            for step in self.steps:
                rows = step.run(rows, task)
            for batch in self._settled(rows, note):
                yield self._leaving(batch)
        except MissingMembersError as error:
            note["failure"] = str(error)
        for members in task.members:
            yield self._leaving(channel_row(self.schema, State.MEMBER, {members.schema.names[0]: members.column(0)}))
        note |= {"joins": task.joins, "seconds": time.monotonic() - began, "worker": _worker()}
        text = pa.array([json.dumps(note)])
        yield self._leaving(channel_row(self.schema, State.NOTE, {NOTE: text}))

    def _counted(self, batches: Iterable[pa.RecordBatch], task: Task, note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Yield the batches without `_shard`, counting rows of the stream and refusing rows of another shard."""
        for batch in batches:
            if SHARD in batch.schema.names:
                shards = pc.min_max(batch.column(SHARD)).as_py()
                if batch.num_rows and (shards["min"], shards["max"]) != (task.shard, task.shard):
                    raise BatchError(f"stage {self.number}: rows of shards {shards} came to the task of {task.shard}")
            rows = batch.drop_columns([SHARD]) if SHARD in batch.schema.names else batch
            note["rows"] += int(pc.sum(pc.less(rows.column(STATE), State.MEMBER)).as_py() or 0)
            yield rows

    def _settled(self, batches: Iterator[pa.RecordBatch], note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        if self.settles is None:
            yield from batches
            return
        books = OutcomeCounts()
        malformed = 0
        for batch in batches:
            state = np.asarray(batch.column(STATE))
            if (state >= State.MEMBER).any():
                yield batch.filter(pa.array(state >= State.MEMBER))
            broken = batch.filter(pa.array(state == State.MALFORMED))
            malformed += broken.num_rows
            yield broken
            settled = settle(self._judged(batch, state), *self.settles)
            books += settled.counts
            for part, destination in (
                (settled.loaded, State.OPEN),
                (settled.routed, State.DUPLICATE),
                (settled.rejected, State.REJECTED),
            ):
                yield _with_state(part, pa.repeat(pa.scalar(value=True), part.num_rows), destination)
        note |= {"books": books.as_dict(), "malformed": malformed}

    @staticmethod
    def _judged(batch: pa.RecordBatch, state: NDArray[np.int8]) -> pa.RecordBatch:
        whole = (state < State.MEMBER) & (state != State.MALFORMED)
        return batch if whole.all() else batch.filter(pa.array(whole))

    def _leaving(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.next_shard is not None:
            batch = self.next_shard.append_to(batch)
        return conform(batch, self.schema)


class _Passing:
    """Iterates over the open rows of batches and keeps the others, which pass a step by."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._closed: deque[pa.RecordBatch] = deque()

    def __iter__(self) -> _Passing:
        return self

    def __next__(self) -> pa.RecordBatch:
        for batch in self._batches:
            is_open = np.asarray(pc.equal(batch.column(STATE), State.OPEN))
            if is_open.all():
                if batch.num_rows:
                    return batch
                continue
            self._closed.append(batch.filter(pa.array(~is_open)))
            if is_open.any():
                return batch.filter(pa.array(is_open))
        raise StopIteration

    def closed(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that were not open, once the input has been read."""
        yield from self._closed


class _Join:
    """One join of a task: brings up the operator, notes what it did, and discards a replica that proves damaged."""

    def __init__(self, joiner: Joiner, shard: int, task: Task, schema: pa.Schema) -> None:
        self._joiner = joiner
        self._shard = shard
        self._task = task
        self._schema = schema
        self._outcomes: dict[str, int] = {}
        self.note: dict[str, Any] = {"role": joiner.role, "shard": shard}

    def __enter__(self) -> Self:
        self.serving = self._task.serving(self._joiner, self._shard, self._schema)
        self._before = self.serving.operator.stats
        reached = self.serving.reached
        self.note["replica"] = "ready" if reached is None else reached.action
        self.note["replica_rows"] = 0 if reached is None else reached.rows
        self.note["replica_seconds"] = 0.0 if reached is None else reached.seconds
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CorruptionError | StorageIOError):
            close(self._joiner, self._shard, damaged=True)
            raise ReplicaDamagedError(f"{error}; the replica has been discarded, and the task begins again") from error
        if error is not None and not isinstance(error, MissingMembersError):
            close(self._joiner, self._shard)
            return
        interval = self.serving.operator.stats - self._before
        self.note |= {name: getattr(interval, name) for name in _STATISTICS}
        self.note["outcomes"] = self._outcomes
        self._task.joins.append(self.note)

    def tally(self, outcomes: pa.Array) -> None:
        """Count outcomes."""
        for counted in pc.value_counts(outcomes).to_pylist():
            self._outcomes[counted["values"]] = self._outcomes.get(counted["values"], 0) + counted["counts"]


def _with_state(batch: pa.RecordBatch, wanted: pa.Array, state: State) -> pa.RecordBatch:
    """Return the batch with a new state for the wanted rows."""
    if STATE not in batch.schema.names:
        return batch.append_column(pa.field(STATE, pa.int8()), pa.repeat(pa.scalar(int(state), pa.int8()), len(batch)))
    if not pc.any(wanted, min_count=0).as_py():
        return batch
    position = batch.schema.get_field_index(STATE)
    changed = pc.if_else(wanted, pa.scalar(int(state), pa.int8()), batch.column(position))
    return batch.set_column(position, batch.schema.field(position), changed)


def _shard(batch: pa.RecordBatch) -> int:
    return int(batch.column(SHARD)[0].as_py()) if SHARD in batch.schema.names else 0


def _worker() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
