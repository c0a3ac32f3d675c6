"""Leaves that have moved since the inner nodes above them were written: every way of reading finds them."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Model, SimulatedDisk, build, rows_of, writer_of

from headrace.storage.check import check_backend
from headrace.storage.errors import CorruptionError, CorruptPageError
from headrace.storage.format import superblock
from headrace.storage.format.keys import Keys
from headrace.storage.format.slots import read_superblock, write_superblock
from headrace.storage.table import Table
from headrace.storage.tree.nodes import Entries
from headrace.storage.tree.relocations import add_relocations, relocated_entries, relocated_leaves
from headrace.storage.tree.snapshot import open_snapshot

ROWS = [{"k": k, "v": k % 1000} for k in range(0, 30_000, 2)]
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int32())])
TABLE = pa.Table.from_pylist(ROWS, schema=SCHEMA)
BUILT = build(TABLE, ["k"], unique=True)
FIRST_ROWS = np.cumsum(open_snapshot(BUILT).leaf_rows) - open_snapshot(BUILT).leaf_rows
PAGE = 4096


def batch(*rows):
    return pa.record_batch({"k": pa.array([k for k, _ in rows]), "v": pa.array([v for _, v in rows], pa.int32())})


def one_in_each(leaves, value):
    """Return one row of each of these leaves."""
    return [(ROWS[FIRST_ROWS[leaf] + 3]["k"], value) for leaf in leaves]


@pytest.fixture
def disk():
    return SimulatedDisk(bytearray(BUILT.image))


@pytest.fixture
def moved(disk):
    """A table four of whose leaves have moved, one of them twice, and its rows."""
    writer = writer_of(disk)
    model = Model(["k"], ROWS)
    for row in one_in_each([2, 5, 9, 5, 3], 7):
        writer.apply(batch(row))
        model.apply([{"k": row[0], "v": row[1]}])
    assert relocated_leaves(read_superblock(disk).relocations).tolist() == [2, 3, 5, 9]
    disk.log.clear()
    return disk, model.sorted()


def entries_of(count):
    numbers = np.arange(count)
    words = numbers.astype(np.uint64)
    return Entries(numbers + 2, words, numbers * 10, np.zeros(count, np.uint8), Keys("u64", words))


@given(st.lists(st.dictionaries(st.integers(0, 20), st.integers(0, 2**63 - 1), max_size=4), max_size=8))
def test_a_list_says_of_each_leaf_what_was_said_last(steps):
    moved, expected = b"", {}
    for step in steps:
        leaves = np.array(sorted(step), dtype=np.int64)
        values = np.array([step[leaf] for leaf in sorted(step)], dtype=np.int64)
        now = np.zeros(21, dtype=np.int64)
        now[leaves] = values
        entries = dataclasses.replace(entries_of(21), pages=now, checksums=now.astype(np.uint64), rows=now % 1000)
        moved = add_relocations(moved, leaves, entries)
        expected |= step
    assert relocated_leaves(moved).tolist() == sorted(expected)
    entries = relocated_entries(entries_of(21), moved)
    assert entries.pages.tolist() == [expected.get(leaf, leaf + 2) for leaf in range(21)]
    assert entries.checksums.tolist() == [expected.get(leaf, leaf) for leaf in range(21)]
    assert entries.rows.tolist() == [expected[leaf] % 1000 if leaf in expected else leaf * 10 for leaf in range(21)]


def test_what_is_opened_has_the_leaves_where_they_are(moved):
    disk, rows = moved
    assert rows_of(disk) == rows
    snapshot = open_snapshot(disk)
    assert np.flatnonzero(snapshot.leaf_pages != snapshot.index.written.pages).tolist() == [2, 3, 5, 9]


@pytest.mark.parametrize("leaves", [1, 9])
def test_a_full_list_becomes_inner_nodes(moved, leaves, monkeypatch):
    disk, rows = moved
    monkeypatch.setattr(superblock, "MOST_RELOCATIONS", 4)
    changes = one_in_each(range(10, 10 + leaves), 8)
    writer_of(disk).apply(batch(*changes))
    assert read_superblock(disk).relocations == b""
    model = Model(["k"], rows)
    model.apply([{"k": k, "v": v} for k, v in changes])
    assert rows_of(disk) == model.sorted()


@pytest.mark.parametrize(
    ("deletes", "upserts"),
    [(range(0, 30_000, 2), []), (range(4_000, 9_000), []), ([], range(1, 30_000, 2))],
    ids=["the table is emptied", "leaves go", "leaves are split"],
)
def test_moved_leaves_outlive_changes_of_the_tree(moved, deletes, upserts):
    disk, rows = moved
    model = Model(["k"], rows)
    rows = [{"k": k, "v": 1} for k in upserts]
    writer_of(disk).apply(pa.Table.from_pylist(rows, schema=SCHEMA), pa.table({"k": pa.array(deletes, pa.int64())}))
    model.apply(rows, [{"k": k} for k in deletes])
    assert read_superblock(disk).relocations == b""
    assert rows_of(disk) == model.sorted()


def test_a_commit_without_changes_keeps_the_list(moved):
    disk, rows = moved
    before = read_superblock(disk)
    writer_of(disk).apply(app=("a", 1))
    assert (read_superblock(disk).relocations, read_superblock(disk).apps) == (before.relocations, {"a": 1})
    assert rows_of(disk) == rows


def test_applications_that_leave_no_room_for_a_list_are_no_hindrance(disk):
    writer = writer_of(disk)
    writer.apply(batch((10, 1)), app=("x" * 1800, 1))
    writer.apply(batch((10, 2)), app=("y" * 100, 1))
    assert read_superblock(disk).relocations == b""
    assert rows_of(disk)[5] == {"k": 10, "v": 2}


def test_each_page_of_moved_leaves_is_used_again(moved):
    disk, _ = moved
    writer, pages = writer_of(disk), len(disk.image) // PAGE
    for value in range(200):
        writer.apply(batch(*one_in_each([value % 17], value)))
    assert len(disk.image) // PAGE <= pages + 30


def test_a_compaction_needs_no_list_and_leaves_the_length_exact(tmp_path):
    with Table.build(tmp_path / "t", TABLE, key="k", unique=True, page_size=PAGE) as table:
        last = table.stats.leaves - 1
        for value in range(6):
            table.apply(batch((ROWS[-1]["k"], value), *one_in_each([0, last // 2], value)))
        assert table.snapshot().superblock.relocations
        assert (np.diff(table.snapshot().leaf_pages) != 1).any()
        assert table.compact().shrunk
        head = table.snapshot().superblock
        assert (head.relocations, head.pages) == (b"", (tmp_path / "t").stat().st_size // PAGE)
        assert (np.diff(table.snapshot().leaf_pages) == 1).all()
        assert table.check().ok
    with Table.open(tmp_path / "t") as table:
        assert pa.Table.from_batches(list(table.scan())).num_rows == len(ROWS)


def test_readers_see_moved_leaves_and_read_no_inner_nodes_again(tmp_path):
    Table.build(tmp_path / "t", TABLE, key="k", unique=True, page_size=PAGE).close()
    with Table.open(tmp_path / "t") as reader, Table.open(tmp_path / "t", mode="w") as writer:
        before, key = reader.snapshot(), pa.table({"k": [10]})
        writer.apply(batch((10, 5)))
        assert reader.lookup(key).column("v").to_pylist() == [10]
        assert reader.refresh().levels is before.levels
        assert reader.lookup(key).column("v").to_pylist() == [5]
        writer.apply(pa.table({"k": range(1, 30_000, 2), "v": [0] * 15_000}))
        assert reader.refresh().levels is not before.levels
        writer.apply(batch((11, 6)))
        with Table.open(tmp_path / "t") as other:
            for table in (other, reader):
                table.refresh()
                assert table.lookup(pa.table({"k": [10, 11]})).column("v").to_pylist() == [5, 6]
                assert table.check().ok


def test_the_filter_knows_relocated_leaves(tmp_path):
    with Table.build(tmp_path / "t", TABLE, key="k", unique=True, page_size=PAGE, filter_bits=8) as table:
        for number in range(20):
            table.apply(batch((2 * number * 700 + 1, number)))
        report = table.check()
        assert (report.violations, report.unfiltered) == ((), 0)


@pytest.mark.parametrize("leaf", [2, 3, 5, 9])
def test_a_stale_page_of_a_moved_leaf_is_detected(moved, leaf):
    disk, _ = moved
    page, writer = int(open_snapshot(disk).leaf_pages[leaf]), writer_of(disk)
    earlier = SimulatedDisk(bytearray(disk.image))
    for value in range(60):
        writer.apply(batch(*one_in_each([leaf], value)))
        if writer.snapshot.leaf_pages[leaf] == page:
            break
    assert writer.snapshot.leaf_pages[leaf] == page
    writer.release()
    disk.image[page * PAGE : (page + 1) * PAGE] = earlier.image[page * PAGE : (page + 1) * PAGE]
    assert [(v.invariant, v.page) for v in check_backend(disk).violations] == [("parent-checksum", page)]
    with pytest.raises(CorruptPageError, match=f"page {page} is damaged"):
        writer_of(disk).apply(batch(*one_in_each([leaf], 4)))


def test_every_flip_in_a_list_is_survived_or_seen(moved):
    disk, rows = moved
    image = bytes(disk.image)
    head = read_superblock(disk)
    start = image.index(head.relocations, head.slot * PAGE) % PAGE
    for at in range(start - 2, start + len(head.relocations)):
        disk.image[:] = image
        disk.image[head.slot * PAGE + at] ^= 0xFF
        assert read_superblock(disk) == head
        for place in (at, at + 2048):
            for slot in (0, 1):
                disk.image[slot * PAGE + place] = image[slot * PAGE + place] ^ 0xFF
        with pytest.raises(CorruptionError, match="both superblocks"):
            open_snapshot(disk)
    disk.image[:] = image
    assert rows_of(disk) == rows


def forged(disk, change):
    """Change the list of moved leaves, all checksums of the superblock being right again."""
    head = read_superblock(disk)
    words = np.frombuffer(head.relocations, dtype=np.uint64).reshape(-1, 3).copy()
    change(words)
    later = dataclasses.replace(head, txid=head.txid + 1, relocations=words.tobytes(), proof=None)
    write_superblock(disk, later)
    return check_backend(disk).violations


def test_a_list_that_names_no_leaf_is_reported(moved):
    disk, _ = moved

    def change(words):
        words[1, 0] = np.uint64(10**6)

    assert "relocations" in {v.invariant for v in forged(disk, change)}
    with pytest.raises(CorruptPageError, match="relocates a leaf that the tree does not have"):
        open_snapshot(disk)


@pytest.mark.parametrize(
    ("column", "value", "invariant"),
    [(1, 2**40, "bounds"), (1, 7, "parent-checksum"), (2, 5, "parent-checksum"), (0, 9 | 3 << 32, "counts")],
)
def test_a_list_that_is_wrong_is_reported(moved, column, value, invariant):
    disk, _ = moved

    def change(words):
        words[2, column] = np.uint64(value)

    assert invariant in {v.invariant for v in forged(disk, change)}
