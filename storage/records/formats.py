"""What a file of records is declared to be: its format, its columns, and how their values are written."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias
from zoneinfo import ZoneInfo

from headrace.storage.errors import InputError
from headrace.storage.records.patterns import Pattern, compile_pattern

if TYPE_CHECKING:
    import os

    import pyarrow as pa

__all__ = ["COMPRESSIONS", "SUFFIXES", "Kind", "RecordFormat", "StrPath", "compression_of", "kind_of"]

Kind = Literal["csv", "json", "parquet"]
StrPath: TypeAlias = "str | os.PathLike[str]"
SUFFIXES: dict[str, Kind] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSIONS = (".gz", ".zst", ".bz2")
_ASCII = 128


@dataclass(frozen=True)
class RecordFormat:
    """How files of records are read.

    Parameters
    ----------
    kind
        ``"csv"``, ``"json"`` (one object a line) or ``"parquet"``.
    columns
        Names and types of the columns. None stands for the columns of the first file, with inferred types.
    header
        Whether the first record of a CSV names the columns. Without a heading, columns are taken by position.
    delimiter, quote, escape
        One ASCII character each. `quote` may be empty for a dialect without quotes. `escape` is the quote by default: a
        quote within a quoted field is doubled.
    nulls
        Spellings of null, beside an empty field. A quoted field is never null.
    encoding
        Name of a Python codec.
    decimal
        Character between the whole and the fraction of a number: ``"."`` or ``","``.
    date_format, timestamp_format
        Pattern of dates and timestamps in the manner of `strptime`; ISO 8601 by default.
    time_zone
        Zone of times that name none.
    ambiguous_time
        What happens to a local time that occurs twice because clocks are set back: ``"reject"``, ``"earlier"`` or
        ``"later"``.
    unknown_fields
        ``"error"`` or ``"ignore"``: whether a column or field that is not declared is refused. None refuses it in CSV
        and JSON, and ignores it in Parquet.
    missing_fields
        ``"error"`` or ``"null"``: whether a declared column or field that is not there is refused, or null.
    any_year
        Keep dates and times of Parquet as they are where the type is the declared one, even outside the years 1 to
        9999, which Python and Spark cannot show.

    Raises
    ------
    InputError
        If an option is not valid; the message names it.
    """

    kind: Kind
    columns: pa.Schema | None = None
    header: bool = True
    delimiter: str = ","
    quote: str = '"'
    escape: str | None = None
    nulls: tuple[str, ...] = ()
    encoding: str = "utf-8"
    decimal: str = "."
    date_format: str | None = None
    timestamp_format: str | None = None
    time_zone: str = "UTC"
    ambiguous_time: Literal["reject", "earlier", "later"] = "reject"
    unknown_fields: Literal["error", "ignore"] | None = None
    missing_fields: Literal["error", "null"] = "error"
    any_year: bool = False

    def __post_init__(self) -> None:
        for name, text, least in (
            ("delimiter", self.delimiter, 1),
            ("quote", self.quote, 0),
            ("escape", self.escape or "", 0),
        ):
            if not least <= len(text) <= 1 or (text and (ord(text) >= _ASCII or text in "\r\n\0")):
                raise InputError(f"{name} is {text!r}; write one ASCII character that is not a line break")
        if self.delimiter in {self.quote, self.escape}:
            raise InputError(f"delimiter and quote or escape are both {self.delimiter!r}; they must differ")
        if self.decimal not in {".", ","}:
            raise InputError(f"decimal is {self.decimal!r}; write '.' or ','")
        if not _is_encoding_of_text(self.encoding):
            raise InputError(
                f"unknown encoding of text {self.encoding!r}; write a name such as 'utf-8', 'latin-1' or 'utf-16'"
            )
        try:
            ZoneInfo(self.time_zone)
        except (LookupError, ValueError, OSError) as error:
            raise InputError(f"unknown time zone {self.time_zone!r}; write a name such as 'Europe/Paris'") from error
        _ = self.patterns

    @property
    def patterns(self) -> tuple[Pattern | None, Pattern | None]:
        """The compiled patterns of dates and of timestamps."""
        return (
            compile_pattern("date_format", self.date_format) if self.date_format else None,
            compile_pattern("timestamp_format", self.timestamp_format) if self.timestamp_format else None,
        )

    @property
    def ignores_unknown(self) -> bool:
        """Whether a column or field that is not declared is passed over."""
        return (self.unknown_fields or ("ignore" if self.kind == "parquet" else "error")) == "ignore"


def _is_encoding_of_text(name: str) -> bool:
    """Return whether Python reads text in an encoding block by block, past bytes that it does not know."""
    try:
        return isinstance(codecs.getincrementaldecoder(name)("surrogateescape").decode(b"", final=True), str)
    except (LookupError, ValueError, TypeError, AssertionError):
        return False


def compression_of(path: StrPath) -> str | None:
    """Return the suffix that says how a file is compressed, or None.

    Examples
    --------
    >>> compression_of("rows.CSV.GZ"), compression_of("rows.csv")
    ('.gz', None)
    """
    suffix = Path(path).suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def kind_of(path: StrPath) -> Kind | None:
    """Return the format that a file's name says, or None.

    Examples
    --------
    >>> kind_of("rows.csv.gz"), kind_of("rows.pq"), kind_of("rows")
    ('csv', 'parquet', None)
    """
    file = Path(path)
    plain = file.with_suffix("") if compression_of(file) else file
    return SUFFIXES.get(plain.suffix.lower())
