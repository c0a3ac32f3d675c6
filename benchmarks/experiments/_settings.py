"""How large the experiments are, and the operators that they compare."""

from dataclasses import dataclass, replace

from benchmarks.experiments._rates import service_rate
from benchmarks.experiments._relations import Relation, stream_batches
from headrace.joins import SSIJ, MeshJoin

__all__ = ["MESHJOIN", "NOW", "PAPER", "QUICK", "REAL", "Settings", "measure"]

PAPER = "SSIJ, table II"
NOW = "SSIJ, as it is"
MESHJOIN = "MeshJoin"


@dataclass(frozen=True)
class Settings:
    """Relations of so many pages, and streams that fill the stream buffer so many times.

    `shares` are the memories of the plots over memory, `share` that of the others, `tight` that of those where the
    paper's is the smallest, all as shares of the relation. `steps` halve the range, on a logarithmic scale, in which a
    greatest rate is searched.
    """

    pages: int = 25_000
    phases: int = 2
    shares: tuple = (0.01, 0.05, 0.10)
    share: float = 0.075
    tight: float = 0.01
    steps: int = 7
    page_size: int = 16_384
    least_memory: int = 0

    def usual(self, **changes):
        """Return the relation of table II: 320 rows to a key, which lie in five pages."""
        return replace(Relation("usual", self.pages, 1, weight=5.0, page_size=self.page_size), **changes)

    def dense(self, rows_per_page, **changes):
        """Return a relation of as many pages in which keys share pages."""
        return replace(Relation("dense", self.pages, rows_per_page, page_size=self.page_size), **changes)


QUICK = Settings(
    pages=600, phases=1, shares=(0.3, 0.6), share=0.3, tight=0.3, steps=2, page_size=4096, least_memory=1 << 19
)

REAL = Settings(phases=8)  # which take a second or less there: fewer are at the mercy of chance


def measure(world, settings, relation, share, keys, kind=SSIJ, piece=None, **options):
    """Return the rate at which an operator serves a stream of these keys."""
    run = world.start(kind, relation, share, **options)
    buffer = relation.scaled(1_000_000)
    batches = stream_batches(keys, piece or max(1, buffer // 20), relation.tuple_nbytes)
    warm = 0 if kind is MeshJoin else 2 * buffer
    return service_rate(run, batches, warm=warm, most=(8 * settings.phases) * buffer, phases=settings.phases)
