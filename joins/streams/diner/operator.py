"""`DINER`, the double index nested-loops reactive join, and its algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins.errors import JoinInputError
from headrace.joins.handle import check_number
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsParameters
from headrace.joins.streams.base.pairs import Pairing
from headrace.joins.streams.diner.flushing import FlushingPolicy
from headrace.joins.streams.diner.reactive import ReactiveNL
from headrace.joins.streams.diner.reactive_join import OUTER_SHARE, ReactiveAlgorithm, ReactiveJoin
from headrace.joins.streams.tuples._row_kernels import set_flags
from headrace.joins.streams.tuples.arena import ARENA_PAGE
from headrace.joins.streams.tuples.layout import TOUCHED
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.indexes import SortedIndex
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["DINER", "DINERAlgorithm"]

_TWO = 2
_PAGES = 8  # of a store: records, heap, entries, hash chains, each begun
_ENTRY_NBYTES = 32  # of a tuple in a sorted index and in hash chains


class DINER(ReactiveJoin["DINERAlgorithm"]):
    """Double index nested-loops reactive join of two streams (Bornea and others, TKDE 2010, section 3).

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, see `headrace.joins.streams.Conditions`: equalities, bands, or both.
    how
        ``"inner"``.
    memory
        Limit on everything that the operator holds (the paper's MemThresh), as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder for the temporary folder of spilled blocks. Without one, tuples that exceed the memory are an
        error.
    block
        Bytes of a spilled block, as a number or as text. By default 10 KiB as in the paper, and for memories of more
        than 10 MiB a 1,024th of the memory, so that a flush costs little for each tuple.
    max_outer_blocks
        Most blocks of the outer input in memory during the reactive phase (the paper's MaxOuterMem). All of them
        together never take more than a quarter of the memory.
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
    >>> orders, payments = pa.record_batch({"id": [1, 2]}), pa.record_batch({"order": [2], "paid": [9.5]})
    >>> join = DINER({"o": orders.schema, "p": payments.schema}, on=[("o.id", "p.order")], memory="1MiB")
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
            check_number("max_new_arrivals", max_new_arrivals, 0), DINERAlgorithm(parameters, block, max_outer_blocks)
        )


class DINERAlgorithm(ReactiveAlgorithm):
    """Algorithm of `DINER`.

    Parameters
    ----------
    parameters
        Parameters of all joins of streams.
    block, max_outer_blocks
        See `DINER`.

    Attributes
    ----------
    stores
        Tuples of each input in memory.
    policies
        Flushing policy of each input.
    disk
        Spilled blocks of each input.
    reactive
        State of the reactive and the cleanup phase.
    """

    reactive: ReactiveNL

    def __init__(self, parameters: StreamsParameters, block: int | str | None, max_outer_blocks: int) -> None:
        super().__init__(parameters, block, max_outer_blocks)
        if len(self.sides) != _TWO:
            raise JoinInputError(f"DINER has two inputs, not {len(self.sides)}; use MINER")
        self._pairing = Pairing(self.graph.edges)
        self._keys = [self._pairing.driver.key_of(side) for side in self.sides]
        self.stores, self._indexes = self._make_stores()
        self.policies = [FlushingPolicy(self._block, side) for side in self.sides]
        self._open_disk()
        self.reactive = ReactiveNL(self, self.disk, self._pairing)
        self.require(self._least(), "an outer and an inner block")

    def _make_stores(self) -> tuple[list[TupleStore], list[SortedIndex]]:
        """Return the stores, and their sorted entries. Keys of several words are found by hash chains as well."""
        stores, indexes = [], []
        for side, key in zip(self.sides, self._keys, strict=True):
            layout = self.layouts[side]
            wide = layout.keys[key].wide
            kinds = self._pairing.index_kinds(side, len(layout.keys), ordered=not wide)
            store = TupleStore(layout, self.budget, kinds)
            indexes.append(store.add_sorted_index(key) if wide else store.sorted_index(key))
            stores.append(store)
        return stores, indexes

    def _least(self) -> int:
        """Return the memory for a chunk of one block and an inner block, which also is enough for arriving tuples."""
        entries = _ENTRY_NBYTES * (self._block // min(layout.stride for layout in self.layouts) + 1)
        return self._block + block_nbytes(self._block) + entries + _PAGES * ARENA_PAGE

    # Arriving phase: algorithms 1 and 3

    def _probe(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Yield the results of arriving tuples, set join bits, and credit regions (algorithm 3)."""
        other = self.stores[1 - side]
        for positions, slots in self._pairing.find(other, side, rows, index, self.pair_limit):
            sources = [(side, rows, positions), (1 - side, other.rows, slots)]
            for at, tuples, chosen in sources:
                set_flags(tuples.records, tuples.layout.stride, tuples.layout.flags, TOUCHED, chosen)
                self.policies[at].regions.credit(tuples, self._keys[at], chosen)
            yield from self.results.batches([(tuples, chosen) for _, tuples, chosen in sorted(sources, key=_side)])

    # Flushing: algorithm 2

    def _victim(self) -> int:
        """Return the input with the most tuples in memory.

        When an input has ended, tuples of the other have nothing to wait for in memory, so they go first (footnote 1).
        """
        for side in self.sides:
            if self.ended[1 - side] and not self.ended[side] and len(self.stores[side]):
                return side
        return int(len(self.stores[1]) > len(self.stores[0]))

    def _flush_block(self) -> None:
        side = self._victim()
        store, index, policy = self.stores[side], self._indexes[side], self.policies[side]
        slots = policy.choose(store.rows, index)
        self._flush_slots(side, self._keys[side], slots)
        policy.flushed(store.rows, index, store.live_nbytes)

    # Reactive and cleanup phase: algorithm 4

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        if not self.reactive.unfinished:
            return None
        return self.reactive.step(self._max_outer_blocks, self.budget.limit // OUTER_SHARE)

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining results (section 3.5): what is in memory becomes blocks, then all blocks meet."""
        if any(map(len, self.disk)):
            self._flush_all()
        for store in self.stores:
            store.free()
        while self.reactive.unfinished:
            yield from self.reactive.step(sum(map(len, self.disk)), self._room_for_chunk())

    def _order(self, side: int) -> tuple[int, FlushingPolicy, SortedIndex]:
        return self._keys[side], self.policies[side], self._indexes[side]

    def _room_for_chunk(self) -> int:
        """Return the bytes of tuples that fit in memory with their index and an inner block."""
        free = self.budget.available - max(disk.largest for disk in self.disk) - _PAGES * ARENA_PAGE
        stride = min(layout.stride for layout in self.layouts)
        return free * stride // (stride + _ENTRY_NBYTES)


def _side(source: tuple[int, Rows, NDArray[np.int64]]) -> int:
    return source[0]
