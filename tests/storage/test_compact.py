import numpy as np
import pyarrow as pa
import pytest
from simulated import SimulatedDisk, build, crash_images, rows_of, writer_of

from headrace.storage.commit.compaction import compact
from headrace.storage.table import Table


def shuffled(path, n=200_000, commits=8):
    rng = np.random.default_rng(5)
    source = pa.table({"k": np.arange(n), "v": rng.integers(0, 2**60, n)})
    table = Table.build(path, source, key=["k"], unique=True, page_size=4096)
    for _ in range(commits):
        keys = np.unique(rng.integers(0, n, 40))
        table.apply(pa.table({"k": keys, "v": keys}), pa.table({"k": np.arange(300) + keys[0]}))
    return table


def content(table):
    return pa.Table.from_batches(list(table.scan()), schema=table.schema)


def test_order_and_space_come_back(tmp_path):
    with shuffled(tmp_path / "t") as table:
        before, rows = table.stats, content(table)
        assert before.fragmentation > 0.05
        result = table.compact()
        after = table.stats
        assert result.shrunk
        assert (result.pages_before, result.pages_after) == (before.bytes // 4096, after.bytes // 4096)
        assert (after.fragmentation, after.free_pages) == (0.0, 0)
        assert after.leaves <= before.leaves
        assert np.diff(table.snapshot().leaf_pages).tolist() == [1] * (after.leaves - 1)
        assert content(table) == rows
        assert table.check().ok
        again = table.compact()
        assert (again.txid, again.pages_after, again.shrunk) == (result.txid, result.pages_after, True)


def test_readers_go_on_and_space_comes_back_when_they_are_done(tmp_path):
    with shuffled(tmp_path / "t") as table, Table.open(tmp_path / "t") as reader:
        rows = content(table)
        lookups = table.snapshot()
        assert not table.compact().shrunk
        assert table.stats.fragmentation == 0.0
        assert content(reader) == rows
        reader.refresh()
        del lookups
        turns = 1
        while not table.compact().shrunk:
            assert content(reader) == rows
            reader.refresh()
            turns += 1
        assert turns <= 3
        assert table.stats.free_pages == 0
        assert content(reader) == content(table) == rows
        table.apply(deletes=pa.table({"k": np.arange(100)}))
        assert content(reader) == rows


def test_leaves_in_order_behind_too_small_a_hole_give_space_back(tmp_path):
    source = pa.table({"k": np.arange(40), "s": [f"{number:0900}" for number in range(40)]})
    with Table.build(tmp_path / "t", source.slice(0, 1), key=["k"], page_size=4096) as table:
        table.apply(source)
        pages = table.snapshot().leaf_pages
        assert np.diff(pages).tolist() == [1] * (len(pages) - 1)
        assert table.compact().shrunk
        assert table.stats.free_pages == 0
        assert content(table).to_pydict() == source.to_pydict()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_small_tables(tmp_path, rows):
    with Table.build(tmp_path / "t", pa.table({"k": np.arange(5)}), key=["k"]) as table:
        table.apply(deletes=pa.table({"k": np.arange(rows, 5)}))
        table.compact()
        assert table.stats.rows == rows
        assert table.stats.free_pages == 0
        assert table.check().ok


def test_a_crash_at_every_write_leaves_all_rows():
    rng = np.random.default_rng(6)
    n = 3000
    source = pa.table({"k": np.arange(n), "v": rng.integers(0, 2**60, n)})
    disk = build(source, ["k"], unique=True)
    writer = writer_of(disk)
    for _ in range(5):
        keys = np.unique(rng.integers(0, n, 50))
        writer.apply(pa.table({"k": keys, "v": keys}), pa.table({"k": rng.integers(0, n, 300)}))
    expected = rows_of(disk)
    start = bytes(disk.image)
    disk.log.clear()
    assert compact(writer_of(disk), lambda _: None).shrunk
    points = 0
    for _, image in crash_images(start, disk.log, rng):
        crashed = SimulatedDisk(image)
        assert rows_of(crashed) == expected
        writer_of(crashed).apply(deletes=pa.table({"k": [expected[0]["k"]]}))
        assert rows_of(crashed) == expected[1:]
        points += 1
    assert points >= 8


def test_updates_at_random_keep_the_order_on_disk(tmp_path):
    """After 100 commits that each touch one leaf in a hundred, a scan costs at most 1.3 times that of a fresh table."""
    n, rng = 400_000, np.random.default_rng(7)
    source = pa.table({"k": np.arange(n), "v": rng.integers(0, 2**62, n)})
    with Table.build(tmp_path / "t", source, key=["k"], unique=True, page_size=4096) as table:
        leaves = table.stats.leaves
        for _ in range(100):
            keys = np.unique(rng.integers(0, n, leaves // 100))
            table.apply(pa.table({"k": keys, "v": keys}))
        assert leaves > 1000
        assert table.stats.fragmentation <= 0.3


def test_commits_that_write_most_leaves_anew_leave_key_order_on_disk(tmp_path):
    """Also after commits here and there, with the file no longer than for some of those alone."""
    n, rng = 100_000, np.random.default_rng(8)
    values = rng.integers(0, 2**62, n)
    with Table.build(tmp_path / "t", pa.table({"k": np.arange(n), "v": values}), key=["k"], page_size=4096) as table:
        leaves = table.stats.leaves
        assert leaves > 256
        for turn in range(8):
            for count in (leaves // 3, n // 10):
                keys = np.unique(rng.integers(0, n, count))
                values[keys] = turn
                table.apply(pa.table({"k": keys, "v": values[keys]}))
            assert table.stats.fragmentation <= 0.3
        assert table.stats.bytes <= 2.6 * leaves * 4096
        assert content(table).to_pydict() == {"k": list(range(n)), "v": values.tolist()}
        assert table.check().ok
