"""A Delta table rewritten with another schema: all rows move to new files, in one commit at exactly the next version.

Delta's own type widening and column dropping need table features that readers outside Spark do not support. The table
keeps its identity, properties, comments and constraints of nullability; its change feed shows each row as deleted and
inserted.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.pipelines.delta.commits import Commit, published
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.live_files import LiveFiles
from headrace.pipelines.delta.reads import has_only_vectors, scan_table
from headrace.pipelines.delta.row_changes import removed_file
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltalake import DeltaTable

    from headrace.pipelines.delta.data_files import DataFile

__all__ = ["refuse_rewrite", "rewrite"]

_ROWS_OF_A_FILE: Final = 1 << 22


def refuse_rewrite(table: DeltaTable, path: str) -> None:
    """Raise an error if a table cannot be rewritten.

    Raises
    ------
    DeltaTableError
        If the table is partitioned, or needs more than plain files and deletion vectors. The message has the remedy.
    """
    partitions = table.metadata().partition_columns
    vectors = "deletionVectors" in (table.protocol().reader_features or ()) and not has_only_vectors(table)
    if partitions or vectors or not takes_files(table):
        why = f"is partitioned by {', '.join(partitions)}" if partitions else "has features that only Spark writes"
        why = "has deletion vectors and other features" if vectors else why
        raise DeltaTableError(
            f"the Delta table {path} {why}, so Headrace cannot rewrite it with another schema; rewrite it with Spark: "
            f'frame = spark.read.format("delta").load("{path}"), change the columns of the frame, then frame.write.'
            'format("delta").mode("overwrite").option("overwriteSchema", "true").save(...) to the same path'
        )


def rewrite(
    path: str,
    table: DeltaTable,
    fields: Sequence[dict[str, Any]],
    schema: pa.Schema,
    convert: Callable[[pa.RecordBatch], pa.RecordBatch],
) -> bool:
    """Replace all rows of a table, and its schema.

    Parameters
    ----------
    path, table
        Path of the table, and the open table at the version to rewrite.
    fields
        New fields, as in Delta's schema.
    schema
        The same columns with their Arrow types.
    convert
        Function that converts rows of the table to rows of the new schema.

    Returns
    -------
    bool
        False if another writer committed first. Nothing was changed then.

    Raises
    ------
    DeltaTableError
        If the rows cannot be read or written.
    """
    refuse_rewrite(table, path)
    files = _written(path, table, schema, convert)
    text = json.dumps({"type": "struct", "fields": list(fields)})
    return published(path, table, files, Commit("", 0), schema=text, removals=_removals(path, table))


def _removals(path: str, table: DeltaTable) -> list[dict[str, Any]]:
    """Return the actions that remove all files; Delta identifies a file by its path and its deletion vector."""
    now = int(time.time() * 1000)
    if has_only_vectors(table):
        return [{"remove": removed_file(file, now)} for file in LiveFiles(path).at(table.version())]
    files = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes"]).to_pylist()
    return [
        {"remove": {"path": each["path"], "size": each["size_bytes"], "deletionTimestamp": now, "dataChange": True}}
        for each in files
    ]


def _written(
    path: str, table: DeltaTable, schema: pa.Schema, convert: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> list[DataFile]:
    """Write all rows into new files, which no commit names yet."""
    files: list[DataFile] = []
    rows, reader = 0, iter(scan_table(table, [field.name for field in table.schema().fields]))
    batch = next(reader, None)
    while batch is not None:
        with FileWriter(FileSpec(path, schema)) as writer:
            rows = 0
            while batch is not None and rows < _ROWS_OF_A_FILE:
                writer.write(convert(batch))
                rows += batch.num_rows
                batch = next(reader, None)
            files += writer.close()
    return files
