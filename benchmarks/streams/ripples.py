"""Results over time with inputs in random order: PR-Join's figure 15, with the other joins of two streams."""

from benchmarks.experiments._claims import Claim, listed
from benchmarks.experiments._results import Figure
from benchmarks.streams._claims import DINER, HMJ, RPJ, SETTINGS, row, share_axes
from benchmarks.streams._data import matches, zipf
from benchmarks.streams._world import PAIR, arrivals, memory_for, online

__all__ = ["FIGURES"]

PR_JOIN, XJOIN = "PR-Join", "XJoin"
LINES = (PR_JOIN, DINER, RPJ, HMJ, XJOIN)
EACH, KEYS = 20_000, 2000
PERCENT = (20, 40, 60, 80, 100)
FRAGMENTS, DELAY = 20, 1.0
SIMILAR = 1.25


def steady(scale):
    """Return results by time, of streams that never pause for long."""
    return _over_time(scale)


def pausing(scale):
    """Return results by time, of streams that pause as long as they flow."""
    return _over_time(scale, fragments=FRAGMENTS, delay=DELAY)


def _over_time(scale, **delays):
    keys, rows = zipf(scale.of(EACH), KEYS, 0, 13), []
    arriving, total = arrivals(keys, SETTINGS, 7, **delays), matches(*keys)
    for name in LINES:
        run = online(name, arriving, memory_for(name, 2 * len(keys[0]) * 5 // 100, PAIR), SETTINGS)
        for percent in PERCENT:
            found = run.until(arriving.times[-1] * percent / 100)
            rows.append(row(name, {"time": percent}, found, total) | {"held": run.held})
    return rows


def _against(rows):
    ours, ratios = rows.values(PR_JOIN, "results"), {}
    for other in rows.lines[1:]:
        ratios[other] = [a / max(b, 1) for a, b in zip(ours, rows.values(other, "results"), strict=True)]
    told = ", ".join(f"{listed(some, '.2f')} times {other}'s" for other, some in ratios.items())
    return {
        "told": f"it has {told}, at {listed(PERCENT)} % of the time", "rpj": ratios[RPJ],
        "least": min(map(min, ratios.values())), "last": min(some[-1] for some in ratios.values()),
    }  # fmt: skip


TIME = "time, % of that of all arrivals"
FIGURES = (
    Figure("ripples", "PR-Join, figure 15a: results over time, streams that never pause", share_axes("time", TIME),
           steady,
           (Claim("PR-Join has more results than RPJ at all times.", _against, lambda f: min(f["rpj"]) >= 1, "{told}",
                  partly=lambda f: max(f["rpj"]) >= 1),
            Claim("(Ours) PR-Join has more results than all others at all times.", _against,
                  lambda f: f["least"] >= 1, "{told}", partly=lambda f: f["last"] >= 1)),
           f"{EACH:,} tuples of each stream with {KEYS:,} keys, equally frequent, in random order; the paper has a "
           "million, 10,000 keys, and tuples of 12 bytes."),
    Figure("ripples_pauses", "PR-Join, section 6.2: results over time, streams that pause", share_axes("time", TIME),
           pausing,
           (Claim(f"PR-Join and RPJ have similar numbers of results (a factor of {SIMILAR:g}).", _against,
                  lambda f: all(1 <= SIMILAR * ratio <= SIMILAR**2 for ratio in f["rpj"]), "{told}",
                  partly=lambda f: any(1 <= SIMILAR * ratio <= SIMILAR**2 for ratio in f["rpj"])),
            Claim("(Ours) PR-Join has more results than all others at all times.", _against,
                  lambda f: f["least"] >= 1, "{told}", partly=lambda f: f["last"] >= 1)),
           f"The same streams. After each of {FRAGMENTS} fragments a pause follows that is as long; the paper's times "
           "between arrivals have a Zipf distribution."),
)  # fmt: skip
