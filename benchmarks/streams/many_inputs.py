"""MINER's experiments, section 5.5 of the paper: figures 20 and 22 and table 21.

The two inner inputs have keys with a Zipf distribution, the outer two have each key once. The sizes are a quarter of
the paper's: its memory of 8.8 MB, or 20 %, says that four inputs have 220,000 tuples. The results are a sixteenth.
"""

import functools
import itertools

import numpy as np

from benchmarks.experiments._claims import Claim, grows, listed
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import NEAR
from benchmarks.streams._claims import BOUND, DINER, SETTINGS, bound_row, compare, row, share_axes
from benchmarks.streams._data import TWO_KEYS, matches, zipf
from benchmarks.streams._world import MULTIWAY, PAIR, Query, Settings, arrivals, memory_for, online
from benchmarks.streams.delays import DELAYS, FRAGMENTS, waiting
from benchmarks.streams.real_data import CSCO, TABLE_4, WEATHER
from benchmarks.streams.real_data import streams as real_streams

__all__ = ["FIGURES", "MINER", "MJOIN", "PAPER_STAR", "star_ratios"]

EACH, KEYS = 25_000, 2_500
MEMORIES = (5, 10, 15, 20)
COUNTS = (2, 3, 4)
GAPS, GAPS_PART = (1, 5), 10
SKEWS = (0.5, 0.75, 1.0, 1.25, 1.5)
MINER, MJOIN = MULTIWAY
PAPER_STAR = 60
PAPER_LEAST, PAPER_MOST = 55, 80  # % online of four inputs with the least and the most memory
PAPER_BUFFER = 1_004  # the paper's most, with a MaxNewArr of 1,000
MODEST = 15  # points
HALF_BOUND = "two inputs with half of the memory of four: no policy has more"
STAR_INPUTS = ("a", "b", "c", "d")
STAR = Query(STAR_INPUTS, tuple((f"{left}.x", f"{right}.x") for left, right in itertools.pairwise(STAR_INPUTS)))
CHAIN_INPUTS = ("b", "c", "a", "d")
CHAIN_ON = (("b.y", "c.x"), ("a.y", "b.x"), ("c.y", "d.x"))
CHAINS = {count: Query(CHAIN_INPUTS[:count], CHAIN_ON[: count - 1], TWO_KEYS) for count in COUNTS}


def star(each, keys, seed):
    """Return the keys of four inputs that share one key."""
    rng = np.random.default_rng(seed)
    left, right = zipf(each, keys, 1, seed)
    return rng.permutation(keys) + 1, left, right, rng.permutation(keys) + 1


def star_matches(streams, keys):
    """Return how many combinations of tuples have equal keys."""
    counts = [np.bincount(stream, minlength=keys + 1) for stream in streams]
    return int(np.prod(np.array(counts, dtype=np.int64), axis=0).sum())


def chain(each, keys, skew, seed):
    """Return the keys x and y of the inputs b, c, a and d of a chain a.y = b.x, b.y = c.x, c.y = d.x.

    The inputs that two and three inputs are made of come first. Each tuple of b has one match in a, and each of c one
    in d, so more inputs do not change the number of results.
    """
    rng = np.random.default_rng(seed)
    (b_y, c_x), (b_x, c_y) = zipf(each, keys, skew, seed), zipf(each, keys, 1, seed + 1)
    unique = [rng.permutation(keys) + 1 for _ in range(2)]
    columns = [(b_x, b_y), (c_x, c_y), (unique[0], unique[0]), (unique[1], unique[1])]
    return [np.column_stack(pair) for pair in columns]


def simple_star(scale):
    """Return the results online of a simple star with four memories."""
    streams = star(scale.of(EACH), scale.of(KEYS), 17)
    total, size = star_matches(streams, scale.of(KEYS)), sum(map(len, streams))
    arriving = arrivals(streams, SETTINGS, 7)
    return [
        row
        for percent in MEMORIES
        for row in compare(
            arriving, total, size * percent // 100, {"memory_percent": percent}, names=MULTIWAY, query=STAR
        )
    ]


def _line(count):
    return f"{count} inputs"


def _run(streams, count, percent, total, place, **delays):
    """Return the row of MINER with the first inputs of a chain."""
    query, arriving = CHAINS[count], arrivals(streams[:count], SETTINGS, 7, **delays)
    run = online(MINER, arriving, memory_for(MINER, len(arriving.times) * percent // 100, query), SETTINGS, query)
    return row(_line(count), place, run.results, total) | waiting(run)


def _inner(streams, tuples, total, place, line=BOUND):
    """Return the bound for the two inner inputs, which no more inputs exceed, with so many tuples in memory."""
    arriving = arrivals((streams[0][:, 1], streams[1][:, 0]), SETTINGS, 7)
    return bound_row(arriving, total, tuples, place, line)


def over_memory(scale):
    """Return the results online of two to four inputs in a chain with four memories."""
    streams = chain(scale.of(EACH), scale.of(KEYS), 1, 19)
    total, rows = matches(streams[0][:, 1], streams[1][:, 0]), []
    for percent in MEMORIES:
        place = {"memory_percent": percent}
        rows += [_run(streams, count, percent, total, place) for count in COUNTS]
        rows += _bounds(streams, percent, total, place)
    return rows


def _bounds(streams, percent, total, place):
    """Return bounds for four inputs: with all memory for the inner two, and with the half that balance gives them."""
    tuples = sum(map(len, streams)) * percent // 100
    return [_inner(streams, tuples, total, place), _inner(streams, tuples // 2, total, place, HALF_BOUND)]


def over_skew(scale):
    """Return the results online of four inputs by the skew of the inner join."""
    rows = []
    for skew in SKEWS:
        streams = chain(scale.of(EACH), scale.of(KEYS), skew, 19)
        total, place = matches(streams[0][:, 1], streams[1][:, 0]), {"skew": skew}
        rows += [_run(streams, count, MEMORIES[0], total, place) for count in (COUNTS[0], COUNTS[-1])]
        rows += _bounds(streams, MEMORIES[0], total, place)
    return rows


@functools.cache
def delayed(scale):
    """Return input buffers with delays, for two to four inputs in a chain."""
    streams = chain(scale.of(EACH) // 2, scale.of(KEYS) // 2, 1, 19)
    total = matches(streams[0][:, 1], streams[1][:, 0])
    return [
        _run(streams, count, MEMORIES[0], total, {"delay": delay}, fragments=FRAGMENTS, delay=delay / 100)
        for delay in DELAYS
        for count in COUNTS
    ]


def over_gaps(scale):
    """Return the results online by the mean time between the tuples of an input, which opens reactive phases."""
    rows = []
    for gap in GAPS:
        settings, place = Settings(between=gap / 1000), {"gap": gap}
        rows += [_with_gaps(DINER, data, real_streams(data, scale), settings, place) for data in (CSCO, WEATHER)]
        streams = chain(scale.of(EACH) // GAPS_PART, scale.of(KEYS) // GAPS_PART, 1, 19)
        total = matches(streams[0][:, 1], streams[1][:, 0])
        rows.append(_with_gaps(MINER, _line(4), streams, settings, place, CHAINS[4], total))
    return rows


def _with_gaps(name, label, streams, settings, place, query=PAIR, total=None):
    arriving = arrivals(streams, settings, 7)
    memory = memory_for(name, len(arriving.times) * MEMORIES[0] // 100, query)
    run = online(name, arriving, memory, settings, query)
    return row(f"{label}, {name}", place, run.results, total or matches(*streams)) | waiting(run)


def _by_gap(rows):
    shares = {line: rows.values(line) for line in rows.lines}
    weather, four = (next(some for line, some in shares.items() if line.startswith(start)) for start in (WEATHER, "4"))
    return {
        "told": "; ".join(f"{line} {listed(values)} %" for line, values in shares.items()), "four": four,
        "weather": weather, "growing": [line for line, values in shares.items() if values[-1] > values[0]],
        "lines": len(shares), "both": [a >= PAPER_LEAST * NEAR and b <= 2 * TABLE_4[WEATHER][0]
                                       for a, b in zip(four, weather, strict=True)],
    }  # fmt: skip


GAP_CLAIMS = (
    Claim("(Ours) The longer the time between arrivals, the more results are online, from reactive phases.", _by_gap,
          lambda f: len(f["growing"]) == f["lines"], "{told}", partly=lambda f: bool(f["growing"])),
    Claim(f"(Ours) With one of these times, four inputs have the paper's {PAPER_LEAST} % and the weather its "
          f"{TABLE_4[WEATHER][0]} % (at most twice).", _by_gap, lambda f: any(f["both"]), "{told}"),
)  # fmt: skip


def _shares(rows):
    shares = {count: rows.values(_line(count)) for count in COUNTS}
    bound, half = rows.values(BOUND), rows.values(HALF_BOUND)
    return {
        "shares": shares, "falling": [count for count, values in shares.items() if not grows(values)],
        "told": "; ".join(f"{_line(count)} {listed(values)} %" for count, values in shares.items()),
        "four": shares[4], "four_told": listed(shares[4]), "bound": bound[0], "bound_most": bound[-1],
        "half": half[0], "half_most": half[-1], "fall": max(a - b for a, b in zip(bound, half, strict=True)),
        "drop": max(a - b for a, b in zip(shares[2], shares[4], strict=True)),
    }  # fmt: skip


CHAIN_CLAIMS = (
    Claim("With more memory, MINER has more results online.", _shares, lambda f: not f["falling"], "{told}",
          partly=lambda f: len(f["falling"]) < len(COUNTS)),
    Claim(f"Four inputs have {PAPER_LEAST} % of the results online with the least memory.", _shares,
          lambda f: f["four"][0] >= PAPER_LEAST * NEAR,
          "{four_told} % with 5, 10, 15, 20 % of the input; with the least memory no policy has more than {bound:.0f} "
          "%, or {half:.0f} % if the memory is divided evenly"),
    Claim(f"Four inputs have more than {PAPER_MOST} % of the results online with the most memory.", _shares,
          lambda f: f["four"][-1] >= PAPER_MOST * NEAR,
          "{four_told} %; with the most memory no policy has more than {bound_most:.0f} %, or {half_most:.0f} % if "
          "the memory is divided evenly"),
    Claim(f"Four inputs have modestly fewer results online than two (at most {MODEST} points).", _shares,
          lambda f: f["drop"] <= MODEST,
          "at most {drop:.0f} points: {told}; the bound for the inner inputs is up to {fall:.0f} points lower if they "
          "have half of the memory"),
    Claim("(Ours) Of these data, no policy can have the paper's share with the least memory.", _shares,
          lambda f: f["bound"] < PAPER_LEAST, "at most {bound:.0f} %"),
)  # fmt: skip


def _of_skew(rows):
    four, two, half = rows.values(_line(4)), rows.values(_line(2)), rows.values(HALF_BOUND)
    return {
        "four": four, "told": listed(four), "two": listed(two), "half": listed(half), "falls": grows(four[::-1]),
        "most": max(four), "skews": listed(list(SKEWS), "g"),
    }  # fmt: skip


SKEW_CLAIMS = (
    Claim(f"(Ours) With other skews, four inputs have the paper's {PAPER_LEAST} % online.", _of_skew,
          lambda f: f["most"] >= PAPER_LEAST * NEAR,
          "{told} % at skew {skews}; two inputs with their own 5 % have {two} %; no policy has more than {half} % with "
          "two inputs and the half of the memory that balance gives them"),
)  # fmt: skip


def star_ratios(rows):
    """Return how many times the results of MJoin MINER has, and the shares of both."""
    ratios = [a / max(b, 1) for a, b in zip(rows.values(MINER, "results"), rows.values(MJOIN, "results"), strict=True)]
    return {
        "ratios": ratios, "told": listed(ratios, ".1f"), "shares": rows.values(MINER),
        "shares_told": listed(rows.values(MINER), ".0f"), "mjoin": listed(rows.values(MJOIN), ".2f"),
    }  # fmt: skip


STAR_CLAIMS = (
    Claim("MINER has more results online than MJoin.", star_ratios, lambda f: min(f["ratios"]) >= 1,
          "{told} times: {shares_told} % against {mjoin} %", partly=lambda f: max(f["ratios"]) >= 1),
    Claim(f"With the least memory, MINER has {PAPER_STAR} times the results of MJoin.", star_ratios,
          lambda f: f["ratios"][0] >= PAPER_STAR * NEAR, "{told} times",
          partly=lambda f: f["ratios"][0] >= PAPER_STAR / 10),
    Claim("The less memory, the further MINER is ahead.", star_ratios,
          lambda f: grows(f["ratios"][::-1]), "{told} times", partly=lambda f: f["ratios"][0] > f["ratios"][-1]),
)  # fmt: skip


def _buffers(rows):
    most = {count: rows.values(_line(count), "buffer") for count in COUNTS}
    reactive = {count: rows.values(_line(count), "reactive") for count in COUNTS}
    return {
        "most": max(map(max, most.values())),
        "told": "; ".join(f"{_line(count)} {listed(values)}" for count, values in most.items()),
        "reactive": min(map(min, reactive.values())), "some": max(map(max, reactive.values())),
        "reactive_told": "; ".join(f"{_line(count)} {listed(values)}" for count, values in reactive.items()),
    }  # fmt: skip


BUFFER_CLAIMS = (
    Claim(f"MINER's input buffer never holds more than {PAPER_BUFFER:,} tuples.", _buffers,
          lambda f: NEAR * f["most"] <= PAPER_BUFFER, "at most, by delay: {told}"),
    Claim("The reactive phase has results with each delay and number of inputs.", _buffers, lambda f: f["reactive"] > 0,
          "{reactive_told}", partly=lambda f: f["some"] > 0),
)  # fmt: skip
MEMORY = share_axes("memory_percent", "memory, % of the input")
FIGURES = (
    Figure("inputs", "MINER, figure 20: two to four inputs", MEMORY, over_memory, CHAIN_CLAIMS,
           f"{EACH:,} tuples of the inner inputs and {KEYS:,} of the outer ones, a quarter of the paper's. The bounds "
           "are those of the two inner inputs in the memory of four, which four inputs do not exceed, since each "
           "result has a pair of theirs."),
    Figure("inputs_skew", "The same with 5 % of memory and other skews",
           share_axes("skew", "Zipf skew of the inner join"), over_skew, SKEW_CLAIMS,
           "The keys of the outer joins keep skew 1."),
    Figure("gaps", "DINER and MINER with other times between arrivals",
           share_axes("gap", "mean milliseconds between the tuples of an input"), over_gaps, GAP_CLAIMS,
           "The papers' exponential delays have a lambda of 0.1, without a unit; a mean of 10 ms is another reading of "
           "it. With 5 ms, all inputs are sometimes silent for 25 ms already: reactive phases begin, and their results "
           f"count as online. The four inputs have one in {GAPS_PART} of the tuples of the figures above."),
    Figure("inputs_buffer", "MINER, table 21: input buffer with delays",
           Axes("delay", "buffer", "delay after each tenth, % of its time", "most tuples in the input buffer"), delayed,
           BUFFER_CLAIMS, "Half as many tuples as in the figures above."),
    Figure("star", "MINER, figure 22: a simple star of four inputs",
           share_axes("memory_percent", "memory, % of the input", ylog=True), simple_star, STAR_CLAIMS),
)  # fmt: skip
