"""Delta tables without Spark: versions, transactions, rows, the change feed, creation.

Everything here is done by `deltalake`, on the driver and in the workers alike. Appends of a batch are in
`headrace.pipelines.delta_commits`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import Dimension, greatest_key, number_members
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.paths import is_link, table_location

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deltalake import DeltaTable

__all__ = [
    "CHANGE_TYPE",
    "COMMIT_VERSION",
    "DeltaHandle",
    "TableVersion",
    "create_dimension",
    "create_table",
    "open_table",
    "read_changes",
    "read_rows",
]

CHANGE_TYPE = "_change_type"
COMMIT_VERSION = "_commit_version"
_COMMITS_SEARCHED = 50
_PROPERTIES = {"delta.enableChangeDataFeed": "true", "delta.enableDeletionVectors": "false"}


@dataclass(frozen=True)
class TableVersion:
    """A version of one Delta table: path, identity (a table made anew has another), number."""

    path: str
    table_id: str
    version: int


class DeltaHandle:
    """A Delta table that the driver follows from batch to batch.

    Parameters
    ----------
    path
        The table.

    Raises
    ------
    DeltaTableError
        If there is none, or it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._table = open_table(path)

    def latest(self) -> TableVersion:
        """Read what was committed since, and return the latest version."""
        self._table.update_incremental()
        return TableVersion(self.path, str(self._table.metadata().id), self._table.version())

    @property
    def table(self) -> DeltaTable:
        """The table itself, for commits."""
        return self._table

    def schema(self) -> pa.Schema:
        """Return the columns at the version last read."""
        return _plain_schema(pa.schema(self._table.schema().to_arrow()))

    def transaction(self, application: str) -> int | None:
        """Return the greatest transaction that an application has committed, as of the version last read."""
        version = self._table.transaction_version(application)
        return None if version is None else int(version)

    def greatest_key(self, column: str) -> int:
        """Return the greatest surrogate key at the version last read, 0 if there is none."""
        actions = pa.table(self._table.get_add_actions(flatten=True))
        name = f"max.{column}"
        if name in actions.column_names:
            counted = pc.fill_null(actions.column("num_records"), 1)
            if not pc.any(pc.and_(pc.is_null(actions.column(name)), pc.greater(counted, 0))).as_py():
                return greatest_key(actions.column(name))
        keys = self._table.to_pyarrow_dataset().to_table(columns=[column])
        return greatest_key(keys.column(column))

    def commits(self, limit: int | None) -> Iterator[Mapping[str, Any]]:
        """Yield what the latest commits say of themselves, the newest first.

        `DeltaTable.history` lists nothing where the table's path holds ``?`` or ``#``, so a local log is read here.
        """
        if is_link(self.path):
            yield from self._table.history(limit)
            return
        log, newest = Path(self.path) / "_delta_log", self._table.version()
        for version in range(newest, -1 if limit is None else max(-1, newest - limit), -1):
            try:
                lines = (log / f"{version:020d}.json").read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                return  # older ones have been cleaned up too
            actions = (json.loads(line) for line in lines)
            yield from ({**each["commitInfo"], "version": version} for each in actions if "commitInfo" in each)

    def commit_note(self, application: str, transaction: int) -> dict[str, Any]:
        """Return what `append` noted with a transaction, and Spark's count of rows; empty when it is not found."""
        for commit in self.commits(_COMMITS_SEARCHED):
            note = _note(commit)
            if note.get("application") == application and note.get("transaction") == transaction:
                return {**note, "rows_written": int(commit.get("operationMetrics", {}).get("numOutputRows", 0))}
        return {}


def open_table(path: str, version: int | None = None) -> DeltaTable:
    """Open a Delta table for reading.

    Raises
    ------
    DeltaTableError
        If there is none at the path, the version is not there, or the table uses a feature that `deltalake` lacks.
    """
    from deltalake import DeltaTable  # noqa: PLC0415 - heavy, and workers may not need it
    from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError  # noqa: PLC0415 - as above

    try:
        return DeltaTable(table_location(path), version=version)
    except TableNotFoundError as error:
        raise DeltaTableError(f"there is no Delta table at {path}; create it, or correct the path") from error
    except DeltaProtocolError as error:
        raise DeltaTableError(
            f"the Delta table at {path} uses a feature that replicas cannot follow ({_first(error)}); rewrite it "
            "with delta.enableDeletionVectors = false and without column mapping"
        ) from error
    except DeltaError as error:
        at = "" if version is None else f" at version {version}"
        raise DeltaTableError(f"the Delta table at {path} cannot be read{at}: {_first(error)}") from error


def read_rows(path: str, version: int, columns: Sequence[str]) -> pa.RecordBatchReader:
    """Return columns of all rows at a version, as a stream of batches in no particular order."""
    dataset = open_table(path, version).to_pyarrow_dataset()
    missing = [name for name in columns if name not in dataset.schema.names]
    if missing:
        raise DeltaTableError(
            f"the Delta table at {path} has no column {missing[0]!r}; it has {', '.join(dataset.schema.names)}"
        )
    return dataset.scanner(columns=list(columns)).to_reader()


def read_changes(path: str, first: int, last: int, columns: Sequence[str]) -> pa.Table | None:
    """Return the changes of versions `first` to `last`, both included.

    Parameters
    ----------
    path
        The table.
    first, last
        Versions; `last` must exist.
    columns
        Columns wanted beside `_change_type` and `_commit_version`.

    Returns
    -------
    Table or None
        The changes in no particular order; None when the feed no longer has them (files were vacuumed, the log was
        cleaned).
    """
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - heavy, and workers may not need it

    table = open_table(path, last)
    try:
        reader = table.load_cdf(first, last, columns=[*columns, CHANGE_TYPE, COMMIT_VERSION])
        changes = pa.table(reader)
    except (DeltaError, OSError, pa.ArrowException):
        return None
    return changes.cast(_plain_schema(changes.schema))


def create_table(path: str, schema: pa.Schema, partition_by: Sequence[str] = (), rows: pa.Table | None = None) -> None:
    """Create a Delta table with the change feed on and deletion vectors off.

    Raises
    ------
    DeltaTableError
        If the table exists already or cannot be written.
    """
    from deltalake import write_deltalake  # noqa: PLC0415 - heavy
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - as above

    table = rows if rows is not None else schema.empty_table()
    try:
        write_deltalake(
            table_location(path),
            table,
            mode="error",
            partition_by=list(partition_by) or None,
            configuration=dict(_PROPERTIES),
        )
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise DeltaTableError(f"the Delta table at {path} cannot be created: {_first(error)}") from error


def create_dimension(path: str, dimension: Dimension, rows: pa.Table | None = None) -> int:
    """Create a dimension's Delta table with its unknown member, and number the given members.

    Parameters
    ----------
    path
        Where the table is created.
    dimension
        The dimension.
    rows
        Natural keys and attributes of its members, in any order; none for an empty dimension.

    Returns
    -------
    int
        The number of members, without the unknown one.

    Raises
    ------
    DeltaTableError
        If the table exists already or cannot be written.
    DimensionError
        If a natural key is null or occurs twice.
    """
    members = dimension.table_schema.empty_table() if rows is None else number_members(dimension, rows)
    whole = pa.concat_tables([dimension.unknown_member(), members])
    create_table(path, dimension.table_schema, rows=whole)
    return int(members.num_rows)


def has_table(path: str) -> bool:
    """Return whether there is a Delta table at a path."""
    from deltalake import DeltaTable  # noqa: PLC0415 - heavy

    return bool(DeltaTable.is_deltatable(table_location(path)))


def folder_exists(path: str) -> bool:
    """Return whether a local folder exists; for other file systems always true."""
    return is_link(path) or Path(path).is_dir()


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which texts and binaries are plain ones, not views or large ones."""
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    return kind


def _note(commit: Mapping[str, Any]) -> dict[str, Any]:
    try:
        note = json.loads(commit.get("userMetadata") or "{}")
    except json.JSONDecodeError:
        return {}
    return note if isinstance(note, dict) else {}


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
