"""Look-ups of unique one-word keys in the order of the stream."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joins import SSIJ
from storage import Table
from storage.key_words import KeyWords
from storage.keys import Keys
from storage.leaf_ranges import LeafRanges

SEEDS = st.integers(0, 2**32 - 1)
LOWEST, HIGHEST = -(2**63), 2**63 - 1


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
        assert np.array_equal(leaf, snapshot.locate(Keys("u64", codes))[0])
        assert ranges.held <= LeafRanges.nbytes(len(frames))


@pytest.mark.parametrize("how", ["inner", "left"])
def test_an_empty_table_matches_nothing(tmp_path, how):
    with Table.build(tmp_path / "t", pa.table({"k": pa.array([], pa.int64())}), key=["k"], unique=True) as table:
        join = SSIJ(table, [("s", "k")], how)
        rows = [len(batch) for batch in [*join.push(pa.record_batch({"s": [1, None]})), *join.finish()]]
        assert sum(rows) == (2 if how == "left" else 0)
