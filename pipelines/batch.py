"""The protocol of a micro-batch: what is done in which order, so that a crash anywhere, replayed, changes nothing.

1. If the facts hold the batch, it is done; only its record may be missing.
2. For each round: the versions to join at are planned, and kept in the catalog before anything is written. A replay
   takes the kept plan, so it computes the same rows whatever else happened to the dimensions.
3. The round's frame is computed and persisted; its tasks write new members and facts into files of the tables, and
   their notes come back. The new members' files are committed.
4. After the last round: rejected rows, routed duplicates and, last of all, the facts are committed.

Every commit carries a transaction of Delta, so that one that is repeated is skipped (`pipelines.batch_tables`). The
books are checked before the facts are committed, and after it if Spark writes them, for only then they are counted.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # noqa: TC002 - Spark looks up the annotations of its functions

from headrace.pipelines.batch_state import Batch, application
from headrace.pipelines.batch_tables import BatchTables
from headrace.pipelines.failures import explained
from headrace.pipelines.frame import NOTE, SHARD, STATE, State, member_column
from headrace.pipelines.metrics import BatchCounts, check_books, first_failure, record_of, summarise
from headrace.pipelines.spark_columns import quoted, spark_schema
from headrace.pipelines.stages import DUPLICATES_ROLE, Group, Prepared, StageRun, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from headrace.pipelines.catalog import BatchRecord, Catalog
    from headrace.pipelines.frame import ShardRule
    from headrace.pipelines.worker import Stage

__all__ = ["BatchProtocol"]

_LOG = logging.getLogger(__name__)


def _no_hook(step: str) -> None:
    """Take note of nothing."""


class BatchProtocol:
    """Runs micro-batches; called by Spark's `foreachBatch`.

    Parameters
    ----------
    prepared
        The pipeline.
    catalog, run
        Where plans and records go, and this run's identity.
    holds
        Called before each write; raises when this run may not write any more.
    hook
        Called with the name of each step before and after it; tests make it fail.
    clock
        Seconds since 1970.
    """

    def __init__(
        self,
        prepared: Prepared,
        catalog: Catalog,
        run: str,
        *,
        holds: Callable[[], None],
        hook: Callable[[str], None] = _no_hook,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._catalog = catalog
        self._run = run
        self._hook = hook
        self._clock = clock
        self._tables = BatchTables(prepared, holds, hook)

    def run_batch(self, frame: DataFrame, number: int, stream: str) -> BatchRecord:
        """Do a batch, or find that it has been done.

        Parameters
        ----------
        frame
            Its rows, with the columns of `headrace.pipelines.frame.source_schema`.
        number
            Its number in the stream.
        stream
            The stream's identity, which Delta's transactions carry.

        Raises
        ------
        BatchError
            If Spark failed; the batch can be done again.
        QualityError
            If the data broke a promise; nothing was committed that a repetition would not find again.
        """
        facts = self._tables.facts
        facts.latest()
        done = facts.transaction(application(stream, "facts"))
        if done is not None and done >= number:
            return self._recover(facts.commit_note(application(stream, "facts"), number), number, stream)
        plan, files = self._catalog.plan(stream, number) or {}, self._tables.that_take_files()
        batch = Batch(number, stream, plan, files, self._clock)
        try:
            return self._do(frame, batch)
        finally:
            for persisted in batch.persisted:
                persisted.unpersist()

    def _do(self, frame: DataFrame, batch: Batch) -> BatchRecord:
        notes: list[dict[str, Any]] = []
        rounds = self._prepared.rounds(self._shards(batch))
        for number, groups in enumerate(rounds):
            stages = self._planned(rounds, number, batch)
            frame = self._joined(frame if number == 0 else _rows_of_the_stream(frame), stages, groups, batch)
            notes += self._notes(frame, batch)
            first_failure(notes)
            for role in (role for group in groups for role in group.roles if self._prepared.infers(role)):
                self._tables.append_members(frame, role, notes, batch)
        counts = summarise(notes)
        check_books(counts, {})
        record = self._record(counts, batch)
        self._tables.append_rest(frame, counts, batch)
        self._tables.append_facts(frame, notes, counts, record, batch)
        record = self._record(counts, batch)
        self._hook("before record")
        self._catalog.record_batch(record)
        self._hook("after record")
        return record

    # Plan

    def _planned(self, rounds: list[list[Group]], number: int, batch: Batch) -> list[Stage]:
        """Return the stages of a round at versions that are kept before anything is written."""
        with batch.phase("plan"):
            roles = [role for group in rounds[number] for role in group.roles]
            targets = {role: self._target(role, batch) for role in roles}
            kept = {role: asdict(target) for role, target in targets.items()}
            if any(batch.plan.get(role) != target for role, target in kept.items()):
                batch.plan |= kept
                self._catalog.save_plan(batch.stream, batch.number, batch.plan)
            return self._prepared.stages(rounds, number, targets, StageRun(self._run, self._shards(batch), batch.files))

    def _target(self, role: str, batch: Batch) -> Target:
        """Return the kept plan of a role, or plan it at the table's latest version."""
        handle = self._tables.joined_by(role)
        latest = handle.latest()
        kept = batch.plan.get(role)
        if kept is not None and kept["table_id"] == latest.table_id and kept["version"] <= latest.version:
            return Target(**kept)
        base = 0
        if role != DUPLICATES_ROLE:
            base = handle.greatest_key(self._prepared.lookups[role].dimension.surrogate_key)
        return Target(latest.version, base, self._shards(batch).get(role, 1), latest.table_id)

    def _shards(self, batch: Batch) -> dict[str, int]:
        """Return the number of shards for each role: as the batch began, even if the pipeline says otherwise now."""
        return {role: batch.plan.get(role, {}).get("shards", count) for role, count in self._prepared.shards.items()}

    # Join

    def _joined(self, frame: DataFrame, stages: Sequence[Stage], groups: Sequence[Group], batch: Batch) -> DataFrame:
        """Return the persisted frame of a round; it is computed when its notes are read."""
        from pyspark import StorageLevel  # noqa: PLC0415 - pyspark is heavy

        for number, (stage, group) in enumerate(zip(stages, groups, strict=True)):
            if group.shuffled:
                role = group.roles[0]
                frame = _shuffled(frame, self._prepared.shard_rule(role, self._shards(batch)[role]))
            elif group.alone:
                frame = frame.coalesce(1) if number == 0 else frame.repartition(1)
            frame = frame.mapInArrow(stage, spark_schema(stage.schema))
        frame = frame.persist(StorageLevel.MEMORY_AND_DISK_DESER)
        batch.persisted.append(frame)
        return frame

    def _notes(self, frame: DataFrame, batch: Batch) -> list[dict[str, Any]]:
        """Compute the frame, and return what its tasks noted."""
        self._hook("before join")
        with batch.phase("join"), explained("the join of a batch"):
            rows = frame.where(frame[STATE] == int(State.NOTE)).select(NOTE).collect()
        self._hook("after join")
        return [json.loads(row[0]) for row in rows]

    # Record

    def _record(self, counts: BatchCounts, batch: Batch) -> BatchRecord:
        seconds = self._clock() - batch.began
        return record_of(
            counts,
            run=self._run,
            stream=batch.stream,
            batch=batch.number,
            started=batch.began,
            seconds=seconds,
            late=self._late(seconds),
            detail={
                "outcomes": counts.books.as_dict(),
                "joins": counts.joins,
                "stages": counts.slowest,
                "workers": counts.workers,
                "phases": dict(batch.phases),
                "plan": dict(batch.plan),
            },
        )

    def _recover(self, note: Mapping[str, Any], number: int, stream: str) -> BatchRecord:
        """Record a batch whose facts are in, by what their commit says, for a run that ended before it could."""
        _LOG.info("batch %d of %s was loaded before; it is skipped", number, stream)
        blank = record_of(
            summarise([]), run=self._run, stream=stream, batch=number, started=self._clock(), seconds=0.0, late=False,
            detail={"recovered": True},
        )  # fmt: skip
        record = type(blank)(**{**asdict(blank), **note.get("record", {}), "run": self._run})
        self._catalog.record_batch(record)
        return record

    def _late(self, seconds: float) -> bool:
        from headrace.storage.units import parse_duration  # noqa: PLC0415 - beside its only use

        return self._config.deadline is not None and seconds > parse_duration(self._config.deadline)


def _rows_of_the_stream(frame: DataFrame) -> DataFrame:
    """Return a round's frame for the next one: without its notes and members."""
    rows = frame.where(frame[STATE] < int(State.MEMBER))
    return rows.drop(*(name for name in frame.columns if name.startswith(member_column(""))))


def _shuffled(frame: DataFrame, rule: ShardRule) -> DataFrame:
    """Return the frame with each row in the partition of its shard."""
    from pyspark.sql.functions import arrow_udf  # noqa: PLC0415 - pyspark is heavy

    if SHARD not in frame.columns:

        @arrow_udf(returnType="int")
        def shard(*columns: pa.Array) -> pa.Array:
            return rule.of(list(columns))

        frame = frame.withColumn(SHARD, shard(*map(quoted, rule.columns)))
    return frame.repartitionById(rule.shards, SHARD)
