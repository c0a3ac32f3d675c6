"""Figures 8 to 11 of the metadata-aware MJoin: scheduling, and MJoin against XJoin, on a simulated clock.

Input (section 6.1): news, each with a serial number, and records of accesses to them. The ten latest news are watched
at any time; accesses choose among them at random. When a news item leaves the ten, a punctuation says that no access to
it follows. In the *ordered* pattern news arrive by number, in the *random* one in a random order. All of both streams
is there from the beginning ("CPU-limited"); the stream scheduling says from which the next tuple comes. The paper does
not say in which proportion tuples are retrieved. Here both streams end together, since an item and its accesses belong
together in time: random scheduling picks one of all tuples that are left, and the quota of a stream is proportional to
its length.

Clock: the operators really run, and the clock adds up what they do. A probe costs one comparison for each tuple in its
bucket, of a fixed number of buckets, as in the paper's hash tables: time grows with the state. A purge costs one test
for each tuple in the state. The unit costs are those of `Settings`, guesses in microseconds of the paper's machine,
which publishes none. So directions and shapes are evidence, and *where* MJoin overtakes XJoin depends on the units; the
runs with half and twice the buckets show how much.
"""

import csv
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from benchmarks.streams._claims import Verdict
from headrace.joins.streams import XJoin
from headrace.joins.streams.punctuated import OneOf, Pattern, PunctuatedJoin, Scheduling

TITLE = "MJoin with punctuations, compared with XJoin: scheduling, purging, memory (figures 8 to 11)"
SCHEMAS = {
    "news": pa.schema([("sno", pa.int64()), ("keyword", pa.int64())]),
    "reads": pa.schema([("sno", pa.int64()), ("ip", pa.int64())]),
}
WATCHED = 10


@dataclass(frozen=True)
class Settings:
    """Sizes, and the costs of operations in microseconds."""

    news: int = 3000
    reads_per_news: int = 10
    quota: int = 10  # retrieval quota of the news; that of the accesses is larger as their stream is
    batch: int = 100  # punctuations after which a batch purge takes place
    buckets: int = 500
    take: float = 2.0  # retrieve and hash a tuple
    compare: float = 1.0  # one tuple of a bucket
    insert: float = 1.0
    output: float = 1.0
    punctuation: float = 10.0  # take a punctuation and propagate it
    test: float = 1.0  # a tuple against the punctuated range, while it arrives or is purged
    crossover: int = 7500  # results at which the paper's MJoin overtakes XJoin
    seed: int = 2003


QUICK = Settings(news=300)


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

    @property
    def name(self):
        order = "ordered" if self.ordered else "random"
        if not self.mjoin:
            return f"XJoin, {order}"
        scheduling = "priority and value" if self.scheduled else "random and sequential"
        return f"MJoin, {order}, {scheduling}, purge every {self.purge_every}"


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


class Clock:
    """What the operations of a join cost, and how many tuples it holds.

    Parameters
    ----------
    settings
        Unit costs.
    """

    def __init__(self, settings):
        self.settings, self.now = settings, 0.0

    def charge(self, join, before, state, taken):
        """Add the cost of a call, from the statistics before it and now, and the state before it."""
        units, after = self.settings, join.stats
        kept = sum(taken) - (after.rows_passed - before.rows_passed if isinstance(join, PunctuatedJoin) else 0)
        probed = taken[0] * state[1] + taken[1] * state[0]
        self.now += units.take * sum(taken) + units.insert * kept + units.compare * probed / units.buckets
        self.now += units.output * (after.rows_out - before.rows_out)
        if isinstance(join, PunctuatedJoin):
            self.now += units.test * (sum(taken) + after.rows_scanned - before.rows_scanned)
            self.now += units.punctuation * (after.punctuations_in - before.punctuations_in)


def sizes(join):
    """Return the tuples that a join holds of each input in its state, and how many wait."""
    algorithm = join.algorithm
    if not isinstance(join, PunctuatedJoin):
        return algorithm.counts.sum(axis=1).tolist(), [0, 0]
    pool = algorithm.waiting
    return algorithm.state.counts.sum(axis=1).tolist(), [0, 0] if pool is None else [pool.waiting(0), pool.waiting(1)]


def make_join(run, settings):
    if not run.mjoin:
        return XJoin(SCHEMAS, "sno", memory="64MiB")
    quota = {"news": settings.quota, "reads": settings.quota * settings.reads_per_news}
    scheduling = Scheduling(quota, ("news",), "value") if run.scheduled else None
    return PunctuatedJoin(
        SCHEMAS, "sno", memory="64MiB", one="news", purge_every=run.purge_every, scheduling=scheduling
    )


def retrievals(run, settings, lengths):
    """Yield (input, tuples): from which of two streams that are all there the next tuples come."""
    sides = np.repeat([0, 1], lengths)
    if run.scheduled:
        quota = settings.quota * np.array([1, settings.reads_per_news])
        sides = sides[
            np.argsort(np.concatenate([np.arange(n) // quota[at] for at, n in enumerate(lengths)]), kind="stable")
        ]
    else:
        np.random.default_rng(settings.seed).shuffle(sides)
    ends = np.append(np.flatnonzero(np.diff(sides)) + 1, len(sides))
    yield from zip(sides[ends - 1].tolist(), np.diff(ends, prepend=0).tolist(), strict=True)


def play(run, settings):
    """Return rows of (results, time, tuples in the state, purges) of a run."""
    news, reads, punctuations = make_streams(settings, ordered=run.ordered)
    streams, names, waiting = (news, reads), list(SCHEMAS), deque(punctuations if run.mjoin else [])
    clock, done, rows = Clock(settings), [0, 0], []
    with make_join(run, settings) as join:

        def step(call, pushed):
            before, (state, pooled) = join.stats, sizes(join)
            call().drain()
            held, now_pooled = sizes(join)
            taken = [pushed[side] + pooled[side] - now_pooled[side] for side in (0, 1)]
            clock.charge(join, before, state, taken)
            rows.append((join.stats.rows_out, clock.now, sum(held) + sum(now_pooled)))

        def push(side, count):
            keys = streams[side][done[side] : done[side] + count]
            batch = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(keys)], schema=SCHEMAS[names[side]])
            pushed = [0, 0]
            pushed[side] = count
            done[side] += count
            step(lambda: join.push(batch, side=names[side], at=0.0), pushed)

        for side, count in retrievals(run, settings, [len(news), len(reads)]):
            stop = done[side] + count
            while side == 1 and waiting and waiting[0][0] <= stop:
                at, number = waiting.popleft()
                push(side, at - done[side])
                step(lambda number=number: join.punctuate("reads", Pattern({"sno": OneOf(number)}), at=0.0), [0, 0])
            push(side, stop - done[side])
        step(join.finish, [0, 0])
        assert join.stats.rows_out == len(reads), (run.name, join.stats.rows_out)
    return np.array(rows)


def at_outputs(rows, outputs):
    """Return time and state when a number of results was reached for the first time."""
    index = np.minimum(np.searchsorted(rows[:, 0], outputs), len(rows) - 1)
    return rows[index, 1], rows[index, 2]


def crossover(slow_first, fast_first, outputs):
    """Return the results from which on the first run is faster than the second for good; None if it never is."""
    faster = at_outputs(slow_first, outputs)[0] < at_outputs(fast_first, outputs)[0]
    if not faster[-1]:
        return None
    last = np.flatnonzero(~faster)
    return int(outputs[last[-1] + 1]) if len(last) else 0


def run(settings, folder):
    """Run all contestants, write their series, and return the verdicts."""
    both = (True, False)
    runs = [Run(mjoin=False, ordered=ordered) for ordered in both]
    runs += [Run(mjoin=True, ordered=ordered, scheduled=scheduled) for ordered in both for scheduled in both]
    runs += [Run(mjoin=True, ordered=ordered, scheduled=True, purge_every=settings.batch) for ordered in both]
    series = {one: play(one, settings) for one in runs}
    total = settings.reads_per_news * (settings.news + WATCHED - 1)
    outputs = np.linspace(total / 60, total, 60).astype(int)
    write(folder / "punctuated.csv", series, outputs)
    verdicts = [
        *scheduling_verdicts(series, outputs),
        *xjoin_verdicts(series, outputs, settings),
        *purging_verdicts(series, outputs, settings),
    ]
    for verdict in verdicts:
        print(f"  {verdict}")
    for factor in (0.5, 2.0):
        changed = replace(settings, buckets=int(settings.buckets * factor))
        pair = [
            Run(mjoin=True, ordered=False, scheduled=True, purge_every=settings.batch),
            Run(mjoin=False, ordered=False),
        ]
        found = crossover(*(play(one, changed) for one in pair), outputs)
        print(f"  with {changed.buckets} buckets MJoin overtakes XJoin at {found} results")
    return verdicts


def write(path, series, outputs):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["contestant", "results", "simulated_seconds", "tuples_in_state"])
        for one, rows in series.items():
            for count, now, state in zip(outputs, *at_outputs(rows, outputs), strict=True):
                writer.writerow([one.name, count, f"{now / 1e6:.6f}", int(state)])
    print(f"  series in {path}")


def scheduling_verdicts(series, outputs):
    """Figure 8: priority and value always outperform random and sequential."""
    for ordered in (True, False):
        best, other = (
            at_outputs(series[Run(mjoin=True, ordered=ordered, scheduled=scheduled)], outputs)[0]
            for scheduled in (True, False)
        )
        ratios = other / best
        order = "ordered" if ordered else "random"
        yield Verdict(
            f"figure 8, {order}: priority and value scheduling always outperform random and sequential",
            bool((ratios > 1).all()),
            f"{ratios.min():.2f} to {ratios.max():.2f} times as fast",
        )
        yield Verdict(
            f"figure 8, {order}: they take less time for all results",
            bool(ratios[-1] > 1),
            f"{ratios[-1]:.2f} times as fast",
        )


def xjoin_verdicts(series, outputs, settings):
    """Figures 9 and 10: MJoin overtakes XJoin, and holds less."""
    for ordered in (True, False):
        order = "ordered" if ordered else "random"
        mjoin = series[Run(mjoin=True, ordered=ordered, scheduled=True, purge_every=settings.batch)]
        xjoin = series[Run(mjoin=False, ordered=ordered)]
        found = crossover(mjoin, xjoin, outputs)
        (mine, kept), (others, held) = at_outputs(mjoin, outputs), at_outputs(xjoin, outputs)
        yield Verdict(
            f"figure 9, {order}: MJoin is slower at first and faster from about {settings.crossover:,} results on",
            found is not None and settings.crossover / 2 <= found <= 2 * settings.crossover,
            f"overtakes at {'no time' if found is None else f'{found:,} results'}; in the end "
            f"{others[-1] / mine[-1]:.2f} times as fast",
        )
        growing = held[-1] / max(kept[-1], 1)
        yield Verdict(
            f"figure 10, {order}: MJoin holds less the more data streams in",
            bool(kept[-1] < held[-1] / 2 and (held - kept)[-1] > (held - kept)[len(held) // 4]),
            f"{int(kept[-1]):,} tuples against {int(held[-1]):,} in the end, a factor of {growing:.0f}; at most "
            f"{int(kept.max()):,}",
        )


def purging_verdicts(series, outputs, settings):
    """Figure 11: batches of punctuations are better than purging at once."""
    once, batches = (
        at_outputs(series[Run(mjoin=True, ordered=False, scheduled=True, purge_every=every)], outputs)[0]
        for every in (1, settings.batch)
    )
    ratios = once / batches
    yield Verdict(
        f"figure 11, random: purging every {settings.batch} punctuations takes less time than at once",
        bool((ratios >= 1).all() and ratios[-1] > 1),
        f"{ratios.min():.2f} to {ratios.max():.2f} times as fast, {ratios[-1]:.2f} in the end",
    )
