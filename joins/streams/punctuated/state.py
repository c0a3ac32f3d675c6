"""`HashState`: the state of all inputs as hash buckets with a part in memory and a part on disk (section 5.1).

All inputs share a key, and so their tuples are in partitions of the same number. The state knows which combinations of
tuples are results already: those that were in memory together, those that a pass over a partition's disk part found,
and those of a partition that was settled later. It knows nothing about punctuations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.blocks import SpilledBlock, SpillReserve, cuts, held, read_block, write_block
from headrace.joins.streams.base.operator import partition_bits
from headrace.joins.streams.base.pairs import coexisted
from headrace.joins.streams.punctuated.errors import UniqueKeyError
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.indexes import new_cursor
from headrace.joins.streams.tuples.rows import gather_columns
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.joins.streams.base.operator import StreamsAlgorithm
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["KEY", "HashState", "Source"]

KEY = 0
"""Position of the shared key among the keys of each input."""

Source = tuple["Rows", "NDArray[np.int64]"]
"""Tuples of an input, and the position of the one in each combination."""

_LEAST_BLOCK, _MOST_BLOCK = 4 << 10, 1 << 20
_BLOCKS_IN_MEMORY = 64
_RESERVED_BLOCKS = 3  # one that is read, what is kept of it, and the buffer that it is written from
_PASS_NBYTES = 64


class HashState:
    """Tuples of all inputs, by partition of their key.

    Parameters
    ----------
    algorithm
        Algorithm whose layouts, budget, stamps and spill files are used.
    partitions
        Number of partitions, a power of 2 from 2 to 64.

    Attributes
    ----------
    stores
        Tuples in memory of each input.
    counts, spilled : int64[inputs, partitions]
        Tuples in memory and on disk of each input and partition.
    arrived : int64[inputs, partitions]
        Tuples that came into memory so far.
    flushes : int64[inputs, partitions]
        Flushes so far.
    matched : bool array
        After `settle` with an input of unique keys: which of the other's tuples on disk have a match, in their order.
    """

    def __init__(self, algorithm: StreamsAlgorithm, partitions: int) -> None:
        self._bits = partition_bits(partitions)
        self._algorithm = algorithm
        self.partitions = partitions
        self.stores = [TupleStore(layout, algorithm.budget, [False]) for layout in algorithm.layouts]
        limit = algorithm.budget.limit
        self._block_nbytes = max(_LEAST_BLOCK, min(limit // _BLOCKS_IN_MEMORY, _MOST_BLOCK))
        self._reserve = SpillReserve(algorithm.budget, _RESERVED_BLOCKS * block_nbytes(self._block_nbytes))
        shape = len(self.stores), partitions
        self.counts = np.zeros(shape, dtype=np.int64)
        self.spilled = np.zeros(shape, dtype=np.int64)
        self.arrived = np.zeros(shape, dtype=np.int64)
        self._seen = np.zeros((*shape, shape[0]), dtype=np.int64)  # `arrived` of each input at the last pass
        self._settled = np.full(partitions, -1, dtype=np.int64)  # all tuples that arrived before have joined
        self._passes: dict[tuple[int, int], list[int]] = {}  # stamps of the passes over disk parts
        self._generations = np.zeros(shape, dtype=np.int64)
        self.matched = np.zeros(0, dtype=np.bool_)
        self.flushes = np.zeros(shape, dtype=np.int64)
        self._least = sum(store.least_nbytes for store in self.stores) + _LEAST_BLOCK
        algorithm.require(self._least, "tuples")

    @property
    def rows_in_memory(self) -> int:
        """Number of tuples in memory."""
        return sum(map(len, self.stores))

    @property
    def spare(self) -> int:
        """Bytes that other things than tuples may take, so that a join of spilled tuples is still possible."""
        held = sum(store.nbytes for store in self.stores)
        return min(self._algorithm.budget.available + held - self._least, self._algorithm.budget.available)

    def partition_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the partitions of tuples of any input."""
        out = np.empty(len(rows), dtype=np.int64)
        kernels.partitions_of(rows.keyed(KEY), 0, len(rows), self._bits, out)
        return out

    def on_disk(self, side: int) -> NDArray[np.bool_]:
        """Return which partitions have tuples of other inputs than `side` on disk."""
        found: NDArray[np.bool_] = np.asarray(np.delete(self.spilled, side, axis=0) > 0).max(axis=0)
        return found

    # Memory

    def insert(self, side: int, rows: Rows, index: NDArray[np.int64]) -> None:
        """Keep the tuples at `index` in memory, for which there is room."""
        kept = rows if len(index) == len(rows) else rows.take(index)
        self.stores[side].insert(kept)
        added = np.bincount(self.partition_of(kept), minlength=self.partitions)
        self.counts[side] += added
        self.arrived[side] += added

    def drop(self, side: int, slots: NDArray[np.int64]) -> None:
        """Drop tuples in memory."""
        if not len(slots):
            return
        store = self.stores[side]
        self.counts[side] -= np.bincount(self.partition_of(store.rows)[slots], minlength=self.partitions)
        store.drop(slots)

    def combinations(
        self, side: int, rows: Rows, index: NDArray[np.int64], stores: Mapping[int, TupleStore]
    ) -> Iterator[list[Source]]:
        """Yield the combinations of tuples with an equal key: one of `rows`, and one of each store.

        Parameters
        ----------
        side, rows, index
            Tuples of an input; those at `index` take part.
        stores
            Tuples of the other inputs, which must not change meanwhile.

        Yields
        ------
        list
            For each input in order, its tuples and the positions of those in each combination.
        """
        limit = max(self._algorithm.pair_limit // max(len(stores), 1), 1)
        order = sorted(stores, key=lambda other: len(stores[other]))
        for positions in self._extended(side, rows, [index], [stores[other] for other in order], limit):
            sources: dict[int, Source] = {side: (rows, positions[0])}
            for other, slots in zip(order, positions[1:], strict=True):
                sources[other] = stores[other].rows, slots
            yield [sources[at] for at in self._algorithm.sides]

    def _extended(
        self, side: int, rows: Rows, found: list[NDArray[np.int64]], stores: Sequence[TupleStore], limit: int
    ) -> Iterator[list[NDArray[np.int64]]]:
        """Extend combinations by a matching tuple of each store."""
        if not stores:
            if len(found[0]):
                yield found
            return
        cursor, index = new_cursor(), np.ascontiguousarray(found[0])
        out = np.empty(limit, dtype=np.int64), np.empty(limit, dtype=np.int64)
        while cursor[0] < len(index):
            count = stores[0].probe(KEY, rows, KEY, index, None, cursor, out)
            at, slots = out[0][:count], out[1][:count].copy()
            yield from self._extended(side, rows, [*(some[at] for some in found), slots], stores[1:], limit)

    # Disk

    def flush(self, side: int, partition: int) -> None:
        """Write the tuples of a partition in memory to disk, and free their memory."""
        if self.counts[side, partition] == 0:
            return
        store = self.stores[side]
        slots = np.flatnonzero(self.partition_of(store.rows) == partition)
        self._write(side, partition, store.rows, slots)
        self._algorithm.counters.rows_spilled += len(slots)
        store.drop(slots)
        self.counts[side, partition] = 0
        self.flushes[side, partition] += 1

    def flush_largest(self) -> tuple[int, int]:
        """Flush the partition, of any input, with most tuples in memory; return which."""
        side, partition = np.unravel_index(np.argmax(self.counts), self.counts.shape)
        self.flush(int(side), int(partition))
        return int(side), int(partition)

    def blocks(self, side: int, partition: int) -> Iterator[Rows]:
        """Yield the tuples of each block of a partition; their memory is charged meanwhile."""
        if self.spilled[side, partition]:
            yield from self._read(side, self._file_number(side, partition))

    def _read(self, side: int, number: int) -> Iterator[Rows]:
        file = self._algorithm.spill_file(side, number)
        for ref in file.scan():
            block = SpilledBlock(ref, ref.tag, -1)
            with read_block(file, self._algorithm.layouts[side], block, self._reserve) as rows:
                yield rows

    def rewrite(self, side: int, partition: int, keep: Callable[[Rows], NDArray[np.bool_]]) -> int:
        """Write a partition's disk part again without some tuples, and return how many were left out.

        Parameters
        ----------
        side, partition
            Input and partition.
        keep
            Returns which tuples of a block are kept; called for each block in order.
        """
        if not self.spilled[side, partition]:
            return 0
        number, before, kept = self._file_number(side, partition), int(self.spilled[side, partition]), 0
        self._generations[side, partition] += 1
        for rows in self._read(side, number):
            index = np.flatnonzero(keep(rows))
            self._write(side, partition, rows, index, departed=True)
            kept += len(index)
        self.spilled[side, partition] = kept
        self._algorithm.drop_spill_file(side, number)
        return before - kept

    def _write(
        self, side: int, partition: int, rows: Rows, index: NDArray[np.int64], *, departed: bool = False
    ) -> None:
        """Write tuples to blocks of about one size, each with a departure stamp of its own unless they have one."""
        algorithm = self._algorithm
        if not len(index):
            return
        file = algorithm.spill_file(side, self._file_number(side, partition))
        for positions, nbytes in cuts(rows, index, self._block_nbytes):
            with held(self._reserve, nbytes):
                part = rows.take(positions)
                if not departed:
                    part.departures[:] = algorithm.next_stamp()
                write_block(file, part, self._reserve)
        if not departed:
            self.spilled[side, partition] += len(index)

    def _file_number(self, side: int, partition: int) -> int:
        return partition + self.partitions * int(self._generations[side, partition])

    # Which combinations exist

    def given(self, sources: Sequence[Source], partition: int) -> NDArray[np.bool_]:
        """Return which combinations of tuples of a partition are results already.

        Parameters
        ----------
        sources
            For each input in order, tuples and the positions of those in each combination.
        partition
            Their partition.
        """
        arrivals = np.stack([rows.arrivals[at] for rows, at in sources])
        departures = np.stack([rows.departures[at] for rows, at in sources])
        found: NDArray[np.bool_] = coexisted(sources) | (arrivals.max(axis=0) < self._settled[partition])
        for side in self._algorithm.sides:
            passes = self._passes.get((side, partition))
            if passes:
                since = np.maximum(np.delete(arrivals, side, axis=0).max(axis=0), departures[side])
                until = np.delete(departures, side, axis=0).min(axis=0)
                stamps = np.array(passes, dtype=np.int64)
                at = np.searchsorted(stamps, since)
                found |= (at < len(stamps)) & (stamps[np.minimum(at, len(stamps) - 1)] < until)
        return found

    def best_pass(self) -> tuple[int, int] | None:
        """Return the disk part that would meet most new combinations with tuples in memory; None if none would."""
        best, chosen = 0, None
        for side in self._algorithm.sides:
            others = [other for other in self._algorithm.sides if other != side]
            new = np.zeros(self.partitions, dtype=np.int64)
            for other in others:
                new += np.minimum(self.counts[other], self.arrived[other] - self._seen[side, :, other])
            new[(self.counts[others] == 0).any(axis=0)] = 0
            scores = new * self.spilled[side]
            at = int(np.argmax(scores))
            if scores[at] > best:
                best, chosen = int(scores[at]), (side, at)
        return chosen if self.spare >= _PASS_NBYTES else None

    def pass_over(self, side: int, partition: int) -> Iterator[list[Source]]:
        """Yield the combinations of a partition's disk part with the tuples in memory that are not results yet."""
        others = {other: store for other, store in enumerate(self.stores) if other != side}
        for rows in self.blocks(side, partition):
            index = np.arange(len(rows), dtype=np.int64)
            for sources in self.combinations(side, rows, index, others):
                yield _where(sources, ~self.given(sources, partition))
        self._algorithm.budget.charge("statistics", _PASS_NBYTES)
        self._passes.setdefault((side, partition), []).append(self._algorithm.next_stamp())
        self._seen[side, partition] = self.arrived[:, partition]

    def settle(self, partition: int, one: int | None = None, *, note: bool = False) -> Iterator[list[Source]]:
        """Yield all combinations of a partition that are not results yet; all of its tuples are on disk.

        Parameters
        ----------
        partition
            Partition.
        one
            Input whose keys are unique, in a join of two inputs.
        note
            Whether the other's tuples that have a match are noted, in a byte each, which the caller charges.
        """
        stamp = self._algorithm.next_stamp()
        size = self.spilled[:, partition]
        sides = sorted(self._algorithm.sides, key=lambda side: -1 if side == one else int(size[side]))
        self.matched = np.zeros(int(size[sides[-1]]) if note else 0, dtype=np.bool_)
        if size.all():
            yield from self._join_levels(partition, sides, {}, one)
        elif one is not None and size[one]:
            self._check_unique_alone(one, partition)
        self._settled[partition] = stamp
        for side in self._algorithm.sides:
            passes = self._passes.pop((side, partition), [])
            self._algorithm.budget.release("statistics", _PASS_NBYTES * len(passes))
            self._seen[side, partition] = self.arrived[:, partition]

    def _join_levels(
        self, partition: int, sides: Sequence[int], stores: dict[int, TupleStore], one: int | None
    ) -> Iterator[list[Source]]:
        """Join disk parts: chunks of all inputs but the last in memory, the blocks of the last one at a time."""
        side = sides[0]
        if len(sides) == 1:
            yield from self._join_blocks(partition, side, stores)
            return
        store = TupleStore(self._algorithm.layouts[side], self._algorithm.budget, [False])
        try:
            for _ in self._chunks(side, partition, store, len(sides) - 1):
                if side == one:
                    self._check_unique(side, partition, store)
                yield from self._join_levels(partition, sides[1:], {**stores, side: store}, one)
                store.free()
        finally:
            store.free()

    def _join_blocks(self, partition: int, side: int, stores: dict[int, TupleStore]) -> Iterator[list[Source]]:
        start = 0
        for rows in self.blocks(side, partition):
            index = np.arange(len(rows), dtype=np.int64)
            for sources in self.combinations(side, rows, index, stores):
                if len(self.matched):
                    self.matched[start + sources[side][1]] = True
                yield _where(sources, ~self.given(sources, partition))
            start += len(rows)

    def _check_unique_alone(self, side: int, partition: int) -> None:
        """Refuse two tuples with one key on disk where there is nothing to join them with."""
        store = TupleStore(self._algorithm.layouts[side], self._algorithm.budget, [False])
        try:
            for _ in self._chunks(side, partition, store, 1):
                self._check_unique(side, partition, store)
                store.free()
        finally:
            store.free()

    def _check_unique(self, side: int, partition: int, store: TupleStore) -> None:
        """Refuse two tuples with one key on disk: each tuple of the store matches itself alone."""
        for rows in self.blocks(side, partition):
            self.check_no_other(side, rows, store)

    def check_no_other(self, side: int, rows: Rows, store: TupleStore) -> None:
        """Refuse tuples for which a store has another tuple with the same key.

        Raises
        ------
        UniqueKeyError
            Names the input and the key.
        """
        index, cursor = np.arange(len(rows), dtype=np.int64), new_cursor()
        limit = max(self._algorithm.pair_limit, 1)
        out = np.empty(limit, dtype=np.int64), np.empty(limit, dtype=np.int64)
        while cursor[0] < len(index):
            found = store.probe(KEY, rows, KEY, index, None, cursor, out)
            at = out[0][:found]
            other = store.rows.arrivals[out[1][:found]] != rows.arrivals[at]
            if other.any():
                raise self.not_unique(side, rows, int(at[np.argmax(other)]))

    def not_unique(self, side: int, rows: Rows, at: int) -> UniqueKeyError:
        """Return the error for a tuple whose key occurred before."""
        columns = gather_columns(rows, np.array([at], dtype=np.int64))
        spec = self._algorithm.graph.keys[side][KEY]
        key = ", ".join(f"{name} = {columns[place][0]}" for place, name in zip(spec.columns, spec.names, strict=True))
        return UniqueKeyError(
            f"input {self._algorithm.graph.names[side]!r} was said to have each key once (`one`), and has {key} twice; "
            "its results are incomplete, so make the join without `one` and start over"
        )

    def _chunks(self, side: int, partition: int, store: TupleStore, levels: int) -> Iterator[None]:
        """Fill a store again and again with a share of the memory, until all tuples of a disk part were in it."""
        file = self._algorithm.spill_file(side, self._file_number(side, partition))
        for ref in file.scan():
            start, block = 0, SpilledBlock(ref, ref.tag, -1)
            while start < block.count:
                with read_block(file, self._algorithm.layouts[side], block, self._reserve) as rows:
                    fits = self._fitting(store, rows, start, levels)
                    store.insert(rows, start, start + fits)
                start += fits
                if start < block.count:
                    yield
        if len(store):
            yield

    def _fitting(self, store: TupleStore, rows: Rows, start: int, levels: int) -> int:
        """Return how many tuples fit into a store; if it is empty at least one, for which memory is made."""
        while True:
            room = self._algorithm.budget.available + store.nbytes
            fits = store.fitting(rows, start, max(room // levels - store.nbytes, 0))
            if fits == 0 and len(store) == 0:
                fits = min(store.fitting(rows, start), 1)
            if fits or len(store):
                return fits
            if self.rows_in_memory == 0:
                raise MemoryBudgetError.of(
                    f"a tuple of {self._algorithm.graph.names[self.side_of(store)]!r} does not fit into the memory "
                    "that is left while spilled tuples are joined"
                )
            self.flush_largest()

    def side_of(self, store: TupleStore) -> int:
        """Return the input whose tuples a store holds."""
        return next(side for side, layout in enumerate(self._algorithm.layouts) if layout is store.layout)


def _where(sources: Sequence[Source], keep: NDArray[np.bool_]) -> list[Source]:
    return [(rows, at[keep]) for rows, at in sources]
