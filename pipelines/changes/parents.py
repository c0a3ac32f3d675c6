"""The parents of a dimension that receives changes: their versions, and the changes that follow from these.

A batch of changes is planned at one version of each parent's table. The task of a shard looks up the versions of the
parents that its members refer to, in replicas of the parents' entries, and `headrace.etl.history.cascade` adds the
changes that follow. The sequence of these changes is the version of the dimension that the batch makes, so each batch
has a greater one.

Members that no change names follow in a batch of their own, after a parent has changed: its tasks look for the members
that ever referred to a changed parent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history import cascade
from headrace.etl.history.cascading import children_of, parents_of
from headrace.etl.history.declaration import AT
from headrace.etl.history.stored import named_members, stored_entries
from headrace.etl.sharding import shard_of
from headrace.pipelines.config.history import history_of, references_of
from headrace.pipelines.delta.tables import DeltaHandle, has_table, read_changes
from headrace.pipelines.dimension.carried_numbers import refuse_numbering_again
from headrace.pipelines.history.tables import create_history
from headrace.pipelines.replica.catch_up import ReplicaSpec
from headrace.pipelines.replica.entry_rows import EntryRows, opened_entries
from headrace.pipelines.replica.rows import of_shard
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.etl.history import History, Reference
    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["Cascade", "ParentTable", "ParentVersions", "followed_stream", "parent_tables", "with_lists"]

_SEPARATOR = r"\s*[,;|]\s*"


@dataclass(frozen=True)
class ParentVersions:
    """The versions of a parent at one version of its table. Picklable.

    Parameters
    ----------
    reference
        Reference of the children to the parent.
    replica
        Replicas of the parent's entries.
    version, base
        Version of the parent's table, and the greatest surrogate key ever given at that version.
    """

    reference: Reference
    replica: ReplicaSpec
    version: int
    base: int

    def of(self, memory: int, *children: pa.Table) -> pa.Table:
        """Return all versions of the parents that entries or changes of children refer to."""
        parent, shards = self.reference.parent, self.replica.shards
        wanted = parents_of(self.reference, *children)
        found = [parent.version_schema.empty_table()]
        keys = parent.dimension.key_schema
        shard = shard_of(wanted.columns, keys, shards) if wanted.num_rows else np.empty(0, np.int64)
        for each in np.unique(shard):
            members = wanted.filter(pa.array(shard == each)).cast(keys)
            with opened_entries(self.replica, int(each), self.version, self.base) as (table, _):
                entries = stored_entries(parent, table, members, memory)
            begins = pc.equal(entries.column(AT), entries.column(parent.valid_from))
            found.append(entries.filter(begins).select(parent.version_schema.names).cast(parent.version_schema))
        return pa.concat_tables(found)

    def changed_since(self, version: int | None) -> pa.Table | None:
        """Return the keys of the parents that changed after a version, each once; None if that is not known."""
        keys = self.reference.parent.dimension.key_schema
        if version is None:
            return None
        if version >= self.version:
            return keys.empty_table()
        path, newest = self.replica.path, self.version
        feed = read_changes(path, version + 1, newest, keys.names, lambda rows: _distinct(rows, keys))
        return None if feed is None else named_members(self.reference.parent, feed)


def _distinct(rows: pa.Table, keys: pa.Schema) -> pa.Table:
    """Return one row for each key; the other columns of the feed are not needed."""
    first = rows.group_by(keys.names).aggregate([(name, "min") for name in rows.column_names if name not in keys.names])
    columns = [first.column(name if name in keys.names else f"{name}_min") for name in rows.column_names]
    return pa.Table.from_arrays(columns, schema=rows.schema)


@dataclass(frozen=True)
class Cascade:
    """What parents give to their children in one batch. Picklable.

    Parameters
    ----------
    parents
        The parents.
    sequence
        Sequence of the changes that follow.
    follows
        Position of the parent whose changed members' children the batch is about; None for a batch of other changes.
    since
        Version of that parent's table up to which the children have followed; None if they have not.
    """

    parents: tuple[ParentVersions, ...]
    sequence: int
    follows: int | None = None
    since: int | None = None

    def changes(self, history: History, entries: pa.Table, changes: pa.Table, memory: int) -> pa.Table:
        """Return changes of members, and those that follow from their parents.

        Parameters
        ----------
        history
            Declaration of the changes.
        entries
            Stored entries of the members.
        changes
            Changes of the members themselves.
        memory
            Memory budget of a join.
        """
        for each in self.parents:
            reference = replace(each.reference, child=history)
            versions = each.of(memory, entries, changes)
            changes = cascade(reference, entries, changes, versions, sequence=self._sequence(history))
        return changes

    def children(self, entries: Iterable[pa.RecordBatch], shards: int, shard: int) -> pa.Table:
        """Return the keys of a shard's members that may have to follow.

        Parameters
        ----------
        entries
            All entries of a replica.
        shards, shard
            Number of shards, and the shard.
        """
        assert self.follows is not None
        parent = self.parents[self.follows]
        changed, keys = parent.changed_since(self.since), parent.reference.child.dimension.key_schema
        if changed is not None and not changed.num_rows:
            return keys.empty_table()
        own = _of_shard(entries, keys, shards, shard)
        if changed is not None:
            return children_of(parent.reference, own, changed)
        found = [keys.empty_table(), *(pa.Table.from_batches([batch.select(keys.names)]).cast(keys) for batch in own)]
        return pa.concat_tables(found).group_by(keys.names).aggregate([])

    def _sequence(self, history: History) -> Any:
        return pa.scalar(self.sequence, history.sequence_type).as_py()


def _of_shard(batches: Iterable[pa.RecordBatch], keys: pa.Schema, shards: int, shard: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from of_shard(pa.Table.from_batches([batch]), keys, shards, shard).to_batches()


@dataclass(frozen=True)
class ParentTable:
    """The table of a parent.

    Parameters
    ----------
    reference
        Reference of the children to the parent.
    handle
        The table.
    shards
        Number of replicas of its entries; None for as many as the dimension that is changed has.
    """

    reference: Reference
    handle: DeltaHandle
    shards: int | None

    def versions(self, config: PipelineConfig, shards: int, tasks: int, at: int | None = None) -> ParentVersions:
        """Return the versions at the newest version of the table, or at a given one."""
        latest, parent = self.handle.latest(), self.reference.parent
        memory = parse_memory(config.replica_memory) // tasks
        replica = ReplicaSpec(
            EntryRows(parent), self.handle.path, latest.table_id, self.shards or shards, config.replicas, memory
        )
        base = self.handle.greatest_key(parent.dimension.surrogate_key)
        return ParentVersions(self.reference, replica, latest.version if at is None else at, base)


def parent_tables(config: PipelineConfig, name: str) -> tuple[ParentTable, ...]:
    """Return the tables of a dimension's parents; those that are missing are created without members."""
    found = []
    for reference in references_of(config, name):
        parent = config.dimensions[reference.parent.dimension.name]
        if not has_table(parent.path):
            refuse_numbering_again(config, reference.parent.dimension.name)
            create_history(parent.path, history_of(config, reference.parent.dimension.name))
        found.append(ParentTable(reference, DeltaHandle(parent.path), parent.shards))
    return tuple(found)


def followed_stream(parent: str, table_id: str) -> str:
    """Return the stream whose batches are the versions of a parent's table that the members of a dimension followed."""
    return f"parent:{parent}:{table_id}"


def with_lists(history: History, changes: pa.Table, repeated: frozenset[str]) -> pa.Table:
    """Return changes with the lists of the attributes that they give, which files have as text.

    Parameters
    ----------
    history
        The declaration.
    changes
        Changes as the files have them.
    repeated
        Attributes that follow from parents. A change that lists one is rejected.
    """
    name = history.partial
    if name is None or name not in changes.column_names:
        return changes
    text = pc.utf8_trim(changes.column(name).combine_chunks(), " \t,;|")
    lists = pc.split_pattern_regex(text, _SEPARATOR)
    lists = pc.if_else(pc.equal(text, ""), pa.scalar([], lists.type), lists)
    given = lists.flatten()
    follows = pc.is_in(given, value_set=pa.array(sorted(repeated), pa.string()))
    # No column has this name, so the change is rejected as one that lists what it cannot give.
    given = pc.if_else(follows, pc.binary_join_element_wise(given, "of the parent", " "), given)
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(np.asarray(lengths))]).astype(np.int32))
    whole = pa.ListArray.from_arrays(offsets, given, mask=lists.is_null())
    return changes.set_column(changes.column_names.index(name), name, whole)
