"""Streams with keys of a distribution, all of one or one that changes: figures 10 to 12, 14, 15 and 18."""

import numpy as np

from benchmarks.experiments._claims import Claim, listed
from benchmarks.experiments._results import Figure
from benchmarks.experiments._settings import NEAR
from benchmarks.streams._claims import (
    BOUND,
    DINER,
    HMJ,
    RPJ,
    SETTINGS,
    ahead,
    bound_row,
    compare,
    compared,
    grows_with,
    share_axes,
    up_to,
)
from benchmarks.streams._data import matches, normal, shifting_normal, zipf
from benchmarks.streams._world import LIFETIME, OPERATORS, arrivals

__all__ = ["FIGURES"]

SHIFTED = 50_000  # tuples of each stream whose mean shifts
EACH = 20_000  # of those whose results grow with the square of it
FEW = 10_000  # with the greatest skew, nearly all pairs are results
KEYS = 999
SKEWS = (1, 2, 3, 4, 5)
MEANS = (0, 25, 50, 75, 100)
VARIANCES = (0, 50, 100, 150, 200)
INTERVALS = (5, 10, 20, 40, 80)
SHIFTS = (0, 5, 10, 15, 20)
SIZES = (20, 40, 60, 80, 100)
SIGNIFICANT = 1.1
REAL_DATA = 2.5  # times the results of RPJ and HMJ, DINER's best with the real data


def _run(keys, place, *, tuples=None, names=OPERATORS):
    arriving, total = arrivals(keys, SETTINGS, 7), matches(*keys)
    tuples = sum(map(len, keys)) * 5 // 100 if tuples is None else tuples
    return [
        *compare(arriving, total, tuples, place, names=names), bound_row(arriving, total, tuples, place)
    ]  # fmt: skip


def _over(places, name, make):
    return [row for place in places for row in _run(make(place), {name: place})]


def skewed(scale):
    """Return results online by the skew of a Zipf distribution."""
    return _over(SKEWS, "skew", lambda skew: zipf(scale.of(FEW), KEYS, skew, 13))


def means(scale):
    """Return results online by the distance of two normal distributions."""
    each, spread = scale.of(EACH), 50
    return _over(MEANS, "distance", lambda x: (normal(each, 500, spread, 21), normal(each, 500 + x, spread, 22)))


def variances(scale):
    """Return results online by the difference in variance of two normal distributions."""
    each, spread = scale.of(EACH), 50
    return _over(VARIANCES, "more", lambda x: (normal(each, 500, spread, 23), normal(each, 500, spread + x, 24)))


def partially_sorted(scale):
    """Return results online with streams that are sorted, cut into intervals, and shuffled by interval."""
    each = scale.of(EACH)

    def make(intervals):
        rng = np.random.default_rng(25)
        cut = [np.array_split(np.sort(keys), intervals) for keys in zipf(each, KEYS, 1, 26)]
        return tuple(np.concatenate([parts[at] for at in rng.permutation(intervals)]) for parts in cut)

    return _over(INTERVALS, "intervals", make)


def shifting(scale):
    """Return results online while the means of both streams shift."""
    each = scale.of(SHIFTED)
    names = (*OPERATORS, LIFETIME)
    return [
        row for shift in SHIFTS for row in _run(shifting_normal(each, shift, 11), {"shift": shift}, names=names)
    ]  # fmt: skip


def fine_keys(scale):
    """Return the same with keys of a hundredth."""
    each = scale.of(EACH)
    names = (*OPERATORS, LIFETIME)
    return [
        row
        for shift in SHIFTS
        for row in _run(shifting_normal(each, shift, 11, units=100), {"shift": shift}, names=names)
    ]


def sizes(scale):
    """Return results online with one stream that is smaller than the other."""
    each = scale.of(EACH)
    larger, other = zipf(each, KEYS, 1, 27)
    return _over_sizes(larger, other, each // 10)


def _over_sizes(larger, other, tuples):
    rows = []
    for percent in SIZES:
        keys = larger, other[: len(other) * percent // 100]
        rows += _run(keys, {"percent": percent}, tuples=tuples)
    return rows


def _lifetime(rows):
    ours, others = rows.values(DINER, "results"), rows.values(LIFETIME, "results")
    ratios = [a / max(b, 1) for a, b in zip(ours, others, strict=True)]
    return {"ratios": ratios, "told": listed(ratios, ".2f"), "most": max(ratios)}


def _of_bound(rows):
    parts = [100 * a / b for a, b in zip(rows.values(DINER, "results"), rows.values(BOUND, "results"), strict=True)]
    bound = rows.values(BOUND, "results")
    most = [
        max(a / max(b, 1) for a, b in zip(bound, rows.values(other, "results"), strict=True)) for other in (RPJ, HMJ)
    ]
    return {"parts": parts, "told": listed(parts, ".0f"), "most": listed(most, ".2f")}


NEAR_BOUND = Claim(
    "(Ours) DINER has at least three quarters of the results that any policy could have.",
    _of_bound,
    lambda f: min(f["parts"]) >= 75,
    "{told} % of the bound; the bound is at most {most} times the results of RPJ and HMJ",
    partly=lambda f: max(f["parts"]) >= 75,
)
SHIFT_CLAIMS = (
    ahead(),
    up_to(3),
    grows_with("The faster the distribution changes, the further DINER is ahead."),
    Claim(
        "(Ours) DINER has up to 3 times the results of an RPJ whose estimates count all arrivals since the start.",
        _lifetime,
        lambda f: f["most"] >= 3 * NEAR,
        "{told} times",
    ),
    NEAR_BOUND,
)


def _least_significant(rows):
    facts = compared(rows)
    return facts | {"significant": facts["least"] >= SIGNIFICANT}


def _smaller(rows):
    shares = rows.values(DINER)
    return compared(rows) | {"shares": listed(shares, ".0f"), "grows": shares[0] > shares[-1]}


DIVERGENCE = grows_with("The further the distributions diverge, the further DINER is ahead.")
SIZE_METHOD = f"{EACH:,} tuples of each stream, a fifth of the paper's: the results grow with the square."
FIGURES = (
    Figure("zipf", "DINER, figure 10: Zipf distribution", share_axes("skew", "Zipf skew"), skewed, (
        ahead(),
        up_to(REAL_DATA, "The benefits of DINER are larger than with the real data (2.5 times)."),
        NEAR_BOUND,
    ), f"{FEW:,} tuples of each stream, a tenth of the paper's: with much skew nearly all pairs are results."),
    Figure("means", "DINER, figure 11: normal distributions with different means",
           share_axes("distance", "distance of the means"), means, (ahead(), DIVERGENCE),
           f"{SIZE_METHOD} The paper's variance of 50 is taken as a standard deviation: with one of 7, "
           "two streams whose means differ by 50 or more have hardly any result."),
    Figure("variances", "DINER, figure 12: normal distributions with different variances",
           share_axes("more", "added to the second standard deviation"), variances, (ahead(), DIVERGENCE),
           SIZE_METHOD),
    Figure("sorted", "DINER, figure 14: partially sorted streams", share_axes("intervals", "intervals", xlog=True),
           partially_sorted, (
        Claim("The benefits of DINER are significant in all cases (10 % or more).", _least_significant,
              lambda f: f["significant"], "it has {told}", partly=lambda f: f["most"] >= SIGNIFICANT),
    ), f"{SIZE_METHOD} The intervals of the two streams are in different orders."),
    Figure("shifting", "DINER, figure 15: means that shift", share_axes("shift", "shift of the mean"), shifting,
           SHIFT_CLAIMS,
           f"{SHIFTED:,} tuples of each stream, half of the paper's. Keys are whole numbers. RPJ flushes by "
           "its estimate of what arrives. "
           "Ours counts recent arrivals, since it halves all counts now and then; the DINER paper does not say how the "
           'estimate ages. The line "' + LIFETIME + '" is the same operator without the halving.'),
    Figure("fine_keys", "The same with keys in hundredths", share_axes("shift", "shift of the mean"), fine_keys,
           (ahead("(Ours) DINER has more results online than RPJ and HMJ with finer keys too."),
            up_to(3, "(Ours) DINER has up to 3 times the results of RPJ and HMJ with finer keys.")),
           "The paper does not state whether its normal keys are rounded."),
    Figure("sizes", "DINER, figure 18: one stream smaller than the other",
           share_axes("percent", "size of the smaller stream, % of the larger"), sizes, (
        ahead(),
        Claim("The smaller one stream, the larger DINER's share.", _smaller, lambda f: f["grows"],
              "{shares} % at 20, 40, 60, 80, 100 %"),
        Claim("The smaller one stream, the further DINER is ahead.", _smaller, lambda f: not f["shrinking"],
              "it has {told}{room_to_shrink}", partly=lambda f: len(f["shrinking"]) < len(f["ratios"])),
    ), f"Zipf skew 1. The larger stream has {EACH:,} tuples, and memory holds a tenth of that, as in the paper."),
)  # fmt: skip
