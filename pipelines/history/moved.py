"""The table of moved facts: for each commit of changes, the facts that point to another version since then.

The table `<dimension>_moved` is partitioned by the Delta version of the dimension whose commit moved the facts. A row
is a member and a half-open time range whose version is another one, a retired version, or a version that has kept its
key but not its attributes, which facts may carry. `headrace dimension restate` reads it.

The commit of the dimension decides. Its note names the files of moved facts under `MOVED_NOTE`, which no commit of this
table names yet. `settle_moved` adds them, in the order of the dimension's commits and each one once, so that a killed
run loses none: the next run, and each `restate`, settle what is left.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.values import rows_differ, single
from headrace.pipelines.delta.commits import Commit, commit_files
from headrace.pipelines.delta.data_files import DataFile, FileSpec
from headrace.pipelines.delta.tables import DeltaHandle, commit_note, create_table, has_table
from headrace.pipelines.paths import MOVED, beside

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.etl.history import Applied, History
    from headrace.pipelines.history.differences import RowDifferences

__all__ = [
    "CAUSE",
    "DIMENSION_VERSION",
    "MOVED_FROM",
    "MOVED_NOTE",
    "MOVED_TO",
    "VERSION_KEY",
    "Cause",
    "ensure_moved_table",
    "moved_files",
    "moved_note",
    "moved_path",
    "moved_rows",
    "moved_schema",
    "settle_moved",
]

MOVED_NOTE: Final = "moved"
MOVED_FROM: Final = "_moved_from"
MOVED_TO: Final = "_moved_to"
CAUSE: Final = "_cause"
VERSION_KEY: Final = "_version_key"
DIMENSION_VERSION: Final = "_dimension_version"


class Cause(StrEnum):
    """Cause of a row of the table of moved facts."""

    VERSION = "version"
    COVERED = "covered"
    COMPLETED = "completed"
    RETIRED = "retired"
    UPDATED = "updated"


_SETTLED: Final = "headrace.moved"


def moved_path(dimension_path: str) -> str:
    """Return the path of the table of moved facts of a dimension."""
    return beside(dimension_path, MOVED)


def moved_schema(history: History) -> pa.Schema:
    """Return the columns: natural key, time range, cause, and the key of a retired or updated version."""
    key = [field.with_nullable(nullable=True) for field in history.dimension.key_schema]
    bounds = [pa.field(name, history.instant_type) for name in (MOVED_FROM, MOVED_TO)]
    return pa.schema([*key, *bounds, pa.field(CAUSE, pa.string()), pa.field(VERSION_KEY, pa.int64())])


def moved_rows(history: History, applied: Applied, differences: RowDifferences) -> pa.Table:
    """Return the rows for the result of applied changes.

    Parameters
    ----------
    history
        The declaration.
    applied, differences
        Result of the changes, and of `row_differences` for them.
    """
    schema, natural = moved_schema(history), history.dimension.natural_key
    moved, retired, updated = applied.moved, applied.retired, _updated(history, differences)
    surrogate = history.dimension.surrogate_key
    ranges = [moved.column(name) for name in (*natural, "moved_from", "moved_to", "cause")]
    gone, kept = ([rows.column(name) for name in (*natural, history.valid_from)] for rows in (retired, updated))
    gone, kept = [*gone, _ends(history, retired)], [*kept, _ends(history, updated)]
    # Facts before the first version count as facts of that version.
    first = updated.filter(pc.equal(updated.column(history.version), 1))
    before = [*(first.column(name) for name in natural), pa.nulls(first.num_rows, history.instant_type)]
    parts = [
        [*ranges, _no_keys(moved)],
        [*gone, _repeated(Cause.RETIRED, retired.num_rows), retired.column(surrogate)],
        [*kept, _repeated(Cause.UPDATED, updated.num_rows), updated.column(surrogate)],
        [*before, first.column(history.valid_from), _repeated(Cause.UPDATED, first.num_rows), _no_keys(first)],
    ]
    return pa.concat_tables([pa.table(part, names=schema.names).cast(schema) for part in parts])


def _updated(history: History, differences: RowDifferences) -> pa.Table:
    """Return the versions that have kept their key, but not their attributes."""
    before, after = differences.before, differences.after
    was_key, key = (np.asarray(single(rows.column(history.dimension.surrogate_key))) for rows in (before, after))
    _, old, new = np.intersect1d(was_key, key, assume_unique=True, return_indices=True)
    names = history.dimension.attributes.names
    was, now = (
        [single(rows.column(name)).take(pa.array(at)) for name in names] for rows, at in ((before, old), (after, new))
    )
    return after.take(pa.array(new[rows_differ(was, now, len(new))]))


def _ends(history: History, versions: pa.Table) -> pa.Array:
    """Return the ends of versions; null for current ones, which facts of any later time meet, whatever `end` says."""
    current = single(versions.column(history.is_current))
    return pc.if_else(current, pa.scalar(None, history.instant_type), single(versions.column(history.valid_to)))


def _no_keys(rows: pa.Table) -> pa.Array:
    return pa.nulls(rows.num_rows, pa.int64())


def _repeated(cause: Cause, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(str(cause), pa.string()), rows)


def moved_files(dimension_path: str, history: History) -> FileSpec:
    """Return the file specification of moved facts. A task writes them before the commit, which has no number yet."""
    return FileSpec(moved_path(dimension_path), moved_schema(history))


def moved_note(files: Iterable[DataFile]) -> dict[str, Any]:
    """Return the part of the note of the dimension's commit that names the files of moved facts."""
    return {MOVED_NOTE: [asdict(file) for file in files]}


def ensure_moved_table(dimension_path: str, history: History) -> str:
    """Create the table of moved facts unless it exists, and return its path."""
    path = moved_path(dimension_path)
    if not has_table(path):
        schema = pa.schema([*moved_schema(history), pa.field(DIMENSION_VERSION, pa.int64())])
        create_table(path, schema, (DIMENSION_VERSION,))
    return path


def settle_moved(dimension_path: str) -> int:
    """Add the moved facts that commits of the dimension name and the table does not have yet.

    Returns
    -------
    int
        Number of commits whose facts were added.

    Raises
    ------
    DeltaTableError
        If a file was removed.
    """
    path = moved_path(dimension_path)
    if not has_table(path):
        return 0
    moved, dimension = DeltaHandle(path), DeltaHandle(dimension_path)
    settled = moved.transaction(_SETTLED)
    waiting = sorted(_waiting(dimension, -1 if settled is None else settled), key=lambda each: each[0])
    for version, files in waiting:
        partition: dict[str, str | None] = {DIMENSION_VERSION: str(version)}
        commit_files(
            path, moved.table, [replace(file, partition=partition) for file in files], Commit(_SETTLED, version)
        )
    return len(waiting)


def _waiting(dimension: DeltaHandle, settled: int) -> Iterator[tuple[int, list[DataFile]]]:
    """Yield the commits after a version that name moved facts, newest first."""
    for commit in dimension.commits(None):
        if commit["version"] <= settled:
            return
        files = commit_note(commit).get(MOVED_NOTE)
        if files:
            yield commit["version"], [DataFile(**file) for file in files]
