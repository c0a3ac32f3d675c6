"""The versions of a dimension that the facts of a role follow.

The fact table says how far its facts were restated: a Delta transaction of its own for each role, whose number is the
version of the dimension, and a note with the version of the facts that were read. A batch that was planned before and
committed after that may have looked its facts up in an older version. The note of its commit names that version, so the
next restatement begins there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.pipelines.delta.commits import Commit, append, commit_files
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import commit_note
from headrace.pipelines.spark.columns import spark_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from headrace.pipelines.delta.tables import DeltaHandle

__all__ = ["Span", "finish", "span_of"]

_FACTS_VERSION: Final = "facts_version"
_NOT_RESTATED: Final = -1


@dataclass(frozen=True)
class Span:
    """Versions to restate for one role.

    Parameters
    ----------
    role, table_id
        Role, and identity of the dimension's table.
    above, up_to
        Versions of the dimension: facts that moved in the commits above the first, up to the second, are restated.
    facts
        Version of the fact table that is read.
    """

    role: str
    table_id: str
    above: int
    up_to: int
    facts: int

    @property
    def application(self) -> str:
        """Application id of the transactions that record the progress."""
        return f"headrace.restate:{self.table_id}:{self.role}"


def span_of(role: str, dimension: DeltaHandle, facts: DeltaHandle) -> Span:
    """Return the versions to restate for a role, at the newest versions of both tables."""
    seen, newest = dimension.latest(), facts.latest()
    span = Span(role, seen.table_id, _NOT_RESTATED, seen.version, newest.version)
    done = facts.transaction(span.application)
    if done is None:
        return span
    notes = facts.commit_notes(span.application, done)
    if not notes:
        return span  # the log no longer tells which facts were read
    planned = _planned_after(facts, role, int(notes[-1][_FACTS_VERSION]))
    return Span(role, seen.table_id, min([done, *planned]), seen.version, newest.version)


def _planned_after(facts: DeltaHandle, role: str, version: int) -> list[int]:
    """Return the versions of the dimension at which batches looked up that were committed after a version."""
    planned = []
    for commit in facts.commits(None):
        if commit["version"] <= version:
            break
        versions: Mapping[str, Any] = commit_note(commit).get("versions", {})
        if role in versions:
            planned.append(int(versions[role]))
    return planned


def finish(spark: SparkSession, facts: DeltaHandle, span: Span, restated: int) -> None:
    """Record that the facts of a role follow the dimension up to a version."""
    commit = Commit(span.application, span.up_to, {_FACTS_VERSION: span.facts, "restated": restated})
    if takes_files(facts.table):
        commit_files(facts.path, facts.table, (), commit)
    else:
        append(spark.createDataFrame([], spark_schema(facts.schema())), facts.path, commit)
