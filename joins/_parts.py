"""Waiting tuples in the order in which the pages they wait for will be read, so many at a time as there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from joins._input_buffer import arrivals_at
from joins._pairs import Read
from joins._stream_buffer import ascending, merged_arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from joins._input_buffer import Arrivals
    from joins._pairs import Pairs
    from joins._sought import Sought
    from joins._stream_buffer import Chunk
    from joins.predicates import Bound

__all__ = ["Part", "Parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """All tuples that wait for some leaves which the plan reads one after the other, each for one of them.

    Attributes
    ----------
    rows, keys, arrival
        Of the tuples.
    place : int32[rows]
        Where the leaf of each tuple stands in the list of all leaves to be read; ascending.
    later : bool[rows] or None
        Set where only the neighbouring leaf can tell what a tuple matches; None if no leaf leaves that open.
    """

    rows: pa.RecordBatch
    keys: Sought
    arrival: Arrivals
    place: NDArray[np.int32]
    later: NDArray[np.bool_] | None
    _group: list[Pairs]
    _order: NDArray[np.int32] | None

    def postpone(self) -> None:
        """Mark the tuples that have to go to a neighbouring leaf in the chunks that they come from."""
        if self.later is None or not self.later.any():
            return
        later = self.later
        if self._order is not None:
            later = np.empty_like(self.later)
            later[self._order] = self.later
        start = 0
        for pairs in self._group:
            assert pairs.chunk.later is not None
            pairs.chunk.later[pairs.pieces] = later[start : start + len(pairs.pieces)]
            start += len(pairs.pieces)


class Parts:
    """Gathers the tuples of all chunks, part by part.

    Parameters
    ----------
    leaves : int32[n]
        All leaves that will be read, in the order of the plan.
    demand : int32[leaves of the table]
        How many tuples wait for each, or more.
    chunks
        The tuples, each waiting for one leaf.
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
        """Yield the tuples that wait for the leaves between two places: in one part, unless too many wait for one."""
        places = ascending(self._leaves[start:stop])
        read = Read(self._leaves[start:stop][places], places)
        for group in read.pairs(self._chunks, self._most):
            yield self._part(group, start)

    def _part(self, group: list[Pairs], start: int) -> Part:
        rows = pa.concat_batches([pairs.rows() for pairs in group]) if len(group) > 1 else group[0].rows()
        place = np.concatenate([pairs.frame for pairs in group])
        arrivals = [arrivals_at(pairs.chunk.arrival, pairs.pieces) for pairs in group]
        order = None
        if bool((place[1:] < place[:-1]).any()):
            order = ascending(place)
            rows, place = rows.take(pa.array(order)), place[order]
        arrival = merged_arrivals(arrivals, [len(pairs.pieces) for pairs in group], order)
        keys, _ = self._bound.encode(rows)
        later = np.zeros(len(rows), dtype=np.bool_) if self._bound.step else None
        return Part(rows, keys, arrival, place + np.int32(start), later, group, order)
