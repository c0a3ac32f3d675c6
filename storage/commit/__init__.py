"""Commits: changes become the next state of a table, atomically and durably, or nothing.

In: batches of upserts, deletes and inserts. Out: a new snapshot. A commit becomes durable in `writer.Writer`; the order
of its writes and syncs is argued in `FORMAT.md`. Contains the writer, transactions, drafts, patching and merging of
leaves, free space, page placement, locks and compaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.commit.changes import Batch, Changes, prepare
    from headrace.storage.commit.compaction import CompactResult, compact
    from headrace.storage.commit.locks import FileLocks, NoLocks
    from headrace.storage.commit.transaction import App, CommitResult, Transaction
    from headrace.storage.commit.writer import Writer

__all__ = [
    "App",
    "Batch",
    "Changes",
    "CommitResult",
    "CompactResult",
    "FileLocks",
    "NoLocks",
    "Transaction",
    "Writer",
    "compact",
    "prepare",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "writer": ("Writer",),
        "transaction": ("App", "CommitResult", "Transaction"),
        "changes": ("Batch", "Changes", "prepare"),
        "locks": ("FileLocks", "NoLocks"),
        "compaction": ("CompactResult", "compact"),
    },
)
