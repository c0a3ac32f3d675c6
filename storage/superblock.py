"""The superblock of a clustered table: what one commit says of the whole table.

How it is encoded is for `storage.superblock_bytes`, where it is written and which one counts for `storage.slots`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace.storage.errors import InputError

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
    "digest",
]

MAGIC = b"HEADRACE"
FORMAT_VERSION = 3
COPY_BYTES = 2048
SLOT_BYTES = 2 * COPY_BYTES
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
PROOF_PAGES = 64
MOVED_AT_ONCE = 8


class Proof(NamedTuple):
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
        Number of the transaction that wrote it; a new table begins with 2 (`write_first_superblocks`).
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
        Leaves that are not where the tree says, see `headrace.storage.moved`; their rows count, not those of the tree.
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


def digest(data: bytes | memoryview) -> bytes:
    """Return BLAKE2b-64."""
    return hashlib.blake2b(data, digest_size=8).digest()
