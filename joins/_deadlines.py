"""When phases have to start so that tuples leave in time, and how long tuples waited. Holds no tuples.

The paper's section IV-F: the cost model first assumes a random read for each page, and is corrected by the worst that
join phases with a similar number of pages have cost. Two things are added. No phase needs more than a scan of the whole
relation; without that bound a phase that seems too long is never tried, and so never learnt. And of a number of pages
that no phase has had yet, the model is taken to err as it has erred before: on its own of random reads and of scans.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from joins._input_buffer import Arrivals

__all__ = ["OperatorTime", "PhaseEstimate", "RecentMaximum", "WaitRecord"]

_BUCKETS = 64
_ROUNDING = 1e-9
_FADING = 0.9  # a single hiccup, or the loading of a kernel, is not to spoil the estimate for ever
_SPANS = 8
_SCAN_CAUTION = 1.2
_CAUTION = 1.25  # the next phase may find its pages less close together than the worst so far


class OperatorTime:
    """The operator's time: the clock's, moved forward to the times at which the operator is said to be called.

    Parameters
    ----------
    clock
        Returns the time in seconds. Without one, time runs like `time.monotonic` from the first time that is said.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock or time.monotonic
        self._offset = 0.0
        self._free = clock is None

    def now(self) -> float:
        """Return the time."""
        return self._clock() + self._offset

    def reach(self, at: float | None) -> float:
        """Move on to the time `at`, if it is given and still ahead; return it, or else the time."""
        if at is None:
            self._free = False
            return self.now()
        if self._free or at > self.now():
            self._offset = at - self._clock()
            self._free = False
        return at


class RecentMaximum:
    """The greatest of the numbers noted of late, none negative: in the last few join phases and between them."""

    def __init__(self) -> None:
        self._spans = deque([0.0], maxlen=_SPANS)

    @property
    def value(self) -> float:
        """The greatest number, or 0."""
        return max(self._spans)

    @property
    def known(self) -> bool:
        """Whether all of these spans have been."""
        return len(self._spans) == _SPANS

    def note(self, value: float) -> None:
        """Note a number."""
        self._spans[-1] = max(self._spans[-1], value)

    def next(self) -> None:
        """Begin another span; the oldest is forgotten."""
        self._spans.append(0.0)


class PhaseEstimate:
    """How long a join phase over so many pages takes, at worst.

    Parameters
    ----------
    seek, transfer
        Seconds of a random read, and of each page in it (the paper's S and T).
    scan
        Seconds of reading the whole relation; may be set anew when it has changed.

    Examples
    --------
    >>> estimate = PhaseEstimate(seek=0.01, transfer=0.001, scan=5.0)
    >>> round(estimate.seconds(100), 6), estimate.seconds(10_000)
    (1.1, 5.0)
    >>> estimate.learn(100, 0.2)
    >>> round(estimate.seconds(100), 6)
    0.261
    """

    nbytes = 8 * _BUCKETS

    def __init__(self, seek: float, transfer: float, scan: float = math.inf) -> None:
        self._random_read = seek + transfer
        self.scan = scan
        self._worst = np.zeros(_BUCKETS)
        self._reads_error = RecentMaximum()
        self._scan_error = RecentMaximum()

    def seconds(self, pages: int) -> float:
        """Return the estimate: what reading costs at most, or a little more than the worst phase of about this size."""
        if pages <= 0:
            return 0.0
        scan = self.scan * max(1.0, _SCAN_CAUTION * self._scan_error.value)
        worst = float(self._worst[_bucket(pages)])
        if worst:
            return min(scan, pages * _CAUTION * worst + self._random_read)
        return min(scan, pages * self._random_read * max(1.0, _CAUTION * self._reads_error.value))

    def learn(self, pages: int, seconds: float) -> None:
        """Note what a join phase has cost."""
        if pages > 0:
            bucket = _bucket(pages)
            self._worst[bucket] = max(_FADING * self._worst[bucket], seconds / pages)
            reads = pages * self._random_read
            if reads < self.scan:
                self._reads_error.note(seconds / reads)
                self._reads_error.next()
            if reads >= self.scan or seconds >= self.scan:
                self._scan_error.note(seconds / self.scan)
                self._scan_error.next()


class WaitRecord:
    """The longest wait of all tuples, and how many missed their deadline.

    Parameters
    ----------
    deadline
        Seconds that a tuple may wait, None if it may wait for ever.
    """

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self.longest = 0.0
        self.misses = 0

    def note(self, arrival: Arrivals, rows: int, now: float) -> None:
        """Note that tuples are complete."""
        if rows == 0:
            return
        self.longest = max(self.longest, now - float(np.min(arrival)))
        if self._deadline is not None:
            late = np.asarray(arrival) + self._deadline < now - _ROUNDING
            self.misses += int(late.sum()) if late.ndim else int(late) * rows


def _bucket(pages: int) -> int:
    return pages.bit_length()
