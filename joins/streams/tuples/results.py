"""Result rows: the columns of all inputs in order, in batches of a bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins.streams.tuples import _row_kernels as kernels
from headrace.joins.streams.tuples.rows import Rows, gather_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins.streams.tuples.layout import RowLayout

__all__ = ["ResultBuilder", "result_schema"]

_TWO = 2
_MOST_ROWS = 16_384  # so that their tuples stay in the processor's cache while column after column is copied
_PAIR_BYTES = 48  # of the arrays that say which tuples a result row consists of


def result_schema(names: Sequence[str], schemas: Sequence[pa.Schema], optional: Sequence[bool]) -> pa.Schema:
    """Return the schema of the results: the columns of all inputs, in the order of the inputs.

    In a join of two inputs, a column of the second whose name is taken gets the suffix ``_right``, as in all joins. In
    a join of more inputs it gets the name of its input in front, ``<input>_<column>``. Either is repeated if necessary.

    Parameters
    ----------
    names, schemas
        Names and schemas of the inputs.
    optional
        Whether a result may have no tuple of an input, so that its columns are null.

    Examples
    --------
    >>> one = pa.schema([("k", pa.int64())])
    >>> result_schema(["a", "b"], [one, one], [False, False]).names
    ['k', 'k_right']
    >>> result_schema(["a", "b", "c"], [one, one, one], [False] * 3).names
    ['k', 'b_k', 'c_k']
    """
    fields: list[pa.Field] = []
    taken: set[str] = set()
    for side, (name, schema) in enumerate(zip(names, schemas, strict=True)):
        for field in schema:
            label = field.name
            while label in taken and side:
                label = f"{label}_right" if len(names) == _TWO else f"{name}_{label}"
            taken.add(label)
            fields.append(field.with_name(label).with_nullable(field.nullable or optional[side]))
    return pa.schema(fields)


class ResultBuilder:
    """Builds result batches.

    Parameters
    ----------
    schema
        Schema of the results.
    layouts
        Layout of each input.
    nbytes
        Largest size of a batch in bytes. A single row may be larger.
    """

    def __init__(self, schema: pa.Schema, layouts: Sequence[RowLayout], nbytes: int) -> None:
        self.schema = schema
        self._nbytes = nbytes
        self._fixed = _PAIR_BYTES + sum(layout.stride for layout in layouts)
        self._all_fixed = all(layout.heap < 0 for layout in layouts)

    @property
    def nbytes(self) -> int:
        """Largest size of a batch in bytes, unless a single row is larger."""
        return self.most_rows * self._fixed if self._all_fixed else self._nbytes

    @property
    def most_rows(self) -> int:
        """Most rows in a batch."""
        return max(1, min(self._nbytes // self._fixed, _MOST_ROWS))

    def batches(self, sources: Sequence[tuple[Rows, NDArray[np.int64]]]) -> Iterator[pa.RecordBatch]:
        """Yield result rows.

        Parameters
        ----------
        sources
            For each input in order, tuples and the position in them of each result row's tuple; -1 for nulls. All
            arrays of positions have one length.
        """
        total, start = len(sources[0][1]), 0
        ends = self._ends(sources)
        while start < total:
            stop = min(start + self.most_rows, total)
            if ends is not None:
                limit = self._nbytes + (int(ends[start - 1]) if start else 0)
                stop = min(stop, max(start + 1, int(np.searchsorted(ends, limit, side="right"))))
            yield self._batch([(rows, index[start:stop]) for rows, index in sources])
            start = stop

    def _batch(self, sources: Sequence[tuple[Rows, NDArray[np.int64]]]) -> pa.RecordBatch:
        columns = [column for rows, index in sources for column in gather_columns(rows, index)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _ends(self, sources: Sequence[tuple[Rows, NDArray[np.int64]]]) -> NDArray[np.int64] | None:
        """Return where each result row would end if they lay side by side; None if all have the same size."""
        sizes: NDArray[np.int64] | None = None
        for rows, index in sources:
            if rows.layout.heap < 0:
                continue
            if sizes is None:
                sizes = np.full(len(index), self._fixed, dtype=np.int64)
            kernels.add_heap_lengths(rows.records, rows.layout.stride, rows.layout.heap, rows.heap, index, sizes)
        return None if sizes is None else np.cumsum(sizes)
