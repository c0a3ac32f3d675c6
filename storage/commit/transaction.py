"""`Transaction`: changes of rows that become one commit. `writer` makes the commit durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from headrace.storage.commit.changes import prepare
from headrace.storage.commit.merge import Counts
from headrace.storage.errors import InputError

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.storage.commit.changes import Batch
    from headrace.storage.commit.draft import Draft
    from headrace.storage.commit.writer import Writer

__all__ = ["App", "CommitResult", "Transaction", "open_already"]

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
        try:
            with self._writer.guard():
                self._apply(upserts, deletes, inserts)
        except BaseException:
            self._ended = True
            raise

    def _apply(self, upserts: Batch | None, deletes: Batch | None, inserts: Batch | None) -> None:
        snapshot = self._writer.snapshot
        changes = prepare(snapshot.layout, upserts=upserts, deletes=deletes, inserts=inserts, unique=snapshot.unique)
        if changes:
            self._counts = self._counts.plus(self._drafted().apply(changes))

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
