"""Memory of SSIJ: the account, the page cache that fills what the others leave, and the buffers.

The division is dynamic (the paper's section IV-A). Stream tuples that need room take the frame of the page with the
smallest utility, and a join phase gives back to pages what is free. Only the read buffer has a size of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.input_buffer import InputBuffer
from headrace.joins.relation import disk_order, unchanged_leaves
from headrace.joins.ssij.memory import _index_kernels
from headrace.joins.ssij.memory.direct_lookup import DirectLookup
from headrace.joins.ssij.memory.page_ranges import PageRanges
from headrace.joins.ssij.memory.reservation import (
    BUFFERS,
    frame_maps_nbytes,
    leaf_maps_nbytes,
    least_memory,
    parts_to_read_into,
    reserve,
)
from headrace.joins.ssij.memory.stream_buffer import LEAF_RUN_NBYTES, StreamBuffer
from headrace.joins.ssij.memory.tiers import Tiers
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.read import LeafMap, PageCache, PagedSnapshot, page_buffer, values_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.deadlines import Arrivals, Deadlines
    from headrace.joins.emitter import Emitter
    from headrace.joins.input_buffer import DeferredSlice
    from headrace.joins.memory import Component, MemoryBudget
    from headrace.joins.ssij.memory.stream_buffer import Chunk
    from headrace.joins.ssij.options import SSIJOptions
    from headrace.joins.stats import Counters
    from headrace.storage.read import DeviceModel, PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["ReadBuffer", "Store"]

_FRAMES_TO_GROW = 1024
_ORDER_NBYTES = 64  # per leaf that is ordered by its page: page and checksum, order, and the search for them
_NO_LEAVES = np.empty(0, dtype=np.int32)
_SCRATCH_NBYTES = 96  # per tuple: positions, keys twice, leaves, frames, rows and counts
_DIRECT_SCRATCH_NBYTES = 40  # where only waiting tuples are sorted: leaf and frame, and then places or rows
_ROW_TIER_NBYTES = 24  # where nothing waits
_ROOM_SHARE = 3 / 8  # of more memory, at least for tuples: the workspace takes a quarter, the read buffer 3/8
_NEARLY_ALL = 4 / 3  # pages to read for each that tuples wait for, where one scan fills the cache


@dataclass(frozen=True, slots=True)
class ReadBuffer:
    """Frames that the pages of a join phase are read into.

    Attributes
    ----------
    frames : uint8[pages * page size + slack]
        The frames.
    pages
        Number of frames; at least two.
    parts
        Two, so that a block is read while the one before is joined; one where longer reads are worth more.
    """

    frames: NDArray[np.uint8]
    pages: int
    parts: int

    @property
    def block(self) -> int:
        """Most pages in a block."""
        return self.pages // self.parts


class Store:
    """The account and everything in it.

    Parameters
    ----------
    snapshot
        Snapshot of the relation, as `reservation.fitting_snapshot` returned it.
    reader
        Reader of its pages.
    budget
        Account to which nothing is charged yet.
    options
        Options of the operator.
    counters
        Counters of evictions.
    columns
        Relation columns of the results.
    equality
        Whether keys are looked up, not ranges of keys. Only then can there be tiers.
    nearest
        Whether the one row nearest to a key is looked up. Like equality it allows direct look-ups.
    deadlines
        How long tuples may wait.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        reader: PageReader,
        budget: MemoryBudget,
        options: SSIJOptions,
        counters: Counters,
        columns: Sequence[str],
        *,
        equality: bool,
        nearest: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.budget = budget
        self.newest_first = options.newest_first
        self.plan_reads = options.planner
        self._deadlines = deadlines
        self.input = InputBuffer(deadlines)
        self.paged = isinstance(snapshot, PagedSnapshot)
        self._counters = counters
        self._device = reader.device
        self._pins = 0
        self._queued = 0
        self._page = snapshot.page_size
        self._order_by_disk()
        leaves = None if self.paged else snapshot.leaves
        self._max_scan = options.max_scan
        frame_maps = frame_maps_nbytes(snapshot)
        spare = budget.limit - least_memory(snapshot, reader, frame_maps, direct=False)
        direct = (equality or nearest) and not self.paged and DirectLookup.possible(snapshot, columns, spare)
        self._frame_maps = frame_maps + (DirectLookup.frame_nbytes(snapshot, columns) if direct else 0)
        hurried = deadlines is not None and deadlines.any
        pages, self.workspace = reserve(
            budget, snapshot, reader, self._frame_maps, direct=direct, ranges=not equality, hurried=hurried
        )
        self.read_buffer = ReadBuffer(page_buffer(pages, self._page), pages, parts_to_read_into(pages, reader.device))
        self.cache = PageCache(self._frames_max(), self._page, leaves, options.policy())
        self._fixed, self._cache_share = options.cache_share is not None, options.cache_share or 0.0
        self.cache.resize(self._reserved_frames(self._cache_share))
        self.direct = DirectLookup(snapshot, columns, self.cache.frames_max) if direct else None
        self.tiers = Tiers(
            snapshot,
            columns,
            budget,
            self.cache,
            None if self._fixed or nearest else self.direct,
            equality=equality,
            beside_pages=options.record_tier,
        )

    @property
    def longest_read(self) -> int:
        """Most disk pages in a read."""
        most = self.read_buffer.block
        return most if self._max_scan is None else min(self._max_scan, most)

    def wanted(self) -> NDArray[np.int32]:
        """Return the leaves that tuples wait for, in disk order (the paper's P_u)."""
        return self.wanted_ahead(0, None)

    def wanted_ahead(self, head: int, planned: NDArray[np.int32] | None, widest: float = 0.0) -> NDArray[np.int32]:
        """Return the leaves to read from a place on disk on, in disk order.

        Parameters
        ----------
        head
            First page that may be read.
        planned : int32[n] or None
            Leaves of the plan so far, in disk order. They are joined by those leaves that tuples wait for between two
            of them that one read covers. None for all leaves that tuples wait for.
        widest
            Most pages between two planned leaves that one read covers.
        """
        if isinstance(self.stream.demand, LeafMap):
            return self._in_disk_order(self.stream.demand.leaves.copy())
        leaves = np.empty(self.stream.pages, dtype=np.int32)
        everything = planned is None
        plan = np.empty(0, dtype=np.int32) if planned is None else planned
        size = _index_kernels.wanted_leaves(
            self.stream.demand, self.disk_order, self.snapshot.leaf_pages, head, plan, everything, widest, leaves
        )
        return leaves[:size]

    def list_by_range(self, *, by_range: bool) -> bool:
        """Have the steps of join phases list the wanted pages of one range only, or all, if there is room for these.

        Return whether there was.
        """
        if self.stream.by_range and not by_range and not self.try_make_room(self.stream.unlisted_nbytes):
            return False
        self.stream.by_range = by_range
        self.account()
        return True

    def wanted_in(self, number: int, head: int) -> NDArray[np.int32]:
        """Return the leaves of a range of pages that tuples wait for, from a place on disk on, in disk order.

        Parameters
        ----------
        number
            Number of the range; see `PageRanges`.
        head
            First page that may be read.
        """
        assert self.ranges is not None
        assert not isinstance(self.stream.demand, LeafMap)
        leaves = self.ranges.wanted(number, self.stream.demand)
        return leaves[np.searchsorted(self.snapshot.leaf_pages[leaves], head) :]

    def still_wanted(self, leaves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return those of some leaves that tuples wait for."""
        return leaves[values_at(self.stream.demand, leaves) > 0]

    def completed_to_relation(self, leaves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return leaves to read from the first page on, and the few beside them that nothing waits for.

        If then all pages of the relation are cached, its rows can have a tier of their own.

        Parameters
        ----------
        leaves : int32[n]
            Leaves that tuples wait for, in disk order.
        """
        rows, cache = self.tiers.rows, self.cache
        if self._fixed or rows is None or not rows.wanted or isinstance(cache.frame_map, LeafMap):
            return leaves
        missing = np.flatnonzero(cache.frame_map < 0).astype(np.int32)
        few = len(leaves) < len(missing) <= _NEARLY_ALL * len(leaves)
        room = cache.available + (self.budget.available - self._queued) // self._page
        if not few or len(missing) > min(room, cache.frames_max - cache.used):
            return leaves
        if not self.try_make_room(self.stream.wanted_nbytes * (len(missing) - len(leaves))):
            return leaves
        self.stream.add_unwanted(len(missing) - len(leaves))
        self.account()
        return missing[np.argsort(self.snapshot.leaf_pages[missing])]

    def reading_seconds(self, device: DeviceModel) -> float:
        """Return the cost of reading the wanted pages by the cheapest plan with reads of any length.

        If inner nodes are paged, leaves are taken to lie on disk in key order and side by side.
        """
        demand = self.stream.demand
        if isinstance(demand, LeafMap):
            wanted = (demand.values, _NO_LEAVES, demand.leaves.astype(np.int64))
        else:
            wanted = (demand, self.disk_order, self.snapshot.leaf_pages)
        return float(_index_kernels.reading_cost(*wanted, device.seek, device.transfer))

    def _in_disk_order(self, leaves: NDArray[np.int32]) -> NDArray[np.int32]:
        """Order leaves, which ascend, by their pages, as many at a time as the workspace has room to order."""
        if not self.snapshot.in_key_order:
            most = max(1, self.workspace // _ORDER_NBYTES)
            for start in range(0, len(leaves), most):
                part = leaves[start : start + most]
                leaves[start : start + most] = part[np.argsort(self.snapshot.pointers(part)[0])]
        return leaves

    def fits(self, tuples: int, index: int) -> bool:
        """Return whether the stream buffer could grow by these bytes, if all cached pages were evicted."""
        return self.lacking(tuples, index) <= 0

    def lacking(self, tuples: int, index: int) -> int:
        """Return by how many bytes they do not fit; 0 or less if they do."""
        return self._growth(tuples, index) - self._reclaimable

    def refusal(self, cause: str, lacking: int) -> MemoryBudgetError:
        """Return the error that advises to give as much memory as has room for `lacking` more bytes of tuples."""
        more = lacking / (_ROOM_SHARE * (1 - self._cache_share))
        return MemoryBudgetError.of(cause, self.budget.limit + math.ceil(more) + self._page)

    def tuples_at_most(self, row_nbytes: float) -> int:
        """Return about how many tuples of this size the stream buffer can hold if all cached pages give way."""
        held = self.budget.held
        room = self._reclaimable + held("stream_buffer") + held("inverted_index")
        return max(1, int(room / (row_nbytes + LEAF_RUN_NBYTES)))

    def rows_at_once(self, row_nbytes: float) -> int:
        """Return for how many tuples of this size the workspace has scratch arrays, beside an output batch.

        Direct look-ups need no batch beside: their results are what they produce, a row for each tuple, which
        `row_nbytes` includes.
        """
        scratch, room = _SCRATCH_NBYTES, self.workspace // 2
        if self.direct is not None:
            scratch, room = _DIRECT_SCRATCH_NBYTES, self.workspace
        if self.tiers.rows is not None and self.tiers.rows.ready:
            scratch = _ROW_TIER_NBYTES
        return max(1, int(room / (scratch + row_nbytes)))

    def tuples_in_a_part(self, emitter: Emitter, keys_per_tuple: int) -> int:
        """Return of how many waiting tuples the workspace can hold a copy, with keys, matches, and results."""
        row_nbytes = self.stream.tuple_nbytes / max(1, self.stream.rows)
        keys = keys_per_tuple * row_nbytes if self.snapshot.codec.kind == "bytes" else 0.0
        each = _SCRATCH_NBYTES + row_nbytes + keys + emitter.row_bytes(row_nbytes)
        return max(1, int(self.workspace // 2 / each))

    def make_room(self, nbytes: int) -> None:
        """Shrink the cache until `nbytes` bytes are available. The pages with the smallest utility leave.

        Raises
        ------
        MemoryBudgetError
            If they cannot be had.
        """
        missing = self._missing(nbytes)
        if missing <= 0:
            return
        if missing > self._evictable * self._page and self.tiers.release():
            missing = self._missing(nbytes)
        frames = -(-missing // self._page)
        if frames > self._evictable:
            raise self.refusal("tuples as large as these have no room", (frames - self._evictable) * self._page)
        self._shrink(frames)

    def queue(self, nbytes: int) -> None:
        """Make what room can be had for tuples that arrive while others are joined. Pinned pages stay."""
        self._queued += nbytes
        missing = 0 if self._pins else self._missing(self._queued)
        frames = min(-(-missing // self._page), self._evictable)
        if frames > 0:
            self._shrink(frames)

    @property
    def queued(self) -> int:
        """Bytes of such tuples."""
        return self._queued

    def unqueue(self, nbytes: int) -> None:
        """Note that such tuples are no longer queued."""
        self._queued -= nbytes

    @property
    def overdrawn(self) -> bool:
        """Whether more tuples have arrived during a join phase than there can be room for."""
        return self._queued > self._reclaimable

    def grow(self) -> None:
        """Give the cache all memory that is available and not wanted by queued tuples."""
        if self._fixed:
            return
        spare = max(0, self.budget.available - self._queued)
        frames = min(self.cache.frames_max, self.cache.capacity + spare // self._page)
        if frames > self.cache.capacity:
            self.budget.resize("cache", frames * self._page)
            self.cache.resize(frames)

    def pin(self, *, on: bool) -> None:
        """Forbid or allow the eviction of pages while their rows are being gathered."""
        self._pins += 1 if on else -1

    def keep(self, leaves: NDArray[np.int32], frames: NDArray[np.int64]) -> None:
        """Make pages resident that were copied into allocated frames."""
        self.cache.admit(leaves, frames, values_at(self.stream.demand, leaves))
        if self.direct is not None:
            self.direct.describe(self.cache.buffer, frames)
        self.budget.settle()

    def hold(self, chunks: Sequence[Chunk]) -> None:
        """Put tuples of one batch into the stream buffer."""
        wanted = min(sum(chunk.wanted_most for chunk in chunks), self.snapshot.leaves - self.stream.pages)
        runs = sum(chunk.index_nbytes for chunk in chunks) + self.stream.listed_growth(wanted)
        self.make_room(self._growth(self.stream.growth(chunks), runs))
        for chunk in chunks:
            self.stream.add(chunk)
        self.account()
        while (few := self.stream.mergeable(self.workspace // 2)) and self.try_make_room(
            self.stream.merged_growth(few)
        ):
            self.stream.merge(few)
            del few  # the tuples that were copied
            self.account()

    def least_utility(self, nbytes: int) -> int:
        """Return the greatest utility among the pages that `nbytes` bytes would evict.

        That is the number of tuples that joined with the page since the last join phase.
        """
        frames = -(-(nbytes - self.budget.available) // self._page)
        if frames <= 0:
            return 0
        utility = self.cache.utility[self.cache.resident_frames]
        spare = self.cache.capacity - len(utility)
        if frames <= spare or len(utility) == 0:
            return 0
        worst = min(frames - spare, len(utility)) - 1
        return int(np.partition(utility, worst)[worst])

    def accept(self, rows: pa.RecordBatch, arrival: Arrivals) -> bool:
        """Put tuples into the input buffer, if there is room for them; return whether there was."""
        nbytes = rows.nbytes + (arrival.nbytes if isinstance(arrival, np.ndarray) else 0)
        if not self.try_make_room(max(self._page, self.input.nbytes + nbytes) - self.budget.held("input_buffer")):
            return False
        self.input.add(rows, arrival)
        self.account()
        return True

    def settle(self, read: NDArray[np.int32], step: int) -> list[Chunk]:
        """Remove the tuples that have met all their leaves; see `StreamBuffer.settle`."""
        complete = self.stream.settle(read, step)
        self.make_room(self._growth(0, 0))  # of which a part of the leaf runs was read have become two
        self.account()
        return complete

    def release_stream(self, step: int) -> None:
        """Empty the stream buffer. Deferred tuples move on by `step` leaves."""
        self.stream.clear(step)
        self.account()

    def phase_done(self, *, eager: bool) -> None:
        """Let cache and tiers adapt to the end of a join phase.

        The paper clears the utility of pages, which then grows until the next phase. An eager phase is followed by the
        next one at once: cleared counters would make every cached page worth less than any page that is read next. So
        they are halved.
        """
        if eager and not self.newest_first:
            self.cache.utility >>= 1
        else:
            self.cache.phase_done()
        counters = self._counters
        seconds = self._device.cost(counters.seeks, counters.pages_read)
        self.tiers.phase_done(self.try_make_room, counters.rows_done, seconds)

    def take_deferred(self, most: int) -> DeferredSlice | None:
        """Remove at most `most` deferred tuples and return them; None if there are none."""
        deferred = self.stream.take_deferred(most)
        self.account()
        return deferred

    def drop_pages(self) -> bool:
        """Evict all cached pages. Return whether there were any."""
        frames = self.cache.resident_frames
        self.cache.release(frames)
        self._counters.pages_evicted += len(frames)
        return bool(len(frames))

    def install(self, snapshot: Snapshot) -> None:
        """Switch to another snapshot; cached pages that it left unchanged stay. The stream buffer must be empty.

        Only if it `can_install`.
        """
        old, self.snapshot = self.snapshot, snapshot
        growth = self._index_growth(old, snapshot)
        was, now = unchanged_leaves(old, snapshot)
        self.cache.remap(len(snapshot.leaf_pages), was, now)
        if self.direct is not None:
            self.direct.install(snapshot)
        self.make_room(self.tiers.growth(snapshot))
        self.tiers.install(old, snapshot, was, now)
        self.make_room(growth)
        self.budget.resize("index", self.budget.held("index") + growth)
        self._order_by_disk()

    def _order_by_disk(self) -> None:
        """Note how the leaves lie on disk, and make a stream buffer for them."""
        if self.paged:
            self.disk_order, self.ranges = _NO_LEAVES, None
            self.stream = StreamBuffer(None, self._deadlines)
        else:
            self.disk_order = disk_order(self.snapshot)
            self.ranges = PageRanges(self.snapshot.leaf_pages, self.disk_order)
            self.stream = StreamBuffer(self.snapshot.leaves, self._deadlines, self.ranges)

    def can_install(self, snapshot: Snapshot) -> bool:
        """Return whether another snapshot can be switched to. Otherwise, a new store must be made for it."""
        if self.paged or isinstance(snapshot, PagedSnapshot):
            return False
        growth = self._index_growth(self.snapshot, snapshot) + self.tiers.growth(snapshot)
        return growth <= self._reclaimable

    def _index_growth(self, old: Snapshot, new: Snapshot) -> int:
        direct = self.direct is not None
        before = old.index_nbytes + leaf_maps_nbytes(old, direct=direct)
        return new.index_nbytes + leaf_maps_nbytes(new, direct=direct) - before

    def account(self) -> None:
        """Bring the account of the buffers up to date. Each has at least a page, even when it holds less."""
        held: dict[Component, int] = {
            "stream_buffer": self.stream.tuple_nbytes,
            "inverted_index": self.stream.index_nbytes,
            "input_buffer": self.input.nbytes,
        }
        growth = {name: max(self._page, nbytes) - self.budget.held(name) for name, nbytes in held.items()}
        for name in sorted(growth, key=lambda name: growth[name]):  # what one gives up, another may need
            self.budget.resize(name, self.budget.held(name) + growth[name])
        self.budget.settle()

    def _frames_max(self) -> int:
        """Charge the cache's maps and return how many frames there can ever be: the table may grow."""
        spare = self.budget.available - PageCache.map_nbytes(0, 0)
        most = 2 * self.snapshot.leaves + _FRAMES_TO_GROW
        frames = max(1, min(spare // (self._page + self._frame_maps), most))
        self.budget.charge("index", PageCache.map_nbytes(0, 0) + self._frame_maps * frames)
        return frames

    def _reserved_frames(self, share: float) -> int:
        """Charge the frames that the cache has from the start: a share of what it and the buffers have."""
        shared = self.budget.available + len(BUFFERS) * self._page
        frames = min(self.cache.frames_max, int(share * shared) // self._page, self.budget.available // self._page)
        self.budget.charge("cache", frames * self._page)
        return frames

    @property
    def _evictable(self) -> int:
        """Frames that the cache can give up."""
        return 0 if self._fixed else self.cache.capacity

    @property
    def _reclaimable(self) -> int:
        """Bytes that are available, or would be if all pages and rows that may leave did so."""
        return self.budget.available + self.tiers.rows_nbytes + self._evictable * self._page

    def _missing(self, nbytes: int) -> int:
        """Return how many bytes pages must give up for `nbytes` to be available. The row tier goes before any page."""
        missing = nbytes - self.budget.available
        if missing > self.cache.available * self._page and self.tiers.release_rows():
            missing = nbytes - self.budget.available
        return missing

    def try_make_room(self, nbytes: int) -> bool:
        """Make room for `nbytes` bytes, if possible. Return whether it was."""
        if nbytes > self._reclaimable:
            return False
        self.make_room(nbytes)
        return True

    def _growth(self, tuples: int, index: int) -> int:
        """Return by how much the account must grow for these additional bytes in the stream buffer and its index."""
        stream = max(self._page, self.stream.tuple_nbytes + tuples) - self.budget.held("stream_buffer")
        lists = max(self._page, self.stream.index_nbytes + index) - self.budget.held("inverted_index")
        return stream + lists

    def _shrink(self, frames: int) -> None:
        evicted = self.cache.resize(self.cache.capacity - frames)
        self._counters.pages_evicted += len(evicted)
        self.budget.resize("cache", self.cache.capacity * self._page)
