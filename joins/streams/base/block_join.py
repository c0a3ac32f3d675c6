"""Join of spilled blocks of two inputs: chunks of the outer ones in memory, the inner ones one at a time.

What was joined while the tuples arrived is left out by the interval technique. Cleanup phases use this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headrace.joins.streams.base.blocks import read_block
from headrace.joins.streams.base.pairs import coexisted
from headrace.joins.streams.tuples._row_kernels import set_flags
from headrace.joins.streams.tuples.layout import MATCHED
from headrace.joins.streams.tuples.store import TupleStore
from headrace.storage.errors import MemoryBudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.blocks import Memory, SpilledBlock
    from headrace.joins.streams.base.operator import StreamsAlgorithm
    from headrace.joins.streams.base.pairs import Pairing
    from headrace.joins.streams.tuples.rows import Rows
    from headrace.storage.spill import SpillFile

__all__ = ["BlockSource", "Given", "join_blocks"]

Given: TypeAlias = "Callable[[SpilledBlock, Rows, NDArray[np.int64], Rows, NDArray[np.int64]], NDArray[np.bool_]]"
"""Returns which pairs of an inner block's tuples and outer tuples are results already."""


@dataclass(frozen=True)
class BlockSource:
    """Blocks of one input, which can be read several times.

    Attributes
    ----------
    side
        Input.
    file
        Their file; None if there are none.
    blocks
        Returns the blocks.
    """

    side: int
    file: SpillFile | None
    blocks: Callable[[], Iterable[SpilledBlock]]

    def read(self) -> Iterator[tuple[SpillFile, SpilledBlock]]:
        """Yield the blocks with their file."""
        if self.file is not None:
            for block in self.blocks():
                yield self.file, block


def join_blocks(
    algorithm: StreamsAlgorithm,
    pairing: Pairing,
    outer: BlockSource,
    inner: BlockSource,
    memory: Memory,
    given: Given | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the results of the blocks of two inputs that do not exist yet, and the outer tuples without a match.

    The outer tuples are read once, the inner ones once for each chunk of outer tuples that fits into the memory that is
    left. If the outer input's tuples without a match are results, they come after the chunk.

    Parameters
    ----------
    algorithm
        Algorithm whose budget, conditions and results are used.
    pairing
        Conditions between the two inputs.
    outer, inner
        Blocks.
    memory
        What the blocks that are read are charged to.
    given
        Returns which pairs are results already, apart from those whose tuples were in memory together.
    """
    kinds = pairing.index_kinds(outer.side, len(algorithm.graph.keys[outer.side]))
    store = TupleStore(algorithm.layouts[outer.side], algorithm.budget, kinds)
    try:
        for _ in _chunks(algorithm, store, outer, memory):
            for file, block in inner.read():
                with read_block(file, algorithm.layouts[inner.side], block, memory) as rows:
                    yield from _probe(algorithm, pairing, store, inner.side, rows, block, given)
            if algorithm.preserved(outer.side):
                yield from algorithm.alone(outer.side, store)
            store.free()
    finally:
        store.free()


def _chunks(algorithm: StreamsAlgorithm, store: TupleStore, outer: BlockSource, memory: Memory) -> Iterator[None]:
    """Fill the store again and again, until all outer tuples were in it."""
    for file, block in outer.read():
        start = 0
        while start < block.count:
            with read_block(file, algorithm.layouts[outer.side], block, memory) as rows:
                fits = store.fitting(rows, start)
                if fits == 0 and len(store) == 0:
                    raise MemoryBudgetError(
                        f"a tuple of {algorithm.graph.names[outer.side]!r} does not fit into the memory that is left "
                        "while spilled tuples are joined; give the join more memory"
                    )
                store.insert(rows, start, start + fits)
            start += fits
            if start < block.count:
                yield
    if len(store):
        yield


def _probe(
    algorithm: StreamsAlgorithm,
    pairing: Pairing,
    store: TupleStore,
    side: int,
    rows: Rows,
    block: SpilledBlock,
    given: Given | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the results of an inner block with the outer tuples in memory."""
    index = np.arange(len(rows), dtype=np.int64)
    for positions, slots in pairing.find(store, side, rows, index, algorithm.pair_limit):
        outer_rows = store.rows
        if algorithm.how != "inner":
            set_flags(outer_rows.records, outer_rows.layout.stride, outer_rows.layout.flags, MATCHED, slots)
        new = ~coexisted([(rows, positions), (outer_rows, slots)])
        if given is not None:
            new &= ~given(block, rows, positions, outer_rows, slots)
        sources = [(rows, positions[new]), (outer_rows, slots[new])]
        yield from algorithm.results.batches(sources if side == 0 else sources[::-1])
