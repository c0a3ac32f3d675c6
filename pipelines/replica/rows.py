"""The contents of a replica, and the conversion of Delta changes to replica changes. Pure functions over Arrow tables.

There are two kinds of replica here: the members of a dimension, and the keys that a fact table has loaded.
`headrace.pipelines.replica.version_rows` adds the versions of dimensions with history, and
`headrace.pipelines.replica.entry_rows` adds their entries.
`headrace.pipelines.replica.catch_up` handles files, locks and versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import Dimension, Duplicates, is_special, member_rows, shard_of, without_blank_keys
from headrace.etl.ranking import rank_rows
from headrace.pipelines.delta.tables import CHANGE_TYPE, COMMIT_VERSION

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "Changes",
    "FeedOrder",
    "LoadedKeyRows",
    "MemberRows",
    "ReplicaRows",
    "feed_order",
    "net_changes",
    "of_shard",
]

_INSERTS = pa.array(["insert", "update_postimage"])
_UPDATES = pa.array(["update_preimage", "update_postimage"])
_NAMED = 5
_FILTER_BITS = 8.0


@dataclass(frozen=True)
class Changes:
    """The net effect of a range of versions on a replica.

    Parameters
    ----------
    inserts
        Rows to insert, whose keys the clustered table must not hold yet.
    upserts
        Rows to insert or replace.
    deletes
        Key columns of the rows to delete.
    absent
        Key columns of rows that came and went, which the clustered table must not hold.
    """

    inserts: pa.Table
    upserts: pa.Table
    deletes: pa.Table
    absent: pa.Table


class ReplicaRows(ABC):
    """Mapping of the rows of a Delta table to the rows of a clustered table."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Prefix of the replica's folder name."""

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Columns that are read from the Delta table."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Schema of the clustered table."""

    @property
    @abstractmethod
    def key(self) -> pa.Schema:
        """Key of the clustered table."""

    @property
    def shard_key(self) -> pa.Schema:
        """Columns of the key that determine a row's shard."""
        return self.key

    @property
    def feed_key(self) -> pa.Schema | None:
        """Columns of the Delta table that determine a row's shard as they are; None if they need normalization."""
        return None

    @property
    def unique(self) -> bool:
        """Whether each key is unique."""
        return True

    @property
    def filter_bits(self) -> float | None:
        """Bits per key in the clustered table's negative filter; None for no filter."""
        return None

    @abstractmethod
    def rows(self, table: pa.Table, version: int) -> pa.Table:
        """Return rows of the Delta table at a version as normalized rows of the clustered table."""

    @abstractmethod
    def changes(self, table: pa.Table) -> Changes | None:
        """Return the net effect of the feed rows; None if only a new build gives the correct result."""

    @abstractmethod
    def hides_later(self, table: pa.Table, base: int) -> bool:
        """Return whether all changes are members above `base`, which a join can hide."""


@dataclass(frozen=True)
class MemberRows(ReplicaRows):
    """The members of a dimension: natural key, surrogate key, and the attributes that facts carry.

    Parameters
    ----------
    dimension
        Dimension with only the carried attributes, and without its flag for inferred members.
    """

    dimension: Dimension

    @property
    def label(self) -> str:  # noqa: D102 - as in the base
        return self.dimension.name

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the base
        return list(self.dimension.table_schema.names)

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.dimension.table_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.dimension.key_schema

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: ARG002, D102 - as in the base
        return member_rows(self.dimension, self.held(table))

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the base
        feed = self._members(self.held(table))
        return net_changes(feed, member_rows(self.dimension, feed), self.key.names)

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: D102 - as in the base
        feed = self._members(table)
        inserted = pc.equal(feed.column(CHANGE_TYPE), "insert")
        above = pc.greater(feed.column(self.dimension.surrogate_key), base)
        return bool(pc.all(pc.and_(inserted, above), min_count=0).as_py())

    def held(self, table: pa.Table) -> pa.Table:
        """Return the rows of the Delta table that the replica holds, with all columns of `dimension`."""
        return table

    def _members(self, table: pa.Table) -> pa.Table:
        """Return the changes of members that a row can refer to, as `member_rows` defines them."""
        return without_blank_keys(self.dimension, table.filter(pc.invert(is_special(self.dimension, table))))


@dataclass(frozen=True)
class LoadedKeyRows(ReplicaRows):
    """The keys that a fact table has loaded.

    Parameters
    ----------
    duplicates
        Declared key of the duplicates.
    """

    duplicates: Duplicates

    @property
    def label(self) -> str:  # noqa: D102 - as in the base
        return "loaded"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the base
        return list(self.duplicates.key.names)

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.duplicates.table_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return pa.schema([self.schema.field(name) for name in self.duplicates.key.names])

    @property
    def unique(self) -> bool:  # noqa: D102 - as in the base
        return False

    @property
    def filter_bits(self) -> float:  # noqa: D102 - as in the base
        return _FILTER_BITS  # most records are new, so the replica does not hold their keys

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: D102 - as in the base
        return self.duplicates.loaded_keys(table, version)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the base
        inserted = pc.equal(table.column(CHANGE_TYPE), "insert")
        if not (pc.all(inserted, min_count=0).as_py() or self._keeps_keys(table.filter(pc.invert(inserted)))):
            return None
        last = pc.max(table.column(COMMIT_VERSION)).as_py() or 0
        none = self.key.empty_table()
        return Changes(self.schema.empty_table(), self.rows(table.filter(inserted), last), none, none)

    def _keeps_keys(self, changed: pa.Table) -> bool:
        """Return whether all changes are updates that keep the key of their row."""
        kinds = changed.column(CHANGE_TYPE)
        if not pc.all(pc.is_in(kinds, value_set=_UPDATES), min_count=0).as_py():
            return False
        sign = pc.if_else(pc.equal(kinds, _UPDATES[0]), -1, 1)
        columns = [COMMIT_VERSION, *self.key.names]
        balance = changed.select(columns).append_column("_sign", sign).group_by(columns).aggregate([("_sign", "sum")])
        return bool(pc.all(pc.equal(balance.column("_sign_sum"), 0), min_count=0).as_py())

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: ARG002, D102 - as in the base
        return table.num_rows == 0


@dataclass(frozen=True)
class FeedOrder:
    """Positions in a feed: first and last change of each key, keys that one version inserts twice, and the inserts."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    repeated: NDArray[np.int64]
    inserts: NDArray[np.bool_]


def net_changes(feed: pa.Table, rows: pa.Table, key: list[str]) -> Changes | None:
    """Return the net effect of feed rows on a table with a unique key; None if a version inserts a key twice.

    Parameters
    ----------
    feed
        Feed rows, with their kinds and versions.
    rows
        The same rows as the clustered table holds them.
    key
        Key columns of the clustered table.
    """
    order = feed_order(feed, rows.select(key))
    if len(order.repeated):
        return None
    last = rows.take(pa.array(order.last))
    arrives, fresh = order.inserts[order.last], order.inserts[order.first]
    inserts, upserts = (last.filter(pa.array(arrives & wanted)) for wanted in (fresh, ~fresh))
    deletes, absent = (last.filter(pa.array(~arrives & wanted)).select(key) for wanted in (~fresh, fresh))
    return Changes(inserts, upserts, deletes, absent)


def feed_order(feed: pa.Table, keys: pa.Table) -> FeedOrder:
    """Order the changes of each key by version, and deletes before inserts within a version."""
    inserts = np.asarray(pc.is_in(feed.column(CHANGE_TYPE), value_set=_INSERTS))
    version = np.asarray(feed.column(COMMIT_VERSION), dtype=np.int64)
    ranks, _ = rank_rows(keys.columns)
    order = np.lexsort((inserts, version, ranks))
    starts = np.flatnonzero(np.diff(ranks[order], prepend=-1)) if len(order) else np.empty(0, dtype=np.int64)
    ends = np.append(starts[1:], len(order)) - 1 if len(starts) else starts
    before, after = order[:-1], order[1:]
    twice = (ranks[before] == ranks[after]) & (version[before] == version[after]) & inserts[before] & inserts[after]
    return FeedOrder(order[starts], order[ends], after[twice], inserts)


def of_shard(rows: pa.Table, key: pa.Schema, shards: int, shard: int) -> pa.Table:
    """Return the rows that belong to a shard. Their keys must be normalized."""
    if shards == 1 or not rows.num_rows:
        return rows
    return rows.filter(pa.array(shard_of([rows.column(name) for name in key.names], key, shards) == shard))
