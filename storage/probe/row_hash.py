"""`RowHash`: a row store with all rows of a relation by key, so that a lookup touches one place in memory.

A slot is a row: its key, its null bits, and the words of its columns, each in as few bytes as the relation needs::

    key - lowest key + 1 | null bits | word - its base | word - its base | ...

Key 0 is an empty slot. A row is in the first free slot from its key's home slot on, so a search ends at its key or at
an empty slot. Where keys are spread evenly, as those that count up are, home slots ascend with them: rows that come in
key order then fill the memory from front to end, several times as fast as in the order of a hash function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.storage.format.constants import WORD
from headrace.storage.leaf.decode import FixedRows
from headrace.storage.probe import _hash_kernels as kernels
from headrace.storage.probe._probe_kernels import FACTS, FACTS_OF_A_COLUMN, rows_of
from headrace.storage.read.frame_memory import SLACK_BYTES, FrameMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format.keys import KeyWords
    from headrace.storage.format.layout import PhysicalColumn

__all__ = ["RowHash", "SlotForm"]

_SPARSE, _DENSE = 2.0, 4 / 3  # slots for each row: scattered ones at best, and in key order or at least
_BEHIND = 4096  # slots after the last home slot; the last of them is always empty
_MOST_WORDS = 64
_MOST_PASSED = 8  # occupied slots passed for each row; more mean that too many keys collide
_U8 = np.uint64(0xFF)
_HASH = 0x9E3779B97F4A7C15
_MOST_SPAN = 1 << 32  # of keys, in whose order slots can be
_PART = 64  # pages that are worth a thread
_EVEN = 1.1  # slots for each row that every page must have in key order
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
    span
        Number of keys that there can be from the lowest to the greatest.
    even_slots
        Number of slots at which every page's keys have enough in key order; infinite if there can be no key order.
    """

    low: np.uint64
    key_nbytes: int
    nulls_nbytes: int
    bases: NDArray[np.uint64]
    widths: NDArray[np.int64]
    span: int
    even_slots: float

    @classmethod
    def of(
        cls,
        facts: NDArray[np.uint64],
        greatest: np.uint64,
        leaves: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None,
    ) -> Self | None:
        """Return the form for the rows of pages, None if there is none.

        What the width of a word can hold beyond the values of these pages is divided between smaller and greater ones.

        Parameters
        ----------
        facts
            Descriptor of each page with rows, see `headrace.storage.probe._probe_kernels.describe_pages`.
        greatest
            Greatest key.
        leaves
            Separator before each leaf with rows, and its number of rows, if these pages, the first and the last among
            them, are only some of the leaves. The form is for the others too that it `holds`.
        """
        words = (facts.shape[1] - FACTS) // FACTS_OF_A_COLUMN
        low = facts[:, 0].min()
        span = int(greatest - low) + 1
        key_nbytes = span.bit_length() + 7 >> 3
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
            span,
            _even_slots(*(leaves or _leaves(facts)), low, span) if span <= _MOST_SPAN else math.inf,
        )

    def holds(self, facts: NDArray[np.uint64], greatest: np.uint64) -> bool:
        """Return whether slots have room for the rows of other pages, whose greatest key this is.

        A word of eight bytes holds any value.
        """
        packed, most = facts[:, FACTS + 1 :: FACTS_OF_A_COLUMN], _masks(self.widths)
        above, masks = facts[:, FACTS::FACTS_OF_A_COLUMN] - self.bases, _masks((packed >> np.uint64(48)) & _U8)
        nulls = self.nulls_nbytes == 0 and bool(((packed >> np.uint64(32)) & np.uint64(0xFFFF)).any())
        keys = facts[:, 0].min() >= self.low and int(greatest) - int(self.low) < self.span
        words = (self.widths == WORD) | (masks <= most) & (above <= most - np.minimum(masks, most))
        return keys and not nulls and bool(words.all())

    @property
    def stride(self) -> int:
        """Bytes of a slot."""
        return self.key_nbytes + self.nulls_nbytes + int(self.widths.sum())

    def slots(self, rows: int, most_nbytes: int, *, ascending: bool) -> int:
        """Return the number of slots for a number of rows within a budget of bytes; 0 if the budget is too small.

        Slots in key order need not be sparse: keys that are evenly spread seldom ask for the same slot.
        """
        room = (most_nbytes - SLACK_BYTES) // self.stride - _BEHIND
        if room < _DENSE * rows:
            return 0
        most = min(int(_SPARSE * rows), room)
        return max(math.ceil(_DENSE * rows), math.ceil(self.even_slots)) if ascending and self.ascends(most) else most

    def nbytes(self, slots: int) -> int:
        """Return the bytes of a number of slots."""
        return (slots + _BEHIND) * self.stride + SLACK_BYTES

    def ascends(self, slots: int) -> bool:
        """Return whether keys are spread so evenly that home slots can ascend with them."""
        return self.even_slots <= slots

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
    ascending
        Whether home slots ascend with the keys, see `SlotForm.ascends`. Otherwise they are scattered.

    Attributes
    ----------
    rows
        Number of rows that were added.
    """

    def __init__(self, columns: Sequence[PhysicalColumn], form: SlotForm, slots: int, *, ascending: bool) -> None:
        self._columns = columns
        self.ascending = ascending
        self._factor = np.uint64(((1 << 64) - 1) // form.span if ascending else _HASH)
        self.form = form
        self._key_mask = _masks(np.array([form.key_nbytes]))[0]
        self._words = form.words
        self._slots = np.uint64(slots)
        self.nbytes = form.nbytes(slots)
        self._end = (slots + _BEHIND - 1) * form.stride
        memory = FrameMemory(self.nbytes - SLACK_BYTES)
        memory.allow(self.nbytes - SLACK_BYTES, 0)
        self._memory = memory.buffer
        self.rows = self._passed = 0

    def add(
        self,
        frames: NDArray[np.uint8],
        page_size: int,
        facts: NDArray[np.uint64],
        frame: NDArray[np.int64],
        rows: int,
        parts: int = 1,
        run: Callable[
            [Callable[[tuple[NDArray[np.int64], int]], int], Sequence[tuple[NDArray[np.int64], int]]], list[int]
        ]
        | None = None,
    ) -> bool:
        """Put the rows of some pages into slots; return False if too many keys collide.

        Parameters
        ----------
        frames, page_size, facts, frame
            The pages; see `headrace.storage.probe._probe_kernels.describe_pages`.
        rows
            Number of rows in these pages.
        parts, run
            Number of parts that slots in key order may be filled in at once, and a function that returns the results of
            a function for all parts. Then the pages must be in key order.
        """
        self.rows += rows
        most = _MOST_PASSED * self.rows - self._passed

        def fill(part: tuple[NDArray[np.int64], int]) -> int:
            pages, end = part
            return int(kernels.fill_slots(frames, page_size, facts, pages, *self._place, self._memory, end, most))

        divided, borders = self._divide(facts, frame, parts)
        passed = [fill(part) for part in divided] if run is None else run(fill, divided)
        passed.append(fill((borders, self._end)))
        self._passed += sum(passed)
        return min(passed) >= 0 and self._passed <= _MOST_PASSED * self.rows

    def _divide(
        self, facts: NDArray[np.uint64], frame: NDArray[np.int64], parts: int
    ) -> tuple[list[tuple[NDArray[np.int64], int]], NDArray[np.int64]]:
        """Divide pages into parts, each with the end of its slots, and the pages between two parts.

        The slots of a page between two parts separate them: rows that find their slot occupied move into it.
        """
        parts = min(parts, len(frame) // _PART) if self.ascending else 1
        if parts <= 1:
            return [(frame, self._end)], frame[:0]
        bounds = [len(frame) * part // parts for part in range(parts + 1)]
        ends = [self._home(facts[frame[at], 0]) - WORD for at in bounds[1:-1]]
        pages = [frame[start : stop - 1] for start, stop in pairwise(bounds[:-1])]
        last = (frame[bounds[-2] :], self._end)
        return [*zip(pages, ends, strict=True), last], frame[np.array(bounds[1:-1]) - 1]

    def _home(self, key: np.uint64) -> int:
        """Return where the slot of a key begins if slots are in key order, as kernels compute it."""
        mixed = int(key - self.form.low) * int(self._factor)
        return ((mixed >> 32) * int(self._slots) >> 32) * self.form.stride

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
            not outer and self.form.nulls_nbytes == 0,
            fixed.sizes, fixed.starts, fixed.out, fixed.valid, fixed.missing, source,
        )  # fmt: skip
        return source[:results], fixed.arrays(results)

    @property
    def _place(self) -> tuple[np.uint64, np.uint64, np.uint64, int, np.uint64, int, NDArray[np.uint64]]:
        """Arguments of kernels that describe the slots."""
        form = self.form
        nulls = form.key_nbytes if form.nulls_nbytes else -1
        return form.low, self._factor, self._slots, form.stride, self._key_mask, nulls, self._words


def _leaves(facts: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the least key and the number of rows of pages, in the order of their keys."""
    order = np.argsort(facts[:, 0])
    return facts[order, 0], rows_of(facts[order])


def _even_slots(first: NDArray[np.uint64], rows: NDArray[np.int64], low: np.uint64, span: int) -> float:
    """Return at how many slots each page has `_EVEN` of them for each row, if they are shared out by keys."""
    starts = (np.maximum(first, low) - low).astype(np.float64)
    return float(_EVEN * (rows / np.diff(np.append(starts, span))).max() * span)


def _range(base: NDArray[np.uint64], width: NDArray[np.uint64]) -> tuple[np.uint64, int]:
    """Return the least of all bases, and how far numbers of these widths above their bases may be above it."""
    low, mask = base.min(), _masks(width)
    top = (base - low) + mask
    return low, int(_ALL if (top < mask).any() else top.max())


def _narrower_range(base: NDArray[np.uint64], width: NDArray[np.uint64]) -> tuple[np.uint64, int]:
    """Return base and bytes of a word whose values are signed or not, whichever is the narrower way to see them."""
    (low, span), (signed_low, signed_span) = _range(base, width), _range(base ^ _SIGN, width)
    if signed_span < span:
        low, span = signed_low ^ _SIGN, signed_span
    nbytes = span.bit_length() + 7 >> 3
    spare = ((1 << 8 * nbytes) - 1 - span) // 2
    return np.uint64((int(low) - spare) % (1 << 64)), nbytes


def _masks(widths: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return the bits of so many bytes."""
    bits = np.uint64(64) - np.uint64(8) * np.minimum(widths.astype(np.uint64), np.uint64(WORD))
    return np.where(widths == 0, np.uint64(0), _ALL >> np.minimum(bits, np.uint64(63)))
