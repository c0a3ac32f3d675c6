"""Online phase where the row tier holds the whole relation: nothing waits, and no page can be missing.

And the scan that fills the tier of an operator whose memory is empty.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.memory.allocators import reuse_freed_memory
from headrace.joins.predicates import BoundEquality
from headrace.joins.ssij.phases.read_ahead import ReadAhead
from headrace.storage.probe import SlotForm
from headrace.storage.read import ReadReport, Reads

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.ssij.memory.row_tier import RowTier

__all__ = ["RowScan", "RowTierPhase"]

_PARTS = 2  # per thread: the consumer takes the first results while the last are looked up
_PART_ROWS = 1 << 16  # at most: memory for results of more is given back and taken again each time
_SAMPLE = 64  # leaves that tell how wide slots must be: one round of reads


class RowTierPhase:
    """Joins a batch in stream order.

    Parameters
    ----------
    context
        Context of the phases.
    tier
        Row tier, which is ready.
    scanned
        Whether the relation was scanned for this batch.
    """

    def __init__(self, context: SSIJContext, tier: RowTier, *, scanned: bool = False) -> None:
        self._context = context
        self._tier = tier
        self._scanned = scanned
        self._slices: list[BatchSlice] = []

    @property
    def waiting_nbytes(self) -> int:
        """Zero: nothing waits."""
        return 0

    def probe(self, batch: BatchSlice) -> list[tuple[int, int]]:
        """Take a batch. Nothing of it will wait."""
        share = self._context.workers.share(len(batch.rows))
        parts = max(share if share == 1 else _PARTS * share, -(-len(batch.rows) // _PART_ROWS))
        self._slices = batch.parts(parts)
        return []

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the batch."""
        context, counters = self._context, self._context.counters
        begin = context.progress.busy_seconds
        counters.online_phases += 1
        context.store.pin(on=True)
        for batch, results in zip(self._slices, context.workers.stream(self._join, self._slices), strict=True):
            counters.rows_cached += 0 if self._scanned else len(batch.rows)
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


class RowScan:
    """Moves all rows from the read buffer into the row tier in one scan.

    Parameters
    ----------
    context
        Context of the phases.
    tier
        Row tier, which takes a scan.
    """

    def __init__(self, context: SSIJContext, tier: RowTier) -> None:
        self._context = context
        self._tier = tier
        store, snapshot = context.store, context.snapshot
        assert store.direct is not None
        self._buffer = store.read_buffer
        self._pages = store.direct.descriptors.for_frames(self._buffer.pages)
        order = store.disk_order if len(store.disk_order) else np.arange(snapshot.leaves, dtype=np.int32)
        self._leaves = order[snapshot.leaf_rows[order] > 0]

    def run(self) -> bool:
        """Return whether the tier holds all rows now. Otherwise it is as empty as before."""
        counters, begin = self._context.counters, self._context.progress.busy_seconds
        if self._tier.begin_scan(self._form(), self._context.store.try_make_room):
            self._move()
        reuse_freed_memory(self._context.store.workspace // 2)  # of results
        counters.join_phases += 1
        counters.join_seconds += self._context.progress.busy_seconds - begin
        return self._tier.ready

    def _form(self) -> SlotForm | None:
        """Return a form of slots for the rows of some leaves, the first and the last among them."""
        snapshot, filled = self._context.snapshot, np.sort(self._leaves)
        count = min(_SAMPLE, len(filled), self._buffer.pages)
        frame = np.arange(count)
        self._read(filled[np.linspace(0, len(filled) - 1, count).astype(np.intp)], frame)
        self._pages.describe(self._buffer.frames, frame)
        return SlotForm.of(
            self._pages.words[frame],
            self._pages.greatest_key(self._buffer.frames, frame),
            (snapshot.separators.prefix[filled], snapshot.leaf_rows[filled]),
        )

    def _read(self, leaves: NDArray[np.int32], frame: NDArray[np.int64]) -> None:
        """Read single leaves into frames of the read buffer."""
        size, (pages, checksums) = self._context.snapshot.page_size, self._context.snapshot.pointers(leaves)
        lengths = np.full(len(pages), size)
        reading = self._context.queue.begin(Reads(pages * size, lengths, frame * size, pages, frame, checksums))
        reading.wait()
        reading.check()
        self._context.counters.add_read(ReadReport(len(pages), len(pages), len(pages)))

    def _move(self) -> None:
        with closing(ReadAhead(self._context, self._leaves).blocks()) as blocks:
            for block in blocks:
                frame = block.slots.astype(np.int64)
                if not self._tier.take(self._pages, self._buffer.frames, frame, self._context.workers):
                    return
