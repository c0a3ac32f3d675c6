"""What SSIJ sets apart before the first tuple: the index, the buffer that pages are read into, and the workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.joins._relation import in_key_order
from headrace.joins.ssij.direct_lookup import DirectLookup
from headrace.joins.ssij.phase_estimate import PhaseEstimate
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read import PageCache, ReadQueue
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from headrace.joins.memory import Component, MemoryBudget
    from headrace.storage.read import DeviceModel, PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["BUFFERS", "leaf_maps_nbytes", "least_memory", "parts_to_read_into", "reserve"]

BUFFERS: tuple[Component, ...] = ("input_buffer", "stream_buffer", "inverted_index")
"""What has a page at least, and grows at the expense of the page cache."""

_LEAF_MAPS = 4 + 4  # of each leaf: frame, demand
_WORKSPACE_PAGES = 2
_WORKSPACE_SHARE = 8
_WORKSPACE_MOST = 48 * 2**20
_READ_PAGES = 2  # one may be read into while the other is joined
_READ_SHARE = 6
_READ_LEAST = 64  # pages, or five eighths of what there is: below that each step costs more than its pages
_READ_TIGHT = 5
_READ_MOST = 512
_BLOCK_SECONDS = 0.5e-3  # what joining a block costs, whatever it holds
_PAGE_SECONDS = 5e-6  # and each page in it


def reserve(
    budget: MemoryBudget, snapshot: Snapshot, reader: PageReader, frame_maps: int, *, direct: bool
) -> tuple[int, int]:
    """Charge what never changes.

    Parameters
    ----------
    budget
        The account.
    snapshot, reader
        The relation.
    frame_maps
        Bytes that a frame of the page cache needs beside its page.
    direct
        Whether there will be direct look-ups.

    Returns
    -------
    pages, workspace
        Pages to read into, and bytes for scratch arrays and output.

    Raises
    ------
    MemoryBudgetError
        If the limit is below the least that works; the message says how much that is.
    """
    page, limit = snapshot.page_size, budget.limit
    needed = least_memory(snapshot, reader, frame_maps, direct=direct)
    if needed > limit:
        raise MemoryBudgetError(
            f"the join needs at least {format_size(needed)} ({needed} bytes) for the index and a page for each "
            f"buffer, and has {format_size(limit)}"
        )
    spare = limit - needed
    pages = _READ_PAGES + _pages_to_read_into(spare // page)
    workspace = _WORKSPACE_PAGES * page + min(spare // _WORKSPACE_SHARE, _WORKSPACE_MOST)
    budget.charge("index", snapshot.index_nbytes + leaf_maps_nbytes(snapshot, direct=direct))
    budget.charge("read_buffer", _reading_nbytes(reader) + pages * page)
    budget.charge("statistics", PhaseEstimate.nbytes)
    budget.charge("workspace", workspace)
    for component in BUFFERS:
        budget.charge(component, page)
    return pages, workspace


def least_memory(snapshot: Snapshot, reader: PageReader, frame_maps: int, *, direct: bool) -> int:
    """Return the least memory that works: the index, a page for each buffer, two to read into, one cached, scratch."""
    pages = len(BUFFERS) + _READ_PAGES + _WORKSPACE_PAGES
    return (
        snapshot.index_nbytes
        + leaf_maps_nbytes(snapshot, direct=direct)
        + PageCache.map_nbytes(0, 0)
        + frame_maps
        + _reading_nbytes(reader)
        + PhaseEstimate.nbytes
        + pages * snapshot.page_size
    )


def leaf_maps_nbytes(snapshot: Snapshot, *, direct: bool) -> int:
    """Return the bytes of what is known of each leaf: frame, demand, place on disk, and how keys find it directly."""
    maps = len(snapshot.leaf_pages) * (_LEAF_MAPS + (0 if in_key_order(snapshot) else 4))
    return maps + (DirectLookup.leaves_nbytes(snapshot) if direct else 0)


def parts_to_read_into(pages: int, device: DeviceModel) -> int:
    """Return how many parts the buffer for so many pages has: in two, one is read into while the other is joined.

    Two parts hide the time to join what the buffer holds, and cost a seek more to fill it. So disks that seek in
    milliseconds have it whole.
    """
    return 2 if device.seek < _BLOCK_SECONDS + _PAGE_SECONDS * pages else 1


def _pages_to_read_into(spare: int) -> int:
    """Return how many of the spare pages are for reading."""
    return min(_READ_MOST, _READ_TIGHT * spare // 8, max(_READ_LEAST, spare // _READ_SHARE))


def _reading_nbytes(reader: PageReader) -> int:
    """Return what reading takes beside the pages: the queue, and vectors if threads read instead."""
    return ReadQueue.nbytes + reader.nbytes_at(1) - reader.page_size
