"""Indexes that find tuples in memory by key: hash chains for equality, sorted entries for ranges and sorted access.

An index belongs to a `TupleStore`, which tells it what is added and removed. A probe yields pairs into arrays of a
fixed size, so that a key with many matches needs no more memory than one with few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.joins.streams.tuples import _index_kernels as kernels
from headrace.joins.streams.tuples.arena import Arena, charged_nbytes
from headrace.joins.streams.tuples.keys import Width

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.memory import MemoryBudget
    from headrace.joins.streams.tuples.rows import Rows

__all__ = ["HashIndex", "KeyIndex", "SortedIndex", "new_cursor"]

_FEWEST_BITS = 6
_EQUAL = Width(0)


def new_cursor() -> NDArray[np.int64]:
    """Return the cursor of a probe that has not begun: position in the list of tuples, place in their matches."""
    return np.array([0, -1], dtype=np.int64)


class KeyIndex(Protocol):
    """Index over one key of the tuples in a store."""

    @property
    def charged(self) -> int:
        """Bytes that are charged."""
        ...

    def nbytes_for(self, count: int) -> int:
        """Return the bytes that are charged for a number of tuples."""
        ...

    def added(self, rows: Rows, start: int) -> None:
        """Add the tuples from slot `start` on; memory is charged first."""
        ...

    def removed(
        self, rows: Rows, slots: NDArray[np.int64], source: NDArray[np.int64], target: NDArray[np.int64]
    ) -> None:
        """Remove the tuples in some slots; then those in slots `source` are in slots `target`."""
        ...

    def rebuild(self, rows: Rows) -> None:
        """Index these tuples instead of more tuples in other slots."""
        ...

    def probe(
        self,
        rows: Rows,
        key: int,
        probing: Rows,
        probing_key: int,
        index: NDArray[np.int64],
        width: Width | None,
        cursor: NDArray[np.int64],
        out: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> int:
        """Fill `out` with pairs of a position in `index` and a slot; return their number, see `new_cursor`."""
        ...

    def free(self) -> None:
        """Free the memory."""
        ...


class HashIndex:
    """Hash chains over one key, for equality.

    Parameters
    ----------
    budget
        Budget to charge.
    key
        Position of the key among the keys of the input.
    """

    def __init__(self, budget: MemoryBudget, key: int) -> None:
        self._key = key
        self._heads, self._links = Arena(budget, "key_index"), Arena(budget, "key_index")
        self._bits = _FEWEST_BITS
        self._built = False

    @property
    def charged(self) -> int:
        """Bytes that are charged."""
        return self._heads.charged + self._links.charged

    def nbytes_for(self, count: int) -> int:
        """Return the bytes that are charged for a number of tuples."""
        return charged_nbytes(4 << self._bits_for(count)) + charged_nbytes(8 * count)

    def added(self, rows: Rows, start: int) -> None:
        """Add the tuples from slot `start` on."""
        bits = self._bits_for(len(rows))
        self._links.resize(8 * len(rows))
        if not self._built or bits != self._bits:
            self._heads.resize(4 << bits)
            self._bits, self._built, start = bits, True, 0
            self._head_array[:] = -1
        kernels.chain(rows.keyed(self._key), start, len(rows), 64 - self._bits, self._head_array, self._link_array)

    def removed(
        self, rows: Rows, slots: NDArray[np.int64], source: NDArray[np.int64], target: NDArray[np.int64]
    ) -> None:
        """Remove the tuples in some slots; then those in slots `source` are in slots `target`."""
        kernels.unlink(self._head_array, self._link_array, slots, source, target)
        self._links.resize(8 * len(rows))
        if self._bits_for(len(rows)) < self._bits:
            self.rebuild(rows)

    def rebuild(self, rows: Rows) -> None:
        """Index these tuples instead of more tuples in other slots."""
        self._built = False
        self.added(rows, 0)
        self._heads.resize(4 << self._bits)

    def probe(
        self,
        rows: Rows,
        key: int,
        probing: Rows,
        probing_key: int,
        index: NDArray[np.int64],
        width: Width | None,
        cursor: NDArray[np.int64],
        out: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> int:
        """Fill `out` with pairs of a position in `index` and a slot; return their number."""
        assert width is None, "a hash index finds equal keys only"
        if not self._built:
            cursor[:] = len(index), -1
            return 0
        return int(
            kernels.probe_chains(
                probing.keyed(probing_key),
                index,
                rows.keyed(key),
                64 - self._bits,
                self._head_array,
                self._link_array,
                cursor,
                *out,
            )
        )

    def free(self) -> None:
        """Free the memory."""
        self._heads.free()
        self._links.free()
        self._built = False

    def _bits_for(self, count: int) -> int:
        """Return the bits of a bucket number: a bucket for each tuple or more, but few changes of their number."""
        wanted = max(_FEWEST_BITS, max(count - 1, 1).bit_length())
        return self._bits if self._built and wanted <= self._bits <= wanted + 2 else wanted

    @property
    def _head_array(self) -> NDArray[np.int32]:
        return self._heads.bytes[: 4 << self._bits].view(np.int32)

    @property
    def _link_array(self) -> NDArray[np.int32]:
        whole = self._links.bytes[: len(self._links.bytes) // 8 * 8]
        return whole.view(np.int32).reshape(-1, 2)


class SortedIndex:
    """Entries of a key word and a slot in the order of the words, for bands and for sorted access.

    Entries with equal words are in the order in which they were added. Adding and removing takes one pass over the
    entries, so do it for many tuples at a time.

    Parameters
    ----------
    budget
        Budget to charge.
    key
        Position of the key among the keys of the input.
    """

    def __init__(self, budget: MemoryBudget, key: int) -> None:
        self._key = key
        self._words, self._slots = Arena(budget, "key_index"), Arena(budget, "key_index")
        self._gone = Arena(budget, "key_index")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def words(self) -> NDArray[np.uint64]:
        """Key words in order. A view."""
        return self._words.bytes[: 8 * self._count].view(np.uint64)

    @property
    def slots(self) -> NDArray[np.int32]:
        """Slots of the tuples in the order of their key words. A view."""
        return self._slots.bytes[: 4 * self._count].view(np.int32)

    @property
    def charged(self) -> int:
        """Bytes that are charged."""
        return self._words.charged + self._slots.charged + self._gone.charged

    def nbytes_for(self, count: int) -> int:
        """Return the bytes that are charged for a number of tuples."""
        return charged_nbytes(8 * count) + charged_nbytes(4 * count) + charged_nbytes(count)

    def added(self, rows: Rows, start: int) -> None:
        """Add the tuples from slot `start` on."""
        self._resize(len(rows))
        words = rows.key_words(self._key)[start:]
        order = np.argsort(words, kind="stable")
        kernels.merge_entries(
            self._words.bytes[: 8 * len(rows)].view(np.uint64),
            self._slots.bytes[: 4 * len(rows)].view(np.int32),
            self._count,
            words[order],
            (order + start).astype(np.int32),
        )
        self._count = len(rows)

    def removed(
        self, rows: Rows, slots: NDArray[np.int64], source: NDArray[np.int64], target: NDArray[np.int64]
    ) -> None:
        """Remove the tuples in some slots; then those in slots `source` are in slots `target`."""
        gone = self._gone.bytes[: self._count].view(np.bool_)
        gone[:] = False
        gone[slots] = True
        kept = len(rows)
        moved_to = np.full(self._count - kept, -1, dtype=np.int64)
        moved_to[source - kept] = target
        self._count = kernels.compact_entries(self.words, self.slots, self._count, gone, kept, moved_to)
        self._resize(kept)

    def rebuild(self, rows: Rows) -> None:
        """Index these tuples instead of more tuples in other slots."""
        self._count = 0
        self.added(rows, 0)

    def probe(
        self,
        rows: Rows,
        key: int,
        probing: Rows,
        probing_key: int,
        index: NDArray[np.int64],
        width: Width | None,
        cursor: NDArray[np.int64],
        out: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> int:
        """Fill `out` with pairs of a position in `index` and a slot; return their number."""
        by = width or _EQUAL
        return int(
            kernels.probe_entries(
                probing.keyed(probing_key),
                index,
                rows.keyed(key),
                self.words,
                self.slots,
                self._count,
                np.uint64(by.words),
                by.number,
                by.floating,
                cursor,
                *out,
            )
        )

    def free(self) -> None:
        """Free the memory."""
        self._count = 0
        self._resize(0)

    def _resize(self, count: int) -> None:
        self._words.resize(8 * count)
        self._slots.resize(4 * count)
        self._gone.resize(count)
