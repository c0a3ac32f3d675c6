"""SSIJ, the semi-streaming index join: a fast stream joined with a relation on disk, within a memory and a deadline.

Phases (Bornea, Deligiannakis, Kotidis and Vassalos, "Semi-Streamed Index Join for Near-Real Time Execution of ETL
Transformations", ICDE 2011, section IV)::

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
           + negative filter        if the table has one: three quarters of what is left at most, nothing in sleep
           + record tier            a third of what is left, if the table has one; nothing while it sleeps
           + whole tier             all rows apart from their pages, if both fit beside an eighth of the memory
           + cached pages           all that the others leave; a tuple that needs room takes a page's frame
           + input buffer           \
           + stream buffer           } a page each at least
           + inverted index         /
           + workspace              an eighth of what is left, two pages at least, 48 MiB at most
           + read buffer            two pages; of those left a sixth or 64, five eighths or 512 at most
           + the queue of reads + the cost model's statistics
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.joins._base import StreamJoin
from headrace.joins._input_buffer import Piece, compact
from headrace.joins._relation import scan_seconds
from headrace.joins.errors import JoinInputError, MemoryBudgetError
from headrace.joins.predicates import Equality
from headrace.joins.ssij.direct import DirectPhase
from headrace.joins.ssij.join_phase import JoinPhase
from headrace.joins.ssij.nearest import NearestPhase
from headrace.joins.ssij.online import OnlinePhase
from headrace.joins.ssij.phase_estimate import PhaseEstimate
from headrace.joins.ssij.recall import RecallPhase
from headrace.joins.ssij.schedule import Schedule
from headrace.joins.ssij.state import SSIJState
from headrace.joins.ssij.store import Store
from headrace.joins.ssij.thresholds import Thresholds
from headrace.joins.ssij.variant import Variant
from headrace.joins.ssij.whole_phase import WholePhase
from headrace.joins.ssij.workers import Workers
from headrace.joins.stats import SSIJStats
from headrace.storage.read import ReadQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from headrace.joins._relation import TableLike
    from headrace.joins.predicates import On
    from headrace.joins.protocol import Output
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["SSIJ"]

_KEY_COPIES = 2  # as they came and sorted, where they are more than one word
_WORD = 8


class SSIJ(StreamJoin):
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
        Hard limit on all that the operator holds, in bytes or as text (``"32MiB"``).
    deadline
        How long a tuple may wait, in seconds or as text (``"500ms"``); None for no limit. Call `tick` at the time
        that `due` names.
    max_scan
        Most disk pages in a read, gaps included (the paper's maxScan).
    input_threshold, stream_threshold
        Tuples that start an online phase and a join phase (the paper's IB_thresh and SB_thresh). By default those of
        the paper's table II, or what an eighth and a third of the memory hold.
    columns
        Of the table, to be in the result; by default all but the key columns that equal a stream column.
    record_tier
        Whether single rows that are asked for often are kept apart from their pages, in a hash table. Tables whose key
        is not one word or not unique, results with text, and predicates of ranges have none. Of tables that fit into
        the memory all rows are kept so, if there is room for that too.
    cache_policy
        Which page leaves first: by ``"utility"`` (the paper's), or by ``"ageing"``, which halves the utility after a
        join phase and does not clear it; for comparison ``"lru"``, or ``"none"``: none is kept.
    memory_split
        Share of the memory, beside index and workspace, that cached pages have once and for all. By default they have
        what the tuples leave.
    read_plan
        ``"optimal"``, or ``"greedy"`` for comparison.
    threads
        That join parts of a batch at once; by default as many as the process may use, four at most.
    reader
        Reads pages; the table's by default.
    clock
        Returns the time in seconds; `time.monotonic` by default.

    Raises
    ------
    MemoryBudgetError
        If the memory is too small; the message says how much is needed.
    JoinInputError
        If a parameter cannot be used.

    Examples
    --------
    >>> import pyarrow as pa, tempfile
    >>> from headrace.storage import Table
    >>> folder = tempfile.TemporaryDirectory()
    >>> planes = pa.table({"plane": ["N1", "N2"], "seats": [4, 189]})
    >>> with Table.build(f"{folder.name}/planes", planes, key=["plane"], unique=True) as table:
    ...     join = SSIJ(table, on=[("tailnum", "plane")], how="left", memory="32MiB")
    ...     flights = pa.record_batch({"tailnum": ["N2", "N1"]})
    ...     batches = [*join.push(flights), *join.finish()]
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
        super().__init__(table, on, how, memory, columns=columns, deadline=deadline, reader=reader, clock=clock)
        for name, value in (
            ("max_scan", max_scan), ("input_threshold", input_threshold), ("stream_threshold", stream_threshold),
            ("threads", threads),
        ):  # fmt: skip
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise JoinInputError(f"`{name}` must be a whole number, at least 1, not {value!r}")
        variant = Variant(cache_policy, memory_split, read_plan)
        self.store = Store(
            self.snapshot,
            self.relation.reader,
            max_scan,
            self.budget,
            variant,
            self.counters,
            self.columns,
            record_tier,
            equality=isinstance(self.predicate, Equality),
        )
        device = self.relation.reader.device
        self._thresholds = Thresholds(self.store, device, input_threshold, stream_threshold)
        self._estimate = PhaseEstimate(device.seek, device.transfer, self._scan_seconds())
        self._schedule = Schedule(self.deadline, self.store, self._thresholds, self._estimate)
        self._workers = Workers(threads)
        self._queue = ReadQueue(self.relation.reader, self.store.read_buffer.frames)
        self._row_nbytes = 1.0
        self._state: SSIJState | None = None

    def refresh(self) -> Output:
        """Complete what was pushed so far with the present snapshot, then go on with the newest one."""
        self._open()
        return self._work.start(self._counted(self._install(lambda: None)))

    def apply(self, upserts: Any = None, deletes: Any = None, **options: Any) -> Output:
        """Change the table (the paper's section IV-E).

        What was pushed before is completed first, with the relation as it was: consume the output, for the changes are
        committed after its last batch. What is pushed afterwards sees the changes.

        Parameters
        ----------
        upserts, deletes, options
            As of `headrace.storage.Table.apply`.
        """
        self._open()
        table = self.relation.changeable()
        return self._work.start(self._counted(self._install(lambda: table.apply(upserts, deletes, **options))))

    @property
    def due(self) -> float | None:
        """Time at which `tick` is to be called at the latest to meet the deadlines; None if nothing waits for one."""
        return self._schedule.due(self._row_nbytes)

    @property
    def stats(self) -> SSIJStats:
        """What was counted so far."""
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
        """Take a batch in; one that arrives during a join phase takes room from the cache while it waits."""
        queued = 0 if self._work.idle else batch.nbytes
        self.store.queue(queued)
        return self._begin(batch, arrival, queued)

    def _begin(self, batch: pa.RecordBatch, arrival: float, queued: int) -> Iterator[pa.RecordBatch]:
        self.store.unqueue(queued)
        if len(batch):
            self._row_nbytes = max(batch.nbytes / len(batch), 1.0)
        self._schedule.batch_begins(self.time.now() - arrival, self._seconds_online)
        start = 0
        while start < len(batch) and self.store.tiers.records_ready(len(batch) - start):
            part = batch.slice(start, self._rows_at_once(len(batch) - start))
            start += len(part)
            for missed in (yield from RecallPhase(self.state).run(Piece(part, arrival))):
                yield from self._take_in(missed, arrival)
        if start < len(batch):
            yield from self._take_in(batch.slice(start), arrival)
        self._schedule.batch_ends(self._seconds_online)
        yield from self._due_work()

    def _take_in(self, batch: pa.RecordBatch, arrival: float) -> Iterator[pa.RecordBatch]:
        waiting = self.store.input
        if waiting.rows + len(batch) < self._thresholds.online(self._row_nbytes) and self.store.accept(
            compact(batch), arrival
        ):
            return
        yield from self._online(waiting.rows)
        start = 0
        while start < len(batch):
            part = batch.slice(start, self._rows_at_once(len(batch) - start))
            start += len(part)
            yield from self._join_online(Piece(part, arrival))
            if not self._schedule.batch_ends_soon(self._seconds_online):
                yield from self._due_work()

    @property
    def _seconds_online(self) -> float:
        return self._work.busy_seconds - self.counters.join_seconds

    # Online and join phases

    def _rows_at_once(self, rows: int) -> int:
        """Return how many of so many tuples are worked on at once: all parts that there is room for are alike."""
        most = self._rows_at_most()
        return -(-rows // -(-rows // most))

    def _rows_at_most(self) -> int:
        copies, wide = _KEY_COPIES * self.bound.keys_per_tuple, self.snapshot.codec.kind == "bytes"
        keys = copies * self._row_nbytes if wide else (copies - _KEY_COPIES) * _WORD
        return self.store.rows_at_once(self._row_nbytes + keys + self.emitter.row_bytes(self._row_nbytes))

    def _online(self, count: int) -> Iterator[pa.RecordBatch]:
        """Run online phases over the oldest tuples of the input buffer."""
        while count > 0:
            piece = self.store.input.take(self._rows_at_once(count))
            count -= len(piece.rows)
            yield from self._join_online(piece)
            self.store.account()

    def _join_online(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Run an online phase; a join phase first if there would be no room for what has to wait, or afterwards."""
        online = self._online_phase()
        waiting = online.probe(piece)
        if not self.store.fits(sum(tuples for tuples, _ in waiting), sum(lists for _, lists in waiting)):
            if self.store.stream.rows:
                yield from self._join_phase()
                yield from self._join_online(piece)
                return
            if len(piece.rows) > 1:
                for half in piece.parts(2):
                    yield from self._join_online(half)
                return
            if self.store.tiers.release() or self.store.drop_pages():
                yield from self._join_online(piece)  # without gaps in what is to be read one tuple needs least
                return
            raise MemoryBudgetError(
                f"one stream tuple of {piece.rows.nbytes} bytes does not fit beside the index and a page; give the "
                f"join more than {self.budget.limit} bytes"
            )
        yield from online.run()
        many = self.store.stream.rows >= self._thresholds.join(self._row_nbytes)
        thresholds = self._thresholds
        pays = not thresholds.waiting_pays(online.waiting_nbytes) if many else thresholds.caching_pays()
        if pays:
            yield from self._join_phase()

    def _online_phase(self) -> OnlinePhase | DirectPhase | WholePhase | NearestPhase:
        if self.bound.step:
            return NearestPhase(self.state)
        direct, whole = self.store.direct, self.store.tiers.whole
        if whole is not None and whole.ready:
            return WholePhase(self.state, whole)
        return OnlinePhase(self.state) if direct is None else DirectPhase(self.state, direct)

    def _join_phase(self) -> Iterator[pa.RecordBatch]:
        if self.store.stream.rows:
            before = self.counters.join_seconds
            yield from JoinPhase(self.state).run()
            self._schedule.phase_ends(self.counters.join_seconds - before)
        while (piece := self.store.take_postponed(self._rows_at_most())) is not None:
            yield from self._join_online(piece)

    def _drain(self) -> Iterator[pa.RecordBatch]:
        yield from self._online(self.store.input.rows)
        while self.store.stream.rows:
            yield from self._join_phase()

    # Deadlines

    def _due_work(self) -> Iterator[pa.RecordBatch]:
        """Run the phases that have to start now for the deadlines to hold.

        What arrived during a join phase shares the next one, so all of it is taken in first.
        """
        if self.deadline is None or self._work.more:
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
        self._estimate.scan = self._scan_seconds()
        self._rebind()

    # Bindings

    @property
    def state(self) -> SSIJState:
        """What the phases share, once the stream's schema is known."""
        assert self._state is not None
        return self._state

    def _rebound(self) -> None:
        self._state = SSIJState(
            snapshot=self.snapshot,
            reader=self.relation.reader,
            queue=self._queue,
            store=self.store,
            bound=self.bound,
            emitter=self.emitter,
            outer=self.how == "left",
            estimate=self._estimate,
            workers=self._workers,
            counters=self.counters,
            completed=self.completed,
            busy=lambda: self._work.busy_seconds,
        )

    def _output_nbytes(self) -> int:
        return self.store.workspace // 2
