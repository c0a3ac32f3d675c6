"""Files as streams of record batches: CSV, JSON lines, or Parquet, from one file or a folder.

Columns that are declared must be in each file. Otherwise the first file defines the columns, and the other files must
match them by name and type; nothing is dropped silently.
Types of text are inferred as `headrace.storage.records.infer_columns` says, unless the caller knows better: key columns
take the type of the key that they are compared with.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.cli.reporting.errors import ArgumentsError, InputFileError, require_column
from headrace.storage.errors import InputError
from headrace.storage.file import read_ahead
from headrace.storage.records import (
    COMPRESSIONS,
    SUFFIXES,
    Piece,
    RecordFileError,
    RecordFormat,
    compression_of,
    infer_columns,
    kind_of,
    read_records,
    record_place,
    sound_batches,
    with_delimiter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    from headrace.cli.reporting.console import Console
    from headrace.pipelines.config import SourceConfig
    from headrace.storage.records import Kind

__all__ = ["PLAIN", "CsvFormat", "FileStream", "Settings", "kind_of", "open_stream", "read_whole", "text_columns"]

PARQUET_MAGIC = b"PAR1"
PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
"""Types of columns that are read as others, since Arrow cannot take rows of them."""
_EXACT = 2**53  # whole numbers below it are floats exactly


@dataclass(frozen=True)
class CsvFormat:
    """Format of a CSV.

    Parameters
    ----------
    delimiter
        Field delimiter; None for the delimiter that splits the header into the most names.
    nulls
        Spellings of a missing value, in addition to an empty field. A quoted spelling is text.
    types
        Types of text columns that are known before the first row is read.
    declared
        Types of columns in files of any kind, if the columns are present.
    settings
        Settings of a pipeline, if the files have members of a dimension.
    """

    delimiter: str | None = None
    nulls: tuple[str, ...] = ()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    declared: Mapping[str, pa.DataType] = field(default_factory=dict)
    settings: Settings | None = None


@dataclass(frozen=True)
class Settings:
    """What a pipeline says of files of members.

    Parameters
    ----------
    source
        Source of the pipeline, whose settings of text apply. Options of the command override them.
    columns
        Columns that each file must have, with their types; None for those of the first file.
    optional
        Those of them that files may lack.
    chosen
        Whether files may have other columns, which are left out.
    declared_in
        What declares the columns, for messages.
    header, encoding, decimal
        Options of the command; None for the setting of the source.
    """

    source: SourceConfig
    columns: pa.Schema | None = None
    optional: Collection[str] = ()
    chosen: bool = False
    declared_in: str = "the pipeline file"
    header: bool | None = None
    encoding: str | None = None
    decimal: Literal[".", ","] | None = None

    def form(self, kind: Kind) -> RecordFormat:
        """Return the format of files of a kind."""
        from headrace.pipelines.config import for_other_files, record_format

        form = record_format(for_other_files(self.source, kind))
        return replace(
            form,
            header=form.header if self.header is None else self.header,
            encoding=self.encoding or form.encoding,
            decimal=self.decimal or form.decimal,
            unknown_fields="ignore" if self.chosen else form.unknown_fields,
        )

    @property
    def sets_delimiter(self) -> bool:
        """Whether the source declares a delimiter."""
        return "delimiter" in self.source.model_fields_set


def text_columns(names: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the types of columns that stay text even if they look like numbers."""
    return dict.fromkeys(names, pa.string())


@dataclass(frozen=True)
class FileStream:
    """Files of one kind and one schema.

    Parameters
    ----------
    files
        Files in read order.
    kind
        ``"csv"``, ``"json"`` or ``"parquet"``.
    schema
        Schema of every batch.
    rows
        Number of rows if known without reading the files, else None.
    typeless
        Whether no record says what the types of the columns are, since there is none.
    whole
        Columns of whole numbers that are read as floats, since they are compared with floats.
    left_out
        Columns of the first file that are not read.
    """

    files: tuple[Path, ...]
    kind: str
    schema: pa.Schema
    rows: int | None
    _form: RecordFormat
    _open: Callable[[Path], Iterator[pa.RecordBatch]]
    typeless: bool = False
    whole: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    _taken: list[tuple[Path, int]] = field(default_factory=list)

    def batches(self) -> Generator[pa.RecordBatch]:
        """Yield all rows, file by file, in batches that fit in memory. A thread reads ahead.

        Raises
        ------
        InputFileError
            If a file cannot be read or does not match the first file, or a whole number is no float exactly. Names the
            file and, if known, the record.
        """
        with closing(read_ahead([self._read], lambda batch: int(batch.nbytes))) as batches:
            yield from batches

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Name file and record in an error of a row that was read, see `InputError.of_row`."""
        try:
            yield
        except InputError as error:
            place = None if error.row is None else self._place(error.row)
            if place is not None:
                error.placed(place)
            raise

    def _place(self, row: int) -> str | None:
        """Return file and record of a row; None if it was not read."""
        for file, rows in self._taken:
            if row < rows:
                return f"{file}, {record_place(row + 1, self._form)}"
            row -= rows
        return None

    def _read(self) -> Generator[pa.RecordBatch]:
        self._taken.clear()
        for file in self.files:
            rows = 0
            self._taken.append((file, rows))
            with _reading(file):
                for batch in self._open(file):
                    self._require_exact(file, batch)
                    rows += batch.num_rows
                    self._taken[-1] = file, rows
                    yield batch

    def _require_exact(self, file: Path, batch: pa.RecordBatch) -> None:
        for name in self.whole:
            largest = pc.max(pc.abs(batch[name])).as_py()
            if largest is not None and largest >= _EXACT:
                raise InputFileError(
                    f"{file}, column {name}: its whole numbers are compared with floats, which do not hold all of "
                    f"those from 2^53 ({_EXACT}) on exactly; give whole numbers in both columns, or texts that are "
                    f"written alike (for CSV: --text {name})"
                )


def open_stream(path: Path, *, batch_rows: int = 1 << 15, csv: CsvFormat | None = None) -> FileStream:
    """Inspect the files and determine their columns, without reading all rows.

    Parameters
    ----------
    path
        A file, or a folder of only CSV, JSON lines, or Parquet files (names with a leading ``.`` or ``_`` are ignored).
    batch_rows
        Maximum number of rows in a batch of a Parquet file.
    csv
        Format of CSV files.

    Raises
    ------
    InputFileError
        If there are no files to read, or the kind of a file is unknown.
    """
    files = _files_at(path)
    kind = _kind_of(files)
    form = csv or CsvFormat()
    if form.settings is not None and form.settings.columns is not None:
        return _declared(files, kind, form, form.settings, batch_rows)
    known, typeless = _first_known(files, kind, form)
    schema = known.columns
    if kind == "parquet":
        rows = _parquet_rows(files)
        return FileStream(files, kind, schema, rows, known, lambda file: _sliced(file, known, batch_rows))
    whole = _whole_columns(files[0], known, form)
    return FileStream(files, kind, schema, None, known, lambda file: _explained(file, known, form), typeless, whole)


def read_whole(path: Path, csv: CsvFormat, console: Console) -> tuple[FileStream, pa.Table]:
    """Return a stream, and all its rows, whose reading shows progress."""
    stream = open_stream(path, csv=csv)
    with console.progress("read", total=stream.rows):
        return stream, pa.Table.from_batches(stream.batches(), stream.schema)


def _declared(files: tuple[Path, ...], kind: Kind, form: CsvFormat, settings: Settings, batch_rows: int) -> FileStream:
    """Return files that have the columns that a pipeline declares."""
    assert settings.columns is not None
    known = _text_form(files[0], kind, form)
    names: Sequence[str] = settings.columns.names
    if kind != "csv" or known.header:
        with _reading(files[0]):
            names = infer_columns(files[0], known).names
    columns = [each for each in settings.columns if each.name in names or each.name not in settings.optional]
    read = pa.schema(columns)
    known = replace(known, columns=read)
    _refuse_text(form, read, settings)
    left_out = tuple(name for name in names if name not in read.names)
    rows = _parquet_rows(files) if kind == "parquet" else None

    def opened(file: Path) -> Iterator[pa.RecordBatch]:
        return _sliced(file, known, batch_rows) if kind == "parquet" else _explained(file, known, form)

    return FileStream(files, kind, read, rows, known, opened, left_out=left_out)


def _refuse_text(form: CsvFormat, columns: pa.Schema, settings: Settings) -> None:
    """Raise an error if an option keeps a column as text that is declared otherwise, or not at all."""
    for name in form.types:
        require_column(settings.declared_in, name, columns.names)
        if columns.field(name).type != pa.string():
            from headrace.pipelines.config import type_name

            kind = type_name(columns.field(name).type)
            raise ArgumentsError(f"{settings.declared_in} declares {name}: {kind}; leave out --text {name}")


def _whole_columns(file: Path, known: RecordFormat, form: CsvFormat) -> tuple[str, ...]:
    """Return the columns whose type is to be a float, although the file has whole numbers there."""
    floats = [name for name, dtype in form.types.items() if pa.types.is_floating(dtype)]
    if not floats:
        return ()
    with _reading(file):
        found = infer_columns(file, known, {})
    return tuple(name for name in floats if name in found.names and pa.types.is_integer(found.field(name).type))


def _first_known(files: Sequence[Path], kind: Kind, form: CsvFormat) -> tuple[RecordFormat, bool]:
    """Return the format by the first file, or by the first CSV with a record; and whether no CSV has one."""
    first = None
    for file in files:
        with _reading(file):
            known = _known(file, kind, form)
            first = first or known
            if kind != "csv" or any(len(records.numbers) for records in read_records(Piece(str(file)), known)):
                return known, False
    assert first is not None
    return first, True


def _known(file: Path, kind: Kind, form: CsvFormat) -> RecordFormat:
    """Return the format of the files, with the columns of one of them."""
    missing: Literal["error", "null"] = "null" if kind == "json" else "error"
    known = replace(_text_form(file, kind, form), unknown_fields="error", missing_fields=missing, any_year=True)
    if not known.header:
        raise InputFileError(
            f"cannot name the columns of {file}: the source declares `header: false`; declare the columns of the "
            "dimension in the pipeline file, or read the first record as a heading: --header"
        )
    columns = infer_columns(file, known, {} if kind == "parquet" else form.types)
    types = {**{each.name: PLAIN.get(each.type, each.type) for each in columns}, **form.declared}
    return replace(known, columns=pa.schema([each.with_type(types[each.name]) for each in columns]))


def _text_form(file: Path, kind: Kind, form: CsvFormat) -> RecordFormat:
    """Return the format of the files, without their columns."""
    settings = form.settings
    known = RecordFormat(kind) if settings is None else settings.form(kind)
    known = replace(known, nulls=form.nulls or known.nulls, delimiter=form.delimiter or known.delimiter)
    fixed = form.delimiter is not None or (settings is not None and settings.sets_delimiter)
    return with_delimiter(file, known) if kind == "csv" and known.header and not fixed else known


def _files_at(path: Path) -> tuple[Path, ...]:
    if not path.exists():
        raise InputFileError(f"there is no file or folder {path}")
    if not path.is_dir():
        return (path,)
    files = sorted(file for file in _walk(path) if not _hidden(file.relative_to(path)))
    if not files:
        raise InputFileError(f"the folder {path} holds no files; put CSV, JSON or Parquet files there")
    return tuple(files)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder. A folder that cannot be listed is an error, not an empty folder."""

    def refuse(error: OSError) -> None:
        raise InputFileError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    for base, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(base) / name for name in names)


def _hidden(file: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.parts)


def _kind_of(files: Sequence[Path]) -> Kind:
    kinds = {file: kind_of(file) or _kind_by_content(file) for file in files}
    if len(set(kinds.values())) > 1:
        first, other = files[0], next(file for file in files if kinds[file] != kinds[files[0]])
        raise InputFileError(f"{first} is {kinds[first]} but {other} is {kinds[other]}; give files of one kind")
    return kinds[files[0]]


def _kind_by_content(file: Path) -> Kind:
    with file.open("rb") as handle:
        head = handle.read(len(PARQUET_MAGIC))
    if head != PARQUET_MAGIC:
        known = f"{', '.join(SUFFIXES)}, and {', '.join(COMPRESSIONS)} behind them"
        raise InputFileError(f"cannot tell the format of {file}; use one of the endings {known}")
    return "parquet"


def _parquet_rows(files: Sequence[Path]) -> int | None:
    if any(compression_of(file) for file in files):
        return None
    rows = 0
    for file in files:
        with _reading(file):
            rows += pq.read_metadata(file).num_rows
    return rows


def _sliced(file: Path, form: RecordFormat, batch_rows: int) -> Iterator[pa.RecordBatch]:
    for batch in sound_batches(file, form):
        yield from (batch.slice(start, batch_rows) for start in range(0, batch.num_rows, batch_rows))


def _explained(file: Path, known: RecordFormat, form: CsvFormat) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a text file; an error for an invalid value explains the remedy."""
    try:
        yield from sound_batches(file, known)
    except RecordFileError as error:
        raise InputFileError(f"{error}{_hint(error, known, form)}") from error


def _hint(error: RecordFileError, known: RecordFormat, form: CsvFormat) -> str:
    """Return how to read a column with a value that does not fit; an empty text if nothing else is wrong with it."""
    assert known.columns is not None
    if error.column is None or error.column not in known.columns.names:
        return ""
    settings = form.settings
    if settings is not None and settings.columns is not None:
        from headrace.pipelines.config import type_name

        kind = type_name(known.columns.field(error.column).type)
        declared = f"; {settings.declared_in} declares {error.column}: {kind}; correct the value, or the type there"
        return "" if kind == "string" else declared
    if known.columns.field(error.column).type != pa.string():
        strings = "if all its values are JSON strings, " if known.kind == "json" else ""
        return f"; {strings}name the column in --text to keep it as text, unless it is compared with a key"
    return "; write all its values as JSON strings" if known.kind == "json" else ""


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Add the file name to an Arrow error."""
    try:
        yield
    except RecordFileError as error:
        raise InputFileError(str(error)) from error
    except (pa.ArrowException, OSError) as error:
        raise InputFileError(f"cannot read {file}: {error}") from error
