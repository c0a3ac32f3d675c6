"""Reservations before the first tuple: the index, the read buffer, and the workspace.

The index is in memory with all its entries, in maps with an element for each leaf, or, if these do not fit, paged: then
inner nodes are read when they are needed, and only cached and wanted leaves are mapped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.joins.ssij.cost import PhaseEstimate
from headrace.joins.ssij.memory.direct_lookup import DirectLookup
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read import SPARSE_NBYTES, PageCache, PagedSnapshot, ReadQueue
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.joins.memory import Component, MemoryBudget
    from headrace.storage.read import DeviceModel, PageReader, ReadReport
    from headrace.storage.tree import Snapshot

__all__ = [
    "BUFFERS",
    "FRAME_MAPS",
    "fitting_snapshot",
    "frame_maps_nbytes",
    "leaf_maps_nbytes",
    "least_memory",
    "parts_to_read_into",
    "reserve",
]

BUFFERS: tuple[Component, ...] = ("input_buffer", "stream_buffer", "inverted_index")
"""Components that have at least a page each, and grow at the expense of the page cache."""

FRAME_MAPS = 16 + 17
"""Bytes for each frame: maps of the page cache, and the choice of resident pages."""
_LEAF_MAPS = 4 + 4  # per leaf: frame, demand
_NODES_LEAST = 2
_NODES_SHARE = 16  # of the memory beyond the least, what inner nodes have if they do not all fit
_WORKSPACE_PAGES = 2
_WORKSPACE_SHARE = 8
_RANGES_SHARE = 4  # up to so many bytes: both ends of ranges are in it, and steps of few tuples cost more than reads
_RANGES_MOST = 2 * 2**20
_WORKSPACE_MOST = 48 * 2**20
_READ_PAGES = 2  # one can be read into while the other is joined
_READ_SHARE = 6
_READ_TIGHT = 3
_READ_FEW, _READ_MOST = 64, 512  # pages; of fewer, half are not worth a block of their own
_BLOCK_SECONDS = 0.5e-3  # cost of joining a block, whatever it holds
_PAGE_SECONDS = 5e-6  # cost of each page in it


def reserve(
    budget: MemoryBudget,
    snapshot: Snapshot,
    reader: PageReader,
    frame_maps: int,
    *,
    direct: bool,
    ranges: bool = False,
    hurried: bool = False,
) -> tuple[int, int]:
    """Charge what never changes.

    Parameters
    ----------
    budget
        Budget of the operator; at least `least_memory`.
    snapshot, reader
        Snapshot of the relation and reader of its pages.
    frame_maps
        Bytes for each frame of the page cache beside its page.
    direct
        Whether there will be direct look-ups.
    ranges
        Whether ranges of keys are searched.
    hurried
        Whether there are deadlines, so that scans must be short.

    Returns
    -------
    pages, workspace
        Pages in the read buffer, and bytes for scratch arrays and output.
    """
    page, limit = snapshot.page_size, budget.limit
    spare = limit - least_memory(snapshot, reader, frame_maps, direct=direct)
    assert spare >= 0, (limit, spare)
    workspace = min(spare // _WORKSPACE_SHARE, _WORKSPACE_MOST)
    if ranges and not direct:
        workspace = max(workspace, min(spare // _RANGES_SHARE, _RANGES_MOST))
    pages = _READ_PAGES + _pages_to_read_into(spare // page, reader.device, hurried=hurried)
    workspace += _WORKSPACE_PAGES * page
    budget.charge("index", snapshot.index_nbytes + leaf_maps_nbytes(snapshot, direct=direct))
    budget.charge("read_buffer", _reading_nbytes(reader) + pages * page)
    budget.charge("statistics", PhaseEstimate.nbytes)
    budget.charge("workspace", workspace)
    for component in BUFFERS:
        budget.charge(component, page)
    return pages, workspace


def least_memory(snapshot: Snapshot, reader: PageReader, frame_maps: int, *, direct: bool) -> int:
    """Return the least memory that works: index, buffers, workspace, and two pages to read into."""
    index = snapshot.index_nbytes + leaf_maps_nbytes(snapshot, direct=direct)
    return index + _least_beside_index(snapshot, reader, frame_maps)


def _least_beside_index(snapshot: Snapshot, reader: PageReader, frame_maps: int) -> int:
    pages = len(BUFFERS) + _READ_PAGES + _WORKSPACE_PAGES
    return (
        PageCache.map_nbytes(0, 0)
        + frame_maps
        + _reading_nbytes(reader)
        + PhaseEstimate.nbytes
        + pages * snapshot.page_size
    )


def fitting_snapshot(
    whole: Snapshot, reader: PageReader, limit: int, index: str, note: Callable[[ReadReport], None]
) -> Snapshot:
    """Return the snapshot with all entries of its index in memory, or one that pages its inner nodes.

    Parameters
    ----------
    whole
        Snapshot of the relation.
    reader
        Reader of its pages.
    limit
        Memory of the operator.
    index
        ``"whole"`` or ``"paged"``; ``"fitting"`` for all entries if they fit.
    note
        Called with a report of all reads of inner nodes.

    Raises
    ------
    MemoryBudgetError
        If the limit is below the least that works. The message says how much that is.
    """
    needed = least_memory(whole, reader, FRAME_MAPS, direct=False)
    paged = 0 if index == "whole" or not whole.levels else _least_paged(whole, reader)
    if paged and (index == "paged" or needed > limit):
        if paged <= limit:
            more = (limit - paged) // _NODES_SHARE // (whole.page_size + FRAME_MAPS + SPARSE_NBYTES)
            return PagedSnapshot(whole, reader, min(len(whole.levels[-1].pages), _NODES_LEAST + more), note)
        needed = paged if index == "paged" else min(paged, needed)
    if needed > limit:
        error = MemoryBudgetError(
            f"the join needs at least {format_size(needed)} ({needed} bytes) for the index and a page for each "
            f"buffer, and has {format_size(limit)}"
        )
        error.least = needed
        raise error
    return whole


def _least_paged(whole: Snapshot, reader: PageReader) -> int:
    """Return the least memory for a snapshot that pages its inner nodes."""
    return PagedSnapshot.nbytes(whole, _NODES_LEAST) + _least_beside_index(whole, reader, FRAME_MAPS + SPARSE_NBYTES)


def frame_maps_nbytes(snapshot: Snapshot) -> int:
    """Return the bytes for each frame of the page cache beside its page, without direct look-ups."""
    return FRAME_MAPS + (SPARSE_NBYTES if isinstance(snapshot, PagedSnapshot) else 0)


def leaf_maps_nbytes(snapshot: Snapshot, *, direct: bool) -> int:
    """Return the bytes of what is known of each leaf: frame, demand, place on disk, and key range."""
    if isinstance(snapshot, PagedSnapshot):
        return 0
    maps = snapshot.leaves * (_LEAF_MAPS + (0 if snapshot.in_key_order else 4))
    return maps + (DirectLookup.leaves_nbytes(snapshot) if direct else 0)


def parts_to_read_into(pages: int, device: DeviceModel) -> int:
    """Return how many parts a read buffer of this size has: with two, one is read into while the other is joined.

    Two parts hide the time to join what the buffer holds, and cost one more seek to fill it. So disks that seek in
    milliseconds have one part. So does a buffer of few pages, where each block costs more than its pages.
    """
    if pages < _READ_FEW:
        return 1
    return 2 if device.seek < _BLOCK_SECONDS + _PAGE_SECONDS * pages else 1


def _pages_to_read_into(spare: int, device: DeviceModel, *, hurried: bool) -> int:
    """Return how many of the spare pages go to the read buffer: a sixth, or where that is little, up to 64 pages.

    Without deadlines, and if the buffer has one part, it is as large as gives scans the highest rate. A scan completes
    the tuples that wait in the other pages, and each of its blocks costs as much as `gap` pages beside those that it
    has. So with a buffer of b pages the rate is proportional to ``(spare - b) * b / (b + gap)``.
    """
    share = spare // _READ_SHARE
    if share >= _READ_FEW:
        return min(share, _READ_MOST)
    most = min(_READ_FEW, _READ_TIGHT * spare // 8)
    if hurried or parts_to_read_into(_READ_PAGES + most, device) > 1:
        return most
    gap = (device.seek + _BLOCK_SECONDS) / (device.transfer + _PAGE_SECONDS)
    return min(most, int(math.sqrt(gap * (gap + spare)) - gap))


def _reading_nbytes(reader: PageReader) -> int:
    """Return what reading takes beside the pages: the queue, and vectors if threads read instead."""
    return ReadQueue.nbytes + reader.nbytes_at(1) - reader.page_size
