"""Figures 3 to 7: throughput over skew, over memory, and over the number of rows that a tuple joins with."""

from benchmarks.experiments._relations import zipf_keys
from benchmarks.experiments._report import Axes, Check, Outcome
from benchmarks.experiments._settings import MESHJOIN, NOW, PAPER, measure
from headrace.joins import MeshJoin

__all__ = ["fig3", "fig4", "fig5", "fig6", "fig7"]

SKEWS = (0.0, 0.5, 1.0)
MEMORY_SKEWS = (0.0, 0.5, 1.0)
NOW_OPTIONS = {"record_tier": False}  # where 320 rows have one key there is no record tier


def _keys(settings, relation, skew, *, scattered=False):
    return zipf_keys(relation.rows, skew, 2 * settings.phases * relation.scaled(1_000_000), scattered=scattered)


def _over_skew(world, settings, *, scattered):
    relation, share = settings.usual(), settings.share
    contestants = ((PAPER, {**relation.as_in_the_paper(share)}), (NOW, NOW_OPTIONS), (MESHJOIN, {"kind": MeshJoin}))
    return [
        {"line": line, "skew": skew, **measure(world, settings, relation, share, keys, **options).row()}
        for skew in SKEWS
        for keys in [_keys(settings, relation, skew, scattered=scattered)]
        for line, options in contestants
    ]


def fig3(world, settings):
    """Throughput over the skew of the stream, popular keys being neighbours."""
    axes = Axes("skew", "tuples_per_second", "Zipf skew")
    outcome = Outcome(
        "fig3", "Figure 3: skew, popular keys side by side", axes, _over_skew(world, settings, scattered=False)
    )
    outcome.checks.extend(_skew_checks(outcome))
    return outcome


def fig4(world, settings):
    """Throughput over the skew of the stream, popular keys being anywhere."""
    axes = Axes("skew", "tuples_per_second", "Zipf skew")
    rows = _over_skew(world, settings, scattered=True)
    return Outcome(
        "fig4", "Figure 4: skew, popular keys scattered", axes, rows, _skew_checks(Outcome("", "", axes, rows))
    )


def _skew_checks(outcome):
    paper, now, mesh = (outcome.values(line) for line in (PAPER, NOW, MESHJOIN))
    return [
        Check(
            "the throughput of SSIJ grows with the skew, by the hit ratio",
            f"{paper[0]:,} to {paper[-1]:,} tuples/s, {paper[-1] / paper[0]:.1f} times; hits "
            f"{outcome.values(PAPER, 'hit_ratio')[-1]:.0%}",
            paper == sorted(paper) and paper[-1] > 1.5 * paper[0],
        ),
        Check(
            "MeshJoin does not profit from skew",
            f"{min(mesh):,} to {max(mesh):,} tuples/s",
            max(mesh) <= 1.05 * mesh[0],
        ),
        Check(
            "SSIJ is faster than MeshJoin at every skew",
            f"{paper[0] / mesh[0]:.2f} times at skew 0, {paper[-1] / mesh[-1]:.2f} at 1 with table II; "
            f"{now[0] / mesh[0]:.2f} and {now[-1] / mesh[-1]:.2f} as it is",
            all(ours >= theirs for ours, theirs in zip(paper, mesh, strict=True)),
        ),
    ]


def _over_memory(world, settings, *, scattered):
    relation, rows = settings.usual(), []
    for skew in MEMORY_SKEWS:
        keys = _keys(settings, relation, skew, scattered=scattered)
        for share in settings.shares:
            contestants = {f"{PAPER}, skew {skew:g}": relation.as_in_the_paper(share)}
            if skew in (MEMORY_SKEWS[0], MEMORY_SKEWS[-1]):
                contestants[f"{NOW}, skew {skew:g}"] = NOW_OPTIONS
            if skew == 0:
                contestants[MESHJOIN] = {"kind": MeshJoin}
            rows += [
                {
                    "line": line,
                    "memory_percent": 100 * share,
                    **measure(world, settings, relation, share, keys, **options).row(),
                }
                for line, options in contestants.items()
            ]
    return sorted(rows, key=lambda row: row["line"])


def _memory_outcome(world, settings, name, title, *, scattered):
    axes = Axes("memory_percent", "tuples_per_second", "memory, % of the relation")
    outcome = Outcome(name, title, axes, _over_memory(world, settings, scattered=scattered))
    lines = {skew: outcome.values(f"{PAPER}, skew {skew:g}") for skew in MEMORY_SKEWS}
    now, mesh = outcome.values(f"{NOW}, skew 1"), outcome.values(MESHJOIN)
    uniform = outcome.values(f"{NOW}, skew 0")
    ratios = [ours / theirs for ours, theirs in zip(lines[1.0], mesh, strict=True)]
    ours = [rate / theirs for rate, theirs in zip(now, mesh, strict=True)]
    outcome.checks.extend([
        Check("the throughput grows with the memory", _series(lines[1.0]),
              all(line == sorted(line) for line in lines.values())),
        Check(
            "at each memory more skew gives more throughput",
            f"skew 0, 0.5, 1 at the largest: {', '.join(f'{lines[skew][-1]:,}' for skew in MEMORY_SKEWS)}",
            all(a <= 1.02 * b <= 1.02 * 1.02 * c for a, b, c in zip(*lines.values(), strict=True)),
        ),
        Check(
            "up to 6 times the throughput of MeshJoin",
            f"{min(ratios):.1f} to {max(ratios):.1f} times with table II, {min(ours):.1f} to {max(ours):.1f} as it is "
            f"(skew 1; at skew 0 {min(a / b for a, b in zip(uniform, mesh, strict=True)):.2f} at the least)",
            max(*ratios, *ours) >= 6,
        ),
        Check("about 3,000 tuples/s or more with a memory of 1 %", f"{lines[0.0][0]:,} to {lines[1.0][0]:,}",
              lines[0.0][0] >= 2700),
    ])  # fmt: skip
    return outcome


def fig5(world, settings):
    """Throughput over the memory, popular keys being neighbours."""
    return _memory_outcome(world, settings, "fig5", "Figure 5: memory, popular keys side by side", scattered=False)


def fig6(world, settings):
    """Throughput over the memory, popular keys being anywhere."""
    return _memory_outcome(world, settings, "fig6", "Figure 6: memory, popular keys scattered", scattered=True)


def _series(rates):
    return f"{' < '.join(f'{rate:,}' for rate in rates)} tuples/s at skew 1" if rates == sorted(rates) else f"{rates}"


def fig7(world, settings):
    """Throughput for 1:K joins."""
    rows = []
    for k, relation in _of_k(settings).items():
        keys = _keys(settings, relation, 1.0)
        for share in (settings.shares[0], settings.shares[-1]):
            contestants = {
                f"{PAPER}, 1:{k}": relation.as_in_the_paper(share),
                f"{MESHJOIN}, 1:{k}": {"kind": MeshJoin},
            }
            if k == 1:
                contestants[f"{NOW}, 1:1"] = {}
            rows += [
                {
                    "line": line,
                    "k": k,
                    "memory_percent": 100 * share,
                    **measure(world, settings, relation, share, keys, **options).row(),
                }
                for line, options in contestants.items()
            ]
    axes = Axes("memory_percent", "tuples_per_second", "memory, % of the relation", ylog=True)
    outcome = Outcome("fig7", "Figure 7: 1:K joins, skew 1", axes, sorted(rows, key=lambda row: row["line"]))
    outcome.checks.extend(_k_checks(outcome, list(_of_k(settings))))
    return outcome


def _of_k(settings):
    """Return the relation for each K: keys that share a page, or pages that belong to one key."""
    return {
        1: settings.dense(64),
        10: settings.dense(6),
        100: settings.dense(1, weight=1.5),
        400: settings.dense(1, weight=6.0),
    }


def _k_checks(outcome, ks):
    ratios = {
        k: max(
            a / b for a, b in zip(outcome.values(f"{PAPER}, 1:{k}"), outcome.values(f"{MESHJOIN}, 1:{k}"), strict=True)
        )
        for k in ks
    }
    told = ", ".join(f"{ratio:.1f} at 1:{k}" for k, ratio in ratios.items())
    worst = min(
        a / b
        for k in ks
        for a, b in zip(outcome.values(f"{PAPER}, 1:{k}"), outcome.values(f"{MESHJOIN}, 1:{k}"), strict=True)
    )
    now = max(a / b for a, b in zip(outcome.values(f"{NOW}, 1:1"), outcome.values(f"{MESHJOIN}, 1:1"), strict=True))
    return [
        Check("SSIJ outperforms MeshJoin in all cases", f"{worst:.2f} times at the least", worst >= 1),
        Check(
            "up to 3 times the rate of MeshJoin for 1:1 joins",
            f"{told}; as it is {now:.1f} at 1:1",
            max(ratios[1], now) >= 3,
        ),
        Check("up to 9 times for 1:400, the benefit growing with K", told, ratios[400] >= 9),
    ]
