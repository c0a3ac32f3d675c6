"""Spark as a contestant, with a typical join and a tuned join. The time of `foreachBatch` is measured."""

import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers._joiners import THREADS, Joiner
from benchmarks.peers._tally import WORD, Tally

__all__ = ["SparkJoiner", "TunedSparkJoiner"]

HEAP = 512  # MiB that Spark's driver needs in addition to its share


class SparkJoiner(Joiner):
    """Spark joins a stream of Parquet files with its table, a Parquet file too."""

    reserve = HEAP << 20

    def __init__(self, setup):
        from pyspark.sql import SparkSession  # noqa: PLC0415 - charged to the group of the process

        super().__init__()
        builder = (
            SparkSession.builder.master(f"local[{THREADS}]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.ansi.enabled", "false")  # the tally's sum wraps around
        )
        builder = builder.config("spark.driver.memory", f"{HEAP + (setup.memory >> 20)}m")
        self._spark = builder.config("spark.sql.shuffle.partitions", THREADS).getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._folder = tempfile.TemporaryDirectory()
        self._table = self._spark.read.parquet(str(setup.table))
        (self._stream / "_").mkdir(parents=True)

    @property
    def _stream(self):
        return Path(self._folder.name) / "stream"

    def start(self):
        """Do nothing: the heap is already allocated."""

    def timed(self, batch):
        """Join a batch; return its tally, and the seconds of the micro-batch."""
        pq.write_table(pa.Table.from_batches([batch]), self._stream / f"{self.done:012}.parquet")
        self.done += len(batch)
        self._result = Tally(), 0.0
        frame = self._spark.readStream.schema("key bigint, number bigint").parquet(str(self._stream))
        writer = frame.writeStream.foreachBatch(self._batch).trigger(availableNow=True)
        writer.option("checkpointLocation", f"{self._folder.name}/checkpoint").start().awaitTermination()
        return self._result

    def _batch(self, frame, _number):
        began = time.perf_counter()
        rows, total = self._joined(frame).selectExpr("count(v)", "sum(number * v)").first()
        self._result = Tally(rows, (total or 0) % WORD), time.perf_counter() - began

    def _joined(self, frame):
        return frame.join(self._table, frame["key"] == self._table["k"])


class TunedSparkJoiner(SparkJoiner):
    """Spark with its table cached in memory; the batch is broadcast, so nothing is shuffled or sorted."""

    def start(self):
        """Fill Spark's cache."""
        self._table = self._table.repartition(THREADS, "k").cache()
        self._table.count()

    def _joined(self, frame):
        from pyspark.sql.functions import broadcast  # noqa: PLC0415 - as above

        return self._table.join(broadcast(frame), frame["key"] == self._table["k"])
