"""Statistics of operators: running counters, and frozen readings that can be subtracted.

A reading minus an earlier one is the interval between them. Counters subtract; gauges (a maximum, a current amount)
keep the later value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from headrace.storage.read import ReadReport

__all__ = ["Counters", "JoinStats", "MemoryUse", "SSIJStats"]


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
    """Bytes that an operator holds now, by component, and the most it ever held. All are gauges.

    Attributes
    ----------
    limit, used, peak
        Budget, sum of all components, and greatest sum so far.
    index
        Inner nodes and the maps from leaf to frame.
    records
        Record tier: single rows that are looked up often.
    rows
        Row tier: all rows of the relation, if they fit beside its pages.
    filter
        Negative filter: which keys are surely absent.
    cache
        Frames of cached relation pages (the paper's CR).
    input_buffer
        Stream tuples that wait for an online phase (the paper's IB).
    stream_buffer
        Stream tuples that wait for relation pages (the paper's SB).
    inverted_index
        Which of them wait for which page (the paper's II).
    workspace
        Scratch arrays, and the output batch in progress.
    read_buffer
        Pages that were read and are being joined, and those in the gaps between them.
    statistics
        Statistics of the cost model.
    tuples
        Tuples of streams that are joined with streams (the process space of the papers).
    key_index
        Hash chains and sorted entries that find these tuples by key.
    spill
        Blocks that are being written to spill files or were read from them, and the list of all blocks.
    """

    limit: int = field(default=0, metadata=_GAUGE)
    used: int = field(default=0, metadata=_GAUGE)
    peak: int = field(default=0, metadata=_GAUGE)
    index: int = field(default=0, metadata=_GAUGE)
    records: int = field(default=0, metadata=_GAUGE)
    rows: int = field(default=0, metadata=_GAUGE)
    filter: int = field(default=0, metadata=_GAUGE)
    cache: int = field(default=0, metadata=_GAUGE)
    input_buffer: int = field(default=0, metadata=_GAUGE)
    stream_buffer: int = field(default=0, metadata=_GAUGE)
    inverted_index: int = field(default=0, metadata=_GAUGE)
    workspace: int = field(default=0, metadata=_GAUGE)
    read_buffer: int = field(default=0, metadata=_GAUGE)
    statistics: int = field(default=0, metadata=_GAUGE)
    tuples: int = field(default=0, metadata=_GAUGE)
    key_index: int = field(default=0, metadata=_GAUGE)
    spill: int = field(default=0, metadata=_GAUGE)


@dataclass(frozen=True, slots=True)
class JoinStats(_Reading):
    """Statistics of every operator.

    Attributes
    ----------
    rows_in, batches_in
        Stream tuples and batches pushed.
    rows_done
        Stream tuples whose join is complete.
    rows_out, batches_out
        Result rows and batches produced.
    rows_cached
        Stream tuples that were complete without reading a page for them.
    pages_wanted, pages_read, seeks
        Relation pages requested, pages read from the disk (gaps included), and reads.
    read_seconds, busy_seconds
        Time spent in reading, and in the operator altogether.
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
    """Statistics of SSIJ beyond those of every operator.

    Attributes
    ----------
    online_phases, join_phases
        Number of runs of each phase.
    online_seconds, join_seconds
        Time in each phase. Reading is part of the join phase.
    rows_recorded
        Tuples of `rows_cached` whose row was in the record tier.
    rows_filtered
        Tuples of `rows_cached` whose key the negative filter knew to be absent.
    false_positives
        Tuples that waited for a page although the filter was asked, and had no match.
    filter_bits
        Average bits per key of the filter in memory; 0 if none is in use (gauge).
    pages_kept, pages_evicted
        Relation pages that a join phase left in the cache, and pages that left the cache.
    pages_cached
        Pages in the cache now (gauge).
    nodes_read
        Inner nodes read, where not all of them are in memory.
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
    nodes_read: int = 0


@dataclass(slots=True)
class Counters:
    """Mutable twin of `SSIJStats`: running counts of an operator. The names mean the same."""

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
    nodes_read: int = 0

    def add_nodes(self, report: ReadReport) -> None:
        """Count a read of inner nodes."""
        self.nodes_read += report.pages_wanted

    def add_read(self, report: ReadReport) -> None:
        """Count a read."""
        self.pages_wanted += report.pages_wanted
        self.pages_read += report.pages_read
        self.seeks += report.seeks
        self.read_seconds += report.seconds
