"""Figures 11 to 15: the policy of the cache, the thresholds, the fill factor, the longest read."""

from dataclasses import dataclass, replace
from itertools import accumulate

from benchmarks.experiments._claims import Claim, grows, listed, ratios
from benchmarks.experiments._rates import arrive, greatest
from benchmarks.experiments._relations import Relation, moving_keys, stream_batches, zipf_keys
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import PAPER, measure
from benchmarks.experiments._world import World
from headrace.joins import SSIJ

__all__ = ["FIGURES"]

INPUT_THRESHOLDS = (500, 2_500, 10_000, 50_000, 250_000, 1_000_000, 2_000_000)
STREAM_THRESHOLDS = (4_000, 20_000, 100_000, 200_000, 400_000, 800_000, 1_600_000)
FILLS = (0.5, 0.65, 0.8, 1.0)
SCANS = (5, 25, 50, 100, 200, 400, 2_000)
INTERVALS = 20
CLOCKED = 10_000_000  # tuples that arrive by the clock, after as many as warm the cache
WARM = 1_000_000
LRU, FREE, PUSHED = "LRU", "phases that cost nothing", "pushed"
MORE, TIMES_MORE = "twice the memory", 2
FLAT = 3  # thresholds within 20 % of the best


def _keys(settings, relation, skew=1.0):
    return zipf_keys(relation.domain, skew, 2 * settings.phases * relation.scaled(1_000_000))


def fig11(world, settings):
    """The paper's policy beside LRU."""
    relation, rows = settings.usual(), []
    keys = _keys(settings, relation)
    for line, policy in ((PAPER, "utility"), (LRU, "lru")):
        for share in settings.shares:
            options = relation.as_in_the_paper(share) | {"cache_policy": policy}
            served = measure(world, settings, relation, share, keys, **options)
            rows.append({"line": line, "memory_percent": 100 * share, **served})
    return rows


def _by_policy(rows):
    gains = ratios(rows, PAPER, LRU)
    return {"gains": gains, "told": listed(gains, ".2f"), "scatter": rows.scatter}


def fig12(world, settings):
    """Throughput over the input threshold, for a stream with temporal locality."""
    relation, share, rows = settings.dense(4), settings.burst, []
    keys = moving_keys(relation.domain, INTERVALS, INTERVALS * relation.scaled(2_000_000))
    lines = {PAPER: world.costs}
    if world.simulated:
        lines[FREE] = replace(world.costs, phase=0.0)
    for line, costs in lines.items():
        for threshold in INPUT_THRESHOLDS:
            piece = relation.scaled(threshold)
            options = relation.as_in_the_paper(share) | {"input_threshold": piece, "costs": costs}
            served = measure(world, settings, relation, share, keys, piece=piece, **options)
            rows.append({"line": line, "input_threshold": threshold, **served})
    return rows


def _by_input(rows):
    rates, free = rows.values(PAPER), rows.values(FREE)
    best = max(rates)
    return {
        "first": rates[0], "best": best, "last": rates[-1], "gain": best / rates[0], "scatter": rows.scatter,
        "at": next(row["input_threshold"] for row in rows.of(PAPER) if row["tuples_per_second"] == best),
        "up_to": rates[-1] <= 1.1 * rows.scatter * rates[-3], "free": max(free) / free[0] if free else None,
    }  # fmt: skip


def fig13(world, settings):
    """Throughput over the stream threshold, in little memory, with arrivals by the clock and pushed."""
    relation, rows = settings.usual(), []
    keys = _keys(settings, relation)
    clocked = zipf_keys(relation.domain, 1.0, relation.scaled(WARM) + relation.scaled(CLOCKED))
    for threshold in STREAM_THRESHOLDS:
        stream = relation.scaled(threshold)
        options = relation.as_in_the_paper(settings.tight) | {"stream_threshold": stream}
        options["input_threshold"] = min(options["input_threshold"], stream)
        batches = stream_batches(clocked, max(1, options["input_threshold"] // 5), relation.tuple_nbytes)
        for line, share in ((PAPER, settings.tight), (MORE, TIMES_MORE * settings.tight)):
            served = measure(world, settings, relation, share, keys, piece=options["input_threshold"], **options)
            clock = _Clocked(world, relation, share, options, batches)
            rate = greatest(clock.fits, served["tuples_per_second"], settings.steps)
            a_phase = round(clock.at(rate).tuples_a_phase / relation.factor) if rate else 0
            rows.append({"line": line, "stream_threshold": threshold, "tuples_per_second": round(rate),
                         "tuples_a_phase": a_phase})  # fmt: skip
            if line == PAPER:
                rows.append({"line": PUSHED, "stream_threshold": threshold, **served})
    return sorted(rows, key=lambda row: (PAPER, MORE, PUSHED).index(row["line"]))


@dataclass(frozen=True)
class _Clocked:
    """Operators with a warm cache whose tuples arrive by the clock."""

    world: World
    relation: Relation
    share: float
    options: dict
    batches: list

    def at(self, rate):
        """Push some tuples, let the others arrive at a rate, and return what happened."""
        run = self.world.start(SSIJ, self.relation, self.share, **self.options)
        ends = list(accumulate(map(len, self.batches)))
        first = next(at for at, end in enumerate(ends, 1) if end >= self.relation.scaled(WARM))
        for batch in self.batches[:first]:
            run.operator.push(batch).drain()
        return arrive(run, self.batches[first:], [(end - ends[first - 1]) / rate for end in ends[first:]])

    def fits(self, rate):
        """Return whether the memory holds the tuples in all trials."""
        return all(self.at(rate).fits for _ in range(self.world.trials))


def _flat(rates):
    return sum(rate >= 0.8 * max(rates) for rate in rates)


def _by_threshold(rows):
    rates, pushed, more, scatter = rows.values(PAPER), rows.values(PUSHED), rows.values(MORE), rows.scatter
    best, (smallest, *_) = max(rates), rows.of(PAPER)
    return {
        "first": rates[0], "best": best, "last": rates[-1], "flat": _flat(rates),
        "count": len(rates), "scatter": scatter, "largest": STREAM_THRESHOLDS[-1], "told": listed(rates),
        "pushed_last": pushed[-1], "pushed_best": max(pushed), "pushed_first": pushed[0],
        "at": next(row["stream_threshold"] for row in rows.of(PAPER) if row["tuples_per_second"] == best),
        "smallest": STREAM_THRESHOLDS[0], "a_phase": smallest["tuples_a_phase"],
        "more_flat": _flat(more), "more_told": listed(more),
    }  # fmt: skip


def _filled(fill):
    return f"fill factor {fill:g}"


def fig14(world, settings):
    """Throughput over the memory, for fill factors. The same rows take more pages if these are less full."""
    keys, rows = None, []
    for fill in FILLS:
        relation = settings.dense(16, fill=fill, name="filled")
        keys = _keys(settings, relation) if keys is None else keys
        for share in (settings.shares[0], settings.shares[-1]):
            same = share * fill / 0.8  # of a file that is larger by the inverse: the same memory for all
            served = measure(world, settings, relation, same, keys, **relation.as_in_the_paper(share))
            rows.append({"line": _filled(fill), "memory_percent": 100 * share, **served})
    return rows


def _by_fill(rows):
    columns = list(zip(*(rows.values(_filled(fill)) for fill in FILLS), strict=True))
    most = columns[-1]
    return {
        "columns": columns, "first": most[0], "last": most[-1], "gain": most[-1] / most[0], "scatter": rows.scatter,
        "told": "; ".join(listed(column) for column in columns),
    }  # fmt: skip


def fig15(world, settings):
    """Throughput over the longest read, in little memory."""
    relation, share, rows = settings.usual(), settings.tight, []
    keys = _keys(settings, relation)
    for scan in SCANS:
        options = relation.as_in_the_paper(share) | {"max_scan": relation.paper_pages(scan)}
        served = measure(world, settings, relation, share, keys, **options)
        run = world.start(SSIJ, relation, share, **options)
        longest = round(run.operator.store.longest_read * relation.weight)
        run.close()
        rows.append({"line": PAPER, "max_scan": scan, "longest_read": longest, **served})
    return rows


def _by_scan(rows):
    rates, hits = rows.values(PAPER), rows.values(PAPER, "hit_ratio")
    return {
        "first": rates[0], "best": max(rates), "last": rates[-1], "gain": max(rates) / rates[0],
        "scatter": rows.scatter, "shortest": SCANS[0], "longest": SCANS[-1], "table": SCANS[4],
        "hits": max(hits[4:]) - min(hits[4:]), "hit_spread": 100 * (max(hits[4:]) - min(hits[4:])),
        "longest_read": rows.values(PAPER, "longest_read")[-1],
    }  # fmt: skip


POLICY_CLAIMS = (
    Claim(
        "LRU is inferior: it takes blocks that the join phase has just read for more recent than the cached ones.",
        _by_policy,
        lambda f: min(f["gains"]) * f["scatter"] >= 0.99 and max(f["gains"]) > 1.1 * f["scatter"],
        "the utility counters give {told} times LRU's rate, from the least memory to the most",
        partly=lambda f: max(f["gains"]) > 1.1 * f["scatter"],
    ),
)
INPUT_CLAIMS = (
    Claim(
        "More tuples in an online phase significantly improve the performance, up to a point.",
        _by_input,
        lambda f: f["gain"] > 1.2 * f["scatter"] and f["up_to"],
        "{first:,} tuples/s with the smallest threshold, {best:,} at {at:,}, {last:,} with the largest",
        partly=lambda f: f["gain"] > 1.2 * f["scatter"],
        otherwise={"holds in part": "+; it is still growing there"},
    ),
    Claim(
        "(Ours) On the simulated disk the gain follows from the assumed time of a phase alone.",
        _by_input,
        lambda f: f["free"] <= 1.1,
        "",
        needs=FREE,
        otherwise={
            "holds": "if phases cost nothing, the best threshold has {free:.2f} times the rate of the smallest: the "
            "figure confirms the assumption, not the paper",
            "does not hold": "if phases cost nothing, the best threshold has {free:.2f} times the rate of the smallest",
        },
    ),
)
ARRIVALS_REASON = Claim(
    "(Ours) What arrives during a join phase shares the next one, so at the greatest rate the arrivals, not a small "
    "threshold, set how many tuples share it. Pushed, a larger threshold improves the performance.",
    _by_threshold,
    lambda f: f["a_phase"] >= 10 * f["smallest"] and f["pushed_best"] > 1.5 * f["scatter"] * f["pushed_first"],
    "with a threshold of {smallest:,} a phase completes {a_phase:,} tuples at {first:,} tuples/s; pushed, "
    "{pushed_first:,} tuples/s with this threshold, {pushed_best:,} with the best",
    partly=lambda f: f["a_phase"] >= 10 * f["smallest"],
)
ROOM_REASON = Claim(
    "(Ours) At this scale the index and a read take so much of the least memory that few thresholds fit beside what "
    "arrives during a join phase. In twice the memory the range is large.",
    _by_threshold,
    lambda f: f["more_flat"] >= FLAT and f["more_flat"] > f["flat"],
    "in twice the memory {more_flat} of {count} thresholds are within 20 % of the best ({more_told})",
)
THRESHOLD_CLAIMS = (
    Claim(
        "A larger stream threshold improves the performance.",
        _by_threshold,
        lambda f: f["best"] > 1.5 * f["scatter"] * f["first"],
        "{first:,} tuples/s with the smallest, {best:,} at {at:,}",
        reason=ARRIVALS_REASON,
    ),
    Claim(
        "For a large range of thresholds it remains almost constant.",
        _by_threshold,
        lambda f: f["flat"] >= FLAT,
        "{flat} of {count} thresholds are within 20 % of the best ({told})",
        reason=ROOM_REASON,
    ),
    Claim(
        "A threshold that takes a significant portion of the memory affects the performance adversely.",
        _by_threshold,
        lambda f: f["last"] * f["scatter"] < 0.95 * f["best"],
        "{last:,} tuples/s at {largest:,}, {best:,} at the best; pushed, {pushed_last:,} and {pushed_best:,}",
    ),
    ARRIVALS_REASON,
    ROOM_REASON,
)
FILL_CLAIMS = (
    Claim(
        "A smaller fill factor lowers the throughput: fewer tuples fit in a block, more blocks are read.",
        _by_fill,
        lambda f: all(grows(column, 1.03 * f["scatter"]) for column in f["columns"]),
        "tuples/s at fill factors of 0.5, 0.65, 0.8, 1, with the least memory and the most: {told}",
        partly=lambda f: any(grows(column, 1.03 * f["scatter"]) for column in f["columns"]),
    ),
)
EVICTION_REASON = Claim(
    "(Ours) No read evicts cached pages here: pages are read into a buffer of its own size, which limits a read.",
    _by_scan,
    lambda f: f["hits"] <= 0.01 and f["longest_read"] < f["longest"],
    "in the least memory a read has at most {longest_read:,} pages; hit ratios from {table} pages up differ by "
    "{hit_spread:.1f} points",
)
SCAN_CLAIMS = (
    Claim(
        "Short reads perform poorly.",
        _by_scan,
        lambda f: f["gain"] > 1.5 * f["scatter"],
        "{first:,} tuples/s with reads of {shortest} pages, {best:,} at the best",
    ),
    Claim(
        "Very long reads may evict many useful pages.",
        _by_scan,
        lambda f: f["last"] * f["scatter"] < 0.95 * f["best"] and f["hits"] > 0.01,
        "{last:,} tuples/s with reads of {longest:,} pages, {best:,} at the best",
        reason=EVICTION_REASON,
    ),
    EVICTION_REASON,
)

_MEMORY = Axes("memory_percent", "tuples_per_second", "memory, % of the relation")
FIGURES = (
    Figure("fig11", "Figure 11: cache policy, skew 1", _MEMORY, fig11, POLICY_CLAIMS),
    Figure("fig12", "Figure 12: input threshold",
           Axes("input_threshold", "tuples_per_second", "input threshold, tuples (at the paper's size)", xlog=True),
           fig12, INPUT_CLAIMS,
           "The assumed 10 ms for each phase, at the paper's size, are what larger phases save on the simulated disk; "
           "hence a second line, in which phases cost nothing."),
    Figure("fig13", "Figure 13: stream threshold, least memory",
           Axes("stream_threshold", "tuples_per_second", "stream threshold, tuples (at the paper's size)", xlog=True),
           fig13, THRESHOLD_CLAIMS,
           "Tuples arrive by the clock, with a warm cache: the rate is the greatest at which they never overflow the "
           'memory. "Pushed" is the rate of completion if the next batch comes when the one before is done.'),
    Figure("fig14", "Figure 14: fill factor, skew 1",
           Axes("memory_percent", "tuples_per_second", "memory, % of the relation at fill factor 0.8"), fig14,
           FILL_CLAIMS, "The memory in bytes is the same for all fill factors."),
    Figure("fig15", "Figure 15: longest read, least memory",
           Axes("max_scan", "tuples_per_second", "longest read, pages (of the paper)", xlog=True), fig15, SCAN_CLAIMS),
)  # fmt: skip
