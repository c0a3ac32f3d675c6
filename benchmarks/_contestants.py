"""The join operators and DuckDB behind one interface: `run` joins for some time and returns the number of tuples."""

import time
from itertools import cycle

import duckdb
import pyarrow as pa

from headrace.joins import SSIJ, IndexNestedLoops, MeshJoin

__all__ = ["DuckDBJoin", "OperatorJoin", "operators"]

ON = [("key", "id")]
FIRST_PIECE = 1_024
PIECE_SECONDS = 0.05
LONGEST = 10  # maximum length of a round, relative to its target: the join phase of a slow operator may come late


def operators():
    """Return the operators of this project by name."""
    return {"SSIJ": SSIJ, "MeshJoin": MeshJoin, "index nested loops": IndexNestedLoops}


class OperatorJoin:
    """One operator fed with an endless stream, in pieces that grow until one takes `PIECE_SECONDS`."""

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
        """Fill the cache with `tuples` tuples or for `seconds`, and determine the piece size.

        A contestant that has completed no tuple by then continues until it does: MeshJoin needs a full cycle.
        """
        began = time.perf_counter()
        while (done := self._operator.stats.rows_done) < tuples:
            started = time.perf_counter()
            if started - began >= seconds and done:
                break
            self._operator.push(self._next()).drain()
            if time.perf_counter() - started < PIECE_SECONDS:
                self._rows = min(2 * self._rows, self._most)
        self._read = self._operator.stats

    def run(self, seconds):
        """Join for `seconds`, and until no more tuples wait than at the start; return the completed tuples."""
        before, started = self._operator.stats, time.perf_counter()
        while True:
            spent, now = time.perf_counter() - started, self._operator.stats
            if spent >= seconds and (now.rows_held <= before.rows_held or spent >= LONGEST * seconds):
                return now.rows_done - before.rows_done
            self._operator.push(self._next()).drain()

    def details(self):
        """Return the operator's counters since the last call."""
        now = self._operator.stats
        interval, self._read = now - self._read, now
        return {
            "piece_rows": self._rows,
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
    """DuckDB joins each batch with its own copy of the table, on all cores, within the same memory if possible."""

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

    def run(self, seconds):
        """Join batches for `seconds`; return the number of tuples."""
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            done += self._join(next(self._batches)).num_rows
        return done

    def warm_up(self, _tuples, seconds):
        self.run(seconds / 2)

    def details(self):
        return {}

    def close(self):
        self._connection.close()

    def _join(self, batch):
        self._connection.register("stream", pa.Table.from_batches([batch]))
        query = "SELECT stream.*, wide, narrow FROM stream JOIN dimension ON key = id"
        return self._connection.sql(query).to_arrow_table()
