"""`NestedBlocks`: nested loops over the spilled blocks of any number of inputs, which can be left after each step.

This is the reactive phase of MINER (Bornea and others, TKDE 22(8), 2010, section 4.2), and the cleanup phase of joins
of many inputs. One input is outer, the others are inner in a join sequence. The numbers `joined` say how far the work
is: all combinations of the first ``joined[i]`` blocks of each input ``i`` have met. A chunk of the next blocks of the
outer input meets all combinations of the first ``joined[i]`` blocks of the inner inputs, then `joined` of the outer
grows. When the outer input is exhausted, an input with blocks that have not met takes its role. Thus each combination
of blocks meets once, and the interval technique leaves out the results of the arriving phase.

Beyond the paper:

- The outer chunk and the inner blocks are held with indexes. An inner block loses the tuples without a match in the
  input before it in the join sequence, when it is loaded.
- If no partial result reaches an input, the blocks of the inputs behind it are not read, and all their combinations
  count as met.
- In the cleanup phase an inner group has as many blocks as fit into its share of the memory with their remaining
  tuples, instead of one.
- The join sequence of the paper for an outer input in the middle of a chain, or in a snowflake, consists of several
  sequences, one of which has priority. Here they follow each other in one sequence, with the same order of loading.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.joins.streams.base.blocks import held, read_block
from headrace.joins.streams.base.pairs import coexisted
from headrace.joins.streams.tuples.arena import ARENA_PAGE
from headrace.joins.streams.tuples.store import TupleStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.base.blocks import SpilledBlock
    from headrace.joins.streams.base.combining import Combiner, Step
    from headrace.joins.streams.tuples.conditions import JoinGraph
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.joins.streams.tuples.results import ResultBuilder
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.spill import SpillFile

__all__ = ["BlockSequence", "NestedBlocks", "Operator"]


class BlockSequence(Protocol):
    """Spilled blocks of one input."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def block(self, at: int) -> SpilledBlock:
        """Return a block."""
        ...

    def content_nbytes(self, at: int) -> int:
        """Return the bytes of a block's tuples."""
        ...


class Operator(Protocol):
    """The operator, as the nested loops need it."""

    budget: MemoryBudget
    graph: JoinGraph
    layouts: list[RowLayout]
    results: ResultBuilder
    combiner: Combiner
    buffer_nbytes: int
    """Memory to read a block, and to copy its tuples."""

    def group_nbytes(self, side: int) -> int:
        """Return the memory for the tuples of one block with their indexes."""
        ...

    def make_room(self, nbytes: int) -> bool:
        """Flush until so many bytes are free; return whether they are."""
        ...


class NestedBlocks:
    """State of the nested loops.

    Parameters
    ----------
    operator
        Operator whose blocks they are.
    blocks
        Spilled blocks of each input.
    file
        Returns the spill file of an input.

    Attributes
    ----------
    outer
        Input of which a chunk is in memory; None before the first step.
    joined
        For each input, the number of its first blocks of which all combinations have met (the paper's JoinedOuter and
        JoinedInner).
    start, count
        For each input, the first block and the number of blocks in memory. For inner inputs the start is the paper's
        CurrInner, less 1; for the outer input the count is its OuterMem. A count of 0 means that it is not chosen yet.
    sequence
        Join sequence behind the outer input.
    """

    def __init__(self, operator: Operator, blocks: Sequence[BlockSequence], file: Callable[[int], SpillFile]) -> None:
        self._operator = operator
        self._file = file
        combiner, layouts = operator.combiner, operator.layouts
        self._stores = [
            TupleStore(layout, operator.budget, combiner.index_kinds(side, len(layout.keys)))
            for side, layout in enumerate(layouts)
        ]
        self.restart(blocks)

    def restart(self, blocks: Sequence[BlockSequence]) -> None:
        """Begin with other blocks, none of which have met. No block is in memory."""
        self._blocks = blocks
        self.outer: int | None = None
        self.joined = [0] * len(blocks)
        self.start, self.count = [0] * len(blocks), [0] * len(blocks)
        self.sequence: list[Step] = []
        self._loaded: set[int] = set()

    def group_nbytes(self, side: int, block: int) -> int:
        """Return the memory for the tuples of a block of so many bytes, with their indexes."""
        store = self._stores[side]
        tuples = block // store.layout.stride + 1
        indexes = sum(index.nbytes_for(tuples) for index in store.indexes if index is not None)
        return block + 2 * ARENA_PAGE + indexes

    @property
    def unfinished(self) -> bool:
        """Whether a combination of blocks has not met."""
        if self.outer is None:
            return all(map(len, self._blocks))
        return any(count < len(blocks) for count, blocks in zip(self.joined, self._blocks, strict=True))

    def step(self, most_blocks: int, outer_nbytes: int, *, fill: bool) -> Iterator[pa.RecordBatch]:
        """Yield the results of the outer chunk with one group of blocks of each inner input.

        Parameters
        ----------
        most_blocks, outer_nbytes
            Most blocks of a new chunk (the paper's MaxOuterMem), and their most bytes; it has one block at least.
        fill
            Whether a new group of inner blocks has as many blocks as fit into its share of the memory, or one.

        Raises
        ------
        MemoryBudgetError
            If there is no memory for the blocks, though all tuples in memory were flushed.
        """
        outer = self._begin(most_blocks, outer_nbytes)
        reached = 0

        def store_of(side: int) -> TupleStore:
            nonlocal reached
            position = next(at for at, step in enumerate(self.sequence) if step.side == side)
            reached = max(reached, position)
            self._load_inner(position, fill=fill)
            return self._stores[side]

        self._load_outer(outer)
        every = self._stores[outer].rows, np.arange(len(self._stores[outer]), dtype=np.int64)
        for pieces in self._operator.combiner.combine({outer: every}, self.sequence, store_of):
            sources = [pieces[side] for side in range(len(self._blocks))]
            new = ~coexisted(sources)
            yield from self._operator.results.batches([(rows, index[new]) for rows, index in sources])
        self._advance(outer, reached)

    def release(self) -> None:
        """Free the memory of all blocks. They are read again when the work goes on."""
        self._loaded.clear()
        for store in self._stores:
            store.free()

    def _begin(self, most_blocks: int, outer_nbytes: int) -> int:
        """Choose the outer input and its next chunk, unless a chunk has not met all inner blocks yet."""
        if self.outer is None:
            self.outer = min(range(len(self._blocks)), key=lambda side: len(self._blocks[side]))
            self.joined = [0 if side == self.outer else len(blocks) for side, blocks in enumerate(self._blocks)]
        if self.count[self.outer] == 0:
            self.outer = self._turn(self.outer)
            self.start = [0] * len(self._blocks)
            self.start[self.outer] = self.joined[self.outer]
            self.count[self.outer] = self._chunk_size(self.outer, most_blocks, outer_nbytes)
            self.sequence = self._operator.combiner.sequence(self.outer, lambda here, there: 0)  # noqa: ARG005
        return self.outer

    def _turn(self, outer: int) -> int:
        """Return the outer input of the next chunk: another one when all blocks of this one have met the others."""
        sides = len(self._blocks)
        order = ((outer + turn) % sides for turn in range(sides))
        return next(side for side in order if self.joined[side] < len(self._blocks[side]))

    def _chunk_size(self, outer: int, most_blocks: int, most_nbytes: int) -> int:
        blocks, start = self._blocks[outer], self.joined[outer]
        most = min(most_blocks, len(blocks) - start)
        count, nbytes = 1, blocks.content_nbytes(start)
        while count < most and nbytes + blocks.content_nbytes(start + count) <= most_nbytes:
            nbytes += blocks.content_nbytes(start + count)
            count += 1
        return count

    def _advance(self, outer: int, reached: int) -> None:
        """Go on to the next blocks at position `reached` of the sequence, or before it if there are none."""
        for position in range(len(self.sequence) - 1, -1, -1):
            side = self.sequence[position].side
            if position <= reached:
                self.start[side] += self.count[side]
                self._drop(side)
                if self.start[side] < self.joined[side]:
                    return
            self.start[side] = 0
            self._drop(side)
        self.joined[outer] += self.count[outer]
        self._drop(outer)

    def _drop(self, side: int) -> None:
        self.count[side] = 0
        self._loaded.discard(side)
        self._stores[side].free()

    def _load_outer(self, outer: int) -> None:
        if outer not in self._loaded:
            for at in range(self.start[outer], self.start[outer] + self.count[outer]):
                with self._read(outer, at) as rows:
                    self._keep(self._stores[outer], rows)
            self._loaded.add(outer)

    def _load_inner(self, position: int, *, fill: bool) -> None:
        """Load a group of inner blocks: the one that was left, or a new one."""
        step = self.sequence[position]
        side, store = step.side, self._stores[step.side]
        if side in self._loaded:
            return
        at, known = self.start[side], self.count[side]
        stop = at + known if known else self.joined[side] if fill else at + 1
        limit = self._share(position)
        while at < stop:
            with self._read(side, at) as rows:
                matching = self._matching(step, rows)
                first = at == self.start[side]
                if not (known or first) and store.fitting(matching, 0, limit - store.nbytes) < len(matching):
                    break
                self._keep(store, matching)
            at += 1
        self.count[side] = at - self.start[side]
        self._loaded.add(side)

    def _share(self, position: int) -> int:
        """Return the memory for the group at a position, so that each one behind it has as much or its least."""
        operator, behind = self._operator, self.sequence[position + 1 :]
        free = operator.budget.available - operator.buffer_nbytes
        return (free - sum(operator.group_nbytes(step.side) for step in behind)) // (1 + len(behind))

    def _matching(self, step: Step, rows: Rows) -> Rows:
        """Return the tuples that have a match in the input before them in the sequence."""
        found = np.zeros(len(rows), dtype=np.bool_)
        every, combiner = np.arange(len(rows), dtype=np.int64), self._operator.combiner
        pairing = combiner.pairing(step.parent, step.side)
        for positions, _ in pairing.find(self._stores[step.parent], step.side, rows, every, combiner.limit):
            found[positions] = True
        return rows if found.all() else rows.take(np.flatnonzero(found))

    def _keep(self, store: TupleStore, rows: Rows) -> None:
        """Insert tuples, if need be with the memory that tuples of the arriving phase hold."""
        while store.fitting(rows, 0) < len(rows):
            if not self._operator.make_room(self._operator.budget.available + 1):
                break  # the insertion raises
        store.insert(rows)

    @contextlib.contextmanager
    def _read(self, side: int, at: int) -> Iterator[Rows]:
        """Yield the tuples of a block; memory for a copy of them is charged as well."""
        operator, block = self._operator, self._blocks[side].block(at)
        operator.make_room(2 * block.nbytes)
        with (
            held(operator.budget, block.nbytes),
            read_block(self._file(side), operator.layouts[side], block, operator.budget) as rows,
        ):
            yield rows
