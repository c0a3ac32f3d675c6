"""Join of spilled blocks of two inputs: chunks of the outer ones in a hash table, which the inner ones probe.

Pairs that met while the tuples arrived are left out, see `Meetings`. Cleanup phases use this, several at a time in
threads: a join has its own memory, and changes nothing that it shares with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples._row_kernels import set_flags, shift_heap
from headrace.joins.streams.tuples.indexes import new_cursor
from headrace.joins.streams.tuples.layout import MATCHED
from headrace.joins.streams.tuples.rows import Rows, heap_range
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.format import SLACK
from headrace.storage.read import FrameMemory
from headrace.storage.spill import block_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.streams.base.blocks import SpilledBlock
    from headrace.joins.streams.base.operator import StreamsAlgorithm
    from headrace.joins.streams.base.pairs import Pairing
    from headrace.joins.streams.tuples._index_kernels import Meetings
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.storage.spill import SpillFile

__all__ = ["BlockJoin", "BlockSource", "Given", "join_memory", "whole_nbytes"]

Given: TypeAlias = "Callable[[Rows, NDArray[np.int64], Rows, NDArray[np.int64]], NDArray[np.bool_]]"
"""Returns which pairs of inner and outer tuples are results already, though `Meetings` does not tell."""

_LINK, _HEAD = 4, 8  # bytes of a tuple in the hash table, beside its own; up to two heads
_CHUNK_SHARE = 8
_MOST_CHUNK = 1 << 20
_LARGE = 32 << 20
_WORD = 8
_ODDS = 256  # bytes for slack and alignment of all parts of the memory


def join_memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory for a `BlockJoin`, which the caller has charged. Joins can use it one after another.

    A page of it is taken when it is first written, so a second join in it is faster than one in new memory.
    """
    memory = FrameMemory(max(nbytes - SLACK, 0))
    if nbytes >= _LARGE:
        memory.allow(nbytes - SLACK, 0)
    return memory.buffer


def whole_nbytes(outer: BlockSource, inner: BlockSource) -> int:
    """Return the memory with which a `BlockJoin` holds all outer tuples at once, so that it reads each block once."""
    fixed = block_nbytes(max(outer.largest, inner.largest)) + outer.count * (outer.tuple_nbytes + _LINK + _HEAD) + _ODDS
    return fixed + min(-(-fixed // (_CHUNK_SHARE - 1)), _MOST_CHUNK)


@dataclass(frozen=True)
class BlockSource:
    """Blocks of one input, which can be read several times.

    Attributes
    ----------
    side
        Input.
    layout
        Layout of their tuples.
    file
        Their file; None if there are none.
    blocks
        Returns the blocks; none if there is no file.
    count, nbytes
        Number of their tuples, and bytes of these at most.
    """

    side: int
    layout: RowLayout
    file: SpillFile | None
    blocks: Callable[[], Iterable[SpilledBlock]]
    count: int
    nbytes: int

    @property
    def largest(self) -> int:
        """Most bytes of a block's tuples."""
        return 0 if self.file is None else self.file.largest

    @property
    def tuple_nbytes(self) -> int:
        """Bytes of a tuple on average."""
        return -(-self.nbytes // self.count) if self.count else self.layout.stride

    def read(self, block: SpilledBlock, buffer: NDArray[np.uint8]) -> Rows:
        """Return the tuples of a block, in this buffer."""
        assert self.file is not None
        content = self.file.read(block.ref, buffer)
        return Rows(self.layout, block.count, content, content[block.count * self.layout.stride :])


class BlockJoin:
    """Join of the blocks of two inputs.

    Parameters
    ----------
    algorithm
        Algorithm whose conditions, join type and results are used.
    pairing
        Conditions between the two inputs.
    outer, inner
        Blocks.
    meetings
        Which inner and outer tuples met before.
    memory
        Memory to use, see `join_memory`. No other join may use it at the same time.
    given
        Returns which pairs are results already, apart from those that met.
    """

    def __init__(
        self,
        algorithm: StreamsAlgorithm,
        pairing: Pairing,
        outer: BlockSource,
        inner: BlockSource,
        meetings: Meetings,
        memory: NDArray[np.uint8],
        given: Given | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._pairing = pairing
        self._outer, self._inner = outer, inner
        self._meetings = meetings
        self._given = given
        largest = max(outer.largest, inner.largest)
        chunk = min(len(memory) // _CHUNK_SHARE, _MOST_CHUNK) & -_WORD
        chunk_at = block_nbytes(largest)
        table_at = chunk_at + (chunk if chunk >= 2 * largest else 0)
        whole = memory if len(memory) >= chunk_at else np.empty(chunk_at, dtype=np.uint8)
        self._buffer, self._chunk, self._table = np.split(whole, [chunk_at, table_at])

    def results(self) -> Generator[pa.RecordBatch, None, None]:
        """Yield the results that do not exist yet, and the tuples without a match if they are results.

        The outer tuples are read once, the inner ones once for each chunk of outer tuples that fits into the memory. If
        tuples of both inputs without a match are results, and the outer ones need several chunks, the inputs change
        roles in the end to find those of the inner one.

        Raises
        ------
        MemoryBudgetError
            If a tuple does not fit into the memory.
        CorruptPageError
            If a block is damaged.
        StorageIOError
            If the operating system refuses.
        """
        buffer = self._buffer
        whole = yield from self._join(buffer)
        if self._algorithm.preserved(self._inner.side) and not whole:
            yield from self._alone_of_inner(buffer)

    def _join(self, buffer: NDArray[np.uint8]) -> Generator[pa.RecordBatch, None, bool]:
        """Join the outer tuples chunk by chunk; return whether one chunk was enough."""
        outer, whole = self._outer, False
        for table in self._tables(outer, buffer):
            whole = len(table) == outer.count
            for rows in self._chunks(self._inner, buffer):
                yield from self._probe(table, rows, whole=whole)
            if self._algorithm.preserved(outer.side):
                yield from self._alone(outer.side, table.rows)
        return whole

    def _probe(self, table: _HashTable, rows: Rows, *, whole: bool) -> Iterator[pa.RecordBatch]:
        """Yield the results of inner tuples with the outer tuples in memory, which may be all of them."""
        algorithm, inner = self._algorithm, self._inner.side
        matched = np.zeros(len(rows), dtype=np.bool_) if whole and algorithm.preserved(inner) else None
        for at, slots in table.pairs(self._pairing, inner, rows, self._meetings, algorithm.pair_limit):
            if algorithm.preserved(self._outer.side):
                table.flag(slots)
            if matched is not None:
                matched[at] = True
            sources = [(rows, at), (table.rows, slots)]
            if self._given is not None:
                new = ~self._given(rows, at, table.rows, slots)
                sources = [(source, index[new]) for source, index in sources]
            yield from algorithm.results.batches(sources if inner == 0 else sources[::-1])
        if matched is not None:
            yield from algorithm.unmatched(inner, rows, np.flatnonzero(~matched & ((rows.flags & MATCHED) == 0)))

    def _alone_of_inner(self, buffer: NDArray[np.uint8]) -> Iterator[pa.RecordBatch]:
        """Yield the inner tuples without a match: they are in memory now, and the outer ones probe them."""
        for table in self._tables(self._inner, buffer):
            for rows in self._chunks(self._outer, buffer):
                limit = self._algorithm.pair_limit
                for _, slots in table.pairs(self._pairing, self._outer.side, rows, _NEVER, limit):
                    table.flag(slots)
            yield from self._alone(self._inner.side, table.rows)

    def _alone(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yield the tuples in memory without a match as results with nulls."""
        limit = self._algorithm.pair_limit
        for start in range(0, len(rows), limit):
            index = start + np.flatnonzero((rows.flags[start : start + limit] & MATCHED) == 0)
            yield from self._algorithm.unmatched(side, rows, index)

    def _tables(self, source: BlockSource, buffer: NDArray[np.uint8]) -> Iterator[_HashTable]:
        """Yield a hash table again and again, until all tuples of an input were in it."""
        table = _HashTable(source.layout, self._pairing.driver.key_of(source.side), self._table, source)
        for block in source.blocks():
            start = 0
            while (start := table.add(source.read(block, buffer), start)) < block.count:
                if len(table) == 0:
                    raise MemoryBudgetError.of(
                        f"a tuple of {self._algorithm.graph.names[source.side]!r} does not fit into the memory that is "
                        "left while spilled tuples are joined"
                    )
                table.build()
                yield table
                table.clear()
        if len(table):
            table.build()
            yield table

    def _chunks(self, source: BlockSource, buffer: NDArray[np.uint8]) -> Iterator[Rows]:
        """Yield the tuples of an input, those of several small blocks at a time."""
        chunk = _TupleMemory(source.layout, self._chunk)
        for spilled in source.blocks():
            block = source.read(spilled, buffer)
            if len(chunk) and chunk.fitting(block, 0) < len(block):
                yield chunk.rows
                chunk.clear()
            if chunk.fitting(block, 0) < len(block):
                yield block
            else:
                chunk.add(block, 0)
        if len(chunk):
            yield chunk.rows


_NEVER = kernels.Meetings(kernels.NEVER_MET, 0, 0)


class _TupleMemory:
    """Tuples of one input in memory of a fixed size: records from the front, variable parts from the back.

    Parameters
    ----------
    layout
        Layout of the tuples.
    memory
        Memory that holds them.
    """

    def __init__(self, layout: RowLayout, memory: NDArray[np.uint8]) -> None:
        self.layout = layout
        self._bytes = memory
        self._size = self._low = max(len(memory) - SLACK, 0) & -_WORD
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Rows:
        """Tuples, by slot. Views, valid until more are added or all are dropped."""
        return Rows(self.layout, self._count, self._bytes, self._bytes)

    def clear(self) -> None:
        """Drop all tuples."""
        self._count, self._low = 0, self._size

    def fitting(self, rows: Rows, start: int) -> int:
        """Return up to which position tuples from `start` on fit."""
        room = self._low - self._count * self.layout.stride
        low, high = start, min(len(rows), start + room // self.layout.stride)
        if self.layout.heap < 0:
            return high
        while low < high:
            middle = (low + high + 1) >> 1
            first, last = heap_range(rows, start, middle)
            if (middle - start) * self.layout.stride + last - first <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, rows: Rows, start: int) -> int:
        """Add tuples from position `start` on, as many as fit; return the position of the next."""
        stop, stride, heap_at = self.fitting(rows, start), self.layout.stride, self.layout.heap
        added = self._bytes[self._count * stride :]
        added[: (stop - start) * stride] = rows.records[start * stride : stop * stride]
        if heap_at >= 0 and stop > start:
            first, last = heap_range(rows, start, stop)
            self._low -= last - first
            self._bytes[self._low : self._low + last - first] = rows.heap[first:last]
            shift_heap(added, stride, heap_at, stop - start, self._low - first)
        self._count += stop - start
        return stop


class _HashTable(_TupleMemory):
    """Tuples of one input in memory with hash chains over one key.

    Parameters
    ----------
    layout
        Layout of the tuples.
    key
        Key of the chains.
    memory
        Memory that holds them and their chains.
    source
        Tuples to expect.
    """

    def __init__(self, layout: RowLayout, key: int, memory: NDArray[np.uint8], source: BlockSource) -> None:
        room = max(len(memory) - SLACK - _WORD, 0)
        self._most = min(room // (source.tuple_nbytes + _LINK + _HEAD), source.count)
        heads, links = _HEAD * self._most, -(-_LINK * self._most // _WORD) * _WORD
        super().__init__(layout, memory[heads + links :])
        self._key = key
        self._all_heads = memory[:heads].view(np.int32)
        self._links = memory[heads : heads + links].view(np.int32)
        self._heads = self._all_heads[:0]

    def fitting(self, rows: Rows, start: int) -> int:
        """Return up to which position tuples from `start` on fit."""
        return min(super().fitting(rows, start), start + self._most - self._count)

    def build(self) -> None:
        """Make the hash chains."""
        self._heads = self._all_heads[: 1 << self._bits]
        kernels.chain_all(self.rows.keyed(self._key), self._count, 64 - self._bits, self._heads, self._links)

    @property
    def _bits(self) -> int:
        return max(1, (self._count - 1).bit_length())

    def flag(self, slots: NDArray[np.int64]) -> None:
        """Note that these tuples have a match."""
        set_flags(self._bytes, self.layout.stride, self.layout.flags, MATCHED, slots)

    def pairs(
        self, pairing: Pairing, side: int, probing: Rows, meetings: Meetings, limit: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the pairs that meet all conditions and did not meet before, at most `limit` at once.

        Yields
        ------
        at, slots : int64[n]
            Positions in `probing`, which are tuples of the input `side`, and slots. Valid until the next pairs.
        """
        cursor, rows = new_cursor(), self.rows
        out = np.empty(limit, dtype=np.int64), np.empty(limit, dtype=np.int64)
        key = pairing.driver.key_of(side)
        while cursor[0] < len(probing):
            found = kernels.join_chains(
                probing.keyed(key),
                len(probing),
                rows.keyed(self._key),
                64 - self._bits,
                self._heads,
                self._links,
                meetings,
                cursor,
                *out,
            )
            at, slots = out[0][:found], out[1][:found]
            keep = pairing.meets(side, probing, at, rows, slots, driven=True)
            yield (at, slots) if keep is None else (at[keep], slots[keep])
