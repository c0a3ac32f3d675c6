"""Delta tables that take each batch exactly once.

A commit carries the number of its batch as an application transaction: the number and the rows appear together, or not
at all. A batch that a table already holds is not written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deltalake.table import TableMerger

__all__ = ["Warehouse"]

APPLICATION: Final = "headrace.samples.brokerage"


@dataclass(frozen=True)
class Warehouse:
    """The folder of the tables.

    Parameters
    ----------
    folder
        Folder with one Delta table in each subfolder.
    """

    folder: Path

    def path(self, table: str) -> str:
        """Return the path of a table."""
        return str(self.folder / table)

    def exists(self, table: str) -> bool:
        """Return whether a table exists."""
        return bool(DeltaTable.is_deltatable(self.path(table)))

    def loaded(self, table: str) -> int:
        """Return the number of the last batch that a table holds; 0 for none."""
        if not self.exists(table):
            return 0
        return DeltaTable(self.path(table)).transaction_version(APPLICATION) or 0

    def rows(self, table: str) -> int:
        """Return the number of rows of a table."""
        return int(DeltaTable(self.path(table)).to_pyarrow_dataset().count_rows())

    def merge(
        self, table: str, batch: int, rows: pa.Table, key: Sequence[str], update: Mapping[str, str] | None = None
    ) -> None:
        """Insert rows with a new key, and update the others.

        Parameters
        ----------
        table
            Name of the table; created if it does not exist.
        batch
            Number of the batch.
        rows
            The rows, each key once.
        key
            Columns that identify a row.
        update
            Expression for each column of a row that exists, over its old values ``old`` and its new values ``new``;
            None to take over the new row.
        """
        same = " AND ".join(f"old.{name} = new.{name}" for name in key)
        merger = self._merger(table, batch, rows, same)
        if update is None:
            merger = merger.when_matched_update_all(_differs(rows.schema.names))
        else:
            merger = merger.when_matched_update(dict(update))
        self._merged(merger, table, batch)

    def replace(self, table: str, batch: int, rows: pa.Table, key: str) -> None:
        """Make a table hold exactly some rows, and rewrite only the files whose rows differ."""
        merger = self._merger(table, batch, rows, f"old.{key} = new.{key}")
        merger = merger.when_matched_update_all(_differs(rows.schema.names)).when_not_matched_by_source_delete()
        self._merged(merger, table, batch)

    def _merger(self, table: str, batch: int, rows: pa.Table, same: str) -> TableMerger:
        target = DeltaTable.create(self.path(table), rows.schema, mode="ignore")
        merger = target.merge(rows, same, source_alias="new", target_alias="old", commit_properties=_properties(batch))
        return merger.when_not_matched_insert_all()

    def _merged(self, merger: TableMerger, table: str, batch: int) -> None:
        """Commit a merge. A merge that changes no row makes no commit, so an empty one records the batch."""
        merger.execute()
        if self.loaded(table) < batch:
            self.mark(table, batch)

    def mark(self, table: str, batch: int) -> None:
        """Record that a table holds a batch."""
        empty = pa.schema(DeltaTable(self.path(table)).schema().to_arrow()).empty_table()
        write_deltalake(self.path(table), empty, mode="append", commit_properties=_properties(batch))


def _properties(batch: int) -> CommitProperties:
    return CommitProperties(app_transactions=[Transaction(APPLICATION, batch)])


def _differs(names: Sequence[str]) -> str:
    return " OR ".join(f"(old.{name} IS DISTINCT FROM new.{name})" for name in names)
