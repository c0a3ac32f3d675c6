"""SSIJ's whole tier: all rows of a relation apart from their pages, where pages and rows both fit into the memory.

A page needs a look at its index entry, at its key and at each column; a row by itself is in one place. It is filled
from the pages once all of them are cached and many tuples have come since the relation changed, some pages after each
batch, so that no tuple waits long for it. The pages stay: tuples that need memory take the tier's first, and changes of
the relation leave most of the pages as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.ssij.direct_lookup import DirectLookup, Found
    from headrace.storage.format import KeyWords
    from headrace.storage.probe import RowHash
    from headrace.storage.read import PageCache
    from headrace.storage.tree import Snapshot

__all__ = ["WholeTier"]

_WAIT = 4  # rows for each tuple that has to come first: changes that are more frequent make it useless
_ROWS_PER_TUPLE = 2  # are put in after a batch: it never costs much more than the look-ups themselves
_TUPLES_SHARE = 8  # of the memory is left for tuples that come in


class WholeTier:
    """All rows, or none as long as some are missing.

    Parameters
    ----------
    snapshot
        The relation.
    lookup
        Knows the cached pages.
    cache
        Has them.
    budget
        From which the tier takes what it holds.
    spares
        Makes room for so many bytes, if it can be had.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        lookup: DirectLookup,
        cache: PageCache,
        budget: MemoryBudget,
        spares: Callable[[int], bool],
    ) -> None:
        self._lookup = lookup
        self._cache = cache
        self._budget = budget
        self._spares = spares
        self.install(snapshot)

    def install(self, snapshot: Snapshot) -> None:
        """Begin anew with another snapshot."""
        self._leaves = len(snapshot.leaf_pages)
        self._rows = snapshot.rows
        self._impossible = snapshot.rows == 0
        self.drop()

    def drop(self) -> bool:
        """Forget all rows and give their memory back; return whether there were any."""
        had = self.nbytes > 0
        self._made: RowHash | None = None
        self._frames: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._ends: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._done = self._looked = 0
        self._budget.resize("whole", 0)
        return had

    @property
    def nbytes(self) -> int:
        """Bytes that the tier holds."""
        return self._budget.held("whole")

    @property
    def ready(self) -> bool:
        """Whether all rows are here."""
        return self._made is not None and self._done == len(self._frames)

    def find(self, keys: KeyWords, outer: bool) -> Found:
        """Find the rows of a ready tier; see `headrace.storage.probe.row_hash.RowHash.find`."""
        assert self._made is not None
        return self._lookup.find_apart(self._made, keys, outer)

    def advance(self, tuples: int) -> None:
        """Go on after so many tuples were looked up in pages."""
        self._looked += tuples
        early = self._impossible or self._cache.used < self._leaves or _WAIT * self._looked < self._rows
        if early or (self._made is None and not self._begin()):
            return
        assert self._made is not None
        before = int(self._ends[self._done - 1]) if self._done else 0
        stop = 1 + int(np.searchsorted(self._ends, before + _ROWS_PER_TUPLE * tuples))
        frames, self._done = self._frames[self._done : stop], min(stop, len(self._frames))
        rows = int(self._ends[self._done - 1]) - before
        if not self._lookup.put_apart(self._made, self._cache.buffer, frames, rows):
            self._impossible = True
            self.drop()

    def _begin(self) -> bool:
        """Take memory for all rows, if there is enough to spare."""
        frames = self._cache.resident_frames
        rows = self._lookup.rows(frames)
        frames, rows = frames[rows > 0], rows[rows > 0]
        form = self._lookup.form(self._cache.buffer, frames)
        spare = self._budget.available + self._cache.available * self._cache.page_size
        slots = 0 if form is None else form.slots(self._rows, spare - self._budget.limit // _TUPLES_SHARE)
        if form is None or slots == 0 or not self._spares(form.nbytes(slots)):
            self._impossible, self._looked = form is None, 0  # there may be more memory to spare another time
            return False
        self._budget.resize("whole", form.nbytes(slots))
        self._made = self._lookup.rows_apart(form, slots)
        self._frames, self._ends = frames, np.cumsum(rows)
        return True
