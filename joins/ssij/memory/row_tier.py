"""Row tier: all rows of a relation beside its pages, where pages and rows both fit into the memory.

Finding a row in a page takes an access to its index entry, its key, and each column; a row by itself is in one place.
The tier is filled from the pages once all of them are cached. After a join phase that has read most of the relation at
once, the next batch fills it at once and by all threads, or with deadlines the next batches in large steps. After a
change of the relation it is worth filling again only when many tuples have come, and then a few pages at a time, so
that no tuple waits long for it. The pages stay: tuples that need memory take the tier's first, and changes of the
relation leave most of the pages as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup, LookupResult
    from headrace.joins.workers import Workers
    from headrace.storage.format import KeyWords
    from headrace.storage.probe import RowHash
    from headrace.storage.read import PageCache
    from headrace.storage.tree import Snapshot

__all__ = ["RowTier"]

_WAIT = 4  # rows per tuple that has to come first: more frequent changes would make the tier useless
_ROWS_PER_TUPLE = 2  # rows added per tuple of a batch: this never costs much more than the look-ups themselves
_ROWS_AFTER_A_SCAN = 1 << 22  # rows added after each batch when a scan has filled the cache: some 30 ms
_SCAN = 0.5  # share of the leaves that a scan brings in
_TUPLES_SHARE = 8  # an eighth of the memory stays free for arriving tuples


class RowTier:
    """All rows, or none as long as some are missing.

    Parameters
    ----------
    snapshot
        Snapshot of the relation.
    lookup
        Direct look-up, with descriptors of the cached pages.
    cache
        Page cache.
    budget
        Budget that the tier charges.
    """

    def __init__(self, snapshot: Snapshot, lookup: DirectLookup, cache: PageCache, budget: MemoryBudget) -> None:
        self._lookup = lookup
        self._cache = cache
        self._budget = budget
        self.install(snapshot)

    def install(self, snapshot: Snapshot) -> None:
        """Start over with another snapshot."""
        self._leaves = len(snapshot.leaf_pages)
        self._rows = snapshot.rows
        self._impossible = snapshot.rows == 0
        self._uneven = self._scanned = False
        self._cached = self._cache.used
        self.drop()

    def drop(self) -> bool:
        """Remove all rows and release their memory. Return whether there were any."""
        had = self.nbytes > 0
        self._table: RowHash | None = None
        self._frames: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._ends: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._done = self._looked = 0
        self._budget.resize("rows", 0)
        return had

    @property
    def nbytes(self) -> int:
        """Bytes that the tier holds."""
        return self._budget.held("rows")

    @property
    def ready(self) -> bool:
        """Whether the tier holds all rows."""
        return self._table is not None and self._done == len(self._frames)

    def find(self, keys: KeyWords, outer: bool) -> LookupResult:
        """Find rows in a ready tier. See `headrace.storage.probe.row_hash.RowHash.find`."""
        assert self._table is not None
        return self._lookup.find_rows(self._table, keys, outer)

    def phase_done(self) -> None:
        """Note whether a join phase has brought most of the relation into the cache."""
        self._scanned = self._scanned or self._cache.used - self._cached >= _SCAN * self._leaves
        self._cached = self._cache.used

    @property
    def wanted(self) -> bool:
        """Whether the tier could be filled if all pages were cached."""
        return self._table is None and not self._impossible

    def fill(self, workers: Workers, make_room: Callable[[int], bool]) -> None:
        """Add all rows if a scan has filled the cache.

        `make_room` makes room for a number of bytes, if possible.
        """
        if self._scanned and not self._impossible and not self.ready and self._cache.used == self._leaves:
            self._add(self._rows, make_room, workers)

    def advance(self, tuples: int, make_room: Callable[[int], bool]) -> None:
        """Add more rows, after `tuples` tuples were looked up in pages.

        `make_room` makes room for a number of bytes, if possible.
        """
        self._looked += tuples
        early = not self._scanned and _WAIT * self._looked < self._rows
        if self._impossible or self._cache.used < self._leaves or early:
            return
        self._add(max(_ROWS_PER_TUPLE * tuples, _ROWS_AFTER_A_SCAN if self._scanned else 0), make_room)

    def _add(self, more: int, make_room: Callable[[int], bool], workers: Workers | None = None) -> None:
        """Add this many rows or some more."""
        if self._table is None and not self._begin(make_room):
            return
        assert self._table is not None
        before = int(self._ends[self._done - 1]) if self._done else 0
        stop = 1 + int(np.searchsorted(self._ends, before + more))
        frames, self._done = self._frames[self._done : stop], min(stop, len(self._frames))
        rows = int(self._ends[self._done - 1]) - before
        if not self._lookup.add_rows(self._table, self._cache.buffer, frames, rows, workers):
            self._impossible, self._uneven = not self._table.ascending, True
            self.drop()

    def _begin(self, make_room: Callable[[int], bool]) -> bool:
        """Allocate memory for all rows, if there is enough to spare."""
        frames = self._lookup.in_key_order(self._cache.resident_frames)
        rows = self._lookup.rows(frames)
        frames, rows = frames[rows > 0], rows[rows > 0]
        form = self._lookup.form(self._cache.buffer, frames)
        spare = self._budget.available + self._cache.available * self._cache.page_size
        most, ascending = spare - self._budget.limit // _TUPLES_SHARE, not self._uneven
        slots = 0 if form is None else form.slots(self._rows, most, ascending=ascending)
        if form is None or slots == 0 or not make_room(form.nbytes(slots)):
            self._impossible, self._looked = form is None, 0  # there may be more memory to spare later
            self._scanned = False
            return False
        self._budget.resize("rows", form.nbytes(slots))
        self._table = self._lookup.row_hash(form, slots, ascending=ascending and form.ascends(slots))
        self._frames, self._ends = frames, np.cumsum(rows)
        return True
