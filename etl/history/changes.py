"""Conversion of incoming changes to one layout. Invalid changes are rejected with a cause.

Layout (`change_schema`): natural key, time, sequence, delete flag, attributes, original spelling of the key. A delete
has only audit attributes. With partial changes, each register (attribute, spelling, delete flag) also has a column with
the sequence of the change, which is null if the change does not give the register.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.equality import conform
from headrace.etl.errors import DeclarationError
from headrace.etl.history.declaration import AT, BEGINNING, SEQUENCE
from headrace.etl.history.instants import are_exact, instant_of, ticks_of, to_instants
from headrace.etl.history.values import canonical, single
from headrace.etl.inputs import check_names
from headrace.etl.surrogate import MAX_KEY_BYTES, key_bytes
from headrace.storage.errors import KeyInputError
from headrace.storage.format import as_array, as_floats, coerce, decoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.etl.history.declaration import History

__all__ = ["Intake", "change_schema", "take_in"]

_END_OF_TIME: Final = dt.date(9999, 12, 31)


@dataclass(frozen=True)
class Intake:
    """Changes that were read.

    Parameters
    ----------
    rows
        Accepted changes in the layout of `change_schema`.
    position
        Position of each accepted change in the input.
    causes
        Cause of rejection for each input change; null for accepted changes.
    """

    rows: pa.Table
    position: NDArray[np.int64]
    causes: pa.Array


def change_schema(history: History) -> pa.Schema:
    """Return the layout of changes."""
    return pa.schema(
        [
            *history.dimension.key_schema,
            pa.field(AT, history.instant_type),
            pa.field(SEQUENCE, history.stored_sequence),
            pa.field(history.is_deleted, pa.bool_()),
            *history.dimension.attributes,
            *(pa.field(name, pa.string()) for name in history.spelled.values()),
            *(pa.field(name, history.stored_sequence) for name in history.given.values()),
        ]
    )


def take_in(history: History, changes: pa.Table | pa.RecordBatch) -> Intake:
    """Read changes.

    Raises
    ------
    DeclarationError
        If a column is missing, or its type cannot be converted to the target type.
    KeyInputError
        If a column can never equal its key.
    """
    _check_names(history, changes.schema)
    reader = _Reader(history, changes)
    sequence = reader.sequence()
    columns = [*reader.key(), reader.at(), sequence]
    deleted = reader.deleted()
    given = reader.given(np.asarray(deleted))
    columns += [deleted, *reader.attributes(given), *reader.spelled()]
    columns += [_only(sequence, given[name]) for name in history.given]
    rows = pa.Table.from_arrays(columns, names=change_schema(history).names)
    accepted = np.flatnonzero(np.asarray(reader.causes.is_null()))
    if len(accepted) < rows.num_rows:
        rows = rows.take(pa.array(accepted))
    return Intake(rows.cast(change_schema(history)), accepted, reader.causes)


def _floats(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return numbers as floats, and a mask of those that are equal to them, and nulls.

    Raises
    ------
    pyarrow.ArrowInvalid
        If the column has no numbers, or decimals, few of which are floats.
    """
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise pa.ArrowInvalid(f"{column.type} is not {kind}")
    if not pa.types.is_integer(column.type):
        return as_floats(column, kind)
    given = np.asarray(column.fill_null(0))
    greatest = 2 ** (np.finfo(kind.to_pandas_dtype()).nmant + 1)
    return column.cast(kind, safe=False), (given >= -greatest) & (given <= greatest)


def _only(column: pa.Array, which: NDArray[np.bool_]) -> pa.Array:
    return column if which.all() else pc.if_else(pa.array(which), column, pa.scalar(None, column.type))


def _check_names(history: History, given: pa.Schema) -> None:
    wanted = [*history.dimension.natural_key, history.effective, history.sequence, history.operation]
    wanted += history.dimension.attributes.names if history.partial is None else []
    missing = [name for name in wanted if name is not None and name not in given.names]
    if missing:
        raise DeclarationError(
            f"changes of dimension {history.dimension.name!r} lack column {missing[0]!r}; a change is a full row, and "
            f"these have {', '.join(given.names)}"
        )
    there = [name for name in {*wanted, *history.dimension.attributes.names, history.partial} if name in given.names]
    check_names(given.names, there, f"dimension {history.dimension.name!r}: the table of changes", DeclarationError)


class _Reader:
    """Converts columns of changes to the layout and collects the first cause of rejection of each row."""

    def __init__(self, history: History, changes: pa.Table | pa.RecordBatch) -> None:
        self._history = history
        self._changes = changes
        self._rows = changes.num_rows
        self.causes = pa.nulls(self._rows, pa.string())
        self._listed = self._read_lists()

    def _read_lists(self) -> pa.Array | None:
        """Return the lists of given attributes, or None if no change has a list."""
        name = self._history.partial
        if name is None or name not in self._changes.schema.names:
            return None
        lists = single(self._changes.column(name))
        kind = lists.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
            pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
        ):
            raise DeclarationError(
                f"column {name!r} names the attributes that a change gives, so it is a list of text, not {kind}"
            )
        return lists

    @property
    def _is_full(self) -> NDArray[np.bool_]:
        """Changes that give all attributes that the changes have columns for."""
        return np.ones(self._rows, dtype=np.bool_) if self._listed is None else np.asarray(self._listed.is_null())

    def _lists(self) -> dict[str, NDArray[np.bool_]]:
        """Return which changes list each attribute; a list with another name rejects its change."""
        columns = [n for n in self._history.dimension.attributes.names if n in self._changes.schema.names]
        listed = {name: np.zeros(self._rows, dtype=np.bool_) for name in columns}
        if self._listed is None:
            return listed
        rows = np.asarray(pc.list_parent_indices(self._listed))
        names = pc.list_flatten(self._listed)
        for name, mask in listed.items():
            mask[rows[np.asarray(pc.fill_null(pc.equal(names, name), fill_value=False))]] = True
        other = np.zeros(self._rows, dtype=np.bool_)
        other[rows[~np.asarray(pc.is_in(names, value_set=pa.array(columns, names.type)))]] = True
        self._reject(other, f"{self._history.partial!r} names what is no attribute with a column")
        return listed

    def _column(self, name: str) -> pa.Array:
        return decoded(as_array(self._changes.column(name)))

    def _reject(self, which: NDArray[np.bool_], cause: str) -> None:
        if which.any():
            self.causes = pc.coalesce(self.causes, pc.if_else(pa.array(which), cause, pa.scalar(None, pa.string())))

    def key(self) -> list[pa.Array]:
        """Return the conformed natural key; rejected rows have nulls."""
        dimension = self._history.dimension
        keys = []
        for name in dimension.natural_key:
            kind = dimension.schema.field(name).type
            key = conform(self._column(name), kind, dimension.rule(name), name)
            self._reject(key.null, f"key column {name!r} is null")
            self._reject(key.unfit, f"key column {name!r} has no value of type {kind}")
            keys.append(key.values)
        self._reject(key_bytes(keys) > MAX_KEY_BYTES, f"the key is longer than {MAX_KEY_BYTES} bytes")
        return keys

    def at(self) -> pa.Array:
        """Return the start of validity of each change."""
        history = self._history
        given = self._column(history.effective)
        at = to_instants(given, history.instant_type, history.effective)
        self._reject(np.asarray(at.is_null()), f"{history.effective!r} is null")
        finer = ~are_exact(given, history.effective_type)
        self._reject(finer, f"{history.effective!r} does not fit {history.effective_type}")
        ticks = ticks_of(at)
        end = history.end or _END_OF_TIME
        self._reject(
            np.asarray(at.is_valid()) & (ticks < instant_of(BEGINNING, at.type)),
            f"{history.effective!r} is before {BEGINNING}",
        )
        self._reject(ticks >= instant_of(end, at.type), f"{history.effective!r} is not before {end}")
        return at

    def sequence(self) -> pa.Array:
        """Return the sequence of each change."""
        history = self._history
        if history.sequence is None:
            return to_instants(self._column(history.effective), history.effective_type, history.effective)
        values, fits = self._fitted(history.sequence, history.sequence_type)
        self._reject(np.asarray(self._column(history.sequence).is_null()), f"{history.sequence!r} is null")
        self._reject(~fits, f"{history.sequence!r} does not fit {history.sequence_type}")
        return values

    def deleted(self) -> pa.Array:
        """Return which changes are deletes."""
        history = self._history
        if history.operation is None:
            return pa.repeat(pa.scalar(value=False), self._rows)
        given = self._column(history.operation)
        carried = ~self._is_full & np.asarray(given.is_null())
        if pa.types.is_boolean(given.type):
            self._reject(np.asarray(given.is_null()) & ~carried, f"{history.operation!r} is null")
            return given.fill_null(fill_value=False)
        if pa.types.is_null(given.type):
            given = given.cast(pa.string())
        if not (pa.types.is_string(given.type) or pa.types.is_large_string(given.type)):
            raise DeclarationError(
                f"column {history.operation!r} says what a change does, so it is text, not {given.type}"
            )
        deletes, upserts = (pa.array(names, given.type) for names in (history.deletes, history.upserts))
        deleted = pc.is_in(given, value_set=deletes)
        known = pc.or_(deleted, pc.is_in(given, value_set=upserts))
        valid = ", ".join((*history.upserts, *history.deletes))
        self._reject(~np.asarray(known) & ~carried, f"{history.operation!r} is none of {valid}")
        return deleted

    def given(self, deleted: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
        """Return which changes give each register. Deletes give only audit attributes."""
        history, every = self._history, np.ones(self._rows, dtype=np.bool_)
        attributes = dict.fromkeys(history.dimension.attributes.names, every)
        if history.partial is not None:
            attributes = dict.fromkeys(attributes, ~every)
            attributes |= {name: listed | self._is_full for name, listed in self._lists().items()}
        given = {n: g if history.type_of(n) == "audit" else g & ~deleted for n, g in attributes.items()}
        given |= dict.fromkeys(history.spelled.values(), every)
        operated = ~every if history.operation is None else np.asarray(self._column(history.operation).is_valid())
        return given | {history.is_deleted: operated}

    def attributes(self, given: dict[str, NDArray[np.bool_]]) -> list[pa.Array]:
        """Return the attributes in their types; null where a change does not give them."""
        columns = []
        for field in self._history.dimension.attributes:
            if field.name not in self._changes.schema.names:
                columns.append(pa.nulls(self._rows, field.type))
                continue
            values, fits = self._fitted(field.name, field.type)
            absent = ~given[field.name]
            if absent.any():
                values, fits = _only(values, ~absent), fits | absent
            self._reject(~fits, f"{field.name!r} does not fit {field.type}")
            columns.append(canonical(values))
        return columns

    def spelled(self) -> list[pa.Array]:
        """Return the original spelling of each normalized key column."""
        return [self._column(name).cast(pa.string()) for name in self._history.spelled]

    def _fitted(self, name: str, kind: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
        """Return a column converted to a type, and a mask of values that are null or fit the type."""
        column = self._column(name)
        if column.type == kind:
            return column, np.ones(self._rows, dtype=np.bool_)
        try:
            if pa.types.is_floating(kind):
                return _floats(column, kind)
            values, valid = coerce(column, kind, name)
        except (KeyInputError, pa.ArrowException) as error:
            raise DeclarationError(
                f"column {name!r} of type {column.type} has no values of type {kind}; cast it"
            ) from error
        if valid is None:
            return values, np.ones(self._rows, dtype=np.bool_)
        return pc.if_else(pa.array(valid), values, pa.scalar(None, kind)), valid | np.asarray(column.is_null())
