"""Rows packed for a shuffle: each row of the packed frame holds many rows of a shard as an Arrow stream.

Spark shuffles rows one by one and converts them from and to Arrow on both sides. A packed frame has one row for each
batch and shard, so that the shuffle only copies bytes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.pipelines.spark.frame import SHARD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

__all__ = ["PACKED", "PACKED_SCHEMA", "bounded_batches", "pack", "unpack"]

PACKED = "_packed"
PACKED_SCHEMA = pa.schema([(SHARD, pa.int32()), (PACKED, pa.binary())])
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_MOST_BYTES = 32 << 20  # of packed rows that Spark sends to a worker at once


def pack(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with one row for each shard (column `_shard`), which holds the rows of the shard without it."""
    shards = np.asarray(batch.column(SHARD))
    found = np.unique(shards)
    rows = batch.drop_columns([SHARD])
    parts = [rows] if len(found) == 1 else [rows.filter(pa.array(shards == shard)) for shard in found]
    return pa.record_batch([pa.array(found, pa.int32()), pa.array(map(_stream, parts), pa.binary())], PACKED_SCHEMA)


def unpack(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batches that a packed batch holds."""
    for stream in batch.column(PACKED):
        with pa.ipc.open_stream(stream.as_buffer()) as reader:
            yield from reader


@contextmanager
def bounded_batches(spark: SparkSession) -> Iterator[None]:
    """Limit the bytes of the Arrow batches of frames that are planned meanwhile, because a packed row is large."""
    before = spark.conf.get(_BATCH_BYTES)
    spark.conf.set(_BATCH_BYTES, _MOST_BYTES)
    try:
        yield
    finally:
        spark.conf.set(_BATCH_BYTES, before)


def _stream(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream
