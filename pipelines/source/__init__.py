"""The source folder: its files, the record of loaded files, and the files of the next batch.

In: a folder and the ledger. Out: batch plans, and the file pieces that a batch reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.pipelines._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.pipelines.source.discovery import LeftOut, examine, printable
    from headrace.pipelines.source.ledger import Ledger
    from headrace.pipelines.source.source_files import SourceFile, adopt_files, list_files, skip_files

__all__ = ["Ledger", "LeftOut", "SourceFile", "adopt_files", "examine", "list_files", "printable", "skip_files"]

__getattr__ = lazy_exports(
    __name__,
    {
        "discovery": ("LeftOut", "examine", "printable"),
        "ledger": ("Ledger",),
        "source_files": ("SourceFile", "adopt_files", "list_files", "skip_files"),
    },
)
