"""What a replica holds, and how changes of its Delta table become changes of it. Pure functions over Arrow tables.

Two kinds of replica: the members of a dimension, and the keys that a fact table has loaded. Files, locks and versions
are in `headrace.pipelines.replica.catch_up`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import UNKNOWN_KEY, Dimension, Duplicates, member_rows, shard_of, without_blank_keys
from headrace.etl.ranking import rank_rows
from headrace.pipelines.delta.tables import CHANGE_TYPE, COMMIT_VERSION

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Changes", "LoadedKeyRows", "MemberRows", "ReplicaRows", "of_shard"]

_INSERTS = pa.array(["insert", "update_postimage"])
_NAMED = 5
_FILTER_BITS = 8.0


@dataclass(frozen=True)
class Changes:
    """The net effect of a range of versions on a replica.

    Parameters
    ----------
    upserts
        Rows of the clustered table.
    deletes
        Key columns of rows that go.
    fresh
        Keys that began with an insert, so that the replica must not hold them yet.
    """

    upserts: pa.Table
    deletes: pa.Table
    fresh: pa.Table


class ReplicaRows(Protocol):
    """How rows of a Delta table are kept in a clustered table."""

    @property
    def label(self) -> str:
        """Names the replica's folder."""

    @property
    def columns(self) -> list[str]:
        """Columns that are read from the Delta table."""

    @property
    def schema(self) -> pa.Schema:
        """The clustered table's schema."""

    @property
    def key(self) -> pa.Schema:
        """The clustered table's key."""

    @property
    def unique(self) -> bool:
        """Whether a key occurs once."""

    @property
    def filter_bits(self) -> float | None:
        """Bits a key of the clustered table's negative filter; None for no filter."""

    def rows(self, table: pa.Table, version: int) -> pa.Table:
        """Return rows of the Delta table, read at a version, as rows of the clustered table, normalised."""

    def changes(self, table: pa.Table) -> Changes | None:
        """Return the net effect of the change feed's rows; None when only a new build gets it right."""

    def hides_later(self, table: pa.Table, base: int) -> bool:
        """Return whether all changes are members above `base`, so that a join can leave them out."""


@dataclass(frozen=True)
class MemberRows:
    """The members of a dimension: natural key, surrogate key, and the attributes that facts carry.

    Parameters
    ----------
    dimension
        The dimension with no more attributes than are carried, and without its flag of inferred members.
    """

    dimension: Dimension

    @property
    def label(self) -> str:  # noqa: D102 - as in the protocol
        return self.dimension.name

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the protocol
        return list(self.dimension.table_schema.names)

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.dimension.table_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.dimension.key_schema

    @property
    def unique(self) -> bool:  # noqa: D102 - as in the protocol
        return True

    @property
    def filter_bits(self) -> None:  # noqa: D102 - as in the protocol
        return None

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: ARG002, D102 - as in the protocol
        return member_rows(self.dimension, table)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the protocol
        feed = self._members(table)
        rows = member_rows(self.dimension, feed)
        order = _feed_order(feed, rows.select(self.key.names))
        if len(order.repeated):
            return None
        last = rows.take(pa.array(order.last))
        arrives = pa.array(order.inserts[order.last])
        keys = last.select(self.key.names)
        fresh = rows.take(pa.array(order.first[order.inserts[order.first]])).select(self.key.names)
        return Changes(last.filter(arrives), keys.filter(pc.invert(arrives)), fresh)

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: D102 - as in the protocol
        feed = self._members(table)
        inserted = pc.equal(feed.column(CHANGE_TYPE), "insert")
        above = pc.greater(feed.column(self.dimension.surrogate_key), base)
        return bool(pc.all(pc.and_(inserted, above), min_count=0).as_py())

    def _members(self, table: pa.Table) -> pa.Table:
        """Return the changes of members that a row can name, those of `member_rows`."""
        known = pc.not_equal(table.column(self.dimension.surrogate_key), UNKNOWN_KEY)
        return without_blank_keys(self.dimension, table.filter(pc.fill_null(known, fill_value=True)))


@dataclass(frozen=True)
class LoadedKeyRows:
    """The keys that a fact table has loaded.

    Parameters
    ----------
    duplicates
        The declared key.
    """

    duplicates: Duplicates

    @property
    def label(self) -> str:  # noqa: D102 - as in the protocol
        return "loaded"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the protocol
        return list(self.duplicates.key.names)

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.duplicates.table_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return pa.schema([self.schema.field(name) for name in self.duplicates.key.names])

    @property
    def unique(self) -> bool:  # noqa: D102 - as in the protocol
        return False

    @property
    def filter_bits(self) -> float:  # noqa: D102 - as in the protocol
        return _FILTER_BITS  # most records are new: their keys are not there

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: D102 - as in the protocol
        return self.duplicates.loaded_keys(table, version)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the protocol
        if not pc.all(pc.equal(table.column(CHANGE_TYPE), "insert"), min_count=0).as_py():
            return None
        last = pc.max(table.column(COMMIT_VERSION)).as_py() or 0
        none = self.key.empty_table()
        return Changes(self.rows(table, last), none, none)

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: ARG002, D102 - as in the protocol
        return table.num_rows == 0


@dataclass(frozen=True)
class _FeedOrder:
    """Positions in a feed: first and last change of each key, keys inserted twice by one version; and what inserts."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    repeated: NDArray[np.int64]
    inserts: NDArray[np.bool_]


def _feed_order(feed: pa.Table, keys: pa.Table) -> _FeedOrder:
    """Order the changes of each key by version, and in a version what goes before what comes."""
    inserts = np.asarray(pc.is_in(feed.column(CHANGE_TYPE), value_set=_INSERTS))
    version = np.asarray(feed.column(COMMIT_VERSION), dtype=np.int64)
    ranks, _ = rank_rows(keys.columns)
    order = np.lexsort((inserts, version, ranks))
    starts = np.flatnonzero(np.diff(ranks[order], prepend=-1)) if len(order) else np.empty(0, dtype=np.int64)
    ends = np.append(starts[1:], len(order)) - 1 if len(starts) else starts
    before, after = order[:-1], order[1:]
    twice = (ranks[before] == ranks[after]) & (version[before] == version[after]) & inserts[before] & inserts[after]
    return _FeedOrder(order[starts], order[ends], after[twice], inserts)


def of_shard(rows: pa.Table, key: pa.Schema, shards: int, shard: int) -> pa.Table:
    """Return the rows, whose keys are normalised already, that belong to a shard."""
    if shards == 1 or not rows.num_rows:
        return rows
    return rows.filter(pa.array(shard_of([rows.column(name) for name in key.names], key, shards) == shard))
