"""Delta tables without Spark: versions, transactions, rows, the change feed, creation.

This module uses `deltalake`, on the driver and in the workers. `headrace.pipelines.delta.commits` appends the rows of a
batch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import Dimension, greatest_key, number_members
from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.delta.reads import feed_is_exact, has_only_vectors, physical_name, plain_schema, scan_table
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.paths import is_link, table_location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from headrace.pipelines.delta.live_files import LiveFile

__all__ = [
    "CHANGE_TYPE",
    "COMMIT_VERSION",
    "GREATEST_KEY",
    "STREAMS",
    "DeltaHandle",
    "TableVersion",
    "commit_note",
    "create_dimension",
    "create_table",
    "first_cause",
    "open_table",
    "read_changes",
    "read_rows",
    "refuse_far_times",
    "registered_streams",
    "remember_greatest_key",
    "stream_registry",
]

CHANGE_TYPE = "_change_type"
COMMIT_VERSION = "_commit_version"
GREATEST_KEY = "headrace.greatestKey"
STREAMS = "headrace.streams"
_COMMITS_SEARCHED = 50
_MARKS = re.compile(r"\x1b\[\d*m|↳")
_DAY_MICROSECONDS = 86_400_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01, 9999-12-31
_LAST_NUMBER = "delta.identity.highWaterMark"
_PROPERTIES = {"delta.enableChangeDataFeed": "true", "delta.enableDeletionVectors": "false"}


@dataclass(frozen=True)
class TableVersion:
    """A version of a Delta table: path, identity (a recreated table has a new one), version number."""

    path: str
    table_id: str
    version: int


class DeltaHandle:
    """A Delta table that the driver follows from batch to batch.

    Parameters
    ----------
    path
        Path of the table.

    Raises
    ------
    DeltaTableError
        If the table does not exist or cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._born = self._first_entry()
        self._table = open_table(path)
        self._form = self._columns(), self._table.metadata().partition_columns
        self._noted, self._noted_up_to = 0, -1
        self._live: LiveFiles | None = None
        self._scanned: dict[str, int] = {}  # highest keys in files without statistics

    def latest(self) -> TableVersion:
        """Read the new commits, and return the latest version.

        Raises
        ------
        DeltaTableError
            If the table was removed or recreated since it was opened.
        """
        self._require_there()
        self._table.update_incremental()
        return TableVersion(self.path, str(self._table.metadata().id), self._table.version())

    def require_form(self) -> None:
        """Raise an error if the partitioning, or a column that existed when the table was opened, has changed.

        Raises
        ------
        DeltaTableError
            If either has changed, or if the table was removed or recreated.
        """
        self.latest()
        columns, partitions = self._form
        now = self._columns()
        changed = [name for name, kind in columns.items() if now.get(name) != kind]
        if changed or partitions != self._table.metadata().partition_columns:
            what = f"column {changed[0]!r}" if changed else "the partitioning"
            raise DeltaTableError(
                f"{what} of the Delta table {self.path} was changed during the run; nothing is lost, run again"
            )

    def _columns(self) -> dict[str, Any]:
        """Return the schema's description of each column, with its details in no particular order.

        The last number of an identity column is not part of it: each commit of facts changes that.
        """
        columns = {field.name: json.loads(field.to_json()) for field in self._table.schema().fields}
        for column in columns.values():
            column.get("metadata", {}).pop(_LAST_NUMBER, None)
        return columns

    def _require_there(self) -> None:
        """Raise an error unless the log is the one that was opened: a commit to another log would damage that table."""
        if is_link(self.path):
            return
        first = self._first_entry()  # a log that was cleaned up has no such entry
        newest = Path(self.path) / "_delta_log" / f"{self._table.version():020d}.json"
        if (first is not None and first != self._born) or not newest.exists():
            raise DeltaTableError(
                f"the Delta table {self.path} was removed or recreated during the run; restore it if that was "
                "not meant, and run again"
            )

    def _first_entry(self) -> tuple[int, int] | None:
        """Return what distinguishes the table from a table recreated at the same path, based on its first log entry."""
        if is_link(self.path):
            return None
        try:
            seen = (Path(self.path) / "_delta_log" / f"{0:020d}.json").stat()
        except OSError:
            return None
        return seen.st_ino, seen.st_mtime_ns

    @property
    def table(self) -> DeltaTable:
        """The open table, for commits."""
        return self._table

    @property
    def live(self) -> LiveFiles:
        """Data files of the table, if it is local and has no other reader feature than deletion vectors."""
        if self._live is None:
            self._live = LiveFiles(self.path)
        return self._live

    def schema(self) -> pa.Schema:
        """Return the columns at the version last read."""
        return plain_schema(pa.schema(self._table.schema().to_arrow()))

    def transaction(self, application: str) -> int | None:
        """Return the highest transaction that an application committed, as of the version last read."""
        version = self._table.transaction_version(application)
        return None if version is None else int(version)

    def greatest_key(self, column: str) -> int:
        """Return the highest surrogate key ever assigned, as of the version last read; 0 if there is none.

        This is the maximum of the keys in the table, the table property `headrace.greatestKey`, and the keys noted by
        member commits. A key whose member was deleted, or removed by `RESTORE`, is therefore never assigned again.

        Raises
        ------
        DeltaTableError
            If the property is not a whole number.
        """
        return max(self.remembered_key(), self._stored_key(column), self._noted_key())

    def remembered_key(self) -> int:
        """Return the highest key that the table property remembers; 0 if there is none.

        Raises
        ------
        DeltaTableError
            If the property is not a whole number.
        """
        text = self._table.metadata().configuration.get(GREATEST_KEY, "0")
        if not text.isdecimal():
            raise DeltaTableError(
                f"the Delta table {self.path} at version {self._table.version()} has the property {GREATEST_KEY} = "
                f"{text!r}, which is not a whole number; set it to the greatest surrogate key ever given: ALTER TABLE "
                f"delta.`{self.path}` SET TBLPROPERTIES ('{GREATEST_KEY}' = '...')"
            )
        return int(text)

    def _noted_key(self) -> int:
        """Return the highest key that member commits noted, within the retained log; `RESTORE` does not change it."""
        version = self._table.version()
        if version > self._noted_up_to:
            limit = None if self._noted_up_to < 0 else version - self._noted_up_to
            notes = (commit_note(commit).get("greatest_key") for commit in self.commits(limit))
            self._noted = max([self._noted, *(key for key in notes if isinstance(key, int))])
            self._noted_up_to = version
        return self._noted

    def _stored_key(self, column: str) -> int:
        """Return the highest key in the table: from the file statistics if they are complete, else from the rows.

        With deletion vectors it may be the key of a removed row, which is as good: a key is never assigned again.
        """
        if has_only_vectors(self._table) and column not in self._table.metadata().partition_columns:
            files = self.live.at(self._table.version())
            return max((self._key_in(file, column) for file in files if file.rows != 0), default=0)
        actions = pa.table(self._table.get_add_actions(flatten=True))
        name = f"max.{physical_name(self._table, column)}"
        if name in actions.column_names:
            counted = pc.fill_null(actions.column("num_records"), 1)
            if not pc.any(pc.and_(pc.is_null(actions.column(name)), pc.greater(counted, 0))).as_py():
                return greatest_key(actions.column(name))
        return max((greatest_key(batch.column(0)) for batch in scan_table(self._table, [column])), default=0)

    def _key_in(self, file: LiveFile, column: str) -> int:
        """Return the highest key in a file, from its statistics or, once, from its rows: a file never changes."""
        bound = file.bounds(column)[1]
        if isinstance(bound, int):
            return bound
        if file.path not in self._scanned:
            rows = read_live_file(self.path, replace(file, vector=None), pa.schema([(column, pa.int64())]))
            self._scanned[file.path] = max((greatest_key(batch.column(0)) for _, batch in rows), default=0)
        return self._scanned[file.path]

    def commits(self, limit: int | None) -> Iterator[Mapping[str, Any]]:
        """Yield the commit information of the latest commits, with `version`, newest first.

        `DeltaTable.history` returns nothing if the table path contains ``?`` or ``#``, so this method reads a local log
        itself.
        """
        if is_link(self.path):
            yield from self._table.history(limit)
            return
        log, newest = Path(self.path) / "_delta_log", self._table.version()
        for version in range(newest, -1 if limit is None else max(-1, newest - limit), -1):
            try:
                lines = (log / f"{version:020d}.json").read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                return  # older entries were cleaned up, too
            actions = (json.loads(line) for line in lines if "commitInfo" in line)
            yield from ({**action["commitInfo"], "version": version} for action in actions if "commitInfo" in action)

    def commit_notes(self, application: str, transaction: int) -> list[dict[str, Any]]:
        """Return the notes of a transaction's commits, oldest first, each with the row count that Spark reported.

        The list is empty if there is no such commit, or if the log no longer has it.
        """
        for limit in (_COMMITS_SEARCHED, None):
            notes = [
                {
                    **note,
                    "rows_written": int(commit.get("operationMetrics", {}).get("numOutputRows", 0)),
                    "metrics": commit.get("operationMetrics", {}),
                }
                for commit in self.commits(limit)
                if (note := commit_note(commit)).get("application") == application
                and note.get("transaction") == transaction
            ]
            if notes:
                return notes[::-1]
        return []


def stream_registry(handle: DeltaHandle) -> dict[str, dict[str, str]]:
    """Return the streams that a fact table received: for each pipeline name, its `stream` and `source`.

    The table property `headrace.streams` holds them as JSON. One commit adds the first facts of a stream and its entry.

    Raises
    ------
    DeltaTableError
        If the property does not hold such JSON.
    """
    text = handle.table.metadata().configuration.get(STREAMS, "{}")
    try:
        registry = json.loads(text)
        return {str(name): {"stream": entry["stream"], "source": entry["source"]} for name, entry in registry.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DeltaTableError(
            f"the property {STREAMS} of {handle.path} is not what Headrace writes: {text[:200]}; restore it"
        ) from error


def registered_streams(handle: DeltaHandle, pipeline: str, stream: str, source: str) -> dict[str, str]:
    """Return the table property that registers a stream for its pipeline; an empty dict if it is registered already.

    Parameters
    ----------
    handle
        Fact table, as of the version last read.
    pipeline
        Name of the pipeline.
    stream
        Identity of the stream.
    source
        Name of the source in the fact table (`headrace.pipelines.source.identity.source_of`).
    """
    registry = stream_registry(handle)
    entry = {"stream": stream, "source": source}
    if registry.get(pipeline) == entry:
        return {}
    return {STREAMS: json.dumps({**registry, pipeline: entry}, sort_keys=True)}


def open_table(path: str, version: int | None = None) -> DeltaTable:
    """Open a Delta table for reading.

    Raises
    ------
    DeltaTableError
        If the path has no table, the version does not exist, or `deltalake` does not support a feature of the table.
    """
    from deltalake import DeltaTable  # noqa: PLC0415 - heavy, and workers may not need it
    from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError  # noqa: PLC0415 - as above

    try:
        return DeltaTable(table_location(path), version=version)
    except TableNotFoundError as error:
        raise DeltaTableError(f"there is no Delta table at {path}; create it, or correct the path") from error
    except DeltaProtocolError as error:
        raise DeltaTableError(
            f"the Delta table at {path} uses a feature that cannot be read ({first_cause(error)}); drop the feature: "
            f"ALTER TABLE delta.`{path}` DROP FEATURE name"
        ) from error
    except DeltaError as error:
        at = "" if version is None else f" at version {version}"
        raise DeltaTableError(f"the Delta table at {path} cannot be read{at}: {first_cause(error)}") from error


def read_rows(path: str, version: int, columns: Sequence[str]) -> pa.RecordBatchReader:
    """Return the given columns of all rows at a version, as a stream of batches in no particular order."""
    table = open_table(path, version)
    names = [field.name for field in table.schema().fields]
    missing = [name for name in columns if name not in names]
    if missing:
        raise DeltaTableError(
            f"the Delta table {path} at version {version} has no column {missing[0]!r}; it has {', '.join(names)}"
        )
    return scan_table(table, columns)


def read_changes(
    path: str,
    first: int,
    last: int,
    columns: Sequence[str],
    keep: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> pa.Table | None:
    """Return the changes of versions `first` to `last`, inclusive.

    Parameters
    ----------
    path
        Path of the table.
    first, last
        First and last version. `last` must exist.
    columns
        Columns to return in addition to `_change_type` and `_commit_version`.
    keep
        Function that returns the rows to keep of a part of the feed, so that the rest takes no memory.

    Returns
    -------
    Table or None
        Changes in no particular order; None if the feed no longer has them (files were vacuumed, or the log was cleaned
        up).
    """
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - heavy, and workers may not need it

    table = open_table(path, last)
    try:
        if not feed_is_exact(table, first, last, columns):
            return None
        reader = table.load_cdf(first, last, columns=[*columns, CHANGE_TYPE, COMMIT_VERSION])
        stream = pa.RecordBatchReader.from_stream(reader)
        schema = plain_schema(stream.schema)
        kept = [keep(pa.Table.from_batches([batch]).cast(schema)) for batch in stream]
    except (DeltaError, OSError, pa.ArrowException):
        return None
    return pa.concat_tables([schema.empty_table(), *kept])


def create_table(path: str, schema: pa.Schema, partition_by: Sequence[str] = (), rows: pa.Table | None = None) -> None:
    """Create a Delta table with the change feed enabled and deletion vectors disabled.

    Raises
    ------
    DeltaTableError
        If the table already exists or cannot be written.
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
        raise DeltaTableError(f"the Delta table at {path} cannot be created: {first_cause(error)}") from error


def create_dimension(path: str, dimension: Dimension, rows: pa.Table | None = None) -> int:
    """Create a dimension's Delta table with its special members, and assign surrogate keys to the given members.

    Parameters
    ----------
    path
        Folder of the new table.
    dimension
        Dimension to create.
    rows
        Natural keys and attributes of the members, in any order; None for an empty dimension.

    Returns
    -------
    int
        Number of members, without special members.

    Raises
    ------
    DeltaTableError
        If the table already exists or cannot be written, or a time is not within the years 1 to 9999.
    DimensionError
        If a natural key is null or occurs twice, or a value does not fit the type of its column.
    """
    members = dimension.table_schema.empty_table() if rows is None else number_members(dimension, rows)
    whole = pa.concat_tables([dimension.special_rows(), members])
    refuse_far_times(whole, f"dimension {dimension.name!r}")
    create_table(path, dimension.table_schema, rows=whole)
    return int(members.num_rows)


def refuse_far_times(rows: pa.Table, where: str) -> None:
    """Raise an error if a date or timestamp (in microseconds) is not within the years 1 to 9999.

    Bounds in Delta's statistics are texts, which have years of four digits.
    """
    for field in rows.schema:
        if field.type == pa.date32():
            ticks, day = rows.column(field.name).cast(pa.int32()), 1
        elif pa.types.is_timestamp(field.type):
            ticks, day = rows.column(field.name).cast(pa.int64()), _DAY_MICROSECONDS
        else:
            continue
        far = pc.or_(pc.less(ticks, _FIRST_DAY * day), pc.greater_equal(ticks, (_LAST_DAY + 1) * day))
        if pc.any(far).as_py():
            row = pc.index(far, pa.scalar(value=True)).as_py()
            raise DeltaTableError(
                f"{where}: a value of column {field.name!r} is not within the years 1 to 9999 "
                f"({ticks[row]} {'days' if day == 1 else 'microseconds'} since 1970); correct it or leave out the row"
            )


def remember_greatest_key(path: str, key: int) -> None:
    """Set the property that remembers the highest surrogate key ever assigned, in a separate commit.

    Raises
    ------
    DeltaTableError
        If the property cannot be set.
    """
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - heavy

    try:
        open_table(path).alter.set_table_properties({GREATEST_KEY: str(key)}, raise_if_not_exists=False)
    except (DeltaError, OSError) as error:
        raise DeltaTableError(f"the property {GREATEST_KEY} of {path} cannot be set: {first_cause(error)}") from error


def has_table(path: str) -> bool:
    """Return whether a Delta table exists at a path."""
    from deltalake import DeltaTable  # noqa: PLC0415 - heavy

    return bool(DeltaTable.is_deltatable(table_location(path)))


def commit_note(commit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note of a commit; an empty dict if another writer made it."""
    try:
        note = json.loads(commit.get("userMetadata") or "{}")
    except json.JSONDecodeError:
        return {}
    return note if isinstance(note, dict) else {}


def first_cause(error: BaseException) -> str:
    r"""Return what failed and why in one line; deltalake writes each cause of an error on a line of its own.

    Examples
    --------
    >>> first_cause(OSError("Generic error\n  \x1b[31m↳\x1b[0m Unable to open\n  ↳ Permission denied"))
    'Generic error: Permission denied'
    """
    lines = [_MARKS.sub("", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    return ": ".join(dict.fromkeys([lines[0], lines[-1]]))
