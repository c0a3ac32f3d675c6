"""`RPJ`: the rate-based progressive join (Tao and others, SIGMOD 2005), a hash join that flushes by rates of arrival.

Source: section 2 of "Adaptive Join Operators for Result Rate Optimization on Streaming Inputs" (DINER and MINER).

Arriving phase: an arriving tuple probes the other input's tuples in memory and is kept. When memory is full, the policy
takes the least probability that the next tuple belongs to an input and a bucket, and flushes tuples of the same bucket
of the opposite input, which have the fewest partners to expect; then those of the next least probability, until a
number of bytes is flushed. Tuples of a bucket that are flushed together are sorted by key.

Reactive phase: the task with the highest expected rate of results is next. Either a block on disk probes the tuples of
the other input in memory, as in XJoin, or the blocks of a bucket on disk are joined with each other: up to F new ones
of each input, and all those that were joined before. So the unit of work of such a task grows with the bucket.

Cleanup phase: what is in memory is flushed, and each bucket's blocks are joined. Duplicates are avoided as in XJoin,
and by the number of blocks of each bucket that have been joined on disk.

Chosen beyond the source:

- the probability of an input and a bucket is its share of recent arrivals: counts that are halved whenever they exceed
  twice the tuples in memory
- a flush frees 10 KiB, or a 1,024th of larger memories; the oldest tuples of a bucket go first
- the expected results of a task are its pairs of tuples that have not been compared, times the share of pairs of the
  bucket that were results in memory; its cost is the number of blocks that it reads
- joined blocks on disk are not merged into longer ones, since chunks of them are joined by an index in memory. This
  saves RPJ the writing, but not the reading
- the tuples in memory make way for the chunks of a task on disk: up to F blocks, and up to a quarter of the memory

Memory: as XJoin, and 80 bytes for each bucket.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.handle import check_number
from headrace.joins.streams.base.block_join import join_memory
from headrace.joins.streams.base.blocks import SpilledBlock, held
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsJoin, StreamsParameters
from headrace.joins.streams.hashing.xjoin import XJoinAlgorithm

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.block_join import BlockSource, Given
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["RPJ"]

_TWO = 2
_FLUSH = 10 << 10
_FLUSHES_IN_MEMORY = 1024
_SHARE = 4
_BUCKET_NBYTES = 80


class RPJ(StreamsJoin["RPJAlgorithm"]):
    """Rate-based progressive join of two streams.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, at least one of them an equality; see `headrace.joins.streams.Conditions`.
    how
        ``"inner"``.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder for spill files. Without it, tuples that exceed the memory are an error.
    partitions
        Number of buckets (the papers' n_part), a power of 2 from 2 to 64.
    fan_in
        Most new blocks of each input in a task on disk (the papers' F).
    wait
        Seconds without an arrival after which inputs are blocked, or text such as ``"25ms"``.
    clock
        Returns the time in seconds; by default the system's.
    backend
        Creates the storage backend of a spill file; by default a file on disk.

    Raises
    ------
    JoinInputError
        If a parameter cannot be used, or if all conditions are bands.
    StreamSchemaError
        If an input lacks a column, or has it twice.
    KeyInputError
        If two columns of a condition have types that never match.
    MemoryBudgetError
        If the memory is less than the operator needs; the message says how much that is.

    Examples
    --------
    >>> import pyarrow as pa
    >>> orders, payments = pa.record_batch({"id": [1, 2]}), pa.record_batch({"order": [2], "paid": [9.5]})
    >>> join = RPJ({"o": orders.schema, "p": payments.schema}, on=[("o.id", "p.order")], memory="1MiB")
    >>> join.push(orders, side="o").drain()
    0
    >>> join.push(payments, side="p").to_table().to_pylist()
    [{'id': 2, 'order': 2, 'paid': 9.5}]
    >>> join.finish().drain()
    0
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
        fan_in: int = 10,
        wait: float | str = WAIT_THRESHOLD,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, wait=wait, spill=spill, clock=clock, backend=backend
        )
        super().__init__(RPJAlgorithm(parameters, partitions, check_number("fan_in", fan_in, 1)))


class RPJAlgorithm(XJoinAlgorithm):
    """Algorithm of `RPJ`.

    Attributes
    ----------
    recent : float64[2, partitions]
        Recent arrivals of each input and bucket; their shares are the probabilities of the next arrival.
    """

    def __init__(self, parameters: StreamsParameters, partitions: int, fan_in: int) -> None:
        super().__init__(parameters, partitions, "RPJ")
        self.budget.charge("statistics", _BUCKET_NBYTES * partitions)
        self.require(self.least_nbytes, "tuples")
        self.recent = np.zeros((_TWO, partitions), dtype=np.float64)
        self._fan_in = fan_in
        self._flush_nbytes = max(_FLUSH, parameters.memory // _FLUSHES_IN_MEMORY)
        self._written = np.zeros((_TWO, partitions), dtype=np.int64)  # blocks
        self._joined = np.zeros((_TWO, partitions), dtype=np.int64)  # of these, joined with each other
        self._pages = np.zeros((_TWO, partitions), dtype=np.int64)  # where the first that was not joined begins
        self._pairs = np.zeros(partitions, dtype=np.int64)  # compared in memory
        self._hits = np.zeros(partitions, dtype=np.int64)  # of these, results

    # Arriving phase

    def _join_memory(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        other = self.stores[1 - side]
        buckets = self.partition_of(side, rows, int(index[0]), int(index[-1]) + 1)
        self._pairs += np.bincount(buckets, minlength=self.partitions) * self.counts[1 - side]
        for positions, slots in self.pairing.find(other, side, rows, index, self.pair_limit):
            self._hits += np.bincount(buckets[positions - index[0]], minlength=self.partitions)
            sources = [(rows, positions), (other.rows, slots)]
            yield from self.results.batches(sources if side == 0 else sources[::-1])

    def _kept(self, side: int, partition: NDArray[np.int64]) -> None:
        super()._kept(side, partition)
        self.recent[side] += np.bincount(partition, minlength=self.partitions)
        if self.recent.sum() > _TWO * max(self.rows_in_memory, 1):
            self.recent /= _TWO

    def _make_room(self) -> None:
        """Flush tuples whose partners are least likely to arrive."""
        left = self._flush_nbytes
        for at in np.argsort(self.recent[::-1], axis=None, kind="stable"):  # reversed: a row is the opposite input's
            side, bucket = divmod(int(at), self.partitions)
            if self.counts[side, bucket]:
                left -= self._flush_oldest(side, bucket, left)
            if left <= 0:
                return

    def _flush_oldest(self, side: int, bucket: int, nbytes: int) -> int:
        """Flush the oldest tuples of a bucket up to a number of bytes, one at least; return how many bytes they had."""
        store = self.stores[side]
        rows = store.rows
        slots = np.flatnonzero(self.partition_of_slots(side) == bucket)
        slots = slots[np.argsort(rows.arrivals[slots], kind="stable")][: nbytes // rows.layout.stride + 1]
        ends = np.cumsum(rows.sizes(slots))
        count = max(1, int(np.searchsorted(ends, nbytes, side="right")))
        self._write_sorted(side, bucket, slots[:count])
        return int(ends[count - 1])

    def flush(self, side: int, partition: int) -> None:
        """Write the tuples of a partition in memory to blocks, and free their memory."""
        if self.counts[side, partition]:
            self._write_sorted(side, partition, np.flatnonzero(self.partition_of_slots(side) == partition))

    def _write_sorted(self, side: int, bucket: int, slots: NDArray[np.int64]) -> None:
        store = self.stores[side]
        words = store.rows.key_words(self.pairing.driver.key_of(side))[slots]
        written = self.write(side, bucket, store.rows, slots[np.argsort(words, kind="stable")])
        store.drop(slots)
        self.counts[side, bucket] -= len(slots)
        self._written[side, bucket] += len(written)
        for block in written:
            self.blocks[side].append(block, bucket)

    # Reactive phase

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        rate_memory, probe = self._best_probe()
        rates = self._disk_rates()
        bucket = int(np.argmax(rates))
        if rates[bucket] > rate_memory:
            return self._join_disk(bucket)
        return None if probe is None else self._probe_with(*probe)

    def _selectivity(self) -> NDArray[np.float64]:
        """Return the share of pairs of each bucket that are results; a little more, so that no bucket is hopeless."""
        selectivity: NDArray[np.float64] = (self._hits + 1) / (self._pairs + self.partitions)
        return selectivity

    def _best_probe(self) -> tuple[float, tuple[int, int] | None]:
        """Return the greatest rate of a block that probes memory, and the block."""
        best: tuple[float, tuple[int, int] | None] = (0.0, None)
        if not self.may_probe:
            return best
        selectivity = self._selectivity()
        for side, blocks in enumerate(self.blocks):
            if len(blocks):
                rates = self.unmet(side) * selectivity[blocks.partitions]
                at = int(np.argmax(rates))
                if rates[at] > best[0]:
                    best = float(rates[at]), (side, at)
        return best

    def _disk_rates(self) -> NDArray[np.float64]:
        """Return the rate of each bucket's task on disk. Tuples are taken to be in blocks of one size."""
        new = np.minimum(self._written - self._joined, self._fan_in)
        reads = (self._joined + _TWO * new).sum(axis=0)
        per_block = self.spilled / np.maximum(self._written, 1)
        pairs = new[0] * (self._joined[1] + new[1]) + self._joined[0] * new[1]
        possible = (self._written > 0).all(axis=0)
        rates: NDArray[np.float64] = np.where(possible, pairs * per_block[0] * per_block[1], 0.0)
        return rates * self._selectivity() / np.maximum(reads, 1)

    def _join_disk(self, bucket: int) -> Iterator[pa.RecordBatch]:
        """Join some new blocks of a bucket with each other and with those that were joined before."""
        self._free_chunk()
        stop = np.minimum(self._joined[:, bucket] + self._fan_in, self._written[:, bucket])
        with held(self.budget, nbytes := self.budget.available):
            yield from self._join_new(bucket, stop, join_memory(nbytes), self._given())
        self._joined[:, bucket] = stop

    def _free_chunk(self) -> None:
        """Make way for the blocks of a task."""
        wanted = min(self._fan_in * self.block_nbytes * _TWO, self.budget.limit // _SHARE)
        while self.rows_in_memory and self.budget.available < wanted:
            self._make_room()

    def _join_new(
        self, bucket: int, stop: NDArray[np.int64], memory: NDArray[np.uint8], given: Given | None
    ) -> Generator[pa.RecordBatch, None, None]:
        """Join the first `stop` blocks of each input, apart from pairs of blocks that were joined before."""
        start, pages = self._joined[:, bucket].tolist(), self._pages[:, bucket].tolist()
        for side, others in ((0, int(stop[1])), (1, start[0])):
            if start[side] < stop[side] and others:
                new = self._part(side, bucket, start[side], pages[side], int(stop[side]))
                yield from self.join_sources(new, self._part(1 - side, bucket, 0, 0, others), memory, given)

    def _part(self, side: int, bucket: int, number: int, page: int, stop: int) -> BlockSource:
        """Return the blocks of a bucket from a number on, which is at this page, up to `stop`.

        Their headers lead from one to the next, so the disk need not seek. The count of tuples is that of the bucket.
        """
        whole = self.source(side, bucket)

        def blocks() -> Iterator[SpilledBlock]:
            assert whole.file is not None
            for ref in islice(whole.file.scan(number, page), stop - number):
                if ref.number >= self._joined[side, bucket]:
                    self._pages[side, bucket] = ref.end
                yield SpilledBlock(ref, ref.tag, -1)

        return replace(whole, blocks=blocks)

    # Cleanup phase

    def _join_partition(
        self, partition: int, memory: NDArray[np.uint8], given: Given | None
    ) -> Generator[pa.RecordBatch, None, None]:
        return self._join_new(partition, self._written[:, partition], memory, given)
