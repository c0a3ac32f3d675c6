"""`Pairing`: all conditions between two inputs, and the search for pairs of tuples that meet them.

One condition, an equality if there is one, finds candidates by an index; the others filter them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.indexes import new_cursor
from headrace.joins.streams.tuples.store import TupleStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.conditions import Edge
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["Pairing", "coexisted", "pairs_limit"]


class Pairing:
    """All conditions between two inputs.

    Parameters
    ----------
    edges
        Edges of the join graph between the two; at least one.

    Attributes
    ----------
    driver
        Edge whose keys find candidates.
    """

    def __init__(self, edges: Sequence[Edge]) -> None:
        self.driver = min(edges, key=lambda edge: edge.width is not None)
        self._others = [edge for edge in edges if edge is not self.driver]

    @property
    def ordered(self) -> bool:
        """Whether the index must have sorted entries."""
        return self.driver.width is not None

    def index_kinds(self, side: int, keys: int, *, ordered: bool | None = None) -> list[bool | None]:
        """Return which keys of an input need an index, and of which kind; see `TupleStore`.

        Parameters
        ----------
        side
            Input.
        keys
            Number of its keys.
        ordered
            Whether the index has sorted entries; by default if it must.
        """
        kinds: list[bool | None] = [None] * keys
        kinds[self.driver.key_of(side)] = self.ordered or bool(ordered)
        return kinds

    def stores(
        self, layouts: Sequence[RowLayout], budget: MemoryBudget, *, ordered: bool | None = None
    ) -> list[TupleStore]:
        """Return an empty store for each input, with the index that `find` needs; see `index_kinds`."""
        return [
            TupleStore(layout, budget, self.index_kinds(side, len(layout.keys), ordered=ordered))
            for side, layout in enumerate(layouts)
        ]

    def find(
        self, store: TupleStore, side: int, probing: Rows, index: NDArray[np.int64], limit: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the pairs of probing tuples and tuples in memory that meet all conditions.

        The store must not change until the last pairs were taken.

        Parameters
        ----------
        store
            Tuples of the other input.
        side
            Input of the probing tuples.
        probing, index
            Tuples that probe are those at `index`.
        limit
            Most pairs to yield at once.

        Yields
        ------
        positions, slots : int64[n]
            Positions in `probing`, and slots of the store.
        """
        for at, slots in self.matches(store, side, probing, index, limit):
            yield index[at], slots

    def matches(
        self, store: TupleStore, side: int, probing: Rows, index: NDArray[np.int64], limit: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield what `find` yields, but with positions in `index`, which may name a tuple repeatedly."""
        other = self.driver.other(side)
        cursor = new_cursor()
        out = np.empty(limit, dtype=np.int64), np.empty(limit, dtype=np.int64)
        while cursor[0] < len(index):
            found = store.probe(
                self.driver.key_of(other), probing, self.driver.key_of(side), index, self.driver.width, cursor, out
            )
            at, slots = out[0][:found].copy(), out[1][:found].copy()
            keep = self.meets(side, probing, index[at], store.rows, slots, driven=True)
            if keep is not None:
                at, slots = at[keep], slots[keep]
            if len(at):
                yield at, slots

    def meets(
        self,
        side: int,
        left: Rows,
        left_index: NDArray[np.int64],
        right: Rows,
        right_index: NDArray[np.int64],
        *,
        driven: bool = False,
    ) -> NDArray[np.bool_] | None:
        """Return which pairs meet the conditions; None if there is none to check.

        Parameters
        ----------
        side
            Input of the tuples `left`; those of `right` belong to the other.
        left, left_index, right, right_index
            Pairs of tuples.
        driven
            Whether the pairs are known to meet the condition of `driver`.
        """
        edges = self._others if driven else [self.driver, *self._others]
        if not edges:
            return None
        keep = np.ones(len(left_index), dtype=np.bool_)
        for edge in edges:
            width = edge.width
            kernels.filter_pairs(
                left.keyed(edge.key_of(side)),
                left_index,
                right.keyed(edge.key_of(edge.other(side))),
                right_index,
                width is not None,
                np.uint64(0 if width is None else width.words),
                0.0 if width is None else width.number,
                width is not None and width.floating,
                keep,
            )
        return keep


def pairs_limit(nbytes: int) -> int:
    """Return how many pairs fit into `nbytes`, with the arrays that are made of them."""
    return max(64, nbytes // 64)


def coexisted(sources: Sequence[tuple[Rows, NDArray[np.int64]]]) -> NDArray[np.bool_]:
    """Return which combinations of tuples were in memory together, so that their result exists already.

    A tuple is in memory from its arrival stamp (included) to its departure stamp (excluded). Intervals that overlap in
    pairs have a common point, so this holds for any number of inputs.

    Parameters
    ----------
    sources
        For each input, tuples and the positions of those of each combination.
    """
    latest = np.max([rows.arrivals[index] for rows, index in sources], axis=0)
    earliest = np.min([rows.departures[index] for rows, index in sources], axis=0)
    together: NDArray[np.bool_] = latest < earliest
    return together
