"""Memory that joins use: the budget that every operator keeps, and the allocators of the process.

In: charges and releases by component. Out: a hard limit, and the statistics of who holds what.
"""

from headrace.joins.memory.budget import Component, MemoryBudget

__all__ = ["Component", "MemoryBudget"]
