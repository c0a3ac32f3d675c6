"""What SSIJ's online phases share: a batch is looked up first, in parts, and joined once it is known to fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins._input_buffer import Piece
    from headrace.joins.ssij.state import SSIJState

__all__ = ["ProbingPhase"]


class _Probed(Protocol):
    @property
    def waiting_nbytes(self) -> tuple[int, int]:
        """The most that the stream buffer and the inverted index will grow by."""
        ...


ProbeT = TypeVar("ProbeT", bound=_Probed)


class ProbingPhase(ABC, Generic[ProbeT]):
    """Joins a batch with what is cached. The cached set is fixed while it is being joined.

    Parameters
    ----------
    state
        Of the operator.
    """

    def __init__(self, state: SSIJState) -> None:
        self._state = state
        self._snapshot = state.snapshot
        self._store = state.store
        self._probes: list[ProbeT] = []

    def probe(self, piece: Piece) -> list[tuple[int, int]]:
        """Look a batch up in the index and in the cache, in parts that threads work on at once. Changes nothing.

        Returns
        -------
        list of (int, int)
            Of each part, the most that the stream buffer and the inverted index will grow by.
        """
        workers = self._state.workers
        self._probes = workers.map(self._probe, piece.parts(workers.share(len(piece.rows))))
        return [probe.waiting_nbytes for probe in self._probes]

    @property
    def waiting_nbytes(self) -> int:
        """Bytes that the tuples of a batch that was run take while they wait, at most."""
        return sum(sum(probe.waiting_nbytes) for probe in self._probes)

    @abstractmethod
    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the batch and put the tuples that need other pages into the stream buffer.

        The stream buffer must have room for what waits.
        """

    @abstractmethod
    def _probe(self, piece: Piece) -> ProbeT:
        """Look a part up. Changes nothing, so that threads may do it at once."""

    def _note_looked_up(self, frame: NDArray[np.int32], waiting: int, asked: int, absent: int) -> None:
        """Count the pages in which a part was looked up, and what the filter was asked for and knew to be absent."""
        self._store.cache.touch(frame)
        if self._store.tiers.records is not None:
            self._store.tiers.records.note_pages(len(frame), len(frame) - waiting)
        if self._store.tiers.filter is not None:
            self._store.tiers.filter.note(asked, absent)
        self._state.counters.rows_filtered += absent
