"""The unknown member (surrogate key -1) of a dimension that another job created without one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import UNKNOWN_KEY
from headrace.pipelines.delta.reads import physical_name, scan_table
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from headrace.etl import Dimension
    from headrace.pipelines.delta.support import Described

__all__ = ["add_unknown_member", "has_unknown_member"]

_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 20


def add_unknown_member(dimension: Dimension, described: Described) -> str | None:
    """Add the member -1 to a dimension, unless the dimension already has it.

    The commit succeeds only at the version after the one that was searched, so two concurrent runs add only one member.

    Parameters
    ----------
    dimension
        Dimension that needs the member.
    described
        Description of the dimension's table.

    Returns
    -------
    str or None
        Description of the change, for the summary of the run; None if nothing changed.

    Raises
    ------
    DeltaTableError
        If the member cannot be added. The message has the SQL that adds it.
    """
    path = described.path
    for _ in range(_ATTEMPTS):
        table = open_table(path)
        if has_unknown_member(table, dimension.surrogate_key):
            return None
        version = table.version()
        if _added(dimension, table, described):
            notice = (
                f"dimension {dimension.name!r} had no unknown member; the member {UNKNOWN_KEY} was added to {path} "
                f"after version {version}"
            )
            _LOG.warning("%s", notice)
            return notice
    raise DeltaTableError(
        f"dimension {dimension.name!r}: other writers won {_ATTEMPTS} attempts to add the unknown member to {path}; "
        "run again when they have ended"
    )


def has_unknown_member(table: DeltaTable, surrogate_key: str) -> bool:
    """Return whether a dimension's table has the member -1, based on file statistics or else on the rows."""
    actions = pa.table(table.get_add_actions(flatten=True))
    name = f"min.{physical_name(table, surrogate_key)}"
    exact = "deletionVectors" not in (table.protocol().reader_features or ())
    if name in actions.column_names and exact:
        lowest = actions.column(name)
        if pc.any(pc.equal(lowest, UNKNOWN_KEY), min_count=0).as_py():
            return True
        if not lowest.null_count and not pc.any(pc.less(lowest, UNKNOWN_KEY), min_count=0).as_py():
            return False
    keys = (batch.column(0) for batch in scan_table(table, [surrogate_key]))
    return any(pc.any(pc.equal(column, UNKNOWN_KEY), min_count=0).as_py() for column in keys)


def _added(dimension: Dimension, table: DeltaTable, described: Described) -> bool:
    """Add the member at the next version; return False if another writer committed first."""
    values = {dimension.surrogate_key: UNKNOWN_KEY}
    if dimension.inferred_flag is not None:
        values[dimension.inferred_flag] = False
    required = [name for name in described.required if name not in values and name not in described.filled]
    if required:
        remedy = f"ALTER TABLE delta.`{described.path}` ALTER COLUMN `{required[0]}` DROP NOT NULL"
        raise DeltaTableError(
            f"dimension {dimension.name!r}: {described.path} has no unknown member (surrogate key "  # noqa: S608 - a message
            f"{UNKNOWN_KEY}), and none can be added because {', '.join(required)} is NOT NULL; insert one with values "
            f"of your own, or allow nulls: {remedy}"
        )
    if takes_files(table):
        return _added_by_files(table, described, values)
    return _added_by_spark(dimension, described.path, _statement(described.path, values))


def _added_by_files(table: DeltaTable, described: Described, values: dict[str, int]) -> bool:
    from deltalake import CommitProperties, write_deltalake  # noqa: PLC0415 - heavy
    from deltalake.exceptions import CommitFailedError, DeltaError  # noqa: PLC0415 - as above

    schema = described.schema
    row = pa.table(
        [pa.array([values.get(field.name)], field.type) for field in schema],
        schema=pa.schema([field.remove_metadata() for field in schema]),
    )
    try:
        write_deltalake(table, row, mode="append", commit_properties=CommitProperties(max_commit_retries=0))
    except CommitFailedError:
        return False
    except (DeltaError, OSError) as error:
        raise DeltaTableError(
            f"the unknown member cannot be added to {described.path} at version {table.version() + 1}: {error}"
        ) from error
    return True


def _statement(path: str, values: dict[str, int]) -> str:
    """Return the SQL that adds the member if it does not exist."""
    key = next(iter(values))
    names = ", ".join(f"`{name}`" for name in values)
    given = ", ".join(str(value).lower() for value in values.values())
    return (
        f"MERGE INTO delta.`{path}` AS m USING (SELECT {UNKNOWN_KEY} AS k) AS u ON m.`{key}` = u.k "  # noqa: S608 - quoted
        f"WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({given})"
    )


def _added_by_spark(dimension: Dimension, path: str, statement: str) -> bool:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - heavy

    session = SparkSession.getActiveSession()
    if session is None:
        raise DeltaTableError(
            f"dimension {dimension.name!r}: the Delta table {path} has no unknown member, and only Spark can add it: "
            f"{statement}"
        )
    try:
        session.sql(statement)
    except Exception as error:
        if "DELTA_CONCURRENT" in str(error):
            return False
        raise DeltaTableError(
            f"dimension {dimension.name!r}: Spark could not add the unknown member to {path}: "
            f"{str(error).splitlines()[0]}; add it yourself: {statement}"
        ) from error
    return True
