"""A snapshot that pages its inner nodes finds the same leaves as one that has all entries in memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.storage.errors import CorruptPageError
from headrace.storage.read import PagedSnapshot
from headrace.storage.table import Table
from headrace.storage.tree import nodes
from headrace.storage.tree.relocations import relocated_leaves

FRAMES = [1, 2, 5, 40]


def keys_of(kind, numbers):
    if kind == "text":  # few separators to a node
        return pa.array([f"{number:06}".ljust(600, "-") + f"{number % 3}" for number in numbers.tolist()])
    return pa.array(numbers * 3)


def table_of(folder, kind, numbers, **options):
    texts = [f"{number:0300x}{row}" for row, number in enumerate(numbers.tolist())]
    rows = pa.table({"k": keys_of(kind, np.sort(numbers)), "v": texts})
    return Table.build(folder / "t", rows, ["k"], page_size=4096, overwrite=True, **options)


def assert_same(table, frames, keys, rng):
    whole = table.snapshot()
    paged = PagedSnapshot(whole, table.reader(), frames)
    for column in (keys, keys.take(pa.array(np.sort(rng.permutation(len(keys)))))):
        encoded = whole.codec.encode([column])
        assert [part.tolist() for part in paged.locate(encoded)] == [part.tolist() for part in whole.locate(encoded)]
    leaves = rng.integers(0, whole.leaves, 300)
    for ours, theirs in zip(paged.pointers(leaves), whole.pointers(leaves), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert (paged.leaves, paged.key_range, paged.in_key_order) == (whole.leaves, whole.key_range, whole.in_key_order)
    assert paged.extent >= whole.extent


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["number", "text"]),
    domain=st.sampled_from([2, 40, 3000]),
    rows=st.sampled_from([100, 4000]),
    frames=st.sampled_from(FRAMES),
    changed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_keys_are_located_as_with_all_entries_in_memory(tmp_path, kind, domain, rows, frames, changed, seed):
    rng = np.random.default_rng(seed)
    with table_of(tmp_path, kind, rng.integers(0, domain, rows)) as table:
        if changed:
            some = np.unique(rng.integers(0, domain, 40))
            table.apply(pa.table({"k": keys_of(kind, some), "v": ["y" * 700] * len(some)}))
        assume(table.snapshot().levels)
        assert_same(table, frames, keys_of(kind, rng.integers(-1, domain + 2, 500).clip(0)), rng)


@pytest.mark.parametrize("frames", FRAMES)
def test_leaves_that_have_moved_are_found(tmp_path, rng, frames):
    with table_of(tmp_path, "number", np.arange(20_000), unique=True) as table:
        for number in (3, 9_000, 9_001, 15_000):
            table.apply(pa.table({"k": keys_of("number", np.array([number])), "v": ["z"]}))
        assert len(relocated_leaves(table.snapshot().superblock.relocations)) == 3
        assert not table.snapshot().in_key_order
        assert_same(table, frames, keys_of("number", rng.integers(0, 20_000, 500)), rng)


def test_several_threads_may_locate_keys_at_once(tmp_path, rng):
    with table_of(tmp_path, "number", np.arange(40_000), unique=True) as table:
        whole = table.snapshot()
        paged = PagedSnapshot(whole, table.reader(), 2)
        keys = [whole.codec.encode([keys_of("number", rng.integers(0, 40_000, 2000))]) for _ in range(16)]
        with ThreadPoolExecutor(4) as threads:
            for part, (first, last) in zip(keys, threads.map(paged.locate, keys), strict=True):
                assert [first.tolist(), last.tolist()] == [side.tolist() for side in whole.locate(part)]


def test_its_size_is_counted(tmp_path):
    with table_of(tmp_path, "number", np.arange(40_000), unique=True) as table:
        whole = table.snapshot()
        count = len(whole.levels[-1].pages)
        assert count > 20
        paged = PagedSnapshot(whole, table.reader(), 2)
        assert paged.index_nbytes == PagedSnapshot.nbytes(whole, 2)
        assert 2 * whole.page_size < paged.index_nbytes <= 45 * count + 2 * whole.page_size + 4000
        assert PagedSnapshot.nbytes(whole, 12) - PagedSnapshot.nbytes(whole, 11) >= whole.page_size


def test_reads_are_reported_and_nodes_stay_in_memory(tmp_path):
    with table_of(tmp_path, "number", np.arange(40_000), unique=True) as table:
        whole, reports = table.snapshot(), []
        count = len(whole.levels[-1].pages)
        paged = PagedSnapshot(whole, table.reader(), count, reports.append)
        for _ in range(3):
            paged.locate(whole.codec.encode([keys_of("number", np.arange(40_000))]))
        assert sum(report.pages_wanted for report in reports) == count


def test_a_node_that_was_damaged_after_the_table_was_opened_is_found(tmp_path):
    with table_of(tmp_path, "number", np.arange(20_000), unique=True) as table:
        paged = PagedSnapshot(table.snapshot(), table.reader(), 2)
        page = int(table.snapshot().levels[-1].pages[1])
        with Path(table.path).open("r+b") as file:
            file.seek(page * 4096 + 1000)
            file.write(b"\xff" * 8)
        with pytest.raises(CorruptPageError, match=f"page {page} "):
            paged.pointers(np.arange(20_000 // 12))


@pytest.fixture
def nothing_kept(monkeypatch):
    """Treat each table as a large one."""
    monkeypatch.setattr(nodes, "_KEPT_BYTES", 0)
    monkeypatch.setattr(nodes, "_WINDOW_BYTES", 2 * 4096)


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("moved", [False, True])
def test_entries_of_a_large_table_are_read_when_they_are_used(tmp_path, rng, moved):
    table_of(tmp_path, "number", np.arange(20_000), unique=True).close()
    if moved:
        with Table.open(tmp_path / "t") as table:
            table.apply(pa.table({"k": keys_of("number", np.array([9_000])), "v": ["z"]}))
    with Table.open(tmp_path / "t") as table:
        snapshot = table.snapshot()
        paged = PagedSnapshot(snapshot, table.reader(), 3)
        keys = snapshot.codec.encode([keys_of("number", rng.integers(0, 20_000, 500))])
        found = paged.locate(keys)
        known = (snapshot.leaves, snapshot.extent, snapshot.in_key_order, snapshot.key_range, snapshot.index_nbytes)
        assert not snapshot.index.in_memory
        assert table.lookup(pa.table({"k": keys_of("number", np.array([9_000, 3]))})).num_rows == 2
        assert snapshot.index.in_memory
        assert [part.tolist() for part in found] == [part.tolist() for part in snapshot.entries.locate(keys)]
        entries, pages = snapshot.index.written, snapshot.index.written.pages
        prefix = entries.separators.prefix
        assert known == (
            len(entries), pages.max() - pages.min() + 1, not moved, (prefix[1], prefix[-1]),
            entries.nbytes + sum(level.nbytes for level in snapshot.levels),
        )  # fmt: skip


@pytest.mark.usefixtures("nothing_kept")
def test_a_node_of_a_large_table_that_was_damaged_is_found_when_it_is_opened_or_used(tmp_path):
    table_of(tmp_path, "number", np.arange(20_000), unique=True).close()
    with Table.open(tmp_path / "t") as table:
        page = int(table.snapshot().levels[-1].pages[1])
        with Path(table.path).open("r+b") as file:
            file.seek(page * 4096 + 1000)
            file.write(b"\xff" * 8)
        with pytest.raises(CorruptPageError, match=f"page {page} "):
            table.lookup(pa.table({"k": keys_of("number", np.array([9_000]))}))
        with pytest.raises(CorruptPageError, match=f"page {page} "):
            Table.open(tmp_path / "t")
