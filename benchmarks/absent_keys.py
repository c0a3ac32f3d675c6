"""Absent keys: SSIJ over a table with and without a negative filter, compared with DuckDB's anti join.

One process, contestants in turns after a warm-up, ratios within rounds. Writes `filter.csv`. DuckDB takes batches of
several sizes, within the same memory; its table is a database file.
"""

import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._measure import interleave, machine, median_rate, median_ratio, print_table, write_csv
from headrace.joins import SSIJ
from headrace.storage import Table

__all__ = ["Settings", "run"]

STEP = 4  # one key in this many numbers
CHUNK = 1_000_000


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement. DuckDB gets `least_duckdb` if the memory is smaller."""

    rows: int = 80_000_000
    memory: int = 96_000_000
    absent: float = 0.99
    bits: float = 8.0
    batch_rows: int = 250_000
    duckdb_batches: tuple = (250_000, 1_000_000)
    warm_batches: int = 24
    rounds: int = 3
    seconds: float = 4.0
    least_duckdb: int = 96_000_000


QUICK = Settings(
    rows=300_000, memory=3_000_000, batch_rows=10_000, duckdb_batches=(10_000,), rounds=2, seconds=0.1,
)  # fmt: skip


def offsets(rows):
    """Return the offset of the key in each range of four numbers."""
    return np.random.default_rng(1).integers(0, STEP, rows, dtype=np.int8)


def relation(offset):
    """Yield the rows in key order."""
    rng = np.random.default_rng(2)
    for start in range(0, len(offset), CHUNK):
        part = offset[start : start + CHUNK]
        keys = np.arange(start, start + len(part), dtype=np.int64) * STEP + part
        yield pa.record_batch({"k": keys, "v": rng.integers(0, 1 << 40, len(part))})


class Stream:
    """Endless batches; a share of the keys is absent from the table."""

    def __init__(self, offset, absent, seed):
        self._offset, self._absent, self._rng = offset, absent, np.random.default_rng(seed)

    def batch(self, size):
        at = self._rng.integers(0, len(self._offset), size)
        shift = np.where(self._rng.random(size) < self._absent, self._rng.integers(1, STEP, size), 0)
        keys = at * STEP + (self._offset[at] + shift) % STEP
        return pa.record_batch({"s": keys, "x": np.arange(size, dtype=np.int64)})


class Join:
    """SSIJ as an inner join: the unmatched keys are the absent keys."""

    def __init__(self, name, table, stream, settings):
        self.name = name
        self._join = SSIJ(table, [("s", "k")], "inner", settings.memory)
        batches = [stream.batch(settings.batch_rows) for _ in range(settings.warm_batches)]
        for batch in batches:
            self._join.push(batch).drain()
        self._stream = cycle(batches)
        self._read = self._join.stats

    def run(self, seconds):
        """Join for `seconds`, and until no more tuples wait than at the start; return how many were completed."""
        before, began = self._join.stats, time.perf_counter()
        while True:
            self._join.push(next(self._stream)).drain()
            now = self._join.stats
            if time.perf_counter() - began >= seconds and now.rows_held <= before.rows_held:
                return now.rows_done - before.rows_done

    def details(self):
        now = self._join.stats
        interval, self._read = now - self._read, now
        return {
            "filter_bits": round(now.filter_bits, 2),
            "filtered": round(interval.rows_filtered / max(1, interval.rows_done), 4),
            "false_positives": interval.false_positives,
            "pages_read": interval.pages_read,
            "peak_memory": now.memory.peak,
        }


class AntiJoin:
    """DuckDB."""

    def __init__(self, path, stream, size, settings):
        self.name = f"DuckDB {size:,}"
        self._batch = pa.Table.from_batches([stream.batch(size)])
        self._connection = duckdb.connect(str(path), read_only=True, config={"threads": 2})
        self._connection.execute(f"SET memory_limit = '{max(settings.memory, settings.least_duckdb)}B'")

    def run(self, seconds):
        """Join for `seconds`, at least one batch; return the number of tuples."""
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds or not done:
            self._connection.register("stream", self._batch)
            self._connection.sql("SELECT stream.* FROM stream ANTI JOIN relation ON s = k").to_arrow_table()
            done += len(self._batch)
        return done

    def details(self):
        return {}


def run(settings, results):
    """Measure, print and write the results into a folder."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as folder:
        offset = offsets(settings.rows)
        contestants = _contestants(Path(folder), offset, settings)
        samples = interleave(contestants, settings.rounds, settings.seconds)
    rows = [{"contestant": s.name, "round": s.round, "tuples_per_second": round(s.rate), **s.details} for s in samples]
    write_csv(results / "filter.csv", rows)
    names = [contestant.name for contestant in contestants]
    print(f"machine: {machine()}; DuckDB {duckdb.__version__}")
    print(f"{settings}\n")
    print_table(
        ["contestant", "M tuples/s", "x of it"],
        [[name, f"{median_rate(samples, name) / 1e6:.3f}", f"{_ratio(samples, names[0], name):.1f}"] for name in names],
    )
    return rows


def _ratio(samples, first, name):
    return 1.0 if name == first else median_ratio(samples, first, name)


def _contestants(folder, offset, settings):
    schema = pa.schema({"k": pa.int64(), "v": pa.int64()})
    plain, filtered = folder / "plain.hdr", folder / "filtered.hdr"
    for path, bits in ((plain, None), (filtered, settings.bits)):
        rows = pa.RecordBatchReader.from_batches(schema, relation(offset))
        Table.build(path, rows, "k", unique=True, filter_bits=bits).close()
    with duckdb.connect(str(folder / "relation.duckdb")) as connection:
        connection.register("rows", pa.RecordBatchReader.from_batches(schema, relation(offset)))
        connection.execute("CREATE TABLE relation AS SELECT * FROM rows")
    stream = Stream(offset, settings.absent, 3)
    return [
        Join("SSIJ with a filter", Table.open(filtered), stream, settings),
        Join("SSIJ without", Table.open(plain), stream, settings),
        *(AntiJoin(folder / "relation.duckdb", stream, size, settings) for size in settings.duckdb_batches),
    ]
