"""Figure 10 and table III: memory that moves between cached pages and waiting tuples, when what is asked for moves."""

from itertools import accumulate

from benchmarks.experiments._rates import arrive, greatest
from benchmarks.experiments._relations import moving_keys, stream_batches
from benchmarks.experiments._report import Axes, Check, Outcome
from headrace.joins import SSIJ

__all__ = ["fig10", "table3"]

INTERVALS, USED = 20, 5  # of the stream, each with 5 % of the keys; so many of them are played
INTERVAL_TUPLES = 2_000_000
SLOWEST, FASTEST = 2_000.0, 2_000_000.0
ADAPTIVE = "adaptive"
VARIANTS = {
    "no cache": {"cache_policy": "none"},
    "20 % cache": {"memory_split": 0.2},
    "50 % cache": {"memory_split": 0.5},
    "70 % cache": {"memory_split": 0.7},
    ADAPTIVE: {},
}
SHARES = (0.05, 0.10, 0.15)
BURST_SHARE = 0.10
BURSTS = {0.10: 700, 0.25: 562, 0.50: 400, 0.70: 225}
BURST_AT = (USED - 0.5) / USED  # the middle of the last interval, when its pages are cached


class Moving:
    """A stream with temporal locality over its relation, and what happens when it comes at some rate."""

    def __init__(self, world, settings):
        self._world = world
        self.relation = settings.dense(4)
        each = self.relation.scaled(INTERVAL_TUPLES)
        keys = moving_keys(self.relation.rows, INTERVALS, INTERVALS * each)[: USED * each]
        self.batches = stream_batches(keys, max(1, each // 80), self.relation.tuple_nbytes)
        self.tuples = len(keys)

    def arrive(self, share, rate, burst=(0.0, 0.0), **variant):
        """Let the stream come at a rate, but faster for a while from the place of the burst on."""
        options = self.relation.as_in_the_paper(share) | variant
        run = self._world.start(SSIJ, self.relation, share, **options)
        return arrive(run, self.batches, self._times(rate, *burst))

    def greatest_rate(self, share, steps, **variant):
        """Return the greatest rate at which no tuple finds the memory full, in any of the trials."""
        trials, pace = self._world.trials, self._world.pace(self.relation)
        return greatest(
            lambda rate: all(self.arrive(share, rate, **variant).fits for _ in range(trials)),
            SLOWEST / pace,
            FASTEST / pace,
            steps,
        )

    def absorbs(self, share, rate, increase, seconds):
        """Return whether a burst fits, in most of the trials: chance may fill the memory without a burst, too."""
        trials = self._world.trials
        return 2 * sum(self.arrive(share, rate, (increase, seconds)).fits for _ in range(trials)) > trials

    def _times(self, rate, increase, duration):
        """Return when each batch has come in full."""
        begin = BURST_AT * self.tuples / rate
        fast = duration * rate * (1 + increase)  # tuples of the burst
        times = []
        for tuples in accumulate(map(len, self.batches)):
            before = min(tuples, begin * rate)
            during = min(max(tuples - begin * rate, 0.0), fast)
            after = max(tuples - begin * rate - fast, 0.0)
            times.append(before / rate + during / (rate * (1 + increase)) + after / rate)
        return times


def fig10(world, settings):
    """The greatest rate for splits of the memory that are fixed, and for one that adapts."""
    moving = Moving(world, settings)
    shares = SHARES if not settings.least_memory else settings.shares
    rows = [
        {
            "line": line,
            "memory_percent": 100 * share,
            "tuples_per_second": round(moving.greatest_rate(share, settings.steps, **variant)),
        }
        for line, variant in VARIANTS.items()
        for share in shares
    ]
    axes = Axes(
        "memory_percent", "tuples_per_second", "memory, % of the relation", "greatest rate of arrivals, tuples/s"
    )
    outcome = Outcome("fig10", "Figure 10: who has the memory", axes, rows)
    last = {line: outcome.values(line)[-1] for line in VARIANTS}
    fixed = [last[line] for line in VARIANTS if line != ADAPTIVE]
    gains = [
        outcome.values(ADAPTIVE)[at] / max(outcome.values(line)[at] for line in VARIANTS if line != ADAPTIVE)
        for at in range(len(shares))
    ]
    outcome.checks.extend([
        Check("with 20, 50, 70 % for the cache the rate grows, and is always above that without a cache",
              ", ".join(f"{line} {rate:,}" for line, rate in last.items()), fixed == sorted(fixed)),
        Check("a split that adapts supports a significantly higher rate", f"{gains[-1]:.2f} times the best fixed one",
              min(gains) > 1.1),
        Check("the gain grows with the memory", ", ".join(f"{gain:.2f}" for gain in gains), gains == sorted(gains)),
        Check("480,000 tuples/s in the best case", f"{max(outcome.values(ADAPTIVE)):,}",
              max(outcome.values(ADAPTIVE)) >= 480_000),
    ])  # fmt: skip
    return outcome


def table3(world, settings):
    """How long a burst may last that comes faster than the greatest rate."""
    moving = Moving(world, settings)
    share = max(BURST_SHARE, settings.share) if settings.least_memory else BURST_SHARE
    nominal = moving.greatest_rate(share, settings.steps)
    longest = (1 - BURST_AT) * moving.tuples / nominal
    rows = []
    for increase, papers in BURSTS.items():
        most = longest / (1 + increase)

        def fits(seconds, increase=increase):
            return moving.absorbs(share, nominal, increase, seconds)

        seconds = most if fits(most) else greatest(fits, most / 200, most, settings.steps)
        whole = seconds == most
        rows.append({
            "line": "here", "increase_percent": round(100 * increase),
            "milliseconds": round(1e3 * seconds / moving.relation.factor), "whole_interval": whole,
            "nominal_rate": round(nominal), "papers_milliseconds": papers,
        })  # fmt: skip
    paper = [{"line": "paper", "increase_percent": round(100 * up), "milliseconds": ms} for up, ms in BURSTS.items()]
    axes = Axes(
        "increase_percent", "milliseconds", "increase over the greatest rate, %", "duration of the burst, ms", ylog=True
    )
    outcome = Outcome("table3", "Table III: bursts", axes, [*rows, *paper])
    ours = outcome.values("here")
    outcome.checks.append(
        Check(
            "bursts of 10, 25, 50, 70 % above the greatest rate are absorbed for 700, 562, 400, 225 ms",
            f"{', '.join(f'{ms:,}' for ms in ours)} ms at a greatest rate of {nominal:,.0f} tuples/s, brought to the "
            f"paper's size{'; each is the rest of the interval' if all(row['whole_interval'] for row in rows) else ''}",
            all(a >= b for a, b in zip(ours, BURSTS.values(), strict=True)),
        )
    )
    return outcome
