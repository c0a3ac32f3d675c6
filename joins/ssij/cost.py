"""Worst-case duration of join phases, so that they start early enough for tuples to leave in time.

The paper's section IV-F: the cost model first assumes a random read for each page, and is corrected by the worst cost
of join phases with a similar number of pages. Two things are added. No phase takes longer than a scan of the whole
relation; without that bound a phase that seems too long is never tried, and so never learned from. And the estimate
separates the cost of reads by the model, which depends on how close together the pages lie, from the error of the
model, which also applies to numbers of pages that no phase has had yet. Random reads and scans have separate errors.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

__all__ = ["PhaseEstimate"]

_BUCKETS_AN_OCTAVE = 4
_BUCKETS = 32 * _BUCKETS_AN_OCTAVE
_DECAY = 0.9  # one hiccup, or the loading of a kernel, must not spoil the estimate for good
_PHASES = 8
_SCAN = 0.8  # share of a scan's cost: a plan that costs more has the error of a scan
_CAUTION = 1.25  # factor on the disk's error while that is not well known, or varies
_PLAN_CAUTION = 1.1  # the next phase may find its pages less close together than the worst so far


class _DiskError:
    """Ratio of measured to modeled read time in recent phases."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_PHASES)

    @property
    def known(self) -> bool:
        """Whether any phase was recorded."""
        return bool(self._ratios)

    @property
    def bound(self) -> float:
        """Ratio that the next phase is unlikely to exceed: the greatest, plus twice the recent variation."""
        if not self._ratios:
            return 1.0
        greatest, most = max(self._ratios), _CAUTION - 1
        varied = greatest - min(self._ratios) if len(self._ratios) == _PHASES else math.inf
        return max(1.0, greatest + min(2 * varied, most * greatest))

    def note(self, ratio: float) -> None:
        """Record the ratio of a phase."""
        self._ratios.append(ratio)


class PhaseEstimate:
    """Worst-case duration of a join phase, by number of pages.

    Parameters
    ----------
    seek, transfer
        Seconds of a random read, and of each page in it (the paper's S and T).
    scan
        Seconds of reading the whole relation. Set it again when the relation has changed.

    Examples
    --------
    >>> estimate = PhaseEstimate(seek=0.01, transfer=0.001, scan=5.0)
    >>> round(estimate.seconds(100), 6), estimate.seconds(10_000)
    (1.111, 5.011)
    >>> estimate.learn(100, planned=0.2, seconds=0.2)
    >>> round(estimate.seconds(100), 6)
    0.286
    """

    nbytes = 2 * 8 * _BUCKETS

    def __init__(self, seek: float, transfer: float, scan: float = math.inf) -> None:
        self._random_read = seek + transfer
        self.scan = scan
        self._pages = np.zeros(_BUCKETS)
        self._planned = np.zeros(_BUCKETS)
        self._reads_error = _DiskError()
        self._scan_error = _DiskError()

    @property
    def measured(self) -> bool:
        """Whether any join phase was recorded. Before, it is not known what the work beside the reads takes."""
        return self._reads_error.known or self._scan_error.known

    def seconds(self, pages: int, least: float = 0.0) -> float:
        """Return the estimate: the worst likely plan, on a disk with its recent error.

        A plan for more pages costs more, but at most in proportion, so each past phase bounds the next, as long as its
        pages lay no closer together. Work beside the reads is assumed to take no longer than one read.

        Parameters
        ----------
        pages
            Number of pages.
        least
            Cost of the reads by the model for those pages that are known.
        """
        if pages <= 0:
            return 0.0
        planned, known = pages * self._random_read, self._pages > 0
        if known.any():
            bounds = self._planned[known] * np.maximum(1.0, pages / self._pages[known])
            planned = min(planned, _PLAN_CAUTION * float(bounds.min()))
        planned = max(planned, least)
        reads = min(planned * self._error(planned).bound, self.scan * self._scan_error.bound)
        return reads + self._random_read

    def learn(self, pages: int, planned: float, seconds: float) -> None:
        """Record a join phase: the cost of its reads by the model, and the seconds it took.

        Earlier phases whose pages lay closer together no longer bound what they would have bound too low.
        """
        if pages <= 0 or planned <= 0:
            return
        at = int(_BUCKETS_AN_OCTAVE * math.log2(pages))
        self._planned[at] *= _DECAY
        if planned * self._pages[at] >= pages * self._planned[at]:
            self._pages[at], self._planned[at] = pages, planned
        self._planned = np.maximum(self._planned, planned * np.minimum(1.0, self._pages / pages))
        self._error(planned).note(seconds / planned)
        if seconds >= self.scan > planned:
            self._scan_error.note(seconds / self.scan)

    def _error(self, planned: float) -> _DiskError:
        """Return the error of plans with this cost."""
        return self._reads_error if planned < _SCAN * self.scan else self._scan_error
