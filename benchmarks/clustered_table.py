"""The clustered table compared with DuckDB, SQLite (WITHOUT ROWID), and LMDB: load, upsert, and durable commit.

Loads: the same Parquet file, keys sorted and in random order; DuckDB without and with its index. Upserts: batches of
present keys, scattered and neighbouring, one commit a batch; preparing a batch in the form an engine takes is not
counted. One-row commits come in groups. Engines take turns, each round in another order, after a load, a batch and a
commit that are not counted: they compile. Rates are medians, ratios are medians of the ratios within a round. Prints
also the disk's own times for comparable writes. Writes `storage.csv` and `storage.png`.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._engines import ENGINES, DuckDBEngine, HeadraceEngine, local, scattered
from benchmarks._measure import machine, print_table, write_csv
from benchmarks._plot import plot_bars

__all__ = ["QUICK", "Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """Rows of the loads and of the table that is changed, batch sizes, rounds; groups of one-row commits in each."""

    load_rows: int = 20_000_000
    base_rows: int = 4_000_000
    batches: tuple = (1_000, 100_000, 1_000_000)
    rounds: int = 5
    groups: int = 10
    commits: int = 50


WARM_UP_ROWS = 100_000
QUICK = Settings(load_rows=100_000, base_rows=50_000, batches=(100, 2_000), rounds=2, groups=2, commits=3)


def run(settings, results):
    print(f"machine: {machine()}")
    print(
        f"load: {settings.load_rows:,} rows (int64, int64) from Parquet; changes: into {settings.base_rows:,} rows, "
        f"{settings.rounds} rounds in turns; every commit synced to the disk"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as folder:
        print(f"disk: {_disk(Path(folder) / 'disk')}")
        rows += _loads(Path(folder), settings)
        rows += _changes(Path(folder), settings)
    write_csv(results / "storage.csv", rows)
    medians = _medians(rows)
    _print_medians(medians, rows)
    groups = {test: rates for test, rates in medians.items() if "commit" not in test}
    plot_bars(
        results / "storage.png",
        groups,
        "rows per second",
        f"{settings.base_rows:,} rows; loads of {settings.load_rows:,}",
    )
    return rows


def _disk(path):
    """Return the time of a small and of a large synced write, without any engine."""
    small, large = os.urandom(8192), os.urandom(32 << 20)
    with path.open("wb") as file:
        began = time.perf_counter()
        os.pwrite(file.fileno(), large, 0)
        os.fdatasync(file.fileno())
        rate = len(large) / (time.perf_counter() - began)
        seconds = []
        for number in range(100):
            began = time.perf_counter()
            os.pwrite(file.fileno(), small, number * 3 * len(small))
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return f"8 KiB written and synced in {1000 * statistics.median(seconds):.2f} ms, 32 MiB at {rate / 1e6:,.0f} MB/s"


def _loads(folder, settings):
    rng = np.random.default_rng(3)
    keys = np.arange(settings.load_rows, dtype=np.int64) * 2
    sources = {"sorted": keys, "unsorted": rng.permutation(keys)}
    rows = []
    for order, column in sources.items():
        parquet = folder / f"{order}.parquet"
        pq.write_table(pa.table({"k": column, "v": column + 1}), parquet)
        _warm_up(folder, pq.ParquetFile(parquet))
        for number in range(settings.rounds):
            for engine in _in_turn([HeadraceEngine, DuckDBEngine], number):
                index = engine is DuckDBEngine and order == "unsorted"
                rows.append(_load(engine, folder, parquet, f"load {order}", number, settings, index=index))
    return rows


def _warm_up(folder, parquet):
    first = folder / "first.parquet"
    pq.write_table(pa.Table.from_batches([next(parquet.iter_batches(WARM_UP_ROWS))]), first)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        engine = HeadraceEngine(Path(place))
        engine.load(first)
        engine.close()


def _load(engine_class, folder, parquet, test, number, settings, *, index):
    with tempfile.TemporaryDirectory(dir=folder) as place:
        engine = engine_class(Path(place))
        began = time.perf_counter()
        engine.load(parquet, **({"index": True} if index else {}))
        seconds = time.perf_counter() - began
        engine.close()
    return _row(test, engine_class.name, number, settings.load_rows, seconds)


def _changes(folder, settings):
    keys = np.arange(settings.base_rows, dtype=np.int64) * 2
    parquet = folder / "base.parquet"
    pq.write_table(pa.table({"k": keys, "v": keys + 1}), parquet)
    engines = []
    for engine_class in ENGINES:
        place = folder / engine_class.name
        place.mkdir()
        engines.append(engine_class(place))
        engines[-1].load(parquet)
        engines[-1].open_for_changes()
    rng = np.random.default_rng(4)
    for engine in engines:
        _upsert(engine, scattered(rng, settings.base_rows, min(settings.batches)), "warm-up", -1)
        _commits(engine, rng, -1, 1, settings)
    rows = []
    for number in range(settings.rounds):
        for name, choose in (("scattered", scattered), ("local", local)):
            for count in settings.batches:
                chosen = choose(rng, settings.base_rows, count)
                test = f"upsert {count:,} {name}"
                rows += [_upsert(engine, chosen, test, number) for engine in _in_turn(engines, number)]
        for group in range(number * settings.groups, (number + 1) * settings.groups):
            rows += [_commits(engine, rng, group, settings.commits, settings) for engine in _in_turn(engines, group)]
    for engine in engines:
        engine.close()
    return rows


def _in_turn(engines, number):
    first = number % len(engines)
    return engines[first:] + engines[:first]


def _upsert(engine, keys, test, number):
    prepared = engine.prepare(keys, keys + 2 + number)
    began = time.perf_counter()
    engine.upsert(prepared)
    return _row(test, engine.name, number, len(keys), time.perf_counter() - began)


def _commits(engine, rng, number, count, settings):
    """Commit rows with new values: SQLite neither writes nor syncs unchanged rows."""
    keys = rng.integers(0, settings.base_rows, count) * 2
    values = keys + 3 + settings.rounds + number
    prepared = [engine.prepare(keys[i : i + 1], values[i : i + 1]) for i in range(len(keys))]
    began = time.perf_counter()
    for rows in prepared:
        engine.upsert(rows)
    return _row("commit of one row", engine.name, number, len(keys), time.perf_counter() - began)


def _row(test, engine, number, rows, seconds):
    return {
        "test": test,
        "engine": engine,
        "round": number,
        "rows": rows,
        "seconds": round(seconds, 5),
        "rows_per_second": round(rows / seconds),
    }


def _medians(rows):
    medians = {}
    for test in dict.fromkeys(row["test"] for row in rows):
        engines = dict.fromkeys(row["engine"] for row in rows if row["test"] == test)
        medians[test] = {
            engine: statistics.median(r["rows_per_second"] for r in rows if (r["test"], r["engine"]) == (test, engine))
            for engine in engines
        }
    return medians


def _ratio(rows, test, other):
    """Return the median over the rounds of Headrace's speedup in the same round."""
    rates = {(row["engine"], row["round"]): row["rows_per_second"] for row in rows if row["test"] == test}
    rounds = {number for _, number in rates}
    return statistics.median(rates["Headrace", number] / rates[other, number] for number in rounds)


def _print_medians(medians, rows):
    names = [engine.name for engine in ENGINES]
    others = names[1:]
    table = []
    for test, rates in medians.items():
        shown = [f"{rates[name]:,.0f}" if name in rates else "-" for name in names]
        ratios = [f"{_ratio(rows, test, name):.2f}" if name in rates else "-" for name in others]
        table.append([test, *shown, *ratios])
    print("\nrows per second (medians), and how many times faster Headrace was")
    print_table(["test", *names, *(f"x {name}" for name in others)], table)
