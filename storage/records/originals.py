"""Original records: taken out of their files exactly, and parsed again without the file.

A record is kept as text. Where text is not exact (bytes that are not UTF-8, the values of Parquet), its bytes are kept
too. `heading` holds what the file said about its columns. `read_originals` parses such records with the parser of
files, so they pass the same rules as when they arrived; the rules may have changed since.
"""

from __future__ import annotations

import base64
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.errors import RecordFileError
from headrace.storage.records import _csv_kernels
from headrace.storage.records.csv_files import dialect, heading_text
from headrace.storage.records.pieces import Piece
from headrace.storage.records.reading import raw_bytes, raw_records, read_records
from headrace.storage.records.records import Records, Rejections
from headrace.storage.records.sources import is_utf8, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from headrace.storage.records.formats import RecordFormat, StrPath

    _Written: TypeAlias = tuple[Path, RecordFormat, NDArray[np.bool_]]
    _Write: TypeAlias = Callable[[Path, "Originals", RecordFormat], _Written]

__all__ = ["INEXACT", "Originals", "check_heading", "original_heading", "original_records", "read_originals"]

INEXACT: Final = b""
_BOM: Final = b"\xef\xbb\xbf"
_ALL: Final = 1 << 62


@dataclass(frozen=True)
class Originals:
    """Records of files that had the same heading.

    Parameters
    ----------
    heading
        First record of a CSV with a heading; Arrow schema of a Parquet file, serialized, in base64; None for JSON, for
        a CSV without a heading, and if the heading is not known.
    texts
        Each record as text; null if only its bytes are exact and they are not known.
    data
        Exact bytes of each record whose text is not exact; null for all others. `INEXACT` stands for bytes that are
        not known. A record of Parquet is a serialized Arrow record batch.
    """

    heading: str | None
    texts: pa.Array
    data: pa.Array


def original_heading(path: StrPath, form: RecordFormat) -> str | None:
    """Return what `Originals.heading` holds for a file.

    Raises
    ------
    RecordFileError
        If the file cannot be read.
    """
    if form.kind == "csv":
        return heading_text(path, form) if form.header else None
    if form.kind == "json":
        return None
    from headrace.storage.records.parquet_files import parquet_schema  # noqa: PLC0415 - loaded only for it

    with reading(path, form.kind):
        return base64.b64encode(_decoded(parquet_schema(str(path))).serialize()).decode("ascii")


def original_records(path: StrPath, form: RecordFormat, numbers: Sequence[int]) -> Originals:
    """Return records of a file exactly, in the order of the given numbers (from 1).

    Raises
    ------
    RecordFileError
        If the file cannot be read, or has fewer records.
    """
    heading = original_heading(path, form)
    texts = raw_records(path, form, numbers)
    if form.kind == "parquet":
        from headrace.storage.records.parquet_files import parquet_batches  # noqa: PLC0415 - loaded only for it

        with reading(path, form.kind):
            data: list[bytes | None] = list(parquet_batches(str(path), numbers))
    else:
        data = _undecoded(path, form, numbers, texts)
    return Originals(heading, pa.array(texts, pa.string()), pa.array(data, pa.binary()))


def _undecoded(path: StrPath, form: RecordFormat, numbers: Sequence[int], texts: Sequence[str]) -> list[bytes | None]:
    """Return the bytes of records that are not UTF-8; of translated text they are not known."""
    suspects = [at for at, text in enumerate(texts) if "\\x" in text]
    data: list[bytes | None] = [None] * len(texts)
    if not suspects:
        return data
    found = raw_bytes(path, form, [numbers[at] for at in suspects])
    for at, exact in zip(suspects, found, strict=True):
        if exact.decode("utf-8", "ignore").encode() != exact:
            data[at] = exact if is_utf8(form.encoding) else INEXACT
    return data


def check_heading(heading: str, form: RecordFormat) -> None:
    """Raise an error if original records of files with a heading do not have the columns that are declared now.

    Parameters
    ----------
    heading
        As in `Originals`.
    form
        How records are read now.

    Raises
    ------
    RecordFileError
        If columns are missing, not declared or, in Parquet, of a type that does not fit. The message names no file.
    """
    if form.kind == "json" or (form.kind == "csv" and not form.header):
        return
    write = _parquet_file if form.kind == "parquet" else _text_file
    without_records = Originals(heading, pa.array([], pa.string()), pa.array([], pa.binary()))
    with tempfile.TemporaryDirectory(prefix="headrace-records-") as folder:
        try:
            path, own_form, _ = write(Path(folder), without_records, form)
            list(read_records(Piece(str(path)), own_form))
        except RecordFileError as error:
            raise RecordFileError(_without_path(error, folder)) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RecordFileError(f"its heading is not that of {form.kind}; its file had another format") from error


def _without_path(error: RecordFileError, folder: str) -> str:
    """Return the message of an error about a temporary file without the name of that file."""
    path = rf"{re.escape(folder)}/records\.[a-z]+"
    return re.sub(path, "the record", re.sub(rf"^{path}: ", "", str(error)))


def read_originals(originals: Originals, form: RecordFormat) -> Iterator[Records]:
    """Parse original records again, each of which gives exactly one row.

    A record that cannot be parsed as one record has a rejection without a column. `Records.numbers` holds the position
    of each record in `originals`, from 1.

    Parameters
    ----------
    originals
        Records whose files had the same heading.
    form
        How records are read now.
    """
    assert form.columns is not None
    exact = np.asarray(originals.data.is_null()) & np.asarray(originals.texts.is_valid())
    known = np.asarray(pc.fill_null(pc.greater(pc.binary_length(originals.data), 0), fill_value=False))
    if form.kind == "parquet":
        groups, reasons = [(known, _parquet_file)], "its exact values are not in the error table"
    else:
        groups, reasons = [(exact, _text_file), (known, _bytes_file)], "its exact bytes are not in the error table"
    for wanted, write in groups:
        yield from _read(originals, np.flatnonzero(wanted), form, write)
    missing = np.flatnonzero(~np.logical_or.reduce([wanted for wanted, _ in groups]))
    yield from _refused(missing, form, f"{reasons}; deliver the record in a new file")


def _read(originals: Originals, rows: NDArray[np.int64], form: RecordFormat, write: _Write) -> Iterator[Records]:
    """Parse some of the records from a temporary file."""
    if not len(rows):
        return
    if form.kind == "csv" and form.header and originals.heading is None:
        yield from _refused(rows, form, "the heading of its file is not known; deliver the record in a new file")
        return
    taken = pa.array(rows)
    some = Originals(originals.heading, originals.texts.take(taken), originals.data.take(taken))
    with tempfile.TemporaryDirectory(prefix="headrace-records-") as folder:
        try:
            path, own_form, whole = write(Path(folder), some, form)
            found = list(read_records(Piece(str(path)), own_form)) if whole.any() else []
        except RecordFileError as error:
            yield from _refused(rows, form, _without_path(error, folder))
            return
        except UnicodeError:
            yield from _refused(rows, form, f"its bytes cannot be read as {form.encoding}")
            return
    yield from _refused(rows[~whole], form, _not_one(form))
    read = rows[whole]
    if sum(records.rows.num_rows for records in found) != len(read):
        yield from _refused(read, form, _not_one(form))
        return
    for records in found:
        positions = read[np.asarray(records.numbers) - 1]
        yield Records(records.rows, pa.array(positions + 1), records.rejects)


def _not_one(form: RecordFormat) -> str:
    lines = "as CSV is declared now" if form.kind == "csv" else "which is one object a line"
    return f"is not exactly one record {lines}; deliver it in a new file"


def _refused(rows: NDArray[np.int64], form: RecordFormat, reason: str) -> Iterator[Records]:
    """Yield records without values, which are rejected as a whole."""
    assert form.columns is not None
    if not len(rows):
        return
    rejected = Rejections()
    for row in range(len(rows)):
        rejected.add(row, None, None, reason)
    empty = pa.RecordBatch.from_arrays([pa.nulls(len(rows), field.type) for field in form.columns], schema=form.columns)
    yield Records(empty, pa.array(rows + 1), rejected.table())


def _text_file(folder: Path, originals: Originals, form: RecordFormat) -> _Written:
    """Write records as UTF-8; a mark of UTF-8 comes first, since the reader skips one there."""
    own = replace(form, encoding="utf-8")
    encoded = originals.texts.cast(pa.binary())
    return _lines(folder, originals.heading, encoded, own, _BOM, (originals.heading or "").encode())


def _bytes_file(folder: Path, originals: Originals, form: RecordFormat) -> _Written:
    """Write records as the bytes that they were, to be read in the encoding that is declared now."""
    if "\n,".encode(form.encoding) != b"\n,":
        raise UnicodeError
    mark = _BOM if is_utf8(form.encoding) else b""
    return _lines(
        folder, originals.heading, originals.data, form, mark, (originals.heading or "").encode(form.encoding)
    )


def _lines(
    folder: Path, heading: str | None, records: pa.Array, form: RecordFormat, mark: bytes, first: bytes
) -> _Written:
    whole = _single(records, form)
    kept = records.filter(pa.array(whole)).to_pylist()
    path = folder / f"records.{form.kind}"
    lines = [first, *kept] if form.kind == "csv" and form.header and heading is not None else kept
    path.write_bytes(mark + b"\n".join(lines) + b"\n")
    return path, form, whole


def _single(records: pa.Array, form: RecordFormat) -> NDArray[np.bool_]:
    """Return which texts are exactly one record each, whatever stands next to them."""
    if form.kind == "json":
        return np.asarray(pc.match_substring_regex(records, r"^[^\n]*[^ \t\r\n][^\n]*$"))
    single = np.asarray(pc.greater(pc.binary_length(records), 0))
    marks = {"\n", "\r", form.quote, form.escape or ""} - {""}
    suspect = np.logical_or.reduce([np.asarray(pc.match_substring(records, mark)) for mark in sorted(marks)])
    for row in np.flatnonzero(suspect & single):
        single[row] = _is_one(records[int(row)].as_py(), form)
    return single


def _is_one(record: bytes, form: RecordFormat) -> bool:
    """Return whether bytes are one record of CSV and nothing else."""
    data = np.frombuffer(bytearray(record + b"\n"), dtype=np.uint8)  # writable, as the blocks of files are
    marks = np.empty(len(data) + 3, dtype=np.int32)
    count, end, state = _csv_kernels.count_records(data, 0, len(data), True, *dialect(form), _ALL, marks)  # noqa: FBT003 - a kernel
    return bool(count == 1 and state != _csv_kernels.UNCLOSED and end >= len(record))


def _parquet_file(folder: Path, originals: Originals, form: RecordFormat) -> _Written:
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded only for it

    if originals.heading is None:
        raise RecordFileError("the schema of its file is not known; deliver the record in a new file")
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(originals.heading)))
    batches = [pa.ipc.read_record_batch(data.as_buffer(), schema) for data in originals.data]
    path = folder / "records.parquet"
    pq.write_table(pa.Table.from_batches(batches, schema), path)
    return path, form, np.ones(len(batches), dtype=np.bool_)


def _decoded(schema: pa.Schema) -> pa.Schema:
    """Return a schema without dictionaries, as serialized batches have it."""
    return pa.schema(
        [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema]
    )
