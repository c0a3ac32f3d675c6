"""`KeyWords`: keys of one word each, as they lie in the column of a batch where that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.storage.format.coercion import coerce
from headrace.storage.format.columns import fixed_type, fixed_values
from headrace.storage.format.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.storage.format.keys import KeyCodec

__all__ = ["KeyWords", "key_words"]

_WORD = 8
_SIGN, _NOTHING = np.uint64(1 << 63), np.uint64(0)
_ALL_VALID = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class KeyWords:
    """Keys that rows look for.

    Attributes
    ----------
    words : uint64[n]
        A key is its word plus `above`, modulo 2**64.
    above
        The same for all.
    valid : bool[n] or None
        Which keys can be in the table at all; all, if None.
    """

    words: NDArray[np.uint64]
    above: np.uint64 = _NOTHING
    valid: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.words.flags.writeable = False  # as the words of a batch are: kernels are compiled for one kind of array

    def __len__(self) -> int:
        return len(self.words)

    @property
    def flags(self) -> NDArray[np.bool_]:
        """`valid` for kernels, which take arrays: empty if all are."""
        return _ALL_VALID if self.valid is None else self.valid

    def keys(self) -> Keys:
        """Return the normalised keys."""
        return Keys("u64", self.words + self.above if self.above else self.words)


def key_words(codec: KeyCodec, columns: Sequence[pa.Array]) -> KeyWords:
    """Return the keys of stream columns in the order of the key, without a copy if they are one column of whole words.

    Parameters
    ----------
    codec
        Of keys of one word.
    columns
        See `headrace.storage.format.keys.KeyCodec.encode_stream`, which says what is refused.
    """
    fixed = fixed_type(codec.types[0])
    assert fixed is not None
    if fixed.width < _WORD:
        keys, valid = codec.encode_stream(columns)
        return KeyWords(keys.prefix, valid=valid)
    array, valid = coerce(columns[0], codec.types[0], codec.columns[0])
    return KeyWords(fixed_values(array)[0].view(np.uint64), _SIGN if fixed.signed else _NOTHING, valid)
