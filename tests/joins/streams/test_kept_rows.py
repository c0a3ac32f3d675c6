"""`KeptRows`: what is kept is all of a batch or nothing, and a probe finds exactly its matches."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.joins.streams.hashing.kept_rows import KeptRows
from headrace.storage.errors import MemoryBudgetError

SCHEMAS = {name: pa.schema([("k", pa.int64()), ("t", pa.string())]) for name in "ab"}


def batch(keys):
    return pa.record_batch([pa.array(keys, pa.int64()), [f"text {key}" for key in keys]], schema=SCHEMAS["a"])


def pairs(results):
    return sorted(zip(*(pa.Table.from_batches(results).column(at).to_pylist() for at in (0, 2)), strict=True))


def test_a_probe_finds_matches_of_the_other_input_only(rng):
    rows = KeptRows(SCHEMAS, [("a.k", "b.k")], "1MiB")
    left, right = (rng.integers(0, 20, 200).tolist() for _ in range(2))
    assert rows.keep(0, batch([*left, None]))
    assert rows.keep(1, batch([100]))
    found = pairs(list(rows.probe(1, batch([*right, None, 100]))))
    assert found == sorted((key, key) for key in left for other in right if key == other)


def test_a_probe_can_leave_out_what_was_kept_last():
    rows = KeptRows(SCHEMAS, [("a.k", "b.k")], "1MiB")
    rows.keep(0, batch([1, 2]))
    before = rows.count(0)
    rows.keep(0, batch([1, 1]))
    assert len(pairs(list(rows.probe(1, batch([1]))))) == 3
    assert len(pairs(list(rows.probe(1, batch([1]), before)))) == 1


def test_a_batch_that_does_not_fit_leaves_nothing():
    rows = KeptRows(SCHEMAS, [("a.k", "b.k")], "256KiB")
    assert rows.keep(0, batch(range(100)))
    assert not rows.keep(0, batch(range(5000)))
    assert rows.count(0) == 100
    assert pairs(list(rows.probe(1, batch([7])))) == [(7, 7)]
    rows.free(0)
    assert rows.count(0) == 0
    assert list(rows.probe(1, batch(np.arange(3).tolist()))) == []


def test_three_inputs_are_refused():
    with pytest.raises(Exception, match="two inputs"):
        KeptRows({**SCHEMAS, "c": SCHEMAS["a"]}, [("a.k", "b.k"), ("b.k", "c.k")], "1MiB")


def test_too_little_memory_is_refused():
    with pytest.raises(MemoryBudgetError):
        KeptRows(SCHEMAS, [("a.k", "b.k")], "1KiB")
