"""Two feeds meet each other on Spark: a pipeline with `correlate`, and Spark's own stream-stream join.

Both read the same Parquet files, a few of each feed in a batch, join them on one key, keep all rows of both feeds as
state, and append the results to a Delta table exactly once. Each runs in a session of its own with two cores and two
partitions; Spark's state store is its default one, which keeps the state in memory. The first batches of each are not
counted. A batch of the pipeline has fixed costs of about half a second (Spark's jobs, commits, ledgers), so its lead
grows with the rows of a batch. A second comparison is without tables and without Spark's tasks: the operator that the
pipeline uses, in two threads of one process, and Spark's join with a sink that drops the results. Contents are compared
for both tables; the verdicts are computed. Writes `correlate.csv`.
"""

import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from benchmarks._measure import machine, print_table, write_csv
from headrace.joins.streams.hashing.kept_rows import KeptRows
from headrace.pipelines.config import load_any
from headrace.pipelines.runner import run as run_pipeline
from headrace.pipelines.spark import SparkSettings, session, stop

__all__ = ["QUICK", "Settings", "run"]

TARGET = 10.0
SHARDS = 2
FILES = 2  # of each feed in a batch, so that two cores can read them
BEGIN = np.datetime64("2026-01-01T00:00:00", "us")
PIPELINE = """
name: paid
sources:
  orders: {{format: parquet, path: orders, schema: {{id: bigint, item: int, ordered: timestamp}}}}
  payments: {{format: parquet, path: payments, schema: {{order: bigint, paid: double, received: timestamp}}}}
correlate: {{on: [orders.id = payments.order], shards: 2}}
sink: {{path: ours}}
trigger: {{max_files: {files}}}
memory: {memory}
spark: {{master: "local[2,4]", conf: {{spark.driver.memory: 6g}}}}
"""


@dataclass(frozen=True)
class Settings:
    """Rows of each feed in a batch, batches, how many of them are not counted, and memory of a worker."""

    rows: int = 500_000
    batches: int = 4
    warming: int = 2
    memory: str = "4GiB"


QUICK = Settings(rows=5_000, batches=3, warming=1, memory="256MiB")


def run(settings, results):
    """Measure all and write the results into a folder."""
    print(f"machine: {machine()}")
    print(
        f"{settings.batches} batches of {settings.rows:,} rows of each feed, {settings.warming} of them not counted; "
        "each order has one payment, at most one batch later; two cores, two partitions"
    )
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as name:
        folder = Path(name).absolute()
        _write_feeds(folder, settings)
        rows = [
            _rated("headrace, pipeline to Delta", _ours(folder, settings), settings),
            *(_rated(f"Spark, {sink}", _sparks(folder, settings, sink), settings) for sink in ("delta", "noop")),
            _rated("headrace, operator alone", _operator(folder, settings), settings),
        ]
        _compare(folder, rows)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    write_csv(results / "correlate.csv", rows)
    for ours, theirs in ((0, 1), (3, 2)):
        ratio = rows[ours]["rows a second"] / rows[theirs]["rows a second"]
        reached = "reached" if ratio >= TARGET else "not reached"
        print(
            f"{rows[ours]['contestant']}: {ratio:.1f} x {rows[theirs]['contestant']}; target {TARGET:.0f} x {reached}"
        )
    return rows


def _write_feeds(folder, settings):
    """Write the files of both feeds, in the order of their dates. Payments come with their order or a batch later."""
    rng = np.random.default_rng(7)
    total = settings.rows * settings.batches
    ids = rng.permutation(total).astype(np.int64)
    delayed = np.argsort(np.arange(total) + rng.integers(0, settings.rows, total), kind="stable")
    times = BEGIN + (np.arange(total) * 1000).astype("timedelta64[us]")
    for feed in ("orders", "payments"):
        (folder / feed).mkdir()
    utc = pa.timestamp("us", "UTC")
    orders = pa.table({"id": ids, "item": (ids % 1000).astype(np.int32), "ordered": pa.array(times, utc)})
    payments = pa.table({"order": ids[delayed], "paid": rng.random(total), "received": pa.array(times, utc)})
    each = -(-settings.rows // FILES)
    for number, start in enumerate(range(0, total, each)):
        for feed, table in (("orders", orders), ("payments", payments)):
            path = folder / feed / f"{number:05d}.parquet"
            pq.write_table(table.slice(start, each), path)
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def _ours(folder, settings):
    """Return the seconds of each batch, from the end of the one before."""
    file = folder / "pipeline.yml"
    file.write_text(PIPELINE.format(files=FILES, memory=settings.memory))
    ends = []
    result = run_pipeline(load_any(file), on_batch=lambda _: ends.append(time.perf_counter()))
    for batch in (result.batches[0], result.batches[-1]):
        print(f"  batch {batch.batch}: {batch.seconds:.2f} s, {batch.detail}")
    _stop_spark()
    return np.diff(ends).tolist()


def _sparks(folder, settings, sink):
    spark = session(
        SparkSettings(
            master="local[2,4]",
            app_name="headrace benchmark",
            shuffle_partitions=SHARDS,
            conf={"spark.driver.memory": "6g"},
        )
    )
    feeds = {}
    for feed in ("orders", "payments"):
        schema = spark.read.parquet(str(folder / feed)).schema
        feeds[feed] = spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES).parquet(str(folder / feed))
    joined = feeds["orders"].join(feeds["payments"], feeds["orders"]["id"] == feeds["payments"]["order"])
    writer = joined.writeStream.trigger(availableNow=True).option("checkpointLocation", str(folder / f"check-{sink}"))
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", 10 * settings.batches)
    query = writer.format(sink).start(str(folder / "sparks")) if sink == "delta" else writer.format(sink).start()
    query.awaitTermination()
    seconds = [
        each["durationMs"]["triggerExecution"] / 1000 for each in query.recentProgress if each["numInputRows"] > 0
    ]
    stop(spark)
    return seconds[1:]


def _stop_spark():
    stop(SparkSession.getActiveSession())


def _operator(folder, settings):
    """Join the feeds with the operator of the pipeline in two threads, each with the keys of one shard."""
    schemas = {feed: pq.read_schema(folder / feed / "00000.parquet") for feed in ("orders", "payments")}
    memory = 2 << 30
    shards = [KeptRows(schemas, [("orders.id", "payments.order")], memory) for _ in range(SHARDS)]
    seconds, files = [], sorted(path.name for path in (folder / "orders").iterdir())
    found, lock = [0], threading.Lock()

    def join(shard, parts):
        kept, results = shards[shard], 0
        for side, batches in enumerate(parts):
            for batch in batches:
                results += sum(map(len, kept.probe(side, batch)))
                if not kept.keep(side, batch):
                    raise MemoryError
        with lock:
            found[0] += results

    with ThreadPoolExecutor(SHARDS) as pool:
        for start in range(0, len(files), FILES):
            tables = [
                pa.concat_tables([pq.read_table(folder / feed / name) for name in files[start : start + FILES]])
                for feed in ("orders", "payments")
            ]
            began = time.perf_counter()
            parts = list(pool.map(_split, tables))
            list(pool.map(join, range(SHARDS), [[part[shard] for part in parts] for shard in range(SHARDS)]))
            seconds.append(time.perf_counter() - began)
    expected = settings.rows * settings.batches
    assert found[0] == expected, f"{found[0]} results in place of {expected}"
    return seconds[1:]


def _split(table):
    """Return the batches of each shard."""
    keys = table.column(0).to_numpy()
    shard = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(63)
    return [table.filter(pa.array(shard == number)).combine_chunks().to_batches() for number in range(SHARDS)]


def _rated(name, seconds, settings):
    """Return the rate over the batches that are counted; `seconds` begins with the second batch."""
    counted = seconds[settings.warming - 1 :]
    assert len(counted) == settings.batches - settings.warming, (name, seconds)
    rate = 2 * settings.rows * len(counted) / sum(counted)
    print(f"  {name}: {', '.join(f'{each:.2f}' for each in seconds)} s")
    return {
        "contestant": name,
        "batches": len(counted),
        "seconds": round(sum(counted), 2),
        "rows a second": round(rate),
    }


def _compare(folder, rows):
    """Compare the contents of both tables."""
    digests = [_digest(DeltaTable(str(folder / name)).to_pyarrow_table()) for name in ("ours", "sparks")]
    if digests[0] != digests[1]:
        raise AssertionError(f"the results differ: {digests}")
    print(f"  both tables have the same {digests[0][0]:,} rows")
    for row in rows:
        row["results"] = digests[0][0]


def _digest(rows):
    connection = duckdb.connect()
    connection.register("results", rows)
    query = 'select count(*), sum(hash(id, item, ordered, "order", paid, received)::hugeint) from results'
    return connection.execute(query).fetchone()
