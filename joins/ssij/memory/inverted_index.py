"""Inverted index (the paper's II): which waiting tuples meet which of the pages just read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.ssij.memory import _index_kernels as kernels
from headrace.storage.format import take

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.ssij.memory.stream_buffer import Chunk

__all__ = ["Postings", "ReadLeaves"]


@dataclass(frozen=True, slots=True)
class Postings:
    """Entries of the inverted index for a chunk: leaf runs, ascending, and the frame of the page that each meets."""

    chunk: Chunk
    runs: NDArray[np.int32]
    frame: NDArray[np.int32]

    @property
    def tuples(self) -> NDArray[np.int32]:
        """Tuple of each run."""
        return self.runs if self.chunk.tuples is None else self.chunk.tuples[self.runs]

    def rows(self) -> pa.RecordBatch:
        """Return the tuple of each run, without a copy if these tuples are adjacent."""
        start, count = int(self.runs[0]), len(self.runs)
        if self.chunk.tuples is None and int(self.runs[-1]) - start == count - 1:
            return self.chunk.rows.slice(start, count)
        return take(self.chunk.rows, self.tuples)


@dataclass(frozen=True, slots=True)
class ReadLeaves:
    """Leaves just read.

    Attributes
    ----------
    leaves : int32[p]
        Leaves, ascending.
    frames : int32[p]
        Frame of each.
    """

    leaves: NDArray[np.int32]
    frames: NDArray[np.int32]

    def pairs(self, chunks: Sequence[Chunk], most: int) -> Iterator[list[Postings]]:
        """Yield the entries of all chunks for these leaves, at most `most` at a time.

        The entries of a group lie in one array: an array for each chunk would have to have room for all of them.
        """
        group: list[Postings] = []
        room, entries = most, np.empty((2, most), dtype=np.int32)
        for chunk in chunks:
            cursor = np.zeros(3, dtype=np.int64)
            while True:
                runs, frame = entries[:, most - room :]
                size = kernels.collect_pairs(
                    chunk.first, chunk.last, chunk.ascends, self.leaves, self.frames, cursor, runs, frame
                )
                if size == 0:
                    break
                postings = _of_waiting(Postings(chunk, runs[:size], frame[:size]))
                if len(postings.runs) == 0:
                    continue
                group.append(postings)
                room -= len(postings.runs)
                if room == 0:
                    yield group
                    group, room, entries = [], most, np.empty((2, most), dtype=np.int32)
        if group:
            yield group


def _of_waiting(postings: Postings) -> Postings:
    """Return the entries of tuples that have not left."""
    alive = postings.chunk.alive
    if alive is None:
        return postings
    stay = alive[postings.runs]
    return postings if stay.all() else Postings(postings.chunk, postings.runs[stay], postings.frame[stay])
