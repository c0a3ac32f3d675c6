"""A micro-batch of facts meets a large dimension on Spark: with SSIJ over replicas, and with Spark's own joins.

All read the same rows as a stream of Parquet files, look up one dimension that is a Delta table, and append to a Delta
table under a transaction, in one session and in turns. A run has several batches: the first is cold, since it starts
workers and fills caches, the others are warm. Timed is a batch: of ours from its plan to the commit of its record, of
Spark from the batch's frame to its commit within `foreachBatch`. The first run of each is not counted; ours builds the
replica in it. Spark joins as most users write it, with adaptive execution, as it does by default, and tuned: the
dimension is cached in memory, the batch's keys are broadcast to it, and what they leave of it is broadcast to the
batch. Another contestant shows the cost of a Spark batch without a lookup. Keys are integers or texts, each a run
of its own. Prints medians and ratios, writes `spark.csv` and `spark.png`.
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
TUNED = "Spark, dimension cached and reduced"
COPY = "Spark copies the rows only"
SIDES = {OURS: "ours", SPARKS: "sparks", TUNED: "tuned", COPY: "copy"}
FILES = 2  # of a batch, so that two cores can read it
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
    """Members, rows of a batch, skew of their keys, batches of a run, runs that are counted and others before, and
    budget of the join; types of keys.
    """

    members: int = 8_000_000
    batch_rows: int = 250_000
    skew: float = 0.5
    batches: int = 3
    rounds: int = 2
    warming: int = 1
    memory: str = "256MiB"
    keys: tuple = tuple(KEY_TYPES)


QUICK = Settings(members=50_000, batch_rows=5_000, batches=2, rounds=1, warming=1)


def run(settings, results):
    """Measure all and write the results into a folder."""
    print(f"machine: {machine()}")
    print(
        f"dimension: {settings.members:,} members in Delta; runs of {settings.batches} batches of "
        f"{settings.batch_rows:,} rows in {FILES} files, Zipf {settings.skew}; join memory {settings.memory} a worker; "
        f"{settings.rounds} runs in turns after {settings.warming} that are not counted"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as name:
        spark = session(SparkSettings(app_name="headrace benchmark"))
        try:
            for case in settings.keys:
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
    batches = stream(ids, settings.skew, (settings.rounds + settings.warming) * settings.batches, settings.batch_rows)
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
    classes = {SPARKS: _SparkJoin, TUNED: _TunedJoin, COPY: _SparkCopy}
    others = {name: kind(spark, folder, SIDES[name], key) for name, kind in classes.items()}
    rows = []
    for number in range(settings.warming + settings.rounds):
        run = tables[number * settings.batches : (number + 1) * settings.batches]
        for name, side in SIDES.items():
            for at, table in enumerate(run):
                _add_files(folder / "stream" / side, number * settings.batches + at, table)
            spent = _run_ours(config) if name == OURS else others[name].run()
            rows += [
                {"keys": case, "contestant": name, "round": number, "counted": number >= settings.warming,
                 "batch": at, "warm": at > 0, "rows": settings.batch_rows, "seconds": round(seconds, 3)}
                for at, seconds in enumerate(spent)
            ]  # fmt: skip
            print(f"{case}, run {number}: {name} {', '.join(f'{seconds:.2f}' for seconds in spent)} s")
    print(f"  Spark joined by {others[SPARKS].plan}, tuned by {others[TUNED].plan}")
    others[TUNED].close()
    return rows


def _add_files(folder, number, table):
    """Add a batch to a stream, as several files, so that all cores can read it."""
    each = -(-len(table) // FILES)
    for part in range(FILES):
        pq.write_table(table.slice(part * each, each), folder / f"{number:04}-{part}.parquet")


def _run_ours(config):
    """Run the pipeline on the available data; return the seconds of each batch."""
    records = run_pipeline(config).batches
    for record in records:
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record.detail["phases"].items())
        print(f"  phases in seconds: {shown}; hit ratio {record.hit_ratio:.1%}, {record.pages_read:,} pages read")
    return [record.seconds for record in records]


class _SparkBatch:
    """A stream that is written to Delta by `foreachBatch`, under a transaction of the batch."""

    def __init__(self, spark, folder, side, key):
        self.spark = spark
        self.folder = folder
        self._side = side
        self._schema = f"number bigint, key {key}"
        self._seconds = []

    def run(self):
        """Process the available data, and return the seconds of each batch."""
        self._seconds = []
        source = str(self.folder / "stream" / self._side)
        frame = self.spark.readStream.schema(self._schema).option("maxFilesPerTrigger", FILES).parquet(source)
        writer = frame.writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", str(self.folder / f"checkpoint_{self._side}"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return self._seconds

    def _batch(self, frame, number):
        began = time.perf_counter()
        writer = self.rows(frame).write.format("delta").mode("append")
        writer = writer.option("txnAppId", self._side).option("txnVersion", number)
        writer.save(str(self.folder / f"facts_{self._side}"))
        self._seconds.append(time.perf_counter() - began)


class _SparkJoin(_SparkBatch):
    """A typical Spark join: the stream joined with the Delta table, unmatched keys mapped to the unknown member."""

    plan = "no join"

    def rows(self, frame):
        """Return the facts."""
        frame.sparkSession.conf.set("spark.sql.adaptive.enabled", "true")
        return self.joined(frame, self.members(frame.sparkSession))

    def members(self, spark):
        """Return the dimension."""
        return spark.read.format("delta").load(str(self.folder / "dim_item")).select("id", "item_key", "wide")

    def joined(self, frame, members):
        """Return the left join, and note how Spark will carry it out."""
        joined = frame.join(members, frame["key"] == members["id"], "left").select(
            "number", "key", sf.coalesce("item_key", sf.lit(-1)).alias("item_key"), sf.col("wide").alias("item_wide")
        )
        text = joined._jdf.queryExecution().executedPlan().toString()  # noqa: SLF001 - the public way only prints it
        self.plan = next((name for name in JOINS if name in text), "another join")
        return joined


class _TunedJoin(_SparkJoin):
    """The dimension stays in memory; Spark moves only the members that the batch references."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._cached = None

    def members(self, spark):
        """Return the dimension, cached. It is filled in the first run, which is not counted."""
        if self._cached is None:
            self._cached = super().members(spark).cache()
            self._cached.count()
        return self._cached

    def joined(self, frame, members):
        """Join with the members that the keys of the batch select."""
        keys = sf.broadcast(frame.select("key"))
        asked = members.join(keys, members["id"] == keys["key"], "left_semi")
        return super().joined(frame, sf.broadcast(asked))

    def close(self):
        """Free the cache."""
        if self._cached is not None:
            self._cached.unpersist()


class _SparkCopy(_SparkBatch):
    """The minimum cost of a batch with Spark's writer: no lookup."""

    def rows(self, frame):
        """Return the rows unchanged."""
        return frame


def _compare(spark, folder):
    """Raise if the joins wrote different facts."""
    ours, *others = (
        spark.read.format("delta").load(str(folder / name)).select("number", "key", "item_key", "item_wide")
        for name in ("facts_ours", "facts_sparks", "facts_tuned")
    )
    for facts in others:
        if ours.exceptAll(facts).limit(1).count() or facts.exceptAll(ours).limit(1).count():
            raise AssertionError("the pipelines wrote different facts")
    print("all wrote the same facts")


def _report(rows, settings, results):
    groups = {}
    for case in settings.keys:
        for warm in (False, True):
            counted = [row for row in rows if row["counted"] and row["keys"] == case and row["warm"] == warm]
            title = f"{case}, {'warm' if warm else 'cold'}"
            medians = {name: statistics.median(_seconds(counted, name).values()) for name in SIDES}
            groups[title] = medians
            print_table([title, "seconds a batch"], [[name, f"{value:.2f}"] for name, value in medians.items()])
            for other in (SPARKS, TUNED):
                ours, theirs = _seconds(counted, OURS), _seconds(counted, other)
                ratio = statistics.median(theirs[batch] / ours[batch] for batch in ours)
                print(f"{title}: {OURS} was {ratio:.1f} times faster than {other} (median of the batches' ratios)")
    title = f"{settings.batch_rows:,} rows into {settings.members:,} members"
    plot_bars(results / "spark.png", groups, "seconds", title)


def _seconds(rows, name):
    """Return the seconds of a contestant's batches, by run and place in it."""
    return {(row["round"], row["batch"]): row["seconds"] for row in rows if row["contestant"] == name}
