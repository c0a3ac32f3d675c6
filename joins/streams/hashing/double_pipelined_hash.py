"""`DoublePipelinedHash`: the double-pipelined hash join of Tukwila (Ives et al.), with incremental symmetric flush.

Arriving phase: an arriving tuple probes the other input's tuples in memory and is kept. When memory is full, the
partition with most tuples is flushed to disk, those of both inputs. From then on, arriving tuples of this partition go
to disk as well, without a probe. There is no reactive phase.

Cleanup phase: the blocks of each flushed partition are joined, except for pairs of tuples that were in memory together.
These are the pairs of two tuples that were in memory before the flush, since both inputs leave memory in one flush. So
a flag tells them, as in Tukwila, and tuples on disk need no stamps.

This is the fastest of the joins that spill, when most of the tuples do not fit into memory: a tuple of a partition on
disk costs one copy and a part of a large sequential write, and the cleanup phase uses all processors. In return such
tuples have no results before the cleanup phase. XJoin and DINER have more results early.

Chosen beyond the original: a flush takes partitions until a quarter of the tuples in memory has left, so that the
indexes are rebuilt a few times only.

Memory: the tuples in memory with their hash chains, and an eighth for tuples on their way to disk.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.operator import HOWS, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.spool import Spool, spool_partitions
from headrace.joins.streams.hashing.partitions import PartitionedHash
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.layout import MET

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples._index_kernels import Meetings
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["DoublePipelinedHash"]

_FLUSHED_SHARE = 4  # of the tuples in memory, at least, leave in a flush


class DoublePipelinedHash(StreamsJoin["DoublePipelinedHashAlgorithm"]):
    """Double-pipelined hash join of two streams.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, at least one of them an equality; see `headrace.joins.streams.Conditions`.
    how
        ``"inner"``, ``"left"``, ``"right"`` or ``"full"``. Tuples without a match come when nothing can match them any
        more, most of them from `finish`.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder in which a temporary folder for spill files is created when memory is full.
    partitions
        Number of partitions, a power of 2 from 2 to 64; by default the most for which the memory has good buffers.
    clock
        Returns the time in seconds; by default the system's.
    backend
        Creates the storage backend of a spill file; by default a file on disk.

    Raises
    ------
    JoinInputError
        If a parameter cannot be used.
    StreamSchemaError
        If an input lacks a column, or has it twice.
    KeyInputError
        If two columns of a condition have types that never match.
    MemoryBudgetError
        If the memory is less than the operator needs; the message says how much that is.
    """

    def __init__(
        self,
        inputs: Mapping[str, pa.Schema],
        on: Conditions,
        how: str = "inner",
        memory: int | str = "64MiB",
        *,
        spill: str | os.PathLike[str] | None = None,
        partitions: int | None = None,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, hows=HOWS, spill=spill, clock=clock, backend=backend
        )
        if partitions is None:
            partitions = spool_partitions(parameters.memory)
        super().__init__(DoublePipelinedHashAlgorithm(parameters, partitions))


class DoublePipelinedHashAlgorithm(PartitionedHash):
    """Algorithm of `DoublePipelinedHash`."""

    def __init__(self, parameters: StreamsParameters, partitions: int) -> None:
        super().__init__(parameters, "a double-pipelined hash join", partitions)
        self._on_disk = np.zeros(partitions, dtype=np.bool_)
        self._slices = 2  # one arrives while another is added to the spool
        self._divided = np.empty((2, 0), dtype=np.int64)
        self._in_spool = self._scratch, self._divided
        self._spool = Spool(self.budget, self.layouts, partitions, self.spill_file)
        self.stores = self.pairing.stores(self.layouts, self.budget)
        self.require(self.least_nbytes, "tuples")

    @property
    def rows_in_memory(self) -> int:
        """Number of tuples in memory."""
        return super().rows_in_memory + self._spool.count

    def close(self) -> None:
        """Stop the thread that writes, and remove the spill files."""
        self._spool.close()
        super().close()

    # Arriving phase

    def _admit(self, side: int, rows: Rows) -> Rows:
        """Send the tuples of partitions on disk there."""
        large = self._spool.too_large(side, rows)
        if large is not None:
            self._make_way(side, rows, large)
        if not self._on_disk.any():
            return rows
        index, numbers = self._divide(side, rows)
        leaving, staying = index[: len(numbers)], index[len(numbers) :]
        if large is not None:
            alone = large[leaving]
            for at, number in zip(leaving[alone].tolist(), numbers[alone].tolist(), strict=True):
                self._spool.write_alone(side, rows, at, number)
            leaving, numbers = leaving[~alone], numbers[~alone]
        rest = rows.take(staying[::-1].copy()) if len(staying) < len(rows) else rows
        if len(leaving):
            self._send(side, rows, leaving, numbers)
        return rest

    def _send(self, side: int, rows: Rows, index: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Add tuples to the spool, which has the arrays that they lie in until the next ones are sent.

        A single tuple may take all of the room for slices, so it does not stay there.
        """
        if len(rows) == 1:
            self._spool.settle()
            self._spool.add(side, rows, index, numbers)
        else:
            self._spool.start(side, rows, index, numbers)
            (self._scratch, self._divided), self._in_spool = self._in_spool, (self._scratch, self._divided)

    def _scratch_for(self, side: int, rows: int) -> NDArray[np.uint8]:
        if rows == 1:
            self._spool.settle()
        return super()._scratch_for(side, rows)

    def _divide(self, side: int, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of tuples for partitions on disk, then those of the others in reverse; the partitions.

        The arrays are valid until the next call. They are a part of the workspace, and the same again and again, since
        new pages take much time.
        """
        if self._divided.shape[1] < len(rows):
            self._divided = np.empty((2, len(rows)), dtype=np.int64)
        index, numbers = self._divided
        keyed = rows.keyed(self.pairing.driver.key_of(side))
        found = kernels.divide(keyed, len(rows), self._bits, self._on_disk, index, numbers, self.spilled[side])
        self.counters.rows_spilled += found
        return index[: len(rows)], numbers[:found]

    def _make_way(self, side: int, rows: Rows, large: NDArray[np.bool_]) -> None:
        """Flush the partitions of tuples that are too large for a buffer, and make room to write the largest."""
        index = np.flatnonzero(large)
        wanted = np.zeros(self.partitions, dtype=np.bool_)
        wanted[self.partition_of(side, rows, 0, len(rows))[index]] = True
        self._flush(wanted & ~self._on_disk)
        needed = self._spool.nbytes_alone(int(rows.sizes(index).max()))
        while self.budget.available < needed and self.counts.any():
            self._make_room()

    def _make_room(self) -> None:
        """Flush the largest partitions, until a quarter of the tuples in memory has left."""
        both = self.counts.sum(axis=0)
        order = np.argsort(-both, kind="stable")
        enough = int(np.searchsorted(np.cumsum(both[order]), both.sum() / _FLUSHED_SHARE)) + 1
        wanted = np.zeros(self.partitions, dtype=np.bool_)
        wanted[order[:enough]] = True
        self._flush(wanted & (both > 0))

    def _flush(self, wanted: NDArray[np.bool_]) -> None:
        """Write the tuples in memory of some partitions, and from now on those that arrive for them."""
        self._spool.settle()
        self._on_disk |= wanted
        for side, store in enumerate(self.stores):
            if self.counts[side, wanted].any():
                store.sweep(partial(self._spool_slots, side, wanted), self.slots_limit)
        self.counts[:, wanted] = 0

    def _spool_slots(self, side: int, wanted: NDArray[np.bool_], start: int, stop: int) -> NDArray[np.bool_]:
        """Write the tuples in some slots that are in wanted partitions; return which stay in memory."""
        rows = self.stores[side].rows
        partition = self.partition_of(side, rows, start, stop)
        leaving = wanted[partition]
        index = np.flatnonzero(leaving)
        self._spool.add(side, rows, start + index, partition[index], MET)
        self._count(side, partition[index])
        return ~leaving

    def _count(self, side: int, partition: NDArray[np.int64]) -> None:
        self.spilled[side] += np.bincount(partition, minlength=self.partitions)
        self.counters.rows_spilled += len(partition)

    # Cleanup phase

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        self._spool.finish()
        self._divided = self._divided[:, :0].copy()
        self._in_spool = self._scratch, self._divided
        yield from super()._cleanup()

    def _flush_spilled(self, side: int, partitions: NDArray[np.int64]) -> None:
        """Do nothing: no tuples of partitions on disk are in memory."""

    def _spilled(self, side: int) -> NDArray[np.bool_]:
        """Return which partitions are on disk, whether or not tuples of this input are there already."""
        del side
        return self._on_disk

    @property
    def spilled_layouts(self) -> Sequence[RowLayout]:
        """Layouts of the inputs' tuples in spill files."""
        return self._spool.layouts

    def meetings(self, inner: int) -> Meetings:
        """Return what tells which spilled tuples were in memory together."""
        layouts = self._spool.layouts
        return kernels.Meetings(kernels.MET_BY_FLAG, layouts[inner].flags, layouts[1 - inner].flags, MET)
