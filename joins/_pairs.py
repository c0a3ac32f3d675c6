"""Which waiting tuples meet which of the pages just read: the inverted index, asked leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from joins import _piece_kernels as kernels
from joins._input_buffer import arrivals_at
from joins._stream_buffer import Chunk, merge_simple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


__all__ = ["Gathered", "Pairs", "Read", "joined_rows"]


_FEW_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pieces of a chunk, ascending, and the frame of the page that each meets."""

    chunk: Chunk
    pieces: NDArray[np.int32]
    frame: NDArray[np.int32]

    def rows(self) -> pa.RecordBatch:
        """Return the tuples of a chunk in which each waits for one leaf, without copying if they lie side by side."""
        start, count = int(self.pieces[0]), len(self.pieces)
        if int(self.pieces[-1]) - start == count - 1:
            return self.chunk.rows.slice(start, count)
        return self.chunk.rows.take(pa.array(self.pieces))


@dataclass(frozen=True, slots=True)
class Read:
    """Pages just read.

    Attributes
    ----------
    leaves : int32[p]
        Ascending.
    frames : int32[p]
        Where they are.
    """

    leaves: NDArray[np.int32]
    frames: NDArray[np.int32]

    def pairs(self, chunks: Sequence[Chunk], most: int) -> Iterator[list[Pairs]]:
        """Yield the pairs of all chunks, at most so many at a time."""
        group: list[Pairs] = []
        room = most
        for chunk in chunks:
            cursor = np.zeros(3, dtype=np.int64)
            while True:
                pieces, frame = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int32)
                size = kernels.collect_pairs(chunk.first, chunk.last, self.leaves, self.frames, cursor, pieces, frame)
                if size == 0:
                    break
                group.append(Pairs(chunk, pieces[:size], frame[:size]))
                room -= size
                if room == 0:
                    yield group
                    group, room = [], most
        if group:
            yield group


class Gathered:
    """Tuples that wait for the next pages of the plan, of all chunks together.

    Reading goes in small steps and there may be many chunks. Instead of asking each chunk in each step, the tuples of
    several steps are gathered into one chunk first, as many as there is room for.

    Parameters
    ----------
    leaves : int32[n]
        All leaves that will be read, in the order of the plan.
    demand : int32[leaves of the table]
        How many tuples wait for each.
    most
        Tuples to gather at a time.
    """

    def __init__(self, leaves: NDArray[np.int32], demand: NDArray[np.int32], most: int) -> None:
        self._leaves = leaves
        self._demand = demand
        self._most = most
        self._start = self._stop = 0
        self._chunk: list[Chunk] = []

    def chunks(self, chunks: list[Chunk], start: int, stop: int) -> list[Chunk]:
        """Return chunks that have all tuples of `chunks` that wait for the leaves of a step."""
        if len(chunks) <= _FEW_CHUNKS:
            return chunks
        if not (self._start <= start and stop <= self._stop):
            ends = np.cumsum(self._demand[self._leaves[start : start + self._most]])
            self._start, self._stop = start, start + int(np.searchsorted(ends, self._most, side="right"))
            if self._stop < stop:
                return chunks
            self._chunk = self._gather(chunks)
        return self._chunk

    def _gather(self, chunks: list[Chunk]) -> list[Chunk]:
        leaves = np.sort(self._leaves[self._start : self._stop])
        places = np.arange(len(leaves), dtype=np.int32)
        parts = []
        for group in Read(leaves, places).pairs(chunks, self._most):
            for pairs in group:
                leaf = leaves[pairs.frame]
                parts.append(Chunk(pairs.rows(), arrivals_at(pairs.chunk.arrival, pairs.pieces), leaf, leaf))
        return [merge_simple(parts)] if parts else []


def joined_rows(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches as one."""
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
