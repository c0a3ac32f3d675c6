"""`PunctuatedJoin`: the metadata-aware MJoin of streams with punctuations (Ding, Rundensteiner and Heineman, 2003).

See the docstring of `headrace.joins.streams.punctuated` for the paper's terms, and what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.joins.errors import FinishedError, JoinInputError
from headrace.joins.handle import check_function, check_number, check_time
from headrace.joins.streams.base.operator import WAIT_THRESHOLD, StreamsAlgorithm, StreamsJoin, StreamsParameters
from headrace.joins.streams.base.stats import StreamsStats
from headrace.joins.streams.punctuated.collection import Punctuation, PunctuationCollection
from headrace.joins.streams.punctuated.errors import PunctuationError
from headrace.joins.streams.punctuated.patterns import BoundPattern, Pattern
from headrace.joins.streams.punctuated.ranges import KeyColumns, KeyCover, PunctuatedRange, passing
from headrace.joins.streams.punctuated.state import KEY, HashState
from headrace.joins.streams.punctuated.waiting import WaitingPool
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.rows import gather_columns
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.units import format_size

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.protocol import Output
    from headrace.joins.streams.tuples.conditions import Conditions
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.file import StorageBackend

__all__ = ["PunctuatedAlgorithm", "PunctuatedJoin", "PunctuatedStats", "Scheduling"]

PURGE_EVERY = 100
"""Punctuations after which the state is purged (section 6.2, experiment 2)."""

TupleOrder = Literal["sequential", "value"]
_TWO = 2
_POOL_SHARE = 16
_GAUGE = {"gauge": True}


@dataclass(frozen=True, slots=True)
class Scheduling:
    """In which order waiting tuples are joined (sections 4.1 and 4.2).

    Parameters
    ----------
    quota
        Most tuples that are retrieved from one input in sequence (the paper's retrieval quota), for all inputs or by
        name. Tuples of the inputs with lower priority wait until so many of them have arrived, or no more come.
    priority
        Names of inputs, the one that is preferred first; the others follow in their order. By default the input with
        unique keys is preferred.
    tuples
        ``"value"``: when a punctuation arrives, the waiting tuples that it is about are joined first, and the others go
        on waiting. ``"sequential"``: all tuples of its input that arrived before it are joined first.
    """

    quota: int | Mapping[str, int]
    priority: tuple[str, ...] = ()
    tuples: TupleOrder = "value"


@dataclass(frozen=True, slots=True)
class PunctuatedStats(StreamsStats):
    """Statistics of a punctuated join beyond those of every join of streams.

    Attributes
    ----------
    punctuations_in, punctuations_out
        Punctuations that arrived and that were propagated.
    rows_passed
        Tuples that were joined and never kept, since nothing can match them any more (on-the-fly dropping).
    rows_purged, rows_purged_on_disk
        Tuples that were kept, in memory or on disk, and dropped before the end of the inputs.
    purges, rows_scanned
        Purges of the state in memory, and tuples that they looked at.
    partitions_settled
        Times that all tuples of a partition on disk were joined.
    rows_violating
        Tuples that arrived after a punctuation that excludes them.
    rows_waiting, rows_on_disk
        Tuples that wait for their turn, and on disk, now (gauges).
    """

    punctuations_in: int = 0
    punctuations_out: int = 0
    rows_passed: int = 0
    rows_purged: int = 0
    rows_purged_on_disk: int = 0
    purges: int = 0
    rows_scanned: int = 0
    partitions_settled: int = 0
    rows_violating: int = 0
    rows_waiting: int = field(default=0, metadata=_GAUGE)
    rows_on_disk: int = field(default=0, metadata=_GAUGE)


@dataclass(slots=True)
class _Counts:
    """Mutable twin of `PunctuatedStats`. The names mean the same."""

    punctuations_in: int = 0
    punctuations_out: int = 0
    rows_passed: int = 0
    rows_purged: int = 0
    rows_purged_on_disk: int = 0
    purges: int = 0
    rows_scanned: int = 0
    partitions_settled: int = 0
    rows_violating: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of `PunctuatedJoin` beyond those of every join of streams."""

    one: str | None
    clustered: Sequence[str]
    purge_every: int
    scheduling: Scheduling | None
    partitions: int
    on_violation: Callable[[str, pa.RecordBatch], object] | None


class PunctuatedJoin(StreamsJoin["PunctuatedAlgorithm"]):
    """Join of two or more streams on one key that drops what punctuations make useless.

    Parameters
    ----------
    inputs
        Schema of each input, by name.
    on
        Equalities that give all inputs one key; see `headrace.joins.streams.Conditions`.
    how
        ``"inner"``.
    memory
        Limit on everything that the operator holds, as bytes or as text such as ``"64MiB"``. Punctuations count too.
    one
        Input, of two, that has each key at most once (the paper's 1-N join). A tuple of the other input is dropped once
        it has joined. A repeated key raises `UniqueKeyError` while both tuples are in memory, or both on disk. One that
        comes after the first tuple was purged cannot be noticed, so promise it only if it is true.
    clustered
        Inputs whose tuples with equal keys arrive in sequence (the paper's 1-NC join): the end of a cluster counts as a
        punctuation. Their key must fit into one word: a number, a date, or a time.
    purge_every
        Number of punctuations after which the state is purged. 1 is immediate purging, which holds least memory
        (rule 2); more is batch purging, which gives results faster (rule 1).
    scheduling
        Order in which tuples are joined; by default that of their arrival.
    on_violation
        Called with the name of an input and a batch of its tuples that arrived after a punctuation that excludes them,
        or after their cluster. They are not joined. By default such tuples raise `PunctuationError`.
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
        If a parameter cannot be used.
    StreamSchemaError
        If an input lacks a column, or has it twice.
    KeyInputError
        If two columns of a condition have types that never match.
    MemoryBudgetError
        If the memory is less than the operator needs; the message says how much that is.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from headrace.joins.streams.punctuated import punctuation_of
    >>> news, reads = pa.record_batch({"sno": [79]}), pa.record_batch({"sno": [79], "ip": ["64.58.76.224"]})
    >>> join = PunctuatedJoin({"n": news.schema, "r": reads.schema}, on="sno", one="n", purge_every=1)
    >>> join.push(news, side="n").drain()
    0
    >>> join.push(reads, side="r").to_table().column_names
    ['sno', 'sno_right', 'ip']
    >>> [punctuation_of(batch) for batch in join.punctuate("r", Pattern({"sno": 79}))]
    [Pattern({'sno_right': OneOf(values=(79,))})]
    >>> join.stats.rows_in_memory
    0
    """

    def __init__(
        self,
        inputs: Mapping[str, pa.Schema],
        on: Conditions,
        how: str = "inner",
        memory: int | str = "64MiB",
        *,
        one: str | None = None,
        clustered: Sequence[str] = (),
        purge_every: int = PURGE_EVERY,
        scheduling: Scheduling | None = None,
        on_violation: Callable[[str, pa.RecordBatch], object] | None = None,
        spill: str | os.PathLike[str] | None = None,
        partitions: int = 16,
        wait: float | str = WAIT_THRESHOLD,
        clock: Callable[[], float] | None = None,
        backend: Callable[[Path], StorageBackend] | None = None,
    ) -> None:
        parameters = StreamsParameters.check(
            inputs, on, how, memory, hows=("inner",), wait=wait, spill=spill, clock=clock, backend=backend
        )
        options = Options(one, clustered, purge_every, scheduling, partitions, on_violation)
        super().__init__(PunctuatedAlgorithm(parameters, options))

    def punctuate(self, side: str, pattern: Pattern | Mapping[str, object], *, at: float | None = None) -> Output:
        """Take a punctuation of an input and return the results that are ready.

        A propagated punctuation is a batch without rows among the results: no result after it matches it. See
        `headrace.joins.streams.punctuated.punctuation_of`.

        Parameters
        ----------
        side
            Name of the input.
        pattern
            No tuple that matches it arrives any more.
        at
            Time of arrival in seconds of the operator's clock; by default now.

        Raises
        ------
        StreamSchemaError
            If the input lacks a column of the pattern.
        JoinInputError
            If the side, the time, or a value of the pattern is not valid.
        FinishedError
            After `finish`, or after `end` of this input.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        position = algorithm.graph.side(side)
        check_time(at)
        if not isinstance(pattern, Mapping):
            raise JoinInputError(f"a punctuation is a Pattern or a mapping of columns to values, not {pattern!r}")
        chosen = pattern if isinstance(pattern, Pattern) else Pattern(pattern)
        bound = chosen.bind(algorithm.graph.schemas[position], f"input {side!r}")
        return self._work.start(algorithm.punctuate(position, bound, at))

    @property
    def stats(self) -> PunctuatedStats:
        """Statistics so far. They stay readable after `close`."""
        stats = super().stats
        assert isinstance(stats, PunctuatedStats)
        return stats


class PunctuatedAlgorithm(StreamsAlgorithm):
    """Algorithm of `PunctuatedJoin`."""

    def __init__(self, parameters: StreamsParameters, options: Options) -> None:
        super().__init__(parameters)
        self._check_graph()
        self.purge_every = check_number("purge_every", options.purge_every, 1)
        if options.on_violation is not None:
            check_function("on_violation", options.on_violation)
        self._on_violation = options.on_violation
        self._one = self._check_one(options.one)
        self._key = KeyColumns(self.graph.schemas, [keys[KEY] for keys in self.graph.keys])
        self._clustered = self._check_clustered(options.clustered)
        self._open_clusters: dict[int, int] = {}  # key word of the cluster that an input is in
        self._counts = _Counts()
        self.state = HashState(self, options.partitions)
        self.ranges = [PunctuatedRange(self._key, self.budget) for _ in self.sides]
        self._partial: list[list[BoundPattern]] = [[] for _ in self.sides]
        self.pending = [PunctuationCollection(options.partitions) for _ in self.sides]
        self.unpurged = 0
        self._may_propagate = False  # tuples were dropped since the last propagation
        self._settled_at = np.zeros(options.partitions, dtype=np.int64)  # purging indications when it was settled
        self._indications = 0
        self.waiting = None if options.scheduling is None else self._make_pool(options.scheduling)
        self._value_oriented = options.scheduling is not None and options.scheduling.tuples == "value"

    # Parameters

    def _check_graph(self) -> None:
        if self.graph.banded or any(len(keys) != 1 for keys in self.graph.keys):
            raise JoinInputError(
                "a punctuated join has one key that all inputs share; give equalities of the same columns for each "
                "input, with one type, or use another operator"
            )

    def _check_one(self, one: str | None) -> int | None:
        if one is None:
            return None
        if len(self.sides) != _TWO:
            raise JoinInputError(f"`one` is for joins of two inputs, not {len(self.sides)}; leave it out")
        return self.graph.side(one)

    def _check_clustered(self, names: Sequence[str]) -> frozenset[int]:
        sides = frozenset(self._named("clustered", names))
        if sides and self._key.wide:
            raise JoinInputError(
                "a clustered input must have a key of at most 8 bytes, such as a number or a time; leave it out"
            )
        return sides

    def _named(self, parameter: str, names: Sequence[str]) -> list[int]:
        """Return the positions of inputs that a parameter names."""
        if isinstance(names, str | bytes) or not isinstance(names, Collection):
            raise JoinInputError(f"`{parameter}` must be a list of names of inputs, not {names!r}")
        return [self.graph.side(name) for name in names]

    def _make_pool(self, scheduling: Scheduling) -> WaitingPool:
        if not isinstance(scheduling, Scheduling) or scheduling.tuples not in ("value", "sequential"):
            raise JoinInputError(f"`scheduling` must be a Scheduling of 'value' or 'sequential' tuples: {scheduling!r}")
        preferred = self._named("priority", scheduling.priority)
        preferred += [] if self._one is None else [self._one]
        order = list(dict.fromkeys([*preferred, *self.sides]))
        given = scheduling.quota
        by_name = given if isinstance(given, Mapping) else dict.fromkeys(self.graph.names, given)
        if set(by_name) != set(self.graph.names):
            raise JoinInputError(f"`quota` must have a number for each of {self.graph.names}, not {given!r}")
        quota = [check_number("quota", by_name[name], 1) for name in self.graph.names]
        return WaitingPool(self.budget, self.budget.limit // _POOL_SHARE, order, quota, self._clustered, KEY)

    # Calls

    def punctuate(self, side: int, bound: BoundPattern, at: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of taking a punctuation."""
        if self.has_ended(side):
            raise FinishedError(f"input {self.graph.names[side]!r} has ended; its punctuations come before `end`")
        self._latest = max(self._latest, self.time.reach(at))
        return self.counted(self._take_punctuation(side, bound), "arriving")

    @property
    def rows_in_memory(self) -> int:
        """Number of tuples in the state in memory."""
        return self.state.rows_in_memory

    @property
    def stats(self) -> PunctuatedStats:
        """Statistics so far."""
        base = super().stats
        return PunctuatedStats(
            **{item.name: getattr(base, item.name) for item in fields(StreamsStats)},
            **{item.name: getattr(self._counts, item.name) for item in fields(_Counts)},
            rows_waiting=0 if self.waiting is None else len(self.waiting),
            rows_on_disk=int(self.state.spilled.sum()),
        )

    # Arrival

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        rows = self._admitted(side, rows)
        if not len(rows):
            return
        if self.waiting is None:
            yield from self._process(side, rows)
            return
        if not self._may_wait(rows):
            yield from self._take_turns(blocked=True)
            if not self._may_wait(rows):
                yield from self._process(side, rows)
                return
        self.waiting.add(side, rows.take(np.arange(len(rows), dtype=np.int64)))
        yield from self._take_turns(blocked=False)

    def _admitted(self, side: int, rows: Rows) -> Rows:
        """Return the tuples that no punctuation of their input excludes; report the others."""
        excluded = self.ranges[side].covers(side, rows, KEY)
        for bound in self._partial[side]:
            excluded |= passing(rows, bound.tests)
        return self._without_violations(side, rows, excluded, "a punctuation that excludes it")

    def _without_violations(self, side: int, rows: Rows, excluded: NDArray[np.bool_], after: str) -> Rows:
        if not excluded.any():
            return rows
        name, index = self.graph.names[side], np.flatnonzero(excluded)
        if self._on_violation is None:
            raise PunctuationError(
                f"a tuple of {name!r} arrived after {after}: {self._shown(side, rows, int(index[0]))}; what it matches "
                "may be gone, so correct the punctuations and start over, or take such tuples with `on_violation`"
            )
        self._counts.rows_violating += len(index)
        for start in range(0, len(index), self.pair_limit):
            self._on_violation(name, rows.take(index[start : start + self.pair_limit]).batch())
        return rows.take(np.flatnonzero(~excluded))

    def _shown(self, side: int, rows: Rows, at: int) -> str:
        columns = gather_columns(rows, np.array([at], dtype=np.int64))
        return ", ".join(f"{name} = {column[0]}" for name, column in zip(self.graph.schemas[side].names, columns))  # noqa: B905 - a column for each name

    def _may_wait(self, rows: Rows) -> bool:
        """Whether there is memory for more waiting tuples."""
        assert self.waiting is not None
        return self.waiting.nbytes + rows.nbytes <= self.waiting.limit and rows.nbytes <= self.state.spare

    def _take_turns(self, *, blocked: bool) -> Iterator[pa.RecordBatch]:
        """Join waiting tuples, as the priorities and quotas of the inputs say (section 5.3)."""
        assert self.waiting is not None
        side = self.waiting.turn(blocked=blocked)
        while side is not None:
            for rows in self.waiting.retrieve(side):
                yield from self._process(side, rows)
            side = self.waiting.turn(blocked=blocked)

    def _process(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Join retrieved tuples with the state in memory, and keep those that may match later."""
        closed = np.zeros(0, dtype=np.uint64)
        if side in self._clustered:
            if self.waiting is not None:  # clusters may have ended since these tuples arrived
                rows = self._admitted(side, rows)
            if len(rows):
                rows, closed = self._in_clusters(side, rows)
        self.stamp_arrivals(rows)
        if side == self._one:
            self._check_unique(side, rows)
        leaving = self._finished(side, rows)
        if leaving.any():
            yield from self._join(side, rows, np.flatnonzero(leaving))
            self._counts.rows_passed += int(leaving.sum())
            rows = rows.take(np.flatnonzero(~leaving))
        yield from self._join_and_keep(side, rows)
        if self.purge_every == 1 and self._may_propagate:
            yield from self._propagate()
        if len(closed):
            yield from self._note_keys(side, KeyCover(np.stack([closed, closed], axis=1)), len(closed))

    def _join_and_keep(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        start, store = 0, self.state.stores[side]
        while start < len(rows):
            fits = store.fitting(rows, start)
            if fits == 0:
                yield from self._make_room(side)
                rows, start = rows.take(np.arange(start, len(rows))), 0
                self.stamp_arrivals(rows)
                continue
            index = np.arange(start, start + fits, dtype=np.int64)
            joined = yield from self._join(side, rows, index)
            if self._one is not None and side != self._one:
                self._counts.rows_passed += int(joined[index].sum())
                index = index[~joined[index]]
            self.state.insert(side, rows, index)
            start += fits

    def _join(
        self, side: int, rows: Rows, index: NDArray[np.int64]
    ) -> Generator[pa.RecordBatch, None, NDArray[np.bool_]]:
        """Yield the results of tuples with the state in memory; return which of `rows` have one.

        In a 1-N join, tuples of the input with many are dropped once they have joined (step 2 in section 5.3).
        """
        others = {other: store for other, store in enumerate(self.state.stores) if other != side}
        joined = np.zeros(len(rows), dtype=np.bool_)
        dropped = None if side != self._one else np.zeros(len(self.state.stores[1 - side]), dtype=np.bool_)
        for sources in self.state.combinations(side, rows, index, others):
            joined[sources[side][1]] = True
            if dropped is not None:
                dropped[sources[1 - side][1]] = True
            yield from self.results.batches(sources)
        if dropped is not None and dropped.any():
            self._drop_joined(1 - side, dropped)
        return joined

    def _drop_joined(self, many: int, dropped: NDArray[np.bool_]) -> None:
        """Drop tuples in memory that have joined with their only match; punctuations may have waited for that."""
        slots = np.flatnonzero(dropped)
        self.state.drop(many, slots)
        self._counts.rows_purged += len(slots)
        self._may_propagate |= len(self.pending[many]) > 0

    def _check_unique(self, side: int, rows: Rows) -> None:
        """Refuse tuples whose key occurred before, as far as it is in memory."""
        self.state.check_no_other(side, rows, self.state.stores[side])
        fields = rows.layout.keys[KEY]
        order = np.lexsort([rows.words(at) for at in (fields.digest, fields.word) if at >= 0])
        same = _same_keys(rows, order[:-1], order[1:])
        if same.any():
            raise self.state.not_unique(side, rows, int(order[int(np.argmax(same)) + 1]))

    def _in_clusters(self, side: int, rows: Rows) -> tuple[Rows, NDArray[np.uint64]]:
        """Return tuples of a clustered input whose cluster is not over, and the keys of the clusters that they end."""
        words = np.ascontiguousarray(rows.key_words(KEY))
        starts = np.flatnonzero(np.append(True, words[1:] != words[:-1]))
        clusters = words[starts]
        before = self._open_clusters.get(side)
        opened = clusters if before is None else np.append(np.uint64(before), clusters)
        _, first = np.unique(opened, return_index=True)
        again = np.ones(len(opened), dtype=np.bool_)
        again[first] = False
        if before is not None:
            again = again[1:]
            again[0] &= int(clusters[0]) != before
        excluded = np.repeat(again, np.diff(np.append(starts, len(words))))
        kept = clusters[~again]
        rows = self._without_violations(side, rows, excluded, "its cluster was over")
        if not len(kept):
            return rows, kept
        self._open_clusters[side] = int(kept[-1])
        ended = kept if before is None or int(kept[0]) == before else np.append(np.uint64(before), kept)
        return rows, ended[:-1]

    # Punctuations

    def _take_punctuation(self, side: int, bound: BoundPattern) -> Iterator[pa.RecordBatch]:
        cover = self._key.covered_by(side, bound)
        yield from self._process_before(side, cover)
        self._counts.punctuations_in += 1
        punctuation = Punctuation(side, bound, cover, self._counts.punctuations_in)
        yield from self._reserve(punctuation.nbytes)
        self.budget.charge("statistics", punctuation.nbytes)
        self.pending[side].add(punctuation)
        if cover is not None:
            yield from self._note_keys(side, cover, 1)
            return
        yield from self._reserve(bound.nbytes)
        self.budget.charge("statistics", bound.nbytes)
        self._partial[side].append(bound)
        yield from self._count_unpurged(1)

    def _process_before(self, side: int, cover: KeyCover | None) -> Iterator[pa.RecordBatch]:
        """Join the waiting tuples whose turn comes before that of a punctuation (section 4.2)."""
        if self.waiting is None:
            return
        if cover is None or not self._value_oriented or side in self._clustered:
            for rows in self.waiting.drain(side):
                yield from self._process(side, rows)
        if cover is None or not self._value_oriented:
            return
        for other in self.sides:
            if other in self._clustered:
                continue  # its tuples stay in sequence
            for rows in self.waiting.draw(other, lambda rows, at=other: cover.covers(at, rows, KEY)):  # type: ignore[misc]
                yield from self._process(other, rows)

    def _note_keys(self, side: int, cover: KeyCover, indications: int) -> Iterator[pa.RecordBatch]:
        """Add keys to the punctuated range of an input, and purge if it is time."""
        yield from self._reserve(self.ranges[side].growth(cover))
        self.ranges[side].add(cover)
        self._indications += 1
        yield from self._count_unpurged(indications)

    def _count_unpurged(self, more: int) -> Iterator[pa.RecordBatch]:
        self.unpurged += more
        if self.unpurged >= self.purge_every:
            yield from self._purge()

    def _reserve(self, nbytes: int) -> Iterator[pa.RecordBatch]:
        """Make room for what is not a tuple."""
        while self.state.spare < nbytes:
            if self.rows_in_memory == 0:
                raise MemoryBudgetError.of(
                    f"the punctuations of {self.graph.names} take what a memory of {format_size(self.budget.limit)} "
                    "leaves",
                    otherwise="punctuate ranges of keys that touch, which are merged",
                )
            yield from self._free_memory()

    # Purging

    def _finished(self, side: int, rows: Rows) -> NDArray[np.bool_]:
        """Return which tuples, joined with the state in memory, nothing can match any more (section 5.1)."""
        finished = self._unmatchable(side, rows)
        if finished.any():
            finished &= ~self.state.on_disk(side)[self.state.partition_of(rows)]
        return finished

    def _unmatchable(self, side: int, rows: Rows) -> NDArray[np.bool_]:
        """Return which tuples of an input match no tuple that arrives later."""
        finished = np.ones(len(rows), dtype=np.bool_)
        for other in self.sides:
            if other != side:
                finished &= self.ranges[other].covers(side, rows, KEY)
                if not finished.any():
                    break
        return finished

    def _purge(self) -> Iterator[pa.RecordBatch]:
        """Drop the tuples in memory that nothing can match any more, and propagate punctuations."""
        self.unpurged = 0
        self._counts.purges += 1
        for side in self.sides:
            if not all(covered for other, covered in enumerate(self.ranges) if other != side):
                continue
            rows = self.state.stores[side].rows
            self._counts.rows_scanned += len(rows)
            slots = np.flatnonzero(self._finished(side, rows))
            self._counts.rows_purged += len(slots)
            self.state.drop(side, slots)
        yield from self._propagate()

    def _make_room(self, side: int) -> Iterator[pa.RecordBatch]:
        """Free memory for arriving tuples."""
        if self.rows_in_memory == 0:
            raise self.no_room(side)
        yield from self._free_memory()

    def _free_memory(self) -> Iterator[pa.RecordBatch]:
        """Purge the state if there is something new to purge by; if that frees nothing, flush a partition."""
        before = self.rows_in_memory
        if self.unpurged:
            yield from self._purge()
        if self.rows_in_memory == before:
            self.state.flush_largest()

    def _propagate(self) -> Iterator[pa.RecordBatch]:
        """Yield the punctuations that no tuple of their input matches any more, wherever it is (section 4.2)."""
        self._may_propagate = False
        ready: list[Punctuation] = []
        for side, collection in enumerate(self.pending):
            rows = self.state.stores[side].rows
            ready += collection.take_ready(rows, self.state.spilled[side], self.state.flushes[side])
        yield from self._emit(ready)

    def _emit(self, ready: list[Punctuation]) -> Iterator[pa.RecordBatch]:
        for punctuation in sorted(ready, key=lambda one: one.number):
            self.budget.release("statistics", punctuation.nbytes)
            self._counts.punctuations_out += 1
            start = sum(len(schema) for schema in self.graph.schemas[: punctuation.side])
            yield punctuation.bound.batch(self.schema, self.schema.names[start:])

    # Reactive phase, ends, cleanup

    def _react(self) -> Iterator[pa.RecordBatch] | None:
        """Work while the inputs are blocked: the in-memory stage, purging, the memory-disk stage, settling.

        A propagation that is due is a part of purging.
        """
        if self.waiting is not None and len(self.waiting):
            return self._take_turns(blocked=True)
        if self.unpurged:
            return self._purge()
        if self._may_propagate:
            return self._propagate()
        chosen = self.state.best_pass()
        if chosen is not None:
            return self._pass_over(*chosen)
        worth = self.state.spilled.sum(axis=0) * (self._settled_at < self._indications)
        partition = int(np.argmax(worth))
        return self._settle(partition) if worth[partition] else None

    def _pass_over(self, side: int, partition: int) -> Iterator[pa.RecordBatch]:
        """Join a disk part with the tuples in memory (the memory-disk stage, section 5.2)."""
        many = None if self._one is None else 1 - self._one
        dropped = np.zeros(len(self.state.stores[many]) if many is not None else 0, dtype=np.bool_)
        for sources in self.state.pass_over(side, partition):
            if many is not None and side != many:
                dropped[sources[many][1]] = True
            yield from self.results.batches(sources)
        if many is not None and dropped.any():
            self._drop_joined(many, dropped)

    def _settle(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Join all tuples of a partition, and drop those on disk that nothing can match any more."""
        for side in self.sides:
            self.state.flush(side, partition)
        noted = 0 if self._one is None else int(self.state.spilled[1 - self._one, partition])
        noted = noted if noted <= self.state.spare else 0
        self.budget.charge("statistics", noted)
        try:
            for sources in self.state.settle(partition, self._one, note=noted > 0):
                yield from self.results.batches(sources)
            self._counts.partitions_settled += 1
            self._settled_at[partition] = self._indications
            for side in self.sides:
                self._purge_disk(side, partition, noted=noted > 0)
        finally:
            self.budget.release("statistics", noted)
        yield from self._propagate()

    def _purge_disk(self, side: int, partition: int, *, noted: bool) -> None:
        """Drop tuples of a settled partition, and note which punctuations no tuple that is left matches."""
        collection, at = self.pending[side], 0
        found = np.zeros(len(collection), dtype=np.bool_)

        def keep(rows: Rows) -> NDArray[np.bool_]:
            nonlocal at, found
            kept = ~self._unmatchable(side, rows)
            if noted and side != self._one:
                kept &= ~self.state.matched[at : at + len(rows)]
            at += len(rows)
            if len(collection):
                found |= collection.held(rows.take(np.flatnonzero(kept)))
            return kept

        self._counts.rows_purged_on_disk += self.state.rewrite(side, partition, keep)
        collection.verify(partition, found, int(self.state.flushes[side, partition]))

    def _ended(self, side: int) -> Iterator[pa.RecordBatch]:
        if self.waiting is not None:
            for rows in self.waiting.drain(side):
                yield from self._process(side, rows)
        self.ranges[side].close()
        self.budget.release("statistics", sum(bound.nbytes for bound in self._partial[side]))
        self._partial[side] = []
        self._indications += 1
        yield from self._purge()

    def _cleanup(self) -> Iterator[pa.RecordBatch]:
        """Join the tuples on disk (the cleanup stage, section 5.2). Everything in memory alone has joined."""
        spilled: list[int] = np.flatnonzero(self.state.spilled.any(axis=0)).tolist()
        for side in self.sides:
            for partition in spilled:
                self.state.flush(side, partition)
        for partition in spilled:
            for sources in self.state.settle(partition, self._one):
                yield from self.results.batches(sources)
            self._counts.partitions_settled += 1
        yield from self._emit([punctuation for collection in self.pending for punctuation in collection.take_all()])


def _same_keys(rows: Rows, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which pairs of tuples have one key."""
    same = np.ones(len(left), dtype=np.bool_)
    if len(left):
        keyed = rows.keyed(KEY)
        kernels.filter_pairs(keyed, left, keyed, right, False, np.uint64(0), 0.0, False, same)  # noqa: FBT003 - a kernel
    return same
