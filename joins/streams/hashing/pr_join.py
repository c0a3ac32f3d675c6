"""`PRJoin`: the partitioned expanding ripple join (Chen, Gibbons and Nath), whose early results are a random sample.

Source: "PR-Join: A Non-Blocking Join Achieving Higher Early Result Rate with Statistical Guarantees", SIGMOD 2010.
Section numbers below are those of the paper.

Phase 1 (section 4.2): while everything fits in memory, an arriving tuple probes the other input's tuples and is kept.

Phase 2: from the moment when memory is full on, arriving tuples are kept in their partition, and give no results yet.
When memory is full, the partition with most tuples writes those of its larger input (section 5.1). A partition of
number i whose size has grown from s tuples in phase 1 to s (1 + g)^(j + i/n), for j = 1, 2, ..., is joined: all its
tuples with each other, those in memory and those on disk, except for pairs of tuples that were there when it was joined
before (section 4.4). So the ripples of a partition expand by the factor 1 + g, and those of the n partitions take
turns. Tuples are written once, and read 2 + 1/g times at most, if no input is blocked (equation 13, see below). While
both inputs are blocked, the partition with most pairs left for each tuple to read is joined (section 5.3).

Phase 3: when all tuples have arrived, each partition is joined a last time.

Each partition of an input is a file of its own to which blocks are appended. A join reads both files from their begins
to their ends, the smaller input into a hash table, so the disk seeks twice. If the smaller input does not fit in
memory, the larger one is read once for each part of it.

Statistics (section 4.3): after each join, a partition has given all results of its first tuples, a growing rectangle in
the space of pairs. If inputs arrive in random order, these tuples are a random sample of the partition. XJoin, RPJ and
the others give results of pairs that depend on what they have kept in memory, which is no such sample.
`PRJoin.coverage` has the sides of all rectangles, and `PRJoin.estimate` makes estimates with confidence intervals.

Chosen beyond the source, or left out of it:

- s is the size of each partition at the end of phase 1, not the average, so that a partition that is always smaller
  expands as the others do. Heavy keys are not spread by a histogram (section 5.1): a larger partition takes longer
- a partition that is joined writes its tuples in memory first, so that a tuple is read from disk only, and the hash
  table gets their memory. Then the others write until the hash table fits ("spill one page of partition j")
- the memory of phase 2 is shared by all partitions, and has no hash chains
- no stop constraint, which would save up to one read of all tuples, since the size of a stream is not known; with a
  fast disk the paper leaves it out too (section 6.1)

Memory: the tuples in memory, in phase 1 with their hash chains; two blocks; and 80 bytes for each partition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.joins.errors import JoinInputError
from headrace.joins.streams.base.block_join import join_memory, whole_nbytes
from headrace.joins.streams.base.blocks import held
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.spool import spool_partitions
from headrace.joins.streams.hashing.estimates import Coverage, Estimate, Sample
from headrace.joins.streams.hashing.partitions import FlushingHash
from headrace.joins.streams.tuples import _index_kernels as kernels

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.joins.streams.base.block_join import Given
    from headrace.joins.streams.base.operator import Phase
    from headrace.joins.streams.base.pairs import Pairing
    from headrace.joins.streams.tuples._index_kernels import Meetings
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["PRJoin"]

_TWO = 2
_FEWEST_PARTITIONS = 16
_PARTITION_NBYTES = 80
_CHUNK = 1 << 14
_EXPANSIONS = 0.01, 1000
_AGGREGATES = ("count", "sum", "mean")


class PRJoin(StreamsJoin["PRJoinAlgorithm"]):
    """Partitioned expanding ripple join of two streams.

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
        Number of partitions (the paper's n), a power of 2 from 2 to 64; by default 16, or more in a large memory.
    expansion
        By which part of its size a partition grows before it is joined again (the paper's gamma), from 0.01 to 1000.
        With a greater one less is read, and results come later.
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
    After a quarter of two inputs in random order, the sum over the complete join is estimated:

    >>> import numpy as np, pyarrow as pa
    >>> rng = np.random.default_rng(7)
    >>> keys, paid = rng.integers(0, 500, (2, 8000)), rng.random(8000)
    >>> a = pa.record_batch({"id": np.arange(8000), "x": keys[0]})
    >>> b = pa.record_batch({"no": np.arange(8000), "x": keys[1], "paid": paid})
    >>> with PRJoin({"a": a.schema, "b": b.schema}, on="x", memory="16MiB") as join:
    ...     early = [*join.push(a.slice(0, 2000), side="a"), *join.push(b.slice(0, 2000), side="b")]
    ...     table, totals = pa.Table.from_batches(early), {"a": 8000, "b": 8000}
    ...     estimate = join.estimate(table, "sum", "paid", ids=("id", "no"), totals=totals)
    ...     late = [*join.push(a.slice(2000), side="a"), *join.push(b.slice(2000), side="b"), *join.finish()]
    >>> print(f"{estimate.value:.0f} +- {estimate.margin:.0f}")
    63163 +- 2216
    >>> exact = sum(batch["paid"].to_numpy().sum() for batch in early + late)
    >>> bool(estimate.low < exact < estimate.high)
    True
    """

    def __init__(
        self,
        inputs: Mapping[str, pa.Schema],
        on: Conditions,
        how: str = "inner",
        memory: int | str = "64MiB",
        *,
        spill: str | os.PathLike[str] | None = None,
        partitions: int | None = None,
        expansion: float = 1.0,
        wait: float | str = WAIT_THRESHOLD,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, wait=wait, spill=spill, clock=clock, backend=backend
        )
        least, most = _EXPANSIONS
        if isinstance(expansion, bool) or not isinstance(expansion, (int, float)) or not least <= expansion <= most:
            raise JoinInputError(f"`expansion` must be a number from {least} to {most}, not {expansion!r}")
        if partitions is None:
            partitions = max(_FEWEST_PARTITIONS, spool_partitions(parameters.memory))
        super().__init__(PRJoinAlgorithm(parameters, partitions, expansion))

    @property
    def coverage(self) -> Coverage:
        """Tuples that the results so far cover.

        Raises
        ------
        JoinInputError
            If an output was consumed in part: some of the results that it covers are still to come.
        ClosedError
            After `close`.
        """
        return self._settled().coverage

    def _settled(self) -> PRJoinAlgorithm:
        algorithm = self.algorithm
        if algorithm.giving:
            raise JoinInputError(
                "the last output was consumed in part, so its results are not a sample yet; consume the rest of it"
            )
        return algorithm

    def estimate(
        self,
        results: pa.Table,
        aggregate: str = "count",
        value: str | None = None,
        *,
        ids: tuple[str, str],
        totals: Mapping[str, int] | None = None,
        confidence: float = 0.95,
    ) -> Estimate:
        """Return an estimate of an aggregate over the complete join from the results so far, with its interval.

        The interval contains the true value with the given probability if both inputs arrive in random order,
        independently of each other, and if there are enough results for sums of their values to be distributed
        normally: some hundreds, more if few of them, or few tuples of an input, have most of the sum. If an input is
        sorted by anything that the value or the number of matches depends on, the interval means nothing.

        The memory that this takes belongs to the caller: some numbers for each result.

        Parameters
        ----------
        results
            All results so far, or those of them that a filter selects. Columns that are not needed may be left out,
            but not those of the first input that its keys are made of.
        aggregate
            ``"count"``; ``"sum"`` or ``"mean"`` of a column, without its nulls.
        value
            Column of numbers, for sum and mean.
        ids
            Column of the results whose values identify the tuple of the first input, and one for the second.
        totals
            Number of tuples that each input will have had at its end, by name. Without it, the estimate is that of the
            join of the tuples that have arrived so far.
        confidence
            Probability, greater than 0 and less than 1.

        Raises
        ------
        JoinInputError
            If an argument cannot be used, if the results are no sample yet, or as for `coverage`.
        ClosedError
            After `close`.
        """
        algorithm = self._settled()
        _check_estimate(results, aggregate, value, confidence, algorithm.counters.rows_out)
        counted = np.ones(len(results), dtype=np.bool_)
        values = np.ones(len(results), dtype=np.float64)
        if value is not None:
            values, counted = _numbers(results, value)
        tuples = self._tuples_of(results, ids, 0), self._tuples_of(results, ids, 1)
        sample = Sample(algorithm.coverage, self._totals(totals), algorithm.partitions_of_results(results), tuples)
        if aggregate == "mean":
            return sample.mean(values, counted, confidence)
        return sample.sum(values, confidence)

    def _tuples_of(self, results: pa.Table, ids: tuple[str, str], side: int) -> NDArray[np.int64]:
        """Return a number for the tuple of an input that each result has."""
        own = len(self.algorithm.graph.schemas[0])
        others = self.schema.names[own:] if side == 0 else self.schema.names[:own]
        if ids[side] in others:
            first, second = self.sides
            raise JoinInputError(
                f"`ids` must be a column of {first!r} and one of {second!r}, but {ids[side]!r} is one of "
                f"{self.sides[1 - side]!r}"
            )
        return _codes(results, ids[side])

    def _totals(self, totals: Mapping[str, int] | None) -> NDArray[np.int64]:
        rows = self.algorithm.coverage.rows
        if totals is None:
            return rows
        if set(totals) != set(self.sides):
            raise JoinInputError(f"`totals` must name {' and '.join(map(repr, self.sides))}, not {list(totals)}")
        for name, arrived in zip(self.sides, rows.tolist(), strict=True):
            if not isinstance(totals[name], int) or totals[name] < arrived:
                raise JoinInputError(
                    f"`totals` of {name!r} must be a whole number, at least the {arrived} tuples that have arrived, "
                    f"not {totals[name]!r}"
                )
        return np.array([totals[name] for name in self.sides], dtype=np.int64)


def _check_estimate(results: Any, aggregate: str, value: str | None, confidence: Any, given: int) -> None:
    """Raise an error if an argument of `PRJoin.estimate` cannot be used by a join that has given so many results."""
    if aggregate not in _AGGREGATES:
        raise JoinInputError(f"`aggregate` must be {' or '.join(map(repr, _AGGREGATES))}, not {aggregate!r}")
    if (value is None) != (aggregate == "count"):
        raise JoinInputError(f"`value` is {value!r}; name a column for sum and mean, and none for count")
    if not isinstance(results, pa.Table):
        raise JoinInputError(f"`results` must be a table, not {type(results).__name__}; use pa.Table.from_batches")
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise JoinInputError(f"`confidence` must be greater than 0 and less than 1, not {confidence!r}")
    if len(results) > given:
        raise JoinInputError(f"there are {len(results)} results, but this join has given {given}; pass its own")


def _column(results: pa.Table, name: str) -> pa.ChunkedArray:
    if results.column_names.count(name) != 1:
        raise JoinInputError(f"the results have no single column {name!r}, only {', '.join(results.column_names)}")
    return results.column(name)


def _numbers(results: pa.Table, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the values of a column, 0 for nulls, and which are no nulls."""
    column = _column(results, name)
    numeric = pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
    if not numeric:
        raise JoinInputError(f"column {name!r} has type {column.type}, which is no number; cast it, or name another")
    known = column.is_valid().to_numpy()
    return pc.fill_null(column.cast(pa.float64(), safe=False), 0.0).to_numpy(), known


def _codes(results: pa.Table, name: str) -> NDArray[np.int64]:
    """Return a number for each value of a column, the same for equal values."""
    column = _column(results, name)
    if column.null_count:
        raise JoinInputError(f"column {name!r} has nulls, so it does not identify tuples; name another in `ids`")
    codes = column.combine_chunks().dictionary_encode()
    if isinstance(codes, pa.ChunkedArray):
        codes = codes.unify_dictionaries().combine_chunks()
    found: NDArray[np.int64] = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


class PRJoinAlgorithm(FlushingHash):
    """Algorithm of `PRJoin`.

    Attributes
    ----------
    arrived, covered, ripples
        See `Coverage`.
    giving
        Number of outputs that were consumed in part.
    """

    def __init__(self, parameters: StreamsParameters, partitions: int, expansion: float) -> None:
        super().__init__(parameters, "PRJoin", partitions)
        self.budget.charge("statistics", _PARTITION_NBYTES * partitions)
        self.stores = self.pairing.stores(self.layouts, self.budget)
        self.require(self.least_nbytes, "tuples")
        self.arrived = np.zeros_like(self.counts)
        self.covered = np.zeros_like(self.counts)
        self.ripples = np.zeros(partitions, dtype=np.int64)
        self.giving = 0
        self._keyless = np.zeros(_TWO, dtype=np.int64)
        self._growth = 1 + expansion
        self._rippling = False  # whether memory has been full
        self._marks = np.zeros(partitions, dtype=np.int64)  # tuples with lesser arrival stamps are covered
        self._due = np.zeros(partitions, dtype=np.float64)  # size at which each partition is joined

    @property
    def coverage(self) -> Coverage:
        """Tuples that the results so far cover."""
        rows = self._keyless + self.arrived.sum(axis=1)
        return Coverage(rows, self.arrived.copy(), self.covered.copy(), self.ripples.copy())

    def partitions_of_results(self, results: pa.Table) -> NDArray[np.int64]:
        """Return the partition of each result, from the keys of the first input."""
        schema, spec = self.graph.schemas[0], self.graph.keys[0][self.pairing.driver.key_of(0)]
        found = [np.zeros(0, dtype=np.int64)]
        for name in spec.names:
            if _column(results, name).type != schema.field(name).type:
                raise JoinInputError(f"column {name!r} of the results must have type {schema.field(name).type}")
        for batch in results.select(spec.names).to_batches(max_chunksize=_CHUNK):
            columns = [
                batch.column(field.name) if at in spec.columns else pa.nulls(len(batch), field.type)
                for at, field in enumerate(schema)
            ]
            rows, _ = self.encoders[0].encode(pa.RecordBatch.from_arrays(columns, names=schema.names))
            found.append(self.partition_of(0, rows, 0, len(rows)))
        return np.concatenate(found)

    def counted(self, results: Iterator[pa.RecordBatch], phase: Phase) -> Iterator[pa.RecordBatch]:
        """Yield the results of a task and count them."""
        self.giving += 1
        yield from super().counted(results, phase)
        self.giving -= 1

    # Phases 1 and 2: arrivals

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        yield from super()._arrive(side, rows)
        if self._rippling:
            for partition in np.flatnonzero(self.arrived.sum(axis=0) >= self._due):
                yield from self._join(int(partition))

    def join_in_memory(
        self, pairing: Pairing, side: int, rows: Rows, index: NDArray[np.int64]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the results of arriving tuples in phase 1; none in phase 2, in which partitions are joined."""
        return iter(()) if self._rippling else super().join_in_memory(pairing, side, rows, index)

    def _drop_keyless(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        self._keyless[side] += len(index)
        yield from super()._drop_keyless(side, rows, index)

    def _came(self, side: int, partition: NDArray[np.int64]) -> None:
        new = np.bincount(partition, minlength=self.partitions)
        self.arrived[side] += new
        if not self._rippling:
            self.covered[side] += new

    def _make_room(self) -> None:
        """Flush the larger input of the partition with most tuples in memory."""
        if not self._rippling:
            self._begin_ripples()
        partition = int(np.argmax(self.counts.sum(axis=0)))
        self.flush(int(np.argmax(self.counts[:, partition])), partition)

    def _begin_ripples(self) -> None:
        """Begin phase 2: all tuples in memory have met, and none is found by its key any more."""
        self._rippling = True
        self._marks[:] = self.next_stamp()
        turns = np.arange(self.partitions) / self.partitions
        self._due = np.maximum(self.covered.sum(axis=0), 1) * self._growth ** (1 + turns)
        for store in self.stores:
            store.drop_indexes()

    def _spilled(self, side: int) -> NDArray[np.bool_]:
        """Return which partitions of an input may have pairs that have not met: in phase 2, all of them."""
        del side
        return np.full(self.partitions, self._rippling)

    # Joins of a partition

    @property
    def _uncovered(self) -> NDArray[np.int64]:
        """Pairs of tuples in each partition that have not met."""
        uncovered: NDArray[np.int64] = self.arrived.prod(axis=0) - self.covered.prod(axis=0)
        return uncovered

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        uncovered = self._uncovered
        partition = int(np.argmax(uncovered / np.maximum(self.arrived.sum(axis=0), 1)))
        return self._join(partition) if uncovered[partition] else None

    def _join(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Join all tuples of a partition (the paper's Join), and note that they have met."""
        if self._uncovered[partition]:
            for side in self.sides:
                self.flush(side, partition)
            wanted = whole_nbytes(*self.sources(partition))
            while self.budget.available < wanted and self.counts.any():
                self._make_room()
            with held(self.budget, nbytes := min(wanted, self.budget.available)):
                yield from self._join_partition(partition, join_memory(nbytes), None)
        self._cover(partition)
        self._marks[partition] = self.next_stamp()
        while self._due[partition] <= self.arrived[:, partition].sum():
            self._due[partition] *= self._growth

    def _cover(self, partition: int) -> None:
        """Note that all tuples of a partition have met."""
        self.ripples[partition] += bool((self.covered[:, partition] < self.arrived[:, partition]).any())
        self.covered[:, partition] = self.arrived[:, partition]

    def _join_partition(
        self, partition: int, memory: NDArray[np.uint8], given: Given | None
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the results of a partition, except for pairs of tuples that had arrived when it was joined before."""
        del given
        mark = self._marks[partition]

        def met(rows: Rows, positions: NDArray[np.int64], outer: Rows, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
            both: NDArray[np.bool_] = (rows.arrivals[positions] < mark) & (outer.arrivals[slots] < mark)
            return both

        if self._uncovered[partition]:
            yield from super()._join_partition(partition, memory, met)

    def _completed(self, partition: int) -> None:
        super()._completed(partition)
        self._cover(partition)

    def meetings(self, inner: int) -> Meetings:
        """Return that nothing in the tuples themselves tells which of them met."""
        del inner
        return kernels.Meetings(kernels.NEVER_MET, 0, 0)
