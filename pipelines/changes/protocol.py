"""The protocol of one batch of changes: an order of steps in which a replay after a crash at any point adds nothing.

1. The changes are applied at the newest version of the dimension: tasks write rows of versions, change files, moved
   facts and rejected changes into files that no commit names yet.
2. One commit of the dimension replaces the changed rows, at exactly the version after the planned one. If another
   writer committed first, the batch is planned again. The commit carries a Delta transaction, the number of the batch,
   and a note with the files that must follow.
3. Rejected changes are committed to the error table, and moved facts to the table of moved facts, both from the note.
   If the run ends before that, `finish` completes the batch.

The versions are a function of the set of changes, so changes that are applied again are reported as replayed. A batch
that changes nothing is not committed, unless it has rejected changes.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.etl.history import ChangeOutcome
from headrace.pipelines.batch.error_rows import ERROR_SCHEMA, Origin
from headrace.pipelines.batch.read_step import ReadStep, record_format
from headrace.pipelines.changes.parents import Cascade, followed_stream
from headrace.pipelines.changes.scanning import FILTER_BYTES, StoredScan
from headrace.pipelines.changes.snapshots import snapshot_history
from headrace.pipelines.changes.stages import ApplyShard, ReadChanges, Tables
from headrace.pipelines.changes.targets import errors_path
from headrace.pipelines.config.column_types import arrow_schema
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.data_files import DataFile, FileSpec
from headrace.pipelines.delta.row_changes import RowChanges, change_rows_exactly, feed_files
from headrace.pipelines.delta.tables import CHANGE_TYPE, GREATEST_KEY, DeltaHandle, commit_note
from headrace.pipelines.errors import BatchError, ConservationError, QualityError, TableMovedError
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.history.moved import moved_files, moved_note, settle_moved
from headrace.pipelines.replica.catch_up import ReplicaSpec
from headrace.pipelines.replica.entry_rows import EntryRows
from headrace.pipelines.source.identity import application
from headrace.pipelines.spark.frame import ShardRule
from headrace.storage.format import is_bytes
from headrace.storage.records import compression_of
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.pipelines.changes.engines import Engine
    from headrace.pipelines.changes.targets import ChangeTarget
    from headrace.pipelines.config.model import SourceConfig
    from headrace.pipelines.source.discovery import FoundFile

__all__ = ["CHANGES", "AppliedBatch", "ApplyProtocol"]

_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 50
_LONGEST_PAUSE: Final = 2.0
CHANGES: Final = "changes"
_LEAST_TASK_BYTES: Final = 1 << 20
_TASK_SHARE: Final = 32  # the rows of a change, its entries and its versions take this many times its own bytes
_SCANNED_CHANGES: Final = 10_000
_SCANNED_ROWS: Final = 500  # a replica follows a change in the time in which a scan reads about so many rows
_FILTER_SHARE: Final = 4  # of the memory, for the filter of a scan
_COMPRESSION: Final = 8
_TEXT_WIDTH: Final = 24
_WIDTH: Final = 8
_REMOVED: Final = ("update_preimage", "delete")
_COUNTS: Final = ("rows", "inserted", "updated", "retired", "moved_ranges", "late")


@dataclass(frozen=True)
class AppliedBatch:
    """Result of a batch of changes.

    Parameters
    ----------
    batch
        Number of the batch in the stream of its source.
    version
        Version of the dimension after the batch.
    rows
        Number of changes, including records that did not fit their columns.
    outcomes
        Number of changes by outcome (`headrace.etl.history.ChangeOutcome`).
    inserted, updated, retired
        Numbers of new versions, of versions that changed under their surrogate key, and of versions that no longer
        exist.
    moved_ranges
        Number of ranges of facts that now belong to another version.
    late
        Number of changes that arrived after a later change of their member.
    seconds
        Duration of the batch.
    recovered
        Whether an earlier run committed the batch, and this run only completed it.
    """

    batch: int
    version: int
    rows: int
    outcomes: Mapping[str, int]
    inserted: int
    updated: int
    retired: int
    moved_ranges: int
    late: int
    seconds: float
    recovered: bool = False


@dataclass(frozen=True)
class _Planned:
    """A batch to apply: files, or the members that follow a parent.

    Parameters
    ----------
    files, number, stream
        Files of the batch, its number, and the identity of its stream. For a parent, the number is the version of the
        parent's table.
    marked
        Whether a batch without effect is committed, too.
    follows, since
        Position of the parent that members follow, and the version of its table that they followed last.
    """

    files: Sequence[FoundFile]
    number: int
    stream: str
    marked: bool = False
    follows: int | None = None
    since: int | None = None


class ApplyProtocol:
    """Applies batches of changes to a dimension.

    Parameters
    ----------
    target
        The dimension, whose tables exist.
    engine
        Threads of this process or Spark, which run the tasks.
    holds
        Function called before each commit. It raises an error if this run may no longer write.
    hook
        Function called with the name of each step before and after the step. Tests use it to inject failures.
    clock
        Function that returns seconds since 1970.

    Attributes
    ----------
    attempts
        Number of times that a batch is planned before other writers win.
    """

    def __init__(
        self,
        target: ChangeTarget,
        engine: Engine,
        *,
        holds: Callable[[], None] = lambda: None,
        hook: Callable[[str], None] = lambda _step: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._target = target
        self._engine = engine
        self._holds = holds
        self._hook = hook
        self._clock = clock
        self._dimension = DeltaHandle(target.path)
        self._errors = DeltaHandle(errors_path(target.path))
        self.attempts = _ATTEMPTS

    def last_batch(self, stream: str) -> int | None:
        """Return the last batch of a stream that the dimension holds, or None."""
        self._dimension.latest()
        return self._dimension.transaction(application(stream, CHANGES))

    def finish(self, number: int, stream: str) -> AppliedBatch | None:
        """Complete a batch that the dimension holds, if its run ended early; None if the dimension does not hold it."""
        self._dimension.latest()
        name = application(stream, CHANGES)
        done = self._dimension.transaction(name)
        if done is None or done < number:
            return None
        notes = self._dimension.commit_notes(name, number)
        if not notes:
            raise BatchError(
                f"{self._target.path} holds batch {number} of stream {stream}, but its log no longer has the commit "
                "that names the rejected changes of the batch; restore the log from a backup"
            )
        self._follow_up(notes[-1], stream, number)
        version = self._version_of(name, number)
        return AppliedBatch(**{**notes[-1]["record"], "version": version, "recovered": True})

    def _version_of(self, name: str, number: int) -> int:
        """Return the version of the dimension that a transaction made."""
        commits = ((commit_note(commit), commit["version"]) for commit in self._dimension.commits(None))
        own = (
            version for note, version in commits if (note.get("application"), note.get("transaction")) == (name, number)
        )
        return int(next(own))

    def run_batch(
        self,
        files: Sequence[FoundFile],
        number: int,
        stream: str,
        source: SourceConfig | None = None,
        *,
        marked: bool = False,
    ) -> AppliedBatch:
        """Apply a batch that the dimension does not hold.

        Parameters
        ----------
        files
            Files of the batch.
        number, stream
            Number of the batch, and identity of its stream.
        source
            Source configuration of the files, if it is not that of the target.
        marked
            Whether a batch without effect is committed, too, because only the dimension knows what was applied.

        Raises
        ------
        BatchError
            If other writers committed first on every attempt. The batch can be run again.
        """
        if source is not None:
            self._target = replace(self._target, source=source)
        return self._attempted(_Planned(files, number, stream, marked=marked))

    def follow(self, position: int) -> AppliedBatch | None:
        """Give the members whose parents have changed since they followed last new versions; None if none changed.

        Parameters
        ----------
        position
            Position of the parent among those of the target.
        """
        parent = self._target.parents[position]
        latest = parent.handle.latest()
        stream = followed_stream(parent.reference.parent.dimension.name, latest.table_id)
        since = self.last_batch(stream)
        if since is not None:
            self.finish(since, stream)
        if since is not None and since >= latest.version:
            return None
        planned = _Planned((), latest.version, stream, marked=True, follows=position, since=since)
        return self._attempted(planned)

    def _attempted(self, planned: _Planned) -> AppliedBatch:
        began, number = self._clock(), planned.number
        for retry in range(self.attempts):
            try:
                return self._apply(planned, began)
            except TableMovedError as moved:
                _LOG.info("batch %d of changes is planned again: %s", number, moved)
                time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.05 * 2**retry)))  # noqa: S311 - spreads writers
        raise BatchError(
            f"batch {number}: other writers changed {self._target.path} during each of {self.attempts} attempts; "
            "nothing is lost, run again when they are done"
        )

    def _apply(self, planned: _Planned, began: float) -> AppliedBatch:
        files, number, stream = planned.files, planned.number, planned.stream
        stage = self._stage(planned, began)
        self._hook("before apply")
        notes = self._engine.run(self._target.source, files, self._reader(stage.shards), stage)
        self._hook("after apply")
        record = self._record(notes, number, stage.version, began)
        if stage.looks_for_missing:
            _refuse_gaps(record)
        changes = self._changes(notes)
        pending = _noted(notes, "errors")
        if not (changes.files or len(changes.removed) or pending or planned.marked):
            return record
        note = {"record": asdict(record), "pending": [asdict(file) for file in pending]}
        note |= moved_note(_noted(notes, "moved"))
        version = self._commit(changes, notes, note, stage, number, stream)
        self._follow_up(note, stream, number)
        return AppliedBatch(**{**asdict(record), "version": version, "seconds": self._clock() - began})

    # Plan

    def _stage(self, planned: _Planned, began: float) -> ApplyShard:
        """Plan the batch at the newest version of the dimension."""
        target, config = self._target, self._target.config
        snapshot = target.snapshot if planned.follows is None else None
        latest = self._dimension.latest()
        replicas = config.dimensions[target.name].shards or self._engine.cores
        memory = parse_memory(config.memory) // self._engine.tasks_of_a_process
        given = sum(_bytes(target.source, file) for file in planned.files)
        shards = replicas * _parts(max(given, self._stored_bytes(planned)), replicas, memory)
        schema = delta_schema(target.history)
        return ApplyShard(
            history=target.history if snapshot is None else snapshot_history(target.history),
            snapshot=snapshot,
            scan=self._scan(given, latest.version, shards, parse_memory(config.memory)),
            replica=ReplicaSpec(
                EntryRows(target.history),
                target.path,
                latest.table_id,
                replicas,
                config.replicas,
                parse_memory(config.replica_memory) // self._engine.tasks_of_a_process,
            ),
            version=latest.version,
            base=self._dimension.greatest_key(target.history.dimension.surrogate_key),
            shards=shards,
            memory=memory,
            tables=Tables(
                FileSpec(target.path, schema),
                feed_files(target.path, schema),
                moved_files(target.path, target.history),
                FileSpec(self._errors.path, ERROR_SCHEMA),
            ),
            origin=Origin(
                config.name,
                planned.stream,
                planned.number,
                datetime.fromtimestamp(began, UTC),
                target.source.path,
                record_format(target.source),
            ),
            cascade=self._cascade(planned, latest.version, replicas),
        )

    def _cascade(self, planned: _Planned, version: int, replicas: int) -> Cascade | None:
        """Return what the parents give to the members, at the newest versions of the parents' tables."""
        if not self._target.parents:
            return None
        config, tasks = self._target.config, self._engine.tasks_of_a_process
        parents = tuple(
            parent.versions(config, replicas, tasks, planned.number if place == planned.follows else None)
            for place, parent in enumerate(self._target.parents)
        )
        return Cascade(parents, version + 1, planned.follows, planned.since)

    def _scan(self, given: int, version: int, shards: int, memory: int) -> StoredScan | None:
        """Return a scan of the dimension if that is cheaper than replicas that follow as many changes."""
        if self._target.snapshot is not None:
            return None
        changes = given // _width(arrow_schema(self._target.source.columns))
        files = self._dimension.live.at(self._dimension.table.version())
        rows = sum((file.rows or 0) - file.removed for file in files)
        if not max(_SCANNED_CHANGES, rows // _SCANNED_ROWS) <= changes <= memory // _FILTER_SHARE // FILTER_BYTES:
            return None
        return StoredScan(self._target.history, self._target.path, version, shards, changes)

    def _stored_bytes(self, planned: _Planned) -> int:
        """Return about how many bytes of stored rows a task may hold: members that lack, or that follow a parent."""
        history, snapshot = self._target.history, self._target.snapshot
        if planned.follows is not None:
            width = _width(history.entry_schema)
        elif snapshot is not None and snapshot.missing == "delete":
            width = _width(history.dimension.key_schema)
        else:
            return 0
        files = self._dimension.live.at(self._dimension.table.version())
        return sum(file.rows or 0 for file in files) * width

    def _reader(self, shards: int) -> ReadChanges:
        form, dimension = record_format(self._target.source), self._target.history.dimension
        rule = ShardRule(dimension.natural_key, dimension.key_schema, shards, dimension.rules)
        return ReadChanges(ReadStep(form, form.columns, skippable=False), rule)

    # Commits

    def _changes(self, notes: Sequence[Mapping[str, Any]]) -> RowChanges:
        feed = _noted(notes, "feed")
        column = self._target.history.dimension.surrogate_key
        removed = _removed(self._dimension.path, feed, column)
        # A commit that only adds rows needs no change files: its data files are its changes.
        return RowChanges(column, removed, _noted(notes, "versions"), feed if len(removed) else ())

    def _commit(
        self,
        changes: RowChanges,
        notes: Sequence[Mapping[str, Any]],
        note: Mapping[str, Any],
        stage: ApplyShard,
        number: int,
        stream: str,
    ) -> int:
        """Commit the changed rows at the version after the planned one, and return that version."""
        greatest = max((given for each in notes if (given := each.get("greatest_key")) is not None), default=None)
        keys = {} if greatest is None else {"base": stage.base, "greatest_key": greatest}
        remembered = max(greatest or 0, stage.base)
        properties = {} if remembered <= self._dimension.remembered_key() else {GREATEST_KEY: str(remembered)}
        commit = Commit(application(stream, CHANGES), number, {**keys, **note}, properties)
        self._begin("changes", self._dimension)
        table = self._dimension.table
        change_rows_exactly(self._dimension.path, table, self._dimension.live, stage.version, changes, commit)
        self._hook("after changes")
        return self._dimension.latest().version

    def _follow_up(self, note: Mapping[str, Any], stream: str, number: int) -> None:
        """Commit the rejected changes and the moved facts that the note of the dimension's commit names."""
        pending = [DataFile(**file) for file in note["pending"]]
        if pending:
            self._begin("errors", self._errors)
            commit_files(self._errors.path, self._errors.table, pending, Commit(application(stream, CHANGES), number))
            self._hook("after errors")
        self._hook("before moved")
        self._holds()
        settle_moved(self._dimension.path)
        self._hook("after moved")

    def _begin(self, part: str, handle: DeltaHandle) -> None:
        self._hook(f"before {part}")
        self._holds()
        handle.require_form()

    def _record(self, notes: Sequence[Mapping[str, Any]], number: int, version: int, began: float) -> AppliedBatch:
        """Return the counts of a batch, which must add up."""
        counts = Counter[str]()
        for note in notes:
            counts.update(note.get("outcomes", {}))
        counts[str(ChangeOutcome.REJECTED)] += sum(note["malformed"] for note in notes)
        totals = {name: sum(note.get(name, 0) for note in notes) for name in _COUNTS}
        if sum(counts.values()) != totals["rows"]:
            raise ConservationError(
                f"batch {number}: {totals['rows']} changes were read, and {sum(counts.values())} have an outcome; "
                "nothing was committed"
            )
        outcomes = {str(outcome): counts[str(outcome)] for outcome in ChangeOutcome if counts[str(outcome)]}
        seconds = self._clock() - began
        return AppliedBatch(batch=number, version=version, outcomes=outcomes, seconds=seconds, **totals)


def _refuse_gaps(record: AppliedBatch) -> None:
    """Raise an error if a snapshot has records that name no member, because their members would count as missing."""
    rejected = record.outcomes.get(str(ChangeOutcome.REJECTED), 0)
    if rejected:
        raise QualityError(
            f"{rejected} records of the snapshot do not fit, and their members would be deleted as missing; nothing "
            "was committed. Repair the snapshot, or leave missing members with `--missing keep`"
        )


def _parts(size: int, replicas: int, memory: int) -> int:
    """Return the number of shards per replica, so that the rows of a task take a share of the memory."""
    task = max(_LEAST_TASK_BYTES, memory // _TASK_SHARE)
    return max(1, -(-size // (task * replicas)))


def _bytes(source: SourceConfig, file: FoundFile) -> int:
    """Return about how many bytes the rows of a file take in memory."""
    if source.format != "parquet":
        return file.size * (_COMPRESSION if compression_of(file.name) else 1)
    width = _width(arrow_schema(source.columns))
    try:
        return int(pq.read_metadata(f"{source.path}/{file.name}").num_rows) * width
    except (OSError, pa.ArrowException):
        return file.size  # the stage that reads the file reports it


def _width(columns: pa.Schema) -> int:
    """Return about how many bytes a row takes in memory."""
    return sum(_TEXT_WIDTH if is_bytes(field.type) else _WIDTH for field in columns)


def _noted(notes: Iterable[Mapping[str, Any]], part: str) -> list[DataFile]:
    return [DataFile(**file) for note in notes for file in note.get(part, ())]


def _removed(path: str, feed: Sequence[DataFile], column: str) -> NDArray[np.int64]:
    """Return the surrogate keys of the rows that are removed, ascending, from the change files."""
    found = [np.empty(0, np.int64)]
    for file in feed:
        table = pq.read_table(f"{path}/{file.path}", columns=[column, CHANGE_TYPE])
        chosen = table.filter(pc.is_in(table.column(CHANGE_TYPE), value_set=pa.array(_REMOVED)))
        found.append(np.asarray(chosen.column(column), dtype=np.int64))
    return np.sort(np.concatenate(found))
