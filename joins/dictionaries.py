"""Dictionaries of stream columns: which of them Arrow can combine, and what those of waiting tuples take.

Rows taken from a batch share its dictionaries, so many chunks of tuples may hold one dictionary. Rows of several
batches that are put together get one dictionary with the values of all, unless theirs are equal.

Arrow (26) cannot combine dictionaries that hold nulls, nor those whose values exceed the type of the index: 127 for
int8 and 255 for uint8, one less than the type can number. It changes floats when it combines dictionaries of them: -0.0
becomes 0.0, and a float16 another number.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["HeldDictionaries", "WaitingDictionaries", "combinable", "combined_nbytes", "own_nbytes", "types_within"]

_WIDE = 32  # bits of an index that no dictionary exceeds
_FEW_NBYTES = 1 << 16
_Place: TypeAlias = tuple[int, ...]


class WaitingDictionaries:
    """Tells whether the next batch can be put together with those that wait.

    To look at all of them for every batch would take time that is quadratic in their number. So the values of narrow
    dictionaries are known from the last time, if they are few, and all are looked at again when as many batches have
    come since. Wide dictionaries matter only if they hold nulls.
    """

    def __init__(self) -> None:
        self._known: pa.RecordBatch | None = None
        self._most = 0
        self._nulls = False

    def admit(self, batch: pa.RecordBatch, waiting: Callable[[], Sequence[pa.RecordBatch]]) -> bool:
        """Return whether a batch can be put together with those that wait. If not, they must leave before it comes."""
        if not _columns(batch.schema):
            return True
        self._nulls = self._nulls or _has_nulls(batch)
        if self._known is not None and self._most > 0 and not self._nulls:
            both = [self._known, _narrow(batch)]
            if combinable(both):
                self._know(both, self._most - 1)
                return True
        others = waiting()
        admitted = combinable([*others, batch])
        those = [*others, batch] if admitted else [batch]
        self._nulls = any(map(_has_nulls, those))
        self._know([_narrow(rows) for rows in those], len(those))
        return admitted

    def _know(self, batches: Sequence[pa.RecordBatch], most: int) -> None:
        """Note the values of batches without rows, until `most` other batches have come."""
        known = pa.concat_batches(batches)
        self._known = known if known.nbytes <= _FEW_NBYTES else None
        self._most = most


class HeldDictionaries:
    """Dictionaries of the batches that are held, each counted once however many batches share it.

    Attributes
    ----------
    nbytes
        Bytes of all of them.
    """

    def __init__(self) -> None:
        self._uses: Counter[_Place] = Counter()
        self.nbytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Count the dictionaries of a batch."""
        for encoded in _encoded(rows):
            place = _place(encoded)
            self.nbytes += 0 if self._uses[place] else encoded.dictionary.nbytes
            self._uses[place] += 1

    def remove(self, rows: pa.RecordBatch) -> None:
        """Forget the dictionaries of a batch that was added."""
        for encoded in _encoded(rows):
            place = _place(encoded)
            self._uses[place] -= 1
            if not self._uses[place]:  # from here on another dictionary may lie there
                del self._uses[place]
                self.nbytes -= encoded.dictionary.nbytes

    def growth(self, rows: pa.RecordBatch) -> int:
        """Return how many bytes the dictionaries of a batch would add."""
        new = {_place(encoded): encoded.dictionary.nbytes for encoded in _encoded(rows)}
        return sum(nbytes for place, nbytes in new.items() if place not in self._uses)

    def clear(self) -> None:
        """Forget all."""
        self._uses.clear()
        self.nbytes = 0


def own_nbytes(rows: pa.RecordBatch) -> int:
    """Return the bytes of a batch without its dictionaries."""
    nbytes: int = rows.nbytes
    return nbytes - sum(encoded.dictionary.nbytes for encoded in _encoded(rows))


def combined_nbytes(batches: Sequence[pa.RecordBatch]) -> int:
    """Return the most bytes of the new dictionaries that rows of these batches get when they are put together."""
    return sum(
        sum(encoded.dictionary.nbytes for encoded in different)
        for different in _different(batches)
        if len(different) > 1
    )


def combinable(batches: Sequence[pa.RecordBatch]) -> bool:
    """Return whether Arrow can put rows of these batches, which have one schema, together."""
    for different in _different(batches):
        if len(different) > 1 and not _wide_without_nulls(different):
            try:
                pa.concat_arrays([encoded.slice(0, 0) for encoded in different])
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                return False
    return True


def types_within(dtype: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and the types in it, at any depth."""
    yield dtype
    if pa.types.is_dictionary(dtype):
        yield from types_within(dtype.value_type)
    elif isinstance(dtype, pa.BaseExtensionType):
        yield from types_within(dtype.storage_type)
    else:
        for at in range(dtype.num_fields):
            yield from types_within(dtype.field(at).type)


def _narrow(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of a batch with narrow dictionaries, without rows."""
    return rows.select(_narrow_columns(rows.schema)).slice(0, 0)


def _has_nulls(rows: pa.RecordBatch) -> bool:
    """Return whether any dictionary of a batch holds nulls."""
    return any(encoded.dictionary.null_count for encoded in _encoded(rows))


def _wide_without_nulls(dictionaries: list[pa.DictionaryArray]) -> bool:
    wide = dictionaries[0].type.index_type.bit_width >= _WIDE
    return wide and not any(encoded.dictionary.null_count for encoded in dictionaries)


def _different(batches: Sequence[pa.RecordBatch]) -> Iterator[list[pa.DictionaryArray]]:
    """Yield, for each dictionary column at any depth, arrays with all different dictionaries of the batches."""
    for column in zip(*map(_encoded, batches), strict=True):
        yield list({_place(encoded): encoded for encoded in column}.values())


def _place(encoded: pa.DictionaryArray) -> _Place:
    """Return where a dictionary lies in memory."""
    dictionary = encoded.dictionary
    buffers = (buffer.address for buffer in dictionary.buffers() if buffer is not None)
    return (dictionary.offset, len(dictionary), *buffers)


@lru_cache(maxsize=64)
def _columns(schema: pa.Schema) -> tuple[int, ...]:
    """Return which columns hold dictionaries."""
    return tuple(at for at, field in enumerate(schema) if any(map(pa.types.is_dictionary, types_within(field.type))))


@lru_cache(maxsize=64)
def _narrow_columns(schema: pa.Schema) -> list[int]:
    """Return which columns hold narrow dictionaries."""
    return [at for at in _columns(schema) if any(map(_is_narrow, types_within(schema.field(at).type)))]


def _is_narrow(dtype: pa.DataType) -> bool:
    return pa.types.is_dictionary(dtype) and dtype.index_type.bit_width < _WIDE


def _encoded(rows: pa.RecordBatch) -> Iterator[pa.DictionaryArray]:
    """Yield the arrays of a batch that have dictionaries, in the order of the columns."""
    return chain.from_iterable(_within(rows.column(at)) for at in _columns(rows.schema))


def _within(array: pa.Array) -> Iterator[pa.DictionaryArray]:
    dtype = array.type
    if pa.types.is_dictionary(dtype):
        yield array
    elif isinstance(dtype, pa.BaseExtensionType):
        yield from _within(array.storage)
    elif pa.types.is_struct(dtype) or pa.types.is_union(dtype):
        for at in range(dtype.num_fields):
            yield from _within(array.field(at))
    elif pa.types.is_nested(dtype):
        yield from _within(array.values)
