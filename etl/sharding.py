"""Assignment of keys to shards: identical on the driver, in a worker, and in the build of a replica.

The shard is XXH64 (seed 0) of the normalized key's bytes, modulo the number of shards. `storage.KeyCodec` encodes the
bytes from the key's declared types, most significant first, so neither the stream's own types nor the machine matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.equality import conform
from headrace.etl.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.etl.equality import KeyRule
    from headrace.storage.format import Keys

__all__ = ["digests_of", "shard_of", "usable_digests"]

_WORD = 8


def shard_of(
    columns: Sequence[pa.Array | pa.ChunkedArray],
    key: pa.Schema,
    shards: int,
    rules: Mapping[str, KeyRule] | None = None,
) -> NDArray[np.int32]:
    """Return the shard of each key.

    Parameters
    ----------
    columns
        Columns of the stream or of the table, in key order.
    key
        Names and types of the key columns, as the dimension declares them (`Dimension.key_schema`).
    shards
        Number of shards.
    rules
        Normalization rules by key column, as the dimension declares them.

    Returns
    -------
    int32[n]
        Shard from 0 to ``shards - 1``. A row without a usable key (null or unfit) matches no member and
        belongs to shard 0.

    Raises
    ------
    DeclarationError
        If `shards` is not positive.
    KeyInputError
        If a column can never equal its key.

    Examples
    --------
    >>> shard_of([pa.array(["N1", None])], pa.schema({"tailnum": pa.string()}), 8).tolist()
    [5, 0]
    """
    if shards < 1:
        raise DeclarationError(f"there is at least one shard, not {shards}")
    usable, digests = usable_digests(columns, key, rules)
    shard = np.zeros(len(columns[0]), dtype=np.int32)
    shard[usable] = digests % np.uint64(shards)
    return shard


def usable_digests(
    columns: Sequence[pa.Array | pa.ChunkedArray], key: pa.Schema, rules: Mapping[str, KeyRule] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the rows with a usable key, ascending, and the digest of each of these keys.

    The parameters and errors are those of `shard_of`, whose shard is the digest modulo the number of shards.
    """
    from headrace.storage.format import KeyCodec  # noqa: PLC0415 - numba comes in with the first key that is hashed

    rules = rules or {}
    arrays = [
        conform(column, field.type, rules.get(field.name), field.name).values
        for column, field in zip(columns, key, strict=True)
    ]
    usable = np.logical_and.reduce([np.asarray(array.is_valid()) for array in arrays])
    if not usable.all():
        arrays = [pc.filter(array, pa.array(usable)) for array in arrays]
    return np.flatnonzero(usable), digests_of(KeyCodec(key, key.names).encode(arrays))


def digests_of(keys: Keys) -> NDArray[np.uint64]:
    """Return XXH64 (seed 0) of the bytes of each key."""
    from headrace.etl._kernels import hash_keys  # noqa: PLC0415 - numba comes in here

    digests: NDArray[np.uint64] = hash_keys(*_bytes_of(keys))
    return digests


def _bytes_of(keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets of the keys and their bytes; a numeric key has eight bytes, big-endian."""
    if keys.offsets is not None and keys.data is not None:
        return keys.offsets, keys.data
    offsets = np.arange(len(keys) + 1, dtype=np.int64) * _WORD
    return offsets, keys.prefix.astype(">u8").view(np.uint8)
