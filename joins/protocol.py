"""The one protocol of all join operators, and the lazy output they return.

Operators are push-based and deterministic; they take their clock as an argument and work only while they are called
or while their output is consumed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

import pyarrow as pa

from headrace.joins.errors import JoinStateError
from headrace.joins.stats import JoinStats, MemoryUse, SSIJStats

__all__ = ["JoinStats", "MemoryUse", "Operator", "Output", "SSIJStats", "Work"]


@runtime_checkable
class Operator(Protocol):
    """A join of a stream with a stored relation.

    The sum of all outputs, once `finish` has been consumed, is the relational join as a multiset of rows.
    """

    def push(self, batch: pa.RecordBatch, *, side: str = "stream", at: float | None = None) -> Output:
        """Take a batch that arrived at `at` (now, if not given) and return what became ready."""
        ...

    def tick(self, now: float | None = None) -> Output:
        """Return what became due without an arrival."""
        ...

    def flush(self) -> Output:
        """Return the results of all that was pushed so far; the operator goes on."""
        ...

    def finish(self) -> Output:
        """Return the rest. Afterwards the operator takes nothing more."""
        ...

    def output_schema(self, stream: pa.Schema) -> pa.Schema:
        """Return the schema of the results for a stream of this schema."""
        ...

    @property
    def due(self) -> float | None:
        """Time at which `tick` is to be called at the latest to meet the deadlines; None if nothing waits for one."""
        ...

    @property
    def stats(self) -> JoinStats:
        """What was counted so far."""
        ...


class Work:
    """What an operator has been asked to do and has not done yet, as generators of result batches, in order.

    The queue belongs to the operator and outlives each `Output`, hence nothing is lost when one is dropped.

    Parameters
    ----------
    clock
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tasks: deque[Iterator[pa.RecordBatch]] = deque()
        self._ready: deque[pa.RecordBatch] = deque()
        self._reader: Output | None = None
        self._failure: BaseException | None = None
        self._busy = 0.0
        self._since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether everything asked for has been done."""
        return not self._tasks

    @property
    def more(self) -> bool:
        """Whether something else is to be done after what is being done now."""
        return len(self._tasks) > 1

    @property
    def busy_seconds(self) -> float:
        """Seconds in which tasks ran, the time that the consumer took between results not included."""
        return self._busy if self._since is None else self._busy + self._clock() - self._since

    def start(self, task: Iterator[pa.RecordBatch]) -> Output:
        """Queue a task and work up to the first result. Earlier outputs end; what they had left comes first here."""
        self.check()
        self._tasks.append(task)
        output = Output(self)
        self._reader = output
        if not self._ready:
            batch = self._advance()
            if batch is not None:
                self._ready.append(batch)
        return output

    def take(self, reader: Output) -> pa.RecordBatch | None:
        """Return the next result, or None if there is none or `reader` is not the latest output."""
        if reader is not self._reader:
            return None
        if self._ready:
            return self._ready.popleft()
        self.check()
        return self._advance()

    def check(self) -> None:
        """Refuse to go on after a failure, which may have cut a phase short.

        Raises
        ------
        JoinStateError
            If a task raised an error.
        """
        if self._failure is not None:
            raise JoinStateError(
                f"the join failed before ({self._failure}); its results are incomplete, so begin with a new operator"
            ) from self._failure

    def _advance(self) -> pa.RecordBatch | None:
        self._since = self._clock()
        try:
            while self._tasks:
                batch = next(self._tasks[0], None)
                if batch is not None:
                    return batch
                self._tasks.popleft()
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._busy += self._clock() - self._since
            self._since = None
        return None


class Output(Iterable[pa.RecordBatch]):
    """Result batches, made while they are consumed, so that a huge result is never in memory at once.

    Work starts at the call that returned the output and goes on with each batch taken. When the operator is called
    again first, this output ends, and what was left comes first in the next one.

    Examples
    --------
    >>> work = Work()
    >>> first = work.start(iter([pa.record_batch({"k": [1]}), pa.record_batch({"k": [2]})]))
    >>> second = work.start(iter([pa.record_batch({"k": [3]})]))
    >>> [batch["k"][0].as_py() for batch in first], [batch["k"][0].as_py() for batch in second]
    ([], [1, 2, 3])
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._work.take(self)
        if batch is None:
            raise StopIteration
        return batch

    def drain(self) -> int:
        """Do all the work, drop the results, and return how many rows they had."""
        return sum(batch.num_rows for batch in self)

    def to_table(self, schema: pa.Schema | None = None) -> pa.Table:
        """Return all results as one `pyarrow.Table`; `schema` is needed when there may be none."""
        return pa.Table.from_batches(list(self), schema=schema)
