"""Columns as Spark names and types them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["quoted", "spark_schema"]


def quoted(name: str) -> str:
    """Return a column's name such that Spark reads no dot or backtick in it."""
    return f"`{name.replace('`', '``')}`"


def spark_schema(schema: pa.Schema) -> StructType:
    """Return a schema of Arrow as Spark has it, its timestamps without a time zone of the session."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - pyspark is heavy

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)
