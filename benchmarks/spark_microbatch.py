"""A micro-batch of facts meets a large dimension on Spark: with SSIJ over replicas, and with Spark's own join.

Both read the same rows as a stream of Parquet files, look up one dimension that is a Delta table, and append to a Delta
table under a transaction, in one session and in turns. Timed is a batch: of ours from its plan to the commit of its
record, of Spark from the batch's frame to its commit within `foreachBatch`. The first batches of each are not counted;
ours builds the replica in them. A third contestant shows what a batch costs Spark that looks up nothing: it copies the
rows into a Delta table. Keys are integers or texts, each a run of its own. Spark joins with adaptive execution, as it
does by default; the join that it planned is printed. Prints medians and ratios, writes `spark.csv` and `spark.png`.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import functions as sf

from benchmarks._data import dimension, stream
from benchmarks._measure import machine, print_table, write_csv
from benchmarks._plot import plot_bars
from headrace.pipelines.config import load_pipeline
from headrace.pipelines.dimension import create_dimension
from headrace.pipelines.runner import run as run_pipeline
from headrace.pipelines.spark import SparkSettings, session, stop

__all__ = ["QUICK", "Settings", "run"]

OURS = "Headrace"
SPARKS = "Spark stream-static join"
COPY = "Spark copies the rows only"
SIDES = {OURS: "ours", SPARKS: "sparks", COPY: "copy"}
JOINS = ("BroadcastHashJoin", "ShuffledHashJoin", "SortMergeJoin")
KEY_TYPES = {"integer keys": "bigint", "text keys": "string"}
PIPELINE = """
name: bench
source:
  format: parquet
  path: stream/ours
  schema: {{number: bigint, key: {key}}}
dimensions:
  item:
    path: dim_item
    natural_key: [id]
lookups:
  - {{dimension: item, role: item, on: {{key: id}}, policy: unknown, carry: [wide]}}
sink: {{path: facts_ours}}
trigger: {{max_files: 2}}
memory: {memory}
replicas: replicas
"""


@dataclass(frozen=True)
class Settings:
    """Members, rows of a batch, skew of their keys, counted rounds and others before, budget of the join."""

    members: int = 8_000_000
    batch_rows: int = 250_000
    skew: float = 0.5
    rounds: int = 3
    warming: int = 2
    memory: str = "256MiB"


QUICK = Settings(members=50_000, batch_rows=5_000, rounds=1, warming=1)


def run(settings, results):
    """Measure all and write the results into a folder."""
    print(f"machine: {machine()}")
    print(
        f"dimension: {settings.members:,} members in Delta; batches of {settings.batch_rows:,} rows in two files, Zipf "
        f"{settings.skew}; join memory {settings.memory} a worker; {settings.rounds} rounds in turns after "
        f"{settings.warming} that are not counted"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as name:
        spark = session(SparkSettings(app_name="headrace benchmark"))
        try:
            for case in KEY_TYPES:
                folder = Path(name).absolute() / case.replace(" ", "_")
                folder.mkdir()
                config, files = _prepare(folder, settings, case)
                rows += _rounds(spark, folder, config, files, settings, case)
                _compare(spark, folder)
        finally:
            stop(spark)
    write_csv(results / "spark.csv", rows)
    _report(rows, settings, results)
    return rows


def _prepare(folder, settings, case):
    """Make the dimension and return the pipeline and the rows of each batch."""
    members = dimension(settings.members)
    ids = members["id"].to_numpy()
    batches = stream(ids, settings.skew, settings.rounds + settings.warming, settings.batch_rows)
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    if KEY_TYPES[case] == "string":
        members = _with_text(members, "id")
        tables = [_with_text(table, "key") for table in tables]
    file = folder / "pipeline.yml"
    file.write_text(PIPELINE.format(memory=settings.memory, key=KEY_TYPES[case]))
    for side in SIDES.values():
        (folder / "stream" / side).mkdir(parents=True)
    config = load_pipeline(file)
    began = time.perf_counter()
    create_dimension(config, "item", members)
    print(f"{case}: wrote the dimension as a Delta table in {time.perf_counter() - began:.1f} s")
    return config, tables


def _with_text(table, name):
    """Return the table with a column of article numbers in place of one of integers."""
    texts = pc.binary_join_element_wise("SKU-", pc.cast(table[name], pa.string()), "")
    return table.set_column(table.schema.get_field_index(name), name, texts)


def _rounds(spark, folder, config, tables, settings, case):
    key = KEY_TYPES[case]
    others = {SPARKS: _SparkJoin(spark, folder, SIDES[SPARKS], key), COPY: _SparkCopy(spark, folder, SIDES[COPY], key)}
    rows = []
    for number, table in enumerate(tables):
        for name, side in SIDES.items():
            _add_files(folder / "stream" / side, number, table)
            seconds = _run_ours(config) if name == OURS else others[name].run()
            rows.append({"keys": case, "contestant": name, "round": number, "counted": number >= settings.warming,
                         "rows": len(table), "seconds": round(seconds, 3),
                         "rows_per_second": round(len(table) / seconds)})  # fmt: skip
            print(f"{case}, round {number}: {name} {seconds:.2f} s")
    print(f"  Spark joined by {others[SPARKS].plan}")
    return rows


def _add_files(folder, number, table):
    """Add a batch to a stream, as two files, so that two cores can read it."""
    half = len(table) // 2
    for part, rows in enumerate((table.slice(0, half), table.slice(half))):
        pq.write_table(rows, folder / f"{number:04}-{part}.parquet")


def _run_ours(config):
    (record,) = run_pipeline(config).batches
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record.detail["phases"].items())
    print(f"  phases in seconds: {shown}; hit ratio {record.hit_ratio:.1%}, {record.pages_read:,} pages read")
    return record.seconds


class _SparkBatch:
    """A stream that is written to Delta by `foreachBatch`, under a transaction of the batch."""

    def __init__(self, spark, folder, side, key):
        self.spark = spark
        self.folder = folder
        self._side = side
        self._schema = f"number bigint, key {key}"
        self._seconds = 0.0

    def run(self):
        """Run what is there, and return the seconds within the batch."""
        source = str(self.folder / "stream" / self._side)
        frame = self.spark.readStream.schema(self._schema).option("maxFilesPerTrigger", 2).parquet(source)
        writer = frame.writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", str(self.folder / f"checkpoint_{self._side}"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return self._seconds

    def _batch(self, frame, number):
        began = time.perf_counter()
        writer = self.rows(frame).write.format("delta").mode("append")
        writer = writer.option("txnAppId", self._side).option("txnVersion", number)
        writer.save(str(self.folder / f"facts_{self._side}"))
        self._seconds = time.perf_counter() - began


class _SparkJoin(_SparkBatch):
    """What a Spark user writes: the stream joined with the Delta table, unmatched keys to the unknown member."""

    plan = "no join"

    def rows(self, frame):
        """Return the facts."""
        spark = frame.sparkSession
        spark.conf.set("spark.sql.adaptive.enabled", "true")
        members = spark.read.format("delta").load(str(self.folder / "dim_item")).select("id", "item_key", "wide")
        joined = frame.join(members, frame["key"] == members["id"], "left").select(
            "number", "key", sf.coalesce("item_key", sf.lit(-1)).alias("item_key"), sf.col("wide").alias("item_wide")
        )
        text = joined._jdf.queryExecution().executedPlan().toString()  # noqa: SLF001 - the public way only prints it
        self.plan = next((name for name in JOINS if name in text), "another join")
        return joined


class _SparkCopy(_SparkBatch):
    """The least that a batch costs with Spark's writer: no lookup."""

    def rows(self, frame):
        """Return the rows as they are."""
        return frame


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
    seconds = {(row["keys"], row["contestant"], row["round"]): row["seconds"] for row in counted}
    groups = {}
    for case in KEY_TYPES:
        rounds = sorted({number for keys, _, number in seconds if keys == case})
        medians = {name: statistics.median(seconds[case, name, number] for number in rounds) for name in SIDES}
        groups[case] = medians
        print_table([case, "seconds a batch"], [[name, f"{value:.2f}"] for name, value in medians.items()])
        ratio = statistics.median(seconds[case, SPARKS, number] / seconds[case, OURS, number] for number in rounds)
        print(f"{case}: {OURS} was {ratio:.1f} times faster than {SPARKS} (median of the rounds' ratios)")
    title = f"{settings.batch_rows:,} rows into {settings.members:,} members"
    plot_bars(results / "spark.png", groups, "seconds", title)
