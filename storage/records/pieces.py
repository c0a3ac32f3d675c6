"""Pieces of files: what one task reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.storage.records import _csv_kernels, _json_kernels
from headrace.storage.records.csv_files import dialect
from headrace.storage.records.formats import compression_of
from headrace.storage.records.sources import BlockReader, is_utf8, open_text, reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.storage.records.formats import RecordFormat, StrPath

__all__ = ["Piece", "split"]

_ALL = 1 << 62


@dataclass(frozen=True)
class Piece:
    """A part of a file, or all of it.

    Parameters
    ----------
    path
        The file.
    start, stop
        Bytes of a text, row groups of Parquet; `stop` is None for all that follow.
    first_record
        Number of the piece's first record in the file, from 1.
    """

    path: str
    start: int = 0
    stop: int | None = None
    first_record: int = 1


def split(path: StrPath, form: RecordFormat, bytes_each: int) -> list[Piece]:
    """Divide a file into pieces of about so many bytes, which several tasks can read.

    Text is cut between records only, which takes a pass over the file. Archives, small files and text that has to be
    translated are one piece.

    Parameters
    ----------
    path
        The file.
    form
        Its format.
    bytes_each
        Bytes of a piece on disk.

    Raises
    ------
    RecordFileError
        If the file cannot be read.
    """
    with reading(path, form.kind):
        small = Path(path).stat().st_size < 2 * bytes_each
        if small or compression_of(path) is not None:
            return [Piece(str(path))]
        if form.kind == "parquet":
            return list(_row_groups(path, bytes_each))
        return list(_texts(path, form, bytes_each)) if is_utf8(form.encoding) else [Piece(str(path))]


def _row_groups(path: StrPath, bytes_each: int) -> Iterator[Piece]:
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded only for Parquet

    metadata = pq.read_metadata(path)
    start = size = rows = 0
    number = 1
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        size += sum(found.column(column).total_compressed_size for column in range(found.num_columns))
        rows += found.num_rows
        if size >= bytes_each or group == metadata.num_row_groups - 1:
            yield Piece(str(path), start, group + 1, number)
            start, size, number, rows = group + 1, 0, number + rows, 0


def _texts(path: StrPath, form: RecordFormat, bytes_each: int) -> Iterator[Piece]:
    start, number, records = 0, 1, 0
    heading = int(form.kind == "csv" and form.header)
    with open_text(path, form) as source:
        reader = BlockReader(source)
        begin = 0  # of the reader's buffer, in the file
        while True:
            if form.kind == "csv":
                place = (reader.data, reader.position, reader.size, reader.final)
                found, end, _ = _csv_kernels.count_records(*place, *dialect(form), _ALL, reader.marks)
            else:
                found, end = _json_kernels.count_lines(reader.data, reader.position, reader.size, reader.final)
            reader.position = end
            records += found
            if reader.final:
                yield Piece(str(path), start, None, number)
                return
            if records > heading and begin + end - start >= bytes_each:
                yield Piece(str(path), start, begin + end, number)
                start, number = begin + end, 1 + records - heading
            begin += end
            reader.fill()
