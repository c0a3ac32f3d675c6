"""When SSIJ's phases have to begin so that tuples leave in time (the paper's section IV-F)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from joins._deadlines import RecentMaximum

if TYPE_CHECKING:
    from joins._deadlines import PhaseEstimate
    from joins._store import Store
    from joins._thresholds import Thresholds

__all__ = ["Schedule"]


class Schedule:
    """Says when the phases that are due begin.

    Beside what a join phase takes, two things count that the paper does not name. Where tuples arrive while another
    phase runs, they wait for that one and for their own. And the tuples of a batch, which arrive together, are to wait
    for the same phase: it begins when all have been looked up, so what a batch takes is allowed for.

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
        self._behind = RecentMaximum()
        self._look_up = RecentMaximum()
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

    def phase_ends(self) -> None:
        """Note that a join phase has ended."""
        self._behind.next()
        self._look_up.next()

    def online_due(self, row_nbytes: float) -> float | None:
        """Latest start of an online phase, were each tuple in the input buffer to want one more page.

        If they are too many to wait together, there will be several join phases one after the other.
        """
        store = self._store
        oldest = store.input.oldest
        if oldest is None or self._deadline is None:
            return None
        waiting, coming = store.stream, store.input.rows
        pages = min(waiting.pages + coming, len(store.snapshot.leaf_pages))
        together = min(self._thresholds.join(row_nbytes), store.tuples_at_most(row_nbytes))
        phases = -(-(waiting.rows + coming) // together)
        return oldest + self._deadline - phases * self._estimate.seconds(pages)

    def join_due(self) -> float | None:
        """Latest start of a join phase; at once if tuples arrive during phases that are too long for two of them."""
        oldest = self._store.stream.oldest
        if oldest is None or self._deadline is None:
            return None
        spare = self._deadline - self._estimate.seconds(self._store.stream.pages)
        return oldest if self._behind.value > spare else oldest + max(0.0, spare - self._look_up.value)
