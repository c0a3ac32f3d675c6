"""Comparison of the replicas on this host with the Delta table that they follow, member by member.

Both are read once into a DuckDB file, so memory is bounded. A replica that is behind is first brought to the version of
the table, as a run would do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from headrace.etl.ranking import key_text
from headrace.pipelines.delta.scratch import load_rows
from headrace.pipelines.delta.tables import read_rows
from headrace.pipelines.replica.catch_up import catch_up, discard
from headrace.pipelines.replica.rows import of_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from duckdb import DuckDBPyConnection

    from headrace.pipelines.replica.catch_up import Reached, ReplicaSpec
    from headrace.storage import Table

__all__ = ["ReplicaDifference", "rebuild", "replica_differences", "replicas_here"]

_EXAMPLES: Final = 10
_SHARD: Final = re.compile(r"(\d+)-of-(\d+)")
_FILE: Final = "table.headrace"


@dataclass(frozen=True)
class ReplicaDifference:
    """A replica that differs from its table.

    Parameters
    ----------
    spec, shard
        Description of the replica, and its shard.
    rows
        Number of rows that differ.
    examples
        Keys of such rows, as text.
    """

    spec: ReplicaSpec
    shard: int
    rows: int
    examples: tuple[str, ...]


def replicas_here(spec: ReplicaSpec) -> list[tuple[ReplicaSpec, int]]:
    """Return the replicas of a description that are on this host, whatever their number of shards."""
    found = []
    folder = spec.place(0).parent
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _SHARD.fullmatch(place.name)
        if match is not None and (place / _FILE).exists():
            found.append((replace(spec, shards=int(match[2])), int(match[1])))
    return found


def replica_differences(
    connection: DuckDBPyConnection, spec: ReplicaSpec, version: int, base: int
) -> Iterator[ReplicaDifference]:
    """Yield the replicas on this host that differ from their table.

    Parameters
    ----------
    connection
        Connection with a file on the local disk.
    spec
        Description of the replicas; the number of shards does not matter.
    version, base
        Version of the table, and the greatest surrogate key at that version.
    """
    for own, shard in replicas_here(spec):
        schema = own.rows.schema
        table: Table = catch_up(own, shard, version, base, _opened)
        with table:
            load_rows(connection, "held", schema, (batch.cast(schema) for batch in table.scan()))
        load_rows(connection, "wanted", schema, _wanted(own, shard, version))
        sides = ("FROM held EXCEPT ALL FROM wanted", "FROM wanted EXCEPT ALL FROM held")
        different = " UNION ALL ".join(f"({side})" for side in sides)
        rows = max(connection.execute(f"SELECT count(*) FROM ({side})").fetchall()[0][0] for side in sides)
        if rows:
            keys = ", ".join(f'"{name}"' for name in own.rows.key.names)
            query = f"SELECT DISTINCT {keys} FROM ({different}) ORDER BY ALL LIMIT {_EXAMPLES}"
            named = connection.sql(query).to_arrow_table()
            texts = tuple(str(text) for text in key_text(named.columns).to_pylist())
            yield ReplicaDifference(own, shard, int(rows), texts)


def rebuild(difference: ReplicaDifference, version: int, base: int) -> None:
    """Build a replica again from its table."""
    spec, shard = difference.spec, difference.shard
    discard(spec, shard, (spec.place(shard) / _FILE).stat().st_ino)
    catch_up(spec, shard, version, base, lambda reached: reached)


def _wanted(spec: ReplicaSpec, shard: int, version: int) -> Iterator[pa.RecordBatch]:
    rows = spec.rows
    for batch in read_rows(spec.path, version, rows.columns):
        table = rows.rows(pa.Table.from_batches([batch]), version).cast(rows.schema)
        yield from of_shard(table, rows.shard_key, spec.shards, shard).to_batches()


def _opened(reached: Reached) -> Table:
    from headrace.storage import Table  # noqa: PLC0415 - numba comes in here

    return Table.open(reached.file)
