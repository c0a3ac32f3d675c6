"""Figure 10 and table III: memory that moves between cached pages and waiting tuples, when the popular keys change."""

import math
from itertools import accumulate

import numpy as np

from benchmarks.experiments._claims import Claim, grows, listed, ratios
from benchmarks.experiments._rates import arrive, closed_loop, closed_loop_rate, greatest
from benchmarks.experiments._relations import MAX_SCAN, moving_keys, stream_batches, zipf_keys
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import NEAR
from headrace.joins import SSIJ

__all__ = ["FIGURES"]

INTERVALS = 20  # of the stream, each with 5 % of the keys
INTERVAL_TUPLES = 2_000_000
ADAPTIVE = "adaptive"
NO_CACHE = "no cache"
VARIANTS = {
    NO_CACHE: {"cache_policy": "none"},
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
MOST_SAVED = 0.2  # of the reads, that a cache can save where it is said to save little
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

    @property
    def pages(self):
        """Number of pages that tuples ask for, counted once for each interval that asks for them."""
        leaves = self._keys // self.relation.rows_per_page
        return sum(len(np.unique(interval)) for interval in leaves.reshape(INTERVALS, -1))

    def bound(self):
        """Return a rate that no division of the memory exceeds: each page is read once an interval, in longest reads.

        The processor is charged once for each tuple.
        """
        costs, pages, tuples = self._world.costs, self.pages, len(self._keys)
        return tuples / (pages * (costs.transfer + costs.seek / MAX_SCAN) + tuples * costs.tuple)

    def closed_loop(self, share, **variant):
        """Return the rate of completion if there is always a batch to push, and the pages that join phases ask for.

        They are those of the median trial, with the best threshold.
        """
        return max(self._closed_loop(share, threshold, variant) for threshold in THRESHOLDS)

    def greatest_rate(self, share, guess, steps, **variant):
        """Return the greatest rate of arrivals at which the memory never overflows, in any of the trials."""
        return greatest(lambda rate: self.at(share, rate, **variant) is not None, guess, steps, MOST_RATE)

    def at(self, share, rate, **variant):
        """Return what happened at a rate of arrivals; None if the memory overflowed."""
        return self._arrive(share, self.batches, [tuples / rate for tuples in _totals(self.batches)], variant)

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
        return self._arrive(share, batches, times, {}) is not None

    def _arrive(self, share, batches, times, variant):
        """Return what happened with the first threshold with which the memory never overflows, or None."""
        for threshold in THRESHOLDS:
            trials = [arrive(self._start(share, threshold, variant), batches, times) for _ in range(self._world.trials)]
            if all(trial.fits for trial in trials):
                return trials[-1]
        return None

    def _closed_loop(self, share, threshold, variant):
        trials = range(self._world.trials)
        runs = sorted((closed_loop(self._start(share, threshold, variant), self.batches) for _ in trials),
                      key=lambda run: run[0])  # fmt: skip
        rate, stats = runs[len(runs) // 2]
        return rate, stats.pages_wanted

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
    tuples, pages, bound = sum(map(len, moving.batches)), moving.pages, moving.bound()
    for line, variant in VARIANTS.items():
        for share in settings.moving:
            pushed, wanted = moving.closed_loop(share, **variant)
            rate = moving.greatest_rate(share, pushed, settings.steps, **variant)
            room = world.table(moving.relation).stats.bytes * share / moving.relation.tuple_nbytes
            arrived = moving.at(share, rate, **variant)
            asked = arrived.pages_wanted / pages if arrived else None
            rows += [
                {"line": line, "memory_percent": 100 * share, "tuples_per_second": round(rate),
                 "reads_of_a_page": asked and round(asked, 3), "bound": round(bound / (1 - room / tuples))},
                {"line": _closed(line), "memory_percent": 100 * share, "tuples_per_second": round(pushed),
                 "reads_of_a_page": round(wanted / pages, 3), "bound": round(bound)},
            ]  # fmt: skip
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


def _by_peaks(rows):
    fixed = [line for line in VARIANTS if line != ADAPTIVE]
    margins = [ratios(rows, line, _closed(line)) for line in fixed]
    return {
        "by_memory": list(zip(*margins, strict=True)),
        "told": "; ".join(f"{line} {listed(each, '.2f')}" for line, each in zip(fixed, margins, strict=True)),
    }


def _by_reads(rows):
    least, pushed = rows.values(NO_CACHE, "reads_of_a_page"), rows.values(_closed(NO_CACHE), "reads_of_a_page")
    return {
        "saved": [1 - 1 / (reads or 1) for reads in least], "told": listed([reads or 0 for reads in least], ".2f"),
        "pushed": listed(pushed, ".2f"), "more": [b > (a or math.inf) for a, b in zip(least, pushed, strict=True)],
        "ours": listed([reads or 0 for reads in rows.values(ADAPTIVE, "reads_of_a_page")], ".2f"),
    }  # fmt: skip


def _by_bound(rows):
    return {"bounds": rows.values(ADAPTIVE, "bound"), "told": listed(rows.values(ADAPTIVE, "bound")),
            "completed": rows.values(_closed(ADAPTIVE), "bound")[0]}  # fmt: skip


PEAKS_REASON = Claim(
    "(Ours) A large fixed cache leaves little room for what arrives during a join phase, which pushed batches do not: "
    "the larger it is, the lower the greatest rate of arrivals beside the rate of completion.",
    _by_peaks,
    lambda f: all(grows(column[::-1], STEP) for column in f["by_memory"]),
    "arrivals by the clock over pushed, from the least memory to the most: {told}",
    partly=lambda f: any(grows(column[::-1], STEP) for column in f["by_memory"]),
)
READS_REASON = Claim(
    "(Ours) By the clock, what arrives during a join phase shares the next one. So a page is hardly read twice in an "
    "interval even without a cache, and no division of the memory saves more than a fifth of the reads.",
    _by_reads,
    lambda f: max(f["saved"]) <= MOST_SAVED and all(f["more"]),
    "a page that an interval asks for is asked for in {told} join phases without a cache, in {ours} with the adaptive "
    "split, from the least memory to the most; pushed, in {pushed} without a cache",
    partly=lambda f: min(f["saved"]) <= MOST_SAVED and any(f["more"]),
)
BOUND_REASON = Claim(
    "(Ours) No join reaches 480,000 on the simulated disk.",
    _by_bound,
    lambda f: max(f["bounds"]) < 480_000 * NEAR,
    f"if each page that an interval asks for is read once, {MAX_SCAN} pages at a time, {{completed:,}} tuples/s are "
    "completed; {told} arrive if what fits in the memory waits at the end",
)


def _split_claims(name, how, reasons):
    facts, (order, gain, growth) = _by_split(name), reasons
    return (
        Claim(
            f"With 20, 50, 70 % for the cache the rate grows, and is always above that without a cache ({how}).",
            facts,
            lambda f: all(f["ordered"]),
            "tuples/s, from the least memory to the most: {told}",
            partly=lambda f: any(f["ordered"]),
            reason=order,
        ),
        Claim(
            f"A split that adapts supports a significantly higher rate ({how}).",
            facts,
            lambda f: min(f["gains"]) >= 1.1,
            "{gains_told} times the best fixed split",
            partly=lambda f: max(f["gains"]) >= 1.1,
            reason=gain,
        ),
        Claim(
            f"The gain grows with the memory ({how}).",
            facts,
            lambda f: grows(f["gains"]),
            "{gains_told} times the best fixed split",
            reason=growth,
        ),
    )


SPLIT_CLAIMS = (
    *_split_claims(lambda line: line, "arrivals by the clock", (PEAKS_REASON, READS_REASON, READS_REASON)),
    *_split_claims(_closed, "pushed", (PEAKS_REASON, PEAKS_REASON, PEAKS_REASON)),
    Claim(
        "480,000 tuples/s in the best case.",
        _by_split(lambda line: line),
        lambda f: f["best"] >= 480_000 * NEAR,
        "{best:,} tuples/s",
        reason=BOUND_REASON,
    ),
    PEAKS_REASON,
    READS_REASON,
    BOUND_REASON,
)


def table3(world, settings):
    """How long a burst may last that comes faster than the greatest rate."""
    moving, rows, share = Moving(world, settings), [], settings.burst
    nominal = moving.greatest_rate(share, moving.closed_loop(share)[0], settings.steps)
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
