"""Column names and column types for Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["quoted", "spark_schema"]


def quoted(name: str) -> str:
    """Return a column name quoted for Spark, so that dots and backticks are literal."""
    return f"`{name.replace('`', '``')}`"


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema of an Arrow schema; timestamps are independent of the session's time zone."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - pyspark is heavy

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)
