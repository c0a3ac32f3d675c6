"""`ReactiveNL`: joins spilled blocks with spilled blocks, a block at a time (the paper's section 3.4, algorithm 4).

A chunk of blocks of the outer input is in memory and meets the blocks of the inner input one after another. Three
numbers say how far it is, so it can be left after any inner block: the first `joined[outer]` blocks of the outer have
met the first `joined[inner]` blocks of the inner, and the next `chunk` blocks of the outer the first `current` of
these.

Line 14 of the printed algorithm reads ``CurrInner < JoinedInner``, which leaves out the last inner block and never
ends; it must be ``<=``. Here blocks count from 0, so the test is ``current < joined[inner]``.

Beyond the paper: the chunk is held with an index, which the sorted inner blocks probe in order, instead of being merged
with each of them. An inner block is not read if its key range, or its time in memory, rules out new results with every
block of the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.joins.streams.base.blocks import read_block
from headrace.joins.streams.base.pairs import coexisted

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.base.pairs import Pairing
    from headrace.joins.streams.diner.disk import BlockList
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.joins.streams.tuples.results import ResultBuilder
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.joins.streams.tuples.store import TupleStore
    from headrace.storage.spill import SpillFile

__all__ = ["Disk", "ReactiveNL"]


class Disk(Protocol):
    """The operator, as the reactive phase needs it."""

    budget: MemoryBudget
    layouts: list[RowLayout]
    results: ResultBuilder

    def spill_file(self, side: int) -> SpillFile:
        """Return the spill file of an input."""
        ...

    def make_room(self, nbytes: int) -> bool:
        """Flush until so many bytes are free; return whether they are."""
        ...


class ReactiveNL:
    """State of the nested loops over spilled blocks.

    Parameters
    ----------
    operator
        Operator whose blocks they are.
    blocks
        Spilled blocks of each input.
    pairing
        Conditions between the inputs.

    Attributes
    ----------
    outer
        Input of which a chunk is in memory; None before the first invocation.
    joined
        For each input, how many of its blocks have met as many blocks of the other as `joined` says for that one (the
        paper's JoinedOuter and JoinedInner).
    current
        Next inner block to meet the chunk (the paper's CurrInner, less 1).
    chunk
        Blocks in the chunk (the paper's OuterMem).
    """

    def __init__(self, operator: Disk, blocks: Sequence[BlockList], pairing: Pairing) -> None:
        self._operator = operator
        self._blocks = blocks
        self._pairing = pairing
        self._stores = pairing.stores(operator.layouts, operator.budget)
        self._loaded = False
        self.outer: int | None = None
        self.joined = [0, 0]
        self.current = 0
        self.chunk = 0

    @property
    def unfinished(self) -> bool:
        """Whether two blocks have not met."""
        if self.outer is None:
            return all(map(len, self._blocks))
        return any(count < len(blocks) for count, blocks in zip(self.joined, self._blocks, strict=True))

    def step(self, most_blocks: int, most_nbytes: int) -> Iterator[pa.RecordBatch]:
        """Yield the results of the chunk with one inner block: the smallest unit of work.

        Parameters
        ----------
        most_blocks
            Most blocks of the outer input in a new chunk (the paper's MaxOuterMem).
        most_nbytes
            Most bytes of a new chunk; it has one block at least.

        Raises
        ------
        MemoryBudgetError
            If there is no memory for the chunk, though all tuples in memory were flushed.
        """
        outer = self._turn()
        inner = 1 - outer
        if self.joined[inner] == 0:  # nothing to meet yet
            self.joined[outer] = len(self._blocks[outer])
            return
        if self.current == 0 and not self._loaded:
            self.chunk = self._chunk_size(outer, most_blocks, most_nbytes)
        met = False
        while self.current < self.joined[inner] and not met:
            start = self.joined[outer]
            met = self._blocks[inner].meets(
                self.current, self._blocks[outer], start, start + self.chunk, self._pairing.driver.width
            )
            if met:
                self._load(outer)
                yield from self._join(outer, self.current)
            self.current += 1
        if self.current == self.joined[inner]:
            self.joined[outer] += self.chunk
            self.current = 0
            self.release()

    def release(self) -> None:
        """Free the memory of the chunk. It is read again when the work goes on."""
        self._loaded = False
        for store in self._stores:
            store.free()

    def _turn(self) -> int:
        """Return the outer input. Roles change when all blocks of the outer have met the inner's `joined` blocks."""
        if self.outer is None:
            self.outer = int(len(self._blocks[1]) < len(self._blocks[0]))
            self.joined[1 - self.outer] = len(self._blocks[1 - self.outer])
        if self.joined[self.outer] == len(self._blocks[self.outer]):
            self.outer = 1 - self.outer
        return self.outer

    def _chunk_size(self, outer: int, most_blocks: int, most_nbytes: int) -> int:
        blocks, start = self._blocks[outer], self.joined[outer]
        most = min(most_blocks, len(blocks) - start)
        count, nbytes = 1, blocks.content_nbytes(start)
        while count < most and nbytes + blocks.content_nbytes(start + count) <= most_nbytes:
            nbytes += blocks.content_nbytes(start + count)
            count += 1
        return count

    def _load(self, outer: int) -> None:
        if self._loaded:
            return
        store, start = self._stores[outer], self.joined[outer]
        for at in range(start, start + self.chunk):
            with self._read(outer, at) as rows:
                self._keep(store, rows)
        self._loaded = True

    def _keep(self, store: TupleStore, rows: Rows) -> None:
        """Insert a block of the chunk, if need be with the memory that tuples of the arriving phase hold."""
        while store.fitting(rows, 0) < len(rows):
            if not self._operator.make_room(self._operator.budget.available + 1):
                break  # the insertion raises
        store.insert(rows)

    def _join(self, outer: int, at: int) -> Iterator[pa.RecordBatch]:
        inner, store = 1 - outer, self._stores[outer]
        with self._read(inner, at) as rows:
            every = np.arange(len(rows), dtype=np.int64)
            for positions, slots in self._pairing.find(store, inner, rows, every, self._operator.results.most_rows):
                sources = self._new(rows, positions, store.rows, slots)
                yield from self._operator.results.batches(sources if inner == 0 else sources[::-1])

    @staticmethod
    def _new(
        left: Rows, positions: NDArray[np.int64], right: Rows, slots: NDArray[np.int64]
    ) -> list[tuple[Rows, NDArray[np.int64]]]:
        """Return the pairs that were not in memory together."""
        new = ~coexisted([(left, positions), (right, slots)])
        return [(left, positions[new]), (right, slots[new])]

    def _read(self, side: int, at: int) -> contextlib.AbstractContextManager[Rows]:
        operator, block = self._operator, self._blocks[side].block(at)
        operator.make_room(block.nbytes)
        return read_block(operator.spill_file(side), operator.layouts[side], block, operator.budget)
