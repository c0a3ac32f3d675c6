"""Replicas of the entries of a dimension with history, in the order of natural key and time.

Changes are applied with them: a change meets all entries of its member. The replica follows the Delta table of
versions, whose rows hold their entries.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.errors import ReplicaDamagedError
from headrace.pipelines.history.layout import delta_schema, entries_of
from headrace.pipelines.replica.catch_up import catch_up, discard
from headrace.pipelines.replica.rows import ReplicaRows, net_changes
from headrace.storage.errors import CorruptionError, StorageIOError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.etl.history import History
    from headrace.pipelines.replica.catch_up import Reached, ReplicaSpec
    from headrace.pipelines.replica.rows import Changes
    from headrace.storage import Table

__all__ = ["EntryRows", "opened_entries"]


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


@contextmanager
def opened_entries(spec: ReplicaSpec, shard: int, version: int, base: int) -> Iterator[tuple[Table, Reached]]:
    """Open a shard's replica at a version of its Delta table; discard it if it is found to be damaged.

    Parameters
    ----------
    spec, shard
        Description of the replica, and number of the shard.
    version, base
        Version of the Delta table, and the greatest surrogate key ever given at that version.

    Raises
    ------
    ReplicaDamagedError
        If the replica is damaged. The task can begin again.
    """
    table, reached = catch_up(spec, shard, version, base, _opened)
    try:
        with table:
            yield table, reached
    except (CorruptionError, StorageIOError) as error:
        discard(spec, shard, reached.file.stat().st_ino)
        raise ReplicaDamagedError(f"{error}; the replica has been discarded, and the task begins again") from error


def _opened(reached: Reached) -> tuple[Table, Reached]:
    from headrace.storage import Table  # noqa: PLC0415 - numba comes in here

    return Table.open(reached.file), reached
