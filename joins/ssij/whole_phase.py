"""SSIJ's online phase where the whole relation is at hand, row by row: nothing waits, nothing can leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins.predicates import BoundEquality

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from headrace.joins._input_buffer import Piece
    from headrace.joins.ssij.state import SSIJState
    from headrace.joins.ssij.whole import WholeTier

__all__ = ["WholePhase"]

_PARTS = 2  # for each thread: the consumer has the first while the last are looked up


class WholePhase:
    """Joins a batch in the order of the stream.

    Parameters
    ----------
    state
        Of the operator.
    whole
        Ready.
    """

    def __init__(self, state: SSIJState, whole: WholeTier) -> None:
        self._state = state
        self._whole = whole
        self._pieces: list[Piece] = []

    @property
    def waiting_nbytes(self) -> int:
        """Nothing waits."""
        return 0

    def probe(self, piece: Piece) -> list[tuple[int, int]]:
        """Take a batch; nothing of it will wait."""
        share = self._state.workers.share(len(piece.rows))
        self._pieces = piece.parts(share if share == 1 else _PARTS * share)
        return []

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the batch."""
        state, counters = self._state, self._state.counters
        begin = state.progress.busy_seconds
        counters.online_phases += 1
        state.store.pin(on=True)
        for piece, results in zip(self._pieces, state.workers.stream(self._join, self._pieces), strict=True):
            counters.rows_cached += len(piece.rows)
            state.completed(piece.arrival, len(piece.rows))
            yield from results
        state.store.pin(on=False)
        counters.online_seconds += state.progress.busy_seconds - begin

    def _join(self, piece: Piece) -> list[pa.RecordBatch]:
        """Join a part. Changes nothing, so that threads may do it at once."""
        bound = self._state.bound
        assert isinstance(bound, BoundEquality)
        found = self._whole.find(bound.words(piece.rows), self._state.outer)
        return list(self._state.emitter.emit_found(piece.rows, found.source, found.columns))
