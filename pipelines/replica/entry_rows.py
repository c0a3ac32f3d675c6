"""Replicas of the entries of a dimension with history, in the order of natural key and time.

Changes are applied with them: a change meets all entries of its member. The replica follows the Delta table of
versions, whose rows hold their entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.history.layout import delta_schema, entries_of
from headrace.pipelines.replica.rows import ReplicaRows, net_changes

if TYPE_CHECKING:
    from headrace.etl.history import History
    from headrace.pipelines.replica.rows import Changes

__all__ = ["EntryRows"]


@dataclass(frozen=True)
class EntryRows(ReplicaRows):
    """The entries of a dimension with history. Entries of a member are in one shard, which its natural key determines.

    Parameters
    ----------
    history
        The declaration.
    """

    history: History

    @property
    def label(self) -> str:  # noqa: D102 - as in the base
        return f"{self.history.dimension.name}-entries"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the base
        return list(delta_schema(self.history).names)

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.history.entry_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return pa.schema([self.schema.field(name) for name in self.history.entry_key])

    @property
    def shard_key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.history.dimension.key_schema

    @property
    def feed_key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.shard_key

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: ARG002, D102 - as in the base
        return entries_of(self.history, table)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the base
        feed = entries_of(self.history, table)
        return net_changes(feed, feed.select(self.schema.names), self.key.names)

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: ARG002, D102 - as in the base
        return table.num_rows == 0
