"""Merges of a batch's facts into a Delta table with Spark's MERGE: one commit, exactly once.

The commit carries the application transaction and the note, as every commit of a batch. Delta takes both from settings
of the session. So each merge has a session of its own, and other writers in the process cannot pick them up.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.pipelines.delta.commits import Commit, append_exactly, commit_exactly, conflicts
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.errors import BatchError, TableMovedError
from headrace.pipelines.spark.columns import quoted, spark_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Column, DataFrame

    from headrace.pipelines.delta.tables import DeltaHandle

__all__ = ["SOURCE", "TARGET", "MergeClauses", "merge", "set_properties"]

SOURCE: Final = "source"
TARGET: Final = "target"
_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 100
_APPLICATION: Final = "spark.databricks.delta.write.txnAppId"
_TRANSACTION: Final = "spark.databricks.delta.write.txnVersion"
_NOTE: Final = "spark.databricks.delta.commitInfo.userMetadata"


@dataclass(frozen=True)
class MergeClauses:
    """The clauses of a merge, over the columns of the aliases `SOURCE` and `TARGET`.

    Parameters
    ----------
    on
        Condition that matches a source row with a stored row.
    newer
        Condition under which a matched row is updated; None for every matched row.
    updates, inserts
        New values of a matched row, and the values of a row that is not matched, by column. Without updates, a matched
        row stays as it is.
    """

    on: Column
    newer: Column | None
    updates: Mapping[str, Column]
    inserts: Mapping[str, Column]


def merge(rows: DataFrame, path: str, clauses: MergeClauses, commit: Commit) -> None:
    """Merge rows into a table once: Delta skips a transaction that the table already holds.

    Parameters
    ----------
    rows
        Source rows, at most one for each stored row.
    path
        Path of the table.
    clauses
        Clauses of the merge.
    commit
        Description of the commit. Its properties are not written.

    Raises
    ------
    BatchError
        If other writers change the table during every attempt.
    """
    from delta.tables import DeltaTable  # noqa: PLC0415 - pyspark is heavy
    from pyspark.sql import SparkSession  # noqa: PLC0415 - as above

    spark = rows.sparkSession
    own = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())  # noqa: SLF001 - has no Python API
    for name, value in (
        (_APPLICATION, commit.application),
        (_TRANSACTION, str(commit.transaction)),
        (_NOTE, commit.user_metadata),
    ):
        own.conf.set(name, value)
    for _ in range(_ATTEMPTS):
        builder = DeltaTable.forPath(own, path).alias(TARGET).merge(rows.alias(SOURCE), clauses.on)
        if clauses.updates:
            builder = builder.whenMatchedUpdate(clauses.newer, _by_quoted(clauses.updates))
        builder = builder.whenNotMatchedInsert(None, _by_quoted(clauses.inserts))
        try:
            with conflicts(f"another writer changed {path}"):
                builder.execute()
        except TableMovedError as moved:
            _LOG.info("rows are merged again: %s", moved)
        else:
            return
    raise BatchError(f"others changed {path} during each of {_ATTEMPTS} attempts to merge into it; run again")


def set_properties(handle: DeltaHandle, properties: Callable[[], Mapping[str, str]]) -> None:
    """Set properties of a table in a commit of their own.

    Parameters
    ----------
    handle
        Table.
    properties
        Function that returns the properties to change, given the table as of the version last read. It is called again
        if another writer changes the table in the meantime.

    Raises
    ------
    BatchError
        If other writers change the table during every attempt.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    for _ in range(_ATTEMPTS):
        version = handle.latest().version
        changes = properties()
        if not changes:
            return
        commit = Commit("", 0, properties=changes)
        try:
            if takes_files(handle.table):
                commit_exactly(handle.path, handle.table, version, (), commit)
            else:
                nothing = SparkSession.active().createDataFrame([], spark_schema(handle.schema()))
                append_exactly(nothing, handle.path, version, commit)
        except TableMovedError as moved:
            _LOG.info("properties are set again: %s", moved)
        else:
            return
    raise BatchError(f"others changed {handle.path} during each of {_ATTEMPTS} attempts to set properties; run again")


def _by_quoted(values: Mapping[str, Column]) -> dict[str, Column]:
    return {quoted(name): value for name, value in values.items()}
