"""`XJoin`: XJoin (Urhan and Franklin), a hash join of two streams that works on spilled tuples while both are blocked.

Arriving phase: an arriving tuple probes the other input's tuples in memory and is kept. When memory is full, the
partition with most tuples, of either input, is flushed to disk.

Reactive phase: while both inputs are blocked, a block of one input on disk probes the tuples of the other in memory.
One block is the smallest unit of work: the one with most pairs of tuples that have not met, its tuples times the tuples
of the other input's partition that came into memory since it last probed. The original leaves this choice to an
optimizer.

Cleanup phase: the blocks of each partition are joined.

Duplicates: tuples whose stays in memory overlap have joined in the arriving phase. A tuple on disk and another one have
also joined if the block of the first probed memory while the second was there. So each block has a list of the stamps
at which it probed. The original compares timestamps of whole partitions; a list for each block allows smaller steps.

Memory: the tuples in memory with their hash chains, two blocks, a list of the first blocks on disk (up to a 16th), and
64 bytes for each probe of a block (up to a 32nd; after that there is no reactive work).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.blocks import BlockList, read_block
from headrace.joins.streams.base.operator import HOWS, WAIT_THRESHOLD, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.pairs import coexisted
from headrace.joins.streams.hashing.partitions import FlushingHash
from headrace.joins.streams.tuples import _index_kernels as kernels

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.block_join import Given
    from headrace.joins.streams.base.blocks import SpilledBlock
    from headrace.joins.streams.tuples._index_kernels import Meetings
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["PROBE_NBYTES", "XJoin", "XJoinAlgorithm"]

PROBE_NBYTES = 64
"""Bytes of a stamp in a list of probes."""
_TWO = 2
_LIST_SHARE = 32  # of the memory, for each list of blocks, and for notes about blocks


class XJoin(StreamsJoin["XJoinAlgorithm"]):
    """XJoin of two streams.

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
        Number of partitions, a power of 2.
    wait
        Seconds without an arrival after which the inputs are blocked.
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
        wait: float | str = WAIT_THRESHOLD,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, hows=HOWS, wait=wait, spill=spill, clock=clock, backend=backend
        )
        super().__init__(XJoinAlgorithm(parameters, partitions))


class XJoinAlgorithm(FlushingHash):
    """Algorithm of `XJoin`.

    Attributes
    ----------
    blocks
        The first blocks of each input. A file has all of its partition.
    """

    def __init__(self, parameters: StreamsParameters, partitions: int, name: str = "XJoin") -> None:
        super().__init__(parameters, name, partitions)
        self.blocks = [BlockList(self.budget, parameters.memory // _LIST_SHARE) for _ in self.sides]
        self.stores = self.pairing.stores(self.layouts, self.budget)
        self.require(self.least_nbytes, "tuples")
        self._arrived = np.zeros_like(self.counts)  # tuples that came into memory so far
        self._probes: dict[int, list[int]] = {}  # by departure stamp, which names a block
        self._noted = 0  # bytes of these

    @property
    def least_nbytes(self) -> int:
        """Bytes that tuples and lists of blocks need at least. A subclass that charges more calls `require` again."""
        lists = (_TWO + 1) * (self.budget.limit // _LIST_SHARE)  # the third is for notes about blocks
        return super().least_nbytes + lists

    def _make_room(self) -> None:
        side, partition = np.unravel_index(np.argmax(self.counts), self.counts.shape)
        self.flush(int(side), int(partition))

    def _kept(self, side: int, partition: NDArray[np.int64]) -> None:
        self._arrived[side] += np.bincount(partition, minlength=self.partitions)

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        best, chosen = 0, None
        for side, blocks in enumerate(self.blocks):
            if len(blocks) == 0:
                continue
            scores = self.unmet(side)
            at = int(np.argmax(scores))
            if scores[at] > best:
                best, chosen = int(scores[at]), (side, at)
        if chosen is None or not self.may_probe:
            return None
        return self._probe_with(*chosen)

    @property
    def may_probe(self) -> bool:
        """Whether there is memory to note another probe of a block."""
        return self._noted + PROBE_NBYTES <= self.budget.limit // _LIST_SHARE and self.budget.available >= PROBE_NBYTES

    def unmet(self, side: int) -> NDArray[np.int64]:
        """Return for each block of an input how many pairs of tuples with the other in memory have not met."""
        blocks, other = self.blocks[side], 1 - side
        new = np.minimum(self.counts[other][blocks.partitions], self._arrived[other][blocks.partitions] - blocks.marks)
        return new * blocks.counts

    def _probe_with(self, side: int, at: int) -> Iterator[pa.RecordBatch]:
        """Join a block with the tuples of the other input in memory."""
        blocks, store = self.blocks[side], self.stores[1 - side]
        file = self.spill_file(side, int(blocks.partitions[at]))
        block = blocks[at]
        probes = self._probes.setdefault(block.departure, [])
        last = probes[-1] if probes else -1
        self.budget.charge("statistics", PROBE_NBYTES)
        self._noted += PROBE_NBYTES
        probes.append(self.next_stamp())
        blocks.marks[at] = self._arrived[1 - side][blocks.partitions[at]]
        with read_block(file, self.layouts[side], block, self.reserve) as rows:
            index = np.arange(len(rows), dtype=np.int64)
            for positions, slots in self.pairing.find(store, side, rows, index, self.pair_limit):
                new = ~coexisted([(rows, positions), (store.rows, slots)]) & (store.rows.arrivals[slots] > last)
                sources = [(rows, positions[new]), (store.rows, slots[new])]
                yield from self.results.batches(sources if side == 0 else sources[::-1])

    # Blocks

    def _wrote(self, side: int, partition: int, blocks: list[SpilledBlock]) -> None:
        for block in blocks:
            self.blocks[side].append(block, partition)

    # Cleanup phase

    def spilled_blocks(self, side: int, partition: int) -> Iterable[SpilledBlock]:
        """Return the blocks of a partition in its file."""
        return self.blocks[side].of(partition, self.spill_file(side, partition))

    def meetings(self, inner: int) -> Meetings:
        """Return what tells which spilled tuples were in memory together."""
        return kernels.Meetings(kernels.MET_IN_TIME, self.layouts[inner].arrival, self.layouts[1 - inner].arrival)

    def _given(self) -> Given | None:
        if not self._probes:
            return None
        departures = np.array(sorted(self._probes), dtype=np.int64)
        lists = [self._probes[int(stamp)] for stamp in departures]
        starts = np.cumsum([0, *map(len, lists)])
        probes = np.concatenate([np.array(stamps, dtype=np.int64) for stamps in lists])

        def given(rows: Rows, positions: NDArray[np.int64], outer: Rows, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
            inner_stay = rows.arrivals[positions], rows.departures[positions]
            outer_stay = outer.arrivals[slots], outer.departures[slots]
            found: NDArray[np.bool_] = kernels.probed(departures, starts, probes, inner_stay[1], *outer_stay)
            found |= kernels.probed(departures, starts, probes, outer_stay[1], *inner_stay)
            return found

        return given
