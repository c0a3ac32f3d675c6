"""The stored side of a join: a table, or one snapshot of it with a reader of its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from joins.errors import JoinInputError, JoinStateError
from storage.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.reader import PageReader

__all__ = ["Relation", "TableLike", "affordable_scan", "open_relation"]

_VECTOR_SHARE = 16


@runtime_checkable
class TableLike(Protocol):
    """What a join needs of `storage.Table`."""

    def snapshot(self) -> Snapshot:
        """Return the relation as it is now."""
        ...

    def reader(self) -> PageReader:
        """Return a reader of the table's pages."""
        ...

    def refresh(self) -> Any:
        """Move on to the newest commit."""
        ...

    @property
    def apply(self) -> Callable[..., Any]:
        """Commits changes; see `storage.Table.apply`."""
        ...


@dataclass(frozen=True, slots=True)
class Relation:
    """A snapshot, a reader of its pages, and the table that both come from, if it is known.

    Attributes
    ----------
    given
        The reader that the user gave, which is used in the place of the table's.
    """

    snapshot: Snapshot
    reader: PageReader
    table: TableLike | None = None
    given: PageReader | None = None

    def newest(self) -> Relation:
        """Return the relation at its newest commit.

        Raises
        ------
        JoinStateError
            If the operator was given a snapshot, which never changes, or the table has become another one.
        """
        table = self.changeable()
        table.refresh()
        snapshot = table.snapshot()
        if (snapshot.schema, snapshot.key, snapshot.page_size) != (
            self.snapshot.schema, self.snapshot.key, self.snapshot.page_size
        ):  # fmt: skip
            raise JoinStateError(
                f"the table {snapshot.path} was replaced by one with other columns, key or page size; make a new join"
            )
        return Relation(snapshot, self.given or table.reader(), table, self.given)

    def changeable(self) -> TableLike:
        """Return the table.

        Raises
        ------
        JoinStateError
            If the operator was given a snapshot, which never changes.
        """
        if self.table is None:
            raise JoinStateError("the join was made over a snapshot, which never changes; make it over the table")
        return self.table


def open_relation(source: TableLike | Snapshot, reader: PageReader | None) -> Relation:
    """Return the relation that an operator was given.

    Raises
    ------
    JoinInputError
        If a snapshot comes without a reader, or what is given is neither a table nor a snapshot.
    """
    if isinstance(source, Snapshot):
        if reader is None:
            raise JoinInputError("a join over a snapshot needs `reader`, which reads its pages; or give it the table")
        return Relation(source, reader, given=reader)
    _refuse_other(source)
    return Relation(source.snapshot(), reader or source.reader(), source, reader)


def _refuse_other(source: object) -> None:
    if not isinstance(source, TableLike):
        raise JoinInputError(
            f"a join is made over a table or a snapshot of one, not over {type(source).__name__}; open one with "
            "storage.Table.open"
        )


def affordable_scan(reader: PageReader, max_scan: int, spare: int) -> int:
    """Return the most pages in a read, up to `max_scan`, whose bookkeeping fits in a share of the spare memory."""
    per_page = reader.nbytes_at(1) - reader.nbytes_at(0)
    return min(max_scan, 1 + spare // _VECTOR_SHARE // per_page)
