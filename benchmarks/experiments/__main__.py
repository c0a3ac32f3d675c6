"""The commands `experiment NAME ...`, `experiments` and `document` of `python -m benchmarks`."""

import argparse
import importlib
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks._measure import machine, print_table
from benchmarks.experiments._results import DEVICES, RESULTS, plot, save_run
from benchmarks.experiments._settings import QUICK, REAL, Settings
from benchmarks.experiments._world import World
from benchmarks.experiments.document import write_document

__all__ = ["FIGURES", "main", "run"]

MODULES = ("scaling", "skew", "tpch", "peers", "adaptive", "sensitivity", "deadlines", "policies")
FIGURES = {
    figure.name: figure
    for module in MODULES
    for figure in importlib.import_module(f"benchmarks.experiments.{module}").FIGURES
}
TABLES = Path("artifacts/experiments")  # where the tables lie while they are measured
SIMULATED_ONLY = ("scaling", "fig7_scale", "read_plans", "hit_ratios", "variants", "record_tier")
LONGEST_FIRST = ("fig16", "fig13", "fig7_scale", "record_tier", "fig7", "scaling", "table3", "fig10")


def run(name, device, settings, folder):
    """Measure a figure in a world of its own, and write its rows. Return the rows and the seconds it took.

    They are seconds of the processor on the simulated disk.
    """
    TABLES.mkdir(parents=True, exist_ok=True)
    clock = time.process_time if device == "simulated" else time.perf_counter
    began = clock()
    with World(device, TABLES, settings.least_memory) as world:
        rows = FIGURES[name].run(world, settings)
    seconds = round(clock() - began)
    known = {"seconds": seconds} | ({} if device == "simulated" else {"machine": machine()})
    save_run(folder, name, rows, known)
    return rows, seconds


def _arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks experiment", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIGURES)} (default: all)")
    parser.add_argument("--device", choices=DEVICES, default="simulated", help="disk and clock to measure with")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that everything runs")
    parser.add_argument("--processes", type=int, default=2, help="figures measured at once on the simulated disk")
    parser.add_argument("--out", type=Path, help=f"folder of the results (default: {RESULTS.name} beside the code)")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in FIGURES]
    if unknown:
        parser.error(f"unknown experiment {unknown[0]!r}; the experiments are {', '.join(FIGURES)}")
    if chosen.device == "real" and set(chosen.names) & set(SIMULATED_ONLY):
        parser.error(f"{', '.join(SIMULATED_ONLY)} run on the simulated disk only; leave out --device real")
    return chosen


def main(arguments):
    """Run the experiments that the command names, or all, and write the document unless they are toys."""
    if arguments == ["document"]:
        write_document(FIGURES.values())
        return
    chosen = _arguments(arguments)
    settings = QUICK if chosen.quick else REAL if chosen.device == "real" else Settings()
    out = chosen.out or (Path("artifacts/experiments") if chosen.quick else RESULTS)
    names = chosen.names or [n for n in FIGURES if chosen.device == "simulated" or n not in SIMULATED_ONLY]
    began = time.perf_counter()
    for name, rows, seconds in _run_all(names, chosen, settings, out / chosen.device):
        _print(FIGURES[name], rows, seconds)
        if out != RESULTS:
            plot(FIGURES[name], rows, out / chosen.device / f"{name}.svg")
    print(f"\n{len(names)} experiments took {time.perf_counter() - began:.0f} s")
    if out == RESULTS:
        write_document(FIGURES.values())


def _run_all(names, chosen, settings, folder):
    """Yield name, rows and seconds of each figure as soon as it is measured."""
    if chosen.device == "real" or chosen.processes == 1 or len(names) == 1:
        for name in names:
            yield name, *run(name, chosen.device, settings, folder)
        return
    order = sorted(names, key=lambda name: LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST))
    with ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, name, chosen.device, settings, folder): name for name in order}
        for future in as_completed(futures):
            yield futures[future], *future.result()


def _print(figure, rows, seconds):
    print(f"\n== {figure.name}: {figure.title} ({seconds} s)")
    head = list(dict.fromkeys(name for row in rows for name in row))
    print_table(head, [[row.get(name, "") for name in head] for row in rows])
    for finding in figure.judge(rows):
        print(f"{finding.verdict.upper()}: {finding.statement} -- {finding.measured}", flush=True)
