"""Creation of a dimension with history as a Delta table: no members yet, only the special members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.etl.history import special_versions
from headrace.pipelines.delta.tables import create_table
from headrace.pipelines.history.layout import delta_schema

if TYPE_CHECKING:
    from headrace.etl.history import History

__all__ = ["create_history", "special_rows"]


def create_history(path: str, history: History) -> None:
    """Create the Delta table of a dimension with history, with its special members.

    Raises
    ------
    DeltaTableError
        If the table already exists or cannot be written.
    """
    create_table(path, delta_schema(history), rows=special_rows(history))


def special_rows(history: History) -> pa.Table:
    """Return the special members as rows of the Delta table, which hold no entries."""
    versions, schema = special_versions(history), delta_schema(history)
    hidden = [pa.nulls(versions.num_rows, field.type) for field in list(schema)[versions.num_columns :]]
    return pa.Table.from_arrays([*versions.columns, *hidden], schema=schema)
