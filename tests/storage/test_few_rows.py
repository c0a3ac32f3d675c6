"""Commits of few rows, which write only their leaves and list them as moved, leave what any commit would have left."""

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Model, SimulatedDisk, build, rows_at, rows_of, writer_of

from headrace.storage.errors import CorruptPageError, InputError, UniqueViolationError
from headrace.storage.format import superblock
from headrace.storage.format.slots import read_superblock
from headrace.storage.tree.snapshot import open_snapshot

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int32())])
ROWS = [{"k": k, "v": k % 1000} for k in range(0, 12_000, 2)]
TABLE = pa.Table.from_pylist(ROWS, schema=SCHEMA)
BUILT = {unique: build(TABLE, ["k"], unique=unique, fill=0.03) for unique in (True, False)}

key = st.integers(0, 12_001)
batch = st.lists(
    st.fixed_dictionaries({"k": key, "v": st.integers(0, 999)}), max_size=4, unique_by=lambda row: row["k"]
)


def batch_of(rows):
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def fresh(*, unique=True):
    disk = SimulatedDisk(bytearray(BUILT[unique].image))
    return disk, writer_of(disk)


def same_index(left, right):
    """Whether two indexes are the same; how many rows the root has is known only if no leaf has moved."""

    def arrays(entries, *, rows):
        return entries.pages, entries.checksums, entries.rows * rows, entries.continued, entries.separators.prefix

    levels = [(left.entries, right.entries)]
    levels += [(mine.nodes, yours.nodes) for mine, yours in zip(left.levels, right.levels, strict=True)]
    return all(
        np.array_equal(a, b)
        for mine, yours in levels
        for a, b in zip(arrays(mine, rows=len(mine) > 1), arrays(yours, rows=len(mine) > 1), strict=True)
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(batch, batch, st.sampled_from([0, 1, 2])), max_size=6), st.booleans())
def test_few_rows_are_changed_as_a_model_says(commits, unique):
    disk, writer = fresh(unique=unique)
    model = Model(["k"], ROWS)
    for upserts, deletes, mode in commits:
        if mode == 0:
            result = writer.apply(batch_of(upserts))
            counts = model.apply(upserts)
        else:
            result = writer.apply(batch_of(upserts), batch_of(deletes))
            counts = model.apply(upserts, deletes)
        assert (result.inserted, result.updated, result.deleted) == counts
        assert same_index(writer.snapshot, open_snapshot(disk))
    assert rows_of(disk) == model.sorted()


def test_few_rows_write_few_pages():
    disk, writer = fresh()
    for at in range(5):
        assert writer.apply(batch_of([{"k": 2000 * at, "v": 1}, {"k": 2000 * at + 2, "v": 2}])).updated == 2
    assert len(writer.snapshot.levels) > 2
    assert writer.snapshot.superblock.pages <= len(BUILT[True].image) // 4096 + 3 * len(writer.snapshot.levels) + 3
    assert same_index(writer.snapshot, open_snapshot(disk))


@pytest.mark.parametrize(
    "rows",
    [
        pa.table({"k": [8, 4], "v": [1, 2]}),
        pa.record_batch({"v": pa.array([2, 1], pa.int64()), "k": pa.array([4, 8], pa.int32())}),
        pa.record_batch({"k": pa.array([0, 4, 8], pa.int64()), "v": pa.array([0, 2, 1], pa.int32())}).slice(1),
    ],
    ids=["descending", "other types and order", "a slice"],
)
def test_rows_are_taken_in_any_form(rows):
    disk, writer = fresh()
    writer.apply(rows)
    found = {row["k"]: row["v"] for row in rows_of(disk)}
    assert (found[0], found[4], found[8]) == (0, 2, 1)


def test_a_key_is_refused_a_second_time():
    disk, writer = fresh()
    with pytest.raises(UniqueViolationError, match="k=6 is in the table already"):
        writer.apply(inserts=batch_of([{"k": 5, "v": 1}, {"k": 6, "v": 1}]))
    with pytest.raises(UniqueViolationError, match="k=7 twice"):
        writer.apply(batch_of([{"k": 7, "v": 1}, {"k": 7, "v": 1}]))
    assert rows_of(disk) == ROWS
    assert writer.apply(inserts=batch_of([{"k": 5, "v": 1}])).inserted == 1


def test_several_changes_of_one_transaction_are_one_commit():
    disk, writer = fresh()
    with writer.transaction(app=("a", 3)) as change:
        change.apply(batch_of([{"k": 10, "v": 1}]))
        change.apply(deletes=batch_of([{"k": 10, "v": 0}, {"k": 12, "v": 0}]))
        change.apply(batch_of([{"k": 13, "v": 5}]))
    result = change.result
    assert (result.txid, result.inserted, result.updated, result.deleted) == (3, 1, 1, 2)
    model = Model(["k"], ROWS)
    model.apply([{"k": 13, "v": 5}], [{"k": 10}, {"k": 12}])
    assert rows_of(disk) == model.sorted()
    assert open_snapshot(disk).superblock.apps == {"a": 3}


def test_an_abandoned_transaction_changes_nothing():
    disk, writer = fresh()
    with contextlib.suppress(RuntimeError), writer.transaction() as change:
        change.apply(batch_of([{"k": 10, "v": 1}]))
        raise RuntimeError
    writer.apply(batch_of([{"k": 12, "v": 1}]))
    model = Model(["k"], ROWS)
    model.apply([{"k": 12, "v": 1}])
    assert rows_of(disk) == model.sorted()
    assert same_index(writer.snapshot, open_snapshot(disk))


def test_each_snapshot_stays_as_it_was(monkeypatch):
    """Also over a commit that writes inner nodes anew."""
    monkeypatch.setattr(superblock, "MOST_RELOCATIONS", 3)
    disk, writer = fresh()
    seen = [(open_snapshot(disk), writer.snapshot)]
    for at in range(8):
        writer.apply(batch_of([{"k": 500 * at, "v": at}]))
        seen.append((open_snapshot(disk), writer.snapshot))
    assert all(same_index(ours, read) for read, ours in reversed(seen))
    assert rows_at(disk, seen[-1][1]) == rows_of(disk)


def test_a_damaged_leaf_is_reported_and_nothing_is_written():
    disk, writer = fresh()
    page = int(writer.snapshot.leaf_pages[0])
    disk.image[page * 4096 + 200] ^= 1
    with pytest.raises(CorruptPageError, match=f"page {page} is damaged"):
        writer.apply(batch_of([{"k": 0, "v": 1}]))
    assert not disk.log[1:]
    assert writer.apply(batch_of([{"k": 11_998, "v": 1}])).updated == 1


def test_an_application_that_has_no_room_leaves_the_others():
    disk, writer = fresh()
    writer.apply(batch_of([{"k": 2, "v": 1}]), app=("a", 1))
    with pytest.raises(InputError, match="shorter"):
        writer.apply(batch_of([{"k": 4, "v": 1}]), app=("b" * 3000, 1))
    assert writer.apply(batch_of([{"k": 6, "v": 1}]), app=("a", 1)).skipped
    writer.apply(batch_of([{"k": 8, "v": 1}]))
    assert dict(read_superblock(disk).apps) == {"a": 1}
    found = {row["k"]: row["v"] for row in rows_of(disk)}
    assert [found[key] for key in (2, 4, 6, 8)] == [1, 4, 6, 1]
