"""Clustered tables on disk: a relation in key order, in pages, with an index that fits in memory.

The rooms, each of which imports only those before it:

- `file` accesses files, `format` defines what their bytes mean, `leaf` encodes and searches leaves;
- `tree` has the inner nodes and snapshots, `read` reads leaves, `filter` identifies absent keys, `probe` serves joins;
- `commit` changes tables, `load` builds them. On top are `Table`, its handle, check and statistics.

Start with `Table`. Names are imported when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.storage.kernel_folder import ensure_kernel_folder, usual_folders

if TYPE_CHECKING:
    from headrace.storage.check import CheckReport, Violation
    from headrace.storage.format.keys import KeyCodec, Keys
    from headrace.storage.format.layout import LeafLayout
    from headrace.storage.table import Table, TableStats
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["CheckReport", "KeyCodec", "Keys", "LeafLayout", "Snapshot", "Table", "TableStats", "Violation"]

_HOMES = {
    "CheckReport": "headrace.storage.check",
    "KeyCodec": "headrace.storage.format.keys",
    "Keys": "headrace.storage.format.keys",
    "LeafLayout": "headrace.storage.format.layout",
    "Snapshot": "headrace.storage.tree.snapshot",
    "Table": "headrace.storage.table",
    "TableStats": "headrace.storage.table",
    "Violation": "headrace.storage.check",
}

ensure_kernel_folder(usual_folders())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.storage' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
