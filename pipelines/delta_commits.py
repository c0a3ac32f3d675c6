"""Commits of a batch to Delta tables: files that tasks wrote, or rows that Spark's own writer appends.

Both carry an application's transaction of Delta, so that a commit that is repeated changes nothing. Files are committed
by `deltalake` in milliseconds, without a job of Spark; Spark's writer does what a table asks for beyond plain files:
constraints, generated columns, column mapping, or a store that is no local folder.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.pipelines.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

    from headrace.pipelines.data_files import DataFile

__all__ = ["append", "commit_files", "takes_files"]

_ATTEMPTS = 5
_PLAIN_FEATURES = {"appendOnly", "changeDataFeed", "timestampNtz", "invariants", "checkConstraints", "generatedColumns"}
_PLAIN_PARTITIONS = {"byte", "short", "integer", "long", "string", "date", "boolean"}


def takes_files(table: DeltaTable) -> bool:
    """Return whether plain Parquet files with the right columns are all that a table asks for."""
    protocol, metadata, fields = table.protocol(), table.metadata(), table.schema().fields
    settings = metadata.configuration
    asked = (
        not table.table_uri.startswith("file://"),
        not set(protocol.writer_features or ()) <= _PLAIN_FEATURES,
        settings.get("delta.columnMapping.mode", "none") != "none",
        any(name.startswith("delta.constraints.") for name in settings),
        any(not field.nullable for field in fields),
        any(name.startswith("delta.") for field in fields for name in field.metadata),
        any(
            getattr(field.type, "type", None) not in _PLAIN_PARTITIONS
            for field in fields
            if field.name in metadata.partition_columns
        ),
    )
    return not any(asked)


def commit_files(
    table: DeltaTable,
    files: Sequence[DataFile],
    application: str,
    transaction: int,
    note: Mapping[str, Any] | None = None,
) -> None:
    """Make files part of a table, once: if the transaction has been committed, nothing is done.

    Parameters
    ----------
    table
        The table; it is brought to its newest version.
    files
        What tasks wrote.
    application, transaction
        Delta's transaction.
    note
        Plain values kept in the commit, to be read by `DeltaHandle.commit_note`.

    Raises
    ------
    BatchError
        If the commit fails again and again.
    """
    from deltalake.exceptions import CommitFailedError  # noqa: PLC0415 - heavy

    failure: Exception | None = None
    for _ in range(_ATTEMPTS):
        table.update_incremental()
        done = table.transaction_version(application)
        if done is not None and done >= transaction:
            return
        try:
            _commit(table, files, application, transaction, note or {})
        except CommitFailedError as error:
            failure = error
        else:
            return
    raise BatchError(f"the commit to {table.table_uri} failed {_ATTEMPTS} times: {failure}; the next run does it again")


def _commit(
    table: DeltaTable, files: Sequence[DataFile], application: str, transaction: int, note: Mapping[str, Any]
) -> None:
    from deltalake import CommitProperties, Transaction  # noqa: PLC0415 - heavy
    from deltalake.transaction import AddAction  # noqa: PLC0415 - as above

    actions = [
        AddAction(file.path, file.size, file.partition, file.written, data_change=True, stats=file.statistics)
        for file in files
    ]
    table.create_write_transaction(
        actions,
        "append",
        table.schema(),
        partition_by=table.metadata().partition_columns,
        commit_properties=CommitProperties(
            custom_metadata={
                "userMetadata": _noted(application, transaction, note),
                "operationMetrics": {"numOutputRows": str(sum(file.rows for file in files))},
            },
            app_transactions=[Transaction(application, transaction)],
        ),
    )


def append(
    frame: DataFrame, path: str, application: str, transaction: int, note: Mapping[str, Any] | None = None
) -> None:
    """Append rows by Spark's writer, once: a transaction that the table holds already is skipped by Delta.

    Parameters
    ----------
    frame
        The rows; the same ones whenever this transaction is repeated.
    path
        The table.
    application, transaction
        Delta's `txnAppId` and `txnVersion`.
    note
        Plain values kept in the commit, to be read by `DeltaHandle.commit_note`.
    """
    noted = _noted(application, transaction, note or {})
    writer = frame.write.format("delta").mode("append").option("userMetadata", noted)
    writer.option("txnAppId", application).option("txnVersion", transaction).save(path)


def _noted(application: str, transaction: int, note: Mapping[str, Any]) -> str:
    return json.dumps({"application": application, "transaction": transaction, **note})
