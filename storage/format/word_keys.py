"""`KeyWords`: keys of one word each, used directly from the column of a batch if possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.format.coercion import coerce
from headrace.storage.format.columns import fixed_type, fixed_values
from headrace.storage.format.constants import WORD
from headrace.storage.format.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format.keys import KeyCodec

__all__ = ["KeyWords", "key_words"]

_SIGN, _NOTHING = np.uint64(1 << 63), np.uint64(0)
_ALL_VALID = np.zeros(0, dtype=np.bool_)


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
    above: np.uint64 = _NOTHING
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
    return KeyWords(fixed_values(array)[0].view(np.uint64), _SIGN if fixed.signed else _NOTHING, valid)
