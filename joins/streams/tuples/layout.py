"""`RowLayout`: how a tuple of one input is stored in memory and in spilled blocks.

A stored tuple is a record of fixed width, and for inputs with text or binary columns a variable part in a heap::

    record: arrival | departure | key words ... | heap position | columns by width ... | null bits | flags | padding
    heap:   record number (4 bytes) | length (4 bytes) | bytes of the first text column | of the next | ... | padding

Records hold every value in the width that Arrow has for it, so conversion in both directions is a copy. A key word is a
number whose order is the order of the keys, see `headrace.joins.streams.tuples.keys`. Keys of more than one word are
also kept as bytes, in the heap, behind the text columns, together with their hash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.joins.errors import StreamSchemaError
from headrace.storage.format import stored_type

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "HEAP_HEADER",
    "MATCHED",
    "MET",
    "NEVER",
    "STAMPS_NBYTES",
    "TOUCHED",
    "FixedColumn",
    "KeyFields",
    "RowLayout",
    "TextColumn",
]

NEVER = 2**63 - 1
"""Departure of a tuple that is still in memory."""
MATCHED = 1
"""Flag of a tuple that has been part of a result."""
TOUCHED = 2
"""Flag for a flushing policy: DINER's join bit, which the Clock clears."""
MET = 4
"""Flag of a spilled tuple that met all tuples of the other input with this flag while they were in memory."""
HEAP_HEADER = 8
"""Bytes in the heap before the variable part of a tuple: number of its record, and its length with padding."""

STAMPS_NBYTES = 16
"""Bytes of the arrival and the departure stamp, with which a record begins."""

_WORD = 8


@dataclass(frozen=True, slots=True)
class FixedColumn:
    """A column of fixed width: its position in the schema, its offset in the record, and its bytes."""

    column: int
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A text or binary column: its position in the schema, and the offset in the record of where its bytes end.

    Attributes
    ----------
    large
        Whether Arrow's offsets have 64 bits.
    """

    column: int
    offset: int
    large: bool


@dataclass(frozen=True, slots=True)
class KeyFields:
    """Offsets in the record of a key word; and for a key of more than one word, of its hash and where its bytes are.

    Attributes
    ----------
    word
        Offset of the key word.
    digest
        Offset of the hash of the bytes; -1 if the word is the whole key.
    start, end
        Offsets of the ends of the part before the bytes in the heap, -1 if they are the first, and of their own end.
    """

    word: int
    digest: int = -1
    start: int = -1
    end: int = -1

    @property
    def wide(self) -> bool:
        """Whether keys go on beyond the word."""
        return self.end >= 0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Offsets of everything in a record.

    Attributes
    ----------
    schema
        Schema of the input.
    stride
        Bytes of a record.
    arrival, departure
        Offsets of the stamps (the paper's ATS and DTS); negative in records without stamps.
    heap
        Offset of the position in the heap; -1 if the input needs none.
    nulls
        Offset of the null bits, one per column in the order of the schema.
    flags
        Offset of the flags `MATCHED` and `TOUCHED`.
    keys
        Fields of each key.
    fixed, text
        Columns by kind.
    """

    schema: pa.Schema
    stride: int
    arrival: int
    departure: int
    heap: int
    nulls: int
    flags: int
    keys: tuple[KeyFields, ...]
    fixed: tuple[FixedColumn, ...]
    text: tuple[TextColumn, ...]

    @classmethod
    def of(cls, schema: pa.Schema, wide_keys: Sequence[bool], side: str) -> RowLayout:
        """Return the layout of an input.

        Parameters
        ----------
        schema
            Schema of the input.
        wide_keys
            Whether each key takes more than one word.
        side
            Name of the input, for messages.

        Raises
        ------
        StreamSchemaError
            If a column's type is nested or otherwise not supported.
        """
        widths = {at: _width(field.type) for at, field in enumerate(schema)}
        for at, width in widths.items():
            if width is None and _is_text(schema.field(at).type) is None:
                field = schema.field(at)
                raise StreamSchemaError(
                    f"column {field.name!r} of {side!r} has type {field.type}, which a join of streams cannot hold; "
                    f"cast it to {stored_type(field.type) or 'a number, a time, string, or binary'}, or leave it out"
                )
        texts = [at for at, width in widths.items() if width is None]
        offset = 2 * _WORD
        keys = []
        for wide in wide_keys:
            keys.append((offset, offset + _WORD if wide else -1))
            offset += _WORD * (1 + wide)
        heap = offset if texts or any(wide_keys) else -1
        offset += _WORD * (heap >= 0)
        fixed = []
        for at in sorted((at for at, width in widths.items() if width), key=lambda at: -_rank(widths[at])):
            if _rank(widths[at]) < _WORD:
                break
            fixed.append(FixedColumn(at, offset, widths[at] or 0))
            offset += -(-(widths[at] or 0) // _WORD) * _WORD
        ends = []
        for _ in range(len(texts) + sum(wide_keys)):
            ends.append(offset)
            offset += 4
        for at in sorted((at for at, width in widths.items() if width), key=lambda at: -_rank(widths[at])):
            width = widths[at] or 0
            if _rank(width) < _WORD:
                fixed.append(FixedColumn(at, offset, width))
                offset += width
        nulls = offset
        flags = nulls + (len(schema) + 7) // 8
        stride = -(-(flags + 1) // _WORD) * _WORD
        wide_ends = iter(zip([-1, *ends][len(texts) :], ends[len(texts) :], strict=False))
        return cls(
            schema,
            stride,
            0,
            _WORD,
            heap,
            nulls,
            flags,
            tuple(KeyFields(word, digest, *(next(wide_ends) if digest >= 0 else ())) for word, digest in keys),
            tuple(fixed),
            tuple(TextColumn(at, ends[rank], bool(_is_text(schema.field(at).type))) for rank, at in enumerate(texts)),
        )

    def without_stamps(self) -> RowLayout:
        """Return the layout of the same records without the stamps at their begin."""
        by = STAMPS_NBYTES

        def moved(offset: int) -> int:
            return offset - by if offset >= 0 else offset

        return replace(
            self,
            stride=self.stride - by,
            arrival=self.arrival - by,
            departure=self.departure - by,
            heap=moved(self.heap),
            nulls=self.nulls - by,
            flags=self.flags - by,
            keys=tuple(KeyFields(moved(k.word), moved(k.digest), moved(k.start), moved(k.end)) for k in self.keys),
            fixed=tuple(replace(column, offset=column.offset - by) for column in self.fixed),
            text=tuple(replace(column, offset=column.offset - by) for column in self.text),
        )

    @property
    def ends(self) -> list[int]:
        """Offsets of the ends of all parts in the heap: text columns, then the bytes of wide keys."""
        return [text.offset for text in self.text] + [key.end for key in self.keys if key.wide]


def _rank(width: int | None) -> int:
    """Return the alignment of a value."""
    return width if width in {1, 2, 4} else _WORD


def _width(dtype: pa.DataType) -> int | None:
    """Return the bytes of a value of fixed width; None if there is no such width."""
    if isinstance(dtype, pa.BaseExtensionType) or pa.types.is_nested(dtype) or pa.types.is_dictionary(dtype):
        return None
    if pa.types.is_null(dtype) or pa.types.is_boolean(dtype):
        return 1
    try:
        bits = dtype.bit_width
    except ValueError:
        return None
    return bits // 8 if bits >= 8 and bits % 8 == 0 and _is_text(dtype) is None else None  # noqa: PLR2004 - bits


def _is_text(dtype: pa.DataType) -> bool | None:
    """Return whether a text or binary type has 64-bit offsets; None for other types."""
    if pa.types.is_string(dtype) or pa.types.is_binary(dtype):
        return False
    return True if pa.types.is_large_string(dtype) or pa.types.is_large_binary(dtype) else None
