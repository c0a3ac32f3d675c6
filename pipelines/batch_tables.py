"""The Delta tables that a batch goes to: members, rejected rows, routed duplicates and facts, each in one commit.

Every commit carries a transaction of Delta: the application is the stream and the table's part, the version the batch.
A commit that is repeated is skipped, and files that no commit names are not part of a table. Tables that ask for more
than plain files are written by Spark, from the same frame.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.etl import CAUSES_COLUMN
from headrace.etl.settlement import CAUSES_TYPE
from headrace.pipelines.data_files import FILE_SCHEMA, DataFile, FileSpec, FileTask
from headrace.pipelines.delta_commits import append, commit_files, takes_files
from headrace.pipelines.delta_tables import DeltaHandle, has_table
from headrace.pipelines.failures import explained
from headrace.pipelines.frame import FILE, MALFORMED, STATE, State, member_column
from headrace.pipelines.metrics import check_books
from headrace.pipelines.spark_columns import quoted, spark_schema
from headrace.pipelines.stages import DUPLICATES_ROLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from headrace.pipelines.batch_state import Batch
    from headrace.pipelines.catalog import BatchRecord
    from headrace.pipelines.metrics import BatchCounts
    from headrace.pipelines.stages import Prepared

__all__ = ["ERROR_SCHEMA", "BatchTables"]

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


class BatchTables:
    """The tables of a pipeline, and what batches append to them.

    Parameters
    ----------
    prepared
        The pipeline.
    holds
        Called before each write; raises when this run may not write any more.
    hook
        Called with the name of each step before and after it.
    """

    def __init__(self, prepared: Prepared, holds: Callable[[], None], hook: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._holds = holds
        self._hook = hook
        roles = [*prepared.lookups, *([DUPLICATES_ROLE] if prepared.duplicates is not None else [])]
        paths = [*map(prepared.path, roles), self._config.sink.path, self._config.errors_path]
        if has_table(self._config.duplicates_path):
            paths.append(self._config.duplicates_path)
        self._handles = {path: DeltaHandle(path) for path in dict.fromkeys(paths)}

    @property
    def facts(self) -> DeltaHandle:
        """The fact table."""
        return self._handles[self._config.sink.path]

    def joined_by(self, role: str) -> DeltaHandle:
        """Return the table that a role joins with."""
        return self._handles[self._prepared.path(role)]

    def that_take_files(self) -> frozenset[str]:
        """Return the tables that take files from tasks."""
        return frozenset(path for path, handle in self._handles.items() if takes_files(handle.table))

    def append_members(self, frame: DataFrame, role: str, notes: Sequence[Mapping[str, Any]], batch: Batch) -> None:
        """Append the new members of a role's dimension, if there are any."""
        joins = [join for note in notes for join in note["joins"] if join["role"] == role]
        if not sum(join.get("new_members", 0) for join in joins):
            return
        path, part = self._prepared.path(role), f"members:{role}"
        if path in batch.files:
            self._commit(_noted_files(joins), path, part, batch)
            return
        members = frame.where(frame[STATE] == int(State.MEMBER)).where(frame[member_column(role)].isNotNull())
        self._append_by_spark(members.select(f"{member_column(role)}.*").coalesce(1), path, part, batch)

    def append_rest(self, frame: DataFrame, counts: BatchCounts, batch: Batch) -> None:
        """Append what does not become a fact."""
        written: dict[str, int | None] = {}
        if counts.books.rejected:
            spec = FileSpec(self._config.errors_path, ERROR_SCHEMA)
            written["errors"] = self._append(self._rejected(frame, batch), spec, "errors", batch)
        if counts.books.routed:
            spec = FileSpec(self._config.duplicates_path, self._prepared.duplicate_schema)
            rows = frame.where(frame[STATE] == int(State.DUPLICATE)).select(*map(quoted, spec.schema.names))
            written["duplicates"] = self._append(rows, spec, "duplicates", batch)
        check_books(counts, written)

    def _rejected(self, frame: DataFrame, batch: Batch) -> DataFrame:
        """Return the rows of the error table: reason, causes and the record as it came."""
        from pyspark.sql import functions as sf  # noqa: PLC0415 - pyspark is heavy

        original = sf.to_json(
            sf.struct(*(sf.col(quoted(name)) for name in self._prepared.stream.names)), {"ignoreNullFields": "false"}
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

    def append_facts(
        self,
        frame: DataFrame,
        notes: Sequence[Mapping[str, Any]],
        counts: BatchCounts,
        record: BatchRecord,
        batch: Batch,
    ) -> None:
        """Append the facts, with the batch's record in their commit."""
        path = self._config.sink.path
        note = {"record": {name: value for name, value in asdict(record).items() if name != "detail"}}
        if path in batch.files:
            files = _noted_files(notes)
            check_books(counts, {"facts": sum(file.rows for file in files)})
            self._commit(files, path, "facts", batch, note)
            return
        names = self._prepared.fact_schema.names
        rows = frame.where(frame[STATE] == int(State.OPEN)).select(*map(quoted, names))
        check_books(counts, {"facts": self._append_by_spark(rows, path, "facts", batch, note)})

    def _append(self, rows: DataFrame, spec: FileSpec, part: str, batch: Batch) -> int | None:
        """Append rows of the batch's frame to a table, and return how many were written."""
        if spec.path not in batch.files:
            return self._append_by_spark(rows, spec.path, part, batch)
        with batch.phase(part), explained(f"writing to {spec.path}"):
            written = rows.mapInArrow(FileTask(spec), spark_schema(FILE_SCHEMA)).collect()
        files = [DataFile(**json.loads(row[0])) for row in written]
        self._commit(files, spec.path, part, batch)
        return sum(file.rows for file in files)

    def _commit(
        self, files: Sequence[DataFile], path: str, part: str, batch: Batch, note: Mapping[str, Any] | None = None
    ) -> None:
        """Commit files that tasks wrote."""
        self._hook(f"before {part}")
        self._holds()
        with batch.phase(part), explained(f"the commit to {path}"):
            commit_files(self._handles[path].table, files, batch.application(part), batch.number, note)
        self._hook(f"after {part}")

    def _append_by_spark(
        self, rows: DataFrame, path: str, part: str, batch: Batch, note: Mapping[str, Any] | None = None
    ) -> int | None:
        """Append rows by Spark's writer, and return how many its commit says were written."""
        self._hook(f"before {part}")
        self._holds()
        application = batch.application(part)
        with batch.phase(part), explained(f"the append to {path}"):
            append(rows, path, application, batch.number, note)
        self._hook(f"after {part}")
        handle = self._handles[path]
        handle.latest()
        return handle.commit_note(application, batch.number).get("rows_written")


def _noted_files(notes: Sequence[Mapping[str, Any]]) -> list[DataFile]:
    """Return the files that tasks noted."""
    return [DataFile(**file) for note in notes for file in note.get("files", ())]
