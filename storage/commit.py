"""The writer of a table: changes become one atomic, durable commit, or nothing.

A commit by transaction `t` goes like this; `FORMAT.md` argues each crash point:

1. changed leaves and the inner nodes above them are written to free pages;
2. sync: the new pages are durable, and nothing points to them yet;
3. the superblock of `t` is written into slot ``t mod 2``; that of ``t - 1`` lies in the other slot, untouched;
4. sync: the commit is durable and may be acknowledged.

A commit of few pages leaves step 2 out: its superblock has a proof, by which it is seen that the pages are there. Once
it is durable it is repeated without the proof in the other slot; where the proof is short, only when the writer leaves.
One of few leaves writes no inner nodes either: its superblock lists these leaves with all that have moved before, until
the list is full.

Pages that `t` frees are used again by a later commit only, and only when no reader claims a snapshot before `t`.
A write or sync that fails leaves unknown bytes in free pages or in one slot; the writer then puts the superblock of
``t - 1`` in the place of one with a proof, and refuses to go on.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.draft import Draft
from headrace.storage.errors import CorruptionError, InputError, PoisonedHandleError, StorageIOError
from headrace.storage.few_rows import FewRows
from headrace.storage.filter_upkeep import FilterWriter, cut_filter
from headrace.storage.index import Index
from headrace.storage.inner import Placed, rewrite_inner
from headrace.storage.metadata import metadata_pages
from headrace.storage.moved import moved_entries, moved_leaves
from headrace.storage.moving import MovingHead
from headrace.storage.new_rows import WordColumns
from headrace.storage.page_writer import PageWriter
from headrace.storage.slots import commit_superblock, put_back, read_superblock, repeat_superblock
from headrace.storage.snapshot import Snapshot, open_snapshot, pages_of
from headrace.storage.space import FreeSpace
from headrace.storage.superblock import FORMAT_VERSION, MOVED_AT_ONCE, check_app
from headrace.storage.superblock_bytes import encode_superblock, fitted
from headrace.storage.transaction import CommitResult, Transaction, open_already

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numpy.typing import NDArray

    from headrace.storage.backend import StorageBackend
    from headrace.storage.changes import Batch
    from headrace.storage.locks import Locks
    from headrace.storage.merge import Counts
    from headrace.storage.new_rows import NewRows
    from headrace.storage.reader import PageReader
    from headrace.storage.superblock import Superblock
    from headrace.storage.transaction import App

__all__ = ["Writer"]

_MOST_HELD = 32  # pages for which nobody asks yet whether readers still need them


class _Guard:
    """Tells a writer what fails within."""

    __slots__ = ("_writer",)

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._writer.fail(error)


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
        self._guard = _Guard(self)
        self._filter: FilterWriter | None = None
        self._busy = False
        self._to_repeat = False
        self._state: tuple[Snapshot, FreeSpace] | None = None
        self._few: FewRows | None = None
        self._moving: MovingHead | None = None
        self.columns: WordColumns | None = None

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

    @property
    def _few_rows(self) -> FewRows:
        assert self._few is not None
        return self._few

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
        self._refuse_busy()
        self._locks.take_writer(wait)
        try:
            newest = read_superblock(self._backend)
            if self._state is None or self._state[0].txid != newest.txid:
                self._backend.sync()  # what is read may be the last words of a writer that died before its sync
                if newest.proof is not None:
                    repeat_superblock(self._backend, newest)
                known = None if self._state is None else self._state[0]
                snapshot = open_snapshot(self._backend, newest, known)
                space = self._map_space(snapshot)
                self._few = FewRows(self._backend, snapshot.layout)
                self.columns = WordColumns.of(snapshot.layout)
                self._state = snapshot, space  # the last step: who is interrupted before it begins anew
            self.open_filter()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let another writer in, once the superblock of the last commit is repeated."""
        if self._to_repeat and self._poison is None:
            with contextlib.suppress(StorageIOError):  # the commit is durable, and its proof tells so as well
                self._repeat()
        self._close_filter()
        self._locks.release_writer()

    def open_filter(self) -> None:
        """Keep up to date the filter that the table has now, if it has one, until the lock is released."""
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
        if deletes is None and inserts is None and self.columns is not None:
            result = self._upsert_few(self.columns, upserts, app)
            if result is not None:
                return result
        with self.transaction(app=app) as transaction:
            transaction.apply(upserts, deletes, inserts=inserts)
        return transaction.result

    def _upsert_few(self, columns: WordColumns, upserts: Batch | None, app: App | None) -> CommitResult | None:
        """Make a commit of few upserts without a transaction, the shortest way; return None if they need another."""
        if self._start(app):
            return None
        with self._guard:
            rows = columns.read(upserts)
            counts = None if rows is None else self.change_few(rows)
            if counts is None:
                return None
            self.commit_few(app)
        return CommitResult(self.snapshot.txid, counts.inserted, counts.updated, counts.deleted)

    def transaction(self, *, app: App | None = None) -> Transaction:
        """Begin a commit of several changes. See `headrace.storage.Table.transaction`.

        Raises
        ------
        PoisonedHandleError
            If a write or sync failed before.
        InputError
            If `app` is not a name and a version, or a transaction is open.
        """
        skipped = self._start(app)
        self._busy = True
        return Transaction(self, app, skipped=skipped)

    def _start(self, app: App | None) -> bool:
        """Get ready for a commit; return whether its application has reached this version already."""
        self._refuse_poisoned()
        self._refuse_busy()
        if self.space.held >= _MOST_HELD:
            self.reclaim()
        check_app(app)
        return app is not None and app[1] <= self.snapshot.superblock.apps.get(app[0], app[1] - 1)

    def begin(self, take: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None) -> Draft:
        """Return a draft of the next transaction; see `PageWriter` for `take`. Ends with `commit` or `abandon`."""
        self._draft = Draft(self.snapshot, self._reader, self._pages(take))
        return self._draft

    def change_few(self, rows: NewRows) -> Counts | None:
        """Make changes of few leaves, for `commit_few`, and return what they are; None if a draft has to make them.

        Raises as `Draft.apply` does.
        """
        return self._few_rows.change(self._head(), self.snapshot.index.written, rows)

    def _pages(self, take: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None) -> PageWriter:
        snapshot = self.snapshot
        return PageWriter(self._backend, self.space, snapshot.page_size, snapshot.txid + 1, take, self._filter)

    def guard(self) -> _Guard:
        """Undo the open draft if what is done within fails, and refuse all further work if a write may have failed.

        Input that is refused and pages that turn out damaged are found before anything that counts is written.
        """
        self._refuse_poisoned()
        return self._guard

    def fail(self, error: BaseException) -> None:
        """Undo the open draft, or refuse all further work from now on; see `guard`."""
        if isinstance(error, InputError | CorruptionError):
            self.abandon()
            self._moving = None
        else:
            self._poison = error

    def abandon(self) -> None:
        """End the open transaction, and drop its draft if that was not committed."""
        self._busy = False
        if self._draft is not None:
            self._draft.pages.roll_back()
        self._draft = None

    def commit(self, draft: Draft, app: App | None, *, anew: bool = False) -> None:
        """Make a draft the table's state, with inner nodes written `anew` in any case; the caller has it guarded."""
        head, moved, pages = self._head(app), draft.moved, draft.pages
        if moved is not None and not anew and head.has_room(len(moved)):
            head.add(moved, draft.entries.take(moved))
            pages.settle()
            proof = pages.proof
            copy = head.follow(draft.rows, pages.end, proof)
            self._publish(copy, self.snapshot.index, draft.freed, proven=proof is not None)
        else:
            leaves = draft.leaves.with_changed(moved_leaves(self.snapshot.superblock.moved))
            self._publish_anew(app, leaves, pages, draft.freed)

    def commit_few(self, app: App | None) -> None:
        """Make the last changes of few leaves the table's state. The caller has it guarded."""
        head, few, before = self._head(app), self._few_rows, self.snapshot
        if head.has_room(few.count):
            try:
                few.publish(self.space, head)
            except StorageIOError:
                put_back(self._backend, before)
                raise
            if self._filter is not None:
                self._filter.put(few.pages, few.numbers)
            self._stand_at(Snapshot(before.path, head.encoded(), before.layout, before.index), few.freed, proven=True)
        else:
            pages = self._pages()
            numbers = pages.place(few.hints)
            few.seal(numbers, head)
            pages.put(few.pages, numbers, few.checksums)
            entries = moved_entries(before.index.written, head.listed)
            self._publish_anew(app, Placed(entries, moved_leaves(head.listed)), pages, few.freed)

    def _head(self, app: App | None = None) -> MovingHead:
        """Return the superblock of the newest commit, to become that of the next, an application's version in it."""
        if app is not None or self._moving is None or self._moving.txid != self.snapshot.txid:
            self._moving = MovingHead(self._with_app(app))
        return self._moving

    def _with_app(self, app: App | None) -> Superblock:
        """Return the superblock of the newest commit, an application's new version in it."""
        head = self.snapshot.superblock
        return head if app is None else replace(head, apps={**head.apps, app[0]: app[1]})

    def _publish_anew(self, app: App | None, leaves: Placed, pages: PageWriter, freed: NDArray[np.int64]) -> None:
        """Write the inner nodes above all leaves that changed or have moved before, and publish a state with them."""
        snapshot, head = self.snapshot, self._with_app(app)
        tree = rewrite_inner(leaves, snapshot.levels, snapshot.fill, pages)
        end = head.metadata_page + metadata_pages(head.metadata_bytes, head.page_size)
        used = [leaves.entries.pages, *(level.pages for level in tree.levels)]
        page, checksum, rows = tree.root_entry
        pages.settle()
        superblock = replace(
            head, version=FORMAT_VERSION, txid=pages.txid, root_page=page, root_checksum=checksum, rows=rows,
            height=tree.height, leaves=len(leaves), pages=max(end, *(int(pages.max(initial=0)) + 1 for pages in used)),
            moved=b"", proof=pages.proof,
        )  # fmt: skip
        superblock, index = fitted(superblock), Index(leaves.entries, tree.levels)
        freed, proof = np.concatenate([freed, tree.freed]), superblock.proof
        self._publish(encode_superblock(superblock), index, freed, proven=proof is not None)
        if proof is not None and len(proof.pages) > MOVED_AT_ONCE:
            self._repeat()

    def _publish(self, copy: bytes, index: Index, freed: NDArray[np.int64], *, proven: bool) -> None:
        """Make durable what was written, and let it be the table's state, which no longer has the pages `freed`.

        The superblock comes as a `copy` of it, which has a proof if it is `proven`.
        """
        before = self.snapshot
        after = Snapshot(before.path, copy, before.layout, index)
        if not proven:
            self._backend.sync()
        try:
            commit_superblock(self._backend, after, copy)
        except StorageIOError:
            if proven:
                put_back(self._backend, before)
            raise
        self._stand_at(after, freed, proven=proven)

    def _stand_at(self, after: Snapshot, freed: NDArray[np.int64], *, proven: bool) -> None:
        """Let a durable commit be the table's state."""
        self.space.hold(after.txid, freed)
        self._state = after, self.space
        self._draft = None
        self._to_repeat = proven

    def _repeat(self) -> None:
        """Repeat the superblock of the newest commit, so that nobody needs to look at the pages of its proof.

        The next commit overwrites what is repeated, so where the proof is short it is left until the writer leaves.
        """
        repeat_superblock(self._backend, self.snapshot.superblock)
        self._to_repeat = False

    def cut(self) -> None:
        """Give back the free pages at the end of the file; the caller has it guarded."""
        pages = self.space.cut()
        self._backend.truncate(pages * self.snapshot.page_size)
        self._backend.sync()
        cut_filter(self._backend.path, pages)

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

    def _refuse_busy(self) -> None:
        if self._busy:
            raise open_already()

    def _refuse_poisoned(self) -> None:
        if self._poison is not None:
            raise PoisonedHandleError(
                f"an earlier write to {self._backend.path} failed ({self._poison}), so its state on disk is not known; "
                "close the table and open it again: it will be at its last commit"
            ) from self._poison
