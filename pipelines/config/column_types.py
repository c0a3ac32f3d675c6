"""Column types as a pipeline file writes them, and their Arrow equivalents. Spark parses the type text itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.errors import PipelineFileError
from headrace.storage.errors import nearest
from headrace.storage.format import stored_type

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TYPE_NAMES", "arrow_schema", "arrow_type", "spark_ddl", "table_type", "type_name"]

_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_SYNONYMS = {"bool": "boolean", "integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
_SIGNED = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(), pa.date64(): pa.date32(),
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_MOST_DIGITS = 38
TYPE_NAMES = (*_PLAIN, "decimal(p,s)")


def canonical(text: str) -> str:
    """Return the name of a type as Spark writes it.

    Raises
    ------
    PipelineFileError
        If the text is not a valid type.
    """
    name = text.strip().lower()
    name = _SYNONYMS.get(name, name)
    if name in _PLAIN:
        return name
    match = _DECIMAL.fullmatch(name)
    if match is not None and 1 <= int(match[1]) <= _MOST_DIGITS and int(match[2]) <= int(match[1]):
        return f"decimal({match[1]},{match[2]})"
    raise PipelineFileError(
        f"unknown type {text!r}{nearest(name, list(_PLAIN))}; the types are {', '.join(TYPE_NAMES)}"
    )


def arrow_type(text: str) -> pa.DataType:
    """Return the Arrow type that Spark uses to exchange values of a pipeline file type.

    Examples
    --------
    >>> arrow_type("bigint"), arrow_type("decimal(10, 2)")
    (DataType(int64), Decimal128Type(decimal128(10, 2)))
    """
    name = canonical(text)
    match = _DECIMAL.fullmatch(name)
    return pa.decimal128(int(match[1]), int(match[2])) if match else _PLAIN[name]


def type_name(kind: pa.DataType) -> str:
    """Return the name of an Arrow type in pipeline files and Spark SQL, or Arrow's own name if it has no such name.

    Examples
    --------
    >>> type_name(pa.int32()), type_name(pa.decimal128(10, 2))
    ('int', 'decimal(10,2)')
    """
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next((name for name, plain in _PLAIN.items() if plain == kind), str(kind))


def table_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type that a Delta table has for an Arrow type, or None if it has none.

    The table's type may hold fewer values: no unsigned integers from 2^63 on, and no fractions of a microsecond.

    Examples
    --------
    >>> table_type(pa.uint32()), table_type(pa.timestamp("ns", "Asia/Tokyo")), table_type(pa.time32("s"))
    (DataType(int64), TimestampType(timestamp[us, tz=UTC]), None)
    """
    if pa.types.is_null(kind):
        return kind
    if pa.types.is_nested(kind):
        parts = [kind.field(place).type for place in range(kind.num_fields)]
        return kind if all(table_type(part) in {part, stored_type(part)} for part in parts) else None
    kept = stored_type(kind)
    if kept is None or pa.types.is_decimal(kept):
        return None if kept is None or not 0 <= kept.scale <= kept.precision else kept
    if pa.types.is_timestamp(kept):
        return _PLAIN["timestamp_ntz" if kept.tz is None else "timestamp"]
    kept = _SIGNED.get(kept, kept)
    return kept if kept in _PLAIN.values() else None


def arrow_schema(columns: Mapping[str, str]) -> pa.Schema:
    """Return the Arrow schema of columns, given their names and types."""
    return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in columns.items()])


def spark_ddl(columns: Mapping[str, str]) -> str:
    """Return the columns as Spark DDL.

    Examples
    --------
    >>> spark_ddl({"id": "long", "a b": "string"})
    '`id` bigint, `a b` string'
    """
    quoted = ((name.replace("`", "``"), canonical(kind)) for name, kind in columns.items())
    return ", ".join(f"`{name}` {kind}" for name, kind in quoted)
