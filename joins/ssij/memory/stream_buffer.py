"""Stream buffer: tuples that wait for relation pages (the paper's SB), and which pages they wait for (II).

Tuples are kept in chunks, copied compactly and sorted by key, so the inverted index needs no lists: the leaves that the
tuples of a chunk wait for ascend, and the tuples that wait for a page are found by binary search. Most tuples wait for
one leaf. A tuple whose matches may lie in several leaves has one *leaf run* for each run of leaves that were not cached
when it came, and a mark that says whether it has matched. A tuple that looks for the nearest row waits for the leaf
where that row should be; if it is not there, the tuple is *deferred* to the neighboring leaf.

A join phase reads in steps, and tuples that have met all their leaves leave after each (`StreamBuffer.settle`). A chunk
of which few have left marks the rest as alive; otherwise it is copied without them. So a tuple that has left cannot be
joined again when its leaf is read for others, and at most a quarter of the buffer is occupied by such tuples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.deadlines import Deadlines
from headrace.joins.dictionaries import HeldDictionaries, combined_nbytes, own_nbytes
from headrace.joins.emitter import rows_at
from headrace.joins.input_buffer import DeferredSlice, arrivals_at, compact
from headrace.joins.ssij.memory import _index_kernels as kernels
from headrace.storage.format import concat_batches, take
from headrace.storage.read import LeafMap, values_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.deadlines import Arrivals
    from headrace.joins.ssij.memory.page_ranges import PageRanges
    from headrace.storage.read import LeafNumbers

__all__ = [
    "DEFERRAL_NBYTES",
    "LEAF_RUN_NBYTES",
    "LISTED_NBYTES",
    "WANTED_NBYTES",
    "Chunk",
    "StreamBuffer",
    "ascending",
    "ascends",
    "by_leaves",
    "division_nbytes",
    "merged_arrivals",
]

_ARRIVAL_NBYTES = 8
_OFFSET_NBYTES = 8
LEAF_RUN_NBYTES = 12
"""Bytes of a leaf run that is not one leaf: first and last leaf, and tuple."""
WANTED_NBYTES = 9
"""Bytes of a wanted page in a join phase: the leaf in the plan and in a step of it, and whether it will stay cached."""
LISTED_NBYTES = WANTED_NBYTES + 2 * (4 + 4)
"""Bytes of a wanted page where the demand is a list: also the leaf and its demand, again while lists are merged."""

DEFERRAL_NBYTES = 5
"""Bytes of a tuple that may be deferred: the mark that says so, and room for the leaf to which it goes on."""

_NO_LEAVES = np.empty(0, dtype=np.int32)
_NO_DEMAND = LeafMap(_NO_LEAVES, _NO_LEAVES, 0)
_FAN_IN = 8
_TIER = 4
_LEAST_DIVIDED = 8192  # tuples: fewer are not worth dividing
_DEAD_SHARE = 4  # a chunk is copied when a fourth of its tuples have left


@dataclass(frozen=True, slots=True)
class Chunk:
    """Stream tuples that entered the stream buffer together.

    Attributes
    ----------
    rows
        The tuples.
    arrival
        When they arrived.
    first, last : int32[runs]
        First and last leaf of each run; the first ones ascend. The same array if each run is one leaf.
    tuples : int32[runs] or None
        Row of each run; None if there is one run for each row, in order.
    matched : bool[rows] or None
        Whether the tuple has had a match; None if every tuple waits for one leaf only.
    ascends
        Whether the last leaves ascend too.
    undecided : bool[rows] or None
        Whether the tuple has to go to the neighboring leaf; None if every leaf can decide.
    alive : bool[rows] or None
        Whether the tuple is still waiting; None if all are. Only where each tuple waits for one leaf.
    within
        Range of pages in which all their leaves lie; None if the tuples were not divided.
    """

    rows: pa.RecordBatch
    arrival: Arrivals
    first: NDArray[np.int32]
    last: NDArray[np.int32]
    tuples: NDArray[np.int32] | None = None
    matched: NDArray[np.bool_] | None = None
    ascends: bool = True
    undecided: NDArray[np.bool_] | None = None
    alive: NDArray[np.bool_] | None = None
    within: int | None = None

    @property
    def tuple_nbytes(self) -> int:
        """Bytes of the tuples without dictionaries, of a mark of each, and of what their deferral may take."""
        arrival = 0 if isinstance(self.arrival, float) else self.arrival.nbytes
        deferral = 0 if self.undecided is None else DEFERRAL_NBYTES * len(self.rows) + division_nbytes(self.rows)
        return own_nbytes(self.rows) + arrival + deferral + len(self.rows)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the leaf runs: the inverted index's share."""
        last = 0 if self.last is self.first else self.last.nbytes
        return self.first.nbytes + last + (0 if self.tuples is None else self.tuples.nbytes)

    @property
    def wanted_most(self) -> int:
        """Most leaves that the runs wait for. Leaves that several runs share count more than once."""
        return len(self.first) if self.last is self.first else int((self.last - self.first).sum()) + len(self.first)

    @property
    def waiting(self) -> int:
        """Number of tuples that are still waiting."""
        return len(self.rows) if self.alive is None else int(self.alive.sum())

    def waiting_arrivals(self) -> Arrivals:
        """Return the arrivals of the tuples that are still waiting."""
        return self.arrival if self.alive is None else arrivals_at(self.arrival, np.flatnonzero(self.alive))

    def compacted(self) -> Chunk:
        """Return the chunk without the tuples that have left."""
        if self.alive is None:
            return self
        stay = np.flatnonzero(self.alive).astype(np.int32)
        first = self.first[stay]
        undecided = None if self.undecided is None else self.undecided[stay]
        return replace(
            self, rows=take(self.rows, stay), arrival=arrivals_at(self.arrival, stay), first=first, last=first,
            undecided=undecided, alive=None,
        )  # fmt: skip

    @property
    def simple(self) -> bool:
        """Whether each tuple waits for one leaf."""
        return self.matched is None

    def deferred_slice(self, step: int) -> DeferredSlice | None:
        """Return the tuples that have to move on by `step` leaves; None if there are none."""
        if self.undecided is None or not self.undecided.any():
            return None
        rows = np.flatnonzero(self.undecided)
        self.undecided[rows] = False
        arrival = arrivals_at(self.arrival, rows)
        return DeferredSlice(take(self.rows, rows), arrival, self.first[rows] + np.int32(step))


class StreamBuffer:
    """Chunks of waiting tuples, and how many leaf runs wait for each leaf.

    Parameters
    ----------
    leaves
        Number of leaves of the relation; None to list the wanted ones only.
    deadlines
        How long tuples may wait.
    ranges
        Ranges of pages by which tuples can be divided.

    Attributes
    ----------
    divides
        Whether tuples are divided by the range in which their leaf lies.
    by_range
        Whether a step of a join phase lists the wanted pages of one range only.
    demand : int32[leaves] or LeafMap
        How many runs wait for each leaf: the lengths of the inverted index's lists, and so the leaves' utility.
    wanted_nbytes
        Bytes of a wanted page.
    pages
        Number of leaves that tuples wait for (the size of the paper's P_u).
    rows
        Number of waiting tuples.
    due, tightest
        Earliest due time of a waiting tuple and smallest allowance; infinity if there are none.
    deferred
        Tuples that the last join phase has deferred to another leaf, to be looked up at once.
    """

    def __init__(
        self, leaves: int | None, deadlines: Deadlines | None = None, ranges: PageRanges | None = None
    ) -> None:
        self._deadlines = deadlines or Deadlines()
        self._ranges = ranges
        self.divides = self.by_range = False
        self._simple: list[list[Chunk]] = [[] for _ in range(1 if ranges is None else ranges.count + 1)]
        self._spanning: list[Chunk] = []
        self.demand: LeafNumbers = _NO_DEMAND if leaves is None else np.zeros(leaves, dtype=np.int32)
        self.wanted_nbytes = LISTED_NBYTES if leaves is None else WANTED_NBYTES
        self.rows = 0
        self.pages = 0
        self._own_nbytes = 0
        self._dictionaries = HeldDictionaries()
        self._runs_nbytes = self._unwanted = 0
        self.due = self.tightest = math.inf
        self.deferred: list[DeferredSlice] = []

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks of waiting tuples."""
        return [*chain.from_iterable(self._simple), *self._spanning]

    def chunks_of(self, leaves: NDArray[np.int32]) -> list[Chunk]:
        """Return the chunks whose tuples may wait for some of the leaves."""
        return [*chain.from_iterable(self._simple[at] for at in self._lists_of(leaves)), *self._spanning]

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """Tuples of all chunks, and those deferred."""
        return [*(chunk.rows for chunk in self.chunks), *(part.rows for part in self.deferred)]

    @property
    def tuple_nbytes(self) -> int:
        """Bytes of the tuples, with the dictionaries that they share."""
        return self._own_nbytes + self._dictionaries.nbytes

    @property
    def spans(self) -> bool:
        """Whether any tuple waits for several leaves."""
        return bool(self._spanning)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the leaf runs, and of the list of wanted pages that a join phase makes."""
        return self._runs_nbytes + self.wanted_nbytes * (self._listed(self.pages) + self._unwanted)

    def listed_growth(self, pages: int) -> int:
        """Return by how many bytes the list of wanted pages would grow with so many more of them."""
        return self.wanted_nbytes * (self._listed(self.pages + pages) - self._listed(self.pages))

    @property
    def unlisted_nbytes(self) -> int:
        """Bytes by which the list of all wanted pages exceeds that of a range."""
        return self.wanted_nbytes * (self.pages - self._listed(self.pages))

    def _listed(self, pages: int) -> int:
        """Return how many pages are listed at a time if so many are wanted."""
        return min(pages, self._ranges.most) if self.by_range and self._ranges is not None else pages

    def runs_over(self, leaf: int) -> int:
        """Return how many runs of several leaves contain a leaf and the one before it."""
        return sum(int(((chunk.first < leaf) & (leaf <= chunk.last)).sum()) for chunk in self._spanning)

    def growth(self, chunks: Sequence[Chunk]) -> int:
        """Return by how many bytes chunks that share their dictionaries would make the stream buffer grow."""
        return sum(chunk.tuple_nbytes for chunk in chunks) + self.dictionaries_growth(chunks[0].rows)

    def dictionaries_growth(self, rows: pa.RecordBatch) -> int:
        """Return how many bytes the dictionaries of some tuples would add, however many chunks these tuples become."""
        return self._dictionaries.growth(rows)

    def division_nbytes(self, rows: pa.RecordBatch) -> int:
        """Return the most bytes by which some tuples grow when they are divided by ranges."""
        if self._ranges is None or not self.divides:
            return 0
        return self._ranges.count * division_nbytes(rows.slice(0, 0))

    def chunks_at(
        self, rows: pa.RecordBatch, arrival: Arrivals, places: NDArray[np.int32], leaf: NDArray[np.int32]
    ) -> list[Chunk]:
        """Return tuples at some places, each of which waits for one leaf: divided by ranges if they are many.

        Changes nothing, so that threads may run it at once.

        Parameters
        ----------
        rows, arrival
            Tuples of a batch.
        places, leaf : int32[n]
            Which of them wait, and their leaves, which ascend.
        """
        if self._ranges is None or not (self.divides and len(places) >= _LEAST_DIVIDED):
            return [_chunk_at(rows, arrival, places, leaf)]
        parts = enumerate(self._ranges.divide(leaf))
        return [_chunk_at(rows, arrival, places[part], leaf[part], number) for number, part in parts if len(part)]

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self._append(chunk)
        self.rows += len(chunk.rows)
        if isinstance(self.demand, LeafMap):
            self.demand = _added(self.demand, chunk)
            self.pages = len(self.demand.leaves)
        else:
            self.pages += kernels.add_demand(chunk.first, chunk.last, self.demand)
        self._note(chunk.arrival)

    def add_unwanted(self, pages: int) -> None:
        """Count pages that the next step of a join phase reads although no tuple waits for them."""
        self._unwanted += pages

    def wanted_among(self, leaves: NDArray[np.int32]) -> int:
        """Return how many of the leaves that a join phase has read tuples wait for: all where the demand is a list."""
        return len(leaves) if isinstance(self.demand, LeafMap) else int(np.count_nonzero(self.demand[leaves]))

    def mergeable(self, nbytes: int) -> list[Chunk]:
        """Return the latest chunks of a kind if they are many, of similar size, and together within `nbytes`."""
        for chunks in (*self._simple, self._spanning):
            last = chunks[-_FAN_IN:]
            sizes = [len(chunk.rows) for chunk in last]
            alike = len(last) == _FAN_IN and max(sizes) <= _TIER * min(sizes)
            if alike and sum(chunk.tuple_nbytes for chunk in last) + _combined_nbytes(last) <= nbytes:
                return last
        return []

    def merged_growth(self, chunks: list[Chunk]) -> int:
        """Return by how many bytes chunks may grow if merged: arrivals, bitmaps, new dictionaries, and division."""
        arrivals = sum(len(chunk.rows) * _ARRIVAL_NBYTES + division_nbytes(chunk.rows) for chunk in chunks)
        return arrivals + _combined_nbytes(chunks) + self.division_nbytes(chunks[0].rows)

    def merge(self, last: list[Chunk]) -> None:
        """Replace the latest chunks, which `mergeable` returned, by one."""
        del self._like(last[0])[-len(last) :]
        for chunk in last:
            self._drop(chunk.rows, chunk.tuple_nbytes)
        self._runs_nbytes -= sum(chunk.index_nbytes for chunk in last)
        for piece in self._divided(_merged(last)):
            self._append(piece)

    def _divided(self, chunk: Chunk) -> list[Chunk]:
        """Return the tuples of a chunk, divided by ranges if each waits for one leaf and they are not yet divided."""
        if not self.divides or not chunk.simple or chunk.undecided is not None or chunk.within is not None:
            return [chunk]
        every = np.arange(len(chunk.rows), dtype=np.int32)
        return self.chunks_at(chunk.rows, chunk.arrival, every, chunk.first)

    def clear(self, step: int) -> None:
        """Remove everything after a join phase except deferred tuples, which move on by `step` leaves."""
        if isinstance(self.demand, LeafMap):
            self.demand = _NO_DEMAND
        else:
            self.demand[:] = 0
        self.pages = self._unwanted = 0
        self._spanning.clear()
        for chunks in self._simple:
            while chunks:
                deferred = chunks.pop().deferred_slice(step)
                if deferred is not None:
                    self.deferred.append(deferred)
        self._recount()

    def settle(self, read: NDArray[np.int32], step: int) -> list[Chunk]:
        """Remove the tuples that have met all their leaves, now that the leaves `read` have been met.

        Deferred tuples move on by `step` leaves.

        Returns
        -------
        list of Chunk
            The removed tuples that had waited for several leaves. Their `matched` says which of them had a match.
        """
        self.pages -= self.wanted_among(read)
        if isinstance(self.demand, LeafMap):
            self.demand = _without(self.demand, read)
        else:
            self.demand[read] = 0
        self._unwanted = 0
        for at in self._lists_of(read):
            self._let_leave(self._simple[at], step)
        complete = []
        for _ in range(len(self._spanning)):
            rest, done = _without_met_runs(self._spanning.pop(0), self.demand)
            self._spanning += [] if rest is None else [rest]
            complete += [] if done is None else [done]
        self._recount()
        return complete

    def _let_leave(self, chunks: list[Chunk], step: int) -> None:
        """Remove the tuples whose leaf has no demand from chunks of tuples that wait for one leaf each.

        Each chunk is freed before the next one is copied.
        """
        for _ in range(len(chunks)):
            chunk = chunks.pop(0)
            deferred = chunk.deferred_slice(step)
            if deferred is not None:
                self.deferred.append(deferred)
            rest = _without_met(chunk, self.demand)
            if rest is not None:
                chunks.append(rest if deferred is None else rest.compacted())  # or they would be held twice

    def _recount(self) -> None:
        chunks = self.chunks
        self.rows = sum(chunk.waiting for chunk in chunks)
        self._own_nbytes = 0
        self._dictionaries.clear()
        for deferred in self.deferred:
            self._keep(deferred.rows, deferred.nbytes)
        for chunk in chunks:
            self._keep(chunk.rows, chunk.tuple_nbytes)
        self._runs_nbytes = sum(chunk.index_nbytes for chunk in chunks)
        self.due = self.tightest = math.inf
        for chunk in chunks:
            self._note(chunk.waiting_arrivals())

    def _note(self, arrival: Arrivals) -> None:
        self.due = min(self.due, self._deadlines.earliest(arrival))
        self.tightest = min(self.tightest, self._deadlines.tightest(arrival))

    def leaves_due(self, before: float) -> NDArray[np.int32]:
        """Return the leaves, ascending, that tuples wait for that are due before some time."""
        leaves = [np.empty(0, dtype=np.int32)]
        for chunk in self.chunks:
            due = np.broadcast_to(np.asarray(self._deadlines.due(chunk.arrival)), len(chunk.rows)) < before
            if chunk.alive is not None:
                due = due & chunk.alive
            runs = np.flatnonzero(due if chunk.tuples is None else due[chunk.tuples])
            first, last = chunk.first[runs], chunk.last[runs]
            length = last - first + 1
            start = np.repeat(np.cumsum(length) - length, length)
            leaves.append(np.repeat(first, length) + (np.arange(len(start)) - start).astype(np.int32))
        return np.unique(np.concatenate(leaves))

    def take_deferred(self, most: int) -> DeferredSlice | None:
        """Remove at most `most` deferred tuples and return them; None if there are none."""
        if not self.deferred:
            return None
        deferred = self.deferred.pop()
        self._drop(deferred.rows, deferred.nbytes)
        if len(deferred.rows) > most:
            rest = deferred.slice(most, len(deferred.rows))
            self.deferred.append(rest)
            self._keep(rest.rows, rest.nbytes)
        return deferred.slice(0, most)

    def _like(self, chunk: Chunk) -> list[Chunk]:
        """Return the list for chunks of a kind."""
        if not chunk.simple:
            return self._spanning
        return self._simple[-1 if chunk.within is None else chunk.within]

    def _lists_of(self, leaves: NDArray[np.int32]) -> list[int]:
        """Return the lists of tuples that wait for one leaf each in which some may wait for these leaves."""
        return [0] if self._ranges is None else [*np.unique(self._ranges.of(leaves)).tolist(), self._ranges.count]

    def _append(self, chunk: Chunk) -> None:
        self._like(chunk).append(chunk)
        self._keep(chunk.rows, chunk.tuple_nbytes)
        self._runs_nbytes += chunk.index_nbytes

    def _keep(self, rows: pa.RecordBatch, nbytes: int) -> None:
        self._own_nbytes += nbytes
        self._dictionaries.add(rows)

    def _drop(self, rows: pa.RecordBatch, nbytes: int) -> None:
        self._own_nbytes -= nbytes
        self._dictionaries.remove(rows)


def _chunk_at(
    rows: pa.RecordBatch,
    arrival: Arrivals,
    places: NDArray[np.int32],
    leaf: NDArray[np.int32],
    within: int | None = None,
) -> Chunk:
    return Chunk(compact(rows_at(rows, places)), arrivals_at(arrival, places), leaf, leaf, within=within)


def _combined_nbytes(chunks: Sequence[Chunk]) -> int:
    """Return the most bytes of the new dictionaries that chunks get if merged."""
    return combined_nbytes([chunk.rows for chunk in chunks])


def division_nbytes(rows: pa.RecordBatch) -> int:
    """Return the most bytes by which copies of some tuples and of the others exceed the bytes of all.

    Either copy may have a bitmap for each column, and one offset more than values.
    """
    return _arrays(rows.schema) * (len(rows) // 8 + 2 + _OFFSET_NBYTES)


@lru_cache(maxsize=64)
def _arrays(schema: pa.Schema) -> int:
    """Return the number of arrays in a batch: columns, and the children of nested ones."""

    def within(dtype: pa.DataType) -> int:
        return 1 + sum(within(dtype.field(at).type) for at in range(dtype.num_fields))

    return sum(within(field.type) for field in schema)


def _added(demand: LeafMap, chunk: Chunk) -> LeafMap:
    """Return the demand with that of a chunk."""
    size = kernels.union_of_runs(chunk.first, chunk.last, _NO_LEAVES, _NO_LEAVES)
    more = np.empty((2, size), dtype=np.int32)
    kernels.union_of_runs(chunk.first, chunk.last, *more)
    merged = np.empty((2, size + len(demand.leaves)), dtype=np.int32)
    count = kernels.merge_demand(demand.leaves, demand.values, *more, *merged)
    return LeafMap(merged[0, :count].copy(), merged[1, :count].copy(), 0)


def _without(demand: LeafMap, leaves: NDArray[np.int32]) -> LeafMap:
    """Return the demand without that for some leaves."""
    stay = np.ones(len(demand.leaves), dtype=np.bool_)
    stay[demand.leaves.searchsorted(leaves)] = False
    return LeafMap(demand.leaves[stay], demand.values[stay], 0)


def _without_met(chunk: Chunk, demand: LeafNumbers) -> Chunk | None:
    """Return a chunk of tuples that wait for one leaf each without those whose leaf has no demand; None if all left."""
    alive = values_at(demand, chunk.first) > 0
    if chunk.alive is not None:
        alive &= chunk.alive
    waiting = int(alive.sum())
    if waiting == 0:
        return None
    if waiting == chunk.waiting:
        return chunk
    rest = replace(chunk, alive=alive)
    return rest.compacted() if _DEAD_SHARE * (len(alive) - waiting) >= len(alive) else rest


def _without_met_runs(chunk: Chunk, demand: LeafNumbers) -> tuple[Chunk | None, Chunk | None]:
    """Return the tuples of a chunk that still have leaves to meet, with these leaves only, and those that have none."""
    assert chunk.tuples is not None
    assert chunk.matched is not None
    # as a map of frames in which the leaves with demand are missing
    met = LeafMap(demand.leaves, np.negative(demand.values), 0) if isinstance(demand, LeafMap) else np.negative(demand)
    left = np.zeros(len(chunk.first), dtype=np.int32)
    if kernels.count_leaf_runs(chunk.first, chunk.last, met, left) == 0:
        return chunk, None
    size = int(left.sum())
    first, last, run = (np.empty(size, dtype=np.int32) for _ in range(3))
    every = np.arange(len(left), dtype=np.int32)
    kernels.list_leaf_runs(chunk.first, chunk.last, met, every, first, last, run)
    order = by_leaves(first, last)
    first, last, tuples = first[order], last[order], chunk.tuples[run[order]]
    waits = np.zeros(len(chunk.rows), dtype=np.bool_)
    waits[tuples] = True
    done = _tuples_of(chunk, np.flatnonzero(~waits))
    if size == 0:
        return None, done
    stay = np.flatnonzero(waits)
    if len(stay) == len(waits):
        return replace(chunk, first=first, last=last, tuples=tuples, ascends=ascends(last)), None
    number = np.cumsum(waits, dtype=np.int32) - 1
    rest = _tuples_of(chunk, stay)
    assert rest is not None
    return replace(rest, first=first, last=last, tuples=number[tuples].astype(np.int32), ascends=ascends(last)), done


def _tuples_of(chunk: Chunk, which: NDArray[np.intp]) -> Chunk | None:
    """Return some tuples of a chunk without leaf runs; None if there are none."""
    if len(which) == 0:
        return None
    none = np.empty(0, dtype=np.int32)
    assert chunk.matched is not None
    return Chunk(take(chunk.rows, which), arrivals_at(chunk.arrival, which), none, none, none, chunk.matched[which])


def _merged(chunks: list[Chunk]) -> Chunk:
    """Merge chunks of one kind."""
    chunks = [chunk.compacted() for chunk in chunks]
    return _merged_simple(chunks) if chunks[0].simple else _merged_spanning(chunks)


def _merged_simple(chunks: list[Chunk]) -> Chunk:
    """Merge chunks of tuples that wait for one leaf, sorted by leaf."""
    first = np.concatenate([chunk.first for chunk in chunks])
    rows = concat_batches([chunk.rows for chunk in chunks])
    order = ascending(first)
    first = first[order]
    arrival = _arrivals_of(chunks, order)
    undecided = None if chunks[0].undecided is None else np.zeros(len(rows), dtype=np.bool_)
    return Chunk(take(rows, order), arrival, first, first, undecided=undecided, within=chunks[0].within)


def _merged_spanning(chunks: list[Chunk]) -> Chunk:
    """Merge chunks of tuples that wait for several leaves; the runs are sorted by leaf."""
    first, last = np.concatenate([[chunk.first, chunk.last] for chunk in chunks], axis=1)
    order = by_leaves(first, last)
    starts = np.cumsum([0, *(len(chunk.rows) for chunk in chunks[:-1])], dtype=np.int32)
    tuples = [chunk.tuples + start for chunk, start in zip(chunks, starts, strict=True) if chunk.tuples is not None]
    marks = [chunk.matched for chunk in chunks if chunk.matched is not None]
    rows, last = concat_batches([chunk.rows for chunk in chunks]), last[order]
    return Chunk(
        rows, _arrivals_of(chunks, None), first[order], last, np.concatenate(tuples)[order], np.concatenate(marks),
        ascends=ascends(last),
    )  # fmt: skip


def _arrivals_of(chunks: list[Chunk], order: NDArray[np.int32] | None) -> Arrivals:
    return merged_arrivals([chunk.arrival for chunk in chunks], [len(chunk.rows) for chunk in chunks], order)


def ascending(values: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return a stable order in which the values ascend."""
    packed = (values.astype(np.int64) << np.int64(31)) | np.arange(len(values), dtype=np.int64)
    packed.sort()
    return (packed & np.int64(2**31 - 1)).astype(np.int32)


def by_leaves(first: NDArray[np.int32], last: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the order by first leaf, then by last leaf. Both ascend in it if they can do so together."""
    by_last = ascending(last)
    return by_last[ascending(first[by_last])]


def ascends(values: NDArray[np.int32]) -> bool:
    """Return whether no value is less than the one before it."""
    return len(values) < 2 or bool((values[1:] >= values[:-1]).all())  # noqa: PLR2004 - one value is in order


def merged_arrivals(parts: Sequence[Arrivals], rows: Sequence[int], order: NDArray[np.int32] | None) -> Arrivals:
    """Return the arrivals of several parts with these numbers of rows, in another order."""
    if all(isinstance(part, float) and part == parts[0] for part in parts):
        return parts[0]
    each = np.concatenate([np.broadcast_to(np.asarray(part), count) for part, count in zip(parts, rows, strict=True)])
    return each if order is None else each[order]
