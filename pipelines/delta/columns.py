"""New columns of Delta tables, whose existing rows are null in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.config.column_types import type_name
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import first_cause, open_table
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_columns", "added_columns_statement"]


def added_columns_statement(path: str, fields: Sequence[pa.Field]) -> str:
    """Return the SQL that adds columns to a table."""
    columns = ", ".join(f"`{field.name}` {type_name(field.type)}" for field in fields)
    return f"ALTER TABLE delta.`{path}` ADD COLUMNS ({columns})"


def add_columns(path: str, fields: Sequence[pa.Field]) -> None:
    """Add columns to a table, unless it has them.

    Raises
    ------
    DeltaTableError
        If the table has a column of the name with another type, or the columns cannot be added. The message has the SQL
        that adds them.
    """
    from deltalake import Field, Schema  # noqa: PLC0415 - heavy
    from deltalake.exceptions import DeltaError  # noqa: PLC0415 - as above

    table = open_table(path)
    there = {field.name for field in table.schema().fields}
    missing = [field for field in fields if field.name not in there]
    if not missing:
        return
    if not takes_files(table):
        _add_by_spark(path, missing)
        return
    plain = [field.with_nullable(nullable=True).remove_metadata() for field in missing]
    wanted: list[Field] = list(Schema.from_arrow(pa.schema(plain)).fields)
    try:
        table.alter.add_columns(wanted)
    except OSError as error:
        raise DeltaTableError(
            f"columns cannot be added to {path}: {first_cause(error)}; the folder must be "
            "writable for this user, and have space left; then run again"
        ) from error
    except DeltaError as error:
        raise DeltaTableError(
            f"columns cannot be added to {path}: {first_cause(error)}; add them yourself: "
            f"{added_columns_statement(path, missing)}"
        ) from error


def _add_by_spark(path: str, fields: Sequence[pa.Field]) -> None:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - heavy

    statement = added_columns_statement(path, fields)
    session = SparkSession.getActiveSession()
    if session is None:
        raise DeltaTableError(f"only Spark can add columns to the Delta table {path}: {statement}")
    try:
        session.sql(statement)
    except Exception as error:
        raise DeltaTableError(
            f"Spark could not add columns to {path}: {str(error).splitlines()[0]}; add them yourself: {statement}"
        ) from error
