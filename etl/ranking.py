"""Ranks and sort order of rows by their key columns, and keys as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.format import decoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["key_text", "occurs_in", "rank_rows", "sort_rows", "sortable", "starts_of_runs"]


_GREATEST: Final = np.int64(2**63 - 1)
_INTERVAL_NBYTES: Final = 16


def rank_rows(columns: Sequence[pa.Array | pa.ChunkedArray]) -> tuple[NDArray[np.int64], int]:
    """Return the dense rank of each row in key order, and the number of distinct keys.

    Parameters
    ----------
    columns
        Key columns, most significant first; null equals null, and comes last.

    Examples
    --------
    >>> ranks, distinct = rank_rows([pa.array(["b", "a", "b"])])
    >>> ranks.tolist(), distinct
    ([1, 0, 1], 2)
    """
    rows = len(columns[0])
    ranks = np.zeros(rows, dtype=np.int64)
    if rows == 0:
        return ranks, 0
    order = sort_rows(columns)
    in_order = np.cumsum(starts_of_runs([column.take(pa.array(order)) for column in columns])) - 1
    ranks[order] = in_order
    return ranks, int(in_order[-1]) + 1


def occurs_in(keys: pa.Table, others: Sequence[pa.Table]) -> NDArray[np.bool_]:
    """Return which rows of a table are also rows of others with the same columns; there are no nulls.

    Examples
    --------
    >>> occurs_in(pa.table({"k": [1, 2, 2]}), [pa.table({"k": [2, 3]})]).tolist()
    [False, True, True]
    """
    ranks, distinct = rank_rows(pa.concat_tables([keys, *others]).columns)
    named = np.zeros(distinct, dtype=np.bool_)
    named[ranks[keys.num_rows :]] = True
    found: NDArray[np.bool_] = named[ranks[: keys.num_rows]]
    return found


def sort_rows(columns: Sequence[pa.Array | pa.ChunkedArray]) -> NDArray[np.int64]:
    """Return the positions that sort rows by the columns, most significant first, nulls last."""
    names = [str(position) for position in range(len(columns))]
    table = pa.table(dict(zip(names, columns, strict=True)))
    return np.asarray(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in names])).astype(np.int64)


def sortable(array: pa.Array) -> list[pa.Array]:
    """Return columns with the same sort order, of which only equal rows tie: -0.0 and 0.0 differ, all NaN are equal.

    Examples
    --------
    >>> sort_rows(sortable(pa.array([[2, 1], None, [2], [10]]))).tolist()
    [2, 0, 3, 1]
    """
    if isinstance(array.type, pa.BaseExtensionType):
        return sortable(array.storage)
    if pa.types.is_dictionary(array.type):
        return sortable(decoded(array))
    if pa.types.is_struct(array.type):
        return [array.is_null(), *(part for child in array.flatten() for part in sortable(child))]
    return [_sortable_values(array)]


def _sortable_values(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct({"key": kind.key_type, "value": kind.item_type})))
    if pa.types.is_nested(kind):
        return _ranks_of_values(array)
    if pa.types.is_interval(kind):
        return array.view(pa.binary(_INTERVAL_NBYTES))
    return _float_words(array) if pa.types.is_floating(kind) else array


def _ranks_of_values(lists: pa.Array) -> pa.Array:
    """Return lists as bytes with the same sort order: the ranks of their values, as fixed numbers of digits."""
    values = pc.list_flatten(lists)
    ranks = rank_rows(sortable(values))[0] if len(values) else np.zeros(0, dtype=np.int64)
    lengths = np.asarray(pc.list_value_length(lists).fill_null(0), dtype=np.int64)
    offsets = pa.py_buffer(np.concatenate([[0], np.cumsum(lengths)]) * ranks.itemsize)
    digits = pa.py_buffer(ranks.astype(">i8"))
    plain = pa.Array.from_buffers(pa.large_binary(), len(lists), [None, offsets, digits])
    return pc.if_else(lists.is_valid(), plain, pa.scalar(None, plain.type))


def _float_words(array: pa.Array) -> pa.Array:
    """Return floats as integers in their order; all NaN are one integer."""
    values = np.asarray(array.cast(pa.float64()).fill_null(0.0))
    bits = np.where(np.isnan(values), np.nan, values).view(np.int64)
    return pa.array(np.where(bits < 0, bits ^ _GREATEST, bits), mask=np.asarray(array.is_null()))


def starts_of_runs(columns: Sequence[pa.Array | pa.ChunkedArray]) -> NDArray[np.bool_]:
    """Return true where a row differs from the previous row in any column, and for the first row; null equals null."""
    rows = len(columns[0])
    starts = np.zeros(rows, dtype=bool)
    starts[:1] = True
    for column in columns:
        this, previous = column.slice(1), column.slice(0, max(rows - 1, 0))
        differs: Any = pc.fill_null(pc.not_equal(this, previous), fill_value=False)
        starts[1:] |= np.asarray(pc.or_(differs, pc.xor(this.is_null(), previous.is_null())), dtype=bool)
    return starts


def key_text(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array:
    """Format keys for people: the value as text, `a | b` for a composite key, `null` for null."""
    text = [pc.fill_null(_text(column), "null") for column in columns]
    if len(text) == 1:
        return text[0]
    return pc.binary_join_element_wise(*text, " | ")


def _text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    plain = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    plain = decoded(plain)
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return (
        _hexadecimal(plain.cast(pa.binary())) if any(test(plain.type) for test in binary) else plain.cast(pa.string())
    )


def _hexadecimal(column: pa.Array) -> pa.Array:
    """Format bytes as hexadecimal digits: the heap is converted at once and every offset doubles."""
    plain = pa.concat_arrays([column, pa.array([b""])])[:-1] if column.offset else column
    _, offsets, heap = plain.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32, count=len(plain) + 1)
    spelled = pa.py_buffer((heap.to_pybytes() if heap is not None else b"").hex().encode())
    text = pa.StringArray.from_buffers(len(plain), pa.py_buffer(2 * ends), spelled)
    return pc.if_else(plain.is_valid(), text, pa.scalar(None, pa.string()))
