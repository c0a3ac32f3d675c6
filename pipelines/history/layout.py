"""The Delta table of a dimension with history: one row per version, which holds the entries of the version.

| columns                   | content                                                                              |
|---------------------------|--------------------------------------------------------------------------------------|
| `History.version_schema`  | the version, as analysts query it                                                    |
| `_sequence`               | sequence of the first entry of the version                                           |
| `_entries`                | entries of the version in order of time: time, sequences, and the recorded own values |

`_entries` is null if the only entry of the version starts it and recorded the values that the version shows, which is
the usual case. Rows without a natural key are special members and have no entries.

The entries are in the same row as their version, so one commit of one table changes both. A second table of entries
would have to follow the first, and a lookup between the two commits would see versions that the entries contradict.

An entry has a row of its own in `History.entry_schema`. All columns of that schema except its time, its sequence, and
the recorded values are equal in all entries of a version, so the layout stores them once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.history.declaration import AT, SEQUENCE
from headrace.etl.history.instants import ticks_of
from headrace.etl.history.values import rows_differ, single

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history import History

__all__ = ["ENTRIES", "delta_schema", "entries_of", "entry_type", "version_rows"]

ENTRIES: Final = "_entries"


def entry_type(history: History) -> pa.StructType:
    """Return the type of an entry within the row of its version."""
    stored = history.entry_schema
    names = [AT, SEQUENCE, *history.recorded.values(), *history.given.values()]
    return pa.struct([pa.field(name, stored.field(name).type) for name in names])


def delta_schema(history: History) -> pa.Schema:
    """Return the columns of the Delta table of a dimension with history.

    Examples
    --------
    >>> from headrace.etl import Dimension
    >>> from headrace.etl.history import History
    >>> columns = pa.schema({"id": pa.int64(), "city": pa.string(), "phone": pa.string()})
    >>> history = History(Dimension("customer", ("id",), "customer_key", columns), type_1="phone")
    >>> delta_schema(history).names[:4], delta_schema(history).names[-2:]
    (['customer_key', 'id', 'city', 'phone'], ['_sequence', '_entries'])
    >>> entry_type(history).names
    ['_at', '_sequence', '_recorded_phone']
    """
    hidden = [pa.field(SEQUENCE, history.stored_sequence), pa.field(ENTRIES, pa.list_(entry_type(history)))]
    return pa.schema([*history.version_schema, *hidden])


def entries_of(history: History, rows: pa.Table) -> pa.Table:
    """Return the entries of versions.

    Parameters
    ----------
    history
        The declaration.
    rows
        Rows of `delta_schema`, in any order. Additional columns, such as those of a change feed, are repeated for each
        entry of a row.

    Returns
    -------
    pyarrow.Table
        Rows of `History.entry_schema`, with the additional columns at the end. Special members have none.
    """
    first_key = history.dimension.natural_key[0]
    rows = rows.filter(rows.column(first_key).is_valid())
    nested = _Nested(history, rows)
    wanted = history.entry_schema
    more = [name for name in rows.column_names if name not in delta_schema(history).names]
    columns = [nested.column(name).cast(wanted.field(name).type) for name in wanted.names]
    columns += [nested.column(name) for name in more]
    return pa.Table.from_arrays(columns, schema=pa.schema([*wanted, *(rows.schema.field(name) for name in more)]))


def version_rows(history: History, entries: pa.Table) -> pa.Table:
    """Return the rows of versions, ordered by surrogate key.

    Parameters
    ----------
    history
        The declaration.
    entries
        All entries of the versions (`History.entry_schema`), in any order.
    """
    surrogate = np.asarray(single(entries.column(history.dimension.surrogate_key)))
    order = np.lexsort((ticks_of(single(entries.column(AT))), surrogate))
    surrogate = surrogate[order]
    heads = np.flatnonzero(np.diff(surrogate, prepend=surrogate[:1] - 1)) if len(order) else order
    columns = {name: single(entries.column(name)).take(pa.array(order[heads])) for name in _row_names(history)}
    columns[ENTRIES] = _lists(history, entries, order, heads)
    schema = delta_schema(history)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _row_names(history: History) -> list[str]:
    return [name for name in delta_schema(history).names if name != ENTRIES]


def _lists(history: History, entries: pa.Table, order: NDArray[np.int64], heads: NDArray[np.int64]) -> pa.Array:
    """Return the entries of each version as a list; null for a version that its row describes completely.

    Parameters
    ----------
    order
        Positions of the entries, by version and time.
    heads
        Positions in `order` at which versions begin.
    """
    counts = np.diff(heads, append=len(order))
    own, shown = ([single(entries.column(name)) for name in names] for names in _recorded_and_shown(history))
    plain = counts == 1
    at = pa.array(order[heads[plain]])
    plain[plain] = ~rows_differ([column.take(at) for column in own], [column.take(at) for column in shown], len(at))
    counts[plain] = 0
    kept = pa.array(order[np.repeat(~plain, np.diff(heads, append=len(order)))])
    fields = list(entry_type(history))
    values = pa.StructArray.from_arrays([single(entries.column(f.name)).take(kept) for f in fields], fields=fields)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(plain)).cast(pa.list_(entry_type(history)))


def _recorded_and_shown(history: History) -> tuple[list[str], list[str]]:
    """Return the columns with recorded values and sequences, and the columns that show the same in the usual case."""
    given = list(history.given.values())
    return [*history.recorded.values(), *given], [*history.recorded, *(SEQUENCE for _ in given)]


class _Nested:
    """The columns of the entries in rows of `delta_schema`."""

    def __init__(self, history: History, rows: pa.Table) -> None:
        self._rows = rows
        lists = single(rows.column(ENTRIES))
        self._own = lists.flatten()
        self._is_alone = not len(self._own)
        self._shown = {AT: history.valid_from, SEQUENCE: SEQUENCE}
        self._shown |= {own: name for name, own in history.recorded.items()}
        self._shown |= dict.fromkeys(history.given.values(), SEQUENCE)
        if self._is_alone:
            return
        counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
        self._parent = np.repeat(np.arange(rows.num_rows), np.maximum(counts, 1))
        # The values of an entry follow in the list, or, if there is no list, are those of the row.
        held = counts[self._parent] > 0
        self._source = len(self._own) + self._parent
        self._source[held] = np.arange(len(self._own))

    def column(self, name: str) -> pa.Array:
        """Return a column of the entries."""
        if self._is_alone:
            return single(self._rows.column(self._shown.get(name, name)))
        if name not in self._shown:
            return single(self._rows.column(name)).take(pa.array(self._parent))
        shown = single(self._rows.column(self._shown[name]))
        own = self._own.field(name).cast(shown.type)
        return pa.concat_arrays([own, shown]).take(pa.array(self._source))
