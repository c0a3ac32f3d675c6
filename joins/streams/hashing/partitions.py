"""`PartitionedHash`: what hash joins of two streams share that spill by partition of the key.

Each input has a `TupleStore` with hash chains, and blocks on disk; both are divided into partitions by another hash of
the key. Matching tuples are in partitions of the same number. Subclasses say what is flushed and when.

The cleanup phase writes what is in memory to blocks, where there are blocks to join with, and then joins the blocks of
each partition, the smaller input outer; see `headrace.joins.streams.base.block_join`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import JoinInputError
from headrace.joins.streams.base.block_join import BlockSource, Given, join_blocks
from headrace.joins.streams.base.blocks import BlockList, SpilledBlock, SpillReserve, cuts, held, write_block
from headrace.joins.streams.base.operator import StreamsAlgorithm
from headrace.joins.streams.base.pairs import Pairing
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.layout import MATCHED
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.operator import StreamsParameters
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["LIST_SHARE", "PartitionedHash"]

_TWO = 2
_MOST_BITS = 6  # each partition of each input has a file
LIST_SHARE = 32
"""Part of the memory that each list of blocks may take, and that notes about blocks may take."""
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
    blocks
        The first blocks of each input. A file has all of its partition.
    spilled : int64[2, partitions]
        Tuples in blocks of each input and partition.
    """

    def __init__(self, parameters: StreamsParameters, name: str, partitions: int) -> None:
        super().__init__(parameters)
        self.pairing = Pairing(self.graph.edges)
        if len(self.sides) != _TWO:
            raise JoinInputError(f"{name} joins two inputs, not {len(self.sides)}; use MJoin or MINER")
        if self.pairing.ordered:
            raise JoinInputError(f"{name} is a hash join and needs columns that are equal; use DINER for bands alone")
        self._bits = int(partitions).bit_length() - 1
        if not isinstance(partitions, int) or partitions != 1 << self._bits or not 1 <= self._bits <= _MOST_BITS:
            raise JoinInputError(f"`partitions` must be a power of 2 from 2 to 64, not {partitions!r}")
        self.partitions = partitions
        self.block_nbytes = max(_LEAST_BLOCK, min(parameters.memory // _BLOCKS_IN_MEMORY, _MOST_BLOCK))
        self.reserve = SpillReserve(self.budget, 2 * block_nbytes(self.block_nbytes))
        self.blocks = [BlockList(self.budget, parameters.memory // LIST_SHARE) for _ in self.sides]
        self.spilled = np.zeros((_TWO, partitions), dtype=np.int64)
        self.counts = np.zeros((_TWO, partitions), dtype=np.int64)
        self.stores = self.pairing.stores(self.layouts, self.budget)
        self.require(self.least_nbytes, "tuples")

    @property
    def least_nbytes(self) -> int:
        """Bytes that tuples and lists of blocks need at least. A subclass that charges more calls `require` again."""
        lists = (_TWO + 1) * (self.budget.limit // LIST_SHARE)  # the third is for notes about blocks
        return sum(store.least_nbytes for store in self.stores) + _LEAST_BLOCK + lists

    # Steps that differ

    @abstractmethod
    def _make_room(self) -> None:
        """Flush some tuples; at least one is in memory."""

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
                if self.rows_in_memory == 0:
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
        for side in self.sides:
            yield from self._release(side, ~spilled)
            for partition in np.flatnonzero(spilled):
                self.flush(side, int(partition))
            self.stores[side].free()
        given = self._given()
        for partition in np.flatnonzero(spilled):
            yield from self._join_partition(int(partition), given)

    def _join_partition(self, partition: int, given: Given | None) -> Iterator[pa.RecordBatch]:
        sources = [self._source(side, partition) for side in self.sides]
        counts = self.spilled[:, partition]
        outer = 0 if self.preserved(0) else 1 if self.preserved(1) else int(counts[1] < counts[0])
        yield from join_blocks(self, self.pairing, sources[outer], sources[1 - outer], self.reserve, given)

    def _source(self, side: int, partition: int) -> BlockSource:
        if self.spilled[side, partition] == 0:
            return BlockSource(side, None, tuple)
        file = self.spill_file(side, partition)
        return BlockSource(side, file, lambda: self.blocks[side].of(partition, file))

    # Partitions

    def partition_of(self, side: int, rows: Rows, start: int, stop: int) -> NDArray[np.int64]:
        """Return the partitions of tuples of an input."""
        out = np.empty(stop - start, dtype=np.int64)
        kernels.partitions_of(rows.keyed(self.pairing.driver.key_of(side)), start, stop - start, self._bits, out)
        return out

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
        for block in written:
            self.blocks[side].append(block, partition)

    def write(
        self, side: int, partition: int, rows: Rows, index: NDArray[np.int64], *, present: bool = True
    ) -> list[SpilledBlock]:
        """Write tuples to blocks of about `block_nbytes`, each with a departure stamp of its own.

        Parameters
        ----------
        side, partition
            Input and partition of the tuples.
        rows, index
            Tuples to write are those at `index`.
        present
            Whether they were in memory. If not, they depart when they arrive.
        """
        file, written = self.spill_file(side, partition), []
        for positions, nbytes in cuts(rows, index, self.block_nbytes):
            with held(self.reserve, nbytes):
                part = rows.take(positions)
                stamp = self.next_stamp()
                part.departures[:] = stamp
                if not present:
                    part.arrivals[:] = stamp
                written.append(write_block(file, part, self.reserve))
        self.counters.rows_spilled += len(index)
        self.spilled[side, partition] += len(index)
        return written

    def _spilled(self, side: int) -> NDArray[np.bool_]:
        """Return which partitions of an input have blocks."""
        found: NDArray[np.bool_] = self.spilled[side] > 0
        return found
