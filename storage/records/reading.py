"""Files as records, whatever their format."""

from __future__ import annotations

import bisect
import io
from typing import TYPE_CHECKING

from headrace.storage.errors import RecordFileError
from headrace.storage.records.csv_files import csv_blocks, csv_records, read_heading
from headrace.storage.records.json_files import json_records
from headrace.storage.records.pieces import Piece
from headrace.storage.records.sources import open_text, reading
from headrace.storage.records.values import check_types

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.storage.records.formats import RecordFormat, StrPath
    from headrace.storage.records.records import Records

__all__ = ["lines_of", "raw_bytes", "raw_records", "read_records"]

_BLANKS = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


def read_records(piece: Piece, form: RecordFormat) -> Iterator[Records]:
    r"""Yield the records of a piece of a file, batch by batch.

    Parameters
    ----------
    piece
        What to read.
    form
        How; its columns are declared.

    Raises
    ------
    RecordFileError
        If the file cannot be read at all: it is cut, damaged, or does not have the declared columns.
    InputError
        If a column has a type that cannot be read from text.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow as pa
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "rows.csv"
    >>> _ = file.write_text("id,price\n1,9.50\n2,9.505\n")
    >>> form = RecordFormat("csv", pa.schema([("id", pa.int64()), ("price", pa.decimal128(8, 2))]))
    >>> [(part.rows.num_rows, part.rejects.to_pylist()[0]["reason"]) for part in read_records(Piece(str(file)), form)]
    [(2, 'has more than 2 digits after the point, and is not rounded')]
    """
    assert form.columns is not None
    if form.kind != "parquet":
        check_types(form.columns)
    with reading(piece.path, form.kind):
        if form.kind == "csv":
            yield from csv_records(piece, form)
        elif form.kind == "json":
            yield from json_records(piece, form)
        else:
            from headrace.storage.records.parquet_files import parquet_records  # noqa: PLC0415 - loaded only for it

            yield from parquet_records(piece, form)


def raw_records(path: StrPath, form: RecordFormat, numbers: Sequence[int]) -> list[str]:
    """Return records as they came: lines of text, of Parquet the values in it as JSON.

    Parameters
    ----------
    path
        The file.
    form
        Its format.
    numbers
        Numbers of records, from 1.

    Raises
    ------
    RecordFileError
        If the file cannot be read, or has fewer records.
    """
    if not numbers:
        return []
    with reading(path, form.kind):
        if form.kind == "parquet":
            from headrace.storage.records.parquet_files import parquet_raw  # noqa: PLC0415 - loaded only for it

            return parquet_raw(str(path), numbers)
    return [raw.decode("utf-8", "backslashreplace") for raw in raw_bytes(path, form, numbers)]


def raw_bytes(path: StrPath, form: RecordFormat, numbers: Sequence[int]) -> list[bytes]:
    """Return the bytes of records of text, in UTF-8 if the file has another encoding.

    Parameters
    ----------
    path, form
        The file, and its format.
    numbers
        Numbers of records, from 1.

    Raises
    ------
    RecordFileError
        If the file cannot be read, or has fewer records.
    """
    with reading(path, form.kind):
        found = dict(_raw(str(path), form, set(numbers)))
    missing = [number for number in numbers if number not in found]
    if missing:
        raise RecordFileError(f"{path} has no record {missing[0]}; it has changed since it was read")
    return [found[number] for number in numbers]


def _raw(path: str, form: RecordFormat, numbers: set[int]) -> Iterator[tuple[int, bytes]]:
    last = max(numbers)
    if form.kind == "json":
        yield from (item for item in raw_lines(path, form, last) if item[0] in numbers)
        return
    columns = len(read_heading(path, form) or ()) if form.header else 1
    first = 1
    ordered = sorted(numbers)
    for block in csv_blocks(Piece(path), form, columns):
        inside = ordered[bisect.bisect_left(ordered, first) : bisect.bisect_left(ordered, first + block.records)]
        yield from ((number, block.raw(number - first)) for number in inside)
        first += block.records
        if first > last:
            return


def lines_of(path: str, form: RecordFormat, last: int) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are records, up to a number."""
    for number, line in raw_lines(path, form, last):
        yield number, line.decode("utf-8", "backslashreplace")


def raw_lines(path: str, form: RecordFormat, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are records, up to a number, as bytes."""
    number = 0
    with open_text(path, form) as source:
        lines = source if isinstance(source, io.BufferedIOBase) else io.BufferedReader(source)
        for place, line in enumerate(lines):
            text = line.removeprefix(_BOM) if place == 0 else line
            if text.strip(_BLANKS):
                number += 1
                yield number, text.rstrip(b"\r\n")
            if number == last:
                return
