"""Joins of two streams, all in memory and with spill files, compared with DuckDB's join of the same tables.

DuckDB has both inputs as a whole and gives no result before it has read one of them; the joins of streams take them in
turns, batch by batch. Contestants take turns, ratios are taken within rounds. Writes `two_streams.csv`.
"""

import tempfile
import time
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._measure import interleave, machine, median_rate, median_ratio, print_table, write_csv
from headrace.joins.streams import DoublePipelinedHash, SymmetricHash, XJoin
from headrace.storage.units import format_size

__all__ = ["Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement: rows of each input, and the memory of the joins that spill and of DuckDB then."""

    rows: int = 4_000_000
    batch_rows: int = 50_000
    plenty: int = 2 << 30
    memory: int = 64 << 20
    rounds: int = 3


QUICK = Settings(rows=60_000, batch_rows=5_000, plenty=256 << 20, memory=2 << 20, rounds=1)
LEAST_DUCKDB = 32 << 20


def inputs(rows):
    """Return two tables with keys that occur once on average."""
    tables = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        tables.append(
            pa.table({"k": rng.integers(0, rows, rows), "v": rng.integers(0, 1000, rows), "f": rng.random(rows)})
        )
    return tables


class StreamContestant:
    """A join of streams. A run is one whole join."""

    def __init__(self, operator, tables, memory, batch_rows):
        self.name = operator.__name__
        self._operator, self._tables, self._memory, self._batch_rows = operator, tables, memory, batch_rows

    def run(self, _seconds):
        """Join the tables; return how many rows were taken in."""
        started, self._details = time.perf_counter(), {}
        with tempfile.TemporaryDirectory() as folder:
            options = {} if self._operator is SymmetricHash else {"spill": folder}
            schemas = {"a": self._tables[0].schema, "b": self._tables[1].schema}
            with self._operator(schemas, "k", "inner", self._memory, **options) as join:
                for pair in zip(*(table.to_batches(self._batch_rows) for table in self._tables), strict=True):
                    for side, batch in zip("ab", pair, strict=True):
                        if join.push(batch, side=side).drain() and "first_seconds" not in self._details:
                            self._details["first_seconds"] = round(time.perf_counter() - started, 4)
                join.finish().drain()
                stats = join.stats
        self._details |= {"rows_out": stats.rows_out, "rows_early": stats.rows_arriving}
        self._details |= {"bytes_spilled": stats.bytes_spilled, "peak": stats.memory.peak}
        return stats.rows_in

    def details(self):
        return self._details


class DuckDBContestant:
    """DuckDB's join of two tables in memory, whose result is read in batches."""

    name = "DuckDB"

    def __init__(self, tables, memory):
        self._tables, self._memory = tables, max(memory, LEAST_DUCKDB)

    def run(self, _seconds):
        """Join the tables; return how many rows were taken in."""
        with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
            connection.execute(f"SET memory_limit = '{self._memory}B'; SET temp_directory = '{folder}'")
            connection.register("a", self._tables[0])
            connection.register("b", self._tables[1])
            reader = connection.sql("SELECT a.*, b.* FROM a JOIN b ON a.k = b.k").to_arrow_reader(100_000)
            self._rows = sum(len(batch) for batch in reader)
        return sum(map(len, self._tables))

    def details(self):
        return {"rows_out": self._rows}


def run(settings, out):
    print(f"{machine()}; two inputs of {settings.rows:,} rows of 24 bytes in batches of {settings.batch_rows:,}")
    tables, rows, written = inputs(settings.rows), [], []
    cases = {"in memory": (settings.plenty, [SymmetricHash])}
    cases["with spill files"] = (settings.memory, [XJoin, DoublePipelinedHash])
    for case, (memory, operators) in cases.items():
        contestants = [StreamContestant(operator, tables, memory, settings.batch_rows) for operator in operators]
        contestants.append(DuckDBContestant(tables, memory))
        for contestant in contestants:
            contestant.run(0)  # kernels are loaded, files are cached
        samples = interleave(contestants, settings.rounds, 0)
        counts = {sample.details["rows_out"] for sample in samples}
        assert len(counts) == 1, f"different results: {counts}"
        for contestant in contestants:
            name = contestant.name
            rate, ratio = median_rate(samples, name), median_ratio(samples, name, "DuckDB")
            first = next(sample.details.get("first_seconds", "") for sample in samples if sample.name == name)
            rows.append([case, format_size(memory), name, f"{rate / 1e6:.2f}", f"{ratio:.2f}", first])
        written += [{"case": case, "name": s.name, "round": s.round, "rate": s.rate, **s.details} for s in samples]
    print_table(["case", "memory", "join", "M tuples/s in", "of DuckDB", "first result, s"], rows)
    write_csv(out / "two_streams.csv", written)
