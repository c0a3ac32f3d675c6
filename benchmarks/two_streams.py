"""Joins of two streams, all in memory and with spill files, compared with DuckDB's join of the same tables.

DuckDB has both inputs as a whole and gives no result before it has read one of them; the joins of streams take them in
turns, batch by batch. Contestants take turns, ratios are taken within rounds. Writes `two_streams.csv`.

``python -m benchmarks.two_streams --rows 50000000 --memory 256MiB`` measures the joins that spill with other sizes.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._measure import interleave, machine, median_rate, median_ratio, print_table, write_csv
from headrace.joins import keep_little_freed_memory, streams
from headrace.joins.streams import DoublePipelinedHash, SymmetricHash, XJoin
from headrace.storage.units import format_size, parse_memory

__all__ = ["Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement: rows of each input, and the memory of the joins that spill and of DuckDB then."""

    rows: int = 4_000_000
    batch_rows: int = 50_000
    plenty: int = 2 << 30
    memory: int = 64 << 20
    rounds: int = 3
    spilling: tuple = (XJoin, DoublePipelinedHash)
    cases: tuple = ("in memory", "with spill files")


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
        started, processor, self._details = time.perf_counter(), time.process_time(), {}
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
        self._details["processor_seconds"] = round(time.process_time() - processor, 2)
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
        processor = time.process_time()
        with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
            connection.execute(f"SET memory_limit = '{self._memory}B'; SET temp_directory = '{folder}'")
            connection.register("a", self._tables[0])
            connection.register("b", self._tables[1])
            reader = connection.sql("SELECT a.*, b.* FROM a JOIN b ON a.k = b.k").to_arrow_reader(100_000)
            self._rows = sum(len(batch) for batch in reader)
        self._processor = round(time.process_time() - processor, 2)
        return sum(map(len, self._tables))

    def details(self):
        return {"rows_out": self._rows, "processor_seconds": self._processor}


def contestants_of(tables, memory, operators, batch_rows):
    joins = [StreamContestant(operator, tables, memory, batch_rows) for operator in operators]
    return [*joins, DuckDBContestant(tables, memory)]


def run(settings, out):
    print(f"{machine()}; two inputs of {settings.rows:,} rows of 24 bytes in batches of {settings.batch_rows:,}")
    tables, small, rows, written = inputs(settings.rows), inputs(QUICK.rows), [], []
    cases = {
        "in memory": (settings.plenty, [SymmetricHash]),
        "with spill files": (settings.memory, settings.spilling),
    }
    for case in settings.cases:
        memory, operators = cases[case]
        for contestant in contestants_of(small, min(memory, QUICK.memory), operators, QUICK.batch_rows):
            contestant.run(0)  # kernels are loaded
        contestants = contestants_of(tables, memory, operators, settings.batch_rows)
        samples = interleave(contestants, settings.rounds, 0)
        counts = {sample.details["rows_out"] for sample in samples}
        assert len(counts) == 1, f"different results: {counts}"
        for contestant in contestants:
            name = contestant.name
            rate, ratio = median_rate(samples, name), median_ratio(samples, name, "DuckDB")
            mine = [sample.details for sample in samples if sample.name == name]
            processor = sorted(details["processor_seconds"] for details in mine)[len(mine) // 2]
            seconds = 2 * settings.rows / rate
            row = [case, format_size(memory), name, f"{rate / 1e6:.2f}", f"{ratio:.2f}", f"{seconds:.1f}"]
            rows.append([*row, processor, mine[0].get("first_seconds", "")])
        written += [{"case": case, "name": s.name, "round": s.round, "rate": s.rate, **s.details} for s in samples]
    head = ["case", "memory", "join", "M tuples/s in", "of DuckDB", "seconds", "processor, s", "first result, s"]
    print_table(head, rows)
    write_csv(out / "two_streams.csv", written)


def main():
    keep_little_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_streams", description="Joins that spill.")
    parser.add_argument("--rows", type=int, default=50_000_000, help="rows of each input")
    parser.add_argument("--memory", default="256MiB", help="memory of each join and of DuckDB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--operators", default="DoublePipelinedHash", help="names of operators, with commas")
    parser.add_argument("--folder", type=Path, help="existing folder for the files of all contestants")
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmarks"), help="folder of the results")
    chosen = parser.parse_args()
    if chosen.folder is not None:
        os.environ["TMPDIR"] = str(chosen.folder)
    chosen.out.mkdir(parents=True, exist_ok=True)
    operators = tuple(getattr(streams, name) for name in chosen.operators.split(","))
    settings = replace(Settings(), rows=chosen.rows, memory=parse_memory(chosen.memory), rounds=chosen.rounds)
    run(replace(settings, spilling=operators, cases=("with spill files",)), chosen.out)


if __name__ == "__main__":
    main()
