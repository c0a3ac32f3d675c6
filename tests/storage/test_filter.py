"""The negative filter beside a table: it never denies a key that is there, whatever became of its file."""

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage import Table
from headrace.storage.check import check_file
from headrace.storage.errors import InputError, LockedError, StorageIOError
from headrace.storage.file.backend import FileBackend
from headrace.storage.filter.segments import FilterFile, drop_filter, filter_path, hash_keys

KEYS = 4000
TEXT = "key-{:06d}"
MASK = 2**64 - 1


def rows_of(numbers, kind="int", version=0):
    key = pa.array(numbers, pa.int64()) if kind == "int" else pa.array(map(TEXT.format, numbers), pa.string())
    return pa.table(
        {
            "k": key,
            "v": pa.array([version] * len(numbers), pa.int64()),
            "p": pa.array(["x" * 60] * len(numbers), pa.string()),
        }
    )


def made(folder, numbers, kind="int", **options):
    options = {"filter_bits": 8, "unique": True, "page_size": 4096} | options
    return Table.build(folder / "t", rows_of(numbers, kind), key="k", **options)


def segments(snapshot, kept=None):
    """Return the shape, the segments of the leaves, and which of them are proven."""
    leaves = len(snapshot.leaf_pages)
    with FilterFile.open(snapshot.path) as file:
        shape = file.shape.folded(kept or file.shape.blocks)
        words, known = np.zeros((leaves, shape.words), dtype=np.uint64), np.zeros(leaves, dtype=np.bool_)
        place = np.arange(leaves, dtype=np.int32)
        file.load(snapshot.leaf_pages, snapshot.leaf_checksums, shape, words, place, known)
    return shape, words, known


def denied(snapshot, keys, kept=None):
    """Say of each key whether the filter denies it, by the words of FORMAT.md."""
    shape, words, known = segments(snapshot, kept)
    normal = snapshot.codec.encode([keys])
    leaf, last = snapshot.locate(normal)
    out = []
    for number, at, end in zip(hash_keys(normal).tolist(), leaf.tolist(), last.tolist(), strict=True):
        if at != end or not known[at]:
            out.append(False)
            continue
        block = (((number >> 32) * shape.blocks) >> 32) * ((shape.kept << 32) // shape.blocks) >> 32
        spread = (number * 0x9E3779B97F4A7C15) & MASK
        bits = [(spread >> (56 - 8 * probe)) & 255 for probe in range(shape.probes)]
        out.append(any(not int(words[at, 4 * block + bit // 64]) >> bit % 64 & 1 for bit in bits))
    return np.array(out)


def assert_denies_no_row(table, kept=None):
    keys = pa.concat_tables([pa.Table.from_batches([b]) for b in table.scan()] or [table.schema.empty_table()])["k"]
    assert not denied(table.snapshot(), keys.combine_chunks(), kept).any()
    report = table.check()
    assert report.violations == ()
    return report


changes = st.lists(st.tuples(st.lists(st.integers(0, KEYS), max_size=60), st.lists(st.integers(0, KEYS), max_size=60)))


@settings(max_examples=8)
@given(
    first=st.integers(0, 1500),
    changes=changes,
    kind=st.sampled_from(["int", "text"]),
    bits=st.sampled_from([4, 8, 16]),
    compact=st.booleans(),
)
def test_every_commit_leaves_a_filter_that_knows_all_leaves_and_denies_no_row(
    tmp_path_factory, first, changes, kind, bits, compact
):
    folder = tmp_path_factory.mktemp("t")
    with made(folder, list(range(0, first * 2, 2)), kind, filter_bits=bits, fill=1.0) as table:
        for version, (upserts, deletes) in enumerate(changes):
            gone = sorted(set(deletes) - set(upserts))
            table.apply(rows_of(sorted(set(upserts)), kind, version), rows_of(gone, kind).select(["k"]))
        if compact:
            table.compact()
        report = assert_denies_no_row(table)
        assert report.unfiltered == 0
        assert_denies_no_row(table, kept=1)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), harm=st.sampled_from(["torn", "stale", "garbage", "cut", "other", "none"]))
def test_whatever_became_of_the_file_it_denies_no_row(tmp_path_factory, seed, harm):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("t")
    with made(folder, list(range(0, KEYS, 2))) as table:
        path = filter_path(table.path)
        before = bytearray(path.read_bytes())
        held = table.snapshot()
        table.apply(rows_of(sorted(set(rng.integers(0, KEYS, 200).tolist())), version=1))
        after = bytearray(path.read_bytes())
        size = len(after)
        if harm == "torn":
            at = int(rng.integers(0, size))
            after[at : at + 512] = before[at : at + 512]
        elif harm == "stale":
            after = before
        elif harm == "garbage":
            at = int(rng.integers(40, size))
            after[at : at + 300] = rng.bytes(min(300, size - at))
        elif harm == "cut":
            after = after[: int(rng.integers(0, size))]
        elif harm == "other":
            (folder / "other").mkdir()
            with made(folder / "other", list(range(1, KEYS, 2))) as other:
                after = bytearray(filter_path(other.path).read_bytes())
        path.write_bytes(after)
        if len(after) < 40:
            assert FilterFile.open(table.path) is None
            return
        table.refresh()
        assert_denies_no_row(table)
        assert not denied(held, pa.array(range(0, KEYS, 2)), None).any()
        table.apply(rows_of(sorted(set(rng.integers(0, KEYS, 50).tolist())), version=2))
        assert_denies_no_row(table)


@pytest.mark.parametrize("kind", ["int", "text"])
@pytest.mark.parametrize(("bits", "probes", "kept"), [(4, 3, 1.0), (8, 3, 1.0), (8, 3, 0.5), (8, 3, 0.7), (16, 5, 1.0)])
def test_absent_keys_pass_at_most_twice_as_often_as_theory_says(tmp_path, kind, bits, probes, kept):
    with made(tmp_path, list(range(0, 40_000, 2)), kind, filter_bits=bits, page_size=8192) as table:
        odd = np.arange(1, 20_000, 2)
        keys = pa.array(odd) if kind == "int" else pa.array([TEXT.format(number) for number in odd])
        with FilterFile.open(table.path) as file:
            blocks = max(1, round(kept * file.shape.blocks))
        passed = 1 - denied(table.snapshot(), keys, blocks).mean()
        shape, _, _ = segments(table.snapshot(), blocks)
        each = shape.bits(table.stats.rows_per_leaf)
        assert (shape.probes, table.stats.filter_bits) == (probes, pytest.approx(bits, rel=0.15))
        assert passed < 2 * (1 - np.exp(-probes / each)) ** probes + 0.003


def test_a_slot_is_what_the_format_says(tmp_path):
    with made(tmp_path, [5, 7, 9]) as table:
        snapshot, content = table.snapshot(), filter_path(table.path).read_bytes()
        page, checksum = int(snapshot.leaf_pages[0]), int(snapshot.leaf_checksums[0])
        magic, numbers, digest = content[:8], np.frombuffer(content[8:20], dtype="<u4"), content[24:32]
        assert (magic, numbers.tolist()) == (b"HEADFLTR", [1, 1, 3])
        assert int.from_bytes(digest, "little") == xxhash.xxh64_intdigest(content[:24])
        slot = content[page * 40 : page * 40 + 40]
        seed = checksum ^ ((page * 0xD6E8FEB86659FD93) & MASK)
        assert int.from_bytes(slot[32:], "little") == xxhash.xxh64_intdigest(slot[:32], seed=seed)
        wanted = 0
        for key in (5, 7, 9):
            word = key ^ 2**63
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                word = ((word ^ word >> 33) * factor) & MASK
            spread = ((word ^ word >> 33) * 0x9E3779B97F4A7C15) & MASK
            for probe in range(3):
                wanted |= 1 << (spread >> (56 - 8 * probe) & 255)
        assert int.from_bytes(slot[:32], "little") == wanted


def test_a_filter_that_lies_is_a_violation_and_one_that_knows_nothing_is_not(tmp_path):
    with made(tmp_path, list(range(500))) as table:
        snapshot = table.snapshot()
        leaves = len(snapshot.leaf_pages)
        with FilterFile.open(table.path, writing=True) as file:
            empty = np.zeros((leaves, file.shape.words), dtype=np.uint64)
            file.store(empty, snapshot.leaf_pages, snapshot.leaf_checksums)
        report = check_file(table.path)
        assert {violation.invariant for violation in report.violations} == {"filter"}
        assert len(report.violations) == leaves
        with FilterFile.open(table.path, writing=True) as file:
            file.store(empty, snapshot.leaf_pages, snapshot.leaf_checksums + np.uint64(1))
        report = check_file(table.path)
        assert (report.ok, report.unfiltered) == (True, leaves)


def test_a_commit_succeeds_though_its_filter_cannot_be_written(tmp_path, monkeypatch, caplog):
    with made(tmp_path, list(range(500))) as table:
        write = FileBackend.pwrite

        def full(self, offset, data):
            if self.path.endswith(".filter"):
                raise StorageIOError("the disk is full")
            write(self, offset, data)

        monkeypatch.setattr(FileBackend, "pwrite", full)
        table.apply(rows_of([1000], version=1))
        assert "the disk is full" in caplog.text
        report = assert_denies_no_row(table)
        assert report.unfiltered > 0
        assert table.lookup(pa.table({"k": [1000]})).num_rows == 1


@pytest.mark.parametrize("content", [b"", b"HEADFLTR", bytes(4000), b"x" * 4000])
def test_a_file_that_is_no_filter_is_not_used_and_a_new_one_can_be_built(tmp_path, caplog, content):
    with made(tmp_path, list(range(500))) as table:
        filter_path(table.path).write_bytes(content)
        table.apply(rows_of([1000], version=1))
        assert (table.check().ok, table.stats.filter_bytes) == (True, 0)
        assert "build it again" in caplog.text
        table.build_filter(np.int64(8))
        assert assert_denies_no_row(table).unfiltered == 0


def test_something_else_in_the_place_of_the_file_is_left_alone(tmp_path):
    with made(tmp_path, list(range(500)), filter_bits=None) as table:
        filter_path(table.path).mkdir()
        table.apply(rows_of([1000], version=1))
        assert (table.check().ok, table.stats.filter_bits) == (True, 0)
        with pytest.raises(StorageIOError):
            table.build_filter()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.filter"]


def test_a_filter_that_is_dropped_while_it_is_opened_is_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os.path, "isfile", lambda _: True)
    assert FilterFile.open(tmp_path / "t") is None
    assert not caplog.records


def test_no_filter_is_dropped_where_nothing_can_be_removed(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not drop_filter(tmp_path / "t")
    filter_path(tmp_path / "t").touch()
    with pytest.raises(StorageIOError, match=r"t\.filter: Read-only file system"):
        drop_filter(tmp_path / "t")


def test_a_table_is_built_though_something_else_has_the_place_of_its_filter(tmp_path):
    (tmp_path / "t.filter").mkdir()
    with made(tmp_path, list(range(500)), filter_bits=None) as table:
        assert (table.check().ok, table.stats.filter_bits) == (True, 0)


def test_an_overwriting_build_leaves_no_filter_of_the_old_table(tmp_path):
    made(tmp_path, list(range(500))).close()
    with made(tmp_path, list(range(300)), filter_bits=None, overwrite=True) as table:
        assert not filter_path(table.path).exists()


def test_a_filter_can_be_dropped_and_made_again_with_other_bits(tmp_path):
    with made(tmp_path, list(range(5000))) as table:
        assert table.stats.filter_bytes == filter_path(table.path).stat().st_size
        assert (table.drop_filter(), table.drop_filter(), table.stats.filter_bits) == (True, False, 0)
        table.apply(rows_of([7000], version=1))
        table.build_filter(16)
        assert table.stats.filter_bits == pytest.approx(16, rel=0.2)
        assert assert_denies_no_row(table).unfiltered == 0


def test_compacting_gives_back_what_the_filter_no_longer_needs(tmp_path):
    with made(tmp_path, list(range(5000))) as table:
        table.apply(deletes=rows_of(list(range(1000, 5000))).select(["k"]))
        before = table.stats.filter_bytes
        table.compact()
        assert table.stats.filter_bytes < before
        assert assert_denies_no_row(table).unfiltered == 0


@pytest.mark.parametrize("bits", [3, 17, "8", True, None, float("nan")])
def test_impossible_bits_are_refused_before_anything_is_built(tmp_path, bits):
    with pytest.raises(InputError, match="4 to 16"), made(tmp_path, [1], filter_bits=None) as table:
        table.build_filter(bits)
    if bits is not None:
        with pytest.raises(InputError, match="4 to 16"):
            Table.build(tmp_path / "new", rows_of([1]), key="k", filter_bits=bits)
        assert not (tmp_path / "new").exists()


def test_only_the_writer_builds_a_filter(tmp_path):
    with made(tmp_path, list(range(500)), filter_bits=None) as table, Table.open(table.path, mode="w"):
        with pytest.raises(LockedError):
            table.build_filter()
        assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_an_empty_table_can_have_a_filter_and_grow(tmp_path):
    with made(tmp_path, []) as table:
        table.apply(rows_of(list(range(300))))
        assert assert_denies_no_row(table).unfiltered == 0
