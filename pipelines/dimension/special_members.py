"""The special members of a dimension's table: added if they are missing, and corrected if the declaration changed.

Member -1 (unknown) is in every dimension; -2 (not applicable) and -3 (invalid) are declared. None of them is ever added
twice: a commit succeeds only at the version after the one that was searched.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl import Special
from headrace.pipelines.delta.reads import physical_name, plain_schema, scan_table
from headrace.pipelines.delta.support import takes_files
from headrace.pipelines.delta.tables import open_table
from headrace.pipelines.errors import DeltaTableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deltalake import DeltaTable

    from headrace.etl import Dimension
    from headrace.pipelines.delta.support import Described

__all__ = ["add_special_members", "special_rows", "wrong_values"]

_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 20


def add_special_members(dimension: Dimension, described: Described) -> list[str]:
    """Add the special members that a dimension's table lacks, and set the attributes that the declaration gives.

    Parameters
    ----------
    dimension
        Dimension with its special members.
    described
        Description of the dimension's table.

    Returns
    -------
    list of str
        Descriptions of the changes, for the summary of the run; empty if nothing changed.

    Raises
    ------
    DeltaTableError
        If the table cannot be changed. The message has the SQL that changes it.
    """
    path, notices = described.path, list[str]()
    for _ in range(_ATTEMPTS):
        table = open_table(path)
        found = special_rows(table, dimension)
        missing = [member for member in dimension.special.present if int(member) not in found]
        wrong = wrong_values(dimension, found)
        version = table.version()
        if missing:
            if _added(dimension, table, described, missing):
                notices += [_told_added(dimension, member, path, version) for member in missing]
        elif wrong:
            if _corrected(dimension, table, described, wrong):
                notices += [_told_corrected(dimension, member, wrong[member], path) for member in wrong]
        else:
            for notice in notices:
                _LOG.warning("%s", notice)
            return notices
    raise DeltaTableError(
        f"dimension {dimension.name!r}: other writers won {_ATTEMPTS} attempts to add special members to {path}; run "
        "again when they have ended"
    )


def _told_added(dimension: Dimension, member: Special, path: str, version: int) -> str:
    return (
        f"dimension {dimension.name!r} had no {_named(member)} member; the member {int(member)} was added to {path} "
        f"after version {version}"
    )


def _told_corrected(dimension: Dimension, member: Special, values: Mapping[str, Any], path: str) -> str:
    shown = ", ".join(f"{name} = {value!r}" for name, value in values.items())
    return f"dimension {dimension.name!r}: the {_named(member)} member {int(member)} of {path} was given {shown}"


def _named(member: Special) -> str:
    return member.text.replace("_", " ")


# What is there


def special_rows(table: DeltaTable, dimension: Dimension) -> dict[int, dict[str, Any]]:
    """Return the rows of the special members that a dimension declares, by surrogate key: their declared attributes.

    Only files that may hold them, by their statistics, are read if the table is plain.
    """
    declared = [name for member in dimension.special.present for name in dimension.special.values(member) or {}]
    wanted = [dimension.surrogate_key, *dict.fromkeys(declared)]
    keys = pa.array([int(member) for member in dimension.special.present], pa.int64())
    found: dict[int, dict[str, Any]] = {}
    for rows in _candidates(table, dimension.surrogate_key, wanted):
        some = rows.filter(pc.is_in(rows.column(dimension.surrogate_key).cast(pa.int64()), value_set=keys))
        for row in some.to_pylist():
            found.setdefault(row[dimension.surrogate_key], row)
    return found


def wrong_values(dimension: Dimension, found: Mapping[int, Mapping[str, Any]]) -> dict[Special, dict[str, Any]]:
    """Return the declared values that special members do not have, by member."""
    wrong: dict[Special, dict[str, Any]] = {}
    for member in dimension.special.present:
        values = dimension.special.values(member) or {}
        row = found.get(int(member))
        differs = {name: value for name, value in values.items() if row is not None and _differ(row[name], value)}
        if differs:
            wrong[member] = differs
    return wrong


def _differ(left: Any, right: Any) -> bool:
    """Whether two values differ; NaN equals itself."""
    return bool(left != right and not (left != left and right != right))  # noqa: PLR0124 - only NaN differs from itself


def _candidates(table: DeltaTable, key: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield rows among which are all special members."""
    files = _files_below_zero(table, key)
    if files is None:
        yield from (pa.Table.from_batches([batch]) for batch in scan_table(table, columns))
        return
    schema = plain_schema(pa.schema(table.schema().to_arrow()))
    for file in files:
        yield _read(file, pa.schema([schema.field(name) for name in columns]))


def _files_below_zero(table: DeltaTable, key: str) -> list[Path] | None:
    """Return the files that may hold a negative key; None if that is not known, or the files are not plain."""
    protocol = table.protocol()
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    place = urlsplit(table.table_uri)
    plain = place.scheme == "file" and not table.metadata().partition_columns
    if not plain or features & {"deletionVectors", "columnMapping"} or _is_mapped(table):
        return None
    actions = pa.table(table.get_add_actions(flatten=True))
    name = f"min.{physical_name(table, key)}"
    paths = actions.column("path").to_pylist()
    folder = Path(unquote(place.path))
    least = actions.column(name).to_pylist() if name in actions.column_names else [None] * len(paths)
    return [folder / unquote(path) for path, low in zip(paths, least, strict=True) if low is None or low < 0]


def _is_mapped(table: DeltaTable) -> bool:
    return bool(table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none")


def _read(file: Path, schema: pa.Schema) -> pa.Table:
    """Return columns of a file; a column that is newer than the file is null."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - heavy

    try:
        there = pq.read_schema(file).names
        rows = pq.read_table(file, columns=[name for name in schema.names if name in there], partitioning=None)
        columns = [
            rows.column(field.name).cast(field.type) if field.name in there else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ]
    except (OSError, pa.ArrowException) as error:
        raise DeltaTableError(f"{file} cannot be read: {error}; restore it from a backup") from error
    return pa.table(columns, schema=schema)


# Changes


def _added(dimension: Dimension, table: DeltaTable, described: Described, members: Sequence[Special]) -> bool:
    """Add members at the next version; return False if another writer committed first."""
    rows = dimension.special_rows(members)
    _refuse_required(dimension, described, rows)
    if takes_files(table):
        return _added_by_files(table, described, rows)
    return all(_run(dimension, described.path, _merge(dimension, described.path, row)) for row in _values(rows))


def _refuse_required(dimension: Dimension, described: Described, rows: pa.Table) -> None:
    """Raise an error if a member has no value for a column that is NOT NULL."""
    given = {name for name in rows.column_names if rows.column(name).null_count == 0}
    required = [name for name in described.required if name not in given and name not in described.filled]
    if required:
        member = Special(rows.column(dimension.surrogate_key)[0].as_py())
        remedy = f"ALTER TABLE delta.`{described.path}` ALTER COLUMN `{required[0]}` DROP NOT NULL"
        raise DeltaTableError(
            f"dimension {dimension.name!r}: {described.path} has no {_named(member)} member (surrogate key "  # noqa: S608 - a message
            f"{int(member)}), and none can be added because {', '.join(required)} is NOT NULL; insert one with values "
            f"of your own, or allow nulls: {remedy}"
        )


def _values(rows: pa.Table) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in rows.to_pylist()]


def _added_by_files(table: DeltaTable, described: Described, rows: pa.Table) -> bool:
    from deltalake import CommitProperties, write_deltalake  # noqa: PLC0415 - heavy

    columns = [
        rows.column(field.name).cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        for field in described.schema
    ]
    whole = pa.table(columns, schema=pa.schema([field.remove_metadata() for field in described.schema]))
    once = CommitProperties(max_commit_retries=0)
    return _committed(table, lambda: write_deltalake(table, whole, mode="append", commit_properties=once))


def _corrected(
    dimension: Dimension, table: DeltaTable, described: Described, wrong: Mapping[Special, Mapping[str, Any]]
) -> bool:
    """Set attributes of members; return False if another writer committed first."""
    from deltalake import CommitProperties  # noqa: PLC0415 - heavy

    once, key = CommitProperties(max_commit_retries=0), dimension.surrogate_key
    for member, values in wrong.items():
        if not takes_files(table):
            given = ", ".join(f"`{name}` = {_literal(value)}" for name, value in values.items())
            statement = f"UPDATE delta.`{described.path}` SET {given} WHERE `{key}` = {int(member)}"  # noqa: S608 - quoted
            done = _run(dimension, described.path, statement)
        else:
            assigned = {_name(name): _plain_literal(value) for name, value in values.items()}
            where = f"{_name(key)} = {int(member)}"
            update = partial(table.update, updates=assigned, predicate=where, commit_properties=once)
            done = _committed(table, update)
        if not done:
            return False
    return True


def _committed(table: DeltaTable, change: Callable[[], Any]) -> bool:
    """Make a change; return False if another writer committed first."""
    from deltalake.exceptions import CommitFailedError, DeltaError  # noqa: PLC0415 - heavy

    try:
        change()
    except CommitFailedError:
        return False
    except (DeltaError, OSError) as error:
        raise DeltaTableError(
            f"the special members of {table.table_uri} cannot be written at version {table.version() + 1}: {error}"
        ) from error
    return True


def _name(column: str) -> str:
    """Return a column name as `deltalake` takes it."""
    return '"' + column.replace('"', '""') + '"'


def _plain_literal(value: Any) -> str:
    """Return a value as SQL of `deltalake`, where a backslash is itself."""
    if value is None or isinstance(value, bool | int | float):
        return _literal(value)
    return "'" + str(value).replace("'", "''") + "'"


def _literal(value: Any) -> str:
    """Return a value as SQL of Spark."""
    if value is None:
        return "NULL"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _merge(dimension: Dimension, path: str, row: Mapping[str, Any]) -> str:
    """Return the SQL that adds a member if it does not exist."""
    key = dimension.surrogate_key
    names = ", ".join(f"`{name}`" for name in row)
    given = ", ".join(_literal(value) for value in row.values())
    return (
        f"MERGE INTO delta.`{path}` AS m USING (SELECT {row[key]} AS k) AS u ON m.`{key}` = u.k "  # noqa: S608 - quoted
        f"WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({given})"
    )


def _run(dimension: Dimension, path: str, statement: str) -> bool:
    """Run a statement with Spark; return False if another writer committed first."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - heavy

    session = SparkSession.getActiveSession()
    if session is None:
        raise DeltaTableError(
            f"dimension {dimension.name!r}: the Delta table {path} lacks a special member (-1 for unknown) or its "
            f"values, and only Spark can write it: {statement}"
        )
    try:
        session.sql(statement)
    except Exception as error:
        if "DELTA_CONCURRENT" in str(error):
            return False
        raise DeltaTableError(
            f"dimension {dimension.name!r}: Spark could not write the special members of {path}: "
            f"{str(error).splitlines()[0]}; write them yourself: {statement}"
        ) from error
    return True
