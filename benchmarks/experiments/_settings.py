"""How large the experiments are, and the operators that they compare."""

from dataclasses import dataclass, replace

from benchmarks.experiments._rates import service_rate
from benchmarks.experiments._relations import Relation, stream_batches
from headrace.joins import SSIJ, MeshJoin

__all__ = [
    "MESH_BEST",
    "MESH_PAPER",
    "MESH_READ",
    "NEAR",
    "NOW",
    "PAPER",
    "QUICK",
    "REAL",
    "Settings",
    "contestants",
    "measure",
]

PAPER = "SSIJ, table II"
NOW = "SSIJ, defaults"
MESH_PAPER = "MeshJoin, as in the paper"
MESH_BEST = "MeshJoin, best read size"
MESH_READ = 15  # of the paper's pages: the read size that gives the rate which the paper reports for figure 16
NEAR = 0.9  # a figure of the paper is reached by this share of it


@dataclass(frozen=True)
class Settings:
    """Relations of so many pages, and streams that fill the stream buffer so many times.

    `shares` are the memories of the plots over memory, `share` that of the others, `tight` that of those where the
    paper's is the smallest, `moving` and `burst` those of figure 10 and table III, all as shares of the relation.
    `steps` halve the bracket in which a greatest rate lies.
    """

    pages: int = 25_000
    phases: int = 2
    shares: tuple = (0.01, 0.05, 0.10)
    moving: tuple = (0.05, 0.10, 0.15)
    share: float = 0.075
    tight: float = 0.01
    burst: float = 0.10
    steps: int = 5
    page_size: int = 16_384
    least_memory: int = 0

    def usual(self, **changes):
        """Return the relation of table II: 320 rows to a key, which lie in five pages."""
        return replace(Relation("usual", self.pages, 1, weight=5.0, page_size=self.page_size), **changes)

    def dense(self, rows_per_page, **changes):
        """Return a relation of as many pages in which keys share pages."""
        return replace(Relation("dense", self.pages, rows_per_page, page_size=self.page_size), **changes)


_TOY = (0.3, 0.6)
QUICK = Settings(
    pages=600, phases=1, shares=_TOY, moving=_TOY, share=0.3, tight=0.3, burst=0.3, steps=2, page_size=4096,
    least_memory=1 << 19,
)  # fmt: skip

REAL = Settings(phases=4, steps=4)  # phases take a second or less there, and each rate is measured three times


def contestants(relation, share, **now):
    """Return the four operators that most figures compare, as options by the names of their lines."""
    return {
        PAPER: relation.as_in_the_paper(share),
        NOW: now,
        MESH_PAPER: {"kind": MeshJoin, "read_pages": relation.paper_pages(MESH_READ)},
        MESH_BEST: {"kind": MeshJoin},
    }


def measure(world, settings, relation, share, keys, **options):
    """Return the row of an operator that serves a stream of these keys: the median of the trials."""
    served = sorted(
        (_serve(world, settings, relation, share, keys, **options) for _ in range(world.trials)),
        key=lambda trial: trial.rate,
    )
    row = served[len(served) // 2].row()
    if len(served) > 1:
        row |= {"lowest": round(served[0].rate), "highest": round(served[-1].rate)}
    return row


def _serve(world, settings, relation, share, keys, kind=SSIJ, piece=None, **options):
    run = world.start(kind, relation, share, **options)
    buffer = relation.scaled(1_000_000)
    batches = stream_batches(keys, piece or max(1, buffer // 20), relation.tuple_nbytes)
    warm = 0 if kind is MeshJoin else 2 * buffer
    most, phases = 8 * settings.phases * buffer, settings.phases
    return service_rate(run, batches, warm=warm, most=most, phases=phases, tuples=phases * buffer)
