"""Look-ups of unique one-word keys in the order of the stream."""

from decimal import Decimal
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ
from headrace.storage import Table
from headrace.storage.format import Keys, KeyWords
from headrace.storage.probe import LeafRanges

SEEDS = st.integers(0, 2**32 - 1)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
ROWS = 60_000


def relation(rng, keys):
    """A table with all kinds of columns, every one with nulls."""
    rows = len(keys)

    def some(values):
        return pa.array(values, mask=rng.random(rows) < 0.2)

    return pa.table({
        "k": keys,
        "small": some(rng.integers(-9, 9, rows).astype(np.int8)),
        "text": some([f"text {key}" for key in keys]),
        "price": some([Decimal(int(key)) * 10**9 for key in keys]).cast(pa.decimal128(38, 2)),
        "flag": some(rng.random(rows) < 0.5),
        "ratio": some(rng.random(rows)),
    })  # fmt: skip


def probes(rng, keys, rows):
    """Keys of the table, keys beside them, and nulls."""
    values = rng.choice(keys, rows).astype(object) + rng.choice([0, 0, 0, 1, -1], rows)
    inside = np.clip(values.astype(float), LOWEST, HIGHEST) == values.astype(float)
    kept = [int(value) if LOWEST <= value <= HIGHEST else 0 for value in values]
    return pa.array(kept, pa.int64(), mask=~inside | (rng.random(rows) < 0.1))


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, shape=st.sampled_from(["even", "bunched", "ends"]), how=st.sampled_from(["inner", "left"]))
def test_results_are_those_of_arrow(tools, tmp_path_factory, seed, shape, how):
    rng = np.random.default_rng(seed)
    source = relation(rng, tools.unique_keys(rng, shape, int(rng.integers(1, 3000))))
    path = tmp_path_factory.mktemp("direct") / "t"
    stream = pa.table({"at": np.arange(2000), "s": probes(rng, source["k"].to_numpy(), 2000)})
    with Table.build(path, source, key=["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, [("s", "k")], how, "8MiB", input_threshold=300, stream_threshold=1000)
        assert join.store.direct is not None
        found = [batch for part in stream.to_batches(500) for batch in join.push(part)]
        got = pa.Table.from_batches([*found, *join.finish()], join.output_schema(stream.schema))
    kind = "inner" if how == "inner" else "left outer"
    wanted = stream.join(source, "s", "k", kind).select(got.column_names)
    assert got.sort_by("at").equals(wanted.sort_by("at").cast(got.schema))


@given(seed=SEEDS, shape=st.sampled_from(["even", "bunched", "ends"]))
@settings(max_examples=30, deadline=None)
def test_leaves_are_those_of_the_index(tools, tmp_path_factory, seed, shape):
    rng = np.random.default_rng(seed)
    keys = tools.unique_keys(rng, shape, int(rng.integers(1, 20_000)))
    with Table.build(tmp_path_factory.mktemp("ranges") / "t", pa.table({"k": keys}), key=["k"], unique=True) as table:
        snapshot = table.snapshot()
        codes = snapshot.codec.encode([pa.array(np.concatenate([keys, keys - 1, [LOWEST, HIGHEST, 0]]))]).prefix
        frames = np.arange(len(snapshot.leaf_pages), dtype=np.int32)
        ranges = LeafRanges(snapshot)
        leaf, frame, waiting = ranges.locate(KeyWords(codes), frames)
        assert waiting == 0
        assert np.array_equal(leaf, frame)
        assert np.array_equal(leaf, snapshot.locate(Keys("u64", codes.copy()))[0])
        assert ranges.held <= LeafRanges.nbytes(len(frames))


@pytest.mark.parametrize("how", ["inner", "left"])
def test_an_empty_table_matches_nothing(tmp_path, how):
    with Table.build(tmp_path / "t", pa.table({"k": pa.array([], pa.int64())}), key=["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], how)
        rows = [len(batch) for batch in [*join.push(pa.record_batch({"s": [1, None]})), *join.finish()]]
        assert sum(rows) == (2 if how == "left" else 0)


@pytest.fixture(scope="module")
def dense(build):
    """Keys 0, 1, 2, ... and seven times the key."""
    with build(pa.table({"k": np.arange(ROWS), "v": 7 * np.arange(ROWS)}), ["k"], unique=True) as table:
        yield table


def pushed_early(join, batches):
    """Yield the results; each batch comes when the first of those of the one before is out."""
    for batch in batches:
        yield from islice(join.push(batch), 1)
    yield from join.finish()


def numbered_batches(seed, count, size, most):
    """Batches of a random key up to one and of a number that no other tuple has."""
    keys = np.random.default_rng(seed).integers(0, most, (count, size))
    numbers = np.arange(count * size).reshape(count, size)
    return [pa.record_batch({"s": part, "at": at}) for part, at in zip(keys, numbers, strict=True)]


def assert_complete(batches, results, how):
    got = pa.Table.from_batches(results).sort_by("at")
    stream = pa.Table.from_batches(batches)
    found = pc.less(stream["s"], ROWS)
    wanted = stream.append_column("v", pc.if_else(found, pc.multiply(stream["s"], 7), None))
    assert got.equals((wanted if how == "left" else wanted.filter(found)).combine_chunks())


@pytest.mark.parametrize("how", ["inner", "left"])
def test_where_all_pages_stay_every_tuple_is_joined_once(dense, how):
    batches = numbered_batches(4, 6, 50_000, 2 * ROWS)
    join = SSIJ(dense, [("s", "k")], how, "16MiB", stream_threshold=90_000, threads=2)
    results = list(pushed_early(join, batches))
    stats = join.stats
    assert_complete(batches, results, how)
    assert stats.rows_done == 300_000
    assert stats.join_phases >= 1
    assert stats.pages_read == stats.pages_wanted == stats.pages_kept == stats.pages_cached
    assert stats.memory.peak <= stats.memory.limit


def test_tuples_wait_together_as_long_as_there_is_room(dense):
    batches = numbered_batches(5, 12, 20_000, ROWS)
    join = SSIJ(dense, [("s", "k")], "inner", "3MiB", stream_threshold=10**9, threads=2)
    results = [result for batch in batches for result in join.push(batch)]
    assert join.stats.join_phases >= 1
    assert join.stats.rows_held > 0
    assert_complete(batches, [*results, *join.finish()], "inner")
    assert join.stats.memory.peak <= join.stats.memory.limit
