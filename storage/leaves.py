"""Leaves: rows encoded into pages, found in them and gathered from them as Arrow arrays.

All work on rows happens in compiled kernels; this module prepares their arrays. It neither reads nor writes files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage import _encode_kernels, _kernels
from storage._byte_kernels import SLACK
from storage.columns import bytes_of, fixed_to_array, fixed_type, fixed_values, null_mask, text_to_array
from storage.errors import InputError
from storage.keys import Keys
from storage.tree import aligned_pages, key_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from storage.layout import LeafLayout, PhysicalColumn

__all__ = [
    "EncodedLeaves",
    "LeafEncoder",
    "decode_pages",
    "encode_leaves",
    "expand_matches",
    "gather",
    "gather_keys",
    "search",
    "verify",
]

Scalar = TypeVar("Scalar", bound=np.generic)

_SIGN = np.int64(-(2**63))
_SAMPLE = 1024
_NO_CHECKSUMS = np.zeros(0, dtype=np.uint64)
_NO_BREAKS = np.zeros(0, dtype=np.int64)
_TEXT = 0


@dataclass(frozen=True, slots=True)
class EncodedLeaves:
    """Leaves that are not yet sealed.

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


class _Physical:
    """The matrices that the encoder's kernels take, built column by column."""

    def __init__(self, layout: LeafLayout, keys: Keys, payload: Sequence[pa.Array]) -> None:
        self.rows = len(keys)
        self.cardinality = 0
        self._words: list[NDArray[np.int64]] = []
        self._spans: list[NDArray[np.int64]] = []
        self._heaps: list[NDArray[np.uint8]] = []
        self._heap_size = 0
        self._nulls: list[NDArray[np.uint8]] = []
        self._codes: list[NDArray[np.int32]] = []
        self.places = np.full((layout.entries, 4), -1, dtype=np.int64)
        self._add_key(keys)
        for column, array in zip(layout.columns, payload, strict=True):
            self._add(column, array)

    def _add_key(self, keys: Keys) -> None:
        if keys.offsets is None or keys.data is None:
            self._place(0, text=False, slot=0)
            self._words.append(keys.prefix.view(np.int64))
        else:
            self._place(0, text=True, slot=0)
            self._add_text(keys.offsets, keys.data)

    def _add(self, column: PhysicalColumn, array: pa.Array) -> None:
        mask = null_mask(array)
        if mask is not None:
            self._nulls.append(mask.view(np.uint8))
        slot = -1 if mask is None else len(self._nulls) - 1
        if column.words == 0:
            self._place(column.first, text=True, slot=len(self._spans), nulls=slot, codes=self._add_codes(array))
            self._add_text(*bytes_of(array))
            return
        for word, values in enumerate(fixed_values(array)):
            self._place(column.first + word, text=False, slot=len(self._words), nulls=slot)
            self._words.append(values)

    def _place(self, entry: int, *, text: bool, slot: int, nulls: int = -1, codes: int = -1) -> None:
        self.places[entry] = (text, slot, nulls, codes)

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
        self.cardinality = max(self.cardinality, len(encoded.dictionary), 1)
        return len(self._codes) - 1

    @property
    def words(self) -> NDArray[np.int64]:
        words = _matrix(self._words, self.rows, np.int64)
        if self.places[0, _TEXT] == 0:
            words[0] ^= _SIGN  # unsigned keys in the order of signed integers
        return words

    @property
    def spans(self) -> NDArray[np.int64]:
        return _matrix(self._spans, self.rows + 1, np.int64)

    @property
    def nulls(self) -> NDArray[np.uint8]:
        return _matrix(self._nulls, self.rows, np.uint8)

    @property
    def codes(self) -> NDArray[np.int32]:
        return _matrix(self._codes, self.rows, np.int32)

    @property
    def heap(self) -> NDArray[np.uint8]:
        return np.concatenate([np.zeros(0, dtype=np.uint8), *self._heaps])


def _matrix(rows: Sequence[NDArray[Scalar]], columns: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.stack(rows) if rows else np.zeros((0, columns), dtype=dtype)


class LeafEncoder:
    """Packs rows in key order into leaves: first where pages end is planned, then they are written.

    Parameters
    ----------
    layout
        Of the table.
    keys
        In ascending order.
    payload
        One array for each payload column, in stored types.
    first_row
        Number of the first row, for messages.

    Raises
    ------
    InputError
        If a key is too large for a page.
    """

    def __init__(self, layout: LeafLayout, keys: Keys, payload: Sequence[pa.Array], *, first_row: int = 0) -> None:
        _check_key_lengths(layout, keys, first_row)
        self._layout = layout
        self._keys = keys
        self._first_row = first_row
        physical = _Physical(layout, keys, payload)
        self._rows, self._cardinality = physical.rows, physical.cardinality
        self._places, self._words, self._spans = physical.places, physical.words, physical.spans
        self._heap, self._nulls, self._codes = physical.heap, physical.nulls, physical.codes

    def plan(self, limit: int, breaks: NDArray[np.int64] = _NO_BREAKS) -> NDArray[np.int64]:
        """Return the rows at which pages end when they are packed greedily.

        Parameters
        ----------
        limit
            Bytes of a page to fill; a row that needs more has a page of its own.
        breaks
            Rows, in ascending order, at which a page ends in any case.

        Raises
        ------
        InputError
            If a row is too large for a page.
        """
        ends, too_long = _encode_kernels.plan_leaves(
            self._places, self._words, self._spans, self._nulls, self._codes, self._cardinality,
            self._rows, limit, self._layout.page_size, breaks,
        )  # fmt: skip
        if too_long >= 0:
            raise InputError(
                f"row {self._first_row + too_long} (key {self._layout.codec.describe(self._keys, too_long)}) does not "
                f"fit in a page of {self._layout.page_size} bytes; shorten it or use larger pages"
            )
        return ends

    def write(self, ends: NDArray[np.int64]) -> EncodedLeaves:
        """Return the pages that end at these rows; what follows the last of them is left out."""
        pages = aligned_pages(len(ends), self._layout.page_size)
        _encode_kernels.write_leaves(
            self._places, self._words, self._spans, self._heap, self._nulls, self._codes, self._cardinality,
            ends, self._layout.page_size, not self._keys.wide, pages,
        )  # fmt: skip
        return EncodedLeaves(pages, np.concatenate([np.zeros(1, dtype=np.int64), ends]))


def encode_leaves(
    layout: LeafLayout,
    keys: Keys,
    payload: Sequence[pa.Array],
    limit: int,
    *,
    first_row: int = 0,
    keep_open: bool = False,
) -> EncodedLeaves:
    """Pack rows in key order greedily into leaves. See `LeafEncoder` for the parameters and what is raised.

    Parameters
    ----------
    limit
        Bytes of a page to fill.
    keep_open
        Leave the last page out if rows that follow might still go there; `first[-1]` says where it begins.
    """
    encoder = LeafEncoder(layout, keys, payload, first_row=first_row)
    ends = encoder.plan(limit)
    return encoder.write(ends[:-1] if keep_open else ends)


def _check_key_lengths(layout: LeafLayout, keys: Keys, first_row: int) -> None:
    if keys.offsets is None or len(keys) == 0:
        return
    lengths = np.diff(keys.offsets)
    longest = int(np.argmax(lengths))
    if lengths[longest] > key_limit(layout.page_size):
        raise InputError(
            f"the key of row {first_row + longest} takes {lengths[longest]} bytes, but pages of {layout.page_size} "
            f"hold keys of at most {key_limit(layout.page_size)}; use larger pages or a shorter key"
        )


def search(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], keys: Keys, *, unique: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find each key in one page.

    Parameters
    ----------
    layout
        Of the table.
    frames : uint8[m * page_size + 8]
        Pages.
    frame : int32[n]
        The page of each key; -1 for none.
    keys
        Of the table's kind.
    unique
        Whether no key occurs twice, which saves looking.

    Returns
    -------
    row, count : int32[n]
        First row with the key in that page, and how many rows have it there (0: none).
    """
    row = np.empty(len(keys), dtype=np.int32)
    count = np.empty(len(keys), dtype=np.int32)
    prefix, offsets, data = keys.parts
    if keys.wide:
        _kernels.search_bytes(frames, layout.page_size, frame, prefix, offsets, data, unique, row, count)
    else:
        _kernels.search_u64(frames, layout.page_size, frame, prefix, unique, row, count)
    return row, count


def expand_matches(
    frame: NDArray[np.int32], row: NDArray[np.int32], count: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return frame, row and position of the key for every match that `search` found, in order."""
    return _kernels.expand_rows(frame, row, count.astype(np.int64))


def gather(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    columns: Sequence[str] | None = None,
) -> list[pa.Array]:
    """Return columns of rows.

    Parameters
    ----------
    layout
        Of the table.
    frames : uint8[m * page_size + 8]
        Pages.
    frame, row : int32[n]
        Where each row lies; a frame of -1 gives nulls.
    columns
        Names; key columns may be among them. By default all payload columns.

    Raises
    ------
    SchemaError
        If a column is not in the table.
    """
    names = layout.select(columns)
    key = _gather_key_columns(layout, frames, frame, row) if set(names) & set(layout.key) else {}
    return [
        key[name] if name in key else _gather_column(layout, frames, frame, row, layout.by_name[name]) for name in names
    ]


def gather_keys(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32]
) -> Keys:
    """Return the normalised keys of rows; rows that are nowhere get 0, or no bytes."""
    if layout.codec.kind == "u64":
        out = np.empty(len(frame) * 8 + SLACK, dtype=np.uint8)
        valid = np.empty(len(frame), dtype=np.uint8)
        _kernels.gather_words(frames, layout.page_size, frame, row, 0, 8, out, valid)
        return Keys("u64", out[:-SLACK].view(np.uint64))
    offsets, data, _ = _gather_bytes(layout, frames, frame, row, 0)
    return Keys.from_bytes(offsets, data)


def decode_pages(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    columns: Sequence[str] | None = None,
) -> list[pa.Array]:
    """Return all rows of whole pages, one page after the other.

    Parameters
    ----------
    frame : int32[n]
        The pages, in the order wanted.
    columns
        Names; by default all columns of the table, key columns included.
    """
    counts = _kernels.count_rows(frames, layout.page_size, frame)
    places, rows, _ = _kernels.expand_rows(frame, np.zeros(len(frame), dtype=np.int32), counts)
    return gather(layout, frames, places, rows, layout.schema.names if columns is None else columns)


def verify(
    frames: NDArray[np.uint8],
    page_size: int,
    numbers: NDArray[np.int64],
    checksums: NDArray[np.uint64] | None,
    frame: NDArray[np.int64],
) -> int:
    """Return the position of the first page that is not what its checksum and its parent say, or -1.

    Parameters
    ----------
    numbers : int64[n]
        Page numbers in the file.
    checksums : uint64[n] or None
        From the parents' pointers.
    frame : int64[n]
        Where the pages lie in `frames`.
    """
    expected = _NO_CHECKSUMS if checksums is None else checksums
    return int(_kernels.verify_pages(frames, page_size, frame, numbers, expected))


def _gather_column(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    column: PhysicalColumn,
) -> pa.Array:
    if column.words == 0:
        offsets, data, valid = _gather_bytes(layout, frames, frame, row, column.first)
        return text_to_array(column.dtype, offsets, data, valid)
    fixed = fixed_type(column.dtype)
    assert fixed is not None
    size = fixed.dtype.itemsize
    valid = np.empty(len(frame), dtype=np.uint8)
    words, missing = [], 0
    for entry in range(column.first, column.first + column.words):
        out = np.empty(len(frame) * size + SLACK, dtype=np.uint8)
        missing = _kernels.gather_words(frames, layout.page_size, frame, row, entry, size, out, valid)
        words.append(out[:-SLACK].view(fixed.dtype))
    return fixed_to_array(column.dtype, words, valid if missing else None)


def _gather_bytes(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32], entry: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8] | None]:
    offsets = np.empty(len(frame) + 1, dtype=np.int64)
    valid = np.empty(len(frame), dtype=np.uint8)
    missing = _kernels.gather_spans(frames, layout.page_size, frame, row, entry, offsets, valid)
    data = np.empty(offsets[-1], dtype=np.uint8)
    _kernels.gather_text(frames, layout.page_size, frame, row, entry, offsets, data)
    return offsets, data, valid if missing else None


def _gather_key_columns(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32]
) -> dict[str, pa.Array]:
    present = np.flatnonzero(frame >= 0)
    if len(present) == len(frame):
        return dict(zip(layout.key, layout.codec.decode(gather_keys(layout, frames, frame, row)), strict=True))
    found = layout.codec.decode(gather_keys(layout, frames, frame[present], row[present]))
    index = np.zeros(len(frame), dtype=np.int64)
    index[present] = np.arange(len(present))
    places = pa.array(index, mask=frame < 0)
    return {name: array.take(places) for name, array in zip(layout.key, found, strict=True)}
