"""The superblocks of commits that only move leaves, each made of the one before in place.

Such commits are the most frequent ones, and nearly all that their superblocks say stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage._few_kernels import add_moved
from headrace.storage._superblock_kernels import write_follower
from headrace.storage.superblock import COPY_BYTES, FORMAT_VERSION, MOVED_AT_ONCE, digest
from headrace.storage.superblock_bytes import (
    CHECKED,
    CHECKSUM,
    MOVED_LEAF,
    encode_superblock,
    list_of_moved,
    room_for_moved,
    tail_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.superblock import Proof, Superblock
    from headrace.storage.tree import Entries

__all__ = ["MovingHead"]


class MovingHead:
    """A superblock that follows the table from one commit to the next, as long as these only move leaves.

    Parameters
    ----------
    head
        Of the newest commit, with the applications' versions as the next one has them.

    Attributes
    ----------
    txid, rows, pages, leaves, unique
        As of the superblock.
    copy : uint8[n]
        A copy of it, and room.
    tail
        Where the applications end in the copy.
    moved : uint8[n]
        The list of leaves that have moved, those of the commit that is being made included, and room for more.
    count
        How many these are.

    Raises
    ------
    InputError
        If the applications do not fit.
    """

    def __init__(self, head: Superblock) -> None:
        copy = bytearray(encode_superblock(replace(head, version=FORMAT_VERSION, moved=b"", proof=None)))
        copy.extend(bytes(len(head.moved) + MOVED_AT_ONCE * MOVED_LEAF))  # there may be no room for the list within
        self.tail = tail_of(head)
        self.txid, self.rows, self.pages = head.txid, head.rows, head.pages
        self.leaves, self.unique = head.leaves, head.unique
        self.count = len(head.moved) // MOVED_LEAF
        self.copy = np.frombuffer(copy, dtype=np.uint8)
        self.moved = self.copy[list_of_moved(self.tail) :]
        self._room = room_for_moved(self.tail)
        self._bytes = memoryview(copy)[:COPY_BYTES]
        self._list = memoryview(copy)[list_of_moved(self.tail) :]
        self.listed[:] = head.moved

    def has_room(self, leaves: int) -> bool:
        """Return whether so many leaves can be listed as moved, even if none of them is yet."""
        return leaves <= MOVED_AT_ONCE and self.count + leaves <= self._room

    def add(self, leaves: NDArray[np.int64], entries: Entries) -> None:
        """List leaves of these numbers as moved to where the entries say."""
        self.count = add_moved(self.moved, self.count, leaves, entries.pages, entries.checksums, entries.rows)

    @property
    def listed(self) -> memoryview:
        """The list, without the room for more."""
        return self._list[: MOVED_LEAF * self.count]

    def follow(self, rows: int, end: int, proof: Proof | None) -> bytes:
        """Become the superblock of the next commit, and return a copy of it.

        Parameters
        ----------
        rows
            Of the table.
        end
            One past the last page that was written.
        proof
            If it has one.
        """
        self.txid, self.rows, self.pages = self.txid + 1, rows, max(self.pages, end)
        pages = np.array(() if proof is None else proof.pages, dtype=np.int64)
        place = write_follower(self.copy, self.tail, self.txid, rows, self.pages, self.count, pages)
        if proof is not None:
            self._bytes[place : place + len(proof.digest)] = proof.digest
        self._bytes[CHECKSUM:CHECKED] = digest(self._bytes[CHECKED:])
        return self.encoded()

    def encoded(self) -> bytes:
        """Return a copy of it as it is now."""
        return bytes(self._bytes)
