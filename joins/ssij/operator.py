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

A join phase goes in steps, and arrivals join it between two of them (`headrace.joins.ssij.phases.join`). It is state
of the operator, not of a call: with a deadline each call takes one step, and `due` lies in the past until the phase
has ended. So a caller that pushes what has arrived and ticks when work is due needs to do nothing more. Without a
deadline a call runs the phase to its end, unless enough tuples are pushed while its results are consumed: these are
looked up first, and the last call goes on with the phase. Where reads are what costs most, a call takes one step of a
continuous phase instead, and the next step comes when tuples need the room. `flush`, `finish`, and changes of the
relation complete the phase first. A batch that finds no room waits for steps of the phase until there is some.

Memory bound::

    limit >= index (inner nodes, maps from leaf to frame and demand; or paged: the lowest nodes' entries, some frames)
           + negative filter        if the table has one: at most three quarters of the rest; nothing while inactive
           + record tier            a third of the rest, if the table has one; nothing while inactive
           + row tier               all rows, if they and the cached pages leave an eighth of the memory
           + cached pages           all that the others leave; a tuple that needs room takes a page's frame
           + input buffer           \
           + stream buffer           } at least a page each
           + inverted index         /  with 9 bytes for each page of a join phase's plan
           + workspace              an eighth of the rest, at least two pages, at most 48 MiB; for ranges of keys that
                                    are not looked up directly a quarter, as long as that is at most 2 MiB
           + read buffer            two pages; of the rest a sixth, at most 512 pages; where a sixth is below 64 pages
                                    up to 64 or three eighths, as many as give scans the highest rate
           + the queue of reads + the cost model's statistics
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from headrace.joins.base import JoinAlgorithm, JoinParameters, StreamJoin
from headrace.joins.errors import MemoryBudgetError
from headrace.joins.input_buffer import BatchSlice, compact
from headrace.joins.predicates import AsOf, Equality
from headrace.joins.relation import scan_seconds
from headrace.joins.ssij.context import SSIJContext
from headrace.joins.ssij.cost import PhaseEstimate
from headrace.joins.ssij.memory.reservation import fitting_snapshot
from headrace.joins.ssij.memory.store import Store
from headrace.joins.ssij.memory.stream_buffer import Chunk
from headrace.joins.ssij.options import SSIJOptions, Tuning
from headrace.joins.ssij.phases.direct import DirectPhase
from headrace.joins.ssij.phases.direct_nearest import DirectNearestPhase
from headrace.joins.ssij.phases.join import JoinPhase
from headrace.joins.ssij.phases.nearest import NearestPhase
from headrace.joins.ssij.phases.online import OnlinePhase
from headrace.joins.ssij.phases.record_tier import RecordTierPhase
from headrace.joins.ssij.phases.row_tier import RowScan, RowTierPhase
from headrace.joins.ssij.schedule import Schedule, Thresholds
from headrace.joins.stats import SSIJStats
from headrace.joins.workers import Workers
from headrace.storage.read import ReadQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import pyarrow as pa

    from headrace.joins.deadlines import Arrivals
    from headrace.joins.predicates import On
    from headrace.joins.protocol import Output
    from headrace.joins.relation import Relation, TableLike
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
        self._options = options
        device = self.relation.reader.device
        self.estimate = PhaseEstimate(device.seek, device.transfer)
        self._workers = Workers(options.threads)
        self._fit_relation(self.relation)
        self._make_memory()
        self._row_nbytes = 1.0
        self._queued_rows = 0
        self._phase: JoinPhase | None = None
        self._context: SSIJContext | None = None

    def _fit_relation(self, relation: Relation) -> None:
        """Join with a relation, of which inner nodes are paged if they do not fit."""
        limit, index, note = self.budget.limit, self._options.index, self.counters.add_nodes
        snapshot = fitting_snapshot(relation.snapshot, relation.reader, limit, index, note)
        self.relation = replace(relation, snapshot=snapshot)

    def _make_memory(self) -> None:
        """Divide the memory for the snapshot. Nothing is held yet."""
        options, reader = self._options, self.relation.reader
        self.store = Store(
            self.snapshot,
            reader,
            self.budget,
            options,
            self.counters,
            self.columns,
            equality=isinstance(self.predicate, Equality),
            nearest=isinstance(self.predicate, AsOf),
            deadlines=self.deadlines,
        )
        self.thresholds = Thresholds(self.store, reader.device, options.input_threshold, options.stream_threshold)
        longest = reader.device.cost(1, self.store.longest_read)
        self._schedule = Schedule(self.deadlines, self.store, self.thresholds, self.estimate, longest)
        self._queue = ReadQueue(reader, self.store.read_buffer.frames)
        self.estimate.scan = self._scan_seconds()

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
            nodes_read=counters.nodes_read,
        )

    # Pending phase

    def _consume(self, batch: pa.RecordBatch, arrival: Arrivals) -> Iterator[pa.RecordBatch]:
        """Take a batch in. One that arrives during a join phase takes room from the cache while it waits."""
        queued = not self.progress.idle
        if queued:
            self.store.queue(batch.nbytes)
            self._queued_rows += len(batch)
        return self._begin(BatchSlice(batch, arrival), self._latest, queued=queued)

    def _waiting(self) -> Sequence[pa.RecordBatch]:
        return [*self.store.input.batches, *self.store.stream.batches]

    def _begin(self, batch: BatchSlice, at: float, *, queued: bool) -> Iterator[pa.RecordBatch]:
        rows = len(batch.rows)
        if queued:
            self.store.unqueue(batch.rows.nbytes)
            self._queued_rows -= rows
        if rows:
            self._row_nbytes = max(batch.rows.nbytes / rows, 1.0)
        self._schedule.batch_begins(at, self.time.now(), self._seconds_online)
        start = 0
        while start < rows and self.store.tiers.use_records(rows - start, self.store.try_make_room):
            part = batch.slice(start, start + self._rows_at_once(rows - start))
            start += len(part.rows)
            for missed in (yield from RecordTierPhase(self.context).run(part)):
                yield from self._take_in(missed)
        if start < rows:
            yield from self._take_in(batch.slice(start, rows))
        self._schedule.batch_ends(self._seconds_online)
        if not self._schedule.others_first(self.time.now()):
            yield from self._due_work()

    def _take_in(self, batch: BatchSlice) -> Iterator[pa.RecordBatch]:
        waiting, rows = self.store.input, len(batch.rows)
        if waiting.rows + rows < self.thresholds.online(self._row_nbytes) and self.store.accept(
            compact(batch.rows), batch.arrival
        ):
            return
        yield from self._online(waiting.rows)
        start = 0
        while start < rows:
            part = batch.slice(start, start + self._rows_at_once(rows - start))
            start += len(part.rows)
            yield from self._join_online(part)
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

        Steps of a join phase come first if there is no room for what has to wait. Afterwards one starts if it pays.
        """
        scanned = yield from self._scan_rows(len(batch.rows))
        online = self._online_phase(scanned=scanned)
        waiting = online.probe(batch)
        while (lacking := self._lacking(waiting)) > 0:
            del online  # and what it has found: steps need the workspace
            if not self.store.stream.rows:
                yield from self._join_in_parts(batch, lacking)
                return
            yield from self._step(self._end_of_step() if self.deadlines.any else None)
            online = self._online_phase()
            waiting = online.probe(batch)
        yield from online.run()
        idle = self._phase is None or self._phase.continuous
        pays = idle and self._phase_pays(online.waiting_nbytes)
        del online  # a phase needs its memory
        if pays:
            self._start_phase()
            if not self.deadlines.any:
                yield from self._go_on()

    def _lacking(self, waiting: list[tuple[int, int]]) -> int:
        return self.store.lacking(sum(tuples for tuples, _ in waiting), sum(lists for _, lists in waiting))

    def _join_in_parts(self, batch: BatchSlice, lacking: int) -> Iterator[pa.RecordBatch]:
        """Run online phases over a batch that does not fit although nothing else waits, by so many bytes."""
        if len(batch.rows) > 1:
            for half in batch.parts(2):
                yield from self._join_online(half)
        elif self.store.tiers.release() or self.store.drop_pages():
            yield from self._join_online(batch)  # a tuple needs least room if no page between its leaves is cached
        else:
            cause = f"one stream tuple of {batch.rows.nbytes} bytes does not fit beside the index and a page"
            raise self.store.refusal(cause, lacking)

    def _phase_pays(self, waiting_nbytes: int) -> bool:
        """Return whether a join phase is worth its reads now that a batch waits in this many bytes."""
        thresholds = self.thresholds
        if self.store.stream.rows >= thresholds.join(self._row_nbytes):
            return not thresholds.waiting_pays(waiting_nbytes)
        return thresholds.caching_pays()

    def _scan_rows(self, arrived: int) -> Generator[pa.RecordBatch, None, bool]:
        """Fill the row tier by a scan, and join the tuples that wait, if it takes one and so many tuples pay for it.

        Return whether there was one. Tuples wait until then, and with deadlines no scan may take so long at once.
        """
        tier = self.store.tiers.rows
        possible = tier is not None and tier.takes_a_scan and self._phase is None and not self.deadlines.any
        if not possible or not self.thresholds.scan_pays(arrived, self._row_nbytes):
            return False
        assert tier is not None
        if not RowScan(self.context, tier).run():
            return False
        for chunk in map(Chunk.compacted, self.store.stream.chunks):
            waited = BatchSlice(chunk.rows, chunk.arrival)
            for batch in waited.parts(-(-len(chunk.rows) // self._rows_at_most())):
                phase = RowTierPhase(self.context, tier, scanned=True)
                phase.probe(batch)
                yield from phase.run()
        self.store.release_stream(self.bound.step)
        return True

    def _online_phase(
        self, *, scanned: bool = False
    ) -> OnlinePhase | DirectPhase | RowTierPhase | NearestPhase | DirectNearestPhase:
        direct, rows_tier = self.store.direct, self.store.tiers.rows
        if self.bound.step:
            return NearestPhase(self.context) if direct is None else DirectNearestPhase(self.context, direct)
        if rows_tier is not None and not self.deadlines.any:
            rows_tier.fill(self._workers, self.store.try_make_room)
        if rows_tier is not None and rows_tier.ready:
            return RowTierPhase(self.context, rows_tier, scanned=scanned)
        return OnlinePhase(self.context) if direct is None else DirectPhase(self.context, direct)

    def _start_phase(self) -> None:
        """Start a join phase if none is running and tuples wait."""
        if self._phase is None and self.store.stream.rows:
            goes_round, stream = self._goes_round, self.store.stream
            continuous, stream.divides = goes_round and stream.divides, goes_round
            single = self.bound.at_most_one(unique=self.snapshot.unique)  # no tuple waits for several leaves
            if not self.store.list_by_range(by_range=continuous and single):
                continuous = stream.divides = True
            eager = self._schedule.eager(self._row_nbytes)
            self._phase = JoinPhase(self.context, eager=eager, continuous=continuous)
            self._schedule.phase_begins(self.time.now())

    @property
    def _goes_round(self) -> bool:
        """Whether join phases are to be continuous, from the first one on whose tuples were divided."""
        possible = isinstance(self.predicate, Equality) and not self.deadlines.any and not self.store.paged
        return possible and self.thresholds.sharing_pays()

    def _step(self, cut: Callable[[], bool] | None) -> Iterator[pa.RecordBatch]:
        """Take a step of the running join phase, which starts if there is none; see `JoinPhase.step`."""
        self._start_phase()
        phase = self._phase
        if phase is not None:
            yield from phase.step(cut, fine=cut is not None and self.deadlines.any)
            self._schedule.step_ends(self.time.now(), phase.settled)
            if phase.done:
                self._phase = None
                self._schedule.phase_ends(phase.seconds)
        yield from self._look_up_deferred()

    def _look_up_deferred(self) -> Iterator[pa.RecordBatch]:
        while (batch := self.store.take_deferred(self._rows_at_most())) is not None:
            yield from self._join_online(batch)

    def _go_on(self) -> Iterator[pa.RecordBatch]:
        """Go on with the running join phase until it ends or enough tuples have arrived to be looked up first.

        A continuous one takes a step.
        """
        while (phase := self._phase) is not None:
            yield from self._step(self._enough_arrived)
            if phase.continuous or self._enough_arrived():
                return

    def _enough_arrived(self) -> bool:
        arrived = self._queued_rows + self.store.input.rows
        return self._queued_rows > 0 and arrived >= self.thresholds.online(self._row_nbytes)

    def _end_of_step(self) -> Callable[[], bool]:
        """Return a function that says whether the step that begins now has taken long enough."""
        time = self.time
        end = time.now() + self._schedule.step_seconds() - self._schedule.read_seconds / 2
        return lambda: time.now() >= end

    def _drain(self) -> Iterator[pa.RecordBatch]:
        yield from self._online(self.store.input.rows)
        while self.store.stream.rows or self._phase is not None:
            yield from self._step(None)

    # Deadlines

    def tick(self, now: float | None) -> Iterator[pa.RecordBatch]:
        """Return the task of doing what is due at `now`."""
        self._schedule.step_is_asked_for()
        return super().tick(now)

    def _due_work(self) -> Iterator[pa.RecordBatch]:
        """Do what has to be done now to meet the deadlines: a step of the running join phase, or what is due.

        Batches that have arrived meanwhile are taken in first, so that they take part. Without deadlines a join phase
        that stopped for them goes on, and a continuous one waits until there are more.
        """
        if self.progress.more:
            return
        if not self.deadlines.any:
            if self._phase is not None and not self._phase.continuous:
                yield from self._go_on()
            return
        if self._phase is not None:
            if self._phase.eager or self._schedule.look_up_now(self.time.now()):
                yield from self._online(self.store.input.rows)
            yield from self._read_urgent()
            yield from self._step(self._end_of_step())
            return
        while self._phase is None and (due := self.due) is not None and due <= self.time.now():
            yield from self._online(self.store.input.rows)
            yield from self._read_urgent()
            if (due := self.due) is not None and due <= self.time.now() and self.store.stream.rows:
                yield from self._step(self._end_of_step())

    def _read_urgent(self) -> Iterator[pa.RecordBatch]:
        """Read the leaves that tuples wait for that cannot wait for the join phase."""
        leaves = self._schedule.urgent(self.time.now(), self._row_nbytes)
        if len(leaves):
            yield from (self._phase or JoinPhase(self.context, eager=False)).detour(leaves)
            yield from self._look_up_deferred()

    def _scan_seconds(self) -> float:
        return scan_seconds(self.snapshot, self.relation.reader.device, self.store.longest_read)

    # The relation changes

    def _install(self, change: Callable[[], Any]) -> Iterator[pa.RecordBatch]:
        yield from self._drain()
        with self.progress.harmless():
            change()
        with self.progress.complete():
            self._fit_changed(self.relation.newest())
            self._switch()

    def _fit_changed(self, relation: Relation) -> None:
        """Join with a relation after a change, which may have made its index too large."""
        try:
            self._fit_relation(relation)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                "the change of the table is committed and all tuples pushed before it are joined, but those behind it "
                f"cannot be: {error}; push them to a new operator with that memory"
            ) from error

    def _switch(self) -> None:
        """Switch to the new snapshot. Nothing waits."""
        self._queue.close()
        if self.store.can_install(self.snapshot):
            self._queue = ReadQueue(self.relation.reader, self.store.read_buffer.frames)
            self.store.install(self.snapshot)
            self.estimate.scan = self._scan_seconds()
        else:
            queued, self._context = self.store.queued, None
            del self.store, self.thresholds, self._schedule, self._queue
            self.budget.clear()
            self._make_memory()
            self.store.queue(queued)
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
        `due` names. While a join phase runs that time is over, and each call of `push` or `tick` takes a step of it, so
        that tuples pushed between two steps can join the phase.
    deadline_column
        Stream column that says how long each tuple may wait from its arrival: durations, or numbers of seconds, at
        least 0. Null means `deadline`. Tuples that are due first are looked up first, and their pages are read out of
        turn if they cannot wait for the others'.
    max_scan
        Most disk pages in a read, gaps included (the paper's maxScan); by default as many as the read buffer has room
        for.
    input_threshold, stream_threshold
        Tuples that start an online phase and a join phase (the paper's IB_thresh and SB_thresh). By default those of
        the paper's table II, or what an eighth (where join phases are continuous, a 32nd) and a third of the memory
        hold. With a stream threshold of your own no join phase is continuous.
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
    index
        ``"fitting"`` to have all inner nodes in memory if they fit, and otherwise read them when they are needed; for
        comparison ``"whole"`` or ``"paged"``.
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
        deadline_column: str | None = None,
        columns: Sequence[str] | None = None,
        reader: PageReader | None = None,
        clock: Callable[[], float] | None = None,
        **options: Unpack[Tuning],
    ) -> None:
        parameters = JoinParameters.check(
            table, on, how, memory, columns=columns, deadline=deadline, reader=reader, clock=clock,
            deadline_column=deadline_column,
        )  # fmt: skip
        super().__init__(SSIJAlgorithm(parameters, SSIJOptions.of({**options})))

    def refresh(self) -> Output:
        """Complete everything pushed so far on the current snapshot, then switch to the newest one.

        If its index does not fit the memory, the output raises `MemoryBudgetError` after the last result, and the
        operator takes no more batches.
        """
        return self._work.start(self._open().refresh(lambda: None))

    def apply(self, upserts: Any = None, deletes: Any = None, **options: Any) -> Output:
        """Change the table (the paper's section IV-E).

        Batches pushed before are completed first, on the relation as it was. Consume the output: the changes are
        committed after its last batch. Batches pushed afterwards see the changes. If the table refuses the changes, the
        output raises its error, and the join goes on with the table as it was. If the index of the changed table does
        not fit the memory, the output raises `MemoryBudgetError`: the change is committed, all results of batches
        pushed before have come, and the operator takes no more batches.

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
