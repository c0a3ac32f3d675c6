"""Compaction: restores key order on disk and releases space, in place, while readers continue.

A compaction consists of two commits. The first packs all rows again by the fill factor and writes them, in key order,
after the end of the file. The second moves these pages, unchanged, to the front, which is free by then, and cuts the
file. A crash leaves the table at one of these commits. If a reader still needs an earlier commit, the second step is
skipped: the table is in key order, and a later `compact` continues from there and releases the space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.commit.draft import Replacement
from headrace.storage.format.page import seal_pages
from headrace.storage.tree.nodes import Entries

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.storage.commit.draft import Draft
    from headrace.storage.commit.writer import Writer
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["CompactResult", "compact"]

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class CompactResult:
    """Result of `compact`.

    Attributes
    ----------
    txid
        Transaction id of the table after the compaction.
    pages_before, pages_after
        Length of the file in pages.
    shrunk
        Whether space was released. If not, a reader needs an earlier commit; compact again when it is done.
    """

    txid: int
    pages_before: int
    pages_after: int
    shrunk: bool


def compact(writer: Writer, adopt: Callable[[Snapshot], None]) -> CompactResult:
    """Restore key order on disk. The writer holds its lock.

    Parameters
    ----------
    writer
        Writer of the table.
    adopt
        Called with the new snapshot after each commit, so that the caller releases its claim on the old one.

    Raises
    ------
    CorruptionError
        If a page is damaged; nothing is changed then.
    StorageIOError
        If a write fails. The writer then refuses all further work.
    """
    before = writer.space.pages
    nobody_reads = writer.reclaim()
    if not _in_order(writer.snapshot) or (nobody_reads and not _front_is_free(writer)):
        _commit(writer, _repack, lambda hints: writer.space.grow(len(hints)))
        adopt(writer.snapshot)
    if writer.reclaim() and _front_is_free(writer):
        if _free_before(writer):
            _commit(writer, _move, lambda hints: writer.space.take_onward(0, len(hints)))
            adopt(writer.snapshot)
        shrunk = writer.reclaim()
    else:
        shrunk = False
    if shrunk:
        with writer.guard():
            writer.cut()
    return CompactResult(writer.snapshot.txid, before, writer.space.pages, shrunk)


def _commit(
    writer: Writer, work: Callable[[Draft], None], take: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> None:
    with writer.guard():
        draft = writer.begin(take)
        work(draft)
        writer.commit(draft, None, rewrite=True)


def _front_is_free(writer: Writer) -> bool:
    """Return whether all pages of the tree fit in one run at the front of the file, or are there already."""
    count = _tree_pages(writer.snapshot)
    free = writer.space.free
    if not _free_before(writer):
        return True
    return len(free) >= count and int(free[count - 1]) == int(free[0]) + count - 1


def _free_before(writer: Writer) -> bool:
    """Return whether there are free pages before the first leaf."""
    free, leaves = writer.space.free, writer.snapshot.leaf_pages
    return len(leaves) > 0 and len(free) > 0 and int(free[0]) < int(leaves[0])


def _in_order(snapshot: Snapshot) -> bool:
    """Return whether the leaves are consecutive on disk, as after a load or a compaction."""
    return not snapshot.superblock.relocations and bool((np.diff(snapshot.leaf_pages) == 1).all())


def _tree_pages(snapshot: Snapshot) -> int:
    return len(snapshot.leaf_pages) + sum(len(level.pages) for level in snapshot.levels)


def _repack(draft: Draft) -> None:
    done = []
    for leaves in _chunks(draft):
        rows = draft.load(leaves)
        done.append(draft.write(rows, leaves, np.zeros(len(leaves), dtype=np.int64)))
    draft.install(done)


def _move(draft: Draft) -> None:
    done = []
    for leaves in _chunks(draft):
        pages, old = draft.read(leaves), draft.entries.slice(int(leaves[0]), int(leaves[-1]) + 1)
        numbers = draft.pages.place(old.pages)
        checksums = seal_pages(pages, draft.page_size, numbers, draft.pages.txid)
        draft.pages.put(pages, numbers, checksums)
        copies = Entries(numbers, checksums, old.rows, old.continued, old.separators)
        done.append(Replacement(leaves, copies, leaves))
    draft.install(done)


def _chunks(draft: Draft) -> list[NDArray[np.int64]]:
    step = max(_CHUNK_BYTES // draft.page_size, 1)
    count = len(draft.entries)
    return [np.arange(start, min(start + step, count)) for start in range(0, count, step)]
