"""The superblock of a clustered table: what one commit says about the whole table, and its encoding in bytes.

A table begins with two pages, the slots. Transaction `t` writes slot ``t mod 2``, so the superblock of the previous
transaction stays untouched. A slot begins with two equal copies of the superblock, `COPY_BYTES` each, so one damaged
byte does not lose a commit. All integers are little-endian:

    0    8 bytes   magic "HEADRACE"
    8    u64       XXH64 of bytes 16..2048, seeded with the slot (0 or 1)
    16   u32       format version        20   u32  page size in bytes
    24   u64       transaction id        32   u64  root page (0: the table is empty)
    40   u64       checksum of the root  48   u64  rows
    56   u64       leaves                64   u64  pages in the file
    72   u64       first metadata page   80   u64  metadata length in bytes
    88   u64       metadata checksum     96   f64  fill factor
    104  u32       height (levels)       108  u8   flags (bit 0: unique; 1: proof; 2: relocation list)
    109  u8        zero                  110  u16  number of applications
    112  for each application: i64 version, u16 length of the name, the name in UTF-8
    then if bit 2 of the flags is set, the relocation list: u16 entries, 24 bytes each (see `tree.relocations`)
    then if bit 1 of the flags is set, the proof: u16 number of pages, XXH64 of their checksums, u64 page ...

A superblock with a proof was written together with the pages of its commit, and is valid only if these pages are on
disk. Once they are known to be, the superblock is written again, without the proof, to the other slot.

`headrace.storage.format.slots` reads and writes the slots and decides which superblock is valid.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.storage.errors import FormatVersionError, InputError
from headrace.storage.format._byte_kernels import xxh64
from headrace.storage.format.constants import COPY_BYTES, FORMAT_VERSION, MAGIC, PAGE_SIZES, RELOCATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PROOF_PAGES",
    "RELOCATED_AT_ONCE",
    "Proof",
    "Superblock",
    "check_app",
    "check_page_size",
    "decode_superblock",
    "encode_superblock",
    "hash_bytes",
    "refuse_version",
    "room_for_relocations",
    "version_of",
    "without_oversized_proof",
]

PROOF_PAGES = 64
"""Most pages that a proof names."""
RELOCATED_AT_ONCE = 8
"""Most leaves that one commit may add to the relocation list."""
MOST_RELOCATIONS = 72
"""Most leaves that the relocation list holds."""

_CHECKSUM, _CHECKED, _FLAGS = 8, 16, 108
_UNIQUE, _PROVEN, _RELOCATED = 1, 2, 4
_HEAD = struct.Struct("<IIQQQQQQQQQdIBBH")
_FIELDS = (
    "version", "page_size", "txid", "root_page", "root_checksum", "rows", "leaves", "pages", "metadata_page",
    "metadata_bytes", "metadata_checksum", "fill", "height",
)  # fmt: skip
"""Fields of a superblock before the flags, in the order of the format."""
_FIELDS_OF = attrgetter(*_FIELDS)
_APP = struct.Struct("<qH")
_COUNT = struct.Struct("<H")
_PROOF = struct.Struct("<HQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MOST_PLAUSIBLE_VERSION = 255
_APPS = _CHECKED + _HEAD.size
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def hash_bytes(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """Return the XXH64 of `data`."""
    writable = np.frombuffer(bytearray(data), dtype=np.uint8)  # numba compiles again for arrays that are not
    return int(xxh64(writable, 0, len(data), np.uint64(seed)))


class Proof(NamedTuple):
    """Shows that all pages of a commit reached the disk.

    Attributes
    ----------
    pages
        Numbers of the pages that the commit wrote.
    digest
        XXH64 of their checksums, in this order.
    """

    pages: tuple[int, ...]
    digest: int

    @classmethod
    def of(cls, checksums: Mapping[int, int]) -> Proof:
        """Return the proof of a commit that wrote these pages, given the checksum of each."""
        return cls(tuple(checksums), hash_bytes(struct.pack(f"<{len(checksums)}Q", *checksums.values())))


@dataclass(frozen=True, slots=True)
class Superblock:
    """What one commit says about the whole table.

    Attributes
    ----------
    page_size
        Page size in bytes.
    txid
        Transaction that wrote the superblock. A new table starts at 2, see `write_first_superblocks`.
    root_page, root_checksum, height
        Page and checksum of the root of the tree, and the number of levels, leaves included.
        An empty table has height 0 and root page 0.
    rows, leaves
        Rows of the relation, and leaf pages that hold them.
    pages
        Pages of the file that this commit relies on, both superblocks included.
    metadata_page, metadata_bytes, metadata_checksum
        Where the schema is stored: first page, length of the text, checksum of the text.
    fill
        Fill factor: the share of a leaf that a load fills.
    unique
        Whether a key may occur only once.
    apps
        Version that each application has reached, by application id.
    version
        Format version.
    relocations
        Relocation list: leaves that are not where the inner nodes say, see `headrace.storage.tree.relocations`. `rows`
        counts these leaves as the list has them.
    proof
        Proof of a commit whose pages were not made durable before its superblock was written.
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
    relocations: bytes = b""
    proof: Proof | None = field(default=None, compare=False)

    @property
    def slot(self) -> int:
        """Slot of the superblock, 0 or 1."""
        return self.txid % 2


def check_page_size(page_size: int) -> None:
    """Raise if a page size is not supported.

    Raises
    ------
    InputError
        If the size is not a power of two from 4 to 64 KiB.
    """
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise InputError(f"a page has {', '.join(map(str, PAGE_SIZES))} bytes, not {page_size}")


def check_app(app: object) -> None:
    """Raise unless `app` is None or the name and version of an application.

    Raises
    ------
    InputError
        If it is something else.
    """
    match app:
        case None | (str(), int()):
            return
    raise InputError(f"an application's state is given as a name and a whole version, not {app!r}")


def encode_superblock(superblock: Superblock, slot: int | None = None) -> bytes:
    """Return one copy of a superblock: `COPY_BYTES` bytes, checksum included.

    Parameters
    ----------
    superblock
        Superblock to encode.
    slot
        Slot that the copy is written to; by default the superblock's own.

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
    copy, at = bytearray(COPY_BYTES), _APPS + len(apps)
    copy[: len(MAGIC)] = MAGIC
    _HEAD.pack_into(copy, _CHECKED, *_FIELDS_OF(superblock), _flags_of(superblock), 0, len(superblock.apps))
    copy[_APPS:at] = apps
    if superblock.relocations:
        _COUNT.pack_into(copy, at, len(superblock.relocations) // RELOCATION_BYTES)
        start, at = at + _COUNT.size, at + _COUNT.size + len(superblock.relocations)
        copy[start:at] = superblock.relocations
    if superblock.proof is not None:
        pages, digest = superblock.proof
        struct.pack_into(f"<HQ{len(pages)}Q", copy, at, len(pages), digest, *pages)
    _U64.pack_into(copy, _CHECKSUM, _checksum_of(copy, superblock.slot if slot is None else slot))
    return bytes(copy)


def _checksum_of(copy: bytes | bytearray, slot: int) -> int:
    return hash_bytes(memoryview(copy)[_CHECKED:], slot)


def _flags_of(superblock: Superblock) -> int:
    flags = _UNIQUE if superblock.unique else 0
    flags |= _RELOCATED if superblock.relocations else 0
    return flags | (_PROVEN if superblock.proof is not None else 0)


def without_oversized_proof(superblock: Superblock) -> Superblock:
    """Return the superblock, without its proof if a copy has no room for it."""
    if superblock.proof is None:
        return superblock
    relocations = _COUNT.size + len(superblock.relocations) if superblock.relocations else 0
    proof = _PROOF.size + _U64.size * len(superblock.proof.pages)
    size = _APPS + len(_encode_apps(superblock.apps)) + relocations + proof
    return superblock if size <= COPY_BYTES else replace(superblock, proof=None)


def room_for_relocations(apps: Mapping[str, int]) -> int:
    """Return how many relocated leaves fit beside these applications and the proof of a commit that relocates leaves.

    Raises
    ------
    InputError
        As `encode_superblock` does.
    """
    taken = _APPS + len(_encode_apps(apps)) + _COUNT.size + _PROOF.size + _U64.size * RELOCATED_AT_ONCE
    return min(MOST_RELOCATIONS, (COPY_BYTES - taken) // RELOCATION_BYTES)


def version_of(copy: bytes) -> int | None:
    """Return the format version in a copy whose checksum was not verified; None if the copy has no plausible one."""
    version = int(_U32.unpack_from(copy, _CHECKED)[0]) if len(copy) == COPY_BYTES else 0
    return version if 0 < version <= _MOST_PLAUSIBLE_VERSION else None


def decode_superblock(copy: bytes, slot: int) -> Superblock | None:
    """Return the superblock in one copy, or None if the copy is damaged or belongs in the other slot.

    Raises
    ------
    FormatVersionError
        If the copy is whole but of another format version.
    """
    if len(copy) != COPY_BYTES or copy[: len(MAGIC)] != MAGIC:
        return None
    if _U64.unpack_from(copy, _CHECKSUM)[0] != _checksum_of(copy, slot):
        return None
    *values, flags, _, apps = _HEAD.unpack_from(copy, _CHECKED)
    fields = dict(zip(_FIELDS, values, strict=True))
    refuse_version(fields["version"])
    if fields["page_size"] not in PAGE_SIZES:
        return None
    versions, end = _decode_apps(copy, apps)
    relocations, end = _decode_relocations(copy, end) if flags & _RELOCATED else (b"", end)
    return Superblock(
        **fields,
        unique=bool(flags & _UNIQUE),
        apps=versions,
        relocations=relocations,
        proof=_decode_proof(copy, end) if flags & _PROVEN else None,
    )


def refuse_version(version: int) -> None:
    """Raise unless this release reads tables of a format version.

    Raises
    ------
    FormatVersionError
        If the version is another than `FORMAT_VERSION`.
    """
    if version == FORMAT_VERSION:
        return
    remedy = "install a newer release of headrace" if version > FORMAT_VERSION else "build the table again"
    raise FormatVersionError(
        f"the table has format version {version}, but this release reads only version {FORMAT_VERSION}; {remedy}"
    )


def _encode_apps(apps: Mapping[str, int]) -> bytes:
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
    """Return the application versions, and the offset at which they end."""
    apps: dict[str, int] = {}
    at = _APPS
    for _ in range(count):
        version, length = _APP.unpack_from(copy, at)
        at += _APP.size
        apps[copy[at : at + length].decode()] = version
        at += length
    return apps, at


def _decode_relocations(copy: bytes, at: int) -> tuple[bytes, int]:
    """Return the relocation list, and the offset at which it ends."""
    end = at + _COUNT.size + RELOCATION_BYTES * _COUNT.unpack_from(copy, at)[0]
    return copy[at + _COUNT.size : end], end


def _decode_proof(copy: bytes, at: int) -> Proof:
    count, digest = _PROOF.unpack_from(copy, at)
    return Proof(struct.unpack_from(f"<{count}Q", copy, at + _PROOF.size), digest)
