"""From stream tuples to ranges of normalised keys: what band, range and as-of predicates become once they are bound."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.joins._sought import KeyRanges
from headrace.storage.format import coerce, extreme, high_bound, is_bytes, low_bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins._sought import Nearest
    from headrace.storage.format import Coerced, KeyCodec

__all__ = ["BoundRanges", "End"]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a range.

    Attributes
    ----------
    column
        Position of a column in the stream.
    offset
        Added to its values, in whole numbers of the key column.
    strict
        Whether the end is left out.
    """

    column: int
    offset: Fraction = Fraction(0)
    strict: bool = False


@dataclass(frozen=True)
class BoundRanges:
    """A predicate of ranges whose columns are resolved.

    Attributes
    ----------
    codec
        Of the relation's key.
    columns
        Positions in the stream of the columns to be equal, in key order. The key column after them is ranged over.
    low, high
        The ends; None for none.
    nearest
        Which row of the range alone is wanted; None for all.
    """

    codec: KeyCodec
    columns: tuple[int, ...]
    low: End | None
    high: End | None
    nearest: Nearest | None = None

    keys_per_tuple = 2

    def at_most_one(self, *, unique: bool) -> bool:
        """Whether a tuple has one match at most, in a relation whose keys are unique or not."""
        del unique
        return self.nearest is not None

    @property
    def step(self) -> int:
        """From a leaf that cannot tell which row is nearest to the one that can; 0 where all rows are wanted."""
        return 0 if self.nearest is None else -1 if self.nearest == "last" else 1

    def encode(self, batch: pa.RecordBatch) -> tuple[KeyRanges, NDArray[np.bool_] | None]:
        """Return the ranges that the tuples look for, and which tuples can match at all (None: every one)."""
        equal = [
            coerce(batch.column(column), dtype, batch.schema.names[column])
            for column, dtype in zip(self.columns, self.codec.types, strict=False)
        ]
        low, high = self._end(batch, self.low, greatest=False), self._end(batch, self.high, greatest=True)
        valid = _all_of([*(fits for _, fits in equal), low[1], high[1], _ordered(low[0], high[0])])
        before = [array for array, _ in equal]
        closed = self.high is None or not self.high.strict or not is_bytes(self._ranged)
        bottom = self.codec.pack([*before, low[0], *self._behind(len(batch), greatest=False)])
        top = self.codec.pack([*before, high[0], *self._behind(len(batch), greatest=closed)])
        return KeyRanges(bottom, top, closed, self.nearest), valid

    @property
    def _ranged(self) -> pa.DataType:
        return self.codec.types[len(self.columns)]

    def _end(self, batch: pa.RecordBatch, end: End | None, *, greatest: bool) -> Coerced:
        if end is None:
            return extreme(self._ranged, len(batch), greatest=greatest), None
        bound = high_bound if greatest else low_bound
        name = batch.schema.names[end.column]
        return bound(batch.column(end.column), self._ranged, name, end.offset, strict=end.strict)

    def _behind(self, rows: int, *, greatest: bool) -> list[pa.Array]:
        """Return the ends of the key columns that may have any value."""
        return [extreme(dtype, rows, greatest=greatest) for dtype in self.codec.types[len(self.columns) + 1 :]]


def _ordered(low: pa.Array, high: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.less_equal(low, high).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _all_of(flags: list[NDArray[np.bool_] | None]) -> NDArray[np.bool_] | None:
    given = [flag for flag in flags if flag is not None and not flag.all()]
    return np.logical_and.reduce(given) if given else None
