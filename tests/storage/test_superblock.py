from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.backend import FileBackend
from storage.errors import FormatVersionError, InputError, NotATableError
from storage.superblock import (
    COPY_BYTES,
    PAGE_SIZES,
    SLOT_BYTES,
    Superblock,
    check_page_size,
    damaged_copies,
    decode_superblock,
    encode_superblock,
    read_superblock,
    write_first_superblocks,
    write_superblock,
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
    assert block[16:32].hex() == "01000000002000000100000000000000"
    assert block[8:16].hex() == "893c036712074f32"


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
    with pytest.raises(NotATableError, match="both superblocks"):
        read_superblock(table)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100_000], ids=["empty", "short", "long"])
def test_other_files_are_not_tables(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    backend = FileBackend(path)
    with pytest.raises(NotATableError, match="not a"):
        read_superblock(backend)
    backend.close()


def test_newer_formats_are_refused(table):
    write_superblock(table, replace(FIRST, txid=2, version=99))
    with pytest.raises(FormatVersionError, match="format version 99"):
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
