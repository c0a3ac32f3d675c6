"""`Writer`: turns changes into one atomic, durable commit, or into nothing.

The commit of transaction `t`; `FORMAT.md` argues each point at which the system may stop:

1. changed leaves and the inner nodes above them are written to free pages;
2. sync: the new pages are durable, and nothing points to them yet;
3. the superblock of `t` is written to slot ``t mod 2``; that of ``t - 1`` stays in the other slot;
4. sync: the commit is durable and is acknowledged.

A commit of few pages leaves out step 2: its superblock has a proof, which shows whether the pages are on disk. Once
the commit is durable, the superblock is repeated without the proof in the other slot; if the proof is short, only
when the writer releases its lock. A commit of few leaves writes no inner nodes either: its superblock lists where
these leaves are, with all leaves relocated before, until the list is full.

Pages that `t` frees are reused by a later commit only, and only when no reader claims a snapshot before `t`. A write
or sync that fails leaves unknown bytes in free pages or in one slot. The writer then overwrites a superblock that has
a proof with the one of ``t - 1``, and refuses further work.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

from headrace.storage.commit.changes import prepare
from headrace.storage.commit.draft import Draft
from headrace.storage.commit.merge import Counts
from headrace.storage.commit.page_writer import PageWriter
from headrace.storage.commit.space import FreeSpace
from headrace.storage.errors import CorruptionError, InputError, PoisonedHandleError, StorageIOError
from headrace.storage.filter.segments import FilterWriter, cut_filter
from headrace.storage.format.constants import RELOCATION_BYTES
from headrace.storage.format.metadata import metadata_pages
from headrace.storage.format.slots import read_superblock, repeat_superblock, restore_superblock, write_superblock
from headrace.storage.format.superblock import (
    RELOCATED_AT_ONCE,
    check_app,
    room_for_relocations,
    without_oversized_proof,
)
from headrace.storage.tree.nodes import Index
from headrace.storage.tree.relocations import add_relocations, relocated_leaves
from headrace.storage.tree.rewrite import rewrite_inner
from headrace.storage.tree.snapshot import Snapshot, open_snapshot, pages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from numpy.typing import NDArray

    from headrace.storage.commit.changes import Batch
    from headrace.storage.commit.locks import FileLocks
    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.superblock import Superblock
    from headrace.storage.read.reader import PageReader

__all__ = ["App", "CommitResult", "Transaction", "Writer", "open_already"]

_MOST_HELD = 32  # held pages from which on a commit asks first whether readers still need them


App: TypeAlias = tuple[str, int]
"""Name and version of an application."""


def open_already() -> InputError:
    """Return the error for a change that begins while a transaction is open."""
    return InputError("a transaction of this table is open already; end it before the next change begins")


class CommitResult(NamedTuple):
    """Result of a commit.

    Attributes
    ----------
    txid
        Transaction id of the table after the commit.
    inserted
        Rows stored under new keys, or by `inserts`.
    updated
        Rows that replaced rows with the same key.
    deleted
        Rows deleted by their keys.
    skipped
        Whether the application had already committed this version or a later one, so that nothing was done.
    """

    txid: int
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    skipped: bool = False


class Transaction:
    """Changes that become one commit when the ``with`` block ends without an exception.

    Attributes
    ----------
    skipped
        Whether the application has already committed this version, so that nothing will be done.
    """

    def __init__(self, writer: Writer, app: App | None, *, skipped: bool) -> None:
        self._writer = writer
        self._app = app
        self._draft: Draft | None = None
        self._counts = Counts()
        self._result: CommitResult | None = None
        self._ended = False
        self.skipped = skipped

    def apply(
        self, upserts: Batch | None = None, deletes: Batch | None = None, *, inserts: Batch | None = None
    ) -> None:
        """Add changes; later ones see the earlier ones. See `headrace.storage.Table.apply` for the parameters.

        Raises
        ------
        InputError
            If the changes are refused. The whole transaction is then undone.
        """
        if self._ended:
            raise InputError("the transaction has ended; begin a new one")
        if self.skipped:
            return
        snapshot = self._writer.snapshot
        try:
            changes = prepare(
                snapshot.layout, upserts=upserts, deletes=deletes, inserts=inserts, unique=snapshot.unique
            )  # outside of the guard: no error can mean that a write failed
            with self._writer.guard():
                if changes:
                    self._counts = self._counts.plus(self._drafted().apply(changes))
        except BaseException:
            self._ended = True
            raise

    def _drafted(self) -> Draft:
        if self._draft is None:
            self._draft = self._writer.begin()
        return self._draft

    @property
    def result(self) -> CommitResult:
        """Result of the commit; known when the ``with`` block has ended.

        Raises
        ------
        InputError
            If the transaction has not been committed.
        """
        if self._result is None:
            raise InputError("the transaction has no result: it was not committed")
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        undone, self._ended = self._ended, True
        try:
            if kind is None and undone:
                raise InputError("nothing was committed: an earlier change of this transaction failed and undid it")
            if kind is None:
                self._result = self._commit()
        finally:
            self._draft = None  # a draft keeps its base snapshot alive, and with it the pages of that
            self._writer.abandon()

    def _commit(self) -> CommitResult:
        if not self.skipped:
            with self._writer.guard():
                if self._app is not None or (self._draft and self._draft.changed):
                    self._writer.commit(self._drafted(), self._app)
        txid = self._writer.snapshot.txid
        counts = self._counts
        return CommitResult(txid, counts.inserted, counts.updated, counts.deleted, self.skipped)


class Writer:
    """Commits changes to a table file while it holds the writer's lock.

    Parameters
    ----------
    backend
        Storage backend of the table file, open for writing.
    locks
        Locks of the table file.
    reader
        Page reader of the same file.
    """

    def __init__(self, backend: StorageBackend, locks: FileLocks, reader: PageReader) -> None:
        self._backend = backend
        self._locks = locks
        self._reader = reader
        self._poison: BaseException | None = None
        self._draft: Draft | None = None
        self._filter: FilterWriter | None = None
        self._busy = False
        self._to_repeat = False
        self._state: tuple[Snapshot, FreeSpace] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """Newest commit. Known once the writer has the lock."""
        assert self._state is not None
        return self._state[0]

    @property
    def space(self) -> FreeSpace:
        """Free pages of the file. Known once the writer has the lock."""
        assert self._state is not None
        return self._state[1]

    def acquire(self, wait: float = 0.0) -> None:
        """Take the writer's lock and read the newest commit.

        Parameters
        ----------
        wait
            Seconds to wait for another writer.

        Raises
        ------
        LockedError
            If another handle still has the lock after that time.
        CorruptionError
            If the table is damaged.
        PoisonedHandleError
            If an earlier write or sync failed.
        """
        self._refuse_poisoned()
        self._refuse_busy()
        self._locks.take_writer(wait)
        try:
            newest = read_superblock(self._backend)
            if self._state is None or self._state[0].txid != newest.txid:
                self._backend.sync()  # a writer that died before its sync may have written what was read
                if newest.proof is not None:
                    repeat_superblock(self._backend, newest)
                known = None if self._state is None else self._state[0]
                snapshot = open_snapshot(self._backend, newest, known)
                self._state = snapshot, self._map_space(snapshot)
            self.open_filter()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Repeat the superblock of the last commit if that is due, and release the lock."""
        if self._to_repeat and self._poison is None:
            with contextlib.suppress(StorageIOError):  # the commit is durable, and its proof shows it too
                self._repeat()
        self._close_filter()
        self._locks.release_writer()

    def open_filter(self) -> None:
        """Keep the table's current filter up to date, if it has one, until the lock is released."""
        self._close_filter()
        self._filter = FilterWriter(self._backend.path, self.snapshot.layout)

    def _close_filter(self) -> None:
        if self._filter is not None:
            self._filter.close()
            self._filter = None

    def apply(
        self,
        upserts: Batch | None = None,
        deletes: Batch | None = None,
        *,
        inserts: Batch | None = None,
        app: App | None = None,
    ) -> CommitResult:
        """Change the table in one commit. See `headrace.storage.Table.apply`."""
        with self.transaction(app=app) as transaction:
            transaction.apply(upserts, deletes, inserts=inserts)
        return transaction.result

    def transaction(self, *, app: App | None = None) -> Transaction:
        """Begin a commit of several changes. See `headrace.storage.Table.transaction`.

        Raises
        ------
        PoisonedHandleError
            If an earlier write or sync failed.
        InputError
            If `app` is not a name and a version, or a transaction is open.
        """
        self._refuse_poisoned()
        self._refuse_busy()
        if self.space.held >= _MOST_HELD:
            self.reclaim()
        check_app(app)
        skipped = app is not None and app[1] <= self.snapshot.superblock.apps.get(app[0], app[1] - 1)
        transaction = Transaction(self, app, skipped=skipped)
        self._busy = True
        return transaction

    def begin(self, take: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None) -> Draft:
        """Return a draft of the next commit; see `PageWriter` for `take`. Ends with `commit` or `abandon`."""
        snapshot = self.snapshot
        pages = PageWriter(self._backend, self.space, snapshot.page_size, snapshot.txid + 1, take, self._filter)
        self._draft = Draft(snapshot, self._reader, pages)
        return self._draft

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Undo the open draft if the block raises, and poison the writer if a write may have failed.

        Refused input and damaged pages are detected before the superblock is written, so they only undo the draft.
        """
        self._refuse_poisoned()
        try:
            yield
        except (InputError, CorruptionError):
            self.abandon()
            raise
        except BaseException as error:
            self._poison = error
            raise

    def abandon(self) -> None:
        """End the open transaction, and undo its draft unless that was committed."""
        self._busy = False
        if self._draft is not None:
            self._draft.pages.roll_back()
        self._draft = None

    def commit(self, draft: Draft, app: App | None, *, rewrite: bool = False) -> None:
        """Make a draft the state of the table. The caller uses `guard`.

        Parameters
        ----------
        draft
            Draft to commit.
        app
            Application and version to record with the commit.
        rewrite
            Whether to write the inner nodes even if the relocation list has room for the leaves.
        """
        head = self.snapshot.superblock
        apps = head.apps if app is None else {**head.apps, app[0]: app[1]}
        relocations = None if rewrite else self._relocations_after(draft, apps)
        index, freed = self.snapshot.index, draft.freed
        if relocations is None:
            nodes, index, gone = self._rewrite_inner_nodes(draft)
            freed = np.concatenate([freed, gone])
        else:
            nodes = {"pages": max(head.pages, draft.pages.end), "relocations": relocations}
        draft.pages.settle()
        proof = draft.pages.proof
        self._publish(
            replace(head, txid=draft.pages.txid, rows=draft.rows, apps=apps, proof=proof, **nodes), index, draft, freed
        )

    def _relocations_after(self, draft: Draft, apps: Mapping[str, int]) -> bytes | None:
        """Return the relocation list after a draft, or None if the inner nodes must be written."""
        leaves = draft.replaced
        if leaves is None or len(leaves) > RELOCATED_AT_ONCE:
            return None
        relocations = add_relocations(self.snapshot.superblock.relocations, leaves, draft.entries)
        return relocations if len(relocations) <= room_for_relocations(apps) * RELOCATION_BYTES else None

    def _rewrite_inner_nodes(self, draft: Draft) -> tuple[dict[str, Any], Index, NDArray[np.int64]]:
        """Write the inner nodes above all changed and all relocated leaves.

        Returns
        -------
        fields
            Fields of the superblock: the new root, and an empty relocation list.
        index
            Index with the new inner nodes.
        freed : int64 array
            Pages of inner nodes that the tree no longer has.
        """
        head = self.snapshot.superblock
        leaves = draft.leaves.with_changed(relocated_leaves(head.relocations))
        tree = rewrite_inner(leaves, self.snapshot.levels, self.snapshot.fill, draft.pages)
        metadata_end = head.metadata_page + metadata_pages(head.metadata_bytes, head.page_size)
        used = [leaves.entries.pages, *(level.pages for level in tree.levels)]
        page, checksum = tree.root_pointer
        fields = {
            "root_page": page,
            "root_checksum": checksum,
            "height": tree.height,
            "leaves": len(leaves),
            "pages": max(metadata_end, *(int(pages.max(initial=0)) + 1 for pages in used)),
            "relocations": b"",
        }
        return fields, Index(leaves.entries, tree.levels), tree.freed

    def _publish(self, superblock: Superblock, index: Index, draft: Draft, freed: NDArray[np.int64]) -> None:
        """Make the written pages and the superblock durable, and make them the state of the table."""
        superblock, before = without_oversized_proof(superblock), self.snapshot
        if superblock.proof is None:
            self._backend.sync()
        try:
            write_superblock(self._backend, superblock)
            self._backend.sync()
        except StorageIOError:
            if superblock.proof is not None:
                restore_superblock(self._backend, before.superblock)
            raise
        self.space.hold(superblock.txid, freed)
        self._state = Snapshot(before.path, superblock, before.layout, index, draft.entries), self.space
        self._draft = None
        self._to_repeat = superblock.proof is not None
        if superblock.proof is not None and len(superblock.proof.pages) > RELOCATED_AT_ONCE:
            self._repeat()

    def _repeat(self) -> None:
        """Repeat the superblock of the newest commit, so that no one has to verify the pages of its proof.

        The next commit overwrites the repetition. If the proof is short, the repetition is therefore left until the
        lock is released.
        """
        repeat_superblock(self._backend, self.snapshot.superblock)
        self._to_repeat = False

    def cut(self) -> None:
        """Cut the free pages at the end off the file. The caller uses `guard`."""
        pages = self.space.cut()
        self._backend.truncate(pages * self.snapshot.page_size)
        self._backend.sync()
        cut_filter(self._backend.path, pages)

    def _map_space(self, snapshot: Snapshot) -> FreeSpace:
        """Return the pages that the newest commit does not reach, held while readers of older commits exist."""
        head = snapshot.superblock
        space = FreeSpace(max(head.pages, -(-self._backend.size() // head.page_size)), pages_of(snapshot))
        if self._locks.oldest_claim(head.txid) is not None:
            space.hold_free(head.txid)
        return space

    def reclaim(self) -> bool:
        """Free the pages that no reader needs any longer; return whether no one reads a commit before the newest."""
        oldest = self._locks.oldest_claim(self.snapshot.txid)
        self.space.reclaim(self.snapshot.txid if oldest is None else oldest)
        return oldest is None

    def _refuse_busy(self) -> None:
        if self._busy:
            raise open_already()

    def _refuse_poisoned(self) -> None:
        if self._poison is not None:
            raise PoisonedHandleError(
                f"an earlier write to {self._backend.path} failed ({self._poison}), so its state on disk is not known; "
                "close the table and open it again: it will be at its last commit"
            ) from self._poison
