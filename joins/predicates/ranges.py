"""Range predicates: the key near a value of the stream, between two of them, or the nearest one before or after.

The relation's key order makes them cheap (the SSIJ paper's section III). So the key column that they range over must
come right after those that have to be equal; key columns behind it may have any value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.joins.errors import JoinInputError
from headrace.joins.predicates.base import Pairs, as_pairs, stream_column
from headrace.joins.predicates.offsets import Offset, ticks
from headrace.joins.predicates.search_keys import KeyRanges, NearestWords
from headrace.storage.format import coerce, extreme, fixed_type, high_bound, is_bytes, low_bound, scale_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.joins.predicates.search_keys import Nearest
    from headrace.storage.format import Coerced, KeyCodec


__all__ = ["AsOf", "Band", "BoundRanges", "End", "Range"]

_NO_WORDS = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a range.

    Attributes
    ----------
    column
        Position of a column in the stream.
    offset
        Added to the column's values, in whole steps of the key column.
    strict
        Whether the end itself is excluded.
    """

    column: int
    offset: Fraction = Fraction(0)
    strict: bool = False


@dataclass(frozen=True)
class BoundRanges:
    """A range predicate whose columns are resolved.

    Attributes
    ----------
    codec
        Codec of the relation's key.
    columns
        Positions in the stream of the columns that have to be equal, in key order. The next key column is ranged over.
    low, high
        Ends of the range; None if it is open.
    nearest
        Which row of the range is wanted; None for all of them.
    """

    codec: KeyCodec
    columns: tuple[int, ...]
    low: End | None
    high: End | None
    nearest: Nearest | None = None

    keys_per_tuple = 2

    def at_most_one(self, *, unique: bool) -> bool:
        """Return whether a tuple has at most one match."""
        del unique
        return self.nearest is not None

    @property
    def step(self) -> int:
        """Leaves to move on by if a leaf cannot decide which row is nearest: -1 or 1; 0 if all rows are wanted."""
        return 0 if self.nearest is None else -1 if self.nearest == "last" else 1

    def encode(self, batch: pa.RecordBatch) -> tuple[KeyRanges, NDArray[np.bool_] | None]:
        """Return the ranges that the tuples search for, and which tuples can match at all (None: all of them)."""
        equal = self._equal(batch)
        low, high = self._end(batch, self.low, greatest=False), self._end(batch, self.high, greatest=True)
        valid = _all_of([*(fits for _, fits in equal), low[1], high[1], _ordered(low[0], high[0])])
        before = [array for array, _ in equal]
        closed = self.high is None or not self.high.strict or not is_bytes(self._ranged)
        bottom = self.codec.pack([*before, low[0], *self._behind(len(batch), greatest=False)])
        top = self.codec.pack([*before, high[0], *self._behind(len(batch), greatest=closed)])
        return KeyRanges(bottom, top, closed, self.nearest), valid

    def nearest_words(self, batch: pa.RecordBatch) -> NearestWords:
        """Return the keys that the tuples search the nearest row of, for relations whose keys are one word each."""
        last = self.nearest == "last"
        near, far = (self.high, self.low) if last else (self.low, self.high)
        assert near is not None
        if far is not None:
            ranges, valid = self.encode(batch)
            ends = (ranges.high.prefix, ranges.low.prefix) if last else (ranges.low.prefix, ranges.high.prefix)
            return NearestWords(*ends, np.uint64(0), last, valid)
        equal = self._equal(batch)
        bound, fits = self._end(batch, near, greatest=last)
        arrays = [*(array for array, _ in equal), bound, *self._behind(len(batch), greatest=last)]
        valid = _all_of([*(flags for _, flags in equal), fits])
        bits = 8 * sum(fixed.width for dtype in self.codec.types[len(self.columns) :] if (fixed := fixed_type(dtype)))
        return NearestWords(self.codec.pack(arrays).prefix, _NO_WORDS, np.uint64((1 << bits) - 1), last, valid)

    def _equal(self, batch: pa.RecordBatch) -> list[Coerced]:
        """Return the stream columns that have to be equal, in key order and of the key's types."""
        return [
            coerce(batch.column(column), dtype, batch.schema.names[column])
            for column, dtype in zip(self.columns, self.codec.types, strict=False)
        ]

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
        """Return the extremes of the key columns behind the ranged one."""
        return [extreme(dtype, rows, greatest=greatest) for dtype in self.codec.types[len(self.columns) + 1 :]]


def _ordered(low: pa.Array, high: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.less_equal(low, high).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _all_of(flags: list[NDArray[np.bool_] | None]) -> NDArray[np.bool_] | None:
    given = [flag for flag in flags if flag is not None and not flag.all()]
    return np.logical_and.reduce(given) if given else None


_STRICT = {"both": (False, False), "left": (False, True), "right": (True, False), "neither": (True, True)}
_NEAREST: dict[str, Nearest] = {"backward": "last", "forward": "first"}

By = str | Sequence[str | tuple[str, str]]


class _Ranging:
    """Members that all range predicates share."""

    key_column: str
    by: By

    @property
    def equated(self) -> tuple[str, ...]:
        """Key columns that equal a stream column."""
        return tuple(key for _, key in as_pairs(self.by))


@dataclass(frozen=True)
class Band(_Ranging):
    """The key lies in a band around a value of the stream, both ends included.

    Parameters
    ----------
    stream_column, key_column
        Names of a stream column and a key column of numbers, dates, times, timestamps, or durations. The types may
        differ in width, unit, and scale.
    below, above
        Width of the band on each side: whole numbers (of the key column's unit; days for a date), decimals, or for
        times also `datetime.timedelta`, `numpy.timedelta64` or text such as ``"5s"``. A negative width moves that end
        past the value. Ends beyond the range of the key's type stop at its limit.
    by
        Columns that have to be equal too: names that both sides share, or ``(stream column, key column)`` pairs. They
        are the key columns before `key_column`.

    Examples
    --------
    >>> import pyarrow as pa, tempfile
    >>> from headrace.joins import SSIJ
    >>> from headrace.storage import Table
    >>> folder = tempfile.TemporaryDirectory()
    >>> weights = pa.table({"mass": [90, 100, 108, 120], "name": [*"abcd"]})
    >>> table = Table.build(f"{folder.name}/weights", weights, key=["mass"])
    >>> with SSIJ(table, on=Band("seen", "mass", below=10, above=8)) as join:
    ...     results = [*join.push(pa.record_batch({"seen": [100]})), *join.finish()]
    >>> pa.Table.from_batches(results).to_pydict()
    {'seen': [100, 100, 100], 'mass': [90, 100, 108], 'name': ['a', 'b', 'c']}
    >>> table.close()
    >>> folder.cleanup()
    """

    stream_column: str
    key_column: str
    below: Offset
    above: Offset
    by: By = ()

    def check(self, codec: KeyCodec) -> None:
        """Refuse what cannot be joined with a table of this key."""
        below, above = self._offsets(_ranged_type(self, codec))
        if below > above:
            raise JoinInputError(
                f"a band from {self.below!r} below to {self.above!r} above is empty; swap them and change their signs"
            )

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundRanges:
        """Resolve names and types against a stream."""
        below, above = self._offsets(_ranged_type(self, codec))
        column = stream_column(stream, self.stream_column)
        return _bound(self, codec, stream, End(column, below), End(column, above))

    def _offsets(self, dtype: pa.DataType) -> tuple[Fraction, Fraction]:
        return -ticks(self.below, dtype, "below"), ticks(self.above, dtype, "above")


@dataclass(frozen=True)
class Range(_Ranging):
    """The key lies between two values of the stream. A null, or a low end above the high end, matches nothing.

    Parameters
    ----------
    low_column, high_column
        Stream columns of the two ends.
    key_column
        Key column of the relation; text is allowed.
    by
        Columns that have to be equal too, as for `Band`.
    inclusive
        Ends that belong to the range: ``"both"``, ``"left"`` (the low one), ``"right"`` or ``"neither"``.

    Examples
    --------
    >>> Range("began", "ended", "time", by=[("sensor", "device")])
    Range(low_column='began', high_column='ended', key_column='time', by=[('sensor', 'device')], inclusive='both')
    """

    low_column: str
    high_column: str
    key_column: str
    by: By = ()
    inclusive: Literal["both", "left", "right", "neither"] = "both"

    def check(self, codec: KeyCodec) -> None:
        """Refuse what cannot be joined with a table of this key."""
        _ranged_type(self, codec, text=True)
        if self.inclusive not in tuple(_STRICT):
            raise JoinInputError(f"`inclusive` must be {' or '.join(map(repr, _STRICT))}, not {self.inclusive!r}")

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundRanges:
        """Resolve names and types against a stream."""
        self.check(codec)
        low, high = _STRICT[self.inclusive]
        bottom = End(stream_column(stream, self.low_column), strict=low)
        top = End(stream_column(stream, self.high_column), strict=high)
        return _bound(self, codec, stream, bottom, top)


@dataclass(frozen=True)
class AsOf(_Ranging):
    """The one row whose key is nearest to a value of the stream: the last at or before it, or the first at or after it.

    Among several rows with that key, the last one in the table is taken backward and the first one forward.

    Parameters
    ----------
    stream_column, key_column
        Stream column and key column, as for `Band`.
    by
        Columns that have to be equal too, as for `Band`; ``["symbol"]`` for prices whose key is symbol and time.
    direction
        ``"backward"`` or ``"forward"``.
    tolerance
        Greatest distance of the row from the value, as `Band.below`; None for any distance.
    strict
        Whether the row must lie strictly before (or after) the value.

    Examples
    --------
    >>> import pyarrow as pa, tempfile
    >>> from headrace.joins import SSIJ
    >>> from headrace.storage import Table
    >>> folder = tempfile.TemporaryDirectory()
    >>> prices = pa.table({"symbol": ["A", "A", "B"], "time": [10, 20, 15], "price": [1.0, 1.5, 7.0]})
    >>> table = Table.build(f"{folder.name}/prices", prices, key=["symbol", "time"], unique=True)
    >>> join = SSIJ(table, on=AsOf("at", "time", by=["symbol"]), how="left", columns=["price"])
    >>> trades = pa.record_batch({"symbol": ["A", "A", "B"], "at": [19, 20, 14]})
    >>> pa.Table.from_batches([*join.push(trades), *join.finish()]).sort_by("at").to_pydict()
    {'symbol': ['B', 'A', 'A'], 'at': [14, 19, 20], 'price': [None, 1.0, 1.5]}
    >>> join.close()
    >>> table.close()
    >>> folder.cleanup()
    """

    stream_column: str
    key_column: str
    by: By = ()
    direction: Literal["backward", "forward"] = "backward"
    tolerance: Offset | None = None
    strict: bool = False

    def check(self, codec: KeyCodec) -> None:
        """Refuse what cannot be joined with a table of this key."""
        if self.direction not in tuple(_NEAREST):
            raise JoinInputError(f"`direction` must be {' or '.join(map(repr, _NEAREST))}, not {self.direction!r}")
        reach = self._reach(_ranged_type(self, codec))
        if reach is not None and reach < 0:
            raise JoinInputError(
                f"`tolerance` must not be negative, but is {self.tolerance!r}; leave it out for any distance"
            )

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundRanges:
        """Resolve names and types against a stream."""
        self.check(codec)
        column, reach = stream_column(stream, self.stream_column), self._reach(_ranged_type(self, codec))
        backward = self.direction == "backward"
        near = End(column, strict=self.strict)
        far = None if reach is None else End(column, -reach if backward else reach)
        low, high = (far, near) if backward else (near, far)
        return _bound(self, codec, stream, low, high, _NEAREST[self.direction])

    def _reach(self, dtype: pa.DataType) -> Fraction | None:
        return None if self.tolerance is None else ticks(self.tolerance, dtype, "tolerance")


def _ranged_type(predicate: _Ranging, codec: KeyCodec, *, text: bool = False) -> pa.DataType:
    """Return the type of the key column that a predicate ranges over.

    Raises
    ------
    JoinInputError
        If the key does not begin with the columns of `by`, followed by that column.
    """
    before, name = predicate.equated, predicate.key_column
    columns, place = codec.columns, len(predicate.equated)
    if set(columns[:place]) != set(before) or columns[place : place + 1] != (name,):
        raise JoinInputError(
            f"{type(predicate).__name__} needs a table whose key begins with the columns of `by` and continues with "
            f"{name!r}; the key is {', '.join(map(repr, columns))}, `by` names {', '.join(map(repr, before)) or 'none'}"
        )
    dtype = codec.types[place]
    if scale_of(dtype) is None and not (text and is_bytes(dtype)):
        raise JoinInputError(
            f"{type(predicate).__name__} cannot range over {name!r} of type {dtype}; it takes integers, decimals of up "
            f"to 18 digits, dates, times, timestamps and durations{', text and binary' if text else ''}"
        )
    behind = [column for column, other in zip(columns, codec.types, strict=True) if is_bytes(other)][-1:]
    if any(is_bytes(other) for other in codec.types[place + 1 :]):
        raise JoinInputError(
            f"{type(predicate).__name__} cannot range over {name!r} with text behind it: "
            f"key column {behind[0]!r} is text; build the table with a key that ends before it"
        )
    return dtype


def _bound(
    predicate: _Ranging,
    codec: KeyCodec,
    stream: pa.Schema,
    low: End | None,
    high: End | None,
    nearest: Nearest | None = None,
) -> BoundRanges:
    pairs: Pairs = as_pairs(predicate.by)
    by_key = {key: name for name, key in pairs}
    columns = tuple(stream_column(stream, by_key[key]) for key in codec.columns[: len(pairs)])
    bound = BoundRanges(codec, columns, low, high, nearest)
    bound.encode(pa.RecordBatch.from_pylist([], stream))  # refuses types that have no order in common
    return bound
