"""`FixedRows`: columns of fixed width that a kernel fills row by row in one buffer, and that become Arrow arrays."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.format.columns import fixed_to_array, fixed_type
from headrace.storage.format.constants import SLACK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format.layout import PhysicalColumn

__all__ = ["FixedRows"]


class FixedRows:
    """Buffer for rows of some columns. Kernels know words, not columns: a decimal has two words.

    Parameters
    ----------
    columns
        Columns of fixed width.
    room
        Maximum number of rows.

    Attributes
    ----------
    entries : int64[words]
        Entries of the words in a leaf's directory.
    sizes, starts : int64[words]
        Bytes of a value of each word, and offset of its first value.
    out : uint8 array
        Values, with spare bytes after those of each word.
    valid : uint8[words, room]
        Filled with 1 for present values and 0 for nulls.
    missing : int64[words]
        Filled with the number of nulls.
    """

    def __init__(self, columns: Sequence[PhysicalColumn], room: int) -> None:
        self._columns = columns
        kinds = [(column, fixed_type(column.dtype)) for column in columns]
        self._types = [kind.dtype for column, kind in kinds if kind for _ in range(column.words)]
        self.entries: NDArray[np.int64] = np.array(
            [column.first + word for column in columns for word in range(column.words)], dtype=np.int64
        )
        self.sizes: NDArray[np.int64] = np.array([kind.itemsize for kind in self._types], dtype=np.int64)
        ends = list(accumulate((int(size) * room + SLACK for size in self.sizes), initial=0))
        self.starts: NDArray[np.int64] = np.array(ends[:-1], dtype=np.int64)
        self.out: NDArray[np.uint8] = np.empty(ends[-1], dtype=np.uint8)
        self.valid: NDArray[np.uint8] = np.empty((len(self.sizes), room), dtype=np.uint8)
        self.missing: NDArray[np.int64] = np.zeros(len(self.sizes), dtype=np.int64)

    def arrays(self, rows: int) -> list[pa.Array]:
        """Return the first rows of each column."""
        arrays, word = [], 0
        for column in self._columns:
            words = [self._word(at, rows) for at in range(word, word + column.words)]
            arrays.append(fixed_to_array(column.dtype, words, self.valid[word, :rows] if self.missing[word] else None))
            word += column.words
        return arrays

    def _word(self, at: int, rows: int) -> NDArray[np.int64]:
        start = int(self.starts[at])
        return self.out[start : start + int(self.sizes[at]) * rows].view(self._types[at])
