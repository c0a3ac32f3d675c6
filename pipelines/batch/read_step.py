"""The step that reads files: it converts file pieces to rows of the declared columns, in the worker that joins them.

No record is lost. A record that does not fit the schema has its causes in `_malformed` and is rejected later. A file
that changed after it was planned, or that cannot be read, ends the batch with an error that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.pipelines.config.source_format import record_format
from headrace.pipelines.errors import SourceFileError
from headrace.pipelines.source.discovery import date_of, leave_out_advice, printable
from headrace.pipelines.spark.frame import (
    FILE,
    MALFORMED,
    MALFORMED_TYPE,
    NOTE,
    RECORD_NUMBER,
    STATE,
    State,
    source_schema,
)
from headrace.storage.records import Piece, RecordFileError, RecordFormat, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.pipelines.batch.steps import Task
    from headrace.storage.records import Records

__all__ = ["ReadStep", "framed", "record_format"]


@dataclass(frozen=True)
class ReadStep:
    """Reads pieces of files.

    Parameters
    ----------
    form
        Record format of the files.
    columns
        Declared columns, in output order.
    skippable
        Whether `headrace source skip` knows the files.
    source
        Name of the source in a pipeline with several, or None.
    """

    form: RecordFormat
    columns: pa.Schema
    skippable: bool = True
    source: str | None = None

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all pieces.

        Parameters
        ----------
        batches
            Batches of pieces, with the columns of `headrace.pipelines.spark.frame.PIECES`. A piece without a stop, or
            with a stop at the file size, extends to the end of the file.
        task
            Task that reads the pieces.

        Raises
        ------
        SourceFileError
            If a file cannot be read, or changed after it was planned. The message names the file.
        """
        del task
        for batch in batches:
            for row in batch.to_pylist():
                yield from self._read(row)

    def _read(self, row: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        advice = leave_out_advice(row["file"], skippable=self.skippable, source=self.source)
        _refuse_changed(row, advice)
        stop = None if row["stop"] == row["size"] else row["stop"]
        piece = Piece(row["path"], row["start"] or 0, stop, row["first_record"] or 1)
        schema = source_schema(self.columns)
        try:
            for records in read_records(piece, self.form):
                file = pa.repeat(pa.scalar(row["file"], pa.string()), records.rows.num_rows)
                yield framed(records, file, records.numbers, schema)
        except RecordFileError as error:
            _refuse_changed(row, advice)  # a changed file is the more likely cause
            raise SourceFileError(
                f"{printable(str(error))}. Repair the file or correct its declaration, or {advice}"
            ) from error
        _refuse_changed(row, advice)


def framed(records: Records, files: pa.Array, numbers: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    """Return records as frame rows, with the file of each record and its number in that file."""
    rows = records.rows.num_rows
    rejected = np.zeros(rows, dtype=np.bool_)
    rejected[np.asarray(records.rejects.column("row"))] = True
    state = np.where(rejected, int(State.MALFORMED), int(State.OPEN)).astype(np.int8)
    own = {
        FILE: files,
        RECORD_NUMBER: numbers,
        MALFORMED: _causes(records) if rejected.any() else pa.nulls(rows, MALFORMED_TYPE),
        STATE: pa.array(state),
        NOTE: pa.nulls(rows, pa.string()),
    }
    columns = [own[field.name] if field.name in own else records.rows.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _causes(records: Records) -> pa.Array:
    """Return the causes of each malformed row as a list, and null for valid rows; causes are in row order."""
    found = records.rejects.combine_chunks()
    row = np.asarray(found.column("row"))
    counts = np.bincount(row, minlength=records.rows.num_rows)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    values = [found.column(name).combine_chunks() for name in ("column", "value", "reason")]
    structs = pa.StructArray.from_arrays(values, fields=list(MALFORMED_TYPE.value_type))
    return pa.ListArray.from_arrays(pa.array(offsets), structs, mask=pa.array(counts == 0)).cast(MALFORMED_TYPE)


def _refuse_changed(row: dict[str, Any], advice: str) -> None:
    """Refuse a file that differs from the plan.

    Raises
    ------
    SourceFileError
        If the file was removed, or its size or date changed.
    """
    path = printable(row["path"])
    try:
        seen = Path(row["path"]).stat()
    except OSError as error:
        raise SourceFileError(
            f"{path} was planned for this batch, but cannot be found now ({error.strerror}); put it back, or {advice}"
        ) from error
    if (seen.st_size, date_of(seen)) != (row["size"], row["mtime_ns"]):
        raise SourceFileError(
            f"{path} changed while the batch was loading (it had {row['size']:,} bytes and has "
            f"{seen.st_size:,}); nothing of the batch was loaded. Write files elsewhere, move them here when they are "
            "complete, and run again"
        )
