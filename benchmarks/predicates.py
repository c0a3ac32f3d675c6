"""Band and as-of joins compared with DuckDB: a stream of trades and a table of prices larger than memory.

Both answer the same batches in turns and are compared row for row before they are timed. Prints medians and ratios,
writes `predicates.csv`.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._measure import machine, print_table, write_csv
from headrace.joins import SSIJ, AsOf, Band
from headrace.storage import Table
from headrace.storage.units import format_size

__all__ = ["QUICK", "Settings", "run"]

STEP = 1_000_000  # microseconds between two prices of a symbol, about


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement. The memory is a share of the table's file; DuckDB gets at least `least_duckdb`."""

    rows: int = 2_000_000
    symbols: int = 1_000
    memory_percent: float = 10.0
    least_duckdb: int = 64 << 20
    batch_rows: int = 100_000
    batches: int = 2
    rounds: int = 3


QUICK = Settings(rows=50_000, symbols=50, memory_percent=60.0, batch_rows=2_000, batches=2, rounds=1)

AS_OF = "SELECT n, price FROM trades ASOF JOIN prices ON trades.symbol = prices.symbol AND trades.at >= prices.time"
WIDTH = 2 * STEP  # microseconds of the band to either side
BAND = f"""SELECT n, price FROM (
        SELECT *,
            unnest(range((trades.at - {WIDTH}) // {2 * WIDTH}, (trades.at + {WIDTH}) // {2 * WIDTH} + 1)) AS bucket
        FROM trades
    ) asked JOIN prices ON asked.symbol = prices.symbol AND asked.bucket = prices.time // {2 * WIDTH}
    AND prices.time BETWEEN asked.at - {WIDTH} AND asked.at + {WIDTH}"""
"""A hash join by symbol and bucket of time: four times as fast as one by symbol alone, which DuckDB plans by itself."""


def run(settings, results):
    """Measure both predicates and write the results into a folder."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as folder:
        prices = _prices(settings)
        _load_duckdb(Path(folder) / "prices.duckdb", prices)
        with Table.build(Path(folder) / "prices.hdr", prices, key=["symbol", "time"]) as table:
            memory = int(table.stats.bytes * settings.memory_percent / 100)
            print(f"machine: {machine()}")
            print(f"table: {len(prices):,} prices of {settings.symbols:,} symbols, {format_size(table.stats.bytes)}")
            print(f"memory: {format_size(memory)}, DuckDB at least {format_size(settings.least_duckdb)}")
            del prices
            rows = [
                row
                for name, predicate, query in (
                    ("as-of", AsOf("at", "time", by=["symbol"]), AS_OF),
                    ("band", Band("at", "time", WIDTH, WIDTH, by=["symbol"]), BAND),
                )
                for row in _measure(name, table, predicate, query, Path(folder) / "prices.duckdb", memory, settings)
            ]
    write_csv(results / "predicates.csv", rows)
    head = ["predicate", "round", "tuples", "matches", "SSIJ s", "DuckDB s", "x DuckDB"]
    print_table(head, [list(row.values()) for row in rows])
    for name in ("as-of", "band"):
        print(f"{name}: median {statistics.median(row['ratio'] for row in rows if row['predicate'] == name)} x DuckDB")
    return rows


def _prices(settings):
    rng = np.random.default_rng(1)
    each = settings.rows // settings.symbols
    symbol = np.repeat([f"SYM{number:05d}" for number in range(settings.symbols)], each)
    times = (np.arange(each)[None, :] * STEP + rng.integers(0, STEP, (settings.symbols, each))).ravel()
    return pa.table({"symbol": symbol, "time": times, "price": rng.integers(1, 10**6, len(times))})


def _trades(settings, seed):
    rng = np.random.default_rng(seed)
    each = settings.rows // settings.symbols
    chosen = rng.integers(0, settings.symbols, settings.batch_rows)
    return pa.record_batch(
        {
            "n": np.arange(settings.batch_rows),
            "symbol": pa.array(np.char.mod("SYM%05d", chosen)),
            "at": rng.integers(0, each * STEP, settings.batch_rows),
        }
    )


def _load_duckdb(path, prices):
    with duckdb.connect(str(path)) as connection:
        connection.register("source", prices)
        connection.execute("CREATE TABLE prices AS SELECT * FROM source")
        connection.execute("CHECKPOINT")


def _measure(name, table, predicate, query, path, memory, settings):
    join = SSIJ(table, on=predicate, memory=memory, columns=["price"])
    with duckdb.connect(str(path), read_only=True) as connection:
        connection.execute(f"SET memory_limit = '{max(memory, settings.least_duckdb)}B'")
        for number in range(settings.rounds + 1):
            batches = [_trades(settings, 100 * number + batch) for batch in range(settings.batches)]
            began = time.perf_counter()
            ours = [result for batch in batches for result in join.push(batch)]
            ours += join.flush()
            middle = time.perf_counter()
            theirs = [_query(connection, query, batch) for batch in batches]
            spent, other = middle - began, time.perf_counter() - middle
            _check(ours, theirs)
            if number:  # the first round warms both up
                matches = sum(map(len, theirs))
                tuples = settings.batches * settings.batch_rows
                yield {
                    "predicate": name,
                    "round": number,
                    "tuples": tuples,
                    "matches": matches,
                    "seconds": round(spent, 3),
                    "duckdb_seconds": round(other, 3),
                    "ratio": round(other / spent, 2),
                }
    join.finish().drain()


def _query(connection, query, batch):
    connection.register("trades", pa.Table.from_batches([batch]))
    return connection.sql(query).to_arrow_table()


def _check(ours, theirs):
    """Raise if the results differ, so that no incorrect result is timed."""
    order = [("n", "ascending"), ("price", "ascending")]
    joined = pa.Table.from_batches(ours).select(["n", "price"]).sort_by(order)
    if not joined.equals(pa.concat_tables(theirs).sort_by(order)):
        raise AssertionError("SSIJ and DuckDB differ")
