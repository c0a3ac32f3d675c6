"""Clustered tables on disk: a relation in key order, in pages, with an index that fits in memory.

The rooms, each of which imports only those before it:

- `file` accesses files, `format` defines what their bytes mean, `leaf` encodes and searches leaves;
- `tree` has the inner nodes and snapshots, `read` reads leaves, `filter` identifies absent keys, `probe` serves joins;
- `commit` changes tables, `load` builds them. On top are `Table`, its handle, check and statistics.

Start with `Table`. Names are imported when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.storage.kernel_folder import ensure_kernel_folder, usual_folders

if TYPE_CHECKING:
    from headrace.storage.table import CheckReport, Table, TableStats

__all__ = ["CheckReport", "Table", "TableStats"]

ensure_kernel_folder(usual_folders())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace.storage' has no attribute {name!r}")
    from headrace.storage import table  # noqa: PLC0415 - numba and pyarrow are loaded with the first use

    return getattr(table, name)
