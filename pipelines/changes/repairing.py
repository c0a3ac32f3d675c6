"""Repair of a dimension with history: what needs no decision is fixed in one commit, and the rest is listed.

No decision is needed where the entries, the declaration or the table itself say what must be there: flags of current
versions, numbers of versions, ends of current versions, hidden columns, special members, the property with the greatest
key, and replicas. A member whose versions differ from its entries in any other way is left as it is, because the entry
or the version may be the damaged one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import KeyAllocator
from headrace.etl.history import apply_changes, special_versions
from headrace.etl.history.values import rows_differ, single
from headrace.etl.ranking import occurs_in, rank_rows
from headrace.pipelines.changes.sources import change_columns
from headrace.pipelines.delta.commits import Commit
from headrace.pipelines.delta.data_files import FileSpec, FileWriter
from headrace.pipelines.delta.row_changes import RowChanges, change_rows_exactly, feed_files
from headrace.pipelines.history.differences import feed_rows
from headrace.pipelines.history.layout import ENTRIES, delta_schema, entries_of, version_rows
from headrace.pipelines.history.tables import special_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

    from headrace.etl.history import History
    from headrace.pipelines.delta.data_files import DataFile
    from headrace.pipelines.delta.tables import DeltaHandle

__all__ = ["RowRepair", "no_changes", "repaired_rows", "repaired_special_members", "rows_differ_in"]

_APPLICATION: Final = "headrace:repair"


def repaired_rows(history: History, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return rows that need no decision, as they are and as they must be, in the same order.

    Parameters
    ----------
    history
        The declaration.
    rows
        All rows of some members (`delta_schema`), without special members.
    """
    entries, surrogate = entries_of(history, rows), history.dimension.surrogate_key
    keys = np.asarray(single(rows.column(surrogate).fill_null(0)))
    if len(np.unique(keys)) < len(keys):
        return rows.slice(0, 0), rows.slice(0, 0)
    applied = apply_changes(history, entries, no_changes(history), KeyAllocator(int(keys.max(initial=0))))
    wanted = version_rows(history, _replaced(history, entries, applied.upserts))
    order = rows.take(pa.array(np.argsort(keys)))
    member, members = rank_rows([single(order.column(name)) for name in history.dimension.natural_key])
    unclear = np.zeros(members, dtype=np.bool_)
    if applied.inserted.num_rows or applied.retired.num_rows or wanted.num_rows != order.num_rows:
        unclear |= _named(history, order, member, members, [applied.inserted, applied.retired])
    there = np.isin(np.asarray(single(wanted.column(surrogate))), np.asarray(single(order.column(surrogate))))
    wanted = wanted.filter(pa.array(there))
    if wanted.num_rows != order.num_rows:
        return rows.slice(0, 0), rows.slice(0, 0)
    differs, undecided = _differing(history, order, wanted)
    unclear[member[undecided]] = True
    chosen = pa.array(differs & ~unclear[member])
    return order.filter(chosen), wanted.filter(chosen)


def repaired_special_members(history: History, found: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the rows of special members that must be replaced, and those that must be added.

    Parameters
    ----------
    history
        The declaration.
    found
        Rows of the table without a natural key (`delta_schema`).
    """
    wanted, surrogate = special_rows(history), history.dimension.surrogate_key
    keys, declared = found.column(surrogate).to_pylist(), wanted.column(surrogate).to_pylist()
    names = special_versions(history).column_names
    stored = {key: row for key, row in zip(keys, found.select(names).to_pylist(), strict=True) if keys.count(key) == 1}
    must = dict(zip(declared, wanted.select(names).to_pylist(), strict=True))
    wrong = [key for key in declared if (key in stored and stored[key] != must[key]) or key not in keys]
    kind = pa.array(wrong, pa.int64())
    return found.filter(pc.is_in(found.column(surrogate), kind)), wanted.filter(
        pc.is_in(wanted.column(surrogate), kind)
    )


@dataclass
class RowRepair:
    """Rows of a table that are replaced in one commit.

    Parameters
    ----------
    history, handle
        Declaration of the dimension, and its table at the version that the rows were read from.
    """

    history: History
    handle: DeltaHandle
    _removed: list[NDArray[np.int64]] = field(default_factory=list)
    _files: list[DataFile] = field(default_factory=list)
    _feed: list[DataFile] = field(default_factory=list)

    def add(self, before: pa.Table, after: pa.Table) -> None:
        """Write the files of rows to replace; no commit names them yet."""
        path, schema, key = self.handle.path, delta_schema(self.history), self.history.dimension.surrogate_key
        self._removed.append(np.asarray(single(before.column(key))))
        self._files += _written(FileSpec(path, schema), after)
        self._feed += _written(feed_files(path, schema), feed_rows(key, before.cast(schema), after.cast(schema)))

    def commit(self, version: int, properties: dict[str, str]) -> None:
        """Replace the rows, at exactly the version after the given one.

        Raises
        ------
        TableMovedError
            If another writer committed first. Nothing was changed.
        """
        removed = np.sort(np.concatenate([np.empty(0, np.int64), *self._removed]))
        changes = RowChanges(
            self.history.dimension.surrogate_key, removed, self._files, self._feed if len(removed) else ()
        )
        commit = Commit(_APPLICATION, version, {}, properties)
        change_rows_exactly(self.handle.path, self.handle.table, self.handle.live, version, changes, commit)


def _differing(history: History, rows: pa.Table, wanted: pa.Table) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which rows differ from what must be there, and which differ in what only a person can decide."""
    derived = {history.is_current, history.version, "_sequence", ENTRIES}
    current = np.asarray(single(wanted.column(history.is_current)), dtype=np.bool_)
    differs = np.zeros(rows.num_rows, dtype=np.bool_)
    undecided = np.zeros(rows.num_rows, dtype=np.bool_)
    for name in wanted.column_names:
        other = rows_differ_in(rows.select([name]), wanted.select([name]))
        differs |= other
        if name == history.valid_to:
            undecided |= other & ~current
        elif name not in derived:
            undecided |= other
    return differs, undecided


def _named(
    history: History, rows: pa.Table, member: NDArray[np.int64], members: int, others: Iterable[pa.Table]
) -> NDArray[np.bool_]:
    """Return which members other rows name."""
    names = list(history.dimension.natural_key)
    keys = rows.select(names)
    found = np.zeros(members, dtype=np.bool_)
    found[member[occurs_in(keys, [table.select(names).cast(keys.schema) for table in others])]] = True
    return found


def _replaced(history: History, entries: pa.Table, upserts: pa.Table) -> pa.Table:
    """Return entries with some replaced."""
    names = list(history.entry_key)
    kept = ~occurs_in(entries.select(names), [upserts.select(names)])
    return pa.concat_tables([entries.filter(pa.array(kept)), upserts])


def _written(spec: FileSpec, rows: pa.Table) -> list[Any]:
    if not rows.num_rows:
        return []
    with FileWriter(spec) as writer:
        for batch in rows.cast(spec.schema).combine_chunks().to_batches():
            writer.write(batch)
        return list(writer.close())


def rows_differ_in(left: pa.Table, right: pa.Table) -> NDArray[np.bool_]:
    """Return which rows of two tables of the same length differ."""
    differs = np.zeros(left.num_rows, dtype=np.bool_)
    for each in right.schema:
        one, other = single(left.column(each.name)).cast(each.type), single(right.column(each.name))
        if not pa.types.is_list(each.type):
            differs |= rows_differ([one], [other], len(one))
            continue
        lengths = [pc.fill_null(pc.list_value_length(side), -1) for side in (one, other)]
        uneven = rows_differ([lengths[0]], [lengths[1]], len(one))
        differs |= uneven
        even = pa.array(~uneven)
        items, others = one.filter(even), other.filter(even)
        parents = np.flatnonzero(~uneven)[np.asarray(pc.list_parent_indices(items))]
        parts = [[side.flatten().field(i) for i in range(each.type.value_type.num_fields)] for side in (items, others)]
        differs[parents[rows_differ(parts[0], parts[1], len(parents))]] = True
    return differs


def no_changes(history: History, *, repeated: Collection[str] = ()) -> pa.Table:
    """Return no changes, with the columns of changes but those that follow from parents."""
    kinds = change_columns(history, repeated=repeated)
    columns = {name: kind for name, kind in kinds.items() if name != history.partial}
    return pa.schema(list(columns.items())).empty_table()
