"""The join of one shard in one batch: new rows with each other and with the rows of earlier batches.

With old rows A and B of the two inputs and new rows dA and dB, the results of the batch are dA x (B + dB) and A x dB.
New rows are sorted by hash and written as runs, which the manifest of the batch names. They are then kept in memory,
part by part as the memory allows, and probed with the rows of the other input. Of the runs of earlier batches, only
blocks that may hold a match are read. Runs of similar size are merged from time to time. A run that a different number
of shards wrote is replaced by runs of the present ones.

Memory: a quarter of it for the part that is kept, a quarter for new rows before they are written and for blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from headrace.joins.streams.hashing.kept_rows import KeptRows
from headrace.pipelines.config.join_plan import LEFT, RIGHT
from headrace.pipelines.correlate.rows import HASH, shard_range, stored_schema
from headrace.pipelines.correlate.runs import BLOCK_BYTES, RunPlace, ZoneRule
from headrace.pipelines.errors import ConservationError
from headrace.storage.errors import MemoryBudgetError
from headrace.storage.format import concat_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.pipelines.config.join_plan import JoinStage
    from headrace.pipelines.correlate.runs import RunDirectory, RunFiles, RunRef

__all__ = ["YOUNG_BATCHES", "ShardJoin", "ShardPlan"]

_SIDES: Final = (LEFT, RIGHT)
_SHARE: Final = 4
_RUNS_OF_A_TIER: Final = 8
_FAN_IN: Final = 16
_MOST_WAITING: Final = 1 << 30  # a column of text in one array has less than 2 GiB
YOUNG_BATCHES: Final = 16
"""Number of batches whose runs are not merged yet, so that a worker with the rows of older batches reads them alone."""
_WORD: Final = 2**64 - 1


@dataclass(frozen=True)
class ShardPlan:
    """The part of a batch that one task of a join does.

    Parameters
    ----------
    stage, number
        The join, and its position.
    shard, shards
        The shard, and the number of shards.
    runs
        Runs of earlier batches that may hold rows of the shard.
    memory
        Memory of the task in bytes.
    batch, attempt
        Number of the batch, and id of the attempt.
    expired
        For each input, the key word below which rows can match no more; None if there is none.
    band
        Band that `expired` is about.
    """

    stage: JoinStage
    number: int
    shard: int
    shards: int
    runs: tuple[RunRef, ...]
    memory: int
    batch: int
    attempt: str
    expired: tuple[int | None, int | None] = (None, None)
    band: int = 0

    @property
    def range(self) -> tuple[int, int]:
        """Upper halves of the hashes of the shard."""
        return shard_range(self.shard, self.shards)

    def whole(self, ref: RunRef) -> bool:
        """Return whether all rows of a run belong to the shard."""
        low, high = self.range
        return low <= ref.low and ref.high <= high

    def over(self, ref: RunRef) -> bool:
        """Return whether no row of a run can match any more."""
        least = self.expired[ref.side]
        return least is not None and ref.newest[self.band] < least


@dataclass
class _Piece:
    """New rows of an input that were written as one run, and the rows if they are still in memory."""

    ref: RunRef
    rows: pa.RecordBatch | None


@dataclass
class _Part:
    """Rows in memory that are probed: their hashes in order, and the least and greatest key word for each band."""

    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    zones: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = field(default_factory=list)


class ShardJoin:
    """Joins the new rows of a shard.

    Parameters
    ----------
    plan
        What to do.
    files
        Runs of the state folder.
    """

    def __init__(self, plan: ShardPlan, files: RunFiles) -> None:
        self._plan = plan
        self._files = files
        self._schemas = [stored_schema(plan.stage, side) for side in _SIDES]
        bands = plan.stage.bands()
        self._zones = [ZoneRule([keys[side] for keys, _ in bands]) for side in _SIDES]
        self._widths = [width for _, width in bands]
        self._waiting: list[list[pa.RecordBatch]] = [[], []]
        self._pieces: list[list[_Piece]] = [[], []]
        self._old = [[ref for ref in plan.runs if ref.side == side and not plan.over(ref)] for side in _SIDES]
        self.rows_new = [0, 0]

    def add(self, side: int, rows: pa.RecordBatch) -> None:
        """Take new stored rows of an input."""
        self._waiting[side].append(rows)
        self.rows_new[side] += rows.num_rows
        if sum(batch.nbytes for batch in self._waiting[side]) > min(self._plan.memory // _SHARE // 3, _MOST_WAITING):
            self._write_waiting(side, keep=False)

    def write(self) -> None:
        """Write the new rows that wait; all of them were added."""
        for side in _SIDES:
            self._write_waiting(side, keep=True)

    def results(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the new rows, which were written."""
        new = self._pieces
        if new[LEFT]:
            yield from self._joined(LEFT, (self._old[RIGHT], new[RIGHT]))
        if new[RIGHT] and self._old[LEFT]:
            yield from self._joined(RIGHT, (self._old[LEFT], ()))

    def old_rows(self, side: int, after: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of an input that came in after a batch and before this one, without their hashes."""
        for ref in self._old[side]:
            if ref.last > after:
                for batch in self._blocks(ref):
                    yield batch.drop_columns([HASH])

    def new_rows(self, side: int) -> Iterator[pa.RecordBatch]:
        """Yield the new rows of an input, without their hashes."""
        for piece in self._pieces[side]:
            for batch in self._rows_of(piece):
                yield batch.drop_columns([HASH])

    def settle(self) -> tuple[list[RunRef], list[str]]:
        """Merge runs; return the runs that a manifest must name in addition, and the files that it names no more."""
        added = {piece.ref.file: piece.ref for pieces in self._pieces for piece in pieces}
        gone = [ref.file for ref in self._plan.runs if self._plan.over(ref)]
        for side in _SIDES:
            present = [*self._old[side], *(piece.ref for piece in self._pieces[side])]
            for group in self._groups(present):
                merged = self._merge(side, group)
                for ref in group:
                    if added.pop(ref.file, None) is None:
                        gone.append(ref.file)
                    else:
                        self._files.remove(ref.file)
                if merged is not None:
                    added[merged.file] = merged
        return list(added.values()), gone

    # New rows

    def _write_waiting(self, side: int, *, keep: bool) -> None:
        """Write the new rows of an input that wait as a run, sorted by hash."""
        if not self._waiting[side]:
            return
        rows = _sorted(self._waiting[side])
        self._waiting[side] = []
        ref = self._written(side, [rows])
        self._pieces[side].append(_Piece(ref, rows if keep else None))

    def _written(self, side: int, batches: Iterable[pa.RecordBatch], came: tuple[int, int] | None = None) -> RunRef:
        plan = self._plan
        came = came or (plan.batch, plan.batch)
        place = RunPlace(plan.number, side, *plan.range, *came, f"{plan.batch:010d}-{plan.attempt[:8]}")
        with self._files.writer(self._zones[side], place) as writer:
            for batch in batches:
                writer.write(batch)
            return writer.close()

    def _rows_of(self, piece: _Piece) -> Iterator[pa.RecordBatch]:
        """Yield the new rows of a piece.

        Raises
        ------
        ConservationError
            If its run gave other rows than were written.
        """
        if piece.rows is not None:
            yield piece.rows
            return
        count = 0
        for batch in self._blocks(piece.ref):
            count += batch.num_rows
            yield batch
        if count != piece.ref.rows:
            raise ConservationError(
                f"{piece.ref.rows:,} new rows were written into {piece.ref.file}, but {count:,} were joined: a defect "
                "of Headrace"
            )

    # Join

    def _joined(self, side: int, others: tuple[Sequence[RunRef], Sequence[_Piece]]) -> Iterator[pa.RecordBatch]:
        """Yield the results of the new rows of an input with runs and new rows of the other."""
        kept = KeptRows(
            {"left": self._plan.stage.inputs[LEFT], "right": self._plan.stage.inputs[RIGHT]},
            self._plan.stage.named_conditions,
            self._plan.memory // _SHARE,
        )
        runs, pieces = others
        for part in self._parts(kept, side):
            for ref in runs:
                for batch in self._blocks(ref, part):
                    yield from kept.probe(1 - side, batch.drop_columns([HASH]))
            for piece in pieces:
                for batch in self._rows_of(piece):
                    yield from kept.probe(1 - side, batch.drop_columns([HASH]))

    def _parts(self, kept: KeptRows, side: int) -> Iterator[_Part]:
        """Keep the new rows of an input, as many at a time as fit, and yield each time."""
        part = _Part()
        for piece in self._pieces[side]:
            for whole in self._rows_of(piece):
                rest = [whole]
                while rest:
                    batch = rest.pop()
                    if kept.keep(side, batch.drop_columns([HASH])):
                        self._note(part, side, batch)
                        continue
                    if kept.count(side):
                        yield part
                        kept.free(side)
                        part = _Part()
                        rest.append(batch)
                    elif batch.num_rows == 1:
                        raise MemoryBudgetError(
                            f"a row does not fit into {self._plan.memory // _SHARE} bytes, a quarter of the memory of "
                            "the pipeline; give it more `memory`"
                        )
                    else:
                        half = batch.num_rows // 2
                        rest += [batch.slice(half), batch.slice(0, half)]
        if kept.count(side):
            yield part
            kept.free(side)

    def _note(self, part: _Part, side: int, batch: pa.RecordBatch) -> None:
        part.hashes.append(np.asarray(batch.column(HASH)))
        words = self._zones[side].words(batch)
        least, greatest = (np.array([end(each) for each in words], dtype=np.uint64) for end in (np.min, np.max))
        part.zones.append((least, greatest))

    def _blocks(self, ref: RunRef, part: _Part | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a run that belong to the shard; only blocks that may match a part, if one is given.

        Blocks of earlier batches are left out if no row that is still to come matches them. New rows are never left
        out: those that are behind the watermark of the other input may match its old rows.
        """
        low, high = self._plan.range
        schema = self._schemas[ref.side]
        with self._files.reading(ref) as file:
            directory = self._files.directory(ref, file)
            wanted = (directory.last >> np.uint64(32) >= low) & (directory.first >> np.uint64(32) < high)
            if part is not None:
                wanted &= self._may_match(directory, part)
            least = self._plan.expired[ref.side]
            if least is not None and ref.last < self._plan.batch:
                wanted &= directory.greatest[self._plan.band] >= np.uint64(least)
            for at in np.flatnonzero(wanted).tolist():
                batch = self._files.block(ref, file, directory, at, schema)
                yield batch if self._plan.whole(ref) else _within(batch, low, high)

    def _may_match(self, directory: RunDirectory, part: _Part) -> NDArray[np.bool_]:
        """Return which blocks may hold matches of a part."""
        wanted = np.zeros(len(directory), dtype=np.bool_)
        for hashes in part.hashes:
            wanted |= np.searchsorted(hashes, directory.first) < np.searchsorted(hashes, directory.last, side="right")
        for band, width in enumerate(self._widths):
            least = max(0, min(int(zone[0][band]) for zone in part.zones) - width)
            greatest = min(_WORD, max(int(zone[1][band]) for zone in part.zones) + width)
            wanted &= (directory.greatest[band] >= np.uint64(least)) & (directory.least[band] <= np.uint64(greatest))
        return wanted

    # Merges

    def _groups(self, runs: Sequence[RunRef]) -> Iterator[list[RunRef]]:
        """Yield the runs to merge: those of other shards, and the runs of a size of which there are many."""
        foreign = [ref for ref in runs if not self._plan.whole(ref)]
        for start in range(0, len(foreign), _FAN_IN):
            yield foreign[start : start + _FAN_IN]
        tiers: dict[int, list[RunRef]] = {}
        for ref in runs:
            if self._plan.whole(ref) and ref.last <= self._plan.batch - YOUNG_BATCHES:
                tiers.setdefault(int(math.log(max(ref.nbytes, BLOCK_BYTES), _SHARE)), []).append(ref)
        for tier in sorted(tiers):
            if len(tiers[tier]) >= _RUNS_OF_A_TIER:
                yield tiers[tier][:_FAN_IN]

    def _merge(self, side: int, group: Sequence[RunRef]) -> RunRef | None:
        """Write the rows of runs that belong to the shard as one run; return None if there are none."""
        rows = _coalesced(_merged([self._blocks(ref) for ref in group]))
        first = next(rows, None)
        if first is None:
            return None
        came = min(ref.first for ref in group), max(ref.last for ref in group)
        merged = self._written(side, chain([first], rows), came)
        expected = sum(ref.rows for ref in group)
        exact = self._plan.expired[side] is None and all(map(self._plan.whole, group))
        if merged.rows > expected or (exact and merged.rows != expected):
            raise ConservationError(
                f"{expected:,} rows were to be merged into {merged.file}, but it has {merged.rows:,}: a defect of "
                "Headrace"
            )
        return merged


def _sorted(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    rows = concat_batches(batches)
    return rows.take(pa.array(np.argsort(np.asarray(rows.column(HASH)), kind="stable")))


def _within(batch: pa.RecordBatch, low: int, high: int) -> pa.RecordBatch:
    upper = np.asarray(batch.column(HASH)) >> np.uint64(32)
    start, stop = np.searchsorted(upper, [low, high])
    return batch.slice(int(start), int(stop - start))


def _merged(sources: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of sources that are each in the order of the hashes, in the order of the hashes."""
    heads: list[tuple[pa.RecordBatch, Iterator[pa.RecordBatch]]] = []
    waiting = list(sources)
    while waiting or heads:
        heads += [(batch, source) for source in waiting if (batch := _next_rows(source)) is not None]
        if not heads:
            return
        bound = min(int(np.asarray(batch.column(HASH))[-1]) for batch, _ in heads)
        taken, kept, waiting = [], [], []
        for batch, source in heads:
            stop = int(np.searchsorted(np.asarray(batch.column(HASH)), np.uint64(bound), side="right"))
            taken.append(batch.slice(0, stop))
            if stop < batch.num_rows:
                kept.append((batch.slice(stop), source))
            else:
                waiting.append(source)
        heads = kept
        yield _sorted(taken)


def _next_rows(source: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Return the next batch with rows."""
    return next((batch for batch in source if batch.num_rows), None)


def _coalesced(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches that fill a block."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(each.nbytes for each in waiting) >= BLOCK_BYTES:
            yield concat_batches(waiting)
            waiting = []
    if waiting:
        yield concat_batches(waiting)
