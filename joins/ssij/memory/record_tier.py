"""Record tier: single rows that are looked up often, beside their pages, in a hash table.

Popular keys are seldom neighbors, so a cached page holds one popular row among hundreds of others. Admission follows
TinyLFU: a row found on a page that had to be read comes in if it was looked up more often recently than the least used
row of its bucket. Once the tier has been offered four times the rows that it holds, it is offered a quarter of them:
most would be refused, and those that are popular come again soon. All counts are halved periodically. A row on a cached
page needs no place as long as the page stays. A stream without popular keys makes the tier inactive: it releases its
memory, and tries again after a pause that doubles each time. So does a stream whose popular keys lie together, so that
the cached pages hold most of what is looked up, or serve so much of it that the tier saves no reads
(`headrace.joins.ssij.memory.tier_trial`).

Only tables whose key is one word and unique can have a record tier, and only for result columns of fixed width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij.memory import _record_kernels as kernels
from headrace.joins.ssij.memory.tier_trial import TierTrial
from headrace.storage.format import SLACK
from headrace.storage.leaf import FixedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.workers import Workers
    from headrace.storage.format import Keys
    from headrace.storage.tree import Snapshot

__all__ = ["RecordMatches", "RecordTier", "part_offered"]

_BUCKETS_PER_LINE = 2  # buckets per line of the sketch: four to five counters for each slot
_LEAST_BUCKETS = 8
_AGE_AFTER = 8  # misses per slot
_EPOCH = 65_536
_LEAST_HITS = 0.12  # share of the tuples: below it, looking up costs more than it saves
_FIRST_PAUSE, _LONGEST_PAUSE = 1 << 20, 1 << 26
_PAUSE_SHARE = 8  # a pause lasts for so many times the tuples of the trial before it
_PAGES_SUFFICE = 0.6  # share of the tuples not found here whose page is cached
_PAGES_COMPETE = 0.05  # the same, where pages without the tier may serve as much as the tier
_WORTH_A_THREAD = 4096  # fewer rows are admitted before a thread has woken up
_OFFERED_SHARE = 4  # a settled tier is offered one in so many rows, since most of them it would refuse
_SETTLED = 4  # times as many rows as the tier has slots: when they have been offered, those that it holds are popular
_GOLDEN = 0.5 * (5**0.5 - 1)  # the golden ratio
_ALL_VALID = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class RecordMatches:
    """Tuples of a batch, by whether their row is in the tier.

    Attributes
    ----------
    hit, slot : int32[h]
        Positions of the tuples found, ascending, and slots of their rows.
    miss : int32[m]
        Positions of the other tuples.
    """

    hit: NDArray[np.int32]
    slot: NDArray[np.int32]
    miss: NDArray[np.int32]


class RecordTier:
    """Rows by key, within a fixed number of bytes.

    Parameters
    ----------
    snapshot
        Snapshot of the relation.
    columns
        Relation columns of the result.
    nbytes
        Bytes for the tier, allocated by `activate`.
    """

    def __init__(self, snapshot: Snapshot, columns: Sequence[str], nbytes: int) -> None:
        self._columns = [snapshot.layout.by_name[name] for name in columns]
        words = FixedRows(self._columns, 0)
        self._entries, self._sizes = words.entries, words.sizes
        self._page_size = snapshot.page_size
        self._buckets_most = max(0, nbytes - SLACK) // _bucket_nbytes(self._sizes)
        self._slots = self._buckets_most * kernels.SLOTS
        self.active = False
        self._inactive_tuples = 0
        self._pause = _FIRST_PAUSE
        self._trial = TierTrial()
        self._trial_tuples = 0
        self._comparing = self._proved = False
        self._in_pages = self._cached = self._choices = 0
        self._drop()

    @staticmethod
    def possible(snapshot: Snapshot, columns: Sequence[str], nbytes: int) -> bool:
        """Return whether a tier of `nbytes` bytes can hold enough rows of this relation."""
        layout = snapshot.layout
        if not all(name in layout.by_name and layout.by_name[name].words for name in columns):
            return False
        sizes = FixedRows([layout.by_name[name] for name in columns], 0).sizes
        fits = nbytes >= _LEAST_BUCKETS * _bucket_nbytes(sizes) + SLACK
        return snapshot.unique and snapshot.codec.kind == "u64" and fits

    @property
    def nbytes(self) -> int:
        """Bytes that the tier takes while it is active."""
        return self._buckets_most * _bucket_nbytes(self._sizes) + SLACK

    def activate(self) -> None:
        """Start empty. The caller has made room for `nbytes`."""
        self.active = True
        self._table = self._empty_table(self._buckets_most)
        self._looked = self._found = self._missed = self._offered = 0
        self._warm = False
        self._trial_tuples, self._proved = 0, False
        self._trial.restart(active=True)

    def should_activate(self, tuples: int) -> bool:
        """Count tuples that came while the tier was inactive. Return whether its pause is over.

        A pause for a comparison is over as soon as the reads without the tier are known.
        """
        self._inactive_tuples -= tuples
        compared = self._comparing and self._trial.without is not None
        if self._inactive_tuples > 0 and not compared:
            return False
        self._comparing = False
        if self._pages_suffice():
            self._inactive_tuples = self._pause
            return False
        return True

    def phase_ends(self, done: int, seconds: float) -> None:
        """Note the end of a join phase: the tuples completed so far, and the cost of all reads by the device model."""
        if self._warm or not self.active:
            self._trial.phase_ends(done, seconds, active=self.active)

    def note_pages(self, tuples: int, cached: int) -> None:
        """Count tuples that were looked up in pages, and those whose page was cached."""
        self._in_pages += tuples
        self._cached += cached

    def _pages_suffice(self) -> bool:
        """Return whether pages were as good recently, and reset the counts."""
        return self._share_cached() >= _PAGES_SUFFICE

    def _share_cached(self) -> float:
        """Return the share of the tuples looked up in pages recently whose page was cached, and reset the counts."""
        share = self._cached / max(1, self._in_pages)
        self._in_pages = self._cached = 0
        return share

    def find(self, keys: Keys, valid: NDArray[np.bool_] | None) -> RecordMatches:
        """Look up the keys of a batch. Threads may do so at once, at the risk of losing a use count."""
        size = len(keys)
        hit, slot, miss = (np.empty(size, dtype=np.int32) for _ in range(3))
        flags = _ALL_VALID if valid is None else valid
        hits = kernels.find_records(keys.prefix, flags, self._table, hit, slot, miss)
        return RecordMatches(hit[:hits], slot[:hits], miss[: size - hits])

    def note(self, matches: RecordMatches) -> bool:
        """Count the matches and age the counts. Return False if the tier became inactive for lack of hits."""
        self._found += len(matches.hit)
        self._looked += len(matches.hit) + len(matches.miss)
        self._missed += len(matches.miss)
        if self._missed > _AGE_AFTER * self._slots:
            self._age()
        if self._looked < max(_EPOCH, self._slots):
            return True
        self._trial_tuples += self._looked
        warm, self._warm = self._warm, self._offered >= max(_EPOCH, self._slots)
        enough, cached = self._found >= _LEAST_HITS * self._looked, self._share_cached()
        self._looked = self._found = 0
        if cached >= _PAGES_SUFFICE or (warm and not enough):
            self.deactivate()
        else:
            self._judge(cached)
        return self.active

    def _judge(self, cached: float) -> None:
        """Decide whether to stay active, given the share of the tuples not found here whose page is cached.

        If few of these pages are cached, pages would not serve the others either. A tier that has saved reads and no
        longer does is compared again, since it may be the stream that has changed.
        """
        pays = self._trial.pays
        if self._trial.with_tier is None:
            return
        if pays is False and not self._proved:
            self.deactivate()
        elif pays is False or (pays is None and cached >= _PAGES_COMPETE):
            self._compare()
        else:
            self._proved, self._trial_tuples, self._pause = True, 0, _FIRST_PAUSE

    def _compare(self) -> None:
        """Pause until the reads without the tier are known."""
        self.deactivate()
        self._comparing = True

    def columns(self, slot: NDArray[np.int32]) -> list[pa.Array]:
        """Return the result columns of the rows in these slots."""
        rows = FixedRows(self._columns, len(slot))
        kernels.copy_records(self._table, slot, rows.starts, rows.out, rows.valid, rows.missing)
        return rows.arrays(len(slot))

    def begin_admission(
        self,
        workers: Workers,
        frames: NDArray[np.uint8],
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        count: NDArray[np.int32],
        keys: Keys,
    ) -> Callable[[], None]:
        """Begin to admit rows that `headrace.storage.leaf.decode.search` has found and that are used often enough.

        Threads divide the buckets. The function returned does what they have not yet done and waits for them. Until
        then no one may look up rows or write to the frames. A popular row that is not offered will be soon.
        """
        self._choices += 1
        settled = self._offered >= _SETTLED * self._slots
        some = part_offered(self._choices, len(frame)) if settled else slice(None)
        rows = frame[some], row[some], count[some], keys.prefix[some]
        self._offered += len(rows[0])

        def admit(part: tuple[int, int]) -> None:
            kernels.admit_rows(frames, self._page_size, *rows, self._entries, self._table, *part)

        parts = workers.threads + 1 if len(rows[0]) >= _WORTH_A_THREAD else 1
        bounds = [self._buckets_most * part // parts for part in range(parts + 1)]
        return workers.begin(admit, list(pairwise(bounds)))

    def keep_only(self, unchanged: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]) -> None:
        """Remove the rows whose keys `unchanged` does not confirm."""
        uses = self._uses
        bucket, slot = np.nonzero(uses)
        if len(bucket):
            gone = ~unchanged(self._table.buckets[bucket, 1 + slot])
            uses[bucket[gone], slot[gone]] = 0

    def deactivate(self) -> None:
        """Remove everything for a while. The caller releases the memory."""
        self.active = False
        self._inactive_tuples = max(self._pause, min(_PAUSE_SHARE * self._trial_tuples, _LONGEST_PAUSE))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._trial.restart(active=False)
        self._drop()

    @property
    def _uses(self) -> NDArray[np.uint8]:
        """View of the use counts of each bucket's slots, uint8[buckets, slots]."""
        return self._table.buckets.view(np.uint8)[:, : kernels.SLOTS]

    def _age(self) -> None:
        self._missed = 0
        sketch = self._table.sketch
        sketch >>= 1
        uses = self._uses
        uses[:] = np.maximum(uses >> 1, uses > 0)

    def _empty_table(self, buckets: int) -> kernels.RecordTable:
        record = _record_nbytes(self._sizes)
        return kernels.RecordTable(
            buckets=np.zeros((buckets, kernels.BUCKET), dtype=np.uint64),
            sketch=np.zeros(buckets * kernels.LINE // _BUCKETS_PER_LINE, dtype=np.uint8),
            records=np.zeros(buckets * kernels.SLOTS * record + SLACK, dtype=np.uint8),
            offsets=np.concatenate([[0], self._sizes.cumsum()]),
            nbytes=record,
        )

    def _drop(self) -> None:
        self._table = self._empty_table(0)
        self._looked = self._found = self._missed = self._offered = 0
        self._warm = False


def part_offered(choice: int, rows: int) -> slice:
    """Return which part of some rows is offered. Successive choices have no period, so no page is always left out."""
    part = int(choice * _GOLDEN % 1 * _OFFERED_SHARE)
    return slice(rows * part // _OFFERED_SHARE, rows * (part + 1) // _OFFERED_SHARE)


def _bucket_nbytes(sizes: NDArray[np.int64]) -> int:
    """Return the bytes of a bucket: keys and use counts, sketch, and records of values of these sizes."""
    return kernels.LINE + kernels.LINE // _BUCKETS_PER_LINE + kernels.SLOTS * _record_nbytes(sizes)


def _record_nbytes(sizes: NDArray[np.int64]) -> int:
    """Return the bytes of a record: values of these sizes, and a null bit for each."""
    return int(sizes.sum()) + -(-len(sizes) // 8)
