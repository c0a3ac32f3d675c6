"""`Rows`: stored tuples side by side, and conversion between them and Arrow batches.

`Rows` is the one form of tuples outside of Arrow: arriving batches, tuples that leave memory, spilled blocks.
`headrace.joins.streams.tuples.store` keeps the tuples in memory in the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins.streams.tuples import _row_kernels as kernels
from headrace.joins.streams.tuples._index_kernels import KeyedRows
from headrace.joins.streams.tuples.layout import NEVER, RowLayout
from headrace.storage.format import SLACK, null_mask, validity, view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.keys import KeySpec
    from headrace.joins.streams.tuples.layout import FixedColumn, TextColumn
    from headrace.storage.format import Keys

__all__ = ["Rows", "RowsEncoder", "gather_columns", "heap_nbytes", "heap_range"]

_WORD = 8
_MAX_TEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Stored tuples of one input.

    Attributes
    ----------
    layout
        Layout of the records.
    count
        Number of tuples.
    records : uint8[at least count * layout.stride]
        Records side by side.
    heap : uint8 array
        Variable parts; empty if the input has none.
    """

    layout: RowLayout
    count: int
    records: NDArray[np.uint8]
    heap: NDArray[np.uint8]

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.records.nbytes + self.heap.nbytes

    def words(self, offset: int) -> NDArray[np.uint64]:
        """Return the words at an offset of the records: a view with one element for each tuple."""
        return np.ndarray(
            (self.count,), dtype=np.uint64, buffer=self.records, offset=offset, strides=(self.layout.stride,)
        )

    @property
    def arrivals(self) -> NDArray[np.int64]:
        """Arrival stamps (the paper's ATS). A view."""
        return self.words(self.layout.arrival).view(np.int64)

    @property
    def departures(self) -> NDArray[np.int64]:
        """Departure stamps (the paper's DTS); `NEVER` in memory. A view."""
        return self.words(self.layout.departure).view(np.int64)

    def key_words(self, key: int) -> NDArray[np.uint64]:
        """Return the key words of a key. A view."""
        return self.words(self.layout.keys[key].word)

    @property
    def flags(self) -> NDArray[np.uint8]:
        """Flags of each tuple. A view."""
        return np.ndarray(
            (self.count,),
            dtype=np.uint8,
            buffer=self.records,
            offset=self.layout.flags,
            strides=(self.layout.stride,),
        )

    def keyed(self, key: int) -> KeyedRows:
        """Return the tuples with one of their keys, as arguments of kernels."""
        layout, fields = self.layout, self.layout.keys[key]
        return KeyedRows(
            self.records, self.heap, layout.stride, fields.word, fields.digest, fields.start, fields.end, layout.heap
        )

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Return copies of the tuples at these positions."""
        layout = self.layout
        records = np.empty(len(index) * layout.stride + SLACK, dtype=np.uint8)
        heap = np.empty(heap_nbytes(self, index), dtype=np.uint8)
        kernels.copy_out(self.records, layout.stride, layout.heap, self.heap, index, records, heap, 0)
        return Rows(layout, len(index), records, heap)

    def sizes(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of each of the tuples at these positions."""
        sizes = np.full(len(index), self.layout.stride, dtype=np.int64)
        if self.layout.heap >= 0:
            kernels.add_heap_lengths(self.records, self.layout.stride, self.layout.heap, self.heap, index, sizes)
        return sizes

    def nbytes_of(self, index: NDArray[np.int64]) -> int:
        """Return the bytes of the tuples at these positions."""
        return len(index) * self.layout.stride + heap_nbytes(self, index)

    def order_by(self, key: int) -> NDArray[np.int64]:
        """Return the stable order of the tuples by a key; of a key of more than one word, by its first word."""
        return np.argsort(self.key_words(key), kind="stable").astype(np.int64, copy=False)

    def batch(self) -> pa.RecordBatch:
        """Return the tuples as Arrow rows."""
        every = np.arange(self.count, dtype=np.int64)
        return pa.RecordBatch.from_arrays(gather_columns(self, every), schema=self.layout.schema)


def heap_nbytes(rows: Rows, index: NDArray[np.int64]) -> int:
    """Return the bytes of the variable parts of the chosen tuples."""
    if rows.layout.heap < 0:
        return 0
    return int(kernels.heap_length(rows.records, rows.layout.stride, rows.layout.heap, rows.heap, index))


def heap_range(rows: Rows, start: int, stop: int) -> tuple[int, int]:
    """Return where the variable parts of some tuples lie, which must be in the order of the tuples."""
    if rows.layout.heap < 0:
        return 0, 0
    positions = rows.words(rows.layout.heap)
    return int(positions[start]), int(positions[stop]) if stop < len(rows) else len(rows.heap)


class RowsEncoder:
    """Turns the batches of one input into stored tuples.

    Parameters
    ----------
    layout
        Layout of the records.
    keys
        Keys of the input.
    """

    def __init__(self, layout: RowLayout, keys: Sequence[KeySpec]) -> None:
        self._layout = layout
        self._keys = keys

    def nbytes(self, batch: pa.RecordBatch) -> int:
        """Return how many bytes `encode` allocates for a batch at most, scratch arrays included."""
        rows, layout = len(batch), self._layout
        scratch = sum(3 * _WORD * rows + column.nbytes for column in batch.columns)
        return self.records_nbytes(rows) + (2 * batch.nbytes + 32 * rows if layout.heap >= 0 else 0) + scratch

    def records_nbytes(self, rows: int) -> int:
        """Return the bytes of so many records, as `encode` makes them."""
        return rows * self._layout.stride + SLACK

    def encode(
        self, batch: pa.RecordBatch, scratch: NDArray[np.uint8] | None = None
    ) -> tuple[Rows, NDArray[np.bool_] | None]:
        """Return the tuples of a batch, and which of them have all keys (None: all of them).

        They have no arrival stamps yet.

        Parameters
        ----------
        batch
            Tuples in the schema of the input.
        scratch
            Memory of `records_nbytes` or more in which their records are to lie; by default new memory.
        """
        layout, rows, nbytes = self._layout, len(batch), self.records_nbytes(len(batch))
        records = np.empty(nbytes, dtype=np.uint8) if scratch is None else scratch[:nbytes]
        kernels.begin_records(records, layout.stride, rows, layout.departure, NEVER)
        wide, valid = [], None
        for spec, fields in zip(self._keys, layout.keys, strict=True):
            keys, found = spec.encode(batch)
            self._put_words(records, fields.word, np.ascontiguousarray(keys.prefix))
            if fields.wide:
                _, offsets, data = keys.parts
                self._put_words(records, fields.digest, kernels.hash_keys(offsets, data))
                wide.append(keys)
            if found is not None:
                valid = found if valid is None else valid & found
        for column in layout.fixed:
            _put_fixed(records, layout, column, batch.column(column.column))
        for at, array in enumerate(batch.columns):
            nulls = np.ones(rows, dtype=np.bool_) if pa.types.is_null(array.type) else null_mask(array)
            if nulls is not None:
                kernels.put_bits(records, layout.stride, layout.nulls + at // 8, at % 8, nulls)
        return Rows(layout, rows, records, self._heap(records, batch, wide)), valid

    def _put_words(self, records: NDArray[np.uint8], offset: int, words: NDArray[np.uint64]) -> None:
        kernels.put_words(records, self._layout.stride, offset, words)

    def _heap(self, records: NDArray[np.uint8], batch: pa.RecordBatch, wide: list[Keys]) -> NDArray[np.uint8]:
        layout, rows = self._layout, len(batch)
        if layout.heap < 0:
            return np.zeros(0, dtype=np.uint8)
        parts = [_text_parts(batch.column(text.column), text) for text in layout.text]
        parts += [(keys.parts[1], keys.parts[2]) for keys in wide]
        lengths = np.zeros(rows, dtype=np.int64)
        for offsets, _ in parts:
            lengths += np.diff(offsets)
        heap = np.empty(int(((lengths + 15) >> 3 << 3).sum()), dtype=np.uint8)
        kernels.begin_heap(records, layout.stride, layout.heap, lengths, heap)
        cursor = np.zeros(rows, dtype=np.int64)
        for end, (offsets, data) in zip(layout.ends, parts, strict=True):
            kernels.put_text(records, layout.stride, layout.heap, end, cursor, offsets, data, heap)
        return heap


def _put_fixed(records: NDArray[np.uint8], layout: RowLayout, column: FixedColumn, array: pa.Array) -> None:
    if pa.types.is_null(array.type):
        return
    if pa.types.is_boolean(array.type):
        bits = view_of(array.buffers()[1], np.uint8)
        values, start = np.unpackbits(bits, bitorder="little"), array.offset
    else:
        values, start = view_of(array.buffers()[1], np.uint8), array.offset
    if len(array):
        kernels.put_fixed(records, layout.stride, column.offset, column.width, values, start, len(array))


def _text_parts(array: pa.Array, text: TextColumn) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return offsets and bytes of a text column; nulls have no bytes."""
    if len(array) == 0:
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    if array.null_count:
        array = array.fill_null(b"" if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type) else "")
    _, offsets, data = array.buffers()
    ends = view_of(offsets, np.int64 if text.large else np.int32)[array.offset : array.offset + len(array) + 1]
    return ends.astype(np.int64), view_of(data, np.uint8)


def gather_columns(rows: Rows, index: NDArray[np.int64]) -> list[pa.Array]:
    """Return the columns of the chosen tuples in the order of the schema; an index of -1 is a row of nulls."""
    layout = rows.layout
    columns: list[pa.Array] = [None] * len(layout.schema)
    nulls = np.zeros((len(layout.schema) + 7) // 8, dtype=np.uint8)
    kernels.chosen_nulls(rows.records, layout.stride, layout.nulls, index, nulls)
    has_nulls = np.unpackbits(nulls, bitorder="little").view(np.bool_)
    for column in layout.fixed:
        dtype = layout.schema.field(column.column).type
        valid = _valid(rows, column.column, index) if has_nulls[column.column] else None
        columns[column.column] = _fixed_array(rows, column, dtype, index, valid)
    before = -1
    for text in layout.text:
        valid = _valid(rows, text.column, index) if has_nulls[text.column] else None
        columns[text.column] = _text_array(rows, text, before, index, valid)
        before = text.offset
    return columns


def _valid(rows: Rows, column: int, index: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    valid = np.empty(len(index), dtype=np.bool_)
    layout = rows.layout
    missing = kernels.gather_bits(rows.records, layout.stride, layout.nulls + column // 8, column % 8, index, valid)
    return valid if missing else None


def _fixed_array(
    rows: Rows, column: FixedColumn, dtype: pa.DataType, index: NDArray[np.int64], valid: NDArray[np.bool_] | None
) -> pa.Array:
    if pa.types.is_null(dtype):
        return pa.nulls(len(index))
    out = np.empty(len(index) * column.width, dtype=np.uint8)
    kernels.gather_fixed(rows.records, rows.layout.stride, column.offset, column.width, index, out)
    if pa.types.is_boolean(dtype):
        out = np.packbits(out, bitorder="little")
    return pa.Array.from_buffers(dtype, len(index), [validity(valid), pa.py_buffer(out)])


def _text_array(
    rows: Rows, text: TextColumn, before: int, index: NDArray[np.int64], valid: NDArray[np.bool_] | None
) -> pa.Array:
    layout = rows.layout
    offsets = np.empty(len(index) + 1, dtype=np.int64)
    kernels.text_offsets(rows.records, layout.stride, before, text.offset, index, offsets)
    out = np.empty(offsets[-1], dtype=np.uint8)
    kernels.gather_text(rows.records, layout.stride, layout.heap, before, rows.heap, index, offsets, out)
    ends = pa.py_buffer(offsets if text.large else offsets.astype(np.int32))
    dtype = layout.schema.field(text.column).type
    return pa.Array.from_buffers(dtype, len(index), [validity(valid), ends, pa.py_buffer(out)])
