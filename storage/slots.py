"""The two slots of superblocks at the beginning of a table: how they are written, and which superblock counts.

A copy counts if magic, checksum and slot are right; of those that count and are proven, the one with the highest
transaction id is the table.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptionError, NotATableError, StorageIOError
from headrace.storage.superblock import COPY_BYTES, MAGIC, PAGE_SIZES, SLOT_BYTES, digest
from headrace.storage.superblock_bytes import decode_superblock, encode_superblock

if TYPE_CHECKING:
    from headrace.storage.backend import StorageBackend
    from headrace.storage.snapshot import Snapshot
    from headrace.storage.superblock import Superblock

__all__ = [
    "commit_superblock",
    "damaged_copies",
    "put_back",
    "read_superblock",
    "repeat_superblock",
    "write_first_superblocks",
    "write_superblock",
]


def read_superblock(backend: StorageBackend) -> Superblock:
    """Return the superblock that counts: of those that are whole and proven the one with the highest transaction id.

    If none is proven, the newest whole one counts, and reading will tell what is damaged.

    Raises
    ------
    NotATableError
        If neither slot holds a whole superblock.
    FormatVersionError
        If the table is of a newer format.

    Notes
    -----
    The second slot lies at the page size, which the first slot tells. If the first one is torn, all page sizes of
    the format are tried.
    """
    whole = _newest_first(backend)
    at = 0
    while at < len(whole):
        if whole[at].proof is None or _is_proven(backend, whole[at]):
            return whole[at]
        now = _newest_first(backend)
        at, whole = (at + 1, whole) if now == whole else (0, now)  # a commit in between may use the pages again
    return whole[0]


def _newest_first(backend: StorageBackend) -> list[Superblock]:
    """Return the whole superblocks, each transaction once, without a proof if one of its copies needs none."""
    size = backend.size()
    whole = [found for found in _copies(backend, 0, 0, size) if found is not None]
    for page_size in (whole[0].page_size,) if whole else PAGE_SIZES:
        second = _copies(backend, page_size, 1, size)
        whole += [found for found in second if found is not None and found.page_size == page_size]
    if not whole:
        raise NotATableError(_not_a_table(backend, size))
    whole.sort(key=lambda found: (found.txid, found.proof is None))
    return list({found.txid: found for found in whole}.values())[::-1]


def _is_proven(backend: StorageBackend, superblock: Superblock) -> bool:
    """Return whether the pages that a commit wrote are on disk, as it wrote them."""
    from headrace.storage.tree import read_pages  # noqa: PLC0415 - numba is loaded with the first page

    assert superblock.proof is not None
    numbers, size = np.array(superblock.proof.pages, dtype=np.int64), superblock.page_size
    try:
        pages = read_pages(backend, size, numbers, None)
    except CorruptionError:
        return False
    checksums = pages[: len(numbers) * size].reshape(-1, size)[:, :8].tobytes()
    return digest(checksums) == superblock.proof.digest


def damaged_copies(backend: StorageBackend, page_size: int) -> list[tuple[int, int]]:
    """Return (slot, copy) of every superblock copy that is not whole. A crash can leave some; a sound table none."""
    size = backend.size()
    copies = [_copies(backend, slot * page_size, slot, size) for slot in (0, 1)]
    return [(slot, copy) for slot in (0, 1) for copy in (0, 1) if copies[slot][copy] is None]


def write_superblock(backend: StorageBackend, superblock: Superblock) -> None:
    """Write a superblock into its slot. The caller syncs after, and before unless the superblock has a proof."""
    backend.pwrite(superblock.slot * superblock.page_size, 2 * encode_superblock(superblock))


def commit_superblock(backend: StorageBackend, after: Snapshot, copy: bytes) -> None:
    """Write a copy of a commit's superblock into its slot and make it durable."""
    backend.pwrite(after.txid % 2 * after.page_size, 2 * copy)
    backend.sync()


def put_back(backend: StorageBackend, before: Snapshot) -> None:
    """Put a table back to the commit `before` if it can be, as making the next one durable by one sync failed.

    What the system has in memory may never reach the disk.
    """
    with contextlib.suppress(StorageIOError):  # the first failure is the one to report
        repeat_superblock(backend, before.superblock)


def repeat_superblock(backend: StorageBackend, superblock: Superblock) -> None:
    """Write a superblock whose commit is durable into the other slot, without a proof."""
    copy = encode_superblock(superblock, repeated=True)
    backend.pwrite((1 - superblock.slot) * superblock.page_size, 2 * copy)


def write_first_superblocks(backend: StorageBackend, superblock: Superblock) -> None:
    """Write both slots of a new table: the given first commit, and its equal under the transaction id before it.

    So a new table survives the loss of either.
    """
    write_superblock(backend, superblock)
    write_superblock(backend, replace(superblock, txid=superblock.txid - 1))


def _copies(backend: StorageBackend, offset: int, slot: int, size: int) -> tuple[Superblock | None, Superblock | None]:
    block = _read_block(backend, offset, size)
    return decode_superblock(block[:COPY_BYTES], slot), decode_superblock(block[COPY_BYTES:], slot)


def _read_block(backend: StorageBackend, offset: int, size: int) -> bytes:
    if size < offset + SLOT_BYTES:
        return b""
    block = bytearray(SLOT_BYTES)
    backend.pread_into(offset, [memoryview(block)])
    return bytes(block)


def _not_a_table(backend: StorageBackend, size: int) -> str:
    if size == 0:
        return f"{backend.path} is empty, not a table; build it again"
    if _read_block(backend, 0, size)[:8] == MAGIC:
        return f"both superblocks of {backend.path} are damaged; restore the file or build it again"
    return f"{backend.path} is not a headrace table: it does not begin as one does"
