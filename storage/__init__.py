"""Clustered tables on disk: a relation in key order, in pages, behind one index that fits in memory.

`Table` is where to begin. Names are imported when they are first used, so that `import storage` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from storage.kernel_folder import ensure_kernel_folder, usual_folders

if TYPE_CHECKING:
    from storage.check import CheckReport, Violation
    from storage.keys import KeyCodec, Keys
    from storage.layout import LeafLayout
    from storage.snapshot import Snapshot
    from storage.table import Table, TableStats

__all__ = ["CheckReport", "KeyCodec", "Keys", "LeafLayout", "Snapshot", "Table", "TableStats", "Violation"]

_HOMES = {
    "CheckReport": "storage.check",
    "KeyCodec": "storage.keys",
    "Keys": "storage.keys",
    "LeafLayout": "storage.layout",
    "Snapshot": "storage.snapshot",
    "Table": "storage.table",
    "TableStats": "storage.table",
    "Violation": "storage.check",
}

ensure_kernel_folder(usual_folders())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
