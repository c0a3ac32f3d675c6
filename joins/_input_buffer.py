"""Stream tuples that have arrived and wait for an online phase (the paper's IB), oldest first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["Arrivals", "InputBuffer", "Piece", "Placed", "Postponed", "arrivals_at", "compact"]

Arrivals = float | NDArray[np.float64]
"""When tuples arrived, in seconds: one time for all of them, or one each."""

_SHARED = 1.5


@dataclass(frozen=True, slots=True)
class Piece:
    """Stream tuples and when they arrived."""

    rows: pa.RecordBatch
    arrival: Arrivals

    def parts(self, count: int) -> list[Self]:
        """Return pieces of about equal numbers of tuples."""
        bounds = [len(self.rows) * part // count for part in range(count + 1)]
        return [self.slice(start, stop) for start, stop in pairwise(bounds)]

    def slice(self, start: int, stop: int) -> Self:
        """Return some of the tuples."""
        arrival = self.arrival[start:stop] if isinstance(self.arrival, np.ndarray) else self.arrival
        return replace(self, rows=self.rows.slice(start, stop - start), arrival=arrival)


@dataclass(frozen=True, slots=True)
class Placed(Piece):
    """Stream tuples and the leaf that each has to meet.

    Attributes
    ----------
    leaf : int32[rows]
    """

    leaf: NDArray[np.int32]

    def slice(self, start: int, stop: int) -> Self:
        """Return some of the tuples."""
        return replace(Piece.slice(self, start, stop), leaf=self.leaf[start:stop])


@dataclass(frozen=True, slots=True)
class Postponed(Placed):
    """Stream tuples that have been to a leaf and found that only its neighbour can tell what they match."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tuples."""
        return self.rows.nbytes + self.leaf.nbytes + (0 if isinstance(self.arrival, float) else self.arrival.nbytes)


class InputBuffer:
    """A queue of stream tuples. Counts what it holds; charging the account is for the operator."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[pa.RecordBatch, float]] = deque()
        self.rows = 0
        self.nbytes = 0

    @property
    def oldest(self) -> float | None:
        """Arrival of the tuple that has waited longest, None if there is none."""
        return self._pieces[0][1] if self._pieces else None

    def add(self, rows: pa.RecordBatch, arrival: float) -> None:
        """Append tuples, which must not have arrived before those already here."""
        if len(rows):
            self._pieces.append((rows, arrival))
            self.rows += len(rows)
            self.nbytes += rows.nbytes

    def take(self, count: int) -> Piece:
        """Remove the oldest `count` tuples, or all if there are fewer, and return them as one batch."""
        taken: list[tuple[pa.RecordBatch, float]] = []
        wanted = min(count, self.rows)
        while wanted > 0:
            rows, arrival = self._pieces.popleft()
            self.nbytes -= rows.nbytes
            if len(rows) > wanted:
                rest = rows.slice(wanted)
                self._pieces.appendleft((rest, arrival))
                self.nbytes += rest.nbytes
                rows = rows.slice(0, wanted)
            taken.append((rows, arrival))
            wanted -= len(rows)
            self.rows -= len(rows)
        return _joined(taken)


def arrivals_at(arrival: Arrivals, rows: NDArray[np.integer]) -> Arrivals:
    """Return when these rows arrived."""
    return arrival[rows] if isinstance(arrival, np.ndarray) else arrival


def compact(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows without the rest of the buffers that they are a part of."""
    if rows.num_columns == 0 or rows.get_total_buffer_size() <= _SHARED * rows.nbytes:
        return rows
    return rows.take(pa.array(np.arange(len(rows), dtype=np.int32)))


def _joined(taken: list[tuple[pa.RecordBatch, float]]) -> Piece:
    if len(taken) == 1:
        return Piece(*taken[0])
    rows = pa.concat_batches([rows for rows, _ in taken])
    first = taken[0][1]
    if all(arrival == first for _, arrival in taken):
        return Piece(rows, first)
    return Piece(rows, np.repeat([arrival for _, arrival in taken], [len(rows) for rows, _ in taken]))
