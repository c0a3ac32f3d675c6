"""The rows that travel between the stages of a batch: their columns and their states.

A batch starts as a frame of file pieces, which the first stage reads. In addition to stream rows, later frames carry
task notes (counts) and, where Spark writes the tables, new members, rejected rows and routed duplicates. These rows
come from the same frame as the data, so they are neither counted twice nor lost, and they need no separate pass over
the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import shard_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.etl import KeyRule

__all__ = [
    "FILE",
    "MALFORMED",
    "MALFORMED_TYPE",
    "NOTE",
    "PIECES",
    "RECORD_NUMBER",
    "REJECTED",
    "ROUTED",
    "SHARD",
    "STATE",
    "ShardRule",
    "State",
    "channel_row",
    "conform",
    "member_column",
    "source_schema",
    "with_state",
]

FILE = "_file"
RECORD_NUMBER = "_record_number"
MALFORMED = "_malformed"
STATE = "_state"
NOTE = "_note"
SHARD = "_shard"
REJECTED = "_rejected"
ROUTED = "_routed"
MALFORMED_TYPE = pa.list_(pa.struct({"column": pa.string(), "value": pa.string(), "reason": pa.string()}))
PIECES = pa.schema(
    [
        ("file", pa.string()),
        ("path", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("first_record", pa.int64()),
        ("size", pa.int64()),
        ("mtime_ns", pa.int64()),
    ]
)


class State(IntEnum):
    """State of a row in a frame. The last stage leaves facts `OPEN`."""

    OPEN = 0
    MALFORMED = 1
    REJECTED = 2
    DUPLICATE = 3
    FILTERED = 4
    MEMBER = 10
    NOTE = 11


def source_schema(stream: pa.Schema) -> pa.Schema:
    """Return the columns of rows as read: stream columns, origin, causes of malformed records, state."""
    own = [(FILE, pa.string()), (RECORD_NUMBER, pa.int64()), (MALFORMED, MALFORMED_TYPE)]
    own += [(STATE, pa.int8()), (NOTE, pa.string())]
    return pa.schema([*stream, *(pa.field(name, kind) for name, kind in own)])


def member_column(role: str) -> str:
    """Return the name of the column that carries the new members of a role."""
    return f"_member_{role}"


@dataclass(frozen=True)
class ShardRule:
    """Assigns rows to shards before a stage.

    Parameters
    ----------
    columns
        Columns of the frame that form the key, in key order.
    key
        Names and types of the key columns.
    shards
        Number of shards.
    rules
        Normalisation by key column.
    """

    columns: tuple[str, ...]
    key: pa.Schema
    shards: int
    rules: Mapping[str, KeyRule]

    def of(self, columns: list[pa.Array], open_rows: NDArray[np.bool_] | None = None) -> pa.Array:
        """Return the shard of each row. Rows without a key, and rows that are not looked up, go to shard 0.

        The shard depends only on the row itself. A retried task may see its rows in another order, so a shard derived
        from the row's position could lose or duplicate the row.
        """
        rows = len(columns[0])
        keyed = np.logical_and.reduce([np.asarray(column.is_valid()) for column in columns])
        if open_rows is not None:
            keyed &= open_rows
        shard = np.zeros(rows, dtype=np.int32)
        if keyed.any():
            wanted = [column if keyed.all() else column.filter(pa.array(keyed)) for column in columns]
            shard[keyed] = shard_of(wanted, self.key, self.shards, self.rules)
        return pa.array(shard, pa.int32())

    def append_to(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with the column `_shard`, which replaces any existing one."""
        batch = batch.drop_columns([SHARD]) if SHARD in batch.schema.names else batch
        is_open = np.asarray(pc.equal(batch.column(STATE), State.OPEN))
        shard = self.of([batch.column(name) for name in self.columns], is_open)
        return batch.append_column(pa.field(SHARD, pa.int32()), shard)


def channel_row(schema: pa.Schema, state: State, values: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return frame rows that are not stream rows: every column is null except the given columns and the state."""
    rows = len(next(iter(values.values())))
    given = {STATE: pa.repeat(pa.scalar(int(state), pa.int8()), rows), **values}
    columns = [given.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with exactly the columns of a schema; missing columns are null."""
    there = set(batch.schema.names)
    columns = [
        _as(batch.column(field.name), field.type) if field.name in there else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def with_state(batch: pa.RecordBatch, wanted: pa.Array, state: State) -> pa.RecordBatch:
    """Return the batch with a new state for the selected rows."""
    if STATE not in batch.schema.names:
        return batch.append_column(pa.field(STATE, pa.int8()), pa.repeat(pa.scalar(int(state), pa.int8()), len(batch)))
    if not pc.any(wanted, min_count=0).as_py():
        return batch
    position = batch.schema.get_field_index(STATE)
    changed = pc.if_else(wanted, pa.scalar(int(state), pa.int8()), batch.column(position))
    return batch.set_column(position, batch.schema.field(position), changed)


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)
