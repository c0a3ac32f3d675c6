"""`LeafEncoder`: packs rows in key order into leaves.

Compiled kernels do the work on rows; this module prepares their arrays. It does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.errors import InputError
from headrace.storage.format.columns import bytes_of, fixed_values, null_mask
from headrace.storage.format.page import aligned_pages, key_limit
from headrace.storage.leaf import _encode_kernels
from headrace.storage.leaf._encode_kernels import RowColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.storage.format.keys import Keys
    from headrace.storage.format.layout import LeafLayout, PhysicalColumn

__all__ = ["EncodedLeaves", "LeafEncoder", "PhysicalRows", "WordRoom"]

Scalar = TypeVar("Scalar", bound=np.generic)

_SIGN = np.int64(-(2**63))
_SAMPLE = 1024
_NO_BREAKS = np.zeros(0, dtype=np.int64)
_TEXT = 0
_NO_TEXT = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class EncodedLeaves:
    """Encoded leaves, not sealed yet.

    Attributes
    ----------
    pages : uint8[p * page_size + 8]
    first : int64[p + 1]
        Positions of each page's rows in what was encoded.
    """

    pages: NDArray[np.uint8]
    first: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Rows of each page."""
        return np.diff(self.first)


class WordRoom:
    """Memory for the words of rows, reused from batch to batch."""

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.int64)

    def matrix(self, words: int, rows: int) -> NDArray[np.int64]:
        """Return int64[words, rows], the same memory each time."""
        if words * rows > len(self._room):
            self._room = np.empty(words * rows, dtype=np.int64)
        return self._room[: words * rows].reshape(words, rows)


class PhysicalRows:
    """The matrices that the kernels of the encoder take, built column by column.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    keys, payload
        The rows.
    room
        Memory for `words`; the next rows overwrite it.
    """

    def __init__(
        self, layout: LeafLayout, keys: Keys, payload: Sequence[pa.Array], room: WordRoom | None = None
    ) -> None:
        self.rows = len(keys)
        self._room = room or WordRoom()
        self._cardinality = 0
        self._words: list[NDArray[np.int64]] = []
        self._spans: list[NDArray[np.int64]] = []
        self._heaps: list[NDArray[np.uint8]] = []
        self._heap_size = 0
        self._nulls: list[NDArray[np.uint8]] = []
        self._codes: list[NDArray[np.int32]] = []
        self._places: list[tuple[bool, int, int, int]] = []
        self._add_key(keys)
        for column, array in zip(layout.columns, payload, strict=True):
            self._add(column, array)

    def _add_key(self, keys: Keys) -> None:
        if keys.offsets is None or keys.data is None:
            self._places.append((False, 0, -1, -1))
            self._words.append(keys.prefix.view(np.int64))
        else:
            self._places.append((True, 0, -1, -1))
            self._add_text(keys.offsets, keys.data)

    def _add(self, column: PhysicalColumn, array: pa.Array) -> None:
        mask = null_mask(array)
        if mask is not None:
            self._nulls.append(mask.view(np.uint8))
        slot = -1 if mask is None else len(self._nulls) - 1
        if column.words == 0:
            self._places.append((True, len(self._spans), slot, self._add_codes(array)))
            self._add_text(*bytes_of(array))
            return
        for values in fixed_values(array):
            self._places.append((False, len(self._words), slot, -1))
            self._words.append(values)

    def _add_text(self, offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        start, end = int(offsets[0]), int(offsets[-1])
        self._spans.append(offsets + (self._heap_size - start))
        self._heaps.append(data[start:end])
        self._heap_size += end - start

    def _add_codes(self, array: pa.Array) -> int:
        """Assign codes to the values of a text column that looks repetitive; return its row in `codes`, or -1."""
        sample = array.slice(len(array) // 2, _SAMPLE) if len(array) > 2 * _SAMPLE else array
        if len(sample) == 0 or 2 * pc.count_distinct(sample).as_py() > len(sample):
            return -1
        encoded = array.dictionary_encode()
        self._codes.append(np.asarray(encoded.indices.fill_null(0)).astype(np.int32, copy=False))
        self._cardinality = max(self._cardinality, len(encoded.dictionary), 1)
        return len(self._codes) - 1

    @property
    def columns(self) -> RowColumns:
        """The matrices."""
        return RowColumns(
            np.array(self._places, dtype=np.int64),
            self._word_matrix(),
            _matrix(self._spans, self.rows + 1, np.int64),
            np.concatenate(self._heaps) if self._heaps else _NO_TEXT,
            _matrix(self._nulls, self.rows, np.uint8),
            _matrix(self._codes, self.rows, np.int32),
            self._cardinality,
        )

    def _word_matrix(self) -> NDArray[np.int64]:
        words = self._room.matrix(len(self._words), self.rows)
        for slot, values in enumerate(self._words):
            if slot == 0 and not self._places[0][_TEXT]:
                np.bitwise_xor(values, _SIGN, out=words[slot])  # unsigned keys in the order of signed integers
            else:
                words[slot] = values
        return words


def _matrix(rows: Sequence[NDArray[Scalar]], columns: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.stack(rows) if rows else np.empty((0, columns), dtype=dtype)


class LeafEncoder:
    """Packs rows in key order into leaves: `plan` decides where pages end, `write` encodes them.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    keys
        Keys in ascending order.
    payload
        One array for each payload column, in stored types.
    room
        See `PhysicalRows`.

    Raises
    ------
    InputError
        If a key is too large for a page.
    """

    def __init__(
        self,
        layout: LeafLayout,
        keys: Keys,
        payload: Sequence[pa.Array],
        *,
        room: WordRoom | None = None,
    ) -> None:
        _check_key_lengths(layout, keys)
        self._layout = layout
        self._keys = keys
        physical = PhysicalRows(layout, keys, payload, room)
        self._rows, self._columns = physical.rows, physical.columns

    def plan(self, limit: int, breaks: NDArray[np.int64] = _NO_BREAKS) -> NDArray[np.int64]:
        """Return the rows at which pages end when they are packed greedily.

        Parameters
        ----------
        limit
            Bytes of a page to fill; a row that needs more has a page of its own.
        breaks
            Rows, in ascending order, at which a page must end.

        Raises
        ------
        InputError
            If a row is too large for a page.
        """
        ends, too_long = _encode_kernels.plan_leaves(self._columns, self._rows, limit, self._layout.page_size, breaks)
        if too_long >= 0:
            raise InputError(
                f"the row with the key {self._layout.codec.describe(self._keys, too_long)} does not fit in a page of "
                f"{self._layout.page_size} bytes; shorten it or use larger pages"
            )
        return ends

    def write(self, ends: NDArray[np.int64]) -> EncodedLeaves:
        """Return the pages that end at these rows; rows after the last end are not encoded."""
        pages = aligned_pages(len(ends), self._layout.page_size)
        _encode_kernels.write_leaves(self._columns, ends, self._layout.page_size, not self._keys.wide, pages)
        return EncodedLeaves(pages, np.concatenate([np.zeros(1, dtype=np.int64), ends]))


def _check_key_lengths(layout: LeafLayout, keys: Keys) -> None:
    if keys.offsets is None or len(keys) == 0:
        return
    lengths = np.diff(keys.offsets)
    longest = int(np.argmax(lengths))
    if lengths[longest] > key_limit(layout.page_size):
        raise InputError(
            f"the key {layout.codec.describe(keys, longest)} takes {lengths[longest]} bytes, but pages of "
            f"{layout.page_size} hold keys of at most {key_limit(layout.page_size)}; use larger pages or a shorter key"
        )
