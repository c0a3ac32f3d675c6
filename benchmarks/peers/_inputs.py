"""Tables and streams of the cases, created once and kept in a folder: rows of two int64, keys with gaps, streams.

The tables never change, so Headrace's pages are built full, like those of a load in key order into the others.
"""

import os
import shutil
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._data import zipf_positions
from benchmarks._engines import DuckDBEngine, HeadraceEngine, LMDBEngine, RocksDBEngine, SQLiteEngine
from benchmarks.peers._tally import WORD, Tally
from headrace.storage import Table

__all__ = ["Inputs", "StreamFile", "forget", "payload", "remember"]

LOADERS = {
    "headrace": ("table.hdr", partial(HeadraceEngine, fill=1.0)),
    "duckdb": ("table.duckdb", DuckDBEngine),
    "sqlite": ("table.sqlite", partial(SQLiteEngine, ordinary=True)),
    "lmdb": ("table.lmdb", LMDBEngine),
    "rocksdb": ("table.rocksdb", RocksDBEngine),
}
GAP = 4  # there is one key in each range of this many numbers
ODD = 0x1234567
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
INTERVALS = 20
CHUNK = 1 << 20


def _mixed(values):
    return values.astype(np.uint64) * MULTIPLIER


def _keys(positions):
    """Return the key of each position: one of every four numbers, so that the others are absent."""
    return positions * GAP + (_mixed(positions) >> np.uint64(62)).astype(np.int64)


def _absent_keys(positions):
    return positions * GAP + ((_mixed(positions) >> np.uint64(62)).astype(np.int64) + 1 + positions % (GAP - 1)) % GAP


def payload(keys, which=0):
    """Return the value that each key has in the table, in its row number `which`: 40 bits that look random."""
    return (_mixed(keys + which * ODD) >> np.uint64(24)).astype(np.int64)


def _positions(kind, rows, count):
    """Return positions of the stream's tuples; the complement of a negative position gives an absent key."""
    rng = np.random.default_rng(5)
    if kind == "uniform":
        return rng.integers(0, rows, count)
    if kind == "zipf":
        return zipf_positions(rng, rows, 1.0, count)
    if kind == "absent":
        positions = rng.integers(0, rows, count)
        return np.where(rng.random(count) < 0.99, ~positions, positions)
    share = rows // INTERVALS
    bounds = np.linspace(0, count, INTERVALS + 1).astype(int)
    return np.concatenate(
        [i * share + zipf_positions(rng, share, 1.0, high - low) for i, (low, high) in enumerate(pairwise(bounds))]
    )


class StreamFile:
    """An endless stream, stored as a file of keys that is read repeatedly.

    Each key has `each` rows in the table, or none.
    """

    def __init__(self, path, each=1):
        self._each = each
        self._keys = np.memmap(path, dtype=np.int64, mode="r")
        self.at = 0

    def take(self, count):
        """Return the next tuples: a key, and a number that tells tuples apart."""
        places = np.arange(self.at, self.at + count, dtype=np.int64)
        start = self.at % len(self._keys)
        keys = np.array(self._keys[start : start + count])
        while len(keys) < count:
            keys = np.concatenate([keys, self._keys[: count - len(keys)]])
        self.at += count
        return pa.record_batch({"key": keys, "number": places})

    def expected(self, count, work):
        """Return the tally of the first tuples' join."""
        length = len(self._keys)
        rounds, rest = divmod(count, length)
        rows, plain, weighted = self._sums(rest, work)
        tally = Tally(rows, (rounds * length * plain + weighted) % WORD)
        if rounds:
            rows, plain, weighted = self._sums(length, work)
            tally += Tally(rows * rounds, (length * plain * (rounds * (rounds - 1) // 2) + weighted * rounds) % WORD)
        return tally

    def _sums(self, count, work):
        """Return the rows of the first tuples' join, the sum of their values, and that of place times value."""
        rows = plain = weighted = 0
        for start in range(0, count, CHUNK):
            keys = np.array(self._keys[start : min(start + CHUNK, count)])
            numbers = np.arange(start, start + len(keys), dtype=np.int64)
            there = _keys(keys // GAP) == keys
            chosen = ~there if work == "absent" else there
            values = keys[chosen] if work == "absent" else self._values(keys[chosen])
            rows += len(values) * (1 if work == "absent" else self._each)
            plain += int(values.sum())
            weighted += Tally.of(numbers[chosen], values).total
        return rows, plain, weighted

    def _values(self, keys):
        """Return the sum of the values in the rows of each key."""
        if self._each == 1:
            return payload(keys)
        different, back = np.unique(keys, return_inverse=True)
        return sum(payload(different, which) for which in range(self._each))[back]


class Inputs:
    """The folder of tables and streams; missing files are created."""

    def __init__(self, folder):
        self._folder = folder

    def stream(self, kind, rows, count):
        """Return the path of a stream; its pages are in the system's cache, charged to this process."""
        path = self._folder / f"{kind}-{rows}-{count}.i8"
        if not path.exists():
            print(f"making the stream {path.name}")
            positions = _positions(kind, rows, count)
            there = _keys(np.abs(positions))
            keys = np.where(positions < 0, _absent_keys(~positions), there) if kind == "absent" else there
            self._finish(path, keys.tofile)
        remember(path)
        return path

    def parquet(self, rows, each=1):
        """Return the path of a table as a Parquet file, in key order, with `each` rows per key."""
        path = self._folder_of(rows, each) / "table.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            places = np.arange(rows, dtype=np.int64)
            keys = _keys(places // each)
            values = payload(keys, places % each)
            self._finish(path, lambda to: pq.write_table(pa.table({"k": keys, "v": values}), to))
        return path

    def table(self, kind, rows, each=1):
        """Return the path of an engine's table."""
        if kind == "parquet":
            return self.parquet(rows, each)
        if kind == "filtered":
            return self._filtered(rows)
        name, engine_class = LOADERS[kind]
        path = self._folder_of(rows, each) / name
        if not path.exists():
            print(f"loading {path}")
            part = path.parent / f"part-{kind}"
            self._clear(part)
            part.mkdir(parents=True)
            engine = engine_class(part, **({"unique": False} if each > 1 and kind == "headrace" else {}))
            engine.load(self.parquet(rows, each))
            engine.close()
            for file in part.iterdir():
                file.rename(path.parent / file.name)
            part.rmdir()
        return path

    def _folder_of(self, rows, each=1):
        return self._folder / (f"{rows}" if each == 1 else f"{rows}-by-{each}")

    def _filtered(self, rows):
        """Return the path of Headrace's table that has a negative filter."""
        path = self._folder_of(rows) / "filtered.hdr"
        if not path.with_name(f"{path.name}.filter").exists():
            print(f"making the filter of {path}")
            shutil.copy(self.table("headrace", rows), path)
            with Table.open(path, mode="w") as table:
                table.build_filter()
        return path

    def _finish(self, path, write):
        part = path.with_suffix(".part")
        write(part)
        part.rename(path)

    def _clear(self, folder):
        """Remove the remains of an interrupted load."""
        if folder.exists():
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            folder.rmdir()


def forget(path):
    """Drop a file, or all files of a folder, from the system's cache."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remember(path):
    """Read a file, or all files of a folder, into the system's cache, charged to this process."""
    for file in _files(path):
        with file.open("rb", buffering=0) as opened:
            while opened.read(CHUNK):
                pass


def _files(path):
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
