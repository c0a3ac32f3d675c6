"""Memory budget of an operator: a hard limit, what each component holds of it, and what the process really takes."""

from __future__ import annotations

from typing import Literal, get_args

from headrace.joins.memory.allocators import ProcessMemory
from headrace.joins.stats import MemoryUse
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.units import format_size

__all__ = ["Component", "MemoryBudget"]

_WORTH_RETURNING = 4 << 20

Component = Literal[
    "index",
    "records",
    "rows",
    "filter",
    "cache",
    "input_buffer",
    "stream_buffer",
    "inverted_index",
    "workspace",
    "read_buffer",
    "statistics",
    "tuples",
    "key_index",
    "spill",
]


class MemoryBudget:
    """Limit on the sum of what the components hold.

    Code that allocates charges first, and releases after freeing, so the sum never exceeds the limit.

    Parameters
    ----------
    limit
        Limit in bytes (the paper's M).

    Examples
    --------
    >>> budget = MemoryBudget(1000)
    >>> budget.charge("cache", 600)
    >>> budget.available
    400
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Component, int] = dict.fromkeys(get_args(Component), 0)
        self._used = 0
        self._peak = 0
        self._process = ProcessMemory(limit)

    @property
    def available(self) -> int:
        """Bytes that no component holds."""
        return self.limit - self._used

    def held(self, component: Component) -> int:
        """Return the bytes that a component holds."""
        return self._held[component]

    def charge(self, component: Component, nbytes: int) -> None:
        """Add to what a component holds.

        Raises
        ------
        MemoryBudgetError
            If the limit would be exceeded. Nothing is charged then.
        """
        if nbytes > self.available:
            raise MemoryBudgetError.of(
                f"the join needs {format_size(self._used + nbytes)} for its {component.replace('_', ' ')}, more than "
                f"its memory of {format_size(self.limit)}",
                self._used + nbytes,
            )
        self._used += nbytes
        self._held[component] += nbytes
        self._peak = max(self._peak, self._used)

    def release(self, component: Component, nbytes: int) -> None:
        """Subtract from what a component holds."""
        assert 0 <= nbytes <= self._held[component], (component, nbytes, self._held[component])
        self._used -= nbytes
        self._held[component] -= nbytes

    def resize(self, component: Component, nbytes: int) -> None:
        """Set what a component holds.

        Raises
        ------
        MemoryBudgetError
            If the limit would be exceeded.
        """
        change = nbytes - self._held[component]
        if change >= 0:
            self.charge(component, change)
        else:
            self.release(component, -change)

    def clear(self) -> None:
        """Release everything, after all components were freed."""
        for component in self._held:
            self.resize(component, 0)

    def settle(self) -> None:
        """Keep the process within the limit: what allocators keep counts too. Call it where memory changes hands."""
        self._process.settle()

    def give_back(self, nbytes: int) -> None:
        """Return freed memory to the system now, if `nbytes` bytes were freed and that many are worth the time."""
        if nbytes >= _WORTH_RETURNING:
            self._process.give_back()

    def use(self) -> MemoryUse:
        """Return the current account."""
        return MemoryUse(limit=self.limit, used=self._used, peak=self._peak, **self._held)
