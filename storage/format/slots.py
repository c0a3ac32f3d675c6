"""The two superblock slots at the start of a table: how they are written, and which superblock is valid.

A copy is whole if its magic and checksum are right. Of the superblocks that are whole and proven, the one with the
highest transaction id is the state of the table.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.errors import CorruptionError, NotATableError, StorageIOError
from headrace.storage.format.constants import COPY_BYTES, MAGIC, PAGE_SIZES, SLOT_BYTES
from headrace.storage.format.page import read_pages
from headrace.storage.format.superblock import (
    decode_superblock,
    encode_superblock,
    hash_bytes,
    refuse_version,
    version_of,
)

if TYPE_CHECKING:
    from headrace.storage.file.backend import StorageBackend
    from headrace.storage.format.superblock import Superblock

__all__ = [
    "damaged_copies",
    "oldest_txid",
    "read_superblock",
    "repeat_superblock",
    "restore_superblock",
    "write_first_superblocks",
    "write_superblock",
]


_SLOTS = 2


def read_superblock(backend: StorageBackend) -> Superblock:
    """Return the valid superblock: of those that are whole and proven, the one with the highest transaction id.

    If none is proven, the newest whole one is valid, and reading its pages reports the damage.

    Raises
    ------
    NotATableError
        If the file does not begin as a table does.
    CorruptionError
        If neither slot holds a whole superblock.
    FormatVersionError
        If the table has another format version.

    Notes
    -----
    The second slot starts at the page size, which the first slot holds. If the first slot is torn, all page sizes of
    the format are tried.
    """
    whole = _newest_first(backend)
    at = 0
    while at < len(whole):
        if whole[at].proof is None or _is_proven(backend, whole[at]):
            return whole[at]
        now = _newest_first(backend)
        at, whole = (at + 1, whole) if now == whole else (0, now)  # a later commit may have reused the pages meanwhile
    return whole[0]


def oldest_txid(backend: StorageBackend) -> int:
    """Return the lowest transaction id of the whole superblocks. It is durable, so the newest is never below it.

    Raises as `read_superblock` does.
    """
    return _newest_first(backend)[-1].txid


def _newest_first(backend: StorageBackend) -> list[Superblock]:
    """Return the whole superblocks, one for each transaction, preferring a copy without a proof.

    The first one was the newest at some moment of this call. That needs a slot without a whole copy to be read again:
    if it was being written, the other slot may have been read one commit too early.
    """
    whole, torn = _read_slots(backend)
    while torn:
        before = whole
        whole, torn = _read_slots(backend)
        torn = torn and whole != before
    if not whole:
        raise _not_a_table(backend, backend.size())
    return whole


def _read_slots(backend: StorageBackend) -> tuple[list[Superblock], bool]:
    """Return the whole superblocks as `_newest_first` does, and whether a slot has none."""
    size = backend.size()
    slots = [[found for found in _copies(backend, 0, 0, size) if found is not None]]
    for page_size in (slots[0][0].page_size,) if slots[0] else PAGE_SIZES:
        second = _copies(backend, page_size, 1, size)
        slots.append([found for found in second if found is not None and found.page_size == page_size])
    whole = sorted(itertools.chain(*slots), key=lambda found: (found.txid, found.proof is None))
    return list({found.txid: found for found in whole}.values())[::-1], sum(map(bool, slots)) != _SLOTS


def _is_proven(backend: StorageBackend, superblock: Superblock) -> bool:
    """Return whether the pages of a commit are on disk as the commit wrote them."""
    assert superblock.proof is not None
    numbers, size = np.array(superblock.proof.pages, dtype=np.int64), superblock.page_size
    try:
        pages = read_pages(backend, size, numbers, None)
    except CorruptionError:
        return False
    checksums = pages[: len(numbers) * size].reshape(-1, size)[:, :8].tobytes()
    return hash_bytes(checksums) == superblock.proof.digest


def damaged_copies(backend: StorageBackend, page_size: int) -> list[tuple[int, int]]:
    """Return (slot, copy) of every damaged superblock copy. A crash can leave some; a sound table has none."""
    size = backend.size()
    copies = [_copies(backend, slot * page_size, slot, size) for slot in (0, 1)]
    return [(slot, copy) for slot in (0, 1) for copy in (0, 1) if copies[slot][copy] is None]


def write_superblock(backend: StorageBackend, superblock: Superblock) -> None:
    """Write a superblock to its slot. The caller syncs afterwards, and before too unless the superblock has a proof."""
    backend.pwrite(superblock.slot * superblock.page_size, 2 * encode_superblock(superblock))


def repeat_superblock(backend: StorageBackend, superblock: Superblock) -> None:
    """Write the superblock of a durable commit to the other slot, without its proof."""
    other = 1 - superblock.slot
    copy = encode_superblock(replace(superblock, proof=None), other)
    backend.pwrite(other * superblock.page_size, 2 * copy)


def restore_superblock(backend: StorageBackend, before: Superblock) -> None:
    """Overwrite the superblock of a commit that failed with that of the commit before it, if that is possible.

    The operating system may hold pages in memory that never reach the disk; they must not prove the failed commit.
    """
    with contextlib.suppress(StorageIOError):  # the first failure is the one to report
        repeat_superblock(backend, before)


def write_first_superblocks(backend: StorageBackend, superblock: Superblock) -> None:
    """Write both slots of a new table: the first commit, and the same under the transaction id before it.

    A new table therefore survives the loss of either slot.
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


def _not_a_table(backend: StorageBackend, size: int) -> CorruptionError:
    """Return the error for a file without a whole superblock; raise if it looks like one of another format version."""
    if size == 0:
        return NotATableError(f"{backend.path} is empty, not a table; build it again")
    block = _read_block(backend, 0, size)
    if block[: len(MAGIC)] != MAGIC:
        return NotATableError(f"{backend.path} is not a headrace table: it does not begin as one does")
    version = version_of(block[:COPY_BYTES])
    if version is not None:
        refuse_version(version)
    return CorruptionError(f"both superblocks of {backend.path} are damaged; restore the file or build it again")
