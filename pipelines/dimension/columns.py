"""Columns of a dimension changed on request: added, filled from a source, widened, removed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.etl.ranking import key_text, rank_rows
from headrace.pipelines.config.column_types import arrow_type, type_name
from headrace.pipelines.delta.reads import plain_schema, scan_table
from headrace.pipelines.delta.support import refuse_twins, takes_files
from headrace.pipelines.delta.tables import first_cause, refuse_far_times
from headrace.pipelines.dimension.inferred import FLAG
from headrace.pipelines.dimension.schema_changes import SchemaChange, change_schema, is_wider
from headrace.pipelines.dimension.tables import declared_dimension, opened_dimension
from headrace.pipelines.errors import DeltaTableError
from headrace.pipelines.hooks import no_hook
from headrace.storage.format import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltalake import DeltaTable

    from headrace.etl import Dimension
    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["ColumnChange", "add_column", "checked_keys", "drop_column", "merged", "source_types", "widen_column"]

_ATTEMPTS: Final = 20
_NAMED: Final = 5


@dataclass(frozen=True)
class ColumnChange:
    """Result of a change.

    Parameters
    ----------
    dimension, path, column, type
        Name and path of the dimension, name of the column, and its type; None for a removed column.
    done
        What was done, in words.
    filled
        Number of members that were given a value; None without a source.
    without_value
        Number of members that the source does not have; None without a source.
    without_member
        Number of rows of the source that have no member; None without a source.
    """

    dimension: str
    path: str
    column: str
    type: str | None
    done: str
    filled: int | None = None
    without_value: int | None = None
    without_member: int | None = None


def add_column(
    config: PipelineConfig,
    name: str,
    column: str,
    kind: str,
    rows: pa.Table | None = None,
    *,
    hook: Callable[[str], None] = no_hook,
) -> ColumnChange:
    """Add an attribute to a dimension, and fill it from source rows if they are given.

    If the column exists with this type, only the values are filled in, so an interrupted call can be repeated.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    column, kind
        Name of the column, and its type as in a pipeline file.
    rows
        Natural keys and values, one row for each member; None to leave the column null.
    hook
        Function called once the column was added.

    Raises
    ------
    DeltaTableError
        If the column exists with another type, the pipeline declares another one, or the source cannot fill it. Nothing
        was written.
    """
    if rows is not None:
        _refuse_history(config, name, column)
    _refuse_recorded(config, name, column)
    table, path = opened_dimension(config, name)
    there = plain_schema(pa.schema(table.schema().to_arrow()))
    wanted = arrow_type(kind)
    _refuse_declared(config, name, column, wanted)
    exists = column in there.names
    if exists and there.field(column).type != wanted:
        raise DeltaTableError(
            f"dimension {name!r} has the column {column!r} already, as {type_name(there.field(column).type)}; name "
            f"another column, or widen it: headrace dimension widen-column {name} {column} TYPE"
        )
    refuse_twins([*(each for each in there.names if each != column), column], f"dimension {name!r}")
    values = None if rows is None else _checked_source(config, name, column, wanted, rows)
    change = SchemaChange(column, None, wanted)
    if not exists:
        change_schema(path, [change])
        hook("after column")
    done = f"the column {column!r} was there already" if exists else change.told(name, path)
    if values is None:
        return ColumnChange(name, path, column, kind, done)
    return ColumnChange(name, path, column, kind, done, *_filled(config, name, column, values))


def source_types(config: PipelineConfig, name: str, column: str, kind: str) -> dict[str, pa.DataType]:
    """Return the types that a source of a column's values is read with, by column: natural key, and the column."""
    table, _ = opened_dimension(config, name)
    there = plain_schema(pa.schema(table.schema().to_arrow()))
    natural = {each: there.field(each).type for each in config.dimensions[name].natural_key if each in there.names}
    return {**natural, column: arrow_type(kind)}


def widen_column(config: PipelineConfig, name: str, column: str, kind: str) -> ColumnChange:
    """Give a column of a dimension a type that holds all values of its present type.

    Raises
    ------
    DeltaTableError
        If the type is not wider, the pipeline declares another one, or the table cannot be rewritten. Nothing was
        written.
    """
    _refuse_history(config, name, column)
    table, path = opened_dimension(config, name)
    there = plain_schema(pa.schema(table.schema().to_arrow()))
    old, new = _column(there, name, column), arrow_type(kind)
    _refuse_declared(config, name, column, new)
    if column in {config.surrogate_key(name), FLAG}:
        raise DeltaTableError(f"the column {column!r} of dimension {name!r} belongs to Headrace and keeps its type")
    if not is_wider(new, old):
        raise DeltaTableError(
            f"dimension {name!r}: {type_name(new)} does not hold every value of {column!r}, which is {type_name(old)}; "
            f"name a wider type, or add a column: headrace dimension add-column {name} {column}_2 {type_name(new)}"
        )
    _refuse_carried(config, name, column, new)
    change = SchemaChange(column, old, new)
    change_schema(path, [change])
    return ColumnChange(name, path, column, type_name(new), change.told(name, path))


def drop_column(config: PipelineConfig, name: str, column: str) -> ColumnChange:
    """Remove an attribute from a dimension. Earlier versions of the table still have it.

    Raises
    ------
    DeltaTableError
        If the pipeline uses the column, or the table cannot be rewritten. Nothing was written.
    """
    _refuse_history(config, name, column)
    table, path = opened_dimension(config, name)
    there = plain_schema(pa.schema(table.schema().to_arrow()))
    old = _column(there, name, column)
    used = _uses(config, name, column)
    if used is not None:
        raise DeltaTableError(f"the column {column!r} of dimension {name!r} cannot be removed: {used}")
    change = SchemaChange(column, old, None)
    change_schema(path, [change])
    return ColumnChange(name, path, column, None, change.told(name, path))


# Checks


def _refuse_recorded(config: PipelineConfig, name: str, column: str) -> None:
    """Raise an error if the entries of a dimension with history would have to record the changes of a new attribute."""
    declared = config.dimensions.get(name)
    if declared is None or declared.history is None:
        return
    given = declared.history
    if given.partial is not None or column in {*given.type_0, *given.type_1, *given.type_1_current, *given.audit}:
        _refuse_history(config, name, column)


def _refuse_history(config: PipelineConfig, name: str, column: str) -> None:
    """Raise an error if a dimension has a history, whose versions and entries depend on each column."""
    declared = config.dimensions.get(name)
    if declared is not None and declared.history is not None:
        raise DeltaTableError(
            f"dimension {name!r} has a history, so the column {column!r} cannot be changed: its versions and the "
            "changes that they record depend on it; make the dimension again from all changes with the new declaration"
        )


def _column(there: pa.Schema, name: str, column: str) -> pa.DataType:
    if column not in there.names:
        raise DeltaTableError(f"dimension {name!r} has no column {column!r}; it has {', '.join(there.names)}")
    return there.field(column).type


def _refuse_declared(config: PipelineConfig, name: str, column: str, wanted: pa.DataType) -> None:
    """Raise an error if the pipeline file declares the column with another type."""
    declared = (config.dimensions[name].columns or {}).get(column)
    if declared is not None and arrow_type(declared) != wanted:
        raise DeltaTableError(
            f"the pipeline file declares dimensions.{name}.columns.{column} as {declared}; declare it as "
            f"{type_name(wanted)} first"
        )


def _refuse_carried(config: PipelineConfig, name: str, column: str, new: pa.DataType) -> None:
    """Raise an error if facts carry the column: their table has its present type."""
    roles = [item.role for item in config.lookups if item.dimension == name and column in item.carry]
    if roles:
        raise DeltaTableError(
            f"facts carry {column!r} as {roles[0]}_{column}, a column of {config.sink.path} that would not hold "
            f"{type_name(new)}; remove it from `carry` of the role {roles[0]!r}, or load the facts into another table"
        )


def _uses(config: PipelineConfig, name: str, column: str) -> str | None:
    """Return how the pipeline uses a column of a dimension, with the remedy; None if it does not."""
    declared = config.dimensions[name]
    if column in declared.natural_key:
        return "it is part of the natural key"
    if column in {config.surrogate_key(name), FLAG}:
        return "it belongs to Headrace"
    roles = [item.role for item in config.lookups if item.dimension == name and column in item.carry]
    if roles:
        return f"facts carry it in the role {roles[0]!r}; remove it from `carry` first"
    for member, values in declared.special.model_dump().items():
        if column in (values or {}):
            return f"the special member {member!r} has a value in it; remove that from the pipeline file first"
    if column in (declared.columns or {}):
        return f"dimensions.{name}.columns declares it, so the next run would add it again; remove it there first"
    return None


# Values


def _checked_source(config: PipelineConfig, name: str, column: str, kind: pa.DataType, rows: pa.Table) -> pa.Table:
    """Return normalized keys and values of source rows.

    Raises
    ------
    DeltaTableError
        If a column is missing, a key is null or occurs twice, or a value does not fit.
    """
    dimension = declared_dimension(config, name)
    missing = [each for each in (*dimension.natural_key, column) if each not in rows.column_names]
    if missing:
        raise DeltaTableError(f"the source has no column {missing[0]!r}; it has {', '.join(rows.column_names)}")
    keys = checked_keys(dimension, rows)
    try:
        values = plain(rows.column(column), kind)
    except pa.ArrowException as error:
        raise DeltaTableError(
            f"the source's column {column!r} does not fit {type_name(kind)}: {str(error).splitlines()[0]}"
        ) from error
    refuse_far_times(pa.table({column: values}), "the source")
    return pa.table([*keys, values], names=[*_key_names(dimension), "value"])


def checked_keys(dimension: Dimension, rows: pa.Table) -> list[pa.Array]:
    """Return the normalized natural keys of source rows.

    Raises
    ------
    DeltaTableError
        If a key is null or occurs twice.
    """
    dimension.check_stream({each: rows.schema.field(each).type for each in dimension.natural_key})
    conformed = dimension.conform_key([rows.column(each) for each in dimension.natural_key])
    keys = [key.values for key in conformed]
    for each, key in zip(dimension.natural_key, keys, strict=True):
        if key.null_count:
            row = pc.index(key.is_null(), pa.scalar(value=True)).as_py()
            raise DeltaTableError.of_row(row, partial(_without_key, each))
    _refuse_repeated(keys)
    return keys


def _without_key(column: str, place: str) -> str:
    return f"the source has no valid {column!r} in {place}; correct it, or leave out the row"


def _refuse_repeated(keys: Sequence[pa.Array]) -> None:
    ranks, distinct = rank_rows(list(keys))
    if distinct == len(ranks):
        return
    counted = pa.table({"rank": pa.array(ranks), "row": pa.array(range(len(ranks)))}).group_by("rank")
    twice = counted.aggregate([("row", "count"), ("row", "min")])
    first = twice.filter(pc.greater(twice.column("row_count"), 1)).column("row_min").slice(0, _NAMED)
    named = key_text([key.take(first.combine_chunks()) for key in keys]).to_pylist()
    raise DeltaTableError(f"the source has natural keys more than once: {'; '.join(named)}; keep one row for each")


def _key_names(dimension: Dimension) -> list[str]:
    return [f"key {position}" for position in range(len(dimension.natural_key))]


def _filled(config: PipelineConfig, name: str, column: str, values: pa.Table) -> tuple[int, int, int]:
    """Set a column from values; return how many members were changed, had no value, and how many values no member."""
    dimension = declared_dimension(config, name)
    for _ in range(_ATTEMPTS):
        table, path = opened_dimension(config, name)
        changes, without_value, without_member = _differences(table, dimension, column, values)
        by_hand = (
            f"fill the column there: MERGE INTO delta.`{path}` USING your_source ON ... WHEN MATCHED THEN UPDATE SET "
            f"`{column}` = ..."
        )
        updates = {f'"{column}"': "source.value"}
        if not changes.num_rows or merged(table, path, dimension.surrogate_key, updates, changes, by_hand):
            return changes.num_rows, without_value, without_member
    raise DeltaTableError(
        f"other writers won {_ATTEMPTS} attempts to fill {column!r} of dimension {name!r}; run again when they ended"
    )


def _differences(table: DeltaTable, dimension: Dimension, column: str, values: pa.Table) -> tuple[pa.Table, int, int]:
    """Return surrogate key and new value of each member whose value differs, and the counts of what does not match."""
    import duckdb  # noqa: PLC0415 - heavy

    keys = _key_names(dimension)
    using = ", ".join(f'"{key}"' for key in keys)
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false; SET TimeZone = 'UTC'")
        connection.register("wanted", values)
        created = False
        for batch in scan_table(table, [dimension.surrogate_key, *dimension.natural_key, column]):
            conformed = dimension.conform_key([batch.column(each) for each in dimension.natural_key])
            surrogate, old = batch.column(dimension.surrogate_key), batch.column(column)
            members = pa.table([surrogate, *(key.values for key in conformed), old], names=["number", *keys, "old"])
            connection.register("given", members)
            connection.execute("INSERT INTO members FROM given" if created else "CREATE TABLE members AS FROM given")
            connection.unregister("given")
            created = True
        if not created:
            none = pa.schema([("number", pa.int64()), ("value", values.schema.field("value").type)]).empty_table()
            return none, 0, values.num_rows
        changes = connection.sql(
            f"SELECT number, value FROM members JOIN wanted USING ({using}) WHERE old IS DISTINCT FROM value"  # noqa: S608 - names of our own
        ).to_arrow_table()
        complete = " AND ".join(f'"{key}" IS NOT NULL' for key in keys)
        without_value = connection.sql(f"FROM members ANTI JOIN wanted USING ({using}) WHERE {complete}")
        without_member = connection.sql(f"FROM wanted ANTI JOIN members USING ({using})")
        counts = [each.aggregate("count(*)").fetchall()[0][0] for each in (without_value, without_member)]
    return changes, counts[0], counts[1]


def merged(table: DeltaTable, path: str, key: str, updates: dict[str, str], changes: pa.Table, by_hand: str) -> bool:
    """Set attributes of members in one commit; return False if another writer committed first.

    Parameters
    ----------
    table, path, key
        Table of the dimension as it was read, its path, and its surrogate key.
    updates
        Expression over the columns of `source` for each quoted column.
    changes
        The source: surrogate keys in the column `number`, and values.
    by_hand
        What to do in Spark if only Spark writes the table.

    Raises
    ------
    DeltaTableError
        If the table cannot be written.
    """
    from deltalake import CommitProperties  # noqa: PLC0415 - heavy
    from deltalake.exceptions import CommitFailedError, DeltaError  # noqa: PLC0415 - as above

    if not takes_files(table):
        raise DeltaTableError(f"the Delta table {path} has features that only Spark writes; {by_hand}")
    once = CommitProperties(max_commit_retries=0)
    try:
        merge = table.merge(
            changes, predicate=f'target."{key}" = source.number', source_alias="source", target_alias="target",
            commit_properties=once,
        )  # fmt: skip
        merge.when_matched_update(updates=updates).execute()
    except CommitFailedError:
        return False
    except (DeltaError, OSError) as error:
        raise DeltaTableError(f"{path} cannot be written: {first_cause(error)}") from error
    return True
