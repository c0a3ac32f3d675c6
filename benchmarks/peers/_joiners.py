"""The contestants: each joins batches of a stream with its own copy of the table, and says what came out.

A joiner is idle when it has been made: the library is loaded, the table open, a tiny join done. `start` takes the
memory that it is given. `timed` takes a batch and returns how many rows came out, a sum over them (of the payload, or
of the keys where absent ones are looked for), and the seconds it took.
"""

import sqlite3
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

__all__ = ["JOINERS", "Setup"]

THREADS = 2
TINY = 1_000
SMALL = 200_000  # rows
SPARK_HEAP = 512  # MiB that Spark's driver needs beside its share
CHUNK = 1 << 20
AT_ONCE = 10_000  # keys of a MultiGet, for it holds the blocks of all
ARROW_NBYTES = 64  # of a tuple and its result, which DuckDB does not count in its limit
OWN_SHARE = 0.75  # of the memory, for the caches of engines that need more beside them


@dataclass(frozen=True)
class Setup:
    """What a contestant works on: its table, its memory, the longest wait, and `"inner"` or `"absent"`."""

    table: Path
    memory: int
    deadline: float | None = None
    work: str = "inner"


class _Joiner:
    """What engines have in common that are done with a batch when its join returns."""

    held = 0
    reserve = 0  # bytes that it needs and has not touched when it is idle

    def __init__(self):
        self.done = 0

    def timed(self, batch):
        """Join a batch; return rows and sum of the result, and the seconds that it took."""
        began = time.perf_counter()
        values = self._join(batch)
        self.done += len(batch)
        return len(values), int(values.sum()), time.perf_counter() - began

    def settle(self):
        """Return rows and sum of what may not wait for the next turn."""
        return 0, 0

    def finish(self):
        """Return rows and sum of what had to wait."""
        return 0, 0

    def details(self):
        """Return what the engine counted."""
        return {}


class SSIJJoiner:
    """An operator of this project, which reads its table with O_DIRECT."""

    kind = "headrace"
    reserve = 0

    def __init__(self, setup):
        from headrace.storage import Table  # noqa: PLC0415 - charged to the group of the process

        self._setup = setup
        with tempfile.TemporaryDirectory() as folder:
            keys = np.random.default_rng(1).permutation(SMALL)
            small = pa.table({"k": np.arange(SMALL), "v": keys})
            with Table.build(Path(folder) / "small", small, key=["k"], unique=True) as table:
                for memory in (table.stats.bytes // 2, 16 * table.stats.bytes):  # so that all kernels are loaded
                    self._operator = self._make(table, memory)
                    for _ in range(3):
                        self.timed(pa.record_batch({"key": keys, "number": keys}))
                    self.finish()
        self._table = Table.open(setup.table)

    def start(self):
        self._operator = self._make(self._table, self._setup.memory)
        self._read = self._operator.stats

    def _make(self, table, memory):
        from headrace.joins import SSIJ  # noqa: PLC0415 - as above

        how = "left" if self._setup.work == "absent" else "inner"
        return SSIJ(table, on=[("key", "k")], how=how, memory=memory, deadline=self._setup.deadline)

    @property
    def done(self):
        return self._operator.stats.rows_done

    @property
    def held(self):
        """Tuples that wait."""
        return self._operator.stats.rows_held

    def timed(self, batch):
        began = time.perf_counter()
        rows, total = self._consume(self._operator.push(batch))
        return rows, total, time.perf_counter() - began

    def settle(self):
        """Join what waits, where it has a deadline: the turns of others take longer."""
        return (0, 0) if self._setup.deadline is None else self._consume(self._operator.flush())

    def finish(self):
        return self._consume(self._operator.finish())

    def _consume(self, output):
        rows = total = 0
        for batch in output:
            values = batch["v"]
            if self._setup.work == "absent":
                values = batch["key"].filter(values.is_null()) if values.null_count else batch["key"].slice(0, 0)
            rows += len(values)
            total += pc.sum(values).as_py() or 0
        return rows, total

    def details(self):
        """Return what the operator counted since it was asked last."""
        now = self._operator.stats
        interval, self._read = now - self._read, now
        names = (
            "hit_ratio",
            "pages_wanted",
            "pages_read",
            "seeks",
            "read_seconds",
            "deadline_misses",
            "longest_wait",
            "rows_filtered",
            "false_positives",
            "filter_bits",
        )
        counted = {name: getattr(interval, name) for name in names if hasattr(interval, name)}
        recorded = getattr(interval, "rows_recorded", 0) / max(1, interval.rows_done)
        return {**counted, "record_hits": recorded, "memory": asdict(now.memory)}


class MeshJoiner(SSIJJoiner):
    """MeshJoin over the same table."""

    def _make(self, table, memory):
        from headrace.joins import MeshJoin  # noqa: PLC0415 - as above

        return MeshJoin(table, on=[("key", "k")], memory=memory)


class NestedLoopsJoiner(SSIJJoiner):
    """Index nested loops over the same table."""

    def _make(self, table, memory):
        from headrace.joins import IndexNestedLoops  # noqa: PLC0415 - as above

        return IndexNestedLoops(table, on=[("key", "k")], memory=memory)


class DuckDBJoiner(_Joiner):
    """DuckDB's hash join of each batch with its table, in a database file."""

    kind = "duckdb"

    def __init__(self, setup):
        import duckdb  # noqa: PLC0415 - as above

        super().__init__()
        self._memory = setup.memory
        kind, chosen = ("ANTI JOIN", "key AS v") if setup.work == "absent" else ("JOIN", "v")
        self._query = f"SELECT key, number, {chosen} FROM stream {kind} t ON key = k"
        self._connection = duckdb.connect(str(setup.table), read_only=True)
        self._scratch = tempfile.TemporaryDirectory()
        self._connection.execute(
            f"SET threads = {THREADS}; SET preserve_insertion_order = false; SET enable_progress_bar = false"
        )
        self._connection.execute(f"SET temp_directory = '{self._scratch.name}'")
        tiny = pa.table({"k": np.arange(TINY)})
        self._connection.register("tiny", tiny)
        self._connection.sql("SELECT a.k FROM tiny a JOIN tiny b USING (k)").to_arrow_table()

    def start(self):
        self._batch_rows = 0

    def _join(self, batch):
        if len(batch) != self._batch_rows:
            self._batch_rows = len(batch)
            limit = max(self._memory - ARROW_NBYTES * len(batch), self._memory // 4)
            self._connection.execute(f"SET memory_limit = '{limit}B'")
        self._connection.register("stream", pa.Table.from_batches([batch]))
        return _Values(self._connection.sql(self._query).to_arrow_table()["v"])


class _Values:
    """A column of Arrow with the few things that are asked of an array."""

    def __init__(self, column):
        self._column = column

    def __len__(self):
        return len(self._column)

    def sum(self):
        return pc.sum(self._column).as_py() or 0


def _ordered(batch):
    """Return the batch in the order of its keys, which is the faster one for engines that look up one by one."""
    return batch.take(pa.array(np.argsort(batch["key"].to_numpy())))


class SQLiteJoiner(_Joiner):
    """SQLite joins a temporary table of the batch with its table, which has no row ids."""

    kind = "sqlite"

    def __init__(self, setup):
        super().__init__()
        self._memory = setup.memory
        self._connection = sqlite3.connect(f"file:{setup.table}?mode=ro", uri=True, isolation_level=None)

    def start(self):
        cache = int(self._memory * OWN_SHARE) >> 10
        self._connection.executescript(
            f"PRAGMA temp_store = MEMORY; PRAGMA cache_size = -{cache};"
            "CREATE TEMP TABLE stream (key INTEGER, number INTEGER)"
        )
        self._connection.execute("SELECT sum(v) FROM t").fetchone()

    def _join(self, batch):
        batch = _ordered(batch)
        rows = zip(batch["key"].to_pylist(), batch["number"].to_pylist(), strict=True)
        self._connection.execute("BEGIN")
        self._connection.execute("DELETE FROM stream")
        self._connection.executemany("INSERT INTO stream VALUES (?, ?)", rows)
        joined = self._connection.execute("SELECT key, number, v FROM stream CROSS JOIN t ON k = key").fetchall()
        self._connection.execute("COMMIT")
        return np.array([row[2] for row in joined], dtype=np.int64)


class SQLiteRowJoiner(SQLiteJoiner):
    """SQLite asked for each tuple."""

    def _join(self, batch):
        ask = self._connection.execute
        found = (ask("SELECT v FROM t WHERE k = ?", (key,)).fetchone() for key in _ordered(batch)["key"].to_pylist())
        return np.array([row[0] for row in found if row is not None], dtype=np.int64)


class LMDBJoiner(_Joiner):
    """LMDB asked for a batch of keys at once; its cache is that of the system, within the group."""

    kind = "lmdb"

    def __init__(self, setup):
        import lmdb  # noqa: PLC0415 - as above

        super().__init__()
        self._table = setup.table
        self._environment = lmdb.open(str(setup.table), readonly=True, lock=False, readahead=False)

    def start(self):
        """Read the table into the cache of the system; nothing is to be set, the memory is that of the group."""
        _read(self._table)

    def _join(self, batch):
        from benchmarks._engines import key_bytes  # noqa: PLC0415 - as above

        with self._environment.begin() as transaction:
            found = transaction.cursor().getmulti(key_bytes(_ordered(batch)["key"].to_numpy()))
        return np.frombuffer(b"".join([value for _, value in found]), dtype="<i8")


class RocksDBJoiner(_Joiner):
    """RocksDB asked for many keys at once (its MultiGet), with half of the memory as its cache of blocks."""

    kind = "rocksdb"

    def __init__(self, setup):
        super().__init__()
        from rocksdict import AccessType, BlockBasedOptions, Cache, Options, Rdict  # noqa: PLC0415 - as above

        blocks, options = BlockBasedOptions(), Options(raw_mode=True)
        blocks.set_block_cache(Cache(setup.memory // 2))
        options.set_block_based_table_factory(blocks)
        self._table = setup.table
        self._database = Rdict(str(setup.table), options, access_type=AccessType.read_only())

    def start(self):
        """Read the table into the cache of the system; that of blocks is empty as yet."""
        _read(self._table)

    def _join(self, batch):
        from benchmarks._engines import key_bytes  # noqa: PLC0415 - as above

        keys = key_bytes(_ordered(batch)["key"].to_numpy())
        some = [self._database.get(keys[start : start + AT_ONCE]) for start in range(0, len(keys), AT_ONCE)]
        return np.frombuffer(b"".join([value for found in some for value in found if value is not None]), dtype="<i8")


class PolarsJoiner(_Joiner):
    """Polars joins each batch with a frame in memory where half of the memory holds it, else with a scan of Parquet."""

    kind = "parquet"

    def __init__(self, setup):
        import polars as pl  # noqa: PLC0415 - as above

        super().__init__()
        self._polars = pl
        self._setup = setup
        tiny = pl.DataFrame({"key": [1]})
        tiny.lazy().join(tiny.lazy(), on="key").collect(engine="streaming")

    def start(self):
        self._table = self._polars.scan_parquet(self._setup.table)
        rows = self._table.select(self._polars.len()).collect().item()
        if 32 * rows <= self._setup.memory:
            self._table = self._table.collect(engine="streaming").lazy()

    def _join(self, batch):
        stream = self._polars.from_arrow(pa.Table.from_batches([batch])).lazy()
        return stream.join(self._table, left_on="key", right_on="k").collect(engine="streaming")["v"]


class SparkJoiner(_Joiner):
    """Spark joins a stream of Parquet files with its table, a Parquet file too; timed is what `foreachBatch` does."""

    kind = "parquet"
    reserve = SPARK_HEAP << 20

    def __init__(self, setup):
        from pyspark.sql import SparkSession  # noqa: PLC0415 - as above

        super().__init__()
        builder = (
            SparkSession.builder.master(f"local[{THREADS}]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
        )
        builder = builder.config("spark.driver.memory", f"{SPARK_HEAP + (setup.memory >> 20)}m")
        self._spark = builder.config("spark.sql.shuffle.partitions", THREADS).getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._folder = tempfile.TemporaryDirectory()
        self._table = self._spark.read.parquet(str(setup.table))
        (self._stream / "_").mkdir(parents=True)

    @property
    def _stream(self):
        return Path(self._folder.name) / "stream"

    def start(self):
        """Nothing to set: the heap has been given."""

    def timed(self, batch):
        """Join a batch; return rows, sum and the seconds of the micro-batch."""
        pq.write_table(pa.Table.from_batches([batch]), self._stream / f"{self.done:012}.parquet")
        self.done += len(batch)
        self._result = 0, 0, 0.0
        frame = self._spark.readStream.schema("key bigint, number bigint").parquet(str(self._stream))
        writer = frame.writeStream.foreachBatch(self._batch).trigger(availableNow=True)
        writer.option("checkpointLocation", f"{self._folder.name}/checkpoint").start().awaitTermination()
        return self._result

    def _batch(self, frame, _number):
        began = time.perf_counter()
        joined = frame.join(self._table, frame["key"] == self._table["k"]).selectExpr("count(v)", "sum(v)").first()
        self._result = joined[0], joined[1] or 0, time.perf_counter() - began


def _read(folder):
    """Read all files of a folder."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


JOINERS = {
    "SSIJ": SSIJJoiner,
    "MeshJoin": MeshJoiner,
    "index nested loops": NestedLoopsJoiner,
    "DuckDB": DuckDBJoiner,
    "SQLite, temporary table": SQLiteJoiner,
    "SQLite, row by row": SQLiteRowJoiner,
    "LMDB": LMDBJoiner,
    "RocksDB": RocksDBJoiner,
    "Polars": PolarsJoiner,
    "Spark": SparkJoiner,
}
