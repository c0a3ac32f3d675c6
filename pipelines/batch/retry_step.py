"""The step that reads rejected records again, in place of files: the first step of a batch that retries them.

The driver sends the original records, so a retry needs neither the files nor a folder that all hosts share. A record
that the present rules of the source reject again has its causes in `_malformed`, like a record of a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.batch.read_step import framed
from headrace.pipelines.spark.frame import source_schema
from headrace.storage.records import Originals, RecordFormat, read_originals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.pipelines.batch.steps import Task

__all__ = ["RETRIED_RECORDS", "RetryStep"]

RETRIED_RECORDS: Final = pa.schema(
    [
        ("file", pa.string()),
        ("record_number", pa.int64()),
        ("heading", pa.string()),
        ("record", pa.string()),
        ("record_bytes", pa.binary()),
        ("mtime_ns", pa.int64()),
    ]
)
"""Columns of a retry's frame. `mtime_ns` orders files as they were loaded: it is the batch that rejected the row."""


@dataclass(frozen=True)
class RetryStep:
    """Parses rejected records again.

    Parameters
    ----------
    form
        Record format of the source, as it is declared now.
    columns
        Declared columns, in output order.
    """

    form: RecordFormat
    columns: pa.Schema

    def run(self, batches: Iterable[pa.RecordBatch], task: Task) -> Iterator[pa.RecordBatch]:
        """Yield one row for each record.

        Parameters
        ----------
        batches
            Batches of records, with the columns of `RETRIED_RECORDS`.
        task
            Task that reads the records.
        """
        del task
        schema = source_schema(self.columns)
        for batch in batches:
            headings = batch.column("heading").dictionary_encode(null_encoding="encode")
            for code, heading in enumerate(headings.dictionary.to_pylist()):
                wanted = np.asarray(headings.indices) == code
                rows = batch if wanted.all() else batch.filter(pa.array(wanted))
                yield from self._read(rows, heading, schema)

    def _read(self, rows: pa.RecordBatch, heading: str | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        originals = Originals(heading, rows.column("record"), rows.column("record_bytes"))
        for records in read_originals(originals, self.form):
            places = pc.subtract(records.numbers, 1)
            yield framed(records, rows.column("file").take(places), rows.column("record_number").take(places), schema)
