"""Arrivals: several stored streams as one sequence of batches in order of time, and their replay into a join.

In: the batches of each input. Out: `Arrival`s, by a time column, by simulated rates, or in turn; `replay` pushes them
into a join and yields its results, at the speed of the arrivals or as fast as possible.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.handle import check_batch, check_function, check_number, check_seconds
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsJoin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

__all__ = ["Arrival", "arrivals_at_rates", "arrivals_by_time", "arrivals_in_turn", "replay", "seconds_of"]

_ROWS = 4096
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch of an input that arrives.

    Attributes
    ----------
    side
        Name of the input.
    batch
        Its rows; None if the input has ended.
    at
        Time of arrival of the last row in seconds; None if there are no times.
    """

    side: str
    batch: pa.RecordBatch | None
    at: float | None


Timed = tuple[pa.RecordBatch, "NDArray[np.float64]"]


def arrivals_in_turn(streams: Mapping[str, Iterable[pa.RecordBatch]]) -> Iterator[Arrival]:
    """Yield one batch of each input in turn, and the end of each input.

    Examples
    --------
    >>> batch = pa.record_batch({"x": [1]})
    >>> [(a.side, a.batch is None) for a in arrivals_in_turn({"a": [batch], "b": [batch, batch]})]
    [('a', False), ('b', False), ('a', True), ('b', False), ('b', True)]
    """
    left = {side: _batches(side, batches) for side, batches in _streams(streams).items()}
    while left:
        for side, batches in list(left.items()):
            batch = next(batches, None)
            yield Arrival(side, batch, None)
            if batch is None:
                del left[side]


def arrivals_by_time(
    streams: Mapping[str, Iterable[pa.RecordBatch]],
    columns: Mapping[str, str],
    *,
    window: float = math.inf,
    rows: int = _ROWS,
) -> Iterator[Arrival]:
    """Yield the rows of all inputs in the order of their times, in batches, and the end of each input.

    Rows of different inputs whose times differ by less than a batch takes may change places.

    Parameters
    ----------
    streams
        Batches of each input, in order of time.
    columns
        Time column of each input, see `seconds_of`.
    window
        Most seconds between the times of a batch.
    rows
        Most rows of an input until rows of the others follow, except that rows of one time stay together.

    Raises
    ------
    JoinInputError
        If a parameter is not valid, or a time is missing, earlier than the one before, or not a time.
    StreamSchemaError
        If an input does not come as record batches, or lacks its time column.

    Examples
    --------
    >>> a, b = pa.record_batch({"t": [1, 2, 9], "x": [1, 2, 3]}), pa.record_batch({"t": [3, 4]})
    >>> found = arrivals_by_time({"a": [a], "b": [b]}, {"a": "t", "b": "t"}, window=1)
    >>> [(arrival.side, arrival.at) for arrival in found if arrival.batch]
    [('a', 2.0), ('b', 4.0), ('a', 9.0)]
    """
    _check_given("columns", columns, streams)
    return _in_order({side: _timed(side, batches, columns[side]) for side, batches in streams.items()}, window, rows)


def arrivals_at_rates(
    streams: Mapping[str, Iterable[pa.RecordBatch]],
    rates: Mapping[str, float],
    seed: int,
    *,
    window: float = math.inf,
    rows: int = _ROWS,
) -> Iterator[Arrival]:
    """Yield the rows of all inputs in the order of simulated times of arrival: Poisson processes that start at 0.

    Parameters
    ----------
    streams, window, rows
        See `arrivals_by_time`.
    rates
        Rows per second of each input.
    seed
        Seed of the random times. The same seed and files give the same arrivals.

    Raises
    ------
    JoinInputError
        If a parameter is not valid, such as a rate that is not a positive number.
    StreamSchemaError
        If an input does not come as record batches.
    """
    _check_given("rates", rates, streams)
    check_number("seed", seed, 0)
    for side, rate in rates.items():
        if not _is_positive(rate):
            raise JoinInputError(
                f"the rate of input {side!r} must be a positive number of rows per second, not {rate!r}"
            )
    return _in_order(
        {
            side: _drawn(side, batches, rates[side], np.random.default_rng([seed, number]))
            for number, (side, batches) in enumerate(streams.items())
        },
        window,
        rows,
    )


def seconds_of(array: pa.Array, name: str) -> NDArray[np.float64]:
    """Return times as seconds; NaN where there is none.

    Parameters
    ----------
    array
        Instants, dates, times of day, durations, or numbers of seconds.
    name
        Name of the column, for the message.

    Raises
    ------
    JoinInputError
        If the type has no times.

    Examples
    --------
    >>> seconds_of(pa.array([1500, None], pa.timestamp("ms")), "at").tolist()
    [1.5, nan]
    """
    if not isinstance(array, pa.Array | pa.ChunkedArray):
        raise JoinInputError(f"{name} must be a pyarrow array, not {type(array).__name__}")
    dtype, types = array.type, pa.types
    if types.is_integer(dtype) or types.is_floating(dtype) or types.is_decimal(dtype):
        scale = 1.0
    elif types.is_date(dtype):
        array, scale = array.cast(pa.timestamp("s")).cast(pa.int64()), 1.0
    elif types.is_timestamp(dtype) or types.is_time(dtype) or types.is_duration(dtype):
        array = array.cast(pa.int32() if types.is_time32(dtype) else pa.int64())
        scale = float(_PER_SECOND[dtype.unit])
    else:
        raise JoinInputError(f"{name} has type {dtype}, which has no times; name a column of times or of seconds")
    numbers: NDArray[np.float64] = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers / scale


def replay(
    join: StreamsJoin[Any],
    arrivals: Iterable[Arrival],
    *,
    speed: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[pa.RecordBatch]:
    """Push arrivals into a join and yield its results, complete at the end.

    Parameters
    ----------
    join
        Operator with the inputs that the arrivals name.
    arrivals
        Arrivals in order of time.
    speed
        Seconds of the arrivals that pass in a second; None to wait for no arrival. While the replay waits, the join
        works on spilled tuples.
    clock
        Clock of the join, in seconds.
    sleep
        Waits for so many seconds.

    Examples
    --------
    >>> from headrace.joins.streams import SymmetricHash
    >>> a, b = pa.record_batch({"x": [1, 2]}), pa.record_batch({"x": [2, 3]})
    >>> with SymmetricHash({"a": a.schema, "b": b.schema}, on="x") as join:
    ...     [batch.to_pylist() for batch in replay(join, arrivals_in_turn({"a": [a], "b": [b]}))]
    [[{'x': 2, 'x_right': 2}]]
    """
    if not isinstance(join, StreamsJoin):
        raise JoinInputError(f"`join` must be a join of streams, not {join!r}")
    if speed is not None and not _is_positive(speed):
        raise JoinInputError(f"`speed` must be a positive number, or None to wait for no arrival, not {speed!r}")
    check_function("clock", clock)
    check_function("sleep", sleep)
    start: tuple[float, float] | None = None  # on the clock, and of the arrivals
    for arrival in _iterated("arrivals", arrivals):
        if not isinstance(arrival, Arrival):
            raise JoinInputError(
                f"a replay takes Arrivals, not {arrival!r}; make them of batches with arrivals_in_turn"
            )
        if speed is not None and arrival.at is not None:
            start = start or (clock(), arrival.at)
            yield from _wait(join, start[0] + (arrival.at - start[1]) / speed, clock, sleep)
        if arrival.batch is None:
            yield from join.end(arrival.side)
        else:
            yield from join.push(arrival.batch, side=arrival.side)
    yield from join.finish()


def _wait(
    join: StreamsJoin[Any], due: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the results of reactive work until it is time for the next arrival."""
    while (left := due - clock()) > 0:
        sleep(min(left, WAIT_THRESHOLD))
        yield from join.idle(until=due)


def _streams(streams: Mapping[str, Iterable[pa.RecordBatch]]) -> Mapping[str, Iterable[pa.RecordBatch]]:
    if not isinstance(streams, Mapping):
        raise JoinInputError(f"`streams` must map the names of inputs to their batches, not {streams!r}")
    return streams


def _check_given(name: str, given: object, streams: Mapping[str, Iterable[pa.RecordBatch]]) -> None:
    """Refuse a parameter that does not map the name of each input to something."""
    missing = [side for side in _streams(streams) if not isinstance(given, Mapping) or side not in given]
    if missing:
        raise JoinInputError(f"`{name}` must have an entry for input {missing[0]!r}, and is {given!r}")


def _iterated(name: str, given: Iterable[Any]) -> Iterator[Any]:
    if not isinstance(given, Iterable):
        raise JoinInputError(f"{name} must be iterable, as a list is, not {given!r}")
    return iter(given)


def _batches(side: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an input, checked."""
    for batch in _iterated(f"the batches of input {side!r}", batches):
        check_batch(batch)
        yield batch


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0 < float(value) < math.inf


def _timed(side: str, batches: Iterable[pa.RecordBatch], column: str) -> Iterator[Timed]:
    """Yield batches with the times of their rows, checked."""
    latest, before = -math.inf, 0
    for batch in _batches(side, batches):
        if len(batch) == 0:
            continue
        if batch.schema.names.count(column) != 1:
            raise StreamSchemaError(
                f"input {side!r} must have one time column {column!r}; its columns are "
                f"{', '.join(map(repr, batch.schema.names))}"
            )
        times = seconds_of(batch.column(column), f"column {column!r} of input {side!r}")
        bad = np.flatnonzero(~np.isfinite(times))
        if len(bad):
            raise JoinInputError(
                f"row {before + int(bad[0]) + 1:,} of input {side!r} has no time in column {column!r}; remove such "
                "rows, or replay the inputs without their times"
            )
        back = np.flatnonzero(np.diff(times, prepend=latest) < 0)
        if len(back):
            raise JoinInputError(
                f"row {before + int(back[0]) + 1:,} of input {side!r} is earlier than the row before it; sort the "
                f"input by {column!r}, or replay the inputs without their times"
            )
        latest, before = float(times[-1]), before + len(batch)
        yield batch, times


def _drawn(side: str, batches: Iterable[pa.RecordBatch], rate: float, rng: np.random.Generator) -> Iterator[Timed]:
    latest = 0.0
    for batch in _batches(side, batches):
        if len(batch):
            times = latest + np.cumsum(rng.exponential(1 / rate, len(batch)))
            latest = float(times[-1])
            yield batch, times


class _Head:
    """The batch of an input that comes next, and its next row."""

    def __init__(self, side: str, batches: Iterator[Timed]) -> None:
        self.side = side
        self._batches = batches
        self._at = 0
        self._current: Timed | None = next(batches, None)

    @property
    def done(self) -> bool:
        return self._current is None

    @property
    def first(self) -> float:
        """Time of the next row."""
        assert self._current is not None
        return float(self._current[1][self._at])

    def reach(self, rows: int) -> float:
        """Return the time up to which at most `rows` rows of the batch come, those of one time counted as one."""
        assert self._current is not None
        times = self._current[1]
        return float(times[min(self._at + rows, len(times)) - 1])

    def take(self, bound: float) -> Iterator[Arrival]:
        """Yield the rows up to a time."""
        while self._current is not None and self.first <= bound:
            batch, times = self._current
            stop = int(np.searchsorted(times, bound, side="right"))
            yield Arrival(self.side, batch.slice(self._at, stop - self._at), float(times[stop - 1]))
            self._at = stop
            if stop == len(batch):
                self._current, self._at = next(self._batches, None), 0


def _in_order(streams: Mapping[str, Iterator[Timed]], window: float, rows: int) -> Iterator[Arrival]:
    check_seconds("window", window, 0)
    check_number("rows", rows, 1)
    return _merged(streams, window, rows)


def _merged(streams: Mapping[str, Iterator[Timed]], window: float, rows: int) -> Iterator[Arrival]:
    heads, latest = [_Head(side, batches) for side, batches in streams.items()], None
    while heads:
        for head in [head for head in heads if head.done]:
            yield Arrival(head.side, None, latest)
            heads.remove(head)
        if heads:
            heads.sort(key=lambda head: head.first)
            bound = min(heads[0].first + window, *(head.reach(rows) for head in heads))
            for head in heads:
                for arrival in head.take(bound):
                    latest = arrival.at
                    yield arrival
