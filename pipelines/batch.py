"""The protocol of a micro-batch: what is done in which order, so that a crash anywhere, replayed, changes nothing.

1. If the facts hold the batch, it is done; only its record may be missing.
2. For each round: the versions to join at are planned, and kept in the catalog before anything is written. A replay
   takes the kept plan, so it computes the same rows whatever else happened to the dimensions.
3. The round's frame is computed and persisted; its tasks write new members and facts into files of the tables, and
   their notes come back. The new members' files are committed.
4. After the last round: rejected rows, routed duplicates and, last of all, the facts are committed.

Every commit carries a transaction of Delta: the application is the stream and the table's part, the version the batch.
A commit that is repeated is skipped, and files that no commit names are not part of a table. The books are checked
before the facts are committed. Tables that ask for more than plain files are written by Spark, from the same frame.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from etl import CAUSES_COLUMN
from etl.settlement import CAUSES_TYPE
from pipelines.data_files import FILE_SCHEMA, DataFile, FileSpec, FileTask
from pipelines.delta_commits import append, commit_files, takes_files
from pipelines.delta_tables import DeltaHandle, has_table
from pipelines.failures import explained
from pipelines.frame import FILE, MALFORMED, NOTE, SHARD, STATE, State, member_column
from pipelines.metrics import BatchCounts, check_books, first_failure, record_of, summarise
from pipelines.stages import DUPLICATES_ROLE, Group, Prepared, StageRun, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from pipelines.catalog import BatchRecord, Catalog
    from pipelines.frame import ShardRule
    from pipelines.worker import Stage

__all__ = ["ERROR_SCHEMA", "BatchProtocol"]

_LOG = logging.getLogger(__name__)
_MALFORMED_REASON = "the record does not fit the schema: too many or too few fields, or a value of another type"
_CAUSES_AS_TEXT = (
    f"transform({CAUSES_COLUMN}, c -> concat(c.role, ': ', c.column, ' = ', coalesce(c.value, 'null'), ': ', c.reason))"
)
ERROR_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("batch", pa.int64()),
        (FILE, pa.string()),
        ("reason", pa.string()),
        ("causes", CAUSES_TYPE),
        ("record", pa.string()),
    ]
)


def _no_hook(step: str) -> None:
    """Take note of nothing."""


@dataclass
class _Batch:
    """One batch on its way through the protocol."""

    number: int
    stream: str
    began: float
    plan: dict[str, Any]
    phases: dict[str, float]
    persisted: list[DataFrame]
    files: frozenset[str]


class BatchProtocol:
    """Runs micro-batches; called by Spark's `foreachBatch`.

    Parameters
    ----------
    prepared
        The pipeline.
    catalog, run
        Where plans and records go.
    owner
        Identity of this run for the operators that workers keep.
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
        self._holds = holds
        self._hook = hook
        self._clock = clock
        roles = [*prepared.lookups, *([DUPLICATES_ROLE] if prepared.duplicates is not None else [])]
        paths = [*map(prepared.path, roles), self._config.sink.path, self._config.errors_path]
        if has_table(self._config.duplicates_path):
            paths.append(self._config.duplicates_path)
        self._handles = {path: DeltaHandle(path) for path in dict.fromkeys(paths)}

    def run_batch(self, frame: DataFrame, number: int, stream: str) -> BatchRecord:
        """Do a batch, or find that it has been done.

        Parameters
        ----------
        frame
            Its rows, with the columns of `pipelines.frame.source_schema`.
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
        facts = self._handles[self._config.sink.path]
        facts.latest()
        application = _application(stream, "facts")
        done = facts.transaction(application)
        if done is not None and done >= number:
            return self._recover(facts.commit_note(application, number), number, stream)
        batch = _Batch(number, stream, self._clock(), self._catalog.plan(stream, number) or {}, {}, [], self._files())
        try:
            return self._do(frame, batch)
        finally:
            for persisted in batch.persisted:
                persisted.unpersist()

    def _files(self) -> frozenset[str]:
        """Return the tables that take files from tasks."""
        return frozenset(path for path, handle in self._handles.items() if takes_files(handle.table))

    def _do(self, frame: DataFrame, batch: _Batch) -> BatchRecord:
        notes: list[dict[str, Any]] = []
        rounds = self._prepared.rounds(self._shards(batch))
        for number, groups in enumerate(rounds):
            stages = self._planned(rounds, number, batch)
            frame = self._joined(frame if number == 0 else _rows_of_the_stream(frame), stages, groups, batch)
            notes += self._notes(frame, batch)
            first_failure(notes)
            for role in (role for group in groups for role in group.roles if self._prepared.infers(role)):
                self._append_members(frame, role, notes, batch)
        counts = summarise(notes)
        check_books(counts, {})
        record = self._record(counts, batch)
        self._append_rest(frame, counts, batch)
        self._append_facts(frame, notes, counts, record, batch)
        record = self._record(counts, batch)
        self._hook("before record")
        self._catalog.record_batch(record)
        self._hook("after record")
        return record

    # Plan

    def _planned(self, rounds: list[list[Group]], number: int, batch: _Batch) -> list[Stage]:
        """Return the stages of a round at versions that are kept before anything is written."""
        with self._phase("plan", batch):
            roles = [role for group in rounds[number] for role in group.roles]
            targets = {role: self._target(role, batch) for role in roles}
            kept = {role: asdict(target) for role, target in targets.items()}
            if any(batch.plan.get(role) != target for role, target in kept.items()):
                batch.plan |= kept
                self._catalog.save_plan(batch.stream, batch.number, batch.plan)
            return self._prepared.stages(rounds, number, targets, StageRun(self._run, self._shards(batch), batch.files))

    def _target(self, role: str, batch: _Batch) -> Target:
        """Return the kept plan of a role, or plan it at the table's latest version."""
        handle = self._handles[self._prepared.path(role)]
        latest = handle.latest()
        kept = batch.plan.get(role)
        if kept is not None and kept["table_id"] == latest.table_id and kept["version"] <= latest.version:
            return Target(**kept)
        base = 0
        if role != DUPLICATES_ROLE:
            base = handle.greatest_key(self._prepared.lookups[role].dimension.surrogate_key)
        return Target(latest.version, base, self._shards(batch).get(role, 1), latest.table_id)

    def _shards(self, batch: _Batch) -> dict[str, int]:
        """Return the number of shards for each role: as the batch began, even if the pipeline says otherwise now."""
        return {role: batch.plan.get(role, {}).get("shards", count) for role, count in self._prepared.shards.items()}

    # Join

    def _joined(self, frame: DataFrame, stages: Sequence[Stage], groups: Sequence[Group], batch: _Batch) -> DataFrame:
        """Return the persisted frame of a round; it is computed when its notes are read."""
        from pyspark import StorageLevel  # noqa: PLC0415 - pyspark is heavy

        for number, (stage, group) in enumerate(zip(stages, groups, strict=True)):
            if group.shuffled:
                role = group.roles[0]
                frame = _shuffled(frame, self._prepared.shard_rule(role, self._shards(batch)[role]))
            elif group.alone:
                frame = frame.coalesce(1) if number == 0 else frame.repartition(1)
            frame = frame.mapInArrow(stage, _spark_schema(stage.schema))
        frame = frame.persist(StorageLevel.MEMORY_AND_DISK_DESER)
        batch.persisted.append(frame)
        return frame

    def _notes(self, frame: DataFrame, batch: _Batch) -> list[dict[str, Any]]:
        """Compute the frame, and return what its tasks noted."""
        self._hook("before join")
        with self._phase("join", batch), explained("the join of a batch"):
            rows = frame.where(frame[STATE] == int(State.NOTE)).select(NOTE).collect()
        self._hook("after join")
        return [json.loads(row[0]) for row in rows]

    # Write

    def _append_members(self, frame: DataFrame, role: str, notes: Sequence[Mapping[str, Any]], batch: _Batch) -> None:
        joins = [join for note in notes for join in note["joins"] if join["role"] == role]
        if not sum(join.get("new_members", 0) for join in joins):
            return
        path, part = self._prepared.path(role), f"members:{role}"
        if path in batch.files:
            self._commit(_noted_files(joins), path, part, batch)
            return
        members = frame.where(frame[STATE] == int(State.MEMBER)).where(frame[member_column(role)].isNotNull())
        self._append_by_spark(members.select(f"{member_column(role)}.*").coalesce(1), path, part, batch)

    def _append_rest(self, frame: DataFrame, counts: BatchCounts, batch: _Batch) -> None:
        """Append what does not become a fact."""
        written: dict[str, int | None] = {}
        if counts.books.rejected:
            spec = FileSpec(self._config.errors_path, ERROR_SCHEMA)
            written["errors"] = self._append(self._rejected(frame, batch), spec, "errors", batch)
        if counts.books.routed:
            spec = FileSpec(self._config.duplicates_path, self._prepared.duplicate_schema)
            rows = frame.where(frame[STATE] == int(State.DUPLICATE)).select(*map(_quoted, spec.schema.names))
            written["duplicates"] = self._append(rows, spec, "duplicates", batch)
        check_books(counts, written)

    def _rejected(self, frame: DataFrame, batch: _Batch) -> DataFrame:
        """Return the rows of the error table: reason, causes and the record as it came."""
        from pyspark.sql import functions as sf  # noqa: PLC0415 - pyspark is heavy

        original = sf.to_json(
            sf.struct(*(sf.col(_quoted(name)) for name in self._prepared.stream.names)), {"ignoreNullFields": "false"}
        )
        rejected = frame.where(frame[STATE].isin(int(State.REJECTED), int(State.MALFORMED)))
        return rejected.select(
            sf.lit(batch.stream).alias("stream"),
            sf.lit(batch.number).cast("bigint").alias("batch"),
            sf.col(FILE),
            sf.when(sf.col(MALFORMED).isNotNull(), _MALFORMED_REASON)
            .otherwise(sf.concat_ws("; ", sf.expr(_CAUSES_AS_TEXT)))
            .alias("reason"),
            sf.col(CAUSES_COLUMN).alias("causes"),
            sf.coalesce(sf.col(MALFORMED), original).alias("record"),
        )

    def _append_facts(
        self,
        frame: DataFrame,
        notes: Sequence[Mapping[str, Any]],
        counts: BatchCounts,
        record: BatchRecord,
        batch: _Batch,
    ) -> None:
        path = self._config.sink.path
        note = {"record": {name: value for name, value in asdict(record).items() if name != "detail"}}
        if path in batch.files:
            files = _noted_files(notes)
            check_books(counts, {"facts": sum(file.rows for file in files)})
            self._commit(files, path, "facts", batch, note)
            return
        names = self._prepared.fact_schema.names
        rows = frame.where(frame[STATE] == int(State.OPEN)).select(*map(_quoted, names))
        check_books(counts, {"facts": self._append_by_spark(rows, path, "facts", batch, note)})

    def _append(self, rows: DataFrame, spec: FileSpec, part: str, batch: _Batch) -> int | None:
        """Append rows of the batch's frame to a table, and return how many were written."""
        if spec.path not in batch.files:
            return self._append_by_spark(rows, spec.path, part, batch)
        with self._phase(part, batch), explained(f"writing to {spec.path}"):
            written = rows.mapInArrow(FileTask(spec), _spark_schema(FILE_SCHEMA)).collect()
        files = [DataFile(**json.loads(row[0])) for row in written]
        self._commit(files, spec.path, part, batch)
        return sum(file.rows for file in files)

    def _commit(
        self, files: Sequence[DataFile], path: str, part: str, batch: _Batch, note: Mapping[str, Any] | None = None
    ) -> None:
        """Commit files that tasks wrote."""
        self._hook(f"before {part}")
        self._holds()
        with self._phase(part, batch), explained(f"the commit to {path}"):
            commit_files(self._handles[path].table, files, _application(batch.stream, part), batch.number, note)
        self._hook(f"after {part}")

    def _append_by_spark(
        self, rows: DataFrame, path: str, part: str, batch: _Batch, note: Mapping[str, Any] | None = None
    ) -> int | None:
        """Append rows by Spark's writer, and return how many its commit says were written."""
        self._hook(f"before {part}")
        self._holds()
        application = _application(batch.stream, part)
        with self._phase(part, batch), explained(f"the append to {path}"):
            append(rows, path, application, batch.number, note)
        self._hook(f"after {part}")
        handle = self._handles[path]
        handle.latest()
        return handle.commit_note(application, batch.number).get("rows_written")

    # Record

    def _record(self, counts: BatchCounts, batch: _Batch) -> BatchRecord:
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
        from storage.units import parse_duration  # noqa: PLC0415 - beside its only use

        return self._config.deadline is not None and seconds > parse_duration(self._config.deadline)

    def _phase(self, name: str, batch: _Batch) -> _Phase:
        return _Phase(name, batch.phases, self._clock)


class _Phase:
    """Adds the time within it to a batch's phases."""

    def __init__(self, name: str, phases: dict[str, float], clock: Callable[[], float]) -> None:
        self._name = name
        self._phases = phases
        self._clock = clock

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._phases[self._name] = self._phases.get(self._name, 0.0) + self._clock() - self._began


def _application(stream: str, part: str) -> str:
    return f"headrace:{stream}:{part}"


def _noted_files(notes: Sequence[Mapping[str, Any]]) -> list[DataFile]:
    """Return the files that tasks noted."""
    return [DataFile(**file) for note in notes for file in note.get("files", ())]


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

        frame = frame.withColumn(SHARD, shard(*map(_quoted, rule.columns)))
    return frame.repartitionById(rule.shards, SHARD)


def _spark_schema(schema: pa.Schema) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - pyspark is heavy

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
