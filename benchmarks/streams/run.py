"""The command `python -m benchmarks streams CASE ...`: experiments of the papers about joins of streams.

A case is a module of this folder whose name does not begin with an underscore, with `TITLE`, the dataclass `Settings`,
its instance `QUICK`, and ``run(settings, folder) -> Sequence[Verdict]``. The exit code is 1 if a claim does not hold.
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import benchmarks.streams


def cases():
    """Return the names of the cases."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.streams.__path__))
    return [name for name in found if not name.startswith("_") and name != "run"]


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks streams", description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(cases())} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small data, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmarks/streams"), help="folder of the results")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.cases if name not in cases()]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; the cases are {', '.join(cases())}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    verdicts = []
    for name in chosen.cases or cases():
        module = importlib.import_module(f"benchmarks.streams.{name}")
        print(f"\n== {name}: {module.TITLE}")
        verdicts += module.run(module.QUICK if chosen.quick else module.Settings(), chosen.out)
    sys.exit(0 if all(verdict.holds for verdict in verdicts) else 1)
