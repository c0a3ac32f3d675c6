"""The protocol of all join operators, and the lazy output that they return.

Operators are push-based and deterministic. They take their clock as an argument, and work only while they are called
or while their output is consumed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self, runtime_checkable

import pyarrow as pa

from headrace.joins.errors import ClosedError, JoinStateError
from headrace.joins.stats import JoinStats, MemoryUse, SSIJStats

__all__ = ["JoinStats", "MemoryUse", "Operator", "Output", "Progress", "SSIJStats", "WorkQueue"]


@runtime_checkable
class Operator(Protocol):
    """A join of a stream with a stored relation.

    The sum of all outputs, once the output of `finish` has been consumed, is the relational join as a multiset of rows.
    """

    def push(self, batch: pa.RecordBatch, *, side: str = "stream", at: float | None = None) -> Output:
        """Take a batch that arrived at `at` (by default now) and return the results that are ready."""
        ...

    def tick(self, now: float | None = None) -> Output:
        """Return the results that are due without an arrival."""
        ...

    def flush(self) -> Output:
        """Return the results of everything pushed so far. The operator stays open for more."""
        ...

    def finish(self) -> Output:
        """Return the remaining results. The operator takes no more batches."""
        ...

    def output_schema(self, stream: pa.Schema) -> pa.Schema:
        """Return the schema of the results for a stream of this schema."""
        ...

    @property
    def due(self) -> float | None:
        """Latest time for the next call of `tick` to meet the deadlines; None if nothing waits for one."""
        ...

    @property
    def stats(self) -> JoinStats:
        """Statistics so far. They stay readable after `close`."""
        ...

    def close(self) -> None:
        """Stop all work, drop results that were not taken, and free the operator's memory. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Progress:
    """How long an operator has worked and how many tasks it has left.

    The work queue updates it and the join algorithm reads it, so neither needs a reference to the other.

    Parameters
    ----------
    clock
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = 0.0
        self._since: float | None = None
        self._harmless = self._complete = False
        self.tasks = 0

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """State that an error raised in this ``with`` block ends the current task only: it loses no result."""
        self._harmless = True
        yield
        self._harmless = False

    @contextmanager
    def complete(self) -> Iterator[None]:
        """State that an error raised in this ``with`` block loses no result of what was pushed before this task."""
        self._complete = True
        yield
        self._complete = False

    @property
    def after_failure(self) -> str:
        """What to do after an error that `failed`."""
        if self._complete:
            return "all that was pushed before has its results, so push the rest to a new operator"
        return "its results are incomplete, so start over with a new operator"

    def failed(self) -> bool:
        """Return whether the error that the current task raised may have lost results."""
        harmless, self._harmless = self._harmless, False
        return not harmless

    @property
    def idle(self) -> bool:
        """Whether no task is left."""
        return self.tasks == 0

    @property
    def more(self) -> bool:
        """Whether another task waits behind the current one."""
        return self.tasks > 1

    @property
    def busy_seconds(self) -> float:
        """Seconds in which tasks ran. Excludes the time that the consumer took between results."""
        return self._busy if self._since is None else self._busy + self._clock() - self._since

    def start(self) -> None:
        """Start the clock of busy seconds."""
        self._since = self._clock()

    def stop(self) -> None:
        """Stop the clock of busy seconds."""
        self._busy, self._since = self.busy_seconds, None


class WorkQueue:
    """Tasks that an operator was asked to do and has not finished, as generators of result batches, in order.

    The queue belongs to the operator and outlives each `Output`, so a dropped output loses no results. Tasks must not
    refer to the queue: that would be a reference cycle, and a dropped operator would keep its memory.

    Parameters
    ----------
    progress
        Updated as tasks start and finish.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or Progress()
        self._tasks: deque[Iterator[pa.RecordBatch]] = deque()
        self._ready: deque[pa.RecordBatch] = deque()
        self._latest = 0
        self._failure: str | None = None
        self._closed = self._lost = False

    def start(self, task: Iterator[pa.RecordBatch]) -> Output:
        """Add a task and work until the first result. Earlier outputs end; their remaining results come first here."""
        self.check()
        self._tasks.append(task)
        self.progress.tasks += 1
        self._latest += 1
        output = Output(self, self._latest)
        if not self._ready:
            batch = self._advance()
            if batch is not None:
                self._ready.append(batch)
        return output

    def take(self, output: int) -> pa.RecordBatch | None:
        """Return the next result; None if there is none or if output number `output` is not the latest."""
        if output != self._latest:
            return None
        if self._ready:
            return self._ready.popleft()
        if self._closed and not self._lost:
            return None
        self.check()
        return self._advance()

    def check(self) -> None:
        """Refuse to work on a closed operator, or after a failure, which may have cut a phase short.

        Raises
        ------
        ClosedError
            If the queue was closed.
        JoinStateError
            If a task raised an error.
        """
        if self._closed:
            lost = " before all of its results were taken" if self._lost else ""
            raise ClosedError(f"the join was closed{lost}; make a new operator")
        if self._failure is not None:
            raise JoinStateError(f"the join failed before ({self._failure}); {self.progress.after_failure}")

    def close(self) -> None:
        """Stop all tasks and drop the results that were not taken."""
        if self._closed:
            return
        self._closed, self._lost = True, bool(self._tasks or self._ready)
        tasks = list(self._tasks)
        self._tasks.clear()
        self._ready.clear()
        self.progress.tasks = 0
        for task in tasks:
            if isinstance(task, Generator):
                task.close()

    def _advance(self) -> pa.RecordBatch | None:
        self.progress.start()
        try:
            while self._tasks:
                batch = next(self._tasks[0], None)
                if batch is not None:
                    return batch
                self._tasks.popleft()
                self.progress.tasks -= 1
        except BaseException as failure:
            if self.progress.failed():
                self._failure = str(failure) or type(failure).__name__
            raise
        finally:
            self.progress.stop()
        return None


class Output(Iterable[pa.RecordBatch]):
    """Result batches, produced while they are consumed, so that a huge result is never in memory at once.

    Work starts with the call that returned the output and continues with each batch taken. If the operator is called
    again first, this output ends, and its remaining results come first in the next one.

    Examples
    --------
    >>> work = WorkQueue()
    >>> first = work.start(iter([pa.record_batch({"k": [1]}), pa.record_batch({"k": [2]})]))
    >>> second = work.start(iter([pa.record_batch({"k": [3]})]))
    >>> [batch["k"][0].as_py() for batch in first], [batch["k"][0].as_py() for batch in second]
    ([], [1, 2, 3])
    """

    def __init__(self, work: WorkQueue, number: int) -> None:
        self._work = work
        self._number = number

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._work.take(self._number)
        if batch is None:
            raise StopIteration
        return batch

    def drain(self) -> int:
        """Do all the work, drop the results, and return their number of rows."""
        return sum(batch.num_rows for batch in self)

    def to_table(self, schema: pa.Schema | None = None) -> pa.Table:
        """Return all results as one `pyarrow.Table`. `schema` is needed when there may be none."""
        return pa.Table.from_batches(list(self), schema=schema)
