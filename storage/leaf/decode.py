"""Search for keys in encoded leaves, and gathering of their rows as Arrow arrays.

Compiled kernels do the work on rows; this module prepares their arrays. It does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.storage.format import _page_kernels
from headrace.storage.format._byte_kernels import copy_blocks
from headrace.storage.format.columns import fixed_to_array, fixed_type, text_to_array
from headrace.storage.format.constants import SLACK
from headrace.storage.format.copies import take
from headrace.storage.format.keys import Keys
from headrace.storage.leaf import _gather_kernels, _search_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.storage.format.layout import LeafLayout, PhysicalColumn

__all__ = [
    "FixedColumn",
    "copy_pages",
    "decode_pages",
    "expand_matches",
    "gather",
    "gather_keys",
    "search",
    "search_nearest",
    "search_range",
    "verify",
]

_NO_CHECKSUMS = np.zeros(0, dtype=np.uint64)


class FixedColumn:
    """Values of one column of fixed width, gathered from pages into arrays of their own.

    Parameters
    ----------
    column
        Column of the table.
    room
        Maximum number of values.
    """

    def __init__(self, column: PhysicalColumn, room: int) -> None:
        fixed = fixed_type(column.dtype)
        assert fixed is not None
        self._column = column
        self._type = fixed.dtype
        self._size = fixed.dtype.itemsize
        self._words = [np.empty(room * self._size + SLACK, dtype=np.uint8) for _ in range(column.words)]
        self._valid = np.empty(room, dtype=np.uint8)
        self._missing = 0

    def write(
        self,
        start: int,
        frames: NDArray[np.uint8],
        page_size: int,
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
    ) -> None:
        """Gather the values of rows to position `start`, after those written before; frame -1 gives nulls."""
        valid = self._valid[start:]
        missing = 0
        for entry, words in enumerate(self._words, self._column.first):
            out = words[start * self._size :]
            missing = _gather_kernels.gather_words(frames, page_size, frame, row, entry, self._size, out, valid)
        self._missing += missing

    def array(self, rows: int) -> pa.Array:
        """Return the first `rows` values."""
        words = [words[: rows * self._size].view(self._type) for words in self._words]
        return fixed_to_array(self._column.dtype, words, self._valid[:rows] if self._missing else None)


def search(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], keys: Keys, *, unique: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find each key in one page.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    frames : uint8[m * page_size + 8]
        Pages.
    frame : int32[n]
        Frame of the page of each key; -1 for none.
    keys
        Keys to find, of the table's kind.
    unique
        Whether no key occurs twice, so that a search can stop at the first match.

    Returns
    -------
    row, count : int32[n]
        First row with the key in that page, and how many rows have it there (0: none).
    """
    row = np.empty(len(keys), dtype=np.int32)
    count = np.empty(len(keys), dtype=np.int32)
    prefix, offsets, data = keys.parts
    if keys.wide:
        _search_kernels.search_bytes(frames, layout.page_size, frame, prefix, offsets, data, unique, row, count)
    else:
        _search_kernels.search_u64(frames, layout.page_size, frame, prefix, unique, row, count)
    return row, count


def search_range(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    low: Keys,
    high: Keys,
    *,
    closed: bool = True,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find each range of keys in one page.

    Parameters
    ----------
    layout, frames, frame
        See `search`.
    low, high
        Bounds of each range. The low bound is included.
    closed
        Whether the high bound is included; for keys of one word it always is.

    Returns
    -------
    row, count : int32[n]
        First row of the range in that page, and how many rows are in it there.
    """
    row = np.empty(len(low), dtype=np.int32)
    count = np.empty(len(low), dtype=np.int32)
    if low.wide:
        _search_kernels.range_bytes(frames, layout.page_size, frame, *low.parts, *high.parts, closed, row, count)
    else:
        _search_kernels.range_u64(frames, layout.page_size, frame, low.prefix, high.prefix, row, count)
    return row, count


def search_nearest(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], low: Keys, high: Keys, *, last: bool
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find in one page the row of each range of keys that is nearest to its end: the last one, or else the first.

    Parameters
    ----------
    layout, frames, frame, low, high
        See `search_range`.
    last
        Whether to find the row nearest to `high` instead of the one nearest to `low`.

    Returns
    -------
    row, count : int32[n]
        Row and count: 1 if the row is in the range, 0 if the table has no row in the range, -1 if all rows of the page
        are beyond the end, so that the neighboring leaf has to be searched.
    """
    row = np.empty(len(low), dtype=np.int32)
    count = np.empty(len(low), dtype=np.int32)
    if low.wide:
        _search_kernels.nearest_bytes(frames, layout.page_size, frame, *low.parts, *high.parts, last, row, count)
    else:
        _search_kernels.nearest_u64(frames, layout.page_size, frame, low.prefix, high.prefix, last, row, count)
    return row, count


def expand_matches(
    frame: NDArray[np.int32], row: NDArray[np.int32], count: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return frame, row and position of the key for every match that `search` found, in order."""
    return _gather_kernels.expand_rows(frame, row, count.astype(np.int64))


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
        Leaf layout of the table.
    frames : uint8[m * page_size + 8]
        Pages.
    frame, row : int32[n]
        Frame and row number of each row; frame -1 gives nulls.
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
    """Return the normalized keys of rows; rows with frame -1 get 0, or no bytes."""
    if layout.codec.kind == "u64":
        out = np.empty(len(frame) * 8 + SLACK, dtype=np.uint8)
        valid = np.empty(len(frame), dtype=np.uint8)
        _gather_kernels.gather_words(frames, layout.page_size, frame, row, 0, 8, out, valid)
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
        Frames of the pages, in the order of the result.
    columns
        Names; by default all columns of the table, key columns included.
    """
    counts = _page_kernels.count_rows(frames, layout.page_size, frame)
    places, rows, _ = _gather_kernels.expand_rows(frame, np.zeros(len(frame), dtype=np.int32), counts)
    return gather(layout, frames, places, rows, layout.schema.names if columns is None else columns)


def copy_pages(
    source: NDArray[np.uint8],
    source_frame: NDArray[np.integer],
    target: NDArray[np.uint8],
    target_frame: NDArray[np.integer],
    page_size: int,
) -> None:
    """Copy whole pages from frames of one buffer to frames of another."""
    copy_blocks(source, source_frame.astype(np.int64), target, target_frame.astype(np.int64), page_size)


def verify(
    frames: NDArray[np.uint8],
    page_size: int,
    numbers: NDArray[np.int64],
    checksums: NDArray[np.uint64] | None,
    frame: NDArray[np.int64],
) -> int:
    """Return the position of the first page that does not match its checksum or its parent's pointer, or -1.

    Parameters
    ----------
    numbers : int64[n]
        Page numbers in the file.
    checksums : uint64[n] or None
        Checksums from the parents' pointers.
    frame : int64[n]
        Frame of each page in `frames`.
    """
    expected = _NO_CHECKSUMS if checksums is None else checksums
    return int(_page_kernels.verify_pages(frames, page_size, frame, numbers, expected))


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
    values = FixedColumn(column, len(frame))
    values.write(0, frames, layout.page_size, frame, row)
    return values.array(len(frame))


def _gather_bytes(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32], entry: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8] | None]:
    offsets = np.empty(len(frame) + 1, dtype=np.int64)
    valid = np.empty(len(frame), dtype=np.uint8)
    missing = _gather_kernels.gather_spans(frames, layout.page_size, frame, row, entry, offsets, valid)
    data = np.empty(offsets[-1], dtype=np.uint8)
    _gather_kernels.gather_text(frames, layout.page_size, frame, row, entry, offsets, data)
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
    return {name: take(array, places) for name, array in zip(layout.key, found, strict=True)}
