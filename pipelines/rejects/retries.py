"""What a retry takes: open rejected rows, divided into batches, and the frame of original records of each batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.batch.resolutions import IDENTITY, RESOLUTION_SCHEMA, RetryOf
from headrace.pipelines.batch.retry_step import RETRIED_RECORDS
from headrace.pipelines.config.source_format import record_format
from headrace.pipelines.delta.tables import create_table, has_table
from headrace.pipelines.errors import RejectedRowsError
from headrace.pipelines.rejects.rows import OPEN, STATUSES, Selection, rejects
from headrace.pipelines.source.ledger import RejectedRow
from headrace.pipelines.spark.frame import FILE, RECORD_NUMBER
from headrace.storage.records import INEXACT, RecordFileError, check_heading, original_heading

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["RetrySource", "check_headings", "open_rows", "retry_batches"]

_ROWS: Final = 200_000
_BYTES: Final = 64 << 20
_FILES: Final = 10_000
_UNDECODED: Final = "is not UTF-8|has a byte that .* does not know"


def open_rows(config: PipelineConfig, selection: Selection) -> pa.Table:
    """Return the open rows of a selection, in the order of their rejection: `IDENTITY` and the size of each record."""
    size = "coalesce(octet_length(encode(record)), 0) + coalesce(octet_length(record_bytes), 0) AS size"
    names = ", ".join(IDENTITY.names)
    with rejects(config, selection, [OPEN]) as found:
        return found.sql(f"SELECT {names}, {size} FROM found ORDER BY {names}").to_arrow_table()  # noqa: S608 - constants


def check_headings(config: PipelineConfig, selection: Selection) -> None:
    """Check that the source, as it is declared now, reads the columns of the files of a selection's open rows.

    Raises
    ------
    RejectedRowsError
        If it refuses the heading of a file. A retry would reject all rows of that file, with this cause in place of
        their own.
    """
    form = record_format(config.source)
    with rejects(config, selection, [OPEN]) as found:
        headings = found.execute(
            "SELECT heading, min(_file), count(DISTINCT _file) - 1, count(*) FROM found WHERE heading IS NOT NULL "
            "GROUP BY heading ORDER BY min(_file)"
        ).fetchall()
    for heading, file, others, rows in headings:
        try:
            check_heading(heading, form)
        except RecordFileError as error:
            more = f" and {others:,} more file{'s' if others > 1 else ''}" if others else ""
            raise RejectedRowsError(
                f"{rows:,} of the selected rows come from {file}{more}, whose columns are not those that are declared "
                f"now: {error}. Nothing was retried, and the rows keep their causes. Declare the source so that it "
                "reads these columns too (docs/files.md, 'When a column is renamed'), or leave these rows out: --file "
                "selects the others"
            ) from error


def retry_batches(rows: pa.Table, most_rows: int = _ROWS, most_bytes: int = _BYTES) -> list[list[RejectedRow]]:
    """Divide rejected rows into batches of limited size.

    In a batch, all rows of a file come from one batch of one stream, so that file and record number identify a row.

    Parameters
    ----------
    rows
        Result of `open_rows`.
    most_rows, most_bytes
        Rows of a batch, and bytes of their records; a batch has at least one row.
    """
    batches: list[list[RejectedRow]] = []
    origins: dict[str, tuple[str, int]] = {}
    size = 0
    for chunk, chunk_size in _chunks(rows, most_rows, most_bytes):
        stream, batch, file, _ = chunk[0]
        fits = (
            bool(batches)
            and origins.get(file, (stream, batch)) == (stream, batch)
            and len(origins) < _FILES
            and len(batches[-1]) + len(chunk) <= most_rows
            and size + chunk_size <= most_bytes
        )
        if not fits:
            batches.append([])
            origins, size = {}, 0
        origins[file] = (stream, batch)
        batches[-1] += chunk
        size += chunk_size
    return batches


def _chunks(rows: pa.Table, most_rows: int, most_bytes: int) -> Iterator[tuple[list[RejectedRow], int]]:
    """Yield rows of one stream, batch and file at a time, with the size of their records."""
    given = rows.combine_chunks()
    starts = _changes(given.select(["stream", "batch", FILE]))
    total = np.cumsum(np.concatenate([[0], np.asarray(given.column("size"), dtype=np.int64)]))
    for first, last in zip(starts, [*starts, given.num_rows][1:], strict=True):
        at = first
        while at < last:
            within = int(np.searchsorted(total, total[at] + most_bytes, side="right")) - 1
            end = min(last, at + most_rows, max(at + 1, within))
            part = given.slice(at, end - at).select(IDENTITY.names).to_pydict()
            yield [RejectedRow(*row) for row in zip(*part.values(), strict=True)], int(total[end] - total[at])
            at = end


def _changes(rows: pa.Table) -> list[int]:
    """Return where sorted rows differ from the row before; the first row counts."""
    if not rows.num_rows:
        return []
    differs = np.zeros(rows.num_rows, dtype=np.bool_)
    differs[0] = True
    for column in rows.columns:
        codes = np.asarray(column.combine_chunks().dictionary_encode(null_encoding="encode").indices)
        differs[1:] |= codes[1:] != codes[:-1]
    return [int(row) for row in np.flatnonzero(differs)]


class RetrySource:
    """Supplies the original records of retries.

    Parameters
    ----------
    spark
        Spark session.
    config
        Configuration of the pipeline.
    """

    def __init__(self, spark: SparkSession, config: PipelineConfig) -> None:
        self._spark = spark
        self._config = config

    def __call__(self, rows: Sequence[RejectedRow]) -> tuple[DataFrame, RetryOf]:
        """Return the frame of the records of rejected rows, and the description of the retry.

        Raises
        ------
        RejectedRowsError
            If the error table no longer has all of the rows, or some of them were resolved meanwhile.
        """
        if not has_table(self._config.resolutions_path):
            create_table(self._config.resolutions_path, RESOLUTION_SCHEMA)
        wanted = pa.Table.from_pylist([dict(zip(IDENTITY.names, row, strict=True)) for row in rows], schema=IDENTITY)
        found = self._records(wanted)
        if found.num_rows != wanted.num_rows:
            raise RejectedRowsError(
                f"{wanted.num_rows - found.num_rows} of {wanted.num_rows} rejected rows that were to be retried are no "
                "longer open in the error table; select again what to retry"
            )
        records = self._complete(found)
        return self._spark.createDataFrame(records), RetryOf(wanted)

    def _records(self, wanted: pa.Table) -> pa.Table:
        names = f"{FILE} AS file, {RECORD_NUMBER} AS record_number, heading, record, record_bytes, batch AS mtime_ns"
        inexact = f"list_bool_or(list_transform(causes, lambda c: regexp_matches(c.reason, '{_UNDECODED}')))"
        with rejects(self._config, Selection(), STATUSES) as found:
            found.register("wanted", wanted)
            return found.sql(
                f"SELECT {names}, coalesce({inexact}, false) AS undecoded FROM found SEMI JOIN wanted "  # noqa: S608 - constants
                f"USING ({', '.join(IDENTITY.names)}) WHERE status = '{OPEN}' ORDER BY {FILE}, {RECORD_NUMBER}"
            ).to_arrow_table()

    def _complete(self, found: pa.Table) -> pa.Table:
        """Return the records with what rows of earlier releases lack, as far as it is known."""
        lost = pc.and_(found.column("undecoded"), pc.is_null(found.column("record_bytes")))
        exact = pc.if_else(lost, pa.scalar(INEXACT, pa.binary()), found.column("record_bytes"))
        heading = self._headings(found)
        columns = {name: found.column(name) for name in RETRIED_RECORDS.names}
        columns |= {"record_bytes": exact, "heading": heading}
        return pa.table([columns[name] for name in RETRIED_RECORDS.names], schema=RETRIED_RECORDS)

    def _headings(self, found: pa.Table) -> pa.ChunkedArray:
        """Return the heading of each record; one that the error table lacks is read from the file if it is there."""
        given = found.column("heading")
        form = record_format(self._config.source)
        if form.kind != "csv" or not form.header or not given.null_count:
            return given
        files = pc.unique(found.column("file").filter(pc.is_null(given)))
        texts = pa.array([self._heading_of(name.as_py()) for name in files], pa.string())
        return pc.coalesce(given, texts.take(pc.index_in(found.column("file"), value_set=files)))

    def _heading_of(self, file: str) -> str | None:
        try:
            return original_heading(Path(self._config.source.path) / file, record_format(self._config.source))
        except RecordFileError:
            return None
