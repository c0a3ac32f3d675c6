"""Changes as the kernels take them that patch leaves; for the commonest few-row changes without going through Arrow.

`storage.changes` checks and orders changes of any kind; its result becomes `NewRows` too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa

from storage import _few_kernels as kernels
from storage.columns import fixed_type
from storage.encode import PhysicalRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storage.changes import Changes
    from storage.layout import LeafLayout

__all__ = ["NewRows", "WordColumns"]

_NO_HEAP = np.zeros(0, dtype=np.uint8)


_Columns: TypeAlias = (
    "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]"
)


class NewRows(NamedTuple):
    """Changes of a table with keys of one word.

    Attributes
    ----------
    touched, upserted, keys, fresh
        As of `storage.changes.Changes`.
    places, words, spans, heap, nulls
        The rows to store, as of `storage.encode.PhysicalRows`.
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

    @property
    def columns(self) -> _Columns:
        """Places, words, spans, heap and nulls, for kernels."""
        return self.places, self.words, self.spans, self.heap, self.nulls


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
        self._names = layout.schema.names
        self._types = layout.schema.types
        kinds = [kind for kind in fixed if kind is not None]
        self._columns = [(self._names.index(name), kind.dtype) for name, kind in zip(names, kinds, strict=True)]
        bits = [8 * kind.width for kind in kinds[: len(layout.key)]]
        flips = [kind.signed << (width - 1) for kind, width in zip(kinds, bits, strict=False)]
        self._bits, self._flips = np.array(bits, dtype=np.uint64), np.array(flips, dtype=np.uint64)
        self._places = np.full((layout.entries, 4), -1, dtype=np.int64)
        self._places[:, 0] = 0
        self._places[:, 1] = np.arange(layout.entries)
        self._seen: pa.Schema | None = None

    @classmethod
    def of(cls, layout: LeafLayout) -> Self | None:
        """Return them if all columns of a table are numbers, dates or times of at most eight bytes."""
        types = layout.schema.types
        plain = all(fixed_type(dtype) and not _is_packed(dtype) for dtype in types)
        return cls(layout) if plain and layout.codec.kind == "u64" else None

    def read(self, batch: pa.RecordBatch) -> NewRows | None:
        """Return upserts, or None if they need a closer look: other columns or types, nulls, keys not ascending."""
        rows = batch.num_rows
        if rows == 0 or not self._fits(batch.schema):
            return None
        arrays = batch.columns
        words = np.empty((len(self._columns), rows), dtype=np.int64)
        for place, (at, dtype) in enumerate(self._columns):
            array = arrays[at]
            if array.null_count:
                return None
            words[place] = np.frombuffer(array.buffers()[1], dtype, rows, array.offset * dtype.itemsize)
        keys = np.empty(rows, dtype=np.uint64)
        if not kernels.pack_keys(words, self._bits, self._flips, keys):
            return None
        upserted, fresh, spans, nulls = _of_upserts(rows)
        return NewRows(keys, upserted, keys, fresh, self._places, words[len(self._bits) - 1 :], spans, _NO_HEAP, nulls)

    def _fits(self, schema: pa.Schema) -> bool:
        if self._seen is None or not schema.equals(self._seen):
            if schema.names != self._names or schema.types != self._types:
                return False
            self._seen = schema
        return True


@functools.cache
def _of_upserts(
    rows: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64], NDArray[np.uint8]]:
    """Return `upserted`, `fresh`, `spans` and `nulls` of that many upserts without text and nulls."""
    return (
        np.ones(rows, dtype=np.bool_),
        np.zeros(rows, dtype=np.bool_),
        np.zeros((0, rows + 1), dtype=np.int64),
        np.zeros((0, rows), dtype=np.uint8),
    )


def _is_packed(dtype: pa.DataType) -> bool:
    """Whether values are not one number each in their Arrow buffer: bits, or words of sixteen bytes."""
    return bool(pa.types.is_boolean(dtype) or pa.types.is_decimal128(dtype))
