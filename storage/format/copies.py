"""Copies of Arrow rows, in memory that returns to the system.

Arrow's default pool keeps freed memory for reuse: a third of a join's budget was measured. The C library's allocator
serves numpy too, and gives freed memory back when it is asked (`malloc_trim`, the pool's `release_unused`). So joins
make their copies here, and leave the default pool to the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["concat_arrays", "concat_batches", "null_array", "repeated", "take"]

_LONG_RUNS = 4  # shorter ones are copied row by row as fast
_DECODED = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_fixed_size_binary)
"""Types whose runs Arrow decodes. It decodes text, too, but crashes where the result is too large for its offsets."""

RowsT = TypeVar("RowsT", pa.Array, pa.RecordBatch)


def take(rows: RowsT, index: NDArray[np.integer] | pa.Array) -> RowsT:
    """Return the rows of an array or a batch at these positions; null where the position is null."""
    places = index if isinstance(index, pa.Array) else pa.array(index)
    return pc.take(rows, places, memory_pool=pa.system_memory_pool())


def repeated(rows: pa.RecordBatch, ends: NDArray[np.int64]) -> pa.RecordBatch:
    """Return each row several times in sequence.

    Parameters
    ----------
    rows
        Rows.
    ends : int64[rows]
        Number of results up to the last one of each row; strictly ascending.
    """
    total = int(ends[-1]) if len(ends) else 0
    if total == len(rows):
        return rows
    if total < _LONG_RUNS * len(rows):
        return take(rows, np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(ends, prepend=0)))
    return pa.RecordBatch.from_arrays([_repeated(column, ends) for column in rows.columns], schema=rows.schema)


def _repeated(values: pa.Array, ends: NDArray[np.int64]) -> pa.Array:
    if not any(is_of(values.type) for is_of in _DECODED):
        return take(values, np.repeat(np.arange(len(values), dtype=np.int32), np.diff(ends, prepend=0)))
    encoded = pa.RunEndEncodedArray.from_arrays(pa.array(ends.astype(np.int32)), values)
    return pc.run_end_decode(encoded, memory_pool=pa.system_memory_pool())


def concat_batches(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all parts. There must be at least one part."""
    return pa.concat_batches(parts, memory_pool=pa.system_memory_pool())


def concat_arrays(parts: Sequence[pa.Array]) -> pa.Array:
    """Return the values of all parts. There must be at least one part."""
    return pa.concat_arrays(parts, memory_pool=pa.system_memory_pool())


def null_array(rows: int, dtype: pa.DataType) -> pa.Array:
    """Return an array of nulls."""
    return pa.nulls(rows, dtype, memory_pool=pa.system_memory_pool())
