"""Search for keys in encoded leaves, and gathering of their rows as Arrow arrays.

Compiled kernels do the work on rows; this module prepares their arrays. It does no I/O.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.storage.format import _page_kernels
from headrace.storage.format._byte_kernels import copy_blocks
from headrace.storage.format.columns import fixed_to_array, fixed_type, text_to_array
from headrace.storage.format.constants import SLACK
from headrace.storage.format.copies import concat_arrays, take
from headrace.storage.format.keys import Keys
from headrace.storage.leaf import _gather_kernels as gather_kernels
from headrace.storage.leaf import _search_kernels as kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.storage.format.layout import LeafLayout, PhysicalColumn

__all__ = [
    "FixedRows",
    "StagedRows",
    "copy_pages",
    "decode_pages",
    "expand_matches",
    "gather",
    "gather_keys",
    "gather_runs",
    "rows_of_pages",
    "search",
    "search_nearest",
    "search_range",
    "verify",
]

_NO_CHECKSUMS = np.zeros(0, dtype=np.uint64)


class FixedRows:
    """Buffer for rows of some columns. Kernels know words, not columns: a decimal has two words.

    Parameters
    ----------
    columns
        Columns of fixed width.
    room
        Maximum number of rows.

    Attributes
    ----------
    entries : int64[words]
        Entries of the words in a leaf's directory.
    sizes, starts : int64[words]
        Bytes of a value of each word, and offset of its first value.
    out : uint8 array
        Values, with spare bytes after those of each word.
    valid : uint8[words, room]
        Filled with 1 for present values and 0 for nulls.
    missing : int64[words]
        Filled with the number of nulls.
    """

    def __init__(self, columns: Sequence[PhysicalColumn], room: int) -> None:
        self._columns = columns
        kinds = [(column, fixed_type(column.dtype)) for column in columns]
        self._types = [kind.dtype for column, kind in kinds if kind for _ in range(column.words)]
        self.entries: NDArray[np.int64] = np.array(
            [column.first + word for column in columns for word in range(column.words)], dtype=np.int64
        )
        self.sizes: NDArray[np.int64] = np.array([kind.itemsize for kind in self._types], dtype=np.int64)
        ends = list(accumulate((int(size) * room + SLACK for size in self.sizes), initial=0))
        self.starts: NDArray[np.int64] = np.array(ends[:-1], dtype=np.int64)
        self.out: NDArray[np.uint8] = np.empty(ends[-1], dtype=np.uint8)
        self.valid: NDArray[np.uint8] = np.empty((len(self.sizes), room), dtype=np.uint8)
        self.missing: NDArray[np.int64] = np.zeros(len(self.sizes), dtype=np.int64)

    def gather(
        self,
        start: int,
        frames: NDArray[np.uint8],
        page_size: int,
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
    ) -> None:
        """Gather rows from pages to position `start`, after those gathered before; frame -1 gives nulls."""
        for word, (entry, size, begin) in enumerate(self._words()):
            out, valid = self.out[begin + start * size :], self.valid[word, start:]
            self.missing[word] += gather_kernels.gather_words(frames, page_size, frame, row, entry, size, out, valid)

    def gather_runs(
        self,
        frames: NDArray[np.uint8],
        page_size: int,
        frame: NDArray[np.int32],
        row: NDArray[np.int32],
        ends: NDArray[np.int64],
    ) -> None:
        """Gather runs of rows from pages to the beginning; see `headrace.storage.leaf.gather_runs`."""
        for word, (entry, size, begin) in enumerate(self._words()):
            out, valid = self.out[begin:], self.valid[word]
            self.missing[word] += gather_kernels.gather_word_runs(
                frames, page_size, frame, row, ends, entry, size, out, valid
            )

    def arrays(self, rows: int) -> list[pa.Array]:
        """Return the first rows of each column."""
        arrays, word = [], 0
        for column in self._columns:
            words = [self._word(at, rows) for at in range(word, word + column.words)]
            arrays.append(fixed_to_array(column.dtype, words, self.valid[word, :rows] if self.missing[word] else None))
            word += column.words
        return arrays

    def _words(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.entries.tolist(), self.sizes.tolist(), self.starts.tolist(), strict=True)

    def _word(self, at: int, rows: int) -> NDArray[np.int64]:
        start = int(self.starts[at])
        return self.out[start : start + int(self.sizes[at]) * rows].view(self._types[at])


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
    return _search(layout, frames, frame, keys, keys, unique=unique, pick=kernels.EQUAL)


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
    return _search(layout, frames, frame, low, high, closed=closed)


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
    return _search(layout, frames, frame, low, high, pick=kernels.LAST if last else kernels.FIRST)


def _search(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    low: Keys,
    high: Keys,
    *,
    closed: bool = True,
    unique: bool = False,
    pick: int = kernels.ALL,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    row, count, size = np.empty(len(low), dtype=np.int32), np.empty(len(low), dtype=np.int32), layout.page_size
    if low.wide:
        kernels.search_bytes(frames, size, frame, low.parts, high.parts, closed, unique, pick, row, count)
    else:
        kernels.search_u64(frames, size, frame, low.prefix, high.prefix, unique, pick, row, count)
    return row, count


def expand_matches(
    frame: NDArray[np.int32], row: NDArray[np.int32], count: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return frame, row and position of the key for every match that `search` found, in order."""
    return gather_kernels.expand_rows(frame, row, count.astype(np.int64))


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
    wanted = [layout.by_name[name] for name in names if name not in key]
    fixed = FixedRows([column for column in wanted if column.words], len(frame))
    fixed.gather(0, frames, layout.page_size, frame, row)
    numbers = iter(fixed.arrays(len(frame)))
    payload = iter([next(numbers) if c.words else _gather_text(layout, frames, frame, row, c) for c in wanted])
    return [key[name] if name in key else next(payload) for name in names]


def gather_runs(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    ends: NDArray[np.int64],
    columns: Sequence[str],
) -> list[pa.Array]:
    """Return columns of rows that lie one after the other in their pages. Columns of fixed width are copied by runs.

    Parameters
    ----------
    layout, frames, columns
        See `gather`.
    frame, row : int32[n]
        Frame and number of the first row of each run; frame -1 gives nulls.
    ends : int64[n]
        Number of rows up to the last one of each run; ascending.

    Raises
    ------
    SchemaError
        If a column is not in the table.
    """
    names, total = layout.select(columns), int(ends[-1]) if len(ends) else 0
    by_runs = [layout.by_name[name] for name in names if name in layout.by_name and layout.by_name[name].words]
    fixed = FixedRows(by_runs, total)
    fixed.gather_runs(frames, layout.page_size, frame, row, ends)
    found = dict(zip([column.name for column in by_runs], fixed.arrays(total), strict=True))
    others = [name for name in names if name not in found]
    if others:
        every, rows = np.empty((2, total), dtype=np.int32)
        gather_kernels.expand_runs(frame, row, ends, every, rows)
        found.update(zip(others, gather(layout, frames, every, rows, others), strict=True))
    return [found[name] for name in names]


def gather_keys(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32]
) -> Keys:
    """Return the normalized keys of rows; rows with frame -1 get 0, or no bytes."""
    if layout.codec.kind == "u64":
        out = np.empty(len(frame) * 8 + SLACK, dtype=np.uint8)
        valid = np.empty(len(frame), dtype=np.uint8)
        gather_kernels.gather_words(frames, layout.page_size, frame, row, 0, 8, out, valid)
        return Keys("u64", out[:-SLACK].view(np.uint64))
    offsets, data, _ = _gather_bytes(layout, frames, frame, row, 0)
    return Keys.from_bytes(offsets, data)


def rows_of_pages(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return frame, row and position of the page in `frame` for every row of whole pages, one page after the other."""
    counts = _page_kernels.count_rows(frames, layout.page_size, frame)
    return gather_kernels.expand_rows(frame, np.zeros(len(frame), dtype=np.int32), counts)


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
    places, rows, _ = rows_of_pages(layout, frames, frame)
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


def _gather_text(
    layout: LeafLayout,
    frames: NDArray[np.uint8],
    frame: NDArray[np.int32],
    row: NDArray[np.int32],
    column: PhysicalColumn,
) -> pa.Array:
    offsets, data, valid = _gather_bytes(layout, frames, frame, row, column.first)
    return text_to_array(column.dtype, offsets, data, valid)


def _gather_bytes(
    layout: LeafLayout, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32], entry: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8] | None]:
    offsets = np.empty(len(frame) + 1, dtype=np.int64)
    valid = np.empty(len(frame), dtype=np.uint8)
    missing = gather_kernels.gather_spans(frames, layout.page_size, frame, row, entry, offsets, valid)
    data = np.empty(offsets[-1], dtype=np.uint8)
    gather_kernels.gather_text(frames, layout.page_size, frame, row, entry, offsets, data)
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


class StagedRows:
    """Rows in the order in which they were added.

    Parameters
    ----------
    layout
        Leaf layout of the table.
    columns
        Names of the columns; key columns are allowed.
    room
        Maximum number of rows.
    """

    def __init__(self, layout: LeafLayout, columns: Sequence[str], room: int) -> None:
        self._layout = layout
        self._room = room
        fixed = [name for name in columns if name in layout.by_name and layout.by_name[name].words]
        self._fixed = FixedRows([layout.by_name[name] for name in fixed], room)
        self._others = [name for name in columns if name not in fixed]
        self._order = [(fixed + self._others).index(name) for name in columns]
        self._parts: list[list[pa.Array]] = []
        self.rows = 0

    @property
    def free(self) -> int:
        """Number of rows that still fit."""
        return self._room - self.rows

    def add(self, frames: NDArray[np.uint8], frame: NDArray[np.int32], row: NDArray[np.int32]) -> None:
        """Append rows; a frame of -1 gives nulls. See `gather` for the parameters."""
        self._fixed.gather(self.rows, frames, self._layout.page_size, frame, row)
        if self._others:
            self._parts.append(gather(self._layout, frames, frame, row, self._others))
        self.rows += len(frame)

    def arrays(self) -> list[pa.Array]:
        """Return the columns. At least one row must have been added, and none can be added afterwards."""
        others = [concat_arrays([part[at] for part in self._parts]) for at in range(len(self._others))]
        arrays = [*self._fixed.arrays(self.rows), *others]
        return [arrays[at] for at in self._order]
