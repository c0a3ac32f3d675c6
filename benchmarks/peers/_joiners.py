"""The contestants: each joins batches of a stream with its own copy of the table, and returns a tally.

A joiner is idle when it has been made: the library is loaded, the table open, a tiny join done. `start` takes the
memory that it is given. `timed` takes a batch and returns the tally of the result, and the seconds that the join took:
what comes before it (conversion of the batch) and after it (the tally) is outside the clock on all sides.
"""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.peers._tally import Tally

__all__ = ["THREADS", "Joiner", "Setup", "joiner"]

THREADS = 2
TINY = 1_000
SMALL = 200_000  # rows


@dataclass(frozen=True)
class Setup:
    """Setup of a contestant: its table, its memory, the longest wait, and `"inner"` or `"absent"`."""

    table: Path
    memory: int
    deadline: float | None = None
    work: str = "inner"


class Joiner:
    """Base class of engines that complete a batch when its join returns."""

    held = 0
    reserve = 0  # bytes that it needs but has not yet touched when idle
    due = None

    def __init__(self):
        self.done = 0

    def timed(self, batch):
        """Join a batch; return the tally of the result, and the seconds that it took."""
        began = time.perf_counter()
        found = self._join(batch)
        seconds = time.perf_counter() - began
        self.done += len(batch)
        return Tally.of_batch(found), seconds

    def arriving(self, batch, _at):
        """Yield the results of a batch."""
        self.done += len(batch)
        yield self._join(batch)

    def configure(self, choice):
        """Take the settings of a trial."""

    def settle(self):
        """Return the tally of tuples that cannot wait for the next turn."""
        return Tally()

    def finish(self):
        """Return the tally of the tuples that waited."""
        return Tally()

    def details(self):
        """Return the engine's counters."""
        return {}


class SSIJJoiner(Joiner):
    """An operator of this project, which reads its table with O_DIRECT."""

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
        """Number of waiting tuples."""
        return self._operator.stats.rows_held

    @property
    def due(self):
        """Time of the next `tick`; None if no tuple waits for it."""
        return self._operator.due

    def timed(self, batch):
        return self._consumed(lambda: self._operator.push(batch))

    def arriving(self, batch, at):
        """Yield the results that are ready when a batch arrives."""
        return self._operator.push(batch, at=at)

    def ticked(self, now):
        """Yield the results that are due."""
        return self._operator.tick(now)

    def settle(self):
        """Join waiting tuples that have a deadline, because the turns of others take longer."""
        return Tally() if self._setup.deadline is None else self._consumed(self._operator.flush)[0]

    def finish(self):
        return self._consumed(self._operator.finish)[0]

    def _consumed(self, start):
        """Consume an output; return its tally, and the seconds without the time of the tally."""
        tally, began = Tally(), time.perf_counter()
        output, seconds = start(), 0.0
        while (batch := next(output, None)) is not None:
            if self._setup.work == "absent":
                batch = _unmatched(batch)
            seconds += time.perf_counter() - began
            tally += Tally.of_batch(batch)
            began = time.perf_counter()
        return tally, seconds + time.perf_counter() - began

    def details(self):
        """Return the operator's counters since the last call."""
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


def _unmatched(batch):
    """Return number and key of the tuples without a match."""
    rows = batch.filter(batch["v"].is_null())
    return pa.record_batch({"number": rows["number"], "v": rows["key"]})


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


class DuckDBJoiner(Joiner):
    """DuckDB's hash join of each batch with its table, in a database file."""

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
        self._connection.sql("SELECT k FROM tiny").to_arrow_reader(TINY).read_all()
        self._streams = False

    def start(self):
        """Do nothing: each trial sets its limit."""

    def configure(self, choice):
        """Set the limit, as a share of the memory, and how results are handed over."""
        self._connection.execute(f"SET memory_limit = '{int(self._memory * choice.limit)}B'")
        self._streams = choice.streams

    def timed(self, batch):
        if not self._streams:
            return super().timed(batch)
        tally, began = Tally(), time.perf_counter()
        results, seconds = self._join(batch), 0.0
        while (result := next(results, None)) is not None:
            seconds += time.perf_counter() - began
            tally += Tally.of_batch(result)
            began = time.perf_counter()
        self.done += len(batch)
        return tally, seconds + time.perf_counter() - began

    def arriving(self, batch, at):
        if not self._streams:
            yield from super().arriving(batch, at)
            return
        self.done += len(batch)
        yield from self._join(batch)

    def _join(self, batch):
        self._connection.register("stream", pa.Table.from_batches([batch]))
        joined = self._connection.sql(self._query)
        return iter(joined.to_arrow_reader()) if self._streams else joined.to_arrow_table()


class PolarsJoiner(Joiner):
    """Polars joins each batch with a frame in memory where half of the memory holds it, else with a scan of Parquet."""

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
        return stream.join(self._table, left_on="key", right_on="k").collect(engine="streaming")


def joiner(engine, setup):
    """Return the joiner of an engine."""
    from benchmarks.peers._spark import SparkJoiner, TunedSparkJoiner  # noqa: PLC0415 - each needs some of these
    from benchmarks.peers._stores import LMDB, RocksDB, SQLite, SQLiteByRow, StoreJoiner  # noqa: PLC0415 - as above

    stores = {"SQLite": SQLite, "SQLite, row by row": SQLiteByRow, "LMDB": LMDB, "RocksDB": RocksDB}
    if engine in stores:
        return StoreJoiner(stores[engine], setup)
    others = {
        "SSIJ": SSIJJoiner,
        "MeshJoin": MeshJoiner,
        "index nested loops": NestedLoopsJoiner,
        "DuckDB": DuckDBJoiner,
        "Polars": PolarsJoiner,
        "Spark": SparkJoiner,
        "Spark, tuned": TunedSparkJoiner,
    }
    return others[engine](setup)
