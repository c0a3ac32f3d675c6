"""`PunctuationCollection`: the punctuations of an input that were not propagated yet (section 5.1).

A punctuation is propagated when no tuple of its input that matches it is held: in memory, or on disk. What is on disk
is known by partition: a partition without tuples has no match, and a look at all of its tuples finds that out for as
long as no more tuples are flushed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.joins.streams.punctuated.ranges import passing
from headrace.joins.streams.punctuated.state import KEY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.streams.punctuated.patterns import BoundPattern
    from headrace.joins.streams.punctuated.ranges import KeyCover
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["Punctuation", "PunctuationCollection"]

_NBYTES = 1024  # of a punctuation without its pattern, its part of the arrays included
_FEWEST = 16


@dataclass(frozen=True, eq=False, slots=True)
class Punctuation:
    """A punctuation that arrived.

    Attributes
    ----------
    side
        Its input.
    bound
        Its pattern.
    cover
        Keys that it covers; None if it constrains other columns.
    number
        Position among all punctuations.
    """

    side: int
    bound: BoundPattern
    cover: KeyCover | None
    number: int

    @property
    def nbytes(self) -> int:
        """Bytes to charge."""
        return _NBYTES + self.bound.nbytes + (0 if self.cover is None else 4 * self.cover.intervals.nbytes)


class PunctuationCollection:
    """Punctuations of one input that were not propagated yet. Their owner charges them.

    Parameters
    ----------
    partitions
        Number of partitions of the state.
    """

    def __init__(self, partitions: int) -> None:
        self._count = self._interval_count = 0
        self._items: NDArray[Any] = np.empty(0, dtype=object)
        self._tested = np.zeros(0, dtype=np.bool_)  # whether it is matched with columns, not with key words
        self._verified = np.zeros((0, partitions), dtype=np.int64)  # flushes after which no tuple on disk matched
        self._limits = np.zeros((0, 2), dtype=np.uint64)
        self._owners = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def add(self, punctuation: Punctuation) -> None:
        """Add a punctuation."""
        at, self._count = self._count, self._count + 1
        self._items, self._tested = _grown(self._items, self._count), _grown(self._tested, self._count)
        self._verified = _grown(self._verified, self._count)
        cover = punctuation.cover
        self._items[at], self._tested[at] = punctuation, cover is None or cover.tests is not None
        self._verified[at] = -1
        if cover is not None and cover.tests is None:
            start, self._interval_count = self._interval_count, self._interval_count + len(cover.intervals)
            self._limits = _grown(self._limits, self._interval_count)
            self._owners = _grown(self._owners, self._interval_count)
            self._limits[start : self._interval_count], self._owners[start : self._interval_count] = cover.intervals, at

    def held(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which punctuations any of some tuples of the input match."""
        held = np.zeros(self._count, dtype=np.bool_)
        if not len(rows) or not self._count:
            return held
        words = np.sort(rows.key_words(KEY))
        limits, owners = self._limits[: self._interval_count], self._owners[: self._interval_count]
        first, last = np.searchsorted(words, limits[:, 0]), np.searchsorted(words, limits[:, 1], side="right")
        held[owners[first < last]] = True
        for at in np.flatnonzero(self._tested[: self._count]):
            held[at] = passing(rows, self._items[at].bound.tests).any()
        return held

    def verify(self, partition: int, found: NDArray[np.bool_], flushes: int) -> None:
        """Note that of the tuples of a partition on disk none matches the punctuations that are not `found`."""
        self._verified[: self._count][~found, partition] = flushes

    def take_ready(self, rows: Rows, spilled: NDArray[np.int64], flushes: NDArray[np.int64]) -> list[Punctuation]:
        """Remove and return the punctuations that no tuple that is held matches, in the order of their arrival.

        Parameters
        ----------
        rows
            Tuples of the input in memory.
        spilled, flushes : int64[partitions]
            Its tuples on disk, and how often each partition was flushed.
        """
        if not self._count:
            return []
        on_disk = (spilled > 0) & (self._verified[: self._count] < flushes)
        return self._take(~self.held(rows) & ~on_disk.any(axis=1))

    def take_all(self) -> list[Punctuation]:
        """Remove and return all punctuations."""
        return self._take(np.ones(self._count, dtype=np.bool_))

    def _take(self, ready: NDArray[np.bool_]) -> list[Punctuation]:
        if not ready.any():
            return []
        taken: list[Punctuation] = self._items[: self._count][ready].tolist()
        places = np.cumsum(~ready) - 1
        owners = self._owners[: self._interval_count]
        stay = ~ready[owners]
        self._limits = self._limits[: self._interval_count][stay]
        self._owners = places[owners[stay]]
        self._interval_count = len(self._owners)
        self._items, self._tested = self._items[: self._count][~ready], self._tested[: self._count][~ready]
        self._verified = self._verified[: self._count][~ready]
        self._count = len(self._items)
        return taken


def _grown(array: NDArray[Any], count: int) -> NDArray[Any]:
    """Return an array with room for so many elements."""
    if count <= len(array):
        return array
    grown = np.empty((max(_FEWEST, count, 2 * len(array)), *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
