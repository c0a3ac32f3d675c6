"""`MINER`, the multiple index nested-loops reactive join, and its algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.handle import check_number
from headrace.joins.streams.base.combining import Combiner
from headrace.joins.streams.base.nested_blocks import NestedBlocks
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsParameters
from headrace.joins.streams.diner.flushing import FlushingPolicy
from headrace.joins.streams.diner.reactive_join import OUTER_SHARE, ReactiveAlgorithm, ReactiveJoin
from headrace.joins.streams.miner.selectivity import Selectivity
from headrace.joins.streams.tuples._row_kernels import set_flags
from headrace.joins.streams.tuples.layout import TOUCHED
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.combining import Step
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.indexes import SortedIndex
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["MINER", "MINERAlgorithm"]


class MINER(ReactiveJoin["MINERAlgorithm"]):
    """Multiple index nested-loops reactive join of streams (Bornea and others, TKDE 2010, section 4).

    Parameters
    ----------
    inputs
        Schema of each input, by name; two or more.
    on
        Conditions, see `headrace.joins.streams.Conditions`: equalities, bands, or both. They connect all inputs.
    how
        ``"inner"``.
    memory
        Limit on everything that the operator holds (the paper's MemThresh), as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder for the temporary folder of spilled blocks. Without one, tuples that exceed the memory are an
        error.
    block
        Bytes of a spilled block, as a number or as text. By default 10 KiB as in the paper, and for memories of more
        than 10 MiB a 1,024th of the memory.
    max_outer_blocks
        Most blocks of the outer input in memory during the reactive phase (the paper's MaxOuterMem).
    max_new_arrivals
        Tuples that may wait before `idle` returns to the arriving phase (the paper's MaxNewArr).
    wait
        Seconds without an arrival after which the inputs are blocked, as a number or as text (the paper's WaitThresh).
    backend
        Creates the storage backend of a spill file; by default files on disk.
    clock
        Returns the time in seconds; by default the system's.

    Raises
    ------
    JoinInputError
        If a parameter cannot be used.
    StreamSchemaError
        If an input lacks a column, or has it twice.
    KeyInputError
        If two columns of a condition have types that never match.
    MemoryBudgetError
        If the memory is not enough.

    Examples
    --------
    >>> import pyarrow as pa
    >>> a, b = pa.record_batch({"x": [1, 2]}), pa.record_batch({"x": [2], "y": [7]})
    >>> c = pa.record_batch({"y": [7, 8]})
    >>> join = MINER({"a": a.schema, "b": b.schema, "c": c.schema}, on=[("a.x", "b.x"), ("b.y", "c.y")], memory="1MiB")
    >>> join.push(a, side="a").drain(), join.push(c, side="c").drain()
    (0, 0)
    >>> join.push(b, side="b").to_table().to_pylist()
    [{'x': 2, 'b_x': 2, 'y': 7, 'c_y': 7}]
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
        block: int | str | None = None,
        max_outer_blocks: int = 19,
        max_new_arrivals: int = 1000,
        wait: float | str = WAIT_THRESHOLD,
        backend: Callable[[Path], StorageBackend] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, wait=wait, spill=spill, backend=backend, clock=clock
        )
        super().__init__(
            check_number("max_new_arrivals", max_new_arrivals, 0), MINERAlgorithm(parameters, block, max_outer_blocks)
        )


class MINERAlgorithm(ReactiveAlgorithm):
    """Algorithm of `MINER`.

    Parameters
    ----------
    parameters
        Parameters of all joins of streams.
    block, max_outer_blocks
        See `MINER`.

    Attributes
    ----------
    combiner
        Search for combinations.
    stores
        Tuples of each input in memory.
    indexes
        For each input, the sorted entries of each join attribute.
    policies
        For each input, the flushing policy of each join attribute, with its areas and their join counters.
    selectivity
        Joins between pairs of inputs since the last flush.
    disk
        Spilled blocks of each input.
    reactive
        State of the reactive and the cleanup phase.
    """

    reactive: NestedBlocks

    def __init__(self, parameters: StreamsParameters, block: int | str | None, max_outer_blocks: int) -> None:
        super().__init__(parameters, block, max_outer_blocks)
        self.combiner = Combiner(self.graph, self.budget)
        self.selectivity = Selectivity(self.combiner.pairings)
        self.stores, self.indexes = self._make_stores()
        self.policies = [[FlushingPolicy(self._block, side) for _ in keys] for side, keys in enumerate(self.graph.keys)]
        self._open_disk()
        self.reactive = NestedBlocks(self, self.disk, self.spill_file)
        self.buffer_nbytes = 2 * block_nbytes(self._block)
        self.require(self.buffer_nbytes + sum(map(self.group_nbytes, self.sides)), "a block of each input")
        self._free = self.budget.available

    def _make_stores(self) -> tuple[list[TupleStore], list[list[SortedIndex]]]:
        """Return the stores, and their sorted entries. Keys of several words are found by hash chains as well."""
        stores, indexes = [], []
        for layout in self.layouts:
            store = TupleStore(layout, self.budget, [not fields.wide for fields in layout.keys])
            stores.append(store)
            indexes.append([
                store.add_sorted_index(key) if fields.wide else store.sorted_index(key)
                for key, fields in enumerate(layout.keys)
            ])  # fmt: skip
        return stores, indexes

    # Arriving phase: section 4.1

    def probing_sequence(self, side: int) -> list[Step]:
        """Return the probing sequence of an input's tuples: pairs of inputs by growing selectivity factor."""
        counts = [len(store) for store in self.stores]
        return self.combiner.sequence(
            side, lambda here, there: self.selectivity.factor(here, there, counts[here], counts[there])
        )

    def _probe(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Yield the results of arriving tuples, set join bits, and credit the areas of all join attributes."""
        sequence = self.probing_sequence(side)
        for pieces in self.combiner.combine(
            {side: (rows, index)}, sequence, self.stores.__getitem__, self.selectivity.note
        ):
            sources = [pieces[at] for at in self.sides]
            for (tuples, chosen), policies in zip(sources, self.policies, strict=True):
                layout = tuples.layout
                set_flags(tuples.records, layout.stride, layout.flags, TOUCHED, chosen)
                for key, policy in enumerate(policies):
                    policy.regions.credit(tuples, key, chosen)
            yield from self.results.batches(sources)

    # Flushing: section 4.1, "Flushing Policy"

    def victim(self) -> tuple[int, int]:
        """Return the input with the most tuples in memory, and its join attribute with the area of least benefit.

        When all other inputs have ended, the tuples of an input have nothing to wait for in memory, so they go first.
        """
        side = max(self.sides, key=lambda at: (self._idle(at), len(self.stores[at]), -at))
        least = [
            min(policy.regions.benefits(index.words).values())
            for policy, index in zip(self.policies[side], self.indexes[side], strict=True)
        ]
        return side, int(np.argmin(least))

    def _idle(self, side: int) -> bool:
        others = all(self.ended[at] for at in self.sides if at != side)
        return others and not self.ended[side] and len(self.stores[side]) > 0

    def _flush_block(self) -> None:
        side, key = self.victim()
        store, indexes, policies = self.stores[side], self.indexes[side], self.policies[side]
        slots = policies[key].choose(store.rows, indexes[key])
        self._flush_slots(side, key, slots)
        for policy, index in zip(policies, indexes, strict=True):
            policy.flushed(store.rows, index, store.live_nbytes)
        self.selectivity.zero()

    def group_nbytes(self, side: int) -> int:
        """Return the memory for the tuples of one block with their indexes."""
        return self.reactive.group_nbytes(side, self._block)

    # Reactive and cleanup phase: section 4.2

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        if not self.reactive.unfinished:
            return None
        return self.reactive.step(self._max_outer_blocks, self._chunk_nbytes(self._free // OUTER_SHARE), fill=False)

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining results: what is in memory becomes blocks, then all blocks meet."""
        if any(map(len, self.disk)):
            self._flush_all()
        for store in self.stores:
            store.free()
        free = self.budget.available - self.buffer_nbytes - sum(map(self.group_nbytes, self.sides))
        while self.reactive.unfinished:
            yield from self.reactive.step(sum(map(len, self.disk)), self._chunk_nbytes(free // 2), fill=True)

    def _order(self, side: int) -> tuple[int, FlushingPolicy, SortedIndex]:
        return 0, self.policies[side][0], self.indexes[side][0]

    def _chunk_nbytes(self, memory: int) -> int:
        """Return the bytes of tuples that fit into so much memory with their indexes, whichever input they are of."""
        share = min(self._block / self.group_nbytes(side) for side in self.sides)
        return int(memory * share)
