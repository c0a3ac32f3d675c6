"""Running counts of an operator, from which its frozen statistics are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.storage.read import ReadReport

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Mutable twin of `headrace.joins.stats.SSIJStats`; the names mean the same."""

    rows_in: int = 0
    batches_in: int = 0
    rows_done: int = 0
    rows_out: int = 0
    batches_out: int = 0
    rows_cached: int = 0
    pages_wanted: int = 0
    pages_read: int = 0
    seeks: int = 0
    read_seconds: float = 0.0
    online_phases: int = 0
    join_phases: int = 0
    online_seconds: float = 0.0
    join_seconds: float = 0.0
    rows_recorded: int = 0
    rows_filtered: int = 0
    pages_kept: int = 0
    pages_evicted: int = 0

    def add_read(self, report: ReadReport) -> None:
        """Count what a read did."""
        self.pages_wanted += report.pages_wanted
        self.pages_read += report.pages_read
        self.seeks += report.seeks
        self.read_seconds += report.seconds
