"""Figure 9: SSIJ beside the join of a database, which looks each tuple up through its index and its buffer pool."""

from benchmarks.experiments._relations import stream_batches, zipf_keys
from benchmarks.experiments._report import Axes, Check, Outcome
from benchmarks.experiments._settings import PAPER
from headrace.joins import SSIJ, IndexNestedLoops

__all__ = ["fig9"]

GIGABYTE = 125_000  # pages
SIZES = (0.5, 1.0, 1.5)
SHARE = 0.1
TUPLES = 1_000_000


def fig9(world, settings):
    """Throughput over the size of the relation; a million tuples meet a cold operator."""
    rows = []
    for size in SIZES:
        pages = round(settings.pages * size / SIZES[-1] / 2)
        relation = settings.dense(max(1, round(2 / size)), pages=pages, stands_for=size * GIGABYTE, name="small")
        share = max(SHARE, settings.share if settings.least_memory else 0)
        contestants = {
            PAPER: (SSIJ, share, relation.as_in_the_paper(share)),
            "index nested loops, pool of 1 GB": (IndexNestedLoops, 1 / size, {}),
            "index nested loops, memory of SSIJ": (IndexNestedLoops, share, {}),
        }
        keys = zipf_keys(relation.rows, 0.0, relation.scaled(TUPLES))
        for line, (kind, memory, options) in contestants.items():
            rate = _cold_rate(world.start(kind, relation, memory, **options), keys, relation)
            rows.append({"line": line, "gigabytes": size, "tuples_per_second": round(rate)})
    axes = Axes("gigabytes", "tuples_per_second", "size of the relation, GB", ylog=True)
    outcome = Outcome("fig9", "Figure 9: index nested loops", axes, sorted(rows, key=lambda row: row["line"]))
    pairs = zip(outcome.values(PAPER), outcome.values("index nested loops, pool of 1 GB"), strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    outcome.checks.append(
        Check(
            "3 to 24 times faster than a database's join, which has 6 to 20 times the memory",
            f"{min(ratios):.0f} to {max(ratios):.0f} times index nested loops with a pool of 1 GB",
            min(ratios) >= 3,
        )
    )
    return outcome


def _cold_rate(run, keys, relation):
    begin = run.clock()
    for batch in stream_batches(keys, max(1, len(keys) // 20), relation.tuple_nbytes):
        run.operator.push(batch).drain()
    run.operator.finish().drain()
    seconds = run.clock() - begin
    run.close()
    return len(keys) / seconds
