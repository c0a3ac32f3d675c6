"""MINER's experiments in section 5.5 of "Adaptive Join Operators for Result Rate Optimization on Streaming Inputs".

The two inner inputs have a Zipf distribution with skew 1 in their keys, the outer two have each key once. The sizes are
a quarter of the paper's: its memory of 8.8 MB, or 20 %, says that four inputs have 220,000 tuples. The results are a
sixteenth. Only the online phase is run; the number of all results is counted from the keys.
"""

import itertools
from dataclasses import asdict

import numpy as np

from benchmarks.streams._data import TUPLE, TWO_KEYS, matches, zipf
from benchmarks.streams._report import Report
from benchmarks.streams._world import MULTIWAY, Settings, arrivals, online

SETTINGS = Settings()
INPUTS = ("a", "b", "c", "d")
MEMORIES = [5, 10, 15, 20]
DELAYS = [10, 20, 30, 40, 50]
PAPER_RATIO = 60
FULL, QUICK = (25_000, 2_500), (10_000, 1_000)


def star(each, keys, seed):
    """Return the keys of four inputs that share one key."""
    rng = np.random.default_rng(seed)
    left, right = zipf(each, keys, 1, seed)
    return rng.permutation(keys) + 1, left, right, rng.permutation(keys) + 1


def star_matches(streams, keys):
    """Return how many combinations of tuples have equal keys."""
    counts = [np.bincount(stream, minlength=keys + 1) for stream in streams]
    return int(np.prod(np.array(counts, dtype=np.int64), axis=0).sum())


def simple_star(*, quick):
    """Measure the results online of a simple star with four memories."""
    each, keys = QUICK if quick else FULL
    streams = star(each, keys, 17)
    total, tuples = star_matches(streams, keys), sum(map(len, streams))
    arriving = arrivals(streams, SETTINGS, 7)
    on = [(f"{left}.x", f"{right}.x") for left, right in itertools.pairwise(INPUTS)]
    report = Report(
        asdict(SETTINGS) | {"quick": quick, "tuples": tuples, "all results": total},
        ["memory %", *(f"{name} results" for name in MULTIWAY), *(f"{name} %" for name in MULTIWAY), "ratio"],
    )
    for percent in MEMORIES:
        memory = memory_for(tuples, percent, quick=quick)
        found = [online(name, arriving, memory, SETTINGS, inputs=INPUTS, on=on).results for name in MULTIWAY]
        shares = [100 * results / total for results in found]
        report.add([share_of(percent, quick=quick), *found, *shares, found[0] / max(found[1], 1)])
    judge_star(report)
    return report


def memory_for(tuples, percent, *, quick):
    """Return a share of the bytes of all inputs."""
    return tuples * TUPLE * share_of(percent, quick=quick) // 100


def share_of(percent, *, quick):
    """Return the share of the memory in percent; small data need more for the operators' fixed parts."""
    return percent * (2 if quick else 1)


def judge_star(report):
    """Compare the rows with figure 22."""
    ratios = [row[5] for row in report.rows]
    text = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    report.judge("MINER never has fewer results online than MJoin", min(ratios) >= 1, text)
    report.judge("the less memory, the further MINER is ahead", sorted(ratios, reverse=True) == ratios, text)
    low, high = PAPER_RATIO / 10**0.5, PAPER_RATIO * 10**0.5
    claim = f"at the smallest memory MINER is {PAPER_RATIO} x MJoin, within its order ({low:.0f} to {high:.0f})"
    report.judge(claim, low <= ratios[0] <= high, text)
    share = [row[3] for row in report.rows]
    text = ", ".join(f"{value:.0f} %" for value in share)
    report.judge("MINER has more results online with more memory", share == sorted(share), text)


def chain(each, keys, seed):
    """Return the keys x and y of the inputs b, c, a and d of a chain a.y = b.x, b.y = c.x, c.y = d.x.

    The inputs that two and three inputs are made of come first. Each tuple of b has one match in a, and each of c one
    in d, so more inputs do not change the number of results.
    """
    rng = np.random.default_rng(seed)
    (b_y, c_x), (b_x, c_y) = zipf(each, keys, 1, seed), zipf(each, keys, 1, seed + 1)
    unique = [rng.permutation(keys) + 1 for _ in range(2)]
    columns = [(b_x, b_y), (c_x, c_y), (unique[0], unique[0]), (unique[1], unique[1])]
    return [np.column_stack(pair) for pair in columns]


CHAIN = [("b.y", "c.x"), ("a.y", "b.x"), ("c.y", "d.x")]
CHAIN_INPUTS = ("b", "c", "a", "d")


def run_chain(streams, memory, settings, **delays):
    """Run MINER on the first inputs of a chain."""
    count = len(streams)
    arriving = arrivals(streams, settings, 7, **delays)
    return online(
        "MINER", arriving, memory, settings, inputs=CHAIN_INPUTS[:count], on=CHAIN[: count - 1], schema=TWO_KEYS
    )


def many_inputs(*, quick):
    """Measure the results online of two to four inputs in a chain with four memories."""
    streams = chain(*(QUICK if quick else FULL), 19)
    total = matches(streams[0][:, 1], streams[1][:, 0])
    report = Report(
        asdict(SETTINGS) | {"quick": quick, "all results": total},
        ["memory %", *(f"{count} inputs %" for count in (2, 3, 4))],
    )
    for percent in MEMORIES:
        shares = []
        for count in (2, 3, 4):
            memory = memory_for(sum(map(len, streams[:count])), percent, quick=quick)
            shares.append(100 * run_chain(streams[:count], memory, SETTINGS).results / total)
        report.add([share_of(percent, quick=quick), *shares])
    judge_inputs(report)
    return report


def judge_inputs(report):
    """Compare the rows with figure 20 and its text."""
    for at, count in enumerate((2, 3, 4), start=1):
        shares = [row[at] for row in report.rows]
        text = ", ".join(f"{share:.0f} %" for share in shares)
        report.judge(f"with {count} inputs, more memory gives more results online", shares == sorted(shares), text)
    low, high = report.rows[0][3], report.rows[-1][3]
    text = f"{low:.0f} % to {high:.0f} %"
    report.judge(
        "four inputs have 55 % of the results online at the smallest memory, within 15 points", low >= 40, text
    )
    report.judge(
        "four inputs have 80 % of the results online at the largest memory, within 15 points", high >= 65, text
    )
    drop = max(row[1] - row[3] for row in report.rows)
    report.judge("four inputs have at most 15 points less than two", drop <= 15, f"{drop:.0f} points")


def buffers(*, quick):
    """Measure the input buffer at the end of reactive phases, with delays after each of 10 fragments."""
    streams = chain(*(QUICK if quick else FULL), 19)
    report = Report(
        asdict(SETTINGS) | {"quick": quick, "memory %": 10 if quick else 5},
        ["delay %", *(f"{count} inputs {what}" for count in (2, 3, 4) for what in ("max", "avg", "reactive"))],
    )
    for delay in DELAYS:
        row = [delay]
        for count in (2, 3, 4):
            memory = memory_for(sum(map(len, streams[:count])), 5, quick=quick)
            run = run_chain(streams[:count], memory, SETTINGS, fragments=10, delay=delay / 100)
            waiting = run.buffers or (0,)
            row += [max(waiting), sum(waiting) / len(waiting), run.reactive]
        report.add(row)
    judge_buffers(report)
    return report


def judge_buffers(report):
    """Compare the rows with table 21."""
    most = [max(row[at] for at in (1, 4, 7)) for row in report.rows]
    text = ", ".join(f"{value:,}" for value in most)
    report.judge("MINER's input buffer never exceeds 1,030 tuples", max(most) <= 1030, text)
    reactive = [min(row[at] for at in (3, 6, 9)) for row in report.rows]
    text = ", ".join(f"{value:,}" for value in reactive)
    report.judge("the reactive phase has results with each delay and number of inputs", min(reactive) > 0, text)
