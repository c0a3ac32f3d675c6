"""Copies of Arrow rows, in memory that returns to the system.

Arrow's default pool keeps freed memory for reuse: a third of a join's budget was measured. The C library's allocator
serves numpy too, and gives freed memory back when it is asked (`malloc_trim`, the pool's `release_unused`). So joins
make their copies here, and leave the default pool to the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["concat_arrays", "concat_batches", "null_array", "take"]

RowsT = TypeVar("RowsT", pa.Array, pa.RecordBatch)


def take(rows: RowsT, index: NDArray[np.integer] | pa.Array) -> RowsT:
    """Return the rows of an array or a batch at these positions; null where the position is null."""
    places = index if isinstance(index, pa.Array) else pa.array(index)
    return pc.take(rows, places, memory_pool=pa.system_memory_pool())


def concat_batches(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all parts. There must be at least one part."""
    return pa.concat_batches(parts, memory_pool=pa.system_memory_pool())


def concat_arrays(parts: Sequence[pa.Array]) -> pa.Array:
    """Return the values of all parts. There must be at least one part."""
    return pa.concat_arrays(parts, memory_pool=pa.system_memory_pool())


def null_array(rows: int, dtype: pa.DataType) -> pa.Array:
    """Return an array of nulls."""
    return pa.nulls(rows, dtype, memory_pool=pa.system_memory_pool())
