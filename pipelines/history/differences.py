"""The rows of the Delta table that applied changes of members remove, add and replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from headrace.etl.history.values import single
from headrace.etl.ranking import occurs_in
from headrace.pipelines.delta.tables import CHANGE_TYPE
from headrace.pipelines.history.layout import version_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history import Applied, History

__all__ = ["RowDifferences", "feed_rows", "row_differences"]

_UPDATED: Final = ("update_preimage", "update_postimage")


@dataclass(frozen=True)
class RowDifferences:
    """Differences between the rows of versions before and after changes.

    Parameters
    ----------
    before
        Rows to remove (`delta_schema`): rows that change, and rows of retired versions.
    after
        Rows to add: the new form of rows that change, and rows of new versions.
    feed
        The same rows with their `_change_type`, as in Delta's change feed.
    """

    before: pa.Table
    after: pa.Table
    feed: pa.Table


def row_differences(history: History, entries: pa.Table, applied: Applied) -> RowDifferences:
    """Return the differences in rows that changes make.

    Parameters
    ----------
    history
        The declaration.
    entries
        Stored entries of the members that the changes name, as given to `apply_changes`.
    applied
        Result of `apply_changes`.
    """
    surrogate = history.dimension.surrogate_key
    gone = _replaced(history, entries, applied)
    keys = np.asarray(single(entries.column(surrogate)))
    upserted = np.asarray(single(applied.upserts.column(surrogate)))
    touched = np.union1d(keys[gone], upserted)
    was_touched = np.isin(keys, touched)
    before = version_rows(history, entries.filter(pa.array(was_touched)))
    kept = entries.filter(pa.array(was_touched & ~gone))
    after = version_rows(history, pa.concat_tables([kept, applied.upserts]))
    return RowDifferences(before, after, feed_rows(surrogate, before, after))


def _replaced(history: History, entries: pa.Table, applied: Applied) -> NDArray[np.bool_]:
    """Return which entries are replaced or removed."""
    keys, *others = (table.select(list(history.entry_key)) for table in (entries, applied.upserts, applied.deletes))
    return occurs_in(keys, others)


def feed_rows(surrogate: str, before: pa.Table, after: pa.Table) -> pa.Table:
    """Return rows before and after a change with their `_change_type`, as in Delta's change feed.

    Parameters
    ----------
    surrogate
        Column of the surrogate key, by which rows before and after belong together.
    before, after
        Rows that are removed, and rows that are added.
    """
    old, new = (np.asarray(single(table.column(surrogate))) for table in (before, after))
    parts = [
        before.append_column(CHANGE_TYPE, _types(np.isin(old, new), _UPDATED[0], "delete")),
        after.append_column(CHANGE_TYPE, _types(np.isin(new, old), _UPDATED[1], "insert")),
    ]
    return pa.concat_tables(parts)


def _types(updated: NDArray[np.bool_], update: str, other: str) -> pa.Array:
    return pa.array([other, update]).take(pa.array(updated.astype(np.int8)))
