"""`Arena`: memory of one array that grows and shrinks without being copied, charged to the budget in whole pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage.read import FrameMemory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.joins.memory import Component, MemoryBudget

__all__ = ["ARENA_PAGE", "Arena", "charged_nbytes"]

ARENA_PAGE = 4096
_HUGE = 2 << 20
_LARGE = 32 << 20


def charged_nbytes(nbytes: int) -> int:
    """Return the bytes that an arena of `nbytes` is charged with. Large arenas use huge pages."""
    page = ARENA_PAGE if nbytes < _LARGE else _HUGE
    return -(-nbytes // page) * page


class Arena:
    """A byte array with room for the whole budget, of which only the charged part uses memory.

    Parameters
    ----------
    budget
        Budget to charge.
    component
        Component that holds the memory.
    """

    def __init__(self, budget: MemoryBudget, component: Component) -> None:
        self._budget = budget
        self._component: Component = component
        self._memory = FrameMemory(charged_nbytes(budget.limit))
        self.charged = 0

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The whole array, beyond the charged part too."""
        return self._memory.buffer

    def resize(self, nbytes: int) -> None:
        """Charge for the first `nbytes` bytes, and give the others back.

        Raises
        ------
        MemoryBudgetError
            If the budget would be exceeded. Nothing is changed then.
        """
        wanted = charged_nbytes(nbytes)
        if wanted > self.charged:
            self._budget.charge(self._component, wanted - self.charged)
            if wanted >= _LARGE:
                self._memory.allow(wanted, 0)
        elif wanted < self.charged:
            self._memory.break_up(self.charged)
            self._memory.give_back(wanted, self.charged)
            self._budget.release(self._component, self.charged - wanted)
        self.charged = wanted

    def free(self) -> None:
        """Give all memory back."""
        self.resize(0)
