"""Statistics of a table: its size, and its layout on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.filter.segments import FilterFile
from headrace.storage.read.lookup import WINDOW_BYTES
from headrace.storage.read.plan import plan_cost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.read.reader import PageReader
    from headrace.storage.tree.snapshot import Snapshot

__all__ = ["TableStats", "scan_cost", "table_stats"]


@dataclass(frozen=True, slots=True)
class TableStats:
    """Size and layout on disk of a table.

    Attributes
    ----------
    rows, leaves, pages
        Rows of the relation, leaf pages that hold them, pages of the file that the newest commit relies on.
    bytes
        Length of the file.
    height
        Levels of the tree, leaves included.
    page_size, fill, unique
        Options with which the table was built.
    txid
        Number of the newest transaction.
    index_bytes
        Bytes of the index in memory while the table is open.
    rows_per_leaf
        Average number of rows in a leaf.
    free_pages
        Pages of the file that the newest commit does not use.
    fragmentation
        Additional cost of reading all rows in key order, as a share of the cost after a load, by the costs of the
        disk: 0 after a load, 0.3 if reading costs 1.3 times as much. `Table.compact` resets it to 0.
    filter_bits, filter_bytes
        Average bits of the filter for each key, and bytes of its file; 0 without a filter.
    """

    rows: int
    leaves: int
    pages: int
    bytes: int
    height: int
    page_size: int
    fill: float
    unique: bool
    txid: int
    index_bytes: int
    rows_per_leaf: float
    free_pages: int
    fragmentation: float
    filter_bits: float = 0.0
    filter_bytes: int = 0


def table_stats(snapshot: Snapshot, reader: PageReader, used: int) -> TableStats:
    """Return the statistics of a snapshot that consists of `used` pages of the file."""
    rows_per_leaf = snapshot.rows / max(len(snapshot.entries), 1)
    filter_bits, filter_bytes = _filter_size(snapshot.path, rows_per_leaf)
    head, leaves, size = snapshot.superblock, len(snapshot.entries), reader.backend.size()
    ordered = scan_cost(reader, np.arange(leaves, dtype=np.int64))
    return TableStats(
        rows=head.rows,
        leaves=leaves,
        pages=head.pages,
        bytes=size,
        height=head.height,
        page_size=head.page_size,
        fill=head.fill,
        unique=head.unique,
        txid=head.txid,
        index_bytes=snapshot.index_nbytes,
        rows_per_leaf=rows_per_leaf,
        free_pages=max(size // head.page_size - used, 0),
        fragmentation=max(scan_cost(reader, snapshot.leaf_pages) / ordered - 1, 0.0) if leaves else 0.0,
        filter_bits=filter_bits,
        filter_bytes=filter_bytes,
    )


def _filter_size(path: str, rows_per_leaf: float) -> tuple[float, int]:
    made = FilterFile.open(path)
    if made is None:
        return 0.0, 0
    with made:
        return made.shape.bits(rows_per_leaf), made.nbytes


def scan_cost(reader: PageReader, pages: NDArray[np.int64]) -> float:
    """Return the seconds that reading pages in this order takes by the device's costs, window by window as a scan does.

    Parameters
    ----------
    reader
        Plans the reads.
    pages
        Page numbers of the leaves in key order.
    """
    step = max(WINDOW_BYTES // reader.page_size, 1)
    device = reader.device
    plans = (reader.plan(np.sort(pages[at : at + step])) for at in range(0, len(pages), step))
    return sum(plan_cost(plan, device.seek, device.transfer) for plan in plans)
