"""A join operator of the simplest kind, and small dimensions, for tests of what is built on operators."""

import random

import pyarrow as pa
import pytest


class DictJoin:
    """A left join through a dict that gives its results late, in another order and in other batches."""

    def __init__(self, table, on, columns, seed=0):
        self._on = on
        self._columns = columns
        self._members = {}
        self._types = [table.schema.field(name).type for name in columns]
        for row in table.to_pylist():
            self._members[tuple(row[name] for _, name in on)] = [row[name] for name in columns]
        self._random = random.Random(seed)
        self._held = []

    def push(self, batch):
        self._held.append(batch)
        if self._random.random() < 0.5:
            yield from self._take()

    def flush(self):
        yield from self._take()

    def _take(self):
        while self._held:
            batch = self._held.pop(self._random.randrange(len(self._held)))
            order = list(range(batch.num_rows))
            self._random.shuffle(order)
            batch = batch.take(pa.array(order, pa.int64()))
            keys = zip(*(batch.column(name).to_pylist() for name, _ in self._on), strict=True)
            found = [self._members.get(key, [None] * len(self._columns)) for key in keys]
            added = [pa.array([row[i] for row in found], kind) for i, kind in enumerate(self._types)]
            named = zip(self._columns, added, strict=True)
            fields = [*batch.schema, *(pa.field(f"{name}_right", array.type) for name, array in named)]
            yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=pa.schema(fields))


@pytest.fixture(scope="session")
def dict_join():
    return DictJoin
