"""What the online phases of SSIJ share.

A batch is looked up first, in parts, and joined once there is room for the tuples that will wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from headrace.joins import _result_kernels
from headrace.joins.dictionaries import own_nbytes
from headrace.joins.ssij.memory.stream_buffer import LEAF_RUN_NBYTES, division_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.input_buffer import BatchSlice
    from headrace.joins.ssij.context import SSIJContext
__all__ = ["ProbingPhase", "sorted_positions"]

_NO_FLAGS = np.zeros(0, dtype=np.bool_)
_WORD = 64  # bits


class _Probed(Protocol):
    @property
    def batch(self) -> BatchSlice:
        """Tuples that were looked up."""
        ...

    @property
    def leaf_runs(self) -> tuple[int, int]:
        """Number of leaf runs that tuples will wait for, and most leaves in them."""
        ...


ProbeT = TypeVar("ProbeT", bound=_Probed)


class ProbingPhase(ABC, Generic[ProbeT]):
    """Joins a batch with the cached pages. The set of cached pages is fixed while the batch is being joined.

    Parameters
    ----------
    context
        Context of the phases.

    Attributes
    ----------
    mark_nbytes
        Bytes that the stream buffer adds to each tuple.
    """

    mark_nbytes: ClassVar = 1

    def __init__(self, context: SSIJContext) -> None:
        self._context = context
        self._snapshot = context.snapshot
        self._store = context.store
        self._probes: list[ProbeT] = []

    def probe(self, batch: BatchSlice) -> list[tuple[int, int]]:
        """Look a batch up in the index and in the cache, in parts that threads work on at once. Changes nothing.

        Returns
        -------
        list of (int, int)
            For each part, the most bytes by which the stream buffer and the inverted index will grow; and then for the
            dictionaries that the parts share.
        """
        workers = self._context.workers
        self._probes = workers.map(self._probe, batch.parts(workers.share(len(batch.rows))))
        growth = [self._waiting_nbytes(probe.batch, *probe.leaf_runs) for probe in self._probes]
        shared = self._store.stream.dictionaries_growth(batch.rows) if any(runs for _, runs in growth) else 0
        return [*growth, (shared, 0)]

    @property
    def waiting_nbytes(self) -> int:
        """Most bytes that the batch's tuples take while they wait, once it was run."""
        return sum(sum(self._waiting_nbytes(probe.batch, *probe.leaf_runs)) for probe in self._probes)

    @abstractmethod
    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the batch and put the tuples that need other pages into the stream buffer.

        The stream buffer must have room for the waiting tuples.
        """

    @abstractmethod
    def _probe(self, batch: BatchSlice) -> ProbeT:
        """Look a part up. Changes nothing, so that threads may run it at once."""

    def _waiting_nbytes(self, batch: BatchSlice, runs: int, wanted: int) -> tuple[int, int]:
        """Return the most bytes that tuples of a batch take in the stream buffer and in the inverted index.

        Without dictionaries.

        Parameters
        ----------
        batch
            Tuples, of which all or some will wait.
        runs
            Number of leaf runs that they wait for.
        wanted
            Most leaves in those runs.
        """
        if not runs:
            return 0, 0
        rows = batch.rows
        arrivals = 0 if isinstance(batch.arrival, float) else batch.arrival.nbytes
        copies = 2 * division_nbytes(rows)  # into chunks by kind, and again when some of a chunk are deferred
        copies += self._store.stream.division_nbytes(rows)
        tuples = own_nbytes(rows) + arrivals + copies + self.mark_nbytes * len(rows)
        return tuples, LEAF_RUN_NBYTES * runs + self._store.stream.listed_growth(wanted)

    def _note_looked_up(self, frame: NDArray[np.int32], waiting: int, asked: int, absent: int) -> None:
        """Count the pages in which a part was looked up, and the filter's answers.

        The paper counts the tuples that a page joined with (section IV-C). Here each look-up counts, also of a key that
        is absent, because it too would have waited for a read without the page; the demand for pages on disk counts
        them as well. With 400,000 keys, Zipf 1, and half (nine tenths) of the stream absent and asking for other pages
        than the rest, 23.7 (26.2) percent of the tuples found their page in a cache of 15 percent, and 21.3 (19.2) if
        only tuples that joined were counted. With an active negative filter both are within 0.2 points.
        """
        self._store.cache.touch(frame)
        if self._store.tiers.records is not None:
            self._store.tiers.records.note_pages(len(frame), len(frame) - waiting)
        if self._store.tiers.filter is not None:
            self._store.tiers.filter.note(asked, absent)
        self._context.counters.rows_filtered += absent


def sorted_positions(
    prefix: NDArray[np.uint64], valid: NDArray[np.bool_] | None, key_range: tuple[np.uint64, np.uint64]
) -> NDArray[np.int32]:
    """Return the positions of the valid keys in nearly ascending order.

    Position and the leading bits of the key, within the relation's range of keys, are packed into one word: sorting
    words is ten times faster than a stable argsort.
    """
    low, high = key_range
    bits = max(len(prefix) - 1, 0).bit_length()
    shift = max(0, int(high - low).bit_length() - (_WORD - bits))
    packed = _result_kernels.pack_positions(prefix, _NO_FLAGS if valid is None else valid, low, high, shift, bits)
    packed.sort()
    return _result_kernels.unpack_positions(packed, bits)
