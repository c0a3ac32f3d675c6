"""`JoinHandle`, the part of an operator that the user holds: the work queue, statistics, and closing.

It knows no relation and no streams. `headrace.joins.base` adds the calls of joins of a stream with a stored relation,
`headrace.joins.streams.base.operator` those of joins of streams with streams.
"""

from __future__ import annotations

import math
import sys
from abc import ABC
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import pyarrow as pa

from headrace.joins.dictionaries import types_within
from headrace.joins.errors import ClosedError, FinishedError, JoinInputError, StreamSchemaError
from headrace.joins.memory.allocators import release_freed_memory
from headrace.joins.protocol import Output, Progress, WorkQueue
from headrace.joins.stats import JoinStats, MemoryUse
from headrace.storage.errors import InputError
from headrace.storage.format import stored_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Algorithm",
    "AlgorithmT",
    "JoinHandle",
    "check_batch",
    "check_clock",
    "check_function",
    "check_same_schema",
    "check_seconds",
    "check_takeable",
    "check_time",
    "columns_of",
    "parsed",
]


class Algorithm(Protocol):
    """What a handle needs of an algorithm, whatever it joins."""

    progress: Progress

    def tick(self, now: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of doing what is due at `now`."""
        ...

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Return the task of completing all tuples that are held."""
        ...

    def close(self) -> None:
        """Stop threads and free what is not memory."""
        ...

    @property
    def stats(self) -> JoinStats:
        """Statistics so far."""
        ...


AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm)
T = TypeVar("T")
R = TypeVar("R")


class JoinHandle(ABC, Generic[AlgorithmT]):
    """Base of all operators. Checks calls and owns the work queue; the algorithm owns everything else.

    Tasks in the queue refer to the algorithm, and nothing refers back to the handle or the queue. So there is no
    reference cycle, and a dropped operator frees its memory at once.

    Parameters
    ----------
    algorithm
        Algorithm that does the work.
    """

    def __init__(self, algorithm: AlgorithmT) -> None:
        self._algorithm: AlgorithmT | None = algorithm
        self._work = WorkQueue(algorithm.progress)
        self._finished = False
        self._last_stats: JoinStats | None = None

    def tick(self, now: float | None = None) -> Output:
        """Return the results that are due without an arrival.

        Parameters
        ----------
        now
            Time in seconds of the operator's clock; by default the clock's.

        Raises
        ------
        JoinInputError
            If the time is not valid.
        FinishedError
            After `finish`.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        check_time(now)
        return self._work.start(algorithm.tick(now))

    def finish(self) -> Output:
        """Return the remaining results. The operator takes no more batches."""
        algorithm = self._open()
        self._finished = True
        return self._work.start(algorithm.drain())

    def close(self) -> None:
        """Stop all work, drop results that were not taken, and free the operator's memory. May be called twice."""
        algorithm = self._algorithm
        if algorithm is None:
            return
        stats = algorithm.stats
        self._last_stats = replace(stats, memory=MemoryUse(limit=stats.memory.limit, peak=stats.memory.peak))
        self._algorithm = None
        try:
            self._work.close()
        finally:
            algorithm.close()
            del algorithm
            release_freed_memory()

    def __del__(self) -> None:
        """Return the memory of an operator that is dropped without being closed."""
        if getattr(self, "_algorithm", None) is not None and not sys.is_finalizing():
            self._algorithm = None
            del self._work
            release_freed_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stats(self) -> JoinStats:
        """Statistics so far. They stay readable after `close`."""
        return self.algorithm.stats if self._last_stats is None else self._last_stats

    @property
    def algorithm(self) -> AlgorithmT:
        """Algorithm that does the work, for tests and experiments.

        Raises
        ------
        ClosedError
            After `close`.
        """
        if self._algorithm is None:
            raise ClosedError("the join is closed; make a new operator")
        return self._algorithm

    def _open(self) -> AlgorithmT:
        """Return the algorithm, which can still be given work."""
        if self._algorithm is not None and self._finished:
            raise FinishedError("the join is finished; make a new operator")
        return self.algorithm


def columns_of(schema: pa.Schema) -> str:
    """Return the columns of a schema as text, for messages."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def check_batch(batch: object) -> None:
    """Refuse what is not a record batch."""
    if not isinstance(batch, pa.RecordBatch):
        raise StreamSchemaError(
            f"a stream comes as pyarrow record batches, not as {type(batch).__name__}; "
            "for a table, push each of its `to_batches()`"
        )


def check_same_schema(schema: pa.Schema, first: pa.Schema) -> None:
    """Refuse a batch whose schema is not that of the first batch."""
    if not schema.equals(first):
        raise StreamSchemaError(
            f"all batches of a stream must have one schema; the first had {columns_of(first)}, this one has "
            f"{columns_of(schema)}"
        )


def check_time(at: object) -> None:
    """Refuse what is not a time on the operator's clock."""
    if at is not None and not _is_time(at):
        raise JoinInputError(f"a time must be a finite number of seconds on the operator's clock, not {at!r}")


def check_clock(clock: Any) -> None:
    """Refuse what does not return a time when it is called without arguments."""
    if clock is None:
        return
    check_function("clock", clock, "a function that returns seconds")
    try:
        now = clock()
    except TypeError as error:
        raise JoinInputError(f"`clock` must be a function without parameters: {error}") from error
    if not _is_time(now):
        raise JoinInputError(f"`clock` must return a finite number of seconds, not {now!r}")


def check_function(name: str, value: object, kind: str = "a function") -> None:
    """Refuse a parameter that cannot be called."""
    if not callable(value):
        raise JoinInputError(f"`{name}` must be {kind}, not {value!r}")


def check_seconds(name: str, value: object, least: float) -> None:
    """Refuse a parameter that is not a number, or is too small; infinity is allowed."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= least:
        limit = "" if least == -math.inf else f" of at least {least}"
        raise JoinInputError(f"`{name}` must be a number of seconds{limit}, not {value!r}")


def _is_time(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def parsed(name: str, parse: Callable[[T], R], value: T) -> R:
    """Return a parameter that is a size or a duration; an error names the parameter."""
    try:
        return parse(value)
    except InputError as error:
        raise JoinInputError(f"`{name}`: {error}") from error


def check_number(name: str, value: object, least: int) -> int:
    """Return a parameter that is a whole number; refuse what is not one, or is too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise JoinInputError(f"`{name}` must be a whole number of at least {least}, not {value!r}")
    return value


def check_takeable(stream: pa.Schema) -> None:
    """Refuse columns whose rows Arrow cannot take, or cannot put together as they are."""
    for field in stream:
        for within in types_within(field.type):
            if pa.types.is_dictionary(within) and pa.types.is_floating(within.value_type):
                raise StreamSchemaError(
                    f"column {field.name!r} has type {field.type}, and Arrow changes floats when it combines the "
                    f"dictionaries of two batches; decode it to {within.value_type} first"
                )
        try:
            pa.array([], field.type).take(pa.array([], pa.int32()))
        except pa.ArrowNotImplementedError as error:
            raise StreamSchemaError(
                f"column {field.name!r} has type {field.type}, from which Arrow cannot take rows; convert it to "
                f"{stored_type(field.type) or 'another type'}, or leave it out"
            ) from error
