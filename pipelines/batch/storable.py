"""Rows that a table of the pipeline cannot hold: tasks find them and send them to the error table with their reasons.

A NOT NULL column, the length of char(n) and varchar(n), a CHECK constraint, a value of a partition column
that Delta stores as null or that names no folder, or a key too long for a replica would otherwise stop a batch, or
silently change a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.equality import KeyRule, conform
from headrace.etl.ranking import key_text
from headrace.pipelines.delta.constraints import broken
from headrace.pipelines.spark.frame import STATE, State
from headrace.storage.records import shown_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = [
    "CAUSE_TYPE",
    "ColumnRule",
    "ConstraintRule",
    "KeyLimit",
    "MergeKeyRule",
    "StorableRule",
    "StorableStep",
    "unstorable",
]

CAUSE_TYPE: Final = pa.struct({"column": pa.string(), "value": pa.string(), "reason": pa.string()})
_MALFORMED: Final = "_malformed"
_ESCAPED: Final = (
    r"""[\x01-\x1f"#%'*/:=?\[\\\]^{\x7f]"""  # what Spark's ExternalCatalogUtils.escapePathName writes as %XX
)
_NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
_NAME_BYTES: Final = 255
_GROWTH: Final = 18  # case folding and composition lengthen UTF-8 at most threefold each, and escapes twofold


@dataclass(frozen=True)
class ColumnRule:
    """Rules of a table for one column.

    Parameters
    ----------
    table, column
        Names of the table and the column in messages.
    required
        Whether the column is NOT NULL.
    partition
        Whether the table is partitioned by this column of text or bytes, so that it must be the name of a folder.
    characters
        Maximum number of characters; None for no limit.
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
        """Yield a mask of the rows that violate the rule, and the reason."""
        values = batch.column(self.column)
        if self.required and values.null_count:
            yield np.asarray(values.is_null()), f"is null, but the column is NOT NULL in {self.table}"
        if self.partition:
            yield from _unnamable(values, self.column, "is", self.table)
        if self.characters is not None:
            yield (
                _flags(pc.greater(pc.utf8_length(values), self.characters)),
                f"is longer than the {self.characters} characters that {self.table} holds",
            )


@dataclass(frozen=True)
class ConstraintRule:
    """A CHECK constraint of a table on some columns."""

    table: str
    name: str
    expression: str
    columns: tuple[str, ...]

    def broken_by(self, batch: pa.RecordBatch) -> Iterator[tuple[NDArray[np.bool_], str]]:
        """Yield a mask of the rows that violate the constraint, and the reason."""
        rows = pa.Table.from_batches([batch.select(list(self.columns))])
        yield broken(self.expression, rows), f"breaks CHECK {self.name} ({self.expression}) of {self.table}"


@dataclass(frozen=True)
class KeyLimit:
    """Limits of a key table for the normalized key.

    Parameters
    ----------
    table
        Name of the table in messages.
    columns
        Columns of the stream, in key order.
    key
        Names and types of the key columns.
    rules
        Normalization by key column.
    partitions
        Key columns of text or bytes that the table is partitioned by.
    characters
        Maximum number of characters of each key column that the table limits.
    limit
        Maximum size of a key in bytes.
    """

    table: str
    columns: tuple[str, ...]
    key: pa.Schema
    rules: Mapping[str, KeyRule] = field(default_factory=dict)
    partitions: tuple[str, ...] = ()
    characters: Mapping[str, int] = field(default_factory=dict)
    limit: int = 16384

    def broken_by(self, batch: pa.RecordBatch) -> Iterator[tuple[NDArray[np.bool_], str]]:
        """Yield a mask of the rows whose key the table cannot hold, and the reason."""
        if not self.partitions and not self.characters and self._surely_short(batch):
            return
        values = [
            conform(batch.column(column), each.type, self.rules.get(each.name), each.name).values
            for column, each in zip(self.columns, self.key, strict=True)
        ]
        for each, column in zip(self.key, values, strict=True):
            if each.name in self.partitions:
                yield from _unnamable(column, each.name, "is a key that is", self.table)
            if each.name in self.characters:
                most = self.characters[each.name]
                beyond = _flags(pc.greater(pc.utf8_length(column), most))
                yield beyond, f"is longer than the {most} characters that {self.table} holds"
        long = self._too_long(values)
        if long is not None:
            yield long, f"is a key of more than {self.limit} bytes, which no replica of {self.table} holds"

    def _surely_short(self, batch: pa.RecordBatch) -> bool:
        """Return whether every key is certainly short enough, even with maximum growth by normalization."""
        most = sum(_most_bytes(batch.column(name)) for name in self.columns)
        return _GROWTH * most <= self.limit

    def _too_long(self, values: Sequence[pa.Array]) -> NDArray[np.bool_] | None:
        """Return a mask of the keys that are too long; None if the longest values show that no key is too long."""
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


@dataclass(frozen=True)
class MergeKeyRule:
    """A column that identifies a fact in a merge, so that it cannot be null."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the rule needs."""
        return (self.column,)

    def broken_by(self, batch: pa.RecordBatch) -> Iterator[tuple[NDArray[np.bool_], str]]:
        """Yield a mask of the rows that violate the rule, and the reason."""
        values = batch.column(self.column)
        if values.null_count:
            yield np.asarray(values.is_null()), "is null, but sink.key identifies the fact by it"


StorableRule: TypeAlias = ColumnRule | ConstraintRule | KeyLimit | MergeKeyRule


def unstorable(batch: pa.RecordBatch, rules: Iterable[StorableRule]) -> tuple[NDArray[np.bool_], pa.Array]:
    """Return a mask of the rows that no table can hold, and the causes of each row.

    Parameters
    ----------
    batch
        Rows with the columns that the rules need.
    rules
        Rules of the tables.

    Returns
    -------
    mask : bool[n]
    causes : list<CAUSE_TYPE>[n]
        Column, value and reason of each violated rule, in rule order.
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
    """A step that sends rows that no table can hold to the error table. Rows that are not open bypass it."""

    rules: tuple[StorableRule, ...]

    def run(self, batches: Iterable[pa.RecordBatch], task: Any) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - as all steps
        """Yield all rows; rows that cannot be stored are marked as malformed, with their causes."""
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
    fixed = [pa.repeat(text, len(rows)) for text in (", ".join(columns), reason)]
    return pa.StructArray.from_arrays([fixed[0], shown_texts(value), fixed[1]], fields=list(CAUSE_TYPE))


def _unnamable(values: pa.Array, column: str, begin: str, table: str) -> Iterator[tuple[NDArray[np.bool_], str]]:
    """Yield masks of the values that no partition can have, and the reasons, which start with `begin`.

    Headrace's own files do not name folders, but those of Spark, which merges and compacts, do.
    """
    end = f"since {table} is partitioned by it"
    length = pc.binary_length(values)
    yield _flags(pc.equal(length, 0)), f"{begin} empty, which Delta stores as null, {end}"
    marker = pa.scalar(_NULL_FOLDER, pa.string()).cast(values.type)
    yield _flags(pc.equal(values, marker)), f"{begin} Spark's name for null, which Delta stores as null, {end}"
    yield (
        _flags(pc.match_substring(values, "\0")),
        f"{begin} text with U+0000, which no name of a folder holds, {end}",
    )
    prefix = len(f"{column}=".encode()) + 2 * len(re.findall(_ESCAPED, column))
    if prefix + 3 * (pc.max(length).as_py() or 0) > _NAME_BYTES:
        escapes = pc.count_substring_regex(values, _ESCAPED)
        bytes_of_name = pc.add(pc.cast(length, pa.int64()), pc.multiply(pc.cast(escapes, pa.int64()), 2))
        yield (
            _flags(pc.greater(bytes_of_name, _NAME_BYTES - prefix)),
            f"{begin} too long for its folder {column}=..., whose name has at most {_NAME_BYTES} bytes, {end}",
        )


def _flags(found: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.fill_null(found, fill_value=False), dtype=bool)


def _most_bytes(column: pa.Array) -> int:
    """Return an upper bound of the bytes that a value of a column takes in a key."""
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return 2 * (pc.max(pc.binary_length(column)).as_py() or 0) + 2
    return 16
