"""Replicas of a dimension with history. Both follow its Delta table, which has one row for each version.

`CurrentRows` holds the current versions: one row per member, unique by natural key, which serves most facts.
`VersionRows` holds all versions in the order of natural key and time, for facts that are older than the current
version. Versions of a member are in one shard, which its natural key determines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.etl import Dimension
from headrace.etl.history.declaration import AT
from headrace.pipelines.replica.rows import MemberRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.etl.history import History

__all__ = ["CurrentRows", "VersionRows", "current_rows", "version_rows"]


def current_rows(history: History, carried: Iterable[str]) -> CurrentRows:
    """Return the rows of current versions with the columns that facts carry, and those that date the version."""
    kept = {*carried, history.valid_from, history.version}
    dimension = history.dimension
    columns = [column for column in history.version_schema if column.name in {*dimension.natural_key, *kept}]
    return CurrentRows(_narrow(dimension, dimension.natural_key, columns), history.is_current)


def version_rows(history: History, carried: Iterable[str]) -> VersionRows:
    """Return the rows of all versions with the columns that facts carry."""
    dimension, kept = history.dimension, {*history.dimension.natural_key, *carried}
    columns = [pa.field(AT, history.instant_type), *(field for field in history.version_schema if field.name in kept)]
    key = (*dimension.natural_key, AT)
    return VersionRows(_narrow(dimension, key, columns), dimension.natural_key, history.valid_from)


def _narrow(dimension: Dimension, key: tuple[str, ...], columns: list[pa.Field]) -> Dimension:
    return Dimension(
        dimension.name, key, dimension.surrogate_key, pa.schema(columns), dimension.rules, inferred_flag=None
    )


@dataclass(frozen=True)
class CurrentRows(MemberRows):
    """The current versions of a dimension with history.

    Parameters
    ----------
    dimension
        Dimension of current versions, with only the columns of the replica.
    is_current
        Column that marks current versions.
    """

    is_current: str

    @property
    def label(self) -> str:  # noqa: D102 - as in the base
        return f"{self.dimension.name}-current"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the base
        return list(dict.fromkeys([*super().columns, self.is_current]))

    @property
    def feed_key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.shard_key

    def held(self, table: pa.Table) -> pa.Table:  # noqa: D102 - as in the base
        return table.filter(table.column(self.is_current))


@dataclass(frozen=True)
class VersionRows(MemberRows):
    """All versions of a dimension with history, in the order of natural key and start of validity.

    Parameters
    ----------
    dimension
        Dimension whose key is the natural key and the start of validity, with only the columns of the replica.
    natural_key
        Columns of the natural key, which determine the shard.
    valid_from
        Column of the Delta table with the start of validity.
    """

    natural_key: tuple[str, ...]
    valid_from: str

    @property
    def label(self) -> str:  # noqa: D102 - as in the base
        return f"{self.dimension.name}-versions"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the base
        stored = [name for name in super().columns if name != AT]
        return list(dict.fromkeys([*stored, self.valid_from]))

    @property
    def shard_key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return pa.schema([self.key.field(name) for name in self.natural_key])

    @property
    def feed_key(self) -> pa.Schema:  # noqa: D102 - as in the base
        return self.shard_key

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: D102 - as in the base
        return super().hides_later(self.held(table), base)

    def held(self, table: pa.Table) -> pa.Table:  # noqa: D102 - as in the base
        return table.append_column(AT, table.column(self.valid_from))
