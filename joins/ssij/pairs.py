"""Which waiting tuples meet which of the pages just read: the inverted index, asked leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins.ssij import _piece_kernels as kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins.ssij.stream_buffer import Chunk

__all__ = ["Pairs", "Read"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pieces of a chunk, ascending, and the frame of the page that each meets."""

    chunk: Chunk
    pieces: NDArray[np.int32]
    frame: NDArray[np.int32]

    @property
    def tuples(self) -> NDArray[np.int32]:
        """The tuple of each piece."""
        return self.pieces if self.chunk.tuples is None else self.chunk.tuples[self.pieces]

    def rows(self) -> pa.RecordBatch:
        """Return the tuple of each piece, without copying if these are tuples that lie side by side."""
        start, count = int(self.pieces[0]), len(self.pieces)
        if self.chunk.tuples is None and int(self.pieces[-1]) - start == count - 1:
            return self.chunk.rows.slice(start, count)
        return self.chunk.rows.take(pa.array(self.tuples))


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
                size = kernels.collect_pairs(
                    chunk.first, chunk.last, chunk.ascends, self.leaves, self.frames, cursor, pieces, frame
                )
                if size == 0:
                    break
                group.append(Pairs(chunk, pieces[:size], frame[:size]))
                room -= size
                if room == 0:
                    yield group
                    group, room = [], most
        if group:
            yield group
