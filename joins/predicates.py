"""Which pairs of stream tuple and relation tuple join. Equality now; the interface leaves room for ranges of keys.

A predicate is what the user states. Bound to the relation's key and the stream's schema it turns a batch of stream
tuples into normalised keys; an operator locates, searches and buffers by those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pyarrow as pa

from joins.errors import JoinInputError, StreamSchemaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from storage.keys import KeyCodec, Keys

__all__ = ["BoundEquality", "Equality", "On", "Predicate", "as_predicate"]


@runtime_checkable
class Predicate(Protocol):
    """A condition between columns of the stream and key columns of the relation."""

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundEquality:
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

    pairs: tuple[tuple[str, str], ...]

    def check(self, key: Sequence[str]) -> None:
        """Refuse pairs that do not name each key column exactly once.

        Raises
        ------
        JoinInputError
            With the relation's key columns in the message.
        """
        named = sorted(column for _, column in self.pairs)
        if named != sorted(key):
            raise JoinInputError(
                f"`on` must name each key column of the table once; the key is {', '.join(map(repr, key))}, "
                f"`on` names {', '.join(map(repr, named)) or 'none'}"
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
        self.check(codec.columns)
        by_key = {column: name for name, column in self.pairs}
        names = [by_key[column] for column in codec.columns]
        for name in names:
            if len(stream.get_all_field_indices(name)) != 1:
                raise StreamSchemaError(
                    f"the stream must have one column {name!r}; its columns are {', '.join(map(repr, stream.names))}"
                )
        codec.encode_stream([pa.array([], stream.field(name).type) for name in names], names)
        return BoundEquality(codec, tuple(stream.get_field_index(name) for name in names))


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

    def encode(self, batch: pa.RecordBatch) -> tuple[Keys, NDArray[np.bool_] | None]:
        """Return the keys that the tuples look for, and which tuples can match at all (None: every one)."""
        return self.codec.encode_stream([batch.column(column) for column in self.columns])


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
        return Equality(tuple(_pair(item) for item in on))
    if not isinstance(on, Predicate):
        raise JoinInputError(_refusal(on))
    return on


def _pair(item: object) -> tuple[str, str]:
    match item:
        case str():
            return item, item
        case str() as stream, str() as key:
            return stream, key
    raise JoinInputError(_refusal(item))


def _refusal(given: object) -> str:
    return f"`on` takes column names and (stream column, key column) pairs, not {given!r}"
