"""The command `python -m benchmarks streams [NAME ...]`: the papers' experiments with joins of streams.

Without `--quick` and `--out` the results replace those beside the code, and docs/experiments-streams.md is written
again. `document` instead of names writes the document, and measures nothing.
"""

import argparse
import importlib
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks._measure import print_table
from benchmarks.experiments._results import load_run, plot, save_run
from benchmarks.streams._world import FULL, QUICK
from benchmarks.streams.document import RESULTS, write_document

__all__ = ["FIGURES", "MODULES", "main", "measure"]

MODULES = {
    name: importlib.import_module(f"benchmarks.streams.{name}").FIGURES
    for name in ("real_data", "synthetic", "delays", "ripples", "many_inputs", "punctuated")
}
FIGURES = {figure.name: figure for figures in MODULES.values() for figure in figures}
LONGEST_FIRST = ("many_inputs", "synthetic", "delays", "ripples", "real_data", "punctuated")


def measure(names, scale, folder):
    """Measure figures, write their rows and plots, and return their names."""
    for name in names:
        began = time.perf_counter()
        rows = FIGURES[name].run(scale)
        save_run(folder, name, rows, {"seconds": round(time.perf_counter() - began, 1)})
        if folder != RESULTS:
            plot(FIGURES[name], rows, folder / f"{name}.svg")
        _print(FIGURES[name], *load_run(folder, name))
    return names


def main(arguments):
    """Measure the figures that the command names, or all, and write the document unless they are small."""
    if arguments == ["document"]:
        write_document(FIGURES.values())
        return
    chosen = _arguments(arguments)
    out, scale = chosen.out, QUICK if chosen.quick else FULL
    names, began = chosen.names or list(FIGURES), time.perf_counter()
    groups = [[figure.name for figure in MODULES[module] if figure.name in names] for module in LONGEST_FIRST]
    _measure_all([group for group in groups if group], scale, out, chosen.processes)
    print(f"\n{len(names)} figures took {time.perf_counter() - began:.0f} s")
    if out == RESULTS:
        write_document(FIGURES.values())


def _measure_all(groups, scale, out, processes):
    if processes == 1 or len(groups) == 1:
        for group in groups:
            measure(group, scale, out)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(measure, group, scale, out) for group in groups]:
            future.result()


def _arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks streams", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIGURES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="less data, to see that everything runs")
    parser.add_argument("--processes", type=int, default=2, help="groups of figures that are measured at once")
    parser.add_argument("--out", type=Path, help=f"folder of the results (default: {RESULTS.name} beside the code)")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in FIGURES]
    if unknown:
        parser.error(f"unknown experiment {unknown[0]!r}; the experiments are {', '.join(FIGURES)}")
    chosen.out = chosen.out or (Path("artifacts/benchmarks/streams") if chosen.quick else RESULTS)
    return chosen


def _print(figure, rows, known):
    print(f"\n== {figure.name}: {figure.title} ({known['seconds']} s)")
    head = list(dict.fromkeys(name for row in rows for name in row))
    print_table(head, [[row.get(name, "") for name in head] for row in rows])
    for finding in figure.judge(rows):
        print(f"{finding.verdict.upper()}: {finding.statement} -- {finding.measured}", flush=True)
