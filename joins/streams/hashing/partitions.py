"""`PartitionedHash`: what hash joins of two streams share that spill by partition of the key.

`FlushingHash` is what those of them share that write tuples with their stamps.

Each input has a `TupleStore` with hash chains, and blocks on disk; both are divided into partitions by another hash of
the key. Matching tuples are in partitions of the same number. Subclasses say what is written to disk and when.

The cleanup phase writes what is in memory to blocks, where there are blocks to join with, and then joins the blocks of
each partition, the smaller input outer, see `headrace.joins.streams.base.block_join`. If there are processors and
memory for it, it joins several partitions at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import JoinInputError
from headrace.joins.streams.base.block_join import BlockJoin, BlockSource, Given, join_memory
from headrace.joins.streams.base.blocks import SpilledBlock, SpillReserve, cuts, held, write_block
from headrace.joins.streams.base.lanes import AHEAD, in_lanes, most_lanes
from headrace.joins.streams.base.operator import StreamsAlgorithm, partition_bits
from headrace.joins.streams.base.pairs import Pairing
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.layout import MATCHED
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.operator import StreamsParameters
    from headrace.joins.streams.tuples._index_kernels import Meetings
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["FlushingHash", "PartitionedHash"]

_TWO = 2
_LEAST_JOIN = 4 << 10
_LEAST_LANE = 1 << 20  # of memory, for a thread to be worthwhile
_LEAST_ROWS = 1 << 16
_LEAST_BLOCK, _MOST_BLOCK = 4 << 10, 1 << 20
_BLOCKS_IN_MEMORY = 64


class PartitionedHash(StreamsAlgorithm):
    """Algorithm of a hash join of two streams that spills by partition.

    Parameters
    ----------
    parameters
        Parameters of the join.
    name
        Name of the operator, for messages.
    partitions
        Number of partitions, a power of 2 up to 64.

    Attributes
    ----------
    counts : int64[2, partitions]
        Tuples in memory of each input and partition.
    spilled : int64[2, partitions]
        Tuples on disk of each input and partition.
    """

    def __init__(self, parameters: StreamsParameters, name: str, partitions: int) -> None:
        super().__init__(parameters)
        self.pairing = Pairing(self.graph.edges)
        if len(self.sides) != _TWO:
            raise JoinInputError(f"{name} joins two inputs, not {len(self.sides)}; use MJoin or MINER")
        if self.pairing.ordered:
            raise JoinInputError(f"{name} is a hash join and needs columns that are equal; use DINER for bands alone")
        self._bits = partition_bits(partitions)
        self.partitions = partitions
        self.spilled = np.zeros((_TWO, partitions), dtype=np.int64)
        self.counts = np.zeros((_TWO, partitions), dtype=np.int64)

    @property
    def least_nbytes(self) -> int:
        """Bytes that tuples in memory, or a join of spilled ones, need at least."""
        return sum(store.least_nbytes for store in self.stores) + _LEAST_JOIN

    # Steps that differ

    @abstractmethod
    def _make_room(self) -> None:
        """Flush some tuples; at least one is in memory."""

    @abstractmethod
    def _flush_spilled(self, side: int, partitions: NDArray[np.int64]) -> None:
        """Write the tuples in memory of these partitions, which are on disk in part."""

    def spilled_blocks(self, side: int, partition: int) -> Iterable[SpilledBlock]:
        """Return the blocks of a partition in its file, which exists."""
        return (SpilledBlock(ref, ref.tag, -1) for ref in self.spill_file(side, partition).scan())

    @abstractmethod
    def meetings(self, inner: int) -> Meetings:
        """Return what tells which spilled tuples met before, those of this input being the left ones."""

    @property
    def spilled_layouts(self) -> Sequence[RowLayout]:
        """Layouts of the inputs' tuples in spill files."""
        return self.layouts

    def source(self, side: int, partition: int) -> BlockSource:
        """Return the source of a partition's tuples on disk."""
        layout, count = self.spilled_layouts[side], int(self.spilled[side, partition])
        if count == 0:
            return BlockSource(side, layout, None, tuple, 0, 0)
        file = self.spill_file(side, partition)
        return BlockSource(
            side, layout, file, partial(self.spilled_blocks, side, partition), count, file.content_nbytes
        )

    def _admit(self, side: int, rows: Rows) -> Rows:
        """Return those of some arriving tuples that are joined in memory now; keep the others elsewhere."""
        del side
        return rows

    def _given(self) -> Given | None:
        """Return what says which pairs were results while tuples were not in memory together."""
        return None

    # Phases

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        rows, start, store = self._admit(side, rows), 0, self.stores[side]
        while start < len(rows):
            fits = store.fitting(rows, start)
            if fits == 0:
                if not self.counts.any():
                    raise self.no_room(side)
                self._make_room()
                rows, start = self._admit(side, rows.take(np.arange(start, len(rows)))), 0
                self.stamp_arrivals(rows)
                continue
            yield from self.join_in_memory(self.pairing, side, rows, np.arange(start, start + fits, dtype=np.int64))
            yield from self._keep(side, rows, start, start + fits)
            start += fits

    def _keep(self, side: int, rows: Rows, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Keep tuples in memory, unless all of the other input has arrived and none of it was spilled."""
        partition = self.partition_of(side, rows, start, stop)
        self._came(side, partition)
        if self.ended[1 - side]:
            waiting = self._spilled(1 - side)[partition]
            if not waiting.all():
                index = np.flatnonzero(~waiting) + start
                yield from self._done(side, rows, index)
                rows = rows.take(np.flatnonzero(waiting) + start)
                start, stop, partition = 0, len(rows), partition[waiting]
        self.stores[side].insert(rows, start, stop)
        self.counts[side] += np.bincount(partition, minlength=self.partitions)
        self._kept(side, partition)

    def _came(self, side: int, partition: NDArray[np.int64]) -> None:
        """Take note that tuples of these partitions have arrived, which may be kept."""

    def _kept(self, side: int, partition: NDArray[np.int64]) -> None:
        """Take note that tuples of these partitions are in memory now."""

    def _ended(self, side: int) -> Iterator[pa.RecordBatch]:
        """Drop the other input's tuples that nothing can match any more."""
        yield from self._release(1 - side, ~self._spilled(side))

    def _release(self, side: int, complete: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        """Drop the tuples in memory of partitions whose join is complete."""
        for slots in self._slots_in(side, complete):
            yield from self._done(side, self.stores[side].rows, slots)
            self.stores[side].drop(slots)
        self.counts[side, complete] = 0

    def _slots_in(self, side: int, wanted: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
        """Yield the slots of the tuples in some partitions, some at a time. They must be dropped before the next."""
        left = int(self.counts[side, wanted].sum())
        out = np.empty(min(left, self.slots_limit), dtype=np.int64)
        while left:
            store = self.stores[side]
            keyed = store.rows.keyed(self.pairing.driver.key_of(side))
            found = kernels.select_partitions(keyed, len(store), self._bits, wanted, out)
            yield out[:found].copy()
            left -= found

    def _done(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Yield those of some tuples whose join is complete that had no match, if they are results."""
        if self.preserved(side):
            alone = index[(rows.flags[index] & MATCHED) == 0]
            for start in range(0, len(alone), self.pair_limit):
                yield from self.unmatched(side, rows, alone[start : start + self.pair_limit])

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        spilled = self._spilled(0) | self._spilled(1)
        partitions = np.flatnonzero(spilled)
        for side in self.sides:
            yield from self._release(side, ~spilled)
            self._flush_spilled(side, partitions)
            self.stores[side].free()
        lanes = self._lanes(len(partitions))
        share = (self.budget.available - self._results_nbytes(lanes)) // lanes
        given = self._given()
        memories = [join_memory(share) for _ in range(lanes)]
        tasks = [partial(self._in_turn, int(partition), memories, given) for partition in partitions]
        with held(self.budget, lanes * share + self._results_nbytes(lanes)):
            yield from in_lanes(tasks, lanes, lambda number: self._completed(int(partitions[number])))

    def _completed(self, partition: int) -> None:
        """Drop the files of a partition whose results have been given."""
        for side in self.sides:
            self.drop_spill_file(side, partition)

    def _lanes(self, partitions: int) -> int:
        """Return how many partitions to join at a time."""
        lanes = min(most_lanes(), max(partitions, 1), max(1, int(self.spilled.sum()) // _LEAST_ROWS))
        while lanes > 1 and (self.budget.available - self._results_nbytes(lanes)) // lanes < _LEAST_LANE:
            lanes -= 1
        return lanes

    def _results_nbytes(self, lanes: int) -> int:
        """Return the memory for result batches of these lanes beyond the workspace, which has room for two."""
        return 0 if lanes == 1 else (AHEAD * lanes + 1 - _TWO) * self.results.nbytes

    def _in_turn(
        self, partition: int, memories: list[NDArray[np.uint8]], given: Given | None
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the results of a partition, in one of the memories that no other lane uses."""
        memory = memories.pop()
        try:
            yield from self._join_partition(partition, memory, given)
        finally:
            memories.append(memory)

    def _join_partition(
        self, partition: int, memory: NDArray[np.uint8], given: Given | None
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the results of a partition, in this memory."""
        yield from self.join_sources(*self.sources(partition), memory, given)

    def sources(self, partition: int) -> tuple[BlockSource, BlockSource]:
        """Return the sources of a partition's tuples on disk: the outer one, the smaller, and the inner one."""
        counts = self.spilled[:, partition]
        outer = int(counts[1] < counts[0])
        if self.how in {"left", "right"}:
            outer = int(self.how == "right")
        return self.source(outer, partition), self.source(1 - outer, partition)

    def join_sources(
        self, outer: BlockSource, inner: BlockSource, memory: NDArray[np.uint8], given: Given | None
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the results of blocks of both inputs, in this memory."""
        return BlockJoin(self, self.pairing, outer, inner, self.meetings(inner.side), memory, given).results()

    # Partitions

    def partition_of(self, side: int, rows: Rows, start: int, stop: int) -> NDArray[np.int64]:
        """Return the partitions of tuples of an input."""
        out = np.empty(stop - start, dtype=np.int64)
        kernels.partitions_of(rows.keyed(self.pairing.driver.key_of(side)), start, stop - start, self._bits, out)
        return out

    def _spilled(self, side: int) -> NDArray[np.bool_]:
        """Return which partitions of an input have blocks."""
        found: NDArray[np.bool_] = self.spilled[side] > 0
        return found


class FlushingHash(PartitionedHash):
    """Algorithm of a hash join of two streams whose blocks on disk are tuples with their stamps.

    Attributes
    ----------
    block_nbytes
        Most bytes of tuples in a block, unless it is a single tuple.
    reserve
        Memory to read or write blocks, charged once.
    """

    def __init__(self, parameters: StreamsParameters, name: str, partitions: int) -> None:
        super().__init__(parameters, name, partitions)
        self.block_nbytes = max(_LEAST_BLOCK, min(parameters.memory // _BLOCKS_IN_MEMORY, _MOST_BLOCK))
        self.reserve = SpillReserve(self.budget, _TWO * block_nbytes(self.block_nbytes))

    def partition_of_slots(self, side: int) -> NDArray[np.int64]:
        """Return the partition of each tuple of an input in memory."""
        store = self.stores[side]
        return self.partition_of(side, store.rows, 0, len(store))

    def flush(self, side: int, partition: int) -> None:
        """Write the tuples of a partition in memory to blocks, and free their memory."""
        if self.counts[side, partition] == 0:
            return
        store, written = self.stores[side], []
        for slots in self._slots_in(side, np.arange(self.partitions) == partition):
            written += self.write(side, partition, store.rows, slots)
            store.drop(slots)
        self.counts[side, partition] = 0
        self._wrote(side, partition, written)

    def _wrote(self, side: int, partition: int, blocks: list[SpilledBlock]) -> None:
        """Take note of blocks that `flush` has written."""

    def write(self, side: int, partition: int, rows: Rows, index: NDArray[np.int64]) -> list[SpilledBlock]:
        """Write tuples to blocks of about `block_nbytes`, each with a departure stamp of its own.

        Parameters
        ----------
        side, partition
            Input and partition of the tuples.
        rows, index
            Tuples to write are those at `index`.
        """
        file, written = self.spill_file(side, partition), []
        for positions, nbytes in cuts(rows, index, self.block_nbytes):
            with held(self.reserve, nbytes):
                part = rows.take(positions)
                stamp = self.next_stamp()
                part.departures[:] = stamp
                written.append(write_block(file, part, self.reserve))
        self.counters.rows_spilled += len(index)
        self.spilled[side, partition] += len(index)
        return written

    def _flush_spilled(self, side: int, partitions: NDArray[np.int64]) -> None:
        for partition in partitions:
            self.flush(side, int(partition))
