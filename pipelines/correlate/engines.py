"""Where the stages of a batch run: in Spark's workers, on any number of hosts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from headrace.pipelines.correlate.rows import CHUNKS, NOTE, PAYLOAD, STAGE, start_rows
from headrace.pipelines.correlate.tasks import PIECES_OF_SOURCES
from headrace.pipelines.source.pieces import spread
from headrace.pipelines.spark.columns import spark_schema
from headrace.pipelines.spark.failures import explained
from headrace.pipelines.spark.frame import SHARD
from headrace.pipelines.spark.packing import bounded_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from headrace.pipelines.correlate.tasks import JoinTask, ReadTask

__all__ = ["Engine", "SparkEngine"]


class Engine(Protocol):
    """Runs the stages of a batch."""

    @property
    def cores(self) -> int:
        """Number of tasks that run at the same time."""

    def run(self, pieces: Sequence[dict[str, Any]], read: ReadTask, joins: Sequence[JoinTask]) -> list[dict[str, Any]]:
        """Read pieces of files, run one join after another, and return the notes of the tasks.

        Parameters
        ----------
        pieces
            Pieces as rows of `PIECES_OF_SOURCES`, with the size of each in bytes.
        read, joins
            Stages in order. Rows of the frame with shard `i` go to task `i` of the next stage. Each task of a join
            also gets a row that only says which shard it has.
        """


class SparkEngine:
    """Runs the stages in Spark's workers.

    Parameters
    ----------
    spark
        Spark session.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @property
    def cores(self) -> int:  # noqa: D102 - as in the protocol
        return int(self._spark.sparkContext.defaultParallelism)

    def run(  # noqa: D102 - as in the protocol
        self, pieces: Sequence[dict[str, Any]], read: ReadTask, joins: Sequence[JoinTask]
    ) -> list[dict[str, Any]]:
        schema = spark_schema(CHUNKS)
        parts = spread([row["bytes"] for row in pieces], self.cores)
        batches = [pa.RecordBatch.from_pylist([pieces[at] for at in part], PIECES_OF_SOURCES) for part in parts]
        starts = pa.Table.from_batches([start_rows(len(joins), read.shards)])
        with bounded_batches(self._spark), explained("the join of a batch"):
            frame = self._spark.createDataFrame(pa.Table.from_batches(batches, PIECES_OF_SOURCES))
            frame = frame.mapInArrow(read, schema).union(self._spark.createDataFrame(starts))
            for join in joins:
                frame = frame.repartitionById(read.shards, SHARD).mapInArrow(join, schema)
            rows = frame.where(frame[STAGE] == NOTE).select(PAYLOAD).collect()
        return [json.loads(bytes(row[0])) for row in rows]
