"""Columns of the tuples in MeshJoin's window: by slot in arrays where a value has a fixed width, else as they came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.storage.format import concat_batches, fixed_type, null_mask, take, validity, view_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WindowColumns"]


class WindowColumns:
    """Values of stream tuples, which are found by slot.

    Parameters
    ----------
    schema
        Schema of the stream.
    batches, tuples
        Number of batches in the window, and slots of each.

    Attributes
    ----------
    nbytes
        Bytes of the arrays, which are allocated at once.
    """

    def __init__(self, schema: pa.Schema, batches: int, tuples: int) -> None:
        self._schema = schema
        self._tuples = tuples
        self._flat: dict[int, NDArray[Any]] = {
            at: np.empty(batches * tuples, dtype=dtype)
            for at, field in enumerate(schema)
            if (dtype := _flat_type(field.type)) is not None
        }
        self._rest = [at for at in range(len(schema)) if at not in self._flat]
        self._batches: list[pa.RecordBatch | None] = [None] * batches
        self._missing: dict[int, dict[int, NDArray[np.bool_]]] = {at: {} for at in self._flat}
        self.nbytes = sum(values.nbytes for values in self._flat.values())

    def growth(self, rows: pa.RecordBatch) -> int:
        """Return the bytes that tuples take in addition to the arrays."""
        masks = sum(len(rows) for at in self._flat if rows.column(at).null_count)
        return masks + (int(rows.select(self._rest).nbytes) if self._rest else 0)

    def write(self, place: int, rows: pa.RecordBatch) -> None:
        """Put tuples into the slots of a batch."""
        start = place * self._tuples
        for at, values in self._flat.items():
            column = rows.column(at)
            given = view_of(column.buffers()[1], values.dtype)[column.offset : column.offset + len(column)]
            values[start : start + len(given)] = given
            if (nulls := null_mask(column)) is not None:
                self._missing[at][place] = nulls
        if self._rest:
            self._batches[place] = rows.select(self._rest)

    @property
    def unflattened(self) -> list[pa.RecordBatch]:
        """Columns of each batch that are no arrays."""
        return [batch for batch in self._batches if batch is not None]

    def clear(self, place: int) -> None:
        """Forget the tuples of a batch."""
        self._batches[place] = None
        for missing in self._missing.values():
            missing.pop(place, None)

    def take(self, slots: NDArray[np.integer]) -> pa.RecordBatch:
        """Return the tuples in these slots."""
        columns: list[pa.Array] = [None] * len(self._schema)
        for at, values in self._flat.items():
            valid = self._valid(at, slots)
            buffers = [validity(valid), pa.py_buffer(values[slots])]
            columns[at] = pa.Array.from_buffers(self._schema.field(at).type, len(slots), buffers)
        if self._rest:
            for at, column in zip(self._rest, self._taken(slots).columns, strict=True):
                columns[at] = column
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _valid(self, at: int, slots: NDArray[np.integer]) -> NDArray[np.bool_] | None:
        """Return which values of a column are present; None if all are."""
        if not self._missing[at]:
            return None
        valid = np.ones(len(slots), dtype=np.bool_)
        places = slots // self._tuples
        for place, nulls in self._missing[at].items():
            here = np.flatnonzero(places == place)
            valid[here] = ~nulls[slots[here] - place * self._tuples]
        return valid

    def _taken(self, slots: NDArray[np.integer]) -> pa.RecordBatch:
        """Return the columns that are no arrays, batch by batch and then in the order of the slots."""
        places = slots // self._tuples
        order = np.argsort(places, kind="stable")
        parts = []
        for which in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
            place = int(places[which[0]])
            batch = self._batches[place]
            assert batch is not None
            parts.append(take(batch, slots[which] - place * self._tuples))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return take(concat_batches(parts), back)


def _flat_type(dtype: pa.DataType) -> np.dtype[np.generic] | None:
    """Return the type of the values in Arrow's buffer, or None if they are not one number each."""
    fixed = fixed_type(dtype)
    if fixed is None or fixed.words > 1 or pa.types.is_boolean(dtype) or pa.types.is_decimal(dtype):
        return None
    return fixed.dtype
