"""Replicas of the entries of a dimension with history, in the order of natural key and time.

Changes are applied with them: a change meets all entries of its member. The replica follows the Delta table of
versions, whose rows hold their entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.history.layout import delta_schema, entries_of
from headrace.pipelines.replica.rows import Changes, feed_order

if TYPE_CHECKING:
    from headrace.etl.history import History

__all__ = ["EntryRows"]


@dataclass(frozen=True)
class EntryRows:
    """The entries of a dimension with history. Entries of a member are in one shard, which its natural key determines.

    Parameters
    ----------
    history
        The declaration.
    """

    history: History

    @property
    def label(self) -> str:  # noqa: D102 - as in the protocol
        return f"{self.history.dimension.name}-entries"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the protocol
        return list(delta_schema(self.history).names)

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.history.entry_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return pa.schema([self.schema.field(name) for name in self.history.entry_key])

    @property
    def shard_key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.history.dimension.key_schema

    @property
    def feed_key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.shard_key

    @property
    def unique(self) -> bool:  # noqa: D102 - as in the protocol
        return True

    @property
    def filter_bits(self) -> None:  # noqa: D102 - as in the protocol
        return None

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: ARG002, D102 - as in the protocol
        return entries_of(self.history, table)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the protocol
        feed = entries_of(self.history, table)
        rows = feed.select(self.schema.names)
        order = feed_order(feed, rows.select(self.key.names))
        if len(order.repeated):
            return None
        last = rows.take(pa.array(order.last))
        arrives = pa.array(order.inserts[order.last])
        keys = last.select(self.key.names)
        fresh = rows.take(pa.array(order.first[order.inserts[order.first]])).select(self.key.names)
        return Changes(last.filter(arrives), keys.filter(pc.invert(arrives)), fresh)

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: ARG002, D102 - as in the protocol
        return table.num_rows == 0
