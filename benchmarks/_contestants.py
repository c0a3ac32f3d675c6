"""The join operators under test and DuckDB, behind one small interface: `step` joins some more of the stream."""

from itertools import cycle

import duckdb
import pyarrow as pa

from joins import SSIJ, IndexNestedLoops, MeshJoin

__all__ = ["DuckDBJoin", "OperatorJoin", "operators"]

ON = [("key", "id")]


def operators():
    """Return the operators of this project by name."""
    return {"SSIJ": SSIJ, "MeshJoin": MeshJoin, "index nested loops": IndexNestedLoops}


class OperatorJoin:
    """One operator fed with a stream without end; counts the tuples whose join is complete."""

    def __init__(self, name, table, batches, memory, step_rows):
        self.name = name
        self._operator = operators()[name](table, on=ON, how="inner", memory=memory)
        self._pieces = cycle(piece for batch in batches for piece in _cut(batch, step_rows))
        self._read = self._operator.stats

    def first(self):
        """Return the next piece of the stream and its join."""
        piece = next(self._pieces)
        results = [*self._operator.push(piece), *self._operator.flush()]
        return piece, pa.Table.from_batches(results)

    def warm_up(self, tuples):
        """Join until the cache has seen that many tuples."""
        before = self._operator.stats.rows_in
        while self._operator.stats.rows_in - before < tuples:
            self._operator.push(next(self._pieces)).drain()
        self._read = self._operator.stats

    def step(self):
        """Push some of the stream and return how many tuples got complete, those of earlier pushes included."""
        before = self._operator.stats.rows_done
        self._operator.push(next(self._pieces)).drain()
        return self._operator.stats.rows_done - before

    def details(self):
        """Return what the operator counted since it was asked last."""
        now = self._operator.stats
        interval, self._read = now - self._read, now
        return {
            "hit_ratio": round(interval.hit_ratio, 4),
            "pages_wanted": interval.pages_wanted,
            "pages_read": interval.pages_read,
            "seeks": interval.seeks,
            "peak_memory": interval.memory.peak,
        }

    def close(self):
        self._operator.finish().drain()


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

    def warm_up(self, _tuples):
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


def _cut(batch, rows):
    return [batch.slice(start, rows) for start in range(0, batch.num_rows, rows)]
