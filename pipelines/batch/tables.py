"""The Delta tables that a batch writes, and the order of the commits.

1. New members: at exactly the version at which their keys were planned; otherwise the batch is planned again.
2. Facts: the commit that marks the batch as loaded. Its note names the files of rejected rows and routed duplicates,
   which tasks have written but which are not part of their tables yet.
3. Rejected rows and routed duplicates, from the note. If a run ends before this step, the next run completes it.

Every commit carries a Delta transaction: the application is the stream and the table's part, the version is the batch
number. Spark writes the tables that need more than plain files, from the same frame. Rows to be committed after the
facts are then staged as Parquet in the folder of their table.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.batch.metrics import reconcile
from headrace.pipelines.batch.resolutions import RESOLUTION_SCHEMA
from headrace.pipelines.batch.stages import DUPLICATES_ROLE, member_schema
from headrace.pipelines.delta.commits import (
    NEW_MEMBERS,
    Commit,
    append,
    append_exactly,
    commit_exactly,
    commit_files,
)
from headrace.pipelines.delta.data_files import DataFile, FileSpec, FileWriter
from headrace.pipelines.delta.merges import merge, set_properties
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import GREATEST_KEY, DeltaHandle, has_table, registered_streams
from headrace.pipelines.errors import BatchError, DeltaTableError, TableMovedError
from headrace.pipelines.source.identity import source_of
from headrace.pipelines.spark.columns import quoted, spark_schema
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.frame import REJECTED, ROUTED, STATE, State, member_column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.batch.merge import MergeRule
    from headrace.pipelines.batch.metrics import BatchCounts
    from headrace.pipelines.batch.stages import Prepared, Target
    from headrace.pipelines.batch.state import Batch
    from headrace.pipelines.catalog import BatchRecord

__all__ = ["BatchTables"]

RESOLUTIONS: Final = "resolutions"
_STAGED: Final = "_headrace_staged"
_CHANNELS: Final = {"errors": (State.REJECTED, REJECTED), "duplicates": (State.DUPLICATE, ROUTED)}


class BatchTables:
    """The tables of a pipeline, and the appends of its batches.

    Parameters
    ----------
    prepared
        Prepared pipeline.
    holds
        Function called before each write. It raises an error if this run may no longer write.
    hook
        Function called with the name of each step before and after the step.
    """

    def __init__(self, prepared: Prepared, holds: Callable[[], None], hook: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._holds = holds
        self._hook = hook
        roles = [*prepared.lookups, *([DUPLICATES_ROLE] if prepared.duplicates is not None else [])]
        paths = [*map(prepared.path, roles), self._config.sink.path, self._config.errors_path]
        others = (self._config.duplicates_path, self._config.resolutions_path)
        paths += [path for path in others if has_table(path)]
        self._handles = {path: DeltaHandle(path) for path in dict.fromkeys(paths)}
        self._paths = {
            "errors": self._config.errors_path,
            "duplicates": self._config.duplicates_path,
            RESOLUTIONS: self._config.resolutions_path,
        }

    @property
    def facts(self) -> DeltaHandle:
        """Handle of the fact table."""
        return self._handles[self._config.sink.path]

    def open_resolutions(self) -> None:
        """Open the table of resolutions, which a retry needs and which may be new."""
        self._handle(self._paths[RESOLUTIONS])

    def joined_by(self, role: str) -> DeltaHandle:
        """Return the table that a role joins with."""
        return self._handles[self._prepared.path(role)]

    def that_take_files(self) -> dict[str, tuple[str, ...]]:
        """Return the partition columns of each table whose files the tasks write, by table path."""
        return {
            path: tuple(handle.table.metadata().partition_columns)
            for path, handle in self._handles.items()
            if takes_files(handle.table) and not (path == self._config.sink.path and self._prepared.merge)
        }

    # Members

    def keys_given(self, role: str, batch: Batch) -> list[tuple[int, int]]:
        """Return the key ranges that earlier attempts at a batch assigned to new members, from the table's log."""
        handle = self.joined_by(role)
        application = batch.application(_members(role))
        done = handle.transaction(application)
        if done is None or done < batch.number:
            return []
        notes = handle.commit_notes(application, batch.number)
        return [(note["base"], note["greatest_key"]) for note in notes]

    def remember_keys(self, role: str, batch: Batch) -> None:
        """Store the dimension's highest key in its property if another job assigned it, before facts carry the key.

        Otherwise the key could be assigned again after the member is deleted.

        Raises
        ------
        TableMovedError
            If another writer changed the dimension in the meantime.
        """
        lookup = self._prepared.lookups[role]
        handle, path = self.joined_by(role), self._prepared.path(role)
        version, greatest = handle.latest().version, handle.greatest_key(lookup.dimension.surrogate_key)
        if greatest <= handle.remembered_key():
            return
        self._holds()
        commit = Commit("", 0, properties={GREATEST_KEY: str(greatest)})
        with explained(f"the commit of the property {GREATEST_KEY} to {path}"):
            if path in batch.files:
                commit_exactly(path, handle.table, version, (), commit)
            else:
                append_exactly(_no_rows(member_schema(lookup)), path, version, commit)

    def add_members(
        self, frame: DataFrame, role: str, notes: Sequence[Mapping[str, Any]], target: Target, batch: Batch
    ) -> None:
        """Add any new members of a role's dimension, at exactly the version at which their keys were assigned.

        Raises
        ------
        TableMovedError
            If another writer changed the dimension after that version.
        """
        joins = [join for note in notes for join in note["joins"] if join["role"] == role]
        greatest = max((join["greatest_key"] for join in joins if join.get("new_members")), default=None)
        if greatest is None:
            return
        path, part = self._prepared.path(role), _members(role)
        count = sum(join.get("new_members", 0) for join in joins)
        commit = Commit(
            batch.application(part),
            batch.number,
            {"base": target.base, "greatest_key": greatest, NEW_MEMBERS: count},
            {GREATEST_KEY: str(greatest)},
        )
        self._begin(part, path)
        with batch.phase(part), explained(f"the commit of new members to {path}"):
            if path in batch.files:
                files = [DataFile(**file) for join in joins for file in join.get("files", ())]
                commit_exactly(path, self._handles[path].table, target.version, files, commit)
            else:
                members = frame.where(frame[STATE] == int(State.MEMBER)).where(frame[member_column(role)].isNotNull())
                append_exactly(members.select(f"{member_column(role)}.*").coalesce(1), path, target.version, commit)
        batch.own.setdefault(role, []).append((target.base, greatest))
        self._hook(f"after {part}")

    # Facts and subsequent commits

    def commit_facts(
        self,
        frame: DataFrame,
        notes: Sequence[Mapping[str, Any]],
        counts: BatchCounts,
        record: BatchRecord,
        batch: Batch,
    ) -> dict[str, Any]:
        """Commit the facts, and return their note: the batch's record, and the commits that must follow.

        Raises
        ------
        TableMovedError
            If the batch searched for duplicates, and another writer changed the facts after the planned version.
        """
        pending = self._pending(frame, notes, counts, batch)
        plain = {name: value for name, value in asdict(record).items() if name != "detail"}
        outcomes = counts.outcomes.as_dict()
        note = {"attempt": batch.attempt, "record": plain, "pending": pending, "outcomes": outcomes}
        note["versions"] = dict(batch.versions)
        if batch.upstream is not None:
            note |= batch.upstream.note
        if batch.retry is not None:
            note["retried"] = batch.retry.summary()
        commit = Commit(batch.application("facts"), batch.number, note)
        path, version = self._config.sink.path, batch.versions.get(DUPLICATES_ROLE)
        files = _noted_files(notes, "facts")
        if path in batch.files:
            reconcile(counts, {"facts": sum(file.rows for file in files)})
        self._begin("facts", path)
        if self._prepared.merge is not None:
            merged = self._merge_facts(frame, self._prepared.merge, counts, commit, batch)
            self._hook("after facts")
            return {**note, "merged": merged}
        with batch.phase("facts"), explained(f"the commit to {path}"):
            self._write_facts(frame, files if path in batch.files else None, version, commit, batch.stream)
        self._hook("after facts")
        if path not in batch.files:
            reconcile(counts, {"facts": self._rows_written(commit)})
        return note

    def _merge_facts(
        self, frame: DataFrame, rule: MergeRule, counts: BatchCounts, commit: Commit, batch: Batch
    ) -> dict[str, int]:
        """Merge facts in one commit, and return what became of them; register their stream before."""
        path = self._config.sink.path
        with batch.phase("facts"), explained(f"the commit to {path}"):
            self._register(batch.stream)
            rows = frame.where(frame[STATE] == int(State.OPEN))
            assert batch.pieces is not None
            folded = rule.fold(rows, batch.pieces, batch.persisted)
            reconcile(counts, {"facts": folded.rows})
            self._hook("before merge")
            self._refuse_loaded(commit)
            merge(folded.frame, path, folded.clauses(), commit)
            self._require_own(commit)
        written = self._last_note(commit)
        return folded.counts({} if written is None else written["metrics"])

    def _register(self, stream: str) -> None:
        """Register the stream of a merge in the fact table, in a commit of its own: MERGE sets no properties.

        A stream without a batch does not count, so an end of the run before the facts is harmless.
        """
        source = source_of(self._config)
        set_properties(self.facts, lambda: registered_streams(self.facts, self._config.name, stream, source))

    def follow_up(self, note: Mapping[str, Any], batch: Batch) -> None:
        """Commit the rejected rows and routed duplicates that the facts' note names, unless this was already done."""
        for part, pending in note["pending"].items():
            path = self._paths[part]
            commit = Commit(batch.application(part), batch.number)
            self._begin(part, path)
            with batch.phase(part), explained(f"the commit to {path}"):
                if "staged" in pending:
                    _append_staged(pending["staged"], self._handle(path), commit)
                else:
                    commit_files(
                        path, self._handle(path).table, [DataFile(**file) for file in pending["files"]], commit
                    )
            self._hook(f"after {part}")

    def _pending(
        self, frame: DataFrame, notes: Sequence[Mapping[str, Any]], counts: BatchCounts, batch: Batch
    ) -> dict[str, Any]:
        """Return what must be committed after the facts: files that tasks wrote, or rows that Spark stages here."""
        pending: dict[str, Any] = {}
        for part, rows in (("errors", counts.outcomes.rejected), ("duplicates", counts.outcomes.routed)):
            retries = batch.retry is not None and part == "errors"
            earlier = batch.upstream.rejected if batch.upstream is not None and part == "errors" else ()
            target = RESOLUTIONS if retries else part
            if not rows and not retries and not earlier:
                continue
            if self._paths[target] in batch.files:
                files = _noted_files(notes, part)
                reconcile(counts, {part: sum(file.rows for file in files)})
                taken = self._retried_files(batch) if retries else []
                pending[target] = {"files": [asdict(file) for file in (*earlier, *taken, *files)]}
            elif earlier:
                raise DeltaTableError(f"{self._paths[target]} no longer takes files of tasks; run again")
            else:
                pending[target] = {"staged": self._staged(frame, part, target, batch)}
        return pending

    def _retried_files(self, batch: Batch) -> list[DataFile]:
        """Write the rows that say which rejected rows the batch retries; no commit names their file yet."""
        path = self._paths[RESOLUTIONS]
        with FileWriter(FileSpec(path, RESOLUTION_SCHEMA, tuple(batch.files[path]))) as writer:
            writer.write(self._retried_rows(batch))
            return writer.close()

    def _retried_rows(self, batch: Batch) -> pa.RecordBatch:
        assert batch.retry is not None
        return batch.retry.resolutions(self._config.name, batch.stream, batch.number, batch.began)

    def _staged(self, frame: DataFrame, part: str, target: str, batch: Batch) -> str:
        """Write rows to a folder next to the table that will receive them, and return the folder."""
        state, channel = _CHANNELS[part]
        folder = f"{self._paths[target]}/{_STAGED}/{batch.stream}-{batch.number}-{batch.attempt}-{target}"
        rows = frame.where(frame[STATE] == int(state)).where(frame[channel].isNotNull()).select(f"{channel}.*")
        if target == RESOLUTIONS:
            taken = pa.Table.from_batches([self._retried_rows(batch)])
            rows = rows.unionByName(frame.sparkSession.createDataFrame(taken))
        with batch.phase(part), explained(f"writing to {folder}"):
            rows.coalesce(1).write.mode("overwrite").parquet(folder)
        return folder

    def _write_facts(
        self, frame: DataFrame, files: Sequence[DataFile] | None, version: int | None, commit: Commit, stream: str
    ) -> None:
        """Commit facts, at a version if one is given, and register their stream if the table does not have it yet.

        A registration changes the table metadata that was read, so that commit must also match a version.
        """
        while True:
            newest = self.facts.latest().version
            self._refuse_loaded(commit)
            streams = registered_streams(self.facts, self._config.name, stream, source_of(self._config))
            if version is None and not streams:
                self._append_facts(frame, files, None, commit)
                return
            at = newest if version is None else version
            try:
                self._append_facts(frame, files, at, replace(commit, properties=streams))
            except TableMovedError:
                if version is not None:
                    raise
            else:
                return

    def _append_facts(
        self, frame: DataFrame, files: Sequence[DataFile] | None, version: int | None, commit: Commit
    ) -> None:
        path = self._config.sink.path
        if files is not None:
            if version is not None:
                commit_exactly(path, self.facts.table, version, files, commit)
            elif not commit_files(path, self.facts.table, files, commit, final=False):
                self._refuse_loaded(commit)
            return
        rows = frame.where(frame[STATE] == int(State.OPEN)).select(*map(quoted, self._prepared.fact_schema.names))
        if version is None:
            append(rows, path, commit)
            self._require_own(commit)
        else:
            append_exactly(rows, path, version, commit)

    def _refuse_loaded(self, commit: Commit) -> None:
        """Raise an error if the facts already hold the batch: another run loads the same stream concurrently."""
        done = self.facts.transaction(commit.application)
        if done is not None and done >= commit.transaction:
            raise self._loaded_elsewhere(commit)

    def _require_own(self, commit: Commit) -> None:
        """Raise an error if Spark skipped an append because another run's commit has the same transaction."""
        written = self._last_note(commit)
        if written is not None and written.get("attempt") != commit.note["attempt"]:
            raise self._loaded_elsewhere(commit)

    def _loaded_elsewhere(self, commit: Commit) -> BatchError:
        return BatchError(
            f"another run has just loaded batch {commit.transaction} of this stream into {self.facts.path}; it "
            "uses the same checkpoint or a copy of it. Nothing was loaded here; stop one of the two and run again"
        )

    def _rows_written(self, commit: Commit) -> int | None:
        written = self._last_note(commit)
        return None if written is None else written.get("rows_written")

    def _last_note(self, commit: Commit) -> dict[str, Any] | None:
        """Return the note of the facts commit of a batch, from any run."""
        self.facts.latest()
        notes = self.facts.commit_notes(commit.application, commit.transaction)
        return notes[-1] if notes else None

    def _handle(self, path: str) -> DeltaHandle:
        if path not in self._handles:
            self._handles[path] = DeltaHandle(path)
        return self._handles[path]

    def _begin(self, part: str, path: str) -> None:
        self._hook(f"before {part}")
        self._holds()
        self._handle(path).require_form()


def _members(role: str) -> str:
    return f"members:{role}"


def _noted_files(notes: Sequence[Mapping[str, Any]], part: str) -> list[DataFile]:
    """Return the files of a table in the task notes."""
    return [DataFile(**file) for note in notes for file in note.get("files", {}).get(part, ())]


def _append_staged(folder: str, table: DeltaHandle, commit: Commit) -> None:
    """Append staged rows to their table once with Spark, and remove the staged rows."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    spark = SparkSession.active()
    done = table.transaction(commit.application)
    waits = done is None or done < commit.transaction
    if not _exists(spark, folder):
        if waits:
            raise DeltaTableError(
                f"{folder} was written for {table.path} but has been removed, so its rows are lost; restore the folder "
                "from a backup, and run again"
            )
        return
    if waits:
        append(spark.read.option("globPaths", "false").parquet(folder), table.path, commit)
    _hadoop_path(spark, folder)[1].delete(_hadoop_path(spark, folder)[0], True)  # noqa: FBT003 - Hadoop's parameter


def _no_rows(schema: pa.Schema) -> DataFrame:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    return SparkSession.active().createDataFrame([], spark_schema(schema))


def _exists(spark: SparkSession, folder: str) -> bool:
    place, files = _hadoop_path(spark, folder)
    return bool(files.exists(place))


def _hadoop_path(spark: SparkSession, folder: str) -> tuple[Any, Any]:
    """Return the Hadoop path of a folder, and its file system."""
    place = spark._jvm.org.apache.hadoop.fs.Path(folder)  # noqa: SLF001 - Hadoop has no Python API
    return place, place.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001 - as above
