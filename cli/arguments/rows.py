"""Rows and keys of a table as text: keys as typed on the command line, rows as CSV or as JSON objects."""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import io
import itertools
import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pc

from headrace.cli.reporting.console import echo
from headrace.cli.reporting.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["limited", "objects", "parse_key", "print_csv", "table_objects", "table_rows"]

_MICROSECOND = 1000  # nanoseconds


def parse_key(text: str | None, key: list[pa.Field]) -> tuple[Any, ...] | None:
    """Parse one key into values of the key's types."""
    if text is None:
        return None
    parts = _fields(text) if len(key) > 1 or text.startswith('"') else [text]
    if len(parts) != len(key):
        raise ArgumentsError(
            f"the key has {len(key)} columns ({', '.join(f.name for f in key)}), but {text!r} {len(parts)}; "
            "give a value for each"
        )
    return tuple(_parsed(part, field) for part, field in zip(parts, key, strict=True))


def _fields(text: str) -> list[str]:
    try:
        return next(csv.reader(io.StringIO(text, newline=""), strict=True), [])
    except csv.Error as error:
        raise ArgumentsError(f"{text!r} is not quoted as in CSV: {error}") from error


def _parsed(text: str, field: pa.Field) -> Any:
    try:
        if pa.types.is_binary(field.type):
            return bytes.fromhex(text)
        if pa.types.is_time(field.type):
            return pa.array([f"1970-01-01T{text}"]).cast(pa.timestamp(field.type.unit)).cast(field.type)[0]
        if pa.types.is_duration(field.type):
            return pa.array([int(text)], pa.int64()).cast(field.type)[0]
        return pa.array([text]).cast(field.type)[0]
    except (pa.ArrowException, ValueError, OverflowError) as error:
        from headrace.pipelines.config import type_name

        raise ArgumentsError(
            f"{text!r} is no {type_name(field.type)}, the type of key column {field.name!r}; "
            "write it as `headrace table scan` prints it"
        ) from error


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the first `limit` rows, or all rows without a limit."""
    left = limit
    for batch in batches:
        if left is None:
            yield batch
            continue
        if left <= 0:
            return
        yield batch.slice(0, min(left, batch.num_rows))
        left -= batch.num_rows


def print_csv(batches: Iterator[pa.RecordBatch], names: list[str]) -> None:
    """Print a header and the rows. Text is quoted, a missing value is an empty field, and bytes are hexadecimal.

    An immediate failure, such as an unknown column, prints nothing.
    """
    first = next(batches, None)
    heading = io.StringIO()
    csv.writer(heading, lineterminator="\n").writerow(names)
    echo(heading.getvalue(), nl=False)
    for batch in itertools.chain([] if first is None else [first], batches):
        lines = io.BytesIO()
        pc.write_csv(_hexadecimal(_in_known_zones(batch)), lines, pc.WriteOptions(include_header=False))
        echo(lines.getvalue(), nl=False)


def objects(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as Python objects. A value that neither Python nor JSON has is text, such as a nanosecond or NaN."""
    columns = [_objects(column) for column in _in_known_zones(batch).columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _objects(column: pa.Array) -> list[Any]:
    if pa.types.is_floating(column.type):
        return [value if value is None or math.isfinite(value) else str(value) for value in column.to_pylist()]
    if column.type == pa.time64("ns"):
        return [_object(value, exact=not (value.value or 0) % _MICROSECOND) for value in column]
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return [_object(value, exact=True) for value in column]


def _object(value: pa.Scalar, *, exact: bool) -> Any:
    """Return a value as Python has it, or as text if it is not exact there or there is none."""
    if exact:
        with contextlib.suppress(OverflowError, ValueError):
            return value.as_py()
    return value.cast(pa.string()).as_py()


def table_objects(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table as `objects` does those of a batch."""
    return [row for batch in rows.to_batches() for row in objects(batch)]


def table_rows(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows for people to read, with all digits of fractions and times."""
    found = (row.values() for row in table_objects(rows))
    return [tuple(str(value) if isinstance(value, float | dt.datetime) else value for value in row) for row in found]


def _in_known_zones(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert instants to UTC if their time zone is not in the system's database."""
    columns = [
        column if _zone_is_known(column.type) else column.cast(pa.timestamp(column.type.unit, "UTC"))
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _zone_is_known(dtype: pa.DataType) -> bool:
    if not pa.types.is_timestamp(dtype) or dtype.tz is None:
        return True
    instant = pa.array([0], pa.int64()).cast(dtype)
    try:
        instant.cast(pa.string())
        instant.to_pylist()
    except (pa.ArrowException, KeyError, ValueError):
        return False
    return True


def _hexadecimal(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [
        pa.array([value and value.hex() for value in column.to_pylist()], pa.string())
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)
