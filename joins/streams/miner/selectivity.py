"""`Selectivity`: estimates of how many tuples of two inputs join (the paper's section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.joins.streams.base.combining import Step

__all__ = ["Selectivity"]


class Selectivity:
    """Numbers of joins between pairs of inputs since the last flush (the paper's LocalJoins).

    Parameters
    ----------
    pairs
        Pairs of inputs with conditions between them, the smaller number first.

    Examples
    --------
    >>> from headrace.joins.streams.base.combining import Step
    >>> selectivity = Selectivity([(0, 1)])
    >>> selectivity.note(Step(side=0, parent=1), 6)
    >>> selectivity.factor(0, 1, 4, 5)
    0.3
    """

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.local_joins = dict.fromkeys(pairs, 0)

    def note(self, step: Step, found: int) -> None:
        """Count joins between two inputs, whether or not they become results."""
        self.local_joins[min(step.side, step.parent), max(step.side, step.parent)] += found

    def factor(self, one: int, other: int, one_count: int, other_count: int) -> float:
        """Return the selectivity factor of two inputs with so many tuples in memory (the paper's sigma)."""
        joins = self.local_joins[min(one, other), max(one, other)]
        return joins / max(one_count * other_count, 1)

    def zero(self) -> None:
        """Start over after a flush."""
        for pair in self.local_joins:
            self.local_joins[pair] = 0
