"""The SSIJ operator: pending phase, and when the other phases run.

Phases (the paper's section IV; `headrace.joins.ssij` names it)::

    push --> record tier: result at once
              |
              v
             input buffer --(input_threshold tuples, or a deadline)--> online phase
                                                                         |      |
                   pages cached: result at once  <-----------------------+      v
                                                                           stream buffer
                   result  <-- join phase <--(stream_threshold tuples, a deadline, no room, or waiting no longer pays)
                               reads the wanted pages by the cheapest plan, the next block while one is joined
                               where seeks are cheap, keeps the most useful ones

Memory bound::

    limit >= index (inner nodes, maps from leaf to frame and demand)
           + negative filter        if the table has one: at most three quarters of the rest; nothing while inactive
           + record tier            a third of the rest, if the table has one; nothing while inactive
           + row tier               all rows beside their pages, if both leave an eighth of the memory
           + cached pages           all that the others leave; a tuple that needs room takes a page's frame
           + input buffer           \
           + stream buffer           } at least a page each
           + inverted index         /
           + workspace              an eighth of the rest, at least two pages, at most 48 MiB
           + read buffer            two pages; of the rest a sixth or 64 pages, at most three eighths or 512 pages
           + the queue of reads + the cost model's statistics
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.joins.base import JoinAlgorithm, JoinParameters, StreamJoin
from headrace.joins.errors import MemoryBudgetError
from headrace.joins.input_buffer import BatchSlice, compact
from headrace.joins.predicates import Equality
from headrace.joins.relation import scan_seconds
from headrace.joins.ssij.context import SSIJContext
from headrace.joins.ssij.cost import PhaseEstimate
from headrace.joins.ssij.memory.store import Store
from headrace.joins.ssij.options import SSIJOptions
from headrace.joins.ssij.phases.direct import DirectPhase
from headrace.joins.ssij.phases.join import JoinPhase
from headrace.joins.ssij.phases.nearest import NearestPhase
from headrace.joins.ssij.phases.online import OnlinePhase
from headrace.joins.ssij.phases.record_tier import RecordTierPhase
from headrace.joins.ssij.phases.row_tier import RowTierPhase
from headrace.joins.ssij.schedule import Schedule, Thresholds
from headrace.joins.ssij.workers import Workers
from headrace.joins.stats import SSIJStats
from headrace.storage.read import ReadQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from headrace.joins.predicates import On
    from headrace.joins.protocol import Output
    from headrace.joins.relation import TableLike
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["SSIJ"]

_KEY_COPIES = 2  # in arrival order and sorted, for keys of more than one word
_WORD = 8


class SSIJAlgorithm(JoinAlgorithm):
    """Pending, online, and join phases of SSIJ, and when each runs.

    Parameters
    ----------
    parameters
        Parameters that all operators share.
    options
        Parameters of SSIJ alone.
    """

    def __init__(self, parameters: JoinParameters, options: SSIJOptions) -> None:
        super().__init__(parameters)
        self.store = Store(
            self.snapshot,
            self.relation.reader,
            self.budget,
            options,
            self.counters,
            self.columns,
            equality=isinstance(self.predicate, Equality),
        )
        device = self.relation.reader.device
        self.thresholds = Thresholds(self.store, device, options.input_threshold, options.stream_threshold)
        self.estimate = PhaseEstimate(device.seek, device.transfer, self._scan_seconds())
        self._schedule = Schedule(self.deadline, self.store, self.thresholds, self.estimate)
        self._workers = Workers(options.threads)
        self._queue = ReadQueue(self.relation.reader, self.store.read_buffer.frames)
        self._row_nbytes = 1.0
        self._context: SSIJContext | None = None

    def refresh(self, change: Callable[[], Any]) -> Iterator[pa.RecordBatch]:
        """Return the task of completing all tuples, changing the relation, and switching to its newest snapshot."""
        return self.counted(self._install(change))

    def close(self) -> None:
        """Stop the threads and close the queue of reads."""
        self._workers.close()
        self._queue.close()

    @property
    def due(self) -> float | None:
        """Latest time for the next call of `tick` to meet the deadlines; None if nothing waits for one."""
        return self._schedule.due(self._row_nbytes)

    @property
    def stats(self) -> SSIJStats:
        """Statistics so far."""
        counters = self.counters
        return SSIJStats(
            **self._base_stats(),
            online_phases=counters.online_phases,
            join_phases=counters.join_phases,
            online_seconds=counters.online_seconds,
            join_seconds=counters.join_seconds,
            rows_recorded=counters.rows_recorded,
            rows_filtered=counters.rows_filtered,
            false_positives=0 if self.store.tiers.filter is None else self.store.tiers.filter.false_positives,
            filter_bits=0.0 if self.store.tiers.filter is None else self.store.tiers.filter.bits,
            pages_kept=counters.pages_kept,
            pages_evicted=counters.pages_evicted,
            pages_cached=len(self.store.cache.resident_frames),
        )

    # Pending phase

    def _consume(self, batch: pa.RecordBatch, arrival: float) -> Iterator[pa.RecordBatch]:
        """Take a batch in. One that arrives during a join phase takes room from the cache while it waits."""
        queued = 0 if self.progress.idle else batch.nbytes
        self.store.queue(queued)
        return self._begin(batch, arrival, queued)

    def _begin(self, batch: pa.RecordBatch, arrival: float, queued: int) -> Iterator[pa.RecordBatch]:
        self.store.unqueue(queued)
        if len(batch):
            self._row_nbytes = max(batch.nbytes / len(batch), 1.0)
        self._schedule.batch_begins(self.time.now() - arrival, self._seconds_online)
        start = 0
        while start < len(batch) and self.store.tiers.use_records(len(batch) - start, self.store.try_make_room):
            part = batch.slice(start, self._rows_at_once(len(batch) - start))
            start += len(part)
            for missed in (yield from RecordTierPhase(self.context).run(BatchSlice(part, arrival))):
                yield from self._take_in(missed, arrival)
        if start < len(batch):
            yield from self._take_in(batch.slice(start), arrival)
        self._schedule.batch_ends(self._seconds_online)
        yield from self._due_work()

    def _take_in(self, batch: pa.RecordBatch, arrival: float) -> Iterator[pa.RecordBatch]:
        waiting = self.store.input
        if waiting.rows + len(batch) < self.thresholds.online(self._row_nbytes) and self.store.accept(
            compact(batch), arrival
        ):
            return
        yield from self._online(waiting.rows)
        start = 0
        while start < len(batch):
            part = batch.slice(start, self._rows_at_once(len(batch) - start))
            start += len(part)
            yield from self._join_online(BatchSlice(part, arrival))
            if not self._schedule.batch_ends_soon(self._seconds_online):
                yield from self._due_work()

    @property
    def _seconds_online(self) -> float:
        return self.progress.busy_seconds - self.counters.join_seconds

    # Online and join phases

    def _rows_at_once(self, rows: int) -> int:
        """Return how many tuples to work on at once, such that all parts of `rows` are of similar size."""
        most = self._rows_at_most()
        return -(-rows // -(-rows // most))

    def _rows_at_most(self) -> int:
        copies, wide = _KEY_COPIES * self.bound.keys_per_tuple, self.snapshot.codec.kind == "bytes"
        keys = copies * self._row_nbytes if wide else (copies - _KEY_COPIES) * _WORD
        return self.store.rows_at_once(self._row_nbytes + keys + self.emitter.row_bytes(self._row_nbytes))

    def _online(self, count: int) -> Iterator[pa.RecordBatch]:
        """Run online phases over the oldest tuples of the input buffer."""
        while count > 0:
            batch = self.store.input.take(self._rows_at_once(count))
            count -= len(batch.rows)
            yield from self._join_online(batch)
            self.store.account()

    def _join_online(self, batch: BatchSlice) -> Iterator[pa.RecordBatch]:
        """Run an online phase.

        A join phase comes first if there is no room for what has to wait, and afterwards if one is due or pays.
        """
        online = self._online_phase()
        waiting = online.probe(batch)
        if not self.store.fits(sum(tuples for tuples, _ in waiting), sum(lists for _, lists in waiting)):
            if self.store.stream.rows:
                yield from self._join_phase()
                yield from self._join_online(batch)
                return
            if len(batch.rows) > 1:
                for half in batch.parts(2):
                    yield from self._join_online(half)
                return
            if self.store.tiers.release() or self.store.drop_pages():
                yield from self._join_online(batch)  # a tuple needs least room if no page between its leaves is cached
                return
            raise MemoryBudgetError(
                f"one stream tuple of {batch.rows.nbytes} bytes does not fit beside the index and a page; give the "
                f"join more than {self.budget.limit} bytes"
            )
        yield from online.run()
        many = self.store.stream.rows >= self.thresholds.join(self._row_nbytes)
        thresholds = self.thresholds
        pays = not thresholds.waiting_pays(online.waiting_nbytes) if many else thresholds.caching_pays()
        if pays:
            yield from self._join_phase()

    def _online_phase(self) -> OnlinePhase | DirectPhase | RowTierPhase | NearestPhase:
        if self.bound.step:
            return NearestPhase(self.context)
        direct, rows_tier = self.store.direct, self.store.tiers.rows
        if rows_tier is not None and rows_tier.ready:
            return RowTierPhase(self.context, rows_tier)
        return OnlinePhase(self.context) if direct is None else DirectPhase(self.context, direct)

    def _join_phase(self) -> Iterator[pa.RecordBatch]:
        if self.store.stream.rows:
            before = self.counters.join_seconds
            yield from JoinPhase(self.context).run()
            self._schedule.phase_ends(self.counters.join_seconds - before)
        while (batch := self.store.take_deferred(self._rows_at_most())) is not None:
            yield from self._join_online(batch)

    def _drain(self) -> Iterator[pa.RecordBatch]:
        yield from self._online(self.store.input.rows)
        while self.store.stream.rows:
            yield from self._join_phase()

    # Deadlines

    def _due_work(self) -> Iterator[pa.RecordBatch]:
        """Run the phases that have to start now to meet the deadlines.

        Batches that arrived during a join phase share the next one, so all of them are taken in first.
        """
        if self.deadline is None or self.progress.more:
            return
        while (due := self.due) is not None and due <= self.time.now():
            if self.store.input.rows:
                yield from self._online(self.store.input.rows)
            else:
                yield from self._join_phase()

    def _scan_seconds(self) -> float:
        return scan_seconds(self.snapshot, self.relation.reader.device, self.store.longest_read)

    # The relation changes

    def _install(self, change: Callable[[], Any]) -> Iterator[pa.RecordBatch]:
        yield from self._drain()
        change()
        self.relation = self.relation.newest()
        self._queue.close()
        self._queue = ReadQueue(self.relation.reader, self.store.read_buffer.frames)
        self.store.install(self.snapshot)
        self.estimate.scan = self._scan_seconds()
        self._rebind()

    # Bindings

    @property
    def context(self) -> SSIJContext:
        """Context of the phases. Available once the stream's schema is known."""
        assert self._context is not None
        return self._context

    def _rebound(self) -> None:
        self._context = SSIJContext(
            snapshot=self.snapshot,
            reader=self.relation.reader,
            queue=self._queue,
            store=self.store,
            bound=self.bound,
            emitter=self.emitter,
            outer=self.how == "left",
            estimate=self.estimate,
            workers=self._workers,
            counters=self.counters,
            completed=self.completed,
            progress=self.progress,
        )

    def _output_nbytes(self) -> int:
        return self.store.workspace // 2


class SSIJ(StreamJoin[SSIJAlgorithm]):
    """Joins a stream with a clustered table.

    Parameters
    ----------
    table
        A `headrace.storage.Table`, or a snapshot of one (then `reader` is needed too).
    on
        ``[("stream column", "key column"), ...]``, a name that both sides share, or a predicate: `headrace.joins.Band`,
        `headrace.joins.Range`, `headrace.joins.AsOf`.
    how
        ``"inner"``, or ``"left"`` to keep stream tuples without a match, with nulls.
    memory
        Hard limit on everything that the operator holds, in bytes or as text (``"32MiB"``).
    deadline
        How long a tuple may wait, in seconds or as text (``"500ms"``); None for no limit. Call `tick` at the time that
        `due` names.
    max_scan
        Most disk pages in a read, gaps included (the paper's maxScan).
    input_threshold, stream_threshold
        Tuples that start an online phase and a join phase (the paper's IB_thresh and SB_thresh). By default those of
        the paper's table II, or what an eighth and a third of the memory hold.
    columns
        Table columns of the result; by default all but the key columns that equal a stream column.
    record_tier
        Whether rows may be kept beside their pages: single rows that are looked up often, or all rows if there is room.
        Tables whose key is not one word or not unique, results with text, and range predicates have no record tier.
    cache_policy
        Which page leaves first: by ``"utility"`` (the paper's), or by ``"ageing"``, which halves the utility after a
        join phase instead of clearing it; for comparison ``"lru"``, or ``"none"`` to cache no pages.
    memory_split
        Fixed share of the memory, beside index and workspace, for cached pages. By default they have what tuples leave.
    read_plan
        ``"optimal"``, or ``"greedy"`` for comparison.
    threads
        Threads that join parts of a batch; by default as many as the process may use, at most four.
    reader
        Reader of pages; the table's by default.
    clock
        Returns the time in seconds; `time.monotonic` by default.

    Raises
    ------
    MemoryBudgetError
        If the memory is too small. The message says how much is needed.
    JoinInputError
        If a parameter cannot be used.

    Examples
    --------
    >>> import pyarrow as pa, tempfile
    >>> from headrace.storage import Table
    >>> folder = tempfile.TemporaryDirectory()
    >>> planes = pa.table({"plane": ["N1", "N2"], "seats": [4, 189]})
    >>> flights = pa.record_batch({"tailnum": ["N2", "N1"]})
    >>> with Table.build(f"{folder.name}/planes", planes, key=["plane"], unique=True) as table:
    ...     with SSIJ(table, on=[("tailnum", "plane")], how="left", memory="32MiB") as join:
    ...         batches = [*join.push(flights), *join.finish()]
    >>> sorted(pa.Table.from_batches(batches)["seats"].to_pylist())
    [4, 189]
    >>> folder.cleanup()
    """

    def __init__(
        self,
        table: TableLike | Snapshot,
        on: On,
        how: str = "inner",
        memory: int | str = "32MiB",
        *,
        deadline: float | str | None = None,
        max_scan: int = 200,
        input_threshold: int | None = None,
        stream_threshold: int | None = None,
        columns: Sequence[str] | None = None,
        record_tier: bool = True,
        cache_policy: str = "utility",
        memory_split: float | None = None,
        read_plan: str = "optimal",
        threads: int | None = None,
        reader: PageReader | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        options = SSIJOptions(
            max_scan, input_threshold, stream_threshold, threads, record_tier, cache_policy, memory_split, read_plan
        )
        parameters = JoinParameters.check(
            table, on, how, memory, columns=columns, deadline=deadline, reader=reader, clock=clock
        )
        super().__init__(SSIJAlgorithm(parameters, options))

    def refresh(self) -> Output:
        """Complete everything pushed so far on the current snapshot, then switch to the newest one."""
        return self._work.start(self._open().refresh(lambda: None))

    def apply(self, upserts: Any = None, deletes: Any = None, **options: Any) -> Output:
        """Change the table (the paper's section IV-E).

        Batches pushed before are completed first, on the relation as it was. Consume the output: the changes are
        committed after its last batch. Batches pushed afterwards see the changes.

        Parameters
        ----------
        upserts, deletes, options
            Changes, as for `headrace.storage.Table.apply`.
        """
        algorithm = self._open()
        table = algorithm.relation.changeable()
        return self._work.start(algorithm.refresh(lambda: table.apply(upserts, deletes, **options)))

    @property
    def stats(self) -> SSIJStats:
        """Statistics so far. They stay readable after `close`."""
        stats = super().stats
        assert isinstance(stats, SSIJStats)
        return stats

    @property
    def store(self) -> Store:
        """Memory of the operator, for tests and experiments."""
        return self.algorithm.store
