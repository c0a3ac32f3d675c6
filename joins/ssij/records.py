"""SSIJ's record tier: single rows that are asked for often, apart from their pages, in a hash table.

Popular keys are seldom neighbours, so a cached page holds one popular row among hundreds that nobody asks for. What
is worth a place is decided as in TinyLFU: a row found on a page that had to be read comes in if it was asked for more
often of late than the least used row of its bucket; all counts are halved now and then. A row on a cached page needs no
place as long as the page stays. A stream without popular keys makes the tier sleep: it gives its memory back, and tries
again after a while that doubles each time. So does a stream whose popular keys lie together: the pages of most of what
is asked for are cached, and what the tier knows they know too.

Only tables whose key is one word and unique, and result columns of one word each, can have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij import _record_kernels as kernels
from headrace.storage.probe import FixedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format import Keys
    from headrace.storage.tree import Snapshot

__all__ = ["RecordTier", "Sighted"]

_WORD = 8
_BUCKETS_PER_LINE = 2  # of the sketch: four to five counters for each slot
_LEAST_BUCKETS = 8
_MOST_COLUMNS = 64  # bits of the word that marks nulls
_AGE_AFTER = 8  # misses for each slot
_EPOCH = 65_536
_LEAST_HITS = 0.12  # of the tuples: below that, looking costs more than it saves
_FIRST_SLEEP, _LONGEST_SLEEP = 1 << 20, 1 << 26
_PAGES_SUFFICE = 0.6  # of the tuples that are not found here find their page cached
_ALL_VALID = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Sighted:
    """Tuples of a batch, by whether their row is here.

    Attributes
    ----------
    hit, slot : int32[h]
        Positions of the tuples, ascending, and the slots of their rows.
    miss : int32[m]
        The other tuples.
    """

    hit: NDArray[np.int32]
    slot: NDArray[np.int32]
    miss: NDArray[np.int32]


class RecordTier:
    """Rows by key, within a fixed number of bytes.

    Parameters
    ----------
    snapshot
        The relation.
    columns
        Of the result.
    nbytes
        Memory for the tier; it is taken when `wake` is called.
    """

    def __init__(self, snapshot: Snapshot, columns: Sequence[str], nbytes: int) -> None:
        self._columns = [snapshot.layout.by_name[name] for name in columns]
        self._entries = FixedRows(self._columns, 0).entries
        self._page_size = snapshot.page_size
        self._buckets_most = nbytes // _bucket_nbytes(len(columns))
        self._slots = self._buckets_most * kernels.SLOTS
        self.awake = False
        self._wake_after = 0
        self._sleep = _FIRST_SLEEP
        self._in_pages = self._cached = 0
        self._drop()

    @staticmethod
    def possible(snapshot: Snapshot, columns: Sequence[str], nbytes: int) -> bool:
        """Return whether a tier of so many bytes can hold rows of this relation, and enough of them."""
        layout = snapshot.layout
        one_word = all(name in layout.by_name and layout.by_name[name].words == 1 for name in columns)
        fits = nbytes >= _LEAST_BUCKETS * _bucket_nbytes(len(columns))
        return snapshot.unique and snapshot.codec.kind == "u64" and one_word and len(columns) <= _MOST_COLUMNS and fits

    @property
    def nbytes(self) -> int:
        """Bytes that the tier takes when it is awake."""
        return self._buckets_most * _bucket_nbytes(len(self._columns))

    def wake(self) -> None:
        """Begin empty. The caller has made room for `nbytes`."""
        self.awake = True
        self._buckets = np.zeros((self._buckets_most, kernels.BUCKET), dtype=np.uint64)
        self._sketch = np.zeros(self._buckets_most * kernels.LINE // _BUCKETS_PER_LINE, dtype=np.uint8)
        self._records = np.zeros((self._slots, 1 + len(self._columns)), dtype=np.uint64)
        self._looked = self._found = self._missed = self._offered = 0
        self._warm = False

    def wants_to_wake(self, tuples: int) -> bool:
        """Count tuples that came while the tier slept; return whether it has slept long enough."""
        self._wake_after -= tuples
        if self._wake_after > 0:
            return False
        if self._pages_suffice():
            self._wake_after = self._sleep
        return self._wake_after <= 0

    def note_pages(self, tuples: int, cached: int) -> None:
        """Count tuples that were looked for in pages, and those of them whose page was cached."""
        self._in_pages += tuples
        self._cached += cached

    def _pages_suffice(self) -> bool:
        """Return whether pages have been as good of late; begin to count anew."""
        suffice = self._cached >= _PAGES_SUFFICE * max(1, self._in_pages)
        self._in_pages = self._cached = 0
        return suffice

    def find(self, keys: Keys, valid: NDArray[np.bool_] | None) -> Sighted:
        """Look up the keys of a batch. Threads may do so at once; a count may get lost then."""
        size = len(keys)
        hit, slot, miss = (np.empty(size, dtype=np.int32) for _ in range(3))
        flags = _ALL_VALID if valid is None else valid
        hits = kernels.find_records(keys.prefix, flags, self._buckets, self._sketch, hit, slot, miss)
        return Sighted(hit[:hits], slot[:hits], miss[: size - hits])

    def note(self, sighted: Sighted) -> bool:
        """Count what was found, let the counts age; return False if the tier has fallen asleep for lack of hits."""
        self._found += len(sighted.hit)
        self._looked += len(sighted.hit) + len(sighted.miss)
        self._missed += len(sighted.miss)
        if self._missed > _AGE_AFTER * self._slots:
            self._age()
        if self._looked < max(_EPOCH, self._slots):
            return True
        warm, self._warm = self._warm, self._offered >= max(_EPOCH, self._slots)
        enough, suffice = self._found >= _LEAST_HITS * self._looked, self._pages_suffice()
        self._looked = self._found = 0
        if suffice or (warm and not enough):
            self.fall_asleep()
        elif enough:
            self._sleep = _FIRST_SLEEP
        return self.awake

    def columns(self, slot: NDArray[np.int32]) -> list[pa.Array]:
        """Return the result columns of the rows in these slots."""
        rows = FixedRows(self._columns, len(slot))
        kernels.copy_records(self._records, slot, rows.sizes, rows.starts, rows.out, rows.valid, rows.missing)
        return rows.arrays(len(slot))

    def admit(
        self,
        frames: NDArray[np.uint8],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        count: NDArray[np.int32],
        keys: Keys,
    ) -> None:
        """Take in what deserves it of the rows that `headrace.storage.leaf.decode.search` has found."""
        self._offered += len(frame)
        kernels.admit_rows(
            frames, self._page_size, frame, row, count, keys.prefix, self._entries, self._buckets, self._sketch,
            self._records,
        )  # fmt: skip

    def keep_only(self, unchanged: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]) -> None:
        """Forget the rows whose keys the function does not confirm."""
        uses = self._uses
        bucket, slot = np.nonzero(uses)
        if len(bucket):
            gone = ~unchanged(self._buckets[bucket, 1 + slot])
            uses[bucket[gone], slot[gone]] = 0

    def fall_asleep(self) -> None:
        """Forget everything for a while; the caller gives the memory back."""
        self.awake = False
        self._wake_after = self._sleep
        self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)
        self._drop()

    @property
    def _uses(self) -> NDArray[np.uint8]:
        """uint8[buckets, slots], a view: the uses of each bucket's slots."""
        return self._buckets.view(np.uint8)[:, : kernels.SLOTS]

    def _age(self) -> None:
        self._missed = 0
        self._sketch >>= 1
        uses = self._uses
        uses[:] = np.maximum(uses >> 1, uses > 0)

    def _drop(self) -> None:
        self._buckets = np.zeros((0, kernels.BUCKET), dtype=np.uint64)
        self._sketch = np.zeros(0, dtype=np.uint8)
        self._records = np.zeros((0, 1), dtype=np.uint64)
        self._looked = self._found = self._missed = self._offered = 0
        self._warm = False


def _bucket_nbytes(columns: int) -> int:
    """Return the bytes of keys and uses, sketch, marks of nulls, and columns."""
    return kernels.LINE + kernels.LINE // _BUCKETS_PER_LINE + kernels.SLOTS * _WORD * (1 + columns)
