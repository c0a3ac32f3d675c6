"""`DoublePipelinedHash`: the double-pipelined hash join of Tukwila (Ives et al.), with incremental symmetric flush.

Arriving phase: an arriving tuple probes the other input's tuples in memory and is kept. When memory is full, the
partition with most tuples is flushed to disk, those of both inputs. From then on, arriving tuples of this partition go
to disk as well, without a probe. There is no reactive phase.

Cleanup phase: the blocks of each flushed partition are joined, except for pairs of tuples that were in memory together.
Tukwila marks the tuples that arrive after the flush; here their stay in memory is empty, so the interval technique does
the same.

Memory: the tuples in memory with their hash chains, tuples on their way to disk (up to an eighth), two blocks, and a
list of the first blocks on disk (up to a 16th).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.operator import StreamsJoin, StreamsParameters
from headrace.joins.streams.hashing.partitions import PartitionedHash
from headrace.joins.streams.tuples.store import TupleStore

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["DoublePipelinedHash"]

_SHARE = 16  # of the memory, for the tuples of each input on their way to disk


class DoublePipelinedHash(StreamsJoin["DoublePipelinedHashAlgorithm"]):
    """Double-pipelined hash join of two streams.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, at least one of them an equality; see `headrace.joins.streams.Conditions`.
    how
        ``"inner"``, ``"left"`` or ``"right"``.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder in which a temporary folder for spill files is created when memory is full.
    partitions
        Number of partitions, a power of 2.
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
        partitions: int = 16,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, hows=("inner", "left", "right"), spill=spill, clock=clock, backend=backend
        )
        super().__init__(DoublePipelinedHashAlgorithm(parameters, partitions))


class DoublePipelinedHashAlgorithm(PartitionedHash):
    """Algorithm of `DoublePipelinedHash`."""

    def __init__(self, parameters: StreamsParameters, partitions: int) -> None:
        super().__init__(parameters, "a double-pipelined hash join", partitions)
        self._on_disk = np.zeros(partitions, dtype=np.bool_)
        self._leaving = [
            TupleStore(layout, self.budget, [None] * len(self.graph.keys[side]))
            for side, layout in enumerate(self.layouts)
        ]
        self._most_leaving = parameters.memory // _SHARE
        self.require(self.least_nbytes + sum(store.least_nbytes for store in self._leaving), "tuples")

    @property
    def rows_in_memory(self) -> int:
        """Number of tuples in memory."""
        return super().rows_in_memory + sum(map(len, self._leaving))

    def _make_room(self) -> None:
        both = self.counts.sum(axis=0)
        if not both.any():
            for side in self.sides:
                self._write_leaving(side)
            return
        partition = int(np.argmax(both))
        self._on_disk[partition] = True
        for side in self.sides:
            self.flush(side, partition)

    def _admit(self, side: int, rows: Rows) -> Rows:
        """Send the tuples of partitions on disk there."""
        if not self._on_disk.any():
            return rows
        absent = self._on_disk[self.partition_of(side, rows, 0, len(rows))]
        if not absent.any():
            return rows
        leaving, start, store = rows.take(np.flatnonzero(absent)), 0, self._leaving[side]
        while start < len(leaving):
            fits = store.fitting(leaving, start, self._most_leaving - store.nbytes)
            if fits == 0 and len(store):
                self._write_leaving(side)
                continue
            if fits == 0:
                self._write(side, leaving, np.arange(start, start + 1))
                fits = 1
            else:
                store.insert(leaving, start, start + fits)
            start += fits
        return rows.take(np.flatnonzero(~absent))

    def _write_leaving(self, side: int) -> None:
        store = self._leaving[side]
        if len(store):
            self._write(side, store.rows, np.arange(len(store)))
            store.free()

    def _write(self, side: int, rows: Rows, index: NDArray[np.int64]) -> None:
        """Write tuples to blocks that were never joined in memory."""
        partition = self.partition_of(side, rows, 0, len(rows))[index]
        for number in np.unique(partition):
            for block in self.write(side, int(number), rows, index[partition == number], present=False):
                self.blocks[side].append(block, int(number))

    def _spilled(self, side: int) -> NDArray[np.bool_]:
        """Return which partitions are on disk, whether or not tuples of this input are there already."""
        del side
        return self._on_disk

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        for side in self.sides:
            self._write_leaving(side)
        yield from super()._cleanup()
