"""The stored rows of the members that changes name, from one scan of the Delta table.

A filter of the named members goes over all data files, and the rows that pass it go to the shards of their members, as
the changes do. So the table is read once, however many shards there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa

from headrace.etl.history.values import single
from headrace.etl.sharding import usable_digests
from headrace.pipelines.delta.live_files import LiveFiles, read_live_file
from headrace.pipelines.history.layout import delta_schema
from headrace.pipelines.spark.frame import SHARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.etl.history import History
    from headrace.pipelines.delta.live_files import LiveFile
    from headrace.pipelines.spark.frame import ShardRule

__all__ = ["FILTER_BYTES", "KeyFilter", "StoredScan"]

FILTER_BYTES: Final = 8  # of a filter for each key: then it passes one of a thousand others


@dataclass(frozen=True)
class KeyFilter:
    """A set of keys that has every key that was added, and few others.

    Parameters
    ----------
    bits
        uint8[n], eight bits each. A key sets two of them.
    """

    bits: NDArray[np.uint8]

    @classmethod
    def empty(cls, nbytes: int) -> Self:
        """Return a filter of a size without keys."""
        return cls(np.zeros(max(1, nbytes), np.uint8))

    @classmethod
    def united(cls, filters: Iterable[bytes]) -> Self:
        """Return the filter of all keys of filters of the same size, which are given as the bytes of their bits."""
        return cls(np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in filters]))

    def add(self, digests: NDArray[np.uint64]) -> None:
        """Add the keys with these digests."""
        for place, bit in self._probes(digests):
            np.bitwise_or.at(self.bits, place, bit)

    def may_have(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return for each digest whether its key may have been added."""
        found = [(self.bits[place] & bit) != 0 for place, bit in self._probes(digests)]
        return found[0] & found[1]

    def _probes(self, digests: NDArray[np.uint64]) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint8]]]:
        """Yield the byte and the bit in it for each digest, twice."""
        size, half, byte = np.uint64(len(self.bits) * 8), np.uint64(32), np.uint64(3)
        for word in (digests, digests >> half | digests << half):
            position = word % size
            yield position >> byte, np.uint8(1) << (position & np.uint64(7)).astype(np.uint8)


@dataclass(frozen=True)
class StoredScan:
    """A scan of a dimension with history for the rows of some members. Picklable.

    Parameters
    ----------
    history
        The declaration.
    path, version
        Path of the table, and the version to read.
    shards
        Number of shards of the changes.
    keys
        About how many keys changes name.
    """

    history: History
    path: str
    version: int
    shards: int
    keys: int

    def no_members(self) -> KeyFilter:
        """Return an empty filter, which is large enough for the keys."""
        return KeyFilter.empty(self.keys * FILTER_BYTES)

    def note(self, named: KeyFilter, changes: pa.RecordBatch, rule: ShardRule) -> None:
        """Add the members that changes name to a filter."""
        _, digests = usable_digests([changes.column(name) for name in rule.columns], rule.key, rule.rules)
        named.add(digests)

    def files(self) -> list[LiveFile]:
        """Return the data files, in the same order on every host."""
        return sorted(LiveFiles(self.path).at(self.version), key=lambda file: file.path)

    def rows(self, file: LiveFile, named: KeyFilter) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file whose members a filter may have, with their shards in `_shard`."""
        key = self.history.dimension.key_schema
        for _, batch in read_live_file(self.path, file, delta_schema(self.history)):
            usable, digests = usable_digests([single(batch.column(name)) for name in key.names], key)
            chosen = named.may_have(digests)
            if not chosen.any():
                continue
            rows = batch.take(pa.array(usable[chosen]))
            shard = (digests[chosen] % np.uint64(self.shards)).astype(np.int32)
            yield rows.append_column(pa.field(SHARD, pa.int32()), pa.array(shard))
