"""Streams like the papers' real ones, two stocks and the weather at two stations: figures 7 to 9, 13 and table 4.

The last figures vary what is not known of the papers' data: how much a tuple's price differs from that of its
neighbours, and how many prices are round.
"""

import functools

from benchmarks.experiments._claims import Claim, grows, listed
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import NEAR
from benchmarks.streams._claims import (
    BOUND,
    COUNTED,
    DINER,
    HMJ,
    PAPER,
    RPJ,
    SETTINGS,
    ahead,
    bound_row,
    compare,
    compared,
    row,
    share_axes,
    up_to,
)
from benchmarks.streams._data import CENT, DEGREE, TUPLE, matches, near_matches, stock, weather
from benchmarks.streams._world import OPERATORS, PAIR, Query, arrivals, online
from headrace.joins.streams import Near
from headrace.storage.errors import MemoryBudgetError

__all__ = ["FIGURES", "TABLE_4"]

MEMORIES = (5, 10, 15, 20)
CSCO, IPIX, WEATHER = "CSCO", "IPIX", "weather"
TABLE_4 = {CSCO: (28, 43, 49, 58), IPIX: (38, 59, 72, 82), WEATHER: (10, 17, 24, 29)}
NOISES = (1 / 80, 1 / 40, 1 / 20, 1 / 10, 1 / 4, 1)
ROUNDED = (0.0, 0.25, 0.5, 0.75, 1.0)
PMJ = "PMJ"


def streams(data, scale, **options):
    """Return the keys of two streams like the paper's."""
    if data == WEATHER:
        return weather(scale.of(45_000), 3)
    tuples, spread, seed = (20_710, 320, 1) if data == CSCO else (45_568, 400, 2)
    return stock(scale.of(tuples), spread, seed, **options)


def _over_memory(scale, data):
    keys = streams(data, scale)
    total, arriving, size = matches(*keys), arrivals(keys, SETTINGS, 7), sum(map(len, keys))
    rows = []
    for percent, papers in zip(MEMORIES, TABLE_4[data], strict=True):
        place, tuples = {"memory_percent": percent}, size * percent // 100
        rows += compare(arriving, total, tuples, place)
        rows += _counted(arriving, total, tuples * TUPLE, place)
        rows.append(bound_row(arriving, total, tuples, place))
        rows.append({"line": PAPER, **place, "share": papers})
    return rows


def _counted(arriving, total, memory, place):
    """Return rows of runs in which everything that an operator holds counts as memory; DINER's is one of the plot."""
    rows = []
    for name in OPERATORS:
        line = COUNTED.replace(DINER, name)
        try:
            rows.append(row(line, place, online(name, arriving, memory, SETTINGS).results, total))
        except MemoryBudgetError:
            rows.append({"line": line, **place, "share": None, "results": 0})
    return rows


def _of_paper(rows):
    ours, papers, bound = rows.values(DINER), rows.values(PAPER), rows.values(BOUND)
    return {
        "reached": [a >= NEAR * b for a, b in zip(ours, papers, strict=True)], "ours": listed(ours, ".0f"),
        "papers": listed(papers, ".0f"), "counted": listed(rows.values(COUNTED), ".0f"),
        "bound": listed(bound, ".0f"), "part": _parts(ours, bound), "papers_part": _parts(papers, bound),
    }  # fmt: skip


def _parts(shares, bound):
    return listed([100 * a / b for a, b in zip(shares, bound, strict=True)], ".0f")


def _ratios_counted(rows):
    ours = rows.values(COUNTED, "results")
    found = {
        other: [a / b if b else None for a, b in zip(ours, rows.values(COUNTED.replace(DINER, other), "results"),
                                                     strict=True)]
        for other in (RPJ, HMJ)
    }  # fmt: skip
    told = " and ".join(
        f"{', '.join('(not enough memory)' if one is None else f'{one:.2f}' for one in some)} times {other}"
        for other, some in found.items()
    )
    known = [ratio for some in found.values() for ratio in some if ratio is not None]
    return {"told": told, "least": min(known), "most": max(known)}


def _real_claims(data):
    return (
        Claim(
            f"DINER has {listed(TABLE_4[data])} % of the results online with 5, 10, 15, 20 % of the input as memory.",
            _of_paper,
            lambda f: all(f["reached"]),
            "{ours} %; {counted} % if everything that it holds counts as memory; no policy has more than {bound} %: "
            "DINER has {part} % of that, and the paper's shares would be {papers_part} % of it",
            partly=lambda f: any(f["reached"]),
        ),
        ahead(),
        up_to(2.5, "DINER has up to 2.5 times the results of RPJ and HMJ (one or more of the real data)."),
        Claim(
            "The less memory, the further DINER is ahead.",
            compared,
            lambda f: not f["shrinking"],
            "it has {told}{room_to_shrink}",
            partly=lambda f: len(f["shrinking"]) < len(f["ratios"]),
        ),
        Claim(
            "(Ours) DINER has more results online than RPJ and HMJ in equal memory, everything counted.",
            _ratios_counted,
            lambda f: f["least"] >= 1,
            "it has {told}",
            partly=lambda f: f["most"] >= 1,
        ),
    )


def _varied(scale, name, values):
    rows = []
    for value in values:
        keys = streams(CSCO, scale, **{name: value})
        arriving, tuples = arrivals(keys, SETTINGS, 7), sum(map(len, keys)) * 5 // 100
        place, total = {"percent": round(100 * value, 2)}, matches(*keys)
        rows += [*compare(arriving, total, tuples, place), bound_row(arriving, total, tuples, place)]
    return rows


def _spans(rows):
    shares = rows.values(DINER)
    return compared(rows) | {
        "shares": listed(shares, ".0f"), "low": min(shares), "high": max(shares), "falls": grows(shares[::-1]),
        "papers": TABLE_4[CSCO][0], "places": listed([r[rows.axes.x] for r in rows.of(DINER)], "g"),
    }  # fmt: skip


SPAN_CLAIMS = (
    Claim(
        f"(Ours) DINER's share depends on this property, and the paper's {TABLE_4[CSCO][0]} % are among its values.",
        _spans,
        lambda f: f["low"] <= f["papers"] <= f["high"] and f["high"] >= 1.5 * f["low"],
        "{shares} % at {places} %",
        partly=lambda f: f["low"] <= f["papers"] <= f["high"],
    ),
    ahead("(Ours) DINER has more results online than RPJ and HMJ whatever this property is."),
    up_to(2.5, "(Ours) Somewhere DINER has 2.5 times the results of RPJ or HMJ, as with the paper's data."),
)


def _ranges(scale):
    rows = []
    for data, width in ((CSCO, 5 * CENT - 1), (IPIX, 5 * CENT - 1), (WEATHER, 5 * DEGREE - 1)):
        keys = streams(data, scale)
        query = Query(PAIR.inputs, (Near("a.x", "b.x", within=width),))
        arriving, tuples = arrivals(keys, SETTINGS, 7), sum(map(len, keys)) * 5 // 100
        rows += compare(arriving, near_matches(*keys, width), tuples, {"data": data}, names=(DINER, PMJ), query=query)
    return rows


def _against_pmj(rows):
    ratios = [a / max(b, 1) for a, b in zip(rows.values(DINER, "results"), rows.values(PMJ, "results"), strict=True)]
    return {
        "ratios": ratios, "told": listed(ratios, ".2f"), "ours": listed(rows.values(DINER), ".0f"),
        "pmj": listed(rows.values(PMJ), ".0f"),
    }  # fmt: skip


RANGE_CLAIMS = (
    Claim(
        "DINER has more results of range joins online than PMJ.",
        _against_pmj,
        lambda f: min(f["ratios"]) >= 1,
        "{ours} % against {pmj} % with CSCO, IPIX, weather: {told} times as many",
        partly=lambda f: max(f["ratios"]) >= 1,
    ),
)

MEMORY = share_axes("memory_percent", "memory, % of the input")
FIGURES = (
    *(
        Figure(
            data.lower(),
            f"DINER, figure 9 and table 4: {data}",
            MEMORY,
            functools.partial(_over_memory, data=data),
            _real_claims(data),
        )
        for data in TABLE_4
    ),
    Figure("noise", "CSCO with prices that differ more or less from those of their neighbors",
           share_axes("percent", "standard deviation of the noise, % of the day's range", xlog=True),
           functools.partial(_varied, name="noise", values=NOISES), SPAN_CLAIMS,
           "Each price is that of the moment and normal noise. The figures above have noise of 2.5 %. With 100 % the "
           "price of the moment hardly matters."),
    Figure("rounded", "CSCO with some prices rounded to five cents",
           share_axes("percent", "rounded prices, %"),
           functools.partial(_varied, name="rounded", values=ROUNDED), SPAN_CLAIMS,
           "Rounding makes few prices frequent. The figures above have none."),
    Figure("ranges", "DINER, figure 13: range joins", Axes("data", "share", "data", "results online, % of all"),
           _ranges, RANGE_CLAIMS, "Prices that differ by less than 5 cents, temperatures by less than 5 degrees."),
)  # fmt: skip
