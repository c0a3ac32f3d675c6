"""`RunMerger`: sorted runs of two inputs in spill files, and the merging phase that joins what was not joined before.

Progressive merge join and hash-merge join write runs in groups: tuples of one group have been joined with each other,
tuples of different groups have not. A turn of the merging phase joins the tuples of some groups across the groups, and
makes one group of them. So each pair of tuples is joined once, and no stamps are compared.

A turn has two passes. The joining pass reads the blocks of the first input in key order, and with each of them the
blocks of the second input whose key ranges it meets; a cache keeps as many of these as memory allows. A key with more
tuples than fit into memory needs no special treatment: its blocks are read several times. The merging pass writes the
runs of each input as one run. It is left out when no turn follows, or when memory does not hold a block of each run;
then the group has several runs.

Memory: a reserve of two blocks, and what is available beyond it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.streams.base.blocks import (
    SpilledBlock,
    SpillReserve,
    held,
    merge_rows,
    write_block,
)
from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.indexes import new_cursor
from headrace.joins.streams.tuples.keys import Width
from headrace.joins.streams.tuples.rows import Rows
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.spill import BlockRef, block_nbytes
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.base.operator import StreamsAlgorithm
    from headrace.joins.streams.base.pairs import Pairing
    from headrace.joins.streams.tuples.layout import RowLayout
    from headrace.storage.spill import SpillFile

__all__ = ["LEAST_BLOCK", "LEAST_FAN_IN", "Run", "RunGroup", "RunMerger"]

LEAST_BLOCK = 8 << 10
LEAST_FAN_IN = 4
"""Fewest runs that a turn takes: two of each input."""
_MOST_BLOCK = 1 << 20
_SHARE = 32
_FIELDS = 6
_LOW = 4
_ENTRY_NBYTES = 160  # of a block: 48 of its entry, and copies of entries in a turn
_RUN_NBYTES = 224  # of a run without its entries, and of its part of a group
_LISTS_SHARE = 4  # of the memory: longer lists are to blame when memory is full
_ENTRY_GROWTH = 4  # blocks at most that are written for each that is merged
_ENTRY = 12  # bytes of a key word and a slot
_SCRATCH = 32  # bytes for each tuple of a block that is merged: words, their order, and copies of both
_OUTPUT_BLOCKS = 4  # buffers of a block that is merged: parts, their concatenation, in order, as written
_SIGN = np.uint64(1 << 63)
_EQUAL = Width(0)


@dataclass(frozen=True, slots=True)
class RunBlock:
    """A block of a run: where it is, and its first and last key word."""

    block: SpilledBlock
    low: int
    high: int

    @property
    def entry(self) -> tuple[int, ...]:
        """Row of `Run.entries`."""
        ref = self.block.ref
        return ref.number, ref.page, ref.nbytes, self.block.count, self.low, self.high


class Run:
    """Blocks of tuples of one input in the order of their key words.

    Parameters
    ----------
    blocks
        Blocks in order.

    Attributes
    ----------
    entries : uint64[blocks, 6]
        Number, first page, bytes and tuples of each block, and its first and last key word.
    """

    __slots__ = ("entries",)

    def __init__(self, blocks: Iterable[RunBlock]) -> None:
        self.entries = np.array([block.entry for block in blocks], dtype=np.uint64).reshape(-1, _FIELDS)

    def __len__(self) -> int:
        return len(self.entries)


def block_of(entry: NDArray[np.uint64]) -> RunBlock:
    """Return the block of a row of `Run.entries`."""
    number, page, nbytes, count, low, high = (int(value) for value in entry)
    return RunBlock(SpilledBlock(BlockRef(number, page, nbytes), count, -1), low, high)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of both inputs whose tuples have been joined with each other: for each input, its runs."""

    runs: tuple[tuple[Run, ...], tuple[Run, ...]]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(len(run) for runs in self.runs for run in runs)


class RunMerger:
    """Writes sorted runs, and joins groups of them.

    Parameters
    ----------
    algorithm
        Join of two streams, whose budget, spill files and results are used.
    pairing
        Conditions. Runs are in the order of the keys of its driver.
    fan_in
        Most runs to merge in a turn, of both inputs together (the paper's F).
    stores
        Bytes that the operator needs for tuples at least.

    Raises
    ------
    MemoryBudgetError
        If the memory is not enough.
    """

    def __init__(self, algorithm: StreamsAlgorithm, pairing: Pairing, fan_in: int, stores: int) -> None:
        self._algorithm = algorithm
        self._pairing = pairing
        self._budget: MemoryBudget = algorithm.budget
        self._keys = [pairing.driver.key_of(side) for side in (0, 1)]
        self.block_nbytes = max(LEAST_BLOCK, min(self._budget.limit // _SHARE, _MOST_BLOCK))
        most_tuples = self.block_nbytes // min(layout.stride for layout in algorithm.layouts)
        reserve = 2 * (block_nbytes(self.block_nbytes) + _ENTRY * most_tuples)
        algorithm.require(reserve + stores, "tuples and for two blocks of them")
        self._reserve = SpillReserve(self._budget, reserve)
        self.most_groups = fan_in // 2

    def write_run(self, side: int, rows: Rows, slots: NDArray[np.int32] | NDArray[np.int64]) -> Run:
        """Write tuples, given in the order of their key words, as a run. Charge its entries with `keep`."""
        run: list[RunBlock] = []
        start = 0
        while start < len(slots):
            count = min(len(slots) - start, max(1, self.block_nbytes // rows.layout.stride))
            index = slots[start : start + count].astype(np.int64)
            while len(index) > 1 and rows.nbytes_of(index) > self.block_nbytes:
                index = index[: (len(index) + 1) // 2]
            with held(self._reserve, rows.nbytes_of(index)):
                run.append(self._write(side, rows.take(index)))
            start += len(index)
        return Run(run)

    def keep(self, group: RunGroup) -> RunGroup:
        """Charge a group that was written, and its list entries.

        Raises
        ------
        MemoryBudgetError
            If there is no memory for them.
        """
        if self.entry_nbytes(group) > self._budget.available:
            raise self._lists_full()
        self._budget.charge("statistics", self.entry_nbytes(group))
        return group

    def no_room(self, side: int) -> MemoryBudgetError:
        """Return the error for a tuple of an input that an empty memory does not take."""
        lists = self._budget.held("statistics")
        return self._lists_full() if lists > self._budget.limit // _LISTS_SHARE else self._algorithm.no_room(side)

    def _lists_full(self) -> MemoryBudgetError:
        """Return the error for lists of blocks that leave no memory for tuples."""
        lists, limit = self._budget.held("statistics"), self._budget.limit
        return MemoryBudgetError.of(
            f"{self._algorithm.counters.rows_spilled:,} tuples were spilled, and the lists of their blocks take "
            f"{format_size(lists)} of the memory of {format_size(limit)}, which leaves no room for tuples",
            2 * limit,
            "use an operator without such lists, such as XJoin",
        )

    @staticmethod
    def entry_nbytes(group: RunGroup) -> int:
        """Return the bytes of a group and its list entries."""
        return _RUN_NBYTES * sum(map(len, group.runs)) + _ENTRY_NBYTES * group.blocks

    def turn(self, groups: Sequence[RunGroup], *, merge: bool) -> Generator[pa.RecordBatch, None, RunGroup]:
        """Join the tuples of several groups across the groups, and return the groups as one.

        Parameters
        ----------
        groups
            Groups to join.
        merge
            Whether another turn follows, so that merging the runs pays.
        """
        yield from self._join(groups)
        runs = []
        for side in (0, 1):
            old = [run for group in groups for run in group.runs[side]]
            runs.append(self._merge(side, old) if merge and self._can_merge(side, old) else tuple(old))
        joined = RunGroup((runs[0], runs[1]))
        change = self.entry_nbytes(joined) - sum(map(self.entry_nbytes, groups))
        self._budget.charge("statistics", max(change, 0))
        self._budget.release("statistics", max(-change, 0))
        return joined

    def turns(self, groups: Sequence[RunGroup]) -> Iterator[pa.RecordBatch]:
        """Join groups, turn after turn, until one is left."""
        left = list(groups)
        while len(left) > 1:
            taken, left = left[: self.most_groups], left[self.most_groups :]
            left.append((yield from self.turn(taken, merge=bool(left))))

    def _write(self, side: int, rows: Rows) -> RunBlock:
        words = rows.key_words(self._keys[side])
        rows.departures[:] = self._algorithm.next_stamp()
        block = write_block(self._algorithm.spill_file(side), rows, self._reserve)
        return RunBlock(block, int(words[0]), int(words[-1]))

    # Joining pass

    def _join(self, groups: Sequence[RunGroup]) -> Iterator[pa.RecordBatch]:
        (owners, lefts), (others, rights) = (self._blocks_in_order(groups, side) for side in (0, 1))
        ranges = _Ranges(rights, self._pairing.driver.width)
        cache = _BlockCache([self._source(side) for side in (0, 1)], self._reserve)
        try:
            for owner, entry in zip(owners, lefts, strict=True):
                block = block_of(entry)
                for at in np.flatnonzero(ranges.meet(block) & (others != owner)):
                    left, right = cache.pair(block, block_of(rights[at]))
                    yield from self._join_blocks(left, right)
        finally:
            cache.clear()

    @staticmethod
    def _blocks_in_order(groups: Sequence[RunGroup], side: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the groups and the entries of all blocks of an input, in the order of their first key words."""
        runs = [(number, run) for number, group in enumerate(groups) for run in group.runs[side]]
        owners = np.repeat([number for number, _ in runs], [len(run) for _, run in runs]).astype(np.int64)
        entries = np.concatenate([np.zeros((0, _FIELDS), dtype=np.uint64), *(run.entries for _, run in runs)])
        order = np.argsort(entries[:, _LOW], kind="stable")
        return owners[order], entries[order]

    def _source(self, side: int) -> _Source:
        algorithm = self._algorithm
        return _Source(algorithm.spill_file(side), algorithm.layouts[side], self._keys[side])

    def _join_blocks(self, left: _SortedBlock, right: _SortedBlock) -> Iterator[pa.RecordBatch]:
        limit, width, cursor = self._algorithm.pair_limit, self._pairing.driver.width or _EQUAL, new_cursor()
        index = np.arange(len(left.rows), dtype=np.int64)
        out = np.empty(limit, dtype=np.int64), np.empty(limit, dtype=np.int64)
        while cursor[0] < len(index):
            found = kernels.probe_entries(
                left.rows.keyed(self._keys[0]),
                index,
                right.rows.keyed(self._keys[1]),
                right.words,
                right.slots,
                len(right.words),
                np.uint64(width.words),
                width.number,
                width.floating,
                cursor,
                *out,
            )
            positions, slots = out[0][:found], out[1][:found]
            keep = self._pairing.meets(0, left.rows, positions, right.rows, slots, driven=True)
            if keep is not None:
                positions, slots = positions[keep], slots[keep]
            yield from self._algorithm.results.batches([(left.rows, positions), (right.rows, slots)])

    # Merging pass

    def _can_merge(self, side: int, runs: Sequence[Run]) -> bool:
        """Return whether memory holds a block of each run, the buffers of the output, and the new list entries."""
        stride = self._algorithm.layouts[side].stride
        largest = [max(block.nbytes + _SCRATCH * block.count for block in _spilled(run)) for run in runs]
        output = _OUTPUT_BLOCKS * block_nbytes(max(self.block_nbytes, stride))
        entries = _ENTRY_GROWTH * _ENTRY_NBYTES * sum(map(len, runs))
        available = self._budget.available
        return len(runs) > 1 and sum(largest) + output <= available + self._reserve.available and entries <= available

    def _merge(self, side: int, runs: Sequence[Run]) -> tuple[Run, ...]:
        """Write several runs as one."""
        cursors = [_RunCursor(run, self._source(side), self._reserve) for run in runs]
        merged: list[RunBlock] = []
        try:
            while cursors := [cursor for cursor in cursors if cursor.load()]:
                bound = min((cursor.high for cursor in cursors if cursor.continues), default=None)
                ends = [cursor.end(bound) for cursor in cursors]
                merged += self._write_merged(side, cursors, ends)
                for cursor, end in zip(cursors, ends, strict=True):
                    cursor.at = end
        finally:
            for cursor in cursors:
                cursor.close()
        return (Run(merged),)

    def _write_merged(self, side: int, cursors: Sequence[_RunCursor], ends: Sequence[int]) -> Iterator[RunBlock]:
        """Write the tuples from the position of each cursor up to an end in the order of their key words."""
        words = np.concatenate([cursor.words[cursor.at : end] for cursor, end in zip(cursors, ends, strict=True)])
        order = np.argsort(words, kind="stable")
        starts = np.cumsum([0, *(end - cursor.at for cursor, end in zip(cursors, ends, strict=True))])
        start, most = 0, max(1, self.block_nbytes // self._algorithm.layouts[side].stride)
        while start < len(order):
            chosen = order[start : start + most]
            picks = self._picks(cursors, starts, chosen)
            while len(chosen) > 1 and sum(source.nbytes_of(index) for source, index in picks) > self.block_nbytes:
                chosen = chosen[: (len(chosen) + 1) // 2]
                picks = self._picks(cursors, starts, chosen)
            with held(self._reserve, (_OUTPUT_BLOCKS - 1) * sum(source.nbytes_of(index) for source, index in picks)):
                rows = merge_rows([source.take(index) for source, index in picks], self._keys[side])
                yield self._write(side, rows)
            start += len(chosen)

    @staticmethod
    def _picks(
        cursors: Sequence[_RunCursor], starts: NDArray[np.int64], chosen: NDArray[np.int64]
    ) -> list[tuple[Rows, NDArray[np.int64]]]:
        """Return which tuples of each cursor are at some positions of their concatenation."""
        inside = [(chosen >= low) & (chosen < high) for low, high in itertools.pairwise(starts)]
        return [
            (cursor.rows, chosen[mask] - start + cursor.at)
            for cursor, mask, start in zip(cursors, inside, starts[:-1], strict=True)
            if mask.any()
        ]


def _spilled(run: Run) -> Iterator[SpilledBlock]:
    return (block_of(entry).block for entry in run.entries)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the blocks of an input are, and by which key they are sorted."""

    file: SpillFile
    layout: RowLayout
    key: int

    def read(self, block: SpilledBlock) -> Rows:
        """Return the tuples of a block. Its memory is charged by the caller."""
        content = self.file.read(block.ref)
        return Rows(self.layout, block.count, content, content[block.count * self.layout.stride :])


@dataclass(frozen=True, slots=True)
class _SortedBlock:
    """Tuples of a block with the entries of a sorted index, and the bytes that are charged."""

    rows: Rows
    words: NDArray[np.uint64]
    slots: NDArray[np.int32]
    nbytes: int


class _BlockCache:
    """Blocks in memory, as many as there is memory for; the block that was not used for the longest time goes first."""

    def __init__(self, sources: Sequence[_Source], memory: SpillReserve) -> None:
        self._sources = sources
        self._memory = memory
        self._blocks: OrderedDict[tuple[int, int], _SortedBlock] = OrderedDict()

    def pair(self, left: RunBlock, right: RunBlock) -> tuple[_SortedBlock, _SortedBlock]:
        """Return a block of each input."""
        first = self._get(0, left.block, None)
        return first, self._get(1, right.block, (0, left.block.ref.number))

    def clear(self) -> None:
        """Drop all blocks."""
        while self._blocks:
            self._evict(None)

    def _get(self, side: int, block: SpilledBlock, pinned: tuple[int, int] | None) -> _SortedBlock:
        name = side, block.ref.number
        if name in self._blocks:
            self._blocks.move_to_end(name)
            return self._blocks[name]
        nbytes = block.nbytes + _ENTRY * block.count
        self._charge(nbytes, pinned)
        source = self._sources[side]
        try:
            rows = source.read(block)
        except BaseException:
            self._memory.release("spill", nbytes)
            raise
        words = np.ascontiguousarray(rows.key_words(source.key))
        self._blocks[name] = _SortedBlock(rows, words, np.arange(len(rows), dtype=np.int32), nbytes)
        return self._blocks[name]

    def _charge(self, nbytes: int, pinned: tuple[int, int] | None) -> None:
        while True:
            try:
                self._memory.charge("spill", nbytes)
            except MemoryBudgetError:
                if not self._evict(pinned):
                    raise
            else:
                return

    def _evict(self, pinned: tuple[int, int] | None) -> bool:
        """Drop a block; return whether there was one."""
        name = next((name for name in self._blocks if name != pinned), None)
        if name is None:
            return False
        self._memory.release("spill", self._blocks.pop(name).nbytes)
        return True


class _RunCursor:
    """Position in a run that is merged: a block in memory, and the next tuple in it."""

    def __init__(self, run: Run, source: _Source, memory: SpillReserve) -> None:
        self._run = run
        self._next = 0
        self._source = source
        self._memory = memory
        self._charged = 0
        self.at = 0
        self.rows: Rows
        self.words = np.zeros(0, dtype=np.uint64)

    def load(self) -> bool:
        """Read the next block if the current one is done; return whether there are tuples left."""
        if self.at == len(self.words):
            self.close()
            if not self.continues:
                return False
            block = block_of(self._run.entries[self._next]).block
            self._next += 1
            self._memory.charge("spill", block.nbytes + _SCRATCH * block.count)
            self._charged = block.nbytes + _SCRATCH * block.count
            self.rows = self._source.read(block)
            self.words, self.at = np.ascontiguousarray(self.rows.key_words(self._source.key)), 0
        return True

    @property
    def continues(self) -> bool:
        """Whether the run has blocks after the current one."""
        return self._next < len(self._run)

    @property
    def high(self) -> int:
        """Last key word of the current block."""
        return int(self.words[-1])

    def end(self, bound: int | None) -> int:
        """Return where the tuples of the current block end whose key words are at most `bound`."""
        return len(self.words) if bound is None else int(np.searchsorted(self.words, np.uint64(bound), side="right"))

    def close(self) -> None:
        """Drop the current block."""
        self._memory.release("spill", self._charged)
        self._charged = 0


class _Ranges:
    """Key ranges of blocks, given by their entries."""

    def __init__(self, entries: NDArray[np.uint64], width: Width | None) -> None:
        self._low, self._high = entries[:, _LOW], entries[:, _LOW + 1]
        self._width = width or _EQUAL

    def meet(self, block: RunBlock) -> NDArray[np.bool_]:
        """Return which blocks may have a tuple near one of this block."""
        low, high = np.uint64(block.low), np.uint64(block.high)
        return ~(self._beyond(self._low, high) | self._beyond(low, self._high))

    def _beyond(
        self, above: NDArray[np.uint64] | np.uint64, below: NDArray[np.uint64] | np.uint64
    ) -> NDArray[np.bool_]:
        """Return where one word is above another by more than the width."""
        greater: NDArray[np.bool_] = np.greater(above, below)
        if self._width.floating:
            with np.errstate(invalid="ignore", over="ignore"):  # the difference of infinities is not a number
                return greater & (_floats(above) - _floats(below) > self._width.number)
        return greater & (
            np.subtract(above, below, where=greater, out=np.zeros(greater.shape, np.uint64))
            > np.uint64(self._width.words)
        )


def _floats(words: NDArray[np.uint64] | np.uint64) -> NDArray[np.float64]:
    """Return the floats of key words."""
    flipped = np.atleast_1d(words) ^ _SIGN
    return (flipped ^ ((flipped >> np.uint64(63)) * (_SIGN - np.uint64(1)))).view(np.float64)
