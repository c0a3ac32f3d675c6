"""The stored entries of the members that changes name, read from the clustered table of entries by a join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.etl.errors import DeclarationError
from headrace.etl.history.declaration import AT
from headrace.etl.history.values import single
from headrace.etl.inputs import check_names
from headrace.etl.surrogate import MAX_KEY_BYTES, key_bytes

if TYPE_CHECKING:
    from headrace.etl.history.declaration import History
    from headrace.storage import Table

__all__ = ["named_members", "stored_entries", "time_limits"]


def named_members(history: History, rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return the natural keys that rows name, normalized, each once; null and unusable keys are left out.

    Raises
    ------
    DeclarationError
        If a column of the natural key is missing, or there twice.
    """
    dimension = history.dimension
    where = f"dimension {dimension.name!r}: the table that names members"
    check_names(rows.schema.names, dimension.natural_key, where, DeclarationError)
    keys = dimension.conform_key([single(rows.column(name)) for name in dimension.natural_key])
    usable = ~np.logical_or.reduce([key.null | key.unfit for key in keys])
    usable &= key_bytes([key.values for key in keys]) <= MAX_KEY_BYTES
    table = pa.Table.from_arrays([key.values for key in keys], schema=dimension.key_schema)
    return table.filter(pa.array(usable)).group_by(dimension.key_schema.names).aggregate([])


def stored_entries(history: History, table: Table, members: pa.Table, memory: int | str) -> pa.Table:
    """Return all entries of some members.

    Parameters
    ----------
    history
        The declaration.
    table
        Clustered table of the entries, with the key `History.entry_key`.
    members
        Natural keys, each once.
    memory
        Memory budget of the join.
    """
    from headrace.joins import SSIJ, Range  # noqa: PLC0415 - numba comes in with the first join

    keys = history.dimension.natural_key
    names = [f"_named_{name}" for name in keys]
    low, high = time_limits(history.instant_type, members.num_rows)
    stream = pa.Table.from_arrays([*members.columns, low, high], names=[*names, "_low", "_high"])
    on = Range("_low", "_high", AT, list(zip(names, keys, strict=True)))
    wanted = history.entry_schema
    own = list(range(stream.num_columns, stream.num_columns + len(wanted)))
    with SSIJ(table, on=on, columns=wanted.names, memory=memory) as join:
        found = [result.select(own) for batch in stream.combine_chunks().to_batches() for result in join.push(batch)]
        found += [result.select(own) for result in join.finish()]
    parts = [pa.RecordBatch.from_arrays(batch.columns, names=wanted.names) for batch in found]
    return pa.Table.from_batches(parts).cast(wanted) if parts else wanted.empty_table()


def time_limits(kind: pa.DataType, rows: int) -> tuple[pa.Array, pa.Array]:
    """Return columns of the least and the greatest instant of a type."""
    width = np.int32 if kind == pa.date32() else np.int64
    limits = np.iinfo(width)
    low, high = (pa.array(np.full(rows, limit, dtype=width)).view(kind) for limit in (limits.min, limits.max))
    return low, high
