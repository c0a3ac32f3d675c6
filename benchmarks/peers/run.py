"""Measures the cases of `python -m benchmarks peers`: contestants take turns, ratios are taken within a round."""

import argparse
import json
import signal
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks._measure import Sample, machine, print_table
from benchmarks.peers import _cases as cases
from benchmarks.peers._device import measure_device
from benchmarks.peers._inputs import Inputs, StreamFile, forget
from benchmarks.peers._joiners import JOINERS, Setup
from benchmarks.peers._processes import Contestant, ContestantError
from benchmarks.peers._report import costs, outcome, summary, write_report

__all__ = ["main"]

TRIAL_SECONDS = 1.0


def main(arguments):
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE", help=f"{', '.join(cases.CASES)}, or all")
    parser.add_argument("--prepare", action="store_true", help="make tables and streams, measure nothing")
    parser.add_argument("--quick", action="store_true", help="small data, to see that everything runs")
    parser.add_argument("--only", metavar="ENGINE", help="beside this peer alone")
    parser.add_argument("--inputs", type=Path, default=Path("artifacts/peers/inputs"), help="folder of the tables")
    parser.add_argument("--out", type=Path, default=Path("artifacts/peers"), help="folder of the results")
    chosen = parser.parse_args(arguments)
    names = list(cases.CASES) if chosen.cases == ["all"] else chosen.cases
    if unknown := [name for name in names if name not in cases.CASES]:
        parser.error(f"unknown case {unknown[0]!r}; the cases are {', '.join(cases.CASES)}, or all")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that processes and their groups are removed
    for folder in (chosen.inputs, chosen.out):
        folder.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(chosen.inputs)
    for name in names:
        cells = [_only(cell, chosen.only) for cell in cases.CASES[name]]
        cells = [cases.quick(cell) for cell in cells] if chosen.quick else cells
        _run_case(name, cells, inputs, chosen)
    if not chosen.prepare:
        print(f"wrote {write_report(chosen.out)}")


def _only(cell, engine):
    if engine is None:
        return cell
    return replace(cell, peers=tuple(peer for peer in cell.peers if peer[0].engine == engine))


def _run_case(name, cells, inputs, chosen):
    print(f"\n== {name}; {machine()}")
    for number, cell in enumerate(cells):
        sides = [cell.ours, *(side for side, _ in cell.peers)]
        places = [_places(inputs, side) for side in sides]
        if chosen.prepare:
            continue
        print(f"{cell.title}: about {_estimate(cell):.0f} s")
        device = measure_device(places[0][0])
        print("disk: {sequential_bytes:,.0f} bytes a second, {random_pages:,.0f} random pages".format(**device))
        result = {"device": device, **_measure(cell, sides, places)}
        path = chosen.out / f"{name}-{number}.json"
        path.write_text(json.dumps({"case": name, "title": cell.title, "machine": machine(), **result}, indent=1))
        print_table(*summary(result))
        for line in costs(result):
            print(line)
        print(f"wrote {path}")


def _places(inputs, side):
    """Return the paths of a side's table and stream, made if need be."""
    kind = JOINERS[side.engine].kind
    if kind == "headrace" and side.work == "absent":
        kind = "filtered"
    return inputs.table(kind, side.rows), inputs.stream(side.stream, side.rows, side.length)


def _estimate(cell):
    trials = sum(len(side.batches) for side, _ in cell.peers if len(side.batches) > 1)
    return 10 + (1 + len(cell.peers)) * (3 + 1.3 * cell.rounds * cell.seconds) + 1.5 * TRIAL_SECONDS * trials


def _measure(cell, sides, places):
    """Let all contestants take turns. Record one that fails, and let the others finish."""
    failures, trials = {}, {}
    with ExitStack() as stack:
        contestants = [_contestant(cell, side, place) for side, place in zip(sides, places, strict=True)]
        entries = list(zip(sides, contestants, places, strict=True))
        for _, contestant, (table, _) in entries:
            stack.callback(contestant.close)
            with _recorded(contestant, failures):
                forget(table)
                contestant.open()
        if cell.grouped and not any(contestant.group for contestant in contestants):
            print("no memory group could be made here: engines have their own limits alone")
        batches = {}
        for side, contestant, _ in _remaining(entries, failures):
            with _recorded(contestant, failures):
                batches[side.name] = _warm_up(side, contestant, trials.setdefault(side.name, {}))
        samples = _rounds(cell, [contestant for _, contestant, _ in entries], batches, failures)
        for side, contestant, (_, stream) in _remaining(entries, failures):
            with _recorded(contestant, failures):
                _check(side, contestant, stream)
        samples = [sample for sample in samples if sample.name not in failures]
        return outcome(cell, contestants, samples, failures, trials)


def _contestant(cell, side, place):
    table, stream = place
    setup = Setup(table.absolute(), int(side.memory * side.share), side.deadline, side.work)
    return Contestant(side.name, side.engine, setup, stream.absolute(), side.memory if cell.grouped else None)


@contextmanager
def _recorded(contestant, failures):
    """Record a failure of the contestant instead of raising it."""
    try:
        yield
    except ContestantError as error:
        failures[contestant.name] = str(error).splitlines()[-1]
        print(f"{contestant.name} is out: {failures[contestant.name]}")


def _remaining(entries, failures):
    """Return the entries of contestants that have not failed."""
    return [entry for entry in entries if entry[1].name not in failures]


def _warm_up(side, contestant, trials):
    """Fill the caches, and return the batch size that is best for the contestant.

    `trials` becomes the rate of each size that was tried, or the message of its failure.
    """
    if len(side.batches) == 1:
        contestant.run(TRIAL_SECONDS, side.batches[0], side.tuples)
        return side.batches[0]
    rates, late = {}, {}
    for rows in side.batches:
        try:
            found = contestant.run(TRIAL_SECONDS, rows)
        except ContestantError as error:
            trials[rows] = str(error).splitlines()[-1]
            print(f"not with batches of {rows:,}: {trials[rows]}")
            contestant.reopen()
            continue
        in_time = side.deadline is None or found["longest_batch_seconds"] <= side.deadline
        trials[rows] = (rates if in_time else late)[rows] = found["tuples"] / found["seconds"]
    if late and not rates:
        print(f"{contestant.name} is in time with no size of a batch: the fastest of all is taken")
        rates = late
    tried = ", ".join(f"{rows:,}: {rate / 1e6:.2f}" for rows, rate in rates.items())
    print(f"{contestant.name}, M tuples/s by size of a batch: {tried}")
    if not rates:
        raise ContestantError(f"{contestant.name} can join no batch in this memory and time")
    return max(rates, key=rates.get)


def _rounds(cell, contestants, batches, failures):
    samples = []
    for number in range(cell.rounds):
        for contestant in contestants[::-1] if number % 2 else contestants:
            if contestant.name in failures:
                continue
            found = None
            with _recorded(contestant, failures):
                found = contestant.run(cell.seconds, batches[contestant.name])
            if found is not None:
                samples.append(Sample(contestant.name, number, found.pop("tuples"), found.pop("seconds"), found))
    return samples


def _check(side, contestant, stream):
    """Refuse to report on a contestant whose rows are not those of the join."""
    pushed, rows, total = contestant.finish()
    if (rows, total) != StreamFile(stream).expected(pushed, side.work):
        raise ContestantError(f"{contestant.name} gave {rows} rows and a sum of {total}, which is wrong")
