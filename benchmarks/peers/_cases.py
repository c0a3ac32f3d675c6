"""The cases: contestants, table, stream, memory, and the target ratio of each."""

from dataclasses import dataclass, replace

__all__ = ["CASES", "KINDS", "Cell", "Choice", "Side", "quick"]

ROWS, MANY_ROWS = 8_000_000, 80_000_000
PLAIN_ROW = 16  # bytes of two int64
CACHED = 256 << 20  # more than any engine's table of 8 M rows
OWN_SHARE = 0.75  # with a larger share, SSIJ sometimes runs out of memory
STREAM = 16_000_000
MANY_STREAM = 40_000_000  # as in figure 10 of the paper
PAPERS_RATE = 480_000
QUICK_ROWS = 100_000
QUICK_MEMORY = 64 << 20

KINDS = {
    "SSIJ": "headrace",
    "MeshJoin": "headrace",
    "index nested loops": "headrace",
    "DuckDB": "duckdb",
    "SQLite": "sqlite",
    "SQLite, row by row": "sqlite",
    "LMDB": "lmdb",
    "RocksDB": "rocksdb",
    "Polars": "parquet",
    "Spark": "parquet",
    "Spark, tuned": "parquet",
}


@dataclass(frozen=True)
class Choice:
    """Settings of a contestant: tuples in a batch, its own limit as a share of the memory, results as a stream."""

    batch_rows: int
    limit: float = 1.0
    streams: bool = False

    @property
    def text(self):
        """The settings as readable text."""
        handed = ", results as a stream" if self.streams else ""
        limit = "" if self.limit == 1 else f", limit {self.limit:.0%}"
        return f"{self.batch_rows:,}{limit}{handed}"


BATCH = (Choice(250_000),)
SOME_BATCHES = tuple(Choice(rows) for rows in (100_000, 250_000, 500_000, 1_000_000))
TWO_BATCHES = tuple(Choice(rows) for rows in (250_000, 1_000_000))
DUCKDB_ROWS = (100_000, 150_000, 250_000, 400_000, 600_000, 800_000, 1_000_000)
DUCKDB_LIMITS = (0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
DUCKDB = tuple(Choice(rows, 0.5, streams=True) for rows in DUCKDB_ROWS)
FEW = tuple(Choice(rows, 0.5, streams=True) for rows in (1_000, 10_000, 50_000, 250_000))


@dataclass(frozen=True)
class Side:
    """A contestant with its table, stream and memory.

    Of several `choices` the best is taken. If `limits` are given, each is tried with the best two, and then whether
    results as one table are faster than as a stream. `tuples` are joined before anything is measured. `share` of the
    memory is the engine's own budget; the rest is for what it does not count: batches that are handed over, and what
    the allocator keeps. Each key has `each` rows. `remembered`: the table's file is in the system's cache, charged to
    no group.
    """

    engine: str
    rows: int = ROWS
    stream: str = "zipf"
    memory: int = CACHED
    choices: tuple = BATCH
    deadline: float | None = None
    work: str = "inner"
    length: int = STREAM
    tuples: int = 2_000_000
    label: str = ""
    share: float = 1.0
    limits: tuple = ()
    each: int = 1
    remembered: bool = False

    @property
    def name(self):
        """Name of the contestant in the results."""
        return self.label or self.engine


@dataclass(frozen=True)
class Cell:
    """A measurement: our side, its peers, and the target ratio for each peer (None: for information only).

    Where all are operators of this project, which count what they hold, `grouped` is false: a few MB would not do for
    the batches of the stream. `clocked`: tuples arrive by the clock, and the greatest rate is searched at which none
    waits longer than the deadline.
    """

    title: str
    ours: Side
    peers: tuple[tuple[Side, float | None], ...]
    least_rate: float = 0.0
    seconds: float = 2.0
    rounds: int = 3
    grouped: bool = True
    clocked: bool = False


def _cached(stream, targets):
    ours = Side("SSIJ", stream=stream)
    choices = {"DuckDB": DUCKDB, "Polars": SOME_BATCHES, "Spark": TWO_BATCHES, "Spark, tuned": TWO_BATCHES}
    peers = tuple(
        (
            replace(
                ours,
                engine=name,
                choices=choices.get(name, BATCH),
                limits=DUCKDB_LIMITS if name == "DuckDB" else (),
                remembered=name in STORES,
                tuples=1,
            ),
            target,
        )
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
    choices = {"DuckDB": DUCKDB, "index nested loops": BATCH, "MeshJoin": (Choice(50_000),)}[engine]
    limits = DUCKDB_LIMITS if engine == "DuckDB" else ()
    peer = replace(ours, engine=engine, choices=choices, tuples=1, share=1.0, limits=limits)
    peers = [(peer, target)]
    if grouped and deadline is None and work == "inner":
        known = replace(peer, label="DuckDB, its file in the system's cache", remembered=True)
        peers.append((known, None))
    title = f"80 M rows in {memory / 1e6:.0f} MB, {what}"
    clocked = deadline is not None
    return Cell(title, ours, tuple(peers), least_rate=least_rate, seconds=seconds, grouped=grouped, clocked=clocked)


def _tenfold():
    ours = Side("SSIJ", MANY_ROWS, "zipf", 96_000_000, BATCH, None, "inner", MANY_STREAM, tuples=8_000_000)
    small = replace(ours, rows=ROWS, memory=9_600_000, length=STREAM, label="SSIJ, 8 M rows")
    return (Cell("80 M rows in 96 MB and 8 M rows in 9.6 MB, zipf", ours, ((small, 0.5),), seconds=2.0, grouped=False),)


def _one_to_many(each):
    """Return a cell in which each tuple has many rows: 80 M in total."""
    ours = Side(
        "SSIJ", MANY_ROWS, "zipf", 96_000_000, (Choice(10_000),), tuples=200_000, share=OWN_SHARE, each=each
    )  # fmt: skip
    peer = replace(ours, engine="DuckDB", choices=FEW, tuples=1, share=1.0, limits=DUCKDB_LIMITS)
    known = replace(peer, label="DuckDB, its file in the system's cache", remembered=True)
    return Cell(f"80 M rows in 96 MB, {each} to a key, zipf", ours, ((peer, 1.0), (known, 1.0)))


STORES = dict.fromkeys(("SQLite", "SQLite, row by row", "LMDB", "RocksDB"), 30.0)
CASES = {
    "cached-zipf": _cached("zipf", {"DuckDB": 8.0, "Polars": None}),
    "cached-stores": _cached("zipf", STORES),
    "cached-spark": _cached("zipf", {"Spark": None, "Spark, tuned": None}),
    "cached-uniform": _cached("uniform", {"DuckDB": 5.0}),
    "large-zipf": (_large("zipf", "zipf", 4.0),),
    "large-deadline": (_large("zipf, within 1 s", "zipf", 3.0, deadline=1.0),),
    "large-uniform": (_large("uniform", "uniform", 1.0),),
    "large-locality": (
        _large("locality of figure 10", "locality", 8.0, share=0.1, least_rate=10 * PAPERS_RATE),
    ),
    "one-to-many": (_one_to_many(400),),
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
    """Return a cell with little data, for a smoke test."""

    def small(side):
        choices = (replace(side.choices[0], batch_rows=10_000 if side.each == 1 else 100),)
        return replace(side, rows=QUICK_ROWS, memory=QUICK_MEMORY, length=QUICK_ROWS, tuples=1, choices=choices)

    peers = tuple((small(side), target) for side, target in cell.peers)
    return replace(cell, title=f"{QUICK_ROWS:,} rows", ours=small(cell.ours), peers=peers, seconds=0.05, rounds=2)
