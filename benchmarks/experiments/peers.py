"""Figure 9: SSIJ beside the join of a database, which looks each tuple up through its index and its buffer pool."""

from benchmarks.experiments._claims import Claim, listed, ratios
from benchmarks.experiments._rates import closed_loop_rate
from benchmarks.experiments._relations import stream_batches, zipf_keys
from benchmarks.experiments._results import Axes, Figure
from benchmarks.experiments._settings import NEAR, PAPER
from headrace.joins import SSIJ, IndexNestedLoops

__all__ = ["FIGURES"]

GIGABYTE = 125_000  # pages
SIZES = (0.5, 1.0, 1.5)
SHARE = 0.1
TUPLES = 1_000_000
POOL, SAME = "index nested loops, pool of 1 GB", "index nested loops, memory of SSIJ"


def fig9(world, settings):
    """Throughput over the size of the relation; a million tuples meet a cold operator."""
    rows, share = [], max(SHARE, settings.share if settings.least_memory else 0)
    for size in SIZES:
        pages = round(settings.pages * size / SIZES[-1] / 2)
        relation = settings.dense(max(1, round(2 / size)), pages=pages, stands_for=size * GIGABYTE, name="small")
        contestants = {
            PAPER: (SSIJ, share, relation.as_in_the_paper(share)),
            POOL: (IndexNestedLoops, 1 / size, {}),
            SAME: (IndexNestedLoops, share, {}),
        }
        keys = zipf_keys(relation.domain, 0.0, relation.scaled(TUPLES))
        batches = stream_batches(keys, max(1, len(keys) // 20), relation.tuple_nbytes)
        for line, (kind, memory, options) in contestants.items():
            rates = sorted(closed_loop_rate(world.start(kind, relation, memory, **options), batches)
                           for _ in range(world.trials))  # fmt: skip
            row = {"line": line, "gigabytes": size, "tuples_per_second": round(rates[len(rates) // 2])}
            if not world.simulated:
                row |= {"lowest": round(rates[0]), "highest": round(rates[-1])}
            rows.append(row)
    return sorted(rows, key=lambda row: row["line"])


def _by_size(rows):
    ours = ratios(rows, PAPER, POOL)
    return {"ours": ours, "least": min(ours), "most": max(ours), "told": listed(ours, ".1f")}


CLAIMS = (
    Claim(
        "SSIJ is at least 3 and up to 24 times faster than a database's join with 6 to 20 times the memory.",
        _by_size,
        lambda f: f["least"] >= 3 * NEAR and f["most"] >= 24 * NEAR,
        "{told} times index nested loops with a pool of 1 GB, at relations of 0.5, 1, 1.5 GB",
        partly=lambda f: f["most"] >= 3 * NEAR,
    ),
)

FIGURES = (
    Figure("fig9", "Figure 9: index nested loops",
           Axes("gigabytes", "tuples_per_second", "size of the relation, GB", ylog=True), fig9, CLAIMS,
           "Index nested loops with a buffer pool of the paper's size stand for the paper's databases."),
)  # fmt: skip
