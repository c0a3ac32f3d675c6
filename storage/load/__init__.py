"""Bulk loads: a table file written from a source in key order.

In: a source of rows and the layout of the table. Out: a table file under its final name, or no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.load.build import BuildOptions, TableWriter, build_table

__all__ = ["BuildOptions", "TableWriter", "build_table"]

__getattr__ = lazy_exports(
    __name__,
    {
        "build": ("BuildOptions", "TableWriter", "build_table"),
    },
)
