"""Cold start: the first tuples of a new operator, whose memory is empty, and those of a new connection to DuckDB.

Each batch of a fresh worker starts like this. A run opens the table, joins the first tuples of a stream, and closes the
table. Contestants take turns, and ratios are taken within a round. SSIJ reads its table with `O_DIRECT`; DuckDB's file
is removed from the system's page cache before a run, or left there. As much memory as a contestant may take is touched
and freed before each run.

Two parts of SSIJ's work are measured by themselves as well, since no order of steps takes less than both: reading the
table, and looking the tuples up in a warm operator.
"""

import gc
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks._contestants import ON, DuckDBJoin
from benchmarks._data import dimension, stream
from benchmarks._measure import Sample, machine, median_rate, median_ratio, print_table, write_csv
from headrace.joins import SSIJ
from headrace.storage import Table
from headrace.storage.read import page_buffer
from headrace.storage.units import format_size

__all__ = ["Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """Settings of the measurement. A round joins `tuples` tuples, in batches of each size."""

    rows: int = 8_000_000
    tuples: int = 6_000_000
    batch_rows: tuple = (250_000, 1_000_000)
    skews: tuple = (0.0, 1.0)
    memory: int = 512 << 20
    rounds: int = 5


READ, LOOK_UPS = "reading the table alone", "look-ups alone"
READ_BYTES, READERS = 1 << 20, 4

QUICK = Settings(rows=50_000, tuples=60_000, batch_rows=(10_000,), memory=64 << 20, rounds=2)


class ColdSSIJ:
    """A new operator for each run."""

    name = "SSIJ"

    def __init__(self, path, memory):
        self.path = path
        self._memory = memory

    def prepare(self):
        """Do nothing: the table is never in the system's cache."""

    def join(self, batches):
        """Yield the results of all batches."""
        with Table.open(self.path) as table, SSIJ(table, on=ON, memory=self._memory) as operator:
            for batch in batches:
                yield from operator.push(batch)
            yield from operator.finish()


class ColdDuckDB:
    """A new connection for each run."""

    def __init__(self, path, memory, *, remembered):
        self.name = "DuckDB, its file in the system's cache" if remembered else "DuckDB"
        self._path = path
        self._memory = memory
        self._remembered = remembered

    def prepare(self):
        """Remove the file from the system's cache, unless it is to be there."""
        if not self._remembered:
            with self._path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def join(self, batches):
        """Yield the results of all batches."""
        contestant = DuckDBJoin(self._path, batches, self._memory)
        for _ in batches:
            yield from contestant.first()[1].to_batches()
        contestant.close()


def run(settings, results):
    """Measure every cell and write the results into a folder."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=results) as folder:
        members = dimension(settings.rows)
        headrace, database = Path(folder) / "dimension.hdr", Path(folder) / "dimension.duckdb"
        Table.build(headrace, members, key=["id"], unique=True).close()
        DuckDBJoin.load(database, members)
        contestants = [
            ColdSSIJ(headrace, settings.memory),
            *(ColdDuckDB(database, settings.memory, remembered=remembered) for remembered in (False, True)),
        ]
        print(
            f"machine: {machine()}; DuckDB {duckdb.__version__}\n{settings.rows:,} rows, the first "
            f"{settings.tuples:,} tuples, memory {format_size(settings.memory)}, {settings.rounds} rounds in turns"
        )
        cells = {
            (batch_rows, skew): _measure(contestants, members, batch_rows, skew, settings)
            for skew in settings.skews
            for batch_rows in settings.batch_rows
        }
    _print_results(cells)
    rows = [
        {"zipf": skew, "batch_rows": batch_rows, "contestant": s.name, "round": s.round, "seconds": round(s.seconds, 4)}
        for (batch_rows, skew), samples in cells.items()
        for s in samples
    ]
    write_csv(results / "cold_start.csv", rows)
    return rows


def _measure(contestants, members, batch_rows, skew, settings):
    """Return the samples of all contestants."""
    batches = stream(members["id"].to_numpy(), skew, settings.tuples // batch_rows, batch_rows)
    for contestant in contestants:  # once before anything is timed: kernels are loaded, files are in the page cache
        _check(contestant, batches, members)
    samples = []
    for number in range(settings.rounds):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            contestant.prepare()
            gc.collect()
            _touch(settings.memory)
            began = time.perf_counter()
            tuples = sum(map(len, contestant.join(batches)))
            samples.append(Sample(contestant.name, number, tuples, time.perf_counter() - began))
    return samples + _parts(contestants[0], batches, settings)


def _touch(nbytes):
    """Write to memory and free it, so that a virtual machine's host has lent it before the clock starts.

    Hosts take back what was free for some seconds. To get it again costs up to 7 microseconds a page, which is no work
    of a contestant.
    """
    np.ones(nbytes, dtype=np.uint8)


def _parts(ssij, batches, settings):
    """Return samples of the two parts of SSIJ's work, each by itself."""
    samples = []
    with Table.open(ssij.path) as table, SSIJ(table, on=ON, memory=settings.memory) as operator:
        for batch in [*batches, *batches]:
            operator.push(batch).drain()
        for number in range(settings.rounds):
            began = time.perf_counter()
            tuples = sum(operator.push(batch).drain() for batch in batches)
            samples.append(Sample(LOOK_UPS, number, tuples, time.perf_counter() - began))
            samples.append(Sample(READ, number, tuples, _read(ssij.path)))
    return samples


def _read(path):
    """Return the seconds that reading a file takes, past the system's page cache, into memory that is in use."""
    file, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size
    buffer = memoryview(page_buffer(-(-size // READ_BYTES), READ_BYTES))
    buffer[:] = bytes(len(buffer))
    try:
        with ThreadPoolExecutor(READERS) as pool:
            began = time.perf_counter()
            places = range(0, size, READ_BYTES)
            done = sum(pool.map(lambda at: os.preadv(file, [buffer[at : at + READ_BYTES]], at), places))
            seconds = time.perf_counter() - began
    finally:
        os.close(file)
    if done != size:
        raise AssertionError(f"{done} of {size} bytes of {path} were read")
    return seconds


def _print_results(cells):
    print("medians, and in brackets the best; ratios are medians of those within a round")
    for (batch_rows, skew), samples in cells.items():
        names = [name for name in dict.fromkeys(sample.name for sample in samples) if name not in {READ, LOOK_UPS}]
        rows = [
            [
                name,
                f"{median_rate(samples, name) / 1e6:.2f} ({max(s.rate for s in samples if s.name == name) / 1e6:.2f})",
                f"{median_ratio(samples, 'SSIJ', name):.2f}",
            ]
            for name in names
        ]
        print(f"\nbatches of {batch_rows:,}, zipf {skew:g}")
        print_table(["contestant", "M/s", "SSIJ is faster by"], rows)
        _print_parts(*(_median_seconds(samples, name) for name in (READ, LOOK_UPS, "SSIJ", "DuckDB")))


def _print_parts(read, look_ups, ssij, duckdb_seconds):
    print(
        f"SSIJ {ssij:.3f} s; {READ} {read:.3f} s, {LOOK_UPS} {look_ups:.3f} s: with no more work it would be faster "
        f"than DuckDB by {duckdb_seconds / (read + look_ups):.1f}"
    )


def _median_seconds(samples, name):
    return statistics.median(sample.seconds for sample in samples if sample.name == name)


def _check(contestant, batches, members):
    """Compare a join with the members, so that no incorrect result is timed."""
    joined = pa.Table.from_batches(contestant.join(batches))
    order = np.argsort(joined["number"].to_numpy())
    keys = np.concatenate([batch["key"].to_numpy() for batch in batches])
    at = np.searchsorted(members["id"].to_numpy(), keys)
    for name in ("wide", "narrow"):
        if not np.array_equal(joined[name].to_numpy()[order], members[name].to_numpy()[at]):
            raise AssertionError(f"{contestant.name} gave a wrong join")
