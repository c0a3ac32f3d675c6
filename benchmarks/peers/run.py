"""Measures the cases of `python -m benchmarks peers`: contestants take turns, ratios are taken within a round."""

import argparse
import json
import re
import signal
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks._measure import Sample, machine, print_table
from benchmarks.peers import _cases as cases
from benchmarks.peers._device import measure_device
from benchmarks.peers._inputs import Inputs, StreamFile
from benchmarks.peers._joiners import Setup
from benchmarks.peers._processes import Contestant, ContestantError
from benchmarks.peers._report import costs, outcome, summary, write_report

__all__ = ["main"]

TRIAL_SECONDS = 0.7
SIZES = 2  # the best sizes of a batch, with which all limits are tried
SEARCH_STEPS = 5
ARRIVALS_WARM, ARRIVALS_SECONDS = 2.0, 4.0
ERROR = re.compile(r"[\w.]+(Error|Exception): ")
HALVING = (0.25, 4.0)  # of the rate without arrivals: where the search for the greatest rate begins and ends


def main(arguments):
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE", help=f"{', '.join(cases.CASES)}, or all")
    parser.add_argument("--prepare", action="store_true", help="make tables and streams, measure nothing")
    parser.add_argument("--quick", action="store_true", help="small data, to see that everything runs")
    parser.add_argument("--only", metavar="ENGINE", help="compare with this peer only")
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
    """Return the paths of a side's table and stream; create missing files."""
    kind = cases.KINDS[side.engine]
    if kind == "headrace" and side.work == "absent":
        kind = "filtered"
    keys = side.rows // side.each
    return inputs.table(kind, side.rows, side.each), inputs.stream(side.stream, keys, side.length)


def _estimate(cell):
    trials = sum(len(side.choices) + 2 * len(side.limits) for side, _ in cell.peers if len(side.choices) > 1)
    rounds = cell.rounds * cell.seconds if not cell.clocked else SEARCH_STEPS * (ARRIVALS_WARM + ARRIVALS_SECONDS)
    return 10 + (1 + len(cell.peers)) * (3 + 1.3 * rounds) + 2 * TRIAL_SECONDS * trials


def _measure(cell, sides, places):
    """Let all contestants take turns. Record one that fails, and let the others finish."""
    failures, trials = {}, {}
    with ExitStack() as stack:
        contestants = [_contestant(cell, side, place) for side, place in zip(sides, places, strict=True)]
        entries = list(zip(sides, contestants, places, strict=True))
        for _, contestant, _ in entries:
            stack.callback(contestant.close)
            with _recorded(contestant, failures):
                contestant.open()
        if cell.grouped and not any(contestant.group for contestant in contestants):
            print("no memory group could be made here: engines have their own limits alone")
        best = {}
        for side, contestant, _ in _remaining(entries, failures):
            with _recorded(contestant, failures):
                best[side.name] = _warm_up(side, contestant, trials.setdefault(side.name, {}))
        measure = _search if cell.clocked else _rounds
        samples = measure(cell, [contestant for _, contestant, _ in entries], best, failures, trials)
        for side, contestant, (_, stream) in _remaining(entries, failures):
            with _recorded(contestant, failures):
                _check(side, contestant, stream)
        samples = [sample for sample in samples if sample.name not in failures]
        settings = {name: ranking[0].text for name, ranking in best.items() if ranking}
        return outcome(cell, contestants, samples, failures, trials, settings)


def _contestant(cell, side, place):
    table, stream = place
    setup = Setup(table.absolute(), int(side.memory * side.share), side.deadline, side.work)
    limit = side.memory if cell.grouped else None
    return Contestant(side.name, side.engine, setup, stream.absolute(), side.each, limit, remembered=side.remembered)


@contextmanager
def _recorded(contestant, failures):
    """Record a failure of the contestant instead of raising it."""
    try:
        yield
    except ContestantError as error:
        failures[contestant.name] = _message(error)
        print(f"{contestant.name} is out: {failures[contestant.name]}")


def _message(error):
    """Return the message line of an error, which may follow a traceback and precede advice."""
    lines = str(error).splitlines()
    return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])


def _remaining(entries, failures):
    """Return the entries of contestants that have not failed."""
    return [entry for entry in entries if entry[1].name not in failures]


def _warm_up(side, contestant, trials):
    """Fill the caches, and return the settings that work for the contestant, the best ones first.

    `trials` becomes the rate with each of the settings that were tried, or the message of the failure.
    """
    if len(side.choices) == 1:
        contestant.run(TRIAL_SECONDS, side.choices[0], side.tuples)
        return [side.choices[0]]
    rates, late = {}, {}
    for choice in side.choices:
        _try(side, contestant, choice, trials, rates, late)
    more = [replace(best, limit=limit) for best in _ranked(rates, late)[:SIZES] for limit in side.limits]
    for choice in more:
        if choice.text not in trials:
            _try(side, contestant, choice, trials, rates, late)
    if more and (best := _ranked(rates, late)[0]).streams:
        _try(side, contestant, replace(best, streams=False), trials, rates, late)
    tried = "; ".join(f"{text}: {_shown(contestant, found)}" for text, found in trials.items())
    print(f"{contestant.name}, M tuples/s by settings: {tried}")
    if late and not rates:
        print(f"{contestant.name} is in time with none of them: the fastest of all is taken")
    if not (ranking := _ranked(rates, late)):
        raise ContestantError(f"{contestant.name} can join no batch in this memory and time")
    return ranking


def _try(side, contestant, choice, trials, rates, late):
    """Measure one choice of settings, and restart the contestant if it fails."""
    try:
        found = contestant.run(TRIAL_SECONDS, choice)
    except ContestantError as error:
        trials[choice.text] = _message(error)
        contestant.reopen()
        return
    in_time = side.deadline is None or found["longest_batch_seconds"] <= side.deadline
    trials[choice.text] = (rates if in_time else late)[choice] = found["tuples"] / found["seconds"]


def _ranked(rates, late):
    """Return the choices that met the deadline, or all choices if none did, fastest first."""
    found = rates or late
    return sorted(found, key=found.get, reverse=True)


def _shown(contestant, found):
    return found.removeprefix(f"{contestant.name} ") if isinstance(found, str) else f"{found / 1e6:.3g}"


def _run(contestant, seconds, ranking, trials):
    """Let a contestant run with the best of its settings; with the next ones, in a new process, if they fail here."""
    while True:
        try:
            return contestant.run(seconds, ranking[0])
        except ContestantError as error:
            trials[ranking[0].text] = f"{_message(error)} in a round"
            print(f"{trials[ranking[0].text]}: {ranking[0].text}")
            if len(ranking) == 1:
                raise
            ranking.pop(0)
            contestant.reopen()


def _rounds(cell, contestants, best, failures, trials):
    samples = []
    for number in range(cell.rounds):
        for contestant in contestants[::-1] if number % 2 else contestants:
            if contestant.name in failures:
                continue
            found = None
            with _recorded(contestant, failures):
                found = _run(contestant, cell.seconds, best[contestant.name], trials.setdefault(contestant.name, {}))
            if found is not None:
                samples.append(Sample(contestant.name, number, found.pop("tuples"), found.pop("seconds"), found))
    return samples


def _search(cell, contestants, best, failures, trials):
    """Search for the greatest rate of arrivals at which each contestant meets the deadline.

    One that meets it at no rate has the rate of a round in which nothing arrives by the clock.
    """
    samples = []
    for contestant in contestants:
        if contestant.name in failures:
            continue
        with _recorded(contestant, failures):
            found = _run(contestant, cell.seconds, best[contestant.name], trials.setdefault(contestant.name, {}))
            rate, details = _greatest(cell, contestant, found["tuples"] / found["seconds"], trials)
            tuples, seconds = found.pop("tuples"), found.pop("seconds")
            sample = (tuples, seconds) if rate is None else (int(rate), 1.0)
            samples.append(Sample(contestant.name, 0, *sample, {**found, **details}))
    return samples


def _greatest(cell, contestant, rate, trials):
    """Return the greatest rate (None if no rate meets the deadline), and its measurements."""
    low, high = (factor * rate for factor in HALVING)
    tried, deadline = trials.setdefault(contestant.name, {}), cell.ours.deadline
    best, seen = None, {}
    for _ in range(SEARCH_STEPS):
        middle = (low * high) ** 0.5
        found = contestant.arrive(middle, deadline, ARRIVALS_WARM, ARRIVALS_SECONDS)
        fits = found["fits"] and found["longest_wait"] <= deadline
        tried[f"arrivals at {middle / 1e6:.3g} M/s"] = f"longest wait {found['longest_wait']:.2f} s"
        print(f"{contestant.name}: {middle / 1e6:.3g} M/s, longest wait {found['longest_wait']:.2f} s")
        if fits:
            best, seen, low = middle, {"clocked_wait": found["longest_wait"]}, middle
        else:
            high = middle
    if best is None:
        print(f"{contestant.name} is late at {high / 1e6:.2g} M/s already: its rate is that without a clock")
    return best, {**seen, "clocked": best is not None}


def _check(side, contestant, stream):
    """Raise if a contestant's rows are not the rows of the join."""
    pushed, tally = contestant.finish()
    expected = StreamFile(stream, side.each).expected(pushed, side.work)
    if tally != expected:
        raise ContestantError(f"{contestant.name} gave {tally}, which is wrong: {expected}")
