"""Figure 10 and table III: memory that moves between cached pages and waiting tuples, when the popular keys change."""

from itertools import accumulate
from statistics import median

import numpy as np

from benchmarks.experiments._claims import Claim, grows, listed, ratios
from benchmarks.experiments._rates import arrive, closed_loop_rate, greatest
from benchmarks.experiments._relations import moving_keys, stream_batches, zipf_keys
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import NEAR
from headrace.joins import SSIJ

__all__ = ["FIGURES"]

INTERVALS = 20  # of the stream, each with 5 % of the keys
INTERVAL_TUPLES = 2_000_000
ADAPTIVE = "adaptive"
VARIANTS = {
    "no cache": {"cache_policy": "none"},
    "20 % cache": {"memory_split": 0.2},
    "50 % cache": {"memory_split": 0.5},
    "70 % cache": {"memory_split": 0.7},
    ADAPTIVE: {},
}
BATCHES = 80  # in an interval
BEFORE = 4  # intervals before the one with the burst
AFTER = 10  # intervals' worth of tuples that follow the burst's begin, all from the same keys
BURSTS = {10: 700, 25: 562, 50: 400, 70: 225}
CONTROL = 100_000  # per cent: a burst that has to fail
THRESHOLDS = (0.25, 0.5, 1.0)  # of the paper's stream threshold: the best counts, whatever the division of the memory
MOST_RATE = 100e6
STEP = 1.03  # of the search for a greatest rate, and a little more


def _closed(line):
    return f"{line}, pushed"


def _totals(batches):
    """Return the number of tuples up to the end of each batch."""
    return list(accumulate(map(len, batches)))


class Moving:
    """A stream with temporal locality over its relation, and what happens when it comes at some rate."""

    def __init__(self, world, settings):
        self._world = world
        self.relation = settings.dense(4)
        self.each = self.relation.scaled(INTERVAL_TUPLES)
        self._keys = moving_keys(self.relation.domain, INTERVALS, INTERVALS * self.each)
        self.batches = self._batches(self._keys)

    def closed_loop(self, share, **variant):
        """Return the rate of completion if there is always a batch to push: the median of the trials."""
        return max(self._closed_loop(share, threshold, variant) for threshold in THRESHOLDS)

    def greatest_rate(self, share, guess, steps, **variant):
        """Return the greatest rate of arrivals at which the memory never overflows, in any of the trials."""

        def fits(rate):
            return self._fits(share, self.batches, [tuples / rate for tuples in _totals(self.batches)], variant)

        return greatest(fits, guess, steps, MOST_RATE)

    def steady_rate(self, share):
        """Return the rate of completion in the last interval, when its pages are cached."""
        return max(self._steady_rate(share, threshold) for threshold in THRESHOLDS)

    def long_interval(self):
        """Return the batches of some intervals, the last of which goes on for a long time."""
        width, first = self.relation.domain // INTERVALS, INTERVALS - BEFORE - 1
        before = self._keys[first * self.each : (INTERVALS - 1) * self.each]
        last = zipf_keys(width, 1.0, round((AFTER + 0.5) * self.each), seed=3) + (INTERVALS - 1) * width
        return self._batches(np.concatenate([before, last]))

    def absorbs(self, share, rate, increase, seconds):
        """Return whether a burst fits that begins in the middle of the last interval, in each trial."""
        batches, begin = self.long_interval(), (BEFORE + 0.5) * self.each
        faster = rate * (1 + increase / 100)
        end = begin + seconds * faster
        times = []
        for tuples in _totals(batches):
            during, after = min(max(tuples - begin, 0.0), end - begin), max(tuples - end, 0.0)
            times.append(min(tuples, begin) / rate + during / faster + after / rate)
        return self._fits(share, batches, times, {})

    def _fits(self, share, batches, times, variant):
        """Return whether there is a threshold with which the memory never overflows."""
        return any(
            all(arrive(self._start(share, threshold, variant), batches, times).fits for _ in range(self._world.trials))
            for threshold in THRESHOLDS
        )

    def _closed_loop(self, share, threshold, variant):
        trials = range(self._world.trials)
        return median(closed_loop_rate(self._start(share, threshold, variant), self.batches) for _ in trials)

    def _steady_rate(self, share, threshold):
        run, batches = self._start(share, threshold, {}), self.long_interval()
        warm = round(BATCHES * (BEFORE + 0.5))
        for batch in batches[:warm]:
            run.operator.push(batch).drain()
        return closed_loop_rate(run, batches[warm:])

    def _start(self, share, threshold, variant):
        options = self.relation.as_in_the_paper(share) | variant
        options["stream_threshold"] = max(1, round(threshold * options["stream_threshold"]))
        return self._world.start(SSIJ, self.relation, share, **options)

    def _batches(self, keys):
        return stream_batches(keys, max(1, self.each // BATCHES), self.relation.tuple_nbytes)


def fig10(world, settings):
    """The greatest rate, of arrivals and of completion, for fixed splits of the memory and for one that adapts."""
    moving, rows = Moving(world, settings), []
    for line, variant in VARIANTS.items():
        for share in settings.moving:
            pushed = moving.closed_loop(share, **variant)
            arriving = moving.greatest_rate(share, pushed, settings.steps, **variant)
            rows += [
                {"line": name, "memory_percent": 100 * share, "tuples_per_second": round(rate)}
                for name, rate in ((line, arriving), (_closed(line), pushed))
            ]
    return sorted(rows, key=lambda row: row["line"].endswith("pushed"))


def _by_split(name):
    def facts(rows):
        lines = {line: rows.values(name(line)) for line in VARIANTS}
        fixed = [lines[line] for line in VARIANTS if line != ADAPTIVE]
        gains = [adaptive / max(others) for adaptive, *others in zip(lines[ADAPTIVE], *fixed, strict=True)]
        ordered = [grows(column) for column in zip(*fixed, strict=True)]
        return {
            "ordered": ordered, "gains": gains, "gains_told": listed(gains, ".2f"), "best": max(lines[ADAPTIVE]),
            "told": "; ".join(f"{line} {listed(rates)}" for line, rates in lines.items()),
        }  # fmt: skip

    return facts


def _split_claims(name, how):
    facts = _by_split(name)
    return (
        Claim(
            f"With 20, 50, 70 % for the cache the rate grows, and is always above that without a cache ({how}).",
            facts,
            lambda f: all(f["ordered"]),
            "tuples/s, from the least memory to the most: {told}",
            partly=lambda f: any(f["ordered"]),
        ),
        Claim(
            f"A split that adapts supports a significantly higher rate ({how}).",
            facts,
            lambda f: min(f["gains"]) >= 1.1,
            "{gains_told} times the best fixed split",
            partly=lambda f: max(f["gains"]) >= 1.1,
        ),
        Claim(
            f"The gain grows with the memory ({how}).",
            facts,
            lambda f: grows(f["gains"]),
            "{gains_told} times the best fixed split",
        ),
    )


def _by_peaks(rows):
    fixed = [line for line in VARIANTS if line != ADAPTIVE]
    margins = [ratios(rows, line, _closed(line)) for line in fixed]
    return {
        "by_memory": list(zip(*margins, strict=True)),
        "told": "; ".join(f"{line} {listed(each, '.2f')}" for line, each in zip(fixed, margins, strict=True)),
    }


SPLIT_CLAIMS = (
    *_split_claims(lambda line: line, "arrivals by the clock"),
    *_split_claims(_closed, "pushed"),
    Claim(
        "480,000 tuples/s in the best case.",
        _by_split(lambda line: line),
        lambda f: f["best"] >= 480_000 * NEAR,
        "{best:,} tuples/s",
    ),
    Claim(
        "(Ours) A large fixed cache leaves little room for what arrives during a join phase: the larger it is, the "
        "lower the greatest rate of arrivals beside the rate of completion.",
        _by_peaks,
        lambda f: all(grows(column[::-1], STEP) for column in f["by_memory"]),
        "arrivals by the clock over pushed, from the least memory to the most: {told}",
        partly=lambda f: any(grows(column[::-1], STEP) for column in f["by_memory"]),
    ),
)


def table3(world, settings):
    """How long a burst may last that comes faster than the greatest rate."""
    moving, rows, share = Moving(world, settings), [], settings.burst
    nominal = moving.greatest_rate(share, moving.closed_loop(share), settings.steps)
    steady = moving.steady_rate(share)
    for increase in (*BURSTS, CONTROL):
        whole = AFTER * moving.each / (nominal * (1 + increase / 100))

        def fits(seconds, increase=increase):
            return moving.absorbs(share, nominal, increase, seconds)

        seconds = greatest(fits, whole, settings.steps, whole)
        rows.append({
            "line": "here", "increase_percent": increase, "milliseconds": round(1e3 * seconds / moving.relation.factor),
            "absorbed_to_the_end": seconds == whole, "nominal_rate": round(nominal), "steady_rate": round(steady),
        })  # fmt: skip
    return [*rows, *({"line": "paper", "increase_percent": up, "milliseconds": ms} for up, ms in BURSTS.items())]


def _by_burst(rows):
    ours = {row["increase_percent"]: row for row in rows.of("here")}
    control, some = ours[CONTROL], ours[min(BURSTS)]
    told = ", ".join(
        f"{'at least ' if ours[up]['absorbed_to_the_end'] else ''}{ours[up]['milliseconds']:,}" for up in BURSTS
    )
    return {
        "enough": [ours[up]["milliseconds"] >= ms for up, ms in BURSTS.items()], "told": told,
        "control_fails": not control["absorbed_to_the_end"], "control": control["milliseconds"],
        "nominal": some["nominal_rate"], "steady": some["steady_rate"],
        "headroom": some["steady_rate"] / some["nominal_rate"],
        "to_the_end": [ours[up]["absorbed_to_the_end"] for up in BURSTS],
    }  # fmt: skip


BURST_CLAIMS = (
    Claim(
        "Bursts of 10, 25, 50, 70 % above the greatest rate are absorbed for 700, 562, 400, 225 ms.",
        _by_burst,
        lambda f: f["control_fails"] and all(f["enough"]),
        "{told} ms (brought to the paper's size) at a greatest rate of {nominal:,} tuples/s",
        partly=lambda f: f["control_fails"] and any(f["enough"]),
    ),
    Claim(
        "(Ours) The experiment can fail: a burst of 1,001 times the rate overflows the memory.",
        _by_burst,
        lambda f: f["control_fails"],
        "",
        otherwise={
            "holds": "it does so after {control:,} ms",
            "does not hold": "it lasted to the end of the stream, so the table says nothing",
        },
    ),
    Claim(
        "(Ours) The changes from one interval to the next, not the steady state, limit the rate.",
        _by_burst,
        lambda f: f["headroom"] >= 1.1,
        "pushed within an interval whose pages are cached, the operator completes {steady:,} tuples/s, "
        "{headroom:.2f} times the greatest rate",
        otherwise={"holds": "+; a burst below that is absorbed for as long as it lasts"},
    ),
)

FIGURES = (
    Figure(
        "fig10", "Figure 10: division of the memory",
        Axes("memory_percent", "tuples_per_second", "memory, % of the relation", "greatest rate, tuples/s"),
        fig10, SPLIT_CLAIMS,
        "All 20 intervals are played, from a cold start. Arrivals by the clock: the greatest rate at which the memory "
        "never overflows; what the memory holds at the end counts as served, as in the paper. Pushed: the next batch "
        "comes when the one before is done, so nothing but the rate of completion counts. Each division of the memory "
        f"has the best of {len(THRESHOLDS)} stream thresholds (a quarter, half and all of table II's), since a large "
        "cache leaves little room for waiting tuples.",
    ),
    Figure(
        "table3", "Table III: bursts",
        Axes("increase_percent", "milliseconds", "increase over the greatest rate, %", "duration of the burst, ms",
             xlog=True, ylog=True),
        table3, BURST_CLAIMS,
        "The greatest rate is that of figure 10 with the same memory. The burst begins in the middle of an interval, "
        f"and this interval then lasts for {AFTER} more, so that a burst can last until it overflows the memory. "
        'A burst that did not overflow it before the end of the stream is told as "at least".',
    ),
)  # fmt: skip
