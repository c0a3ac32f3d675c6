"""Pages of a join phase, in blocks: the next block is read while one is joined, if there is room for two.

While a block is awaited, the next one has been requested, so that the disk always has a read to make.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij.phases._join_kernels import lay_out
from headrace.storage.errors import HeadraceError
from headrace.storage.read import ReadReport, Reads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from headrace.joins.ssij.context import SSIJContext
    from headrace.joins.workers import Workers
    from headrace.storage.read import Reading

__all__ = ["Block", "ReadAhead"]

_PLAN_NBYTES = 144
_BLOCKS_PLANNED, _STEPS_PLANNED = 4, 16  # no more is planned at once of a phase that may stop after a step
_WORTH_A_THREAD = 64  # fewer pages are verified before a thread has woken up


@dataclass(frozen=True, slots=True)
class Block:
    """Pages that are in the read buffer together.

    Attributes
    ----------
    start, stop
        Range of the wanted leaves.
    slots : int32[stop - start]
        Frame of the read buffer in which each of them lies.
    """

    start: int
    stop: int
    slots: NDArray[np.int32]


class _Fetch:
    """Pages being read. A thread, if there is one, awaits and verifies them while others are joined."""

    def __init__(self, reading: Reading, workers: Workers | None) -> None:
        self._reading = reading
        self._in_a_thread = workers is not None
        self._end: Callable[[], None] | None = self._run if workers is None else workers.start(self._run)

    def verified(self) -> None:
        """Wait until the pages are verified.

        Raises
        ------
        CorruptPageError, StorageIOError
            If a page is not what was written, or cannot be read.
        """
        end, self._end = self._end, None
        assert end is not None
        try:
            end()
        finally:
            del end  # it refers to the error, which refers to this frame: a reference cycle

    def abandon(self) -> None:
        """Wait until nothing is written to the frames any more."""
        if self._end is not None and self._in_a_thread:
            with suppress(HeadraceError):  # the pages are no longer wanted
                self.verified()
        self._reading.abandon()

    def _run(self) -> None:
        self._reading.wait()
        self._reading.check()


class ReadAhead:
    """Reads all wanted leaves by the cheapest plan.

    Parameters
    ----------
    context
        Context of the phases.
    leaves : int32[n]
        Wanted leaves in disk order.
    cut
        Whether to stop before the next block; asked before each but the first. None to read all leaves.
    fine
        Whether to read in small blocks and to plan no more than a few of them, because `cut` will soon say to stop.
    """

    def __init__(
        self,
        context: SSIJContext,
        leaves: NDArray[np.int32],
        cut: Callable[[], bool] | None = None,
        *,
        fine: bool = False,
    ) -> None:
        self._context = context
        self._leaves = leaves
        self._cut = cut
        self._fine = fine
        self._buffer = context.store.read_buffer
        self._block = context.store.longest_read if fine else self._buffer.block

    def blocks(self) -> Generator[Block, None, None]:
        """Yield the blocks. Each can be used until the next one is requested."""
        clock, coming = self._context.reader.clock, self._blocks()
        helps = self._buffer.parts > 1 and self._context.workers.several and self._buffer.block >= _WORTH_A_THREAD
        workers = self._context.workers if helps else None
        fetches: deque[tuple[Block, _Fetch]] = deque()
        seconds = 0.0
        try:
            while True:
                begin = clock()
                while len(fetches) < self._buffer.parts and (block := next(coming, None)) is not None:
                    fetches.append((block[0], _Fetch(self._context.queue.begin(block[1]), workers)))
                if not fetches:
                    return
                fetches[0][1].verified()
                seconds += clock() - begin
                yield fetches.popleft()[0]
        finally:
            self._context.counters.read_seconds += seconds
            for _, fetch in fetches:
                fetch.abandon()  # nothing else may write to the buffer before it has ended

    def _blocks(self) -> Iterator[tuple[Block, Reads]]:
        """Yield the blocks with their reads, before they are read."""
        start, number, buffer = 0, 0, self._buffer
        size, device = self._context.snapshot.page_size, self._context.reader.device
        while start < len(self._leaves):
            pages, checksums = self._next_pages(start)
            plan = self._context.store.plan_reads(pages, device.seek, device.transfer, self._context.store.longest_read)
            slots, bounds = np.empty(len(pages), dtype=np.int64), np.empty(len(plan) + 1, dtype=np.int64)
            count = lay_out(
                plan.start, plan.length, plan.first, pages, number, self._block, buffer.parts, slots, bounds
            )
            number += count
            offsets, lengths, places = plan.start * size, plan.length * size, slots[plan.first[:-1]] * size
            frames, wanted = slots.astype(np.int32), plan.first.tolist()
            for low, high in pairwise(bounds[: count + 1].tolist()):
                left, right = wanted[low], wanted[high]
                if self._cut is not None and start + left > 0 and self._cut():
                    return
                self._context.counters.add_read(ReadReport(right - left, int(plan.length[low:high].sum()), high - low))
                yield Block(start + left, start + right, frames[left:right]), Reads(
                    offsets[low:high], lengths[low:high], places[low:high],
                    pages[left:right], slots[left:right], checksums[left:right],
                )  # fmt: skip
            start += len(pages)

    def _next_pages(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the pages to plan next, with checksums: all, or as many as the workspace has room to plan."""
        device = self._context.reader.device
        most = max(self._buffer.block, self._context.store.workspace // 4 // _PLAN_NBYTES)
        if self._fine:
            most = min(most, max(_BLOCKS_PLANNED * self._block, len(self._leaves) // _STEPS_PLANNED))
        pages, checksums = self._context.snapshot.pointers(self._leaves[start : start + most])
        if self._context.store.paged:  # whose leaves are in disk order piece by piece
            pages = pages[: _first_descent(pages)]
        elif start + len(pages) < len(self._leaves):
            pages = pages[: _end_of_runs(pages, device.seek / device.transfer)]
        return pages, checksums


def _first_descent(pages: NDArray[np.int64]) -> int:
    """Return how many pages ascend."""
    descents = np.flatnonzero(pages[1:] < pages[:-1])
    return int(descents[0]) + 1 if len(descents) else len(pages)


def _end_of_runs(pages: NDArray[np.int64], widest: float) -> int:
    """Return where to cut pages so that the plan of the first part belongs to the best plan of all, if possible.

    No read goes over a gap that costs more than a seek.
    """
    cuts = np.flatnonzero(np.diff(pages) - 1 > widest) + 1
    return int(cuts[-1]) if len(cuts) else len(pages)
