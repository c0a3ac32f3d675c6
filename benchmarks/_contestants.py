"""The join operators and DuckDB behind one interface: `step` takes in some of the stream, `complete` ends."""

import time
from itertools import cycle

import duckdb
import pyarrow as pa

from joins import SSIJ, IndexNestedLoops, MeshJoin

__all__ = ["DuckDBJoin", "OperatorJoin", "operators"]

ON = [("key", "id")]
FIRST_PIECE = 1_024
PIECE_SECONDS = 0.05


def operators():
    """Return the operators of this project by name."""
    return {"SSIJ": SSIJ, "MeshJoin": MeshJoin, "index nested loops": IndexNestedLoops}


class OperatorJoin:
    """One operator fed with a stream without end, in pieces that grow until one takes `PIECE_SECONDS`."""

    def __init__(self, name, table, batches, memory):
        self.name = name
        self._operator = operators()[name](table, on=ON, how="inner", memory=memory)
        self._stream = cycle(batches)
        self._batch = next(self._stream)
        self._most = self._batch.num_rows
        self._rows = FIRST_PIECE
        self._read = self._operator.stats

    def first(self):
        """Return the next piece of the stream and its join."""
        piece = self._next()
        results = [*self._operator.push(piece), *self._operator.flush()]
        return piece, pa.Table.from_batches(results)

    def warm_up(self, tuples, seconds):
        """Fill the cache with that many tuples or for that long, and find the size of a piece."""
        done, began = 0, time.perf_counter()
        while done < tuples and time.perf_counter() - began < seconds:
            started = time.perf_counter()
            done += self.step()
            if time.perf_counter() - started < PIECE_SECONDS:
                self._rows *= 2
        self.complete()
        self._read = self._operator.stats

    def step(self):
        """Push some of the stream and return how many tuples that was."""
        piece = self._next()
        self._operator.push(piece).drain()
        return piece.num_rows

    def complete(self):
        """Bring out all that waits."""
        self._operator.flush().drain()

    def details(self):
        """Return what the operator counted since it was asked last."""
        now = self._operator.stats
        interval, self._read = now - self._read, now
        return {
            "piece_rows": min(self._rows, self._most),
            "hit_ratio": round(interval.hit_ratio, 4),
            "pages_wanted": interval.pages_wanted,
            "pages_read": interval.pages_read,
            "seeks": interval.seeks,
            "peak_memory": interval.memory.peak,
        }

    def close(self):
        self._operator.finish().drain()

    def _next(self):
        """Return the next piece of the stream; pieces end with their batch."""
        if not self._batch.num_rows:
            self._batch = next(self._stream)
        piece = self._batch.slice(0, self._rows)
        self._batch = self._batch.slice(len(piece))
        return piece


class DuckDBJoin:
    """DuckDB joins each batch with its own copy of the table, on all cores, within the same memory where it can."""

    name = "DuckDB"

    def __init__(self, path, batches, memory):
        self._connection = duckdb.connect(str(path), read_only=True)
        self._connection.execute(f"SET memory_limit = '{memory}B'")
        self._batches = cycle(batches)

    @staticmethod
    def load(path, table):
        """Store the table in a database file."""
        with duckdb.connect(str(path)) as connection:
            connection.register("source", table)
            connection.execute("CREATE TABLE dimension AS SELECT * FROM source")
            connection.execute("CHECKPOINT")

    def first(self):
        batch = next(self._batches)
        return batch, self._join(batch)

    def step(self):
        return self._join(next(self._batches)).num_rows

    def complete(self):
        """Nothing waits: each batch is joined at once."""

    def warm_up(self, _tuples, _seconds):
        self.step()
        self.step()

    def details(self):
        return {}

    def close(self):
        self._connection.close()

    def _join(self, batch):
        self._connection.register("stream", pa.Table.from_batches([batch]))
        query = "SELECT stream.*, wide, narrow FROM stream JOIN dimension ON key = id"
        return self._connection.sql(query).to_arrow_table()
