"""The stages of a batch as they run in Spark's Python workers: functions over Arrow batches for `mapInArrow`.

A stage takes the rows of one shard (or any partition, if it needs no shuffle), brings its replicas up to the planned
version, and yields its rows, the inferred members and one note with its counts. The same input always yields the same
rows, regardless of caches and retries. `headrace.pipelines.batch.stages` plans the stages.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import MissingMembersError
from headrace.pipelines.batch.settlement import Settlement, Settling
from headrace.pipelines.batch.steps import DuplicateStep, LookupStep, Task
from headrace.pipelines.errors import BatchError
from headrace.pipelines.process_identity import worker_name
from headrace.pipelines.spark.frame import NOTE, SHARD, STATE, ShardRule, State, channel_row, conform
from headrace.pipelines.spark.packing import PACKED, PACKED_SCHEMA, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.pipelines.batch.read_step import ReadStep
    from headrace.pipelines.batch.retry_step import RetryStep
    from headrace.pipelines.batch.storable import StorableStep

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """The work of one `mapInArrow` call. Picklable; called with the batches of a partition.

    Parameters
    ----------
    number
        Position of the stage in the batch.
    owner
        Id of the run, see `headrace.pipelines.replica.operators.serve`.
    reader
        Reader of the file pieces or retried records that the first stage receives; None for later stages.
    steps
        Lookups and the duplicate search, in order.
    next_shard
        Shard rule of the next stage; None for the last stage of a round.
    settles
        Settlement for the last stage of the batch; None for other stages.
    schema
        Schema of the output.
    packs
        Whether the output is packed for the shuffle that follows.
    """

    number: int
    owner: str
    reader: ReadStep | RetryStep | None
    steps: tuple[LookupStep | DuplicateStep | StorableStep, ...]
    next_shard: ShardRule | None
    settles: Settlement | None
    schema: pa.Schema
    packs: bool = False

    @property
    def output_schema(self) -> pa.Schema:
        """Schema of the output, packed or not."""
        return PACKED_SCHEMA if self.packs else self.schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage over one partition, until its input is exhausted."""
        began = time.monotonic()
        source = iter(batches)
        first = next(source, None)
        if first is None:
            return
        task = Task(self.owner, _shard(first))
        note: dict[str, Any] = {"stage": self.number, "shard": task.shard, "rows": 0}
        given = chain([first], source)
        try:
            rows = self._counted(given if self.reader is None else self.reader.run(given, task), task, note)
            for step in self.steps:
                rows = step.run(rows, task)
            for batch in self._settled(rows, note):
                yield self._leaving(batch)
        except MissingMembersError as error:
            note["failure"] = str(error)
        for members in task.members:
            yield self._leaving(channel_row(self.schema, State.MEMBER, {members.schema.names[0]: members.column(0)}))
        note |= {"joins": task.joins, "seconds": time.monotonic() - began, "worker": worker_name()}
        text = pa.array([json.dumps(note)])
        yield self._leaving(channel_row(self.schema, State.NOTE, {NOTE: text}))

    def _counted(self, batches: Iterable[pa.RecordBatch], task: Task, note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Yield the batches without `_shard` and filtered rows; count stream rows and refuse rows of another shard."""
        for batch in batches:
            if SHARD in batch.schema.names:
                shards = pc.min_max(batch.column(SHARD)).as_py()
                if batch.num_rows and (shards["min"], shards["max"]) != (task.shard, task.shard):
                    raise BatchError(f"stage {self.number}: rows of shards {shards} came to the task of {task.shard}")
            for rows in _rows(batch):
                note["rows"] += int(pc.sum(pc.less(rows.column(STATE), State.MEMBER)).as_py() or 0)
                yield _unfiltered(rows, note)

    def _settled(self, batches: Iterator[pa.RecordBatch], note: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Settle the rows and yield those that Spark writes; before the last stage, yield all rows."""
        if self.settles is None:
            yield from batches
            return
        with Settling(self.settles) as settling:
            for batch in batches:
                yield from settling.take(batch)
            note |= settling.note()

    def _leaving(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.next_shard is not None:
            batch = self.next_shard.append_to(batch)
        batch = conform(batch, self.schema)
        return pack(batch) if self.packs else batch


def _rows(batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
    """Return the rows that arrive with a batch, without `_shard`."""
    if PACKED in batch.schema.names:
        return unpack(batch)
    return [batch.drop_columns([SHARD]) if SHARD in batch.schema.names else batch]


def _unfiltered(batch: pa.RecordBatch, note: dict[str, Any]) -> pa.RecordBatch:
    """Return a batch without the rows that a transformation filtered out, which end here and are counted."""
    filtered = pc.equal(batch.column(STATE), State.FILTERED)
    count = int(pc.sum(filtered).as_py() or 0)
    if not count:
        return batch
    note["filtered"] = note.get("filtered", 0) + count
    return batch.filter(pc.invert(filtered))


def _shard(batch: pa.RecordBatch) -> int:
    return int(batch.column(SHARD)[0].as_py()) if SHARD in batch.schema.names else 0
