"""Entries of inferred members, and the rows of special members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.declaration import AT, BEGINNING
from headrace.etl.outcomes import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.etl.history.declaration import History
    from headrace.etl.lookup import Lookup
    from headrace.etl.special import Special

__all__ = ["bounds_of_all_times", "inferred_entries", "inferred_members", "special_versions"]


def inferred_members(history: History, lookup: Lookup, batches: Iterable[pa.RecordBatch], base: int = 0) -> pa.Table:
    """Return the entries of members that a lookup of facts has inferred.

    Parameters
    ----------
    history
        The declaration.
    lookup
        Lookup of the current version (`AsOfLookup.current`).
    batches
        Output batches of the lookup.
    base
        Base of the allocator. Members with keys up to the base are already in the dimension.
    """
    columns = [lookup.key_column, *lookup.stream_columns]
    inferred = [
        batch.filter(pc.equal(batch.column(lookup.outcome_column), str(Outcome.INFERRED))).select(columns)
        for batch in batches
    ]
    rows = pa.Table.from_batches(inferred) if inferred else None
    if rows is None or not rows.num_rows:
        return history.entry_schema.empty_table()
    rows = rows.filter(pc.greater(rows.column(0), base))
    # The smallest spelling represents the member, so that the order of facts does not matter.
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in columns])
    rows = rows.take(order)
    keys, first = np.unique(np.asarray(rows.column(0)), return_index=True)
    return inferred_entries(history, rows.take(pa.array(first)).select(list(lookup.stream_columns)), keys)


def inferred_entries(history: History, spelled: pa.Table, surrogate_keys: Any) -> pa.Table:
    """Return entries of members without attributes, valid for all times.

    Parameters
    ----------
    history
        The declaration.
    spelled
        Natural keys in their original spelling, in the column order of the dimension; each member once.
    surrogate_keys
        Surrogate key of each member.
    """
    rows, dimension = spelled.num_rows, history.dimension
    conformed = dimension.conform_key(spelled.columns)
    given = dict(zip(dimension.natural_key, (key.values for key in conformed), strict=True))
    given[dimension.surrogate_key] = pa.array(surrogate_keys, pa.int64())
    for name, column in history.spelled.items():
        given[column] = spelled.column(dimension.natural_key.index(name)).cast(pa.string())
        given[history.recorded[column]] = given[column]
    begin = pa.scalar(BEGINNING, pa.date32()).cast(history.instant_type)
    given |= {AT: pa.repeat(begin, rows)}
    return _table(history.entry_schema, rows, given | bounds_of_all_times(history, rows, inferred=True))


def special_versions(history: History, members: Iterable[Special] | None = None) -> pa.Table:
    """Return special members, by default all of the dimension, as versions that are valid for all times."""
    wanted = history.special.present if members is None else tuple(members)
    values = [history.special.values(member) or {} for member in wanted]
    given: dict[str, Any] = {
        field.name: pa.array([row.get(field.name) for row in values], field.type)
        for field in history.dimension.attributes
    }
    given[history.dimension.surrogate_key] = pa.array([int(member) for member in wanted], pa.int64())
    return _table(
        history.version_schema, len(wanted), given | bounds_of_all_times(history, len(wanted), inferred=False)
    )


def bounds_of_all_times(history: History, rows: int, *, inferred: bool) -> dict[str, pa.Array]:
    """Return the additional columns of versions that are the only one of their member and valid for all times."""
    kind = history.instant_type
    begin = pa.scalar(BEGINNING, pa.date32()).cast(kind)
    end = pa.scalar(history.end, pa.date32()).cast(kind)
    flag = history.dimension.inferred_flag
    assert flag is not None
    return {
        history.valid_from: pa.repeat(begin, rows),
        history.valid_to: pa.repeat(end, rows),
        history.is_current: pa.repeat(pa.scalar(value=True), rows),
        history.version: pa.repeat(pa.scalar(1, pa.int64()), rows),
        history.is_deleted: pa.repeat(pa.scalar(value=False), rows),
        flag: pa.repeat(pa.scalar(inferred), rows),
    }


def _table(schema: pa.Schema, rows: int, given: dict[str, Any]) -> pa.Table:
    """Return a table of a schema; columns that are not given are null."""
    columns = [given.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    return pa.Table.from_arrays(columns, names=schema.names).cast(schema)
