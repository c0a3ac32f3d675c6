"""The experiments of "Adaptive Join Operators for Result Rate Optimization on Streaming Inputs" with DINER.

Memory is a share of the bytes of both streams, and everything that an operator holds counts. Only the online phase is
run; the number of all results is counted from the keys.
"""

from dataclasses import asdict
from itertools import pairwise

from benchmarks.streams._data import TUPLE, matches, shifting_normal, stock, weather, zipf
from benchmarks.streams._report import Report
from benchmarks.streams._world import OPERATORS, Settings, arrivals, online

SETTINGS = Settings()
PAPER_SHARES = {"CSCO-like": [28, 43, 49, 58], "IPIX-like": [38, 59, 72, 82], "weather-like": [10, 17, 24, 29]}
MEMORIES = [5, 10, 15, 20]
SHIFTS = [0, 5, 10, 15, 20]
DELAYS = [10, 20, 30, 40, 50]


def memory_for(streams, percent):
    """Return a share of the bytes of the streams."""
    return sum(map(len, streams)) * TUPLE * percent // 100


def online_shares(*, quick):
    """Measure the results online with four memories, without delays."""
    by = 4 if quick else 1
    streams = {
        "CSCO-like": stock(20_710 // by, 320, 1),
        "IPIX-like": stock(45_568 // by, 400, 2),
        "weather-like": weather(45_000 // by, 3),
    }
    factor = 2 if quick else 1  # small data need a larger share for the fixed parts of the operators
    report = Report(asdict(SETTINGS) | {"quick": quick}, ["data", "memory %", *OPERATORS, "paper's DINER %"])
    for data, keys in streams.items():
        total, arriving = matches(*keys), arrivals(keys, SETTINGS, 7)
        for at, percent in enumerate(MEMORIES):
            memory = memory_for(keys, percent * factor)
            shares = [100 * online(name, arriving, memory, SETTINGS).results / total for name in OPERATORS]
            report.add([data, percent, *shares, PAPER_SHARES[data][at]])
    _judge_online(report)
    return report


def _judge_online(report):
    by_data = {data: [row for row in report.rows if row[0] == data] for data in PAPER_SHARES}
    growing = [all(a[2] < b[2] for a, b in pairwise(rows)) for rows in by_data.values()]
    shown = "; ".join(f"{data} {', '.join(f'{row[2]:.0f}' for row in rows)} %" for data, rows in by_data.items())
    report.judge("with more memory, DINER has more results online", all(growing), shown)
    _judge_ratios(report, [(f"{row[0]} {row[1]} %", *row[2:5]) for row in report.rows], 2.5)
    small, large = ([row[2] / max(row[3], row[4]) for row in report.rows if row[1] == at] for at in (5, 20))
    text = (
        f"{', '.join(f'{ratio:.2f}' for ratio in small)} at 5 %, {', '.join(f'{ratio:.2f}' for ratio in large)} at 20 %"
    )
    bigger = [a > b for a, b in zip(small, large, strict=True)]
    report.judge("DINER is further ahead with less memory, on all data", all(bigger), text)
    off = [abs(row[2] - row[5]) for row in report.rows]
    report.judge("DINER's shares are within 15 points of table 4", max(off) <= 15, f"at most {max(off):.0f} points off")


def _judge_ratios(report, rows, most):
    """Judge whether DINER is never behind, and how far it is ahead; rows are a label, DINER, RPJ and HMJ."""
    for at, name in ((2, "RPJ"), (3, "HMJ")):
        ratios = {row[0]: row[1] / max(row[at], 1e-9) for row in rows}
        low, high = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
        text = f"{ratios[low]:.2f} x at {low}, {ratios[high]:.2f} x at {high}"
        report.judge(f"DINER never has fewer results online than {name}", ratios[low] >= 1, text)
        report.judge(f"DINER is up to {most} x {name}, or more", ratios[high] >= most, text)


def shifting(*, quick):
    """Measure the results online while the means of both streams shift."""
    each = 100_000 // (10 if quick else 1)
    columns = ["shift", *OPERATORS, "all results"]
    report = Report(asdict(SETTINGS) | {"quick": quick, "memory %": 10 if quick else 5}, columns)
    for shift in SHIFTS:
        keys = shifting_normal(each, shift, 11)
        arriving, memory = arrivals(keys, SETTINGS, 7), memory_for(keys, 10 if quick else 5)
        found = [online(name, arriving, memory, SETTINGS).results for name in OPERATORS]
        report.add([shift, *found, matches(*keys)])
    _judge_ratios(report, [(f"shift {row[0]}", *row[1:4]) for row in report.rows], 3.0)
    return report


def delays(*, quick):
    """Measure input buffers and results online with delays after each of 10 fragments."""
    by = 10 if quick else 1
    keys = zipf(100_000 // by, 9_999, 0.5, 13)
    memory, total = memory_for(keys, 10 if quick else 5), matches(*keys)
    settings = Settings(max_new_arrivals=1000 // by)
    columns = ["delay %", *(f"{name} {what}" for name in OPERATORS for what in ("max", "avg", "results %"))]
    report = Report(asdict(settings) | {"quick": quick, "memory %": 10 if quick else 5}, columns)
    for delay in DELAYS:
        arriving = arrivals(keys, settings, 7, fragments=10, delay=delay / 100)
        row = [delay]
        for name in OPERATORS:
            run = online(name, arriving, memory, settings)
            buffers = run.buffers or (0,)
            row += [max(buffers), sum(buffers) / len(buffers), 100 * run.results / total]
        report.add(row)
    most = {name: [row[1 + 3 * at] for row in report.rows] for at, name in enumerate(OPERATORS)}
    limit = 1.03 * settings.max_new_arrivals
    text = "; ".join(f"{name} {', '.join(f'{value:,}' for value in values)}" for name, values in most.items())
    report.judge(f"DINER's input buffer never exceeds {limit:,.0f} tuples", max(most["DINER"]) <= limit, text)
    for name in ("RPJ", "HMJ"):
        report.judge(f"{name}'s exceeds twice DINER's", max(most[name]) > 2 * max(most["DINER"]), text)
    for at, name, factor in ((6, "RPJ", 1.83), (9, "HMJ", 8.65)):
        ratios = [row[3] / max(row[at], 1e-9) for row in report.rows]
        text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        report.judge(f"DINER never has fewer results online than {name}", min(ratios) >= 1, text)
        report.judge(f"DINER is up to {factor} x {name}, or more", max(ratios) >= factor, text)
    return report
