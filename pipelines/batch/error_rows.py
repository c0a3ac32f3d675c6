"""Rows of the error table: the reasons for each rejection, and the original record.

The original record is exact, so that it can be retried: `record` holds it as text, `record_bytes` its bytes where the
text is not exact, and `heading` what its file said about its columns (`headrace.storage.records.Originals`). A batch
that retries rejected rows adds resolutions instead (`headrace.pipelines.batch.resolutions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - fields of a dataclass that is pickled
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import CAUSES_COLUMN
from headrace.etl.settlement import CAUSES_TYPE
from headrace.pipelines.batch.resolutions import Action, resolution_rows
from headrace.pipelines.spark.frame import FILE, MALFORMED, RECORD_NUMBER
from headrace.storage.records import Originals, RecordFormat, original_records

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ERROR_SCHEMA", "Origin", "error_rows", "rejected_rows"]

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
        ("heading", pa.string()),
        ("record_bytes", pa.binary()),
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
    retried
        Stream and batch that rejected the rows, by file, for a batch that retries rejected rows; None for other
        batches.
    """

    pipeline: str
    stream: str
    batch: int
    loaded_at: datetime
    folder: str
    form: RecordFormat
    retried: Mapping[str, tuple[str, int]] | None = None


def rejected_rows(rejected: pa.RecordBatch, origin: Origin) -> pa.RecordBatch:
    """Return rejected rows as rows of the error table, or of the table of resolutions for a batch of retried rows."""
    if origin.retried is None:
        return error_rows(rejected, origin)
    causes = _causes(rejected)
    files = rejected.column(FILE).dictionary_encode()
    given = [origin.retried[name] for name in files.dictionary.to_pylist()]
    identity = {
        "stream": pa.array([stream for stream, _ in given], pa.string()).take(files.indices),
        "batch": pa.array([batch for _, batch in given], pa.int64()).take(files.indices),
        FILE: rejected.column(FILE),
        RECORD_NUMBER: rejected.column(RECORD_NUMBER),
    }
    by = (origin.pipeline, origin.stream, origin.batch, origin.loaded_at)
    rows = resolution_rows(identity, Action.REJECTED, *by, reason=_reasons(causes), causes=causes)
    (batch,) = rows.combine_chunks().to_batches()
    return batch


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
        **_records(rejected, origin),
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


def _records(rejected: pa.RecordBatch, origin: Origin) -> dict[str, pa.Array]:
    """Return the original records, read again from their files, by column."""
    files = rejected.column(FILE).dictionary_encode()
    numbers = np.asarray(rejected.column(RECORD_NUMBER))
    order: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    found: list[Originals] = []
    for code, name in enumerate(files.dictionary.to_pylist()):
        rows = np.flatnonzero(np.asarray(files.indices) == code)
        order.append(rows)
        found.append(original_records(Path(origin.folder) / name, origin.form, numbers[rows].tolist()))
    back = pa.array(np.argsort(np.concatenate([np.empty(0, np.int64), *order])))
    columns = {
        "record": [each.texts for each in found],
        "heading": [pa.repeat(pa.scalar(each.heading, pa.string()), len(each.texts)) for each in found],
        "record_bytes": [each.data for each in found],
    }
    kinds = {name: ERROR_SCHEMA.field(name).type for name in columns}
    return {name: pa.chunked_array(parts, kinds[name]).combine_chunks().take(back) for name, parts in columns.items()}
