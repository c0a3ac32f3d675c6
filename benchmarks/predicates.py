"""Band and as-of joins: compared with DuckDB, and as-of with an equality look-up of the same table.

A stream of trades meets a table of prices, larger than the memory and within it. Contestants answer the same batches in
turns and are compared row for row. Then facts meet members with several versions each, by the time of the fact or by
the exact key of a version. Prints medians and ratios, writes `predicates.csv` and `as_of_equality.csv`.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._data import zipf_positions
from benchmarks._measure import machine, print_table, write_csv
from headrace.joins import SSIJ, AsOf, Band
from headrace.storage import Table
from headrace.storage.units import format_size

__all__ = ["QUICK", "Settings", "run"]

STEP = 1_000_000  # microseconds between two prices of a symbol, about
MOST_TIME = 1_000_000  # of a version
LATER = 100_000  # most by which a fact comes after its version begins, while no other does


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement. Memory is given as shares of the table's file.

    DuckDB gets at least `least_duckdb`. Members have `versions` versions each; facts ask for them with `skewed_percent`
    of the file as memory by Zipf's law with exponent 1, and with all of it alike.
    """

    rows: int = 2_000_000
    symbols: int = 1_000
    memory_percents: tuple[float, ...] = (10.0, 200.0)
    least_duckdb: int = 64 << 20
    batch_rows: int = 100_000
    batches: int = 2
    rounds: int = 3
    members: int = 250_000
    versions: int = 4
    facts: int = 250_000
    pairs: int = 6
    skewed_percent: float = 10.0


QUICK = Settings(
    rows=50_000,
    symbols=50,
    memory_percents=(60.0,),
    batch_rows=2_000,
    rounds=1,
    members=10_000,
    facts=2_000,
    pairs=4,
    skewed_percent=60.0,
)

AS_OF = "SELECT n, price FROM trades ASOF JOIN prices ON trades.symbol = prices.symbol AND trades.at >= prices.time"
WIDTH = 2 * STEP  # microseconds of the band to either side
BAND = f"""SELECT n, price FROM trades JOIN prices ON trades.symbol = prices.symbol
    AND prices.time BETWEEN trades.at - {WIDTH} AND trades.at + {WIDTH}"""
TUNED_BAND = f"""SELECT n, price FROM (
        SELECT *,
            unnest(range((trades.at - {WIDTH}) // {2 * WIDTH}, (trades.at + {WIDTH}) // {2 * WIDTH} + 1)) AS bucket
        FROM trades
    ) asked JOIN prices ON asked.symbol = prices.symbol AND asked.bucket = prices.time // {2 * WIDTH}
    AND prices.time BETWEEN asked.at - {WIDTH} AND asked.at + {WIDTH}"""
"""A hash join by symbol and bucket of time, where DuckDB by itself plans one by symbol alone."""

CASES = (
    ("as-of", AsOf("at", "time", by=["symbol"]), {"plain": AS_OF}),
    ("band", Band("at", "time", WIDTH, WIDTH, by=["symbol"]), {"plain": BAND, "tuned": TUNED_BAND}),
)
KEYS = {
    "two int32, one word": (lambda numbers: pa.array(numbers, pa.int32()), pa.int32()),
    "int64 and timestamp": (pa.array, pa.timestamp("us")),
    "text and int32": (lambda numbers: pa.array(np.char.mod("M%07d", numbers)), pa.int32()),
}


def run(settings, results):
    """Measure both predicates and write the results into a folder."""
    print(f"machine: {machine()}")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as folder:
        rows = _compare_with_duckdb(settings, Path(folder))
        write_csv(results / "predicates.csv", rows)
        pairs = [row for key in KEYS for row in _compare_with_equality(key, settings, Path(folder))]
        write_csv(results / "as_of_equality.csv", pairs)
    return rows, pairs


def _compare_with_duckdb(settings, folder):
    prices = _prices(settings)
    _load_duckdb(folder / "prices.duckdb", prices)
    with Table.build(folder / "prices.hdr", prices, key=["symbol", "time"]) as table:
        print(f"table: {len(prices):,} prices of {settings.symbols:,} symbols, {format_size(table.stats.bytes)}")
        print(f"DuckDB has the memory of SSIJ, at least {format_size(settings.least_duckdb)}")
        del prices
        rows = []
        for percent in settings.memory_percents:
            for name, predicate, queries in CASES:
                rows += _measure(name, table, predicate, queries, folder / "prices.duckdb", percent, settings)
    _print_medians(rows, ["predicate", "memory_percent", "contestant"], {"seconds": "s", "ratio": "SSIJ x"})
    return rows


def _print_medians(rows, keys, values):
    """Print the medians of the values for each combination of keys."""
    groups = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    table = []
    for group in groups:
        chosen = [row for row in rows if tuple(row[key] for key in keys) == group]
        table.append([*group, *(round(statistics.median(row[value] for row in chosen), 2) for value in values)])
    print_table([*keys, *values.values()], table)


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


def _measure(name, table, predicate, queries, path, percent, settings):
    memory = int(table.stats.bytes * percent / 100)
    with (
        duckdb.connect(str(path), read_only=True) as connection,
        SSIJ(table, on=predicate, memory=memory, columns=["price"]) as join,
    ):
        connection.execute(f"SET memory_limit = '{max(memory, settings.least_duckdb)}B'")
        for number in range(settings.rounds + 1):
            batches = [_trades(settings, 100 * number + batch) for batch in range(settings.batches)]
            began = time.perf_counter()
            ours = [result for batch in batches for result in join.push(batch)]
            ours += join.flush()
            spent = {"SSIJ": time.perf_counter() - began}
            for contestant, query in queries.items():
                began = time.perf_counter()
                theirs = [_query(connection, query, batch) for batch in batches]
                spent[f"DuckDB, {contestant}"] = time.perf_counter() - began
                _check(ours, theirs)
            if number:  # the first round warms all up
                for contestant, seconds in spent.items():
                    yield {
                        "predicate": name,
                        "memory_percent": percent,
                        "contestant": contestant,
                        "round": number,
                        "tuples": settings.batches * settings.batch_rows,
                        "matches": sum(map(len, theirs)),
                        "seconds": round(seconds, 3),
                        "ratio": round(seconds / spent["SSIJ"], 2),
                    }


def _query(connection, query, batch):
    connection.register("trades", pa.Table.from_batches([batch]))
    return connection.sql(query).to_arrow_table()


def _check(ours, theirs):
    """Raise if the results differ, so that no incorrect result is timed."""
    order = [("n", "ascending"), ("price", "ascending")]
    joined = pa.Table.from_batches(ours).select(["n", "price"]).sort_by(order)
    if not joined.equals(pa.concat_tables(theirs).sort_by(order)):
        raise AssertionError("SSIJ and DuckDB differ")


def _compare_with_equality(key, settings, folder):
    """Return rates of both look-ups of a table of versions, where it fits the memory and where it does not."""
    rng = np.random.default_rng(1)
    members = np.repeat(np.arange(settings.members), settings.versions)
    steps = LATER + rng.integers(0, MOST_TIME // settings.versions, (settings.members, settings.versions))
    times = np.cumsum(steps, axis=1).ravel()
    column, time_type = KEYS[key]
    versions = {"member": column(members), "time": pa.array(times).cast(time_type), "version": np.arange(len(members))}
    rows = []
    with Table.build(folder / key, pa.table(versions), key=["member", "time"], unique=True) as table:
        print(f"{key}: {len(members):,} versions, {format_size(table.stats.bytes)}")
        for skew, memory in ((0, 512 << 20), (1, int(table.stats.bytes * settings.skewed_percent / 100))):
            rows += _pairs(key, table, memory, (members, times), skew, settings)
    _print_medians(
        rows, ["key", "memory", "zipf"], {"as_of": "as-of M/s", "equality": "equality M/s", "ratio": "ratio"}
    )
    return rows


def _pairs(key, table, memory, versions, skew, settings):
    """Yield the rates of pairs of batches, the first quarter left out: then all is loaded and compiled."""
    rng = np.random.default_rng(2)
    as_of = SSIJ(table, on=AsOf("time", "time", by=["member"]), memory=memory, columns=["version"])
    equality = SSIJ(table, on=["member", "time"], memory=memory, columns=["version"])
    with as_of, equality:
        for number in range(settings.pairs):
            chosen = zipf_positions(rng, len(versions[0]), skew, settings.facts)
            spent = {}
            for name, join, most in (("as_of", as_of, LATER), ("equality", equality, 1)):
                batch = _facts(key, versions, chosen, rng.integers(0, most, settings.facts))
                began = time.perf_counter()
                results = [*join.push(batch), *join.flush()]
                spent[name] = time.perf_counter() - began
                _check_versions(results, chosen)
            if number >= settings.pairs // 4:
                rates = {name: round(settings.facts / seconds / 1e6, 2) for name, seconds in spent.items()}
                ratio = round(spent["equality"] / spent["as_of"], 2)
                yield {
                    "key": key,
                    "memory": format_size(memory),
                    "zipf": skew,
                    "round": number,
                    **rates,
                    "ratio": ratio,
                }


def _facts(key, versions, chosen, later):
    column, time_type = KEYS[key]
    members, times = versions
    return pa.record_batch(
        {
            "n": np.arange(len(chosen)),
            "member": column(members[chosen]),
            "time": pa.array(times[chosen] + later).cast(time_type),
        }
    )


def _check_versions(results, chosen):
    """Raise if a fact has another version than the one it was made for."""
    found = pa.Table.from_batches(results)
    version = np.full(len(chosen), -1)
    version[found["n"].to_numpy()] = found["version"].to_numpy()
    if len(found) != len(chosen) or not np.array_equal(version, chosen):
        raise AssertionError("SSIJ found another version")
