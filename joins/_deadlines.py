"""When phases have to start so that tuples leave in time, and how long tuples waited. Holds no tuples.

The paper's section IV-F: the cost model first assumes a random read for each page, and is corrected by the worst that
join phases with a similar number of pages have cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from joins._input_buffer import Arrivals

__all__ = ["OperatorTime", "PhaseEstimate", "WaitRecord"]

_BUCKETS = 64


class OperatorTime:
    """The operator's time: the clock's, shifted to agree with the times at which it is said to be called.

    Parameters
    ----------
    clock
        Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offset = 0.0
        self._latest = -np.inf

    def now(self) -> float:
        """Return the time, which never goes back."""
        self._latest = max(self._latest, self._clock() + self._offset)
        return float(self._latest)

    def set(self, at: float | None) -> float:
        """Take `at` as the time of the call that is being made, if it is given, and return the time."""
        if at is not None:
            self._offset = max(at, self._latest) - self._clock()
            self._latest = max(at, self._latest)
        return self.now()


class PhaseEstimate:
    """How long a join phase over so many pages takes, at worst.

    Parameters
    ----------
    seek, transfer
        Seconds of a random read, and of each page in it (the paper's S and T).

    Examples
    --------
    >>> estimate = PhaseEstimate(seek=0.01, transfer=0.001)
    >>> round(estimate.seconds(100), 6)
    1.1
    >>> estimate.learn(100, 0.2)
    >>> estimate.seconds(100)
    0.2
    """

    nbytes = 8 * _BUCKETS

    def __init__(self, seek: float, transfer: float) -> None:
        self._random_read = seek + transfer
        self._worst = np.zeros(_BUCKETS)

    def seconds(self, pages: int) -> float:
        """Return the estimate; none of it is based on less than the worst phase with about as many pages."""
        if pages <= 0:
            return 0.0
        worst = self._worst[_bucket(pages)]
        return float(pages * (worst or self._random_read))

    def learn(self, pages: int, seconds: float) -> None:
        """Note what a join phase has cost."""
        if pages > 0:
            bucket = _bucket(pages)
            self._worst[bucket] = max(self._worst[bucket], seconds / pages)


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
            # The same sum as that which decides when a phase is due, so that both round alike.
            late = np.asarray(arrival) + self._deadline < now
            self.misses += int(late.sum()) if late.ndim else int(late) * rows


def _bucket(pages: int) -> int:
    return pages.bit_length()
