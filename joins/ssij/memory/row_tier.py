"""Row tier: all rows of a relation by themselves, where they fit into the memory.

Finding a row in a page takes an access to its index entry, its key, and each column; a row by itself is in one place.

The tier is filled in one of two ways. The first scan of an operator whose memory is empty moves all rows as they are
read, and caches no page (`headrace.joins.ssij.phases.row_tier.RowScan`): its memory is taken only once, and filling
costs little beside the wait for the disk. How wide slots must be is then known from a sample of the pages only. If
others turn out to need wider ones, the scan is given up, and the tuples are joined as if there was no tier.

Otherwise it is filled from the pages once all of them are cached, and the pages stay: tuples that need memory take the
tier's first, and changes of the relation leave most of the pages as they are. After a join phase that has read most of
the relation at once, the next batch fills it at once and by all threads, or with deadlines the next batches in large
steps. After a change of the relation it is worth filling again only when many tuples have come, and then a few pages at
a time, so that no tuple waits long for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.probe import SlotForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.ssij.memory.direct_lookup import DirectLookup, LookupResult
    from headrace.joins.workers import Workers
    from headrace.storage.format import KeyWords
    from headrace.storage.probe import PageDescriptors, RowHash
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
        self._scanned_for = False
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
        return self._table is not None and self._table.rows == self._rows

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

    @property
    def takes_a_scan(self) -> bool:
        """Whether the next scan may move all rows into the tier: the operator has had none and has no cached page."""
        return self.wanted and not self._scanned_for and self._cache.used == 0

    def begin_scan(self, form: SlotForm | None, make_room: Callable[[int], bool]) -> bool:
        """Allocate memory for all rows, if there is enough to spare. Return whether a scan can move them."""
        self._scanned_for = True
        return self._allocate(form, make_room)

    def take(
        self, pages: PageDescriptors, frames: NDArray[np.uint8], frame: NDArray[np.int64], workers: Workers
    ) -> bool:
        """Add the rows of pages that a scan has read. If they do not fit, drop all rows and return False."""
        assert self._table is not None
        pages.describe(frames, frame)
        frame = pages.in_key_order(frame)
        if not self._table.form.holds(pages.words[frame], pages.greatest_key(frames, frame)):
            self.drop()
            return False
        return self._put(pages, frames, frame, workers)

    def _add(self, more: int, make_room: Callable[[int], bool], workers: Workers | None = None) -> None:
        """Add this many rows or some more."""
        if self._table is None and not self._begin(make_room):
            return
        before = int(self._ends[self._done - 1]) if self._done else 0
        stop = 1 + int(np.searchsorted(self._ends, before + more))
        frames, self._done = self._frames[self._done : stop], min(stop, len(self._frames))
        self._put(self._lookup.descriptors, self._cache.buffer, frames, workers)

    def _put(
        self,
        pages: PageDescriptors,
        frames: NDArray[np.uint8],
        frame: NDArray[np.int64],
        workers: Workers | None,
    ) -> bool:
        """Add the rows of pages in key order. If too many keys collide, drop all rows and return False."""
        assert self._table is not None
        rows = int(pages.rows(frame).sum())
        threads = (1, None) if workers is None else (workers.share(rows), workers.map)
        if pages.add_rows(self._table, frames, frame, rows, *threads):
            return True
        self._impossible, self._uneven = not self._table.ascending, True
        self.drop()
        return False

    def _begin(self, make_room: Callable[[int], bool]) -> bool:
        """Allocate memory for all rows, if there is enough to spare."""
        pages = self._lookup.descriptors
        frames = pages.in_key_order(self._cache.resident_frames)
        rows = pages.rows(frames)
        frames, rows = frames[rows > 0], rows[rows > 0]
        form = SlotForm.of(pages.words[frames], pages.greatest_key(self._cache.buffer, frames))
        if not self._allocate(form, make_room):
            self._impossible, self._looked = form is None, 0  # there may be more memory to spare later
            self._scanned = False
            return False
        self._frames, self._ends = frames, np.cumsum(rows)
        return True

    def _allocate(self, form: SlotForm | None, make_room: Callable[[int], bool]) -> bool:
        spare = self._budget.available + self._cache.available * self._cache.page_size
        most, ascending = spare - self._budget.limit // _TUPLES_SHARE, not self._uneven
        slots = 0 if form is None else form.slots(self._rows, most, ascending=ascending)
        if form is None or slots == 0 or not make_room(form.nbytes(slots)):
            return False
        self._budget.resize("rows", form.nbytes(slots))
        self._table = self._lookup.descriptors.row_hash(form, slots, ascending=ascending and form.ascends(slots))
        return True
