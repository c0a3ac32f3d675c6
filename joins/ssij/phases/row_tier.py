"""Online phase where the row tier holds the whole relation: nothing waits, and no page can be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins.predicates import BoundEquality

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.row_tier import RowTier

__all__ = ["RowTierPhase"]

_PARTS = 2  # per thread: the consumer takes the first results while the last are looked up


class RowTierPhase:
    """Joins a batch in stream order.

    Parameters
    ----------
    context
        Context of the phases.
    tier
        Row tier, which is ready.
    """

    def __init__(self, context: SSIJContext, tier: RowTier) -> None:
        self._context = context
        self._tier = tier
        self._slices: list[BatchSlice] = []

    @property
    def waiting_nbytes(self) -> int:
        """Zero: nothing waits."""
        return 0

    def probe(self, batch: BatchSlice) -> list[tuple[int, int]]:
        """Take a batch. Nothing of it will wait."""
        share = self._context.workers.share(len(batch.rows))
        self._slices = batch.parts(share if share == 1 else _PARTS * share)
        return []

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the batch."""
        context, counters = self._context, self._context.counters
        begin = context.progress.busy_seconds
        counters.online_phases += 1
        context.store.pin(on=True)
        for batch, results in zip(self._slices, context.workers.stream(self._join, self._slices), strict=True):
            counters.rows_cached += len(batch.rows)
            context.completed(batch.arrival, len(batch.rows))
            yield from results
        context.store.pin(on=False)
        counters.online_seconds += context.progress.busy_seconds - begin

    def _join(self, batch: BatchSlice) -> list[pa.RecordBatch]:
        """Join a part. Changes nothing, so that threads may run it at once."""
        bound = self._context.bound
        assert isinstance(bound, BoundEquality)
        found = self._tier.find(bound.words(batch.rows), self._context.outer)
        return list(self._context.emitter.emit_found(batch.rows, found.source, found.columns))
