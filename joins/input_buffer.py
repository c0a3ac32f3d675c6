"""Slices of stream batches with their arrival times, and the input buffer (the paper's IB), which queues them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.joins.deadlines import Arrivals, Deadlines
from headrace.joins.dictionaries import own_nbytes
from headrace.storage.format import concat_batches, take

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["Arrivals", "BatchSlice", "DeferredSlice", "InputBuffer", "LocatedSlice", "arrivals_at", "compact"]

_SHARED = 1.5


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Stream tuples and when they arrived.

    Attributes
    ----------
    rows
        Stream tuples.
    arrival
        Time of arrival in seconds, with due times if the stream states them.
    """

    rows: pa.RecordBatch
    arrival: Arrivals

    def parts(self, count: int) -> list[Self]:
        """Return `count` slices of about equal numbers of tuples."""
        bounds = [len(self.rows) * part // count for part in range(count + 1)]
        return [self.slice(start, stop) for start, stop in pairwise(bounds)]

    def slice(self, start: int, stop: int) -> Self:
        """Return the tuples from `start` up to `stop`."""
        arrival = self.arrival[start:stop] if isinstance(self.arrival, np.ndarray) else self.arrival
        return replace(self, rows=self.rows.slice(start, stop - start), arrival=arrival)


@dataclass(frozen=True, slots=True)
class LocatedSlice(BatchSlice):
    """Stream tuples and the leaf in which each may have its match.

    Attributes
    ----------
    leaf : int32[rows]
        Ordinal of the leaf.
    """

    leaf: NDArray[np.int32]

    def slice(self, start: int, stop: int) -> Self:
        """Return the tuples from `start` up to `stop`."""
        return replace(BatchSlice.slice(self, start, stop), leaf=self.leaf[start:stop])

    def only(self, which: NDArray[np.intp]) -> Self:
        """Return some of the tuples."""
        rows, arrival = take(self.rows, which), arrivals_at(self.arrival, which)
        return replace(self, rows=rows, arrival=arrival, leaf=self.leaf[which])


@dataclass(frozen=True, slots=True)
class DeferredSlice(LocatedSlice):
    """Stream tuples whose first leaf could not decide their match, so that they go on to the neighboring leaf."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tuples without dictionaries."""
        return (
            own_nbytes(self.rows) + self.leaf.nbytes + (0 if isinstance(self.arrival, float) else self.arrival.nbytes)
        )


class InputBuffer:
    """Queue of stream tuples. It counts its bytes; the operator charges them to the budget.

    Tuples leave in the order of their due times, which is the order of arrival unless they state deadlines themselves.

    Parameters
    ----------
    deadlines
        How long tuples may wait.

    Attributes
    ----------
    rows, nbytes
        Number of tuples, and their bytes.
    due, tightest
        Earliest due time of a tuple and smallest allowance; infinity if there are none.
    """

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._batches: deque[tuple[pa.RecordBatch, Arrivals]] = deque()
        self.rows = 0
        self.nbytes = 0
        self.due = self.tightest = math.inf

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """Batches of tuples in the queue."""
        return [rows for rows, _ in self._batches]

    def soon(self, share: float) -> float:
        """Return the earliest time at which a tuple has waited for this share of its allowance."""
        return min((self._deadlines.soon(arrival, share) for _, arrival in self._batches), default=math.inf)

    def add(self, rows: pa.RecordBatch, arrival: Arrivals) -> None:
        """Append tuples. They must not have arrived before those already here."""
        if len(rows):
            self._batches.append((rows, arrival))
            self.rows += len(rows)
            self.nbytes += _nbytes(rows, arrival)
            self._note(arrival)

    def take(self, count: int) -> BatchSlice:
        """Remove the `count` tuples that are due first, or all if there are fewer, and return them as one slice."""
        if self._deadlines.column is not None and count < self.rows:
            taken = self._take_earliest(count)
        else:
            taken = self._take_oldest(min(count, self.rows))
        self.due = self.tightest = math.inf
        for _, arrival in self._batches:
            self._note(arrival)
        return _joined(taken)

    def _note(self, arrival: Arrivals) -> None:
        self.due = min(self.due, self._deadlines.earliest(arrival))
        self.tightest = min(self.tightest, self._deadlines.tightest(arrival))

    def _take_oldest(self, wanted: int) -> list[tuple[pa.RecordBatch, Arrivals]]:
        taken: list[tuple[pa.RecordBatch, Arrivals]] = []
        while wanted > 0:
            rows, arrival = self._batches.popleft()
            self.nbytes -= _nbytes(rows, arrival)
            if len(rows) > wanted:
                batch = BatchSlice(rows, arrival)
                rest, first = batch.slice(wanted, len(rows)), batch.slice(0, wanted)
                self._batches.appendleft((rest.rows, rest.arrival))
                self.nbytes += _nbytes(rest.rows, rest.arrival)
                rows, arrival = first.rows, first.arrival
            taken.append((rows, arrival))
            wanted -= len(rows)
            self.rows -= len(rows)
        return taken

    def _take_earliest(self, count: int) -> list[tuple[pa.RecordBatch, Arrivals]]:
        due = np.concatenate([np.asarray(self._deadlines.due(arrival)) for _, arrival in self._batches])
        chosen = np.zeros(len(due), dtype=np.bool_)
        chosen[np.argpartition(due, count - 1)[:count]] = True
        taken: list[tuple[pa.RecordBatch, Arrivals]] = []
        start = 0
        for _ in range(len(self._batches)):
            rows, arrival = self._batches.popleft()
            marks, start = chosen[start : start + len(rows)], start + len(rows)
            self.nbytes -= _nbytes(rows, arrival)
            self.rows -= len(rows)
            first, rest = np.flatnonzero(marks), np.flatnonzero(~marks)
            if len(first):
                taken.append((_rows_at(rows, first), arrivals_at(arrival, first)))
            if len(rest):
                self._batches.append((_rows_at(rows, rest), arrivals_at(arrival, rest)))
                self.nbytes += _nbytes(*self._batches[-1])
                self.rows += len(rest)
        return taken


def arrivals_at(arrival: Arrivals, rows: NDArray[np.integer]) -> Arrivals:
    """Return the arrival of the tuples at these positions."""
    return arrival[rows] if isinstance(arrival, np.ndarray) else arrival


def compact(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows in buffers of their own, if the buffers that they share are much larger."""
    if rows.num_columns == 0 or rows.get_total_buffer_size() <= _SHARED * rows.nbytes:
        return rows
    return take(rows, np.arange(len(rows), dtype=np.int32))


def _nbytes(rows: pa.RecordBatch, arrival: Arrivals) -> int:
    return rows.nbytes + (arrival.nbytes if isinstance(arrival, np.ndarray) else 0)


def _rows_at(rows: pa.RecordBatch, index: NDArray[np.intp]) -> pa.RecordBatch:
    return rows if len(index) == len(rows) else take(rows, index)


def _joined(taken: list[tuple[pa.RecordBatch, Arrivals]]) -> BatchSlice:
    if len(taken) == 1:
        return BatchSlice(*taken[0])
    rows = concat_batches([rows for rows, _ in taken])
    first = taken[0][1]
    if not isinstance(first, np.ndarray) and all(np.array_equal(arrival, first) for _, arrival in taken):
        return BatchSlice(rows, first)
    each = [np.broadcast_to(np.asarray(arrival), len(rows)) for rows, arrival in taken]
    return BatchSlice(rows, np.concatenate(each))
