"""Verification of a dimension with history: the stored versions must follow from the recorded changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.applying import apply_changes
from headrace.etl.history.declaration import AT
from headrace.etl.history.values import rows_differ, single
from headrace.etl.ranking import key_text
from headrace.etl.surrogate import KeyAllocator

if TYPE_CHECKING:
    from headrace.etl.history.declaration import History

__all__ = ["violations"]

_NAMED = 5


def violations(history: History, entries: pa.Table, current: pa.Table, greatest_key: int) -> tuple[str, ...]:
    """Return the violations in stored entries and in the replica of current versions; empty if both are valid.

    Bounds, numbers, flags, and attributes of all versions are recomputed from the changes that the entries record.
    """
    found = []
    key = history.dimension.surrogate_key
    again = apply_changes(history, entries, _no_changes(history), KeyAllocator(greatest_key))
    if again.upserts.num_rows:
        found.append(
            f"{again.upserts.num_rows} entries are not what their changes say: {_keys(history, again.upserts)}"
        )
    heads = entries.filter(pc.equal(entries.column(AT), entries.column(history.valid_from)))
    if len(pc.unique(heads.column(key))) < heads.num_rows or heads.column(key).null_count:
        found.append(f"surrogate keys ({key!r}) are not unique")
    if (pc.max(heads.column(key)).as_py() or 0) > greatest_key:
        found.append(f"a surrogate key is greater than {greatest_key}, the greatest that was given out")
    columns = current.column_names
    expected = heads.filter(heads.column(history.is_current)).select(columns).cast(current.schema)
    order = [(name, "ascending") for name in history.dimension.natural_key]
    if not _equal(expected.sort_by(order), current.sort_by(order)):
        found.append("the replica of current versions differs from the entries")
    return tuple(found)


def _equal(left: pa.Table, right: pa.Table) -> bool:
    if left.num_rows != right.num_rows:
        return False
    one, other = ([single(column) for column in table.columns] for table in (left, right))
    return not rows_differ(one, other, left.num_rows).any()


def _keys(history: History, rows: pa.Table) -> str:
    keys = key_text([rows.column(name).slice(0, _NAMED) for name in history.dimension.natural_key])
    return "; ".join(dict.fromkeys(keys.to_pylist()))


def _no_changes(history: History) -> pa.Table:
    columns = [*history.dimension.key_schema, *history.dimension.attributes]
    columns.append(pa.field(history.effective, history.effective_type))
    if history.sequence is not None:
        columns.append(pa.field(history.sequence, history.sequence_type))
    if history.operation is not None:
        columns.append(pa.field(history.operation, pa.string()))
    named = {column.name: column for column in columns}  # a column may serve two purposes
    return pa.schema(list(named.values())).empty_table()
