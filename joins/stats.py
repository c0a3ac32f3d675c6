"""What operators count. Frozen, so that a reading taken before can be subtracted from one taken after.

Counters subtract; gauges (a maximum, a current amount) keep the later reading's value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self

__all__ = ["JoinStats", "MemoryUse", "SSIJStats"]


_GAUGE = {"gauge": True}  # a field whose value a subtraction keeps


@dataclass(frozen=True, slots=True)
class _Reading:
    """A dataclass whose instances can be subtracted: later minus earlier is the interval between them."""

    def __sub__(self, earlier: Self) -> Self:
        if type(earlier) is not type(self):
            return NotImplemented
        values = {
            item.name: getattr(self, item.name)
            if item.metadata.get("gauge")
            else getattr(self, item.name) - getattr(earlier, item.name)
            for item in fields(self)
        }
        return type(self)(**values)


@dataclass(frozen=True, slots=True)
class MemoryUse(_Reading):
    """Bytes that an operator holds now, by component, and the most it ever held. All gauges.

    Attributes
    ----------
    limit, used, peak
        The budget, the sum of all components, and the greatest sum so far.
    index
        Inner nodes and the maps from leaf to frame.
    records
        Single rows that are asked for often, apart from their pages.
    whole
        All rows apart from their pages, where they fit beside these.
    filter
        What is known of keys that are not in the table.
    cache
        Frames of cached relation pages (the paper's CR).
    input_buffer
        Stream tuples that wait for an online phase (IB).
    stream_buffer
        Stream tuples that wait for relation pages (SB).
    inverted_index
        Which of them wait for which page (II).
    workspace
        Scratch arrays, and the output batch that is being made.
    read_buffer
        Where pages are read to be joined, and those in the gaps between them.
    statistics
        Of the cost model.
    """

    limit: int = field(default=0, metadata=_GAUGE)
    used: int = field(default=0, metadata=_GAUGE)
    peak: int = field(default=0, metadata=_GAUGE)
    index: int = field(default=0, metadata=_GAUGE)
    records: int = field(default=0, metadata=_GAUGE)
    whole: int = field(default=0, metadata=_GAUGE)
    filter: int = field(default=0, metadata=_GAUGE)
    cache: int = field(default=0, metadata=_GAUGE)
    input_buffer: int = field(default=0, metadata=_GAUGE)
    stream_buffer: int = field(default=0, metadata=_GAUGE)
    inverted_index: int = field(default=0, metadata=_GAUGE)
    workspace: int = field(default=0, metadata=_GAUGE)
    read_buffer: int = field(default=0, metadata=_GAUGE)
    statistics: int = field(default=0, metadata=_GAUGE)


@dataclass(frozen=True, slots=True)
class JoinStats(_Reading):
    """What every operator counts.

    Attributes
    ----------
    rows_in, batches_in
        Stream tuples and batches pushed.
    rows_done
        Stream tuples whose join is complete.
    rows_out, batches_out
        Result rows and batches that have come out.
    rows_cached
        Stream tuples that were complete without reading a page for them.
    pages_wanted, pages_read, seeks
        Relation pages asked for, pages that came from the disk (gaps included), and reads.
    read_seconds, busy_seconds
        Spent in reading, and in the operator altogether.
    rows_held
        Stream tuples inside the operator now (gauge).
    longest_wait
        Greatest time in seconds from a tuple's arrival to its completion (gauge).
    deadline_misses
        Stream tuples that were completed after their deadline.
    memory
        Bytes held, by component (gauge).
    """

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
    busy_seconds: float = 0.0
    rows_held: int = field(default=0, metadata=_GAUGE)
    longest_wait: float = field(default=0.0, metadata=_GAUGE)
    deadline_misses: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse, metadata=_GAUGE)

    @property
    def hit_ratio(self) -> float:
        """Share of the completed stream tuples that needed no read; 0 before the first."""
        return self.rows_cached / self.rows_done if self.rows_done else 0.0

    @property
    def rate(self) -> float:
        """Stream tuples completed per second in which the operator worked; 0 before the first."""
        return self.rows_done / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True, slots=True)
class SSIJStats(JoinStats):
    """What SSIJ counts beyond the rest.

    Attributes
    ----------
    online_phases, join_phases
        How often each phase ran.
    online_seconds, join_seconds
        Time in each phase; reading is part of the join phase.
    rows_recorded
        Those of `rows_cached` whose row was in the record tier.
    rows_filtered
        Those of `rows_cached` that the table's negative filter knew to have no match.
    false_positives
        Tuples that waited for a page although the filter was asked, and had no match.
    filter_bits
        Bits that a key has in the filter in memory, on average; 0 if there is none in use (gauge).
    pages_kept, pages_evicted
        Relation pages that a join phase left in the cache, and pages that left the cache.
    pages_cached
        Pages in the cache now (gauge).
    """

    online_phases: int = 0
    join_phases: int = 0
    online_seconds: float = 0.0
    join_seconds: float = 0.0
    rows_recorded: int = 0
    rows_filtered: int = 0
    false_positives: int = 0
    filter_bits: float = field(default=0.0, metadata=_GAUGE)
    pages_kept: int = 0
    pages_evicted: int = 0
    pages_cached: int = field(default=0, metadata=_GAUGE)
