"""The stored side of a join: a table, or a snapshot of one with a reader of its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from headrace.joins.errors import JoinInputError, JoinStateError
from headrace.storage.read import PageReader
from headrace.storage.tree import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.storage.read import DeviceModel

__all__ = [
    "Relation",
    "TableLike",
    "affordable_scan",
    "disk_order",
    "open_relation",
    "unchanged_leaves",
]

_VECTOR_SHARE = 16


@runtime_checkable
class TableLike(Protocol):
    """What a join needs of `headrace.storage.Table`."""

    def snapshot(self) -> Snapshot:
        """Return the current snapshot."""
        ...

    def reader(self) -> PageReader:
        """Return a reader of the table's pages."""
        ...

    def refresh(self) -> Any:
        """Move on to the newest commit."""
        ...

    @property
    def apply(self) -> Callable[..., Any]:
        """Commit changes. See `headrace.storage.Table.apply`."""
        ...


@dataclass(frozen=True, slots=True)
class Relation:
    """A snapshot, a reader of its pages, and the table that both come from, if known.

    Attributes
    ----------
    snapshot
        Snapshot that is joined with.
    reader
        Reader of its pages.
    table
        Table of the snapshot; None if the operator was given a snapshot.
    given
        Reader that the user gave, which replaces the table's.
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
            If the operator was given a snapshot, or the table was replaced by another one.
        """
        table = self.changeable()
        table.refresh()
        snapshot = table.snapshot()
        if (snapshot.schema, snapshot.key, snapshot.page_size) != (
            self.snapshot.schema, self.snapshot.key, self.snapshot.page_size
        ):  # fmt: skip
            raise JoinStateError(
                f"the table {snapshot.path} was replaced by one with other columns, key, or page size; make a new join"
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
            raise JoinStateError("the join was made over a snapshot, which never changes; pass the table instead")
        return self.table


def open_relation(source: TableLike | Snapshot, reader: PageReader | None) -> Relation:
    """Return the relation that an operator was given.

    Raises
    ------
    JoinInputError
        If a snapshot comes without a reader, or `source` is neither a table nor a snapshot, or `reader` is no reader of
        such pages.
    """
    if isinstance(source, Snapshot):
        if reader is None:
            raise JoinInputError("a join over a snapshot needs `reader`, a reader of its pages; pass one, or the table")
        return Relation(source, _checked(reader, source), given=reader)
    _refuse_other(source)
    snapshot = source.snapshot()
    given = source.reader() if reader is None else _checked(reader, snapshot)
    return Relation(snapshot, given, source, reader)


def _checked(reader: object, snapshot: Snapshot) -> PageReader:
    """Return the reader that an operator was given."""
    if not isinstance(reader, PageReader):
        raise JoinInputError(
            f"`reader` must be a reader of the table's pages, as `Table.reader()` returns one, not {reader!r}"
        )
    if reader.page_size != snapshot.page_size:
        raise JoinInputError(
            f"`reader` reads pages of {reader.page_size} bytes, and those of {snapshot.path} have "
            f"{snapshot.page_size}; pass a reader of that table"
        )
    return reader


def _refuse_other(source: object) -> None:
    if not isinstance(source, TableLike):
        raise JoinInputError(
            f"a join works over a table or a snapshot of one, not over {type(source).__name__}; open one with "
            "headrace.storage.Table.open"
        )


def affordable_scan(reader: PageReader, max_scan: int, spare: int) -> int:
    """Return the most pages in a read, up to `max_scan`, whose bookkeeping fits in a share of `spare` bytes."""
    per_page = reader.nbytes_at(1) - reader.nbytes_at(0)
    return min(max_scan, 1 + spare // _VECTOR_SHARE // per_page)


def disk_order(snapshot: Snapshot) -> NDArray[np.int32]:
    """Return the leaves in disk order; an empty array if that is key order."""
    if snapshot.in_key_order:
        return np.empty(0, dtype=np.int32)
    return np.argsort(snapshot.leaf_pages).astype(np.int32)


def scan_seconds(snapshot: Snapshot, device: DeviceModel, most: int) -> float:
    """Return the cost in seconds of reading all leaves and the gaps between them, `most` pages a read."""
    pages = snapshot.extent
    if pages == 0:
        return 0.0
    return device.cost(-(-pages // most), pages)


def unchanged_leaves(old: Snapshot, new: Snapshot) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the ordinals, in both snapshots, of leaves whose page and checksum are the same."""
    _, was, now = np.intersect1d(old.leaf_pages, new.leaf_pages, assume_unique=True, return_indices=True)
    same = old.leaf_checksums[was] == new.leaf_checksums[now]
    return was[same], now[same]
