"""`Snapshot`: one committed, immutable state of a table, with its index. Reads no leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptionError, CorruptPageError
from headrace.storage.format.constants import FIRST_PAGE
from headrace.storage.format.keys import KeyCodec, Keys
from headrace.storage.format.layout import LeafLayout
from headrace.storage.format.metadata import metadata_pages, read_metadata
from headrace.storage.format.slots import read_superblock
from headrace.storage.tree.nodes import Entries, Index, read_index
from headrace.storage.tree.relocations import relocated_entries, relocated_leaves

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.superblock import Superblock
    from headrace.storage.tree.nodes import InnerLevel

__all__ = ["Snapshot", "open_snapshot", "pages_of", "root_entries"]


class Snapshot:
    """The relation at one transaction.

    Parameters
    ----------
    path
        Path of the table file.
    superblock
        Superblock of the commit.
    layout
        Physical columns of the leaves.
    index
        Leaf entries and inner nodes as the inner nodes have them.
    entries
        Leaf entries as they are now, in key order; by default made from the index and the relocation list.
    """

    __slots__ = ("__weakref__", "_entries", "index", "layout", "path", "superblock")

    def __init__(
        self, path: str, superblock: Superblock, layout: LeafLayout, index: Index, entries: Entries | None = None
    ) -> None:
        self.path = path
        self.superblock = superblock
        self.layout = layout
        self.index = index
        self._entries = entries

    @property
    def entries(self) -> Entries:
        """Leaf entries as they are now, in key order. Those of a large table are read when they are first used.

        Raises
        ------
        CorruptionError
            If they are not what was written.
        """
        if self._entries is None:
            entries = relocated_entries(self.index.written, self.superblock.relocations)
            _check_counts(self, len(entries), int(entries.rows.sum()))
            self._entries = entries
        return self._entries

    @property
    def txid(self) -> int:
        """Transaction id of the commit."""
        return self.superblock.txid

    @property
    def levels(self) -> tuple[InnerLevel, ...]:
        """The inner nodes that the entries were read from, root first."""
        return self.index.levels

    @property
    def schema(self) -> pa.Schema:
        """Schema of the relation, key columns included."""
        return self.layout.schema

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns, most significant first."""
        return self.layout.key

    @property
    def codec(self) -> KeyCodec:
        """Turns key columns into normalized keys and back."""
        return self.layout.codec

    @property
    def unique(self) -> bool:
        """Whether a key occurs only once."""
        return self.superblock.unique

    @property
    def page_size(self) -> int:
        """Bytes in a page."""
        return self.layout.page_size

    @property
    def fill(self) -> float:
        """Share of a leaf that a load fills."""
        return self.superblock.fill

    @property
    def rows(self) -> int:
        """Rows of the relation."""
        return self.superblock.rows

    @property
    def leaves(self) -> int:
        """Number of leaves."""
        return self.superblock.leaves

    @property
    def extent(self) -> int:
        """Pages on disk from the first leaf to the last, as the inner nodes have them."""
        summary = self.index.summary
        return summary.highest - summary.lowest + 1 if self.leaves else 0

    @property
    def in_key_order(self) -> bool:
        """Whether the leaves lie on disk in key order. No relocated leaf does."""
        return self.index.summary.in_key_order and not self.superblock.relocations

    @property
    def key_range(self) -> tuple[np.uint64, np.uint64]:
        """Leading words of the second separator and of the last; zeros if there is only one leaf."""
        return self.index.summary.ends

    @property
    def leaf_pages(self) -> NDArray[np.int64]:
        """int64[n], page numbers of the leaves in key order."""
        return self.entries.pages

    @property
    def leaf_rows(self) -> NDArray[np.int64]:
        """int64[n], rows of each leaf."""
        return self.entries.rows

    @property
    def leaf_checksums(self) -> NDArray[np.uint64]:
        """uint64[n], checksum of each leaf from its pointer."""
        return self.entries.checksums

    @property
    def separators(self) -> Keys:
        """A key between each leaf and the one before; the first is minus infinity."""
        return self.entries.separators

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index in memory."""
        return self.index.summary.nbytes + sum(level.nbytes for level in self.levels)

    def pointers(self, leaves: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the page numbers and checksums of leaves (ordinals, in any order)."""
        return self.leaf_pages[leaves], self.leaf_checksums[leaves]

    def locate(self, keys: Keys) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the first and the last leaf that may hold each key.

        Parameters
        ----------
        keys
            In any order; nearly sorted ones are found fastest.

        Returns
        -------
        first, last : int32[m]
            Ordinals of leaves, `first <= last`. More than one only for a key that spans leaves. A table without
            leaves gives -1 for both.
        """
        if self.leaves:
            return self.entries.locate(keys)
        none = np.full(len(keys), -1, dtype=np.int32)
        return none, none


def open_snapshot(
    backend: StorageBackend, superblock: Superblock | None = None, known: Snapshot | None = None
) -> Snapshot:
    """Read the index of a table.

    Parameters
    ----------
    backend
        Storage backend of the table file.
    superblock
        The commit to read; by default the newest.
    known
        Another commit of this file: inner nodes that are the same are not read again.

    Raises
    ------
    NotATableError
        If the file is not a table.
    CorruptionError
        If the file is damaged.
    """
    head = read_superblock(backend) if superblock is None else superblock
    if backend.size() < head.pages * head.page_size:
        raise CorruptionError(
            f"{backend.path} has {backend.size()} bytes, but {head.pages} pages of {head.page_size} belong to it: "
            "the file has been truncated; restore it or build it again"
        )
    if known is not None and _tree_of(known.superblock) == _tree_of(head):
        layout, index = known.layout, known.index
    else:
        layout, index = _read_index(backend, head)
    if head.relocations and relocated_leaves(head.relocations)[-1] >= index.summary.leaves:
        raise CorruptPageError(
            f"{backend.path}: the superblock relocates a leaf that the tree does not have; restore the file"
        )
    snapshot = Snapshot(backend.path, head, layout, index)
    if index.in_memory:
        _ = snapshot.entries  # are checked
    else:
        rows = head.rows if head.relocations else index.summary.rows
        _check_counts(snapshot, index.summary.leaves, rows)
    return snapshot


def _check_counts(snapshot: Snapshot, leaves: int, rows: int) -> None:
    head = snapshot.superblock
    if (leaves, rows) != (head.leaves, head.rows):
        raise CorruptPageError(
            f"{snapshot.path}: the tree has {leaves} leaves and {rows} rows, "
            f"the superblock says {head.leaves} and {head.rows}; restore the file or build it again"
        )


def _tree_of(head: Superblock) -> tuple[int, ...]:
    """Return the fields that identify metadata and inner nodes; the root's checksum covers all inner nodes."""
    return head.metadata_page, head.metadata_checksum, head.height, head.root_page, head.root_checksum


def _read_index(backend: StorageBackend, head: Superblock) -> tuple[LeafLayout, Index]:
    schema, key = read_metadata(
        backend, head.page_size, head.metadata_page, head.metadata_bytes, head.metadata_checksum
    )
    layout = LeafLayout(schema, key, head.page_size)
    return layout, read_index(backend, head.page_size, layout.codec.kind, root_entries(head, layout), head.height)


def root_entries(head: Superblock, layout: LeafLayout) -> Entries:
    """Return the superblock's pointer to the root as a level of one entry; no entry for an empty table.

    Its rows are those of the table. The root page has the same number only if no leaf is relocated.
    """
    if head.height == 0:
        return Entries.empty(layout.codec.kind)
    return Entries(
        np.array([head.root_page], dtype=np.int64),
        np.array([head.root_checksum], dtype=np.uint64),
        np.array([head.rows], dtype=np.int64),
        np.zeros(1, dtype=np.uint8),
        Keys.lowest(layout.codec.kind),
    )


def pages_of(snapshot: Snapshot) -> NDArray[np.int64]:
    """Return the numbers of all pages that a snapshot is made of, superblocks included."""
    head = snapshot.superblock
    count = metadata_pages(head.metadata_bytes, head.page_size)
    metadata = head.metadata_page + np.arange(count, dtype=np.int64)
    inner = [level.pages for level in snapshot.levels]
    return np.concatenate([np.arange(FIRST_PAGE, dtype=np.int64), metadata, *inner, snapshot.leaf_pages])
