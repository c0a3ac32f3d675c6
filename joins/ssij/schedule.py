"""When SSIJ's phases have to begin so that tuples leave in time (the paper's section IV-F)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.joins.ssij.phase_estimate import PhaseEstimate
    from headrace.joins.ssij.store import Store
    from headrace.joins.ssij.thresholds import Thresholds

__all__ = ["Schedule"]

_SPANS = 8
_STANDS_STILL = 0.25  # of a phase: had tuples arrived meanwhile, some would have waited longer


class _RecentMaximum:
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


class Schedule:
    """Says when the phases that are due begin.

    Beside what a join phase takes, two things count that the paper does not name. Tuples that arrive while another
    phase runs wait for that one and for their own, unless the stream is pulled: then it stands still meanwhile, and a
    phase may take nearly all of the deadline. And the tuples of a batch, which arrive together, are to wait for the
    same phase: it begins when all have been looked up, so what a batch takes is allowed for.

    Parameters
    ----------
    deadline
        Seconds that a tuple may wait; None for ever.
    store
        With the buffers.
    thresholds
        How many tuples wait together.
    estimate
        How long a join phase takes.
    """

    def __init__(self, deadline: float | None, store: Store, thresholds: Thresholds, estimate: PhaseEstimate) -> None:
        self._deadline = deadline
        self._store = store
        self._thresholds = thresholds
        self._estimate = estimate
        self._behind = _RecentMaximum()
        self._phase = _RecentMaximum()
        self._look_up = _RecentMaximum()
        self._began = 0.0

    def batch_begins(self, after: float, online: float) -> None:
        """Note that a batch is taken in, so many seconds after its arrival.

        Parameters
        ----------
        online
            Seconds that online phases have taken so far.
        """
        self._behind.note(after)
        self._began = online

    def batch_ends_soon(self, online: float) -> bool:
        """Return whether the rest of the batch is to be looked up before the next phase: it is no longer than usual."""
        return online - self._began <= self._look_up.value

    def batch_ends(self, online: float) -> None:
        """Note that the batch has been taken in."""
        self._look_up.note(online - self._began)

    def phase_ends(self, seconds: float) -> None:
        """Note that a join phase has ended, which took so many seconds."""
        self._phase.note(seconds)
        for recent in (self._behind, self._phase, self._look_up):
            recent.next()

    def due(self, row_nbytes: float) -> float | None:
        """Latest time at which the next phase has to begin: an online phase if anything is in the input buffer.

        The paper leaves those tuples of the input buffer out of a join phase that do not expire during it; they would
        wait for two. So all take part, and until they have been looked up each counts as one more page. If they are
        too many to wait together, there will be several join phases one after the other.
        """
        store = self._store
        arrivals = [oldest for oldest in (store.input.oldest, store.stream.oldest) if oldest is not None]
        if not arrivals or self._deadline is None:
            return None
        most = min(self._thresholds.join(row_nbytes), store.tuples_at_most(row_nbytes))
        together = max(most, store.stream.rows)
        phases = -(-(store.stream.rows + store.input.rows) // together)
        seconds = phases * self._seconds_of_all
        if self._pulled:
            return min(arrivals) + max(0.0, self._deadline - seconds - self._look_up.value)
        return min(arrivals) + (self._deadline - seconds if seconds <= self._deadline / 2 else 0.0)

    @property
    def _seconds_of_all(self) -> float:
        """What a join phase takes if each tuple of the input buffer wants one more page."""
        store = self._store
        pages = min(store.stream.pages + store.input.rows, len(store.snapshot.leaf_pages))
        return self._estimate.seconds(pages)

    @property
    def _pulled(self) -> bool:
        """Whether nothing has arrived during join phases of late."""
        return self._phase.known and self._behind.value < _STANDS_STILL * self._phase.value
