"""The pages of a join phase, in blocks: while one is being joined, the next one is read, if there is room for two."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij._block_kernels import lay_out
from headrace.storage.errors import HeadraceError
from headrace.storage.read import ReadReport, Reads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.joins.ssij.state import SSIJState
    from headrace.joins.ssij.workers import Workers
    from headrace.storage.read import Reading

__all__ = ["Block", "ReadAhead"]

_PLAN_NBYTES = 144
_WORTH_A_THREAD = 64  # pages of a block: fewer are verified before a thread has woken up


@dataclass(frozen=True, slots=True)
class Block:
    """Pages that are in the read buffer together.

    Attributes
    ----------
    start, stop
        Which of the wanted leaves.
    slots : int32[stop - start]
        Frame of the read buffer in which each of these lies.
    """

    start: int
    stop: int
    slots: NDArray[np.int32]


class _Fetch:
    """Pages on their way: a thread, if there is one, awaits and verifies them while others are joined."""

    def __init__(self, reading: Reading, workers: Workers | None) -> None:
        self._reading = reading
        self._here = None if workers is None else Event()
        self._end = reading.check if workers is None else workers.start(self._run)

    def arrived(self) -> None:
        """Wait until the pages are in memory; the next ones can be asked for."""
        if self._here is None:
            self._reading.wait()
        else:
            self._here.wait()

    def verified(self) -> None:
        """Wait until they are known to be what was written.

        Raises
        ------
        CorruptPageError, StorageIOError
            If they are not, or cannot be read.
        """
        self._end()

    def abandon(self) -> None:
        """Return when nothing is written to the frames any more."""
        if self._here is not None:
            with suppress(HeadraceError):  # of pages that nobody wants
                self._end()
        self._reading.abandon()

    def _run(self) -> None:
        assert self._here is not None
        try:
            self._reading.wait()
        finally:
            self._here.set()
        self._reading.check()


class ReadAhead:
    """Reads all wanted leaves by the cheapest plan.

    Parameters
    ----------
    state
        Of the operator.
    leaves : int32[n]
        In the order of the disk.
    """

    def __init__(self, state: SSIJState, leaves: NDArray[np.int32]) -> None:
        self._state = state
        self._leaves = leaves
        self._buffer = state.store.read_buffer

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, each readable until the next one is asked for."""
        clock = self._state.reader.clock
        ahead = self._buffer.parts > 1
        helps = ahead and self._state.workers.several and self._buffer.block >= _WORTH_A_THREAD
        workers = self._state.workers if helps else None
        before: tuple[Block, _Fetch] | None = None
        seconds = 0.0
        try:
            for coming in chain(self._blocks(), (None,)):
                begin = clock()
                arrived, before = before, None
                if arrived is not None:
                    arrived[1].arrived()
                if ahead:
                    before = self._begin(coming, workers)
                if arrived is not None:
                    arrived[1].verified()
                seconds += clock() - begin
                if arrived is not None:
                    yield arrived[0]
                if not ahead:
                    before = self._begin(coming, workers)
        finally:
            self._state.counters.read_seconds += seconds
            if before is not None:
                before[1].abandon()  # nobody else may write to the buffer before it has ended

    def _begin(self, coming: tuple[Block, Reads] | None, workers: Workers | None) -> tuple[Block, _Fetch] | None:
        return None if coming is None else (coming[0], _Fetch(self._state.queue.begin(coming[1]), workers))

    def _blocks(self) -> Iterator[tuple[Block, Reads]]:
        """Yield the blocks before they are read."""
        start, number, buffer = 0, 0, self._buffer
        size, device = self._state.snapshot.page_size, self._state.reader.device
        while start < len(self._leaves):
            pages = self._next_pages(start)
            checksums = self._state.snapshot.leaf_checksums[self._leaves[start : start + len(pages)]]
            plan = self._state.store.plan_reads(pages, device.seek, device.transfer, self._state.store.longest_read)
            self._state.counters.add_read(ReadReport(plan.pages_wanted, plan.pages_read, len(plan)))
            slots, bounds = np.empty(len(pages), dtype=np.int64), np.empty(len(plan) + 1, dtype=np.int64)
            count = lay_out(
                plan.start, plan.length, plan.first, pages, number, buffer.block, buffer.parts, slots, bounds
            )
            number += count
            offsets, lengths, places = plan.start * size, plan.length * size, slots[plan.first[:-1]] * size
            frames, wanted = slots.astype(np.int32), plan.first.tolist()
            for low, high in pairwise(bounds[: count + 1].tolist()):
                left, right = wanted[low], wanted[high]
                yield Block(start + left, start + right, frames[left:right]), Reads(
                    offsets[low:high], lengths[low:high], places[low:high],
                    pages[left:right], slots[left:right], checksums[left:right],
                )  # fmt: skip
            start += len(pages)

    def _next_pages(self, start: int) -> NDArray[np.int64]:
        """Return the pages to plan now: all that are left, or as many as the workspace has room to plan."""
        device = self._state.reader.device
        most = max(self._buffer.block, self._state.store.workspace // 4 // _PLAN_NBYTES)
        pages = self._state.snapshot.leaf_pages[self._leaves[start : start + most]]
        if start + len(pages) < len(self._leaves):
            pages = pages[: _end_of_runs(pages, device.seek / device.transfer)]
        return pages


def _end_of_runs(pages: NDArray[np.int64], widest: float) -> int:
    """Return where to cut pages so that a plan of the first part is part of the best plan of all, if that can be.

    No read goes over a gap that costs more than a seek.
    """
    cuts = np.flatnonzero(np.diff(pages) - 1 > widest) + 1
    return int(cuts[-1]) if len(cuts) else len(pages)
