"""MeshJoin: a stream meshed with a cyclic scan of the relation, for comparison (section V of the SSIJ paper).

Phases: the relation is read in chunks of b pages, over and over. With each chunk, w stream tuples enter a window, which
is a multimap by key. All relation tuples of the chunk probe it, and the tuples that have now met every chunk leave. So
every tuple stays for exactly one cycle, whatever its key. At the end of the stream (and on `flush`) the scan continues
for one cycle without new tuples. MeshJoin uses no index and cannot meet deadlines.

Memory bound: list of the leaves + chunk of b pages + (k + 1) * w tuples with keys and multimap entries, for k chunks in
the relation + workspace (an eighth, at least two pages, at most 16 MiB) + bounce page and read vectors. b and w are
chosen for the highest rate (`headrace.joins.meshjoin.split`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.base import JoinAlgorithm, JoinParameters, StreamJoin
from headrace.joins.emitter import Matches
from headrace.joins.errors import JoinInputError, MemoryBudgetError
from headrace.joins.input_buffer import BatchSlice, InputBuffer, compact
from headrace.joins.meshjoin._window_kernels import enumerate_rows
from headrace.joins.meshjoin.split import MeshSplit, split_memory
from headrace.joins.meshjoin.window import MeshWindow
from headrace.joins.predicates import Equality
from headrace.joins.relation import TableLike, affordable_scan
from headrace.joins.stats import JoinStats
from headrace.storage.format import Keys
from headrace.storage.format.copies import take
from headrace.storage.leaf import gather_keys
from headrace.storage.read import page_buffer
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.meshjoin.window import WindowBatch
    from headrace.joins.predicates import On
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["MeshJoin"]

_WORKSPACE_PAGES = 2
_WORKSPACE_SHARE = 8
_WORKSPACE_MOST = 16 * 2**20
_SCRATCH_NBYTES = 64
_TUPLE_OVERHEAD = 8 + 4 + 1  # arrival, place, mark


class _MeshScan(JoinAlgorithm):
    """Scans the relation chunk by chunk and joins each chunk with the window.

    Parameters
    ----------
    parameters
        Parameters of the join.
    """

    def __init__(self, parameters: JoinParameters) -> None:
        super().__init__(parameters)
        snapshot = self.snapshot
        fixed = snapshot.index_nbytes + 4 * len(snapshot.leaf_pages)
        needed = fixed + self.relation.reader.nbytes_at(1) + (_WORKSPACE_PAGES + 2) * snapshot.page_size
        if needed > self.budget.limit:
            raise MemoryBudgetError(
                f"MeshJoin needs at least {format_size(needed)} ({needed} bytes) for the list of leaves, a page and "
                f"stream tuples, and has {format_size(self.budget.limit)}"
            )
        spare = self.budget.limit - needed
        self._scan = affordable_scan(self.relation.reader, self.relation.reader.max_scan, spare)
        self._workspace = _WORKSPACE_PAGES * snapshot.page_size + min(spare // _WORKSPACE_SHARE, _WORKSPACE_MOST)
        self.budget.charge("index", fixed)
        self.budget.charge("read_buffer", self.relation.reader.nbytes_at(self._scan))
        self.budget.charge("workspace", self._workspace)
        self._order = np.argsort(snapshot.leaf_pages).astype(np.int32)
        self._input = InputBuffer()
        self._step_number = 0
        self._in_frames = -1
        self._split: MeshSplit | None = None

    @property
    def split(self) -> MeshSplit | None:
        """How the memory is divided; None before the first tuple, whose size it depends on."""
        return self._split

    @property
    def stats(self) -> JoinStats:
        """Statistics so far."""
        return JoinStats(**self._base_stats())

    def _consume(self, batch: pa.RecordBatch, arrival: float) -> Iterator[pa.RecordBatch]:
        if len(batch) == 0:
            return
        if self._split is None:
            self._allocate(batch)
        assert self._split is not None
        start = 0
        while start < len(batch):
            part = batch.slice(start, self._split.tuples - self._input.rows)
            start += len(part)
            part = compact(part) if start == len(batch) else part
            if not self._room_for(part.nbytes):
                yield from self._step(self._input.take(self._input.rows))
            self._account(part.nbytes)
            self._input.add(part, arrival)
            if self._input.rows >= self._split.tuples:
                yield from self._step(self._input.take(self._input.rows))

    def _drain(self) -> Iterator[pa.RecordBatch]:
        if self._split is None:
            return
        if self._input.rows:
            yield from self._step(self._input.take(self._input.rows))
        while not self._window.empty:
            yield from self._step(None)

    def _allocate(self, batch: pa.RecordBatch) -> None:
        """Divide the memory, now that the size of a tuple is known."""
        keys, _ = self._keys(batch)
        key = keys.nbytes / len(batch) if keys.wide else 0.0
        size = batch.nbytes / len(batch) + key + _TUPLE_OVERHEAD + MeshWindow.slot_nbytes()
        leaves, snapshot = len(self.snapshot.leaf_pages), self.snapshot
        self._split = split_memory(
            self.budget.available, leaves, snapshot.rows / max(1, leaves), size, self.relation.reader.device
        )
        self.budget.charge("cache", self._split.pages * snapshot.page_size)
        self._frames = page_buffer(self._split.pages, snapshot.page_size)
        self._window = MeshWindow(self._split.chunks, self._split.tuples)
        self.budget.charge("inverted_index", self._window.map_nbytes)

    def _keys(self, rows: pa.RecordBatch) -> tuple[Keys, NDArray[np.bool_] | None]:
        keys, valid = self.bound.encode(rows)
        assert isinstance(keys, Keys)
        return keys, valid

    def _room_for(self, nbytes: int) -> bool:
        return nbytes <= self.budget.available or self._input.rows == 0

    def _account(self, arriving: int = 0) -> None:
        self.budget.resize("input_buffer", self._input.nbytes + arriving)
        self.budget.resize("stream_buffer", self._window.nbytes)

    def _step(self, arrived: BatchSlice | None) -> Iterator[pa.RecordBatch]:
        """Admit tuples, join the window with the next chunk, and complete the tuples that have met every chunk."""
        assert self._split is not None
        chunk = self._step_number % self._split.chunks
        if arrived is not None and len(arrived.rows):
            self._window.enter(chunk, arrived, *self._keys(arrived.rows))
            self._account()
        yield from self._join_chunk(chunk)
        self._step_number += 1
        leaving = self._window.leave(self._step_number % self._split.chunks)
        self._account()
        if leaving is not None:
            yield from self._complete(leaving)

    def _join_chunk(self, chunk: int) -> Iterator[pa.RecordBatch]:
        assert self._split is not None
        leaves = self._order[chunk * self._split.pages : (chunk + 1) * self._split.pages]
        if len(leaves) == 0 or self._window.empty:
            return
        if self._in_frames != chunk:
            self._read(leaves)
            self._in_frames = chunk
        at_once = self._pairs_at_once()
        found = _MatchBuffer()
        for frame, row in self._relation_rows(leaves, at_once):
            keys = gather_keys(self.snapshot.layout, self._frames, frame, row)
            for slots, which in self._window.pairs(keys, at_once):
                found.add(slots, frame[which], row[which])
                if found.size >= at_once:
                    yield from self._emit(found)
                    found = _MatchBuffer()
        yield from self._emit(found)

    def _relation_rows(
        self, leaves: NDArray[np.int32], at_once: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield frame and row of the chunk's tuples, at most `at_once` at a time."""
        rows = self.snapshot.leaf_rows[leaves].astype(np.int32)
        ends = np.cumsum(rows)
        start = 0
        while start < len(leaves):
            before = int(ends[start] - rows[start])
            stop = max(start + 1, int(np.searchsorted(ends, before + at_once, side="right")))
            yield enumerate_rows(rows[start:stop], start)
            start = stop

    def _emit(self, found: _MatchBuffer) -> Iterator[pa.RecordBatch]:
        if found.size:
            slots, frame, row = found.arrays()
            rows, order = self._window.matched(slots)
            matches = Matches(frame[order], row[order], np.ones(len(order), dtype=np.int32))
            yield from self.emitter.emit(rows, matches, self._frames)

    def _read(self, leaves: NDArray[np.int32]) -> None:
        reader, pages = self.relation.reader, self.snapshot.leaf_pages[leaves]
        plan = reader.plan(pages, self._scan)
        frames, checksums = np.arange(len(leaves)), self.snapshot.leaf_checksums[leaves]
        self.counters.add_read(reader.read_plan(plan, slice(None), pages, self._frames, frames, checksums))

    def _complete(self, batch: WindowBatch) -> Iterator[pa.RecordBatch]:
        self.completed(batch.arrival, len(batch.rows))
        unmatched = np.flatnonzero(~batch.matched)
        if self.how == "left" and len(unmatched):
            yield from self.emitter.nulls(take(batch.rows, unmatched))

    def _pairs_at_once(self) -> int:
        return max(1, int(self._workspace // 2 / (_SCRATCH_NBYTES + self.emitter.row_bytes(0.0))))

    def _rebound(self) -> None:
        """Do nothing: only the emitter depends on the stream's schema."""

    def _output_nbytes(self) -> int:
        return self._workspace // 2


class _MatchBuffer:
    """Pairs of slot and relation tuple, collected until they are worth a batch."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
        self.size = 0

    def add(self, slots: NDArray[np.int32], frame: NDArray[np.int32], row: NDArray[np.int32]) -> None:
        if len(slots):
            self._parts.append((slots, frame, row))
            self.size += len(slots)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        slots, frames, rows = zip(*self._parts, strict=True)
        return np.concatenate(slots), np.concatenate(frames), np.concatenate(rows)


class MeshJoin(StreamJoin[_MeshScan]):
    """Joins a stream with a clustered table by scanning the table over and over.

    Parameters
    ----------
    table, on, how, memory, columns, reader, clock
        As for `headrace.joins.SSIJ`. Range predicates are refused: the window finds equal keys only.
    deadline
        Refused: MeshJoin cannot meet deadlines.
    """

    def __init__(
        self,
        table: TableLike | Snapshot,
        on: On,
        how: str = "inner",
        memory: int | str = "32MiB",
        *,
        deadline: float | str | None = None,
        columns: Sequence[str] | None = None,
        reader: PageReader | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if deadline is not None:
            raise JoinInputError("MeshJoin cannot meet deadlines: each tuple waits for a whole scan; use SSIJ")
        parameters = JoinParameters.check(
            table, on, how, memory, columns=columns, deadline=None, reader=reader, clock=clock
        )
        if not isinstance(parameters.predicate, Equality):
            raise JoinInputError(
                f"MeshJoin finds matches by hashing, which does not support {type(parameters.predicate).__name__}; "
                "use SSIJ or IndexNestedLoops"
            )
        super().__init__(_MeshScan(parameters))

    @property
    def split(self) -> MeshSplit | None:
        """Division of the memory; None before the first tuple, on whose size it depends."""
        return self.algorithm.split
