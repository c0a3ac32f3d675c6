"""`PunctuatedRange`: the keys that an input will not have any more (the paper's PR, section 5.1), tested in batches.

Keys of one word are kept as intervals of words, merged where they touch, so that punctuations in order take no more
memory than one. Exact keys of more words are kept as key tuples behind hash chains. What is left, such as ranges of
texts, is kept as patterns and tested one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins.streams.tuples.indexes import new_cursor
from headrace.joins.streams.tuples.keys import KeySpec
from headrace.joins.streams.tuples.layout import RowLayout
from headrace.joins.streams.tuples.rows import RowsEncoder, gather_columns
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.punctuated.patterns import BoundPattern, ColumnTest
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["INTERVAL_NBYTES", "KeyColumns", "KeyCover", "PunctuatedRange", "passing"]

INTERVAL_NBYTES = 64
"""Bytes that are charged for an interval: its limits, in the array and in the copy when the array changes."""
_LAST = 2**64 - 1
_SLICE = 1024


class KeyColumns:
    """The key that all inputs share, and where each input has its columns.

    Parameters
    ----------
    schemas
        Schemas of the inputs.
    keys
        Key of each input.
    """

    def __init__(self, schemas: Sequence[pa.Schema], keys: Sequence[KeySpec]) -> None:
        self.schemas = schemas
        self.places = [key.columns for key in keys]
        self.types, self.wide = keys[0].types, keys[0].wide
        labels = [f"key{at}" for at in range(len(self.types))]
        self.spec = KeySpec(range(len(labels)), labels, self.types)
        self.schema = pa.schema(list(zip(labels, self.types, strict=True)))

    def covered_by(self, side: int, pattern: BoundPattern) -> KeyCover | None:
        """Return the keys that a pattern of an input covers; None if it constrains other columns: it covers none then.

        If a value cannot be expressed in the types of the key, the cover is smaller than the pattern, never larger.
        """
        if not pattern.columns <= set(self.places[side]):
            return None
        tests = {self.places[side].index(test.column): test for test in pattern.tests}
        if not tests:
            return KeyCover(np.array([[0, _LAST]], dtype=np.uint64))
        exact = self._exact_keys(tests)
        if exact is not None:
            if self.wide:
                return KeyCover(_no_intervals(), exact, self._tests(tests))
            keys, found = self.spec.encode(exact)
            words = np.unique(keys.prefix if found is None else keys.prefix[found])
            return KeyCover(np.stack([words, words], axis=1))
        interval = None if self.wide or len(self.types) > 1 else self._interval(tests[0])
        return KeyCover(_no_intervals(), None, self._tests(tests)) if interval is None else KeyCover(interval)

    def _exact_keys(self, tests: dict[int, ColumnTest]) -> pa.RecordBatch | None:
        """Return the keys of a pattern that lists them; None if it does not. A composite key is listed if it is one."""
        lists = [tests[at].values if at in tests else None for at in range(len(self.types))]
        if any(values is None or (len(lists) > 1 and len(values) != 1) for values in lists):
            return None
        moved = [tests[at].moved(at, dtype) for at, dtype in enumerate(self.types)]
        if any(test is None for test in moved):
            return None
        return pa.RecordBatch.from_arrays([test.values for test in moved if test is not None], schema=self.schema)

    def _interval(self, test: ColumnTest) -> NDArray[np.uint64] | None:
        """Return the words of a range; None if the type of the key does not have its limits."""
        moved = test.moved(0, self.types[0])
        if moved is None or moved.values is not None:
            return None
        low, high = 0, _LAST
        if moved.low is not None:
            low = self._word(moved.low) + (not moved.include_low)
        if moved.high is not None:
            high = self._word(moved.high) - (not moved.include_high)
        return np.array([[low, high]], dtype=np.uint64) if 0 <= low <= high <= _LAST else _no_intervals()

    def _word(self, value: pa.Scalar) -> int:
        keys, _ = self.spec.encode(pa.RecordBatch.from_arrays([pa.array([value], self.types[0])], schema=self.schema))
        return int(keys.prefix[0])

    def _tests(self, tests: dict[int, ColumnTest]) -> list[list[ColumnTest] | None]:
        """Return the tests for the tuples of each input; None for an input whose types do not have the values."""
        bound: list[list[ColumnTest] | None] = []
        for schema, places in zip(self.schemas, self.places, strict=True):
            moved = [test.moved(places[at], schema.field(places[at]).type) for at, test in tests.items()]
            found = [test for test in moved if test is not None]
            bound.append(found if len(found) == len(moved) else None)
        return bound


@dataclass(frozen=True)
class KeyCover:
    """The keys that one punctuation covers.

    Attributes
    ----------
    intervals : uint64[n, 2]
        First and last word of each interval.
    exact
        Keys, if they have more than one word and the pattern lists them.
    tests
        For the tuples of each input, tests of columns that are all met by covered tuples only; None if there are none.
    """

    intervals: NDArray[np.uint64]
    exact: pa.RecordBatch | None = None
    tests: list[list[ColumnTest] | None] | None = None

    def covers(self, side: int, rows: Rows, key: int) -> NDArray[np.bool_]:
        """Return which tuples of an input have a covered key."""
        if self.tests is None:
            return _within(self.intervals, rows.key_words(key))
        tests = self.tests[side]
        if tests is None:
            return np.zeros(len(rows), dtype=np.bool_)
        return passing(rows, tests)


class PunctuatedRange:
    """The keys that an input will not have any more.

    Parameters
    ----------
    key
        Key that the inputs share.
    budget
        Budget to charge, as the components ``statistics`` and, for keys of more than one word, ``tuples``.
    """

    def __init__(self, key: KeyColumns, budget: MemoryBudget) -> None:
        self._budget = budget
        self._everything = False
        self._intervals = _no_intervals()
        self._patterns: list[KeyCover] = []
        layout = RowLayout.of(key.schema, [key.wide], "punctuations")
        self._keys = TupleStore(layout, budget, [False]) if key.wide else None
        self._encoder = RowsEncoder(layout, [key.spec])
        self._charged = 0

    def __bool__(self) -> bool:
        return self._everything or len(self._intervals) > 0 or bool(self._patterns) or bool(self._keys)

    @property
    def everything(self) -> bool:
        """Whether the input has no more tuples at all."""
        return self._everything

    def growth(self, cover: KeyCover) -> int:
        """Return a limit on the bytes that `add` charges."""
        nbytes = INTERVAL_NBYTES * len(cover.intervals)
        if cover.exact is not None and self._keys is not None:
            rows, _ = self._encoder.encode(cover.exact)
            return nbytes + 2 * rows.nbytes + 24 * len(rows) + 6 * 4096 + 2 * self._keys.nbytes
        return nbytes + (sum(map(_tests_nbytes, cover.tests)) if cover.tests is not None else 0)

    def add(self, cover: KeyCover) -> None:
        """Add keys.

        Raises
        ------
        MemoryBudgetError
            If there is no memory for them.
        """
        if self._everything:
            return
        if len(cover.intervals):
            self._merge(cover.intervals)
        if cover.exact is not None and self._keys is not None:
            rows, valid = self._encoder.encode(cover.exact)
            index = np.arange(len(rows)) if valid is None else np.flatnonzero(valid)
            rows = rows.take(index[~self._known(rows, 0)[index]])
            self._keys.insert(rows)
        elif cover.tests is not None:
            nbytes = sum(map(_tests_nbytes, cover.tests))
            self._budget.charge("statistics", nbytes)
            self._charged += nbytes
            self._patterns.append(cover)

    def close(self) -> None:
        """Note that the input has ended: all keys are covered, and nothing else needs to be kept."""
        self._everything = True
        self._intervals, self._patterns = _no_intervals(), []
        if self._keys is not None:
            self._keys.free()
        self._budget.release("statistics", self._charged)
        self._charged = 0

    def covers(self, side: int, rows: Rows, key: int) -> NDArray[np.bool_]:
        """Return which tuples of an input have a covered key.

        Parameters
        ----------
        side
            Input of the tuples, which need not be the one that was punctuated.
        rows
            Tuples.
        key
            Key of that input.
        """
        if self._everything:
            return np.ones(len(rows), dtype=np.bool_)
        covered = np.zeros(len(rows), dtype=np.bool_)
        if not len(rows):
            return covered
        if len(self._intervals):
            covered |= _within(self._intervals, rows.key_words(key))
        if self._keys:
            covered |= self._known(rows, key)
        for cover in self._patterns:
            covered |= cover.covers(side, rows, key)
        return covered

    def _known(self, rows: Rows, key: int) -> NDArray[np.bool_]:
        known = np.zeros(len(rows), dtype=np.bool_)
        if self._keys:
            index, cursor = np.arange(len(rows), dtype=np.int64), new_cursor()
            out = np.empty(_SLICE, dtype=np.int64), np.empty(_SLICE, dtype=np.int64)
            while cursor[0] < len(index):
                found = self._keys.probe(0, rows, key, index, None, cursor, out)
                known[out[0][:found]] = True
        return known

    def _merge(self, added: NDArray[np.uint64]) -> None:
        """Add intervals, and merge those that overlap or touch."""
        intervals = np.concatenate([self._intervals, added])
        intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
        ends = np.maximum.accumulate(intervals[:, 1])
        first = np.ones(len(intervals), dtype=np.bool_)
        first[1:] = (intervals[1:, 0] > ends[:-1]) & (intervals[1:, 0] - ends[:-1] > 1)
        starts = np.flatnonzero(first)
        merged = np.stack([intervals[starts, 0], ends[np.append(starts[1:], len(intervals)) - 1]], axis=1)
        change = INTERVAL_NBYTES * (len(merged) - len(self._intervals))
        if change > 0:
            self._budget.charge("statistics", change)
        else:
            self._budget.release("statistics", -change)
        self._charged += change
        self._intervals = merged

    def __repr__(self) -> str:
        return f"<PunctuatedRange of {len(self._intervals)} intervals, {format_size(self._charged)}>"


def _no_intervals() -> NDArray[np.uint64]:
    return np.zeros((0, 2), dtype=np.uint64)


def _within(intervals: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which words are in one of some intervals, which are in order."""
    if not len(intervals):
        return np.zeros(len(words), dtype=np.bool_)
    words = np.ascontiguousarray(words)
    at = np.searchsorted(intervals[:, 0], words, side="right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (words <= intervals[np.maximum(at, 0), 1])
    return found


def passing(rows: Rows, tests: Sequence[ColumnTest]) -> NDArray[np.bool_]:
    """Return which tuples pass all tests, a slice of them at a time."""
    passed = np.ones(len(rows), dtype=np.bool_)
    for start in range(0, len(rows), _SLICE):
        index = np.arange(start, min(start + _SLICE, len(rows)), dtype=np.int64)
        columns = gather_columns(rows, index)
        for test in tests:
            passed[index] &= test.passes(columns[test.column])
    return passed


def _tests_nbytes(tests: Sequence[ColumnTest] | None) -> int:
    return 0 if tests is None else sum(512 + test.nbytes for test in tests)
