"""The cases: which contestants meet over which table and stream, in how much memory, and the ratio to reach."""

from dataclasses import dataclass, replace

__all__ = ["CASES", "Cell", "Side", "quick"]

ROWS, MANY_ROWS = 8_000_000, 80_000_000
PLAIN_ROW = 16  # bytes of two int64
BATCH = (250_000,)
DUCKDB_BATCHES = (100_000, 250_000, 1_000_000, 2_000_000)
CACHED = 256 << 20  # more than any engine's table of 8 M rows
OWN_SHARE = 0.75  # more, and SSIJ and DuckDB are at times ended for want of memory
STREAM = 16_000_000
MANY_STREAM = 40_000_000  # as in figure 10 of the paper
PAPERS_RATE = 480_000
QUICK_ROWS = 100_000
QUICK_MEMORY = 64 << 20


@dataclass(frozen=True)
class Side:
    """A contestant with its table, stream and memory; of several sizes of a batch the best is taken for it.

    `tuples` are joined before anything is measured. `share` of the memory is the engine's own budget; the rest is for
    what it does not count: batches that are handed over, and what the allocator keeps.
    """

    engine: str
    rows: int = ROWS
    stream: str = "zipf"
    memory: int = CACHED
    batches: tuple = BATCH
    deadline: float | None = None
    work: str = "inner"
    length: int = STREAM
    tuples: int = 2_000_000
    label: str = ""
    share: float = 1.0

    @property
    def name(self):
        """What the contestant is called in the results."""
        return self.label or self.engine


@dataclass(frozen=True)
class Cell:
    """A measurement: ours beside its peers, the ratio that each is to reach, None where it is for information.

    Where all are operators of this project, which count what they hold, `grouped` is false: a few MB would not do for
    the batches of the stream.
    """

    title: str
    ours: Side
    peers: tuple[tuple[Side, float | None], ...]
    least_rate: float = 0.0
    seconds: float = 2.0
    rounds: int = 3
    grouped: bool = True


def _cached(stream, targets):
    ours = Side("SSIJ", stream=stream)
    batches = {"DuckDB": DUCKDB_BATCHES, "Polars": DUCKDB_BATCHES, "Spark": (1_000_000,)}
    peers = tuple(
        (replace(ours, engine=name, batches=batches.get(name, BATCH), tuples=1), target)
        for name, target in targets.items()
    )
    return (Cell(f"8 M rows in 256 MiB, {stream}", ours, peers, seconds=1.0),)


def _large(
    what,
    stream,
    target,
    share=0.075,
    engine="DuckDB",
    deadline=None,
    work="inner",
    least_rate=0.0,
    seconds=2.0,
):
    memory = int(MANY_ROWS * PLAIN_ROW * share)
    grouped = engine == "DuckDB"
    own = OWN_SHARE if grouped else 1.0
    ours = Side("SSIJ", MANY_ROWS, stream, memory, BATCH, deadline, work, MANY_STREAM, tuples=6_000_000, share=own)
    batches = {"DuckDB": DUCKDB_BATCHES, "index nested loops": (20_000,), "MeshJoin": (20_000,)}.get(engine, BATCH)
    peer = replace(ours, engine=engine, batches=batches, tuples=1)
    title = f"80 M rows in {memory / 1e6:.0f} MB, {what}"
    return Cell(title, ours, ((peer, target),), least_rate=least_rate, seconds=seconds, grouped=grouped)


def _tenfold():
    ours = Side("SSIJ", MANY_ROWS, "zipf", 96_000_000, BATCH, None, "inner", MANY_STREAM, tuples=8_000_000)
    small = replace(ours, rows=ROWS, memory=9_600_000, length=STREAM, label="SSIJ, 8 M rows")
    return (
        Cell("80 M rows in 96 MB beside 8 M rows in 9.6 MB, zipf", ours, ((small, 0.5),), seconds=2.0, grouped=False),
    )


STORES = dict.fromkeys(("SQLite, temporary table", "SQLite, row by row", "LMDB", "RocksDB"), 30.0)
CASES = {
    "cached-zipf": _cached("zipf", {"DuckDB": 8.0, "Polars": None}),
    "cached-stores": _cached("zipf", STORES),
    "cached-spark": _cached("zipf", {"Spark": None}),
    "cached-uniform": _cached("uniform", {"DuckDB": 5.0}),
    "large-zipf": (_large("zipf", "zipf", 4.0),),
    "large-deadline": (_large("zipf, within 1 s", "zipf", 3.0, deadline=1.0),),
    "large-uniform": (_large("uniform", "uniform", 1.0),),
    "large-locality": (
        _large("locality of figure 10", "locality", 8.0, share=0.1, least_rate=10 * PAPERS_RATE),
    ),
    "meshjoin": tuple(
        _large(f"{stream}", stream, target, share, "MeshJoin")
        for share in (0.1, 0.01)
        for stream, target in (("zipf", 6.0), ("uniform", 1.0))
    ),
    "nested-loops": (_large("zipf", "zipf", 24.0, engine="index nested loops"),),
    "absent": tuple(_large("99 % absent", "absent", 5.0, share, work="absent") for share in (0.075, 0.2)),
    "scale10": _tenfold(),
}  # fmt: skip


def quick(cell):
    """Return a cell with little data, to see that everything runs."""

    def small(side):
        return replace(side, rows=QUICK_ROWS, memory=QUICK_MEMORY, length=QUICK_ROWS, tuples=1, batches=(10_000,))

    peers = tuple((small(side), target) for side, target in cell.peers)
    return replace(cell, title=f"{QUICK_ROWS:,} rows", ours=small(cell.ours), peers=peers, seconds=0.05, rounds=2)
