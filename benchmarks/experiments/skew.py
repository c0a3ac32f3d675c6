"""Figures 3 to 7: throughput over skew, over memory, and over the number of rows that a tuple joins with."""

import math
from itertools import pairwise

from benchmarks.experiments._claims import Claim, grows, listed, percent, ratios
from benchmarks.experiments._relations import zipf_keys
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import MESH_BEST, MESH_PAPER, NEAR, NOW, PAPER, contestants, measure

__all__ = ["FIGURES"]

SKEWS = (0.0, 0.5, 1.0)
KS = (1, 10, 100, 400)
ROWS_PER_PAGE = 64
PROPORTIONAL = "SSIJ, threshold in proportion to the memory"
ONE_PERCENT = 0.01
SCALES = (0.5, 1.0, 2.0, 4.0)  # of the pages of the other figures
NO_RECORDS = {"record_tier": False}  # 320 rows have one key, and such tables have no record tier


def _keys(settings, relation, skew, *, scattered=False):
    return zipf_keys(relation.domain, skew, 2 * settings.phases * relation.scaled(1_000_000), scattered=scattered)


def _over_skew(world, settings, *, scattered):
    relation, share, rows = settings.usual(), settings.share, []
    for skew in SKEWS:
        keys = _keys(settings, relation, skew, scattered=scattered)
        for line, options in contestants(relation, share, **NO_RECORDS).items():
            rows.append({"line": line, "skew": skew, **measure(world, settings, relation, share, keys, **options)})
    return rows


def _by_skew(rows):
    rates, hits, mesh = rows.values(PAPER), rows.values(PAPER, "hit_ratio"), rows.values(MESH_PAPER)
    steady = max(max(line) / min(line) for line in (mesh, rows.values(MESH_BEST)))
    ours, best = ratios(rows, PAPER, MESH_PAPER), ratios(rows, NOW, MESH_BEST)
    return {
        "rates": rates, "told": listed(rates), "gain": rates[-1] / rates[0], "scatter": rows.scatter, "hits": hits,
        "hits_told": ", ".join(map(percent, hits)), "mesh": listed(mesh), "mesh_best": listed(rows.values(MESH_BEST)),
        "steady": steady, "ours": ours, "ours_told": listed(ours, ".2f"), "best": best,
        "best_told": listed(best, ".2f"),
    }  # fmt: skip


SKEW_CLAIMS = (
    Claim(
        "The throughput of SSIJ grows significantly with the skew, due to the hit ratio of the cache.",
        _by_skew,
        lambda f: grows(f["rates"], f["scatter"]) and grows(f["hits"]) and f["gain"] >= 1.5,
        "{told} tuples/s at skew 0, 0.5, 1, that is {gain:.1f} times; hit ratios {hits_told}",
        partly=lambda f: f["gain"] >= 1.5,
    ),
    Claim(
        "The throughput of MeshJoin does not change much with the skew.",
        _by_skew,
        lambda f: f["steady"] <= 1.1 * f["scatter"],
        "{mesh} tuples/s as in the paper, {mesh_best} at the best read size; the fastest is {steady:.2f} times the "
        "slowest",
    ),
    Claim(
        "SSIJ is faster than MeshJoin at every skew.",
        _by_skew,
        lambda f: min(f["ours"]) >= 1,
        "table II has {ours_told} times the rate of MeshJoin as in the paper",
        partly=lambda f: max(f["ours"]) >= 1,
    ),
    Claim(
        "(Ours) SSIJ with its defaults is faster than MeshJoin at its best read size at every skew.",
        _by_skew,
        lambda f: min(f["best"]) >= 1,
        "{best_told} times its rate",
        partly=lambda f: max(f["best"]) >= 1,
    ),
)


def _at(line, skew):
    return f"{line}, skew {skew:g}"


def _over_memory(world, settings, *, scattered):
    relation, rows = settings.usual(), []
    for skew in SKEWS:
        keys = _keys(settings, relation, skew, scattered=scattered)
        for share in settings.shares:
            for line, options in contestants(relation, share, **NO_RECORDS).items():
                if line in (MESH_PAPER, MESH_BEST) and skew > 0:
                    continue  # the paper shows MeshJoin at skew 0, its best case
                name = line if line in (MESH_PAPER, MESH_BEST) else _at(line, skew)
                served = measure(world, settings, relation, share, keys, **options)
                rows.append({"line": name, "memory_percent": 100 * share, **served})
    return sorted(rows, key=lambda row: row["line"])


def _by_memory(rows):
    lines = {skew: rows.values(_at(PAPER, skew)) for skew in SKEWS}
    mesh = ratios(rows, _at(PAPER, 1.0), MESH_PAPER)
    best = [ratio for skew in SKEWS for ratio in ratios(rows, _at(NOW, skew), MESH_BEST)]
    return {
        "lines": lines, "scatter": rows.scatter, "mesh": mesh, "mesh_told": listed(mesh, ".1f"), "most": max(mesh),
        "told": "; ".join(f"{listed(rates)} at skew {skew:g}" for skew, rates in lines.items()),
        "falling": listed([skew for skew, rates in lines.items() if not grows(rates, rows.scatter)], "g"),
        "tight": [rates[0] for rates in lines.values()],
        "tight_told": listed([rates[0] for rates in lines.values()]), "best": best, "best_least": min(best),
        "best_most": max(best),
    }  # fmt: skip


def _more_skew_helps(facts):
    return all(
        b * 1.02 * facts["scatter"] >= a for cells in zip(*facts["lines"].values(), strict=True)
        for a, b in pairwise(cells)
    )  # fmt: skip


MEMORY_CLAIMS = (
    Claim(
        "The throughput grows with the memory.",
        _by_memory,
        lambda f: not f["falling"],
        "tuples/s with table II, from the least memory to the most: {told}",
        partly=lambda f: any(grows(rates, f["scatter"]) for rates in f["lines"].values()),
        otherwise={"holds in part": "+; it does not grow at skew {falling}"},
    ),
    Claim(
        "At each memory more skew gives more throughput.",
        _by_memory,
        _more_skew_helps,
        "{told}",
    ),
    Claim(
        "SSIJ has up to 6 times the throughput of MeshJoin.",
        _by_memory,
        lambda f: f["most"] >= 6 * NEAR and min(f["mesh"]) >= 1,
        "table II at skew 1 has {mesh_told} times the rate of MeshJoin as in the paper",
        partly=lambda f: min(f["mesh"]) >= 1,
    ),
    Claim(
        "SSIJ supports close to or more than 3,000 tuples/s with a memory of 1 %.",
        _by_memory,
        lambda f: min(f["tight"]) >= 3000 * NEAR,
        "{tight_told} tuples/s at skew 0, 0.5, 1 with the least memory",
        partly=lambda f: max(f["tight"]) >= 3000 * NEAR,
    ),
    Claim(
        "(Ours) SSIJ with its defaults is faster than MeshJoin at its best read size at every memory and skew.",
        _by_memory,
        lambda f: f["best_least"] >= 1,
        "{best_least:.2f} to {best_most:.2f} times its rate",
        partly=lambda f: f["best_most"] >= 1,
    ),
)


def _of_k(settings, k, scale=1.0):
    return settings.dense(ROWS_PER_PAGE, rows_per_key=k, pages=round(scale * settings.pages))


def _proportional(relation, share):
    """Return table II's parameters, with the stream threshold that it has for 1 % of memory for each percent."""
    tight = relation.as_in_the_paper(ONE_PERCENT)
    return tight | {"stream_threshold": round(tight["stream_threshold"] * max(share / ONE_PERCENT, 1.0))}


def fig7(world, settings):
    """Throughput of 1:K joins on tables in which each key has K rows."""
    rows, most = [], settings.shares[-1]
    for k in KS:
        relation = _of_k(settings, k)
        keys = _keys(settings, relation, 1.0)
        runs = [(share, *contestant) for share in (settings.shares[0], most)
                for contestant in contestants(relation, share).items()]  # fmt: skip
        for share, line, options in (*runs, (most, PROPORTIONAL, _proportional(relation, most))):
            served = measure(world, settings, relation, share, keys, **options)
            rows.append({"line": f"{line}, 1:{k}", "memory_percent": 100 * share, **served})
    return sorted(rows, key=lambda row: row["line"])


def _by_k(rows):
    ours = {k: ratios(rows, f"{PAPER}, 1:{k}", f"{MESH_PAPER}, 1:{k}") for k in KS}
    best = {k: ratios(rows, f"{NOW}, 1:{k}", f"{MESH_BEST}, 1:{k}") for k in KS}
    return {
        "ours": ours, "best": best, "most": {k: max(some) for k, some in ours.items()},
        "told": "; ".join(f"1:{k} {listed(some, '.1f')}" for k, some in ours.items()),
        "best_told": "; ".join(f"1:{k} {listed(some, '.2f')}" for k, some in best.items()),
        "least": min(map(min, ours.values())), "best_least": min(map(min, best.values())),
        "first": max(ours[1]), "last": max(ours[400]),
        "shrinking": ", ".join(f"1:{k}" for k, some in ours.items() if some[-1] < some[0]),
    }  # fmt: skip


def _by_threshold(rows):
    least = {k: ratios(rows, f"{PAPER}, 1:{k}", f"{MESH_PAPER}, 1:{k}")[0] for k in KS}
    most = {k: rows.values(f"{PROPORTIONAL}, 1:{k}")[0] / rows.values(f"{MESH_PAPER}, 1:{k}")[-1] for k in KS}
    return {
        "gains": [most[k] / least[k] for k in KS],
        "told": "; ".join(f"1:{k} {least[k]:.1f}, {most[k]:.1f}" for k in KS),
    }


def fig7_scale(world, settings):
    """How many times MeshJoin's rate 1:400 joins have over the scale, in the most memory."""
    rows, share, k = [], settings.shares[-1], KS[-1]
    for scale in SCALES:
        relation = _of_k(settings, k, scale)
        keys = _keys(settings, relation, 1.0)
        mesh = measure(world, settings, relation, share, keys, **contestants(relation, share)[MESH_PAPER])
        for line, options in (
            (PAPER, relation.as_in_the_paper(share)),
            (PROPORTIONAL, _proportional(relation, share)),
        ):
            served = measure(world, settings, relation, share, keys, **options)
            ratio = served["tuples_per_second"] / mesh["tuples_per_second"]
            rows.append({"line": line, "scale": relation.factor, "times": round(ratio, 2), **served})
    return sorted(rows, key=lambda row: row["line"])


def _by_scale(rows):
    times, (*_, before, last) = rows.values(PROPORTIONAL), rows.of(PROPORTIONAL)
    step = (last["times"] - before["times"]) / math.log(last["scale"] / before["scale"])
    return {
        "times": times, "told": listed(times, ".1f"), "table": listed(rows.values(PAPER), ".1f"),
        "scales": ", ".join(f"1/{1 / row['scale']:g}" for row in rows.of(PAPER)),
        "hits": ", ".join(map(percent, rows.values(PAPER, "hit_ratio"))),
        "full": last["times"] - step * math.log(last["scale"]),
    }  # fmt: skip


THRESHOLD_REASON = Claim(
    "(Ours) Table II's threshold, which grows 2.5 times while the memory grows ten times, keeps the benefit from "
    "growing: with 400,000 tuples for each percent it grows for every K.",
    _by_threshold,
    lambda f: min(f["gains"]) > 1,
    "times MeshJoin as in the paper, with the least and the most memory: {told}",
    partly=lambda f: max(f["gains"]) > 1,
    needs=f"{PROPORTIONAL}, 1:1",
)
SCALE_REASON = Claim(
    "(Ours) The threshold and the scale keep 1:400 joins below 9 times: with a threshold in proportion to the memory "
    "the ratio grows with the scale, by the last step to 9 times at the paper's size (extrapolated).",
    _by_scale,
    lambda f: grows(f["times"]) and f["full"] >= 9 * NEAR,
    "{told} times MeshJoin as in the paper at scales of {scales}, {full:.1f} by extrapolation; with table II {table}, "
    "since of more keys the same share has more of the stream: hit ratios {hits}",
    partly=lambda f: grows(f["times"]),
)
K_CLAIMS = (
    Claim(
        "SSIJ outperforms MeshJoin in all cases.",
        _by_k,
        lambda f: f["least"] >= 1,
        "table II has at least {least:.2f} times the rate of MeshJoin as in the paper ({told}; least memory, most "
        "memory)",
        partly=lambda f: max(f["most"].values()) >= 1,
    ),
    Claim(
        "SSIJ has up to 3 times the rate of MeshJoin for 1:1 joins.",
        _by_k,
        lambda f: f["first"] >= 3 * NEAR,
        "{first:.1f} times",
        partly=lambda f: f["first"] >= 1,
    ),
    Claim(
        "SSIJ has up to 9 times the rate of MeshJoin for 1:400 joins.",
        _by_k,
        lambda f: f["last"] >= 9 * NEAR,
        "{last:.1f} times",
        partly=lambda f: f["last"] >= 1,
        reason=SCALE_REASON,
    ),
    Claim(
        "The benefit increases with the memory.",
        _by_k,
        lambda f: not f["shrinking"],
        "times MeshJoin with the least and the most memory: {told}",
        partly=lambda f: len(f["shrinking"].split(", ")) < len(KS),
        otherwise={"holds in part": "+; it shrinks for {shrinking}"},
        reason=THRESHOLD_REASON,
    ),
    THRESHOLD_REASON,
    Claim(
        "(Ours) SSIJ with its defaults is faster than MeshJoin at its best read size in all cases.",
        _by_k,
        lambda f: f["best_least"] >= 1,
        "times its rate: {best_told}",
        partly=lambda f: max(map(max, f["best"].values())) >= 1,
    ),
)

_SKEW = Axes("skew", "tuples_per_second", "Zipf skew")
_MEMORY = Axes("memory_percent", "tuples_per_second", "memory, % of the relation")
_K = Axes("memory_percent", "tuples_per_second", "memory, % of the relation", ylog=True)
FIGURES = (
    Figure("fig3", "Figure 3: skew, popular keys side by side", _SKEW,
           lambda world, settings: _over_skew(world, settings, scattered=False), SKEW_CLAIMS),
    Figure("fig4", "Figure 4: skew, popular keys scattered", _SKEW,
           lambda world, settings: _over_skew(world, settings, scattered=True), SKEW_CLAIMS),
    Figure("fig5", "Figure 5: memory, popular keys side by side", _MEMORY,
           lambda world, settings: _over_memory(world, settings, scattered=False), MEMORY_CLAIMS),
    Figure("fig6", "Figure 6: memory, popular keys scattered", _MEMORY,
           lambda world, settings: _over_memory(world, settings, scattered=True), MEMORY_CLAIMS),
    Figure("fig7", "Figure 7: 1:K joins, skew 1", _K, fig7, K_CLAIMS,
           "Each key has K rows in the table, and each stream tuple has K results. On the simulated disk results cost "
           "no time; on the real device they are made and consumed."),
    Figure("fig7_scale", "Figure 7, continued: 1:400 joins over the scale",
           Axes("scale", "times", "scale", "times MeshJoin as in the paper", xlog=True), fig7_scale, (SCALE_REASON,),
           "10 % of memory."),
)  # fmt: skip
