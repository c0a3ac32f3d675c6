"""Replicas of a dimension with history. Both follow its Delta table, which has one row for each version.

`CurrentRows` holds the current versions: one row per member, unique by natural key, which serves most facts.
`VersionRows` holds all versions in the order of natural key and time, for facts that are older than the current
version. Versions of a member are in one shard, which its natural key determines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import Dimension
from headrace.etl.history.declaration import AT
from headrace.etl.special import Special
from headrace.pipelines.replica.rows import Changes, MemberRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.etl.history import History

__all__ = ["CurrentRows", "VersionRows", "current_rows", "version_rows"]

_SPECIAL = pa.array([int(member) for member in Special], pa.int64())


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
class CurrentRows:
    """The current versions of a dimension with history.

    Parameters
    ----------
    dimension
        Dimension of current versions, with only the columns of the replica.
    is_current
        Column that marks current versions.
    """

    dimension: Dimension
    is_current: str

    @property
    def label(self) -> str:  # noqa: D102 - as in the protocol
        return f"{self.dimension.name}-current"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the protocol
        return list(dict.fromkeys([*self.dimension.table_schema.names, self.is_current]))

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.dimension.table_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.dimension.key_schema

    @property
    def shard_key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.key

    @property
    def feed_key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.shard_key

    @property
    def unique(self) -> bool:  # noqa: D102 - as in the protocol
        return True

    @property
    def filter_bits(self) -> None:  # noqa: D102 - as in the protocol
        return None

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: D102 - as in the protocol
        return MemberRows(self.dimension).rows(self._current(table), version)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the protocol
        return MemberRows(self.dimension).changes(self._current(table))

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: D102 - as in the protocol
        return MemberRows(self.dimension).hides_later(_members(self.dimension, table), base)

    def _current(self, table: pa.Table) -> pa.Table:
        return _members(self.dimension, table.filter(table.column(self.is_current)))


@dataclass(frozen=True)
class VersionRows:
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

    dimension: Dimension
    natural_key: tuple[str, ...]
    valid_from: str

    @property
    def label(self) -> str:  # noqa: D102 - as in the protocol
        return f"{self.dimension.name}-versions"

    @property
    def columns(self) -> list[str]:  # noqa: D102 - as in the protocol
        stored = [name for name in self.dimension.table_schema.names if name != AT]
        return list(dict.fromkeys([*stored, self.valid_from]))

    @property
    def schema(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.dimension.table_schema

    @property
    def key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.dimension.key_schema

    @property
    def shard_key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return pa.schema([self.key.field(name) for name in self.natural_key])

    @property
    def feed_key(self) -> pa.Schema:  # noqa: D102 - as in the protocol
        return self.shard_key

    @property
    def unique(self) -> bool:  # noqa: D102 - as in the protocol
        return True

    @property
    def filter_bits(self) -> None:  # noqa: D102 - as in the protocol
        return None

    def rows(self, table: pa.Table, version: int) -> pa.Table:  # noqa: D102 - as in the protocol
        return MemberRows(self.dimension).rows(self._dated(table), version)

    def changes(self, table: pa.Table) -> Changes | None:  # noqa: D102 - as in the protocol
        return MemberRows(self.dimension).changes(self._dated(table))

    def hides_later(self, table: pa.Table, base: int) -> bool:  # noqa: D102 - as in the protocol
        return MemberRows(self.dimension).hides_later(self._dated(table), base)

    def _dated(self, table: pa.Table) -> pa.Table:
        return _members(self.dimension, table.append_column(AT, table.column(self.valid_from)))


def _members(dimension: Dimension, table: pa.Table) -> pa.Table:
    """Return the rows that are not special members."""
    special = np.asarray(pc.is_in(table.column(dimension.surrogate_key), value_set=_SPECIAL))
    return table.filter(pa.array(~special)) if special.any() else table
