"""The switches of SSIJ that the paper's experiments compare: who leaves the cache, who has the memory, how reads go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.joins.errors import JoinInputError
from headrace.storage.read import (
    LRU,
    AgeingCounter,
    CachePolicy,
    ReadPlan,
    UtilityCounter,
    plan_reads,
    plan_reads_greedily,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    Planner: TypeAlias = Callable[[NDArray[np.int64], float, float, int], ReadPlan]

__all__ = ["Variant"]

_POLICIES: dict[str, Callable[[], CachePolicy]] = {
    "utility": UtilityCounter,
    "ageing": AgeingCounter,
    "lru": LRU,
    "none": UtilityCounter,
}
_PLANNERS: dict[str, Planner] = {"optimal": plan_reads, "greedy": plan_reads_greedily}


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of the switches, checked. See `headrace.joins.SSIJ` for what they mean."""

    cache_policy: str = "utility"
    memory_split: float | None = None
    read_plan: str = "optimal"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("cache_policy", self.cache_policy, _POLICIES), ("read_plan", self.read_plan, _PLANNERS),
        ):  # fmt: skip
            if value not in known:
                raise JoinInputError(f"`{name}` is {' or '.join(map(repr, known))}, not {value!r}")
        split = self.memory_split
        if split is not None and not (isinstance(split, int | float) and 0 <= split < 1):
            raise JoinInputError(f"`memory_split` is a share of the memory, at least 0 and below 1, not {split!r}")
        if self.cache_policy == "none":
            if split:
                raise JoinInputError(f"without a cache no memory can be set apart for it: `memory_split` is {split!r}")
            object.__setattr__(self, "memory_split", 0.0)

    @property
    def policy(self) -> Callable[[], CachePolicy]:
        """Makes the policy of the cache."""
        return _POLICIES[self.cache_policy]

    @property
    def newest_first(self) -> bool:
        """Whether a page that was read just now is worth more than any in the cache."""
        return self.cache_policy == "lru"

    @property
    def planner(self) -> Planner:
        """Plans the reads of a join phase."""
        return _PLANNERS[self.read_plan]
