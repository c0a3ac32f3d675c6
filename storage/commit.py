"""The writer of a table: changes become one atomic, durable commit, or nothing.

A commit by transaction `t` goes like this; `FORMAT.md` argues each crash point:

1. changed leaves and the inner nodes above them are written to free pages;
2. sync: the new pages are durable, and nothing points to them yet;
3. the superblock of `t` is written into slot ``t mod 2``; that of ``t - 1`` lies in the other slot, untouched;
4. sync: the commit is durable and may be acknowledged.

A commit of few pages leaves step 2 out: its superblock says how to see that the pages are there.

Pages that `t` frees are used again by a later commit only, and only when no reader claims a snapshot before `t`.
A write or sync that fails leaves unknown bytes in free pages or in one slot; the writer then refuses to go on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from storage.changes import prepare
from storage.draft import Draft
from storage.errors import CorruptionError, InputError, PoisonedHandleError, StorageIOError
from storage.merge import Counts
from storage.metadata import metadata_pages
from storage.page_writer import PageWriter
from storage.slots import read_superblock, repeat_superblock, write_superblock
from storage.snapshot import Snapshot, open_snapshot
from storage.space import FreeSpace
from storage.superblock import FORMAT_VERSION, check_app, encode_superblock, has_room_for_proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from storage.backend import StorageBackend
    from storage.changes import Batch
    from storage.inner import NewTree, Placed
    from storage.locks import Locks
    from storage.reader import PageReader
    from storage.superblock import Superblock

__all__ = ["CommitResult", "Transaction", "Writer", "pages_of"]

_SUPERBLOCKS = 2

App = tuple[str, int]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did.

    Attributes
    ----------
    txid
        Transaction at which the table stands now.
    inserted
        Rows stored under keys that were not there (or by `inserts`).
    updated
        Rows stored in place of rows with the same key.
    deleted
        Rows removed because their keys were to be deleted.
    skipped
        Whether the application had committed this version or a later one already, so that nothing was done.
    """

    txid: int
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    skipped: bool = False


def pages_of(snapshot: Snapshot) -> NDArray[np.int64]:
    """Return the numbers of all pages that a snapshot is made of, superblocks included."""
    head = snapshot.superblock
    count = metadata_pages(head.metadata_bytes, head.page_size)
    metadata = head.metadata_page + np.arange(count, dtype=np.int64)
    inner = [level.pages for level in snapshot.levels]
    return np.concatenate([np.arange(_SUPERBLOCKS, dtype=np.int64), metadata, *inner, snapshot.leaf_pages])


def _length(head: Superblock, leaves: Placed, tree: NewTree, freed: NDArray[np.int64]) -> int:
    """Return the pages of the file that the next commit relies on; `head` is the superblock of the one before it.

    Takes no look at all leaves unless the last page of the file went.
    """
    last, some = head.pages - 1, leaves.entries.pages
    if (freed == last).any():
        last = head.metadata_page + metadata_pages(head.metadata_bytes, head.page_size) - 1
    else:
        some = some[leaves.changed]
    return max(last, *(int(pages.max(initial=0)) for pages in (some, *(level.pages for level in tree.levels)))) + 1


class Writer:
    """What commits to a table file, whenever it holds the writer's lock.

    Parameters
    ----------
    backend
        The file, open for writing.
    locks
        Of the file.
    reader
        Reads pages of the same file.
    """

    def __init__(self, backend: StorageBackend, locks: Locks, reader: PageReader) -> None:
        self._backend = backend
        self._locks = locks
        self._reader = reader
        self._poison: BaseException | None = None
        self._draft: Draft | None = None
        self._busy = False
        self._state: tuple[Snapshot, FreeSpace] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The newest commit. Known once the writer has been acquired."""
        assert self._state is not None
        return self._state[0]

    @property
    def space(self) -> FreeSpace:
        """The free pages, known as the snapshot is."""
        assert self._state is not None
        return self._state[1]

    def acquire(self, wait: float = 0.0) -> None:
        """Become the one writer, at the newest commit.

        Parameters
        ----------
        wait
            Seconds to wait for another writer.

        Raises
        ------
        LockedError
            If another handle is the writer after that time.
        CorruptionError
            If the table is damaged.
        PoisonedHandleError
            If a write or sync failed before.
        """
        self._refuse_poisoned()
        if self._busy:
            raise InputError("a transaction of this table is open already; end it before the next change begins")
        self._locks.take_writer(wait)
        try:
            newest = read_superblock(self._backend)
            if self._state is None or self._state[0].txid != newest.txid:
                self._backend.sync()  # what is read may be the last words of a writer that died before its sync
                if newest.proof is not None:
                    repeat_superblock(self._backend, newest)
                snapshot = open_snapshot(self._backend, newest)
                self._state = snapshot, self._map_space(snapshot)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let another writer in."""
        self._locks.release_writer()

    def apply(
        self,
        upserts: Batch | None = None,
        deletes: Batch | None = None,
        *,
        inserts: Batch | None = None,
        app: App | None = None,
    ) -> CommitResult:
        """Change the table in one commit. See `storage.Table.apply`."""
        with self.transaction(app=app) as transaction:
            transaction.apply(upserts, deletes, inserts=inserts)
        return transaction.result

    def transaction(self, *, app: App | None = None) -> Transaction:
        """Begin a commit of several changes. See `storage.Table.transaction`.

        Raises
        ------
        PoisonedHandleError
            If a write or sync failed before.
        InputError
            If `app` is not a name and a version.
        """
        self._refuse_poisoned()
        check_app(app)
        self.reclaim()
        skipped = app is not None and app[1] <= self.snapshot.superblock.apps.get(app[0], app[1] - 1)
        self._busy = True
        return Transaction(self, None if skipped else self.begin(), app)

    def begin(self, take: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None) -> Draft:
        """Return a draft of the next transaction; see `PageWriter` for `take`. Ends with `commit` or `abandon`."""
        txid, size = self.snapshot.txid + 1, self.snapshot.page_size
        self._draft = Draft(self.snapshot, self._reader, PageWriter(self._backend, self.space, size, txid, take))
        return self._draft

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Undo the open draft if what is done within fails, and refuse all further work if a write may have failed.

        Input that is refused and pages that turn out damaged are found before anything that counts is written.
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
        """End the open transaction, and drop its draft if that was not committed."""
        self._busy = False
        if self._draft is not None:
            self._draft.pages.roll_back()
            self._draft = None

    def commit(self, draft: Draft, app: App | None) -> Snapshot:
        """Make a draft the table's state; the caller has it guarded."""
        head = self.snapshot.superblock
        if app is not None:
            head = replace(head, apps={**head.apps, app[0]: app[1]})
            encode_superblock(head)  # refuses too many before anything is written
        snapshot = self._next(draft, head)
        draft.pages.settle()
        if snapshot.superblock.proof is None:
            self._backend.sync()
            write_superblock(self._backend, snapshot.superblock)
            self._backend.sync()
        else:
            self._commit_at_once(head, snapshot.superblock)
        self.space.hold(draft.pages.txid, draft.freed)
        self._state = snapshot, self.space
        self._draft = None
        return snapshot

    def _commit_at_once(self, before: Superblock, superblock: Superblock) -> None:
        """Make pages and superblock durable by one sync; the superblock says how to see that the pages are there."""
        try:
            write_superblock(self._backend, superblock)
            self._backend.sync()
        except StorageIOError:
            with contextlib.suppress(StorageIOError):  # the first failure is the one to report
                repeat_superblock(self._backend, before)  # what the system has in memory may never reach the disk
            raise
        repeat_superblock(self._backend, superblock)

    def cut(self) -> None:
        """Give back the free pages at the end of the file; the caller has it guarded."""
        self._backend.truncate(self.space.cut() * self.snapshot.page_size)
        self._backend.sync()

    def _next(self, draft: Draft, head: Superblock) -> Snapshot:
        """Write the inner nodes of a draft and return the state that it makes; `head` is that before it."""
        leaves, tree = draft.finish(self.snapshot.fill)
        entries, root = leaves.entries, tree.root
        superblock = replace(
            head,
            txid=draft.pages.txid,
            root_page=int(root.pages[0]) if len(root) else 0,
            root_checksum=int(root.checksums[0]) if len(root) else 0,
            height=tree.height,
            rows=draft.rows,
            leaves=len(entries),
            pages=_length(head, leaves, tree, draft.freed),
            version=FORMAT_VERSION,
            proof=draft.pages.proof if has_room_for_proof(head) else None,
        )
        return Snapshot(self.snapshot.path, superblock, self.snapshot.layout, entries, tree.levels)

    def _map_space(self, snapshot: Snapshot) -> FreeSpace:
        """Return the free pages: all that the newest commit does not reach, held back while older readers live."""
        head = snapshot.superblock
        space = FreeSpace(max(head.pages, -(-self._backend.size() // head.page_size)), pages_of(snapshot))
        if self._locks.oldest_claim(head.txid) is not None:
            space.hold_free(head.txid)
        return space

    def reclaim(self) -> bool:
        """Free what no reader needs any longer; say whether nobody reads an earlier commit than the newest."""
        oldest = self._locks.oldest_claim(self.snapshot.txid)
        self.space.reclaim(self.snapshot.txid if oldest is None else oldest)
        return oldest is None

    def _refuse_poisoned(self) -> None:
        if self._poison is not None:
            raise PoisonedHandleError(
                f"an earlier write to {self._backend.path} failed ({self._poison}), so its state on disk is not known; "
                "close the table and open it again: it will be at its last commit"
            ) from self._poison


class Transaction:
    """Changes that become one commit when the ``with`` block ends, or none if it ends by an exception.

    Attributes
    ----------
    skipped
        Whether the application committed this version before, so that nothing will be done.
    """

    def __init__(self, writer: Writer, draft: Draft | None, app: App | None) -> None:
        self._writer = writer
        self._draft = draft
        self._app = app
        self._counts = Counts()
        self._result: CommitResult | None = None
        self._ended = False
        self.skipped = draft is None

    def apply(
        self, upserts: Batch | None = None, deletes: Batch | None = None, *, inserts: Batch | None = None
    ) -> None:
        """Add changes; later ones see the earlier ones. See `storage.Table.apply` for the parameters.

        Raises
        ------
        InputError
            If the changes cannot be made. The whole transaction is then undone.
        """
        if self._ended:
            raise InputError("the transaction has ended; begin a new one")
        if self._draft is None:
            return
        try:
            with self._writer.guard():
                self._apply(self._draft, upserts, deletes, inserts)
        except BaseException:
            self._ended = True
            raise

    def _apply(self, draft: Draft, upserts: Batch | None, deletes: Batch | None, inserts: Batch | None) -> None:
        snapshot = self._writer.snapshot
        changes = prepare(snapshot.layout, upserts=upserts, deletes=deletes, inserts=inserts, unique=snapshot.unique)
        if changes:
            self._counts += draft.apply(changes)

    @property
    def result(self) -> CommitResult:
        """What the commit did; known when the ``with`` block has ended.

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
            self._writer.abandon()

    def _commit(self) -> CommitResult:
        draft, txid = self._draft, self._writer.snapshot.txid
        if draft is not None and (draft.changed or self._app is not None):
            with self._writer.guard():
                txid = self._writer.commit(draft, self._app).txid
        counts = self._counts
        return CommitResult(txid, counts.inserted, counts.updated, counts.deleted, self.skipped)
