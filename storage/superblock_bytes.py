"""The superblock of a clustered table, byte for byte.

A table begins with two pages, the slots. Transaction `t` writes slot ``t mod 2``, so that the superblock of the
transaction before it stays untouched. A slot begins with two equal copies of the superblock, `COPY_BYTES` each, so
that a damaged byte does not lose a commit. All integers are little-endian:

    0    8 bytes   magic "HEADRACE"
    8    u64       BLAKE2b-64 of bytes 16..2048
    16   u32       format version        20   u32  page size in bytes
    24   u64       transaction id        32   u64  root page (0: the table is empty)
    40   u64       checksum of the root  48   u64  rows
    56   u64       leaves                64   u64  pages in the file
    72   u64       first metadata page   80   u64  metadata length in bytes
    88   u64       metadata checksum     96   f64  fill factor
    104  u32       height (levels)       108  u8   flags (bit 0: unique; 1 to 3: below)
    109  u8        zero                  110  u16  number of applications
    112  per application: i64 version, u16 length of the name, the name in UTF-8
    then if bit 3 of the flags is set, moved leaves: u16 number of them, 24 bytes for each (`headrace.storage.moved`)
    then if bit 1 of the flags is set, the proof: u16 number of pages, BLAKE2b-64 of their checksums, u64 page ...

A superblock with a proof was written together with the pages of its commit, and counts only if these are on disk. As
soon as they are known to be, it is repeated without the proof in the other slot (bit 2 of the flags).

A copy counts if magic, checksum and slot are right.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.storage.errors import FormatVersionError, InputError
from headrace.storage.superblock import (
    COPY_BYTES,
    FORMAT_VERSION,
    MAGIC,
    MOVED_AT_ONCE,
    PAGE_SIZES,
    Proof,
    Superblock,
    digest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CHECKED",
    "CHECKSUM",
    "FLAGS",
    "MOVED_LEAF",
    "PAGES",
    "PROVEN_BY_PAGES",
    "ROWS",
    "TXID",
    "UNIQUE",
    "WITH_MOVED",
    "decode_superblock",
    "encode_superblock",
    "fitted",
    "list_of_moved",
    "read_copy",
    "room_for_moved",
    "tail_of",
    "txid_of",
]

MOVED_LEAVES = 72
"""Most leaves that a list of moved ones has."""
CHECKSUM, TXID, ROWS, PAGES, FLAGS = 8, 24, 48, 64, 108
CHECKED = 16
UNIQUE, PROVEN_BY_PAGES, REPEATED, WITH_MOVED = 1, 2, 4, 8
MOVED_LEAF = 24
"""Bytes of what the list of moved leaves says of one."""

_HEAD = struct.Struct("<IIQQQQQQQQQdIBBH")
_APP = struct.Struct("<qH")
_MOVED = struct.Struct("<H")
_PROOF = struct.Struct("<H8s")
_U64 = struct.Struct("<Q")
_APPS = CHECKED + _HEAD.size
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def encode_superblock(superblock: Superblock, *, repeated: bool = False) -> bytes:
    """Return one copy of a superblock: `COPY_BYTES` bytes, checksum included.

    Parameters
    ----------
    superblock
        What to encode.
    repeated
        Whether it is for the other slot than its own, and without a proof.

    Raises
    ------
    InputError
        If the application ids do not fit, or a version is not a 64-bit integer.
    """
    apps = _encode_apps(superblock.apps)
    if _APPS + len(apps) > COPY_BYTES:
        raise InputError(
            f"the {len(superblock.apps)} application ids need {len(apps)} bytes, "
            f"but a superblock has room for {COPY_BYTES - _APPS}; use fewer or shorter ids"
        )
    flags = (UNIQUE if superblock.unique else 0) | (REPEATED if repeated else 0)
    copy, tail = memoryview(bytearray(COPY_BYTES)), _APPS + len(apps)
    copy[: len(MAGIC)] = MAGIC
    _HEAD.pack_into(copy, CHECKED, *_head_of(superblock), flags, 0, len(superblock.apps))
    copy[_APPS:tail] = apps
    at = tail
    if superblock.moved:
        copy[FLAGS] |= WITH_MOVED
        _MOVED.pack_into(copy, at, len(superblock.moved) // MOVED_LEAF)
        at = list_of_moved(tail) + len(superblock.moved)
        copy[list_of_moved(tail) : at] = superblock.moved
    if superblock.proof is not None and not repeated:
        pages, digest_of_pages = superblock.proof
        copy[FLAGS] |= PROVEN_BY_PAGES
        struct.pack_into(f"<H8s{len(pages)}Q", copy, at, len(pages), digest_of_pages, *pages)
    copy[CHECKSUM:CHECKED] = digest(copy[CHECKED:])
    return bytes(copy)


def _head_of(superblock: Superblock) -> tuple[int | float, ...]:
    """Return what precedes the flags."""
    return (
        superblock.version,
        superblock.page_size,
        superblock.txid,
        superblock.root_page,
        superblock.root_checksum,
        superblock.rows,
        superblock.leaves,
        superblock.pages,
        superblock.metadata_page,
        superblock.metadata_bytes,
        superblock.metadata_checksum,
        superblock.fill,
        superblock.height,
    )


def tail_of(superblock: Superblock) -> int:
    """Return where the applications end in a copy, and moved leaves and a proof begin."""
    return _APPS + len(_encode_apps(superblock.apps))


def list_of_moved(tail: int) -> int:
    """Return where the list of moved leaves begins in a copy that has one."""
    return tail + _MOVED.size


def fitted(superblock: Superblock) -> Superblock:
    """Return a superblock, without its proof if a copy has no room for it."""
    if superblock.proof is None:
        return superblock
    moved = _MOVED.size + len(superblock.moved) if superblock.moved else 0
    size = tail_of(superblock) + moved + _PROOF.size + _U64.size * len(superblock.proof.pages)
    return superblock if size <= COPY_BYTES else replace(superblock, proof=None)


def room_for_moved(tail: int) -> int:
    """Return how many moved leaves fit behind the applications, beside the proof of a commit that moves leaves."""
    taken = tail + _MOVED.size + _PROOF.size + _U64.size * MOVED_AT_ONCE
    return min(MOVED_LEAVES, (COPY_BYTES - taken) // MOVED_LEAF)


def txid_of(copy: bytes) -> int:
    """Return the transaction of a whole copy."""
    return int(_U64.unpack_from(copy, TXID)[0])


def decode_superblock(copy: bytes, slot: int) -> Superblock | None:
    """Return the superblock in one copy, or None if the copy is not whole or belongs in the other slot.

    Raises
    ------
    FormatVersionError
        If the copy is whole but of a newer format.
    """
    if len(copy) != COPY_BYTES or copy[:8] != MAGIC or copy[8:CHECKED] != digest(copy[CHECKED:]):
        return None
    found = read_copy(copy)
    if (found.txid + bool(copy[FLAGS] & REPEATED)) % 2 != slot or found.page_size not in PAGE_SIZES:
        return None
    return found


def read_copy(copy: bytes) -> Superblock:
    """Return the superblock in a copy that is whole.

    Raises
    ------
    FormatVersionError
        If it is of a newer format.
    """
    (version, page_size, txid, root, root_sum, rows, leaves, pages, meta, meta_len, meta_sum, fill, height,
     flags, _, apps) = _HEAD.unpack_from(copy, CHECKED)  # fmt: skip
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"the table has format version {version}, but this release reads up to {FORMAT_VERSION}; "
            "install a newer release of headrace"
        )
    versions, end = _decode_apps(copy, apps)
    moved, end = _decode_moved(copy, end) if flags & WITH_MOVED else (b"", end)
    return Superblock(
        page_size=page_size,
        txid=txid,
        root_page=root,
        root_checksum=root_sum,
        height=height,
        rows=rows,
        leaves=leaves,
        pages=pages,
        metadata_page=meta,
        metadata_bytes=meta_len,
        metadata_checksum=meta_sum,
        fill=fill,
        unique=bool(flags & UNIQUE),
        apps=versions,
        version=version,
        moved=moved,
        proof=_decode_proof(copy, end) if flags & PROVEN_BY_PAGES else None,
    )


def _encode_apps(apps: Mapping[str, int]) -> bytes:
    if not apps:
        return b""
    parts = []
    for app, version in sorted(apps.items()):
        if not _INT64_MIN <= version <= _INT64_MAX:
            raise InputError(f"version {version} of application {app!r} is not a 64-bit integer")
        try:
            name = app.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the application id {app!r} is not text that UTF-8 can hold; use another one") from error
        if len(name) > COPY_BYTES:
            raise InputError(f"the application id {app[:40]!r}... is {len(name)} bytes long; use a shorter one")
        parts.append(_APP.pack(version, len(name)) + name)
    return b"".join(parts)


def _decode_apps(copy: bytes, count: int) -> tuple[dict[str, int], int]:
    """Return the versions, and where they end."""
    apps: dict[str, int] = {}
    at = _APPS
    for _ in range(count):
        version, length = _APP.unpack_from(copy, at)
        at += _APP.size
        apps[copy[at : at + length].decode()] = version
        at += length
    return apps, at


def _decode_moved(copy: bytes, at: int) -> tuple[bytes, int]:
    """Return the moved leaves, and where they end."""
    end = at + _MOVED.size + MOVED_LEAF * _MOVED.unpack_from(copy, at)[0]
    return copy[at + _MOVED.size : end], end


def _decode_proof(copy: bytes, at: int) -> Proof:
    count, digest = _PROOF.unpack_from(copy, at)
    return Proof(struct.unpack_from(f"<{count}Q", copy, at + _PROOF.size), digest)
