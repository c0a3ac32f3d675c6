"""`RowHash`: a row store with all rows of a relation by key, so that a lookup touches one place in memory.

A slot is a row: its key, its null bits, and the words of its columns, each in as few bytes as the relation needs::

    key - lowest key + 1 | null bits | word - its base | word - its base | ...

Key 0 is an empty slot. A row is in the first free slot from its key's home slot on, so a search ends at its key or at
an empty slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.storage.format.constants import WORD
from headrace.storage.leaf.decode import FixedRows
from headrace.storage.probe import _hash_kernels as kernels
from headrace.storage.probe._probe_kernels import FACTS, FACTS_OF_A_COLUMN
from headrace.storage.read.frame_memory import SLACK_BYTES, FrameMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format.keys import KeyWords
    from headrace.storage.format.layout import PhysicalColumn

__all__ = ["RowHash", "SlotForm"]

_SPARSE, _DENSE = 2.0, 4 / 3  # slots for each row: more are not faster, fewer are slow
_BEHIND = 4096  # slots after the last home slot; the last of them is always empty
_MOST_WORDS = 64
_MOST_PASSED = 8  # occupied slots passed for each row; more mean that too many keys collide
_U8 = np.uint64(0xFF)
_SIGN, _ALL = np.uint64(1 << 63), np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class SlotForm:
    """Layout of a slot.

    Attributes
    ----------
    low
        Lowest key.
    key_nbytes, nulls_nbytes
        Bytes of a key above the lowest one, and of the null bits.
    bases : uint64[words]
        Base that is subtracted from each word.
    widths : int64[words]
        Bytes of each difference.
    """

    low: np.uint64
    key_nbytes: int
    nulls_nbytes: int
    bases: NDArray[np.uint64]
    widths: NDArray[np.int64]

    @classmethod
    def of(cls, facts: NDArray[np.uint64], greatest: np.uint64) -> Self | None:
        """Return the form for the rows of pages, None if there is none.

        Parameters
        ----------
        facts
            Descriptor of each page with rows, see `headrace.storage.probe._probe_kernels.describe_pages`.
        greatest
            Greatest key.
        """
        words = (facts.shape[1] - FACTS) // FACTS_OF_A_COLUMN
        low = facts[:, 0].min()
        key_nbytes = (int(greatest - low) + 1).bit_length() + 7 >> 3
        if words > _MOST_WORDS or key_nbytes > WORD:
            return None
        packed = facts[:, FACTS + 1 :: FACTS_OF_A_COLUMN]
        ranges = [
            _narrower_range(facts[:, FACTS + FACTS_OF_A_COLUMN * word], (packed[:, word] >> np.uint64(48)) & _U8)
            for word in range(words)
        ]
        nullable = bool(((packed >> np.uint64(32)) & np.uint64(0xFFFF)).any())
        return cls(
            low,
            key_nbytes,
            -(-words // 8) if nullable else 0,
            np.array([base for base, _ in ranges], dtype=np.uint64),
            np.array([width for _, width in ranges], dtype=np.int64),
        )

    @property
    def stride(self) -> int:
        """Bytes of a slot."""
        return self.key_nbytes + self.nulls_nbytes + int(self.widths.sum())

    def slots(self, rows: int, most_nbytes: int) -> int:
        """Return the number of slots for a number of rows within a budget of bytes; 0 if the budget is too small."""
        room = (most_nbytes - SLACK_BYTES) // self.stride - _BEHIND
        return min(int(_SPARSE * rows), room) if room >= _DENSE * rows else 0

    def nbytes(self, slots: int) -> int:
        """Return the bytes of a number of slots."""
        return (slots + _BEHIND) * self.stride + SLACK_BYTES

    @property
    def words(self) -> NDArray[np.uint64]:
        """uint64[words, 4]: where in a slot to load eight bytes, their shift, their mask, and what to add."""
        ends = self.key_nbytes + self.nulls_nbytes + np.cumsum(self.widths)
        places = np.maximum(ends - WORD, 0)  # so that a load stays within the slot
        shifts = np.minimum(8 * (ends - self.widths - places), 56)
        return np.stack([places.astype(np.uint64), shifts.astype(np.uint64), _masks(self.widths), self.bases], axis=1)


class RowHash:
    """Rows in slots, empty at first.

    Parameters
    ----------
    columns
        Columns of the rows, of fixed width.
    form
        Form of the slots.
    slots
        Number of slots.
    """

    def __init__(self, columns: Sequence[PhysicalColumn], form: SlotForm, slots: int) -> None:
        self._columns = columns
        self._form = form
        self._key_mask = _masks(np.array([form.key_nbytes]))[0]
        self._words = form.words
        self._slots = np.uint64(slots)
        self.nbytes = form.nbytes(slots)
        self._end = (slots + _BEHIND - 1) * form.stride
        memory = FrameMemory(self.nbytes - SLACK_BYTES)
        memory.allow(self.nbytes - SLACK_BYTES, 0)
        self._memory = memory.buffer
        self._rows = self._passed = 0

    def add(
        self, frames: NDArray[np.uint8], page_size: int, facts: NDArray[np.uint64], frame: NDArray[np.int64], rows: int
    ) -> bool:
        """Put the rows of some pages into slots; return False if too many keys collide.

        Parameters
        ----------
        frames, page_size, facts, frame
            The pages; see `headrace.storage.probe._probe_kernels.describe_pages`.
        rows
            Number of rows in these pages.
        """
        self._rows += rows
        passed = kernels.fill_slots(
            frames, page_size, facts, frame, *self._place, self._memory, self._end,
            _MOST_PASSED * self._rows - self._passed,
        )  # fmt: skip
        self._passed += max(0, passed)
        return bool(passed >= 0)

    def find(self, keys: KeyWords, outer: bool) -> tuple[NDArray[np.int32], list[pa.Array]]:
        """Find keys. Several threads may do this at the same time.

        Parameters
        ----------
        keys
            Keys to find.
        outer
            Whether absent keys give a row of nulls.

        Returns
        -------
        source : int32[results]
            Position of each result's key, ascending.
        columns
            One value for each result.
        """
        fixed, source = FixedRows(self._columns, len(keys)), np.empty(len(keys), dtype=np.int32)
        results = kernels.find_slots(
            self._memory, *self._place, keys.words, keys.above, keys.flags, outer,
            not outer and self._form.nulls_nbytes == 0,
            fixed.sizes, fixed.starts, fixed.out, fixed.valid, fixed.missing, source,
        )  # fmt: skip
        return source[:results], fixed.arrays(results)

    @property
    def _place(self) -> tuple[np.uint64, np.uint64, int, np.uint64, int, NDArray[np.uint64]]:
        """Arguments of kernels that describe the slots."""
        form = self._form
        nulls = form.key_nbytes if form.nulls_nbytes else -1
        return form.low, self._slots, form.stride, self._key_mask, nulls, self._words


def _range(base: NDArray[np.uint64], width: NDArray[np.uint64]) -> tuple[np.uint64, int]:
    """Return the least of all bases, and the bytes that numbers of these widths above their bases may need above it."""
    low, mask = base.min(), _masks(width)
    top = (base - low) + mask
    if (top < mask).any():
        return low, WORD
    return low, int(top.max()).bit_length() + 7 >> 3


def _narrower_range(base: NDArray[np.uint64], width: NDArray[np.uint64]) -> tuple[np.uint64, int]:
    """Return the range of a word whose values are signed or not, whichever is the narrower way to see them."""
    (low, nbytes), (signed_low, signed_nbytes) = _range(base, width), _range(base ^ _SIGN, width)
    return (low, nbytes) if nbytes <= signed_nbytes else (signed_low ^ _SIGN, signed_nbytes)


def _masks(widths: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return the bits of so many bytes."""
    bits = np.uint64(64) - np.uint64(8) * np.minimum(widths.astype(np.uint64), np.uint64(WORD))
    return np.where(widths == 0, np.uint64(0), _ALL >> np.minimum(bits, np.uint64(63)))
