"""Creation of a dimension with history as a Delta table: no members yet, only the special members."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.etl.history import special_versions
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.row_changes import create_row_table
from headrace.pipelines.delta.tables import has_table
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.history.layout import delta_schema

if TYPE_CHECKING:
    from headrace.etl.history import History

__all__ = ["create_history", "special_rows"]


def create_history(path: str, history: History) -> None:
    """Create the Delta table of a dimension with history, with its special members.

    The table has deletion vectors, so that changes need not write data files again.

    Raises
    ------
    DeltaTableError
        If the table already exists or cannot be written.
    """
    schema = delta_schema(history)
    if has_table(path):
        raise DeltaTableError(f"there is a Delta table at {path} already; name another folder, or remove the table")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeltaTableError(f"the Delta table at {path} cannot be created: {error}") from error
    with FileWriter(FileSpec(path, schema)) as writer:
        for batch in special_rows(history).to_batches():
            writer.write(batch)
        files = writer.close()
    create_row_table(path, schema, files)


def special_rows(history: History) -> pa.Table:
    """Return the special members as rows of the Delta table, which hold no entries."""
    versions, schema = special_versions(history), delta_schema(history)
    hidden = [pa.nulls(versions.num_rows, field.type) for field in list(schema)[versions.num_columns :]]
    return pa.Table.from_arrays([*versions.columns, *hidden], schema=schema)
