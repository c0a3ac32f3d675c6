"""The one parser: files of CSV, JSON lines and Parquet as records of declared types, exactly or not at all.

A value that does not fit its column rejects its record, with the column, the value and the rule; the rest of the file
is read. A file that cannot be read as a whole is a `RecordFileError`. Nothing here knows tables, joins or pipelines.
Names are imported when they are first used, so that a format can be checked without loading what reads it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.storage.errors import RecordFileError
    from headrace.storage.records.formats import COMPRESSIONS, SUFFIXES, Kind, RecordFormat, compression_of, kind_of
    from headrace.storage.records.inference import infer_columns, record_place, sound_batches, with_delimiter
    from headrace.storage.records.originals import (
        INEXACT,
        Originals,
        check_heading,
        original_heading,
        original_records,
        read_originals,
    )
    from headrace.storage.records.pieces import Piece, split
    from headrace.storage.records.reading import raw_records, read_records
    from headrace.storage.records.records import REJECTS, Records, shown_texts

__all__ = [
    "COMPRESSIONS",
    "INEXACT",
    "REJECTS",
    "SUFFIXES",
    "Kind",
    "Originals",
    "Piece",
    "RecordFileError",
    "RecordFormat",
    "Records",
    "check_heading",
    "compression_of",
    "infer_columns",
    "kind_of",
    "original_heading",
    "original_records",
    "raw_records",
    "read_originals",
    "read_records",
    "record_place",
    "shown_texts",
    "sound_batches",
    "split",
    "with_delimiter",
]

_HOMES = {
    "COMPRESSIONS": "headrace.storage.records.formats",
    "REJECTS": "headrace.storage.records.records",
    "SUFFIXES": "headrace.storage.records.formats",
    "INEXACT": "headrace.storage.records.originals",
    "Kind": "headrace.storage.records.formats",
    "Originals": "headrace.storage.records.originals",
    "Piece": "headrace.storage.records.pieces",
    "RecordFileError": "headrace.storage.errors",
    "RecordFormat": "headrace.storage.records.formats",
    "Records": "headrace.storage.records.records",
    "check_heading": "headrace.storage.records.originals",
    "compression_of": "headrace.storage.records.formats",
    "infer_columns": "headrace.storage.records.inference",
    "kind_of": "headrace.storage.records.formats",
    "original_heading": "headrace.storage.records.originals",
    "original_records": "headrace.storage.records.originals",
    "raw_records": "headrace.storage.records.reading",
    "read_originals": "headrace.storage.records.originals",
    "read_records": "headrace.storage.records.reading",
    "shown_texts": "headrace.storage.records.records",
    "record_place": "headrace.storage.records.inference",
    "sound_batches": "headrace.storage.records.inference",
    "split": "headrace.storage.records.pieces",
    "with_delimiter": "headrace.storage.records.inference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.storage.records' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
