"""The versions of a dimension with history, for lookups of a program's own Arrow tables without Spark."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.pipelines.changes.targets import check_table
from headrace.pipelines.config.history import history_of
from headrace.pipelines.delta.tables import DeltaHandle
from headrace.pipelines.replica.catch_up import ReplicaSpec
from headrace.pipelines.replica.entry_rows import EntryRows, opened_entries
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.etl.history.reading import StoredVersions
    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["open_versions"]


@contextmanager
def open_versions(config: PipelineConfig, name: str) -> Iterator[StoredVersions]:
    """Open the versions of a dimension at the newest version of its table, for lookups.

    The lookups use a replica with all entries in one shard, which a dimension with ``shards: 1`` shares with applies.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.

    Raises
    ------
    PipelineFileError, DeltaTableError
        If the dimension has no history or no table, or the table does not have the declared columns.
    """
    from headrace.etl.history.reading import StoredVersions  # noqa: PLC0415 - numba comes in here

    history, path = history_of(config, name), config.dimensions[name].path
    check_table(path, history, f"dimension {name!r}")
    handle = DeltaHandle(path)
    latest = handle.latest()
    spec = ReplicaSpec(
        EntryRows(history), path, latest.table_id, 1, config.replicas, parse_memory(config.replica_memory)
    )
    base = handle.greatest_key(history.dimension.surrogate_key)
    with opened_entries(spec, 0, latest.version, base) as (table, _):
        yield StoredVersions(history, table, config.memory)
