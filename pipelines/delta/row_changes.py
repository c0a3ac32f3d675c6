"""Changes of rows in a Delta table, by merge-on-read: no data file is written again.

A changed row is removed by the deletion vector of its file, and its new form is in a new file. Change files describe
what changed for readers of the change feed. All of it is one entry of the log, which becomes the version after the one
that the change was planned at, or the change is planned again.

Rows are found by a column of unique integers, which is read from the files whose statistics do not rule them out. Data
files of the table are never kept in memory, so the memory for a change grows only with the number of removed rows.
"""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.pipelines.delta.commits import commit_exactly, create_entry, listed_file
from headrace.pipelines.delta.data_files import FileSpec
from headrace.pipelines.delta.deletion_vectors import write_vectors
from headrace.pipelines.delta.live_files import read_live_file
from headrace.pipelines.delta.tables import CHANGE_TYPE
from headrace.pipelines.errors import DeltaTableError, TableMovedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deltalake import DeltaTable
    from numpy.typing import NDArray

    from headrace.pipelines.delta.commits import Commit
    from headrace.pipelines.delta.data_files import DataFile
    from headrace.pipelines.delta.live_files import LiveFile, LiveFiles

__all__ = [
    "RowChanges",
    "change_rows_exactly",
    "create_row_table",
    "feed_files",
    "listed_feed",
    "remaining_file",
    "removed_file",
    "rows_of",
]

_FEED: Final = "_change_data"
_THREADS: Final = 4
_PROPERTIES: Final = {"delta.enableChangeDataFeed": "true", "delta.enableDeletionVectors": "true"}


def create_row_table(
    path: str, schema: pa.Schema, files: Sequence[DataFile] = (), properties: Mapping[str, str] | None = None
) -> None:
    """Create a table whose rows can be changed: with deletion vectors and the change feed.

    `deltalake` would add a feature to the protocol that keeps tasks from writing the table's files.

    Parameters
    ----------
    path, schema
        Folder and columns of the new table.
    files
        Data files of the table, which are in the folder already.
    properties
        Further properties of the table.

    Raises
    ------
    DeltaTableError
        If there is a table already, or the log cannot be written.
    """
    from deltalake import Schema  # noqa: PLC0415 - heavy

    features = ["deletionVectors", *(["timestampNtz"] if _has_local_times(schema) else [])]
    now = int(time.time() * 1000)
    operation = {"operation": "CREATE TABLE", "operationParameters": {}}
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": now, **operation, "engineInfo": "headrace"}},
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": [*features, "appendOnly", "changeDataFeed", "invariants"],
            }
        },
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": Schema.from_arrow(schema).to_json(),
                "partitionColumns": [],
                "configuration": {**_PROPERTIES, **(properties or {})},
                "createdTime": now,
            }
        },
        *({"add": listed_file(file)} for file in files),
    ]
    try:
        (Path(path) / "_delta_log").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeltaTableError(f"the Delta table at {path} cannot be created: {error}") from error
    if not create_entry(path, 0, "\n".join(map(json.dumps, actions)) + "\n"):
        raise DeltaTableError(f"there is a Delta table at {path} already; name another folder, or remove the table")


def _has_local_times(schema: pa.Schema) -> bool:
    """Return whether a column, or a part of it, is a timestamp without a time zone."""
    kinds = [field.type for field in schema]
    while kinds:
        kind = kinds.pop()
        if pa.types.is_timestamp(kind) and kind.tz is None:
            return True
        kinds += [kind.field(part).type for part in range(kind.num_fields)]
    return False


def feed_files(path: str, schema: pa.Schema) -> FileSpec:
    """Return the specification of change files: rows of the table, with their `_change_type`."""
    return FileSpec(path, pa.schema([*schema, pa.field(CHANGE_TYPE, pa.string())]), subfolder=_FEED)


@dataclass(frozen=True)
class RowChanges:
    """Rows to remove from a table and files to add to it.

    Parameters
    ----------
    column
        Column of unique int64 values that identifies a row.
    removed
        Values of the rows to remove, ascending.
    files
        Data files with new rows, and the new form of changed rows.
    feed
        Change files with all changes of the commit: rows before and after a change, new rows, removed rows. They may
        be left out if no row is removed.
    """

    column: str
    removed: NDArray[np.int64]
    files: Sequence[DataFile]
    feed: Sequence[DataFile] = ()


def change_rows_exactly(
    path: str, table: DeltaTable, live: LiveFiles, version: int, changes: RowChanges, commit: Commit
) -> None:
    """Change rows of a table if its rows have not changed since a version.

    Commits of other writers that changed no row (`OPTIMIZE`, an application transaction) may come in between.

    Parameters
    ----------
    path, table, live
        Path of the table, the open table, which is updated to its newest version, and its data files.
    version
        Version that the changes were planned at.
    changes
        Changes to commit.
    commit
        Description of the commit.

    Raises
    ------
    TableMovedError
        If another writer changed rows, properties or the schema since that version, or a file was removed. Nothing was
        committed.
    DeltaTableError
        If the log cannot be written, or the table does not have each row to remove exactly once.
    """

    def further(at: int) -> list[dict[str, Any]]:
        gone = [file.path for file in changes.feed if not (Path(path) / file.path).exists()]
        if gone:
            raise TableMovedError(f"{path}/{gone[0]} was removed before it was committed")
        return [*_removals(path, live.at(at), changes), *({"cdc": listed_feed(file)} for file in changes.feed)]

    commit_exactly(path, table, version, changes.files, commit, further)


def listed_feed(file: DataFile) -> dict[str, Any]:
    """Return the `cdc` action of a change file."""
    return {"path": file.path, "partitionValues": file.partition, "size": file.size, "dataChange": False}


def _removals(path: str, files: Iterable[LiveFile], changes: RowChanges) -> list[dict[str, Any]]:
    """Return the actions that remove rows, after writing their deletion vectors."""
    if not len(changes.removed):
        return []
    candidates = [file for file in files if len(_wanted(file, changes))]
    with ThreadPoolExecutor(_THREADS, "headrace-positions") as pool:
        found = list(pool.map(lambda file: _positions(path, file, changes), candidates))
    hits = [(file, positions) for file, positions in zip(candidates, found, strict=True) if len(positions)]
    count = sum(len(positions) for _, positions in hits)
    if count != len(changes.removed):
        raise DeltaTableError(
            f"the Delta table {path} has {count} rows whose {changes.column!r} is one of the {len(changes.removed)} "
            "rows to change; each of them must be there once. Nothing was committed; check the dimension with "
            "`headrace dimension check`"
        )
    return _actions(path, hits)


def _wanted(file: LiveFile, changes: RowChanges) -> NDArray[np.int64]:
    """Return the removed values that a file may have, by its statistics."""
    least, greatest = file.bounds(changes.column)
    if least is None or greatest is None:
        return changes.removed
    first = np.searchsorted(changes.removed, least, side="left")
    return changes.removed[first : np.searchsorted(changes.removed, greatest, side="right")]


def _positions(path: str, file: LiveFile, changes: RowChanges) -> NDArray[np.int64]:
    """Return the positions in a file of the rows to remove."""
    wanted = _wanted(file, changes)
    found = []
    for positions, batch in read_live_file(path, file, pa.schema([(changes.column, pa.int64())])):
        keys = np.asarray(batch.column(0).fill_null(np.iinfo(np.int64).min))
        at = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
        found.append(positions[wanted[at] == keys])
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _actions(path: str, hits: Sequence[tuple[LiveFile, NDArray[np.int64]]]) -> list[dict[str, Any]]:
    """Return the remove action of each file, and the add action of a file that keeps some of its rows."""
    removed = [_all_removed(path, file, positions) for file, positions in hits]
    rows = [rows_of(path, file) for file, _ in hits]
    partly = [number for number in range(len(hits)) if len(removed[number]) < rows[number]]
    vectors = write_vectors(path, [removed[number] for number in partly])
    now = int(time.time() * 1000)
    actions: list[dict[str, Any]] = [{"remove": removed_file(file, now)} for file, _ in hits]
    for number, vector in zip(partly, vectors, strict=True):
        file = hits[number][0]
        actions.append({"add": remaining_file(file, rows[number], vector.descriptor())})
    return actions


def _all_removed(path: str, file: LiveFile, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    if file.vector is None:
        return positions
    return np.union1d(file.vector.positions(path).astype(np.int64), positions)


def rows_of(path: str, file: LiveFile) -> int:
    """Return the number of rows in a file, including removed ones."""
    return pq.read_metadata(Path(path) / file.place).num_rows if file.rows is None else file.rows


def removed_file(file: LiveFile, now: int) -> dict[str, Any]:
    """Return the `remove` action of a file, at a time in ms."""
    described = {
        "path": file.path,
        "deletionTimestamp": now,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": dict(file.partition),
        "size": file.size,
    }
    return described if file.vector is None else described | {"deletionVector": file.vector.descriptor()}


def remaining_file(file: LiveFile, rows: int, vector: Mapping[str, Any]) -> dict[str, Any]:
    """Return the add action of a file with a deletion vector; its bounds may belong to removed rows."""
    return {
        "path": file.path,
        "partitionValues": dict(file.partition),
        "size": file.size,
        "modificationTime": file.modified,
        "dataChange": True,
        "stats": json.dumps({**file.statistics, "numRecords": rows, "tightBounds": False}),
        "deletionVector": dict(vector),
    }
