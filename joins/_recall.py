"""SSIJ's first look at a batch: tuples whose row is in the record tier are joined at once, before all phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from joins._emit import rows_at
from joins._input_buffer import arrivals_at

if TYPE_CHECKING:
    from collections.abc import Generator

    import pyarrow as pa

    from joins._input_buffer import Piece
    from joins._records import Sighted
    from joins._state import SSIJState

__all__ = ["RecallPhase"]


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
        parts = piece.parts(workers.share(len(piece.rows)))
        missed = []
        for part, (sighted, columns) in zip(parts, workers.map(self._look_up, parts), strict=True):
            self._store.note_records(sighted)
            if len(sighted.miss):
                missed.append(rows_at(part.rows, sighted.miss))
            if len(sighted.hit):
                counters.rows_cached += len(sighted.hit)
                counters.rows_recorded += len(sighted.hit)
                self._state.completed(arrivals_at(part.arrival, sighted.hit), len(sighted.hit))
                yield self._state.emitter.finished(rows_at(part.rows, sighted.hit), columns)
        return missed

    def _look_up(self, piece: Piece) -> tuple[Sighted, list[pa.Array]]:
        """Find tuples in the record tier. Changes nothing but counts, so that threads may do it at once."""
        assert self._store.records is not None
        sighted = self._store.records.find(*self._state.bound.encode(piece.rows))
        return sighted, self._store.records.columns(sighted.slot)
