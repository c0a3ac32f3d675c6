"""The protocol of a micro-batch: an order of steps in which a replay after a crash at any point changes nothing.

1. The batch joins at the newest table versions. The only results of an earlier attempt that remain are the members that
   it added. This attempt finds them in the dimension, so its facts get the same keys even if the batch's rows differ.
2. The frame of each round is computed: its tasks write new members, facts and rejected rows into files that no commit
   names yet, and return their notes. New members are committed at exactly the version that their keys were assigned
   at. If another writer committed first, the batch is planned again.
3. The facts are committed, which marks the batch as loaded. Rejected rows and routed duplicates follow, from the note
   of the facts (`headrace.pipelines.batch.tables`). If the run ends before that, `finish` completes the batch.

The task counts are reconciled before the facts are committed. If Spark writes the facts, they are checked again
afterward.
"""

from __future__ import annotations

import json
import logging
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from headrace.pipelines.batch.error_rows import Origin
from headrace.pipelines.batch.metrics import BatchCounts, first_failure, reconcile, record_of, summarise
from headrace.pipelines.batch.read_step import record_format
from headrace.pipelines.batch.stages import DUPLICATES_ROLE, Group, Prepared, StageRun, Target
from headrace.pipelines.batch.state import Batch, Upstream
from headrace.pipelines.batch.tables import BatchTables
from headrace.pipelines.catalog import BatchRecord
from headrace.pipelines.errors import BatchError, ConservationError, DeltaTableError, TableMovedError
from headrace.pipelines.hooks import Step, no_hook
from headrace.pipelines.source.identity import application
from headrace.pipelines.spark.columns import spark_schema
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.frame import NOTE, SHARD, STATE, State, member_column
from headrace.pipelines.spark.packing import bounded_batches
from headrace.storage.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from headrace.pipelines.batch.resolutions import RetryOf
    from headrace.pipelines.batch.worker import Stage
    from headrace.pipelines.catalog import Catalog

__all__ = ["BatchProtocol"]

_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 50
_LONGEST_PAUSE: Final = 2.0


class BatchProtocol:
    """Runs micro-batches.

    Parameters
    ----------
    prepared
        Prepared pipeline.
    catalog, run
        Run catalog that receives the batch records, and the id of this run.
    holds
        Function called before each write. It raises an error if this run may no longer write.
    hook
        Function called with the name of each step before and after the step. Tests use it to inject failures.
    clock
        Function that returns seconds since 1970.
    """

    def __init__(
        self,
        prepared: Prepared,
        catalog: Catalog,
        run: str,
        *,
        holds: Callable[[], None],
        hook: Callable[[str], None] = no_hook,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._catalog = catalog
        self._run = run
        self._hook = hook
        self._clock = clock
        self._tables = BatchTables(prepared, holds, hook)

    def loaded(self, stream: str) -> int | None:
        """Return the last batch of a stream in the facts, or None."""
        self._tables.facts.latest()
        return self._tables.facts.transaction(application(stream, "facts"))

    def finish(self, number: int, stream: str, attempt: str | None = None) -> BatchRecord | None:
        """Complete a batch whose facts are loaded, if its run ended early.

        Parameters
        ----------
        number, stream
            Number of the batch, and identity of the stream.
        attempt
            Id of the attempt that must have loaded it; None for any attempt.

        Returns
        -------
        BatchRecord or None
            Record of the loaded batch; None if the facts do not hold the batch, which can then be run.

        Raises
        ------
        BatchError
            If another attempt loaded the batch.
        DeltaTableError
            If the log of the facts no longer has the commits that must follow.
        """
        loaded = self.loaded(stream)
        if loaded is None or loaded < number:
            return None
        facts = self._tables.facts
        notes = facts.commit_notes(application(stream, "facts"), number)
        if not notes:
            raise DeltaTableError(
                f"{facts.path} holds batch {number} of stream {stream}, but its log no longer has the commit that "
                "names the rejected rows of the batch; restore the log from a backup, or begin a new stream with "
                "`headrace source adopt`"
            )
        note = notes[-1]
        if attempt is not None and note["attempt"] != attempt:
            raise BatchError(
                f"{facts.path} holds batch {number} of stream {stream} from another run, which used a copy of this "
                "checkpoint; restore the newer checkpoint, or begin a new stream with `headrace source adopt`"
            )
        batch = self._batch(number, stream, note["attempt"])
        self._tables.follow_up(note, batch)
        record = BatchRecord(**{**note["record"], "run": self._run, "detail": _recovered(note)})
        self._catalog.record_batch(record)
        return record

    def run_batch(
        self,
        pieces: DataFrame,
        number: int,
        stream: str,
        attempt: str = "",
        retry: RetryOf | None = None,
        upstream: Upstream | None = None,
    ) -> BatchRecord:
        """Load a batch that is not in the facts yet.

        Parameters
        ----------
        pieces
            Pieces of the batch's files, with the columns of `headrace.pipelines.spark.frame.PIECES`.
        number
            Number of the batch in the stream.
        stream
            Identity of the stream, which Delta's transactions carry.
        attempt
            Id of the attempt, stored in the note of the facts.
        retry
            Rejected rows that the batch retries; the frame then has the columns of
            `headrace.pipelines.batch.retry_step.RETRIED_RECORDS`. None for a batch of files.
        upstream
            What an earlier part of the pipeline did for the batch, or None.

        Raises
        ------
        BatchError
            If Spark failed, or other writers committed first on every attempt. The batch can be run again.
        QualityError
            If the data violated a guarantee. No fact was committed.
        """
        if retry is not None:
            self._tables.open_resolutions()
        batch = self._batch(number, stream, attempt, retry, upstream)
        batch.own = {role: self._tables.keys_given(role, batch) for role in self._inferring()}
        for planned in range(_ATTEMPTS):
            try:
                return self._load(pieces, batch)
            except TableMovedError as moved:
                _LOG.info("batch %d is planned again: %s", number, moved)
                time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.05 * 2**planned)))  # noqa: S311 - spreads writers
            finally:
                while batch.persisted:
                    batch.persisted.pop().unpersist()
        raise BatchError(
            f"batch {number}: other writers changed its tables during each of {_ATTEMPTS} attempts; nothing is lost, "
            "run again when they are done"
        )

    def _batch(
        self,
        number: int,
        stream: str,
        attempt: str,
        retry: RetryOf | None = None,
        upstream: Upstream | None = None,
    ) -> Batch:
        for role in self._prepared.lookups:
            self._tables.joined_by(role).latest()
        self._tables.facts.latest()
        return Batch(number, stream, attempt, self._tables.that_take_files(), self._clock, retry, upstream)

    def _inferring(self) -> list[str]:
        return [role for role in self._prepared.lookups if self._prepared.infers(role)]

    def _load(self, frame: DataFrame, batch: Batch) -> BatchRecord:
        notes: list[dict[str, Any]] = []
        batch.pieces = frame
        if self._prepared.transform is not None:
            stage = self._prepared.reading_stage(self._stage_run(batch))
            read = frame.mapInArrow(stage, spark_schema(stage.schema))
            frame = self._prepared.transform.apply(read, batch.persisted)
        rounds = self._prepared.rounds()
        for number, groups in enumerate(rounds):
            targets = self._targets(groups, batch)
            stages = self._prepared.stages(rounds, number, targets, self._stage_run(batch))
            packs = any(stage.packs for stage in stages)
            with bounded_batches(frame.sparkSession) if packs else nullcontext():
                frame = self._joined(frame if number == 0 else _rows_of_the_stream(frame), stages, groups, batch)
                notes += self._notes(frame, batch)
            first_failure(notes)
            for role in (role for group in groups for role in group.roles if self._prepared.infers(role)):
                self._tables.add_members(frame, role, notes, targets[role], batch)
        counts = summarise(notes)
        reconcile(counts, {})
        _require_retried(counts, batch)
        note = self._tables.commit_facts(frame, notes, counts, self._record(counts, batch), batch)
        self._tables.follow_up(note, batch)
        record = self._record(counts, batch)
        if "merged" in note:
            record = replace(record, detail={**record.detail, "merged": note["merged"]})
        self._hook("before record")
        self._catalog.record_batch(record)
        self._hook("after record")
        return record

    # Plan

    def _targets(self, groups: Sequence[Group], batch: Batch) -> dict[str, Target]:
        """Plan each role of a round at the newest version of its table."""
        with batch.phase("plan"):
            return {role: self._target(role, batch) for group in groups for role in group.roles}

    def _target(self, role: str, batch: Batch) -> Target:
        if self._prepared.infers(role):
            self._tables.remember_keys(role, batch)
        handle = self._tables.joined_by(role)
        latest = handle.latest()
        batch.versions[role] = latest.version
        base = 0
        if role != DUPLICATES_ROLE:
            base = handle.greatest_key(self._prepared.lookups[role].dimension.surrogate_key)
        shards = self._prepared.shards.get(role, 1)
        return Target(latest.version, base, shards, latest.table_id, tuple(batch.own.get(role, ())))

    def _stage_run(self, batch: Batch) -> StageRun:
        config = self._config
        began = datetime.fromtimestamp(batch.began, UTC)
        origin = Origin(
            config.name,
            batch.stream,
            batch.number,
            began,
            config.source.path,
            record_format(config.source),
            None if batch.retry is None else batch.retry.origins,
        )
        return StageRun(self._run, self._prepared.shards, batch.files, origin)

    # Join

    def _joined(self, frame: DataFrame, stages: Sequence[Stage], groups: Sequence[Group], batch: Batch) -> DataFrame:
        """Return the frame of a round, which is computed when its notes are read; persisted if it has other rows."""
        from pyspark import StorageLevel  # noqa: PLC0415 - pyspark is heavy

        for number, (stage, group) in enumerate(zip(stages, groups, strict=True)):
            if group.shuffled:
                frame = frame.repartitionById(self._prepared.shards[group.roles[0]], SHARD)
            elif group.alone:
                frame = frame.coalesce(1) if number == 0 else frame.repartition(1)
            frame = frame.mapInArrow(stage, spark_schema(stage.output_schema))
        if set(frame.columns) != {STATE, NOTE}:
            frame = frame.persist(StorageLevel.MEMORY_AND_DISK_DESER)
            batch.persisted.append(frame)
        return frame

    def _notes(self, frame: DataFrame, batch: Batch) -> list[dict[str, Any]]:
        """Compute the frame, and return the notes of its tasks."""
        self._hook("before join")
        with batch.phase("join"), explained(self._computation()):
            rows = frame.where(frame[STATE] == int(State.NOTE)).select(NOTE).collect()
        self._hook(Step("after join", f"batch {batch.number}: writing tables"))
        return [json.loads(row[0]) for row in rows]

    def _computation(self) -> str:
        """Return what the tasks of a batch compute, for the message of a failure."""
        transform = self._prepared.transform
        steps = () if transform is None else transform.python_steps
        return " or ".join([*(f"a user-defined function in {step}" for step in steps), "the join of a batch"])

    # Record

    def _record(self, counts: BatchCounts, batch: Batch) -> BatchRecord:
        seconds = self._clock() - batch.began
        deadline = self._config.deadline
        record = record_of(
            counts,
            run=self._run,
            stream=batch.stream,
            batch=batch.number,
            started=batch.began,
            seconds=seconds,
            late=deadline is not None and seconds > parse_duration(deadline),
            detail={
                "outcomes": counts.outcomes.as_dict(),
                "joins": counts.joins,
                "stages": counts.slowest,
                "workers": counts.workers,
                "phases": dict(batch.phases),
                "versions": dict(batch.versions),
            },
        )
        return record if batch.upstream is None else batch.upstream.completed(record)


def _require_retried(counts: BatchCounts, batch: Batch) -> None:
    """Raise an error unless each row that the batch retries came in once."""
    if batch.retry is not None and counts.rows_in != batch.retry.rows.num_rows:
        raise ConservationError(
            f"{batch.retry.rows.num_rows} rejected rows were to be retried, but {counts.rows_in} came in: a defect of "
            "Headrace"
        )


def _recovered(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of a batch whose run ended early, from the note of its facts."""
    return {"recovered": True, **({"outcomes": note["outcomes"]} if "outcomes" in note else {})}


def _rows_of_the_stream(frame: DataFrame) -> DataFrame:
    """Return a round's frame without its notes and members, for the next round."""
    rows = frame.where(frame[STATE] < int(State.MEMBER))
    return rows.drop(*(name for name in frame.columns if name.startswith(member_column(""))))
