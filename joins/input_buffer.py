"""Slices of stream batches with their arrival times, and the input buffer (the paper's IB), which queues them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from headrace.storage.format.copies import concat_batches, take

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Arrivals", "BatchSlice", "DeferredSlice", "InputBuffer", "LocatedSlice", "arrivals_at", "compact"]

Arrivals = float | NDArray[np.float64]
"""Arrival of tuples in seconds: one time for all of them, or one each."""

_SHARED = 1.5


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Stream tuples and when they arrived.

    Attributes
    ----------
    rows
        Stream tuples.
    arrival
        Time of arrival in seconds.
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


@dataclass(frozen=True, slots=True)
class DeferredSlice(LocatedSlice):
    """Stream tuples whose first leaf could not decide their match, so that they go on to the neighboring leaf."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tuples."""
        return self.rows.nbytes + self.leaf.nbytes + (0 if isinstance(self.arrival, float) else self.arrival.nbytes)


class InputBuffer:
    """First-in, first-out queue of stream tuples. It counts its bytes; the operator charges them to the budget."""

    def __init__(self) -> None:
        self._batches: deque[tuple[pa.RecordBatch, float]] = deque()
        self.rows = 0
        self.nbytes = 0

    @property
    def oldest(self) -> float | None:
        """Arrival of the tuple that has waited longest; None if the buffer is empty."""
        return self._batches[0][1] if self._batches else None

    def add(self, rows: pa.RecordBatch, arrival: float) -> None:
        """Append tuples. They must not have arrived before those already here."""
        if len(rows):
            self._batches.append((rows, arrival))
            self.rows += len(rows)
            self.nbytes += rows.nbytes

    def take(self, count: int) -> BatchSlice:
        """Remove the oldest `count` tuples, or all if there are fewer, and return them as one slice."""
        taken: list[tuple[pa.RecordBatch, float]] = []
        wanted = min(count, self.rows)
        while wanted > 0:
            rows, arrival = self._batches.popleft()
            self.nbytes -= rows.nbytes
            if len(rows) > wanted:
                rest = rows.slice(wanted)
                self._batches.appendleft((rest, arrival))
                self.nbytes += rest.nbytes
                rows = rows.slice(0, wanted)
            taken.append((rows, arrival))
            wanted -= len(rows)
            self.rows -= len(rows)
        return _joined(taken)


def arrivals_at(arrival: Arrivals, rows: NDArray[np.integer]) -> Arrivals:
    """Return the arrival of the tuples at these positions."""
    return arrival[rows] if isinstance(arrival, np.ndarray) else arrival


def compact(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows in buffers of their own, if the buffers that they share are much larger."""
    if rows.num_columns == 0 or rows.get_total_buffer_size() <= _SHARED * rows.nbytes:
        return rows
    return take(rows, np.arange(len(rows), dtype=np.int32))


def _joined(taken: list[tuple[pa.RecordBatch, float]]) -> BatchSlice:
    if len(taken) == 1:
        return BatchSlice(*taken[0])
    rows = concat_batches([rows for rows, _ in taken])
    first = taken[0][1]
    if all(arrival == first for _, arrival in taken):
        return BatchSlice(rows, first)
    return BatchSlice(rows, np.repeat([arrival for _, arrival in taken], [len(rows) for rows, _ in taken]))
