"""Deadlines of stream tuples: one for all of them, or one each from a column of the stream (section IV-F).

A tuple's *allowance* is how long it may wait. Its *due time* is its arrival plus its allowance, on the operator's
clock. The allowance is a duration and not an instant, because the instants in a stream come from the clocks of its
sources, and the operator's clock, which may be simulated, need not agree with any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["STAMP", "Arrivals", "Deadlines", "arrived"]

STAMP = np.dtype([("arrival", np.float64), ("due", np.float64)])
"""Arrival and due time of a tuple that brings a deadline of its own."""

Arrivals: TypeAlias = float | NDArray[Any]
"""Arrival of tuples in seconds: one time for all of them, or one each; a `STAMP` each if a column states deadlines."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def arrived(arrivals: Arrivals) -> float | NDArray[np.float64]:
    """Return the times of arrival without the due times."""
    if isinstance(arrivals, np.ndarray) and arrivals.dtype == STAMP:
        times: NDArray[np.float64] = arrivals["arrival"]
        return times
    return arrivals


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long tuples may wait.

    Attributes
    ----------
    default
        Seconds that a tuple may wait that states no allowance; None for no limit.
    column
        Stream column with the allowances: durations, or numbers of seconds. Null means the default. None if there is no
        such column.
    """

    default: float | None = None
    column: str | None = None

    @property
    def any(self) -> bool:
        """Whether any tuple can have a deadline."""
        return self.default is not None or self.column is not None

    def check(self, stream: pa.Schema) -> None:
        """Refuse a stream without the column, or with one that holds no durations.

        Raises
        ------
        StreamSchemaError
            If the column is missing, occurs twice, or has another type.
        """
        if self.column is None:
            return
        found = stream.get_all_field_indices(self.column)
        if len(found) != 1:
            count = "no column" if not found else f"{len(found)} columns"
            raise StreamSchemaError(
                f"the stream has {count} {self.column!r}{'' if found else nearest(self.column, stream.names)} for the "
                f"deadlines; its columns are {', '.join(stream.names)}"
            )
        kind = stream.field(found[0]).type
        if not (pa.types.is_duration(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise StreamSchemaError(
                f"deadline column {self.column!r} has type {kind}; it must hold durations, or numbers of seconds, that "
                "a tuple may wait from its arrival"
            )

    def stamp(self, batch: pa.RecordBatch, at: float) -> Arrivals:
        """Return the arrivals of a batch that arrived at `at`.

        Raises
        ------
        JoinInputError
            If an allowance is negative or not a number.
        """
        if self.column is None:
            return at
        stamps = np.empty(len(batch), dtype=STAMP)
        stamps["arrival"] = at
        stamps["due"] = at + self._allowances(batch.column(self.column))
        return stamps

    def due(self, arrivals: Arrivals) -> float | NDArray[np.float64]:
        """Return the due times; infinity for tuples without a deadline."""
        if isinstance(arrivals, np.ndarray) and arrivals.dtype == STAMP:
            times: NDArray[np.float64] = arrivals["due"]
            return times
        return arrivals + (math.inf if self.default is None else self.default)

    def earliest(self, arrivals: Arrivals) -> float:
        """Return the earliest due time; infinity if there is none."""
        if not self.any:
            return math.inf
        return float(np.min(self.due(arrivals), initial=math.inf))

    def tightest(self, arrivals: Arrivals) -> float:
        """Return the smallest allowance; infinity if there is none."""
        if not isinstance(arrivals, np.ndarray) or arrivals.dtype != STAMP:
            return math.inf if self.default is None else self.default
        return float(np.min(arrivals["due"] - arrivals["arrival"], initial=math.inf))

    def soon(self, arrivals: Arrivals, share: float) -> float:
        """Return the earliest time at which a tuple has waited for this share of its allowance."""
        if not self.any:
            return math.inf
        came = arrived(arrivals)
        return float(np.min(came + share * (self.due(arrivals) - came), initial=math.inf))

    def _allowances(self, values: pa.Array) -> NDArray[np.float64]:
        if pa.types.is_duration(values.type):
            unit = _PER_SECOND[values.type.unit]
            seconds = values.cast(pa.int64()).to_numpy(zero_copy_only=False).astype(np.float64) / unit
        else:
            seconds = values.to_numpy(zero_copy_only=False).astype(np.float64)
        missing = np.zeros(len(values), dtype=np.bool_)
        if values.null_count:
            missing = values.is_null().to_numpy(zero_copy_only=False)
            seconds[missing] = math.inf if self.default is None else self.default
        wrong = np.flatnonzero(~(seconds >= 0) & ~missing)
        if len(wrong):
            row = int(wrong[0])
            raise JoinInputError(
                f"deadline column {self.column!r}, row {row} of the batch: {float(seconds[row])} seconds is not a time "
                "that a tuple can wait; give durations of at least 0, or null for the operator's deadline"
            )
        return seconds
