"""Equality of stream columns and key columns, and the short forms in which users state it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.joins.errors import JoinInputError
from headrace.joins.predicates.base import Pairs, Predicate, as_pairs, refusal, stream_column
from headrace.storage.errors import nearest
from headrace.storage.format import KeyWords, key_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.storage.format import KeyCodec, Keys

__all__ = ["BoundEquality", "Equality", "On", "as_predicate"]

On = str | Sequence[str | tuple[str, str]] | Predicate


@dataclass(frozen=True)
class Equality:
    """Stream columns equal key columns, pairwise. Null never equals anything.

    Parameters
    ----------
    pairs
        ``(stream column, key column)`` pairs in any order. Together they name every key column of the relation once.

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
            Names the relation's key columns.
        """
        named = sorted(self.equated)
        unknown = [key for key in named if key not in codec.columns]
        if len(named) == len(codec.columns) and unknown:
            raise JoinInputError(
                f"the table has no key column {unknown[0]!r}{nearest(unknown[0], codec.columns)}; the key is "
                f"{', '.join(map(repr, codec.columns))}; pair columns of different names as (stream column, key column)"
            )
        if named != sorted(codec.columns):
            raise JoinInputError(
                f"`on` must name each key column of the table once; the key is {', '.join(map(repr, codec.columns))}, "
                f"`on` names {', '.join(map(repr, named)) or 'none'}; pair columns of different names as "
                "(stream column, key column)"
            )

    def bind(self, codec: KeyCodec, stream: pa.Schema) -> BoundEquality:
        """Resolve names and types against a stream.

        Raises
        ------
        StreamSchemaError
            If the stream lacks a column, or has it twice.
        KeyInputError
            If no value of a stream column's type can equal one of its key column's type.
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
        Codec of the relation's key.
    columns
        Positions of the join columns in the stream, in key order.
    """

    codec: KeyCodec
    columns: tuple[int, ...]

    keys_per_tuple = 1
    step = 0

    def at_most_one(self, *, unique: bool) -> bool:
        """Return whether a tuple has at most one match: whether the relation's keys are unique."""
        return unique

    def encode(self, batch: pa.RecordBatch) -> tuple[Keys, NDArray[np.bool_] | None]:
        """Return the keys that the tuples search for, and which tuples can match at all (None: all of them)."""
        return self.codec.encode_stream([batch.column(column) for column in self.columns])

    def words(self, batch: pa.RecordBatch) -> KeyWords:
        """Return the keys that the tuples search for, for relations whose keys are one word each."""
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
        If `on` is something else.

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
        raise JoinInputError(refusal(on))
    return on
