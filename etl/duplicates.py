"""Duplicate records: rows whose declared key repeats within one input or was loaded by an earlier input.

One row per key of the input is kept: the first by the `order_by` columns, then by all other columns in the order of
their names. Rows that tie on all columns are equal, so the choice depends neither on the arrival order nor on the
batch boundaries. A row with a null in its key is never a duplicate.

A list is ordered by its values, one after another, and a struct by its fields. NaN equals NaN, and -0.0 is before 0.0.

The input is held in memory, because its last row may repeat its first. Shard the stream by the key, so that rows with
equal keys are in the same shard (`Duplicates.shard_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.equality import Conformed, KeyRule, check_rule, conform
from headrace.etl.errors import DeclarationError
from headrace.etl.inputs import check_names, of_one_schema
from headrace.etl.ranking import rank_rows, sort_rows, sortable, starts_of_runs
from headrace.etl.sharding import shard_of
from headrace.etl.special import as_names
from headrace.joins.dictionaries import types_within
from headrace.joins.handle import check_takeable
from headrace.storage.format import as_array, stored_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from headrace.etl.surrogate import JoinOperator

__all__ = ["DUPLICATE_COLUMN", "LOADED_BY", "DuplicateAction", "Duplicates", "mark_duplicates"]

DUPLICATE_COLUMN: Final = "_duplicate"
LOADED_BY: Final = "_loaded_by"
_RANK: Final = "_rank"
_STREAM: Final = "duplicates: the stream"
_ROWS_OUT: Final = 65_536


class DuplicateAction(StrEnum):
    """Treatment of a duplicate: drop it, load it with the outcome `duplicate`, or route it to the duplicates table."""

    DROP = "drop"
    FLAG = "flag"
    ROUTE = "route"


@dataclass(frozen=True)
class Duplicates:
    """The declared key of a stream's records and the treatment of records that repeat a key.

    Parameters
    ----------
    key
        Names and types of the key columns in the stream.
    action
        ``"drop"``, ``"flag"`` or ``"route"``.
    order_by
        Columns that decide which row of a key is kept: the first in ascending order, nulls last.
    rules
        Normalization rules of key columns, by name.

    Raises
    ------
    DeclarationError
        If there is no key, it names a column twice or has an unsuitable type, the action is not valid, or a rule does
        not fit its column.

    Examples
    --------
    >>> Duplicates(pa.schema({"ticket": pa.int64()})).table_schema.names
    ['ticket', '_loaded_by']
    """

    key: pa.Schema
    action: DuplicateAction | str = DuplicateAction.DROP
    order_by: tuple[str, ...] = ()
    rules: Mapping[str, KeyRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.action not in set(DuplicateAction):
            raise DeclarationError(
                f"duplicates: unknown action {self.action!r}; the valid ones are {', '.join(DuplicateAction)}"
            )
        object.__setattr__(self, "action", DuplicateAction(self.action))
        object.__setattr__(self, "order_by", as_names(self.order_by))
        if not self.key.names:
            raise DeclarationError("duplicates: the key has no column; name at least one")
        check_names(self.key.names, self.key.names, "duplicates: the key", DeclarationError)
        if LOADED_BY in self.key.names:
            raise DeclarationError(
                f"duplicates: the table of loaded keys has a column {LOADED_BY!r} of its own; rename the key column"
            )
        for name, rule in self.rules.items():
            if name not in self.key.names:
                raise DeclarationError(f"duplicates: no key column {name!r}; they are {', '.join(self.key.names)}")
            check_rule(rule, self.key.field(name).type, name)
        for name, column in zip(self.key.names, self.key, strict=True):
            if stored_type(column.type) is None or pa.types.is_floating(column.type):
                raise DeclarationError(
                    f"duplicates: column {name!r} of type {column.type} cannot be a key; use an integer, decimal, "
                    "date, time, boolean, text or binary column"
                )
        object.__setattr__(self, "key", pa.schema([c.with_type(stored_type(c.type)) for c in self.key]))

    @property
    def table_schema(self) -> pa.Schema:
        """Schema of the table of loaded keys: the key and the number of the batch that loaded it."""
        return pa.schema([*(c.with_nullable(nullable=False) for c in self.key), pa.field(LOADED_BY, pa.int64())])

    @property
    def operator_on(self) -> list[tuple[str, str]]:
        """Argument `on` of the join operator over the table of loaded keys."""
        return [(f"_key_{name}", name) for name in self.key.names]

    @property
    def operator_columns(self) -> list[str]:
        """Argument `columns` of that operator."""
        return [LOADED_BY]

    def check(self, stream: pa.Schema) -> None:
        """Raise unless repeated rows can be found in a stream.

        Raises
        ------
        DeclarationError
            If it lacks a column, or has one twice.
        KeyInputError
            If a column can never equal its key.
        StreamSchemaError
            If it has a column that Arrow cannot take rows from.
        """
        check_names(stream.names, (*self.key.names, *self.order_by, *stream.names), _STREAM, DeclarationError)
        check_takeable(stream)
        if DUPLICATE_COLUMN in stream.names:
            raise DeclarationError(f"duplicates: the stream has a column {DUPLICATE_COLUMN!r} already; rename it")
        self.conform_key(stream.empty_table())

    def conform_key(self, rows: pa.Table | pa.RecordBatch) -> list[Conformed]:
        """Return the key columns, converted to the declared types and normalized."""
        check_names(rows.schema.names, self.key.names, "duplicates: the input", DeclarationError)
        return [conform(rows.column(c.name), c.type, self.rules.get(c.name), c.name) for c in self.key]

    def shard_of(self, rows: pa.Table | pa.RecordBatch, shards: int) -> NDArray[np.int32]:
        """Return the shard of each row, based on its key."""
        check_names(rows.schema.names, self.key.names, "duplicates: the input", DeclarationError)
        return shard_of([rows.column(name) for name in self.key.names], self.key, shards, self.rules)

    def loaded_keys(self, rows: pa.Table | pa.RecordBatch, batch: int) -> pa.Table:
        """Return the distinct non-null keys of a batch's facts as rows of the table of loaded keys."""
        keys = pa.table({c.name: key.values for c, key in zip(self.key, self.conform_key(rows), strict=True)})
        distinct = keys.drop_null().group_by(self.key.names).aggregate([])
        return distinct.append_column(LOADED_BY, pa.array(np.full(distinct.num_rows, batch))).cast(self.table_schema)


def mark_duplicates(
    duplicates: Duplicates,
    batches: Iterable[pa.RecordBatch],
    operator: JoinOperator | None = None,
    *,
    visible_before: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Mark each row that repeats another.

    Parameters
    ----------
    duplicates
        Declaration of the key.
    batches
        Batches of the complete input, or of one complete shard.
    operator
        Left join over the table of loaded keys, created with ``on=duplicates.operator_on`` and
        ``columns=duplicates.operator_columns``; None compares within the input only.
    visible_before
        Batch number. Keys loaded by this batch or a later one count as not loaded, so that a replayed batch does not
        match itself.

    Yields
    ------
    RecordBatch
        The stream's columns and `_duplicate`: null for a kept row, ``"loaded"`` if the key was loaded before,
        ``"batch"`` if another row of the input is kept instead.

    Raises
    ------
    DeclarationError
        If the stream lacks a column, or has one twice.
    KeyInputError
        If a column can never equal its key.
    StreamSchemaError
        If a batch is not a record batch, has another schema than the first, or a column that Arrow cannot take rows
        from.
    """
    whole = list(of_one_schema(batches))
    if not whole:
        return
    rows = pa.Table.from_batches(whole)
    duplicates.check(rows.schema)
    if not any(pa.types.is_dictionary(kind) for column in rows.schema for kind in types_within(column.type)):
        rows = rows.combine_chunks()
    keys = duplicates.conform_key(rows)
    usable = np.flatnonzero(np.logical_and.reduce([np.asarray(key.values.is_valid()) for key in keys]))
    columns = [key.values.take(pa.array(usable)) for key in keys]
    ranks, distinct = rank_rows(columns)
    kept = _first_of_each(rows, usable, ranks, duplicates)
    mark = np.zeros(rows.num_rows, dtype=np.int8)
    mark[usable] = 1
    mark[kept] = 0
    if operator is not None and distinct:
        mark[usable[_loaded(duplicates, columns, ranks, operator, visible_before)[ranks]]] = 2
    text = pa.array([None, "batch", "loaded"]).take(pa.array(mark))
    yield from rows.append_column(DUPLICATE_COLUMN, text).to_batches(max_chunksize=_ROWS_OUT)


def _first_of_each(
    rows: pa.Table, usable: NDArray[np.int64], ranks: NDArray[np.int64], duplicates: Duplicates
) -> NDArray[np.int64]:
    """Return the position of the kept row of each key."""
    repeated = np.bincount(ranks)[ranks] > 1
    candidates = usable[repeated]
    if not len(candidates):
        return usable
    some = pa.array(candidates)
    others = sorted(name for name in rows.column_names if name not in duplicates.order_by)
    criteria = [
        part for name in (*duplicates.order_by, *others) for part in sortable(as_array(rows.column(name)).take(some))
    ]
    order = sort_rows([pa.array(ranks[repeated]), *criteria])
    starts = starts_of_runs([pa.array(ranks[repeated][order])])
    return np.concatenate([usable[~repeated], candidates[order[starts]]])


def _loaded(
    duplicates: Duplicates,
    columns: list[pa.Array],
    ranks: NDArray[np.int64],
    operator: JoinOperator,
    visible_before: int | None,
) -> NDArray[np.bool_]:
    """Return whether each distinct key, by rank, was loaded before."""
    first = np.unique(ranks, return_index=True)[1]
    names = [*(name for name, _ in duplicates.operator_on), _RANK]
    asked = [*(column.take(pa.array(first)) for column in columns), pa.array(np.arange(len(first)))]
    loaded = np.zeros(len(first), dtype=bool)
    batch = pa.RecordBatch.from_arrays(asked, names=names)
    for output in _ask(operator, batch):
        by = output.column(output.num_columns - 1)
        found = by.is_valid() if visible_before is None else pc.less(by, visible_before)
        loaded[np.asarray(output.column(len(columns)).filter(found))] = True
    return loaded


def _ask(operator: JoinOperator, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    yield from operator.push(batch)
    yield from operator.flush()
