import dataclasses
import itertools

import numpy as np
import pyarrow as pa
import pytest

from headrace.storage import Table
from headrace.storage.check import check_backend
from headrace.storage.errors import CorruptionError
from headrace.storage.file.backend import FileBackend
from headrace.storage.format._byte_kernels import xxh64
from headrace.storage.format.slots import write_superblock
from headrace.storage.tree.snapshot import pages_of

PAGE = 4096


def build(path, rows=3000, *, text=True):
    keys = [f"key {n // 4:05}" for n in range(rows)] if text else np.arange(rows) * 1000
    values = pa.array([["a", "b", None][n % 3] for n in range(rows)])
    table = pa.table({"k": keys, "c": values, "v": np.arange(rows) % 99})
    Table.build(path, table, ["k"], page_size=PAGE, unique=not text).close()
    return path.read_bytes()


def check(path):
    backend = FileBackend(path)
    try:
        return check_backend(backend)
    finally:
        backend.close()


def read_all(path):
    """Read the whole table through every way of reading it."""
    with Table.open(path) as table:
        rows = pa.Table.from_batches(list(table.scan()), schema=table.schema)
        return rows, table.lookup(rows.select(["k"]).slice(0, 50))


def reseal(raw, page):
    """Give a changed page a right checksum of its own."""
    data = np.frombuffer(bytes(raw[page * PAGE : (page + 1) * PAGE]) + bytes(8), dtype=np.uint8)
    raw[page * PAGE : page * PAGE + 8] = int(xxh64(data, 8, PAGE - 8, np.uint64(page))).to_bytes(8, "little")


def test_a_sound_table_has_no_violations(tmp_path):
    raw = build(tmp_path / "t")
    report = check(tmp_path / "t")
    assert report.ok
    assert (report.pages, report.rows, report.unreferenced) == (len(raw) // PAGE, 3000, 0)


@pytest.mark.parametrize("text", [True, False])
def test_a_flipped_bit_is_detected_or_changes_nothing(tmp_path, text):
    raw = build(tmp_path / "good", 600, text=text)
    sound = read_all(tmp_path / "good")
    for at in [*range(0, len(raw), 61), *range(2 * PAGE, len(raw), PAGE)]:
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "bad").write_bytes(damaged)
        if at < 2 * PAGE:  # there are two superblocks, and in a new table they say the same
            assert read_all(tmp_path / "bad") == sound
            continue
        with pytest.raises(CorruptionError, match=r"page .*bad|bad.* page"):
            read_all(tmp_path / "bad")
        assert not check(tmp_path / "bad").ok


def commit(path, number):
    """Change some of the rows of a table of integers, so that pages go to new places and are taken again."""
    with Table.open(path) as table:
        keys = np.arange(number * 30, number * 30 + 90, dtype=np.int64) * 1000
        table.apply(pa.table({"k": keys, "c": ["new"] * 90, "v": np.full(90, number)}))
    return path.read_bytes()


def same_or_damaged(path, raw, sound):
    """Return whether reading finds damage; otherwise it must find all rows as they were."""
    path.write_bytes(raw)
    try:
        assert read_all(path) == sound
    except CorruptionError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("commits", [0, 5])
def test_every_flipped_byte_is_detected_or_changes_nothing(tmp_path, commits):
    raw = build(tmp_path / "good", 200, text=False)
    for number in range(commits):
        raw = commit(tmp_path / "good", number % 3)
    sound = read_all(tmp_path / "good")
    with Table.open(tmp_path / "good") as table:
        used = set(pages_of(table.snapshot()).tolist()) - {0, 1}
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 0xFF
        found = same_or_damaged(tmp_path / "bad", damaged, sound)
        assert found == (at // PAGE in used), at


def test_every_older_page_put_back_is_detected(tmp_path):
    build(tmp_path / "good", 3000, text=False)
    images = [commit(tmp_path / "good", number % 7) for number in range(12)]
    raw, sound = images[-1], read_all(tmp_path / "good")
    with Table.open(tmp_path / "good") as table:
        used = set(pages_of(table.snapshot()).tolist()) - {0, 1}
    tried = 0
    for page, old in itertools.product(sorted(used), images[:-1]):
        begin, end = page * PAGE, (page + 1) * PAGE
        if old[begin:end] not in {b"", raw[begin:end]}:
            assert same_or_damaged(tmp_path / "bad", raw[:begin] + old[begin:end] + raw[end:], sound)
            tried += 1
    assert tried >= 10


def test_every_swap_of_two_pages_is_detected(tmp_path):
    raw = build(tmp_path / "t")
    pages = [raw[at : at + PAGE] for at in range(0, len(raw), PAGE)]
    for left in range(2, len(pages)):
        for right in range(left + 1, len(pages)):
            swapped = [*pages]
            swapped[left], swapped[right] = pages[right], pages[left]
            (tmp_path / "bad").write_bytes(b"".join(swapped))
            with pytest.raises(CorruptionError, match="page"):
                read_all(tmp_path / "bad")
            assert not check(tmp_path / "bad").ok


def test_truncation_anywhere_is_detected(tmp_path):
    raw = build(tmp_path / "t")
    for length in [*range(0, len(raw), PAGE), 1, 100, PAGE + 1, len(raw) - 1]:
        (tmp_path / "bad").write_bytes(raw[:length])
        with pytest.raises(CorruptionError, match="bad"):
            read_all(tmp_path / "bad")
        assert not check(tmp_path / "bad").ok


def test_a_stale_page_that_is_whole_in_itself_is_detected(tmp_path):
    raw = bytearray(build(tmp_path / "t"))
    raw[4 * PAGE + 30] ^= 1
    reseal(raw, 4)
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(CorruptionError, match="page 4"):
        read_all(tmp_path / "t")
    (violation,) = check(tmp_path / "t").violations
    assert (violation.invariant, violation.page) == ("parent-checksum", 4)


def test_all_damaged_pages_are_reported_not_only_the_first(tmp_path):
    raw = bytearray(build(tmp_path / "t"))
    for page in (4, 6, 7):
        raw[page * PAGE + 1000] ^= 1
    (tmp_path / "t").write_bytes(raw)
    assert [(v.invariant, v.page) for v in check(tmp_path / "t").violations] == [
        ("page-checksum", 4),
        ("page-checksum", 6),
        ("page-checksum", 7),
    ]


@pytest.mark.parametrize("content", [b"", b"k,v\n1,2\n", bytes(PAGE * 4), b"HEADRACE" + bytes(PAGE)])
def test_what_is_not_a_table_is_said_to_be_none(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(CorruptionError):
        Table.open(tmp_path / "t")
    (violation,) = check(tmp_path / "t").violations
    assert violation.invariant == "superblock"


class Forged:
    """A table whose pages are changed and all checksums on the way to the root made right again."""

    def __init__(self, path, **options):
        self.path = path
        self.raw = bytearray(build(path, **options))
        with Table.open(path) as table:
            snapshot = table.snapshot()
        self.leaves = snapshot.leaf_pages.tolist()
        self.root = snapshot.superblock.root_page
        self.head = snapshot.superblock
        self.count = len(self.leaves)

    def change(self, page, at, data):
        start = page * PAGE + at
        self.raw[start : start + len(data)] = data

    def report(self):
        for ordinal, leaf in enumerate(self.leaves):
            reseal(self.raw, leaf)
            self.change(self.root, 24 + 8 * self.count + 8 * ordinal, self.raw[leaf * PAGE : leaf * PAGE + 8])
        reseal(self.raw, self.root)
        checksum = int.from_bytes(self.raw[self.root * PAGE : self.root * PAGE + 8], "little")
        self.path.write_bytes(self.raw)
        backend = FileBackend(self.path, "w")
        write_superblock(backend, dataclasses.replace(self.head, root_checksum=checksum))
        backend.close()
        return check(self.path)


@pytest.mark.parametrize(
    ("at", "data", "detail"),
    [
        (16, b"\x02", "is not a leaf"),
        (20, bytes(4), "impossible number of rows"),
        (20, b"\xff\xff\xff\xff", "impossible number of rows"),
        (24 + 14, b"\x09", "bad directory entry 0"),
        (24 + 15, b"\x07", "bad directory entry 0"),
        (24 + 32 + 8, b"\x01\x00", "outside the page in directory entry 2"),
        (24 + 32 + 8, b"\xff\xff", "outside the page in directory entry 2"),
        (24 + 16 + 12, b"\xff\xff", "outside the page in directory entry 1"),
        (24 + 16 + 10, b"\xff\x0f", "bad text in directory entry 1"),
        (24 + 10, b"\xff\x0f", "bad text in directory entry 0"),
    ],
)
def test_pages_of_impossible_structure_are_reported(tmp_path, at, data, detail):
    forged = Forged(tmp_path / "t")
    forged.change(forged.leaves[1], at, data)
    report = forged.report()
    assert [(v.invariant, v.page) for v in report.violations] == [("structure", forged.leaves[1])]
    assert detail in report.violations[0].detail


def test_keys_below_the_base_of_their_block_are_reported(tmp_path):
    forged = Forged(tmp_path / "t", text=False)
    forged.change(forged.leaves[1], 24, (2**64 - 1).to_bytes(8, "little"))
    (violation,) = forged.report().violations
    assert (violation.invariant, violation.page) == ("structure", forged.leaves[1])
    assert "below the base" in violation.detail


def test_keys_out_of_order_and_out_of_bounds_are_reported(tmp_path):
    forged = Forged(tmp_path / "t", text=False)
    forged.change(forged.leaves[1], 24, (2**63 + 10**12).to_bytes(8, "little"))
    invariants = {v.invariant for v in forged.report().violations}
    assert invariants == {"key-order", "separators"}


def test_wrong_counts_are_reported(tmp_path):
    forged = Forged(tmp_path / "t")
    forged.change(forged.root, 24 + 16 * forged.count, (1).to_bytes(8, "little"))
    assert "counts" in {v.invariant for v in forged.report().violations}


def test_a_page_with_two_parents_is_reported(tmp_path):
    forged = Forged(tmp_path / "t")
    forged.leaves[2] = forged.leaves[1]
    forged.change(forged.root, 24 + 16, forged.leaves[1].to_bytes(8, "little"))
    report = forged.report()
    assert ("reachable-once", forged.leaves[1]) in [(v.invariant, v.page) for v in report.violations]


def test_a_key_that_occurs_twice_in_a_unique_table_is_reported(tmp_path):
    forged = Forged(tmp_path / "t", text=False)
    leaf = forged.leaves[0]
    start = leaf * PAGE + int.from_bytes(forged.raw[leaf * PAGE + 32 : leaf * PAGE + 34], "little")
    width = forged.raw[leaf * PAGE + 38]
    forged.raw[start + width : start + 2 * width] = forged.raw[start : start + width]
    assert [(v.invariant, v.page) for v in forged.report().violations] == [("unique", leaf)]


def test_pages_of_a_later_transaction_are_reported(tmp_path):
    forged = Forged(tmp_path / "t")
    forged.change(forged.leaves[3], 8, (99).to_bytes(8, "little"))
    assert [(v.invariant, v.page) for v in forged.report().violations] == [("transaction", forged.leaves[3])]


def test_pointers_outside_the_file_are_reported(tmp_path):
    forged = Forged(tmp_path / "t")
    forged.change(forged.root, 24, (2**40).to_bytes(8, "little"))
    assert ("bounds", 2**40) in [(v.invariant, v.page) for v in forged.report().violations]
