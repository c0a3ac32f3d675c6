"""Runs of the operators that one figure compares, and the claims that several figures share."""

import numpy as np

from benchmarks.experiments._claims import Claim, listed
from benchmarks.experiments._results import Axes
from benchmarks.experiments._settings import NEAR
from benchmarks.streams._bound import most_online
from benchmarks.streams._world import OPERATORS, PAIR, Settings, memory_for, online

__all__ = [
    "BOUND", "COUNTED", "DINER", "HMJ", "PAPER", "RPJ", "SETTINGS", "TOGETHER", "ahead", "bound_row", "compare",
    "compared", "grows_with", "room", "share_axes", "up_to",
]  # fmt: skip

SETTINGS = Settings()
DINER, RPJ, HMJ = OPERATORS
BOUND = "no policy has more"
PAPER = "DINER in the paper"
COUNTED = "DINER, all memory counted"
TOGETHER = 2 * 5 / 100  # tuples in memory, as a part of one stream of two: 5 % of both


def share_axes(x, xlabel, **options):
    """Return the axes of a figure that shows shares of results."""
    return Axes(x, "share", xlabel, "results online, % of all", **options)


def row(line, place, results, total):
    """Return the row of a run."""
    return {"line": line, **place, "share": round(100 * results / total, 1), "results": results}


def compare(arriving, total, tuples, place, *, names=OPERATORS, query=PAIR, settings=SETTINGS):
    """Run operators that hold equally many tuples on the same arrivals, and return a row of each.

    Parameters
    ----------
    arriving, total
        Arrivals, and how many results they have.
    tuples
        Most tuples in memory.
    place
        Columns of the rows that say what varies.
    """
    rows = []
    for name in names:
        run = online(name, arriving, memory_for(name, tuples, query), settings, query)
        rows.append(row(name, place, run.results, total) | {"held": run.held})
    return rows


def bound_row(arriving, total, tuples, place, line=BOUND):
    """Return the row of the bound on what any policy has, for two inputs."""
    return row(line, place, most_online(arriving.sides, arriving.keys, tuples), total)


def compared(rows):
    """Return how many times the results of RPJ and HMJ DINER has, at each place."""
    ours = rows.values(DINER, "results")
    ratios = {
        other: [a / max(b, 1) for a, b in zip(ours, rows.values(other, "results"), strict=True)] for other in (RPJ, HMJ)
    }
    told = " and ".join(f"{listed(some, '.2f')} times the results of {other}" for other, some in ratios.items())
    every = [ratio for some in ratios.values() for ratio in some]
    possible, most_ahead = _possible(rows), room(rows)
    shrinking = [other for other, some in ratios.items() if some[0] <= some[-1]]
    growing = [other for other, some in ratios.items() if some[-1] > some[0]]
    return {
        "ratios": ratios, "least": min(every), "most": max(every), "most_rpj": max(ratios[RPJ]),
        "most_hmj": max(ratios[HMJ]), "told": f"{told}, at {_places(rows)}",
        "shrinking": shrinking, "growing": growing,
        "room_to_shrink": most_ahead if shrinking else "",
        "room_to_grow": most_ahead if len(growing) < len(ratios) else "",
        "held": _held(rows) if min(every) < 1 else "",
        "possible": f"; no policy has more than {listed(map(max, possible), '.2f')} times theirs" if possible else "",
    }  # fmt: skip


def _held(rows):
    """Return how many tuples the operators hold on average, as text: fewer results may be those of fewer tuples."""
    means = {name: np.mean([found.get("held", np.nan) for found in rows.of(name)]) for name in (DINER, RPJ, HMJ)}
    if np.isnan(list(means.values())).any():
        return ""
    return f"; on average {', '.join(f'{name} holds {mean:.0f}' for name, mean in means.items())} tuples"


def _possible(rows):
    """Return how many times the results of RPJ and HMJ any policy has at most, by place; nothing without a bound."""
    if BOUND not in rows.lines:
        return []
    bound = rows.values(BOUND, "results")
    return [[a / max(b, 1) for a, b in zip(bound, rows.values(other, "results"), strict=True)] for other in (RPJ, HMJ)]


def room(rows):
    """Return how far ahead of RPJ and HMJ any policy is at most at each place, as text; nothing without a bound."""
    possible = _possible(rows)
    if not possible:
        return ""
    rpj, hmj = (listed(some, ".2f") for some in possible)
    return f"; no policy has more than {rpj} times RPJ's and {hmj} times HMJ's"


def _places(rows):
    return f"{rows.axes.xlabel}: {listed(dict.fromkeys(found[rows.axes.x] for found in rows.rows), 'g')}"


def ahead(statement="DINER has more results online than RPJ and HMJ."):
    """Return the claim that DINER is never behind."""
    return Claim(
        statement, compared, lambda f: f["least"] >= 1, "it has {told}{held}", partly=lambda f: f["most"] >= 1,
    )  # fmt: skip


def up_to(factor, statement=None):
    """Return the claim that DINER is ahead by a factor somewhere."""
    return Claim(
        statement or f"DINER has up to {factor:g} times the results of RPJ and HMJ.",
        compared,
        lambda f: f["most"] >= NEAR * factor,
        "at most {most_rpj:.2f} times those of RPJ and {most_hmj:.2f} times those of HMJ{possible}",
    )


def grows_with(statement):
    """Return the claim that DINER's lead grows from the first place to the last."""
    return Claim(
        statement,
        compared,
        lambda f: len(f["growing"]) == len(f["ratios"]),
        "it has {told}{room_to_grow}",
        partly=lambda f: bool(f["growing"]),
    )
