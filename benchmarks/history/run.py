"""Measures the cases of `python -m benchmarks history`: both sides in one run, in turns, on equal data.

The first round of each case does not count: it starts workers, compiles, and builds replicas. A ratio is the median of
the ratios of pairs: above 1, the contestant takes more time than the first one. Processor time includes Spark and its
workers; where other work shares the machine, its ratios are more reliable. A case fails if the two sides end with
different content.
"""

import argparse
import importlib
import statistics
import tempfile
from dataclasses import fields, replace
from pathlib import Path

from benchmarks._measure import machine, print_table, write_csv
from benchmarks.history._settings import QUICK, Settings, started
from headrace.pipelines.spark import stop

__all__ = ["main"]

CASES = {
    "facts": "facts and a dimension with history: some have new members, and some are older than the current version",
    "changes": "changes of members, half of which open a version",
    "large": "many changes of a large dimension, in a process whose memory and written bytes are measured",
    "restate": "facts that belong to another version since changes came late",
}


def main(arguments):
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks history", description=__doc__)
    listed = "; ".join(f"{name}: {what}" for name, what in CASES.items())
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{listed} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small data, to see that everything runs")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all sizes (default: 1)")
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), help=f"default: {field.default}"
        )
    parser.add_argument(
        "--folder", type=Path, help="folder for the tables, on a disk with room (default: that of --out)"
    )
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmarks"), help="folder of the results")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    given = {field.name: getattr(chosen, field.name) for field in fields(Settings)}
    settings = QUICK if chosen.quick else Settings().scaled(chosen.scale)
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    folder = chosen.folder or chosen.out
    for wanted in (chosen.out, folder):
        wanted.mkdir(parents=True, exist_ok=True)
    _run(chosen.cases or list(CASES), settings, folder, chosen.out)


def _run(cases, settings, folder, out):
    print(f"machine: {machine()}")
    print(f"settings: {settings}")
    rows = []
    spark = started()
    try:
        for case in cases:
            print(f"\n== {case}: {CASES[case]}")
            with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=folder) as name:
                module = importlib.import_module(f"benchmarks.history._{case}")
                for row in module.measure(spark, Path(name).absolute(), settings):
                    print(_shown(row), flush=True)
                    rows.append({"case": case, **row})
                _report([row for row in rows if row["case"] == case], module.CONTESTANTS)
    finally:
        stop(spark)
    write_csv(out / "history.csv", rows)


def _shown(row):
    times = f"{row['seconds']:.2f} s, {row['processor']:.2f} s of processor time"
    return f"round {row['round']}: {row['contestant']} {times}"


def _report(rows, names):
    """Print medians, and the medians of the ratios of each contestant to the first one."""
    counted = [row for row in rows if row["counted"]]
    lines = []
    for name in names:
        cells = []
        for measure in ("seconds", "processor"):
            found = {each: _by_round(counted, each, measure) for each in (name, names[0])}
            ratio = statistics.median(found[name][number] / found[names[0]][number] for number in found[name])
            cells += [f"{statistics.median(found[name].values()):.2f}", f"{ratio:.2f}"]
        lines.append([name, *cells])
    print_table(["contestant", "seconds", "ratio", "processor seconds", "ratio"], lines)


def _by_round(rows, name, measure):
    return {row["round"]: row[measure] for row in rows if row["contestant"] == name}
