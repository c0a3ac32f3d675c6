"""The rows of a correlation on their way: stored form, tasks that they belong to, and the frame between the stages.

A stored row has the columns of its input and `_hash`, the hash of its equal columns, which decides the shard. The frame
of a stage carries many rows in each of its own rows, serialized by Arrow, so Spark moves few large values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from headrace.etl import digests_of
from headrace.pipelines.spark.frame import SHARD
from headrace.storage.format import concat_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from headrace.pipelines.config.join_plan import JoinStage

__all__ = [
    "CHUNKS",
    "HASH",
    "NOTE",
    "PAYLOAD",
    "SIDE",
    "STAGE",
    "START",
    "Chunk",
    "Packer",
    "chunks_of",
    "note_row",
    "shard_range",
    "start_rows",
    "stored_schema",
]

HASH: Final = "_hash"
STAGE: Final = "stage"
SIDE: Final = "side"
PAYLOAD: Final = "payload"
CHUNKS: Final = pa.schema([(SHARD, pa.int32()), (STAGE, pa.int32()), (SIDE, pa.int32()), (PAYLOAD, pa.binary())])
START: Final = 2
"""Side of a row that only says which shard its task has."""
NOTE: Final = -1
"""Stage of a row that holds the note of a task."""

_CHUNK_BYTES: Final = 1 << 20
_HALF: Final = np.uint64(32)


def stored_schema(stage: JoinStage, side: int) -> pa.Schema:
    """Return the schema of the stored rows of an input."""
    return pa.schema([pa.field(HASH, pa.uint64()), *stage.inputs[side]])


def shard_range(shard: int, shards: int) -> tuple[int, int]:
    """Return the upper halves of the hashes of a shard: from the first number up to, but not including, the second.

    Examples
    --------
    >>> [shard_range(shard, 3) for shard in range(3)]
    [(0, 1431655766), (1431655766, 2863311531), (2863311531, 4294967296)]
    """
    return -(-(shard << 32) // shards), -(-((shard + 1) << 32) // shards)


def _shards_of(hashes: NDArray[np.uint64], shards: int) -> NDArray[np.int64]:
    return (((hashes >> _HALF) * np.uint64(shards)) >> _HALF).astype(np.int64)


@dataclass
class Packer:
    """Turns rows of an input into chunks for the tasks of their shards.

    Parameters
    ----------
    stage
        Join that the rows go to.
    number, side
        Position of the join, and input of the rows.
    shards
        Number of shards.
    memory
        Bytes of rows that wait for their chunks to be full.

    Attributes
    ----------
    keyless
        Number of rows so far that have no key, so they match nothing and go nowhere.
    packed
        Number of rows so far that went to a task.
    """

    stage: JoinStage
    number: int
    side: int
    shards: int
    memory: int
    keyless: int = 0
    packed: int = 0
    _waiting: dict[int, list[pa.RecordBatch]] = field(default_factory=dict)
    _nbytes: dict[int, int] = field(default_factory=dict)

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Take rows in the schema of the input, and yield the chunks that are full."""
        stored = self._stored(batch)
        if not stored.num_rows:
            return
        shard = _shards_of(np.asarray(stored.column(0)), self.shards)
        order = np.argsort(shard, kind="stable")
        ordered = stored.take(pa.array(order))
        found, starts = np.unique(shard[order], return_index=True)
        room = min(_CHUNK_BYTES, self.memory // self.shards)
        for each, start, end in zip(found.tolist(), starts, [*starts[1:], len(order)], strict=True):
            part = ordered.slice(start, end - start)
            self._waiting.setdefault(each, []).append(part)
            self._nbytes[each] = self._nbytes.get(each, 0) + part.nbytes
            if self._nbytes[each] >= room:
                yield self._chunk(each)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the chunks that are not full."""
        for shard in sorted(self._waiting):
            yield self._chunk(shard)

    def _chunk(self, shard: int) -> pa.RecordBatch:
        batch = concat_batches(self._waiting.pop(shard))
        self._nbytes.pop(shard)
        self.packed += batch.num_rows
        return _row(shard, self.number, self.side, batch.serialize())

    def _stored(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that have all keys, with their hash."""
        valid: NDArray[np.bool_] | None = None
        for key in self.stage.graph.keys[self.side]:
            _, found = key.encode(batch)
            if found is not None and not found.all():
                valid = found if valid is None else valid & found
        if valid is not None:
            self.keyless += int(np.count_nonzero(~valid))
            batch = batch.filter(pa.array(valid))
        keys, _ = self.stage.equal_keys()[self.side].encode(batch)
        hashes = pa.array(digests_of(keys))
        return pa.RecordBatch.from_arrays([hashes, *batch.columns], schema=stored_schema(self.stage, self.side))


@dataclass(frozen=True)
class Chunk:
    """A row of the frame between stages: the join and the input that its content goes to, and the content."""

    shard: int
    stage: int
    side: int
    payload: memoryview

    def rows(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the stored rows of a chunk."""
        return pa.ipc.read_record_batch(pa.py_buffer(self.payload), schema)

    def passed(self) -> pa.RecordBatch:
        """Return the chunk as a row of the frame."""
        return _row(self.shard, self.stage, self.side, self.payload)

    def note(self) -> dict[str, Any]:
        """Return the note of a task."""
        note: dict[str, Any] = json.loads(bytes(self.payload))
        return note


def chunks_of(batch: pa.RecordBatch) -> Iterator[Chunk]:
    """Yield the chunks of a batch of the frame."""
    shards, stages, sides = (batch.column(name).to_pylist() for name in (SHARD, STAGE, SIDE))
    payloads = batch.column(PAYLOAD)
    for at, (shard, stage, side) in enumerate(zip(shards, stages, sides, strict=True)):
        yield Chunk(shard, stage, side, memoryview(payloads[at].as_buffer()))


def note_row(note: Mapping[str, Any], shard: int = 0) -> pa.RecordBatch:
    """Return a note of a task as a row of the frame; `shard` only decides which task passes it on."""
    return _row(shard, NOTE, START, json.dumps(note).encode())


def start_rows(stages: int, shards: int) -> pa.RecordBatch:
    """Return a row for each shard of each join, so that every task runs and knows its shard."""
    every = np.arange(stages * shards)
    columns = [
        pa.array(every % shards, pa.int32()),
        pa.array(every // shards, pa.int32()),
        pa.array(np.full(len(every), START), pa.int32()),
        pa.array([b""] * len(every), pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHUNKS)


def _row(shard: int, stage: int, side: int, payload: Any) -> pa.RecordBatch:
    data = pa.py_buffer(payload)
    ends = pa.py_buffer(np.array([0, data.size], dtype=np.int32))
    columns = [pa.array([value], pa.int32()) for value in (shard, stage, side)]
    return pa.RecordBatch.from_arrays(
        [*columns, pa.Array.from_buffers(pa.binary(), 1, [None, ends, data])], schema=CHUNKS
    )
