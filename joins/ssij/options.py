"""Options of SSIJ, checked: thresholds, threads, and the alternatives that the paper's experiments compare."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict

from headrace.joins.errors import JoinInputError
from headrace.storage.errors import nearest
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

__all__ = ["SSIJOptions", "Tuning"]

_POLICIES: dict[str, Callable[[], CachePolicy]] = {
    "utility": UtilityCounter,
    "ageing": AgeingCounter,
    "lru": LRU,
    "none": UtilityCounter,
}
_PARAMETERS = ("table", "on", "how", "memory", "deadline", "deadline_column", "columns", "reader", "clock")
_INDEXES = ("fitting", "whole", "paged")
_PLANNERS: dict[str, Planner] = {"optimal": plan_reads, "greedy": plan_reads_greedily}


class Tuning(TypedDict, total=False):
    """Keyword arguments of `headrace.joins.SSIJ` that become its `SSIJOptions`."""

    max_scan: int | None
    input_threshold: int | None
    stream_threshold: int | None
    threads: int | None
    record_tier: bool
    cache_policy: str
    memory_split: float | None
    read_plan: str
    index: str


@dataclass(frozen=True, slots=True)
class SSIJOptions:
    """Parameters of SSIJ that other operators do not have. See `headrace.joins.SSIJ` for their meaning.

    Raises
    ------
    JoinInputError
        If a value cannot be used.
    """

    max_scan: int | None = None
    input_threshold: int | None = None
    stream_threshold: int | None = None
    threads: int | None = None
    record_tier: bool = True
    cache_policy: str = "utility"
    memory_split: float | None = None
    read_plan: str = "optimal"
    index: str = "fitting"

    def __post_init__(self) -> None:
        for name in ("max_scan", "input_threshold", "stream_threshold", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise JoinInputError(f"`{name}` must be a whole number, at least 1, not {value!r}")
        for name, known in (("cache_policy", _POLICIES), ("read_plan", _PLANNERS), ("index", _INDEXES)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise JoinInputError(f"`{name}` must be {' or '.join(map(repr, known))}, not {value!r}")
        if not isinstance(self.record_tier, bool):
            raise JoinInputError(f"`record_tier` must be True or False, not {self.record_tier!r}")
        self._check_split()

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Return the options with these names and values.

        Raises
        ------
        TypeError
            If there is no option of that name.
        JoinInputError
            If a value cannot be used.
        """
        known = (*_PARAMETERS, *(option.name for option in fields(cls)))
        for name in given:
            if name not in known:
                raise TypeError(f"SSIJ has no parameter {name!r}{nearest(name, known)}; it has {', '.join(known)}")
        return cls(**given)

    def _check_split(self) -> None:
        split = self.memory_split
        if split is not None and not (isinstance(split, int | float) and 0 <= split < 1):
            raise JoinInputError(f"`memory_split` must be a share of the memory, at least 0 and below 1, not {split!r}")
        if self.cache_policy == "none" and split:
            raise JoinInputError(
                f"without a cache no memory can be reserved for it: `memory_split` is {split!r}; leave it out"
            )

    @property
    def cache_share(self) -> float | None:
        """Fixed share of the memory that cached pages have; None if they have what the tuples leave."""
        return 0.0 if self.cache_policy == "none" else self.memory_split

    @property
    def policy(self) -> Callable[[], CachePolicy]:
        """Factory of the cache's replacement policy."""
        return _POLICIES[self.cache_policy]

    @property
    def newest_first(self) -> bool:
        """Whether a page that was just read is worth more than any cached page (LRU)."""
        return self.cache_policy == "lru"

    @property
    def planner(self) -> Planner:
        """Function that plans the reads of a join phase."""
        return _PLANNERS[self.read_plan]
