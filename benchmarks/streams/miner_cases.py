"""The comparison of MINER with MJoin in "Adaptive Join Operators for Result Rate Optimization on Streaming Inputs".

Four inputs share one key. Two have a Zipf distribution with skew 1, two have each key once, as in section 5.5. The sizes
are a quarter of the paper's (its memory of 8.8 MB, or 20 %, says that the inputs have 220,000 tuples): the results are a
sixteenth. Only the online phase is run; the number of all results is counted from the keys.
"""

from dataclasses import asdict

import numpy as np

from benchmarks.streams._data import TUPLE, zipf
from benchmarks.streams._report import Report
from benchmarks.streams._world import MULTIWAY, Settings, arrivals, online

SETTINGS = Settings()
INPUTS = ("a", "b", "c", "d")
MEMORIES = [5, 10, 15, 20]
PAPER_RATIO = 60


def star(each, keys, seed):
    """Return the keys of four inputs: the outer two have each key once, the inner two follow a Zipf distribution."""
    rng = np.random.default_rng(seed)
    left, right = zipf(each, keys, 1, seed)
    return rng.permutation(keys) + 1, left, right, rng.permutation(keys) + 1


def star_matches(streams, keys):
    """Return how many combinations of tuples have equal keys."""
    counts = [np.bincount(stream, minlength=keys + 1) for stream in streams]
    return int(np.prod(np.array(counts, dtype=np.int64), axis=0).sum())


def simple_star(*, quick):
    """Measure the results online of a simple star with four memories."""
    each, keys = (10_000, 1_000) if quick else (25_000, 2_500)
    streams, total = star(each, keys, 17), 0
    total = star_matches(streams, keys)
    arriving, size = arrivals(streams, SETTINGS, 7), sum(map(len, streams)) * TUPLE
    on = [(f"{left}.x", f"{right}.x") for left, right in zip(INPUTS, INPUTS[1:], strict=False)]
    report = Report(
        asdict(SETTINGS) | {"quick": quick, "tuples": sum(map(len, streams)), "all results": total},
        ["memory %", *(f"{name} results" for name in MULTIWAY), *(f"{name} %" for name in MULTIWAY), "ratio"],
    )
    for percent in MEMORIES:
        memory = size * percent * (2 if quick else 1) // 100  # small data need more for the operators' fixed parts
        found = [online(name, arriving, memory, SETTINGS, inputs=INPUTS, on=on).results for name in MULTIWAY]
        shares = [100 * results / total for results in found]
        report.rows.append([percent, *found, *shares, found[0] / max(found[1], 1)])
    judge_star(report)
    return report


def judge_star(report):
    """Compare the rows with figure 22 and section 5.5."""
    ratios = [row[5] for row in report.rows]
    text = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    report.judge("MINER never has fewer results online than MJoin", min(ratios) >= 1, text)
    report.judge("the less memory, the further MINER is ahead", sorted(ratios, reverse=True) == ratios, text)
    order = f"{PAPER_RATIO / 10**0.5:.0f} to {PAPER_RATIO * 10**0.5:.0f}"
    within = PAPER_RATIO / 10**0.5 <= ratios[0] <= PAPER_RATIO * 10**0.5
    report.judge(f"at the smallest memory MINER is {PAPER_RATIO} x MJoin, within its order ({order})", within, text)
    share = [row[3] for row in report.rows]
    text = ", ".join(f"{value:.0f} %" for value in share)
    report.judge("MINER has more results online with more memory", share == sorted(share), text)
