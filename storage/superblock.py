"""The superblock of a clustered table, byte for byte. Where it is written and which one counts is for `storage.slots`.

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
    104  u32       height (levels)       108  u8   flags (bit 0: unique)
    109  u8        zero                  110  u16  number of applications
    112  per application: i64 version, u16 length of the name, the name in UTF-8
    then if bit 3 of the flags is set, moved leaves: u16 number of them, 24 bytes for each (`storage.moved`)
    then if bit 1 of the flags is set, the proof: u16 number of pages, BLAKE2b-64 of their checksums, u64 page ...

A superblock with a proof was written together with the pages of its commit, and counts only if these are on disk. As
soon as they are known to be, it is repeated without the proof in the other slot (bit 2 of the flags).

A copy counts if magic, checksum and slot are right; of those that count and are proven, the one with the highest
transaction id is the table. Opening files and reading pages is for others.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from storage.errors import FormatVersionError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "COPY_BYTES",
    "FORMAT_VERSION",
    "MAGIC",
    "MOVED_AT_ONCE",
    "PAGE_SIZES",
    "PROOF_PAGES",
    "SLOT_BYTES",
    "Proof",
    "Superblock",
    "check_app",
    "check_page_size",
    "decode_superblock",
    "digest",
    "encode_superblock",
    "fits",
    "room_for_moved",
]

MAGIC = b"HEADRACE"
FORMAT_VERSION = 3
COPY_BYTES = 2048
SLOT_BYTES = 2 * COPY_BYTES
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
PROOF_PAGES = 64
MOVED_AT_ONCE = 8
MOVED_LEAVES = 72

_HEAD = struct.Struct("<IIQQQQQQQQQdIBBH")
_APP = struct.Struct("<qH")
_MOVED = struct.Struct("<H")
_MOVED_LEAF = 24
_PROOF = struct.Struct("<H8s")
_CHECKED = 16
_APPS = _CHECKED + _HEAD.size
_UNIQUE = 1
_PROVEN_BY_PAGES = 2
_REPEATED = 4
_WITH_MOVED = 8
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Proof:
    """By which pages it can be seen that all pages of a commit reached the disk.

    Attributes
    ----------
    pages
        Numbers of the pages that the commit wrote.
    digest
        BLAKE2b-64 of their checksums, in this order.
    """

    pages: tuple[int, ...]
    digest: bytes

    @classmethod
    def of(cls, checksums: Mapping[int, int]) -> Proof:
        """Return the proof for pages and their checksums."""
        return cls(tuple(checksums), digest(struct.pack(f"<{len(checksums)}Q", *checksums.values())))


@dataclass(frozen=True, slots=True)
class Superblock:
    """What one commit says of the whole table.

    Attributes
    ----------
    page_size
        Bytes in a page.
    txid
        Number of the transaction that wrote it; a new table begins with 1 (`write_first_superblocks`).
    root_page, root_checksum, height
        The root of the tree, the checksum its page must have, and the number of levels, leaves included.
        An empty table has height 0 and root page 0.
    rows, leaves
        Rows of the relation, and leaf pages that hold them.
    pages
        Length of the file in pages that this commit relies on, both superblocks included.
    metadata_page, metadata_bytes, metadata_checksum
        Where the schema lies: first page, length of its text, checksum.
    fill
        Share of a leaf that a load fills.
    unique
        Whether a key may occur only once.
    apps
        For each application id the version it has reached.
    version
        Of the format.
    moved
        Leaves that are not where the tree says, see `storage.moved`; their rows count, not those of the tree.
    proof
        Of a commit whose pages were not made durable before its superblock was written.
    """

    page_size: int
    txid: int
    root_page: int
    root_checksum: int
    height: int
    rows: int
    leaves: int
    pages: int
    metadata_page: int
    metadata_bytes: int
    metadata_checksum: int
    fill: float
    unique: bool
    apps: Mapping[str, int] = field(default_factory=dict)
    version: int = FORMAT_VERSION
    moved: bytes = b""
    proof: Proof | None = field(default=None, compare=False)

    def followed_by(
        self,
        txid: int,
        root: tuple[int, int, int],
        shape: tuple[int, int, int],
        moved: bytes,
        proof: Proof | None,
    ) -> Superblock:
        """Return the superblock of a later commit.

        Parameters
        ----------
        txid
            Of that commit.
        root
            Page and checksum of its root; rows of the table.
        shape
            Levels, leaves, and pages of the file.
        moved
            Its moved leaves.
        proof
            If it has one; it is left out if there is no room.
        """
        made = Superblock(
            self.page_size, txid, root[0], root[1], shape[0], root[2], shape[1], shape[2],
            self.metadata_page, self.metadata_bytes, self.metadata_checksum, self.fill, self.unique, self.apps,
            FORMAT_VERSION, moved, proof,
        )  # fmt: skip
        return made if fits(made) else replace(made, proof=None)

    @property
    def slot(self) -> int:
        """Which of the two superblock pages it belongs in."""
        return self.txid % 2


def check_page_size(page_size: int) -> None:
    """Refuse a page size that the format does not know.

    Raises
    ------
    InputError
        If the size is not a power of two from 4 to 64 KiB.
    """
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise InputError(f"a page has {', '.join(map(str, PAGE_SIZES))} bytes, not {page_size}")


def check_app(app: object) -> None:
    """Refuse what is neither None nor an application's name and version.

    Raises
    ------
    InputError
        If it is something else.
    """
    match app:
        case None | (str(), int()):
            return
    raise InputError(f"an application's state is given as a name and a whole version, not {app!r}")


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
    moved = _encode_moved(superblock.moved) if superblock.moved else b""
    proof = b"" if superblock.proof is None or repeated else _encode_proof(superblock.proof)
    flags = (_UNIQUE if superblock.unique else 0) | (_WITH_MOVED if moved else 0)
    flags |= (_PROVEN_BY_PAGES if proof else 0) | (_REPEATED if repeated else 0)
    checked = (_encode_head(superblock, flags) + apps + moved + proof).ljust(COPY_BYTES - _CHECKED, b"\0")
    return MAGIC + digest(checked) + checked


def _encode_head(superblock: Superblock, flags: int) -> bytes:
    return _HEAD.pack(
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
        flags,
        0,
        len(superblock.apps),
    )


def fits(superblock: Superblock) -> bool:
    """Return whether all that a superblock says has room in a copy."""
    size = _APPS + len(_encode_apps(superblock.apps)) + _proof_size(superblock.proof)
    return size + (_MOVED.size + len(superblock.moved) if superblock.moved else 0) <= COPY_BYTES


def room_for_moved(superblock: Superblock) -> int:
    """Return how many moved leaves fit beside the applications and the proof of a commit that moves leaves."""
    taken = _APPS + len(_encode_apps(superblock.apps)) + _MOVED.size + _PROOF.size + 8 * MOVED_AT_ONCE
    return min(MOVED_LEAVES, (COPY_BYTES - taken) // _MOVED_LEAF)


def decode_superblock(copy: bytes, slot: int) -> Superblock | None:
    """Return the superblock in one copy, or None if the copy is not whole or belongs in the other slot.

    Raises
    ------
    FormatVersionError
        If the copy is whole but of a newer format.
    """
    if len(copy) != COPY_BYTES or copy[:8] != MAGIC or copy[8:_CHECKED] != digest(copy[_CHECKED:]):
        return None
    (version, page_size, txid, root, root_sum, rows, leaves, pages, meta, meta_len, meta_sum, fill, height,
     flags, _, apps) = _HEAD.unpack_from(copy, _CHECKED)  # fmt: skip
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"the table has format version {version}, but this release reads up to {FORMAT_VERSION}; "
            "install a newer release of headrace"
        )
    if (txid + bool(flags & _REPEATED)) % 2 != slot or page_size not in PAGE_SIZES:
        return None
    versions, end = _decode_apps(copy, apps)
    moved, end = _decode_moved(copy, end) if flags & _WITH_MOVED else (b"", end)
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
        unique=bool(flags & _UNIQUE),
        apps=versions,
        version=version,
        moved=moved,
        proof=_decode_proof(copy, end) if flags & _PROVEN_BY_PAGES else None,
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


def _encode_moved(moved: bytes) -> bytes:
    return _MOVED.pack(len(moved) // _MOVED_LEAF) + moved


def _decode_moved(copy: bytes, at: int) -> tuple[bytes, int]:
    """Return the moved leaves, and where they end."""
    end = at + _MOVED.size + _MOVED_LEAF * _MOVED.unpack_from(copy, at)[0]
    return copy[at + _MOVED.size : end], end


def _proof_size(proof: Proof | None) -> int:
    return 0 if proof is None else _PROOF.size + 8 * len(proof.pages)


def _encode_proof(proof: Proof) -> bytes:
    return _PROOF.pack(len(proof.pages), proof.digest) + struct.pack(f"<{len(proof.pages)}Q", *proof.pages)


def _decode_proof(copy: bytes, at: int) -> Proof:
    count, digest = _PROOF.unpack_from(copy, at)
    return Proof(struct.unpack_from(f"<{count}Q", copy, at + _PROOF.size), digest)


def digest(data: bytes | memoryview) -> bytes:
    """Return BLAKE2b-64."""
    return hashlib.blake2b(data, digest_size=8).digest()
