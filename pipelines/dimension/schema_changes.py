"""Changes of a dimension's columns: attributes that are added, widened or removed.

A pipeline that declares `columns` adds the attributes that its table lacks and widens those that are narrower, before
its first batch, and says so. Nothing is removed by declaration. What cannot be done without loss is refused before
anything is written. Replicas follow by themselves: their folder depends on the columns that they hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from headrace.pipelines.config.column_types import type_name
from headrace.pipelines.delta.columns import add_columns
from headrace.pipelines.delta.reads import plain_schema
from headrace.pipelines.delta.rewrites import refuse_rewrite, rewrite
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SchemaChange", "change_schema", "changed_schema", "is_wider", "planned_changes", "refuse_changes"]

_ATTEMPTS: Final = 20
_INTEGERS: Final = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_DIGITS: Final = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_DELTA_NAMES: Final = {
    "tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long", "timestamp": "timestamp",
}  # fmt: skip


@dataclass(frozen=True)
class SchemaChange:
    """A change of one column.

    Parameters
    ----------
    column
        Name of the column.
    old, new
        Type before and after the change; `old` is None for a column that is added, `new` for one that is removed.
    """

    column: str
    old: pa.DataType | None
    new: pa.DataType | None

    def told(self, dimension: str, path: str) -> str:
        """Return what was done, for the summary of a run."""
        if self.old is None and self.new is not None:
            what = f"the column {self.column!r} {type_name(self.new)} was added; members have no value in it yet"
        elif self.old is not None and self.new is not None:
            what = f"the column {self.column!r} was widened from {type_name(self.old)} to {type_name(self.new)}"
        else:
            what = f"the column {self.column!r} was removed; earlier versions of the table still have it"
        return f"dimension {dimension!r}, {path}: {what}"


def is_wider(new: pa.DataType, old: pa.DataType) -> bool:
    """Return whether each value of a type is exactly a value of another type."""
    if old in _INTEGERS and new in _INTEGERS:
        return _INTEGERS.index(new) > _INTEGERS.index(old)
    if pa.types.is_decimal(new):
        if pa.types.is_decimal(old):
            whole = new.precision - new.scale >= old.precision - old.scale
            return bool(whole and new.scale >= old.scale and new != old)
        return bool(old in _DIGITS and new.precision - new.scale >= _DIGITS[old])
    if new == pa.float64():
        return old in {pa.float32(), pa.int8(), pa.int16(), pa.int32()}
    return bool(new == pa.float32() and old in {pa.int8(), pa.int16()})


def planned_changes(
    there: pa.Schema, declared: Mapping[str, pa.DataType], fixed: Sequence[str] = ()
) -> list[SchemaChange]:
    """Return the changes that give a table the declared columns; a type that is not wider is left to the caller.

    Parameters
    ----------
    there
        Columns of the table.
    declared
        Declared types by column.
    fixed
        Columns that must be in the table already.
    """
    known = {field.name: field.type for field in there}
    lower = {name.lower() for name in known}
    changes = []
    for column, kind in declared.items():
        if column not in known:
            if column not in fixed and column.lower() not in lower:
                changes.append(SchemaChange(column, None, kind))
        elif is_wider(kind, known[column]):
            changes.append(SchemaChange(column, known[column], kind))
    return changes


def changed_schema(there: pa.Schema, changes: Sequence[SchemaChange]) -> pa.Schema:
    """Return the columns of a table after changes."""
    by_name = {change.column: change for change in changes}
    fields = []
    for field in there:
        change = by_name.get(field.name)
        if change is None:
            fields.append(field)
        elif change.new is not None:
            fields.append(field.with_type(change.new))
    added = [pa.field(change.column, change.new) for change in changes if change.old is None]
    return pa.schema([*fields, *added])


def refuse_changes(path: str, changes: Sequence[SchemaChange]) -> None:
    """Raise an error if a table cannot be changed; nothing is written.

    Raises
    ------
    DeltaTableError
        If columns are to be widened or removed, and the table cannot be rewritten.
    """
    if any(change.old is not None for change in changes):
        refuse_rewrite(open_table(path), path)


def change_schema(path: str, changes: Sequence[SchemaChange]) -> None:
    """Make changes of a table's columns. New columns are added first; the others take one rewrite of the table.

    Raises
    ------
    DeltaTableError
        If the table cannot be changed, or other writers win every attempt.
    """
    refuse_changes(path, changes)
    added = [pa.field(change.column, change.new) for change in changes if change.old is None]
    if added:
        add_columns(path, added)
    others = [change for change in changes if change.old is not None]
    for _ in range(_ATTEMPTS if others else 0):
        if _rewritten(path, others):
            return
    if others:
        raise DeltaTableError(
            f"other writers won {_ATTEMPTS} attempts to change the columns of {path}; run again when they have ended"
        )


def _rewritten(path: str, changes: Sequence[SchemaChange]) -> bool:
    """Rewrite a table with changed columns; return False if another writer committed first."""
    table = open_table(path)
    there = plain_schema(pa.schema(table.schema().to_arrow()))
    pending = [change for change in changes if _is_pending(change, there)]
    if not pending:
        return True
    schema = pa.schema([field.remove_metadata() for field in changed_schema(there, pending)])
    by_name = {change.column: change.new for change in pending}
    fields = []
    for field in json.loads(table.schema().to_json())["fields"]:
        new = by_name.get(field["name"], ...)
        if new is not None:
            fields.append(field if new is ... else {**field, "type": _delta_type(new)})

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [batch.column(field.name).cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    return rewrite(path, table, fields, schema, convert)


def _is_pending(change: SchemaChange, there: pa.Schema) -> bool:
    """Return whether a change is still to be made; raise an error if another job made a different one."""
    kind = there.field(change.column).type if change.column in there.names else None
    if kind not in {change.old, change.new}:
        found = "removed" if kind is None else f"changed to {type_name(kind)}"
        raise DeltaTableError(f"the column {change.column!r} was {found} by another job; run again")
    return bool(kind == change.old)


def _delta_type(kind: pa.DataType) -> str:
    name = type_name(kind)
    return _DELTA_NAMES.get(name, name)
