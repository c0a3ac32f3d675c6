"""SSIJ's record tier: the same results with it and without, and a tier that is active only where it pays."""

import datetime as dt
from decimal import Context, Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.joins import SSIJ
from headrace.joins.ssij.memory.record_tier import RecordTier, part_offered

KEYS = 60_000
POPULAR = 200
WIDE = Context(prec=38)
FIXED_TYPES = [
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.date32(), pa.timestamp("us", "Asia/Tokyo"), pa.duration("ns")),
    *(pa.decimal128(9, 2), pa.decimal128(18, 0), pa.decimal128(19, 19), pa.decimal128(38, 10)),
]


@pytest.fixture(scope="module")
def relation():
    rng = np.random.default_rng(7)
    key = np.arange(KEYS)
    return pa.table(
        {
            "k": key,
            "wide": pa.array(rng.integers(-(2**62), 2**62, KEYS), mask=key % 7 == 0),
            "small": pa.array((key % 100).astype(np.int8)),
            "flag": pa.array(key % 3 == 0),
            "half": pa.array((key / 2).astype(np.float32), mask=key % 5 == 0),
            "price": pa.array(
                [None if at % 11 == 0 else Decimal(at) ** 5 for at in key.tolist()], pa.decimal128(38, 2)
            ),
            "day": pa.array([dt.date(2020, 1, 1) + dt.timedelta(days=int(at) % 999) for at in key]),
        }
    )


@pytest.fixture(scope="module")
def table(build, relation):
    with build(relation, ["k"], unique=True, page_size=4096) as table:
        yield table


def skewed(rng, size):
    """Most tuples ask for a few keys, which lie far apart; some for keys that are not there."""
    popular = rng.integers(0, POPULAR, size) * (KEYS // POPULAR)
    return np.where(rng.random(size) < 0.8, popular, rng.integers(-50, KEYS + 50, size))


def stream_of(keys, start=0):
    return pa.record_batch({"id": np.arange(start, start + len(keys)), "s_k": keys})


def joined(join, batches):
    parts = [result for batch in batches for result in join.push(batch)]
    return pa.Table.from_batches([*parts, *join.finish()]).sort_by("id")


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("memory", ["256KiB", "512KiB", "1MiB"])
def test_results_are_those_without_the_tier(table, relation, how, memory):
    rng = np.random.default_rng(1)
    batches = [stream_of(skewed(rng, 9000), start) for start in range(0, 180_000, 9000)]
    join = SSIJ(table, on=[("s_k", "k")], how=how, memory=memory)
    found = joined(join, batches)
    assert join.stats.rows_recorded > 0.3 * join.stats.rows_in
    plain = SSIJ(table, on=[("s_k", "k")], how=how, memory=memory, record_tier=False)
    assert found.equals(joined(plain, batches))
    assert plain.stats.rows_recorded == 0
    stream = pa.Table.from_batches(batches)
    oracle = stream.join(relation, "s_k", "k", f"{how} {'outer' if how == 'left' else ''}".strip()).sort_by("id")
    assert found.select(oracle.column_names).equals(oracle.cast(found.select(oracle.column_names).schema))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 3000), threads=st.sampled_from([1, 2]))
def test_a_changed_row_is_never_served_from_the_tier(build, seed, size, threads):
    rng = np.random.default_rng(seed)
    wide = {f"pad{at}": rng.integers(0, 2**62, 2000) for at in range(20)}
    rows = pa.table({"k": np.arange(2000), "v": np.zeros(2000, dtype=np.int64), **wide})
    with build(rows, ["k"], unique=True, page_size=4096) as table:
        join = SSIJ(table, on="k", how="left", memory="384KiB", threads=threads, columns=["v"])
        assert join.store.tiers.records is not None
        value = dict.fromkeys(range(2000), 0)
        for version in range(1, 6):
            keys = rng.integers(0, 40, size) * 50
            batches = [pa.record_batch({"k": keys})] * 3
            results = [result for batch in batches for result in join.push(batch)]
            gone, new = rng.integers(0, 40, 2) * 50
            changed = pa.table({"k": pa.array([new]), "v": pa.array([version]), **{name: [version] for name in wide}})
            removed = pa.table({"k": pa.array([gone])}) if gone != new else None
            results += join.apply(changed, removed)
            seen = pa.Table.from_batches(results)
            assert seen.num_rows == 3 * size
            assert seen["v"].to_pylist() == [value.get(key) for key in seen["k"].to_pylist()]
            value[int(new)] = version
            if removed is not None:
                value.pop(int(gone), None)


def column(rng, dtype, size):
    """Return random bits as values of a type, with some nulls or none or nothing else; decimals of both signs."""
    if pa.types.is_decimal(dtype):
        most = 10**dtype.precision - 1
        pool = [0, 1, -1, most, -most, *(int(part) * most // 2**31 for part in rng.integers(-(2**31), 2**31, 50))]
        values = pa.array([Decimal(number).scaleb(-dtype.scale, WIDE) for number in pool], dtype)
        values = values.take(pa.array(rng.integers(0, len(pool), size)))
    else:
        bits = pa.py_buffer(rng.bytes(8 * size))
        values = pa.Array.from_buffers(dtype, size, [None, bits])
    null = rng.random(size) < rng.choice([0, 0.1, 1])
    return pc.if_else(pa.array(null), pa.scalar(None, dtype), values)


def bits_of(array):
    """Return floats as integers of their bits, as NaN equals nothing and -0.0 equals 0.0; other arrays as they are."""
    integers = {pa.float16(): pa.int16(), pa.float32(): pa.int32(), pa.float64(): pa.int64()}
    return array.view(integers.get(array.type, array.type))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtypes=st.one_of(
        st.lists(st.sampled_from(FIXED_TYPES), min_size=1, max_size=9),
        st.builds(
            lambda dtype, count: [dtype] * count, st.sampled_from(FIXED_TYPES), st.sampled_from([63, 64, 65, 80])
        ),
    ),
    how=st.sampled_from(["inner", "left"]),
    threads=st.sampled_from([1, 2]),
)
def test_rows_of_any_columns_come_whole_from_the_tier(build, seed, dtypes, how, threads):
    rng = np.random.default_rng(seed)
    size = 3000
    payload = {f"c{at}": column(rng, dtype, size) for at, dtype in enumerate(dtypes)}
    fill = {f"f{at}": rng.integers(0, 2**62, size) for at in range(20)}
    names = rng.choice(list(payload), rng.choice([0, 1, len(payload) + 3])).tolist()  # some of them twice
    rows = pa.table({"k": np.arange(size), **payload, **fill})
    with build(rows, ["k"], unique=True, page_size=8192) as table:
        memory = 320_000 + table.stats.leaves * 8192 // 2
        options = {"how": how, "columns": names, "memory": memory, "threads": threads}
        with SSIJ(table, on="k", **options) as join:
            popular = rng.integers(-5, size + 5, 40)
            keys = [np.where(rng.random(2000) < 0.9, rng.choice(popular, 2000), rng.integers(0, size, 2000))] * 4
            parts = []
            for part in keys:
                parts += join.push(pa.record_batch({"k": part}))
                parts += join.flush()
            found = pa.Table.from_batches([*parts, *join.finish()])
            assert join.stats.rows_recorded > 1000
    wanted = np.concatenate(keys)
    absent = (wanted < 0) | (wanted >= size)
    assert len(found) == (len(wanted) if how == "left" else int((~absent).sum()))
    key = found["k"].to_numpy()
    assert np.array_equal(np.sort(key), np.sort(wanted if how == "left" else wanted[~absent]))
    place = pa.array(key, mask=(key < 0) | (key >= size))
    for at, name in enumerate(names):
        expected = payload[name].take(place)
        assert bits_of(found.column(1 + at).combine_chunks()).equals(bits_of(expected)), name


def test_a_stream_without_popular_keys_makes_the_tier_inactive(table):
    join = SSIJ(table, on=[("s_k", "k")], memory="256KiB")
    rng = np.random.default_rng(3)
    for start in range(0, 400_000, 50_000):
        join.push(stream_of(rng.permutation(KEYS)[:50_000], start)).drain()
    assert join.stats.memory.records == 0
    assert join.stats.rows_recorded < 0.05 * join.stats.rows_in


@pytest.mark.parametrize("blocks", range(1, 14))
def test_each_row_of_a_block_is_offered_in_some_rounds_of_any_number_of_blocks(blocks):
    offered = np.zeros(101, dtype=np.int64)
    for choice in range(0, 400 * blocks, blocks):
        offered[part_offered(choice, 101)] += 1
    assert offered.min() > 80
    assert offered.max() < 120


@pytest.mark.parametrize("size", [5_000, 20_000])
def test_a_warm_tier_follows_keys_that_become_popular(table, size):
    join = SSIJ(table, on=[("s_k", "k")], memory="256KiB")
    rng = np.random.default_rng(5)
    for start in range(0, 800_000, size):
        if start == 700_000:
            before = join.stats
        shift = 0 if start < 300_000 else KEYS // POPULAR // 2
        join.push(stream_of(skewed(rng, size) + shift, start)).drain()
    last = join.stats - before
    assert last.rows_recorded > 0.75 * last.rows_in  # 0.8 of them ask for a popular key


def test_a_stream_whose_keys_lie_together_makes_the_tier_inactive(table):
    join = SSIJ(table, on=[("s_k", "k")], memory="512KiB")
    rng = np.random.default_rng(9)
    for start in range(0, 300_000, 10_000):
        join.push(stream_of(20_000 + rng.zipf(1.2, 10_000) % 3000, start)).drain()
    assert join.stats.memory.records == 0
    assert join.stats.hit_ratio > 0.8


def test_the_tier_gives_way_to_a_tuple_that_needs_its_memory(table):
    join = SSIJ(table, on=[("s_k", "k")], memory="512KiB")
    rng = np.random.default_rng(5)
    for _ in range(10):
        join.push(pa.record_batch({"s_k": skewed(rng, 9000), "text": ["x"] * 9000})).drain()
    assert join.stats.memory.records > 0
    room = join.algorithm.budget.limit - join.algorithm.budget.held("index") - join.algorithm.budget.held("workspace")
    huge = "y" * (room - join.algorithm.budget.held("read_buffer") - 40_000)
    rows = [*join.push(pa.record_batch({"s_k": [KEYS - 1], "text": [huge]})), *join.finish()]
    assert sum(len(row) for row in rows if row["text"][0].as_py() == huge) == 1


def test_only_unique_keys_and_columns_of_fixed_width_have_a_tier(build, table):
    snapshot = table.snapshot()
    assert RecordTier.possible(snapshot, ["wide", "flag", "price"], 1 << 20)
    assert not RecordTier.possible(snapshot, ["k", "wide"], 1 << 20)
    assert not RecordTier.possible(snapshot, ["wide"], 100)
    text = pa.table({"k": [1, 2], "name": ["a", "b"]})
    with build(text, ["k"], unique=True) as with_text:
        assert not RecordTier.possible(with_text.snapshot(), ["name"], 1 << 20)
    with build(text.select(["k"]), ["k"]) as repeated:
        assert not RecordTier.possible(repeated.snapshot(), [], 1 << 20)


def test_a_record_takes_the_bytes_of_its_values_and_a_null_bit_for_each(table):
    snapshot, nbytes = table.snapshot(), 1 << 20
    buckets = {}
    for columns in (["small"], ["wide"], ["price", "small", "flag", "day"]):
        tier = RecordTier(snapshot, columns, nbytes)
        tier.activate()
        buckets[tuple(columns)] = len(tier._table.buckets)
        assert nbytes - 300 < tier.nbytes <= nbytes
        assert sum(part.nbytes for part in tier._table[:3]) == pytest.approx(tier.nbytes, rel=0.001)
    beside = 64 + 32  # keys and use counts of seven rows, and their share of the sketch
    widths = [2, 9, 16 + 1 + 1 + 4 + 1]  # the null bits of a decimal's two words, too, are in the last byte
    assert list(buckets.values()) == [nbytes // (beside + 7 * width) for width in widths]


def test_a_table_that_fits_into_the_memory_has_no_tier(table):
    assert SSIJ(table, on=[("s_k", "k")], memory="1MiB").store.tiers.records is not None
    assert SSIJ(table, on=[("s_k", "k")], memory="16MiB").store.tiers.records is None
