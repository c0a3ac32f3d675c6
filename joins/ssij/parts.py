"""Waiting tuples in the order in which the pages they wait for will be read, so many at a time as there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins._input_buffer import arrivals_at
from headrace.joins.ssij.pairs import Read
from headrace.joins.ssij.stream_buffer import ascending, merged_arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins._input_buffer import Arrivals
    from headrace.joins._sought import Sought
    from headrace.joins.predicates import Bound
    from headrace.joins.ssij.pairs import Pairs
    from headrace.joins.ssij.stream_buffer import Chunk

__all__ = ["Part", "Parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """All that waits for some leaves which the plan reads one after the other: tuples and leaves in pairs.

    Attributes
    ----------
    rows, keys, arrival
        Of the tuples.
    place : int32[rows]
        Where the leaf of each pair stands in the list of all leaves to be read; ascending.
    later : bool[rows] or None
        Set where only the neighbouring leaf can tell what a tuple matches; None if no leaf leaves that open.
    spans : bool[rows] or None
        Where the tuple waits for other leaves, too; None if none does.
    matched : bool[rows] or None
        Set where such a tuple has a match in this leaf.
    """

    rows: pa.RecordBatch
    keys: Sought
    arrival: Arrivals
    place: NDArray[np.int32]
    later: NDArray[np.bool_] | None
    spans: NDArray[np.bool_] | None
    matched: NDArray[np.bool_] | None
    _group: list[Pairs]
    _order: NDArray[np.int32] | None

    def note(self, start: int, count: NDArray[np.int32]) -> None:
        """Note how many matches pairs have, from `start` on; -1 takes the place of 0 where that decides nothing yet."""
        stop = start + len(count)
        if self.later is not None:
            self.later[start:stop] = count < 0
        if self.spans is not None and self.matched is not None:
            spans = self.spans[start:stop]
            self.matched[start:stop] = spans & (count > 0)
            count[spans & (count == 0)] = -1

    def complete(self, start: int, stop: int) -> tuple[Arrivals, int]:
        """Return when those tuples of some pairs arrived that are complete now, and how many these are."""
        open_still = self.spans if self.later is None else self.later
        if open_still is None:
            return (self.arrival[start:stop] if isinstance(self.arrival, np.ndarray) else self.arrival), stop - start
        done = start + np.flatnonzero(~open_still[start:stop])
        return arrivals_at(self.arrival, done), len(done)

    def hand_back(self) -> None:
        """Tell the chunks which tuples have to go to a neighbouring leaf, and which of several leaves' have matched."""
        for pairs, later, matched in self._of_chunks():
            if later is not None and pairs.chunk.later is not None:
                pairs.chunk.later[pairs.pieces] = later
            if matched is not None and pairs.chunk.matched is not None:
                pairs.chunk.matched[pairs.tuples[matched]] = True

    def _of_chunks(self) -> Iterator[tuple[Pairs, NDArray[np.bool_] | None, NDArray[np.bool_] | None]]:
        """Yield the pairs of each chunk with their marks."""
        later, matched = self._as_they_came(self.later), self._as_they_came(self.matched)
        start = 0
        for pairs in self._group:
            stop = start + len(pairs.pieces)
            yield pairs, None if later is None else later[start:stop], None if matched is None else matched[start:stop]
            start = stop

    def _as_they_came(self, marks: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        if marks is None or self._order is None:
            return marks
        came = np.empty_like(marks)
        came[self._order] = marks
        return came


class Parts:
    """Gathers the tuples of all chunks, part by part.

    Parameters
    ----------
    leaves : int32[n]
        All leaves that will be read, in the order of the plan.
    demand : int32[leaves of the table]
        How many tuples wait for each, or more.
    chunks
        The tuples.
    bound
        From tuples to keys.
    most
        Tuples in a part.
    """

    def __init__(
        self,
        leaves: NDArray[np.int32],
        demand: NDArray[np.int32],
        chunks: Sequence[Chunk],
        bound: Bound,
        most: int,
    ) -> None:
        self._leaves = leaves
        self._demand = demand
        self._chunks = chunks
        self._bound = bound
        self._most = most

    def reach(self, start: int) -> int:
        """Return up to where a part can reach from `start` on; one leaf at least, even if too many wait for it."""
        ends = np.cumsum(self._demand[self._leaves[start : start + self._most]])
        return start + max(1, int(np.searchsorted(ends, self._most, side="right")))

    def gather(self, start: int, stop: int) -> Iterator[Part]:
        """Yield what waits for the leaves between two places: in one part, unless too many tuples wait for one."""
        places = ascending(self._leaves[start:stop])
        read = Read(self._leaves[start:stop][places], places)
        for group in read.pairs(self._chunks, self._most):
            yield self._part(group, start)

    def _part(self, group: list[Pairs], start: int) -> Part:
        rows = pa.concat_batches([pairs.rows() for pairs in group]) if len(group) > 1 else group[0].rows()
        place = np.concatenate([pairs.frame for pairs in group])
        arrivals = [arrivals_at(pairs.chunk.arrival, pairs.tuples) for pairs in group]
        order = None
        if bool((place[1:] < place[:-1]).any()):
            order = ascending(place)
            rows, place = rows.take(pa.array(order)), place[order]
        arrival = merged_arrivals(arrivals, [len(pairs.pieces) for pairs in group], order)
        keys, _ = self._bound.encode(rows)
        later = np.zeros(len(rows), dtype=np.bool_) if self._bound.step else None
        spans, matched = _spanning(group, order)
        return Part(rows, keys, arrival, place + np.int32(start), later, spans, matched, group, order)


def _spanning(
    group: list[Pairs], order: NDArray[np.int32] | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | tuple[None, None]:
    """Return which pairs are of tuples that wait for several leaves, and marks for matches; None if there are none."""
    if all(pairs.chunk.simple for pairs in group):
        return None, None
    spans = np.repeat([not pairs.chunk.simple for pairs in group], [len(pairs.pieces) for pairs in group])
    return (spans if order is None else spans[order]), np.zeros(len(spans), dtype=np.bool_)
