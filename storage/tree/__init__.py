"""The B+-tree above the leaves, and snapshots: committed states with their index in memory.

In: superblocks and inner nodes, or changed leaf entries. Out: the entry of each leaf, the leaves that may hold a key,
and the inner nodes that a commit must write. Reads no leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.tree.nodes import Entries, InnerLevel
    from headrace.storage.tree.relocations import relocation_columns
    from headrace.storage.tree.snapshot import Snapshot, open_snapshot

__all__ = ["Entries", "InnerLevel", "Snapshot", "open_snapshot", "relocation_columns"]

__getattr__ = lazy_exports(
    __name__,
    {
        "nodes": ("Entries", "InnerLevel"),
        "relocations": ("relocation_columns",),
        "snapshot": ("Snapshot", "open_snapshot"),
    },
)
