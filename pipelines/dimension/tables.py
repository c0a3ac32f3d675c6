"""Dimensions as Delta tables, without Spark: creation from source rows, description, checks, and key lookups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from headrace.etl import Dimension, Special, SpecialMembers
from headrace.etl.history.declaration import SEQUENCE
from headrace.pipelines.config.column_types import arrow_schema, table_type
from headrace.pipelines.config.declared import key_rules, special_members, spellings
from headrace.pipelines.delta.reads import plain_schema, scan_table
from headrace.pipelines.delta.support import refuse_float_keys, refuse_twins
from headrace.pipelines.delta.tables import create_dimension as write_dimension
from headrace.pipelines.delta.tables import has_table, open_table, remember_greatest_key
from headrace.pipelines.dimension.carried_numbers import refuse_numbering_again
from headrace.pipelines.dimension.check import Audit, Finding, Repair
from headrace.pipelines.errors import DeltaTableError, OtherCommandError, UnknownDimensionError
from headrace.pipelines.history.layout import ENTRIES
from headrace.pipelines.replica.row_sizes import LONGEST_ROW, RowSizes, long_row
from headrace.storage.errors import nearest
from headrace.storage.format import is_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import duckdb
    from deltalake import DeltaTable

    from headrace.pipelines.config.model import DimensionConfig, PipelineConfig

__all__ = [
    "DimensionSummary",
    "Finding",
    "FoundMembers",
    "Repair",
    "audited",
    "check_dimension",
    "create_dimension",
    "declared_dimension",
    "describe_dimension",
    "find_members",
    "member_columns",
    "members_with",
    "opened_dimension",
    "plan_repair",
    "refuse_creation",
    "refuse_long_members",
    "replicated",
]

_POSITION: Final = "position of a wanted key"
_KEY: Final = "part of a normalized key"


@dataclass(frozen=True)
class DimensionSummary:
    """Description of a dimension.

    Attributes
    ----------
    name, path, natural_key, surrogate_key
        Name, path and keys as declared in the pipeline file.
    exists
        Whether the Delta table exists. If it does not, the remaining fields are empty.
    version, members, versions, inferred, greatest_key
        Version of the Delta table, number of members without the unknown member, number of their versions if the
        dimension has a history, number of inferred members or versions, and the highest surrogate key assigned so far.
    columns
        Name and type of each column.
    """

    name: str
    path: str
    natural_key: tuple[str, ...]
    surrogate_key: str
    exists: bool
    version: int | None = None
    members: int | None = None
    versions: int | None = None
    inferred: int | None = None
    greatest_key: int | None = None
    columns: tuple[tuple[str, str], ...] = ()


def declared_dimension(config: PipelineConfig, name: str, schema: pa.Schema | None = None) -> Dimension:
    """Return a dimension of a pipeline file.

    Parameters
    ----------
    config, name
        Configuration of the pipeline, and name of the dimension in it.
    schema
        Schema with the column types; None to use the types that the pipeline file declares.

    Raises
    ------
    DeltaTableError
        If the pipeline declares no such dimension, or neither declared columns nor a table give its types.
    """
    declared = _declared(config, name)
    if declared.columns is not None:
        schema = arrow_schema(declared.columns)
    if schema is None:
        schema = _types_of(_open(name, declared))
    return Dimension(
        name,
        tuple(declared.natural_key),
        config.surrogate_key(name),
        schema,
        key_rules(declared),
        special=special_members(declared, name, schema),
        spellings=spellings(declared),
    )


def create_dimension(config: PipelineConfig, name: str, rows: pa.Table) -> DimensionSummary:
    """Create the Delta table of a dimension: members 1, 2, ... in key order, and the unknown member.

    Parameters
    ----------
    rows
        Natural keys and attributes, one row per member, in any order.

    Raises
    ------
    DeltaTableError
        If the table already exists, or cannot hold a column or a value, a declared column is missing in `rows`, or
        facts carry numbers of its members.
    DimensionError
        If a natural key is null or occurs twice, or a value does not fit the type of its column.
    """
    refuse_creation(config, name)
    path = _declared(config, name).path
    schema = _table_schema(name, rows.schema) if _declared(config, name).columns is None else None
    dimension = declared_dimension(config, name, schema)
    label = f"dimension {name!r}"
    missing = [
        each
        for each in dimension.schema.names
        if each not in rows.column_names and each not in dimension.spellings.values()
    ]
    if missing:
        near = nearest(missing[0], rows.column_names)
        raise DeltaTableError(
            f"{label}: the source has no column {missing[0]!r}{near}; it has {', '.join(rows.column_names)}"
        )
    refuse_twins(dimension.table_schema.names, label)
    refuse_float_keys(dimension.key_schema, label)
    refuse_long_members(config, dimension, rows)
    members = write_dimension(path, dimension, rows)
    remember_greatest_key(path, members)
    return describe_dimension(config, name)


def refuse_creation(config: PipelineConfig, name: str) -> None:
    """Refuse to create a dimension that has a history or a table, or whose members facts refer to.

    Raises
    ------
    DeltaTableError
        Says what to do instead.
    """
    path = _declared(config, name).path
    if _declared(config, name).history is not None:
        raise OtherCommandError(
            f"dimension {name!r} has a history, so its members come from changes, which create it: `headrace dimension "
            f"apply {name} SOURCE`, with --snapshot TIME for a list of members"
        )
    if has_table(path):
        raise DeltaTableError(
            f"dimension {name!r} is already at {path}, perhaps made by a run; docs/operations.md, 'Add members to a "
            "dimension', has the statement that adds members; to make it again, remove the table, and "
            f"with it the facts that carry its keys, {config.sink.path}, and the checkpoint {config.checkpoint}, so "
            "that the next run loads all files again"
        )
    refuse_numbering_again(config, name)


def member_columns(config: PipelineConfig, name: str) -> tuple[pa.Schema | None, tuple[str, ...]]:
    """Return the columns of files of members, and those of them that files may lack: spellings of natural keys.

    None stands for the columns that the files have.
    """
    declared = _declared(config, name)
    if declared.columns is None:
        return None, ()
    return arrow_schema(declared.columns), tuple(spellings(declared).values())


def describe_dimension(config: PipelineConfig, name: str) -> DimensionSummary:
    """Return the description of a dimension, which need not exist yet."""
    declared = _declared(config, name)
    identity = (name, declared.path, tuple(declared.natural_key), config.surrogate_key(name))
    if not has_table(declared.path):
        return DimensionSummary(*identity, exists=False)
    table = _open(name, declared)
    key = config.surrogate_key(name)
    flag = "is_inferred" if "is_inferred" in _types_of(table).names else "false"
    nameless = " OR ".join(f"{_quoted(column)} IS NULL" for column in declared.natural_key)
    unnamed = ", ".join(str(int(member)) for member in Special if member is not Special.UNKNOWN)
    rows, inferred, greatest = _query(
        table,
        [key, *declared.natural_key, *([] if flag == "false" else [flag])],
        f"SELECT count(*), count(*) FILTER ({flag}), greatest(coalesce(max({_quoted(key)}), 0), 0) FROM members "  # noqa: S608 - quoted
        f"WHERE {_quoted(key)} <> {Special.UNKNOWN} AND NOT ({_quoted(key)} IN ({unnamed}) AND ({nameless}))",
    )[0]
    columns = tuple((column.name, str(column.type)) for column in _types_of(table))
    return DimensionSummary(
        *identity,
        exists=True,
        version=table.version(),
        members=rows if declared.history is None else _count_members(config, name, table),
        versions=None if declared.history is None else rows,
        inferred=inferred,
        greatest_key=greatest,
        columns=columns,
    )


def _count_members(config: PipelineConfig, name: str, table: DeltaTable) -> int:
    """Return the number of members of a dimension with history: its distinct natural keys without special members."""
    dimension = declared_dimension(config, name)
    natural = dimension.natural_key
    keys = [f"{_KEY} {position}" for position in range(len(natural))]
    distinct, named = (
        ", ".join(map(_quoted, keys)),
        " AND ".join(f"{_quoted(column)} IS NOT NULL" for column in natural),
    )
    with _duckdb() as connection:
        connection.register("members", _keyed_members(table, dimension, keys, natural))
        counted = f"SELECT count(*) FROM (SELECT DISTINCT {distinct} FROM members WHERE {named})"  # noqa: S608 - quoted
        return int(connection.execute(counted).fetchall()[0][0])


def check_dimension(config: PipelineConfig, name: str) -> list[Finding]:
    """Return the rules that a dimension, or the pipeline's facts with its keys, violate; an empty list if none."""
    with audited(config, name) as audit:
        return audit.findings()


def plan_repair(config: PipelineConfig, name: str) -> list[Repair]:
    """Return the repairs of the findings of `check_dimension`. Nothing is changed."""
    with audited(config, name) as audit:
        return audit.repairs()


def audited(config: PipelineConfig, name: str) -> Audit:
    """Return the audit of a dimension, which begins when its block is entered."""
    declared = _declared(config, name)
    schema = _types_of(_open(name, declared))
    missing = [each for each in (*declared.natural_key, config.surrogate_key(name)) if each not in schema.names]
    if missing:
        raise DeltaTableError(
            f"dimension {name!r}: the Delta table {declared.path} has no column {missing[0]!r}; it has "
            f"{', '.join(schema.names)}"
        )
    carried = {column for item in config.lookups if item.dimension == name for column in item.carry}
    special = special_members(declared, name, schema)
    texts = {column for member in special.present for column in special.values(member) or {}}
    absent = sorted(texts - {*schema.names})
    if absent:
        raise DeltaTableError(
            f"dimension {name!r}: special members have values of {absent[0]!r}, which the Delta table {declared.path} "
            f"does not have; it has {', '.join(schema.names)}; add the column: headrace dimension add-column {name} "
            f"{absent[0]} TYPE"
        )
    kept = [each for each in schema if each.name in {*declared.natural_key, *carried, *texts}]
    rules = key_rules(declared)
    key = config.surrogate_key(name)
    natural = tuple(declared.natural_key)
    dimension = Dimension(name, natural, key, pa.schema(kept), rules, inferred_flag=None, special=special)
    return Audit(config, dimension, declared.path, replicated(config, dimension))


class FoundMembers(NamedTuple):
    """The result of a search for members by natural key.

    Attributes
    ----------
    members
        Members that were found, with all columns, except for those that a history keeps for itself.
    missing
        Ascending positions of the keys that match no member.
    """

    members: pa.Table
    missing: list[int]


def find_members(config: PipelineConfig, name: str, keys: Sequence[Sequence[str]]) -> FoundMembers:
    """Return the members with the given natural keys, compared as in the pipeline.

    Parameters
    ----------
    keys
        Natural keys as text, with one value per key column.
    """
    declared = _declared(config, name)
    table = _open(name, declared)
    dimension = declared_dimension(config, name)
    texts = [pa.array([key[at] for key in keys], pa.string()) for at in range(len(dimension.natural_key))]
    kinds = [dimension.schema.field(column).type for column in dimension.natural_key]
    try:
        values = [text.cast(kind) for text, kind in zip(texts, kinds, strict=True)]
    except pa.ArrowException as error:
        raise DeltaTableError(f"dimension {name!r}: not a natural key: {error}") from error
    wanted = pa.table(
        {column: key.values for column, key in zip(dimension.natural_key, dimension.conform_key(values), strict=True)}
    )
    hidden = () if declared.history is None else (SEQUENCE, ENTRIES)
    columns = [column for column in _types_of(table).names if column not in hidden]
    return members_with(table, dimension, wanted, columns)


def replicated(config: PipelineConfig, dimension: Dimension) -> Dimension:
    """Return a dimension with the columns that a replica holds: its keys, and the attributes that the facts carry."""
    carried = {name for item in config.lookups if item.dimension == dimension.name for name in item.carry}
    kept = [field for field in dimension.schema if field.name in carried or field.name in dimension.natural_key]
    plain = replace(dimension, special=SpecialMembers(), spellings={})
    return replace(plain, schema=pa.schema(kept), inferred_flag=None)


def _table_schema(name: str, given: pa.Schema) -> pa.Schema:
    """Return the columns of source rows with the types of a Delta table."""
    fields = []
    for field in given:
        kind = table_type(field.type)
        if kind is None:
            raise DeltaTableError(
                f"dimension {name!r}: column {field.name!r} of the source is {field.type}, which no Delta table has; "
                f"cast it, read it as text (--text), or declare the other columns in dimensions.{name}.columns"
            )
        fields.append(field.with_type(kind))
    return pa.schema(fields)


def refuse_long_members(config: PipelineConfig, dimension: Dimension, rows: pa.Table) -> None:
    """Raise an error if a source row yields a member that fits in no page of a replica."""
    kept = replicated(config, dimension)
    if not rows.num_rows or any(name not in rows.column_names for name in kept.natural_key):
        return  # the assignment of surrogate keys reports the missing column
    keys = [key.values for key in kept.conform_key([rows.column(name) for name in kept.natural_key])]
    given = dict(zip(kept.natural_key, keys, strict=True))
    given |= {
        field.name: rows.column(field.name).cast(field.type)
        for field in kept.attributes
        if field.name in rows.column_names and is_bytes(field.type)
    }
    columns = [given.get(field.name, pa.nulls(rows.num_rows, field.type)) for field in kept.table_schema]
    usable = np.logical_and.reduce([np.asarray(key.is_valid()) for key in keys])
    measured = pa.table(columns, schema=kept.table_schema).filter(pa.array(usable))
    sizes = RowSizes(kept.table_schema, kept.key_schema)
    if sizes.needs(measured, LONGEST_ROW) > LONGEST_ROW:
        needs = sizes.of_each(measured)
        longest = measured.slice(int(needs.argmax()), 1)
        path = _declared(config, dimension.name).path
        raise long_row(f"dimension {dimension.name!r}", path, longest, dimension.natural_key, int(needs.max()))


def members_with(table: DeltaTable, dimension: Dimension, wanted: pa.Table, columns: Sequence[str]) -> FoundMembers:
    """Return columns of the members with the given normalized natural keys."""
    keys = [f"{_KEY} {position}" for position in range(wanted.num_columns)]
    using = ", ".join(map(_quoted, keys))
    wanted = wanted.rename_columns(keys).append_column(_POSITION, pa.array(range(wanted.num_rows), pa.int64()))
    with _duckdb() as connection:
        connection.register("members", _keyed_members(table, dimension, keys, columns))
        connection.register("wanted", wanted)
        found = connection.sql(f"FROM members SEMI JOIN wanted USING ({using}) ORDER BY ALL").to_arrow_table()
        connection.register("found", found)
        unmatched = connection.sql(f"FROM wanted ANTI JOIN found USING ({using})").to_arrow_table()
        return FoundMembers(found.drop_columns(keys), sorted(unmatched.column(_POSITION).to_pylist()))


def _keyed_members(
    table: DeltaTable, dimension: Dimension, names: Sequence[str], columns: Sequence[str]
) -> pa.RecordBatchReader:
    """Return columns of all rows of a dimension's table, with the normalized natural key in additional columns."""
    types = _types_of(table)
    schema = pa.schema([types.field(column) for column in columns])
    kinds = [field.type for field in dimension.key_schema]
    whole = pa.schema([*schema, *(pa.field(name, kind) for name, kind in zip(names, kinds, strict=True))])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in scan_table(table, schema.names):
            keys = dimension.conform_key([batch.column(name) for name in dimension.natural_key])
            yield pa.RecordBatch.from_arrays([*batch.columns, *(key.values for key in keys)], schema=whole)

    return pa.RecordBatchReader.from_batches(whole, batches())


def _declared(config: PipelineConfig, name: str) -> DimensionConfig:
    if name not in config.dimensions:
        known = ", ".join(config.dimensions) or "none"
        near = nearest(name, list(config.dimensions))
        raise UnknownDimensionError(
            f"pipeline {config.name!r} has no dimension {name!r}{near}; its dimensions are {known}"
        )
    return config.dimensions[name]


def opened_dimension(config: PipelineConfig, name: str) -> tuple[DeltaTable, str]:
    """Return the open table of a dimension at its latest version, and its path.

    Raises
    ------
    DeltaTableError
        If the pipeline declares no such dimension, or its table does not exist.
    """
    declared = _declared(config, name)
    return _open(name, declared), declared.path


def _open(name: str, declared: DimensionConfig) -> DeltaTable:
    if not has_table(declared.path):
        raise DeltaTableError(
            f"dimension {name!r} is not there yet: {declared.path} is no Delta table; make it with "
            f"`headrace dimension create {name} SOURCE`"
        )
    return open_table(declared.path)


def _types_of(table: DeltaTable) -> pa.Schema:
    return plain_schema(pa.schema(table.schema().to_arrow()))


def _query(table: DeltaTable, columns: list[str], sql: str) -> list[tuple[Any, ...]]:
    with _duckdb() as connection:
        connection.register("members", scan_table(table, columns))
        return connection.execute(sql).fetchall()


def _duckdb() -> duckdb.DuckDBPyConnection:
    """Return a connection without a progress bar, because standard output is reserved for results."""
    import duckdb  # noqa: PLC0415 - heavy, and not needed to read a pipeline file

    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    return connection


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
