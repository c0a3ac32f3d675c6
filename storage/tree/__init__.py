"""The B+-tree above the leaves, and snapshots: committed states with their index in memory.

In: superblocks and inner nodes, or changed leaf entries. Out: the entry of each leaf, the leaves that may hold a key,
and the inner nodes that a commit must write. Reads no leaves.
"""

from headrace.storage.tree.relocations import relocation_columns
from headrace.storage.tree.snapshot import Snapshot, open_snapshot

__all__ = ["Snapshot", "open_snapshot", "relocation_columns"]
