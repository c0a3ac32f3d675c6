"""Batches of facts against a dimension with history: Headrace against a stream-static join of Spark.

Facts are new (a share of their members is not in the dimension, and is added) and, in a second stream, some are older
than the current version of their member. Spark joins each batch once with the versions, left, and keeps the result; it
numbers and appends the members that it did not find, and then appends the facts. For facts that are all new, it joins
with the current versions by equality alone; tuned, it caches these in memory, broadcasts the batch's keys to them, and
what they leave to the batch.
"""

import time

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as sf

from benchmarks.history._members import FIRST_VERSIONS, LAST_DAY, Members, date, link_table, pipeline, write_stream
from benchmarks.history._processor import Stopwatch
from benchmarks.history._settings import content
from headrace.pipelines.runner import run as run_pipeline

__all__ = ["CONTESTANTS", "measure"]

NEW, LATE = "all facts new", "some facts older"
CONTESTANTS = (OURS, OURS_LATE, SPARKS, TUNED, SPARKS_LATE) = (
    f"Headrace, {NEW}", f"Headrace, {LATE}", f"Spark, {NEW}", f"Spark tuned, {NEW}", f"Spark, {LATE}",
)  # fmt: skip
SIDES = {OURS: "ours", OURS_LATE: "ours_late", SPARKS: "sparks", TUNED: "tuned", SPARKS_LATE: "sparks_late"}
FILES = 2  # of a batch
FACTS = "number, customer, day, customer_city, id, first, valid_to"


def measure(spark, folder, settings):
    """Yield a row for each contestant and batch; the first batch of a run does not count, and neither the first run."""
    members = Members(settings.members)
    dimensions = {name: f"customer_{side}" for name, side in SIDES.items()}
    configs = {name: pipeline(folder, SIDES[name], settings.memory, dimensions[name]) for name in SIDES}
    path = members.create(configs[OURS], settings.kept or None)
    for name in CONTESTANTS[1:]:
        link_table(path, folder / dimensions[name])
    runs = {name: _Headrace(configs[name]) for name in (OURS, OURS_LATE)}
    runs |= {name: _SPARK[name](spark, folder, SIDES[name], dimensions[name]) for name in (SPARKS, TUNED, SPARKS_LATE)}
    for number in range(settings.rounds + 1):
        first = number * settings.batches
        for name, side in SIDES.items():
            late = settings.late if name in {OURS_LATE, SPARKS_LATE} else 0
            for batch in range(first, first + settings.batches):
                write_stream(folder / "stream" / side, batch, _facts(members, settings, batch, late), FILES)
        for name in CONTESTANTS[:: 1 if number % 2 else -1]:
            for at, (seconds, processor) in enumerate(runs[name].run()):
                yield {"contestant": name, "round": first + at, "counted": number > 0 and at > 0,
                       "rows": settings.batch_rows, "seconds": seconds, "processor": processor}  # fmt: skip
    runs[TUNED].close()
    for one, other in ((OURS, SPARKS), (OURS, TUNED), (OURS_LATE, SPARKS_LATE)):
        _compare(spark, folder, one, other, settings)


def _facts(members, settings, batch, late):
    """Return the facts of a batch."""
    rng = np.random.default_rng(1000 + batch)
    rows = settings.batch_rows
    member = rng.integers(0, settings.members, rows)
    customer, day = members.ids[member], rng.integers(LAST_DAY, LAST_DAY + 30, rows)
    old = rng.random(rows) < late
    member[old] -= member[old] % 5  # a member with two versions
    customer[old] = members.ids[member[old]]
    day[old] = rng.integers(FIRST_VERSIONS[1], members.second[member[old]])
    new = ~old & (rng.random(rows) < settings.new)
    customer[new] = 3 + 4 * rng.integers(0, settings.members, new.sum())
    number = batch * rows + np.arange(rows)
    return pa.table({"number": number, "customer": customer, "day": date(day)})


class _Headrace:
    """A pipeline."""

    def __init__(self, config):
        self._config = config

    def run(self):
        """Load the available files, and return the seconds and the processor seconds of each batch."""
        watches, spent = [Stopwatch()], []

        def on_batch(_record):
            spent.append(watches[-1].seconds())
            watches.append(Stopwatch())

        records = run_pipeline(self._config, on_batch=on_batch).batches
        for record in records:
            shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record.detail["phases"].items())
            print(f"  {record.new_members:,} new members; phases in seconds: {shown}")
        return list(zip((record.seconds for record in records), spent, strict=True))


class _Spark:
    """A stream that Spark joins with the current versions by equality, in `foreachBatch`."""

    def __init__(self, spark, folder, side, dimension):
        self.spark = spark
        self.dimension = str(folder / dimension)
        self._folder, self._side = folder, side
        self._greatest = self.versions().agg(sf.max("customer_key")).first()[0]
        self._seconds = []

    def run(self):
        """Load the available files, and return the seconds and the processor seconds of each batch."""
        self._seconds = []
        frame = self.spark.readStream.schema("number bigint, customer bigint, day date")
        frame = frame.option("maxFilesPerTrigger", FILES).parquet(str(self._folder / "stream" / self._side))
        writer = frame.writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", str(self._folder / f"checkpoint_{self._side}"))
        self.spark.conf.set("spark.sql.adaptive.enabled", "true")
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
        finally:
            self.spark.conf.set("spark.sql.adaptive.enabled", "false")
        return self._seconds

    def versions(self):
        """Return all versions."""
        return self.spark.read.format("delta").load(self.dimension)

    def members(self, _facts):
        """Return the versions that facts may have."""
        return self.versions().where("is_current").select("id", "customer_key", "city")

    def joined(self, facts):
        """Return facts with key and city of their version; null for new members."""
        members = self.members(facts)
        return facts.join(members, facts["customer"] == members["id"], "left")

    def _batch(self, frame, number):
        frame.sparkSession.conf.set("spark.sql.adaptive.enabled", "true")
        began, watch = time.perf_counter(), Stopwatch()
        joined = self.joined(frame).select("number", "customer", "day", "customer_key", "city").persist()
        keys = joined.where("customer_key IS NULL").select("customer").distinct().orderBy("customer").toPandas()
        keys["new_key"] = self._greatest + 1 + np.arange(len(keys))
        self._greatest += len(keys)
        new = frame.sparkSession.createDataFrame(keys, "customer bigint, new_key bigint").persist()
        self._append(new.selectExpr(*_INFERRED), self.dimension, number)
        facts = joined.join(sf.broadcast(new), "customer", "left")
        self._append(facts.selectExpr(*_FACTS), str(self._folder / f"facts_{self._side}"), number)
        joined.unpersist()
        new.unpersist()
        self._seconds.append((time.perf_counter() - began, watch.seconds()))

    def _append(self, frame, path, number):
        writer = frame.write.format("delta").mode("append").option("txnAppId", self._side)
        writer.option("txnVersion", number).save(path)


_INFERRED = (
    "new_key AS customer_key", "customer AS id", "DATE'0001-01-01' AS valid_from", "true AS is_current",
    "1L AS version", "false AS is_deleted", "true AS is_inferred",
)  # fmt: skip
_FACTS = ("number", "customer", "day", "coalesce(customer_key, new_key) AS customer_key", "city AS customer_city")


class _Tuned(_Spark):
    """The current versions stay in memory, and Spark moves only those that the batch names."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._first = self._greatest
        # A copy, because an append to a table makes Spark read again what it has cached of the table.
        link_table(self.dimension, f"{self.dimension}_cached")
        held = self.spark.read.format("delta").load(f"{self.dimension}_cached").where("is_current")
        self._cached = held.select("id", "customer_key", "city").persist()
        self._cached.count()

    def members(self, facts):
        """Return the versions that the keys of the batch select; members that were added since are read from Delta."""
        added = self.versions().where(f"customer_key > {self._first}").select("id", "customer_key", "city")
        keys = sf.broadcast(facts.select("customer").distinct())
        members = self._cached.unionByName(added)
        return sf.broadcast(members.join(keys, members["id"] == keys["customer"], "left_semi"))

    def close(self):
        """Free the memory."""
        self._cached.unpersist()


class _AsOf(_Spark):
    """A stream that Spark joins with the versions that were valid at the days of the facts."""

    def joined(self, facts):
        """Return facts with key and city of their version; null for new members."""
        held = self.versions().select("id", "customer_key", "city", "valid_from", "valid_to")
        valid = (facts["day"] >= held["valid_from"]) & (held["valid_to"].isNull() | (facts["day"] < held["valid_to"]))
        return facts.join(held, (facts["customer"] == held["id"]) & valid, "left")


_SPARK = {SPARKS: _Spark, TUNED: _Tuned, SPARKS_LATE: _AsOf}


def _compare(spark, folder, one, other, settings):
    """Raise if two contestants wrote different facts. The keys of added members differ, but not their versions."""
    found = []
    for name in (one, other):
        side = SIDES[name]
        facts = spark.read.format("delta").load(str(folder / f"facts_{side}"))
        held = spark.read.format("delta").load(str(folder / f"customer_{side}")).select(
            "customer_key", "id", "valid_to", sf.expr("if(is_inferred, NULL, valid_from) AS first")
        )  # fmt: skip
        found.append(content(facts.join(held, "customer_key"), FACTS))
        members = spark.read.format("delta").load(str(folder / f"customer_{side}"))
        found[-1] += tuple(members.selectExpr("count(DISTINCT customer_key)", "count(DISTINCT id)").first())
    rows = (settings.rounds + 1) * settings.batches * settings.batch_rows
    if found[0] != found[1] or found[0][0] != rows:
        raise AssertionError(f"{one} and {other} wrote different facts or members: {found}, of {rows} facts")
    print(f"{one} and {other} wrote the same {rows:,} facts and added the same members")
