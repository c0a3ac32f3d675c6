"""The superblocks of commits that only move leaves, each made of the one before in place.

Such commits are the most frequent ones, and nearly all that their superblocks say stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from storage import _few_kernels as kernels
from storage.moved import LISTED, moved_words
from storage.superblock import FORMAT_VERSION, MOVED_AT_ONCE
from storage.superblock_bytes import encode_superblock, follow, room_for_moved, tail_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storage.superblock import Proof, Superblock
    from storage.tree import Entries

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
    moved : uint64[LISTED]
        Leaves that have moved, those of the commit that is being made included; see `storage.moved.moved_words`.
    count
        How many these are.

    Raises
    ------
    InputError
        If the applications do not fit.
    """

    def __init__(self, head: Superblock) -> None:
        plain = replace(head, version=FORMAT_VERSION, moved=b"", proof=None)
        self._copy = memoryview(bytearray(encode_superblock(plain)))
        self._tail = tail_of(head)
        self.txid, self.rows, self.pages = head.txid, head.rows, head.pages
        self.leaves, self.unique = head.leaves, head.unique
        words = moved_words(head.moved)
        self.count = len(words)
        self.moved: NDArray[np.uint64] = np.empty(LISTED, dtype=np.uint64)
        self.moved[: self.count] = words
        self._bytes = memoryview(self.moved).cast("B")  # type: ignore[arg-type] # numpy declares its buffer from 3.12 on
        self._entry = self.moved.strides[0]

    def has_room(self, leaves: int) -> bool:
        """Return whether so many leaves can be listed as moved, even if none of them is yet."""
        return leaves <= MOVED_AT_ONCE and self.count + leaves <= room_for_moved(self._tail)

    def add(self, leaves: NDArray[np.int64], entries: Entries) -> None:
        """List leaves of these numbers as moved to where the entries say."""
        self.count = kernels.add_moved(self.moved, self.count, leaves, entries.pages, entries.checksums, entries.rows)

    @property
    def listed(self) -> memoryview:
        """The list as bytes."""
        return self._bytes[: self._entry * self.count]

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
        return follow(self._copy, self._tail, (self.txid, self.rows, self.pages), self.listed, proof)
