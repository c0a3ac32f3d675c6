"""Record-tier phase: joins the tuples whose row is in the record tier at once, before all other phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.joins.emitter import rows_at
from headrace.joins.input_buffer import BatchSlice, arrivals_at
from headrace.storage.format import Keys

if TYPE_CHECKING:
    from collections.abc import Generator

    import pyarrow as pa

    from headrace.joins.deadlines import Arrivals
    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.record_tier import RecordMatches

__all__ = ["RecordTierPhase"]


@dataclass(frozen=True, slots=True)
class _Joined:
    """A part of a batch: what the record tier had, the results, and the tuples that it did not have."""

    matches: RecordMatches
    arrival: Arrivals
    results: pa.RecordBatch | None
    missed: BatchSlice | None


class RecordTierPhase:
    """Joins a batch with the record tier, which is active.

    Parameters
    ----------
    context
        Context of the phases.
    """

    def __init__(self, context: SSIJContext) -> None:
        self._context = context
        self._store = context.store

    def run(self, batch: BatchSlice) -> Generator[pa.RecordBatch, None, list[BatchSlice]]:
        """Yield the results of the tuples found. Return the others."""
        workers, counters = self._context.workers, self._context.counters
        missed = []
        for joined in workers.map(self._look_up, batch.parts(workers.share(len(batch.rows)))):
            self._store.tiers.note_records(joined.matches)
            if joined.missed is not None:
                missed.append(joined.missed)
            if joined.results is not None:
                hit = joined.matches.hit
                counters.rows_cached += len(hit)
                counters.rows_recorded += len(hit)
                self._context.completed(arrivals_at(joined.arrival, hit), len(hit))
                yield joined.results
        return missed

    def _look_up(self, batch: BatchSlice) -> _Joined:
        """Look tuples up. Changes nothing but use counts, so that threads may run it at once."""
        records, emitter = self._store.tiers.records, self._context.emitter
        assert records is not None
        keys, valid = self._context.bound.encode(batch.rows)
        assert isinstance(keys, Keys)
        matches = records.find(keys, valid)
        missed = None
        if len(matches.miss):
            missed = BatchSlice(rows_at(batch.rows, matches.miss), arrivals_at(batch.arrival, matches.miss))
        results = None
        if len(matches.hit):
            results = emitter.finished(rows_at(batch.rows, matches.hit), records.columns(matches.slot))
        return _Joined(matches, batch.arrival, results, missed)
