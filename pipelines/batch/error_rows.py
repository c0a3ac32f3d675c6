"""Rows of the error table: the reasons for each rejection, and the original record."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - fields of a dataclass that is pickled
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import CAUSES_COLUMN
from headrace.etl.settlement import CAUSES_TYPE
from headrace.pipelines.spark.frame import FILE, MALFORMED, RECORD_NUMBER
from headrace.storage.records import RecordFormat, raw_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["ERROR_SCHEMA", "Origin", "error_rows"]

ERROR_SCHEMA = pa.schema(
    [
        ("pipeline", pa.string()),
        ("stream", pa.string()),
        ("batch", pa.int64()),
        (FILE, pa.string()),
        (RECORD_NUMBER, pa.int64()),
        ("reason", pa.string()),
        ("causes", CAUSES_TYPE),
        ("record", pa.string()),
    ]
)


@dataclass(frozen=True)
class Origin:
    """The batch that rows originate from.

    Parameters
    ----------
    pipeline, stream, batch
        Pipeline name, stream identity and batch number.
    loaded_at
        Start time of the batch.
    folder, form
        Source folder, and record format of its files.
    """

    pipeline: str
    stream: str
    batch: int
    loaded_at: datetime
    folder: str
    form: RecordFormat


def error_rows(rejected: pa.RecordBatch, origin: Origin) -> pa.RecordBatch:
    """Return the rows of the error table for rejected rows.

    Parameters
    ----------
    rejected
        Rejected rows with `_file`, `_record_number`, and `_malformed` (for records that do not fit the schema) or
        `_causes` (for records that a lookup rejected).
    origin
        Batch that the rows originate from.
    """
    rows = rejected.num_rows
    causes = _causes(rejected)
    columns = {
        "pipeline": pa.repeat(origin.pipeline, rows),
        "stream": pa.repeat(origin.stream, rows),
        "batch": pa.repeat(pa.scalar(origin.batch, pa.int64()), rows),
        FILE: rejected.column(FILE),
        RECORD_NUMBER: rejected.column(RECORD_NUMBER),
        "reason": _reasons(causes),
        "causes": causes,
        "record": _records(rejected, origin),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in ERROR_SCHEMA.names], schema=ERROR_SCHEMA)


def _causes(rejected: pa.RecordBatch) -> pa.Array:
    """Return the causes of each row: those of its record if it has any, else those of its lookups."""
    names = rejected.schema.names
    parts = []
    if CAUSES_COLUMN in names:
        parts.append(rejected.column(CAUSES_COLUMN))
    if MALFORMED in names:
        parts.append(_without_role(rejected.column(MALFORMED)))
    if len(parts) == 1:
        return parts[0]
    malformed = np.asarray(rejected.column(MALFORMED).is_valid())
    chosen = np.arange(rejected.num_rows) + np.where(malformed, rejected.num_rows, 0)
    return pa.concat_arrays(parts).take(pa.array(chosen))


def _without_role(malformed: pa.ListArray) -> pa.ListArray:
    """Return record causes in the form of lookup causes, without a role."""
    found = malformed.flatten()
    fields = [pa.nulls(len(found), pa.string()), *(found.field(name) for name in ("column", "value", "reason"))]
    whole = pa.StructArray.from_arrays(fields, fields=list(CAUSES_TYPE.value_type))
    lengths = pc.fill_null(pc.list_value_length(malformed), 0)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), whole).cast(CAUSES_TYPE)


def _reasons(causes: pa.ListArray) -> pa.Array:
    """Return causes as text, concatenated in the form ``role: column = value: reason``."""
    found = causes.flatten()
    role, column, value, reason = (found.field(name) for name in ("role", "column", "value", "reason"))
    named = pc.if_else(role.is_valid(), pc.binary_join_element_wise(role, ": ", "", null_handling="skip"), "")
    place = pc.binary_join_element_wise(column, " = ", pc.fill_null(value, "null"), ": ", "", null_handling="skip")
    place = pc.if_else(column.is_valid(), place, "")
    texts = pc.binary_join_element_wise(named, place, reason, "")
    offsets = pa.array(np.concatenate([[0], np.cumsum(np.asarray(pc.list_value_length(causes)))]).astype(np.int32))
    return pc.binary_join(pa.ListArray.from_arrays(offsets, texts), "; ")


def _records(rejected: pa.RecordBatch, origin: Origin) -> pa.Array:
    """Return the original records, read again from their files."""
    files = rejected.column(FILE).dictionary_encode()
    numbers = np.asarray(rejected.column(RECORD_NUMBER))
    texts: list[str | None] = [None] * rejected.num_rows
    for code, name in enumerate(files.dictionary.to_pylist()):
        rows = np.flatnonzero(np.asarray(files.indices) == code)
        _place(texts, rows, raw_records(Path(origin.folder) / name, origin.form, numbers[rows].tolist()))
    return pa.array(texts, pa.string())


def _place(texts: list[str | None], rows: NDArray[np.int64], records: Sequence[str]) -> None:
    for row, record in zip(rows, records, strict=True):
        texts[row] = record
