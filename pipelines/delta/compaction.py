"""Compaction of a Delta table whose rows are changed by deletion vectors: fewer files, without removed rows.

Changes leave small files, and removed rows in old ones, which every reader has to read and skip. Compaction writes the
remaining rows of such files into new files, and commits that as a rearrangement, which is no change of any row: the
change feed has nothing, and replicas stay as they are. Files are read and written batch by batch.

Delta's own OPTIMIZE and REORG TABLE ... APPLY (PURGE) do the same with Spark.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.delta.commits import create_entry, listed_file
from headrace.pipelines.delta.data_files import DataFile, FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.delta.reads import plain_schema
from headrace.pipelines.delta.row_changes import removed_file
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.errors import TableMovedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from deltalake import DeltaTable

    from headrace.pipelines.delta.live_files import LiveFile

__all__ = ["Compacted", "compact_table"]

TARGET_BYTES: Final = 128 << 20
_SMALL: Final = 0.5
_ATTEMPTS: Final = 10


@dataclass(frozen=True)
class Compacted:
    """Result of a compaction.

    Parameters
    ----------
    version
        Version of the table afterward.
    files_before, files_after
        Number of data files of the table.
    rows
        Number of rows that were written again.
    removed
        Number of removed rows that the table no longer holds.
    """

    version: int
    files_before: int
    files_after: int
    rows: int
    removed: int


def compact_table(path: str, target: int = TARGET_BYTES, hook: Callable[[str], None] = lambda _step: None) -> Compacted:
    """Write the rows of small files, and of files with removed rows, into files of a target size.

    Parameters
    ----------
    path
        Path of a local table without partitions.
    target
        Bytes of a new file, about.
    hook
        Function called with the name of each step.

    Raises
    ------
    TableMovedError
        If other writers changed the files of every attempt. Nothing was committed.
    DeltaTableError
        If a file cannot be read or written.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _compacted(path, target, hook)
        except TableMovedError:
            continue
    raise TableMovedError(f"other writers changed {path} during each of {_ATTEMPTS} attempts to compact it; run again")


def _compacted(path: str, target: int, hook: Callable[[str], None]) -> Compacted:
    table, live = open_table(path), LiveFiles(path)
    files = live.at(table.version())
    chosen = _chosen(files, target)
    if not chosen:
        return Compacted(table.version(), len(files), len(files), 0, 0)
    schema = plain_schema(pa.schema(table.schema().to_arrow()))
    written = list(_written(path, chosen, schema, target))
    hook("before commit")
    version = _commit(path, table, live, chosen, written)
    after = len(files) - len(chosen) + len(written)
    return Compacted(
        version, len(files), after, sum(file.rows for file in written), sum(file.removed for file in chosen)
    )


def _chosen(files: Sequence[LiveFile], target: int) -> list[LiveFile]:
    """Return the files with removed rows, and the small files unless there is only one."""
    holed = [file for file in files if file.removed]
    small = [file for file in files if not file.removed and file.size < target * _SMALL]
    return [*holed, *small] if holed or len(small) > 1 else []


def _written(path: str, files: Iterable[LiveFile], schema: pa.Schema, target: int) -> Iterator[DataFile]:
    """Write the rows of files into new files, one after another, and yield these."""
    batches = (batch for file in files for _, batch in read_live_file(path, file, schema))
    batch = next(batches, None)
    while batch is not None:
        with FileWriter(FileSpec(path, schema)) as writer:
            size = 0
            while batch is not None and size < target * 4:  # files are about a quarter of their rows in memory
                writer.write(batch)
                size += batch.nbytes
                batch = next(batches, None)
            yield from writer.close()


def _commit(
    path: str, table: DeltaTable, live: LiveFiles, chosen: Sequence[LiveFile], written: Sequence[DataFile]
) -> int:
    """Replace files by others at the next version, and return that version."""
    form = table.schema().to_json(), table.metadata().configuration, str(table.protocol())
    while True:
        table.update_incremental()
        there = {(file.path, file.vector) for file in live.at(table.version())}
        if form != (table.schema().to_json(), table.metadata().configuration, str(table.protocol())):
            raise TableMovedError(f"another writer changed the schema or a property of {path}")
        if any((file.path, file.vector) not in there for file in chosen):
            raise TableMovedError(f"another writer changed files of {path}")
        gone = [file.path for file in written if not (Path(path) / file.path).exists()]
        if gone:
            raise TableMovedError(f"{path}/{gone[0]} was removed before it was committed")
        version = table.version() + 1
        if create_entry(path, version, _entry(table.version(), chosen, written)):
            return version


def _entry(read_version: int, chosen: Sequence[LiveFile], written: Sequence[DataFile]) -> str:
    now = int(time.time() * 1000)
    info = {
        "timestamp": now,
        "operation": "OPTIMIZE",
        "operationParameters": {"predicate": "[]"},
        "readVersion": read_version,
        "isolationLevel": "SnapshotIsolation",
        "isBlindAppend": False,
        "engineInfo": "headrace",
    }
    actions: list[dict[str, Any]] = [{"commitInfo": info}]
    actions += [{"remove": {**removed_file(file, now), "dataChange": False}} for file in chosen]
    actions += [{"add": {**listed_file(file), "dataChange": False}} for file in written]
    return "\n".join(map(json.dumps, actions)) + "\n"
