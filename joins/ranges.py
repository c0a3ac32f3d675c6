"""Predicates of ranges: the key near a value of the stream, between two of them, or the nearest one before or after.

A relation's rows in key order are what makes them cheap (the SSIJ paper's section III: range conditions). So the key
column that they range over comes right after those that have to be equal, in the table's key; key columns behind it may
have any value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from headrace.joins._bound_ranges import BoundRanges, End
from headrace.joins.errors import JoinInputError
from headrace.joins.offsets import Offset, ticks
from headrace.joins.predicates import Pairs, as_pairs, stream_column
from headrace.storage.format import is_bytes, scale_of

if TYPE_CHECKING:
    from fractions import Fraction

    from headrace.joins._sought import Nearest
    from headrace.storage.format import KeyCodec

__all__ = ["AsOf", "Band", "Range"]

_STRICT = {"both": (False, False), "left": (False, True), "right": (True, False), "neither": (True, True)}
_NEAREST: dict[str, Nearest] = {"backward": "last", "forward": "first"}

By = str | Sequence[str | tuple[str, str]]


class _Ranging:
    """What the predicates share."""

    key_column: str
    by: By

    @property
    def equated(self) -> tuple[str, ...]:
        """Key columns that equal a stream column."""
        return tuple(key for _, key in as_pairs(self.by))


@dataclass(frozen=True)
class Band(_Ranging):
    """The key lies from so much below a value of the stream to so much above it, both included.

    Parameters
    ----------
    stream_column, key_column
        Their names; numbers, dates, times, timestamps or durations. The types may differ in width, unit and scale.
    below, above
        How far: whole numbers (of the key column's unit; days for a date), decimals, or for times also
        `datetime.timedelta`, `numpy.timedelta64` or text such as ``"5s"``. A negative one moves that end beyond the
        value. Ends beyond what the key's type can hold stop at its end.
    by
        Columns to be equal besides: names that both sides share, or ``(stream column, key column)`` pairs. They are
        the key columns before `key_column`.

    Examples
    --------
    >>> import pyarrow as pa, tempfile
    >>> from headrace.joins import SSIJ
    >>> from headrace.storage import Table
    >>> folder = tempfile.TemporaryDirectory()
    >>> weights = pa.table({"mass": [90, 100, 108, 120], "name": [*"abcd"]})
    >>> table = Table.build(f"{folder.name}/weights", weights, key=["mass"])
    >>> join = SSIJ(table, on=Band("seen", "mass", below=10, above=8))
    >>> results = [*join.push(pa.record_batch({"seen": [100]})), *join.finish()]
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
            raise JoinInputError(f"a band from {self.below!r} below to {self.above!r} above holds nothing; swap them")

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundRanges:
        """Resolve names and types against a stream."""
        below, above = self._offsets(_ranged_type(self, codec))
        column = stream_column(stream, self.stream_column)
        return _bound(self, codec, stream, End(column, below), End(column, above))

    def _offsets(self, dtype: pa.DataType) -> tuple[Fraction, Fraction]:
        return -ticks(self.below, dtype, "below"), ticks(self.above, dtype, "above")


@dataclass(frozen=True)
class Range(_Ranging):
    """The key lies between two values of the stream. A null or an end above the other matches nothing.

    Parameters
    ----------
    low_column, high_column
        Of the stream.
    key_column
        Of the relation; text, too.
    by
        As of `Band`.
    inclusive
        Which ends are part of the range: ``"both"``, ``"left"`` (the low one), ``"right"`` or ``"neither"``.

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
            raise JoinInputError(f"`inclusive` is {' or '.join(map(repr, _STRICT))}, not {self.inclusive!r}")

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundRanges:
        """Resolve names and types against a stream."""
        self.check(codec)
        low, high = _STRICT[self.inclusive]
        bottom = End(stream_column(stream, self.low_column), strict=low)
        top = End(stream_column(stream, self.high_column), strict=high)
        return _bound(self, codec, stream, bottom, top)


@dataclass(frozen=True)
class AsOf(_Ranging):
    """The one row whose key is nearest to a value of the stream: the last not after it, or the first not before it.

    Of several rows with that key the last one in the table is taken backward and the first one forward.

    Parameters
    ----------
    stream_column, key_column
        As of `Band`.
    by
        As of `Band`; ``["symbol"]`` for prices whose key is symbol and time.
    direction
        ``"backward"``, or ``"forward"``.
    tolerance
        How far the row may lie from the value, as `Band.below`; None for any distance.
    strict
        Whether the row must lie before (or after) the value, not at it.

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
            raise JoinInputError(f"`direction` is {' or '.join(map(repr, _NEAREST))}, not {self.direction!r}")
        reach = self._reach(_ranged_type(self, codec))
        if reach is not None and reach < 0:
            raise JoinInputError(f"`tolerance` is how far a row may lie, not {self.tolerance!r}; give nothing for any")

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
        If the key is not made of the columns to be equal, that one, and others.
    """
    before, name = predicate.equated, predicate.key_column
    columns, place = codec.columns, len(predicate.equated)
    if set(columns[:place]) != set(before) or columns[place : place + 1] != (name,):
        raise JoinInputError(
            f"{type(predicate).__name__} needs a table whose key begins with the columns of `by` and goes on with "
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
            f"{type(predicate).__name__} cannot leave the text of key column {behind[0]!r} open, which comes after "
            f"{name!r}; build the table with a key that ends before it"
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
