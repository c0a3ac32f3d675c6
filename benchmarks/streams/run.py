"""The command `python -m benchmarks streams CASE ... [--quick] [--out FOLDER]`.

Exits with 1 if a verdict is that a claim does not hold.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

CASES = {
    "online": ("diner_cases", "online_shares", "DINER's table 4 and figure 9: results online with four memories"),
    "shifting": ("diner_cases", "shifting", "DINER's figure 15: means that shift from period to period"),
    "delays": ("diner_cases", "delays", "DINER's table 3 and figure 16: input buffers and results with delays"),
    "sstar": ("miner_cases", "simple_star", "MINER's figure 22: MINER and Viglas' MJoin on a star of four inputs"),
    "inputs": ("miner_cases", "many_inputs", "MINER's figure 20: results online of two to four inputs"),
    "buffers": ("miner_cases", "buffers", "MINER's table 21: input buffers with delays"),
}
"""For each case its module, its function, and what it measures."""


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks streams", description=__doc__.splitlines()[0])
    listed = "; ".join(f"{name}: {what}" for name, (_, _, what) in CASES.items())
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=listed)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmarks/streams"), help="folder of the results")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in chosen.cases:
        module, function, what = CASES[name]
        print(f"\n== {name}: {what}")
        report = getattr(importlib.import_module(f"benchmarks.streams.{module}"), function)(quick=chosen.quick)
        print(report.text())
        (chosen.out / f"{name}.json").write_text(json.dumps(report.content(), indent=1) + "\n")
        failed |= not all(verdict.holds for verdict in report.verdicts)
    if failed:
        sys.exit(1)
