"""MeshJoin: a stream meshed with a cyclic scan of the relation, for comparison (section V of the SSIJ paper).

Phases: the relation is read in chunks of b pages, over and over. With each chunk, w stream tuples enter a window, which
is a multimap by key. All relation tuples of the chunk probe it, on several threads, while the next chunk is read; then
the tuples that have met every chunk leave. So every tuple stays for exactly one cycle. At the end of
the stream (and on `flush`) the scan continues for one cycle without new tuples. MeshJoin uses no index and cannot meet
deadlines.

Memory bound: list of the leaves + one or two chunks of b pages + (k + 1) * w tuples with keys and multimap entries, for
k chunks in the relation + workspace (an eighth, at least four pages, at most 16 MiB) + bounce page and read vectors. b
and w are chosen for the highest rate (`headrace.joins.meshjoin.split`).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from headrace.joins.base import JoinAlgorithm, JoinParameters, StreamJoin
from headrace.joins.emitter import Matches
from headrace.joins.errors import JoinInputError, MemoryBudgetError
from headrace.joins.handle import check_number
from headrace.joins.input_buffer import BatchSlice, InputBuffer, compact
from headrace.joins.meshjoin._window_kernels import RowBuffer
from headrace.joins.meshjoin.chunks import ChunkReader
from headrace.joins.meshjoin.split import MeshSplit, split_memory
from headrace.joins.meshjoin.window import ChunkScan, MeshWindow
from headrace.joins.predicates import Equality
from headrace.joins.relation import TableLike, affordable_scan
from headrace.joins.stats import JoinStats
from headrace.joins.workers import Workers
from headrace.storage.format import Keys
from headrace.storage.leaf import gather_keys
from headrace.storage.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.deadlines import Arrivals
    from headrace.joins.predicates import On
    from headrace.storage.read import PageReader
    from headrace.storage.tree import Snapshot

__all__ = ["MeshJoin"]

_WORKSPACE_PAGES = 4
_WORKSPACE_SHARE = 8
_WORKSPACE_MOST = 16 * 2**20
_ROW_NBYTES = 8 + 3 * 4 + 12  # hash, slot, frame, row; and a key
_PAIR_NBYTES = 48
_TUPLE_NBYTES = 8  # arrival
_SURE = 4  # of more memory, at least a fourth is for tuples


class _MeshScan(JoinAlgorithm):
    """Scans the relation chunk by chunk and joins each chunk with the window.

    Parameters
    ----------
    parameters
        Parameters of the join.
    read_pages
        Pages in a chunk; None to choose the number with the highest rate.
    """

    def __init__(self, parameters: JoinParameters, read_pages: int | None) -> None:
        super().__init__(parameters)
        self._read_pages = read_pages
        snapshot, reader = self.snapshot, self.relation.reader
        fixed = snapshot.index_nbytes + 4 * len(snapshot.leaf_pages)
        needed = fixed + reader.nbytes_at(1) + (_WORKSPACE_PAGES + 2) * snapshot.page_size
        if needed > self.budget.limit:
            raise MemoryBudgetError(
                f"MeshJoin needs at least {format_size(needed)} ({needed} bytes) for the list of leaves, a page and "
                f"stream tuples, and has {format_size(self.budget.limit)}"
            )
        spare = self.budget.limit - needed
        self._longest_read = affordable_scan(reader, reader.max_scan, spare)
        self._workspace = _WORKSPACE_PAGES * snapshot.page_size + min(spare // _WORKSPACE_SHARE, _WORKSPACE_MOST)
        self.budget.charge("index", fixed)
        self.budget.charge("read_buffer", reader.nbytes_at(self._longest_read))
        self.budget.charge("workspace", self._workspace)
        self._input = InputBuffer()
        self._workers = Workers()
        self._step_number = self._entering = 0
        self._varying = 1.0
        self._split: MeshSplit | None = None

    @property
    def split(self) -> MeshSplit | None:
        """How the memory is divided; None before the first tuple, whose size it depends on."""
        return self._split

    @property
    def stats(self) -> JoinStats:
        """Statistics so far."""
        return JoinStats(**self._base_stats())

    def close(self) -> None:
        """Stop the threads."""
        if self._split is not None:
            self._chunks.close()
        self._workers.close()

    def _consume(self, batch: pa.RecordBatch, arrival: Arrivals) -> Iterator[pa.RecordBatch]:
        if len(batch) == 0:
            return
        if self._split is None:
            self._allocate(batch)
        assert self._split is not None
        start, most = 0, len(batch)
        while start < len(batch):
            part = batch.slice(start, min(most, self._split.tuples - self._input.rows))
            part = compact(part) if start + len(part) == len(batch) else part
            lacking = part.nbytes - self.budget.available
            if lacking <= 0:
                start += len(part)
                self._input.add(part, arrival)
                self._account()
            elif len(part) > 1 and not self._holds_any:
                most = len(part) // 2
            elif not self._holds_any:
                raise self._refusal(part, lacking)
            if self._input.rows >= self._split.tuples or lacking > 0:
                yield from self._go_on()

    @property
    def _holds_any(self) -> bool:
        return bool(self._input.rows or self._window.batches)

    def _go_on(self) -> Iterator[pa.RecordBatch]:
        """Take a step, with the tuples that have arrived, if there are any."""
        if self._input.rows:
            yield from self._admit(self._input.take(self._input.rows))
        elif self._window.batches:
            yield from self._step()

    def _waiting(self) -> Sequence[pa.RecordBatch]:
        return self._input.batches if self._split is None else [*self._input.batches, *self._window.unflattened]

    def _drain(self) -> Iterator[pa.RecordBatch]:
        if self._split is None:
            return
        while self._holds_any:
            yield from self._go_on()

    def _allocate(self, batch: pa.RecordBatch) -> None:
        """Divide the memory, now that the size of a tuple is known."""
        keys, _ = self._keys(batch)
        key = keys.nbytes / len(batch) if keys.wide else 0.0
        size = batch.nbytes / len(batch) + key + _TUPLE_NBYTES + MeshWindow.slot_nbytes()
        snapshot, reader = self.snapshot, self.relation.reader
        leaves = len(snapshot.leaf_pages)
        self._split = split_memory(
            self.budget.available,
            leaves,
            snapshot.rows / max(1, leaves),
            size,
            reader.device,
            self._read_pages,
            ahead=reader.threads > 1,
            reserved=self.budget.limit - self.budget.available,
        )
        self.budget.charge("cache", self._split.buffers * self._split.pages * snapshot.page_size)
        self._chunks = ChunkReader(snapshot, reader, self._split, self._longest_read, self.counters)
        self._window = MeshWindow(batch.schema, self._split.chunks, self._split.tuples)
        self.budget.charge("inverted_index", self._window.map_nbytes)
        self._account()
        fixed = (self._window.map_nbytes + self._window.nbytes) / (self._split.chunks * self._split.tuples)
        self._varying = max(size - fixed, 1.0) / size
        rows = max(2, self._workspace // 4 // _ROW_NBYTES)
        self._scratch = [_row_buffer(rows // 2) for _ in range(2)]

    def _keys(self, rows: pa.RecordBatch) -> tuple[Keys, NDArray[np.bool_] | None]:
        keys, valid = self.bound.encode(rows)
        assert isinstance(keys, Keys)
        return keys, valid

    def _account(self) -> None:
        self.budget.resize("input_buffer", self._input.nbytes + self._entering)
        self.budget.resize("stream_buffer", self._window.nbytes)

    def _admit(self, arrived: BatchSlice) -> Iterator[pa.RecordBatch]:
        """Take a step with tuples that enter the window.

        Tuples may be larger than those whose size decided how the memory is divided. If there is no room, others leave
        first, and then these enter in parts.
        """
        parts, each = [arrived], self.budget.held("input_buffer") / len(arrived.rows)
        while parts:
            part = parts.pop()
            rows, (keys, valid) = len(part.rows), self._keys(part.rows)
            self._entering = math.ceil(each * (rows + sum(len(later.rows) for later in parts)))
            self._account()
            lacking = self._window.growth(part, keys) - self.budget.available - int(each * rows)
            if lacking <= 0:
                self._entering = max(0, self._entering - math.ceil(each * rows))
                self._account()
                self._window.enter(self._step_number % self._window.places, part, keys, valid)
                yield from self._step()
            elif self._window.batches:
                parts.append(part)
                yield from self._step()
            elif rows > 1:
                parts += reversed(part.parts(2))
            else:
                raise self._refusal(part.rows, lacking)

    def _refusal(self, tuples: pa.RecordBatch, lacking: int) -> MemoryBudgetError:
        """Return the error of a tuple that does not fit alone."""
        more = math.ceil(_SURE * lacking / self._varying)
        return MemoryBudgetError.of(
            f"one stream tuple of {tuples.nbytes} bytes does not fit beside MeshJoin's pages and window",
            self.budget.limit + more,
        )

    def _step(self) -> Iterator[pa.RecordBatch]:
        """Join the window with the next chunk, and complete the tuples that have met every chunk."""
        assert self._split is not None
        chunk, coming = (number % self._split.chunks for number in (self._step_number, self._step_number + 1))
        self._account()
        if self._window.batches and self._chunks.pages(chunk):
            frames = self._chunks.read(chunk)
            if self._window.batches > 1:  # not all tuples leave after this step
                self._chunks.read_ahead(coming)
            yield from self._join(frames, self._chunks.pages(chunk))
        self._step_number += 1
        leaving = self._window.leave(coming, outer=self.how == "left")
        self._account()
        if leaving is not None:
            self.completed(leaving.arrival, leaving.rows)
            if leaving.unmatched is not None:
                yield from self.emitter.nulls(leaving.unmatched)

    def _join(self, frames: NDArray[np.uint8], pages: int) -> Iterator[pa.RecordBatch]:
        """Join the window with the pages of a chunk: threads probe, and this one outputs what they found."""
        shares = self._workers.share(pages * self.snapshot.rows // max(1, len(self.snapshot.leaf_pages)))
        bounds = [pages * share // shares for share in range(shares + 1)]
        scans = [
            ChunkScan(self.snapshot.layout, frames, np.array([start, 0], dtype=np.int64), stop, scratch)
            for (start, stop), scratch in zip(pairwise(bounds), self._scratch, strict=False)
        ]
        most, found = self._pairs_at_once(), _PairBuffer()
        while scans:
            for rows in self._workers.map(self._window.find, scans):
                cursor = np.array([0, -1], dtype=np.int64)
                while len((pairs := self._window.pairs(rows, cursor, most - found.size))[0]):
                    found.add(pairs[0], rows.frame[pairs[1]], rows.row[pairs[1]])
                    if found.size >= most:
                        yield from self._emit(frames, found)
                        found = _PairBuffer()
            scans = [scan for scan in scans if not scan.done]
        yield from self._emit(frames, found)

    def _emit(self, frames: NDArray[np.uint8], found: _PairBuffer) -> Iterator[pa.RecordBatch]:
        if not found.size:
            return
        slots, frame, row = found.arrays()
        if self.snapshot.layout.codec.kind != "u64":
            keys = gather_keys(self.snapshot.layout, frames, frame, row)
            same = self._window.same_keys(slots, keys)
            slots, frame, row = slots[same], frame[same], row[same]
        if len(slots):
            matches = Matches(frame, row, np.ones(len(slots), dtype=np.int32))
            yield from self.emitter.emit(self._window.matched(slots), matches, frames)

    def _pairs_at_once(self) -> int:
        return max(1, int(self._workspace // 4 / _PAIR_NBYTES))

    def _rebound(self) -> None:
        """Do nothing: only the emitter depends on the stream's schema."""

    def _output_nbytes(self) -> int:
        return self._workspace // 2


class _PairBuffer:
    """Pairs of slot and relation row, collected until they are worth a batch."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
        self.size = 0

    def add(self, slots: NDArray[np.int32], frame: NDArray[np.int32], row: NDArray[np.int32]) -> None:
        self._parts.append((slots, frame, row))
        self.size += len(slots)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        if len(self._parts) == 1:
            return self._parts[0]
        slots, frames, rows = zip(*self._parts, strict=True)
        return np.concatenate(slots), np.concatenate(frames), np.concatenate(rows)


def _row_buffer(rows: int) -> RowBuffer:
    slot, frame, row = (np.empty(rows, dtype=np.int32) for _ in range(3))
    return RowBuffer(np.empty(rows, dtype=np.uint64), slot, frame, row)


class MeshJoin(StreamJoin[_MeshScan]):
    """Joins a stream with a clustered table by scanning the table over and over.

    Parameters
    ----------
    table, on, how, memory, columns, reader, clock
        As for `headrace.joins.SSIJ`. Range predicates are refused: the window finds equal keys only.
    deadline
        Refused: MeshJoin cannot meet deadlines.
    read_pages
        Pages of the relation in each read (the b of the MeshJoin paper); by default the number with the highest rate
        on the table's disk.
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
        read_pages: int | None = None,
    ) -> None:
        if read_pages is not None:
            check_number("read_pages", read_pages, 1)
        if deadline is not None:
            raise JoinInputError("MeshJoin cannot meet deadlines: each tuple waits for a whole scan; use SSIJ")
        parameters = JoinParameters.check(
            table, on, how, memory, columns=columns, deadline=None, reader=reader, clock=clock
        )
        if not isinstance(parameters.predicate, Equality):
            raise JoinInputError(
                f"MeshJoin finds matches by hashing, which does not support {type(parameters.predicate).__name__}; "
                "use SSIJ (ssij) or IndexNestedLoops (inlj)"
            )
        super().__init__(_MeshScan(parameters, read_pages))

    @property
    def split(self) -> MeshSplit | None:
        """Division of the memory; None before the first tuple, on whose size it depends."""
        return self.algorithm.split
