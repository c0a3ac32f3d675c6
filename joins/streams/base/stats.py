"""Statistics of joins of streams with streams."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.joins.stats import JoinStats

__all__ = ["PhaseCounters", "StreamsStats"]

_GAUGE = {"gauge": True}


@dataclass(frozen=True, slots=True)
class StreamsStats(JoinStats):
    """Statistics of a join of streams beyond those of every operator. `rows_done` are tuples that were taken in.

    Attributes
    ----------
    rows_arriving, rows_reactive, rows_cleanup
        Result rows of each phase. The first two are the results online.
    reactive_steps
        Steps of work while all inputs were blocked.
    rows_dropped
        Tuples without a key, which can never match.
    rows_spilled, blocks_spilled, blocks_read
        Tuples and blocks written to spill files, and blocks read from them.
    bytes_spilled, bytes_read
        Bytes written to spill files, and read from them.
    rows_in_memory
        Tuples in memory now (gauge).
    """

    rows_arriving: int = 0
    rows_reactive: int = 0
    rows_cleanup: int = 0
    reactive_steps: int = 0
    rows_dropped: int = 0
    rows_spilled: int = 0
    blocks_spilled: int = 0
    blocks_read: int = 0
    bytes_spilled: int = 0
    bytes_read: int = 0
    rows_in_memory: int = field(default=0, metadata=_GAUGE)


@dataclass(slots=True)
class PhaseCounters:
    """Mutable twin of `StreamsStats`. The names mean the same."""

    rows_in: int = 0
    batches_in: int = 0
    rows_done: int = 0
    rows_out: int = 0
    batches_out: int = 0
    rows_arriving: int = 0
    rows_reactive: int = 0
    rows_cleanup: int = 0
    reactive_steps: int = 0
    rows_dropped: int = 0
    rows_spilled: int = 0
