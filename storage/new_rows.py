"""Changes as the kernels take them that patch leaves; for the commonest few-row changes without going through Arrow.

`headrace.storage.changes` checks and orders changes of any kind; its result becomes `NewRows` too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import pyarrow as pa

from headrace.storage import _few_kernels as kernels
from headrace.storage.columns import fixed_type
from headrace.storage.encode import PhysicalRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.changes import Batch, Changes
    from headrace.storage.layout import LeafLayout

__all__ = ["MOST_ROWS", "NewRows", "WordColumns"]

MOST_ROWS = 64
"""Rows that are few."""

_NO_HEAP = np.zeros(0, dtype=np.uint8)


class NewRows(NamedTuple):
    """Changes of a table with keys of one word, in the order in which kernels take them.

    Attributes
    ----------
    touched, upserted, keys, fresh
        As of `headrace.storage.changes.Changes`.
    places, words, spans, heap, nulls
        The rows to store, as of `headrace.storage.encode.PhysicalRows`.
    """

    touched: NDArray[np.uint64]
    upserted: NDArray[np.bool_]
    keys: NDArray[np.uint64]
    fresh: NDArray[np.bool_]
    places: NDArray[np.int64]
    words: NDArray[np.int64]
    spans: NDArray[np.int64]
    heap: NDArray[np.uint8]
    nulls: NDArray[np.uint8]

    @classmethod
    def of(cls, layout: LeafLayout, changes: Changes) -> NewRows:
        """Return changes in this form."""
        rows = PhysicalRows(layout, changes.keys, changes.payload)
        return cls(
            changes.touched.prefix, changes.upserted, changes.keys.prefix, changes.fresh,
            rows.places, rows.words, rows.spans, rows.heap, rows.nulls,
        )  # fmt: skip


class WordColumns:
    """Reads upserts into a table all of whose columns are of one word, and whose keys are, straight from their buffers.

    Parameters
    ----------
    layout
        Of the table; see `of`.
    """

    def __init__(self, layout: LeafLayout) -> None:
        names = [*layout.key, *layout.payload.names]
        fixed = [fixed_type(layout.schema.field(name).type) for name in names]
        kinds = [kind for kind in fixed if kind is not None]
        columns = [
            (layout.schema.names.index(name), kind.width, kind.signed) for name, kind in zip(names, kinds, strict=True)
        ]
        self._columns = np.array(columns, dtype=np.int64)
        bits = [8 * kind.width for kind in kinds[: len(layout.key)]]
        flips = [kind.signed << (width - 1) for kind, width in zip(kinds, bits, strict=False)]
        self._bits, self._flips = np.array(bits, dtype=np.uint64), np.array(flips, dtype=np.uint64)
        self._places = np.full((layout.entries, 4), -1, dtype=np.int64)
        self._places[:, 0] = 0
        self._places[:, 1] = np.arange(layout.entries)
        self._room = functools.cache(self._make_room)
        self._schema = layout.schema.__arrow_c_schema__()

    @classmethod
    def of(cls, layout: LeafLayout) -> Self | None:
        """Return them if all columns of a table are numbers, dates or times of at most eight bytes.

        Their names must be texts that C can tell apart, too.
        """
        plain = all(
            fixed_type(field.type) and not _is_packed(field.type) and "\0" not in field.name for field in layout.schema
        )
        return cls(layout) if plain and layout.codec.kind == "u64" else None

    def read(self, batch: Batch | None) -> NewRows | None:
        """Return upserts, or None if they need a closer look: many, other columns or types, nulls, keys not ascending.

        The next upserts take the memory of those before.
        """
        if not isinstance(batch, pa.RecordBatch):
            return None
        rows = batch.num_rows
        if not 0 < rows <= MOST_ROWS:
            return None
        words, new = self._room(rows)
        schema, array = batch.__arrow_c_array__()
        read = kernels.read_rows(
            id(schema), id(self._schema), id(array), self._columns, self._bits, self._flips, words, new.keys,
        )  # fmt: skip
        return new if read else None

    def _make_room(self, rows: int) -> tuple[NDArray[np.int64], NewRows]:
        """Return memory for the words of so many upserts, and these upserts in it."""
        words, keys = np.zeros((len(self._columns), rows), dtype=np.int64), np.zeros(rows, dtype=np.uint64)
        upserted, fresh = np.ones(rows, dtype=np.bool_), np.zeros(rows, dtype=np.bool_)
        spans, nulls = np.zeros((0, rows + 1), dtype=np.int64), np.zeros((0, rows), dtype=np.uint8)
        stored = words[len(self._bits) - 1 :]
        return words, NewRows(keys, upserted, keys, fresh, self._places, stored, spans, _NO_HEAP, nulls)


def _is_packed(dtype: pa.DataType) -> bool:
    """Whether values are not one number each in their Arrow buffer: bits, or words of sixteen bytes."""
    return bool(pa.types.is_boolean(dtype) or pa.types.is_decimal128(dtype))
