"""`MJoin`, the multiway hash join of streams (Viglas, Naughton and Burger, VLDB 2003), to compare MINER with.

This follows the description in section 2 of Bornea and others (TKDE 22(8), 2010), not the original paper: XJoin for
many inputs that all share one key.

Arriving phase: each input has a hash table. An arriving tuple probes the other hash tables, the most selective join
first, and is then inserted into its own.

Flushing is coordinated: one partition of the key is chosen at random, and its tuples are flushed from all inputs.

Cleanup phase: the blocks of each partition are joined with each other.

Chosen beyond the description:

- The selectivity of an input is the number of its matches for each probing tuple, counted since the start. An input
  that was not probed yet has the selectivity 0, and of equal inputs the first one is probed first.
- The random partition is one that has tuples in memory, from a generator with a fixed seed, so runs can be repeated.
- All tuples that a flush takes depart at once. A combination was a result of the arriving phase if all its tuples were
  in memory together, which the interval technique tells. XJoin's comparison of timestamps says the same in this case.
- There is no phase like the second stage of XJoin: blocks on disk wait for the cleanup phase.
- Blocks of a partition are joined by `headrace.joins.streams.base.nested_blocks`, as in MINER.

Memory: the workspace of all joins of streams, pieces of partial results, buffers for a flush, the tuples in memory with
their hash chains, and in the cleanup phase 24 bytes for each block of the partition.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import JoinInputError
from headrace.joins.streams.base.blocks import SpilledBlock, SpillReserve, cuts, held, write_block
from headrace.joins.streams.base.combining import Combiner
from headrace.joins.streams.base.nested_blocks import NestedBlocks
from headrace.joins.streams.base.operator import (
    WAIT_THRESHOLD,
    StreamsAlgorithm,
    StreamsJoin,
    StreamsParameters,
    partition_bits,
)
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.spill import BlockRef, block_nbytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.base.combining import Step
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend
    from headrace.storage.spill import SpillFile

__all__ = ["MJoin", "MJoinAlgorithm"]

_LEAST_BLOCK, _MOST_BLOCK = 4 << 10, 1 << 20
_BLOCKS_IN_MEMORY = 64


class MJoin(StreamsJoin["MJoinAlgorithm"]):
    """Multiway hash join of streams that share a key.

    Parameters
    ----------
    inputs
        Schema of each input, by name; two or more.
    on
        Conditions: equalities, all on the same columns of each input; see `headrace.joins.streams.Conditions`.
    how
        ``"inner"``.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder in which a temporary folder for spill files is created when memory is full.
    partitions
        Number of partitions, a power of 2 from 2 to 64.
    wait
        Seconds without an arrival after which the inputs are blocked.
    clock
        Returns the time in seconds; by default the system's.
    backend
        Creates the storage backend of a spill file; by default a file on disk.

    Raises
    ------
    JoinInputError
        If a parameter cannot be used, or the inputs do not share one key.
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
        wait: float | str = WAIT_THRESHOLD,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, wait=wait, spill=spill, clock=clock, backend=backend
        )
        super().__init__(MJoinAlgorithm(parameters, partitions))


class MJoinAlgorithm(StreamsAlgorithm):
    """Algorithm of `MJoin`.

    Parameters
    ----------
    parameters
        Parameters of all joins of streams.
    partitions
        See `MJoin`.

    Attributes
    ----------
    combiner
        Search for combinations.
    stores
        Tuples of each input in memory.
    counts : int64[inputs, partitions]
        Tuples in memory of each input and partition.
    spilled : int64[partitions]
        Tuples in blocks of each partition, of all inputs together.
    """

    def __init__(self, parameters: StreamsParameters, partitions: int) -> None:
        super().__init__(parameters)
        self._check(partitions)
        self._bits = partitions.bit_length() - 1
        self._block = max(_LEAST_BLOCK, min(parameters.memory // _BLOCKS_IN_MEMORY, _MOST_BLOCK))
        self.combiner = Combiner(self.graph, self.budget)
        self.stores = [TupleStore(layout, self.budget, [False]) for layout in self.layouts]
        self.counts = np.zeros((len(self.sides), partitions), dtype=np.int64)
        self.spilled = np.zeros(partitions, dtype=np.int64)
        self._reserve = SpillReserve(self.budget, self._block + block_nbytes(self._block))
        self._random = np.random.default_rng(0)
        self._probes = np.zeros((len(self.sides), 2), dtype=np.int64)  # tuples that probed an input, and their matches
        self.buffer_nbytes = 2 * block_nbytes(self._block)
        self._partition = 0  # that is joined in the cleanup phase
        self._nested = NestedBlocks(self, [_FileBlocks(self.budget, None)] * len(self.sides), self._file)
        self.require(self.buffer_nbytes + sum(map(self.group_nbytes, self.sides)), "a block of each input")

    def _check(self, partitions: object) -> None:
        if any(len(keys) != 1 for keys in self.graph.keys) or self.graph.banded:
            raise JoinInputError(
                "MJoin needs inputs that share one key: equalities between the same columns of each; use MINER for "
                "bands, chains and snowflakes"
            )
        partition_bits(partitions)

    # Arriving phase

    def probing_sequence(self, side: int) -> list[Step]:
        """Return the probing sequence of an input's tuples: the most selective joins first."""
        matches = self._probes[:, 1] / np.maximum(self._probes[:, 0], 1)
        return self.combiner.sequence(side, lambda _, there: float(matches[there]))

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        store, start = self.stores[side], 0
        while start < len(rows):
            fitting = store.fitting(rows, start)
            if fitting == 0:
                self._flush_for(side)
                self.stamp_arrivals(rows, start)
                continue
            yield from self._probe(side, rows, np.arange(start, start + fitting, dtype=np.int64))
            self._keep(side, rows, start, start + fitting)
            start += fitting

    def _probe(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        sequence = self.probing_sequence(side)
        order = [side, *(step.side for step in sequence)]
        found = np.zeros(len(self.sides), dtype=np.int64)
        found[side] = len(index)

        def note(step: Step, matches: int) -> None:
            found[step.side] += matches

        for pieces in self.combiner.combine({side: (rows, index)}, sequence, self.stores.__getitem__, note):
            yield from self.results.batches([pieces[at] for at in self.sides])
        for before, there in itertools.pairwise(order):
            self._probes[there] += found[before], found[there]

    # Flushing

    def _flush_for(self, side: int) -> None:
        if not self.rows_in_memory:
            raise self.no_room(side)
        self._flush()

    def _flush(self) -> None:
        """Flush a random partition from all inputs."""
        partition = int(self._random.choice(np.flatnonzero(self.counts.any(axis=0))))
        departure = self.next_stamp()
        for side in self.sides:
            self._flush_partition(side, partition, departure)

    def _flush_partition(self, side: int, partition: int, departure: int) -> None:
        """Write the tuples of a partition in memory to blocks, and free their memory."""
        store, left = self.stores[side], int(self.counts[side, partition])
        wanted = np.arange(len(self.spilled)) == partition
        out = np.empty(min(left, self.slots_limit), dtype=np.int64)
        while left:
            found = kernels.select_partitions(store.rows.keyed(0), len(store), self._bits, wanted, out)
            self._write(side, partition, out[:found], departure)
            store.drop(out[:found])
            left -= found
        self.counts[side, partition] = 0

    def _keep(self, side: int, rows: Rows, start: int, stop: int) -> None:
        numbers = np.empty(stop - start, dtype=np.int64)
        kernels.partitions_of(rows.keyed(0), start, stop - start, self._bits, numbers)
        self.stores[side].insert(rows, start, stop)
        self.counts[side] += np.bincount(numbers, minlength=len(self.spilled))

    def _write(self, side: int, partition: int, slots: NDArray[np.int64], departure: int) -> None:
        """Write tuples in memory to blocks."""
        rows = self.stores[side].rows
        for positions, nbytes in cuts(rows, slots, self._block):
            with held(self._reserve, nbytes):
                part = rows.take(positions)
                part.departures[:] = departure
                write_block(self.spill_file(side, partition), part, self._reserve)
        self.counters.rows_spilled += len(slots)
        self.spilled[partition] += len(slots)

    def make_room(self, nbytes: int) -> bool:
        """Return whether so many bytes are free. In the cleanup phase no tuples of the arriving phase are in memory."""
        return self.budget.available >= nbytes

    def group_nbytes(self, side: int) -> int:
        """Return the memory for the tuples of one block with their indexes."""
        return self._nested.group_nbytes(side, self._block)

    # Cleanup phase

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        spilled = np.flatnonzero(self.spilled)
        for side, store in enumerate(self.stores):
            departure = self.next_stamp()
            for partition in spilled:
                self._flush_partition(side, int(partition), departure)
            store.free()
        for partition in spilled:
            yield from self._join_partition(int(partition))

    def _join_partition(self, partition: int) -> Iterator[pa.RecordBatch]:
        self._partition = partition
        blocks = [_FileBlocks(self.budget, self._file(side)) for side in self.sides]
        self._nested.restart(blocks)
        try:
            free = self.budget.available - self.buffer_nbytes - sum(map(self.group_nbytes, self.sides))
            share = min(self._block / self.group_nbytes(side) for side in self.sides)
            while self._nested.unfinished:
                yield from self._nested.step(sum(map(len, blocks)), int(free // 2 * share), fill=True)
        finally:
            for listed in blocks:
                listed.free()

    def _file(self, side: int) -> SpillFile:
        return self.spill_file(side, self._partition)


class _FileBlocks:
    """Blocks of a spill file, found by their headers."""

    _FIELDS = 3

    def __init__(self, budget: MemoryBudget, file: SpillFile | None) -> None:
        self._budget = budget
        self._charged = 8 * self._FIELDS * (0 if file is None else len(file))
        budget.charge("spill", self._charged)
        self._table = np.zeros((self._charged // (8 * self._FIELDS), self._FIELDS), dtype=np.int64)
        for ref in () if file is None else file.scan():
            self._table[ref.number] = ref.page, ref.nbytes, ref.tag

    def __len__(self) -> int:
        return len(self._table)

    def block(self, at: int) -> SpilledBlock:
        """Return a block; its departure is not known."""
        page, nbytes, count = self._table[at].tolist()
        return SpilledBlock(BlockRef(at, page, nbytes, count), count, -1)

    def content_nbytes(self, at: int) -> int:
        """Return the bytes of a block's tuples."""
        return int(self._table[at, 1])

    def free(self) -> None:
        """Free the memory of the list."""
        self._budget.release("spill", self._charged)
        self._charged = 0
