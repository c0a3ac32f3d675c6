"""The predicate protocols: what the user states, and what it becomes once it is bound to a key and a stream.

A bound predicate turns a batch of stream tuples into normalized keys, or ranges of keys, to search for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.storage.errors import nearest

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.joins.predicates.search_keys import SearchKeys
    from headrace.storage.format import KeyCodec

__all__ = ["Bound", "Pairs", "Predicate", "as_pairs", "refusal", "stream_column"]

Pairs = tuple[tuple[str, str], ...]
"""``(stream column, key column)`` pairs."""


class Bound(Protocol):
    """A predicate whose columns are resolved."""

    @property
    def keys_per_tuple(self) -> int:
        """Number of normalized keys for each tuple."""
        ...

    @property
    def step(self) -> int:
        """Leaves to move on by if a leaf cannot decide which row is nearest: -1 or 1; 0 if every leaf can decide."""
        ...

    def at_most_one(self, *, unique: bool) -> bool:
        """Return whether a tuple has at most one match, in a relation whose keys are unique or not."""
        ...

    def encode(self, batch: pa.RecordBatch) -> tuple[SearchKeys, NDArray[np.bool_] | None]:
        """Return what the tuples search for, and which tuples can match at all (None: all of them)."""
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
        """Resolve names and types, before the first row arrives."""
        ...


def as_pairs(columns: str | Sequence[str | tuple[str, str]]) -> Pairs:
    """Return ``(stream column, key column)`` pairs. A single name stands for both columns.

    Raises
    ------
    JoinInputError
        If `columns` is not a sequence, or an item is neither a name nor a pair of names.
    """
    if not isinstance(columns, Sequence):
        raise JoinInputError(refusal(columns))
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
            f"the stream must have one column {name!r}{nearest(str(name), stream.names)}; its columns are "
            f"{', '.join(map(repr, stream.names))}"
        )
    return int(stream.get_field_index(name))


def _pair(item: object) -> tuple[str, str]:
    match item:
        case str():
            return item, item
        case str() as stream, str() as key:
            return stream, key
    raise JoinInputError(refusal(item))


def refusal(given: object) -> str:
    """Return the message about an `on` that cannot be used."""
    return f"`on` must be column names and (stream column, key column) pairs, not {given!r}"
