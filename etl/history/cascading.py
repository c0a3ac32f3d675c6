"""Cascades: a new version of a parent gives its children new versions.

A child refers to a member of a parent dimension, for example an account to its customer, and repeats columns of the
parent's versions, at least the surrogate key. `cascade` compares these columns with the versions that are valid at each
time at which the child or its parent changes, and returns partial changes where they differ. A partial change carries
all other attributes of the child, so that a change of the child itself on the same day, in whatever order, makes one
version with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.errors import DeclarationError
from headrace.etl.history.changes import change_schema, take_in
from headrace.etl.history.declaration import AT, History
from headrace.etl.history.instants import ticks_of, to_instants
from headrace.etl.history.merging import Merged, merge
from headrace.etl.history.stored import named_members
from headrace.etl.history.values import differ, pick, single
from headrace.etl.ranking import rank_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from headrace.etl.equality import Conformed

__all__ = ["Reference", "cascade", "children_of", "parents_of"]


@dataclass(frozen=True)
class Reference:
    """Reference from a child dimension to the versions of a parent dimension, both with history.

    Parameters
    ----------
    child
        Dimension whose members refer to the parent. It needs `partial` and `sequence`.
    parent
        Dimension that is referred to.
    on
        Natural key column of the parent for each attribute of the child that refers to it.
    carry
        Column of the parent's versions for each attribute of the child that repeats it, such as
        ``{"customer_key": "customer_key", "customer_from": "valid_from"}``. The changes of the child itself do not give
        these attributes.
    audit
        Column of the parent's versions for each audit attribute of the child that versions take which only a version
        of the parent opens.

    Raises
    ------
    DeclarationError
        If a column is missing, or the declarations do not fit together.
    """

    child: History
    parent: History
    on: dict[str, str]
    carry: dict[str, str]
    audit: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"reference from {self.child.dimension.name!r} to {self.parent.dimension.name!r}"
        if self.child.partial is None or self.child.sequence is None:
            raise DeclarationError(f"{where}: the child needs `partial` and `sequence`, which decide what is newer")
        if sorted(self.on.values()) != sorted(self.parent.dimension.natural_key):
            raise DeclarationError(f"{where}: `on` names all columns of the parent's natural key, each once")
        self._check_attributes(where)
        if self.child.instant_type != self.parent.instant_type:
            raise DeclarationError(f"{where}: the versions of one begin on days, those of the other at times")

    def _check_attributes(self, where: str) -> None:
        attributes, versions = self.child.dimension.attributes, self.parent.version_schema
        kinds = {**dict.fromkeys((*self.on, *self.carry), "2"), **dict.fromkeys(self.audit, "audit")}
        for name, kind in kinds.items():
            if name not in attributes.names or self.child.type_of(name) != kind:
                raise DeclarationError(f"{where}: the child has no attribute {name!r} of type {kind}")
        for name, column in (self.carry | self.audit).items():
            if column not in versions.names:
                raise DeclarationError(f"{where}: the parent has no column {column!r}")
            if attributes.field(name).type != versions.field(column).type:
                raise DeclarationError(
                    f"{where}: {name!r} has type {attributes.field(name).type}, and {column!r} of the parent has type "
                    f"{versions.field(column).type}; give both the same type"
                )


def cascade(
    reference: Reference,
    entries: pa.Table,
    changes: pa.Table | pa.RecordBatch,
    parents: pa.Table,
    *,
    sequence: Any,
    audit: Mapping[str, Any] | None = None,
) -> pa.Table:
    """Return changes of children, followed by the changes that their parents' versions cause.

    Parameters
    ----------
    reference
        Reference from the children to their parents.
    entries
        All stored entries of the children that the changes name, and of those whose parents may have changed.
    changes
        Changes of children themselves. If they lack the partial column, they give the columns that they have.
    parents
        All versions of the parents that these children ever referred to; versions of others are ignored.
    sequence
        Sequence of the resulting changes. It is greater than that of all earlier cascades of these children.
    audit
        Values of audit attributes for versions that only the cascade opens.

    Returns
    -------
    pyarrow.Table
        Changes for `apply_changes`: natural key, times, attributes, and the list of attributes that each gives.

    Raises
    ------
    DeclarationError
        If changes give an attribute that the cascade sets, or an earlier cascade has a greater sequence.
    """
    parents = parents.filter(_has_key(reference, parents))
    own = _listed(reference, changes)
    merged = merge(reference.child, entries, take_in(reference.child, own).rows)
    points = _points(reference, merged, parents)
    emitted = points.taken(_differs_from_carried(reference, merged, points, parents))
    _check_sequence(reference, merged, emitted, sequence)
    caused = _changes(reference, merged, emitted, parents, sequence, dict(audit or {}))
    for name in reference.child.dimension.natural_key:
        place = caused.column_names.index(name)
        caused = caused.set_column(place, name, caused.column(place).cast(own.schema.field(name).type))
    return pa.concat_tables([own, caused], promote_options="permissive").select(own.column_names)


def children_of(reference: Reference, entries: Iterable[pa.RecordBatch], parents: pa.Table) -> pa.Table:
    """Return the keys of the children that ever referred to some parents, each key once.

    Parameters
    ----------
    reference
        Reference from the children to their parents.
    entries
        Entries of children.
    parents
        Natural keys of the parents, normalized, each once.
    """
    dimension, keys = reference.parent.dimension, reference.child.dimension.key_schema
    child_of = {column: name for name, column in reference.on.items()}
    found = [keys.empty_table()]
    for batch in entries:
        referred = dimension.conform_key([batch.column(child_of[name]) for name in dimension.natural_key])
        met = batch.filter(pa.array(_are_among(referred, parents)))
        found.append(pa.Table.from_batches([met.select(keys.names)]).cast(keys))
    return pa.concat_tables(found).group_by(keys.names).aggregate([])


def parents_of(reference: Reference, *rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return the keys of the parents that entries or changes of children refer to, each key once."""
    parent, names = reference.parent, list(reference.on)
    keys = [parent.dimension.key_schema.empty_table()]
    for table in rows:
        if set(names) <= set(table.schema.names):
            columns = [single(table.column(name)) for name in names]
            keys.append(named_members(parent, pa.table(columns, names=list(reference.on.values()))))
    found = pa.concat_tables(keys)
    return found.group_by(found.column_names).aggregate([])


def _are_among(keys: list[Conformed], wanted: pa.Table) -> NDArray[np.bool_]:
    """Return which keys are among some distinct keys."""
    usable = ~np.logical_or.reduce([key.null | key.unfit for key in keys])
    rows = pa.array(np.flatnonzero(usable))
    both = [pa.concat_arrays([single(w), key.values.take(rows)]) for w, key in zip(wanted.columns, keys, strict=True)]
    ranks, _ = rank_rows(both)
    usable[usable] = np.isin(ranks[wanted.num_rows :], ranks[: wanted.num_rows])
    return usable


def _has_key(reference: Reference, parents: pa.Table) -> pa.Array:
    """Return which versions belong to members with a natural key; the special members have none."""
    keys = [single(parents.column(name)).is_valid() for name in reference.parent.dimension.natural_key]
    return reduce(pc.and_, keys)


def _listed(reference: Reference, changes: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return changes with all columns, and with the list of attributes that each gives."""
    child, rows = reference.child, changes.num_rows
    table = pa.table(changes.columns, names=changes.schema.names)
    attributes = child.dimension.attributes
    present = [name for name in attributes.names if name in table.column_names]
    every = pa.array([present], pa.list_(pa.string())).take(pa.array(np.zeros(rows, dtype=np.int64)))
    assert child.partial is not None
    if child.partial in table.column_names:
        place = table.column_names.index(child.partial)
        lists = pc.coalesce(single(table.column(place)).cast(pa.list_(pa.string())), every)
        table = table.set_column(place, child.partial, lists)
    else:
        table = table.append_column(child.partial, every)
    clash = set(pc.unique(pc.list_flatten(single(table.column(child.partial)))).to_pylist()) & set(reference.carry)
    if clash:
        raise DeclarationError(
            f"changes of dimension {child.dimension.name!r} give {min(clash)!r}, which follows from "
            f"{reference.parent.dimension.name!r}; leave the column out"
        )
    table = table.drop_columns([name for name in reference.carry if name in table.column_names])
    for column in attributes:
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(rows, column.type))
    at = to_instants(table.column(child.effective), child.effective_type, child.effective)
    return table.set_column(table.column_names.index(child.effective), child.effective, at)


@dataclass(frozen=True)
class _Points:
    """Times at which the reference of a child may change, by child and time.

    Parameters
    ----------
    row
        Row of `Merged` that is valid at the point.
    own
        True if the point is the time of that row, false if only a version of the parent begins.
    version
        Position of the version of the parent that is valid at the point; -1 if there is none.
    """

    row: NDArray[np.int64]
    own: NDArray[np.bool_] = field(repr=False)
    version: NDArray[np.int64] = field(repr=False)

    def taken(self, which: NDArray[np.bool_]) -> _Points:
        return _Points(self.row[which], self.own[which], self.version[which])


def _points(reference: Reference, merged: Merged, parents: pa.Table) -> _Points:
    """Return the times of the children's rows, and between them those at which their parents' versions begin."""
    at = merged.at
    begins = ticks_of(single(parents.column(reference.parent.valid_from)))
    child, parent = _parent_ranks(reference, merged, parents)
    times = np.unique(np.concatenate([at, begins]))
    scale = len(times) + 1
    place = parent * scale + np.searchsorted(times, begins)
    order = np.argsort(place, kind="stable")
    following = np.append(at[1:], 0)
    final = np.append(merged.starts[1:], np.ones(min(1, len(at)), dtype=np.bool_))
    until = np.where(final, len(times), np.searchsorted(times, following))
    since = child * scale + np.searchsorted(times, at)
    first = np.searchsorted(place[order], since, side="right")
    end = np.maximum(np.searchsorted(place[order], child * scale + until, side="left"), first)
    end = np.where(child < 0, first, end)
    valid = first - 1
    known = (valid >= 0) & (child >= 0)
    known[known] = parent[order[valid[known]]] == child[known]
    counts = end - first + 1
    row = np.repeat(np.arange(len(at)), counts)
    step = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    sorted_version = np.where(step == 0, np.where(known, valid, -1)[row], first[row] + step - 1)
    version = np.where(sorted_version < 0, -1, order[np.maximum(sorted_version, 0)]) if len(order) else sorted_version
    return _Points(row, step == 0, version)


def _parent_ranks(
    reference: Reference, merged: Merged, parents: pa.Table
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rank of the parent of each row, -1 without one, and of each version."""
    dimension = reference.parent.dimension
    attribute = {column: name for name, column in reference.on.items()}
    given = dimension.conform_key([merged.columns[attribute[name]] for name in dimension.natural_key])
    absent = np.logical_or.reduce([key.null | key.unfit for key in given])
    stored = [single(parents.column(name)) for name in dimension.natural_key]
    present = pa.array(np.flatnonzero(~absent))
    keys = [
        pa.concat_arrays([key.values.take(present), s.cast(key.values.type)])
        for key, s in zip(given, stored, strict=True)
    ]
    ranks, _ = rank_rows(keys)
    child = np.full(len(absent), -1, dtype=np.int64)
    child[~absent] = ranks[: len(present)]
    return child, ranks[len(present) :]


def _differs_from_carried(
    reference: Reference, merged: Merged, points: _Points, parents: pa.Table
) -> NDArray[np.bool_]:
    """Return the points at which the child, after the changes of all points before, would refer to another version."""
    begins = np.ones(len(points.row), dtype=np.bool_)
    begins[1:] = merged.starts[points.row[1:]] & points.own[1:]
    before = np.where(begins, -1, np.append(-1, points.version[:-1]) if len(begins) else points.version)
    differs = np.zeros(len(points.row), dtype=np.bool_)
    for name, column in reference.carry.items():
        values = single(parents.column(column))
        given = np.asarray(merged.own[reference.child.given[name]].is_valid())[points.row] & points.own
        recorded = merged.own[reference.child.recorded[name]].take(pa.array(points.row))
        carried = pc.if_else(pa.array(given), recorded, pick(values, before))
        differs |= differ(carried, pick(values, points.version))
    return differs


def _check_sequence(reference: Reference, merged: Merged, points: _Points, sequence: Any) -> None:
    child = reference.child
    own = pa.array(points.row[points.own])
    for name in reference.carry:
        greatest = pc.max(merged.own[child.given[name]].take(own)).as_py()
        if greatest is not None and greatest >= pa.scalar(sequence, child.stored_sequence).as_py():
            raise DeclarationError(
                f"dimension {child.dimension.name!r}: an earlier cascade has the sequence {greatest}, which is not "
                f"less than {sequence}; give each cascade a greater one"
            )


def _changes(
    reference: Reference, merged: Merged, points: _Points, parents: pa.Table, sequence: Any, audit: dict[str, Any]
) -> pa.Table:
    child, rows = reference.child, len(points.row)
    row = pa.array(points.row)
    columns = {name: merged.columns[name].take(row) for name in child.dimension.natural_key}
    begins = pick(single(parents.column(reference.parent.valid_from)), np.where(points.own, -1, points.version))
    at = pc.coalesce(begins, merged.columns[AT].take(row))
    columns[child.effective] = to_instants(at, child.effective_type, child.effective)
    assert child.sequence is not None
    assert child.partial is not None
    columns[child.sequence] = pa.repeat(pa.scalar(sequence, child.sequence_type), rows)
    repeated = reference.carry | reference.audit
    columns |= {name: pick(single(parents.column(column)), points.version) for name, column in repeated.items()}
    for name, value in audit.items():
        columns[name] = pa.repeat(pa.scalar(value, change_schema(child).field(name).type), rows)
    lists = pa.array([[*dict.fromkeys([*repeated, *audit])], [*reference.carry]], pa.list_(pa.string()))
    columns[child.partial] = lists.take(pa.array(points.own.astype(np.int64)))
    return pa.table(columns)
