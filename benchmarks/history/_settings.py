"""Settings of the cases, and the Spark session that both sides share."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

from headrace.pipelines.spark import SparkSettings, session

__all__ = ["CONTENT", "QUICK", "Settings", "content", "merging", "started"]

CONF = {
    "spark.driver.memory": "5g",
    "spark.sql.shuffle.partitions": "4",
}
CONTENT = "id, city, phone, valid_from, valid_to, is_current, version"


@dataclass(frozen=True)
class Settings:
    """Sizes of the cases.

    Parameters
    ----------
    members
        Members of the dimension.
    batch_rows, batches
        Facts of a batch, and batches of a run, of which the first does not count.
    new, late
        Shares of facts with a new member, and of facts that are older than the current version.
    changes
        Changes of a round, half of which open a version.
    facts, moved
        Facts to restate from, and about how many of them move in a round.
    rounds
        Rounds that count, after one that does not.
    memory
        Memory of Headrace's joins, and of its replicas' caches.
    large_members, large_changes
        Members of a large dimension, and changes of a round, half of which open a version.
    kept
        Folder that keeps the initial tables of dimensions for later runs; empty for none.
    """

    members: int = 10_000_000
    batch_rows: int = 1_000_000
    batches: int = 3
    new: float = 0.01
    late: float = 0.05
    changes: int = 100_000
    facts: int = 100_000_000
    moved: int = 1_000_000
    rounds: int = 2
    memory: str = "512MiB"
    large_members: int = 50_000_000
    large_changes: int = 1_000_000
    kept: str = ""

    def scaled(self, scale):
        """Return the settings with all sizes multiplied."""
        names = ("members", "batch_rows", "changes", "facts", "moved", "large_members", "large_changes")
        return replace(self, **{name: max(10, int(getattr(self, name) * scale)) for name in names})


QUICK = replace(Settings().scaled(0.001), facts=50_000, moved=1_000, rounds=1, batches=2, memory="64MiB")


MERGE_CONF = {"spark.sql.adaptive.enabled": "true", "spark.sql.autoBroadcastJoinThreshold": "64m"}


@contextmanager
def merging(spark):
    """Let Spark adapt its plans, and broadcast the source of a MERGE."""
    before = {name: spark.conf.get(name) for name in MERGE_CONF}
    try:
        for name, value in MERGE_CONF.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def started():
    """Return a Spark session: Headrace's settings, with more memory for Spark."""
    return session(SparkSettings(app_name="headrace benchmark of histories", conf=CONF))


def content(frame, columns):
    """Return the number of rows of a frame, and a hash of their values that does not depend on their order."""
    hashed = frame.selectExpr(f"cast(xxhash64({columns}) as decimal(38)) as hash")
    row = hashed.selectExpr("count(1) as rows", "sum(hash) as hash").first()
    return row["rows"], row["hash"]
