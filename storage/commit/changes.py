"""`Changes`: the changes of a commit in key order and in stored types: rows to store, and keys whose rows are removed.

The input is checked as far as that is possible without the table's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from headrace.storage.commit import _commit_kernels as kernels
from headrace.storage.errors import KeyInputError, SchemaError, UniqueViolationError
from headrace.storage.format.coercion import plain
from headrace.storage.format.keys import Keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.storage.format.layout import LeafLayout

__all__ = ["Batch", "Changes", "Part", "find_keys", "is_dense", "positions", "prepare"]

Batch: TypeAlias = pa.Table | pa.RecordBatch
_SPARSE = 2


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one commit.

    Attributes
    ----------
    keys
        Keys of the rows to store, ascending.
    payload
        Array of each payload column, in the order of `keys`.
    fresh : bool[n]
        Whether a row is an insert, so that present rows with its key stay.
    touched
        Keys whose present rows are removed, ascending, each once.
    upserted : bool[m]
        Which of `touched` are keys of upserts; the others are deletes.
    """

    keys: Keys
    payload: list[pa.Array]
    fresh: NDArray[np.bool_]
    touched: Keys
    upserted: NDArray[np.bool_]

    def __bool__(self) -> bool:
        return len(self.keys) > 0 or len(self.touched) > 0

    @property
    def count(self) -> int:
        """Number of rows to store or of keys whose rows are removed, whichever is greater."""
        return max(len(self.keys), len(self.touched))

    def slice(self, rows: slice, touched: slice) -> Changes:
        """Return a run of the rows to store, and a run of the keys whose rows are removed."""
        return Changes(
            self.keys.slice(rows.start, rows.stop),
            [array.slice(rows.start, rows.stop - rows.start) for array in self.payload],
            self.fresh[rows],
            self.touched.slice(touched.start, touched.stop),
            self.upserted[touched],
        )

    def take(self, rows: NDArray[np.int64], touched: NDArray[np.int64]) -> Changes:
        """Return the rows to store and the keys whose rows are removed at these positions, which ascend."""
        index = pa.array(rows)
        return Changes(
            self.keys.take(rows),
            [array.take(index) for array in self.payload],
            self.fresh[rows],
            self.touched.take(touched),
            self.upserted[touched],
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Batch of changes: neighboring leaves that are changed together in memory, and the changes that affect them.

    Attributes
    ----------
    leaves : int64[m]
        Ordinals, ascending.
    joined : bool[m]
        Whether a leaf shares its rows with the next one.
    low, high
        Leaves from `low` up to `high` may be joined as neighbors.
    dense
        Whether most leaves of a stretch of the table are changed, so that they may be placed together.
    changes
        Changes of these leaves.
    leaf, touched_leaf
        Leaf of each row to store, and first leaf of each key whose rows are removed.
    """

    leaves: NDArray[np.int64]
    joined: NDArray[np.bool_]
    low: int
    high: int
    dense: bool
    changes: Changes
    leaf: NDArray[np.int64]
    touched_leaf: NDArray[np.int64]

    def cut(self, start: int, stop: int) -> Part:
        """Return the batch of the leaves from `start` up to `stop` in this one."""
        leaves = self.leaves[start:stop]
        around = [int(leaves[0]), int(leaves[-1]) + 1]
        rows = slice(*np.searchsorted(self.leaf, around))
        touched = slice(*np.searchsorted(self.touched_leaf, around))
        return Part(
            leaves,
            self.joined[start:stop],
            around[0] if start else self.low,
            int(self.leaves[stop]) if stop < len(self.leaves) else self.high,
            is_dense(leaves),
            self.changes.slice(rows, touched),
            self.leaf[rows],
            self.touched_leaf[touched],
        )

    def only(self, some: NDArray[np.bool_]) -> Part:
        """Return the batch of some of the leaves."""
        rows = np.flatnonzero(some[positions(self.leaves, self.leaf)])
        touched = np.flatnonzero(some[positions(self.leaves, self.touched_leaf)])
        return replace(
            self,
            leaves=self.leaves[some],
            joined=self.joined[some],
            changes=self.changes.take(rows, touched),
            leaf=self.leaf[rows],
            touched_leaf=self.touched_leaf[touched],
        )


def is_dense(leaves: NDArray[np.int64]) -> bool:
    """Return whether these are most leaves of a stretch of the table."""
    return bool(leaves[-1] - leaves[0] < _SPARSE * len(leaves))


def positions(leaves: NDArray[np.int64], leaf: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each `leaf` is among `leaves`, which ascend."""
    return np.searchsorted(leaves, leaf)


def find_keys(keys: Keys, among: Keys) -> NDArray[np.int64]:
    """Return the position of each key among others, or -1. Both ascend, and the others are distinct."""
    return kernels.find_sorted(keys.parts, among.parts, keys.wide)


def prepare(
    layout: LeafLayout,
    *,
    upserts: Batch | None = None,
    deletes: Batch | None = None,
    inserts: Batch | None = None,
    unique: bool = False,
) -> Changes:
    """Return changes in key order.

    Parameters
    ----------
    upserts, inserts
        Batches with all columns of the table, by name. Upserts replace all rows of their keys.
    deletes
        A batch with the key columns; other columns are ignored. A key that is also upserted is upserted.
    unique
        Whether a key may occur only once.

    Raises
    ------
    SchemaError
        If a column is missing, unknown, or of a type that cannot be stored in the table's, or if what is given is
        not a batch.
    KeyInputError
        If a key is null.
    UniqueViolationError
        If a key is to be stored twice in a unique table.
    """
    _refuse_other_types(upserts, deletes, inserts)
    keys, payload, fresh = _to_store(layout, upserts, inserts)
    if keys.first_descent() >= 0:
        order = keys.argsort()
        keys, fresh = keys.take(order), fresh[order]
        payload = [array.take(pa.array(order)) for array in payload]
    if unique:
        _refuse_twice(layout, keys)
    replaced = _distinct(keys if inserts is None else keys.take(np.flatnonzero(~fresh)))
    if deletes is None:
        return Changes(keys, payload, fresh, replaced, np.ones(len(replaced), dtype=np.bool_))
    gone = _distinct(_deleted(layout, deletes))
    touched = _distinct(Keys.concat([replaced, gone]))
    return Changes(keys, payload, fresh, touched, find_keys(touched, replaced) >= 0)


def _to_store(
    layout: LeafLayout, upserts: Batch | None, inserts: Batch | None
) -> tuple[Keys, list[pa.Array], NDArray[np.bool_]]:
    """Return the rows to store as they came: keys, payload, and which are inserts."""
    if inserts is None:
        keys, payload = _rows(layout, upserts)
        return keys, payload, np.zeros(len(keys), dtype=np.bool_)
    parts = [_rows(layout, batch) for batch in (upserts, inserts)]
    keys = Keys.concat([part[0] for part in parts])
    payload = [pa.concat_arrays(list(arrays)) for arrays in zip(*(part[1] for part in parts), strict=True)]
    return keys, payload, np.arange(len(keys)) >= len(parts[0][0])


def _rows(layout: LeafLayout, batch: Batch | None) -> tuple[Keys, list[pa.Array]]:
    if batch is None:
        return Keys.empty(layout.codec.kind), [pa.nulls(0, field.type) for field in layout.payload]
    _check_columns(batch.schema.names, layout.names)
    return layout.codec.encode(batch), [_stored(batch, field) for field in layout.fields]


def _refuse_other_types(*batches: object) -> None:
    for batch in batches:
        if batch is not None and not isinstance(batch, pa.Table | pa.RecordBatch):
            raise SchemaError(f"changes are pyarrow tables or record batches, not {type(batch).__name__}; convert them")


def _check_columns(names: list[str], expected: list[str]) -> None:
    if names == expected and len(set(names)) == len(names):
        return
    missing = [name for name in expected if name not in names]
    unknown = [name for name in names if name not in expected]
    twice = [name for name in names if names.count(name) > 1]
    if missing or unknown or twice:
        what = "is missing" if missing else "is unknown" if unknown else "occurs more than once"
        name, columns = (missing or unknown or twice)[0], ", ".join(map(repr, expected))
        raise SchemaError(f"column {name!r} {what}; rows to store have the columns {columns}, each once")


def _stored(batch: Batch, field: pa.Field) -> pa.Array:
    column = batch.column(field.name)
    try:
        array = plain(column, field.type)
    except pa.ArrowException as error:
        raise SchemaError(
            f"column {field.name!r} of type {column.type} cannot be stored as {field.type}: {error}"
        ) from error
    if not field.nullable and array.null_count:
        raise SchemaError(f"column {field.name!r} holds {array.null_count} nulls, but the table declares it not null")
    return array


def _deleted(layout: LeafLayout, batch: Batch | None) -> Keys:
    if batch is None:
        return Keys.empty(layout.codec.kind)
    keys, valid = layout.codec.encode_stream(batch)
    for name in layout.key:
        if batch.column(name).null_count:
            raise KeyInputError(f"key column {name!r} of the rows to delete holds nulls, but a key never is null")
    return keys if valid is None else keys.take(np.flatnonzero(valid))


def _distinct(keys: Keys) -> Keys:
    if len(keys) < 2:  # noqa: PLR2004 - one key is distinct
        return keys
    if keys.first_descent() >= 0:
        keys = keys.take(keys.argsort())
    same = keys.same_as_next()
    return keys.take(np.flatnonzero(np.concatenate([[True], ~same]))) if same.any() else keys


def _refuse_twice(layout: LeafLayout, keys: Keys) -> None:
    if len(keys) < 2:  # noqa: PLR2004 - one key is there once
        return
    same = keys.same_as_next()
    if same.any():
        key = layout.codec.describe(keys, int(np.argmax(same)))
        raise UniqueViolationError(f"the changes store key {key} twice, but the table is unique; nothing was changed")
