"""Keyed tables of two int64 columns in Headrace, DuckDB, SQLite, LMDB and RocksDB, durable at every commit."""

import sqlite3

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.storage import Table

__all__ = [
    "ENGINES",
    "DuckDBEngine",
    "HeadraceEngine",
    "LMDBEngine",
    "RocksDBEngine",
    "SQLiteEngine",
    "key_bytes",
    "rocksdb_options",
]

MAP_SIZE = 16 << 30
LOAD_ROWS = 250_000


def key_bytes(keys):
    """Encode non-negative integers as bytes that sort in the same order."""
    return keys.astype(">i8").view("V8").tolist()


class HeadraceEngine:
    """A clustered table, built with these options; a commit is one `apply`."""

    name = "Headrace"

    def __init__(self, folder, **options):
        self._path = folder / "table.hdr"
        self._options = options
        self._table = None

    def load(self, parquet):
        self._table = Table.build(self._path, parquet, key=["k"], **{"unique": True, **self._options})

    def open_for_changes(self):
        self._table.close()
        self._table = Table.open(self._path, mode="w")

    def prepare(self, keys, values):
        return pa.record_batch({"k": keys, "v": values})

    def upsert(self, rows):
        self._table.apply(upserts=rows)

    def close(self):
        self._table.close()


class DuckDBEngine:
    """A DuckDB file, with a primary key if rows are to be changed."""

    name = "DuckDB"

    def __init__(self, folder):
        self._connection = duckdb.connect(str(folder / "table.duckdb"))

    def load(self, parquet, *, index=False):
        self._connection.execute("CREATE OR REPLACE TABLE t AS SELECT * FROM read_parquet(?)", [str(parquet)])
        if index:
            self._connection.execute("CREATE UNIQUE INDEX by_k ON t (k)")
        self._connection.execute("CHECKPOINT")

    def open_for_changes(self):
        self._connection.execute("CREATE UNIQUE INDEX IF NOT EXISTS by_k ON t (k)")

    def prepare(self, keys, values):
        return pa.table({"k": keys, "v": values})

    def upsert(self, rows):
        self._connection.register("given", rows)
        self._connection.execute("INSERT INTO t SELECT * FROM given ON CONFLICT (k) DO UPDATE SET v = excluded.v")

    def close(self):
        self._connection.close()


class SQLiteEngine:
    """SQLite with a write-ahead log and synchronous FULL; WITHOUT ROWID unless an ordinary table is requested."""

    name = "SQLite"

    def __init__(self, folder, *, ordinary=False):
        self._connection = sqlite3.connect(folder / "table.sqlite", isolation_level=None)
        self._connection.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -262144;"
        )
        kind = "" if ordinary else " WITHOUT ROWID"
        self._connection.execute(f"CREATE TABLE t (k INTEGER PRIMARY KEY, v INTEGER){kind}")

    def load(self, parquet):
        table = pq.read_table(parquet)
        self.upsert(self.prepare(table["k"].to_numpy(), table["v"].to_numpy()))

    def open_for_changes(self):
        """Do nothing: the key exists from the start."""

    def prepare(self, keys, values):
        return list(zip(keys.tolist(), values.tolist(), strict=True))

    def upsert(self, rows):
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO t VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v = excluded.v", rows)
        self._connection.execute("COMMIT")

    def close(self):
        self._connection.close()


class LMDBEngine:
    """LMDB with big-endian keys, synced at each commit; `putmulti`, its fastest Python interface, writes the rows."""

    name = "LMDB"

    def __init__(self, folder):
        import lmdb  # noqa: PLC0415 - of the bench extra, as RocksDB

        self._environment = lmdb.open(str(folder / "table.lmdb"), map_size=MAP_SIZE)

    def load(self, parquet):
        table = pq.read_table(parquet)
        self.upsert(self.prepare(table["k"].to_numpy(), table["v"].to_numpy()))

    def open_for_changes(self):
        """Do nothing: the key exists from the start."""

    def prepare(self, keys, values):
        return list(zip(key_bytes(keys), values.astype("<i8").view("V8").tolist(), strict=True))

    def upsert(self, rows):
        with self._environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(rows)

    def close(self):
        self._environment.close()


def rocksdb_options(block_cache):
    """Return options for lookups: Bloom filters, a hash index, uncompressed blocks, and memory-mapped files."""
    from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options  # noqa: PLC0415 - as above

    blocks, options = BlockBasedOptions(), Options(raw_mode=True)
    blocks.set_bloom_filter(10, False)  # noqa: FBT003 - their signature
    blocks.set_block_cache(Cache(block_cache))
    blocks.set_cache_index_and_filter_blocks(False)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    return options


class RocksDBEngine:
    """RocksDB with big-endian keys; a load is written in batches, and compacted at its end."""

    name = "RocksDB"

    def __init__(self, folder):
        from rocksdict import Rdict, WriteBatch  # noqa: PLC0415 - as above

        self._database = Rdict(str(folder / "table.rocksdb"), rocksdb_options(LOAD_ROWS))
        self._new_batch = WriteBatch

    def load(self, parquet):
        for rows in pq.ParquetFile(parquet).iter_batches(LOAD_ROWS):
            keys, values = rows["k"].to_numpy(), rows["v"].to_numpy()
            batch = self._new_batch(raw_mode=True)
            for key, value in zip(key_bytes(keys), values.astype("<i8").view("V8").tolist(), strict=True):
                batch.put(key, value)
            self._database.write(batch)
        self._database.flush()
        self._database.compact_range(None, None)

    def close(self):
        self._database.close()


ENGINES = (HeadraceEngine, DuckDBEngine, SQLiteEngine, LMDBEngine)


def scattered(rng, rows, count):
    """Return `count` distinct keys of a table whose keys are the even numbers below 2 * rows."""
    return np.sort(rng.choice(rows, count, replace=False)).astype(np.int64) * 2


def local(rng, rows, count):
    """Return adjacent keys from a random position."""
    start = rng.integers(0, rows - count + 1)
    return np.arange(start, start + count, dtype=np.int64) * 2
