"""Trial of the record tier: what a tuple costs in reads with the tier, and what it costs without.

Popular rows that lie together are served by cached pages as well, and the tier only takes memory from these pages and
from waiting tuples. How many hits the pages would have with that memory cannot be told from hits of the tier, so reads
are counted with and without it. Costs are those of the device model, not measured times, so that equal streams lead to
equal decisions.
"""

from __future__ import annotations

__all__ = ["TierTrial"]

_WORTH = 0.97  # share of the reads without the tier: it must save a few percent of them
_LEAST_TUPLES = 65_536  # tuples in a measurement, which lasts for one join phase at least
_SETTLING = 2  # join phases after a change of mode that are not measured: one of both modes, one that fills the memory


class TierTrial:
    """Read costs per tuple in two modes, from the ends of join phases.

    Examples
    --------
    >>> trial = TierTrial()
    >>> for done, seconds in (0, 0.0), (50_000, 1.5), (150_000, 3.5):
    ...     trial.phase_ends(done, seconds, active=False)
    >>> for done, seconds in (200_000, 4.0), (250_000, 4.6), (350_000, 5.6):
    ...     trial.phase_ends(done, seconds, active=True)
    >>> trial.without, trial.with_tier, trial.pays
    (2e-05, 1e-05, True)
    """

    def __init__(self) -> None:
        self.without: float | None = None
        self.with_tier: float | None = None
        self._began: tuple[int, float] | None = None
        self._settling, self._active = _SETTLING, False

    @property
    def pays(self) -> bool | None:
        """Whether the tier saves reads; None while that is unknown."""
        if self.with_tier is None or self.without is None:
            return None
        return self.with_tier <= _WORTH * self.without

    def restart(self, *, active: bool) -> None:
        """Measure again in a mode that begins now."""
        self._began, self._settling, self._active = None, _SETTLING, active
        if active:
            self.with_tier = None
        else:
            self.without = None

    def phase_ends(self, done: int, seconds: float, *, active: bool) -> None:
        """Note the end of a join phase.

        Parameters
        ----------
        done
            Tuples completed so far.
        seconds
            Cost of all reads so far, by the device model.
        active
            Whether the tier is active and holds most of the rows that it will hold.
        """
        if active != self._active:
            self._began, self._settling, self._active = None, _SETTLING, active
        if self._began is None:
            self._settling -= 1
            self._began = None if self._settling else (done, seconds)
            return
        tuples, cost = done - self._began[0], seconds - self._began[1]
        if tuples < _LEAST_TUPLES:
            return
        self._began = (done, seconds)
        if active:
            self.with_tier = cost / tuples
        else:
            self.without = cost / tuples
