"""The data files of a Delta table at a version, with their deletion vectors, from the log of a local table.

`deltalake` lists the files without the descriptors of their deletion vectors, which a commit that removes rows has to
repeat. So the last checkpoint and the log entries after it are read here. Tables with multi-part or v2 checkpoints are
not supported; `headrace.pipelines.delta.support` refuses row changes of tables that have them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.pipelines.delta.deletion_vectors import DeletionVector
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.spark.frame import conform

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

__all__ = ["LiveFile", "LiveFiles", "read_live_file"]

_ADD: Final = "add"
_FIELDS: Final = ("path", "partitionValues", "size", "modificationTime", "stats", "deletionVector")
_BATCH_ROWS: Final = 1 << 15


@dataclass(frozen=True)
class LiveFile:
    """A data file of a table at a version.

    Parameters
    ----------
    path
        Path of the file as in the log, relative to the table and URL-encoded.
    partition
        Partition values as in the log.
    size, modified
        Bytes, and modification time in ms.
    statistics
        Statistics: row count, null counts, bounds.
    vector
        Deletion vector, or None.
    """

    path: str
    partition: Mapping[str, str | None]
    size: int
    modified: int
    statistics: Mapping[str, Any]
    vector: DeletionVector | None

    @classmethod
    def of(cls, add: Mapping[str, Any]) -> LiveFile:
        """Return the file of an `add` action."""
        vector = add.get("deletionVector")
        return cls(
            add["path"],
            dict(add.get("partitionValues") or {}),
            add["size"],
            add["modificationTime"],
            json.loads(add.get("stats") or "{}"),
            None if vector is None else DeletionVector.of(vector),
        )

    @property
    def place(self) -> str:
        """Path of the file relative to the table."""
        return unquote(self.path)

    @property
    def rows(self) -> int | None:
        """Number of rows in the file, including removed ones; None if the statistics lack it."""
        return self.statistics.get("numRecords")

    @property
    def removed(self) -> int:
        """Number of removed rows."""
        return 0 if self.vector is None else self.vector.cardinality

    def bounds(self, column: str) -> tuple[Any, Any]:
        """Return the least and the greatest value of a column; None for an unknown bound."""
        least, greatest = (self.statistics.get(name) or {} for name in ("minValues", "maxValues"))
        return least.get(column), greatest.get(column)


class LiveFiles:
    """Follows the data files of a local table from version to version.

    Parameters
    ----------
    path
        Path of the table.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._log = Path(path) / "_delta_log"
        self._version = -1
        self._files: dict[tuple[str, DeletionVector | None], LiveFile] = {}

    def at(self, version: int) -> list[LiveFile]:
        """Return the files at a version, which must not be older than the one of the last call.

        Raises
        ------
        DeltaTableError
            If the log cannot be read.
        """
        if self._version < 0:
            self._start(version)
        for entry in range(self._version + 1, version + 1):
            self._follow(entry)
        self._version = max(version, self._version)
        return list(self._files.values())

    def _start(self, version: int) -> None:
        """Read the newest checkpoint up to a version, if there is one."""
        found = [int(file.name[:20]) for file in self._log.glob("*.checkpoint.parquet") if file.name[:20].isdigit()]
        checkpoint = max((each for each in found if each <= version), default=None)
        if checkpoint is None:
            return
        name = self._log / f"{checkpoint:020d}.checkpoint.parquet"
        try:
            with pq.ParquetFile(name) as file:
                for batch in file.iter_batches(columns=[f"{_ADD}.{field}" for field in _FIELDS]):
                    for row in batch.filter(batch.column(_ADD).is_valid()).column(_ADD).to_pylist():
                        if row["path"] is not None:
                            self._add(LiveFile.of(row))
        except (OSError, pa.ArrowException) as error:
            raise DeltaTableError(f"{name} cannot be read: {error}") from error
        self._version = checkpoint

    def _follow(self, version: int) -> None:
        """Apply a log entry: removes first, because a file whose rows were removed is removed and added."""
        actions = list(self._actions(version))
        for action in actions:
            if "remove" in action:
                vector = action["remove"].get("deletionVector")
                key = action["remove"]["path"], None if vector is None else DeletionVector.of(vector)
                self._files.pop(key, None)
        for action in actions:
            if _ADD in action:
                self._add(LiveFile.of(action[_ADD]))

    def _add(self, file: LiveFile) -> None:
        self._files[file.path, file.vector] = file

    def _actions(self, version: int) -> Iterator[dict[str, Any]]:
        name = self._log / f"{version:020d}.json"
        try:
            lines = name.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise DeltaTableError(
                f"{name} cannot be read, and no checkpoint replaces it: {error}; restore the log from a backup"
            ) from error
        yield from (json.loads(line) for line in lines if line.strip())


def read_live_file(
    table: str, file: LiveFile, schema: pa.Schema, wanted: NDArray[np.int64] | None = None
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """Yield the rows of a file that were not removed, with their positions in the file.

    Parameters
    ----------
    table
        Path of the table.
    file
        File to read.
    schema
        Columns to read, none of them a partition column. A column that the file does not have is null.
    wanted
        Ascending positions; row groups that have none of them are left out. None for all rows.

    Raises
    ------
    DeltaTableError
        If the file cannot be read.
    """
    removed = np.empty(0, np.int64) if file.vector is None else file.vector.positions(table).astype(np.int64)
    place = Path(table) / file.place
    try:
        with pq.ParquetFile(place, coerce_int96_timestamp_unit="us") as parquet:
            for start, batch in _batches(parquet, schema.names, wanted):
                kept = _kept(removed, start, batch.num_rows)
                rows = conform(batch, schema)
                yield start + np.flatnonzero(kept), rows if kept.all() else rows.filter(pa.array(kept))
    except (OSError, pa.ArrowException) as error:
        raise DeltaTableError(
            f"the data file {place} of the Delta table {table} cannot be read: {error}; restore it from a backup"
        ) from error


def _batches(
    parquet: pq.ParquetFile, columns: list[str], wanted: NDArray[np.int64] | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the batches of the row groups that have wanted positions, each with its first position in the file."""
    lengths = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    groups = np.arange(len(lengths))
    if wanted is not None:
        groups = groups[np.diff(np.searchsorted(wanted, starts)) > 0]
    for group in groups:
        start = int(starts[group])
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[int(group)], columns=columns):
            yield start, batch
            start += batch.num_rows


def _kept(removed: NDArray[np.int64], start: int, rows: int) -> NDArray[np.bool_]:
    """Return which rows of a batch that begins at a position are not among the removed positions."""
    kept = np.ones(rows, dtype=np.bool_)
    first, last = np.searchsorted(removed, [start, start + rows])
    kept[removed[first:last] - start] = False
    return kept
