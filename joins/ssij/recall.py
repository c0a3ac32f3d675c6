"""SSIJ's first look at a batch: tuples whose row is in the record tier are joined at once, before all phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.joins._emit import rows_at
from headrace.joins._input_buffer import arrivals_at
from headrace.storage.format import Keys

if TYPE_CHECKING:
    from collections.abc import Generator

    import pyarrow as pa

    from headrace.joins._input_buffer import Arrivals, Piece
    from headrace.joins.ssij.records import Sighted
    from headrace.joins.ssij.state import SSIJState

__all__ = ["RecallPhase"]


@dataclass(frozen=True, slots=True)
class _Recalled:
    """What became of a part of a batch: results, and the tuples that were not found."""

    sighted: Sighted
    arrival: Arrivals
    results: pa.RecordBatch | None
    missed: pa.RecordBatch | None


class RecallPhase:
    """Joins a batch with the record tier, which is awake.

    Parameters
    ----------
    state
        Of the operator.
    """

    def __init__(self, state: SSIJState) -> None:
        self._state = state
        self._store = state.store

    def run(self, piece: Piece) -> Generator[pa.RecordBatch, None, list[pa.RecordBatch]]:
        """Yield the results of what is found; return what is not."""
        workers, counters = self._state.workers, self._state.counters
        missed = []
        for recalled in workers.map(self._look_up, piece.parts(workers.share(len(piece.rows)))):
            self._store.tiers.note_records(recalled.sighted)
            if recalled.missed is not None:
                missed.append(recalled.missed)
            if recalled.results is not None:
                hit = recalled.sighted.hit
                counters.rows_cached += len(hit)
                counters.rows_recorded += len(hit)
                self._state.completed(arrivals_at(recalled.arrival, hit), len(hit))
                yield recalled.results
        return missed

    def _look_up(self, piece: Piece) -> _Recalled:
        """Find tuples in the record tier. Changes nothing but counts, so that threads may do it at once."""
        records, emitter = self._store.tiers.records, self._state.emitter
        assert records is not None
        keys, valid = self._state.bound.encode(piece.rows)
        assert isinstance(keys, Keys)
        sighted = records.find(keys, valid)
        missed = rows_at(piece.rows, sighted.miss) if len(sighted.miss) else None
        results = None
        if len(sighted.hit):
            results = emitter.finished(rows_at(piece.rows, sighted.hit), records.columns(sighted.slot))
        return _Recalled(sighted, piece.arrival, results, missed)
