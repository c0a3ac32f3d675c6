"""Comparison of SSIJ, MeshJoin, index nested loops, and DuckDB: one table, three memory sizes, three skews.

Prints medians and ratios, writes `joins.csv` and `joins.png`. Contestants take turns within one run; slow ones get
fewer tuples of the same stream, and all rates are per tuple.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._contestants import PIECE_SECONDS, DuckDBJoin, OperatorJoin, operators
from benchmarks._data import dimension, stream
from benchmarks._measure import interleave, machine, median_rate, median_ratio, print_table, write_csv
from benchmarks._plot import plot_rates
from headrace.storage import Table
from headrace.storage.units import format_size

__all__ = ["Settings", "run"]

OTHERS = ("MeshJoin", "index nested loops", "DuckDB")


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    `room` is the memory beyond the table size in a 100 % budget, for index and buffers; DuckDB cannot join in less than
    `least_duckdb`, so it gets that much where the budget is smaller.
    """

    rows: int = 8_000_000
    memories: tuple = (1.0, 7.5, 100.0)
    skews: tuple = (0.0, 0.5, 1.0)
    batch_rows: int = 250_000
    batches: int = 24
    rounds: int = 3
    seconds: float = 0.5
    warm_up: int = 2_000_000
    warm_seconds: float = 1.5
    room: int = 64 << 20
    least_duckdb: int = 64 << 20


QUICK = Settings(
    rows=50_000,
    memories=(25.0, 100.0),
    batch_rows=5_000,
    batches=6,
    rounds=2,
    seconds=0.02,
    warm_up=20_000,
    warm_seconds=0.2,
)


def run(settings, results):
    """Measure every cell and write the results into a folder."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as folder:
        table, ids = _prepare(Path(folder), settings)
        with table:
            _print_settings(settings, table)
            cells = [
                cell
                for skew in settings.skews
                for cell in _measure_skew(
                    Path(folder), table, stream(ids, skew, settings.batches, settings.batch_rows), skew, settings
                )
            ]
    rows = [row for cell in cells for row in cell["rows"]]
    write_csv(results / "joins.csv", rows)
    _print_results(cells)
    plot_rates(results / "joins.png", cells, f"{settings.rows:,} rows, batches of {settings.batch_rows:,}")
    print(f"took {time.perf_counter() - began:.0f} s")
    return cells


def _prepare(folder, settings):
    members = dimension(settings.rows)
    began = time.perf_counter()
    table = Table.build(folder / "dimension.hdr", members, key=["id"], unique=True)
    print(f"built the clustered table in {time.perf_counter() - began:.1f} s")
    DuckDBJoin.load(folder / "dimension.duckdb", members)
    return table, members["id"].to_numpy()


def _print_settings(settings, table):
    stats = table.stats
    print(f"machine: {machine()}")
    print(
        f"table: {stats.rows:,} rows (int64 key, two int64 attributes), {stats.leaves:,} leaves of {stats.page_size} "
        f"bytes, {format_size(stats.bytes)}, index {format_size(stats.index_bytes)}"
    )
    print(
        f"stream: batches of {settings.batch_rows:,} tuples of 16 bytes, every key present, popular keys scattered at "
        "random; inner join"
    )
    print(
        f"rounds: {settings.rounds} of {settings.seconds} s for each contestant, in turns, and until no more tuples "
        f"wait than at its beginning; before them a warm-up of {settings.warm_up:,} tuples or {settings.warm_seconds} "
        f"s. Operators take batches in pieces that last {PIECE_SECONDS} s, so slow ones join fewer tuples; rates are "
        "of tuples that are done"
    )
    print(
        f"memory: per cent of the table's file (100 % with {format_size(settings.room)} for index and buffers); "
        f"DuckDB {duckdb.__version__} gets at least {format_size(settings.least_duckdb)} and reads through the "
        "system's page cache, the operators read with O_DIRECT"
    )


def _measure_skew(folder, table, batches, skew, settings):
    for percent in settings.memories:
        memory = int(table.stats.bytes * percent / 100) + (settings.room if percent >= 100 else 0)
        contestants = [
            *(OperatorJoin(name, table, batches, memory) for name in operators()),
            DuckDBJoin(folder / "dimension.duckdb", batches, max(memory, settings.least_duckdb)),
        ]
        for contestant in contestants:
            _check(contestant, table)
            contestant.warm_up(settings.warm_up, settings.warm_seconds)
        samples = interleave(contestants, settings.rounds, settings.seconds)
        for contestant in contestants:
            contestant.close()
        yield _cell(samples, percent, memory, skew, settings)


def _check(contestant, table):
    """Compare the join of the first piece with the table, so that no incorrect result is timed."""
    piece, joined = contestant.first()
    order = np.argsort(joined["number"].to_numpy())
    looked_up = table.lookup(pa.record_batch({"id": piece["key"]}))
    expected = looked_up["wide"].to_numpy()
    if not np.array_equal(joined["wide"].to_numpy()[order], expected):
        raise AssertionError(f"{contestant.name} gave a wrong join")


def _cell(samples, percent, memory, skew, settings):
    names = list(dict.fromkeys(sample.name for sample in samples))
    common = {"table_rows": settings.rows, "memory_percent": percent, "memory_bytes": memory, "zipf": skew}
    rows = [
        {
            **common,
            "operator": s.name,
            "round": s.round,
            "tuples": s.tuples,
            "seconds": round(s.seconds, 4),
            "tuples_per_second": round(s.rate),
            **s.details,
        }
        for s in samples
    ]
    hits = [sample.details["hit_ratio"] for sample in samples if sample.name == "SSIJ"]
    return {
        "percent": percent,
        "skew": skew,
        "rows": rows,
        "rates": {name: median_rate(samples, name) for name in names},
        "ratios": {name: median_ratio(samples, "SSIJ", name) for name in OTHERS},
        "hit_ratio": statistics.median(hits),
    }


def _print_results(cells):
    head = [
        "memory",
        "zipf",
        "SSIJ M/s",
        "hits",
        *(f"{name} M/s" for name in OTHERS),
        *(f"x {name}" for name in OTHERS),
    ]
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell["percent"], cell["skew"])):
        rates = [f"{cell['rates'][name] / 1e6:.3f}" for name in OTHERS]
        ratios = [f"{cell['ratios'][name]:.1f}" for name in OTHERS]
        rows.append(
            [
                f"{cell['percent']:g} %",
                f"{cell['skew']:g}",
                f"{cell['rates']['SSIJ'] / 1e6:.3f}",
                f"{cell['hit_ratio']:.1%}",
                *rates,
                *ratios,
            ]
        )
    print("\nmillions of tuples per second (medians), and how many times faster SSIJ was in the same round (median)")
    print_table(head, rows)
