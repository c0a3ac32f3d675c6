"""`ProgressiveMerge`: the progressive merge join of two streams (Dittrich, Seeger, Taylor and Widmayer, VLDB 2002).

Source: section 2 of "Adaptive Join Operators for Result Rate Optimization on Streaming Inputs" (DINER and MINER).

Arriving phase: tuples are kept, and nothing is joined until the memory is full. Then the tuples of both inputs in
memory, which are in order, are joined, written as a group of two sorted runs, and dropped. There is no reactive phase.
Cleanup phase: what is in memory becomes the last group; then up to F/2 groups are merged in a turn, see
`headrace.joins.streams.merging.runs`. A tuple joins those of the other input that belong to another group.

Chosen beyond the source: both inputs share the memory, so the part of each follows its rate of arrival. Tuples are
sorted as they arrive, into the entries of a sorted index, so a flush needs no memory for sorting. Bands work as
equalities do. If the memory was never full, the cleanup phase joins the tuples in memory and writes nothing.

Memory: the tuples of both inputs, 13 bytes for each in the sorted entries, 160 bytes for each spilled block and 224 for
each run, two blocks for flushing, and the workspace. A tuple that is larger than a block (a 32nd of the memory, at
least 8 KiB) may be refused. The lists of blocks grow with the input; when they leave no room for tuples, the join fails
and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.handle import check_number
from headrace.joins.streams.base.operator import StreamsAlgorithm, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.pairs import Pairing
from headrace.joins.streams.merging.runs import LEAST_FAN_IN, RunGroup, RunMerger

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["ProgressiveMerge"]

_TWO = 2
_LEAST_STORES = 64 << 10
_PROBES = 4096


class ProgressiveMerge(StreamsJoin["ProgressiveMergeAlgorithm"]):
    """Progressive merge join of two streams.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, see `headrace.joins.streams.Conditions`.
    how
        Only ``"inner"``.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    spill
        Existing folder in which the spill files are created; None if the operator may not spill.
    fan_in
        Most runs that a turn of the merging phase takes, of both inputs together; at least 4 (the paper's F).
    backend
        Creates the storage backend of a spill file; by default a file on disk.
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
        If the memory is not enough: when the operator is made, or later by `push`.

    Examples
    --------
    >>> import pyarrow as pa
    >>> orders, payments = pa.record_batch({"id": [1, 2]}), pa.record_batch({"order": [2], "paid": [9.5]})
    >>> join = ProgressiveMerge({"o": orders.schema, "p": payments.schema}, on=[("o.id", "p.order")], memory="1MiB")
    >>> join.push(orders, side="o").drain() + join.push(payments, side="p").drain()
    0
    >>> join.finish().to_table().to_pylist()
    [{'id': 2, 'order': 2, 'paid': 9.5}]
    """

    def __init__(
        self,
        inputs: Mapping[str, pa.Schema],
        on: Conditions,
        how: str = "inner",
        memory: int | str = "64MiB",
        *,
        spill: str | os.PathLike[str] | None = None,
        fan_in: int = 10,
        backend: Callable[[Path], StorageBackend] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        check = StreamsParameters.check(inputs, on, how, memory, spill=spill, backend=backend, clock=clock)
        super().__init__(ProgressiveMergeAlgorithm(check, check_number("fan_in", fan_in, LEAST_FAN_IN)))


class ProgressiveMergeAlgorithm(StreamsAlgorithm):
    """Algorithm of `ProgressiveMerge`."""

    def __init__(self, parameters: StreamsParameters, fan_in: int) -> None:
        super().__init__(parameters)
        self.require_two_inputs("a progressive merge join")
        self._pairing = Pairing(self.graph.edges)
        self._merger = RunMerger(self, self._pairing, fan_in, _LEAST_STORES)
        self._groups: list[RunGroup] = []
        self.stores = self._pairing.stores(self.layouts, self.budget, ordered=True)

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        store, start = self.stores[side], 0
        while start < len(rows):
            count = store.fitting(rows, start)
            if count == 0 and self.rows_in_memory:
                yield from self._join_memory()
                self._flush()
                continue
            if count == 0:
                raise self._merger.no_room(side)
            store.insert(rows, start, start + count)
            start += count

    def _join_memory(self) -> Iterator[pa.RecordBatch]:
        """Join the tuples in memory, in the order of the first input's keys."""
        left, right = self.stores
        for start in range(0, len(left), _PROBES):
            index = self._in_order(0)[start : start + _PROBES].astype(np.int64)
            for positions, slots in self._pairing.find(right, 0, left.rows, index, self.pair_limit):
                yield from self.results.batches([(left.rows, positions), (right.rows, slots)])

    def _in_order(self, side: int) -> NDArray[np.int32]:
        return self.stores[side].sorted_index(self._pairing.driver.key_of(side)).slots

    def _flush(self) -> None:
        """Write the tuples in memory, which were joined, as a group of runs."""
        runs = []
        for side, store in enumerate(self.stores):
            self.counters.rows_spilled += len(store)
            run = self._merger.write_run(side, store.rows, self._in_order(side))
            runs.append((run,) if len(run) else ())
            store.free()
        self._groups.append(self._merger.keep(RunGroup((runs[0], runs[1]))))

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        yield from self._join_memory()
        if self._groups and self.rows_in_memory:
            self._flush()
        for store in self.stores:
            store.free()
        yield from self._merger.turns(self._groups)
