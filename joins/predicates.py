"""Which pairs of stream tuple and relation tuple join: what all predicates are, and equality. `ranges` has the others.

A predicate is what the user states. Bound to the relation's key and the stream's schema it turns a batch of stream
tuples into normalised keys, or ranges of keys; an operator locates, searches and buffers by those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pyarrow as pa

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.storage.format import KeyWords, key_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.joins._sought import Sought
    from headrace.storage.format import KeyCodec, Keys

__all__ = [
    "Bound",
    "BoundEquality",
    "Equality",
    "On",
    "Pairs",
    "Predicate",
    "as_pairs",
    "as_predicate",
    "stream_column",
]

Pairs = tuple[tuple[str, str], ...]


class Bound(Protocol):
    """A predicate whose columns are resolved."""

    @property
    def keys_per_tuple(self) -> int:
        """How many normalised keys there are for each tuple."""
        ...

    @property
    def step(self) -> int:
        """From a leaf that cannot tell which row is nearest to the one that can: -1 or 1; 0 if every leaf can tell."""
        ...

    def at_most_one(self, *, unique: bool) -> bool:
        """Whether a tuple has one match at most, in a relation whose keys are unique or not."""
        ...

    def encode(self, batch: pa.RecordBatch) -> tuple[Sought, NDArray[np.bool_] | None]:
        """Return what the tuples look for, and which tuples can match at all (None: every one)."""
        ...


@runtime_checkable
class Predicate(Protocol):
    """A condition between columns of the stream and key columns of the relation."""

    @property
    def equated(self) -> tuple[str, ...]:
        """Key columns that equal a stream column, so that results need not repeat them."""
        ...

    def check(self, codec: KeyCodec) -> None:
        """Refuse what cannot be joined with a table of this key, before the stream is known."""
        ...

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> Bound:
        """Resolve names and types, before the first row is touched."""
        ...


On = str | Sequence[str | tuple[str, str]] | Predicate


@dataclass(frozen=True)
class Equality:
    """Stream columns equal key columns, one by one. Null never equals anything.

    Parameters
    ----------
    pairs
        ``(stream column, key column)``, in any order; together they name every key column of the relation once.

    Examples
    --------
    >>> Equality((("tailnum", "plane"),))
    Equality(pairs=(('tailnum', 'plane'),))
    """

    pairs: Pairs

    @property
    def equated(self) -> tuple[str, ...]:
        """Key columns that equal a stream column: all of them."""
        return tuple(key for _, key in self.pairs)

    def check(self, codec: KeyCodec) -> None:
        """Refuse pairs that do not name each key column exactly once.

        Raises
        ------
        JoinInputError
            With the relation's key columns in the message.
        """
        named = sorted(self.equated)
        if named != sorted(codec.columns):
            raise JoinInputError(
                f"`on` must name each key column of the table once; the key is {', '.join(map(repr, codec.columns))}, "
                f"`on` names {', '.join(map(repr, named)) or 'none'}; columns of other names are paired with it: "
                "(stream column, key column)"
            )

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundEquality:
        """Resolve names and types against a stream.

        Raises
        ------
        StreamSchemaError
            If the stream lacks a column, or has it twice.
        KeyInputError
            If the types are such that no value of one could equal one of the other.
        """
        self.check(codec)
        by_key = {column: name for name, column in self.pairs}
        names = [by_key[column] for column in codec.columns]
        columns = tuple(stream_column(stream, name) for name in names)
        codec.encode_stream([pa.array([], stream.field(name).type) for name in names], names)
        return BoundEquality(codec, columns)


@dataclass(frozen=True)
class BoundEquality:
    """An equality whose columns are resolved.

    Attributes
    ----------
    codec
        Of the relation's key.
    columns
        Positions of the join columns in the stream, in key order.
    """

    codec: KeyCodec
    columns: tuple[int, ...]

    keys_per_tuple = 1
    step = 0

    def at_most_one(self, *, unique: bool) -> bool:
        """Whether a tuple has one match at most: where the relation's keys are unique."""
        return unique

    def encode(self, batch: pa.RecordBatch) -> tuple[Keys, NDArray[np.bool_] | None]:
        """Return the keys that the tuples look for, and which tuples can match at all (None: every one)."""
        return self.codec.encode_stream([batch.column(column) for column in self.columns])

    def words(self, batch: pa.RecordBatch) -> KeyWords:
        """Return the keys that the tuples look for where these are one word each."""
        return key_words(self.codec, [batch.column(column) for column in self.columns])


def as_predicate(on: On) -> Predicate:
    """Return the predicate that `on` states in one of its short forms.

    Parameters
    ----------
    on
        A predicate; a column name that both sides share; or a list of names and ``(stream column, key column)`` pairs.

    Raises
    ------
    JoinInputError
        If it is something else.

    Examples
    --------
    >>> as_predicate(["year", ("tailnum", "plane")])
    Equality(pairs=(('year', 'year'), ('tailnum', 'plane')))
    """
    if isinstance(on, str):
        return Equality(((on, on),))
    if isinstance(on, Sequence):
        return Equality(as_pairs(on))
    if isinstance(on, type) or not isinstance(on, Predicate):
        raise JoinInputError(_refusal(on))
    return on


def as_pairs(columns: str | Sequence[str | tuple[str, str]]) -> Pairs:
    """Return ``(stream column, key column)`` pairs; a name alone stands for both.

    Raises
    ------
    JoinInputError
        If it is no sequence, or something in it is neither a name nor a pair of names.
    """
    if not isinstance(columns, Sequence):
        raise JoinInputError(_refusal(columns))
    return tuple(_pair(item) for item in ((columns,) if isinstance(columns, str) else columns))


def stream_column(stream: pa.Schema, name: str) -> int:
    """Return the position of a column of the stream.

    Raises
    ------
    StreamSchemaError
        If the stream lacks it, or has it twice.
    """
    if not isinstance(name, str) or len(stream.get_all_field_indices(name)) != 1:
        raise StreamSchemaError(
            f"the stream must have one column {name!r}; its columns are {', '.join(map(repr, stream.names))}"
        )
    return int(stream.get_field_index(name))


def _pair(item: object) -> tuple[str, str]:
    match item:
        case str():
            return item, item
        case str() as stream, str() as key:
            return stream, key
    raise JoinInputError(_refusal(item))


def _refusal(given: object) -> str:
    return f"`on` takes column names and (stream column, key column) pairs, not {given!r}"
