"""Figures 11 to 15: the policy of the cache, the thresholds, the fill factor, the longest read."""

from itertools import pairwise

from benchmarks.experiments._relations import moving_keys, zipf_keys
from benchmarks.experiments._report import Axes, Check, Outcome
from benchmarks.experiments._settings import PAPER, measure

__all__ = ["fig11", "fig12", "fig13", "fig14", "fig15"]

INPUT_THRESHOLDS = (500, 2_500, 10_000, 50_000, 250_000, 1_000_000, 2_000_000)
STREAM_THRESHOLDS = (4_000, 20_000, 100_000, 200_000, 400_000, 800_000, 1_600_000)
FILLS = (0.5, 0.65, 0.8, 1.0)
SCANS = (5, 25, 50, 100, 200, 400, 2_000)
INTERVALS = 20


def _keys(settings, relation, skew=1.0):
    return zipf_keys(relation.rows, skew, 2 * settings.phases * relation.scaled(1_000_000))


def fig11(world, settings):
    """The paper's policy beside LRU."""
    relation, rows = settings.usual(), []
    keys = _keys(settings, relation)
    for line, policy in ((PAPER, "utility"), ("LRU", "lru")):
        for share in settings.shares:
            options = relation.as_in_the_paper(share) | {"cache_policy": policy}
            served = measure(world, settings, relation, share, keys, **options)
            rows.append({"line": line, "memory_percent": 100 * share, **served.row()})
    axes = Axes("memory_percent", "tuples_per_second", "memory, % of the relation")
    outcome = Outcome("fig11", "Figure 11: which page leaves, skew 1", axes, rows)
    gains = [ours / lru for ours, lru in zip(outcome.values(PAPER), outcome.values("LRU"), strict=True)]
    outcome.checks.append(
        Check(
            "LRU is inferior: it takes what the join phase has just read for the most useful",
            f"the utility counter gives {', '.join(f'{gain:.2f}' for gain in gains)} times LRU's rate",
            min(gains) >= 0.99 and max(gains) > 1.1,
        )
    )
    return outcome


def fig12(world, settings):
    """Throughput over the input threshold, for a stream with temporal locality."""
    relation, share, rows = settings.dense(4), max(0.10, settings.share if settings.least_memory else 0), []
    keys = moving_keys(relation.rows, INTERVALS, INTERVALS * relation.scaled(2_000_000))
    for threshold in INPUT_THRESHOLDS:
        options = relation.as_in_the_paper(share) | {"input_threshold": relation.scaled(threshold)}
        served = measure(world, settings, relation, share, keys, piece=relation.scaled(threshold), **options)
        rows.append({"line": PAPER, "input_threshold": threshold, **served.row()})
    axes = Axes("input_threshold", "tuples_per_second", "input threshold, tuples (at the paper's size)", xlog=True)
    outcome = Outcome("fig12", "Figure 12: input threshold", axes, rows)
    rates = outcome.values(PAPER)
    outcome.checks.append(
        Check(
            "more tuples in an online phase improve the throughput significantly, up to a point",
            f"{rates[0]:,} at {INPUT_THRESHOLDS[0]:,}, {max(rates):,} at the best, {rates[-1]:,} at "
            f"{INPUT_THRESHOLDS[-1]:,}",
            max(rates) > 1.2 * rates[0] and rates[-1] < 1.1 * rates[-3],
        )
    )
    return outcome


def fig13(world, settings):
    """Throughput over the stream threshold, in little memory."""
    relation, share, rows = settings.usual(), settings.tight, []
    keys = _keys(settings, relation)
    for threshold in STREAM_THRESHOLDS:
        stream = relation.scaled(threshold)
        options = relation.as_in_the_paper(share) | {"stream_threshold": stream}
        options["input_threshold"] = min(options["input_threshold"], stream)
        served = measure(world, settings, relation, share, keys, piece=options["input_threshold"], **options)
        rows.append({"line": PAPER, "stream_threshold": threshold, **served.row()})
    axes = Axes("stream_threshold", "tuples_per_second", "stream threshold, tuples (at the paper's size)", xlog=True)
    outcome = Outcome("fig13", f"Figure 13: stream threshold, memory {100 * share:g} %", axes, rows)
    rates = outcome.values(PAPER)
    best = max(rates)
    flat = sum(rate >= 0.8 * best for rate in rates)
    outcome.checks.extend([
        Check("a larger threshold improves the throughput", f"{rates[0]:,} to {best:,}", best > 2 * rates[0]),
        Check("for a large range it remains almost constant",
              f"{flat} of {len(rates)} thresholds are within 20 % of the best", flat >= 3),
        Check("when it takes a significant portion of the memory the throughput falls",
              f"{rates[-1]:,} at {STREAM_THRESHOLDS[-1]:,}", rates[-1] < 0.95 * best),
    ])  # fmt: skip
    return outcome


def fig14(world, settings):
    """Throughput over the memory, for fill factors."""
    keys, rows = None, []
    for fill in FILLS:
        # The same rows take more pages if these are less full; the memory is the same for all.
        relation = settings.dense(16, fill=fill, name="filled")
        keys = _keys(settings, relation) if keys is None else keys
        for share in (settings.shares[0], settings.shares[-1]):
            same = share * fill / 0.8
            served = measure(world, settings, relation, same, keys, **relation.as_in_the_paper(share))
            rows.append({"line": f"fill factor {fill:g}", "memory_percent": 100 * share, **served.row()})
    axes = Axes("memory_percent", "tuples_per_second", "memory, % of the relation at fill factor 0.8")
    outcome = Outcome("fig14", "Figure 14: fill factor, skew 1", axes, rows)
    at_most = [outcome.values(f"fill factor {fill:g}")[-1] for fill in FILLS]
    outcome.checks.append(
        Check(
            "a smaller fill factor lowers the throughput: fewer rows to a page, more pages to read",
            f"{at_most[0]:,} at 0.5 to {at_most[-1]:,} at 1, memory {rows[-1]['memory_percent']:g} %",
            at_most[-1] > 1.2 * at_most[0] and all(b >= 0.97 * a for a, b in pairwise(at_most)),
        )
    )
    return outcome


def fig15(world, settings):
    """Throughput over the longest read, in little memory."""
    relation, share, rows = settings.usual(), settings.tight, []
    keys = _keys(settings, relation)
    for scan in SCANS:
        options = relation.as_in_the_paper(share) | {"max_scan": max(1, round(scan / relation.weight))}
        rows.append(
            {"line": PAPER, "max_scan": scan, **measure(world, settings, relation, share, keys, **options).row()}
        )
    axes = Axes("max_scan", "tuples_per_second", "longest read, pages (of the paper)", xlog=True)
    outcome = Outcome("fig15", f"Figure 15: longest read, memory {100 * share:g} %", axes, rows)
    rates = outcome.values(PAPER)
    outcome.checks.extend([
        Check("short reads perform poorly", f"{rates[0]:,} at {SCANS[0]}, {max(rates):,} at the best",
              max(rates) > 1.5 * rates[0]),
        Check("very long ones evict useful pages", f"{rates[-1]:,} at {SCANS[-1]:,}: reads have a buffer of their own, "
              "which bounds them, and evict nothing", rates[-1] < 0.95 * max(rates)),
    ])  # fmt: skip
    return outcome
