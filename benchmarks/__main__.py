"""The command `python -m benchmarks [EXPERIMENT ...] [--quick] [--out FOLDER]`.

The experiments of the SSIJ paper have their own: `python -m benchmarks experiment NAME ...`, `experiments` for all
of them, `hit-ratios` for the policies of the page cache, and `document` to write docs/experiments.md from the results.
Peers, dimensions with history and joins of streams have cases of their own: `python -m benchmarks peers CASE ...`,
`python -m benchmarks history [CASE ...]`, `python -m benchmarks streams [CASE ...]`.
"""

import argparse
import importlib
import sys
from pathlib import Path

from headrace.joins import keep_little_freed_memory

EXPERIMENTS = {
    "joins": "SSIJ, MeshJoin, index nested loops and DuckDB",
    "cold": "the first tuples of a new operator, compared with DuckDB",
    "predicates": "band and as-of joins, compared with DuckDB",
    "filter": "absent keys: a table with a negative filter, compared with DuckDB's anti join",
    "spark": "a micro-batch on Spark, with SSIJ and with Spark's own join",
    "correlate": "a pipeline that joins two feeds on Spark, compared with Spark's stream-stream join",
    "two-streams": "joins of two streams, in memory and with spill files, compared with DuckDB",
    "storage": "load, upsert and commit, compared with DuckDB, SQLite and LMDB",
}
MODULES = {
    "joins": "joins",
    "cold": "cold_start",
    "correlate": "correlation",
    "filter": "absent_keys",
    "predicates": "predicates",
    "spark": "spark_microbatch",
    "storage": "clustered_table",
    "two-streams": "two_streams",
}


def main():
    keep_little_freed_memory()  # as the command line does; for all contestants
    if sys.argv[1:2] in (["experiment"], ["experiments"], ["document"], ["hit-ratios"]):
        names = {"hit-ratios": ["hit_ratios"], "document": ["document"]}.get(sys.argv[1], [])
        importlib.import_module("benchmarks.experiments.__main__").main([*names, *sys.argv[2:]])
        return
    if sys.argv[1:2] in (["peers"], ["history"], ["streams"]):
        importlib.import_module(f"benchmarks.{sys.argv[1]}.run").main(sys.argv[2:])
        return
    others = (
        "with commands of their own, see their --help: experiment NAME ..., experiments, hit-ratios, document, "
        "peers CASE ..., history [CASE ...], streams [CASE ...]"
    )
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Headrace.", epilog=others)
    listed = "; ".join(f"{name}: {what}" for name, what in EXPERIMENTS.items())
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{listed} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small data, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmarks"), help="folder of the results")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.experiments if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"unknown experiment {unknown[0]!r}; the experiments are {', '.join(EXPERIMENTS)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.experiments or EXPERIMENTS:
        module = importlib.import_module(f"benchmarks.{MODULES[name]}")
        print(f"\n== {name}: {EXPERIMENTS[name]}")
        module.run(module.QUICK if chosen.quick else module.Settings(), chosen.out)


if __name__ == "__main__":
    main()
