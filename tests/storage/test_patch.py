"""Leaves patched in place are what merging and encoding them anew would have made of their rows."""

import datetime as dt
import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Model, build, rows_of, writer_of

from headrace.storage.commit import _patch_kernels as kernels
from headrace.storage.commit import draft
from headrace.storage.commit.draft import PageRooms
from headrace.storage.errors import UniqueViolationError

SCHEMA = pa.schema(
    [
        ("k", pa.int32()),
        ("i", pa.int64()),
        ("b", pa.bool_()),
        ("f", pa.float64()),
        ("d", pa.date32()),
        ("w", pa.decimal128(30, 2)),
        ("t", pa.string()),
        ("r", pa.string()),
        ("x", pa.binary()),
    ]
)


def optional(strategy):
    return st.none() | strategy


row = st.fixed_dictionaries(
    {
        "k": st.integers(-60, 60),
        "i": optional(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)),
        "b": optional(st.booleans()),
        "f": optional(st.sampled_from([0.0, 1.5, -2.0])),
        "d": optional(st.integers(0, 9).map(lambda n: dt.date(2013, 1, 1) + dt.timedelta(days=n))),
        "w": optional(st.integers(-(10**25), 10**25).map(lambda n: decimal.Decimal(n) / 100)),
        "t": optional(st.text(alphabet="ab\x00ü", max_size=6)),
        "r": optional(st.sampled_from(["AA", "UA", "Delta"])),
        "x": optional(st.binary(max_size=4) | st.integers(0, 700).map(bytes)),
    }
)


@pytest.fixture
def statuses(monkeypatch):
    """Count what becomes of leaves."""
    seen = dict.fromkeys((kernels.DONE, kernels.SAME, kernels.FALLBACK, kernels.SMALL), 0)
    run = kernels.patch_leaves

    def counting(*arguments):
        clash = run(*arguments)
        for status in seen:
            seen[status] += int((arguments[8] == status).sum()) if clash < 0 else 0
        return clash

    monkeypatch.setattr(kernels, "patch_leaves", counting)
    return seen


def table_of(rows):
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def distinct(rows):
    return list({r["k"]: r for r in rows}.values())


def commit(rows, changes, unique, *, patched):
    disk = build(table_of(rows), ["k"], unique=unique, fill=0.7)
    can_patch = draft.can_patch
    draft.can_patch = can_patch if patched else lambda _: False
    try:
        results = [
            writer_of(disk).apply(
                table_of(upserts), table_of(deletes).select(["k"]), inserts=None if unique else table_of(inserts)
            )
            for upserts, deletes, inserts in changes
        ]
    finally:
        draft.can_patch = can_patch
    return results, rows_of(disk)


few = st.lists(row, max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(row, min_size=20, max_size=120),
    changes=st.lists(st.tuples(few, few, few), min_size=1, max_size=3),
    unique=st.booleans(),
)
def test_patching_equals_merging(rows, changes, unique):
    if unique:
        rows = distinct(rows)
        changes = [(distinct(upserts), deletes, inserts) for upserts, deletes, inserts in changes]
    results, found = commit(rows, changes, unique, patched=True)
    expected_results, expected = commit(rows, changes, unique, patched=False)
    assert results == expected_results
    assert found == expected
    model = Model(["k"], rows)
    counted = [model.apply(upserts, deletes, [] if unique else inserts) for upserts, deletes, inserts in changes]
    assert [(r.inserted, r.updated, r.deleted) for r in results] == counted


class Rooms(PageRooms):
    """Rooms in which something was before."""

    content = 0

    def take(self):
        room = super().take()
        room[:] = self.content
        return room


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(row, min_size=20, max_size=120).map(distinct),
    changes=st.lists(st.tuples(few.map(distinct), few), min_size=1, max_size=3),
)
def test_nothing_of_what_was_in_a_room_before_gets_into_a_page(rows, changes):
    images = []
    for content in (0, 255):
        disk = build(table_of(rows), ["k"], unique=True, fill=0.7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft, "PageRooms", Rooms)
            patch.setattr(Rooms, "content", content)
            for upserts, deletes in changes:
                writer_of(disk).apply(table_of(upserts), table_of(deletes).select(["k"]))
        images.append(bytes(disk.image))
    assert images[0] == images[1]


WIDE = pa.schema([("k", pa.int64()), ("v", pa.int32())])
far_key = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), 2**63 - 1]) | st.integers(-9, 9)
far_keys = st.lists(far_key, min_size=1, max_size=12, unique=True)


@settings(max_examples=60, deadline=None)
@given(far_keys, st.lists(st.tuples(far_keys, st.integers(1, 80)), max_size=5))
def test_keys_may_lie_as_far_apart_as_their_type_allows(first, commits):
    def rows(keys, value):
        return [{"k": k, "v": value} for k in sorted(keys)]

    def batch(rows):
        return pa.RecordBatch.from_pylist(rows, schema=WIDE)

    disk = build(pa.Table.from_pylist(rows(first, 0), schema=WIDE), ["k"], unique=True)
    writer, model = writer_of(disk), Model(["k"], rows(first, 0))
    for value, (keys, beside) in enumerate(commits, 1):
        new = rows({*keys, *(min(k, 2**63 - 81) + beside for k in keys)}, value)
        result = writer.apply(batch(new))
        assert (result.inserted, result.updated, result.deleted) == model.apply(new)
    assert writer.apply(batch(model.sorted())).updated == len(model.rows)
    assert rows_of(disk) == model.sorted()


def plain(keys, value=7, text="abc"):
    return [
        {
            "k": int(k),
            "i": value,
            "b": True,
            "f": 1.0,
            "d": dt.date(2013, 1, 1),
            "w": None,
            "t": text,
            "r": "AA",
            "x": b"%040d" % int(k),
        }
        for k in keys
    ]


def test_values_that_fit_are_patched(statuses):
    disk = build(table_of(plain(range(0, 4000, 2))), ["k"], unique=True)
    writer = writer_of(disk)
    writer.apply(table_of(plain(range(301, 2000, 500))), table_of(plain(range(0, 4000, 400))).select(["k"]))
    assert statuses[kernels.DONE] > 5
    assert statuses[kernels.FALLBACK] == 0
    assert [r["k"] for r in rows_of(disk)] == sorted(
        {*range(0, 4000, 2), *range(301, 2000, 500)} - {*range(0, 4000, 400)}
    )


@pytest.mark.parametrize("values", [(10**12, -5), (-(2**63), 2**63 - 1), (8, 7), (None, 300)])
@pytest.mark.parametrize("key", [1001, -9, 3001])
def test_numbers_that_do_not_fit_are_patched_too(statuses, key, values):
    rows = plain(range(0, 4000, 2))
    disk, model = build(table_of(rows), ["k"], unique=True), Model(["k"], rows)
    writer = writer_of(disk)
    for value in values:
        for changes in (plain([key], value=value), plain(range(200, 3000, 100), value=value)):
            writer.apply(table_of(changes))
            model.apply(changes)
    assert statuses[kernels.FALLBACK] == 0
    assert rows_of(disk) == model.sorted()


@pytest.mark.parametrize(
    "changes",
    [
        {"upserts": table_of(plain([1001], text="longer"))},
        {"upserts": table_of(plain(range(1001, 1400, 2)))},
        {"deletes": table_of(plain(range(1000, 1600))).select(["k"])},
        {"deletes": table_of(plain(range(-5, 5000))).select(["k"])},
    ],
    ids=["long text", "full page", "small leaf", "nothing left"],
)
def test_what_does_not_fit_is_merged(statuses, changes):
    rows = plain(range(0, 4000, 2))
    disk = build(table_of(rows), ["k"], unique=True)
    writer_of(disk).apply(**changes)
    assert statuses[kernels.FALLBACK] > 0
    model = Model(["k"], rows)
    model.apply(**{name: batch.to_pylist() for name, batch in changes.items()})
    assert rows_of(disk) == model.sorted()


def test_small_leaves_are_joined_with_neighbours_that_change_too(statuses):
    rows = plain(range(0, 6000, 2))
    disk = build(table_of(rows), ["k"], unique=True)
    writer = writer_of(disk)
    leaves = writer.snapshot.superblock.leaves
    deletes = [k for k in range(0, 6000, 2) if k % 1000 > 150]
    rng = np.random.default_rng(1)
    touched = plain(rng.choice(np.setdiff1d(np.arange(0, 6000, 2), deletes), 60, replace=False), value=6)
    writer.apply(table_of(touched), table_of(plain(deletes)).select(["k"]))
    assert statuses[kernels.SMALL] > 0
    assert writer.snapshot.superblock.leaves < leaves
    model = Model(["k"], rows)
    model.apply(touched, plain(deletes))
    assert rows_of(disk) == model.sorted()


def test_a_small_leaf_beside_a_key_of_many_leaves_takes_in_no_neighbour_that_was_patched(statuses):
    rows = plain([*range(0, 1000, 2), *[1000] * 90, *range(1002, 2000, 2)])
    disk = build(table_of(rows), ["k"], unique=False)
    writer = writer_of(disk)
    snapshot = writer.snapshot
    first_keys = (snapshot.entries.separators.prefix.astype(np.int64) - 2**31).tolist()
    beside = next(leaf for leaf, key in enumerate(first_keys) if key > 1000)
    small, patched = first_keys[beside : beside + 2]
    deletes = plain([*range(small + 4, patched, 2), patched + 2])
    upserts = plain([1000])
    writer.apply(table_of(upserts), table_of(deletes).select(["k"]))
    assert statuses[kernels.DONE] == 1
    model = Model(["k"], rows)
    model.apply(upserts, deletes)
    assert rows_of(disk) == model.sorted()


def test_an_insert_of_a_key_that_is_there_is_refused(statuses):
    disk = build(table_of(plain(range(0, 4000, 2))), ["k"], unique=True)
    with pytest.raises(UniqueViolationError, match="k=222 is in the table"):
        writer_of(disk).apply(inserts=table_of(plain([1, 222, 3001])))
    assert len(rows_of(disk)) == 2000
    assert statuses[kernels.DONE] == 0


def test_a_leaf_of_equal_rows_holds_no_more_of_them_than_a_page_has_bytes():
    """They take no bytes at all, so that only their number tells when a page is full."""
    schema = pa.schema([("k", pa.int32()), ("v", pa.int64())])

    def equal(rows):
        return pa.Table.from_pylist([{"k": 5, "v": 1}] * rows, schema=schema)

    disk = build(equal(100), ["k"], unique=False)
    writer = writer_of(disk)
    for rows in (3000, 60, 3000):
        writer.apply(inserts=equal(rows))
        assert writer.snapshot.leaf_rows.max() <= writer.snapshot.page_size
    assert len(rows_of(disk)) == writer.snapshot.rows == 6160
