"""Key columns as normalized keys whose byte order is the order of the rows. Knows nothing about pages or files.

Two kinds: keys of fixed-width columns that take at most eight bytes together are one unsigned integer each ("u64");
all others are strings of bytes ("bytes"). Signed numbers have their sign bit flipped, columns follow each other most
significant first, and text that is not the last column is escaped so that no two keys collide by concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.storage.errors import KeyInputError, SchemaError, nearest
from headrace.storage.format import _key_kernels as kernels
from headrace.storage.format._key_kernels import KeyParts
from headrace.storage.format.coercion import coerce, shown
from headrace.storage.format.columns import (
    FixedType,
    bytes_of,
    fixed_to_array,
    fixed_type,
    fixed_values,
    is_bytes,
    text_to_array,
)
from headrace.storage.format.constants import SIGN, WORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["KeyCodec", "KeyWords", "Keys", "Kind", "key_words", "stable_order"]


Kind = Literal["u64", "bytes"]
KeySource: TypeAlias = pa.RecordBatch | pa.Table | Sequence[pa.Array | pa.ChunkedArray]

_SHOWN = 60
_NO_OFFSETS = np.zeros(1, dtype=np.int64)
_NO_DATA = np.zeros(1, dtype=np.uint8)
_ZERO = np.uint64(0)
_ALL_VALID = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Keys:
    """Normalized keys, one per row.

    Attributes
    ----------
    kind
        ``"u64"`` or ``"bytes"``.
    prefix : uint64[n]
        The key itself, or the first eight bytes of it as a big-endian number padded with zeros.
    offsets : int64[n + 1] or None
        Offsets in `data` at which the bytes of each key begin and end; they need not start at 0.
    data : uint8 array or None
    """

    kind: Kind
    prefix: NDArray[np.uint64]
    offsets: NDArray[np.int64] | None = None
    data: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.prefix)

    @property
    def wide(self) -> bool:
        """Whether keys go on beyond the prefix."""
        return self.kind == "bytes"

    @property
    def parts(self) -> KeyParts:
        """Prefix, offsets and data for kernels."""
        if self.offsets is None or self.data is None:
            return KeyParts(self.prefix, _NO_OFFSETS, _NO_DATA)
        return KeyParts(self.prefix, self.offsets, self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys; of a shared buffer, only those that they use."""
        if self.offsets is None:
            return self.prefix.nbytes
        return self.prefix.nbytes + self.offsets.nbytes + int(self.offsets[-1] - self.offsets[0])

    @classmethod
    def from_bytes(cls, offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> Keys:
        """Return byte keys with these offsets into these bytes."""
        return cls("bytes", kernels.prefixes(offsets, data), offsets, data)

    @classmethod
    def empty(cls, kind: Kind) -> Keys:
        """Return an empty array of keys."""
        if kind == "u64":
            return cls("u64", np.zeros(0, dtype=np.uint64))
        return cls("bytes", np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.uint8))

    @classmethod
    def lowest(cls, kind: Kind) -> Keys:
        """Return the lowest possible key."""
        if kind == "u64":
            return cls("u64", np.zeros(1, dtype=np.uint64))
        return cls.from_bytes(np.zeros(2, dtype=np.int64), np.zeros(0, dtype=np.uint8))

    @classmethod
    def concat(cls, parts: Sequence[Keys]) -> Keys:
        """Return the keys of all parts, in order. There must be at least one part."""
        prefix = np.concatenate([part.prefix for part in parts])
        if not parts[0].wide:
            return cls("u64", prefix)
        offsets, pieces, at = [np.zeros(1, dtype=np.int64)], [], 0
        for part in parts:
            _, ends, data = part.parts
            offsets.append(ends[1:] + (at - ends[0]))
            pieces.append(data[ends[0] : ends[-1]])
            at += int(ends[-1] - ends[0])
        return cls("bytes", prefix, np.concatenate(offsets), np.concatenate(pieces))

    def slice(self, start: int, stop: int) -> Keys:
        """Return the keys from `start` up to `stop`, sharing the bytes."""
        if self.offsets is None:
            return Keys(self.kind, self.prefix[start:stop])
        return Keys(self.kind, self.prefix[start:stop], self.offsets[start : stop + 1], self.data)

    def take(self, index: NDArray[np.integer]) -> Keys:
        """Return the keys at these positions."""
        prefix = self.prefix[index]
        if self.offsets is None or self.data is None:
            return Keys(self.kind, prefix)
        wanted = np.ascontiguousarray(index, dtype=np.int64)
        offsets = kernels.take_lengths(self.offsets, wanted)
        return Keys(self.kind, prefix, offsets, kernels.write_taken(self.offsets, self.data, wanted, offsets))

    def comparable(self, row: int) -> bytes:
        """Return one key as bytes that compare as keys do."""
        if self.offsets is None or self.data is None:
            return int(self.prefix[row]).to_bytes(WORD, "big")
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def argsort(self) -> NDArray[np.int64]:
        """Return the stable order of the keys."""
        return stable_order(self.prefix, exact=not self.wide, order_of=self._order_of)

    def _order_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.wide:
            return np.argsort(self.prefix[rows], kind="stable")
        order: NDArray[np.uint64] = pc.sort_indices(_as_binary(self.take(rows))).to_numpy()
        return order.astype(np.int64)

    def first_descent(self, *, strictly: bool = False) -> int:
        """Return the first position whose key is smaller than the one before it, or -1 if the keys are in order.

        Parameters
        ----------
        strictly
            Also stop where a key equals the one before it.
        """
        return int(kernels.first_descent(self.parts, self.wide, strictly)) if len(self) > 1 else -1

    def same_as_next(self) -> NDArray[np.bool_]:
        """Return bool[n - 1]: whether each key equals the one after it."""
        equal: NDArray[np.bool_] = kernels.same_as_next(self.parts, self.wide)
        return equal


def _as_binary(keys: Keys) -> pa.Array:
    _, offsets, data = keys.parts
    return pa.Array.from_buffers(pa.large_binary(), len(keys), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


class KeyCodec:
    """Turns key columns into normalized keys and back.

    Parameters
    ----------
    schema
        Schema of the table.
    columns
        Names of the key columns, most significant first.

    Raises
    ------
    SchemaError
        If there is no key column, one is missing or named twice, or its type cannot be a key.

    Examples
    --------
    >>> codec = KeyCodec(pa.schema([("a", pa.int32()), ("b", pa.int32())]), ("a", "b"))
    >>> keys = codec.encode([pa.array([1, -1], pa.int32()), pa.array([2, 2], pa.int32())])
    >>> codec.kind, keys.argsort().tolist()
    ('u64', [1, 0])
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self.types = _key_types(schema, self.columns)
        self._fixed = [fixed_type(dtype) for dtype in self.types]
        width = sum(WORD + 1 if fixed is None else fixed.width for fixed in self._fixed)
        self.kind: Kind = "u64" if width <= WORD else "bytes"

    def encode(self, source: KeySource) -> Keys:
        """Return the keys of rows to store.

        Parameters
        ----------
        source
            A batch or table that has the key columns by name, or the key columns in order.

        Raises
        ------
        KeyInputError
            If a key is null or does not fit the key column's type; the message names column and row.
        """
        arrays = []
        for name, column, dtype in zip(self.columns, self._columns_of(source), self.types, strict=True):
            array, valid = coerce(column, dtype, name)
            if valid is not None:
                row = int(np.argmin(valid))
                given = column.slice(row, 1)
                null = not given[0].is_valid
                cause = "is null, but a key never is" if null else f"is {shown(given)}, which {dtype} cannot hold"
                raise KeyInputError.of_row(row, partial("key column {!r} {} ({})".format, name, cause))
            arrays.append(array)
        return self.pack(arrays)

    def encode_stream(
        self, source: KeySource, names: Sequence[str] | None = None
    ) -> tuple[Keys, NDArray[np.bool_] | None]:
        """Return the keys of stream rows, and which of them can have a match.

        Parameters
        ----------
        source
            See `encode`.
        names
            Names of the columns in the source, for messages; by default those of the key.

        Returns
        -------
        keys
            Keys; those of rows that are not valid have arbitrary values.
        valid : bool[n] or None
            False for null keys and for values that the key column's type cannot hold; None if all are valid.

        Raises
        ------
        KeyInputError
            If no value of a column's type can ever equal a key.
        """
        arrays, valid = [], None
        for name, column, dtype in zip(names or self.columns, self._columns_of(source), self.types, strict=True):
            array, fits = coerce(column, dtype, name)
            arrays.append(array)
            if fits is not None:
                valid = fits if valid is None else valid & fits
        return self.pack(arrays), valid

    def decode(self, keys: Keys) -> list[pa.Array]:
        """Return the key columns of keys."""
        return self._unpack_u64(keys.prefix) if self.kind == "u64" else self._unpack_bytes(keys)

    def describe(self, keys: Keys, row: int) -> str:
        """Return one key as text, for messages."""
        values = [shown(array) for array in self.decode(keys.slice(row, row + 1))]
        values = [value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..." for value in values]
        return ", ".join(f"{name}={value}" for name, value in zip(self.columns, values, strict=True))

    def _columns_of(self, source: KeySource) -> list[pa.Array | pa.ChunkedArray]:
        if not isinstance(source, pa.RecordBatch | pa.Table):
            return list(source)
        names = source.schema.names
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise SchemaError(f"key column {missing[0]!r} is missing; the columns are {', '.join(map(repr, names))}")
        twice = [name for name in self.columns if names.count(name) > 1]
        if twice:
            raise SchemaError(f"key column {twice[0]!r} occurs more than once; give each key column once")
        return [source.column(name) for name in self.columns]

    def pack(self, arrays: Sequence[pa.Array]) -> Keys:
        """Return the keys of columns that have the key's types and no nulls."""
        if self.kind == "u64":
            return Keys("u64", self.pack_words([fixed_values(array)[0] for array in arrays]))
        if len(arrays) == 1 and self._fixed[0] is None:
            return Keys.from_bytes(*bytes_of(arrays[0]))
        return self._pack_bytes(arrays)

    def pack_words(self, columns: Sequence[NDArray[np.int64]]) -> NDArray[np.uint64]:
        """Return the keys of one word each whose columns have these values; see `columns.fixed_values`."""
        packed: NDArray[np.uint64] | None = None
        for values, fixed in zip(columns, self._fixed, strict=True):
            assert fixed is not None
            bits = _ordered(values, fixed)
            packed = bits if packed is None else (packed << np.uint64(8 * fixed.width)) | bits
        assert packed is not None
        return packed

    def _pack_bytes(self, arrays: Sequence[pa.Array]) -> Keys:
        rows = len(arrays[0])
        lengths = np.zeros(rows, dtype=np.int64)
        for position, (array, fixed) in enumerate(zip(arrays, self._fixed, strict=True)):
            if fixed is not None:
                lengths += fixed.width
            elif position < len(arrays) - 1:
                kernels.escaped_lengths(*bytes_of(array), lengths)
            else:
                lengths += np.diff(bytes_of(array)[0])
        offsets = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(offsets[-1], dtype=np.uint8)
        cursor = offsets[:-1].copy()
        for position, (array, fixed) in enumerate(zip(arrays, self._fixed, strict=True)):
            if fixed is None:
                kernels.append_bytes(data, cursor, *bytes_of(array), position < len(arrays) - 1)
                continue
            for words in _ordered_words(array, fixed):
                kernels.append_fixed(data, cursor, words, min(fixed.width, WORD))
        return Keys.from_bytes(offsets, data)

    def _unpack_u64(self, packed: NDArray[np.uint64]) -> list[pa.Array]:
        arrays = []
        for dtype, fixed in zip(reversed(self.types), reversed(self._fixed), strict=True):
            assert fixed is not None
            arrays.append(fixed_to_array(dtype, _unordered_words([packed], fixed)))
            if fixed.width < WORD:
                packed = packed >> np.uint64(8 * fixed.width)
        return arrays[::-1]

    def _unpack_bytes(self, keys: Keys) -> list[pa.Array]:
        _, offsets, data = keys.parts
        cursor, ends = offsets[:-1].copy(), offsets[1:]
        arrays = []
        for position, (dtype, fixed) in enumerate(zip(self.types, self._fixed, strict=True)):
            if fixed is not None:
                width = min(fixed.width, WORD)
                words = [kernels.read_fixed(data, cursor, width) for _ in range(fixed.words)]
                arrays.append(fixed_to_array(dtype, _unordered_words(words, fixed)))
                continue
            escape = position < len(self.types) - 1
            if escape:
                spans = kernels.unescaped_lengths(data, cursor, ends)
            else:
                spans = np.concatenate([_NO_OFFSETS, np.cumsum(ends - cursor)])
            arrays.append(text_to_array(dtype, spans, kernels.read_bytes(data, cursor, spans, escape)))
        return arrays


def _key_types(schema: pa.Schema, columns: tuple[str, ...]) -> list[pa.DataType]:
    if not columns or len(set(columns)) < len(columns):
        raise SchemaError(f"a key is one or more different columns, not {list(columns)}")
    types = []
    for name in columns:
        if name not in schema.names:
            raise SchemaError(
                f"there is no column {name!r}{nearest(str(name), schema.names)} for the key; the columns are "
                f"{', '.join(map(repr, schema.names))}"
            )
        dtype = schema.field(name).type
        if pa.types.is_floating(dtype) or not (fixed_type(dtype) or is_bytes(dtype)):
            raise SchemaError(
                f"column {name!r} has type {dtype}, which cannot be a key; keys are integers, decimals, dates, times, "
                "timestamps, booleans, strings or binary"
            )
        types.append(dtype)
    return types


def _ordered_words(array: pa.Array, fixed: FixedType) -> list[NDArray[np.uint64]]:
    """Return the words of a column as unsigned numbers in the order of its values."""
    first, *rest = fixed_values(array)
    return [_ordered(first, fixed), *(values.view(np.uint64) for values in rest)]


def _ordered(values: NDArray[np.int64], fixed: FixedType) -> NDArray[np.uint64]:
    """Return the first word of a column's values as unsigned numbers in their order."""
    word, bits = values.view(np.uint64), 8 * min(fixed.width, WORD)
    if fixed.signed:
        word = word ^ np.uint64(1 << (bits - 1))
    return word if bits == 64 else word & np.uint64((1 << bits) - 1)  # noqa: PLR2004 - bits of a word


def _unordered_words(words: Sequence[NDArray[np.uint64]], fixed: FixedType) -> list[NDArray[np.int64]]:
    """Undo `_ordered_words`; bits above the column's width are dropped."""
    up = np.uint64(64 - 8 * min(fixed.width, WORD))
    if not fixed.signed:
        return [((words[0] << up) >> up).view(np.int64)]
    first = ((words[0] << up) ^ SIGN).view(np.int64) >> up.view(np.int64)
    return [first, *(word.view(np.int64) for word in words[1:])]


_WORD_BITS = 64


def stable_order(
    prefix: NDArray[np.uint64], *, exact: bool, order_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the stable order of keys by their prefixes.

    The leading bits of each prefix and its position share one integer, so that a plain sort of integers gives the
    order up to keys whose leading bits are the same; those few are sorted separately.

    Parameters
    ----------
    prefix : uint64[n]
        First bytes of the keys.
    exact
        Whether the prefix is the whole key.
    order_of
        Returns the stable order of the keys at the given positions.

    Returns
    -------
    int64[n]
    """
    count = len(prefix)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    low = prefix.min()
    place_bits = int(count - 1).bit_length()
    cut = max(int(prefix.max() - low).bit_length() + place_bits - _WORD_BITS, 0)
    packed = (prefix - low) >> np.uint64(cut)
    packed <<= np.uint64(place_bits)
    packed |= np.arange(count, dtype=np.uint64)
    packed.sort()
    order = (packed & np.uint64((1 << place_bits) - 1)).astype(np.int64)
    if exact and cut == 0:
        return order
    packed >>= np.uint64(place_bits)
    same = packed[1:] == packed[:-1]
    tied = np.flatnonzero(np.concatenate([same, [False]]) | np.concatenate([[False], same]))
    if len(tied):
        # Sorted by leading bits already, so sorting all tied keys at once leaves each group in its place.
        among = order[tied]
        order[tied] = among[order_of(among)]
    return order


@dataclass(frozen=True, slots=True)
class KeyWords:
    """Keys to find.

    Attributes
    ----------
    words : uint64[n]
        Words; a key is its word plus `above`, modulo 2**64.
    above
        Constant that is added to each word.
    valid : bool[n] or None
        False for keys that cannot be in the table; None if all can be.
    """

    words: NDArray[np.uint64]
    above: np.uint64 = _ZERO
    valid: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.words.flags.writeable = False  # as the words of a batch, so that kernels are compiled once

    def __len__(self) -> int:
        return len(self.words)

    @property
    def flags(self) -> NDArray[np.bool_]:
        """`valid` as an array for kernels: empty if all keys are valid."""
        return _ALL_VALID if self.valid is None else self.valid

    def keys(self) -> Keys:
        """Return the normalized keys."""
        return Keys("u64", self.words + self.above if self.above else self.words)


def key_words(codec: KeyCodec, columns: Sequence[pa.Array]) -> KeyWords:
    """Return the keys of stream columns in the order of the key, without a copy if they are one column of whole words.

    Parameters
    ----------
    codec
        Codec of keys of one word.
    columns
        See `headrace.storage.format.keys.KeyCodec.encode_stream`, which says what is refused.
    """
    fixed = fixed_type(codec.types[0])
    assert fixed is not None
    if fixed.width < WORD:
        keys, valid = codec.encode_stream(columns)
        return KeyWords(keys.prefix, valid=valid)
    array, valid = coerce(columns[0], codec.types[0], codec.columns[0])
    return KeyWords(fixed_values(array)[0].view(np.uint64), SIGN if fixed.signed else _ZERO, valid)
