"""Streams that pause: figures 16, 17 and 19, and table 3."""

import functools

from benchmarks.experiments._claims import Claim, listed
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import NEAR
from benchmarks.streams._claims import DINER, HMJ, RPJ, SETTINGS, ahead, compared, row, share_axes
from benchmarks.streams._data import matches, stock, zipf
from benchmarks.streams._world import OPERATORS, PAIR, arrivals, memory_for, online

__all__ = ["EACH", "FIGURES", "PAPER_AHEAD", "PAPER_BUFFER", "by_other"]

EACH, KEYS = 20_000, 999
DELAYS = (10, 20, 30, 40, 50)
FRAGMENTS = 10
OUTER_BLOCKS = (9, 19, 29, 39, 49, 59)
PAPER_AHEAD = {RPJ: 1.83, HMJ: 8.65}  # of RPJ where its input buffer fits in memory
PAPER_BUFFER = 1_030  # the paper's most, with a MaxNewArr of 1,000
MARGINAL = 1.05


@functools.cache
def delayed_zipf(scale):
    """Return results and input buffers with delays, of streams with a Zipf distribution."""
    return _delayed(zipf(scale.of(EACH), KEYS, 1, 13))


@functools.cache
def delayed_stock(scale):
    """Return results and input buffers with delays, of a stock."""
    return _delayed(stock(scale.of(20_710), 320, 1))


def _delayed(keys):
    total, tuples, rows = matches(*keys), sum(map(len, keys)) * 5 // 100, []
    for delay in DELAYS:
        arriving = arrivals(keys, SETTINGS, 7, fragments=FRAGMENTS, delay=delay / 100)
        for name in OPERATORS:
            run = online(name, arriving, memory_for(name, tuples, PAIR), SETTINGS)
            rows.append(row(name, {"delay": delay}, run.results, total) | waiting(run) | {"memory_tuples": tuples})
    return rows


def waiting(run):
    """Return the columns of a run that tell about its input buffer."""
    buffers = run.buffers or (0,)
    mean = round(sum(buffers) / len(buffers))
    return {"reactive": run.reactive, "buffer": max(buffers), "buffer_mean": mean}


def outer_blocks(scale):
    """Return DINER's results by the outer blocks that it loads."""
    keys = zipf(scale.of(EACH), KEYS, 1, 13)
    arriving, total = arrivals(keys, SETTINGS, 7, fragments=FRAGMENTS, delay=0.3), matches(*keys)
    memory = memory_for(DINER, sum(map(len, keys)) * 5 // 100, PAIR)
    return [
        row(DINER, {"blocks": blocks},
            online(DINER, arriving, memory, SETTINGS, max_outer_blocks=blocks).results, total)
        for blocks in OUTER_BLOCKS
    ]  # fmt: skip


def by_other(rows):
    """Return how far DINER is ahead of the others, and of RPJ where that has memory for its input buffer."""
    facts = compared(rows)
    fits = [
        ratio
        for ratio, buffer, memory in zip(
            facts["ratios"][RPJ], rows.values(RPJ, "buffer"), rows.values(RPJ, "memory_tuples"), strict=True
        )
        if buffer <= memory
    ]
    told = f"at most {max(fits):.2f} times, at {len(fits)} of the delays" if fits else "it fits at no delay"
    return facts | {"rpj": max(fits, default=0.0), "rpj_told": told, "reactive": _reactive_part(rows)}


def _reactive_part(rows):
    """Return which part of HMJ's results is of reactive phases, and how far DINER is ahead of the others, as text."""
    all_of_it, reactive = rows.values(HMJ, "results"), rows.values(HMJ, "reactive")
    part = [100 * b / max(a, 1) for a, b in zip(all_of_it, reactive, strict=True)]
    without = [
        ours / max(a - b, 1) for ours, a, b in zip(rows.values(DINER, "results"), all_of_it, reactive, strict=True)
    ]
    return f"HMJ's reactive phases have {listed(part)} % of its results; without them, {listed(without, '.1f')} times"


def _buffers(rows):
    most = {name: rows.values(name, "buffer") for name in OPERATORS}
    memory = rows.values(RPJ, "memory_tuples")
    return {
        "most": {name: max(values) for name, values in most.items()}, "memory": memory[0],
        "told": "; ".join(f"{name} {listed(values)}" for name, values in most.items()),
        "over": [a > b for a, b in zip(most[RPJ], memory, strict=True)],
    }  # fmt: skip


def _by_blocks(rows):
    shares = rows.values(DINER, "results")
    same = next(found["blocks"] for found in rows.rows if found["results"] == shares[-1])
    return {"spread": max(shares) / min(shares), "shares": listed(rows.values(DINER), ".1f"), "same": same}


RESULT_CLAIMS = (
    ahead("With delays, DINER has more results online than RPJ and HMJ."),
    Claim(f"DINER has up to {PAPER_AHEAD[RPJ]} times the results of RPJ where RPJ's input buffer fits in memory.",
          by_other, lambda f: f["rpj"] >= PAPER_AHEAD[RPJ] * NEAR,
          "{rpj_told}; at most {most_rpj:.2f} times at any delay"),
    Claim(f"DINER has up to {PAPER_AHEAD[HMJ]} times the results of HMJ.", by_other,
          lambda f: f["most_hmj"] >= PAPER_AHEAD[HMJ] * NEAR, "at most {most_hmj:.2f} times; {reactive}"),
)  # fmt: skip
BUFFER_CLAIMS = (
    Claim(f"DINER's input buffer never holds more than {PAPER_BUFFER:,} tuples.", _buffers,
          lambda f: NEAR * f["most"][DINER] <= PAPER_BUFFER, "at most, by delay: {told}"),
    Claim("RPJ's input buffer exceeds the memory for some delay.", _buffers, lambda f: any(f["over"]),
          "the memory holds {memory:,} tuples; at most, by delay: {told}"),
    Claim("RPJ and HMJ need several times DINER's input buffer.", _buffers,
          lambda f: min(f["most"][RPJ], f["most"][HMJ]) >= 2 * f["most"][DINER], "at most, by delay: {told}",
          partly=lambda f: max(f["most"][RPJ], f["most"][HMJ]) >= 2 * f["most"][DINER]),
)  # fmt: skip
DELAY = "delay after each tenth, % of its time"
FIGURES = (
    Figure("delays", "DINER, figure 16: delays, Zipf skew 1", share_axes("delay", DELAY), delayed_zipf, RESULT_CLAIMS,
           f"{EACH:,} tuples of each stream; the paper has 100,000."),
    Figure("input_buffer", "DINER, table 3: input buffer with delays",
           Axes("delay", "buffer", DELAY, "most tuples in the input buffer", ylog=True), delayed_zipf, BUFFER_CLAIMS,
           "The runs of the figure above. A step of reactive work ends before an operator looks at the input buffer."),
    Figure("stock_delays", "DINER, figure 17: delays, CSCO", share_axes("delay", DELAY), delayed_stock,
           (ahead("With delays, DINER has more results online than RPJ and HMJ."),)),
    Figure("outer_blocks", "DINER, figure 19: outer blocks in the reactive phase (MaxOuterMem)",
           share_axes("blocks", "outer blocks"), outer_blocks,
           (Claim("The number of outer blocks hardly matters (5 %).", _by_blocks, lambda f: f["spread"] <= MARGINAL,
                  "{shares} % of the results online; the most are {spread:.3f} times the least, and from {same} blocks "
                  "on all are the same"),),
           f"Delays of 30 %, Zipf skew 1, {EACH:,} tuples of each stream. Outer blocks take at most a quarter of the "
           "memory, which is a fifth of the paper's."),
)  # fmt: skip
