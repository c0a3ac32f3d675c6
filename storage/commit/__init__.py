"""Commits: changes become the next state of a table, atomically and durably, or nothing.

In: batches of upserts, deletes and inserts. Out: a new snapshot. A commit becomes durable in `writer.Writer`; the order
of its writes and syncs is argued in `FORMAT.md`. Contains the writer, transactions, drafts, patching and merging of
leaves, free space, page placement, locks and compaction.
"""

from headrace.storage.commit.changes import find_keys
from headrace.storage.commit.writer import CommitResult, Transaction, Writer

__all__ = ["CommitResult", "Transaction", "Writer", "find_keys"]
