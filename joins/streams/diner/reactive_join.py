"""`ReactiveJoin`: what the reactive joins of Bornea and others (TKDE 2010), DINER and MINER, share.

Each input has a `TupleStore`. While tuples arrive, they are joined with those in memory; when memory is full, a block
of one input goes to disk, see `headrace.joins.streams.diner.flushing`. Subclasses say how tuples probe and which block
is flushed. While all inputs are blocked, and at cleanup, the spilled blocks meet in nested loops.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np

from headrace.joins.errors import JoinInputError
from headrace.joins.handle import check_number, parsed
from headrace.joins.streams.base.blocks import SpillReserve, held, write_block
from headrace.joins.streams.base.operator import StreamsAlgorithm, StreamsJoin, check_idle
from headrace.joins.streams.diner.disk import BlockList
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.spill import block_nbytes
from headrace.storage.units import format_size, parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.protocol import Output
    from headrace.joins.streams.base.operator import StreamsParameters
    from headrace.joins.streams.diner.flushing import FlushingPolicy
    from headrace.joins.streams.tuples.indexes import SortedIndex
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["OUTER_SHARE", "ReactiveAlgorithm", "ReactiveJoin"]

OUTER_SHARE: Final = 4
"""Part of the memory that outer blocks may take during the reactive phase."""
_PAPER_BLOCK = 10 << 10
_BLOCKS_IN_MEMORY = 1024
_LEAST_BLOCK = 1 << 10


class NestedLoops(Protocol):
    """Nested loops over spilled blocks, as the arriving phase needs them."""

    def release(self) -> None:
        """Free the memory of blocks that are loaded."""
        ...


class ReactiveAlgorithm(StreamsAlgorithm):
    """Algorithm of a reactive join.

    Parameters
    ----------
    parameters
        Parameters of all joins of streams.
    block, max_outer_blocks
        See `DINER`.

    Attributes
    ----------
    disk
        Spilled blocks of each input.
    reactive
        State of the reactive and the cleanup phase.
    """

    disk: list[BlockList]
    reactive: NestedLoops

    def __init__(self, parameters: StreamsParameters, block: int | str | None, max_outer_blocks: int) -> None:
        super().__init__(parameters)
        self._max_outer_blocks = check_number("max_outer_blocks", max_outer_blocks, 1)
        self._block = _checked_block(block, parameters.memory)

    def _open_disk(self) -> None:
        """Make the lists of spilled blocks, and reserve the memory to flush one."""
        self.disk = [BlockList(self.budget) for _ in self.sides]
        self._reserve = SpillReserve(self.budget, self._block + block_nbytes(self._block))

    # Steps that differ

    @abstractmethod
    def _probe(self, side: int, rows: Rows, index: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Yield the results of arriving tuples, set join bits, and credit the flushing policies."""

    @abstractmethod
    def _flush_block(self) -> None:
        """Move a block from memory to disk."""

    @abstractmethod
    def _order(self, side: int) -> tuple[int, FlushingPolicy, SortedIndex]:
        """Return the key by which the last tuples of an input are written, its flushing policy, and its entries."""

    # Arriving phase

    def _arrive(self, side: int, rows: Rows) -> Iterator[pa.RecordBatch]:
        self.reactive.release()
        store, start, probed = self.stores[side], 0, 0
        while start < len(rows):
            fitting = store.fitting(rows, start)
            stop = min(start + fitting + 1, len(rows))  # the first that does not fit has its results before the flush
            if probed < stop:
                yield from self._probe(side, rows, np.arange(probed, stop, dtype=np.int64))
                probed = stop
            store.insert(rows, start, start + fitting)
            start += fitting
            if start < len(rows):
                self._flush_for(side, rows, start)
                self.stamp_arrivals(rows, probed)

    def _flush_for(self, side: int, rows: Rows, at: int) -> None:
        if not self.rows_in_memory:
            size = rows.nbytes_of(np.array([at], dtype=np.int64))
            raise MemoryBudgetError.of(
                f"a tuple of {self.graph.names[side]!r} takes {format_size(size)}, and a memory of "
                f"{format_size(self.budget.limit)} has no room for it"
            )
        self._flush()

    # Flushing

    def _flush(self) -> None:
        """Move a block from memory to disk; more of them if the lists of blocks need their memory."""
        self._flush_block()
        while self.rows_in_memory and not all(disk.reserve() for disk in self.disk):
            self._flush_block()

    def _flush_all(self) -> None:
        """Write all tuples in memory to blocks. A store is freed at once, so that no later flush writes them again."""
        self.reactive.release()
        for side, store in enumerate(self.stores):
            key, policy, index = self._order(side)
            while not self.disk[side].reserve(len(cuts := policy.blocks(store.rows, index))) and self.rows_in_memory:
                self._flush_block()
            self._write_copies(side, key, cuts)
            store.free()

    def _flush_slots(self, side: int, key: int, slots: NDArray[np.int64]) -> None:
        """Move tuples, sorted by a key, from memory to a block."""
        store, departure = self.stores[side], self.next_stamp()
        with held(self._reserve, store.rows.nbytes_of(slots)):
            self._write(side, key, store.remove(slots, departure))

    def _write_copies(self, side: int, key: int, cuts: list[NDArray[np.int64]]) -> None:
        """Write tuples in memory, sorted by a key, to blocks; they all depart at once, and stay in the store."""
        rows, departure = self.stores[side].rows, self.next_stamp()
        for slots in cuts:
            with held(self._reserve, rows.nbytes_of(slots)):
                part = rows.take(slots)
                part.departures[:] = departure
                self._write(side, key, part)

    def _write(self, side: int, key: int, rows: Rows) -> None:
        block = write_block(self.spill_file(side), rows, self._reserve)
        self.disk[side].append(block, rows, key)
        self.counters.rows_spilled += len(rows)

    def make_room(self, nbytes: int) -> bool:
        """Flush until so many bytes are free, or nothing is left in memory; return whether they are free."""
        while self.budget.available < nbytes and self.rows_in_memory:
            self._flush()
        return self.budget.available >= nbytes


AlgorithmT = TypeVar("AlgorithmT", bound=ReactiveAlgorithm)


class ReactiveJoin(StreamsJoin[AlgorithmT]):
    """Handle of a reactive join.

    Parameters
    ----------
    max_new_arrivals
        Tuples that may wait before `idle` returns to the arriving phase (the paper's MaxNewArr), checked.
    algorithm
        Algorithm that does the work.
    """

    def __init__(self, max_new_arrivals: int, algorithm: AlgorithmT) -> None:
        self._max_new_arrivals = max_new_arrivals
        super().__init__(algorithm)

    def idle(
        self,
        now: float | None = None,
        *,
        until: float = math.inf,
        waiting: Callable[[], bool] | None = None,
        arrived: Callable[[], int] | None = None,
    ) -> Output:
        """Work while no input delivers tuples, if that is so for longer than the operator waits.

        Parameters
        ----------
        now, until, waiting
            See `StreamsJoin.idle`.
        arrived
            Returns how many tuples wait in the input buffer. No further step begins when they are more than
            `max_new_arrivals`. Asked after each block of the innermost input (algorithm 4, lines 17 to 19; section
            4.2).

        Raises
        ------
        JoinInputError
            If a time, `waiting` or `arrived` is not valid.
        FinishedError
            After `finish`.
        ClosedError
            After `close`.
        """
        algorithm = self._open()
        check_idle(now, until, waiting=waiting, arrived=arrived)
        most = self._max_new_arrivals

        def enough() -> bool:
            return (waiting is not None and waiting()) or (arrived is not None and arrived() > most)

        return self._work.start(algorithm.idle(now, until, enough))


def _checked_block(block: int | str | None, memory: int) -> int:
    """Return the bytes of a block."""
    if block is None:
        return max(_PAPER_BLOCK, memory // _BLOCKS_IN_MEMORY)
    nbytes = parsed("block", parse_memory, block)
    if nbytes < _LEAST_BLOCK:
        raise JoinInputError(f"`block` must be at least {format_size(_LEAST_BLOCK)}, not {block!r}")
    return nbytes
