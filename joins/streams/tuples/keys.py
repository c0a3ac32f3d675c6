"""`KeySpec`: the columns of one input that a condition compares, and their key words.

Both inputs of a condition use the types of its left columns, so that equal values have equal words whatever the
widths, units and scales of their types. A value that the left type cannot hold equals none of its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.joins.errors import JoinInputError
from headrace.joins.predicates.offsets import Offset, ticks
from headrace.storage.errors import KeyInputError
from headrace.storage.format import KeyCodec, Keys, fixed_type, null_mask, scale_of, stored_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["KeySpec", "Width", "band_width", "check_comparable", "key_types"]

_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class Width:
    """Greatest distance of the keys of a band.

    Attributes
    ----------
    words
        Distance of key words; 0 for keys that are floats.
    number
        Distance of floats.
    floating
        Whether key words are floats in order, see `KeySpec`.
    """

    words: int
    number: float = 0.0
    floating: bool = False


class KeySpec:
    """Columns of an input as keys.

    A float has the word of the integer with its bits, the order of negative numbers reversed; -0.0 has the word of 0.0,
    and NaN is not a key.

    Parameters
    ----------
    columns
        Positions of the columns in the input's schema, most significant first.
    names
        Their names, for messages.
    types
        Types of the keys, see `key_types`.
    """

    def __init__(self, columns: Sequence[int], names: Sequence[str], types: Sequence[pa.DataType]) -> None:
        self.columns = tuple(columns)
        self.names = tuple(names)
        self.types = tuple(types)
        labels = [f"{at}" for at in range(len(types))]
        packed = [pa.int64() if pa.types.is_floating(dtype) else dtype for dtype in types]
        self._codec = KeyCodec(pa.schema(list(zip(labels, packed, strict=True))), labels)

    @property
    def wide(self) -> bool:
        """Whether a key takes more than one word."""
        return self._codec.kind == "bytes"

    @property
    def identity(self) -> tuple[tuple[int, ...], tuple[pa.DataType, ...]]:
        """What makes two specifications of one input the same."""
        return self.columns, self.types

    def encode(self, batch: pa.RecordBatch) -> tuple[Keys, NDArray[np.bool_] | None]:
        """Return the keys of a batch, and which rows have one (None: all of them).

        Raises
        ------
        KeyInputError
            If no value of a column's type can equal one of its key type.
        """
        arrays = [
            _float_words(batch.column(at)) if pa.types.is_floating(dtype) else batch.column(at)
            for at, dtype in zip(self.columns, self.types, strict=True)
        ]
        return self._codec.encode_stream(arrays, self.names)


def key_types(left: Sequence[pa.DataType], names: Sequence[str]) -> list[pa.DataType]:
    """Return the types of keys that are compared with columns of these types.

    Raises
    ------
    KeyInputError
        If a type cannot be a key.
    """
    types = []
    for dtype, name in zip(left, names, strict=True):
        stored = stored_type(dtype)
        if stored is None or pa.types.is_duration(stored):
            raise KeyInputError(
                f"column {name!r} has type {dtype}, which cannot be a join column; cast it to a number, a time, text "
                "or binary"
            )
        types.append(pa.float64() if pa.types.is_floating(stored) else stored)
    return types


def check_comparable(spec: KeySpec, schema: pa.Schema) -> None:
    """Refuse columns of which no value can equal a key.

    Raises
    ------
    KeyInputError
        Names the column and both types.
    """
    for at, name, dtype in zip(spec.columns, spec.names, spec.types, strict=True):
        found = schema.field(at).type
        if pa.types.is_floating(dtype) != pa.types.is_floating(found):
            raise KeyInputError(
                f"column {name!r} has type {found}, and the column that it is compared with is a {dtype}; change "
                "one of the types, so that both are floats or neither is"
            )
    spec.encode(pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema))


def band_width(within: Offset | float, left: pa.DataType, right: pa.DataType, names: tuple[str, str]) -> Width:
    """Return how far apart the keys of a band may be.

    Raises
    ------
    JoinInputError
        If `within` is negative, or not a distance between such values.
    KeyInputError
        If the types differ in unit or scale, or have no distance.
    """
    if pa.types.is_floating(left) and pa.types.is_floating(right):
        if isinstance(within, bool) or not isinstance(within, int | float) or not math.isfinite(within) or within < 0:
            raise JoinInputError(f"`within` must be a finite number of at least 0, not {within!r}")
        return Width(0, float(within), floating=True)
    fixed, scale = fixed_type(left), scale_of(left)
    signed = [pa.types.is_signed_integer(dtype) for dtype in (left, right)]
    same = left == right or (pa.types.is_integer(left) and pa.types.is_integer(right) and signed[0] == signed[1])
    if fixed is None or scale is None or not same:
        raise KeyInputError(
            f"columns {names[0]!r} and {names[1]!r} have types {left} and {right}, between which there is no distance; "
            "cast both to one type of number or time"
        )
    if isinstance(within, float):
        raise JoinInputError(f"`within` must be exact between values of type {left}: an int or a Decimal, not {within}")
    steps = ticks(within, left, "within")
    if steps < 0:
        raise JoinInputError(f"`within` must be at least 0, not {within!r}")
    return Width(min(math.floor(Fraction(steps)), 2**64 - 1))


def _float_words(array: pa.Array) -> pa.Array:
    """Return floats as integers in their order; null for NaN."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    values = np.asarray(array.cast(pa.float64()).fill_null(0.0)) + 0.0  # -0.0 becomes 0.0
    bits = values.view(np.int64)
    words = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    missing = np.isnan(values)
    nulls = null_mask(array)
    if nulls is not None:
        missing |= nulls
    return pa.array(words, mask=missing if missing.any() else None)
