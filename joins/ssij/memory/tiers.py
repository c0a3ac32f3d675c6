"""Tiers: what the memory holds of the relation beside its pages.

These are the negative filter; the record tier, with rows that are looked up often; and the row tier, with all rows, if
pages and rows both fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij.memory.filter_tier import FilterTier
from headrace.joins.ssij.memory.record_tier import RecordTier
from headrace.joins.ssij.memory.row_tier import RowTier
from headrace.storage.format import Keys
from headrace.storage.read import PagedSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.predicates.search_keys import SearchKeys
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup
    from headrace.joins.ssij.memory.record_tier import RecordMatches
    from headrace.joins.workers import Workers
    from headrace.storage.read import PageCache
    from headrace.storage.tree import Snapshot

__all__ = ["Tiers"]

_RECORDS_SHARE = 3  # the record tier has a third of the memory
_TUPLES_SHARE = 8  # where all pages are cached, an eighth of the memory stays free for arriving tuples


class Tiers:
    """Filter, record tier, and row tier, each of which may be missing.

    Parameters
    ----------
    snapshot
        Snapshot of the relation.
    columns
        Relation columns of the results.
    budget
        Budget that the tiers charge.
    cache
        Page cache.
    lookup
        Direct look-up; None if the keys do not allow it, or no memory can be taken from the cache.
    equality
        Whether keys are looked up, not ranges of keys. Otherwise there are no tiers.
    beside_pages
        Whether rows may be kept beside their pages.

    Attributes
    ----------
    filter, records, rows
        Negative filter, record tier, and row tier; None if missing.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        budget: MemoryBudget,
        cache: PageCache,
        lookup: DirectLookup | None,
        *,
        equality: bool,
        beside_pages: bool,
    ) -> None:
        self._budget = budget
        beside_pages = beside_pages and equality
        paged = isinstance(snapshot, PagedSnapshot)  # the filter has an element for each leaf
        self.filter = FilterTier.of(snapshot, budget) if equality and not paged else None
        self.records = _record_tier(snapshot, columns, budget) if beside_pages else None
        self.rows: RowTier | None = None
        if beside_pages and self.records is None and lookup is not None and lookup.fixed:
            self.rows = RowTier(snapshot, lookup, cache, budget)

    def use_records(self, tuples: int, make_room: Callable[[int], bool]) -> bool:
        """Return whether to look the next `tuples` tuples up in the record tier, which may become active for them.

        `make_room` makes room for a number of bytes, if possible.
        """
        if self.records is None or self.records.active:
            return self.records is not None
        if not self.records.should_activate(tuples) or not make_room(self.records.nbytes):
            return False
        self._budget.resize("records", self.records.nbytes)
        self.records.activate()
        return True

    @property
    def records_active(self) -> bool:
        """Whether there is an active record tier."""
        return self.records is not None and self.records.active

    def note_records(self, matches: RecordMatches) -> None:
        """Count what the record tier found, and release its memory if it became inactive."""
        if self.records is not None and self.records.active and not self.records.note(matches):
            self._budget.resize("records", 0)

    def begin_admission(
        self,
        workers: Workers,
        frames: NDArray[np.uint8],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        count: NDArray[np.int32],
        keys: SearchKeys,
    ) -> Callable[[], None] | None:
        """Offer rows that were just found in pages to the record tier, if it is active; see `RecordTier`."""
        if self.records is None or not self.records.active or not isinstance(keys, Keys):
            return None
        return self.records.begin_admission(workers, frames, frame, row, count, keys)

    def release_rows(self) -> bool:
        """Release the row tier's memory. Return whether it had any."""
        return self.rows is not None and self.rows.drop()

    @property
    def rows_nbytes(self) -> int:
        """Bytes that the row tier would release."""
        return 0 if self.rows is None else self.rows.nbytes

    def release(self) -> bool:
        """Release the memory of all tiers. Return whether they had any."""
        had = self.release_rows() or bool(self._budget.held("records") or self._budget.held("filter"))
        if self.records is not None and self.records.active:
            self.records.deactivate()
        if self.filter is not None:
            self.filter.deactivate()
        self._budget.resize("records", 0)
        return had

    def phase_done(self, make_room: Callable[[int], bool], done: int, seconds: float) -> None:
        """Activate the filter if many tuples have waited without a match. Tell the other tiers that pages came.

        `done` is the number of tuples completed so far, and `seconds` the cost of all reads by the device model.
        """
        if self.records is not None:
            self.records.phase_ends(done, seconds)
        if self.rows is not None:
            self.rows.phase_done()
        if self.filter is not None and self.filter.should_activate() and make_room(self.filter.nbytes):
            self.filter.activate()

    def growth(self, snapshot: Snapshot) -> int:
        """Return how many more bytes the tiers take with another snapshot."""
        return 0 if self.filter is None else self.filter.growth(snapshot)

    def install(self, old: Snapshot, new: Snapshot, was: NDArray[np.intp], now: NDArray[np.intp]) -> None:
        """Switch to another snapshot, in which leaf `now[i]` is leaf `was[i]` of the old one.

        There is room for `growth`.
        """
        if self.rows is not None:
            self.rows.install(new)
        if self.records is not None:
            same = np.zeros(len(old.leaf_pages), dtype=np.bool_)
            same[was] = True
            self.records.keep_only(lambda keys: same[old.locate(Keys("u64", keys))[0]])
        if self.filter is not None:
            self.filter.install(new, was, now)


def _record_tier(snapshot: Snapshot, columns: Sequence[str], budget: MemoryBudget) -> RecordTier | None:
    """Return a tier of a third of the memory; None if the whole relation fits, whose pages are as fast."""
    available = budget.available
    nbytes = available // _RECORDS_SHARE
    fits = snapshot.leaves * snapshot.page_size <= available - available // _TUPLES_SHARE
    if fits or not RecordTier.possible(snapshot, columns, nbytes):
        return None
    return RecordTier(snapshot, columns, nbytes)
