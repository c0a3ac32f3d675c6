"""The source folder: its files, the record of loaded files, and the files of the next batch.

In: a folder and the ledger. Out: batch plans, and the file pieces that a batch reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.source.discovery import (
        FoundFile,
        LeftOut,
        date_of,
        examine,
        fingerprint,
        printable,
        skip_command,
    )
    from headrace.pipelines.source.identity import application, check_identity, replaced_stream, source_of
    from headrace.pipelines.source.intake import Intake
    from headrace.pipelines.source.ledger import Ledger, Plan
    from headrace.pipelines.source.pieces import check_source, option_text, piece_frame
    from headrace.pipelines.source.source_files import SourceFile, adopt_files, list_files, skip_files

__all__ = [
    "FoundFile",
    "Intake",
    "Ledger",
    "LeftOut",
    "Plan",
    "SourceFile",
    "adopt_files",
    "application",
    "check_identity",
    "check_source",
    "date_of",
    "examine",
    "fingerprint",
    "list_files",
    "option_text",
    "piece_frame",
    "printable",
    "replaced_stream",
    "skip_command",
    "skip_files",
    "source_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "discovery": ("FoundFile", "LeftOut", "date_of", "examine", "fingerprint", "printable", "skip_command"),
        "identity": ("application", "check_identity", "replaced_stream", "source_of"),
        "intake": ("Intake",),
        "ledger": ("Ledger", "Plan"),
        "pieces": ("check_source", "option_text", "piece_frame"),
        "source_files": ("SourceFile", "adopt_files", "list_files", "skip_files"),
    },
)
