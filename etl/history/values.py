"""Column comparison in which null equals null and NaN equals NaN, and selection by optional positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.instants import ticks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["canonical", "differ", "differ_from_previous", "order_of", "pick", "rows_differ", "single"]


def single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def canonical(column: pa.Array) -> pa.Array:
    """Return floats with a single zero and a single NaN; other columns are unchanged."""
    if not pa.types.is_floating(column.type):
        return column
    values = column.to_numpy(zero_copy_only=False) + np.zeros((), dtype=column.type.to_pandas_dtype())
    values = np.where(np.isnan(values), np.array(np.nan, dtype=values.dtype), values)
    return pa.array(values, column.type, mask=np.asarray(column.is_null()), from_pandas=False)


def differ(left: pa.Array, right: pa.Array) -> NDArray[np.bool_]:
    """Return where two columns differ.

    Examples
    --------
    >>> nan = float("nan")
    >>> differ(pa.array([1.0, nan, None, None]), pa.array([1.0, nan, None, 2.0])).tolist()
    [False, False, False, True]
    """
    differs = pc.fill_null(pc.not_equal(left, right), fill_value=False)
    if pa.types.is_floating(left.type):
        both = pc.and_(pc.is_nan(left), pc.is_nan(right))
        differs = pc.and_not(differs, pc.fill_null(both, fill_value=False))
    if left.null_count or right.null_count:
        differs = pc.or_(differs, pc.xor(left.is_null(), right.is_null()))
    return np.asarray(differs, dtype=np.bool_)


def differ_from_previous(columns: Sequence[pa.Array], rows: int) -> NDArray[np.bool_]:
    """Return true where a row differs from the previous row in any column, and for the first row."""
    differs = np.zeros(rows, dtype=np.bool_)
    differs[:1] = True
    for column in columns:
        differs[1:] |= differ(column.slice(1), column.slice(0, max(rows - 1, 0)))
    return differs


def rows_differ(left: Sequence[pa.Array], right: Sequence[pa.Array], rows: int) -> NDArray[np.bool_]:
    """Return where two tables, given by their columns, differ in any column."""
    differs = np.zeros(rows, dtype=np.bool_)
    for one, other in zip(left, right, strict=True):
        differs |= differ(one, other)
    return differs


def order_of(column: pa.Array) -> NDArray[np.int64]:
    """Return integers that sort like the values of a column; undefined where it is null."""
    if pa.types.is_date32(column.type) or pa.types.is_timestamp(column.type):
        return ticks_of(column)
    if pa.types.is_signed_integer(column.type):
        return np.asarray(column.fill_null(0)).astype(np.int64)
    return np.asarray(pc.rank(column, sort_keys="ascending", tiebreaker="dense")).astype(np.int64)


def pick(column: pa.Array, positions: NDArray[np.int64]) -> pa.Array:
    """Return the values at positions; null where a position is negative."""
    absent = positions < 0
    return column.take(pa.array(positions, mask=absent if absent.any() else None))
