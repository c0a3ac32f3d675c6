"""The command `python -m benchmarks streams CASE ... [--quick] [--out FOLDER]`.

A case is a function in `CASES` that returns a `Report`, or a module of this folder with a name of its own, with
`TITLE`, the dataclass `Settings`, its instance `QUICK`, and ``run(settings, folder) -> Sequence[Verdict]``. The exit
code is 1 if a claim does not hold.
"""

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path

import benchmarks.streams

CASES = {
    "online": ("diner_cases", "online_shares", "DINER's table 4 and figure 9: results online with four memories"),
    "shifting": ("diner_cases", "shifting", "DINER's figure 15: means that shift from period to period"),
    "delays": ("diner_cases", "delays", "DINER's table 3 and figure 16: input buffers and results with delays"),
    "sstar": ("miner_cases", "simple_star", "MINER's figure 22: MINER and Viglas' MJoin on a star of four inputs"),
    "inputs": ("miner_cases", "many_inputs", "MINER's figure 20: results online of two to four inputs"),
    "buffers": ("miner_cases", "buffers", "MINER's table 21: input buffers with delays"),
}
"""For each case its module, its function, and what it measures."""


def modules():
    """Return the names of the modules that are cases."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.streams.__path__)]
    return [name for name in names if not name.startswith("_") and name != "run" and not name.endswith("_cases")]


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks streams", description=__doc__.splitlines()[0])
    names = [*CASES, *modules()]
    listed = "; ".join(f"{name}: {CASES[name][2]}" if name in CASES else name for name in names)
    parser.add_argument("cases", nargs="*", choices=[*names, []], metavar="CASE", help=f"{listed} (default: all)")
    parser.add_argument("--quick", action="store_true", help="less data, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmarks/streams"), help="folder of the results")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    verdicts = []
    for name in chosen.cases or names:
        verdicts += run_case(name, chosen.out, quick=chosen.quick)
    if not all(verdict.holds for verdict in verdicts):
        sys.exit(1)


def run_case(name, folder, *, quick):
    """Run a case, show what it measured, and return its verdicts."""
    if name not in CASES:
        module = importlib.import_module(f"benchmarks.streams.{name}")
        print(f"\n== {name}: {module.TITLE}")
        return module.run(module.QUICK if quick else module.Settings(), folder)
    module, function, what = CASES[name]
    print(f"\n== {name}: {what}")
    report = getattr(importlib.import_module(f"benchmarks.streams.{module}"), function)(quick=quick)
    print(report.text())
    (folder / f"{name}.json").write_text(json.dumps(report.content(), indent=1) + "\n")
    return report.verdicts
