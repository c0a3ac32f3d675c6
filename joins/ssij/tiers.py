"""What SSIJ's memory holds of the relation beside its pages: the negative filter, and rows apart from their pages.

These are those rows that are asked for often, or where pages and rows both fit all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij.filter import FilterTier
from headrace.joins.ssij.records import RecordTier
from headrace.joins.ssij.whole import WholeTier
from headrace.storage.format import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.joins._sought import Sought
    from headrace.joins.memory import MemoryBudget
    from headrace.joins.ssij.direct_lookup import DirectLookup
    from headrace.joins.ssij.records import Sighted
    from headrace.storage.read import PageCache
    from headrace.storage.tree import Snapshot

__all__ = ["Tiers"]

_RECORDS_SHARE = 3
_TUPLES_SHARE = 8  # where all pages are cached, what is left for tuples that come in


class Tiers:
    """Filter, record tier and whole tier, each of which may be missing.

    Parameters
    ----------
    snapshot
        The relation.
    columns
        Of the results.
    budget
        From which they take what they hold.
    cache
        Of pages.
    lookup
        Of rows in them; None if these are not looked up directly, or no memory can be taken from the cache.
    spares
        Makes room for so many bytes, if it can be had.
    equality
        Whether keys are looked up, not ranges of keys: there is none of them otherwise.
    apart
        Whether rows may be kept apart from their pages.

    Attributes
    ----------
    filter, records, whole
        None where there can be none.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        budget: MemoryBudget,
        cache: PageCache,
        lookup: DirectLookup | None,
        spares: Callable[[int], bool],
        *,
        equality: bool,
        apart: bool,
    ) -> None:
        self._budget = budget
        self._spares = spares
        apart = apart and equality
        self.filter = FilterTier.of(snapshot, budget) if equality else None
        self.records = _record_tier(snapshot, columns, budget) if apart else None
        self.whole: WholeTier | None = None
        if apart and self.records is None and lookup is not None and lookup.fixed:
            self.whole = WholeTier(snapshot, lookup, cache, budget, spares)

    def records_ready(self, tuples: int) -> bool:
        """Return whether the record tier is to be asked for the next so many tuples; it may wake up for them."""
        if self.records is None or self.records.awake:
            return self.records is not None
        if not self.records.wants_to_wake(tuples) or not self._spares(self.records.nbytes):
            return False
        self._budget.resize("records", self.records.nbytes)
        self.records.wake()
        return True

    @property
    def records_awake(self) -> bool:
        """Whether there is a record tier at work."""
        return self.records is not None and self.records.awake

    def note_records(self, sighted: Sighted) -> None:
        """Count what the record tier has found; its memory is free if it fell asleep over it."""
        if self.records is not None and self.records.awake and not self.records.note(sighted):
            self._budget.resize("records", 0)

    def admit(
        self,
        frames: NDArray[np.uint8],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        count: NDArray[np.int32],
        keys: Sought,
    ) -> None:
        """Let the record tier have what it wants of rows just found in pages."""
        if self.records is not None and self.records.awake and isinstance(keys, Keys):
            self.records.admit(frames, frame, row, count, keys)

    def release_whole(self) -> bool:
        """Make the whole tier give its memory back; return whether it had any."""
        return self.whole is not None and self.whole.drop()

    @property
    def whole_nbytes(self) -> int:
        """Bytes that the whole tier would give back."""
        return 0 if self.whole is None else self.whole.nbytes

    def release(self) -> bool:
        """Make all of them give their memory back; return whether they had any."""
        had = self.release_whole() or bool(self._budget.held("records") or self._budget.held("filter"))
        if self.records is not None and self.records.awake:
            self.records.fall_asleep()
        if self.filter is not None:
            self.filter.fall_asleep()
        self._budget.resize("records", 0)
        return had

    def phase_done(self) -> None:
        """Wake the filter up if many tuples have waited in vain."""
        if self.filter is not None and self.filter.wants_to_wake() and self._spares(self.filter.nbytes):
            self.filter.wake()

    def growth(self, snapshot: Snapshot) -> int:
        """Return how many bytes more they take with another snapshot."""
        return 0 if self.filter is None else self.filter.growth(snapshot)

    def install(self, old: Snapshot, new: Snapshot, was: NDArray[np.intp], now: NDArray[np.intp]) -> None:
        """Go on with another snapshot, whose leaves `now` are those that `was` were. There is room for `growth`."""
        if self.whole is not None:
            self.whole.install(new)
        if self.records is not None:
            same = np.zeros(len(old.leaf_pages), dtype=np.bool_)
            same[was] = True
            self.records.keep_only(lambda keys: same[old.locate(Keys("u64", keys))[0]])
        if self.filter is not None:
            self.filter.install(new, was, now)


def _record_tier(snapshot: Snapshot, columns: Sequence[str], budget: MemoryBudget) -> RecordTier | None:
    """Return a tier of a third of the memory; none if the whole relation fits, whose pages are as fast."""
    available = budget.available
    nbytes = available // _RECORDS_SHARE
    fits = len(snapshot.leaf_pages) * snapshot.page_size <= available - available // _TUPLES_SHARE
    if fits or not RecordTier.possible(snapshot, columns, nbytes):
        return None
    return RecordTier(snapshot, columns, nbytes)
