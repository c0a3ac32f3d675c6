"""Waiting tuples and their leaves, as pairs in the order in which the read plan reads the leaves.

The pairs come in batches, as many at a time as the workspace has room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.input_buffer import arrivals_at
from headrace.joins.ssij.memory.inverted_index import ReadLeaves
from headrace.joins.ssij.memory.stream_buffer import ascending, merged_arrivals
from headrace.storage.format import concat_batches, take
from headrace.storage.read import values_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import Arrivals
    from headrace.joins.predicates import Bound
    from headrace.joins.predicates.search_keys import SearchKeys
    from headrace.joins.ssij.memory.inverted_index import Postings
    from headrace.joins.ssij.memory.stream_buffer import Chunk
    from headrace.storage.read import LeafNumbers

__all__ = ["PairBatch", "PairBatches"]


@dataclass(frozen=True, slots=True)
class PairBatch:
    """All pairs of a waiting tuple and a leaf for some leaves that the plan reads in sequence.

    Attributes
    ----------
    rows, keys, arrival
        Tuples of the pairs.
    place : int32[rows]
        Position of each pair's leaf in the list of all leaves to read; ascending.
    undecided : bool[rows] or None
        Set where only the neighboring leaf can decide a tuple's match; None if every leaf can decide.
    spans : bool[rows] or None
        Whether the tuple waits for other leaves too; None if none does.
    matched : bool[rows] or None
        Set where such a tuple has a match in this leaf.
    """

    rows: pa.RecordBatch
    keys: SearchKeys
    arrival: Arrivals
    place: NDArray[np.int32]
    undecided: NDArray[np.bool_] | None
    spans: NDArray[np.bool_] | None
    matched: NDArray[np.bool_] | None
    _group: list[Postings]
    _order: NDArray[np.int32] | None

    def note(self, start: int, count: NDArray[np.int32]) -> None:
        """Record the number of matches of pairs, from `start` on.

        A count of 0 becomes -1 where the tuple may still match in another leaf.
        """
        stop = start + len(count)
        if self.undecided is not None:
            self.undecided[start:stop] = count < 0
        if self.spans is not None and self.matched is not None:
            spans = self.spans[start:stop]
            self.matched[start:stop] = spans & (count > 0)
            count[spans & (count == 0)] = -1

    def complete(self, start: int, stop: int) -> tuple[Arrivals, int]:
        """Return the arrival and the number of the tuples that are complete among some pairs."""
        open_still = self.spans if self.undecided is None else self.undecided
        if open_still is None:
            return (self.arrival[start:stop] if isinstance(self.arrival, np.ndarray) else self.arrival), stop - start
        done = start + np.flatnonzero(~open_still[start:stop])
        return arrivals_at(self.arrival, done), len(done)

    def hand_back(self) -> None:
        """Mark, in the chunks, tuples that go on to a neighboring leaf and tuples that have matched."""
        for pairs, undecided, matched in self._of_chunks():
            if undecided is not None and pairs.chunk.undecided is not None:
                pairs.chunk.undecided[pairs.runs] = undecided
            if matched is not None and pairs.chunk.matched is not None:
                pairs.chunk.matched[pairs.tuples[matched]] = True

    def _of_chunks(self) -> Iterator[tuple[Postings, NDArray[np.bool_] | None, NDArray[np.bool_] | None]]:
        """Yield the pairs of each chunk with their marks."""
        undecided, matched = self._as_they_came(self.undecided), self._as_they_came(self.matched)
        start = 0
        for pairs in self._group:
            stop = start + len(pairs.runs)
            yield (
                pairs,
                None if undecided is None else undecided[start:stop],
                None if matched is None else matched[start:stop],
            )
            start = stop

    def _as_they_came(self, marks: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        if marks is None or self._order is None:
            return marks
        came = np.empty_like(marks)
        came[self._order] = marks
        return came


class PairBatches:
    """Gathers the pairs of all chunks, batch by batch.

    Parameters
    ----------
    leaves : int32[n]
        All leaves that will be read, in the order of the plan.
    demand : int32[leaves of the table] or LeafMap
        Upper bound on the number of tuples that wait for each leaf.
    chunks
        Chunks of waiting tuples.
    bound
        Bound predicate.
    most
        Most pairs in a batch.
    """

    def __init__(
        self,
        leaves: NDArray[np.int32],
        demand: LeafNumbers,
        chunks: Sequence[Chunk],
        bound: Bound,
        most: int,
    ) -> None:
        self._leaves = leaves
        self._demand = demand
        self._chunks = chunks
        self._bound = bound
        self._most = most

    def gather(self, start: int) -> tuple[int, Iterator[PairBatch]]:
        """Gather the pairs of as many leaves from a place on as a batch has room for, but at least one leaf's.

        Return the place that was reached, and the batches: one, which exists then, and more if too many tuples wait for
        a single leaf.
        """
        ends = np.cumsum(values_at(self._demand, self._leaves[start : start + self._most]))
        stop = start + max(1, int(np.searchsorted(ends, self._most, side="right")))
        batches = self._between(start, stop)
        return stop, chain(list(islice(batches, 1)), batches)

    def _between(self, start: int, stop: int) -> Iterator[PairBatch]:
        """Yield the pairs of the leaves between two places: in one batch, unless too many wait for one leaf."""
        places = ascending(self._leaves[start:stop])
        read = ReadLeaves(self._leaves[start:stop][places], places)
        for group in read.pairs(self._chunks, self._most):
            yield self._batch(group, start)

    def _batch(self, group: list[Postings], start: int) -> PairBatch:
        rows = concat_batches([pairs.rows() for pairs in group]) if len(group) > 1 else group[0].rows()
        place = np.concatenate([pairs.frame for pairs in group])
        arrivals = [arrivals_at(pairs.chunk.arrival, pairs.tuples) for pairs in group]
        order = None
        if bool((place[1:] < place[:-1]).any()):
            order = ascending(place)
            rows, place = take(rows, order), place[order]
        arrival = merged_arrivals(arrivals, [len(pairs.runs) for pairs in group], order)
        keys, _ = self._bound.encode(rows)
        undecided = np.zeros(len(rows), dtype=np.bool_) if self._bound.step else None
        spans, matched = _spanning(group, order)
        return PairBatch(rows, keys, arrival, place + np.int32(start), undecided, spans, matched, group, order)


def _spanning(
    group: list[Postings], order: NDArray[np.int32] | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | tuple[None, None]:
    """Return which pairs are of tuples that wait for several leaves, and marks for matches; None if there are none."""
    if all(pairs.chunk.simple for pairs in group):
        return None, None
    spans = np.repeat([not pairs.chunk.simple for pairs in group], [len(pairs.runs) for pairs in group])
    return (spans if order is None else spans[order]), np.zeros(len(spans), dtype=np.bool_)
