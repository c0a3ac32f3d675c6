"""The one parser: files of CSV, JSON lines and Parquet as records of declared types, exactly or not at all.

A value that does not fit its column rejects its record, with the column, the value and the rule; the rest of the file is
read. A file that cannot be read as a whole is a `RecordFileError`. Nothing here knows tables, joins or pipelines.
"""

from headrace.storage.errors import RecordFileError
from headrace.storage.records.formats import COMPRESSIONS, SUFFIXES, Kind, RecordFormat, compression_of, kind_of
from headrace.storage.records.pieces import Piece, split
from headrace.storage.records.reading import raw_records, read_records
from headrace.storage.records.records import REJECTS, Records

__all__ = [
    "COMPRESSIONS",
    "REJECTS",
    "SUFFIXES",
    "Kind",
    "Piece",
    "RecordFileError",
    "RecordFormat",
    "Records",
    "compression_of",
    "kind_of",
    "raw_records",
    "read_records",
    "split",
]
