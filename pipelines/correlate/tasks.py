"""The stages of a correlation as they run in Spark's Python workers: functions over Arrow batches for `mapInArrow`.

`ReadTask` reads pieces of files of all sources and sends their rows to the tasks of their shards. `JoinTask` is one
join of the chain for one shard. Rejected rows and results go to files of their tables, which the driver commits. A
stage passes on what is meant for later ones, and the notes of all tasks.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.batch.error_rows import Origin, error_rows
from headrace.pipelines.batch.steps import Task
from headrace.pipelines.config.join_plan import LEFT
from headrace.pipelines.correlate.residents import resident_results
from headrace.pipelines.correlate.rows import START, Packer, chunks_of, note_row, stored_schema
from headrace.pipelines.correlate.runs import RunFiles, RunRef
from headrace.pipelines.correlate.shard_join import ShardJoin, ShardPlan
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.errors import BatchError, StateDamagedError
from headrace.pipelines.process_identity import worker_name
from headrace.pipelines.spark.frame import FILE, MALFORMED, MALFORMED_TYPE, PIECES, STATE, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from headrace.pipelines.batch.read_step import ReadStep
    from headrace.pipelines.config.join_plan import JoinStage
    from headrace.pipelines.correlate.rows import Chunk

__all__ = ["PIECES_OF_SOURCES", "SOURCE", "JoinTask", "ReadTask", "SourceRead"]

SOURCE = "source"
_SHARE = 8
PIECES_OF_SOURCES = pa.schema([pa.field(SOURCE, pa.string()), *PIECES])


@dataclass(frozen=True)
class SourceRead:
    """How the rows of a source are read.

    Parameters
    ----------
    reader
        Reader of its files.
    names
        Names of its columns in the join.
    stage, side
        Join and input that the rows go to.
    origin
        Origin of its rejected rows.
    time
        Column with the time of a row, or None.
    watermark
        Time in ticks below which a row is late; None if no row is.
    """

    reader: ReadStep
    names: tuple[str, ...]
    stage: int
    side: int
    origin: Origin
    time: str | None = None
    watermark: int | None = None


@dataclass
class _Counts:
    """Counts of the rows of a source in one task."""

    rows: int = 0
    malformed: int = 0
    late: int = 0
    keyless: int = 0
    sent: int = 0
    newest: int | None = None


@dataclass(frozen=True)
class ReadTask:
    """Reads pieces of files. Picklable.

    Parameters
    ----------
    sources
        Sources by name.
    stages
        Joins in order.
    shards, memory
        Number of shards, and memory of a task in bytes.
    errors
        Files of the error table.
    """

    sources: Mapping[str, SourceRead]
    stages: tuple[JoinStage, ...]
    shards: int
    memory: int
    errors: FileSpec

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read all pieces of a partition; yield chunks of rows, and a note."""
        packers: dict[str, Packer] = {}
        counts: dict[str, _Counts] = {}
        with FileWriter(self.errors) as errors:
            for row in (row for batch in batches for row in batch.to_pylist()):
                name = row.pop(SOURCE)
                source = self.sources[name]
                tally = counts.setdefault(name, _Counts())
                if name not in packers:
                    room = self.memory // _SHARE // len(self.sources)
                    packers[name] = Packer(self.stages[source.stage], source.stage, source.side, self.shards, room)
                piece = pa.RecordBatch.from_pylist([row], PIECES)
                for batch in source.reader.run([piece], Task("", 0)):
                    rows = _checked(batch, name, source, tally, errors)
                    yield from packers[name].take(rows)
            for name, packer in packers.items():
                yield from packer.rest()
                counts[name].keyless, counts[name].sent = packer.keyless, packer.packed
            files = [asdict(file) for file in errors.close()]
        if counts:
            read = {name: asdict(tally) for name, tally in counts.items()}
            yield note_row({"read": read, "files": {"errors": files}, "worker": worker_name()})


def _checked(
    batch: pa.RecordBatch, name: str, source: SourceRead, tally: _Counts, errors: FileWriter
) -> pa.RecordBatch:
    """Write malformed and late rows to the error table; return the others, as an input of a join."""
    tally.rows += batch.num_rows
    is_open = np.asarray(batch.column(STATE)) == State.OPEN
    tally.malformed += int(np.count_nonzero(~is_open))
    if not is_open.all():
        _reject(batch.filter(pa.array(~is_open)), name, source, errors)
        batch = batch.filter(pa.array(is_open))
    if source.time is not None:
        batch = _timely(batch, name, source, tally, errors)
    columns = batch.columns[: len(source.names)]
    return pa.RecordBatch.from_arrays(columns, names=list(source.names))


def _timely(batch: pa.RecordBatch, name: str, source: SourceRead, tally: _Counts, errors: FileWriter) -> pa.RecordBatch:
    """Write late rows to the error table, and return the others."""
    assert source.time is not None
    times = batch.column(source.time)
    ticks = times.view(pa.int32() if pa.types.is_date32(times.type) else pa.int64())
    newest = pc.max(ticks).as_py()
    if newest is not None:
        tally.newest = newest if tally.newest is None else max(tally.newest, newest)
    if source.watermark is None:
        return batch
    late = pc.fill_null(pc.less(ticks.cast(pa.int64()), source.watermark), False)  # noqa: FBT003 - the value
    if not pc.any(late, min_count=0).as_py():
        return batch
    rows = batch.filter(late)
    tally.late += rows.num_rows
    values = rows.column(source.time).cast(pa.string())
    limit = pa.scalar(source.watermark, pa.int64()).cast(ticks.type).cast(times.type).cast(pa.string()).as_py()
    reason = f"late: rows of source {name} before {limit} were declared complete by correlate.lateness"
    fields = [pa.repeat(source.time, len(values)), values, pa.repeat(reason, len(values))]
    structs = pa.StructArray.from_arrays(fields, fields=list(MALFORMED_TYPE.value_type))
    causes = pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32)), structs).cast(
        MALFORMED_TYPE
    )
    at = rows.schema.get_field_index(MALFORMED)
    _reject(rows.set_column(at, rows.schema.field(at), causes), name, source, errors)
    return batch.filter(pc.invert(late))


def _reject(batch: pa.RecordBatch, name: str, source: SourceRead, errors: FileWriter) -> None:
    rejected = error_rows(batch, source.origin)
    at = rejected.schema.get_field_index(FILE)
    files = pc.binary_join_element_wise(name, rejected.column(at), "/")
    errors.write(rejected.set_column(at, rejected.schema.field(at), files))


@dataclass(frozen=True)
class JoinTask:
    """One join of the chain, for one shard. Picklable.

    Parameters
    ----------
    stages, number
        Joins in order, and the position of this one.
    shards, memory
        Number of shards, and memory of a task in bytes.
    runs
        Runs of the join.
    batch, attempt, recent
        Number of the batch, id of the attempt, and the attempts that loaded the latest batches.
    folder, remedy
        State folder, and what to do if it is damaged.
    shown
        File that a host sees if it has the state folder.
    facts
        Files of the table of results, and the columns of the last join in their order.
    expired, band
        See `ShardPlan`.
    """

    stages: tuple[JoinStage, ...]
    number: int
    shards: int
    memory: int
    runs: tuple[RunRef, ...]
    batch: int
    attempt: str
    recent: Mapping[int, str]
    folder: str
    remedy: str
    shown: str
    facts: FileSpec
    order: tuple[str, ...]
    expired: tuple[int | None, int | None] = (None, None)
    band: int = 0

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join the rows of a shard; yield what later stages get, results for the next join, and a note."""
        began = time.monotonic()
        chunks = (chunk for batch in batches for chunk in chunks_of(batch))
        first = next(chunks, None)
        if first is None:
            return
        plan = self._plan(first.shard)
        note: dict[str, Any] = {"stage": self.number, "shard": plan.shard, "worker": worker_name()}
        try:
            self._require_folder()
            join = ShardJoin(plan, RunFiles(self.folder, self.remedy))
            for chunk in chain([first], chunks):
                passed = self._taken(chunk, join)
                if passed is not None:
                    yield passed
            join.write()
            yield from self._sent(self._results(plan, join, note), note)
            added, gone = join.settle()
            note |= {"received": join.rows_new, "added": [run.document() for run in added], "gone": gone}
        except StateDamagedError as error:
            note["failure"] = str(error)
        note["seconds"] = time.monotonic() - began
        yield note_row(note, plan.shard)

    def _plan(self, shard: int) -> ShardPlan:
        plan = ShardPlan(
            self.stages[self.number], self.number, shard, self.shards, (), self.memory, self.batch, self.attempt,
            self.expired, self.band,
        )  # fmt: skip
        low, high = plan.range
        runs = tuple(run for run in self.runs if run.low < high and low < run.high)
        return replace(plan, runs=runs)

    def _require_folder(self) -> None:
        if not Path(self.shown).exists():
            raise BatchError(
                f"host {socket.gethostname()} does not have the state folder {self.folder} of the driver; name a "
                "folder that all hosts share as correlate.state"
            )

    def _taken(self, chunk: Chunk, join: ShardJoin) -> pa.RecordBatch | None:
        """Give a chunk to the join; return it if it is meant for a later stage."""
        if chunk.stage != self.number:
            return chunk.passed()
        if chunk.side != START:
            join.add(chunk.side, chunk.rows(stored_schema(self.stages[self.number], chunk.side)))
        return None

    def _results(self, plan: ShardPlan, join: ShardJoin, note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        found = resident_results(self.folder, plan, join, self.recent) if any(join.rows_new) else None
        note["resident"] = found is not None
        return join.results() if found is None else found

    def _sent(self, results: Iterator[pa.RecordBatch], note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Write results to files of the table, or yield them for the next join."""
        note["results"] = 0
        if self.number < len(self.stages) - 1:
            packer = Packer(self.stages[self.number + 1], self.number + 1, LEFT, self.shards, self.memory // _SHARE)
            for batch in results:
                note["results"] += batch.num_rows
                yield from packer.take(batch)
            yield from packer.rest()
            note |= {"keyless": packer.keyless, "sent": packer.packed}
            return
        with FileWriter(self.facts) as writer:
            for batch in results:
                note["results"] += batch.num_rows
                writer.write(
                    pa.RecordBatch.from_arrays([batch.column(name) for name in self.order], schema=self.facts.schema)
                )
            note["files"] = {"facts": [asdict(file) for file in writer.close()]}
