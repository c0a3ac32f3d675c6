"""`Combiner`: combinations of tuples of any number of inputs, found by probing one input after another.

The search is depth first and in pieces: a step takes at most `limit` matches of one input, and goes on to the next
input with these before it looks for more. So the memory for partial results does not depend on their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from headrace.joins.streams.base.pairs import Pairing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.conditions import JoinGraph
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.joins.streams.tuples.store import TupleStore

__all__ = ["Combination", "Combiner", "Step"]

Combination: TypeAlias = "dict[int, tuple[Rows, NDArray[np.int64]]]"
"""For some inputs, their tuples and the position in them of each combination's tuple."""

_LARGE_MEMORY = 16 << 20
_FEW, _MANY = 256, 4096
_WORD = 8
_SCRATCH = 8  # arrays of a step beside the positions of each input


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a probing sequence.

    Attributes
    ----------
    side
        Input that is probed.
    parent
        Input whose tuples probe it.
    filters
        Inputs that are joined before and have conditions with it too; the graph has a cycle then.
    """

    side: int
    parent: int
    filters: tuple[int, ...] = ()


class Combiner:
    """Search for combinations of tuples.

    Parameters
    ----------
    graph
        Inputs and conditions.
    budget
        Budget to charge with the memory of partial results, as the component ``workspace``.

    Attributes
    ----------
    pairings
        All conditions between two inputs, by their positions in order.
    limit
        Most matches in a piece.
    """

    def __init__(self, graph: JoinGraph, budget: MemoryBudget) -> None:
        pairs = sorted({(min(edge.sides), max(edge.sides)) for edge in graph.edges})
        self.pairings = {
            pair: Pairing([edge for edge in graph.edges if set(edge.sides) == set(pair)]) for pair in pairs
        }
        self._count = len(graph.names)
        self.limit = _FEW if budget.limit < _LARGE_MEMORY else _MANY
        budget.charge("workspace", (self._count - 1) * (self._count + _SCRATCH) * _WORD * self.limit)

    def pairing(self, one: int, other: int) -> Pairing:
        """Return the conditions between two inputs."""
        return self.pairings[min(one, other), max(one, other)]

    def index_kinds(self, side: int, keys: int) -> list[bool | None]:
        """Return which keys of an input are probed, and whether they need sorted entries; see `TupleStore`."""
        kinds: list[bool | None] = [None] * keys
        for pair, pairing in self.pairings.items():
            if side in pair:
                key = pairing.driver.key_of(side)
                kinds[key] = bool(kinds[key]) or pairing.ordered
        return kinds

    def sequence(self, start: int, cost: Callable[[int, int], float]) -> list[Step]:
        """Return a probing sequence: at each step the connected input with the least cost.

        Parameters
        ----------
        start
            Input that the sequence begins with.
        cost
            Cost of a pair of inputs, the joined one first. Of equal pairs, the one with the first input is taken.
        """
        joined, steps = [start], []
        while len(joined) < self._count:
            pairs = [
                (cost(here, there), there, here)
                for pair in self.pairings
                for here, there in (pair, pair[::-1])
                if here in joined and there not in joined
            ]
            _, side, parent = min(pairs)
            filters = (
                other for other in joined if other != parent and (min(other, side), max(other, side)) in self.pairings
            )
            steps.append(Step(side, parent, tuple(filters)))
            joined.append(side)
        return steps

    def combine(
        self,
        start: Combination,
        sequence: Sequence[Step],
        stores: Callable[[int], TupleStore],
        note: Callable[[Step, int], None] | None = None,
    ) -> Iterator[Combination]:
        """Yield the combinations with one tuple of each input that meet all conditions, in pieces.

        Parameters
        ----------
        start
            Tuples of one input.
        sequence
            Probing sequence that begins with this input.
        stores
            Returns the tuples in memory of an input. Asked only for inputs that a partial result is joined with.
        note
            Called with each step and the number of matches found.
        """
        if not sequence:
            yield start
            return
        step = sequence[0]
        probing, index = start[step.parent]
        if len(index) == 0:
            return
        store = stores(step.side)
        for at, slots in self.pairing(step.parent, step.side).matches(store, step.parent, probing, index, self.limit):
            longer = {side: (rows, positions[at]) for side, (rows, positions) in start.items()}
            longer[step.side] = (store.rows, slots)
            longer = self._filtered(longer, step)
            found = len(longer[step.side][1])
            if found:
                if note is not None:
                    note(step, found)
                yield from self.combine(longer, sequence[1:], stores, note)

    def _filtered(self, pieces: Combination, step: Step) -> Combination:
        """Return the combinations that meet the conditions with other inputs as well."""
        for other in step.filters:
            left, right = pieces[other], pieces[step.side]
            keep = self.pairing(other, step.side).meets(other, *left, *right)
            assert keep is not None
            if not keep.all():
                pieces = {side: (rows, positions[keep]) for side, (rows, positions) in pieces.items()}
        return pieces
