"""The commands `experiment NAME ...` and `experiments` of `python -m benchmarks`."""

import argparse
import importlib
import time
from pathlib import Path

from benchmarks._measure import machine
from benchmarks.experiments._report import write_outcome, write_summary
from benchmarks.experiments._settings import QUICK, REAL, Settings
from benchmarks.experiments._world import World

__all__ = ["EXPERIMENTS", "main", "run"]

MODULES = {
    "skew": ("fig3", "fig4", "fig5", "fig6", "fig7"),
    "tpch": ("fig8",),
    "peers": ("fig9",),
    "adaptive": ("fig10", "table3"),
    "sensitivity": ("fig11", "fig12", "fig13", "fig14", "fig15"),
    "deadlines": ("fig16",),
    "policies": ("hit_ratios", "variants"),
}
EXPERIMENTS = {name: module for module, names in MODULES.items() for name in names}


def run(name, world, settings):
    """Run one experiment and return its outcome."""
    module = importlib.import_module(f"benchmarks.experiments.{EXPERIMENTS[name]}")
    return getattr(module, name)(world, settings)


def main(arguments):
    """Run the experiments that the command names, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks experiment", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--device", choices=("simulated", "real"), default="simulated", help="whose reads and clock")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("artifacts/experiments"), help="folder of the results")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"unknown experiment {unknown[0]!r}; the experiments are {', '.join(EXPERIMENTS)}")
    settings = QUICK if chosen.quick else REAL if chosen.device == "real" else Settings()
    folder = chosen.out / chosen.device
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    if chosen.device == "real":
        print(f"machine: {machine()}")
    with World(chosen.device, folder, settings.least_memory) as world:
        for name in chosen.names or EXPERIMENTS:
            began = time.perf_counter()
            outcome = run(name, world, settings)
            print(f"\n== {name}: {outcome.title} ({time.perf_counter() - began:.0f} s)")
            write_outcome(outcome, folder)
            outcomes.append(outcome)
    write_summary(outcomes, folder / "summary.md")
