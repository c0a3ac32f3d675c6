"""Commits of a batch to Delta tables: exactly once, and at exactly the planned version.

There are two ways to write. Tasks write Parquet files, and `commit_files` publishes them here in one entry of Delta's
log; a hard link creates the entry only if no other writer created that version (Delta protocol, "Delta log entries").
Tables that need more than plain files (constraints, generated columns, column mapping, an object store) go through
Spark's own transaction, opened at the planned version. Each commit carries a Delta application transaction, a note, and
the table properties that it changes.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import commit_note
from headrace.pipelines.durable import create_whole
from headrace.pipelines.errors import BatchError, DeltaTableError, TableMovedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

    from headrace.pipelines.delta.data_files import DataFile

__all__ = [
    "NEW_MEMBERS",
    "Commit",
    "append",
    "append_exactly",
    "commit_exactly",
    "commit_files",
    "conflicts",
    "create_entry",
    "listed_file",
    "member_files",
    "publish_next",
    "published",
]

NEW_MEMBERS: Final = "new_members"
"""Field in the note of a commit by which a batch adds its new members to a dimension, and does nothing else."""

_LOG = logging.getLogger(__name__)
_ENGINE: Final = "headrace"
_ADDING: Final = frozenset({"commitInfo", "metaData", "txn", "add"})
_ATTEMPTS: Final = 100
_CHECKPOINT_COMMITS: Final = "100"


@dataclass(frozen=True)
class Commit:
    """Description of a commit, without its rows.

    Parameters
    ----------
    application, transaction
        Delta application id, and transaction number of the commit.
    note
        Values stored in the commit as JSON. `DeltaHandle.commit_notes` reads them.
    properties
        Table properties that the commit changes.
    """

    application: str
    transaction: int
    note: Mapping[str, Any] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def user_metadata(self) -> str:
        """The note in the form that Delta stores."""
        return json.dumps({"application": self.application, "transaction": self.transaction, **self.note})


def commit_files(
    path: str, table: DeltaTable, files: Sequence[DataFile], commit: Commit, *, final: bool = True
) -> bool:
    """Add files to a table exactly once, at the next version.

    Parameters
    ----------
    path, table
        Path of the table, and the open table, which is updated to its newest version.
    files
        Data files that tasks wrote.
    commit
        Description of the commit. If the table already holds its transaction, this function does nothing.
    final
        Whether the rows cannot be computed again if a file was removed.

    Returns
    -------
    bool
        Whether this call made the commit.

    Raises
    ------
    BatchError
        If other writers win every attempt.
    DeltaTableError
        If the log cannot be written, or a file was removed.
    TableMovedError
        If a file was removed, and `final` is false.
    """
    for attempt in range(_ATTEMPTS):
        table.update_incremental()
        done = table.transaction_version(commit.application)
        if done is not None and done >= commit.transaction:
            return False
        _require_files(path, files, final=final)
        if _publish(path, table, files, commit, blind=True):
            return True
        time.sleep(min(0.5, 0.001 * 2**attempt))
    raise BatchError(
        f"other writers won {_ATTEMPTS} attempts to commit to {path}; nothing is lost, the next run commits again"
    )


def commit_exactly(
    path: str,
    table: DeltaTable,
    version: int,
    files: Sequence[DataFile],
    commit: Commit,
    more: Callable[[int], Sequence[dict[str, Any]]] | None = None,
) -> None:
    """Add files to a table if its rows have not changed since a version.

    Commits of other writers that changed no row (`OPTIMIZE`, an application transaction) may come in between.

    Parameters
    ----------
    path, table
        Path of the table, and the open table, which is updated to its newest version.
    version
        Version that the files were planned at.
    files
        Data files that tasks wrote.
    commit
        Description of the commit.
    more
        Function that returns further actions of the commit, such as the removal of rows, for the version that the
        commit follows.

    Raises
    ------
    TableMovedError
        If another writer changed rows, properties or the schema since that version, or a file was removed. Nothing was
        committed.
    DeltaTableError
        If the log cannot be written.
    """
    while True:
        table.update_incremental()
        if not _only_rearranged(path, version, table.version()):
            raise TableMovedError(f"another writer changed {path} after version {version}")
        version = table.version()
        if publish_next(path, table, files, commit, () if more is None else more(version)):
            return


def append(frame: DataFrame, path: str, commit: Commit) -> None:
    """Append rows once with Spark's writer: Delta skips a transaction that the table already holds.

    Parameters
    ----------
    frame
        Rows to append, the same ones each time this transaction is repeated.
    path
        Path of the table.
    commit
        Description of the commit. Its properties are not written.

    Raises
    ------
    BatchError
        If other writers change the table's metadata during every attempt.
    """
    writer = frame.write.format("delta").mode("append").option("userMetadata", commit.user_metadata)
    writer = writer.option("txnAppId", commit.application).option("txnVersion", commit.transaction)
    for _ in range(_ATTEMPTS):
        try:
            with conflicts(f"another writer changed {path}"):
                return writer.save(path)
        except TableMovedError as moved:
            _LOG.info("rows are appended again: %s", moved)
    raise BatchError(f"others changed {path} during each of {_ATTEMPTS} attempts to append to it; run again")


def append_exactly(frame: DataFrame, path: str, version: int, commit: Commit) -> None:
    """Append rows with a transaction of Spark's writer that reads the whole table at a version.

    Delta then refuses the commit if another writer changed rows or metadata after that version. This function uses
    Delta's Scala classes, because the public API has no conditional append. A commit without an application only sets
    its properties.

    Raises
    ------
    TableMovedError
        If another writer changed the table after the version. Nothing was committed.
    """
    spark: Any = frame.sparkSession
    jvm, none = spark._jvm, spark._jvm.scala.Option.empty()  # noqa: SLF001 - the gateway to Delta's classes
    delta = jvm.org.apache.spark.sql.delta
    transaction = delta.DeltaLog.forTable(spark._jsparkSession, path).startTransaction(none, none)  # noqa: SLF001 - as above
    if transaction.snapshot().version() != version:
        raise TableMovedError(f"another writer changed {path} after version {version}")
    transaction.readWholeTable()
    _change_metadata(jvm, transaction, commit.properties)
    actions = transaction.writeFiles(frame._jdf)  # noqa: SLF001 - as above
    if commit.application:
        done = delta.actions.SetTransaction(commit.application, commit.transaction, none)
        actions = getattr(actions, "$plus$colon")(done)
    note = jvm.scala.Option.apply(commit.user_metadata)
    operation = getattr(delta, "DeltaOperations$Write")(
        jvm.org.apache.spark.sql.SaveMode.Append, none, none, note, none, none, none, none, none
    )
    with conflicts(f"another writer changed {path} after version {version}"):
        transaction.commit(actions, operation)


@contextmanager
def conflicts(message: str) -> Iterator[None]:
    """Convert each of Delta's conflict errors, which share no base class in Python, to `TableMovedError`."""
    from delta import exceptions  # noqa: PLC0415 - pyspark is heavy

    kinds = (
        exceptions.ConcurrentAppendException,
        exceptions.ConcurrentDeleteDeleteException,
        exceptions.ConcurrentDeleteReadException,
        exceptions.ConcurrentTransactionException,
        exceptions.ConcurrentWriteException,
        exceptions.DeltaConcurrentModificationException,
        exceptions.MetadataChangedException,
        exceptions.ProtocolChangedException,
    )
    try:
        yield
    except kinds as error:
        raise TableMovedError(message) from error


def _change_metadata(jvm: Any, transaction: Any, properties: Mapping[str, str]) -> None:
    """Set table properties within a transaction of Spark's writer."""
    if not properties:
        return
    old = transaction.metadata()
    settings = old.configuration()
    for name, value in properties.items():
        settings = getattr(settings, "$plus")(jvm.scala.Tuple2(name, value))
    kept = (old.id(), old.name(), old.description(), old.format(), old.schemaString(), old.partitionColumns())
    transaction.updateMetadata(old.copy(*kept, settings, old.createdTime()), False)  # noqa: FBT003 - Scala's parameter


def _publish(
    path: str,
    table: DeltaTable,
    files: Sequence[DataFile],
    commit: Commit,
    *,
    blind: bool,
    more: Sequence[dict[str, Any]] = (),
) -> bool:
    """Create the log entry after the table's version; return False if another writer created that version first."""
    if files and not takes_files(table):
        raise BatchError(
            f"{path} was changed during the batch and no longer takes plain files; run again, nothing is lost"
        )
    version = table.version() + 1
    actions = [_commit_info(table, files, commit, blind=blind, appends=not more)]
    if commit.properties:
        actions.append({"metaData": _metadata(table, commit.properties)})
    if commit.application:
        now = int(time.time() * 1000)
        actions.append({"txn": {"appId": commit.application, "version": commit.transaction, "lastUpdated": now}})
    actions += [{"add": listed_file(file)} for file in files]
    actions += more
    if not create_entry(path, version, "\n".join(map(json.dumps, actions)) + "\n"):
        return False
    _checkpoint(table, version)
    return True


def publish_next(
    path: str, table: DeltaTable, files: Sequence[DataFile], commit: Commit, more: Sequence[dict[str, Any]]
) -> bool:
    """Add files and further actions at exactly the version after the one that is open.

    Parameters
    ----------
    path, table
        Path of the table, and the open table.
    files
        New data files.
    commit
        Description of the commit.
    more
        Further actions of the commit, such as the removal of rows.

    Returns
    -------
    bool
        False if another writer created that version first.

    Raises
    ------
    TableMovedError
        If a file was removed. Nothing was committed.
    DeltaTableError
        If the log cannot be written.
    """
    _require_files(path, files, final=False)
    return _publish(path, table, files, commit, blind=False, more=more)


def published(
    path: str,
    table: DeltaTable,
    files: Sequence[DataFile],
    commit: Commit,
    *,
    schema: str,
    removals: Sequence[Mapping[str, Any]],
) -> bool:
    """Replace the files of a table and its schema, at exactly the version after the one that is open.

    Parameters
    ----------
    path, table
        Path of the table, and the open table.
    files
        New data files.
    commit
        Description of the commit.
    schema
        New schema, as Delta stores it.
    removals
        Actions that remove the old files.

    Returns
    -------
    bool
        False if another writer created that version first.
    """
    version = table.version() + 1
    information = _commit_info(table, files, commit, blind=False, appends=False)
    information["commitInfo"]["operation"] = "CHANGE COLUMN"
    information["commitInfo"]["operationParameters"] = {}
    metadata = {**_metadata(table, commit.properties), "schemaString": schema}
    actions = [information, {"metaData": metadata}, *removals, *({"add": listed_file(file)} for file in files)]
    return create_entry(path, version, "\n".join(map(json.dumps, actions)) + "\n")


def member_files(path: str, first: int, last: int) -> list[str] | None:
    """Return the data files of new members that versions `first` to `last` added; None if a version did anything else.

    A batch adds members at exactly the version at which it found that the dimension does not have them, so each of them
    is there once.
    """
    files: list[str] = []
    for version in range(first, last + 1):
        actions = list(_entry(path, version))
        if all(map(_rearranges, actions)):
            continue
        if not _adds_members(actions):
            return None
        files += [unquote(action["add"]["path"]) for action in actions if "add" in action]
    return files


def _adds_members(actions: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a log entry is Headrace's own commit of new members, in plain files."""
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    own = info.get("engineInfo") == _ENGINE and NEW_MEMBERS in commit_note(info)
    return own and all(action.keys() <= _ADDING for action in actions)


def create_entry(path: str, version: int, text: str) -> bool:
    """Write the log entry of a version durably.

    Returns
    -------
    bool
        False if the version exists already.
    """
    log = Path(path) / "_delta_log"
    try:
        create_whole(log / f"{version:020d}.json", text.encode())
    except FileExistsError:
        return False
    except OSError as error:
        raise DeltaTableError(f"{log} cannot be written: {error}; correct the cause and run again") from error
    return True


def _commit_info(
    table: DeltaTable, files: Sequence[DataFile], commit: Commit, *, blind: bool, appends: bool
) -> dict[str, Any]:
    return {
        "commitInfo": {
            "timestamp": int(time.time() * 1000),
            **_operation(table, commit, appends=appends),
            "readVersion": table.version(),
            "isolationLevel": "Serializable",
            "isBlindAppend": blind,
            "operationMetrics": {
                "numFiles": str(len(files)),
                "numOutputRows": str(sum(file.rows for file in files)),
                "numOutputBytes": str(sum(file.size for file in files)),
            },
            **({"userMetadata": commit.user_metadata} if commit.application else {}),
            "engineInfo": _ENGINE,
        }
    }


def _operation(table: DeltaTable, commit: Commit, *, appends: bool) -> dict[str, Any]:
    if not commit.application:
        properties = {"properties": json.dumps(dict(commit.properties))}
        return {"operation": "SET TBLPROPERTIES", "operationParameters": properties}
    if not appends:
        return {"operation": "MERGE", "operationParameters": {}}
    partitions = json.dumps(table.metadata().partition_columns)
    return {"operation": "WRITE", "operationParameters": {"mode": "Append", "partitionBy": partitions}}


def _metadata(table: DeltaTable, properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the table's metadata action with the given properties changed."""
    metadata = table.metadata()
    described = {"name": metadata.name, "description": metadata.description}
    return {
        "id": str(metadata.id),
        **{name: text for name, text in described.items() if text is not None},
        "format": {"provider": "parquet", "options": {}},
        "schemaString": table.schema().to_json(),
        "partitionColumns": metadata.partition_columns,
        "configuration": {**metadata.configuration, **properties},
        "createdTime": metadata.created_time,
    }


def listed_file(file: DataFile) -> dict[str, Any]:
    """Return the `add` action of a file."""
    return {
        "path": file.path,
        "partitionValues": file.partition,
        "size": file.size,
        "modificationTime": file.written,
        "dataChange": True,
        "stats": file.statistics,
    }


def _require_files(path: str, files: Sequence[DataFile], *, final: bool) -> None:
    """Refuse to commit a file that was removed: `VACUUM` may remove a file that was not committed for a long time."""
    gone = [file.path for file in files if not (Path(path) / file.path).exists()]
    if gone and not final:
        raise TableMovedError(f"{path}/{gone[0]} was removed before it was committed")
    if gone:
        raise DeltaTableError(
            f"{path}/{gone[0]} was written for this commit but has been removed, so its rows are lost; restore the "
            "file, or restore the table's folder from a backup, and run again"
        )


def _only_rearranged(path: str, first: int, last: int) -> bool:
    """Return whether the commits after version `first`, up to `last`, changed no row and no metadata."""
    return all(_rearranges(action) for version in range(first + 1, last + 1) for action in _entry(path, version))


def _entry(path: str, version: int) -> Iterator[dict[str, Any]]:
    """Yield the actions of a log entry; treat an unreadable entry as a change."""
    try:
        lines = (Path(path) / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8").splitlines()
    except OSError:
        yield {"metaData": {}}
        return
    yield from (json.loads(line) for line in lines if line.strip())


def _rearranges(action: Mapping[str, Any]) -> bool:
    moved = action.get("add") or action.get("remove")
    return not moved["dataChange"] if moved else not action.keys() & {"metaData", "protocol", "cdc", "add", "remove"}


def _checkpoint(table: DeltaTable, version: int) -> None:
    """Write a checkpoint of the log from time to time, so that readers need only its tail. A failure is harmless."""
    every = int(table.metadata().configuration.get("delta.checkpointInterval", _CHECKPOINT_COMMITS))
    if every < 1 or version % every:
        return
    try:
        table.update_incremental()
        table.create_checkpoint()
    except Exception as error:  # noqa: BLE001 - the commit is done, and the next one tries again
        _LOG.warning("no checkpoint of the log of %s was written: %s", table.table_uri, error)
