"""Fast probing for joins: leaves located and rows found for many keys at once, in memory.

In: keys of one word. Out: leaf numbers, and rows from a hash table of rows that were read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.probe.fixed_rows import FixedRows
    from headrace.storage.probe.leaf_ranges import LeafRanges
    from headrace.storage.probe.row_hash import RowHash, SlotForm

__all__ = ["FixedRows", "LeafRanges", "RowHash", "SlotForm"]

__getattr__ = lazy_exports(
    __name__,
    {
        "row_hash": ("RowHash", "SlotForm"),
        "leaf_ranges": ("LeafRanges",),
        "fixed_rows": ("FixedRows",),
    },
)
