"""`HashMerge`: the hash-merge join of two streams (Mokbel, Lu and Aref, ICDE 2004).

Source: section 2 of "Adaptive Join Operators for Result Rate Optimization on Streaming Inputs" (DINER and MINER).

Hashing phase: each arriving tuple probes the tuples of the other input in memory, then is kept. When the memory is
full, a pair of buckets, the tuples of one range of hash values in both inputs, is sorted, written as a group of two
runs, and dropped. Adaptive flushing chooses the pair: the largest one whose flush keeps the memory balanced between the
inputs. Merging phase, while all inputs are blocked and at cleanup: up to F/2 groups of a bucket are merged in a turn,
see `headrace.joins.streams.merging.runs`. Tuples of one group were in memory together, so they have been joined.

Chosen beyond the source: the memory is balanced if the numbers of tuples of both inputs differ by at most a tenth of
all tuples, or by no more than before. Pairs with less than half of the average size are not flushed as long as another
keeps the balance. If none does, the largest pair goes. A step of the reactive phase is a turn for the bucket with the
most groups; the result of a turn queues behind the other groups. One of the conditions must be an equality, by which
tuples are hashed; bands in addition filter.

Memory: the tuples of both inputs, 12 to 16 bytes for each in the hash chains, 32 bytes for each tuple of the largest
bucket to sort it, 160 bytes for each spilled block and 224 for each run, two blocks for flushing and merging, and the
workspace. A tuple that is larger than a block (a 32nd of the memory, at least 8 KiB) may be refused. The lists of
blocks grow with the input, so a memory of a few hundred KiB holds those of some 10 MB of tuples; then the join fails
and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.errors import JoinInputError
from headrace.joins.handle import check_number
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsAlgorithm, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.pairs import Pairing
from headrace.joins.streams.merging.runs import LEAST_FAN_IN, RunGroup, RunMerger
from headrace.joins.streams.tuples import _index_kernels as kernels

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["HashMerge", "choose_bucket"]

_TWO = 2
_LEAST_STORES = 96 << 10
_MOST_BUCKETS = 64
_LEAST_BUCKETS = 4
_BUCKET_SHARE = 32 << 10  # of the memory: a smaller bucket would be written in too small blocks
_SORTING = 32  # bytes for each tuple of a bucket that is sorted: slots, key words, their order, slots in order
_BALANCE = 0.1
_FEW_SHARE = 256
_SLICE = 1 << 16


class HashMerge(StreamsJoin["HashMergeAlgorithm"]):
    """Hash-merge join of two streams.

    Parameters
    ----------
    inputs
        Schema of each of the two inputs, by name.
    on
        Conditions, see `headrace.joins.streams.Conditions`. At least one must be an equality.
    how
        Only ``"inner"``.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``.
    wait
        Seconds without an arrival after which the inputs are blocked, or text such as ``"25ms"``.
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
    >>> join = HashMerge({"o": orders.schema, "p": payments.schema}, on=[("o.id", "p.order")], memory="1MiB")
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
        wait: float | str = WAIT_THRESHOLD,
        spill: str | os.PathLike[str] | None = None,
        fan_in: int = 10,
        backend: Callable[[Path], StorageBackend] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        check = StreamsParameters.check(inputs, on, how, memory, wait=wait, spill=spill, backend=backend, clock=clock)
        super().__init__(HashMergeAlgorithm(check, check_number("fan_in", fan_in, LEAST_FAN_IN)))


class HashMergeAlgorithm(StreamsAlgorithm):
    """Algorithm of `HashMerge`."""

    def __init__(self, parameters: StreamsParameters, fan_in: int) -> None:
        super().__init__(parameters)
        self.require_two_inputs("a hash-merge join")
        self._pairing = Pairing(self.graph.edges)
        if self._pairing.ordered:
            raise JoinInputError(
                "a hash-merge join needs an equality, and all conditions are bands; add one, or use DINER"
            )
        self._merger = RunMerger(self, self._pairing, fan_in, _LEAST_STORES)
        buckets = 1 << max(min(parameters.memory // _BUCKET_SHARE, _MOST_BUCKETS), _LEAST_BUCKETS).bit_length() - 1
        self._counts = np.zeros((_TWO, buckets), dtype=np.int64)
        self._groups: list[list[RunGroup]] = [[] for _ in range(buckets)]
        self.stores = self._pairing.stores(self.layouts, self.budget)

    # Hashing phase

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        start = 0
        while start < len(rows):
            count = self._fitting(side, rows, start)
            few = min(self.rows_in_memory // _FEW_SHARE, len(rows) - start - 1)  # not worth a probe of their own
            if self.rows_in_memory and count <= few:
                self._flush(choose_bucket(self._counts, _BALANCE))
                continue
            stop = start + max(count, 1)
            if count == 0 and self.stores[side].fitting(rows, start) == 0:
                raise self._merger.no_room(side)
            yield from self.join_in_memory(self._pairing, side, rows, np.arange(start, stop, dtype=np.int64))
            self.stores[side].insert(rows, start, stop)
            buckets = self._buckets(side, rows, start, stop)
            self._counts[side] += np.bincount(buckets, minlength=self._counts.shape[1])
            start = stop

    def _fitting(self, side: int, rows: Rows, start: int) -> int:
        """Return how many tuples from position `start` on fit, so that there is memory for sorting any bucket."""
        available = self.budget.available
        count = min(len(rows) - start, max(1, available // (4 * _SORTING)))
        sorting = _SORTING * (int(self._counts.max()) + count)
        return min(count, self.stores[side].fitting(rows, start, max(available - sorting, 0)))

    def _buckets(self, side: int, rows: Rows, start: int, stop: int) -> NDArray[np.int64]:
        """Return the buckets of the tuples from position `start` up to `stop`."""
        out = np.empty(stop - start, dtype=np.int64)
        bits = self._counts.shape[1].bit_length() - 1
        kernels.partitions_of(rows.keyed(self._pairing.driver.key_of(side)), start, len(out), bits, out)
        return out

    def _flush(self, bucket: int) -> None:
        """Write the tuples of a bucket of both inputs, which were joined, as a group of runs."""
        runs = []
        for side, store in enumerate(self.stores):
            slots = self._slots_in_order(side, bucket)
            run = self._merger.write_run(side, store.rows, slots)
            runs.append((run,) if len(run) else ())
            store.drop(slots)
            self.counters.rows_spilled += len(slots)
        self._counts[:, bucket] = 0
        group = RunGroup((runs[0], runs[1]))
        while self.rows_in_memory and self.budget.available < self._merger.entry_nbytes(group):
            self._flush(choose_bucket(self._counts, _BALANCE))
        self._groups[bucket].append(self._merger.keep(group))

    def _slots_in_order(self, side: int, bucket: int) -> NDArray[np.int64]:
        """Return the slots of the tuples of a bucket in the order of their key words."""
        rows, parts = self.stores[side].rows, []
        for start in range(0, len(rows), _SLICE):
            buckets = self._buckets(side, rows, start, min(start + _SLICE, len(rows)))
            parts.append(start + np.flatnonzero(buckets == bucket))
        slots = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        words = rows.key_words(self._pairing.driver.key_of(side))[slots]
        return slots[np.argsort(words, kind="stable")]

    # Merging phase

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        most = max(self._groups, key=len)
        return self._turn(most) if len(most) > 1 else None

    def _turn(self, groups: list[RunGroup]) -> Iterator[pa.RecordBatch]:
        taken = groups[: self._merger.most_groups]
        joined = yield from self._merger.turn(taken, merge=True)
        groups[: len(taken)] = []
        groups.append(joined)

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        for bucket, groups in enumerate(self._groups):
            if groups and self._counts[:, bucket].any():
                self._flush(bucket)
        for store in self.stores:
            store.free()
        for groups in self._groups:
            yield from self._merger.turns(groups)


def choose_bucket(counts: NDArray[np.int64], balance: float) -> int:
    """Return the pair of buckets to flush: the largest one whose flush keeps the memory balanced.

    Parameters
    ----------
    counts : int64[2, buckets]
        Tuples in memory of each input in each bucket; not all 0.
    balance
        Greatest difference between the inputs in a balanced memory, as a share of all tuples.

    Examples
    --------
    >>> choose_bucket(np.array([[9, 5, 0], [0, 5, 9]]), 0.1)
    1
    """
    sizes = counts.sum(axis=0)
    differences = counts[0] - counts[1]
    before = int(differences.sum())
    after = np.abs(before - differences)
    balanced = after <= np.maximum(abs(before), balance * (sizes.sum() - sizes))
    good = balanced & (2 * sizes >= sizes.mean())
    return int(np.argmax(np.where(good, sizes, 0) if good.any() else sizes))
