import bisect
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from arrow_strategies import rows_of, tables, values_in
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage.errors import InputError, SchemaError
from headrace.storage.format.coercion import conform
from headrace.storage.format.columns import stored_schema
from headrace.storage.format.layout import LeafLayout
from headrace.storage.format.page import seal_pages
from headrace.storage.leaf.decode import (
    decode_pages,
    expand_matches,
    gather,
    gather_runs,
    search,
    search_nearest,
    search_range,
    verify,
)
from headrace.storage.leaf.encode import LeafEncoder

PAGE_SIZES = st.sampled_from([4096, 8192, 16384, 32768, 65536])


class Encoded:
    """A table in key order and its leaves."""

    def __init__(self, table, key, page_size=4096, limit=None, repeat=1):
        schema = stored_schema(table.schema, key)
        self.layout = LeafLayout(schema, key, page_size)
        rows = conform(pa.concat_tables([table] * repeat), schema)
        order = self.layout.codec.encode(rows).argsort()
        self.rows = pa.Table.from_batches([rows.take(pa.array(order))])
        self.keys = self.layout.codec.encode(self.rows)
        payload = [self.rows.column(name).combine_chunks() for name in self.layout.payload.names]
        encoder = LeafEncoder(self.layout, self.keys, payload)
        self.leaves = encoder.write(encoder.plan(limit or page_size))
        self.frames = self.leaves.pages
        self.count = len(self.leaves.counts)

    def decoded(self):
        arrays = decode_pages(self.layout, self.frames, np.arange(self.count, dtype=np.int32))
        return pa.table(arrays, schema=self.layout.schema)


@given(tables(), PAGE_SIZES, st.sampled_from([1, 40]))
def test_leaves_hold_what_was_encoded(case, page_size, repeat):
    encoded = Encoded(*case, page_size=page_size, repeat=repeat)
    decoded = encoded.decoded()
    decoded.validate(full=True)
    assert rows_of(decoded) == rows_of(encoded.rows)


@given(tables(), st.sampled_from([200, 1000, 4096]))
def test_pages_take_no_more_than_the_limit_but_at_least_one_row(case, limit):
    encoded = Encoded(*case, limit=limit, repeat=10)
    used = [4096 - len(page) + len(page.rstrip(b"\0")) for page in np.split(encoded.frames[:-8], encoded.count or 1)
            for page in [page.tobytes()]] if encoded.count else []  # fmt: skip
    for size, rows in zip(used, encoded.leaves.counts, strict=True):
        assert rows >= 1
        assert size <= limit or rows == 1


def search_twin(encoded, frame, wanted):
    """Find keys one by one in lists."""
    raw = [encoded.keys.comparable(row) for row in range(len(encoded.keys))]
    first = encoded.leaves.first
    result = []
    for number, key in zip(frame.tolist(), wanted, strict=True):
        page = raw[first[number] : first[number + 1]] if number >= 0 else []
        result.append((page.index(key) if key in page else 0, page.count(key)))
    return result


@settings(max_examples=60)
@given(tables(max_payload=1), st.sampled_from([1, 30]), st.randoms(use_true_random=False))
def test_search_finds_what_a_list_finds(case, repeat, random):
    encoded = Encoded(*case, limit=600, repeat=repeat)
    wanted = [random.randrange(len(encoded.keys)) for _ in range(50)] if len(encoded.keys) else []
    keys = encoded.keys.take(np.array(wanted, dtype=np.int64))
    frame = np.array([random.randrange(-1, encoded.count) for _ in wanted], dtype=np.int32)
    row, count = search(encoded.layout, encoded.frames, frame, keys)
    expected = search_twin(encoded, frame, [keys.comparable(at) for at in range(len(keys))])
    assert list(zip(row.tolist(), count.tolist(), strict=True)) == expected


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 400) | st.integers(2**64 - 9, 2**64 - 1), max_size=300),
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 400) | st.integers(2**64 - 9, 2**64 - 1), max_size=30),
)
def test_search_of_integers_equals_numpy(stored, wanted):
    encoded = Encoded(pa.table({"k": pa.array(stored, pa.uint64())}), ["k"])
    keys = encoded.layout.codec.encode([pa.array(wanted + stored, pa.uint64())])
    frame = np.full(len(keys), 0 if encoded.count else -1, dtype=np.int32)
    ordered = encoded.keys.prefix[: int(encoded.leaves.counts[0])] if encoded.count else encoded.keys.prefix
    row, count = search(encoded.layout, encoded.frames, frame, keys)
    low, high = np.searchsorted(ordered, keys.prefix), np.searchsorted(ordered, keys.prefix, "right")
    assert count.tolist() == (high - low).tolist()
    assert row.tolist() == np.where(high > low, low, 0).tolist()


@settings(max_examples=60)
@given(tables(max_payload=1), st.sampled_from([1, 30]), st.booleans(), st.randoms(use_true_random=False))
def test_search_of_ranges_finds_what_a_list_finds(case, repeat, closed, random):
    encoded = Encoded(*case, limit=600, repeat=repeat)
    raw = [encoded.keys.comparable(row) for row in range(len(encoded.keys))]
    ends = [sorted(random.randrange(len(raw)) for _ in "ab") for _ in range(50)] if raw else []
    low, high = (encoded.keys.take(np.array([end[side] for end in ends], dtype=np.int64)) for side in (0, 1))
    frame = np.array([random.randrange(-1, encoded.count) for _ in ends], dtype=np.int32)
    closed = closed or not low.wide
    every = list(zip(*search_range(encoded.layout, encoded.frames, frame, low, high, closed=closed), strict=True))
    last, first = (
        list(zip(*search_nearest(encoded.layout, encoded.frames, frame, low, high, last=side), strict=True))
        for side in (True, False)
    )
    for at, number in enumerate(frame.tolist()):
        page = raw[encoded.leaves.first[number] : encoded.leaves.first[number + 1]] if number >= 0 else []
        bottom, top = low.comparable(at), high.comparable(at)
        inside = [row for row, key in enumerate(page) if bottom <= key < top or (closed and bottom <= key == top)]
        assert every[at][1] == len(inside)
        assert not inside or every[at][0] == inside[0]
        under = [row for row, key in enumerate(page) if key <= top]
        over = [row for row, key in enumerate(page) if key >= bottom]
        assert number < 0 or last[at][1] == (-1 if not under else page[under[-1]] >= bottom)
        assert number < 0 or first[at][1] == (-1 if not over else page[over[0]] <= top)
        assert last[at][1] < 1 or last[at][0] == under[-1]
        assert first[at][1] < 1 or first[at][0] == over[0]


PARTS = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3) | st.integers(-300, 300)


@given(
    st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=150),
    st.lists(st.tuples(PARTS, PARTS), max_size=40),
    st.booleans(),
)
def test_search_of_keys_of_one_length_finds_what_a_list_finds(stored, other, closed):
    """Two numbers of eight bytes: they lie side by side in a page, and keys of different pages share few bytes."""
    table = pa.table({"a": [a for a, _ in stored], "b": [b for _, b in stored]})
    encoded = Encoded(table, ["a", "b"])
    assert encoded.count == 1
    ordered = sorted(stored)
    asked = [*stored, *other, *((a, max(b - 1, -(2**63))) for a, b in stored)]
    ends = [sorted(pair) for pair in zip(asked, [*asked[1:], asked[0]], strict=True)]
    low, high = (
        encoded.layout.codec.encode([pa.array([end[side][part] for end in ends]) for part in (0, 1)]) for side in (0, 1)
    )
    frame = np.zeros(len(ends), dtype=np.int32)
    row, count = search_range(encoded.layout, encoded.frames, frame, low, high, closed=closed)
    first = [bisect.bisect_left(ordered, bottom) for bottom, _ in ends]
    stop = [(bisect.bisect_right if closed else bisect.bisect_left)(ordered, top) for _, top in ends]
    assert count.tolist() == [max(end - begin, 0) for begin, end in zip(first, stop, strict=True)]
    assert all(at == begin for at, begin, size in zip(row.tolist(), first, count.tolist(), strict=True) if size)


@given(st.sets(st.integers(0, 2**64 - 1) | st.integers(0, 400), max_size=300))
def test_search_of_unique_keys_finds_each_once(stored):
    encoded = Encoded(pa.table({"k": pa.array(sorted(stored), pa.uint64())}), ["k"])
    frame = np.repeat(np.arange(encoded.count, dtype=np.int32), encoded.leaves.counts)
    row, count = search(encoded.layout, encoded.frames, frame, encoded.keys, unique=True)
    assert (count == 1).all()
    assert row.tolist() == [at for rows in encoded.leaves.counts for at in range(rows)]


@settings(max_examples=60)
@given(tables(), st.randoms(use_true_random=False))
def test_gather_takes_rows_in_any_order_and_nulls_for_nowhere(case, random):
    encoded = Encoded(*case, limit=600, repeat=5)
    total = len(encoded.keys)
    wanted = [random.randrange(-1, total) for _ in range(40)] if total else [-1, -1]
    place = np.searchsorted(encoded.leaves.first, wanted, side="right") - 1
    frame = place.astype(np.int32)
    row = (np.array(wanted) - encoded.leaves.first[np.maximum(place, 0)]).astype(np.int32)
    names = encoded.layout.schema.names
    got = gather(encoded.layout, encoded.frames, frame, row, names)
    index = pa.array(wanted, pa.int64(), mask=np.array(wanted) < 0)
    assert [values_in(array) for array in got] == [values_in(encoded.rows.column(name).take(index)) for name in names]


@settings(max_examples=60)
@given(tables(), st.randoms(use_true_random=False))
def test_runs_of_rows_are_gathered_like_their_rows(case, random):
    encoded = Encoded(*case, limit=600, repeat=5)
    counts = encoded.leaves.counts.tolist()
    runs = []
    for _ in range(20):
        frame = random.randrange(-1, encoded.count)
        row = random.randrange(counts[frame]) if frame >= 0 else 0
        runs.append((frame, row, random.randint(1, counts[frame] - row if frame >= 0 else 3)))
    frame, row, lengths = (np.array(part, dtype=np.int32) for part in zip(*runs, strict=True))
    ends, names = np.cumsum(lengths, dtype=np.int64), encoded.layout.schema.names
    got = gather_runs(encoded.layout, encoded.frames, frame, row, ends, names)
    rows = np.concatenate([np.arange(begin, begin + length, dtype=np.int32) for _, begin, length in runs])
    expected = gather(encoded.layout, encoded.frames, np.repeat(frame, lengths), rows, names)
    assert [values_in(array) for array in got] == [values_in(array) for array in expected]
    assert [array.type for array in got] == [array.type for array in expected]
    assert all(array.validate(full=True) is None for array in got)


def test_no_runs_are_no_rows():
    encoded = Encoded(pa.table({"k": [1, 2], "v": [3, 4], "t": ["a", "b"]}), ["k"])
    none = np.empty(0, dtype=np.int32)
    got = gather_runs(encoded.layout, encoded.frames, none, none, none.astype(np.int64), ["t", "v"])
    assert [(array.type, len(array)) for array in got] == [(pa.string(), 0), (pa.int64(), 0)]


def test_runs_of_numbers_take_only_the_memory_of_their_columns():
    encoded = Encoded(pa.table({"k": range(500), "v": range(0, 5000, 10)}), ["k"])
    runs = 200
    rows, frame = runs * 500, np.zeros(runs, dtype=np.int32)
    ends = np.arange(1, runs + 1, dtype=np.int64) * 500
    assert encoded.count == 1
    tracemalloc.start()
    try:
        got = gather_runs(encoded.layout, encoded.frames, frame, np.zeros_like(frame), ends, ["v"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(got[0]) == rows
    assert peak < rows * (8 + 1) + 10_000  # values, and whether each is present


def test_matches_are_expanded_in_order():
    frame, row, origin = expand_matches(*(np.array(a, dtype=np.int32) for a in ([4, 4, 9], [7, 0, 2], [2, 0, 3])))
    assert frame.tolist() == [4, 4, 9, 9, 9]
    assert row.tolist() == [7, 8, 2, 3, 4]
    assert origin.tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("column", "most"),
    [
        (pa.array([7] * 1000), 0),
        (pa.array(range(10**12, 10**12 + 1000)), 2),
        (pa.array([None] * 1000, pa.float64()), 0.125),
        (pa.array(["ORD", "JFK", "LGA", "EWR"] * 250), 1.03),
        (pa.array(["ORD"] * 1000), 0.01),
        (pa.array([f"N{n:05}" for n in range(1000)]), 6),
        (pa.array([n % 2 == 0 for n in range(1000)]), 1),
    ],
    ids=["constant", "close integers", "all null", "repetitive", "constant text", "text of one length", "flags"],
)
def test_columns_take_few_bytes(column, most):
    plain = Encoded(pa.table({"k": pa.array(range(1000))}), ["k"], page_size=65536)
    with_column = Encoded(pa.table({"k": pa.array(range(1000)), "v": column}), ["k"], page_size=65536)
    size = [len(e.frames.tobytes().rstrip(b"\0")) for e in (plain, with_column)]
    assert with_column.count == 1
    assert size[1] - size[0] - 16 <= most * 1000 + 2


def test_rows_without_any_bytes_are_bounded_by_the_page_size():
    encoded = Encoded(pa.table({"k": pa.array([1] * 10_000), "v": pa.array([2] * 10_000)}), ["k"])
    assert encoded.leaves.counts.tolist() == [4096, 4096, 1808]


def test_a_row_beyond_a_page_is_named():
    table = pa.table({"k": [1, 2], "v": ["short", "x" * 5000]})
    with pytest.raises(InputError, match="the row with the key k=2 does not fit in a page of 4096 bytes"):
        Encoded(table, ["k"])


def test_a_row_beyond_the_limit_has_a_page_of_its_own():
    table = pa.table({"k": [1, 2, 3], "v": ["a", "x" * 3900, "b"]})
    assert Encoded(table, ["k"], limit=1000).leaves.counts.tolist() == [1, 1, 1]


def test_a_key_beyond_a_quarter_of_a_page_is_named():
    with pytest.raises(InputError, match=r"key k=x+\.\.\. takes 1025 bytes, but .* keys of at most 1024"):
        Encoded(pa.table({"k": ["a", "x" * 1025]}), ["k"])


def test_too_many_columns_for_a_page_are_refused():
    table = pa.table({f"c{n}": [1] for n in range(200)})
    with pytest.raises(SchemaError, match="200 columns need 3224 bytes of each page of 4096"):
        Encoded(table, ["c0"])


def test_an_unknown_column_is_named():
    encoded = Encoded(pa.table({"k": [1], "v": [2]}), ["k"])
    nowhere = np.array([-1], dtype=np.int32)
    with pytest.raises(SchemaError, match="no column 'w'; its columns are 'k', 'v'"):
        gather(encoded.layout, encoded.frames, nowhere, nowhere, ["w"])


def test_sealed_pages_verify_and_changed_ones_do_not():
    encoded = Encoded(pa.table({"k": range(4000)}), ["k"])
    numbers = np.arange(encoded.count, dtype=np.int64) + 10
    checksums = seal_pages(encoded.frames, 4096, numbers, 3)
    frame = np.arange(encoded.count, dtype=np.int64)
    page = encoded.frames[4096:8192]
    assert checksums[1] == xxhash.xxh64_intdigest(page[8:].tobytes(), seed=11)
    assert verify(encoded.frames, 4096, numbers, checksums, frame) == -1
    assert verify(encoded.frames, 4096, numbers, None, frame) == -1
    assert verify(encoded.frames, 4096, numbers + 1, None, frame) == 0
    page[100] ^= 1
    assert verify(encoded.frames, 4096, numbers, None, frame) == 1


def test_a_page_has_the_bytes_that_the_format_says():
    table = pa.table(
        {"k": pa.array([5, 7, 9], pa.int64()), "c": ["b", None, "cd"], "v": pa.array([300, 1, 2], pa.int32())}
    )
    encoded = Encoded(table, ["k"])
    seal_pages(encoded.frames, 4096, np.array([6]), 2)
    raw = encoded.frames.tobytes()
    assert raw[8:24].hex() == "02000000000000000100000003000000"
    key, text, value = raw[24:40], raw[40:56], raw[56:72]
    assert key.hex() == "05000000000000804800000000000100"
    assert text.hex() == "00000000000000004c004f004b000101"
    assert value.hex() == "01000000000000005200000000000200"
    assert raw[72:88].hex() == "00020402010103" + b"bcd".hex() + "2b0100000100"
    assert raw[88:4096] == bytes(4008)
