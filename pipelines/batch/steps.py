"""The steps of a stage: lookups and the duplicate search, over the replicas of a task's shard.

A step takes the rows of a task and yields them with additional columns. Rows that are not open bypass it.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import (
    DUPLICATE_COLUMN,
    DuplicateAction,
    Duplicates,
    KeyAllocator,
    Lookup,
    MissingMembersError,
    Outcome,
    Policy,
    mark_duplicates,
    new_members,
    resolve,
)
from headrace.etl.history import AsOfLookup, Operators, inferred_members, resolve_as_of
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.errors import ReplicaDamagedError
from headrace.pipelines.history.layout import version_rows
from headrace.pipelines.replica.operators import Joiner, Serving, close, serve
from headrace.pipelines.spark.frame import FILE, RECORD_NUMBER, STATE, State, member_column, with_state
from headrace.storage.errors import CorruptionError, StorageIOError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["STATISTICS", "DuplicateStep", "LookupStep", "Task"]

STATISTICS = (
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
_ROW = "_row"
_HELD_ROWS = 1 << 18
_HELD_BYTES = 64 << 20


@dataclass
class Task:
    """One task of a stage: its shard, the owner of its operators, and its counts."""

    owner: str
    shard: int
    joins: list[dict[str, Any]] = field(default_factory=list)
    members: list[pa.RecordBatch] = field(default_factory=list)

    def serving(self, joiner: Joiner, shard: int, schema: pa.Schema) -> Serving:
        """Return the operator for a join of this task."""
        return serve(joiner, shard, self.owner, schema.to_string(show_schema_metadata=False))


@dataclass(frozen=True)
class LookupStep:
    """One lookup and its replicas: one shard for an inferring lookup, else the whole dimension.

    The join receives only keys, event times and row numbers, so that its memory is available for the dimension. Its
    results are then added to the rows in row order.

    Parameters
    ----------
    lookup, joiner
        Lookup, and the joiner that serves it. For a dimension with history, it joins the current versions.
    files
        File specification for new members; None if they travel with the rows.
    own
        Ranges of surrogate keys that earlier attempts at the batch assigned, see `headrace.etl.resolve`.
    older
        Joiners over all versions of a dimension with history, backward and forward in time, as far as the lookup needs
        them. They open their replica only for facts that are older than the current version.
    """

    lookup: Lookup | AsOfLookup
    joiner: Joiner
    files: FileSpec | None = None
    own: tuple[tuple[int, int], ...] = ()
    older: tuple[Joiner, ...] = ()

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:
        """Yield all rows with the lookup's columns; rows that are not open bypass the lookup."""
        infers = self.lookup.policy is Policy.INFER
        shards = self.joiner.replica.shards
        shard = task.shard if shards > 1 else 0
        allocator = KeyAllocator(self.joiner.base, shards, shard) if infers else None
        passing = _Passing(batches)
        first = next(passing, None)
        if first is not None:
            keyed = _keyed(first, self._asked, 0)
            with ExitStack() as stack:
                join = stack.enter_context(_Join(self.joiner, shard, task, keyed.schema))
                older = [stack.enter_context(_OlderJoin(joiner, shard, task)) for joiner in self.older]
                for held in _held(chain([first], passing), everything=infers):
                    yield from self._resolved(held, join, older, allocator, task)
        for batch in passing.closed():
            yield self._passed(batch)

    @property
    def _asked(self) -> tuple[str, ...]:
        """Columns of the rows that determine the result of the lookup."""
        names = list(self.lookup.stream_columns)
        if isinstance(self.lookup, AsOfLookup) and self.lookup.event_time is not None:
            names.append(self.lookup.event_time)
        return tuple(dict.fromkeys([*names, *self._order()]))

    def _resolved(
        self,
        held: list[pa.RecordBatch],
        join: _Join,
        older: list[_OlderJoin],
        allocator: KeyAllocator | None,
        task: Task,
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows with the lookup's columns and their new state; keep the inferred members."""
        starts = np.cumsum([0, *(batch.num_rows for batch in held)])
        keyed = (_keyed(batch, self._asked, start) for batch, start in zip(held, starts[:-1], strict=True))
        outputs = list(self._outputs(keyed, join, older, allocator))
        found = pa.Table.from_batches(outputs).combine_chunks()
        outcomes = found.column(self.lookup.outcome_column)
        join.tally(outcomes)
        if pc.any(pc.equal(outcomes, str(Outcome.INFERRED)), min_count=0).as_py():
            members = self._new_members(outputs)
            if members.num_rows:
                self._keep_members(members, join, task)
        order = np.empty(found.num_rows, np.int64)
        order[np.asarray(found.column(_ROW))] = np.arange(found.num_rows)
        added = found.select(self.lookup.added_schema().names).take(pa.array(order))
        for batch, start in zip(held, starts[:-1], strict=True):
            columns = [column.combine_chunks() for column in added.slice(start, batch.num_rows).columns]
            whole = pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], schema=pa.schema([*batch.schema, *self.lookup.added_schema()])
            )
            rejected = pc.equal(whole.column(self.lookup.outcome_column), str(Outcome.REJECTED))
            yield with_state(whole, rejected, State.REJECTED)

    def _outputs(
        self,
        keyed: Iterator[pa.RecordBatch],
        join: _Join,
        older: list[_OlderJoin],
        allocator: KeyAllocator | None,
    ) -> Iterator[pa.RecordBatch]:
        current, visible_to = join.serving.operator, join.serving.visible_to
        if isinstance(self.lookup, AsOfLookup):
            operators = Operators(current, *older)
            return resolve_as_of(self.lookup, operators, keyed, allocator, visible_to=visible_to, own=self.own)
        return resolve(self.lookup, current, keyed, allocator, visible_to=visible_to, own=self.own)

    def _new_members(self, outputs: list[pa.RecordBatch]) -> pa.Table:
        """Return the inferred members as rows of the dimension's Delta table."""
        if not isinstance(self.lookup, AsOfLookup):
            return new_members(self.lookup, outputs, self.joiner.base, self._order())
        history = self.lookup.history
        return version_rows(history, inferred_members(history, self.lookup.current, outputs, self.joiner.base))

    def _order(self) -> tuple[str, ...]:
        """Return the columns that say which row came first, if the dimension keeps first spellings."""
        return (FILE, RECORD_NUMBER) if self.lookup.dimension.spellings else ()

    def _keep_members(self, members: pa.Table, join: _Join, task: Task) -> None:
        """Write new members into a file, or keep them to travel with the rows."""
        join.note["new_members"] = members.num_rows
        join.note["greatest_key"] = pc.max(members.column(self.lookup.dimension.surrogate_key)).as_py()
        (batch,) = members.combine_chunks().to_batches()
        if self.files is None:
            column = pa.chunked_array(members.to_struct_array()).combine_chunks()
            task.members.append(pa.RecordBatch.from_arrays([column], names=[member_column(self.lookup.role)]))
            return
        with FileWriter(self.files) as writer:
            writer.write(batch)
            join.note["files"] = [asdict(file) for file in writer.close()]

    def _passed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return bypassing rows with this lookup's columns: no key, and the outcome that closed them."""
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
    """The duplicate search, over one shard of the keys."""

    duplicates: Duplicates
    joiner: Joiner

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:
        """Yield all rows with `_duplicate`; rows that are not open bypass the search."""
        passing = _Passing(batches)
        first = next(passing, None)
        if first is not None:
            with _Join(self.joiner, task.shard, task, first.schema) as join:
                rows = chain([first], passing)
                for batch in mark_duplicates(self.duplicates, rows, join.serving.operator):
                    repeats = batch.column(DUPLICATE_COLUMN).is_valid()
                    join.tally(pc.if_else(repeats, str(Outcome.DUPLICATE), str(Outcome.MATCHED)))
                    closes = self.duplicates.action is not DuplicateAction.FLAG
                    yield with_state(batch, repeats, State.DUPLICATE) if closes else batch
        for batch in passing.closed():
            yield batch.append_column(pa.field(DUPLICATE_COLUMN, pa.string()), pa.nulls(batch.num_rows, pa.string()))


class _Passing:
    """Iterates over the open rows of batches, and keeps the other rows, which bypass a step."""

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
        """Yield the rows that were not open, once the input is exhausted."""
        yield from self._closed


class _Join:
    """One join of a task: opens the operator, notes its counters, and discards a damaged replica."""

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
            raise self.damaged(error) from error
        if error is not None and not isinstance(error, MissingMembersError):
            close(self._joiner, self._shard)
            return
        interval = self.serving.operator.stats - self._before
        self.note |= {name: getattr(interval, name) for name in STATISTICS}
        self.note["outcomes"] = self._outcomes
        self._task.joins.append(self.note)

    def damaged(self, error: BaseException) -> ReplicaDamagedError:
        """Discard the replica, and return the error that makes the task begin again."""
        close(self._joiner, self._shard, damaged=True)
        return ReplicaDamagedError(f"{error}; the replica has been discarded, and the task begins again")

    def tally(self, outcomes: pa.Array) -> None:
        """Count outcomes."""
        for counted in pc.value_counts(outcomes).to_pylist():
            self._outcomes[counted["values"]] = self._outcomes.get(counted["values"], 0) + counted["counts"]


class _OlderJoin:
    """A join over all versions, which is opened for the first row that needs it."""

    def __init__(self, joiner: Joiner, shard: int, task: Task) -> None:
        self._given = (joiner, shard, task)
        self._join: _Join | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._join is None:
            return
        if isinstance(error, CorruptionError | StorageIOError):  # of another replica: `_guarding` converts its own
            error = ReplicaDamagedError(str(error))
        self._join.__exit__(kind, error, trace)

    def push(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Push a batch, and yield the results that are ready."""
        join = self._join or _Join(*self._given, batch.schema)
        with _guarding(join):
            if self._join is None:
                join.__enter__()
                self._join = join
            yield from join.serving.operator.push(batch)

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of all rows pushed so far."""
        if self._join is not None:
            with _guarding(self._join):
                yield from self._join.serving.operator.flush()


@contextmanager
def _guarding(join: _Join) -> Iterator[None]:
    """Discard the replica of a join if its file turns out to be damaged, and not that of the join around it."""
    try:
        yield
    except (CorruptionError, StorageIOError) as error:
        raise join.damaged(error) from error


def _keyed(batch: pa.RecordBatch, names: tuple[str, ...], start: int) -> pa.RecordBatch:
    """Return columns of a batch, and the number of each row."""
    rows = pa.array(np.arange(start, start + batch.num_rows))
    return pa.RecordBatch.from_arrays([*(batch.column(name) for name in names), rows], names=[*names, _ROW])


def _held(batches: Iterable[pa.RecordBatch], *, everything: bool) -> Iterator[list[pa.RecordBatch]]:
    """Yield lists of batches to join together: all batches in one list, or lists of limited size."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if not everything and (rows >= _HELD_ROWS or size >= _HELD_BYTES):
            yield held
            held, rows, size = [], 0, 0
    if held:
        yield held
