"""Parquet files that tasks write and that become part of a Delta table when a commit names them.

A file that no commit names (from a retried task or a failed batch) is not part of the table. `VACUUM` removes it, like
unused files of Spark's own writer. `headrace.pipelines.delta.commits` makes the commit.
"""

from __future__ import annotations

import json
import math
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.spark.frame import conform

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["DataFile", "FileSpec", "FileWriter"]

_GROUP_ROWS = 1 << 18
_SAMPLED_ROWS = 1 << 15
_MILLISECOND = timedelta(milliseconds=1)
_LAST_MILLISECOND = datetime(9999, 12, 31, 23, 59, 59, 999_000, UTC)
_INDEXED_COLUMNS = 32
_INDEXED_CHARACTERS = 32
_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True)
class FileSpec:
    """Description of a table that receives files.

    Parameters
    ----------
    path
        Folder of the table.
    schema
        Columns to write.
    partition_by
        Partition columns of the table. A file has one value for each, stored in its log entry.
    subfolder
        Subfolder of the table that receives the files, for files that are not data files.
    """

    path: str
    schema: pa.Schema
    partition_by: tuple[str, ...] = ()
    subfolder: str = ""


@dataclass(frozen=True)
class DataFile:
    """A file as in Delta's log: path relative to the table, partition, size, time in ms, statistics as JSON."""

    path: str
    partition: dict[str, str | None]
    size: int
    written: int
    rows: int
    statistics: str


class FileWriter:
    """Writes rows into files of a table, one per partition. An error in the block removes the files."""

    def __init__(self, spec: FileSpec) -> None:
        self._spec = spec
        kept = [field for field in spec.schema if field.name not in spec.partition_by]
        self._schema = pa.schema(kept)
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for file in self._open.values():
                file.abandon()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, which have the table's columns in any order and may have additional ones."""
        for partition, rows in self._parts(batch):
            if partition not in self._open:
                self._open[partition] = _OpenFile(Path(self._spec.path), self._spec.subfolder, self._schema)
            self._open[partition].write(conform(rows, self._schema))

    def close(self) -> list[DataFile]:
        """Complete the files and return them; an empty list if there were no rows."""
        return [
            file.close(dict(zip(self._spec.partition_by, partition, strict=True)))
            for partition, file in self._open.items()
        ]

    def _parts(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
        """Yield the rows of each partition, with partition values as in the log; an empty text counts as null."""
        if not batch.num_rows:
            return
        if not self._spec.partition_by:
            yield (), batch
            return
        code = np.zeros(batch.num_rows, dtype=np.int64)
        texts = []
        for name in self._spec.partition_by:
            text = batch.column(name).cast(pa.string())
            text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
            encoded = text.dictionary_encode(null_encoding="encode")
            code = code * len(encoded.dictionary) + np.asarray(encoded.indices)
            texts.append(text)
        found, first, part = np.unique(code, return_index=True, return_inverse=True)
        for i in range(len(found)):
            values = tuple(text[int(first[i])].as_py() for text in texts)
            yield values, batch.filter(pa.array(part == i))


class _OpenFile:
    """An open Parquet file, written in row groups. It is created with the first of them."""

    def __init__(self, table: Path, subfolder: str, schema: pa.Schema) -> None:
        self._table = table
        self._path = table / subfolder / f"part-{uuid.uuid4()}.snappy.parquet"
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0
        self._floating = [field.name for field in schema if pa.types.is_floating(field.type)]
        self._with_nan: set[str] = set()
        self._writer: pq.ParquetWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows."""
        self._waiting.append(batch)
        self._rows += batch.num_rows
        if self._rows >= _GROUP_ROWS:
            self._flush()

    def close(self, partition: dict[str, str | None]) -> DataFile:
        """Complete the file and return its description."""
        self._flush()
        with _named(self._path):
            assert self._writer is not None  # a file is opened for rows
            self._writer.close()
            metadata = pq.read_metadata(self._path)
            seen = self._path.stat()
        statistics = json.dumps(_statistics(metadata, self._schema, self._with_nan))
        written = int(seen.st_mtime * 1000)
        path = self._path.relative_to(self._table).as_posix()
        return DataFile(path, partition, seen.st_size, written, metadata.num_rows, statistics)

    def abandon(self) -> None:
        """Remove the file, even if the disk is full and the file cannot be completed."""
        if self._writer is None:
            return
        with suppress(OSError):
            self._writer.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _created(self, first: pa.Table) -> pq.ParquetWriter:
        if self._path.parent != self._table:
            self._path.parent.mkdir(exist_ok=True)
        return pq.ParquetWriter(
            self._path, self._schema, compression="snappy", use_dictionary=_repetitive_columns(first)
        )

    def _flush(self) -> None:
        if not self._rows:
            return  # a row group without rows has no statistics, and would deprive the file of its own
        with _named(self._path):
            table = pa.Table.from_batches(self._waiting, self._schema)
            if self._writer is None:
                self._writer = self._created(table)
            self._writer.write_table(table)
        self._with_nan |= {name for name in self._floating if pc.any(pc.is_nan(table.column(name))).as_py()}
        self._waiting.clear()
        self._rows = 0


def _repetitive_columns(rows: pa.Table) -> bool | list[str]:
    """Return the columns whose values repeat, by a sample; a dictionary of the others costs time and saves nothing."""
    if any(pa.types.is_nested(kind) or pa.types.is_null(kind) for kind in rows.schema.types):
        return True  # a list would have to name the parts of nested columns
    sample = rows.slice(0, _SAMPLED_ROWS)
    distinct = {name: pc.count_distinct(sample.column(name), mode="all").as_py() for name in sample.column_names}
    return [name for name, count in distinct.items() if 2 * count <= sample.num_rows]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert a failed write to an error that names the file."""
    try:
        yield
    except OSError as error:
        raise DeltaTableError(
            f"{path.parent} cannot be written: {error}; correct the cause and run again, nothing is lost"
        ) from error


def _statistics(metadata: pq.FileMetaData, schema: pa.Schema, with_nan: Collection[str]) -> dict[str, Any]:
    """Return the statistics for file skipping: the row count, and null counts and bounds of the first columns.

    Either all columns have bounds or none does: if only some columns have bounds, delta-rs's dataset assumes that no
    filter matches a column without them. A column of nulls needs no bounds, and binary columns never have any.

    Parameters
    ----------
    with_nan
        Columns that hold a NaN. Spark sorts NaN above all numbers, but Parquet's bounds exclude it.
    """
    columns: dict[str, list[Any]] = {}
    for group in range(metadata.num_row_groups):
        for position in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(position)
            if chunk.path_in_schema in schema.names[:_INDEXED_COLUMNS]:
                columns.setdefault(chunk.path_in_schema, []).append(chunk.statistics)
    nulls: dict[str, int] = {}
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    for name, chunks in columns.items():
        if all(each is not None and each.has_null_count for each in chunks):
            nulls[name] = sum(each.null_count for each in chunks)
        bounded = [each for each in chunks if each is None or not _is_empty(each)]
        kind = schema.field(name).type
        if not bounded or pa.types.is_binary(kind):
            continue
        least[name] = greatest[name] = None
        if name not in with_nan and all(each is not None and each.has_min_max for each in bounded):
            with suppress(OverflowError):  # a date that Python has no type for
                least[name] = _bound(min(each.min for each in bounded), kind, up=False)
                greatest[name] = _bound(max(each.max for each in bounded), kind, up=True)
    found = {"numRecords": metadata.num_rows, "nullCount": nulls}
    if None in least.values() or None in greatest.values():
        return found
    return found | {"minValues": least, "maxValues": greatest}


def _is_empty(chunk: pq.Statistics) -> bool:
    return bool(chunk.has_null_count and chunk.num_values == 0)


def _bound(value: Any, kind: pa.DataType, *, up: bool) -> Any:
    """Return a bound in Delta's form, rounded outward; None for a missing bound."""
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return value
    if pa.types.is_date(kind):
        return value.isoformat()
    if pa.types.is_timestamp(kind):
        return _time_bound(value, up=up)
    if pa.types.is_string(kind):
        return _text_bound(value, up=up)
    return _number_bound(value) if pa.types.is_floating(kind) or pa.types.is_decimal(kind) else None


def _number_bound(value: float | Decimal) -> float | None:
    """Return a number that JSON represents exactly, or None."""
    number = float(value)
    return number if math.isfinite(number) and (isinstance(value, float) or Decimal(repr(number)) == value) else None


def _text_bound(value: str, *, up: bool) -> str | None:
    if len(value) <= _INDEXED_CHARACTERS:
        return value
    if up and value[_INDEXED_CHARACTERS] == _LAST_CHARACTER:
        return None
    return value[:_INDEXED_CHARACTERS] + (_LAST_CHARACTER if up else "")


def _time_bound(value: datetime, *, up: bool) -> str | None:
    whole = value.replace(microsecond=value.microsecond // 1000 * 1000)
    if up and whole != value:
        if whole.replace(tzinfo=UTC) == _LAST_MILLISECOND:
            return None
        whole += _MILLISECOND
    zone = "" if value.tzinfo is None else "Z"
    return whole.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone
