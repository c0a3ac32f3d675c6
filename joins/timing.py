"""Clock of an operator, and how long its tuples waited. Holds no tuples."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.deadlines import arrived

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.joins.deadlines import Arrivals, Deadlines
    from headrace.joins.stats import Counters

__all__ = ["CompletionLog", "OperatorTime", "WaitRecord"]

_ROUNDING = 1e-9


class OperatorTime:
    """Clock of the operator, moved forward to the times that its caller states.

    Parameters
    ----------
    clock
        Returns the time in seconds. Without one, time runs like `time.monotonic` from the first time that is stated.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock or time.monotonic
        self._offset = 0.0
        self._free = clock is None

    def now(self) -> float:
        """Return the current time."""
        return self._clock() + self._offset

    def reach(self, at: float | None) -> float:
        """Move forward to the time `at`, if it is given and still ahead. Return it, or else the current time."""
        if at is None:
            self._free = False
            return self.now()
        if self._free or at > self.now():
            self._offset = at - self._clock()
            self._free = False
        return at


class WaitRecord:
    """Longest wait of all tuples, and how many missed their deadline.

    Parameters
    ----------
    deadlines
        How long tuples may wait.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.longest = 0.0
        self.misses = 0

    def note(self, arrival: Arrivals, rows: int, now: float) -> None:
        """Record tuples that are complete."""
        if rows == 0:
            return
        self.longest = max(self.longest, now - float(np.min(arrived(arrival))))
        if self._deadlines.any:
            late = np.asarray(self._deadlines.due(arrival)) < now - _ROUNDING
            self.misses += int(late.sum()) if late.ndim else int(late) * rows


class CompletionLog:
    """Counts completed tuples and measures how long they waited.

    Parameters
    ----------
    counters
        Running counts of the operator.
    waits
        Record of the waits.
    time
        Clock of the operator.
    """

    def __init__(self, counters: Counters, waits: WaitRecord, time: OperatorTime) -> None:
        self._counters = counters
        self._waits = waits
        self._time = time

    def note(self, arrival: Arrivals, rows: int) -> None:
        """Count tuples whose join is complete."""
        self._counters.rows_done += rows
        self._waits.note(arrival, rows, self._time.now())
