"""A micro-batch of facts meets a large dimension on Spark: with SSIJ over replicas, and with Spark's own join.

Both read the same rows as a stream of Parquet files, look up one dimension that is a Delta table, and append to a Delta
table, in one session and in turns. Timed is what happens within `foreachBatch`: from the batch's frame to its commit.
Ours also writes its plan, its books and its transaction. The first batch of each is not counted; ours builds the
replica in it. Prints medians and the ratio, writes `spark.csv` and `spark.png`.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as sf

from benchmarks._data import dimension, stream
from benchmarks._measure import machine, print_table, write_csv
from benchmarks._plot import plot_bars
from pipelines.config import load_pipeline
from pipelines.dimension_tables import create_dimension
from pipelines.runner import run as run_pipeline
from pipelines.spark import SparkSettings, session, stop

__all__ = ["QUICK", "Settings", "run"]

OURS = "Headrace"
SPARKS = "Spark stream-static join"
PIPELINE = """
name: bench
source:
  format: parquet
  path: stream/ours
  schema: {{number: bigint, key: bigint}}
dimensions:
  item:
    path: dim_item
    natural_key: [id]
lookups:
  - {{dimension: item, role: item, on: {{key: id}}, policy: unknown, carry: [wide]}}
sink: {{path: facts_ours}}
trigger: {{max_files: 1}}
memory: {memory}
replicas: replicas
"""


@dataclass(frozen=True)
class Settings:
    """Members, rows of a batch, skew of their keys, counted rounds, and the budget of the join."""

    members: int = 8_000_000
    batch_rows: int = 250_000
    skew: float = 0.5
    rounds: int = 3
    memory: str = "32MiB"


QUICK = Settings(members=50_000, batch_rows=5_000, rounds=1)


def run(settings, results):
    """Measure both and write the results into a folder."""
    print(f"machine: {machine()}")
    print(
        f"dimension: {settings.members:,} members in Delta; batches of {settings.batch_rows:,} rows, "
        f"Zipf {settings.skew}; join memory {settings.memory}; {settings.rounds} rounds in turns after one that is not "
        "counted"
    )
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as name:
        folder = Path(name).absolute()
        config, files = _prepare(folder, settings)
        spark = session(SparkSettings(app_name="headrace benchmark"))
        try:
            rows = _rounds(spark, folder, config, files)
            _compare(spark, folder)
        finally:
            stop(spark)
    write_csv(results / "spark.csv", rows)
    _report(rows, settings, results)
    return rows


def _prepare(folder, settings):
    members = dimension(settings.members)
    file = folder / "pipeline.yml"
    file.write_text(PIPELINE.format(memory=settings.memory))
    for side in ("ours", "sparks"):
        (folder / "stream" / side).mkdir(parents=True)
    config = load_pipeline(file)
    began = time.perf_counter()
    create_dimension(config, "item", members)
    print(f"wrote the dimension as a Delta table in {time.perf_counter() - began:.1f} s")
    batches = stream(members["id"].to_numpy(), settings.skew, settings.rounds + 1, settings.batch_rows)
    return config, [pa.Table.from_batches([batch]) for batch in batches]


def _rounds(spark, folder, config, files):
    theirs = _SparkJoin(spark, folder)
    rows = []
    for number, table in enumerate(files):
        for name, seconds in (
            (OURS, _run_ours(folder, config, number, table)),
            (SPARKS, theirs.run(number, table)),
        ):
            rows.append({"contestant": name, "round": number, "counted": number > 0, "rows": len(table),
                         "seconds": round(seconds, 3), "rows_per_second": round(len(table) / seconds)})  # fmt: skip
            print(f"round {number}: {name} {seconds:.2f} s")
    return rows


def _run_ours(folder, config, number, table):
    pq.write_table(table, folder / "stream" / "ours" / f"{number:04}.parquet")
    (record,) = run_pipeline(config).batches
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record.detail["phases"].items())
    print(f"  phases in seconds: {shown}; hit ratio {record.hit_ratio:.1%}, {record.pages_read:,} pages read")
    return record.seconds


class _SparkJoin:
    """What a Spark user writes: the stream joined with the Delta table, unmatched keys to the unknown member."""

    def __init__(self, spark, folder):
        self._spark = spark
        self._folder = folder
        self._seconds = 0.0

    def run(self, number, table):
        """Add a file to the stream, run what is there, and return the seconds within the batch."""
        pq.write_table(table, self._folder / "stream" / "sparks" / f"{number:04}.parquet")
        frame = self._spark.readStream.schema("number bigint, key bigint").option("maxFilesPerTrigger", 1)
        writer = frame.parquet(str(self._folder / "stream" / "sparks")).writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint_sparks"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return self._seconds

    def _batch(self, frame, _number):
        began = time.perf_counter()
        members = self._spark.read.format("delta").load(str(self._folder / "dim_item")).select("id", "item_key", "wide")
        joined = frame.join(members, frame["key"] == members["id"], "left").select(
            "number", "key", sf.coalesce("item_key", sf.lit(-1)).alias("item_key"), sf.col("wide").alias("item_wide")
        )
        joined.write.format("delta").mode("append").save(str(self._folder / "facts_sparks"))
        self._seconds = time.perf_counter() - began


def _compare(spark, folder):
    """Refuse to report if the two wrote different facts."""
    facts = [
        spark.read.format("delta").load(str(folder / name)).select("number", "key", "item_key", "item_wide")
        for name in ("facts_ours", "facts_sparks")
    ]
    if facts[0].exceptAll(facts[1]).limit(1).count() or facts[1].exceptAll(facts[0]).limit(1).count():
        raise AssertionError("the two pipelines wrote different facts")
    print("both wrote the same facts")


def _report(rows, settings, results):
    counted = [row for row in rows if row["counted"]]
    medians = {
        name: statistics.median(row["seconds"] for row in counted if row["contestant"] == name)
        for name in (OURS, SPARKS)
    }
    seconds = {(row["contestant"], row["round"]): row["seconds"] for row in counted}
    ratio = statistics.median(seconds[SPARKS, number] / seconds[OURS, number] for _, number in seconds)
    print_table(["", "seconds a batch"], [[name, f"{value:.2f}"] for name, value in medians.items()])
    print(f"{OURS} was {ratio:.1f} times faster (median of the rounds' ratios)")
    title = f"{settings.batch_rows:,} rows into {settings.members:,} members"
    plot_bars(results / "spark.png", {title: medians}, "seconds", "One micro-batch")
