"""Rows that a table of the pipeline cannot hold: found in the tasks, and sent to the error table with their reasons.

A NOT NULL column, the length of char(n) and varchar(n), a CHECK constraint, an empty text in a partition column (Delta
stores it as null) and a key longer than a replica holds would each stop a batch, or change a value in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.equality import KeyRule, conform
from headrace.etl.ranking import key_text
from headrace.pipelines.delta.constraints import broken
from headrace.pipelines.spark.frame import STATE, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["CAUSE_TYPE", "ColumnRule", "ConstraintRule", "KeyLimit", "StorableRule", "StorableStep", "unstorable"]

CAUSE_TYPE: Final = pa.struct({"column": pa.string(), "value": pa.string(), "reason": pa.string()})
_MALFORMED: Final = "_malformed"
_SHOWN: Final = 200
_GROWTH: Final = 18  # case folding and composition lengthen UTF-8 at most threefold each, and escapes twofold


@dataclass(frozen=True)
class ColumnRule:
    """What a table asks of one column.

    Parameters
    ----------
    table, column
        How reasons name the table, and the column.
    required
        Whether it is NOT NULL.
    partition
        Whether the table is partitioned by this text, so that it cannot be empty.
    characters
        The most that it holds; None for no limit.
    """

    table: str
    column: str
    required: bool = False
    partition: bool = False
    characters: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the rule needs."""
        return (self.column,)

    def broken_by(self, batch: pa.RecordBatch) -> Iterator[tuple[NDArray[np.bool_], str]]:
        """Yield which rows break the rule, and why."""
        values = batch.column(self.column)
        if self.required and values.null_count:
            yield np.asarray(values.is_null()), f"is null, but the column is NOT NULL in {self.table}"
        if self.partition:
            yield (
                _flags(pc.equal(values, "")),
                f"is empty, which Delta stores as null, since {self.table} is partitioned by it",
            )
        if self.characters is not None:
            yield (
                _flags(pc.greater(pc.utf8_length(values), self.characters)),
                f"is longer than the {self.characters} characters that {self.table} holds",
            )


@dataclass(frozen=True)
class ConstraintRule:
    """A CHECK constraint of a table over some columns."""

    table: str
    name: str
    expression: str
    columns: tuple[str, ...]

    def broken_by(self, batch: pa.RecordBatch) -> Iterator[tuple[NDArray[np.bool_], str]]:
        """Yield which rows break the constraint, and why."""
        rows = pa.Table.from_batches([batch.select(list(self.columns))])
        yield broken(self.expression, rows), f"breaks CHECK {self.name} ({self.expression}) of {self.table}"


@dataclass(frozen=True)
class KeyLimit:
    """What the table of a key asks of it, once it is normalised.

    Parameters
    ----------
    table
        How reasons name the table.
    columns
        Columns of the stream, in the order of the key.
    key
        The key's columns and types.
    rules
        Normalisation by key column.
    partitions
        Key columns of text by which the table is partitioned.
    characters
        The most characters of a key column, where the table limits them.
    limit
        The most bytes of a key.
    """

    table: str
    columns: tuple[str, ...]
    key: pa.Schema
    rules: Mapping[str, KeyRule] = field(default_factory=dict)
    partitions: tuple[str, ...] = ()
    characters: Mapping[str, int] = field(default_factory=dict)
    limit: int = 16384

    def broken_by(self, batch: pa.RecordBatch) -> Iterator[tuple[NDArray[np.bool_], str]]:
        """Yield which rows have a key that the table cannot hold, and why."""
        if not self.partitions and not self.characters and self._surely_short(batch):
            return
        values = [
            conform(batch.column(column), each.type, self.rules.get(each.name), each.name).values
            for column, each in zip(self.columns, self.key, strict=True)
        ]
        for each, column in zip(self.key, values, strict=True):
            if each.name in self.partitions:
                yield (
                    _flags(pc.equal(column, "")),
                    f"is an empty key, which Delta stores as null, since {self.table} is partitioned by it",
                )
            if each.name in self.characters:
                most = self.characters[each.name]
                beyond = _flags(pc.greater(pc.utf8_length(column), most))
                yield beyond, f"is longer than the {most} characters that {self.table} holds"
        long = self._too_long(values)
        if long is not None:
            yield long, f"is a key of more than {self.limit} bytes, which no replica of {self.table} holds"

    def _surely_short(self, batch: pa.RecordBatch) -> bool:
        """Return whether no key is too long, however much longer normalization makes it."""
        most = sum(_most_bytes(batch.column(name)) for name in self.columns)
        return _GROWTH * most <= self.limit

    def _too_long(self, values: Sequence[pa.Array]) -> NDArray[np.bool_] | None:
        """Return which keys are too long; None when a look at the longest values shows that none is."""
        most = sum(_most_bytes(column) for column in values)
        if most <= self.limit:
            return None
        from headrace.storage.format import KeyCodec  # noqa: PLC0415 - numba comes in only when keys are long

        usable = np.logical_and.reduce([np.asarray(column.is_valid()) for column in values])
        keys = KeyCodec(self.key, self.key.names).pack([column.filter(pa.array(usable)) for column in values])
        long = np.zeros(len(usable), dtype=bool)
        if keys.offsets is not None:
            long[usable] = np.diff(keys.offsets) > self.limit
        return long


StorableRule: TypeAlias = ColumnRule | ConstraintRule | KeyLimit


def unstorable(batch: pa.RecordBatch, rules: Iterable[StorableRule]) -> tuple[NDArray[np.bool_], pa.Array]:
    """Return which rows no table can take, and for each row its causes.

    Parameters
    ----------
    batch
        Rows with the columns of the rules.
    rules
        What the tables ask.

    Returns
    -------
    mask : bool[n]
    causes : list<CAUSE_TYPE>[n]
        Column, value and reason of each broken rule, in the order of the rules.
    """
    rows: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    parts: list[pa.Array] = [pa.array([], CAUSE_TYPE)]
    for rule in rules:
        for flags, reason in rule.broken_by(batch):
            if flags.any():
                found = np.flatnonzero(flags)
                rows.append(found)
                parts.append(_causes(batch, rule.columns, found, reason))
    row = np.concatenate(rows)
    counts = np.bincount(row, minlength=batch.num_rows)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    listed = pa.concat_arrays(parts).take(pa.array(np.argsort(row, kind="stable")))
    return counts > 0, pa.ListArray.from_arrays(pa.array(offsets), listed)


@dataclass(frozen=True)
class StorableStep:
    """A step of a stage that sends rows which no table can take to the error table. Rows that are not open pass by."""

    rules: tuple[StorableRule, ...]

    def run(self, batches: Iterable[pa.RecordBatch], task: Any) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - as all steps
        """Yield all rows, those that cannot be stored as malformed ones with their causes."""
        for batch in batches:
            mask, causes = unstorable(batch, self.rules)
            mask &= np.asarray(pc.equal(batch.column(STATE), int(State.OPEN)))
            yield _set_aside(batch, mask, causes) if mask.any() else batch


def _set_aside(batch: pa.RecordBatch, mask: NDArray[np.bool_], causes: pa.Array) -> pa.RecordBatch:
    wanted = pa.array(mask)
    state = pc.if_else(wanted, pa.scalar(int(State.MALFORMED), pa.int8()), batch.column(STATE))
    there = batch.column(_MALFORMED)
    told = pc.if_else(wanted, causes.cast(there.type), there)
    for name, column in ((STATE, state), (_MALFORMED, told)):
        position = batch.schema.get_field_index(name)
        batch = batch.set_column(position, batch.schema.field(position), column)
    return batch


def _causes(batch: pa.RecordBatch, columns: Sequence[str], rows: NDArray[np.int64], reason: str) -> pa.Array:
    wanted = pa.array(rows)
    values = [batch.column(name).take(wanted) for name in columns]
    value = key_text(values)
    if len(values) == 1:
        value = pc.if_else(values[0].is_valid(), value, pa.scalar(None, value.type))
    short = pc.utf8_slice_codeunits(value, 0, _SHOWN)
    fixed = [pa.repeat(text, len(rows)) for text in (", ".join(columns), reason)]
    return pa.StructArray.from_arrays([fixed[0], short, fixed[1]], fields=list(CAUSE_TYPE))


def _flags(found: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.fill_null(found, fill_value=False), dtype=bool)


def _most_bytes(column: pa.Array) -> int:
    """Return an upper bound of the bytes that a value of a column takes in a key."""
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return 2 * (pc.max(pc.binary_length(column)).as_py() or 0) + 2
    return 16
