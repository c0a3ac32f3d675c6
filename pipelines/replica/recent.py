"""New members in memory, beside an operator over a replica that does not have them yet.

A batch of facts adds members at random places of a replica, and to write them there costs a page for each. So an
operator that was kept from an earlier batch stays at its version, and keys that it does not find are looked up among
the members that were added since. When these fill their share of the memory, or the dimension changed in any other way,
the replica catches up (`headrace.pipelines.replica.catch_up`), and takes all of them in one commit.

Only the commits by which batches add their members are followed so. They are conditional on the version at which the
replicas did not have the members, so no member is there twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.joins import SSIJ
    from headrace.joins.stats import SSIJStats
    from headrace.pipelines.replica.catch_up import ReplicaSpec
    from headrace.storage.format import Keys

__all__ = ["JoinWithRecent", "Recent", "members_of"]


def members_of(spec: ReplicaSpec, shard: int, version: int, files: Sequence[str]) -> pa.Table | None:
    """Return the members of a shard in data files, as rows of its replica at a version; None if a file is gone."""
    parts = [spec.rows.schema.empty_table()]
    for file in files:
        try:
            table = pq.ParquetFile(f"{spec.path}/{file}").read(spec.rows.columns, use_threads=False)
        except (OSError, pa.ArrowException):
            return None
        parts.append(spec.rows_of(shard, table, version))
    return pa.concat_tables(parts)


@dataclass(frozen=True)
class Recent:
    """New members in key order.

    Parameters
    ----------
    key
        Key columns.
    keys
        Keys of the members, ascending.
    rows
        The members.
    """

    key: pa.Schema
    keys: Keys
    rows: pa.Table

    @classmethod
    def of(cls, rows: pa.Table, key: pa.Schema) -> Self:
        """Return members, which come in any order, each once."""
        from headrace.storage.format import KeyCodec  # noqa: PLC0415 - numba comes in here

        keys = KeyCodec(key, key.names).encode(rows)
        order = keys.argsort()
        return cls(key, keys.take(order), rows.take(pa.array(order)).combine_chunks())

    @property
    def nbytes(self) -> int:
        """Bytes of the members and their keys."""
        return int(self.rows.nbytes) + self.keys.nbytes

    def find(self, columns: Sequence[pa.Array]) -> NDArray[np.int64]:
        """Return the position of each key among the members, or -1: int64[n]."""
        from headrace.storage.commit import find_keys  # noqa: PLC0415 - numba comes in here
        from headrace.storage.format import KeyCodec  # noqa: PLC0415 - as above

        wanted = KeyCodec(self.key, self.key.names).encode(columns)
        order = wanted.argsort()
        found = np.empty(len(order), np.int64)
        found[order] = find_keys(wanted.take(order), self.keys)
        return found


class JoinWithRecent:
    """Left join with a replica and the members that were added since.

    Parameters
    ----------
    operator
        Left join with the replica, whose first column is never null in the replica.
    recent
        The members.
    on, columns
        Arguments `on` and `columns` of the operator.
    """

    def __init__(self, operator: SSIJ, recent: Recent, on: Sequence[tuple[str, str]], columns: Sequence[str]) -> None:
        self._operator = operator
        self._recent = recent
        self._stream_keys = [name for name, _ in on]
        self._columns = columns

    def push(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Push a batch, and yield the results that are ready."""
        return self._completed(self._operator.push(batch))

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of all rows pushed so far."""
        return self._completed(self._operator.flush())

    @property
    def stats(self) -> SSIJStats:
        """Statistics of the operator."""
        return self._operator.stats

    def _completed(self, outputs: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for output in outputs:
            width = output.num_columns - len(self._columns)
            absent = np.asarray(output.column(width).is_null())
            yield self._filled(output, width, absent) if absent.any() else output

    def _filled(self, output: pa.RecordBatch, width: int, absent: NDArray[np.bool_]) -> pa.RecordBatch:
        """Return results in which rows without a match have the columns of their recent member, if there is one."""
        rows = np.flatnonzero(absent)
        found = self._recent.find([output.column(name).take(pa.array(rows)) for name in self._stream_keys])
        filled = np.zeros(output.num_rows, dtype=np.bool_)
        filled[rows[found >= 0]] = True
        members = self._recent.rows.select(self._columns).take(pa.array(found[found >= 0]))
        columns = [
            pc.replace_with_mask(column, pa.array(filled), member.combine_chunks())
            for column, member in zip(output.columns[width:], members.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays([*output.columns[:width], *columns], schema=output.schema)
