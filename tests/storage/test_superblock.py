from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.errors import CorruptionError, FormatVersionError, InputError, NotATableError
from headrace.storage.file.backend import FileBackend
from headrace.storage.format._byte_kernels import xxh64
from headrace.storage.format.constants import COPY_BYTES, FORMAT_VERSION, PAGE_SIZES, SLOT_BYTES
from headrace.storage.format.slots import (
    damaged_copies,
    read_superblock,
    repeat_superblock,
    write_first_superblocks,
    write_superblock,
)
from headrace.storage.format.superblock import (
    MOST_RELOCATIONS,
    PROOF_PAGES,
    RELOCATED_AT_ONCE,
    Proof,
    Superblock,
    check_page_size,
    decode_superblock,
    encode_superblock,
    room_for_relocations,
    without_oversized_proof,
)

FIRST = Superblock(
    page_size=8192,
    txid=1,
    root_page=7,
    root_checksum=2**64 - 1,
    height=3,
    rows=10**12,
    leaves=5,
    pages=9,
    metadata_page=2,
    metadata_bytes=333,
    metadata_checksum=17,
    fill=0.8,
    unique=True,
    apps={"fact_flights/läufer": -3, "b": 2**63 - 1},
)


@pytest.fixture
def table(tmp_path):
    backend = FileBackend(tmp_path / "t", "x")
    write_first_superblocks(backend, FIRST)
    backend.truncate(4 * FIRST.page_size)
    yield backend
    backend.close()


def test_a_new_table_reads_back(table):
    assert read_superblock(table) == FIRST


@given(
    page_size=st.sampled_from(PAGE_SIZES),
    txid=st.integers(0, 2**64 - 1),
    rows=st.integers(0, 2**64 - 1),
    fill=st.floats(0.1, 1),
    unique=st.booleans(),
    apps=st.dictionaries(st.text(max_size=20), st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_round_trip(*, page_size, txid, rows, fill, unique, apps):
    block = replace(FIRST, page_size=page_size, txid=txid, rows=rows, fill=fill, unique=unique, apps=apps)
    assert decode_superblock(encode_superblock(block), txid % 2) == block
    assert decode_superblock(encode_superblock(block), 1 - txid % 2) is None


def test_the_bytes_are_stable():
    block = encode_superblock(FIRST)
    assert len(block) == COPY_BYTES
    assert block[:8] == b"HEADRACE"
    assert block[16:32].hex() == "04000000002000000100000000000000"
    assert block[8:16].hex() == "c9d4c156a6af17d7"


def test_moved_leaves_are_read_back_and_repeated():
    moved = bytes(range(240)) * 7
    block = replace(FIRST, relocations=moved, proof=Proof((4, 5), 12345678))
    read = decode_superblock(encode_superblock(block), 1)
    assert (read, read.relocations, read.proof) == (block, moved, block.proof)
    again = decode_superblock(encode_superblock(replace(block, proof=None), 0), 0)
    assert (again, again.relocations, again.proof) == (block, moved, None)


@pytest.mark.parametrize("name", [0, 300, 500, 1800])
def test_as_many_leaves_move_as_there_is_room_for(name):
    block = replace(FIRST, apps={"a" * name: 1} if name else {})
    room = room_for_relocations(block.apps)
    proof = Proof(tuple(range(RELOCATED_AT_ONCE)), 12345678)
    assert room == MOST_RELOCATIONS if not name else room < MOST_RELOCATIONS
    if room > 0:
        full = replace(block, txid=2, relocations=bytes(24 * room), proof=proof)
        assert without_oversized_proof(full).proof == proof
        assert decode_superblock(encode_superblock(full), 0) == full


def test_a_proof_is_left_out_if_there_is_no_room():
    proof = Proof(tuple(range(PROOF_PAGES)), 12345678)
    assert without_oversized_proof(replace(FIRST, proof=proof)).proof == proof
    full = without_oversized_proof(replace(FIRST, apps={"a" * 1500: 1}, proof=proof))
    assert full.proof is None
    assert len(encode_superblock(full)) == COPY_BYTES


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("torn", [0, 1])
def test_a_torn_slot_falls_back_to_the_other(tmp_path, page_size, torn):
    backend = FileBackend(tmp_path / "t", "x")
    newest = replace(FIRST, page_size=page_size, txid=torn + 2)
    before = replace(newest, txid=torn + 1, rows=1)
    write_superblock(backend, before)
    write_superblock(backend, newest)
    backend.truncate(4 * page_size)
    assert read_superblock(backend) == newest
    backend.pwrite(newest.slot * page_size, b"\xff" * SLOT_BYTES)
    assert read_superblock(backend) == before
    backend.close()


def test_every_damaged_byte_is_survived_and_reported(table):
    whole = 2 * encode_superblock(FIRST)
    for at in range(0, SLOT_BYTES, 13):
        table.pwrite(FIRST.page_size + at, bytes([whole[at] ^ 0x40]))
        assert read_superblock(table) == FIRST
        assert damaged_copies(table, FIRST.page_size) == [(1, at // COPY_BYTES)]
        table.pwrite(FIRST.page_size + at, whole[at : at + 1])
    assert damaged_copies(table, FIRST.page_size) == []


def test_both_slots_damaged(table):
    for slot in (0, 1):
        for copy in (0, 1):
            table.pwrite(slot * FIRST.page_size + copy * COPY_BYTES + 60, b"\xfe")
    with pytest.raises(CorruptionError, match="both superblocks"):
        read_superblock(table)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100_000], ids=["empty", "short", "long"])
def test_other_files_are_not_tables(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    backend = FileBackend(path)
    with pytest.raises(NotATableError, match="not a"):
        read_superblock(backend)
    backend.close()


@pytest.mark.parametrize(("version", "remedy"), [(99, "newer release"), (FORMAT_VERSION - 1, "build the table again")])
def test_other_format_versions_are_refused(table, version, remedy):
    write_superblock(table, replace(FIRST, txid=2, version=version))
    with pytest.raises(FormatVersionError, match=f"format version {version}.*{remedy}"):
        read_superblock(table)


def test_a_format_version_whose_checksum_is_another_is_named(table):
    whole = bytearray(2 * encode_superblock(replace(FIRST, version=3)))
    whole[8:16] = whole[2056:2064] = b"BLAKE2b!"
    for slot in (0, 1):
        table.pwrite(slot * FIRST.page_size, bytes(whole))
    with pytest.raises(FormatVersionError, match="format version 3, but this release reads only version 4"):
        read_superblock(table)


def test_too_many_applications():
    with pytest.raises(InputError, match="application ids need"):
        encode_superblock(replace(FIRST, apps={f"application-{i:030}": 1 for i in range(60)}))


def test_versions_are_64_bit():
    with pytest.raises(InputError, match="not a 64-bit integer"):
        encode_superblock(replace(FIRST, apps={"a": 2**63}))


def test_page_sizes_are_named():
    with pytest.raises(InputError, match="4096, 8192"):
        check_page_size(5000)


def seal(backend, page, content):
    """Write a page with its checksum, and return what the proof says of it."""
    body = np.frombuffer(content.ljust(FIRST.page_size - 8, b"\0") + bytes(8), dtype=np.uint8)
    checksum = int(xxh64(body, 0, FIRST.page_size - 8, np.uint64(page)))
    backend.pwrite(page * FIRST.page_size, checksum.to_bytes(8, "little") + body[:-8].tobytes())
    return checksum


@pytest.fixture
def proven(table):
    """A table whose newest superblock was written together with pages 2 and 3."""
    proof = Proof.of({page: seal(table, page, b"new") for page in (3, 2)})
    newest = replace(FIRST, txid=2, rows=77, proof=proof)
    write_superblock(table, newest)
    return table, newest


def test_a_proof_is_read_back():
    block = replace(FIRST, proof=Proof(tuple(range(5, 5 + PROOF_PAGES)), 12345678))
    assert decode_superblock(encode_superblock(block), 1).proof == block.proof


def test_a_superblock_whose_pages_are_there_counts(proven):
    table, newest = proven
    assert read_superblock(table) == newest


@pytest.mark.parametrize("page", [2, 3])
def test_a_superblock_counts_only_if_its_pages_are_there(proven, page):
    table, _ = proven
    table.pwrite(page * FIRST.page_size + 100, b"x")
    assert read_superblock(table) == FIRST


def test_a_superblock_counts_only_if_its_pages_are_those_that_it_was_written_with(proven):
    table, _ = proven
    seal(table, 3, b"of another attempt")
    assert read_superblock(table) == FIRST


def test_a_repeated_superblock_needs_no_proof(proven):
    table, newest = proven
    repeat_superblock(table, newest)
    assert read_superblock(table).proof is None
    table.pwrite(3 * FIRST.page_size + 100, b"x")
    assert read_superblock(table) == newest
    table.pwrite(newest.slot * FIRST.page_size, b"\xff" * SLOT_BYTES)
    assert read_superblock(table) == newest


def test_a_superblock_without_proof_counts_if_there_is_no_other(proven):
    table, newest = proven
    table.pwrite(3 * FIRST.page_size + 100, b"x")
    table.pwrite((1 - newest.slot) * FIRST.page_size, b"\xff" * SLOT_BYTES)
    assert read_superblock(table) == newest


def test_a_commit_during_the_proof_is_seen(proven):
    table, newest = proven

    class Overtaken:
        """Its pages are used again by a later commit as soon as one looks at them."""

        path = "overtaken"
        size = table.size
        commits = 0

        def pread_into(self, offset, buffers):
            if offset >= 2 * FIRST.page_size and not self.commits:
                self.commits = 1
                table.pwrite(3 * FIRST.page_size + 100, b"x")
                write_superblock(table, replace(newest, txid=3, proof=None))
            table.pread_into(offset, buffers)

    assert read_superblock(Overtaken()).txid == 3


def test_a_slot_that_is_being_written_does_not_hide_a_commit_between_the_reads_of_both(table):
    for txid in (2, 3):
        write_superblock(table, replace(FIRST, txid=txid))

    class Busy:
        """Transaction 4 is committed after slot 0 was read, and 5 is being written when slot 1 is."""

        path = "busy"
        size = table.size

        def pread_into(self, offset, buffers):
            if offset == FIRST.page_size:
                write_superblock(table, replace(FIRST, txid=4))
                table.pwrite(FIRST.page_size, b"\xff" * SLOT_BYTES)
            table.pread_into(offset, buffers)

    assert read_superblock(Busy()).txid == 4
