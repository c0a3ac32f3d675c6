"""The metadata-aware MJoin of 2003: scheduling, and MJoin against XJoin, on a simulated clock; figures 8 to 11.

Input (section 6.1): news, each with a serial number, and records of accesses to them. The ten latest news are watched
at any time; accesses choose among them at random. When a news item leaves the ten, a punctuation says that no access to
it follows. In the *ordered* pattern news arrive by number, in the *random* one in a random order. Both streams are
complete from the beginning ("CPU-limited"); the stream scheduling says from which the next tuple comes.

The paper does not say in which proportion tuples are retrieved. *Even* retrieval takes both streams at one rate: random
scheduling tosses a coin, and both have the same quota. News are a tenth of the tuples, so they are all there early.
*Proportional* retrieval takes each stream in proportion to its length: random scheduling picks one of all tuples that
are left, and the quota of a stream is proportional to its length, so both streams end together.

Clock: the operators really run, and the clock adds up what they do. A probe costs one comparison for each tuple in its
bucket, of a fixed number of buckets, as in the paper's hash tables: time grows with the state. A purge costs one test
for each tuple in the state. The unit costs are those of `Units`, guesses of the paper's machine: it publishes
none. So directions and shapes are evidence, and *where* MJoin overtakes XJoin depends on the units.
"""

import functools
from collections import deque
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from benchmarks.experiments._claims import Claim, listed
from benchmarks.experiments._results import Axes, Figure
from headrace.joins.streams import XJoin
from headrace.joins.streams.punctuated import OneOf, Pattern, PunctuatedJoin, Scheduling

__all__ = ["FIGURES"]

SCHEMAS = {
    "news": pa.schema([("sno", pa.int64()), ("keyword", pa.int64())]),
    "reads": pa.schema([("sno", pa.int64()), ("ip", pa.int64())]),
}
WATCHED = 10
PLACES = 10  # numbers of results at which a run is told
FINE = 60  # those at which runs are compared
MOST_TOGETHER = 20  # tuples that are pushed together
CROSSOVER = 7500  # results at which the paper's MJoin overtakes XJoin
BUCKETS = (250, 500, 1000)
ORDERS = {"ordered": True, "random": False}


@dataclass(frozen=True)
class Settings:
    """Sizes of the streams, and how they are retrieved."""

    news: int = 1500
    reads_per_news: int = 10
    quota: int = 10  # retrieval quota of the news
    even: bool = False  # whether both streams are retrieved at one rate, or each in proportion to its length
    seed: int = 2003

    @property
    def quotas(self):
        """Retrieval quotas of the news and of the accesses."""
        return self.quota, self.quota * (1 if self.even else self.reads_per_news)


@dataclass(frozen=True)
class Units:
    """Costs of operations in microseconds, and the buckets of a hash table."""

    take: float = 2.0  # retrieve and hash a tuple
    compare: float = 1.0  # one tuple of a bucket
    insert: float = 1.0
    output: float = 1.0
    punctuation: float = 10.0  # take a punctuation and propagate it
    test: float = 1.0  # a tuple against the punctuated range, while it arrives or is purged
    buckets: int = 500

    def seconds(self, work):
        """Return the time at the end of each step, from rows of `Played.work`."""
        probe = self.compare / self.buckets
        return 1e-6 * np.cumsum(work @ (self.take, self.insert, probe, self.output, self.test, self.punctuation))


@dataclass(frozen=True)
class Run:
    """A contestant in a run.

    Attributes
    ----------
    mjoin
        Whether it is MJoin; otherwise XJoin.
    ordered
        Whether news arrive by number.
    scheduled
        Whether stream scheduling is by priority and tuple scheduling by value; otherwise random and sequential.
    purge_every
        Punctuations after which MJoin purges.
    """

    mjoin: bool
    ordered: bool
    scheduled: bool = False
    purge_every: int = 1


def make_streams(settings, *, ordered):
    """Return the numbers of the news, those of the accesses, and which punctuation follows how many accesses."""
    rng = np.random.default_rng(settings.seed)
    reads, punctuations = [], []
    for newest in range(settings.news + WATCHED - 1):
        watched = np.arange(max(0, newest - WATCHED + 1), min(newest + 1, settings.news))
        reads += rng.choice(watched, settings.reads_per_news).tolist()
        if newest >= WATCHED - 1:
            punctuations.append((len(reads), newest - WATCHED + 1))
    news = np.arange(settings.news)
    return (news if ordered else rng.permutation(news)), np.array(reads), punctuations


@dataclass(frozen=True)
class Counts:
    """What a join has done so far, and how many tuples of each input it holds in its state and in its pool."""

    results: int
    passed: int
    scanned: int
    punctuations: int
    state: tuple
    waiting: tuple

    @classmethod
    def of(cls, join):
        """Return the counts of a join."""
        algorithm, stats = join.algorithm, join.stats
        if not isinstance(join, PunctuatedJoin):
            return cls(stats.rows_out, 0, 0, 0, tuple(algorithm.counts.sum(axis=1).tolist()), (0, 0))
        pool = algorithm.waiting
        return cls(
            stats.rows_out, stats.rows_passed, stats.rows_scanned, stats.punctuations_in,
            tuple(algorithm.state.counts.sum(axis=1).tolist()),
            (0, 0) if pool is None else (pool.waiting(0), pool.waiting(1)),
        )  # fmt: skip

    @property
    def held(self):
        """Tuples that the join holds."""
        return sum(self.state) + sum(self.waiting)


def work(before, after, pushed, *, metadata):
    """Return the operations of a call, from the counts before and after it and the tuples that were pushed.

    These are tuples taken, tuples kept, pairs of a tuple and one of the state that it probes, results, tests against
    the punctuated range, and punctuations.
    """
    taken = [pushed[side] + before.waiting[side] - after.waiting[side] for side in (0, 1)]
    kept = sum(taken) - (after.passed - before.passed)
    probed = taken[0] * before.state[1] + taken[1] * before.state[0]
    tests = sum(taken) + after.scanned - before.scanned if metadata else 0
    return (
        sum(taken), kept, probed, after.results - before.results, tests, after.punctuations - before.punctuations
    )  # fmt: skip


def make_join(run, settings):
    """Return a new operator."""
    if not run.mjoin:
        return XJoin(SCHEMAS, "sno", memory="64MiB")
    quota = dict(zip(SCHEMAS, settings.quotas, strict=True))
    scheduling = Scheduling(quota, ("news",), "value") if run.scheduled else None
    return PunctuatedJoin(
        SCHEMAS, "sno", memory="64MiB", one="news", purge_every=run.purge_every, scheduling=scheduling
    )


def retrievals(run, settings, lengths):
    """Yield (input, tuples): from which of two complete streams the next tuples come."""
    rng = np.random.default_rng(settings.seed)
    if run.scheduled:
        rounds = [np.arange(length) // quota for length, quota in zip(lengths, settings.quotas, strict=True)]
        sides = np.repeat([0, 1], lengths)[np.argsort(np.concatenate(rounds), kind="stable")]
    elif settings.even:
        sides = tossed(lengths, rng)
    else:
        sides = rng.permutation(np.repeat([0, 1], lengths))
    ends = np.append(np.flatnonzero(np.diff(sides)) + 1, len(sides))
    for side, count in zip(sides[ends - 1].tolist(), np.diff(ends, prepend=0).tolist(), strict=True):
        yield from ((side, min(MOST_TOGETHER, count - done)) for done in range(0, count, MOST_TOGETHER))


def tossed(lengths, rng):
    """Return inputs in random order, each of two as often as the other until one is exhausted."""
    sides = rng.integers(0, 2, 4 * max(lengths))
    numbers = np.where(sides == 0, np.cumsum(sides == 0), np.cumsum(sides == 1))
    drawn = sides[numbers <= np.array(lengths)[sides]]
    return np.concatenate([drawn, np.repeat([0, 1], np.array(lengths) - np.bincount(drawn, minlength=2))])


@dataclass(frozen=True)
class Played:
    """A run: after each call the results so far, the tuples that the operator holds, and the work of the call."""

    results: np.ndarray
    held: np.ndarray
    work: np.ndarray

    def at(self, outputs, units):
        """Return time and tuples held when a number of results was reached for the first time."""
        index = np.minimum(np.searchsorted(self.results, outputs), len(self.results) - 1)
        return units.seconds(self.work)[index], self.held[index]

    @property
    def tests_and_inserts(self):
        """Tests of tuples against the punctuated range, and tuples that were kept, in the whole run."""
        return int(self.work[:, 4].sum()), int(self.work[:, 1].sum())


@functools.cache
def play(run, settings):
    """Run a contestant."""
    news, reads, punctuations = make_streams(settings, ordered=run.ordered)
    with make_join(run, settings) as join:
        player = _Player(join, (news, reads))
        waiting = deque(punctuations if run.mjoin else [])
        for side, count in retrievals(run, settings, [len(news), len(reads)]):
            stop = player.done[side] + count
            while side == 1 and waiting and waiting[0][0] <= stop:
                at, number = waiting.popleft()
                player.push(side, at - player.done[side])
                player.step(functools.partial(join.punctuate, "reads", Pattern({"sno": OneOf(number)}), at=0.0))
            player.push(side, stop - player.done[side])
        player.step(join.finish)
        assert join.stats.rows_out == len(reads), (run, join.stats.rows_out)
    return player.played


class _Player:
    """Calls of a join, and what they did."""

    def __init__(self, join, streams):
        self._join, self._streams = join, streams
        self._before, self.done, self._rows = Counts.of(join), [0, 0], []

    @property
    def played(self):
        """The run so far."""
        results, held, done = zip(*self._rows, strict=True)
        return Played(np.array(results), np.array(held), np.array(done, dtype=np.float64))

    def push(self, side, count):
        """Push the next tuples of an input."""
        keys = pa.array(self._streams[side][self.done[side] : self.done[side] + count])
        name, pushed = list(SCHEMAS)[side], [0, 0]
        pushed[side] = count
        self.done[side] += count
        tuples = pa.RecordBatch.from_arrays([keys, keys], schema=SCHEMAS[name])
        self.step(functools.partial(self._join.push, tuples, side=name, at=0.0), pushed)

    def step(self, call, pushed=(0, 0)):
        """Do a call, and note what it did and where the join is."""
        call().drain()
        before, after = self._before, Counts.of(self._join)
        self._before = after
        done = work(before, after, pushed, metadata=isinstance(self._join, PunctuatedJoin))
        self._rows.append((after.results, after.held, done))


def crossover(slow_first, fast_first, outputs, units):
    """Return the results from which on the first run is faster than the second for good; None if it never is."""
    faster = slow_first.at(outputs, units)[0] < fast_first.at(outputs, units)[0]
    if not faster[-1]:
        return None
    last = np.flatnonzero(~faster)
    return int(outputs[last[-1] + 1]) if len(last) else 0


def _settings(scale, **options):
    return Settings(news=scale.of(Settings.news), **options)


def _outputs(settings, places):
    total = settings.reads_per_news * (settings.news + WATCHED - 1)
    return np.linspace(total / places, total, places).astype(int)


def _series(runs, settings):
    """Return rows of some runs, told at a few numbers of results."""
    outputs, rows = _outputs(settings, PLACES), []
    for line, run in runs.items():
        played = play(run, settings)
        tests, inserts = played.tests_and_inserts
        for results, seconds, held in zip(outputs, *played.at(outputs, Units()), strict=True):
            row = {"line": line, "results": int(results), "ms": round(1e3 * seconds, 1), "tuples": int(held)}
            rows.append(row | {"tests": tests, "inserts": inserts})
    return rows


BEST, USUAL = "priority and value", "random and sequential"
XJOIN, MJOIN = "XJoin", "MJoin"
AT_ONCE, BATCH = "at once", 100


def _in_order(contestant, order):
    return f"{contestant}, {order} arrivals"


def _best(order, every=BATCH):
    return Run(mjoin=True, ordered=ORDERS[order], scheduled=True, purge_every=every)


def scheduling(scale):
    """Return the time of MJoin with two kinds of scheduling."""
    runs = {
        _in_order(name, order): Run(mjoin=True, ordered=ORDERS[order], scheduled=name == BEST)
        for order in ORDERS
        for name in (BEST, USUAL)
    }
    return _series(runs, _settings(scale))


def against_xjoin(scale):
    """Return the time of MJoin, and of XJoin, and the tuples that they hold."""
    runs = {}
    for order, ordered in ORDERS.items():
        runs[_in_order(MJOIN, order)] = _best(order)
        runs[_in_order(XJOIN, order)] = Run(mjoin=False, ordered=ordered)
    return _series(runs, _settings(scale))


def purging(scale):
    """Return the time of MJoin that purges at once, and that purges in batches."""
    return _series({AT_ONCE: _best("random", 1), f"every {BATCH}": _best("random")}, _settings(scale))


def quotas(scale):
    """Return how many times as fast priority and value scheduling is, by what a test of the purge costs."""
    rows = []
    for quota in QUOTAS:
        settings = _settings(scale, quota=quota)
        for order, ordered in ORDERS.items():
            best, usual = (
                play(Run(mjoin=True, ordered=ordered, scheduled=scheduled), settings) for scheduled in (True, False)
            )
            for test in TESTS:
                last, units = _outputs(settings, 1), Units(test=test)
                ratio = usual.at(last, units)[0][0] / best.at(last, units)[0][0]
                line = f"quota {quota}, {order} arrivals"
                rows.append({"line": line, "test": test, "ratio": round(ratio, 3)})
    return rows


def crossovers(scale):
    """Return where MJoin overtakes XJoin, by buckets and retrieval."""
    rows = []
    for even in (False, True):
        settings = _settings(scale, even=even)
        outputs = _outputs(settings, FINE)
        for order, ordered in ORDERS.items():
            pair = play(_best(order), settings), play(Run(mjoin=False, ordered=ordered), settings)
            line = f"{'even' if even else 'proportional'} retrieval, {order} arrivals"
            rows += [
                {"line": line, "buckets": at, "results": crossover(*pair, outputs, Units(buckets=at))}
                for at in BUCKETS
            ]  # fmt: skip
    return rows


def _faster(rows, one, other):
    return [b / a for a, b in zip(rows.values(one), rows.values(other), strict=True)]


def _by_scheduling(order):
    def facts(rows):
        lines = [_in_order(name, order) for name in (BEST, USUAL)]
        ratios = _faster(rows, *lines)
        tests, inserts = ([rows.values(line, column)[-1] for line in lines] for column in ("tests", "inserts"))
        return {
            "ratios": ratios, "told": listed(ratios, ".2f"), "tests": tests[0] - tests[1],
            "inserts": inserts[0] - inserts[1],
        }  # fmt: skip

    return Claim(
        f"Priority and value scheduling always outperform random and sequential scheduling ({order} arrivals).",
        facts,
        lambda f: min(f["ratios"]) > 1,
        "{told} times as fast; {tests:+,} tests against the punctuated range, {inserts:+,} tuples kept",
        partly=lambda f: f["ratios"][-1] > 1,
    )


def _overtakes(order):
    def facts(rows):
        ratios = _faster(rows, _in_order(MJOIN, order), _in_order(XJOIN, order))
        places = rows.values(_in_order(MJOIN, order), "results")
        slower = [place for place, ratio in zip(places, ratios, strict=True) if ratio < 1]
        found = slower[-1] if slower else 0
        return {"found": found, "ratios": ratios, "told": listed(ratios, ".2f"), "last": ratios[-1]}

    return Claim(
        f"MJoin takes more time than XJoin at first, and less from about {CROSSOVER:,} results on ({order} arrivals).",
        facts,
        lambda f: f["last"] > 1 and f["ratios"][0] < 1 and CROSSOVER / 2 <= f["found"] <= 2 * CROSSOVER,
        "{told} times as fast; slower up to {found:,} results",
        partly=lambda f: f["last"] > 1,
    )


def _holds_less(order):
    def facts(rows):
        mine, others = (rows.values(_in_order(name, order)) for name in (MJOIN, XJOIN))
        return {
            "mine": mine, "others": others, "told": listed(mine), "others_told": listed(others),
            "saved": [b - a for a, b in zip(mine, others, strict=True)],
        }  # fmt: skip

    return Claim(
        f"The more data streams in, the more memory MJoin saves against XJoin ({order} arrivals).",
        facts,
        lambda f: f["saved"][-1] > f["saved"][0] > 0 and 2 * max(f["mine"]) < f["others"][-1],
        "it holds {told} tuples, XJoin {others_told}",
        partly=lambda f: f["saved"][-1] > f["saved"][0],
    )


def _by_batch(rows):
    ratios = _faster(rows, f"every {BATCH}", AT_ONCE)
    return {"ratios": ratios, "told": listed(ratios, ".2f")}


def _all_ratios(rows):
    ratios = [row["ratio"] for row in rows.rows]
    return {"least": min(ratios), "most": max(ratios)}


def _all_crossovers(rows):
    found = [row["results"] for row in rows.rows]
    some = [one for one in found if one is not None]
    return {
        "near": sum(CROSSOVER / 2 <= one <= 2 * CROSSOVER for one in some), "count": len(found),
        "least": min(some, default=0), "most": max(some, default=0), "never": len(found) - len(some),
    }  # fmt: skip


QUOTAS, TESTS = (1, 10), (0.1, 0.5, 1.0)
TIME = Axes("results", "ms", "results", "milliseconds")
FIGURES = (
    Figure("scheduling", "MJoin with punctuations, figure 8: scheduling", TIME, scheduling,
           tuple(map(_by_scheduling, ORDERS)), "MJoin purges after each punctuation."),
    Figure("scheduling_costs", "Scheduling with other quotas and costs of a purge",
           Axes("test", "ratio", "microseconds to test a tuple of the state", "times as fast"), quotas,
           (Claim("(Ours) Priority and value scheduling are faster with some of these costs and slower with others.",
                  _all_ratios, lambda f: f["least"] < 1 < f["most"], "{least:.2f} to {most:.2f} times as fast"),),
           "With priority, more news are in the state, and each purge tests them all; in return, accesses find their "
           "news and are not inserted. What weighs more depends on the quota of the news and on the costs, and the "
           "paper states neither."),
    Figure("xjoin", "MJoin with punctuations, figure 9: time, compared with XJoin", TIME, against_xjoin,
           tuple(map(_overtakes, ORDERS)),
           f"MJoin purges after {BATCH} punctuations, with priority and value scheduling."),
    Figure("crossover", "Where MJoin overtakes XJoin, with other buckets and retrieval",
           Axes("buckets", "results", "buckets of a hash table", "results"), crossovers,
           (Claim(f"(Ours) Where MJoin overtakes XJoin depends on the costs: about {CROSSOVER:,} results are one case "
                  "of several.", _all_crossovers, lambda f: 0 < f["near"] < f["count"],
                  "{least:,} to {most:,} results, in {near} of {count} cases about as many as in the paper, in {never} "
                  "cases never"),),
           "The number of results from which on MJoin is faster for good; 0 if it always is."),
    Figure("state", "MJoin with punctuations, figure 10: memory, compared with XJoin",
           Axes("results", "tuples", "results", "tuples held"), against_xjoin, tuple(map(_holds_less, ORDERS))),
    Figure("purging", "MJoin with punctuations, figure 11: purging at once and in batches", TIME, purging,
           (Claim(f"Purging after {BATCH} punctuations takes less time than after each (random arrivals).", _by_batch,
                  lambda f: min(f["ratios"]) > 1, "{told} times as fast", partly=lambda f: f["ratios"][-1] > 1),)),
)  # fmt: skip
