"""The pages of a join phase, in blocks: while one is being joined, the next one is read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from joins._block_kernels import lay_out
from storage.plan import ReadPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from joins._state import SSIJState
    from storage.read_queue import Reading

__all__ = ["Block", "ReadAhead"]

_PLAN_NBYTES = 80


@dataclass(frozen=True, slots=True)
class Block:
    """Pages that are in the read buffer together.

    Attributes
    ----------
    plan
        The reads.
    start, stop
        Which of the wanted leaves they bring in.
    slots : int32[stop - start]
        Frame of the read buffer in which each of these lies.
    """

    plan: ReadPlan
    start: int
    stop: int
    slots: NDArray[np.int32]


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
        self._half = max(1, self._buffer.pages // 2)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, each readable until the next one is asked for."""
        before: tuple[Block, Reading] | None = None
        try:
            for block in self._blocks():
                arrived, before = before, None
                if arrived is not None:
                    arrived[1].wait()
                before = (block, self._begin(block))
                if arrived is not None:
                    yield self._checked(*arrived)
            if before is not None:
                arrived, before = before, None
                arrived[1].wait()
                yield self._checked(*arrived)
        finally:
            if before is not None:
                before[1].wait()  # nobody else may write to the buffer before it has ended

    def _blocks(self) -> Iterator[Block]:
        """Yield the blocks before they are read."""
        start, number = 0, 0
        while start < len(self._leaves):
            pages = self._next_pages(start)
            plan = self._state.reader.plan(pages, min(self._state.store.max_scan, self._half))
            slots = np.empty(len(pages), dtype=np.int32)
            bounds = np.empty(len(plan) + 1, dtype=np.int64)
            count = lay_out(plan.start, plan.length, plan.first, pages, self._half, slots, bounds)
            firsts = plan.first.tolist()
            for low, high in pairwise(bounds[: count + 1].tolist()):
                left, right = firsts[low], firsts[high]
                part = ReadPlan(plan.start[low:high], plan.length[low:high], plan.first[low : high + 1] - left)
                frames = slots[left:right] + np.int32(self._half * (number % 2))
                yield Block(part, start + left, start + right, frames)
                number += 1
            start += len(pages)

    def _next_pages(self, start: int) -> NDArray[np.int64]:
        """Return the pages to plan now: all that are left, or as many as the workspace has room to plan."""
        device = self._state.reader.device
        most = max(self._half, self._state.store.workspace // 4 // _PLAN_NBYTES)
        pages = self._state.snapshot.leaf_pages[self._leaves[start : start + most]]
        if start + len(pages) < len(self._leaves):
            pages = pages[: _end_of_runs(pages, device.seek / device.transfer)]
        return pages

    def _begin(self, block: Block) -> Reading:
        leaves, snapshot = self._leaves[block.start : block.stop], self._state.snapshot
        pages, checksums = snapshot.leaf_pages[leaves], snapshot.leaf_checksums[leaves]
        return self._state.queue.begin(block.plan, pages, self._buffer.frames, block.slots, checksums)

    def _checked(self, block: Block, reading: Reading) -> Block:
        self._state.counters.add_read(reading.check())
        return block


def _end_of_runs(pages: NDArray[np.int64], widest: float) -> int:
    """Return where to cut pages so that a plan of the first part is part of the best plan of all, if that can be.

    No read goes over a gap that costs more than a seek.
    """
    cuts = np.flatnonzero(np.diff(pages) - 1 > widest) + 1
    return int(cuts[-1]) if len(cuts) else len(pages)
